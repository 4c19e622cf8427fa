"""The report as Markdown with its figures beside it."""

from __future__ import annotations

from collections.abc import Iterable

from specbench.show import tables
from specbench.show.answer import answer_markdown
from specbench.show.report.content import COST_HEADINGS, LONG_TABLE, Report, alternative, missing_figures
from specbench.show.tables import markdown_row, markdown_text

_SUMMARY = ("Speed", "Acceptance and time")  # one table here


def to_markdown(report: Report) -> str:
    """The report as Markdown; its figures are linked as ``plots/<name>.png``."""
    parts = [f"# {markdown_text(report.name)}"]
    for answer in report.answers:
        parts += [*answer_markdown(answer), *_items(answer.details)]
    if report.warnings:
        warnings = [f"{each.severity}: {each.message} {each.advice}" for each in report.warnings]
        parts += ["## Warnings", *_items(warnings)]
    parts += ["## Summary", tables.to_markdown(tables.summary_sheet(report.summary)).rstrip()]
    if report.requests:
        parts += [
            "## Requests side by side",
            tables.to_markdown(tables.request_sheet(report.requests)).rstrip(),
        ]
    if report.categories.rows:
        parts += ["## By category", tables.to_markdown(tables.category_sheet(report.categories)).rstrip()]
    if report.heads:
        parts += ["## Trained heads", tables.to_markdown(tables.head_sheet(report.heads)).rstrip()]
    if report.training:
        parts += [
            "## Training",
            *_folded(tables.to_markdown(tables.training_sheet(report.training)).rstrip()),
        ]
    if report.pictures:
        parts += ["## Figures"]
        parts += [
            f"![{markdown_text(alternative(each, dict.fromkeys(_SUMMARY, 'Summary')))}](plots/{each.name}.png)"
            for each in report.pictures
        ]
    if report.missing:
        parts += _items(missing_figures(report))
    if report.positions:
        parts += [
            "## Acceptance by position",
            *_folded(tables.to_markdown(tables.position_sheet(report.positions)).rstrip()),
        ]
    parts += ["## How it was measured", *_items(f"{name}: {text}" for name, text in report.method)]
    if report.costs:
        heading = [markdown_row(COST_HEADINGS), "| --- | ---: | ---: |"]
        parts += ["\n".join([*heading, *map(markdown_row, report.costs)])]
    for group, facts in report.facts.items():
        parts += [
            f"## {group}",
            "\n".join([markdown_row(["", ""]), "| --- | --- |", *map(markdown_row, facts)]),
        ]
    return "\n\n".join(parts) + "\n"


def _folded(table: str) -> list[str]:
    """A table, behind its number of rows if it is long."""
    rows = table.count("\n") - 1
    return [f"<details><summary>{rows} rows</summary>", table, "</details>"] if rows > LONG_TABLE else [table]


def _items(texts: Iterable[str]) -> list[str]:
    lines = [f"- {markdown_text(text)}" for text in texts]
    return ["\n".join(lines)] if lines else []
