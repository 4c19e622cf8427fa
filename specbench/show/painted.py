"""Terminal text with a style that shows where its tokens came from."""

from __future__ import annotations

from specbench.base.textsafe import terminal_safe
from specbench.decoding.records import Origin

# Codes of SGR: what tells the origins apart without color, and the color.
_TERMINAL: dict[Origin, tuple[str, str]] = {
    "accepted": ("4", "32"),
    "forced": ("2;4", "32"),
    "corrected": ("1", "33"),
    "bonus": ("3", "35"),
}


def painted(text: str, origin: Origin, *, color: bool = True) -> str:
    """Return safe terminal text in the style of its origin;
    without ``color``, it is only underlined, bold or italic.
    """
    safe = terminal_safe(text)
    if not safe or origin not in _TERMINAL:
        return safe
    attributes, hue = _TERMINAL[origin]
    return f"\x1b[{attributes}{f';{hue}' if color else ''}m{safe}\x1b[0m"
