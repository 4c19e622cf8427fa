"""The notation of ``--until``."""

from __future__ import annotations

import re

from specbench.base.errors import UsageError

SURE = "sure"
"""``--until sure``: until the verdict on the fastest configuration is known."""


def parse_until(text: str) -> float | None:
    """Parse ``sure`` (returns ``None``), or the half-width of an interval as ``5%``.

    Raises:
        UsageError: It is neither, or not between 0.5% and 50%.
    """
    if text == SURE:
        return None
    found = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?) ?%", text, re.ASCII)
    if found is None:
        raise UsageError(f"--until is {text!r}.", f"Give {SURE}, or a width such as 5%.")
    share = float(found[1]) / 100
    if not 0.005 <= share <= 0.5:
        raise UsageError(f"--until is {text}.", "Give 0.5% to 50%.")
    return share
