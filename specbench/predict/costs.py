"""What forward passes take: of drafters measured here or stored, of the target given or logged too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from specbench.base.progress import announce
from specbench.bench.passes import pass_costs, time_passes
from specbench.decoding.clocks import clock_for
from specbench.decoding.theory import PassCosts
from specbench.drafters.parts import models_of
from specbench.predict.chances import model_of
from specbench.results.store import read_run

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.decoding.protocols import Drafter
    from specbench.drafters.chain import ChainDrafter
    from specbench.predict.answers import Answer

_ROUNDS = 8

_UNCACHED = 512 << 20
"""Bytes that hardly any cache holds."""


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
    log: Path,
    *,
    milliseconds: float | None = None,
    progress: Progress | None = None,
) -> tuple[PassCosts, str, list[str]]:
    """Time drafters that a stored run has not timed, and find what the target's passes take.

    Args:
        drafters: By name; of a cascade its model is timed.
        answers: At least one; their times are taken where nothing else is known.
        log: Where the answers are from; a stored run has times, of drafters too.
        milliseconds: A pass of the target over one token, if it is given.

    Returns:
        The costs; where those of the target are from, as the end of a sentence, empty if they are not known; and the
        drafters that were timed here.
    """
    run = read_run(log).costs if (log / "run.json").is_file() else None
    timed = PassCosts({}) if run is None else run
    parts = {name: model_of(each) for name, each in drafters.items() if name not in timed.drafter_s}
    models = [model for each in parts.values() for model in models_of(each)]
    target: Any = _NoTarget(models)
    announce(progress, "timing passes")
    clock = clock_for(str(target.device))
    costs = pass_costs(time_passes(target, parts, answers[0].prompt, [1], clock, _ROUNDS, Random(0)))
    logged = [each.pass_s for each in answers if each.pass_s is not None]
    seconds, source = dict[int, float](), ""
    if milliseconds is not None:
        seconds, source = {1: milliseconds / 1000}, "as given"
    elif timed.target_s:
        seconds, source = dict(timed.target_s), f"measured in {log.name}"
    elif logged:
        seconds, source = {1: median(logged)}, "by the log"
    both = {
        name: {**getattr(costs, name), **getattr(timed, name)}
        for name in ("drafter_s", "later_s", "reading_s")
    }
    return msgspec.structs.replace(costs, target_s=seconds, **both), source, list(parts)
