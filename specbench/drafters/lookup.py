"""Prompt lookup: what followed the last tokens when they stood in the prompt or the output before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from specbench.drafters.base import Draft
from specbench.drafters.options import Options, join_spec
from specbench.errors import UsageError
from specbench.measure import Clock, WallClock

if TYPE_CHECKING:
    import torch

    from specbench.lengths import LengthPolicy
    from specbench.sampling import Randomness, Sampling

__all__ = ["LookupDrafter"]

_LONGEST = 64
"""Longer matches are not told apart."""

_INDEXED = 4
"""Suffixes up to this length are found in an index, longer ones at the places of the last so many."""

_PLACES = 32
"""Of those, so many are compared, the most recent ones."""

_WRITTEN = {"n": "n=TOKENS (or any)", "min": "min=TOKENS"}
_DEFAULTS = {"n": 3, "min": 1}


class LookupDrafter:
    """Finds the longest suffix of the context that occurred before and copies what followed there.

    Of several equally long matches the most recent is taken: in running text it predicts better than the
    first. What is copied may run past the end of the context into the drafts themselves, which continues a
    period.

    The context is indexed as it grows, at each proposal; work per token does not depend on its length.

    Args:
        max_match: Longest suffix that is told from shorter ones, 1 to 64. Up to 4 tokens the longest match is
            always found; more are looked for at the 32 most recent places of the last 4 tokens (of the last
            ``min_match``, if those are more). ``None`` for any length, which means 64.
        min_match: Shortest suffix that counts as a match, 1 to 64.
        clock: Times the reading of the prompt.

    Raises:
        UsageError: A value outside its range, or ``min_match`` above ``max_match``.
    """

    def __init__(self, max_match: int | None = 3, min_match: int = 1, clock: Clock | None = None) -> None:
        for what, value in (("longest", max_match), ("shortest", min_match)):
            if value is not None and not 1 <= value <= _LONGEST:
                raise UsageError(
                    f"The {what} match of the lookup is {value} tokens.", f"Give 1 to {_LONGEST}."
                )
        if max_match is not None and min_match > max_match:
            raise UsageError(
                f"The shortest match of the lookup, {min_match} tokens, is above the longest, {max_match}.",
                "Lower min, or raise n.",
            )
        self.max_match = max_match
        self.min_match = min_match
        self._clock = clock or WallClock()
        self._limit = max_match or _LONGEST
        self._indexed = min(self._limit, max(_INDEXED, min_match))
        self._chained = self._indexed if self._indexed < self._limit else None
        self._read = 0
        # Where the token stands that followed an n-gram most recently; and for each such place of a longest
        # indexed n-gram the one before it. Nothing follows the context's end yet: no suffix finds itself.
        self._after: dict[tuple[int, ...], int] = {}
        self._earlier: dict[int, int] = {}

    @classmethod
    def from_options(cls, options: Mapping[str, str | bool]) -> LookupDrafter:
        """Build one from the options of the command line: n (longest match, or ``any``) and min.

        Raises:
            UsageError: An unknown option or a bad value.
        """
        given = Options("lookup", options, _WRITTEN)
        return cls(
            max_match=None if options.get("n") == "any" else given.integer("n", 3),
            min_match=given.integer("min", 1),
        )

    @property
    def name(self) -> str:
        return join_spec("lookup", {"n": self.max_match or "any", "min": self.min_match}, _DEFAULTS)

    def begin(self, prompt: Sequence[int]) -> None:
        self._read = 0
        self._after.clear()
        self._earlier.clear()

    def propose(
        self, context: Sequence[int], room: int, policy: LengthPolicy, sampling: Sampling, random: Randomness
    ) -> Draft:
        draft = Draft()
        first_read = self._read == 0
        began = self._clock.now()
        self._index(context)
        if first_read:
            draft.prefill_s = self._clock.now() - began
        limit = policy.begin(room)
        source, match = self._find(context) if limit > 0 else (None, 0)
        if source is None:
            return draft
        # If the drafts before it are right, a token follows a match that is longer by as many.
        draft.evidence = [n / (n + 1) for n in range(match, match + limit)]
        while len(draft.tokens) < limit and policy.another(draft):
            behind = source + len(draft.tokens) - len(context)
            draft.tokens.append(context[behind] if behind < 0 else draft.tokens[behind])
        return draft

    def _index(self, context: Sequence[int]) -> None:
        """Index the n-grams in front of every token that was not read yet."""
        for i in range(self._read, len(context)):
            for n in range(self.min_match, min(self._indexed, i) + 1):
                ngram = tuple(context[i - n : i])
                if n == self._chained and ngram in self._after:
                    self._earlier[i] = self._after[ngram]
                self._after[ngram] = i
        self._read = len(context)

    def _find(self, context: Sequence[int]) -> tuple[int | None, int]:
        """The place from which to copy, just behind the match, and the match's length in tokens."""
        for n in range(min(self._indexed, len(context)), self.min_match - 1, -1):
            place = self._after.get(tuple(context[len(context) - n :]))
            if place is not None:
                return self._longest(context, place) if n == self._chained else (place, n)
        return None, 0

    def _longest(self, context: Sequence[int], place: int | None) -> tuple[int | None, int]:
        """Of the places where the longest indexed suffix was, the one that matches furthest back, and how far."""
        best, longest = place, 0
        for _ in range(_PLACES):
            if place is None:
                break
            match = self._indexed
            while match < min(self._limit, place) and context[place - 1 - match] == context[-1 - match]:
                match += 1
            if match > longest:
                best, longest = place, match
            if match == self._limit:
                break
            place = self._earlier.get(place)
        return best, longest

    def commit(self, context: Sequence[int], emitted: int, logits: torch.Tensor) -> None:
        """New tokens are indexed at the next proposal."""

    def rollback(self, length: int) -> None:
        """Only emitted tokens are ever indexed, so there is nothing to take back."""
