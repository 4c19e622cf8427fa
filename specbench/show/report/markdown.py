"""The report as Markdown, with image files next to it."""

from __future__ import annotations

from collections.abc import Iterator

from specbench.show import document
from specbench.show.answer import answer_parts
from specbench.show.document import Heading, Image, Items, Part, Sheet
from specbench.show.report.content import SUMMARY, Report, alternative

_IN_SUMMARY = dict.fromkeys(("Speed", "Acceptance and time"), SUMMARY)
"""Tables of the page that are one table here."""


def to_markdown(report: Report) -> str:
    """Return the report as Markdown, with links to figures as ``plots/<name>.png``."""
    return document.to_markdown(*_parts(report))


def _parts(report: Report) -> Iterator[Part]:
    yield Heading(report.name, 1)
    for answer in report.answers:
        yield from (*answer_parts(answer), Items(answer.details))
    if report.warnings:
        warnings = [f"{each.severity}: {each.message} {each.advice}" for each in report.warnings]
        yield from (Heading("Warnings"), Items(warnings))
    for title, sheet in report.tables.items():
        yield from (Heading(title), sheet)
    if report.pictures:
        yield Heading("Figures")
    for each in report.pictures:
        yield Image(alternative(each, _IN_SUMMARY), f"plots/{each.name}.png")
    yield Items(report.missing)
    yield from (Heading("How it was measured"), Items([f"{name}: {text}" for name, text in report.method]))
    if report.costs.rows:
        yield report.costs
    for group, facts in report.facts.items():
        yield from (Heading(group), Sheet(["", ""], [*map(list, facts)], left=frozenset({1})))
