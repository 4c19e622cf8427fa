"""How often a target writes each token, as `specbench calibrate --vocab` counted: kept in the cache folder.

A drafter's head may be cut to the tokens that the target writes most often (FR-Spec, Zhao et al. 2025, arXiv
2502.14856; VocabTrim, Goel et al. 2025, arXiv 2506.22694).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from specbench.errors import UsageError
from specbench.models.shelf import Shelf


@dataclass(frozen=True)
class TokenCounts:
    """What a target writes.

    Attributes:
        target: Its name.
        ranked: The tokens that were seen, the most frequent first.
        counted: Number of tokens of its own outputs that were counted.
        held_out: Tokens of outputs that were not.
    """

    target: str
    ranked: tuple[int, ...]
    counted: int
    held_out: tuple[int, ...]

    def most_frequent(self, number: int, among: Collection[int]) -> list[int]:
        """So many ids, ascending. Where fewer were seen the lowest ids follow: merges come in the order of frequency.

        Args:
            number: How many.
            among: Those that can be taken.
        """
        seen = [token for token in self.ranked if token in among]
        rest = set(among).difference(seen)
        return sorted([*seen, *sorted(rest)][:number])

    def coverage(self, kept: Collection[int]) -> float:
        """Share of the tokens of other outputs that are among these."""
        kept = frozenset(kept)
        return sum(token in kept for token in self.held_out) / len(self.held_out)


def _parse(data: Mapping[str, Any]) -> TokenCounts | None:
    ranked, held_out = data.get("ranked"), data.get("held_out")
    if not isinstance(ranked, list) or not isinstance(held_out, list):
        return None
    if not isinstance(data.get("target"), str) or type(data.get("counted")) is not int:
        return None
    if not held_out or any(type(token) is not int or token < 0 for token in [*ranked, *held_out]):
        return None
    return TokenCounts(data["target"], tuple(dict.fromkeys(ranked)), data["counted"], tuple(held_out))


_HINT = "Run `specbench calibrate --vocab 16000` with this target."
_SHELF = Shelf("vocabularies", "The stored counts are", _HINT, _parse)


def any_counts() -> bool:
    """Whether any target's tokens were ever counted here."""
    return bool(_SHELF.names())


def nothing_counted(target: str) -> UsageError:
    """That a target's tokens were not counted."""
    return UsageError(f"The tokens that {target} writes were not counted yet.", _HINT)


def read_counts(fingerprint: str, target: str) -> TokenCounts:
    """What was counted of a target.

    Args:
        fingerprint: The target's.
        target: What it is called in messages.

    Raises:
        UsageError: Nothing was, or the file is damaged. RunError: It cannot be read.
    """
    counts = _SHELF.read(fingerprint)
    if counts is None:
        raise nothing_counted(target)
    return counts


def write_counts(fingerprint: str, counts: TokenCounts) -> None:
    """Store counts, see ``Shelf.write``."""
    _SHELF.write(fingerprint, counts)
