"""Build the drafters of a loaded target from their specs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specbench.backends.torch.assistant import AssistantScorer
from specbench.backends.torch.block_scorers import BlockScorer
from specbench.backends.torch.caches import NoKVCache, make_cache
from specbench.backends.torch.head_scorers import (
    AnyHeadScorer,
    EagleScorer,
    MedusaScorer,
    OfTarget,
    ParallelScorer,
)
from specbench.backends.torch.kernels.attention import fold_attention
from specbench.backends.torch.kernels.surgery import linear_weights, pack_linears, quantize_linears, trim_head
from specbench.backends.torch.mtp import MtpLayers
from specbench.backends.torch.mtp_scorer import MtpScorer
from specbench.backends.torch.scorer import FittedLogits, Scorer
from specbench.base.errors import RunError, UsageError
from specbench.base.progress import Progress, announce
from specbench.decoding.protocols import UNKNOWN_DRAFTER, Drafter, DrafterPrior, ForwardRequest
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.free import make_free
from specbench.drafters.heads import HeadDrafter
from specbench.drafters.layers import cheaper_form, check_form
from specbench.drafters.model import ModelDrafter, SelfDrafter
from specbench.drafters.outside import find_class
from specbench.drafters.plain import NoDraft
from specbench.drafters.several import SeveralDrafters
from specbench.drafters.translate import TranslatingDrafter
from specbench.models.checkpoints import text_config
from specbench.models.devices import check_options
from specbench.models.heads.assistant import layers_of_target
from specbench.models.heads.base import HeadFiles, find_head
from specbench.models.heads.block import BLOCK_KINDS
from specbench.models.heads.mtp import checkpoint_files, load_any_head
from specbench.models.heads.weights import TrainedHead
from specbench.models.kept_layers import kept_layers
from specbench.models.load import LanguageModel, dtype_name, load_config, load_model, resolve_dtype
from specbench.models.pairing import translation_of
from specbench.models.target import Target, pack_kept, quantize
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
        if isinstance(form, SelfForm) and (form.layers is not None or form.skip):
            check_form(form, load_config(target, progress=progress))
        elif isinstance(form, Mtp):
            if target.kind == "folder":  # others may have to be fetched first
                checkpoint_files(Path(target.source), load_config(target), target.name)
        elif isinstance(form, SmallModel) and (head := find_head(form.model, progress)) is not None:
            head.check(load_config(target, progress=progress), target.name)


def refuse_keep(spec: DrafterSpec) -> None:
    """Raise ``UsageError`` for the option ``keep`` where prompts are decoded repeatedly to time them."""
    if spec.keeps_state:
        raise UsageError(
            f"The drafter {spec} carries counts from one generation to the next, so what is measured would be how"
            " well it remembers its own answers.",
            "Leave keep out.",
        )


# -- from specs to drafters ------------------------------------------------------------------------


def load_drafter(
    spec: str | DrafterSpec,
    target: Target,
    options: LoadOptions | None = None,
    *,
    cache: CacheKind = "dynamic",
    progress: Progress | None = None,
    allow_pickle: bool = False,
) -> Drafter:
    """Build a drafter for a target.

    Args:
        spec: A drafter name with options after a colon (``ngram:order=3``, ``self:int8``; ``specbench drafters`` lists
            them), a model spec, or two drafters joined by a plus (``lookup+self:int8``).
        target: The target to draft for.
        options: Dtype and device of drafter models, in place of those that the spec has. On a CPU "auto" means int8;
            "int4" is coarser, and faster where there are native kernels.
        cache: The kind of KV cache of a drafter model; self-drafters share the target's cache.
        progress, allow_pickle: See ``load_target``.

    Raises:
        UsageError: There is no such drafter, or it does not fit this target.
        RunError: It could not be loaded.

    Example:
        >>> load_drafter("lookup+self:int8", target).traits.name
        'lookup+self:int8'
        >>> load_drafter("lookupp", target)
        Traceback (most recent call last):
            ...
        specbench.base.errors.UsageError: ...
    """
    spec = parse_drafter(spec) if isinstance(spec, str) else spec
    return DrafterLoader(target, options, cache=cache, progress=progress, allow_pickle=allow_pickle).load(
        spec
    )


class DrafterLoader:
    """Loader of the drafters of one target.

    Each model is loaded once, and each drafter is built once, even if several cascades or merged
    drafters use it.

    Args:
        target, options, cache, progress, allow_pickle: See ``load_drafter``.
        loaded: Models that are loaded already; newly loaded models are added to it.
    """

    def __init__(
        self,
        target: Target,
        options: LoadOptions | None = None,
        *,
        cache: CacheKind = "dynamic",
        progress: Progress | None = None,
        allow_pickle: bool = False,
        loaded: dict[SmallModel, LanguageModel | TrainedHead] | None = None,
    ) -> None:
        self._target, self._options, self._cache = target, options, cache
        self._progress, self._allow_pickle = progress, allow_pickle
        self.loaded = {} if loaded is None else loaded
        self._made: dict[DrafterSpec, Drafter | RunError] = {}

    def load(self, spec: DrafterSpec) -> Drafter:
        """Return the drafter of a spec.

        Raises:
            UsageError, RunError: See ``load_drafter``. A failure is remembered and not tried again.
        """
        if isinstance(spec, Several):
            return SeveralDrafters([self.load(part) for part in spec.drafters])
        if isinstance(spec, Cascade):
            model = self.load(spec.back)
            assert isinstance(model, ModelDrafter)
            return join_cascade(spec, model, self._target)
        if spec not in self._made:
            try:
                self._made[spec] = self._make(spec)
            except RunError as error:
                self._made[spec] = error
        made = self._made[spec]
        if isinstance(made, RunError):
            raise made
        return made

    def _make(self, spec: DrafterSpec) -> Drafter:
        if isinstance(spec, SelfForm):
            return self_drafter(spec, self._target, progress=self._progress)
        if not isinstance(spec, SmallModel):
            return make_free(spec, self._target) if isinstance(spec, FreeSpec) else NoDraft()
        options = self._options or loading(spec)
        if spec not in self.loaded:
            check_options(options)
            self.loaded[spec] = load_drafter_model(
                spec.model,
                options,
                self._target.language_model,
                progress=self._progress,
                allow_pickle=self._allow_pickle,
            )
        model = self.loaded[spec]
        if isinstance(model, TrainedHead):
            self.loaded[spec] = replace(model, tensors={})  # its drafter has them
            return wrap_head(model, self._target, options)
        return wrap_drafter(
            model,
            self._target,
            cache=self._cache,
            int8=options.dtype == "auto",
            progress=self._progress,
        )


def loading(spec: SmallModel) -> LoadOptions:
    """Return how the model of a drafter is loaded."""
    return LoadOptions(spec.dtype, spec.device, any_target=spec.any_target)


def load_drafter_model(
    spec: ModelSpec,
    options: LoadOptions,
    target: LanguageModel,
    *,
    progress: Progress | None,
    allow_pickle: bool,
) -> LanguageModel | TrainedHead:
    """Load the model or the trained head that a drafter's spec names."""
    config = target.model.config
    if spec.kind == "mtp":
        if target.folder is None:
            raise UsageError(
                f"The target {target.name} was not loaded from a folder, where MTP layers would be.",
                "Load it with load_target.",
            )
        head: HeadFiles | None = checkpoint_files(target.folder, config, target.name)
    else:
        head = find_head(spec, progress)
    if head is not None:
        return load_any_head(head, text_config(config).num_hidden_layers, allow_pickle=allow_pickle)
    return load_model(
        spec, options, progress=progress, allow_pickle=allow_pickle, share_tokenizer_with=target
    )


def join_cascade(spec: Cascade, model: ModelDrafter, target: Target | None = None) -> CascadeDrafter:
    """Build a cascade of its spec's free drafter and of ``model``."""
    return CascadeDrafter(make_free(spec.front, target), model, spec.passes)


# -- models of their own ---------------------------------------------------------------------------


def wrap_drafter(
    language_model: LanguageModel,
    target: Target,
    *,
    cache: CacheKind = "dynamic",
    int8: bool = False,
    progress: Progress | None = None,
) -> ModelDrafter:
    """Make a drafter of a loaded model; its linear layers are quantized or packed in place.

    If its tokenizer differs from the target's, it drafts the tokens that both have, and its head is trimmed to these.

    Args:
        cache: The kind of the drafter's own KV cache.
        int8: Whether to quantize if the model is on a CPU. (A model loaded with the dtype "int8" or "int4" always is.)

    Raises:
        UsageError: The tokenizers share too few tokens, or the head cannot be trimmed.

    Example:
        >>> wrap_drafter(load_target("smollm2-135m").language_model, target, int8=True).traits.name
        'smollm2-135m (int8)'
    """
    translation = translation_of(target.language_model, language_model)
    model = language_model.model
    fold_attention(model)
    make_cache(cache, model.config)  # can refuse, before the layers change
    dtype = language_model.dtype
    draftable = None if translation is None else sorted(translation.shared)
    if translation is not None:
        _trim_head(language_model, tuple(map(translation.shared.__getitem__, sorted(translation.shared))))
    rounded = language_model.quantize or ("int8" if int8 and model.device.type == "cpu" else None)
    if rounded is not None:
        quantize(language_model, rounded, progress=progress)
        dtype = rounded
    else:
        pack_kept(language_model, progress)
    name = language_model.name
    announce(progress, f"testing forward passes of {name}")
    scorer = Scorer(
        model,
        cache,
        vocab_size=target.vocab_size,
        context_limit=language_model.context_limit,
        output_device=target.scorer.device,
        places=None if draftable is None else torch.tensor(draftable),
    )
    name = f"{name} ({dtype})"
    drafter = (
        ModelDrafter(scorer, name) if translation is None else TranslatingDrafter(scorer, name, translation)
    )
    drafter.traits = replace(drafter.traits, prior=DrafterPrior(_reading_share(model, target)))
    return drafter


def _reading_share(drafter: nn.Module, target: Target) -> float:
    """Return the weights of a drafter's linear layers over those of the target, by which both read prompts."""
    own, whole = (linear_weights(model) for model in (drafter, target.language_model.model))
    return min(1.0, own / whole) if own and whole else UNKNOWN_DRAFTER.reading_share


def _trim_head(language_model: LanguageModel, rows: tuple[int, ...]) -> None:
    """Trim a model's head to these logits."""
    if language_model.head_rows == rows:
        return
    if language_model.head_rows is not None:
        raise UsageError(
            f"The head of {language_model.name} was already trimmed to another vocabulary, for another target.",
            "Load the model once for each.",
        )
    trim_head(language_model.model, torch.tensor(rows, device=language_model.model.device))
    language_model.head_rows = rows


def self_drafter(form: SelfForm, target: Target, *, progress: Progress | None = None) -> SelfDrafter:
    """Build a drafter that is a cheaper form of the target and uses the target's KV cache.

    Raises:
        UsageError: The target cannot take this form.
    """
    check_form(form, target.language_model.model.config)
    if (form.int8 or form.int4) and target.quantization is not None:
        raise UsageError(
            f"The target is {target.quantization} already, and {form} would need the original weights.",
            "Leave int8 and int4 out: use self:layers=N or self:skip=I-J-...",
        )
    model, kept = target.language_model, form.kept(target.language_model.layers)
    rounded: QuantizedName | None = "int8" if form.int8 else "int4" if form.int4 else None
    whole = rounded is not None and len(kept) == model.layers
    try:
        with kept_layers(model, rounded, progress) if rounded and whole else nullcontext() as layers:
            cheaper = cheaper_form(model.model, kept, form.int8, layers, int4=form.int4)
    except ValueError as error:
        raise UsageError(
            f"This target cannot leave out layers: {error}.", "Use self:int8, or a drafter model."
        ) from error
    scorer = Scorer(cheaper, target.scorer.cache, context_limit=target.scorer.context_limit)
    return SelfDrafter(scorer, str(form))


# -- trained heads ---------------------------------------------------------------------------------

_SCORERS: Mapping[str, type[AnyHeadScorer]] = {
    **dict.fromkeys(BLOCK_KINDS, BlockScorer),
    "medusa": MedusaScorer,
    "peagle": ParallelScorer,
}
"""Scorers of heads by kind; ``EagleScorer`` for the others."""


def wrap_head(head: TrainedHead, target: Target, options: LoadOptions | None = None) -> HeadDrafter:
    """Make a drafter of a trained head, on its target's device.

    Args:
        options: Its dtype (on a CPU "auto" means int8), and whether other weights of the target are allowed.

    Raises:
        UsageError: The head was trained for another target, its file does not match its configuration, another device
            is requested, or the target gives no hidden states.
    """
    options = options or LoadOptions()
    if options.device != "auto":
        raise UsageError(
            f"The head {head.name} always runs on its target's device.",
            "Leave the drafter's device out.",
        )
    model: Any = target.language_model.model
    config, embeddings = model.config, model.get_input_embeddings()
    head.files.check(config, target.name)
    if not options.any_target:
        head.files.check_weights(target.language_model.identity, target.name)
    own_head = partial(_head_of, target)
    medusa = head.files.kind == "medusa"
    module: Any = head.medusa(own_head) if medusa else head.with_layers(config, own_head)
    rounded = quantized(options.dtype)
    quantize = rounded is not None or options.dtype == "auto"
    dtype = embeddings.weight.dtype if quantize else resolve_dtype(options, config, Counter())
    device = target.scorer.device
    module.to(device=device, dtype=dtype)
    name = dtype_name(dtype)
    if rounded == "int4":
        quantize_linears(module, "int4")
        name = "int4"
    elif quantize and device.type == "cpu":
        quantize_linears(module)
        name = "int8"
    else:
        pack_linears(module)
    layers = head.files.layers(config)
    fitted = FittedLogits(
        target.vocab_size, None if head.target_tokens is None else head.target_tokens.to(device)
    )
    several = isinstance(module, MtpLayers)
    scorer_of: Any = MtpScorer if several else _SCORERS.get(head.files.kind, EagleScorer)
    if head.files.kind == "assistant":
        scorer_of = partial(AssistantScorer, **_shared_with(head, target))
    limit = _context_limit(head, target)
    scorer = scorer_of(module, OfTarget(embeddings, layers, fitted, limit, dtype, device))
    require_states(target, layers)
    prior = DrafterPrior(_reading_share(module, target), head.files.training.acceptance)
    drafter = HeadDrafter(scorer, f"{head.name} ({name})")
    drafter.traits = replace(drafter.traits, prior=prior)
    if head.files.assumes_layers:
        drafter.assumed = (
            f"The config.json of the head {head.name} does not name the layers that it reads:"
            f" {', '.join(map(str, layers))} are assumed, as of EAGLE-3's authors."
        )
    return drafter


def _context_limit(head: TrainedHead, target: Target) -> int | None:
    """Return the longest context of a head, in tokens; that of an MTP layer or assistant is its target's."""
    if head.files.kind == "medusa":
        return None
    if head.files.kind in ("mtp", "assistant"):
        return target.language_model.context_limit
    return int(head.files.layer.max_position_embeddings)


def _shared_with(head: TrainedHead, target: Target) -> dict[str, Any]:
    """Return what an assistant reads of its target, see ``AssistantScorer``."""
    cache = target.scorer.cache
    if isinstance(cache, NoKVCache):
        raise UsageError(
            f"The head {head.name} attends to the target's keys and values, which --cache none does not keep.",
            "Choose another cache.",
        )
    config = target.language_model.model.config
    shared = layers_of_target(head.files.folder, head.name, config)
    return {"target_cache": cache, "shared": shared}


def _head_of(target: Target) -> torch.Tensor:
    """Return the weight of a target's output head, [vocab, width]."""
    model: Any = target.language_model.model
    weight: torch.Tensor = model.get_output_embeddings().weight
    if weight.shape[1] == 0 and text_config(model.config).tie_word_embeddings:  # quantized
        weight = model.get_input_embeddings().weight
    if weight.shape[1] == 0:
        raise UsageError(
            f"The head needs the output layer of {target.name}, which is quantized ({target.dtype}).",
            f"Leave out --dtype {target.dtype}.",
        )
    return weight


def require_states(target: Target, layers: Sequence[int]) -> None:
    """Raise ``UsageError`` if a target does not give a hidden state of its hidden size for each token and layer."""
    scorer, width = target.scorer, text_config(target.language_model.model.config).hidden_size
    tokens = [0, 0]
    scorer.begin()
    try:
        hidden = scorer.score(ForwardRequest(scorer, tokens, layers=layers)).hidden
        right = hidden is not None and hidden.shape == (len(tokens), len(layers), width)
    except (TypeError, IndexError, AttributeError, RuntimeError):
        right = False
    finally:
        scorer.begin()
    if not right:
        raise UsageError(
            f"{target.name} does not give one hidden state per token and layer, which a trained head needs.",
            "Use another drafter.",
        )
