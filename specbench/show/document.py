"""Documents: what is said, in parts, and the writers that show it on a terminal and as Markdown.

Parts hold text as it is. Only writers make it safe for where it goes: no control characters or markup on a terminal, no
markup, HTML or line break out of its place in Markdown. The page of a report has its templates (``show/report``).
"""

from __future__ import annotations

import html
import io
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from specbench.base.textsafe import counted, one_line, terminal_safe

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading; level 1 is that of the document."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A sentence or more."""

    text: str
    style: Literal["", "bold", "dim"] = ""


@dataclass(frozen=True, slots=True)
class Code:
    """What to type, to be copied whole."""

    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """A list; without lines it is not shown."""

    lines: Sequence[str]
    heading: str = ""


@dataclass(frozen=True, slots=True)
class Image:
    """A picture in a file beside the document, which only Markdown shows."""

    alternative: str
    path: str


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table.

    Attributes:
        headings: One per column; the first column names the rows, the others hold figures.
        rows: Cells, one list per row.
        values: What to sort the cells by, shaped as ``rows``: text in the first column, numbers elsewhere (NaN: none).
        ranks: How soon a column may be left out where there is no room: the highest first, 0 never; none: all 0.
        notes: Sentences to stand below.
        marked: Rows that stand out, by number.
        left: Columns besides the first that hold text.
        styles: Of the last cells of rows on a terminal, by the cell's text.
        matrix: Whether all columns matter alike, so that several tables show those that do not fit into one.
        folded: Whether Markdown shows the number of rows, and the table on demand.
        elsewhere: Where the columns are that were left out.
    """

    headings: list[str]
    rows: list[list[str]]
    values: list[list[Any]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    marked: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    styles: Mapping[str, str] = field(default_factory=dict)
    matrix: bool = False
    folded: bool = False
    elsewhere: str = "in summary.md, or on a wider terminal"


Part = Heading | Paragraph | Code | Items | Image | Sheet


# --- Markdown -------------------------------------------------------------------------------------


def to_markdown(*parts: Part) -> str:
    """A document as Markdown, tables with all of their columns."""
    return "\n\n".join(filter(None, map(_markdown, parts))) + "\n"


def _markdown(part: Part) -> str:
    match part:
        case Heading():
            return f"{'#' * part.level} {_escaped(part.text)}"
        case Paragraph():
            return f"**{_escaped(part.text)}**" if part.style == "bold" else _escaped(part.text)
        case Code():  # as code, if there is nothing in it that could be HTML
            command = one_line(part.text)
            return _escaped(command) if re.search("[<>&]", command) else f"    {command}"
        case Items():
            heading = f"{_escaped(part.heading)}\n\n" if part.heading and part.lines else ""
            return heading + "\n".join(f"- {_escaped(line)}" for line in part.lines)
        case Image():
            return f"![{_escaped(part.alternative)}]({part.path})"
        case Sheet():
            sides = ["---", *("---" if i in part.left else "---:" for i in range(1, len(part.headings)))]
            table = "\n".join([_row(part.headings), f"| {' | '.join(sides)} |", *map(_row, part.rows)])
            table = f"{table}\n\n{_markdown(Items(part.notes))}" if part.notes else table
            summary = f"<details><summary>{len(part.rows)} rows</summary>"
            return f"{summary}\n\n{table}\n\n</details>" if part.folded else table


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


_MARKDOWN = str.maketrans({each: "\\" + each for each in "\\`*_{}[]|#~$"})


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no HTML, no way out of its cell or line."""
    return html.escape(one_line(text).translate(_MARKDOWN), quote=False)


# --- Terminal -------------------------------------------------------------------------------------

_LABEL_CELLS = 28  # a longer name takes several lines
_VERDICT_CELLS = 12
_INDENT = "  "  # of a name's other lines
_BREAKS = " ,:/+"  # signs of a name behind which a line may end
_BETWEEN = 2  # cells between columns, one of them the box's own
_WORDS = {"γ": "gamma", "α": "alpha", "–": "-", "…": "...", "∞": "inf", "×": "x", "≥": ">="}


def show(console: Console, *parts: Part, wrap: bool = True) -> None:
    """Print a document, readable from 60 columns up; paragraphs stand close to each other, all else apart.

    Args:
        console: Where.
        *parts: What.
        wrap: Whether paragraphs and lists are broken into lines.
    """
    from rich.text import Text

    def say(text: str, style: str = "", *, whole: bool = not wrap) -> None:
        console.print(Text(_told(text, console.encoding), style=style), soft_wrap=whole)

    before: Part | None = None
    for part in parts:
        if isinstance(part, Image) or (isinstance(part, Items) and not part.lines):
            continue
        if before is not None and not (isinstance(part, Paragraph) and isinstance(before, Paragraph)):
            console.print()
        before = part
        match part:
            case Heading():
                say(part.text, "bold")
            case Paragraph():
                say(part.text, part.style)
            case Code():
                say(f"    {part.text}", whole=True)
            case Items():
                for line in [part.heading] if part.heading else []:
                    say(line)
                for line in part.lines:
                    say(f"  {line}")
            case Sheet():
                _show_sheet(part, console)


def to_text(*parts: Part, width: int = 80) -> str:
    """A document as ``show`` prints it, with tables of at most so many cells; paragraphs are single lines."""
    from rich.console import Console

    out = io.StringIO()
    show(Console(file=out, width=width, highlight=False, color_system=None), *parts, wrap=False)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def spelled_out(text: str, encoding: str) -> str:
    """Text for a terminal, without power over it; signs that its encoding lacks become words."""
    if not encoding.lower().startswith("utf"):
        for sign, word in _WORDS.items():
            text = text.replace(sign, word)
    return terminal_safe(text, encoding)


def _told(text: str, encoding: str) -> str:
    """The same in one line."""
    return re.sub(r"[\n\t]+", " ", spelled_out(text, encoding))


def terminal_table(sheet: Sheet, width: int = 80, encoding: str = "utf-8") -> Table:
    """A sheet as a table for a console of that many cells, with the columns that matter least left out as needed.

    A matrix keeps as many of its columns as there is room for; ``show`` shows the others below.
    """
    headings, rows = _text_of(sheet, encoding)
    return _table(sheet, headings, rows, _kept(sheet, _widths(headings, rows), width), width)


def _show_sheet(sheet: Sheet, console: Console) -> None:
    from rich.text import Text

    headings, rows = _text_of(sheet, console.encoding)
    widths = _widths(headings, rows)
    kept = _kept(sheet, widths, console.width)
    console.print(_table(sheet, headings, rows, kept, console.width))
    notes = list(sheet.notes)
    if sheet.matrix:
        while (begin := kept[-1] + 1) < len(widths):
            kept = _fitting(widths, begin, console.width)
            console.print(_table(sheet, headings, rows, kept, console.width))
    elif hidden := len(widths) - len(kept):
        notes.append(f"{counted(hidden, 'more column')}: {sheet.elsewhere}.")
    for note in notes:
        console.print(Text(_told(note, console.encoding), style="dim"), soft_wrap=False)


def _text_of(sheet: Sheet, encoding: str) -> tuple[list[str], list[list[str]]]:
    """Headings and cells as a console shows them, long headings and verdicts in several lines."""
    headings = [_broken(_told(heading, encoding)) for heading in sheet.headings]
    rows = [[_told(cell, encoding) for cell in row] for row in sheet.rows]
    if "verdict" in headings:
        at = headings.index("verdict")
        for row in rows:
            row[at] = textwrap.fill(row[at], _VERDICT_CELLS)
    return headings, rows


def _in_lines(text: str, cells: int) -> str:
    """A name in lines of at most so many cells, broken where its parts end, all but the first indented."""
    from rich.cells import cell_len, chop_cells

    lines: list[str] = []
    while text:
        indent = _INDENT if lines else ""
        line = chop_cells(text, cells - len(indent))[0]
        if cell_len(text) > cells - len(indent):
            end = max(line.rfind(sign) for sign in _BREAKS) + 1
            line = line[:end] if end > len(line) // 2 else line
        lines.append(indent + line.rstrip())
        text = text[len(line) :]
    return "\n".join(lines)


def _widths(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    from rich.cells import cell_len

    columns = zip(headings, *rows, strict=True)
    widths = [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in columns]
    return [min(widths[0], _LABEL_CELLS), *widths[1:]]


def _broken(heading: str) -> str:
    """A long heading in two lines, broken at a space or before a slash."""
    if len(heading) <= 7:
        return heading
    return heading.replace(" ", "\n", 1) if " " in heading else heading.replace("/", "\n/", 1)


def _kept(sheet: Sheet, widths: Sequence[int], width: int) -> list[int]:
    """The columns to show, in order: the least important go until the rest fits; a matrix keeps its first ones."""
    if sheet.matrix:
        return _fitting(widths, 1, width)
    kept = list(range(len(widths)))
    while sheet.ranks and sum(widths[i] + _BETWEEN for i in kept) - _BETWEEN > width:
        last = max(sheet.ranks[i] for i in kept)
        if not last:
            break
        kept = [i for i in kept if sheet.ranks[i] < last]  # columns of one rank belong together
    return kept


def _fitting(widths: Sequence[int], begin: int, width: int) -> list[int]:
    """The first column and as many from ``begin`` on as fit, at least one."""
    kept, used = [0], widths[0]
    for i in range(begin, len(widths)):
        used += _BETWEEN + widths[i]
        if used > width and len(kept) > 1:
            break
        kept.append(i)
    return kept


def _table(
    sheet: Sheet, headings: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int], width: int
) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    widths = _widths(headings, rows)
    over = max(0, sum(widths[i] + _BETWEEN for i in kept) - _BETWEEN - width)
    label_cells = max(8, widths[0] - over)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, _BETWEEN - 1, 0, 0), show_edge=False)
    for i in kept:
        side: Literal["left", "right"] = "left" if i == 0 or i in sheet.left else "right"
        table.add_column(Text(headings[i]), justify=side, vertical="bottom", no_wrap=True)
    for number, row in enumerate(rows):
        # As Text: what looks like markup in a name stays as it is.
        cells = [Text(_in_lines(row[0], label_cells)), *(Text(row[i]) for i in kept[1:])]
        cells[-1].stylize(sheet.styles.get(sheet.rows[number][kept[-1]], ""))
        table.add_row(*cells, style="bold" if number in sheet.marked else "")
    return table
