"""The report as one HTML page, which loads no other file."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment

from specbench.base.record import Json
from specbench.base.textsafe import one_line
from specbench.decoding.records import PARTS
from specbench.results import stats
from specbench.results.summary import Categories, Summary, SummaryRow
from specbench.show import html
from specbench.show.answer import Answer
from specbench.show.document import Sheet
from specbench.show.report.charts import MOST_LINES, Chart, layouts
from specbench.show.report.content import CATEGORIES, SUMMARY, Picture, Report, alternative

_FOLDER = Path(__file__).parent
_LONG = 40  # characters above which a name may take several lines
_SHOWN, _SHOWN_NARROW = (
    0.62,
    0.85,
)  # of a figure's pixels, so that its letters are as tall as those of the tables
_STEP_HEADINGS = {"tokens/step", "accepted", "of tested", "α", "mean γ", *PARTS}
_RATIO = r"[\d.∞]+× \[[^\]]*\]\*?"
_BAR_WIDTH = 110.0  # as in parts.html.jinja
_NO_INTERVAL = "[too few to say]"  # of stats.ratio_text


def to_html(report: Report) -> str:
    """Return the report as one HTML file that includes its pictures, style and script."""
    summary = report.tables[SUMMARY]
    steps = [i for i, heading in enumerate(summary.headings) if heading in _STEP_HEADINGS]
    shown = [_table(title, sheet) for title, sheet in report.tables.items() if title != SUMMARY]
    for table in shown:
        if table.title == CATEGORIES:
            _mark_verdicts(table, report.categories)
    if steps:
        at = next((i for i, each in enumerate(shown) if each.title == "Acceptance by position"), len(shown))
        shown.insert(at, _table("Acceptance and time", summary, [0, *steps], notes=[]))
    return html.page(
        templates(),
        _FOLDER,
        report=report,
        answers=[_answer(each) for each in report.answers],
        titles=["Speed", "Figures", *(each.title for each in shown), "How it was measured", "Measured on"],
        speed=_speed_table(report.summary, summary),
        pictures=[_picture(each, report.charts.get(each.name)) for each in report.pictures],
        tables=shown,
        costs=_table("Single passes", report.costs),
    )


@cache
def templates() -> Environment:
    """Return the templates of the page."""
    return html.templates(
        _FOLDER,
        anchor=lambda title: re.sub(r"\W+", "-", title.lower()),
        sentence=_sentence,
        split_at_intervals=lambda text: re.split(r"(\[[^\]]*\]\*?)", text),
    )


def _sentence(text: str) -> str:
    """Capitalize a text, unless it starts with a Greek symbol."""
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def _answer(answer: Answer) -> Json:
    return {
        "kind": (answer.verdict or "cannot tell").replace(" ", "-"),
        "headline": re.split(f"({_RATIO})", answer.headline),
        "command": one_line(answer.command),
        "details": [each for each in (answer.rivals, *answer.details) if each],
    }


def _picture(picture: Picture, chart: Chart | None) -> Json:
    return {
        "name": picture.name,
        "about": picture.about,
        "chart": None if chart is None else _chart(chart),
        "alt": alternative(picture),
        "wide": _image(picture.png, _SHOWN),
        "narrow": _image(picture.narrow, _SHOWN_NARROW) if picture.narrow else None,
    }


def _chart(chart: Chart) -> Json:
    switches = [(number, line.name, line.color) for number, line in enumerate(chart.lines)]
    return {"layouts": layouts(chart), "switches": switches, "most": MOST_LINES, "note": chart.note}


def _image(png: bytes, share: float) -> Json:
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))  # of the PNG's header
    data = "data:image/png;base64," + base64.b64encode(png).decode()
    return {"data": data, "width": round(share * width), "height": round(share * height)}


# --- Tables ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Cell:
    """A cell: its text, the value to sort it by,
    its mark (``faster`` or ``slower`` with a sign), and a bar for a speedup.
    """

    text: str
    value: str | None
    kind: str | None = None
    sign: str = ""
    bar: Json | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    cells: list[_Cell]
    best: bool

    @property
    def long(self) -> bool:
        return len(self.name) > _LONG


@dataclass(slots=True)
class _Table:
    """A table for the template."""

    title: str
    headings: list[str]
    rows: list[_Row]
    folded: bool
    notes: list[str] = field(default_factory=list)


def _table(
    title: str, sheet: Sheet, columns: Sequence[int] | None = None, notes: list[str] | None = None
) -> _Table:
    first, *others = range(len(sheet.headings)) if columns is None else columns
    rows = [
        _Row(row[first], [_Cell(row[i], _sort_value(values[i])) for i in others], number in sheet.marked)
        for number, (row, values) in enumerate(zip(sheet.rows, sheet.values, strict=True))
    ]
    headings = [sheet.headings[i] for i in (first, *others)]
    return _Table(title, headings, rows, sheet.folded, [*sheet.notes] if notes is None else notes)


def _sort_value(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    return None if value is None or math.isnan(value) else repr(float(value))


def _speed_table(summary: Summary, sheet: Sheet) -> _Table:
    """Return the summary as a table without metrics of steps:
    speedups come first, each with a bar next to its number.
    """
    place = {heading: i for i, heading in enumerate(sheet.headings)}
    first = [place[heading] for heading in ("configuration", "speedup", "verdict") if heading in place]
    others = [i for heading, i in place.items() if heading not in _STEP_HEADINGS and i not in first]
    table = _table("Speed", sheet, [*first, *others])
    draw = _bars(summary.rows)
    for row, figures in zip(table.rows, summary.rows, strict=True):
        for heading, cell in zip(table.headings[1:], row.cells, strict=True):
            if heading == "speedup":
                cell.bar = draw(figures)
            elif heading == "verdict" and (row.best or figures.verdict in ("faster", "slower")):
                cell.kind = "faster" if row.best else figures.verdict
    return table


def _bars(rows: Sequence[SummaryRow]) -> Callable[[SummaryRow], Json | None]:
    """Return a function that draws the bar of a row's speedup, all rows on one logarithmic scale."""
    ends = [1.25, 0.8]
    for speedup in (row.speedup for row in rows if row.speedup.value > 0):
        # A very wide interval would squeeze all others; it runs to the edge instead.
        low, high = (speedup.low or speedup.value), (speedup.high or speedup.value)
        ends += [speedup.value, max(low, speedup.value / 2), min(high, speedup.value * 2)]
    least, most = math.log(min(ends)) - 0.03, math.log(max(ends)) + 0.03

    def x(value: float) -> float:
        share = (math.log(value) - least) / (most - least) if value > 0 else 0.0
        return round(_BAR_WIDTH * min(1.0, max(0.0, share)), 1)

    def draw(row: SummaryRow) -> Json | None:
        speedup = row.speedup
        if not speedup.value > 0 or row.is_baseline:
            return None
        certain = speedup.low is not None and speedup.high is not None
        return {
            "kind": row.verdict if row.verdict in ("faster", "slower") else "unsure",
            "one": x(1.0),
            "interval": [x(speedup.low or 0.0), x(speedup.high or 0.0)] if certain else None,
            "value": x(speedup.value),
        }

    return draw


def _mark_verdicts(table: _Table, categories: Categories) -> None:
    """Mark the cells of the table of categories whose interval excludes 1."""
    table.notes.append("[–]: too few to say. ▲ ▼: the interval lies wholly above or below 1.")
    if any(row.provisional for row in categories.rows):
        table.notes.append(f"{categories.disturbance} {stats.PROVISIONAL}")
    configs = list(dict.fromkeys(row.config.id for row in categories.rows))
    names = list(dict.fromkeys(row.category for row in categories.rows))
    verdicts = {(row.config.id, row.category): row.verdict for row in categories.rows}
    for config, row in zip(configs, table.rows, strict=True):
        for category, cell in zip(names, row.cells, strict=False):  # the last is over all categories
            verdict = verdicts.get((config, category))
            if verdict in ("faster", "slower"):
                cell.kind, cell.sign = verdict, "▲" if verdict == "faster" else "▼"
            else:
                cell.text = cell.text.replace(_NO_INTERVAL, "[–]")
