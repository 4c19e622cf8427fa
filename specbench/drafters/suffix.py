"""Suffix decoding: what followed the longest match of the last tokens, counted in a trie of all suffixes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from specbench.drafters.free import CandidateDrafter
from specbench.specs.drafters import Suffix

if TYPE_CHECKING:
    from specbench.decoding.clocks import Clock
    from specbench.decoding.drafts import StepOutcome

_BEST = 8
"""Continuations of one match that are told apart."""

_END = -1
"""Stands between texts in a trie that holds several."""


class _Node:
    """A string that stood in the text twice or more.

    Attributes:
        count: How often.
        next: By token that followed it the longer string's node, or the place of that token where it followed once.
        total: How often it was followed by anything.
        best: The most frequent of these tokens, of equals the last seen first; at most ``_BEST``.
    """

    __slots__ = ("best", "count", "next", "total")

    def __init__(self) -> None:
        self.count = self.total = 0
        self.next: dict[int, _Place] = {}
        self.best: list[int] = []

    def count_of(self, token: int) -> int:
        """How often a token followed that did."""
        child = self.next[token]
        return 1 if isinstance(child, int) else child.count

    def followed_by(self, token: int, child: _Place) -> None:
        """Count a token that followed, which is now at ``child``."""
        self.next[token] = child
        self.total += 1
        best, count = self.best, self.count_of(token)
        if token in best:
            place = best.index(token)
        elif len(best) < _BEST:
            place = len(best)
            best.append(token)
        elif count >= self.count_of(best[-1]):
            place = _BEST - 1
        else:
            return
        while place and count >= self.count_of(best[place - 1]):
            best[place] = best[place - 1]
            place -= 1
        best[place] = token


_Place: TypeAlias = "_Node | int"
"""Where a string ends: its node, or where its last token stands in the text if that is the only time."""


class SuffixTrie:
    """Counts of what followed every string of up to ``longest`` tokens, for one text or several.

    A string that was seen once is no more than a place in the text: it gets a node when it comes again. So a token
    takes a step for each length up to that of the longest match behind it, and memory grows by what repeats.

    Args:
        longest: In tokens, at least 1.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._root = _Node()
        self._text: list[int] = []
        self._matches: list[
            _Node
        ] = []  # of the text's end, by length from 1: those that stood before as well

    def extend(self, tokens: Iterable[int]) -> None:
        """Go on with the text."""
        for token in tokens:
            place = len(self._text)
            self._text.append(token)
            matches: list[_Node] = []
            for length, node in enumerate((self._root, *self._matches), start=1):
                child = node.next.get(token, place)
                if isinstance(child, int) and child != place:  # it was there once: now it needs a node
                    child = self._unfolded(child, counts=length <= self.longest)
                if not isinstance(child, int):
                    child.count += 1
                    if length <= self.longest:
                        matches.append(child)
                node.followed_by(token, child)
            self._matches = matches

    def _unfolded(self, place: int, *, counts: bool) -> _Node:
        """The node of a string that was seen once, and ended at ``place``."""
        node = _Node()
        node.count = 1
        if counts and self._text[place + 1] != _END:
            node.followed_by(self._text[place + 1], place + 1)
        return node

    def end(self) -> None:
        """The text ends here, and another one begins: no string spans both."""
        self._text.append(_END)
        self._matches = []

    def match(self, tail: Sequence[int], shortest: int = 1) -> tuple[int, Mapping[int, tuple[int, int]]]:
        """The longest end of ``tail`` that was followed by anything.

        Args:
            tail: Tokens; they need not be those of the text's end.
            shortest: No shorter ones, 1 or more.

        Returns:
            Its length, 0 without any; and by token that followed, the most frequent first, how often it did and how
            often anything did.
        """
        for length in range(min(self.longest, len(tail)), shortest - 1, -1):
            place = self._find(tail[len(tail) - length :])
            if isinstance(place, int):
                if place + 1 < len(self._text) and self._text[place + 1] != _END:
                    return length, {self._text[place + 1]: (1, 1)}
            elif place is not None and place.best:
                return length, {token: (place.count_of(token), place.total) for token in place.best}
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

    The match is looked for in the prompt and the output, and if asked in earlier outputs too, the longer one of both
    counting. A token that followed it c of n times has the chance c/(n + 1/m) behind a match of m tokens: the longer
    the match, the less a sight of something else is allowed for. That tells better than c/n what is accepted
    (docs/log.md).

    Work per token is bounded by the longest match that is looked for, and does not depend on the context's length.

    Args:
        spec: How long a match may be and has to be, and whether outputs are kept.
        clock: Times the reading of the prompt.
    """

    def __init__(self, spec: Suffix | None = None, clock: Clock | None = None) -> None:
        self.spec = spec or Suffix()
        super().__init__(self.spec, clock)
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
        m, found = self._trie.match(tail, self.spec.min)
        if self.spec.keep:
            earlier, known = self._past.match(tail, max(self.spec.min, m + 1))
            m, found = (earlier, known) if known else (m, found)
        return {token: m * count / (m * total + 1) for token, (count, total) in found.items()}

    def update(self, outcome: StepOutcome) -> None:
        """New tokens are read at the next proposal; an output that is kept is counted when it has ended."""
        if self.spec.keep:
            self._output += outcome.context[len(outcome.context) - outcome.emitted :]
