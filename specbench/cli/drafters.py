"""`specbench drafters`: what ``--drafter`` takes."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from specbench.cli.console import write_parts
from specbench.specs.drafters import DRAFTERS

if TYPE_CHECKING:
    from specbench.show.document import Part


def drafters() -> None:
    """List the drafters with their options."""
    from specbench.show.document import Facts, Heading, Items, Paragraph

    parts: list[Part] = []
    for kind in DRAFTERS:
        summary = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
        parts += [Heading(kind.word, 3), Paragraph(summary)]
        if options := kind.options():
            width = max(len(each.syntax) for each in options) + 2
            parts.append(Facts([(each.syntax, [(each.help, "")]) for each in options], width))
    notes = (
        "Options follow a colon, separated by commas: --drafter ngram:order=3,top-k=4",
        "A drafter changes the speed, never the output's distribution.",
    )
    write_parts(*parts, Items(notes))
