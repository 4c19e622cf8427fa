"""Published accepted lengths beside measured ones, with what differs in the setting (``report --reference``)."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from specbench.base.errors import UsageError
from specbench.base.files import reason
from specbench.base.record import Size, wrong_field
from specbench.results.results import Results
from specbench.results.run import RIVALS
from specbench.results.summary import Summary, SummaryRow
from specbench.rows import Row

PUBLISHED = "published"
"""Names the figures that come with specbench."""

_FORM = "Its first line names target, drafter and tokens_per_step; gamma, prompts and others can be empty."


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A published accepted length, and the setting that is known of it."""

    target: str
    drafter: str
    tokens_per_step: Size
    gamma: int | None = None
    prompts: str | None = None
    temperature: Size | None = None
    thinking: Literal["on", "off"] | None = None
    engine: str | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """A published figure, and the measured one (of a category, or all prompts) whose setting differs least: what
    differs, as "what there / here".
    """

    published: Reference
    config: Row
    prompts: str
    measured: float
    differs: tuple[str, ...]


def read_references(name: str) -> list[Reference]:
    """Read the figures that come with specbench (``published``), or those of a CSV file.

    Raises:
        UsageError: There is no such file, or a line has another form.
    """
    path = Path(__file__).with_name("published.csv") if name == PUBLISHED else Path(name)
    try:
        lines = list(csv.DictReader(path.read_text("utf-8-sig").splitlines()))
    except (OSError, ValueError, csv.Error) as error:
        why = reason(error) if isinstance(error, OSError) else "it is no CSV in UTF-8"
        raise UsageError(
            f"The file {name} cannot be read: {why}.", f"Name a CSV file, or {PUBLISHED}."
        ) from None
    found = []
    for number, line in enumerate(lines, 2):
        filled = {str(key): value for key, value in line.items() if value}
        try:
            found.append(msgspec.convert(filled, Reference, strict=False))
        except msgspec.ValidationError as error:
            what = wrong_field(error)
            raise UsageError(f"Line {number} of {name} has no valid {what}.", _FORM) from None
    return found


def reference_rows(
    results: Results, summary: Summary, categories: Sequence[SummaryRow], published: Sequence[Reference]
) -> list[ReferenceRow]:
    """Return the published figures to which something measured is alike: the target or the drafter, and the draft
    length where both are known.
    """
    measured: list[tuple[Row, str, float]] = [
        (row.config, row.category or "all", row.tokens_per_step.value)
        for row in (*summary.rows, *categories)
        if row.config.kind in RIVALS
    ]
    found = []
    for each in published:
        alike = []
        for config, prompts, tokens in measured:
            differs = dict(_differences(results, config, prompts, each))
            if math.isnan(tokens) or "γ" in differs or {"target", "drafter"} <= differs.keys():
                continue
            texts = tuple(f"{what} {there} / {here}" for what, (there, here) in differs.items())
            alike.append(ReferenceRow(each, config, prompts, tokens, texts))
        found += sorted(alike, key=lambda row: len(row.differs))[:1]
    return found


def _differences(
    results: Results, config: Row, prompts: str, published: Reference
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield what differs with its value there and here; what is not known of one of them is left out."""
    run, at, head = results.run, config.condition, results.run.heads.get(config.drafter)
    if _plain(published.drafter) not in _plain(f"{config.drafter} {head.kind if head else ''}"):
        yield "drafter", (published.drafter, config.drafter)
    suites = [suite.name for suite in run.suites]
    for what, there, here in (
        ("target", published.target, run.target.name or "not known"),
        ("γ", published.gamma, config.gamma),
        ("prompts", published.prompts, suites[0] if prompts == "all" and len(suites) == 1 else prompts),
        ("temperature", published.temperature, at.temperature),
        ("thinking", published.thinking, None if at.thinking is None else "on" if at.thinking else "off"),
        ("engine", published.engine, run.options.get("engine") if config.kind == "server" else "specbench"),
    ):
        if there is not None and here is not None and _plain(f"{there}") != _plain(f"{here}"):
            yield what, (f"{there}", f"{here}")


def _plain(name: str) -> str:
    """Return a name without its owner, and without what is no letter or digit."""
    return re.sub(r"[^a-z0-9.]", "", name.lower().rpartition("/")[2])
