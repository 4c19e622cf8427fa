"""Names of verification methods on the command line. ``specbench.decoding.verdicts`` implements them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from specbench.base.errors import UsageError

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


@dataclass(frozen=True)
class Relaxed:
    """A rule that accepts draft tokens without a test if the target finds them likely enough. NOT LOSSLESS.

    A token is accepted if all conditions hold for it, given p, the target's distribution at its place:

    Attributes:
        top_k: It is among the k most probable tokens (``relaxed_topk`` in TensorRT-LLM).
        margin: p(token) >= max(p) - margin (``relaxed_delta`` in TensorRT-LLM).
        typical: p(token) >= min(ε, √ε·exp(-H(p))): typical acceptance (Cai et al. 2024, Medusa), with its δ = √ε.

    Raises:
        UsageError: A value outside its range.

    Example:
        >>> str(Relaxed.parse("margin:0.6 + top-k:10"))
        'top-k:10+margin:0.6'
    """

    top_k: int | None = None
    margin: float | None = None
    typical: float | None = None

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise _bad_rule(f"top-k:{self.top_k}")
        for name, value in (("margin", self.margin), ("typical", self.typical)):
            if value is not None and not 0 <= value <= 1:
                raise _bad_rule(f"{name}:{value}")

    def __str__(self) -> str:
        given = {"top-k": self.top_k, "margin": self.margin, "typical": self.typical}
        return "+".join(f"{name}:{value}" for name, value in given.items() if value is not None)

    @classmethod
    def parse(cls, text: str) -> Relaxed:
        """Return the rule that is written as conditions joined by ``+``; raise ``UsageError`` if it is none."""
        values: dict[str, Any] = {}
        for part in text.split("+"):
            word, _, value = (each.strip() for each in part.partition(":"))
            try:
                kind = {"top-k": int, "margin": float, "typical": float}[word]
                name, number = word.replace("-", "_"), kind(value)
            except (KeyError, ValueError):
                raise _bad_rule(text) from None
            if name in values:
                raise _bad_rule(text)
            values[name] = number
        return cls(**values)


def _bad_rule(text: str) -> UsageError:
    return UsageError(
        f"There is no relaxed rule {text!r}.",
        "Give top-k:K (K tokens, at least 1), margin:P or typical:P (probabilities), or several joined by +.",
    )
