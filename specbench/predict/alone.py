"""Drafters without their target: loading them, and timing their passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from specbench.base.errors import UsageError
from specbench.base.progress import announce
from specbench.bench.passes import pass_costs, time_passes
from specbench.decoding.clocks import clock_for
from specbench.decoding.theory import PassCosts
from specbench.drafters.free import make_free
from specbench.drafters.parts import models_of
from specbench.models.drafters import join_cascade, loading, wrap_drafter
from specbench.models.head_files import find_head
from specbench.models.load import LanguageModel, load_model, load_tokenizer
from specbench.predict.chances import model_of
from specbench.specs.drafters import (
    Cascade,
    DrafterSpec,
    FreeSpec,
    Grammar,
    Mtp,
    NGram,
    SelfForm,
    Several,
    SmallModel,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specbench.base.progress import Progress
    from specbench.decoding.protocols import Drafter
    from specbench.drafters.chain import ChainDrafter
    from specbench.predict.law import Answer


_ROUNDS = 8

_UNCACHED = 512 << 20
"""Bytes that hardly any cache holds."""


def is_predictable(spec: DrafterSpec) -> bool:
    """Return whether answers alone tell what a drafter would draft.

    They do not if it reads the target's states or logits, drafts trees, needs the format of the answer, depends on
    earlier answers, draws at random, or drafts nothing.
    """
    parts = list(spec.all_parts())
    return not (
        spec.is_plain
        or spec.keeps_state
        or isinstance(spec, Several)
        or any(isinstance(part, SelfForm | Mtp | Grammar) for part in parts)
        or any(isinstance(part, NGram) and (part.top_k > 1 or part.sample) for part in parts)
        or any(isinstance(part, SmallModel) and find_head(part.model) is not None for part in parts)
    )


def load_alone(
    specs: Sequence[DrafterSpec], tokenizer: str | None, progress: Progress | None = None
) -> tuple[dict[str, Drafter], PreTrainedTokenizerBase | None]:
    """Load drafters, and the tokenizer of the answers: the one that is named, or else that of the first model.

    Returns:
        The drafters by their names in tables, and the tokenizer; ``None`` if there is none.

    Raises:
        UsageError: A drafter depends on the target, or its tokenizer is not that of the answers.
        RunError: A model cannot be loaded.
    """
    for spec in specs:
        if not is_predictable(spec):
            raise UsageError(
                f"Answers alone do not tell what {spec} would draft.",
                "Run it where the target is, with `specbench sweep`.",
            )
    named = None if tokenizer is None else load_tokenizer(tokenizer, progress=progress)
    models: dict[SmallModel, LanguageModel] = {}
    for small in dict.fromkeys(model for spec in specs for model in spec.models):
        models[small] = loaded = load_model(small.model, loading(small), progress=progress)
        named = named or loaded.tokenizer
        if (
            named is not None
            and loaded.tokenizer is not None
            and named.get_vocab() != loaded.tokenizer.get_vocab()
        ):
            raise UsageError(
                f"The tokenizer of {loaded.name} is not that of the answers, {named.name_or_path}.",
                "Measure it where the target is, with `specbench sweep`, which translates.",
            )
    wrapped = {small: _wrapped(small, model, progress) for small, model in models.items()}
    drafters: list[Drafter] = []
    for spec in specs:
        if isinstance(spec, FreeSpec):
            drafters.append(make_free(spec, SimpleNamespace(vocab_size=2**31)))
        else:
            model = wrapped[spec.models[0]]
            drafters.append(join_cascade(spec, model) if isinstance(spec, Cascade) else model)
    return {drafter.traits.name: drafter for drafter in drafters}, named


def _wrapped(small: SmallModel, model: LanguageModel, progress: Progress | None) -> ChainDrafter:
    """Make a drafter of a model that takes the target's place as well."""
    scorer = SimpleNamespace(device=model.model.device)
    target: Any = SimpleNamespace(language_model=model, vocab_size=model.vocab_size, scorer=scorer)
    return wrap_drafter(model, target, int8=small.dtype == "auto", progress=progress)


# -- times -----------------------------------------------------------------------------------------


class _NoTarget:
    """Takes a target's place where drafters alone are timed: its passes read as much memory as no cache holds, so that
    a draft finds the caches as it does behind a target.
    """

    context_limit = None

    def __init__(self, models: Sequence[ChainDrafter]) -> None:
        self.device = models[0].scorer.device if models else "cpu"
        self._weights = torch.ones(_UNCACHED if models else 1, dtype=torch.uint8, device=self.device)

    def begin(self) -> None:
        pass

    def score(self, request: Any) -> None:  # noqa: ARG002 - as a scorer
        self._weights.max()

    def rollback(self, length: int) -> None:
        pass


def costs_of(
    drafters: Mapping[str, Drafter],
    answers: Sequence[Answer],
    *,
    milliseconds: float | None = None,
    progress: Progress | None = None,
) -> tuple[PassCosts, str]:
    """Time drafters, and find what the target's passes take.

    Args:
        drafters: By name; of a cascade its model is timed.
        answers: At least one; their times are taken where nothing else is known.
        milliseconds: A pass of the target over one token, if it is given.

    Returns:
        The costs; and where those of the target are from, as the end of a sentence, empty if they are not known.
    """
    parts = {name: model_of(drafter) for name, drafter in drafters.items()}
    models = [model for drafter in parts.values() for model in models_of(drafter)]
    target: Any = _NoTarget(models)
    announce(progress, "timing passes")
    clock = clock_for(str(target.device))
    costs = pass_costs(time_passes(target, parts, answers[0].prompt, [1], clock, _ROUNDS, Random(0)))
    logged = [answer.pass_s for answer in answers if answer.pass_s is not None]
    seconds, source = dict[int, float](), ""
    if milliseconds is not None:
        seconds, source = {1: milliseconds / 1000}, "as given"
    elif logged:
        seconds, source = {1: median(logged)}, "by the log"
    return msgspec.structs.replace(costs, target_s=seconds), source
