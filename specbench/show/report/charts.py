"""Charts of the page: drawn as SVG in it, with values at each mark, and lines that can be switched off, by style alone.

They show what the pictures of the same names show, so that ``report.md`` and paper lack nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator

from specbench.base.record import Json
from specbench.base.textsafe import counted
from specbench.results.acceptance import positions
from specbench.results.stats import decimals, ratio_text
from specbench.show.plots import canvas
from specbench.show.plots.acceptance import FEW, TOO_FEW, position_lines

if TYPE_CHECKING:
    from specbench.base.record import Estimate
    from specbench.results.results import Results
    from specbench.show.plots.canvas import PlotData

MOST_LINES = 16
"""Lines that can be switched off; style.css has a rule for each."""

_FARTHEST = 1.6  # factor from a value up to which its interval widens the axis
_TEXT = {"wide": 92, "narrow": 46}  # characters in a line above the chart
_SIZES = {"wide": (720.0, 330.0), "narrow": (360.0, 300.0)}
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 12.0, 44.0, 42.0


@dataclass(frozen=True, slots=True)
class Mark:
    """A value with its interval, and what is said of it."""

    x: float
    y: float
    low: float | None
    high: float | None
    text: str
    sure: bool = True


@dataclass(frozen=True, slots=True)
class Line:
    """Marks of one drafter; ``joined`` if a line runs through them."""

    name: str
    color: str
    marks: Sequence[Mark]
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart.

    Attributes:
        x_label, y_label: What the axes show.
        lines: The lines; those without marks are left out.
        level: A value with a dashed line, such as 1 for a ratio.
        share: Whether y is a share, shown in percent from 0.
        note: What has to be known to read it.
    """

    x_label: str
    y_label: str
    lines: Sequence[Line]
    level: float | None = None
    share: bool = False
    note: str = ""


def make_charts(results: Results) -> dict[str, Chart]:
    """Return the charts of a run, by the name of the picture that shows the same."""
    run = canvas.PlotData(results, canvas.Look())
    found = {"speedup": _by_gamma(run, "speedup"), "tokens-per-second": _by_gamma(run, "tokens_per_second")}
    found["positions"] = _by_position(run)
    return {name: chart for name, chart in found.items() if chart.lines}


def _by_gamma(run: PlotData, metric: str) -> Chart:
    is_ratio = metric == "speedup"

    def said(estimate: Estimate) -> str:
        return ratio_text(estimate) if is_ratio else f"{ratio_text(estimate, '')} tokens/s"

    lines = []
    dodged = canvas.dodged(run.series) if run.series else []
    for each, places in zip(run.series, dodged, strict=True):
        marks = [
            Mark(
                float(x),
                value.value,
                value.low,
                value.high,
                _text(row.config.label, said(value), value.prompts),
            )
            for x, row in zip(places, each.rows, strict=True)
            if math.isfinite((value := getattr(row, metric)).value)
        ]
        if marks:
            lines.append(Line(each.name, each.color, marks, joined=not each.adapts))
    label = "speedup over plain (×)" if is_ratio else "decode speed (tokens/s)"
    notes = (run.intervals, canvas.hollow(run.series).replace("Hollow, on a dotted line", "Hollow"))
    return Chart(
        "γ (tokens drafted per step)",
        label,
        lines,
        1.0 if is_ratio else None,
        note=" ".join(filter(None, notes)),
    )


def _text(label: str, value: str, prompts: int) -> str:
    return f"{label}: {value}, {counted(prompts, 'prompt')}"


def _by_position(run: PlotData) -> Chart:
    lines = []
    for each in position_lines(run, positions(run.results)):
        marks = [
            Mark(
                float(row.position),
                row.rate,
                None,
                None,
                f"{each.name}, position {row.position}: {row.rate:.0%} accepted of {row.tested:,} tested",
                row.tested >= FEW,
            )
            for row in each.rows
            if row.tested >= TOO_FEW
        ]
        if marks:
            lines.append(Line(each.name, each.color, marks))
    note = (
        "Tested: all drafts before it were accepted. With a fixed γ, the largest is shown. Hollow: fewer than"
        f" {FEW} tested; fewer than {TOO_FEW} are not shown."
    )
    return Chart("position in the draft", "accepted, of those tested", lines, share=True, note=note)


# --- Layout ---------------------------------------------------------------------------------------


def layouts(chart: Chart) -> list[Json]:
    """Return the chart for wide and for narrow screens, with all places computed, for the template."""
    return [_layout(chart, name, *size) for name, size in _SIZES.items()]


def _layout(chart: Chart, name: str, width: float, height: float) -> Json:
    marks = [mark for line in chart.lines for mark in line.marks]
    across = _scale([mark.x for mark in marks], (), _LEFT + 14.0, width - _RIGHT - 10.0, whole=True)
    ends = [end for mark in marks for end in (mark.low, mark.high) if end is not None and _near(end, mark.y)]
    values = [0.0, 1.0] if chart.share else [mark.y for mark in marks]
    more = [*ends, *([] if chart.level is None else [chart.level])]
    up = _scale(values, () if chart.share else more, height - _BOTTOM, _TOP)
    lines = []
    for number, line in enumerate(chart.lines):
        places = [(across(mark.x), up(mark.y)) for mark in line.marks]
        lines.append(
            {
                "number": number,
                "color": line.color,
                "path": " ".join(f"{x},{y}" for x, y in places) if line.joined and len(places) > 1 else "",
                "marks": [
                    {
                        "x": x,
                        "shape": _shape(number, x, y),
                        "hollow": not line.joined or not mark.sure,
                        "interval": None
                        if mark.low is None or mark.high is None
                        else [_within(up(end), _TOP, height - _BOTTOM) for end in (mark.low, mark.high)],
                        "said": _broken(mark.text, _TEXT[name]),
                    }
                    for (x, y), mark in zip(places, line.marks, strict=True)
                ],
            }
        )
    return {
        "name": name,
        "width": width,
        "height": height,
        "left": _LEFT,
        "right": width - _RIGHT,
        "top": _TOP,
        "bottom": height - _BOTTOM,
        "x_ticks": [(across(tick), f"{tick:g}") for tick in across.ticks],
        "y_ticks": [(up(tick), f"{tick:.0%}" if chart.share else f"{tick:g}") for tick in up.ticks],
        "level": None if chart.level is None else up(chart.level),
        "x_label": chart.x_label,
        "y_label": chart.y_label,
        "lines": lines,
    }


def _near(end: float, value: float) -> bool:
    """Return whether an end of an interval is near enough to its value that the axis should show it."""
    return value / _FARTHEST <= end <= value * _FARTHEST


class _Scale:
    """Places of values on an axis, with its ticks."""

    def __init__(self, place: Callable[[float], float], ticks: Sequence[float]) -> None:
        self._place, self.ticks = place, ticks

    def __call__(self, value: float) -> float:
        return self._place(value)


def _scale(
    values: Sequence[float], more: Sequence[float], start: float, end: float, *, whole: bool = False
) -> _Scale:
    low, high = min((*values, *more)), max((*values, *more))
    margin = 0.0 if whole else 0.05 * (high - low)
    low, high = low - margin, high + margin
    if high - low < 1e-9:
        low, high = low - 1.0, high + 1.0
    ticks = [
        float(tick) for tick in MaxNLocator(nbins=10 if whole else 6, integer=whole).tick_values(low, high)
    ]

    def place(value: float) -> float:
        return round(start + (end - start) * (value - low) / (high - low), 1)

    return _Scale(place, [tick for tick in ticks if low - 1e-9 <= tick <= high + 1e-9])


def _within(place: float, least: float, most: float) -> float:
    return min(most, max(least, place))


def _shape(number: int, x: float, y: float) -> str:
    """Return the outline of a mark: each line has a shape, since colors alone are not seen by everybody."""
    corners = (
        ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        ((0, -5), (5, 4), (-5, 4)),
        ((0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)),
        ((-5, -4), (5, -4), (0, 5)),
    )[number % 4]
    return "M" + "L".join(f"{decimals(x + dx, 4)},{decimals(y + dy, 4)}" for dx, dy in corners) + "Z"


def _broken(text: str, width: int) -> list[str]:
    """Return a text in at most two lines, the first before its figures."""
    name, _, figures = text.rpartition(": ")
    if len(text) <= width:
        return [text]
    return [canvas.short(name, width), figures]
