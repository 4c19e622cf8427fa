"""Prompt lookup: drafts what followed the last tokens where they occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specbench.decoding.drafts import Guess
from specbench.drafters.free import FreeDrafter
from specbench.specs.drafters import Lookup

if TYPE_CHECKING:
    from specbench.decoding.sampling import Sampling

_INDEXED = 4
"""Suffixes up to this length are indexed; longer ones are searched at the places of this many tokens."""

_PLACES = 32
"""How many of the most recent places are compared."""


class LookupDrafter(FreeDrafter):
    """Copies what followed the longest suffix of the context that occurred before, at its latest place.

    A copy may run past the end of the context into the draft, which continues a period. Work per token does not depend
    on the context's length. Matches of up to 4 tokens are always found, longer ones at the 32 most recent places of the
    last 4 tokens (or of the shortest match, if longer).
    """

    def __init__(self, spec: Lookup | None = None, target: Any = None) -> None:
        self.spec = spec or Lookup()
        super().__init__(self.spec, target)
        self._least, self._limit = self.spec.min, self.spec.longest
        self._indexed = min(self._limit, max(_INDEXED, self._least))
        self._chained = self._indexed if self._indexed < self._limit else None
        # The place after the most recent occurrence of an n-gram, and for the longest indexed ones the place before it.
        # Nothing follows the context's end yet, so no suffix finds itself.
        self._after: dict[tuple[int, ...], int] = {}
        self._earlier: dict[int, int] = {}
        # A copy in progress: the place that it goes on at, the token before it, its source, and its match so far.
        self._copying: tuple[int, int, int, int] | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._after.clear()
        self._earlier.clear()
        self._copying = None

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> Guess | None:
        """Continue the copy; after a token of another drafter, search again."""
        known = len(context)
        position = known + len(drafted)
        if self._copying is not None and drafted and self._copying[:2] == (position, drafted[-1]):
            _, _, source, match = self._copying
        else:
            copied = self._find(context, [*context[-self._limit :], *drafted] if drafted else context)
            if copied is None:
                return None
            source, match = copied
        token = context[source] if source < known else drafted[source - known]
        self._copying = position + 1, token, source + 1, match + 1
        return Guess(token, match_confidence=match / (match + 1))

    def take_in(self, context: Sequence[int], first: int) -> None:
        """Index the n-grams before every new token."""
        self._copying = None
        for i in range(first, len(context)):
            for n in range(self._least, min(self._indexed, i) + 1):
                ngram = tuple(context[i - n : i])
                if n == self._chained and ngram in self._after:
                    self._earlier[i] = self._after[ngram]
                self._after[ngram] = i

    def _find(self, context: Sequence[int], text: Sequence[int]) -> tuple[int, int] | None:
        """Return the place in the context after the longest match of the end of ``text``, and the match's length."""
        for n in range(min(self._indexed, len(text)), self._least - 1, -1):
            place = self._after.get(tuple(text[len(text) - n :]))
            if place is not None:
                return self._longest(context, text, place) if n == self._chained else (place, n)
        return None

    def _longest(self, context: Sequence[int], text: Sequence[int], latest: int) -> tuple[int, int]:
        """Return the place of the longest match among those of the longest indexed suffix, and its length."""
        best, longest, place = latest, 0, latest
        for _ in range(_PLACES):
            match = self._indexed
            while match < min(self._limit, place) and context[place - 1 - match] == text[-1 - match]:
                match += 1
            if match > longest:
                best, longest = place, match
            if match == self._limit:
                break
            if (earlier := self._earlier.get(place)) is None:
                break
            place = earlier
        return best, longest
