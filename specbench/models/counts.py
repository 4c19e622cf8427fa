"""How often a target writes each token, as `specbench calibrate --vocab` counted: kept in the cache folder.

A drafter's head may be cut to the tokens that the target writes most often (FR-Spec, Zhao et al. 2025, arXiv
2502.14856; VocabTrim, Goel et al. 2025, arXiv 2506.22694).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specbench.errors import RunError, UsageError
from specbench.files import explained, reason, write_text
from specbench.models.builtin import CACHE_VARIABLE, cache_folder

__all__ = ["TokenCounts", "any_counts", "nothing_counted", "read_counts", "write_counts"]

_FORMAT = 1
"""Version of the files. 1: first release."""

_HINT = "Run `specbench calibrate --vocab 16000` with this target."


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


def _folder() -> Path:
    return cache_folder() / "vocabularies"


def _path(fingerprint: str) -> Path:
    return _folder() / f"{fingerprint}.json"


def any_counts() -> bool:
    """Whether any target's tokens were ever counted here."""
    return any(_folder().glob("*.json"))


def nothing_counted(target: str) -> UsageError:
    """That a target's tokens were not counted."""
    return UsageError(f"The tokens that {target} writes were not counted yet.", _HINT)


def read_counts(fingerprint: str, target: str) -> TokenCounts:
    """What was counted of a target.

    Args:
        fingerprint: The target's.
        target: What it is called in messages.

    Raises:
        UsageError: Nothing was, or the file is damaged.
    """
    try:
        data = json.loads(_path(fingerprint).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise nothing_counted(target) from None
    except OSError as error:
        raise RunError(f"The stored counts cannot be read ({reason(error)}).") from error
    except (ValueError, RecursionError):
        data = None
    counts = _parse(data)
    if counts is None:
        raise UsageError("The stored counts are damaged, or of another version of specbench.", _HINT)
    return counts


def _parse(data: Any) -> TokenCounts | None:
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        return None
    ranked, held_out = data.get("ranked"), data.get("held_out")
    if not isinstance(ranked, list) or not isinstance(held_out, list):
        return None
    if not isinstance(data.get("target"), str) or type(data.get("counted")) is not int:
        return None
    if not held_out or any(type(token) is not int or token < 0 for token in [*ranked, *held_out]):
        return None
    return TokenCounts(data["target"], tuple(dict.fromkeys(ranked)), data["counted"], tuple(held_out))


def write_counts(fingerprint: str, counts: TokenCounts) -> None:
    """Store counts, in the place of earlier ones; a crash leaves either the old or the new ones.

    Raises:
        RunError: The cache folder cannot be written. UsageError: A link stands in the file's place.
    """
    text = json.dumps({"format": _FORMAT, **asdict(counts)}) + "\n"
    with explained(
        f"The cache folder {str(cache_folder())!r} cannot be written",
        f"Set {CACHE_VARIABLE} to a folder that can.",
    ):
        _folder().mkdir(parents=True, exist_ok=True)
        write_text(_path(fingerprint), text)
