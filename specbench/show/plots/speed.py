"""Figures of speed: speedup and tokens/s by γ, predictions compared with measurements, and categories."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from specbench.results.stats import ratio_text
from specbench.show.plots import canvas
from specbench.show.plots.canvas import PlotData, Series, figure, short

if TYPE_CHECKING:
    from collections.abc import Sequence


@figure("speedup", "speedup against γ, or of each server", table="Speed")
def speedup(run: PlotData) -> Figure:
    rows = [row for row in run.rows if not math.isnan(row.tokens_per_second.value)]
    alone = [row for row in rows if row.is_server and row.config.condition.batch is None]
    series = [] if alone else canvas.with_gamma(run, "speedup")
    if all(len(each.rows) == 1 for each in series):  # nothing to see over γ
        return canvas.rows_of_speed(run, alone or rows, "Speed")
    levels = {"plain = 1": 1.0}
    levels |= {
        f"{short(row.config.label, 22)} {ratio_text(row.speedup)}": row.speedup.value
        for row in run.levels
        if row.measured
    }
    labels = ("", "speedup over plain (×)")
    title = "Speedup against draft length"
    return canvas.one_panel(run, series, "speedup", labels, levels, title, _fastest(series))


def _fastest(series: Sequence[Series]) -> str:
    """Return a sentence that names the highest speedup, and that of fixed γ: which is fastest, verdicts say."""
    rows = [(each, row) for each in series for row in each.rows if math.isfinite(row.speedup.value)]
    fixed = [pair for pair in rows if not pair[0].adapts]
    names = [
        f"{each.name if each.adapts else each.name_at(row)}, {ratio_text(row.speedup)}"
        for each, row in (max(some, key=lambda pair: pair[1].speedup.value) for some in (rows, fixed) if some)
    ]
    return f"Highest: {'; of fixed γ: '.join(dict.fromkeys(names))}."
