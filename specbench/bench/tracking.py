"""The measurements of a sweep for a tracker."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import geometric_mean
from typing import TYPE_CHECKING

from specbench.bench.runner import CellDone, Event
from specbench.results.lines import Generation

if TYPE_CHECKING:
    from specbench.base.trackers import Tracker


def tracked(tracker: Tracker) -> Callable[[Event], None]:
    """Return a function for ``on_event`` of a sweep, which gives each measurement to a tracker.

    Values are named ``CONFIGURATION/tokens_per_second``, ``/ttft_s``, ``/tokens_per_step`` and ``/speedup``, which is
    over the baseline on the same prompts so far. Failed measurements and warm-ups are left out.
    """
    speeds: dict[str, dict[tuple[object, ...], float]] = {}

    def handle(event: Event) -> None:
        if not isinstance(event, CellDone) or event.cell.warmup or event.measurement.result is None:
            return
        line, result, label = event.measurement.line, event.measurement.result, event.config.label
        values = {"tokens_per_second": event.measurement.speed}
        if isinstance(result, Generation):
            values["ttft_s"] = result.ttft_s
            if result.steps.emitted:
                values["tokens_per_step"] = sum(result.steps.emitted) / len(result.steps.emitted)
        own = speeds.setdefault(event.config.id, {})
        own[line.prompt, line.turn, line.repeat] = event.measurement.speed
        base = speeds.get(event.config.baseline, {})
        ratios = [own[key] / base[key] for key in own.keys() & base.keys() if own[key] > 0 and base[key] > 0]
        if ratios and event.config.id != event.config.baseline:
            values["speedup"] = geometric_mean(ratios)
        tracker.log(
            {f"{label}/{name}": value for name, value in values.items() if math.isfinite(value)}, event.done
        )

    return handle
