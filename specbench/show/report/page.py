"""The report as one HTML page that loads nothing: what its template shows, computed."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from specbench.base.record import Json
from specbench.base.textsafe import one_line
from specbench.decoding.records import PARTS
from specbench.results import stats
from specbench.results.summary import Categories, Summary, SummaryRow
from specbench.show import tables
from specbench.show.answer import Answer
from specbench.show.document import Sheet
from specbench.show.report.content import (
    COST_HEADINGS,
    LONG_TABLE,
    Picture,
    Report,
    alternative,
    missing_figures,
)

if TYPE_CHECKING:
    pass

_FOLDER = Path(__file__).parent
_LONG = 40  # characters of a name from which on it may take several lines
_SHOWN, _SHOWN_NARROW = (
    0.62,
    0.85,
)  # of the pixels of a figure: its letters are as tall as those of the tables
_STEP_HEADINGS = {"tokens/step", "accepted", "of tested", "α", "mean γ", *PARTS}
_RATIO = r"[\d.∞]+× \[[^\]]*\]\*?"
_NO_INTERVAL = "[too few to say]"  # of tables.ratio_text


def to_html(report: Report) -> str:
    """The report as one HTML file that loads nothing: pictures, style and script are inside."""
    style, script = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    summary = tables.summary_sheet(report.summary)
    steps = [i for i, heading in enumerate(summary.headings) if heading in _STEP_HEADINGS]
    shown = [
        *(
            [_noted_table("Requests side by side", tables.request_sheet(report.requests))]
            if report.requests
            else []
        ),
        *([_category_table("By category", report.categories)] if report.categories.rows else []),
        *([_noted_table("Trained heads", tables.head_sheet(report.heads))] if report.heads else []),
        *([_noted_table("Training", tables.training_sheet(report.training))] if report.training else []),
        *([_table("Acceptance and time", summary, [0, *steps])] if steps else []),
        *(
            [_table("Acceptance by position", tables.position_sheet(report.positions))]
            if report.positions
            else []
        ),
    ]
    return templates().get_template("page.html.jinja").render(
        policy=f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'",
        style=Markup(style),  # noqa: S704 - our own
        script=Markup(script),  # noqa: S704
        report=report,
        answers=[_answer(each) for each in report.answers],
        titles=["Speed", "Figures", *(each.title for each in shown), "How it was measured", "Measured on"],
        speed=_speed_table("Speed", report.summary, summary),
        pictures=[_picture(each) for each in report.pictures],
        missing=missing_figures(report),
        tables=shown,
        costs=_cost_table("Single passes", report.costs),
    )  # fmt: skip


@cache
def templates() -> Environment:
    """The templates; whatever they are given is escaped, and what they are not given is an error."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        loader=FileSystemLoader(_FOLDER),
    )
    environment.filters |= {
        "anchor": lambda title: re.sub(r"\W+", "-", title.lower()),
        "one_line": one_line,
        "sentence": _sentence,
        "split_at_intervals": lambda text: re.split(r"(\[[^\]]*\]\*?)", text),
    }
    return environment


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _sentence(text: str) -> str:
    """With a capital in front; a Greek letter is a symbol and stays small."""
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def _answer(answer: Answer) -> Json:
    """An answer; in its headline every other part is a ratio with its interval, and the first of them the answer."""
    return {
        "kind": (answer.verdict or "cannot tell").replace(" ", "-"),
        "headline": re.split(f"({_RATIO})", answer.headline),
        "command": one_line(answer.command),
        "details": [each for each in (answer.rivals, *answer.details) if each],
    }


def _picture(picture: Picture) -> Json:
    return {
        "name": picture.name,
        "about": picture.about,
        "alt": alternative(picture),
        "wide": _image(picture.png, _SHOWN),
        "narrow": _image(picture.narrow, _SHOWN_NARROW) if picture.narrow else None,
    }


def _image(png: bytes, share: float) -> Json:
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))  # of the PNG's header
    data = "data:image/png;base64," + base64.b64encode(png).decode()
    return {"data": data, "width": round(share * width), "height": round(share * height)}


# --- Tables ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Cell:
    """A figure of a table.

    Attributes:
        text: As it is shown.
        value: What to sort it by; ``None`` for nothing.
        kind: ``faster`` or ``slower`` if it is marked so.
        sign: That says so again.
        bar: Its speedup, drawn (``_Scale.bar``).
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
    """What the template shows as a table; a long one is behind its number of rows if it is ``folded``."""

    title: str
    headings: list[str]
    rows: list[_Row]
    folded: bool
    notes: list[str] = field(default_factory=list)


def _table(title: str, sheet: Sheet, columns: Sequence[int] | None = None) -> _Table:
    """Some columns of a sheet, the first of them the rows' names."""
    first, *others = range(len(sheet.headings)) if columns is None else columns
    rows = [
        _Row(
            row[first],
            [_Cell(row[i], _sort_value(sheet.values[number][i])) for i in others],
            best=number in sheet.marked,
        )
        for number, row in enumerate(sheet.rows)
    ]
    return _Table(title, [sheet.headings[i] for i in (first, *others)], rows, len(rows) > LONG_TABLE)


def _sort_value(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    return None if value is None or math.isnan(value) else repr(float(value))


def _speed_table(title: str, summary: Summary, sheet: Sheet) -> _Table:
    """The summary but for what is told of the steps: speedups first, each drawn beside its figure."""
    place = {heading: i for i, heading in enumerate(sheet.headings)}
    first = [place[heading] for heading in ("configuration", "speedup", "verdict") if heading in place]
    others = [i for heading, i in place.items() if heading not in _STEP_HEADINGS and i not in first]
    table = _table(title, sheet, [*first, *others])
    table.folded, table.notes = False, sheet.notes
    scale = _Scale(summary.rows)
    for row, shown in zip(table.rows, summary.rows, strict=True):
        for heading, cell in zip(table.headings[1:], row.cells, strict=True):
            if heading == "speedup":
                cell.bar = scale.bar(shown)
            elif heading == "verdict" and (row.best or shown.verdict in ("faster", "slower")):
                cell.kind = "faster" if row.best else shown.verdict
    return table


class _Scale:
    """Draws speedups of several rows to one logarithmic scale."""

    WIDTH, HEIGHT = 110.0, 14.0

    def __init__(self, rows: Sequence[SummaryRow]) -> None:
        speedups = [row.speedup for row in rows if row.speedup.value > 0]
        values = [each.value for each in speedups]
        # A very wide interval would squeeze all others; it runs to the edge instead.
        lows = [max(each.low, each.value / 2) for each in speedups if each.low]
        highs = [min(each.high, each.value * 2) for each in speedups if each.high]
        self.low = math.log(min([0.8, *values, *lows])) - 0.03
        self.high = math.log(max([1.25, *values, *highs])) + 0.03

    def x(self, value: float) -> float:
        """Where a value is drawn, within the edges."""
        share = (math.log(value) - self.low) / (self.high - self.low) if value > 0 else 0.0
        return round(self.WIDTH * min(1.0, max(0.0, share)), 1)

    def bar(self, row: SummaryRow) -> Json | None:
        """Places in the drawing of a row; ``None`` without a value."""
        speedup = row.speedup
        if not speedup.value > 0 or row.is_baseline:
            return None
        ends = None if speedup.low is None or speedup.high is None else (speedup.low, speedup.high)
        return {
            "width": f"{self.WIDTH:g}",
            "height": f"{self.HEIGHT:g}",
            "middle": f"{self.HEIGHT / 2:g}",
            "kind": row.verdict if row.verdict in ("faster", "slower") else "unsure",
            "one": self.x(1.0),
            "interval": ends and [self.x(end) for end in ends],
            "value": self.x(speedup.value),
        }


def _noted_table(title: str, sheet: Sheet) -> _Table:
    table = _table(title, sheet)
    table.notes = sheet.notes
    return table


def _category_table(title: str, categories: Categories) -> _Table:
    """The matrix of categories, marked where a speedup can be told from 1."""
    sheet = tables.category_sheet(categories)
    table = _table(title, sheet)
    table.notes = [*sheet.notes, "[–]: too few to say. ▲ ▼: the interval lies wholly above or below 1."]
    if any(row.provisional for row in categories.rows):
        table.notes.append(f"{categories.disturbance} {stats.PROVISIONAL}")
    configs = list(dict.fromkeys(row.config.id for row in categories.rows))
    names = list(dict.fromkeys(row.category for row in categories.rows))
    verdicts = {(row.config.id, row.category): row.verdict for row in categories.rows}
    for config, row in zip(configs, table.rows, strict=True):
        for category, cell in zip(names, row.cells, strict=True):
            verdict = verdicts.get((config, category))
            if verdict in ("faster", "slower"):
                cell.kind, cell.sign = verdict, "▲" if verdict == "faster" else "▼"
            else:
                cell.text = cell.text.replace(_NO_INTERVAL, "[–]")
    return table


def _cost_table(title: str, lines: list[list[str]]) -> _Table | None:
    if not lines:
        return None
    values = [[what, float(ms), float(times.split("= ")[1])] for what, ms, times in lines]
    return _table(title, Sheet(COST_HEADINGS, lines, values))
