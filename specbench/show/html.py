"""Documents as HTML pages that are one file each: style and script are inside, nothing else may be loaded or run."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from specbench.base.textsafe import one_line, terminal_safe
from specbench.show.document import Part

_COLORED = re.compile(r"(?:\W )?(fastest|faster|slower|accepted|forced|rejected)\??")
"""Cells with a color, which the style sheet has by the word."""


def to_html(title: str, parts: Sequence[Part]) -> str:
    """Return a document as a page.

    The template ``page.html.jinja`` escapes all values and raises an error for a missing one. Its content security
    policy allows ``style.css``, ``script.js``, images in the page itself, and nothing else.
    """
    folder = Path(__file__).parent
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        loader=FileSystemLoader(folder),
    )
    filters: dict[str, Callable[..., Any]] = {
        "color": lambda cell: found[1] if (found := _COLORED.fullmatch(cell)) else "",
        "data_uri": lambda svg: "data:image/svg+xml;base64," + base64.b64encode(svg).decode(),
        "kind": lambda part: type(part).__name__,
        "lines": terminal_safe,
        "one_line": one_line,
        "sort_value": _sort_value,
    }
    environment.filters |= filters
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return environment.get_template("page.html.jinja").render(
        title=title,
        parts=parts,
        policy=policy,
        style=Markup(style),  # noqa: S704 - our own
        script=Markup(script),  # noqa: S704
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _sort_value(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    return None if value is None or math.isnan(value) else repr(float(value))
