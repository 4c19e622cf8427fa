"""What forward passes take: of drafters measured here, of the target measured too, given, logged or stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from specbench.base.progress import announce
from specbench.bench.passes import cost_widths, pass_costs, time_passes
from specbench.decoding.clocks import clock_for
from specbench.decoding.theory import PassCosts
from specbench.drafters.parts import models_of
from specbench.models.load import make_random_model
from specbench.models.target import prepare_target
from specbench.predict.chances import model_of
from specbench.results.lines import TargetTimes
from specbench.results.store import read_run

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.decoding.protocols import Drafter
    from specbench.predict.answers import Answer

_ROUNDS = 8


class _NoTarget:
    """Takes a target's place where drafters alone are timed."""

    context_limit = None
    device = "cpu"

    def begin(self) -> None:
        pass

    def score(self, request: Any) -> None:
        pass

    def rollback(self, length: int) -> None:
        pass


def costs_of(
    drafters: Mapping[str, Drafter],
    answers: Sequence[Answer],
    gammas: Sequence[int],
    log: Path,
    *,
    milliseconds: float | None = None,
    config: str | None = None,
    progress: Progress | None = None,
) -> tuple[PassCosts, str]:
    """Time drafters, and find what the target's passes take.

    Args:
        drafters: By name; of a cascade its model is timed.
        answers: At least one; their times are taken where nothing else is known.
        gammas: Draft lengths.
        log: Where the answers are from; a stored run has times.
        milliseconds: A pass of the target over one token, if it is given.
        config: A model whose configuration the target has, to time it here with random weights.

    Returns:
        The costs, and where those of the target are from, as the end of a sentence; empty if they are not known.

    Raises:
        UsageError, RunError: There is no such model, or no memory for it.
    """
    target: Any = _NoTarget()
    if config is not None:
        target = prepare_target(
            make_random_model(config, progress=progress), "dynamic", progress=progress
        ).scorer
    announce(progress, "timing passes")
    parts = {name: model_of(each) for name, each in drafters.items()}
    models = [model for each in parts.values() for model in models_of(each)]
    clock = clock_for(str(models[0].scorer.device if models else target.device))
    widths = [1] if config is None else cost_widths(gammas)
    lines = time_passes(target, parts, answers[0].prompt, widths, clock, _ROUNDS, Random(0))
    if config is not None:
        return pass_costs(lines), "measured here with random weights"
    costs = pass_costs([line for line in lines if not isinstance(line, TargetTimes)])
    run = read_run(log).costs if (log / "run.json").is_file() else None
    logged = [each.pass_s for each in answers if each.pass_s is not None]
    seconds, source = dict[int, float](), ""
    if milliseconds is not None:
        seconds, source = {1: milliseconds / 1000}, "as given"
    elif run is not None and run.target_s:
        seconds, source = dict(run.target_s), f"measured in {log.name}"
    elif logged:
        seconds, source = {1: median(logged)}, "by the log"
    return msgspec.structs.replace(costs, target_s=seconds), source
