"""What is known of a drafter: before it has drafted, and how far into a context it can draft."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_BLIND, _SEEING = 0.02, 0.3
"""Chances of acceptance that are told apart: of a drafter that guesses, and of one that is worth asking."""

_SURE = math.log(30.0)
"""Log-likelihood ratio from which on a drafter counts as blind: some nine rejections on end."""

_ONE_PROMPT = 0.75 * _SURE
"""The most that one prompt adds to it: a text that no drafter expects is no sign of blindness."""

_REJECTED = math.log((1.0 - _BLIND) / (1.0 - _SEEING))
_ACCEPTED = math.log(_BLIND / _SEEING)

_PER_OCTAVE = 2
"""Lengths of context that are told apart while they double."""

_FORGOTTEN = 64
"""Prompts that begin where a drafter is blind, after which it is tried again."""


@dataclass(frozen=True)
class DrafterPrior:
    """What is known of a drafter before it has drafted.

    Attributes:
        reading_share: The expected time in which its model reads a prompt, over the target's.
        acceptance: The share of its first draft tokens that were accepted when it was trained, strictly between 0 and
            1; ``None`` if that is not known.
    """

    reading_share: float = 0.2
    acceptance: float | None = None


UNKNOWN_DRAFTER = DrafterPrior()


class ContextReach:
    """What is known of a drafter's first draft tokens, by length of context.

    A sequential probability ratio test (Wald 1945) for each length: a drafter is blind there once rejections are 30
    times as likely of one that guesses as of one whose tokens are accepted 3 times out of 10, in two prompts or more.
    An acceptance lowers the ratio again. Beyond a length at which it is blind it is blind too, unless it was accepted
    there.
    """

    def __init__(self) -> None:
        self._evidence: dict[int, float] = {}
        self._earlier: dict[int, float] = {}  # what was known when this prompt began
        self._begun = 0
        self._reading_s = 0.0

    def learn(self, context: int, *, accepted: bool) -> None:
        """Learn whether a first draft token, after ``context`` tokens, was accepted."""
        evidence = _known(self._evidence, context) + (_ACCEPTED if accepted else _REJECTED)
        most = max(0.0, _known(self._earlier, context)) + _ONE_PROMPT
        self._evidence[_place(context)] = min(max(evidence, _ACCEPTED), _SURE, most)

    def is_blind(self, context: int) -> bool:
        """Return whether the drafter guesses after ``context`` tokens."""
        return _known(self._evidence, context) >= _SURE

    def was_blind(self, context: int) -> bool:
        """Return whether the drafter guessed after ``context`` tokens in earlier prompts, and does still.

        What is learned within a prompt alone must not keep a drafter from being tried again there.
        """
        return _known(self._earlier, context) >= _ONE_PROMPT and self.is_blind(context)

    def begin(self, context: int) -> None:
        """Note that a prompt begins; where the drafter is blind, it is tried again after many of them."""
        if self.is_blind(context):
            self._begun += 1
        if self._begun >= _FORGOTTEN:
            self._evidence = {place: each for place, each in self._evidence.items() if each < _SURE}
            self._begun = 0
        self._earlier = dict(self._evidence)

    def time_reading(self, tokens: int, seconds: float) -> None:
        """Learn how long the drafter took to read a prompt of its own accord."""
        self._reading_s = seconds / max(1, tokens)

    def reading_s(self, tokens: int) -> float:
        """Return how long it takes to read so many tokens; 0 if it never had to."""
        return self._reading_s * tokens


def _known(evidence: Mapping[int, float], context: int) -> float:
    """Return the evidence at this length, or at the next shorter one that has any."""
    place = _place(context)
    nearest = max((each for each in evidence if each <= place), default=None)
    return 0.0 if nearest is None else evidence[nearest]


def _place(context: int) -> int:
    return int(_PER_OCTAVE * math.log2(max(1, context)))
