"""From specs to a target and a drafter that work together; what cannot work is refused before weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbench.attention import fold_attention
from specbench.caches import CacheKind
from specbench.drafters import drafter_word
from specbench.drafters.base import Drafter, NoDraft
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter, SelfDrafter
from specbench.drafters.ngram import NGramDrafter
from specbench.drafters.options import Options, split_spec
from specbench.errors import UsageError
from specbench.models import (
    LanguageModel,
    LoadOptions,
    Progress,
    check_compatible,
    check_options,
    load_config,
    load_model,
    parse_model_spec,
    wrap_model,
)
from specbench.packing import first_layers, int8_copy, pack_linears, quantise_linears
from specbench.scorer import Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Target", "check_drafter", "load_drafter", "load_target", "wrap_target"]


@dataclass
class Target:
    """The model whose output distribution is kept, ready to decode.

    Attributes:
        language_model: The loaded model with its tokenizer and facts.
        scorer: The same model with its cache.
        dtype: "int8" when the int8 model is the target, else the weights' dtype.
        packed: Whether its linear layers are packed for the CPU.
    """

    language_model: LanguageModel
    scorer: Scorer
    dtype: str
    packed: bool

    @property
    def name(self) -> str:
        return self.language_model.name

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self.language_model.tokenizer

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self.language_model.end_ids

    @property
    def vocab_size(self) -> int:
        return self.language_model.vocab_size


def load_target(
    spec: str,
    options: LoadOptions | None = None,
    *,
    cache: CacheKind = "dynamic",
    progress: Progress | None = None,
    allow_pickle: bool = False,
) -> Target:
    """Load a target.

    Args:
        spec: Hub id (with ``@revision``), model folder, ``.gguf`` file or built-in name.
        options: Dtype, device, device map. On a CPU the linear layers are packed, or quantised for "int8": then
            the int8 model is the target and exactness refers to it.
        cache: The kind of key/value cache.
        progress: Told how far fetching and loading have come.
        allow_pickle: Load pickled weights if there are no others.

    Raises:
        UsageError, RunError: See ``specbench.models.load_model``.
    """
    language_model = load_model(spec, options, progress=progress, allow_pickle=allow_pickle)
    return _prepare_target(language_model, cache)


def wrap_target(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    name: str | None = None,
    cache: CacheKind = "dynamic",
    pack: bool = True,
) -> Target:
    """A target made of ``transformers`` objects you hold. ``pack`` makes its layers fast, in place."""
    return _prepare_target(wrap_model(model, tokenizer, name), cache, pack=pack)


def _prepare_target(language_model: LanguageModel, cache: CacheKind, *, pack: bool = True) -> Target:
    model, dtype = language_model.model, language_model.dtype
    # First, for it can refuse: a cache that cannot hold the model's layers.
    scorer = Scorer(model, cache, context_limit=language_model.context_limit)
    packed = False
    if pack:
        fold_attention(model)
    if language_model.quantise_int8:
        quantise_linears(model)
        dtype = "int8"
    elif pack:
        packed = pack_linears(model)
    return Target(language_model, scorer, dtype, packed)


def check_drafter(spec: str, target_spec: str, *, progress: Progress | None = None) -> None:
    """Check a drafter spec against the target's configuration, before any weights are loaded.

    Raises:
        UsageError: No such drafter, option or model, or it cannot draft for this target.
    """
    if drafter_word(spec) is None:
        parse_model_spec(spec)
    elif drafter_word(spec) == "self":
        form = _self_form(spec)
        if isinstance(form, int):
            config = load_config(target_spec, progress=progress).get_text_config(decoder=True)
            _check_layers(form, config.num_hidden_layers)
    else:
        _free_drafter(spec)


def load_drafter(
    spec: str,
    target: Target,
    options: LoadOptions | None = None,
    *,
    cache: CacheKind = "dynamic",
    progress: Progress | None = None,
    allow_pickle: bool = False,
) -> Drafter:
    """Build a drafter for a target.

    Args:
        spec: A drafter word with options after a colon (``ngram:order=3``, ``self:int8``; ``specbench drafters`` lists
            them) or a model spec.
        target: What it drafts for.
        options: Dtype, device and device map of a drafter model. On a CPU "auto" means int8.
        cache: The kind of cache of a drafter model; self-drafters share the target's.
        progress, allow_pickle: See ``load_target``.

    Raises:
        UsageError: No such drafter, or it does not fit this target.
        RunError: It could not be loaded.
    """
    word = drafter_word(spec)
    if word == "self":
        return _self_drafter(spec, target)
    if word is not None:
        return _free_drafter(spec)
    options = options or LoadOptions()
    check_options(options)
    language_model = load_model(spec, options, progress=progress, allow_pickle=allow_pickle)
    return wrap_drafter(language_model, target, cache=cache, int8=options.dtype == "auto")


def wrap_drafter(
    language_model: LanguageModel, target: Target, *, cache: CacheKind = "dynamic", int8: bool = False
) -> ModelDrafter:
    """A drafter of a loaded model; its linear layers are quantised or packed in place.

    Args:
        language_model: The drafter; its tokenizer must be the target's.
        target: What it drafts for.
        cache: The kind of its own cache.
        int8: Quantise if it is on a CPU. (Always done if the model was loaded with the dtype "int8".)

    Raises:
        UsageError: The tokenizers differ.
    """
    check_compatible(target.language_model, language_model)
    model = language_model.model
    scorer = Scorer(
        model,
        cache,
        vocab_size=target.vocab_size,
        context_limit=language_model.context_limit,
        output_device=target.scorer.device,
    )
    dtype = language_model.dtype
    if language_model.quantise_int8 or (int8 and scorer.device.type == "cpu"):
        quantise_linears(model)
        dtype = "int8"
    else:
        pack_linears(model)
    fold_attention(model)
    return ModelDrafter(scorer, f"{language_model.name} ({dtype})")


def _free_drafter(spec: str) -> Drafter:
    """The drafters that need no model."""
    word, options = split_spec(spec)
    if word == "ngram":
        return NGramDrafter.from_options(options)
    if word == "lookup":
        return LookupDrafter.from_options(options)
    Options(word, options, {})
    return NoDraft()


def _self_form(spec: str) -> int | str:
    """What a ``self:`` spec asks for: "int8", or a number of layers."""
    word, options = split_spec(spec)
    known = Options(word, options, {"int8": "int8", "layers": "layers=N"})
    layers = known.integer("layers", None)
    if known.flag("int8") == (layers is not None):
        raise UsageError(
            f"{spec!r} does not say how the target drafts for itself.", "Write self:int8 or self:layers=N."
        )
    return "int8" if layers is None else layers


def _check_layers(asked: int, total: int) -> None:
    if not 1 <= asked <= total:
        raise UsageError(
            f"The drafter self:layers={asked} asks for {asked} layers, the target has {total}.",
            f"Give 1 to {total - 1}.",
        )


def _self_drafter(spec: str, target: Target) -> Drafter:
    form = _self_form(spec)
    model = target.language_model.model
    if isinstance(form, int):
        _check_layers(form, target.language_model.layers)
        try:
            cheaper = first_layers(model, form)
        except ValueError as error:
            raise UsageError(
                f"This target cannot exit early: {error}.", "Use self:int8, or a drafter model."
            ) from error
        name = f"self:layers={form}"
    else:
        if target.dtype == "int8":
            raise UsageError(
                "The target is int8 already, so self:int8 would draft with itself.", "Use self:layers=N."
            )
        cheaper, name = int8_copy(model), "self:int8"
    scorer = Scorer(cheaper, target.scorer.cache, context_limit=target.scorer.context_limit)
    return SelfDrafter(scorer, name)
