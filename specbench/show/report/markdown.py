"""The report as Markdown with its figures beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from specbench.show import document, tables
from specbench.show.answer import answer_parts
from specbench.show.document import Heading, Image, Items, Part, Sheet
from specbench.show.report.content import COST_HEADINGS, LONG_TABLE, Report, alternative, missing_figures

_SUMMARY = ("Speed", "Acceptance and time")  # one table here


def to_markdown(report: Report) -> str:
    """The report as Markdown; its figures are linked as ``plots/<name>.png``."""
    return document.to_markdown(*_parts(report))


def _parts(report: Report) -> Iterator[Part]:
    yield Heading(report.name, 1)
    for answer in report.answers:
        yield from (*answer_parts(answer), Items(answer.details))
    if report.warnings:
        warnings = [f"{each.severity}: {each.message} {each.advice}" for each in report.warnings]
        yield from (Heading("Warnings"), Items(warnings))
    yield from (Heading("Summary"), tables.summary_sheet(report.summary))
    if report.requests:
        yield from (Heading("Requests side by side"), tables.request_sheet(report.requests))
    if report.categories.rows:
        yield from (Heading("By category"), tables.category_sheet(report.categories))
    if report.heads:
        yield from (Heading("Trained heads"), tables.head_sheet(report.heads))
    if report.training:
        yield from (Heading("Training"), _folded(tables.training_sheet(report.training)))
    if report.pictures:
        yield Heading("Figures")
    renamed = dict.fromkeys(_SUMMARY, "Summary")
    yield from (Image(alternative(each, renamed), f"plots/{each.name}.png") for each in report.pictures)
    yield Items(missing_figures(report))
    if report.positions:
        yield from (Heading("Acceptance by position"), _folded(tables.position_sheet(report.positions)))
    yield from (Heading("How it was measured"), Items([f"{name}: {text}" for name, text in report.method]))
    if report.costs:
        yield Sheet(COST_HEADINGS, report.costs)
    for group, facts in report.facts.items():
        yield from (Heading(group), Sheet(["", ""], [*map(list, facts)], left=frozenset({1})))


def _folded(sheet: Sheet) -> Sheet:
    """A table, behind its number of rows if it is long."""
    return replace(sheet, folded=len(sheet.rows) > LONG_TABLE)
