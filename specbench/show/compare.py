"""A comparison (``specbench.results.compare``) as a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from specbench.results import stats
from specbench.show.document import Heading, Paragraph, Part, Sheet

if TYPE_CHECKING:
    from specbench.results.compare import Compared, ComparedRow


_FEW = 4
"""The most configurations that have a table by category each."""


def comparison_parts(compared: Compared) -> Iterator[Part]:
    """Yield a comparison for a terminal; few configurations have a table by category each."""
    yield from (Paragraph(f"A  {compared.a}"), Paragraph(f"B  {compared.b}"))
    overall = compared.overall
    categories = len(overall) <= _FEW
    if len(overall) > 1 or not categories:
        yield _sheet(compared, overall, "configuration")
    for row in overall if categories else ():
        pair = row.config_a, row.config_b
        mine = [each for each in compared.rows if (each.config_a, each.config_b) == pair]
        if len(overall) == 1:
            yield _sheet(compared, mine, "category")
        elif len(mine) > 1:
            yield Heading(f"{row.label}, by category")
            yield _sheet(compared, mine[1:], "category")
    yield from (Paragraph(note, "dim") for note in compared.notes)


def _sheet(
    compared: Compared, rows: Sequence[ComparedRow], of: Literal["configuration", "category"]
) -> Sheet:
    """Return a table of rows; ``of`` is what names a row."""
    unit = "tokens/s" if compared.measure == "speed" else "speedup"
    cells = []
    for row in rows:
        if compared.measure == "speed":
            sides = [stats.decimals(each.value) for each in (row.a, row.b)]
        else:
            sides = [stats.ratio_text(each, "") for each in (row.a, row.b)]
        ratio, verdict = stats.ratio_text(row.ratio, ""), stats.verdict_text(row.verdict, row.provisional)
        name = row.label if of == "configuration" else row.category or "all"
        cells.append([name, str(row.ratio.prompts), *sides, ratio, verdict])
    return Sheet(
        [of, "prompts", f"A {unit}", f"B {unit}", "A / B", "verdict"],
        cells,
        ranks=[0, 2, 1, 1, 0, 0],
        left=frozenset({5}),
        styles={"faster": "green", "slower": "red"},
        elsewhere="with --json, or on a wider terminal",
    )
