"""Names of verification methods on the command line. ``specbench.decoding.verdicts`` implements them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

VerificationName = Literal[
    "rejection", "block", "traversal", "naive", "greedy-draft", "recursive", "specinfer"
]

VERIFICATIONS: Mapping[VerificationName, str] = {
    "rejection": "one draft at a time, by p/q; chains",
    "block": "the whole chain together, never worse than rejection; chains",
    "traversal": "the tree from its leaves up; drafts without replacement",
    "naive": "a token of the target's is drawn and looked up among the drafts; the drafter's most probable tokens",
    "greedy-draft": "the drafter's most probable tokens and one from its tail",
    "recursive": "one draft after the other by what is left of p; drafts without replacement",
    "specinfer": "independent drafts in random order; several drafters",
}
"""What each does, in a few words."""


def verification_name(text: str) -> VerificationName:
    """Return a name as a verification method; raise ``ValueError`` if there is no such method."""
    if text not in VERIFICATIONS:
        raise ValueError(f"no verification: {text}")
    return cast("VerificationName", text)
