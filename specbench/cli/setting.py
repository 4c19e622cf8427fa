"""What a command line says of models, draft length and sampling, loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specbench.backends.torch.caches import CacheKind
    from specbench.backends.torch.scorer import Scorer
    from specbench.decoding.protocols import Drafter
    from specbench.decoding.request import DraftPolicy
    from specbench.decoding.sampling import Sampling
    from specbench.errors import SpecbenchError
    from specbench.models.prepare import Target
    from specbench.options import CacheOptions, DecodingOptions, LengthOptions, ModelOptions, SamplingOptions
    from specbench.progress import Progress
    from specbench.specs.drafters import DrafterSpec
    from specbench.specs.rules import RuleSpec


@dataclass(frozen=True)
class Setting:
    """A target with what drafts for it.

    Attributes:
        target, drafter: Loaded.
        policy: How much is drafted.
        sampling: The transforms, with what the model's own settings ask for.
        drafter_spec, rule: As they were asked for.
        note: What there is to say of something calibrated; ``None`` for nothing.
    """

    target: Target
    drafter: Drafter
    policy: DraftPolicy
    sampling: Sampling
    drafter_spec: DrafterSpec
    rule: RuleSpec
    note: str | None


def load_setting(
    target: str,
    drafter: str,
    models: ModelOptions,
    length_policy: str | None,
    egag: bool,
    tree: str | None,
    gamma: int | None,
    length: LengthOptions,
    decoding: DecodingOptions,
    caching: CacheOptions,
    sampling: SamplingOptions,
    *,
    cache: CacheKind,
    progress: Progress,
) -> Setting:
    """Load what these options of a command name; what cannot work is refused before that.

    Args:
        target, drafter, models, length_policy, egag, tree, gamma, length, decoding, caching, sampling: As on the
            command line.
        cache: See ``cli.options.cache_for``.
        progress: Told how far it has come.

    Raises:
        UsageError, RunError: Something is wrong with one of them, or it cannot be loaded.
    """
    from specbench.cli.options import chained
    from specbench.cli.rule import length_rule
    from specbench.decoding.sampling import Sampling
    from specbench.models.prepare import prepare
    from specbench.specs.drafters import parse_drafter
    from specbench.specs.models import parse_model

    transforms = Sampling(**sampling.transforms)
    spec, target_spec = parse_drafter(drafter), parse_model(target)
    rule = length_rule(
        length_policy,
        egag,
        tree,
        length.costs,
        {**length.given, "gamma": gamma},
        greedy=transforms.greedy and len(spec.parts) == 1,  # several draft chains of one length
        chained=chained(models, caching),
    )
    if not spec.is_plain:
        rule.spec.check(spec)
    loaded, (proposer,) = prepare(
        target_spec, [spec], models, cache=cache, bit_exact=caching.bit_exact, progress=progress
    )
    transforms = transforms.with_defaults(loaded.language_model.defaults.under(decoding), loaded.vocab_size)
    policy, note = rule.build(loaded, proposer, transforms)
    return Setting(loaded, proposer.drafter, policy, transforms, spec, rule.spec, note)


def facts(target: Target, drafter: Drafter, decoding: DecodingOptions) -> list[str]:
    """What the user should know of them before reading an output; how the models were loaded is not among it."""
    from specbench.cli.options import widths_differ

    lines = list(target.language_model.defaults.notes(applied=decoding.model_defaults))
    lines += tokenizer_notes([drafter])
    if not decoding.residual_adjustment:
        lines.append("NOT LOSSLESS: the residual adjustment is off.")
    if (parting := widths_differ(target)) is not None:
        lines.append(parting)
    if not target.packed and target.rounded is None and target.scorer.device.type == "cpu":
        lines.append("This machine lacks the packed linear layers; decoding uses the ordinary, slower ones.")
    for what, scorer in (("Decoding", target.scorer), ("Drafting", _own_scorer(drafter))):
        if (reason := _without_native_products(scorer)) is not None:
            lines.append(f"{what} is slower than it could be, without native passes: {reason}.")
            break
    return lines


def tokenizer_notes(drafters: Iterable[Drafter | SpecbenchError]) -> list[str]:
    """What there is to say of drafting models with another tokenizer than the target's, a sentence each."""
    from specbench.drafters.parts import models_of
    from specbench.drafters.translate import TranslatingDrafter
    from specbench.errors import SpecbenchError

    loaded = [drafter for drafter in drafters if not isinstance(drafter, SpecbenchError)]
    models = [model for drafter in loaded for model in models_of(drafter)]
    translated = [model for model in models if isinstance(model, TranslatingDrafter)]
    found = {model.name.rsplit(" (", 1)[0]: model.translation for model in translated}  # in whatever dtype
    return [
        f"The drafter {name} has another tokenizer than the target: tokens are translated, and it drafts only the"
        f" {len(both.shared):,} of the target's {both.tokens:,} tokens ({len(both.shared) / both.tokens:.1%})"
        " that both have."
        for name, both in found.items()
    ]


def _own_scorer(drafter: Drafter) -> Scorer | None:
    """What makes a drafter's passes, if it is a model."""
    from specbench.drafters.cascade import CascadeDrafter
    from specbench.drafters.model import ModelDrafter

    model = drafter.model if isinstance(drafter, CascadeDrafter) else drafter
    return model.scorer if isinstance(model, ModelDrafter) else None


def _without_native_products(scorer: Scorer | None) -> str | None:
    """Why a model on a CPU has none where it could: in int8 or int4, or of the Llama family; ``None`` for others."""
    import torch

    from specbench.backends.torch.kernels.native import why_not
    from specbench.backends.torch.kernels.surgery import kind_of_rounding
    from specbench.backends.torch.passes import ShortPass
    from specbench.backends.torch.scorer import Scorer

    if scorer is None or scorer.device.type != "cpu":
        return None
    if kind_of_rounding(scorer.model) is not None:
        return why_not()
    short = isinstance(scorer, Scorer) and issubclass(scorer.way, ShortPass)  # a head has a way of its own
    return why_not() if short and scorer.model.dtype != torch.float16 else None
