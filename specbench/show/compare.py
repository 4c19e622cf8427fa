"""A comparison (``specbench.results.compare``) as a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from specbench.base.textsafe import counted
from specbench.results import stats
from specbench.show.document import Items, Paragraph, Part, Sheet
from specbench.show.tables import Column, table

if TYPE_CHECKING:
    from types import SimpleNamespace

    from specbench.results.compare import Compared, ComparedRow
    from specbench.results.published import Published


def comparison_parts(compared: Compared) -> Iterator[Part]:
    """Yield a comparison for a terminal, with a table for each figure."""
    if compared.worse_than is not None:
        yield Paragraph(_answer([row.outcome for row in compared.rows], compared.worse_than), "bold")
    width = max(map(len, compared.words))
    for word, name in zip(compared.words, compared.names, strict=True):
        yield Paragraph(f"{word:{width}}  {name}")
    for kind in dict.fromkeys(row.kind for row in compared.rows):
        yield _sheet(compared, [row for row in compared.rows if row.kind is kind])
    yield from (Paragraph(note, "dim") for note in compared.notes)


def _answer(outcomes: Sequence[str], worse_than: float) -> str:
    """Return what a gate says of all its rows and figures."""
    worse, unknown = outcomes.count("worse"), outcomes.count("cannot tell")
    said = f"Yes, {worse}" if worse else f"Not known of {unknown}" if unknown else "No, 0"
    rows = counted(len(outcomes), "row and figure", "rows and figures")
    return f"Worse by more than {100 * worse_than:g}%? {said} of {rows}."


def published_parts(
    run: str, rows: Sequence[SimpleNamespace], published: Published, file: Path
) -> Iterator[Part]:
    """Yield a run beside published accepted lengths."""
    yield from (Paragraph(f"A  {run}"), Paragraph(f"B  {published.model}, {file.name}"))
    columns = (
        Column("config.label", "configuration", "text"),
        Column("gamma", "γ", "count"),
        Column("thinking", "B thinks", "text", 1),
        Column("tokens_per_draft", "A tokens/draft", "ratio"),
        Column("published", "B"),
        Column("verdict", "A is", "text"),
    )
    same = "Lengths can be compared only with the prompts, sampling and length of output of B, which its header says:"
    yield table(rows, columns, ["Tokens per draft count the bonus token, and no step without a draft."])
    yield Items(list(published.header), same)


def _sheet(compared: Compared, rows: Sequence[ComparedRow]) -> Sheet:
    """Return a table of rows of one figure; those of a single configuration are named by their category."""
    kind = rows[0].kind
    of_one = compared.worse_than is None and len({row.configs for row in rows}) == 1
    heading, name = ("category", "category_name") if of_one else ("configuration", "label")
    sides = [
        Column(side, f"{word} {kind.heading}", kind.form, 1)
        for side, word in zip(("a", "b"), compared.words, strict=True)
    ]
    columns = (
        Column(name, heading, "text"),
        Column("ratio.prompts", "prompts", "count", 2),
        *sides,
        Column("ratio", " / ".join(compared.words), "ratio"),
    )
    sheet = table(rows, columns)
    return replace(
        sheet,
        headings=[*sheet.headings, "verdict"],
        rows=[
            [*cells, stats.verdict_text(row.verdict_word, row.provisional)]
            for cells, row in zip(sheet.rows, rows, strict=True)
        ],
        values=[],
        ranks=[*sheet.ranks, 0],
        left=frozenset({5}),
        styles={"faster": "green", "slower": "red", "not worse": "green", "worse": "red"},
        elsewhere="with --json, or on a wider terminal",
    )


def to_junit(gate: Compared) -> bytes:
    """Return a gate as JUnit XML, with a test case for each row: failed if it is worse, skipped if one cannot tell."""
    tags = {"worse": "failure", "cannot tell": "skipped"}
    suites = ElementTree.Element("testsuites")
    name = f"specbench compare {gate.names[1]} {gate.names[0]} --worse-than {100 * (gate.worse_than or 0):g}%"
    suite = ElementTree.SubElement(suites, "testsuite", {"name": name, "tests": str(len(gate.rows))})
    for row in gate.rows:
        case = ElementTree.SubElement(suite, "testcase", {"classname": row.label, "name": row.kind.name})
        if row.outcome in tags:
            message = (
                f"{stats.ratio_text(row.ratio)} the baseline's: {row.outcome}{row.why and f', {row.why}'}"
            )
            ElementTree.SubElement(case, tags[row.outcome], {"message": message})
    text = ElementTree.tostring(suites, encoding="unicode", xml_declaration=True)
    return text.translate(dict.fromkeys((0xFFFE, 0xFFFF), "\ufffd")).encode()  # which XML may not contain
