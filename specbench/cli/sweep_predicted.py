"""Sweeps of loaded models, whose rows are predicted before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench.base.errors import SpecbenchError
from specbench.bench.passes import pass_costs
from specbench.bench.runner import CellRunner
from specbench.cli.sweep_display import RunningTable
from specbench.cli.sweep_run import SweepJob
from specbench.decoding.clocks import WallClock
from specbench.predict.here import Predictions, Report, predict_rows
from specbench.show.document import Paragraph, show

if TYPE_CHECKING:
    from specbench.bench.engines.own import ModelEngine
    from specbench.bench.grid import Sweep
    from specbench.cli.progress import StageProgress
    from specbench.decoding.clocks import Clock
    from specbench.results.store import RunStore

_ANSWERS, _SECONDS = 6, 8.0
"""Plain outputs that predictions rest on, at most, and seconds after which no further one is begun."""


def predict_sweep(
    sweep: Sweep, store: RunStore, engine: ModelEngine, clock: Clock, report: Report
) -> Predictions:
    """Predict the rows of a sweep under each condition, from plain outputs of its first prompts."""
    report("timing passes", 0, 1)
    runner, found = CellRunner(sweep, store, engine), Predictions()
    contexts = sweep.options.contexts
    if runner.measure_costs(context=min(contexts, default=None)):  # a sweep says so when it times them again
        return found
    costs = pass_costs(store.costs())
    for plain in sweep.configs:
        if plain.kind == "plain":
            began, outputs = clock.now(), dict[str, Sequence[int]]()
            for prompt in sweep.prompts[:_ANSWERS]:
                if outputs and clock.now() - began > _SECONDS:
                    break
                report("decoding plainly", len(outputs), _ANSWERS)
                outputs[prompt.id] = runner.output(plain, prompt.id)
            each = predict_rows(engine, sweep, plain, outputs, costs, report=report)
            found.rows |= each.rows
            found.failed |= each.failed
    return found


class PredictedSweepJob(SweepJob):
    """A sweep of loaded models, whose rows are predicted before they are measured."""

    engine: ModelEngine

    def predict(self, store: RunStore, progress: StageProgress) -> RunningTable | None:
        if self.quiet or self.sweep.options.batches:
            return None
        try:
            found = predict_sweep(self.sweep, store, self.engine, WallClock(), progress.update)
        except (SpecbenchError, MemoryError) as error:  # measuring tells more
            self.say(f"Nothing is predicted: {error}")
            return None
        table = RunningTable(self.sweep.configs, found.rows)
        if not self.console.is_terminal and found.rows:
            show(self.console, Paragraph("Predicted; measured now:"), table.sheet())
        return table
