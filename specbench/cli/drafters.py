"""`specbench drafters`: what ``--drafter`` takes."""

from __future__ import annotations

import inspect
import textwrap
from typing import TYPE_CHECKING

from specbench.specs.drafters import DRAFTERS

if TYPE_CHECKING:
    from rich.console import Console

_WIDEST = 100
_INDENT = 10  # cells before a summary: the longest word and a gap


def drafters() -> None:
    """List the drafters with their options."""
    from rich.console import Console

    console = Console(highlight=False)
    for kind in DRAFTERS:
        summary = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
        _item(console, kind.word, summary, 0, _INDENT, "bold")
        options = kind.options()
        column = _INDENT + max((len(each.syntax) for each in options), default=0) + 2
        for each in options:
            _item(console, each.syntax, each.help, _INDENT, column, "cyan")
        console.print()
    for line in (
        "Options follow a colon, separated by commas: --drafter ngram:order=3,top-k=4",
        "A drafter changes the speed, never the output's distribution.",
    ):
        console.print(line, style="dim", markup=False, soft_wrap=not console.is_terminal)


def _item(console: Console, name: str, text: str, indent: int, column: int, style: str) -> None:
    """Print a name at ``indent`` and its text from ``column`` on, wrapped there."""
    from rich.text import Text

    width = min(console.width, _WIDEST) - column
    for number, line in enumerate(textwrap.wrap(text, max(width, 20)) or [""]):
        shown = Text(" " * indent).append("" if number else name, style)
        shown.pad_right(column - len(shown))
        console.print(shown.append(line, "" if name else style), soft_wrap=True)
