"""What commands write to stdout and stderr, safe for where it goes."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

import typer

from specbench.base.textsafe import one_line, terminal_safe

if TYPE_CHECKING:
    from specbench.show.document import Part


def say(message: str) -> None:
    """Print one line on stderr, after the name of the program; a terminal breaks it between words."""
    typer.echo(broken(f"specbench: {one_line(message)}", sys.stderr), err=True)


def broken(text: str, stream: TextIO) -> str:
    """Return text whose lines break between words if it goes to a terminal; lines with a command stay whole."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    fill = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line if ":  " in line else fill(line) for line in text.split("\n"))


def write_out(text: str) -> None:
    """Write text to stdout and flush it; on a terminal without the characters that would steer it."""
    if text:
        sys.stdout.write(terminal_safe(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def has_styles() -> bool:
    """Whether stdout is a terminal that can show dim text."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def write_json(figures: Any) -> None:
    """Write one JSON object in one line."""
    write_out(json.dumps(figures, allow_nan=False) + "\n")


def write_parts(*parts: Part) -> None:
    """Write a document to stdout; a terminal breaks its lines."""
    from rich.console import Console

    from specbench.show.document import show

    console = Console(highlight=False)
    show(console, *parts, wrap=console.is_terminal)


def duration(seconds: float) -> str:
    """Return a duration in words."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
