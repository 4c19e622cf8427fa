"""Where the tokens of an output came from."""

from __future__ import annotations

from typing import Literal

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
