"""What theory says of speculative decoding: tokens of a step, times of passes, the speedup of both, the best γ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "SLOPE",
    "PassCosts",
    "best_length",
    "expected_tokens",
    "expected_tokens_by_position",
    "interpolate",
    "never_falling",
    "predicted_speedup",
]

SLOPE = 0.02
"""By how much of v(1) another token is taken to lengthen a target pass, where nothing tells."""


def expected_tokens(alpha: float, gamma: int) -> float:
    """``(1 - α^(γ+1)) / (1 - α)``: tokens of a step with γ drafts if tests pass independently with chance α.

    Leviathan et al. 2023, equation 1.
    """
    return gamma + 1.0 if alpha >= 1.0 else (1.0 - alpha ** (gamma + 1)) / (1.0 - alpha)


def expected_tokens_by_position(rates: Iterable[float]) -> list[float]:
    """``1 + Σ_{k≤γ} Π_{i≤k} a_i`` as item γ: tokens of a step with γ drafts, from 0 to as many as there are rates.

    The same sum as equation 1 of Leviathan et al. 2023, without taking the tests to be alike.

    Args:
        rates: a_1, a_2, ..., acceptance of positions among the steps that tested it; NaN (never tested) counts as 0.
    """
    survival = tokens = 1.0
    found = [tokens]
    for rate in rates:
        survival *= 0.0 if math.isnan(rate) else rate
        tokens += survival
        found.append(tokens)
    return found


def predicted_speedup(tokens: float, passes: float, c: float, v: float = 1.0) -> float:
    """``E / (k·c + v)``: the speedup over plain decoding that the costs of the passes alone would allow.

    Leviathan et al. 2023, theorem 3.8, with v in place of their assumption that a wide pass costs as much as a narrow.

    Args:
        tokens: Expected tokens of a step, or their sum over the steps of a run, as all that follows but ``c``.
        passes: Passes of the drafter: γ where each gives a token.
        c: Time of one drafter pass over that of a target pass with one token.
        v: Time of the target pass over that of one with one token.
    """
    return tokens / (passes * c + v)


def best_length(tokens: Sequence[float], draft_s: float, verify_s: Sequence[float], least: int = 0) -> int:
    """The draft length that emits most per second, ``E(γ) / (γ·d + v(γ+1))``; of equally good ones the shortest.

    Args:
        tokens: Expected tokens of a step with γ drafts as item γ.
        draft_s: d, time of a drafter's pass.
        verify_s: v(n), time of the rest of a step that verifies n tokens, as item n, in the same unit.
        least: The shortest that is asked about.
    """
    return max(
        range(least, len(tokens)),
        key=lambda gamma: tokens[gamma] / (gamma * draft_s + verify_s[gamma + 1]),
    )


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of single passes.

    Attributes:
        target_s: Of the target, by number of tokens, ascending.
        drafter_s: Of drafting one token, by drafter.
        context: Tokens of context they were timed at; ``None`` where nobody says.
    """

    target_s: Mapping[int, float]
    drafter_s: Mapping[str, float] = field(default_factory=dict)
    context: int | None = None

    @classmethod
    def from_json(cls, costs: Mapping[str, Any]) -> PassCosts:
        """From the field ``costs`` of ``run.json``, its form checked. A drafter without a time is left out."""
        target = {int(n): float(seconds) for n, seconds in (costs.get("target_pass_s") or {}).items()}
        drafters = costs.get("drafter_pass_s") or {}
        return cls(
            dict(sorted(target.items())),
            {name: float(seconds) for name, seconds in drafters.items() if seconds is not None},
            costs.get("context_tokens"),
        )

    def to_json(self) -> dict[str, Any]:
        """What ``from_json`` takes."""
        return {
            "target_pass_s": {str(n): seconds for n, seconds in self.target_s.items()},
            "drafter_pass_s": dict(self.drafter_s),
            "context_tokens": self.context,
        }

    def target_pass_s(self, n: int) -> float:
        """Of a target's pass with ``n`` tokens: between two widths that were timed on a straight line.

        Beyond the widest it goes on along the line of the last two, never falling, or with ``SLOPE`` behind a lone one.
        """
        *_, last = self.target_s
        if n <= last:
            return interpolate(self.target_s, n)
        rise = SLOPE * self.target_s[last]
        if len(self.target_s) > 1:
            *_, before, _ = self.target_s
            rise = max(0.0, (self.target_s[last] - self.target_s[before]) / (last - before))
        return self.target_s[last] + rise * (n - last)

    def v(self, n: int) -> float:
        """v(n): time of a target's pass with ``n`` tokens over that of one with a single token."""
        return self.target_pass_s(n) / self.target_s[1]

    def c(self, drafter: str) -> float:
        """c: time of a drafter's pass over that of a target's with a single token."""
        return self.drafter_s[drafter] / self.target_s[1]


def interpolate(points: Mapping[int, float], n: int) -> float:
    """The value at ``n``, straight between neighbours and level beyond the ends; 0 without points. Keys ascend."""
    below, above = None, None
    for width, value in points.items():
        if width == n:
            return value
        if width < n:
            below = (width, value)
        else:
            above = (width, value)
            break
    if below is None or above is None:
        known = below or above
        return known[1] if known else 0.0
    return below[1] + (above[1] - below[1]) * (n - below[0]) / (above[0] - below[0])


def never_falling(seconds: Mapping[int, float]) -> dict[int, float]:
    """Times by number of tokens, ascending, in which no pass takes longer than one with more tokens.

    If it seems to, it was disturbed, as first passes often are.
    """
    least = math.inf
    found = {}
    for n in sorted(seconds, reverse=True):
        found[n] = least = min(seconds[n], least)
    return dict(reversed(found.items()))
