"""Names of verification methods on the command line. ``specbench.decoding.verdicts`` implements them."""

from __future__ import annotations

from typing import Literal, get_args

VerificationName = Literal[
    "rejection", "block", "traversal", "naive", "greedy-draft", "recursive", "specinfer"
]

VERIFICATIONS: tuple[VerificationName, ...] = get_args(VerificationName)


def verification_name(text: str) -> VerificationName:
    """Return a name as a verification method; raise ``ValueError`` if there is no such method."""
    if text not in VERIFICATIONS:
        raise ValueError(f"no verification: {text}")
    return text
