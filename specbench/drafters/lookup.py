"""Prompt lookup: what followed the last tokens when they stood in the prompt or the output before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbench.decoding.clocks import Clock, WallClock
from specbench.decoding.protocols import Draft, Guess
from specbench.errors import UsageError
from specbench.specs.notation import Options, join_spec

if TYPE_CHECKING:
    import torch

    from specbench.decoding.protocols import LengthPolicy
    from specbench.decoding.sampling import Randomness, Sampling

__all__ = ["LookupDrafter"]

_LONGEST = 64
"""Longer matches are not told apart."""

_INDEXED = 4
"""Suffixes up to this length are found in an index, longer ones at the places of the last so many."""

_PLACES = 32
"""Of those, so many are compared, the most recent ones."""

_WRITTEN = {"n": "n=TOKENS (or any)", "min": "min=TOKENS"}
_DEFAULTS: Mapping[str, int | str] = {"n": 3, "min": 1}
_DEFAULTS_IN_CASCADE: Mapping[str, int | str] = {"n": "any", "min": 2}


@dataclass(frozen=True, slots=True)
class _Copying:
    """A draft that is being copied: at ``position`` of the text comes what stands at ``source``.

    ``match`` tokens before them are the same.
    """

    position: int
    source: int
    match: int


def _evidence(match: int) -> float:
    return match / (match + 1)


def _token_at(place: int, context: Sequence[int], drafted: Sequence[int]) -> int:
    """The token at a place of ``context + drafted``."""
    return context[place] if place < len(context) else drafted[place - len(context)]


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
        defaults: What ``name`` leaves out, by the names of the options.

    Raises:
        UsageError: A value outside its range, or ``min_match`` above ``max_match``.
    """

    def __init__(
        self,
        max_match: int | None = 3,
        min_match: int = 1,
        clock: Clock | None = None,
        defaults: Mapping[str, int | str] = _DEFAULTS,
    ) -> None:
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
        self.epoch = 0
        self._defaults = defaults
        self._limit = max_match or _LONGEST
        self._indexed = min(self._limit, max(_INDEXED, min_match))
        self._chained = self._indexed if self._indexed < self._limit else None
        self._read = 0
        # Where the token stands that followed an n-gram most recently; and for each such place of a longest
        # indexed n-gram the one before it. Nothing follows the context's end yet: no suffix finds itself.
        self._after: dict[tuple[int, ...], int] = {}
        self._earlier: dict[int, int] = {}
        self._copying: _Copying | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, str | bool], *, in_cascade: bool = False) -> LookupDrafter:
        """Build one from the options of the command line: n (longest match, or ``any``) and min.

        Args:
            options: What was given.
            in_cascade: Whether a model drafts where this one does not: then a match has to have two tokens by default,
                and may be of any length.

        Raises:
            UsageError: An unknown option or a bad value.
        """
        given = Options("lookup", options, _WRITTEN)
        defaults = _DEFAULTS_IN_CASCADE if in_cascade else _DEFAULTS
        longest = options.get("n", defaults["n"])
        return cls(
            max_match=None if longest == "any" else given.integer("n", 3),
            min_match=given.integer("min", int(defaults["min"])),
            defaults=defaults,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def name(self) -> str:
        return join_spec("lookup", {"n": self.max_match or "any", "min": self.min_match}, self._defaults)

    def begin(self, prompt: Sequence[int]) -> None:
        self.epoch += 1
        self._read = 0
        self._after.clear()
        self._earlier.clear()
        self._copying = None

    def propose(
        self, context: Sequence[int], room: int, policy: LengthPolicy, sampling: Sampling, random: Randomness
    ) -> Draft:
        draft = Draft(prefill_s=self.read(context))
        limit = policy.begin(room)
        source, match = self._find(context, context) if limit > 0 else (None, 0)
        if source is None:
            return draft
        # If the drafts before it are right, a token follows a match that is longer by as many.
        draft.evidence = [_evidence(n) for n in range(match, match + limit)]
        while len(draft.tokens) < limit and policy.another(draft):
            draft.tokens.append(_token_at(source + len(draft.tokens), context, draft.tokens))
        return draft

    def read(self, context: Sequence[int]) -> float:
        first = self._read == 0
        began = self._clock.now()
        self._index(context)
        self._copying = None
        return self._clock.now() - began if first else 0.0

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> Guess | None:
        """Go on copying; behind a token that another drafted, look for a match anew, with the drafts as its end."""
        position = len(context) + len(drafted)
        copying = self._copying
        if copying is None or copying.position != position:
            source, match = self._find(context, [*context[-_LONGEST:], *drafted] if drafted else context)
            if source is None:
                return None
            copying = _Copying(position, source, match)
        token = _token_at(copying.source, context, drafted)
        self._copying = _Copying(position + 1, copying.source + 1, copying.match + 1)
        return Guess(token, _evidence(copying.match))

    def _index(self, context: Sequence[int]) -> None:
        """Index the n-grams in front of every token that was not read yet."""
        for i in range(self._read, len(context)):
            for n in range(self.min_match, min(self._indexed, i) + 1):
                ngram = tuple(context[i - n : i])
                if n == self._chained and ngram in self._after:
                    self._earlier[i] = self._after[ngram]
                self._after[ngram] = i
        self._read = len(context)

    def _find(self, context: Sequence[int], text: Sequence[int]) -> tuple[int | None, int]:
        """The place in the context from which to copy, just behind the longest match, and the match's length in tokens.

        ``text`` is what the match is for: the context, or the end of it and drafts that continue it.
        """
        for n in range(min(self._indexed, len(text)), self.min_match - 1, -1):
            place = self._after.get(tuple(text[len(text) - n :]))
            if place is not None:
                return self._longest(context, text, place) if n == self._chained else (place, n)
        return None, 0

    def _longest(
        self, context: Sequence[int], text: Sequence[int], place: int | None
    ) -> tuple[int | None, int]:
        """Of the places where the longest indexed suffix was, the one that matches furthest back, and how far."""
        best, longest = place, 0
        for _ in range(_PLACES):
            if place is None:
                break
            match = self._indexed
            while match < min(self._limit, place) and context[place - 1 - match] == text[-1 - match]:
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
