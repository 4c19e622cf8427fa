"""A comparison (``specbench.results.compare``) as a table for terminals and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench.results import stats
from specbench.show.tables import markdown_row, markdown_text, spelled_out, verdict_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from specbench.results.compare import Compared, Row


def _headings(compared: Compared, *, by_category: bool) -> list[str]:
    unit = "tokens/s" if compared.measure == "speed" else "speedup"
    names = ["configuration", *(["category"] if by_category else [])]
    return [*names, "prompts", f"A {unit}", f"B {unit}", "A / B", "verdict"]


def _cells(row: Row, compared: Compared, *, by_category: bool) -> list[str]:
    if compared.measure == "speed":
        sides = [stats.decimals(each.value) for each in (row.a, row.b)]
    else:
        sides = [stats.ratio_text(each, "") for each in (row.a, row.b)]
    names = [row.label, *([row.category or "all"] if by_category else [])]
    return [
        *names,
        str(row.ratio.prompts),
        *sides,
        stats.ratio_text(row.ratio, ""),
        verdict_text(row.verdict, row.provisional),
    ]


def render_terminal(compared: Compared, console: Console, *, categories: bool) -> None:
    """Print a comparison, readable from 80 columns up.

    Args:
        compared: What to show.
        console: Where.
        categories: Also show the categories, a table for each configuration.
    """
    from rich.text import Text

    def say(text: str, style: str = "") -> None:
        console.print(Text(spelled_out(text, console.encoding), style=style))

    say(f"A  {compared.a}")
    say(f"B  {compared.b}\n")
    overall = compared.overall
    if len(overall) > 1 or not categories:
        console.print(_table(compared, overall, console))
    for row in overall if categories else ():
        mine = [each for each in compared.rows if _pair(each) == _pair(row)]
        if len(overall) == 1:
            console.print(_table(compared, mine, console))
        elif len(mine) > 1:
            say(f"\n{row.label}, by category", "bold")
            console.print(_table(compared, mine[1:], console))
    console.print()
    for note in compared.notes:
        say(note, "dim")


def _pair(row: Row) -> tuple[str, str]:
    return row.config_a, row.config_b


_STYLES = {"faster": "green", "slower": "red", "cannot tell": ""}
_GAP = 2


def _table(compared: Compared, rows: Sequence[Row], console: Console) -> Table:
    """Rows by category if any is about one, else by configuration. Both sides go where there is no room."""
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    by_category = any(row.category is not None for row in rows)
    headings = _headings(compared, by_category=False)
    cells = [_cells(row, compared, by_category=False) for row in rows]
    if by_category:
        headings[0] = "category"
        cells = [[row.category or "all", *mine[1:]] for row, mine in zip(rows, cells, strict=True)]
    widths = [max(cell_len(line[i]) for line in (headings, *cells)) for i in range(len(headings))]
    widths[0] = min(widths[0], 30)
    kept = list(range(len(headings)))
    for less in ([1], [2, 3]):
        if sum(widths[i] + _GAP for i in kept) - _GAP > console.width:
            kept = [i for i in kept if i not in less]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, _GAP - 1, 0, 0), show_edge=False)
    for i in kept:
        table.add_column(
            Text(spelled_out(headings[i], console.encoding)),
            justify="left" if i in (0, len(headings) - 1) else "right",
            no_wrap=i != 0,
            overflow="fold",
        )
    for row, line in zip(rows, cells, strict=True):
        shown = [
            Text(spelled_out(line[i], console.encoding)) for i in kept
        ]  # as Text: markup in a name stays as it is
        shown[-1].stylize(_STYLES[row.verdict])
        table.add_row(*shown)
    return table


def to_markdown(compared: Compared) -> str:
    """A comparison as a Markdown table with its categories, and notes below."""
    by_category = any(row.category is not None for row in compared.rows)
    headings = _headings(compared, by_category=by_category)
    lines = [
        markdown_row(headings),
        "| " + " | ".join("---:" if name[:1] in "pAB" else "---" for name in headings) + " |",
        *(markdown_row(_cells(row, compared, by_category=by_category)) for row in compared.rows),
        "",
        *(f"- {markdown_text(note)}" for note in compared.notes),
    ]
    return "\n".join(lines) + "\n"
