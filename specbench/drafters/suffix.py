"""Suffix decoding: what followed the longest match of the last tokens, counted in a trie of all suffixes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from typing import TYPE_CHECKING, Any, TypeAlias

from specbench.drafters.free import CandidateDrafter
from specbench.specs.drafters import Suffix

if TYPE_CHECKING:
    from specbench.decoding.drafts import StepOutcome

_BEST = 8
"""Continuations kept per match."""

_END = -1
"""Separates texts in a trie."""


class _Node:
    """A string that occurred twice or more.

    Attributes:
        count: Its occurrences.
        next: For each following token, in the order last seen, the longer string's node, or the token's place if it
            followed once.
        total: Occurrences with a following token.
    """

    __slots__ = ("count", "next", "total")

    def __init__(self) -> None:
        self.count = self.total = 0
        self.next: dict[int, _Place] = {}

    def count_of(self, token: int) -> int:
        """Return how often a token followed."""
        child = self.next[token]
        return 1 if isinstance(child, int) else child.count

    def followed_by(self, token: int, child: _Place) -> None:
        """Count a following token, now at ``child``."""
        self.next.pop(token, None)
        self.next[token] = child
        self.total += 1

    def best(self) -> list[int]:
        """Return the most frequent following tokens, the last seen first where equally frequent."""
        return nlargest(_BEST, reversed(self.next), key=self.count_of)


_Place: TypeAlias = "_Node | int"
"""A string's node, or the place of its last token if it occurred once."""


class SuffixTrie:
    """Counts of what followed every string of up to ``longest`` tokens, for one text or several.

    A string that occurred once is only a place in the text, and gets a node when it occurs again, so memory grows with
    repetitions only.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._root = _Node()
        self._text: list[int] = []
        # Of the text's end, by length from 1: those that stood before as well.
        self._matches: list[_Node] = []

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            place = len(self._text)
            self._text.append(token)
            matches: list[_Node] = []
            for length, node in enumerate((self._root, *self._matches), start=1):
                child = node.next.get(token, place)
                if isinstance(child, int) and child != place:  # its second occurrence: now it needs a node
                    child = self._unfolded(child, counts=length <= self.longest)
                if not isinstance(child, int):
                    child.count += 1
                    if length <= self.longest:
                        matches.append(child)
                node.followed_by(token, child)
            self._matches = matches

    def _unfolded(self, place: int, *, counts: bool) -> _Node:
        """Make the node of a string that occurred once and ended at ``place``."""
        node = _Node()
        node.count = 1
        if counts and self._text[place + 1] != _END:
            node.followed_by(self._text[place + 1], place + 1)
        return node

    def end(self) -> None:
        """End the text; no string spans it and the next one."""
        self._text.append(_END)
        self._matches = []

    def match(self, tail: Sequence[int], shortest: int = 1) -> tuple[int, Mapping[int, tuple[int, int]]]:
        """Find the longest end of ``tail``, of at least ``shortest`` tokens, that was followed by a token.

        Returns:
            Its length, or 0; and by following token, the most frequent first, its count and the count of all.
        """
        for length in range(min(self.longest, len(tail)), shortest - 1, -1):
            place = self._find(tail[len(tail) - length :])
            if isinstance(place, int):
                if place + 1 < len(self._text) and self._text[place + 1] != _END:
                    return length, {self._text[place + 1]: (1, 1)}
            elif place is not None and place.next:
                return length, {token: (place.count_of(token), place.total) for token in place.best()}
        return 0, {}

    def _find(self, string: Sequence[int]) -> _Place | None:
        node = self._root
        for i, token in enumerate(string, start=1):
            child = node.next.get(token)
            if child is None:
                return None
            if isinstance(child, int):
                end = child + len(string) - i
                return end if self._text[child + 1 : end + 1] == [*string[i:]] else None
            node = child
        return node


class SuffixDrafter(CandidateDrafter):
    """Drafts what most often followed the longest match of the last tokens (Oliaro et al. 2024, SuffixDecoding).

    Matches are searched in prompt and output, and optionally in earlier outputs; the longer one counts. A token that
    followed c of n times has the chance c/(n + 1/m) after a match of m tokens, which predicts acceptance better than
    c/n. Work per token does not depend on the context's length.

    Args:
        spec: The shortest and longest match, and whether outputs are kept.
    """

    def __init__(self, spec: Suffix | None = None, target: Any = None) -> None:
        self.spec = spec or Suffix()
        super().__init__(self.spec, target)
        self._trie = SuffixTrie(self.spec.n)
        self._past = SuffixTrie(self.spec.n)
        self._output: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._trie = SuffixTrie(self.spec.n)
        if self._output:
            self._past.extend(self._output)
            self._past.end()
            self._output = []

    def take_in(self, context: Sequence[int], first: int) -> None:
        self._trie.extend(context[first:])

    def candidates(self, context: Sequence[int], drafted: Sequence[int]) -> Mapping[int, float]:
        tail = [*context[-self.spec.n :], *drafted][-self.spec.n :]
        m, counts = self._trie.match(tail, self.spec.min)
        if self.spec.keep:
            earlier, known = self._past.match(tail, max(self.spec.min, m + 1))
            m, counts = (earlier, known) if known else (m, counts)
        return {token: m * count / (m * total + 1) for token, (count, total) in counts.items()}

    def update(self, outcome: StepOutcome) -> None:
        """Keep the output, which is counted when it has ended; new tokens are read at the next proposal."""
        if self.spec.keep:
            self._output += outcome.context[len(outcome.context) - outcome.emitted :]
