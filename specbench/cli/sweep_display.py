"""The progress of a running sweep: a bar, and a table whose rows are predicted, and then measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from specbench.base.errors import SpecbenchError
from specbench.base.record import NO_FIGURE, Estimate
from specbench.base.textsafe import counted, one_line
from specbench.bench.passes import pass_costs
from specbench.decoding.clocks import WallClock
from specbench.results import stats
from specbench.results.lines import Generation
from specbench.show.document import Paragraph, Sheet, show, table_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from specbench.bench.engines.own import ModelEngine
    from specbench.bench.session import Session, SweepProgress
    from specbench.cli.progress import StageProgress
    from specbench.results.lines import Measurement
    from specbench.rows import Row

_PREDICTED = "predicted"

_BESIDE = 6
"""Lines of a terminal that the table leaves free."""

_ANSWERS, _SECONDS = 6, 8.0
"""Plain outputs that predictions rest on, at most, and seconds after which no further one is begun."""


class RunningTable:
    """What is known of the rows of a running sweep, the fastest first.

    Args:
        rows: The rows.
        predicted: Predicted speedups and tokens per step, by id.
    """

    def __init__(self, rows: Sequence[Row], predicted: Mapping[str, tuple[Estimate, Estimate]]) -> None:
        self._rows, self._predicted = rows, predicted
        self._speeds: dict[str, dict[tuple[str, int, int], float]] = {row.id: {} for row in rows}
        self._counts: dict[str, list[tuple[int, int, str]]] = {row.id: [] for row in rows}
        self._latest: Measurement | None = None

    def add(self, measured: Measurement | None) -> None:
        """Add the latest measurement, unless it is known."""
        if measured is None or measured is self._latest:
            return
        self._latest, line, result = measured, measured.line, measured.result
        if isinstance(result, Generation) and result.decode_s > 0:
            tokens = result.new_tokens - result.first_tokens
            self._speeds[line.config][line.prompt, line.turn, line.repeat] = tokens / result.decode_s
            self._counts[line.config].append((tokens, len(result.steps.emitted), line.prompt))

    def _measured(self, row: Row) -> tuple[Estimate, Estimate] | None:
        """Return speedup and tokens per step on prompts that plain decoding was measured on too; ``None`` before there
        are any.
        """
        mine, plain = self._speeds[row.id], self._speeds[row.baseline]
        both = [key for key in mine if plain.get(key)]
        if not both:
            return None
        speedup = stats.geometric_mean(
            [mine[key] / plain[key] for key in both], [key[0] for key in both], [key[2] for key in both]
        )
        tokens, steps, prompts = zip(*self._counts[row.id], strict=True)
        return speedup, stats.pooled_rate(tokens, steps, prompts, least=1.0) if any(steps) else NO_FIGURE

    def sheet(self) -> Sheet:
        """Return the table; each row says whether it is predicted or measured."""
        found: list[tuple[float, list[str]]] = []
        for row in self._rows:
            measured = None if row.id == row.baseline else self._measured(row)
            each = measured or self._predicted.get(row.id)
            if each is None:
                continue
            speedup, tokens = each
            source = _PREDICTED
            if measured is not None:
                source = f"measured, {counted(speedup.prompts, 'prompt')}"
            cells = [one_line(row.label), _text(tokens), _text(speedup), source]
            found.append((speedup.value, cells))
        found.sort(key=lambda each: -each[0])
        headings = ["configuration", "tokens/step", "× plain", "source"]
        rows = [cells for _, cells in found]
        return Sheet(
            headings, rows, ranks=[0, 1, 0, 0], left=frozenset({3}), styles={_PREDICTED: "dim"},
            elsewhere="on a wider terminal",
        )  # fmt: skip

    def drawn(self, console: Console) -> Table:
        """Return the table as a terminal shows it, the first rows if it is low."""
        sheet = self.sheet()
        most = max(1, console.height - _BESIDE)
        return table_of(replace(sheet, rows=sheet.rows[:most]), console.width)[0]


def predicted(
    session: Session[Any], progress: StageProgress, say: Callable[[str], None]
) -> RunningTable | None:
    """Predict the rows of a sweep of models under each condition, from plain outputs of its first prompts.

    ``None`` where nothing is predicted.
    """
    options = session.sweep.options
    if options.servers or options.batches:
        return None
    from specbench.predict.here import Predictions, predict_rows

    found, clock, report = Predictions(), WallClock(), progress.update
    report("timing passes", 0, 1)
    try:
        if session.measure_costs(context=min(options.contexts, default=None)):
            return None  # a sweep says so when it times them again
        costs = pass_costs(session.store.costs())
        for plain in (each for each in session.sweep.configs if each.kind == "plain"):
            began, outputs = clock.now(), dict[str, Sequence[int]]()
            for prompt in session.sweep.prompts[:_ANSWERS]:
                if outputs and clock.now() - began > _SECONDS:
                    break
                report("decoding plainly", len(outputs), _ANSWERS)
                outputs[prompt.id] = session.output(plain, prompt.id)
            each = predict_rows(
                cast("ModelEngine", session.engine), session.sweep, plain, outputs, costs, report=report
            )
            found.rows |= each.rows
    except (SpecbenchError, MemoryError) as error:  # measuring tells more
        say(f"Nothing is predicted: {error}")
        return None
    table = RunningTable(session.sweep.configs, found.rows)
    if not progress.console.is_terminal and found.rows:
        show(progress.console, Paragraph("Predicted; measured now:"), table.sheet())
    return table


def show_cell(
    at: SweepProgress, table: RunningTable | None, progress: StageProgress, say: Callable[[str], None]
) -> None:
    """Show how far a sweep is, between measurements: a bar, below the table of all rows if there is one.

    Args:
        say: Prints a line.
    """
    if at.problem:
        say(f"Single forward passes could not be timed: {at.problem}")
    if table is not None:
        table.add(at.latest)
        progress.above = partial(table.drawn, progress.console)
    failed = f"{at.failed} failed" if at.failed else ""
    note = ", ".join(filter(None, [f"{at.done} of {at.total}", failed, at.now]))
    progress.update("measuring", at.done, at.total, note=note, left_s=at.seconds_left)


def _text(estimate: Estimate) -> str:
    return "–" if math.isnan(estimate.value) else stats.ratio_text(estimate, "")
