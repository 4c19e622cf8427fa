"""Build the drafters of a loaded target from their specs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import nn

from specbench import kernels
from specbench.backends.torch.caches import make_cache
from specbench.backends.torch.head_scorers import OfTarget
from specbench.backends.torch.scorer import FittedLogits, Scorer
from specbench.backends.torch.submodels import cheaper_form, check_form
from specbench.base.errors import UsageError
from specbench.base.progress import Progress, announce
from specbench.decoding.protocols import Drafter, DrafterTraits, ForwardRequest, NoDraft
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.chain import ChainDrafter
from specbench.drafters.free import make_free
from specbench.drafters.model import HeadDrafter, SelfDrafter
from specbench.drafters.outside import find_class
from specbench.drafters.several import SeveralDrafters
from specbench.drafters.translate import TranslatingDrafter
from specbench.models.checkpoints import text_config
from specbench.models.devices import check_options, resolve_device
from specbench.models.files import read_headers
from specbench.models.head_files import HEAD_KINDS, find_head
from specbench.models.heads import FORMATS, TrainedHead, check_head, load_head, model_drafter
from specbench.models.heads.mtp import checkpoint_files
from specbench.models.kept_layers import kept_layers
from specbench.models.load import LanguageModel, dtype_name, load_config, load_model, resolve_dtype
from specbench.models.mtp_layouts import FLOATS
from specbench.models.pairing import translation_of
from specbench.models.target import Target, transform_layers
from specbench.options import CacheKind, LoadOptions, QuantizedName, quantized
from specbench.specs.drafters import (
    Cascade,
    DrafterSpec,
    FreeSpec,
    Mtp,
    Outside,
    SelfForm,
    Several,
    SmallModel,
    parse_drafter,
)
from specbench.specs.models import ModelSpec

# -- checks before weights are loaded --------------------------------------------------------------


def check_drafter(spec: DrafterSpec, target: ModelSpec, *, progress: Progress | None = None) -> None:
    """Raise ``UsageError`` if the configurations of drafter and target show that the drafter cannot draft for it."""
    for part in spec.parts:
        for own in part.all_parts():
            if isinstance(own, Outside):
                find_class(own)
        form = part.model_part
        if isinstance(form, SelfForm) and form.layers is not None:
            check_form(form, load_config(target, progress=progress))
        elif isinstance(form, Mtp):
            if target.kind == "folder":  # others may have to be fetched first
                checkpoint_files(Path(target.source), load_config(target), target.name)
        elif isinstance(form, SmallModel) and (head := find_head(form.model, progress)) is not None:
            check_head(head, load_config(target, progress=progress), target.name)


# -- from specs to drafters ------------------------------------------------------------------------


def load_drafter(
    spec: str | DrafterSpec,
    target: Target,
    options: LoadOptions | None = None,
    *,
    cache: CacheKind = "dynamic",
    progress: Progress | None = None,
) -> Drafter:
    """Build a drafter for a target.

    Args:
        spec: A drafter name with options after a colon (``ngram:order=3``, ``self:int8``; ``specbench drafters`` lists
            them), a model spec, or two drafters joined by a plus (``lookup+self:int8``).
        target: The target to draft for.
        options: Dtype and device of drafter models, in place of those that the spec has. On a CPU "auto" means int8;
            "int4" is coarser, and faster where there are native kernels.
        cache: The kind of KV cache of a drafter model; self-drafters share the target's cache.
        progress: See ``load_target``.

    Raises:
        UsageError: There is no such drafter, or it does not fit this target.
        RunError: It could not be loaded.

    Examples:
        >>> load_drafter("lookup+self:int8", target).traits.name
        'lookup+self:int8'
        >>> load_drafter("lookupp", target)
        Traceback (most recent call last):
            ...
        specbench.base.errors.UsageError: ...
    """
    spec = parse_drafter(spec) if isinstance(spec, str) else spec
    loader = DrafterLoader(options, cache=cache, progress=progress)
    return loader.load(spec, target)


class DrafterLoader:
    """Loader of the drafters of one target: each model is loaded once, and each drafter is built once.

    Args:
        options, cache, progress: See ``load_drafter``.

    Attributes:
        loaded: The models loaded so far.
    """

    def __init__(
        self,
        options: LoadOptions | None = None,
        *,
        cache: CacheKind = "dynamic",
        progress: Progress | None = None,
    ) -> None:
        self._options, self._cache, self._progress = options, cache, progress
        self.loaded: dict[SmallModel, LanguageModel | TrainedHead] = {}
        self._made: dict[DrafterSpec, Drafter] = {}

    def load(self, spec: DrafterSpec, target: Target) -> Drafter:
        """Return the drafter of a spec; for errors see ``load_drafter``."""
        if isinstance(spec, Several):
            return SeveralDrafters([self.load(part, target) for part in spec.drafters])
        if isinstance(spec, Cascade):
            return join_cascade(spec, cast("ChainDrafter", self.load(spec.back, target)), target)
        if spec not in self._made:
            self._made[spec] = self._make(spec, target)
        return self._made[spec]

    def _make(self, spec: DrafterSpec, target: Target) -> Drafter:
        if isinstance(spec, SelfForm):
            return self_drafter(spec, target, progress=self._progress)
        if not isinstance(spec, SmallModel):
            return make_free(spec, target) if isinstance(spec, FreeSpec) else NoDraft()
        model, options = self.load_model(spec, target.language_model), self._options or loading(spec)
        if isinstance(model, TrainedHead):
            self.loaded[spec] = replace(model, tensors={})  # its drafter has them
            return wrap_head(model, target, options)
        int8 = options.dtype == "auto"
        return wrap_drafter(model, target, cache=self._cache, int8=int8, progress=self._progress)

    def load_model(self, spec: SmallModel, target: LanguageModel) -> LanguageModel | TrainedHead:
        """Return the model or the trained head that a drafter's spec names."""
        if spec in self.loaded:
            return self.loaded[spec]
        options, config = self._options or loading(spec), target.model.config
        check_options(options)
        if not isinstance(spec, Mtp):
            head = find_head(spec.model, self._progress)
        elif target.folder is not None:
            head = checkpoint_files(target.folder, config, target.name)
        else:
            raise UsageError(
                f"The target {target.name} was not loaded from a folder, where MTP layers would be.",
                "Load it with load_target.",
            )
        if head is not None and not HEAD_KINDS[head.kind].whole:
            layers = text_config(config).num_hidden_layers
            self.loaded[spec] = load_head(head, layers)
            return self.loaded[spec]
        if options.dtype == "auto" and resolve_device(options.device).type == "cpu":
            options = replace(options, dtype="int8")
        self.loaded[spec] = load_model(
            spec.model, options, progress=self._progress, share_tokenizer_with=target
        )
        return self.loaded[spec]


def loading(spec: SmallModel) -> LoadOptions:
    """Return how the model of a drafter is loaded."""
    return LoadOptions(spec.dtype, spec.device, any_target=spec.any_target)


def join_cascade(spec: Cascade, model: ChainDrafter, target: Target | None = None) -> CascadeDrafter:
    """Build a cascade of its spec's free drafter and of ``model``."""
    return CascadeDrafter(make_free(spec.front, target), model)


# -- from models and heads to drafters: transform, then wrap ---------------------------------------


def wrap_drafter(
    language_model: LanguageModel,
    target: Target,
    *,
    cache: CacheKind = "dynamic",
    int8: bool = False,
    progress: Progress | None = None,
) -> ChainDrafter:
    """Make a drafter of a loaded model; its linear layers are quantized or packed in place.

    If its tokenizer differs from the target's, it drafts the tokens that both have, and its head is trimmed to these.

    Args:
        cache: The kind of the drafter's own KV cache.
        int8: Whether to quantize if the model is on a CPU. (A model loaded with the dtype "int8" or "int4" always is.)

    Raises:
        UsageError: The tokenizers share too few tokens, or the head cannot be trimmed.

    Examples:
        >>> wrap_drafter(load_target("smollm2-135m").language_model, target, int8=True).traits.name
        'smollm2-135m (int8)'
    """
    model, translation = language_model.model, translation_of(target.language_model, language_model)
    make_cache(cache, model.config)  # can refuse, before the layers change
    shared = {} if translation is None else dict(sorted(translation.shared.items()))
    rounded = language_model.quantize or ("int8" if int8 and model.device.type == "cpu" else None)
    dtype = transform_layers(language_model, rounded, rows=tuple(shared.values()), progress=progress)
    name = f"{language_model.name} ({dtype})"
    announce(progress, f"testing forward passes of {language_model.name}")
    scorer = Scorer(
        model,
        cache,
        vocab_size=target.vocab_size,
        context_limit=language_model.context_limit,
        output_device=target.scorer.device,
        places=torch.tensor([*shared]) if shared else None,
    )
    drafter: ChainDrafter
    if translation is None:
        drafter = model_drafter(language_model, scorer, name)
    else:
        drafter = TranslatingDrafter(scorer, name, translation)
    drafter.traits = _sized(drafter.traits, model, target)
    return drafter


def _sized(traits: DrafterTraits, module: nn.Module, target: Target) -> DrafterTraits:
    """Return traits with the time of reading a prompt, which models do by the weights of linear layers."""
    own, whole = (kernels.layers_of(each).weights for each in (module, target.language_model.model))
    return replace(traits, reading_share=min(1.0, own / whole)) if own and whole else traits


_ROUNDED: dict[QuantizedName, tuple[float, float]] = {"int8": (0.96, 3.4), "int4": (0.92, 2.2)}
"""Acceptance and even odds (``DrafterTraits``): a rounded copy of the target is accepted more often than its own
probabilities say (notes/measured.md).
"""


def self_drafter(form: SelfForm, target: Target, *, progress: Progress | None = None) -> SelfDrafter:
    """Build a drafter that is a cheaper form of the target and uses the target's KV cache.

    Raises:
        UsageError: The target cannot take this form.
    """
    check_form(form, target.language_model.model.config)
    if (form.int8 or form.int4) and target.quantization is not None:
        raise UsageError(
            f"The target is {target.quantization} already, and {form} would need the original weights.",
            "Leave int8 and int4 out: use self:layers=N.",
        )
    model = target.language_model
    count = form.layers or model.layers
    rounded: QuantizedName | None = "int8" if form.int8 else "int4" if form.int4 else None
    whole = rounded is not None and count == model.layers
    try:
        with kept_layers(model, rounded, progress) if rounded and whole else nullcontext() as layers:
            cheaper = cheaper_form(model.model, count, rounded, layers)
    except ValueError as error:
        raise UsageError(
            f"This target cannot leave out layers: {error}.", "Use self:int8, or a drafter model."
        ) from error
    scorer = Scorer(cheaper, target.scorer.cache, context_limit=target.scorer.context_limit)
    drafter = SelfDrafter(scorer, str(form))
    if rounded and whole:
        acceptance, even_odds = _ROUNDED[rounded]
        drafter.traits = replace(drafter.traits, acceptance=acceptance, even_odds=even_odds)
    return drafter


def wrap_head(head: TrainedHead, target: Target, options: LoadOptions | None = None) -> HeadDrafter:
    """Make a drafter of a trained head, on its target's device.

    Args:
        options: Its dtype (on a CPU "auto" means int8), and whether other weights of the target are allowed.

    Raises:
        UsageError: The head was trained for another target, its file does not match its configuration, another device
            is requested, or the target gives no hidden states.
    """
    options, files, form = options or LoadOptions(), head.files, FORMATS[head.files.kind]
    if options.device != "auto":
        what = f"The head {head.name} always runs on its target's device."
        raise UsageError(what, "Leave the drafter's device out.")
    model, scorer = cast("Any", target.language_model.model), target.scorer
    check_head(files, model.config, target.name)
    if not options.any_target:
        hint = "Use it with its own target, or add the option any-target: --drafter HEAD:any-target."
        files.check_weights(target.language_model.identity, target.name, hint)
    assert form.module is not None
    assert form.scorer is not None
    module = form.module(head, model.config, partial(_head_of, target))
    dtype, name = _transform_head(module, target, options)
    layers = files.layers(target.language_model.layers)
    require_states(target, layers)
    limit = form.context_limit(files) if form.context_limit else target.language_model.context_limit
    tokens = None if head.target_tokens is None else head.target_tokens.to(scorer.device)
    embed, fitted = model.get_input_embeddings(), FittedLogits(target.vocab_size, tokens)
    of_target = OfTarget(embed, layers, fitted, limit, dtype, scorer.device, model.config, scorer.cache)
    drafter = HeadDrafter(form.scorer(module, of_target), f"{head.name} ({name})")
    drafter.traits = _sized(drafter.traits, module, target)
    return drafter


def _transform_head(module: Any, target: Target, options: LoadOptions) -> tuple[torch.dtype, str]:
    """Move a head to its target, and quantize or pack it; return the dtype of its inputs, and of its layers."""
    model: Any = target.language_model.model
    device, rounded = target.scorer.device, quantized(options.dtype)
    if options.dtype == "auto":
        rounded = "int8"
    dtype = model.get_input_embeddings().weight.dtype
    if rounded is None:
        dtype = resolve_dtype(options, model.config, Counter())
    module.to(device=device, dtype=dtype)
    if rounded is None or (rounded == "int8" and device.type != "cpu"):
        kernels.pack(module)
        return dtype, dtype_name(dtype)
    kernels.quantize(module, rounded)
    return dtype, rounded


def _head_of(target: Target) -> torch.Tensor:
    """Return the weight of a target's output head, [vocab, width]; of a quantized one that of its checkpoint."""
    model: Any = target.language_model.model
    head = model.get_output_embeddings()
    if head.weight.shape[1]:
        weight: torch.Tensor = head.weight
        return weight
    if getattr(model.config, "tie_word_embeddings", False):
        embeddings: torch.Tensor = model.get_input_embeddings().weight
        return embeddings
    name = next(path for path, module in model.named_modules() if module is head).rpartition(".")[2]
    folder = target.language_model.folder
    for key, header in ({} if folder is None else read_headers(folder)).items():
        if f".{key}".endswith(f".{name}.weight") and header.dtype in FLOATS:
            return load_file(header.path)[key]
    raise UsageError(
        f"The head needs the output layer of {target.name}, which is quantized ({target.dtype}).",
        f"Load the target in another dtype than {target.dtype}.",
    )


def require_states(target: Target, layers: Sequence[int]) -> None:
    """Raise ``UsageError`` if a target does not give a hidden state of its hidden size for each token and layer."""
    scorer, width = target.scorer, text_config(target.language_model.model.config).hidden_size
    scorer.begin()
    right = False
    with suppress(TypeError, IndexError, AttributeError, RuntimeError):
        hidden = scorer.score(ForwardRequest(scorer, [0, 0], layers=layers)).hidden
        right = hidden is not None and hidden.shape == (2, len(layers), width)
    scorer.begin()
    if not right:
        raise UsageError(
            f"{target.name} does not give one hidden state per token and layer, which a trained head needs.",
            "Use another drafter.",
        )
