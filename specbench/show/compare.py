"""A comparison (``specbench.results.compare``) as a document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from specbench.results import stats
from specbench.show.document import Heading, Paragraph, Part, Sheet
from specbench.show.tables import Column, ratio_text, table

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
        yield _sheet(compared, overall, "label")
    for row in overall if categories else ():
        pair = row.config_a, row.config_b
        mine = [each for each in compared.rows if (each.config_a, each.config_b) == pair]
        if len(overall) == 1:
            yield _sheet(compared, mine, "category")
        elif len(mine) > 1:
            yield Heading(f"{row.label}, by category")
            yield _sheet(compared, mine[1:], "category")
    yield from (Paragraph(note, "dim") for note in compared.notes)


def _sheet(compared: Compared, rows: Sequence[ComparedRow], of: Literal["label", "category"]) -> Sheet:
    """Return a table of rows; ``of`` is what names a row."""
    is_speed = compared.measure == "speed"
    unit = "tokens/s" if is_speed else "speedup"
    form: Callable[[Any], str] = stats.decimals if is_speed else ratio_text
    columns = (
        Column(of, "configuration" if of == "label" else of, lambda name: name or "all"),
        Column("ratio.prompts", "prompts", str, 2),
        Column("a", f"A {unit}", form, 1),
        Column("b", f"B {unit}", form, 1),
        Column("ratio", "A / B", ratio_text),
        Column("verdict_text", "verdict", str),
    )
    return replace(
        table(rows, columns),
        left=frozenset({5}),
        styles={"faster": "green", "slower": "red"},
        elsewhere="with --json, or on a wider terminal",
    )
