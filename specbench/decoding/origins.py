"""Where the tokens of an output came from, and how a notebook shows it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Literal

from specbench.base.textsafe import terminal_safe

Origin = Literal["accepted", "forced", "corrected", "bonus", "target"]
"""An accepted draft, one that the format forced, or what closes a step (``records.Closing``)."""

ORIGINS: dict[Origin, str] = {
    "accepted": "accepted draft",
    "forced": "forced by the format",
    "corrected": "corrected",
    "bonus": "bonus",
    "target": "the target's own",
}
"""What each is called in a legend."""

_CSS: dict[Origin, str] = {
    "accepted": "color:#2a9d4a;text-decoration:underline",
    "forced": "color:#6b7d2a;text-decoration:underline",
    "corrected": "color:#c77700;font-weight:bold",
    "bonus": "color:#b04fc0;font-style:italic",
}


def as_html(pieces: Iterable[tuple[Origin, str]], caption: str) -> str:
    """The pieces of an output's text in order, each in the style of its origin, a legend and a caption."""
    text = "".join(_span(terminal_safe(piece), origin, title=True) for origin, piece in pieces)
    legend = " · ".join(_span(name, origin) for origin, name in ORIGINS.items())
    return (
        f'<div style="white-space:pre-wrap">{text}</div>'
        f'<div style="font-size:smaller;margin-top:.5em">{legend} — {escape(caption)}</div>'
    )


def _span(text: str, origin: Origin, *, title: bool = False) -> str:
    style = f' style="{_CSS[origin]}"' if origin in _CSS else ""
    hint = f' title="{escape(ORIGINS[origin])}"' if title else ""
    return f"<span{style}{hint}>{escape(text)}</span>"
