"""Sweeps of loaded models, whose rows are predicted before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from specbench.base.errors import SpecbenchError
from specbench.bench.passes import pass_costs
from specbench.bench.runner import CellRunner
from specbench.cli.sweep_display import RunningTable
from specbench.decoding.clocks import WallClock
from specbench.predict.here import Predictions, Report, predict_rows
from specbench.show.document import Paragraph, show

if TYPE_CHECKING:
    from specbench.bench.engines.own import ModelEngine
    from specbench.bench.grid import Sweep
    from specbench.cli.progress import StageProgress
    from specbench.cli.sweep_run import SweepJob
    from specbench.results.store import RunStore

_ANSWERS, _SECONDS = 6, 8.0
"""Plain outputs that predictions rest on, at most, and seconds after which no further one is begun."""


def _predicted(sweep: Sweep, store: RunStore, engine: ModelEngine, report: Report) -> Predictions:
    """Predict the rows of a sweep under each condition, from plain outputs of its first prompts."""
    report("timing passes", 0, 1)
    runner, found, clock = CellRunner(sweep, store, engine), Predictions(), WallClock()
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


def predict_table(job: SweepJob, store: RunStore, progress: StageProgress) -> RunningTable | None:
    """Predict the rows of a sweep before they are measured; ``None`` where nothing is predicted."""
    if job.quiet or job.sweep.options.batches:
        return None
    try:
        found = _predicted(job.sweep, store, cast("ModelEngine", job.engine), progress.update)
    except (SpecbenchError, MemoryError) as error:  # measuring tells more
        job.say(f"Nothing is predicted: {error}")
        return None
    table = RunningTable(job.sweep.configs, found.rows)
    if not job.console.is_terminal and found.rows:
        show(job.console, Paragraph("Predicted; measured now:"), table.sheet())
    return table
