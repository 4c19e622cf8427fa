"""What is shown before and while a sweep runs: a table of predictions, and a bar."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, cast

from specbench.base.errors import SpecbenchError
from specbench.base.textsafe import one_line
from specbench.bench.passes import pass_costs
from specbench.results import stats
from specbench.show.document import Paragraph, Sheet, show

if TYPE_CHECKING:
    from specbench.base.record import Estimate
    from specbench.bench.engines.own import ModelEngine
    from specbench.bench.session import Session
    from specbench.cli.progress import StageProgress

_ANSWERS, _SECONDS = 6, 8.0
"""Plain outputs that predictions rest on, at most, and seconds after which no further one is begun."""


def show_predicted(session: Session, progress: StageProgress, say: Callable[[str], None]) -> None:
    """Predict the rows of a sweep of models under each condition, from plain outputs of its first prompts."""
    options = session.sweep.options
    if options.servers or options.batches:
        return
    from specbench.predict.here import Prediction, predict_rows

    found, clock, report = dict[str, Prediction](), perf_counter, progress.update
    report("timing passes", 0, 1)
    try:
        session.measure_costs(context=min(options.contexts, default=None))
        if session.problem:
            return
        costs = pass_costs(session.store.costs())
        for plain in (each for each in session.sweep.configs if each.kind == "plain"):
            began, outputs = clock(), dict[str, Sequence[int]]()
            for prompt in session.sweep.prompts[:_ANSWERS]:
                if outputs and clock() - began > _SECONDS:
                    break
                report("decoding plainly", len(outputs), _ANSWERS)
                outputs[prompt.id] = session.output(plain, prompt.id)
            engine = cast("ModelEngine", session.engine)
            found |= predict_rows(engine, session.sweep, plain, outputs, costs, report)[0]
    except (SpecbenchError, MemoryError) as error:  # measuring tells more
        say(f"Nothing is predicted: {error}")
        return
    rows = sorted(found.items(), key=lambda each: -each[1].speedup.value)
    cells = [
        [one_line(session.configs[name].label), _text(each.tokens_per_step), _text(each.speedup)]
        for name, each in rows
    ]
    if cells:
        sheet = Sheet(["configuration", "tokens/step", "× plain"], cells)
        show(progress.console, Paragraph("Predicted; measured now:"), sheet)


def show_cell(session: Session, doing: str, progress: StageProgress) -> None:
    """Show how far a sweep is, between measurements."""
    done, total = session.found + session.measured, len(session.planned)
    failed = f"{session.failed} failed" if session.failed else ""
    note = ", ".join(filter(None, [f"{done} of {total}", failed, doing]))
    progress.update("measuring", done, total, note=note)


def _text(estimate: Estimate) -> str:
    return "–" if math.isnan(estimate.value) else stats.ratio_text(estimate, "")
