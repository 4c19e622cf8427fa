"""Documents made of parts, with writers for a terminal and for Markdown.

Parts contain plain text. Writers make it safe where it is shown: no control characters or markup on a terminal, no
markup, HTML or line breaks in Markdown. ``specbench.show.html`` writes them as web pages.
"""

from __future__ import annotations

import html
import io
import re
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
    """A command to be copied."""

    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """A list, left out if it has no lines."""

    lines: Sequence[str]
    heading: str = ""


Span = tuple[str, str]
"""A text, and its style on a terminal."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels with their values; on a terminal, the labels are in a column of ``width`` characters."""

    pairs: Sequence[tuple[str, Sequence[Span]]]
    width: int = 11


@dataclass(frozen=True, slots=True)
class Tokens:
    """An output on a web page: each token, its origin, and the index of the part of the document with its step."""

    tokens: Sequence[tuple[str, str, int]]


@dataclass(frozen=True, slots=True)
class Image:
    """A figure as a file next to the document, and as SVG with its width in pixels; terminals do not show it."""

    alternative: str
    path: str
    svg: bytes
    width: int


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table.

    Attributes:
        headings: One per column; the first column names the rows, the others hold figures.
        rows: Cells, one list per row.
        values: Values to sort the cells by, shaped like ``rows``: text in the first column, numbers or NaN in others.
        ranks: A number for each column: a narrow terminal leaves out columns with the highest number first, and columns
            with 0 never. Empty means that no column is left out, and cells are broken into lines.
        notes: Sentences below the table.
        marked: Indices of highlighted rows.
        left: Indices of columns that contain text, in addition to the first; they are aligned left.
        styles: Terminal styles of the last column's cells, by their text.
        elsewhere: Where to find the columns that were left out.
    """

    headings: list[str]
    rows: list[list[str]]
    values: list[list[Any]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    marked: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    styles: Mapping[str, str] = field(default_factory=dict)
    elsewhere: str = "in summary.md, or on a wider terminal"


Part = Heading | Paragraph | Code | Items | Facts | Tokens | Image | Sheet


# --- Markdown -------------------------------------------------------------------------------------


def to_markdown(*parts: Part) -> str:
    """Return a document as Markdown; its tables have all of their columns."""
    return "\n\n".join(filter(None, map(_markdown, parts))) + "\n"


def _markdown(part: Part) -> str:
    match part:
        case Heading():
            return f"{'#' * part.level} {_escaped(part.text)}"
        case Paragraph():
            return f"**{_escaped(part.text)}**" if part.style == "bold" else _escaped(part.text)
        case Code():  # as code, unless it holds what could be HTML
            command = one_line(part.text)
            return _escaped(command) if re.search("[<>&]", command) else f"    {command}"
        case Items():
            heading = f"{_escaped(part.heading)}\n\n" if part.heading and part.lines else ""
            return heading + "\n".join(f"- {_escaped(line)}" for line in part.lines)
        case Facts():
            lines = [f"{label}: {''.join(text for text, _ in value)}" for label, value in part.pairs]
            return _markdown(Items(lines))
        case Tokens():
            return _escaped("".join(text for text, *_ in part.tokens))
        case Image():
            return f"![{_escaped(part.alternative)}]({part.path})"
        case Sheet():
            sides = ["---", *("---" if i in part.left else "---:" for i in range(1, len(part.headings)))]
            table = "\n".join([_row(part.headings), f"| {' | '.join(sides)} |", *map(_row, part.rows)])
            return f"{table}\n\n{_markdown(Items(part.notes))}" if part.notes else table


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


_MARKDOWN = str.maketrans({each: "\\" + each for each in "\\`*_{}[]|#~$"})


def _escaped(text: str) -> str:
    """Escape text so that Markdown shows it as it is, within its cell or line."""
    return html.escape(one_line(text).translate(_MARKDOWN), quote=False)


# --- Terminal -------------------------------------------------------------------------------------

_NAME_CELLS = 28  # a longer name takes several lines
_BETWEEN = 2  # cells between columns


def show(console: Console, *parts: Part, wrap: bool = True) -> None:
    """Print a document, readable in 60 columns or more, with blank lines between parts that do not belong together.

    Args:
        console: The console to print on.
        *parts: The parts of the document.
        wrap: Whether to break paragraphs and lists into lines.
    """
    from rich.text import Text

    def say(text: str, style: str = "", *, whole: bool = not wrap) -> None:
        console.print(Text(_safe_line(text), style=style), soft_wrap=whole)

    before: Part | None = None
    for part in parts:
        if isinstance(part, Image | Tokens) or (isinstance(part, Items) and not part.lines):
            continue
        paragraphs = isinstance(part, Paragraph) and isinstance(before, Paragraph)
        below = isinstance(part, Facts) or (isinstance(before, Heading) and before.level > 2)
        if before is not None and not paragraphs and not below:
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
            case Facts():
                console.print(_grid(part))
            case Sheet():
                table, notes = table_of(part, console.width)
                console.print(table)
                for note in notes:
                    say(note, "dim", whole=False)


def to_text(*parts: Part, width: int = 80) -> str:
    """Return a document as ``show`` prints it,
    with tables of at most ``width`` characters and paragraphs in one line.
    """
    from rich.console import Console

    out = io.StringIO()
    show(Console(file=out, width=width, highlight=False, color_system=None), *parts, wrap=False)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def _safe_line(text: str) -> str:
    return re.sub(r"[\n\t]+", " ", terminal_safe(text))


def _grid(facts: Facts) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(width=facts.width, style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in facts.pairs:
        spans = ((terminal_safe(text), style) for text, style in value)
        grid.add_row(Text(f"  {label}"), Text.assemble(*spans))
    return grid


def table_of(sheet: Sheet, width: int) -> tuple[Table, list[str]]:
    """Return a table as a terminal of some width shows it, and the sentences below it.

    The columns of the highest ranks are left out until the others fit; names, and all cells of a table without ranks,
    are broken into lines.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    headings = [_in_two_lines(_safe_line(heading)) for heading in sheet.headings]
    rows = [[_safe_line(cell) for cell in row] for row in sheet.rows]
    kept = _fitting(sheet.ranks, headings, rows, width)
    most = max(headings[i].count("\n") for i in kept)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, _BETWEEN - 1, 0, 0), show_edge=False)
    for i in kept:
        is_name = i == 0 or i in sheet.left
        heading = "\n" * (most - headings[i].count("\n")) + headings[i]  # at the bottom, and cells at the top
        table.add_column(
            Text(heading),
            justify="left" if is_name else "right",
            overflow="fold",
            no_wrap=bool(sheet.ranks) and not is_name,
        )
    for number, row in enumerate(rows):
        cells = [Text(row[i]) for i in kept]  # as Text: markup in a name stays as it is
        cells[-1].stylize(sheet.styles.get(sheet.rows[number][kept[-1]], ""))
        table.add_row(*cells, style="bold" if number in sheet.marked else "")
    hidden = len(headings) - len(kept)
    more = [f"{counted(hidden, 'more column')}: {sheet.elsewhere}."] if hidden else []
    return table, [*sheet.notes, *more]


def _fitting(
    ranks: Sequence[int], headings: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> list[int]:
    """Return the columns to show, in order; columns of one rank belong together."""
    from rich.cells import cell_len

    columns = zip(headings, *rows, strict=True)
    widths = [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in columns]
    widths[0] = min(widths[0], _NAME_CELLS)
    kept = list(range(len(widths)))
    while ranks and sum(widths[i] + _BETWEEN for i in kept) - _BETWEEN > width:
        last = max(ranks[i] for i in kept)
        if not last:
            break
        kept = [i for i in kept if ranks[i] < last]
    return kept


def _in_two_lines(heading: str) -> str:
    """Break a long heading at a space or before a slash."""
    if len(heading) <= 7:
        return heading
    return heading.replace(" ", "\n", 1) if " " in heading else heading.replace("/", "\n/", 1)
