"""From specs to a target and a drafter that work together; what cannot work is refused before weights are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from specbench.backends.torch.caches import CacheKind, make_cache
from specbench.backends.torch.head_scorers import (
    AnyHeadScorer,
    BlockScorer,
    EagleScorer,
    MedusaScorer,
    ParallelScorer,
)
from specbench.backends.torch.kernels.attention import fold_attention
from specbench.backends.torch.kernels.linear import PackedLinear
from specbench.backends.torch.kernels.surgery import (
    holds,
    kind_of_rounding,
    pack_linears,
    quantise_linears,
    round_linears,
    trim_head,
)
from specbench.backends.torch.scorer import FittedLogits, Scorer
from specbench.decoding.protocols import Drafter, Pass
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.heads import HeadDrafter
from specbench.drafters.layers import cheaper_form, check_form
from specbench.drafters.look_ahead import LookAheadDrafter
from specbench.drafters.model import ModelDrafter, SelfDrafter
from specbench.drafters.plain import NoDraft
from specbench.drafters.several import SeveralDrafters
from specbench.drafters.translate import TranslatingDrafter, Translation
from specbench.errors import RunError, UsageError
from specbench.models.calibrations import COUNTS, FORMS, ChoiceKey, not_counted, read_choice
from specbench.models.checkpoints import text_config
from specbench.models.heads import TrainedHead, find_head, load_head
from specbench.models.load import (
    LanguageModel,
    check_options,
    load_config,
    load_model,
    resolve_dtype,
    wrap_model,
)
from specbench.models.pairing import translation_of
from specbench.models.rounded_layers import rounded_layers
from specbench.options import LoadOptions, ModelOptions, QuantisedName, quantised
from specbench.progress import Progress, announce
from specbench.specs.drafters import (
    Cascade,
    DrafterSpec,
    SelfForm,
    Several,
    SmallModel,
    parse_drafter,
)
from specbench.specs.models import ModelSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from specbench.models.stories import HeadStory


@dataclass(repr=False)
class Target:
    """The model whose output distribution is kept, ready to decode.

    Several targets may decode side by side, each in a thread of its own with drafters of its own; one target serves one
    generation at a time.

    Attributes:
        language_model: The loaded model with its tokenizer and facts.
        scorer: The same model with its cache.
        dtype: "int8" or "int4" when that model is the target, else the weights' dtype.
        packed: Whether its linear layers are packed for the CPU.
        bit_exact: Whether every pass gives the same logits to the bit. Tried where
            layers round what they are given to bytes, else false.
        widths_differ: Why passes of different widths do not, where that was tried and found.
    """

    language_model: LanguageModel
    scorer: Scorer
    dtype: str
    packed: bool
    bit_exact: bool = False
    widths_differ: str | None = None

    def __repr__(self) -> str:
        return f"Target({self.name!r}, {self.dtype} on {self.scorer.device})"

    @property
    def name(self) -> str:
        return self.language_model.name

    @property
    def rounded(self) -> QuantisedName | None:
        """What its linear layers are rounded to; ``None`` for nothing."""
        return quantised(self.dtype)

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
    spec: str | ModelSpec,
    options: LoadOptions | None = None,
    *,
    cache: CacheKind | None = None,
    progress: Progress | None = None,
    allow_pickle: bool = False,
) -> Target:
    """Load a target.

    Args:
        spec: Hub id (with ``@revision``), model folder, ``.gguf`` file or built-in name.
        options: Dtype, device, device map. On a CPU the linear layers are packed, or rounded for "int8" and
            "int4": then that model is the target and exactness refers to it.
        cache: The kind of key/value cache; ``None`` for ``default_cache``.
        progress: Told how far fetching and loading have come.
        allow_pickle: Load pickled weights if there are no others.

    Returns:
        The target. Load one after the other; for decoding in threads see ``Target``.

    Raises:
        UsageError, RunError: See ``specbench.models.load.load_model``.
    """
    language_model = load_model(spec, options, progress=progress, allow_pickle=allow_pickle, measure=True)
    rounded = language_model.quantise is not None
    kind = cache or default_cache(language_model.model.config, rounded=rounded)
    return _prepare_target(language_model, kind, progress=progress)


def default_cache(config: PretrainedConfig, *, rounded: bool) -> CacheKind:
    """The kind of a target's cache where none is asked for.

    Rounding activations to bytes makes much of a last bit, so an int8 or int4 target needs passes that are the same to
    the bit: these take the preallocated kind. Whatever that cannot hold gets the dynamic kind, as all other targets do.

    Args:
        config: The model's.
        rounded: Whether its linear layers are int8 or int4 ones.
    """
    if rounded:
        with suppress(UsageError):
            make_cache("preallocated", config)
            return "preallocated"
    return "dynamic"


def wrap_target(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    name: str | None = None,
    cache: CacheKind = "dynamic",
    pack: bool = True,
) -> Target:
    """A target made of ``transformers`` objects you hold.

    For decoding in threads see ``Target``.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer; ``None`` if prompts are token ids.
        name: What results call it.
        cache: The kind of key/value cache.
        pack: Make its layers fast, in place. It goes on working with ``transformers``, hooks and all, and
            ``save_pretrained`` writes the weights it came with.

    Raises:
        UsageError: The model cannot be decoded speculatively, or not with this cache.
    """
    return _prepare_target(wrap_model(model, tokenizer, name), cache, pack=pack)


def _prepare_target(
    language_model: LanguageModel,
    cache: CacheKind,
    *,
    pack: bool = True,
    progress: Progress | None = None,
) -> Target:
    model, dtype = language_model.model, language_model.dtype
    if pack:
        fold_attention(model)
    make_cache(cache, model.config)  # can refuse, before the layers change
    if language_model.quantise is not None:
        _quantise(language_model, language_model.quantise, progress=progress)
    elif pack:
        announce(progress, f"packing {language_model.name}")
        pack_linears(model)
    dtype = kind_of_rounding(model) or dtype
    announce(progress, f"trying out passes of {language_model.name}")
    scorer = Scorer(model, cache, context_limit=language_model.context_limit)
    tried = scorer.rounding == torch.int8
    widths_differ = scorer.why_not_bit_exact() if tried else None
    return Target(
        language_model,
        scorer,
        dtype,
        holds(model, PackedLinear),
        tried and widths_differ is None,
        widths_differ,
    )


def _quantise(
    language_model: LanguageModel, rounded: QuantisedName, *, alike: bool = True, progress: Progress | None
) -> None:
    """Round the linear layers of a model, in place, or take what is kept of them; for ``alike`` see ``Int8Linear``."""
    with rounded_layers(language_model, rounded, progress) as layers:
        if rounded == "int8":
            quantise_linears(language_model.model, alike=alike, layers=layers)
        else:
            round_linears(language_model.model, layers=layers)


def check_drafter(spec: DrafterSpec, target: ModelSpec, *, progress: Progress | None = None) -> None:
    """Check a drafter against the target's configuration, before any weights are loaded.

    Raises:
        UsageError: It cannot draft for this target.
    """
    for part in spec.parts:
        _check_form(part.model_part, target, progress)


def _check_form(form: DrafterSpec, target: ModelSpec, progress: Progress | None) -> None:
    if isinstance(form, SmallModel) and (head := find_head(form.model, progress)) is not None:
        if form.vocab is not None:
            raise UsageError(f"The head {head.name} has a vocabulary of its own.", "Leave vocab out.")
        head.check(load_config(target, progress=progress), target.name)
    if isinstance(form, SmallModel) and form.vocab is not None and not COUNTS.names():
        raise UsageError(not_counted(target.name), COUNTS.hint)
    if not isinstance(form, SelfForm):
        return
    if form.calibrated and not FORMS.names():
        raise UsageError("No calibration is stored yet.", FORMS.hint)
    if form.layers is not None or form.skip:
        check_form(form, load_config(target, progress=progress))


def refuse_keep(spec: DrafterSpec) -> None:
    """Refuse a drafter that learns from one generation for the next, where a prompt is decoded again to be timed.

    Raises:
        UsageError: It has the option ``keep``.
    """
    if spec.keeps_state:
        raise UsageError(
            f"The drafter {spec} carries counts from one generation to the next, so what is measured would be how"
            " well it remembers its own answers.",
            "Leave keep out.",
        )


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
        spec: A drafter word with options after a colon (``ngram:order=3``, ``self:int8``; ``specbench drafters`` lists
            them), a model spec, or two drafters with a plus between them (``lookup+self:int8``).
        target: What it drafts for.
        options: Dtype, device and device map of a drafter model. On a CPU "auto" means int8; "int4" is coarser, and
            quicker where there are native products.
        cache: The kind of cache of a drafter model; self-drafters share the target's.
        progress, allow_pickle: See ``load_target``.

    Raises:
        UsageError: No such drafter, or it does not fit this target.
        RunError: It could not be loaded.
    """
    spec = parse_drafter(spec) if isinstance(spec, str) else spec
    return DrafterLoader(target, options, cache=cache, progress=progress, allow_pickle=allow_pickle).load(
        spec
    )


class DrafterLoader:
    """Makes drafters of one target. A model is loaded once for each vocabulary, and a drafter made once, whichever
    cascades and merged drafters have it.

    Args:
        target, options, cache, progress, allow_pickle: See ``load_drafter``.
        loaded: Models that are loaded already, which are taken; others are added.
    """

    def __init__(
        self,
        target: Target,
        options: LoadOptions | None = None,
        *,
        cache: CacheKind = "dynamic",
        progress: Progress | None = None,
        allow_pickle: bool = False,
        loaded: dict[ModelSpec, LanguageModel | TrainedHead] | None = None,
    ) -> None:
        self._target, self._options, self._cache = target, options or LoadOptions(), cache
        self._progress, self._allow_pickle = progress, allow_pickle
        self.loaded = {} if loaded is None else loaded
        self._taken: set[ModelSpec] = set()
        self._made: dict[DrafterSpec, Drafter | RunError] = {}

    def load(self, spec: DrafterSpec) -> Drafter:
        """The drafter of a spec.

        Raises:
            UsageError, RunError: See ``load_drafter``. What failed once fails again, and is not tried again.
        """
        if isinstance(spec, Several):
            return SeveralDrafters([self.load(part) for part in spec.drafters])
        if isinstance(spec, Cascade):
            model = self.load(spec.back)
            assert isinstance(model, ModelDrafter)
            return join_cascade(spec, model)
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
            drafter: Drafter = _without_model(spec)
            return drafter
        own = self._own(spec.model)
        if isinstance(own, TrainedHead):
            self.loaded[spec.model] = own.without_weights()
            return wrap_head(own, self._target, self._options)
        return wrap_drafter(
            own,
            self._target,
            cache=self._cache,
            int8=self._options.dtype == "auto",
            vocab=spec.vocab,
            progress=self._progress,
        )

    def _own(self, model: ModelSpec) -> LanguageModel | TrainedHead:
        """A drafter's model; loaded again where another drafter has changed its head."""
        if model not in self.loaded or model in self._taken:
            check_options(self._options)
            self.loaded[model] = _load_own(
                model,
                self._options,
                self._target.language_model,
                progress=self._progress,
                allow_pickle=self._allow_pickle,
            )
        self._taken.add(model)
        return self.loaded[model]


def _load_own(
    spec: ModelSpec,
    options: LoadOptions,
    target: LanguageModel,
    *,
    progress: Progress | None,
    allow_pickle: bool,
) -> LanguageModel | TrainedHead:
    """What the model spec of a drafter of this target names."""
    head = find_head(spec, progress)
    if head is not None:
        return load_head(head, allow_pickle=allow_pickle)
    return load_model(spec, options, progress=progress, allow_pickle=allow_pickle, beside=target)


def join_cascade(spec: Cascade, model: ModelDrafter) -> CascadeDrafter:
    """A cascade of the free drafter that is asked first, and of ``model``, whichever its spec names."""
    return CascadeDrafter(_without_model(spec.front), model, spec.passes)


def _without_model(spec: DrafterSpec) -> Any:
    """What drafts without any model."""
    if spec.drafter is None:
        return NoDraft()
    module, _, name = spec.drafter.partition(":")
    return getattr(import_module(f"specbench.drafters.{module}"), name)(spec)


def wrap_drafter(
    language_model: LanguageModel,
    target: Target,
    *,
    cache: CacheKind = "dynamic",
    int8: bool = False,
    vocab: int | None = None,
    progress: Progress | None = None,
) -> ModelDrafter:
    """A drafter of a loaded model; its linear layers are quantised or packed in place.

    With another tokenizer than the target's it drafts the tokens that both have, and its head is cut to these.

    Args:
        language_model: The drafter.
        target: What it drafts for.
        cache: The kind of its own cache.
        int8: Quantise if it is on a CPU. (Always done if the model was loaded with the dtype "int8" or "int4".)
        vocab: Draft so many tokens only, those that the target writes most often; ``None`` for all.
        progress: Told what is being done.

    Raises:
        UsageError: The tokenizers share too few tokens, the head cannot be cut, or the target's tokens were not
            counted.
    """
    translation = translation_of(target.language_model, language_model)
    model = language_model.model
    fold_attention(model)
    make_cache(cache, model.config)  # can refuse, before the layers change
    dtype = language_model.dtype
    draftable = _draftable(language_model, target, translation, vocab)
    if draftable is not None and translation is not None:
        _cut_head(language_model, tuple(translation.shared[token] for token in draftable))
    else:
        _cut_head(language_model, draftable)
    rounded = language_model.quantise or ("int8" if int8 and model.device.type == "cpu" else None)
    if rounded is not None:
        _quantise(language_model, rounded, alike=False, progress=progress)
        dtype = rounded
    else:
        announce(progress, f"packing {language_model.name}")
        pack_linears(model)
    announce(progress, f"trying out passes of {language_model.name}")
    scorer = Scorer(
        model,
        cache,
        vocab_size=target.vocab_size,
        context_limit=language_model.context_limit,
        output_device=target.scorer.device,
        places=None if draftable is None else torch.tensor(draftable),
    )
    name = language_model.name if vocab is None else f"{language_model.name}:vocab={vocab}"
    name = f"{name} ({dtype})"
    return (
        ModelDrafter(scorer, name) if translation is None else TranslatingDrafter(scorer, name, translation)
    )


def wrap_head(
    head: TrainedHead, target: Target, options: LoadOptions | None = None
) -> HeadDrafter | LookAheadDrafter:
    """A drafter of a trained head, on its target's device.

    Args:
        head: The head.
        target: What it was trained for.
        options: Its dtype (on a CPU "auto" means int8), and whether any weights will do.

    Raises:
        UsageError: It was trained for another target, its file is not what its configuration says, another device is
            asked for, or the target gives no hidden states.
    """
    options = options or LoadOptions()
    if options.device != "auto" or options.device_map is not None:
        raise UsageError(
            f"The head {head.name} drafts on its target's device.",
            "Leave the drafter's device and device map out.",
        )
    model: Any = target.language_model.model
    config, embeddings = model.config, model.get_input_embeddings()
    head.files.check(config, target.name)
    if not options.any_target:
        head.files.check_weights(target.language_model.identity, target.name)
    if head.files.kind == "pass":
        return _look_ahead(head, target)
    own_head = partial(_head_of, target)
    medusa = head.files.kind == "medusa"
    module: Any = head.medusa(own_head) if medusa else head.with_layers(config, own_head)
    rounded = quantised(options.dtype)
    quantise = rounded is not None or options.dtype == "auto"
    dtype = embeddings.weight.dtype if quantise else resolve_dtype(options, config, Counter())
    device = target.scorer.device
    module.to(device=device, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    if rounded == "int4":
        round_linears(module)
        name = "int4"
    elif quantise and device.type == "cpu":
        quantise_linears(module, alike=False)
        name = "int8"
    else:
        pack_linears(module)
    layers = head.files.layers(config)
    fitted = FittedLogits(target.vocab_size, None if head.places is None else head.places.to(device))
    scorer: AnyHeadScorer
    if medusa:
        scorer = MedusaScorer(module, layers[0], dtype, device, fitted, embeddings.weight.shape[0])
    else:
        scorer_of = _SCORERS.get(head.files.kind, EagleScorer)
        scorer = scorer_of(module, embeddings, layers, fitted, head.files.layer.max_position_embeddings)
    require_states(target, layers)
    return HeadDrafter(scorer, f"{head.name} ({name})")


_SCORERS: Mapping[str, type[EagleScorer] | type[BlockScorer]] = {
    "dflash": BlockScorer,
    "peagle": ParallelScorer,
}
"""Of heads of decoder layers, by kind; of the others ``EagleScorer``."""


def _look_ahead(head: TrainedHead, target: Target) -> LookAheadDrafter:
    """A target that drafts with embeddings of tokens to come."""
    model: Any = target.language_model.model
    own = model.get_input_embeddings()
    try:
        twin: Any = cheaper_form(model, range(target.language_model.layers), int8=False)
    except ValueError as error:
        raise UsageError(
            f"This target takes no embeddings of others: {error}.", "Use another drafter."
        ) from error
    twin.set_input_embeddings(head.look_ahead(own))
    scorer = Scorer(twin, target.scorer.cache, context_limit=target.scorer.context_limit)
    first = len(own.weight)
    return LookAheadDrafter(scorer, range(first, first + head.files.number("look_ahead")), head.name)


def _head_of(target: Target) -> torch.Tensor:
    """The weight of a target's own head, [vocab, width]."""
    model: Any = target.language_model.model
    weight: torch.Tensor = model.get_output_embeddings().weight
    if weight.shape[1] == 0 and text_config(model.config).tie_word_embeddings:  # rounded
        weight = model.get_input_embeddings().weight
    if weight.shape[1] == 0:
        raise UsageError(
            f"The head takes its last layer from {target.name}, which is {target.dtype}.",
            f"Leave out --dtype {target.dtype}.",
        )
    return weight


def require_states(target: Target, layers: Sequence[int]) -> None:
    """Refuse a target that gives no hidden states, or others than one of its width for each token and layer.

    Raises:
        UsageError: It does.
    """
    scorer, width = target.scorer, text_config(target.language_model.model.config).hidden_size
    tokens = [0, 0]
    scorer.begin()
    try:
        hidden = scorer.score(Pass(scorer, tokens, layers=layers)).hidden
        right = hidden is not None and hidden.shape == (len(tokens), len(layers), width)
    except (TypeError, IndexError, AttributeError, RuntimeError):
        right = False
    finally:
        scorer.begin()
    if not right:
        raise UsageError(
            f"{target.name} does not give one hidden state for each token and layer, and a head drafts on these.",
            "Use another drafter.",
        )


def _draftable(
    language_model: LanguageModel, target: Target, translation: Translation | None, vocab: int | None
) -> tuple[int, ...] | None:
    """Which of the target's tokens a model drafts, ascending; ``None`` for all."""
    known = None if translation is None else tuple(sorted(translation.shared))
    if vocab is None:
        return known
    among = range(min(target.vocab_size, language_model.vocab_size)) if known is None else known
    if vocab >= len(among):
        raise UsageError(
            f"{language_model.name} drafts {len(among)} tokens, and vocab={vocab} keeps all of them.",
            "Give less, or leave it out.",
        )
    counts = COUNTS.require(target.language_model.fingerprint, not_counted(target.name))
    return tuple(counts.most_frequent(vocab, among))


def _cut_head(language_model: LanguageModel, rows: tuple[int, ...] | None) -> None:
    """Leave these logits of a model alone, ``None`` for all; nothing happens where there are no others any more."""
    if language_model.head_rows == rows:
        return
    if language_model.head_rows is not None:
        raise UsageError(
            f"The head of {language_model.name} was cut to other tokens, for another drafter.",
            "Load the model once for each.",
        )
    trim_head(language_model.model, torch.tensor(rows, device=language_model.model.device))
    language_model.head_rows = rows


def choice_key(target: Target) -> ChoiceKey:
    """Under which a calibrated form of a target is kept."""
    return ChoiceKey(target.language_model.fingerprint, target.dtype, target.scorer.device.type)


def self_drafter(form: SelfForm, target: Target, *, progress: Progress | None = None) -> SelfDrafter:
    """A drafter that is the target in a cheaper form, on the target's own cache.

    Raises:
        UsageError: The target cannot take this form, or none was calibrated for it.
    """
    if form.calibrated:
        form = read_choice(choice_key(target)).form
    check_form(form, target.language_model.model.config)
    if (form.int8 or form.int4) and target.rounded is not None:
        raise UsageError(
            f"The target is {target.rounded} already: {form} would need the weights that it was made of.",
            "Leave int8 and int4 out: use self:layers=N or self:skip=I-J-...",
        )
    model, kept = target.language_model, form.kept(target.language_model.layers)
    rounded: QuantisedName | None = "int8" if form.int8 else "int4" if form.int4 else None
    whole = rounded is not None and len(kept) == model.layers
    try:
        with rounded_layers(model, rounded, progress) if rounded and whole else nullcontext() as layers:
            cheaper = cheaper_form(model.model, kept, form.int8, layers, int4=form.int4)
    except ValueError as error:
        raise UsageError(
            f"This target cannot leave out layers: {error}.", "Use self:int8, or a drafter model."
        ) from error
    scorer = Scorer(cheaper, target.scorer.cache, context_limit=target.scorer.context_limit)
    return SelfDrafter(scorer, str(form))


# -- all of it -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proposer:
    """A drafter that is ready, or the reason why it is not.

    Attributes:
        name: What results call it.
        spec: What was asked for.
        outcome: The drafter, or what went wrong when it was loaded.
        models: Those that were loaded for it.
    """

    name: str
    spec: DrafterSpec
    outcome: Drafter | RunError
    models: tuple[LanguageModel | TrainedHead, ...] = ()

    @property
    def drafter(self) -> Drafter:
        """The drafter.

        Raises:
            RunError: It could not be loaded.
        """
        if isinstance(self.outcome, RunError):
            raise self.outcome
        return self.outcome

    @property
    def story(self) -> HeadStory | None:
        """How its head came about, or, where nothing tells of that, its kind; ``None`` without one."""
        for model in self.models:
            if isinstance(model, TrainedHead):
                return model.files.story
        return None

    @property
    def weights(self) -> str:
        """Fingerprints of its models; empty without any."""
        return "+".join(model.fingerprint for model in self.models)


def check_models(
    target: ModelSpec,
    drafters: Sequence[DrafterSpec],
    options: ModelOptions,
    *,
    progress: Progress | None = None,
) -> None:
    """Refuse what cannot be, before any weights are loaded.

    Raises:
        UsageError: A device or dtype that there is not, or a drafter that cannot draft for this target.
    """
    check_options(options.target)
    check_options(options.drafter)
    for spec in drafters:
        check_drafter(spec, target, progress=progress)


def prepare(
    target: ModelSpec,
    drafters: Sequence[DrafterSpec],
    options: ModelOptions,
    *,
    cache: CacheKind | None = None,
    bit_exact: bool = False,
    progress: Progress | None = None,
    beforehand: Callable[[LanguageModel], None] | None = None,
) -> tuple[Target, list[Proposer]]:
    """Load a target and its drafters. Every model is loaded once for each vocabulary, whoever drafts with it.

    Args:
        target, drafters: What is asked for.
        options: How their weights are loaded.
        cache: Kind of key/value cache; ``None`` for the target's default (``default_cache``) and dynamic drafters.
        bit_exact: Refuse a target whose logits depend on the width of the pass.
        progress: Told how far loading has come.
        beforehand: Called with the target as ``transformers`` has loaded it, before its layers change. As it may take
            long, the drafters' models are loaded before and have to fit.

    Raises:
        UsageError: What cannot be (see ``check_models``), or two drafters of one name.
        RunError: The target could not be loaded. What befalls a drafter is raised where it is asked for.
    """
    check_models(target, drafters, options, progress=progress)

    language_model = load_model(
        target, options.target, progress=progress, allow_pickle=options.allow_pickle, measure=True
    )
    config = language_model.model.config
    kind = cache or default_cache(config, rounded=language_model.quantise is not None)
    loaded: dict[ModelSpec, LanguageModel | TrainedHead] = {}
    if beforehand is not None:
        make_cache(kind, config)  # refuses what it cannot hold
        for own in dict.fromkeys(model for spec in drafters for model in spec.own_models):
            loaded[own] = model = _load_own(
                own,
                options.drafter,
                language_model,
                progress=progress,
                allow_pickle=options.allow_pickle,
            )
            if isinstance(model, LanguageModel):
                translation_of(language_model, model)  # or the refusal
        beforehand(language_model)
    ready = _prepare_target(language_model, kind, progress=progress)
    if bit_exact:
        announce(progress, "trying passes of several widths")
        ready.scorer.require_bit_exact()

    proposers = prepare_drafters(ready, drafters, options, cache=cache, progress=progress, loaded=loaded)
    for drafting in loaded.values():
        if isinstance(drafting, LanguageModel):
            language_model.notes += drafting.notes
    return ready, proposers


def prepare_drafters(
    ready: Target,
    drafters: Sequence[DrafterSpec],
    options: ModelOptions,
    *,
    cache: CacheKind | None = None,
    progress: Progress | None = None,
    loaded: dict[ModelSpec, LanguageModel | TrainedHead] | None = None,
) -> list[Proposer]:
    """Load drafters for a target that is loaded. Every model is loaded once for each vocabulary.

    Args:
        ready: The target.
        drafters: What is asked for, checked (``check_models``).
        options: How their weights are loaded.
        cache: Kind of the drafter models' caches; ``None`` for dynamic ones.
        progress: Told how far loading has come.
        loaded: Models that are loaded already, which are taken; others are added.

    Raises:
        UsageError: A drafter that does not fit the target, or two of one name. What befalls one later is raised where
            it is asked for.
    """
    loader = DrafterLoader(
        ready,
        options.drafter,
        cache=cache or "dynamic",
        progress=progress,
        allow_pickle=options.allow_pickle,
        loaded=loaded,
    )
    proposers: list[Proposer] = []
    for spec in drafters:
        outcome: Drafter | RunError
        try:
            outcome = loader.load(spec)
        except RunError as error:
            outcome = error
        name = str(spec) if isinstance(outcome, RunError) else outcome.name
        if any(name == other.name for other in proposers):
            raise UsageError(f"Two drafters are called {name!r}.", "Name each drafter once.")
        models = tuple(loader.loaded[model] for model in spec.own_models if model in loader.loaded)
        proposers.append(Proposer(name, spec, outcome, models))
    return proposers
