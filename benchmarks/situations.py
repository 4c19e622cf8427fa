"""Compare the draft policy `auto` with plain decoding and with the best fixed length, in simulated situations.

    python benchmarks/situations.py                   # all, 8 minutes
    python benchmarks/situations.py --cost cliff-4    # those with one curve of the target's costs

A situation is a curve of the target's times, a course of acceptance and the drafter's times. An output has 2,000
tokens; which of them the drafter would hit is drawn once, so that every policy meets the same. Times are noisy for the
policy, and exact where speeds are compared. The first 200 tokens do not count, nor 200 after a change halfway. The best
fixed length (0 to 16) is the fastest on six other outputs: the luckiest on the same one would be faster than it can be.

Goal: no situation below 0.97 of plain decoding, or of the best fixed length. Prints those below, and one line of JSON
at the end; exit code 1 if the goal is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from specbench.decoding.drafts import Draft, Guess
from specbench.decoding.logits import Logits
from specbench.decoding.protocols import DraftPolicy, NewPrompt
from specbench.decoding.records import Step, StepTimes
from specbench.policies import build_policy

TOKENS, LEARNING = 2000, 200
GOAL = 0.97
SEEDS, OTHERS = range(1), range(1, 7)
LONGEST = 16
HIT, MISS = 0, 1


def experts(active: int, of: int) -> Callable[[int], float]:
    """Return the times of a mixture of experts: nearly all of a pass is reading those that its tokens choose."""
    return lambda n: 0.2 + 0.8 * (1.0 - (1.0 - active / of) ** n) * of / active


COSTS: Mapping[str, Callable[[int], float]] = {
    "flat": lambda n: 1.0,
    "gentle": lambda n: 1.0 + 0.02 * (n - 1),
    "linear": lambda n: 1.0 + 0.1 * (n - 1),
    "steep": lambda n: 1.0 + 0.3 * (n - 1),
    "dear-second": lambda n: 1.0 if n == 1 else 1.6,
    "cliff-2": lambda n: 1.0 if n <= 2 else 1.8,
    "cliff-4": lambda n: 1.0 if n <= 4 else 1.8,
    "cliff-8": lambda n: 1.0 if n <= 8 else 1.8,
    "high-cliff-4": lambda n: 1.0 if n <= 4 else 3.0,
    "stairs": lambda n: 1.0 + 0.5 * ((n - 1) // 4),
    "experts-8-of-128": experts(8, 128),
    "experts-2-of-8": experts(2, 8),
    "noisy": lambda n: 1.0 + 0.02 * (n - 1),
}
"""Seconds of the target's pass over n tokens."""

ACCEPTANCE: Mapping[str, Callable[[int], float]] = {
    "0": lambda i: 0.0,
    "0.3": lambda i: 0.3,
    "0.7": lambda i: 0.7,
    "0.95": lambda i: 0.95,
    "falls": lambda i: 0.9 if i < TOKENS // 2 else 0.05,
    "rises": lambda i: 0.05 if i < TOKENS // 2 else 0.9,
    "period-40": lambda i: 0.95 if i // 20 % 2 else 0.2,
    "period-400": lambda i: 0.95 if i // 200 % 2 else 0.2,
}
"""The chance that the drafter hits token i of the output."""

DRAFTERS: Mapping[str, Callable[[int, int], float]] = {
    "lookup": lambda g, i: 0.0,
    "0.02": lambda g, i: 0.02 * g,
    "0.1": lambda g, i: 0.1 * g,
    "0.3": lambda g, i: 0.3 * g,
    "0.8": lambda g, i: 0.8 * g,
    "dear-first": lambda g, i: 0.05 * g + (0.4 if g else 0.0),
    "slowed": lambda g, i: (0.05 if i < TOKENS // 2 else 1.5) * g,
}
"""Seconds of a draft of g tokens at token i of the output; "lookup" has no model."""


class Sure(Logits):
    """Logits of a drafter that gives its tokens this probability."""

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def log_chance(self, token: int) -> float:  # noqa: ARG002
        return math.log(self.probability)


@dataclass(frozen=True)
class Situation:
    """Names of a curve of the target's times, a course of acceptance, and a drafter."""

    cost: str
    acceptance: str
    drafter: str

    def __str__(self) -> str:
        return f"{self.cost}, {self.acceptance}, {self.drafter}"

    def counts(self, token: int) -> bool:
        """Return whether speed is measured at this token."""
        changes = self.acceptance in ("falls", "rises") or self.drafter == "slowed"
        return token >= LEARNING + (TOKENS // 2 if changes else 0)

    def decode(self, policy: DraftPolicy, seed: int) -> Iterator[tuple[int, int, int, float]]:
        """Decode an output; yield by step its first token, its draft length, its tokens and its exact seconds."""
        hit, noise = self.hits(seed), random.Random(seed)
        wide, disturbed = (0.2, 0.05) if self.cost == "noisy" else (0.05, 0.02)

        def noisy(seconds: float) -> float:
            return seconds * math.exp(noise.gauss(0.0, wide)) * (3.0 if noise.random() < disturbed else 1.0)

        policy.begin(NewPrompt())
        start, index = 0, 0
        while start < TOKENS:
            gamma = draft_length(policy, self.drafter != "lookup")
            accepted = next((i for i in range(gamma) if not hit[start + i]), gamma)
            draft_s, verify_s = DRAFTERS[self.drafter](gamma, start), COSTS[self.cost](gamma + 1)
            policy.observe(
                Step(
                    index=index, position=start, drafted=(HIT,) * gamma, accepted=accepted,
                    tested=min(gamma, accepted + 1),
                    tokens=tuple(HIT if each else MISS for each in hit[start : start + accepted + 1]),
                    closing="corrected" if accepted < gamma else "bonus" if gamma else "target",
                    expected_acceptance=(), times=StepTimes(draft_s=noisy(draft_s), verify_s=noisy(verify_s)),
                )
            )  # fmt: skip
            yield start, gamma, accepted + 1, draft_s + verify_s
            start, index = start + accepted + 1, index + 1

    def hits(self, seed: int) -> list[bool]:
        """Return which tokens of an output the drafter hits."""
        draws = random.Random(-1 - seed)
        return [draws.random() < ACCEPTANCE[self.acceptance](i) for i in range(TOKENS + 2 * LONGEST)]

    def fixed(self, gamma: int, seed: int) -> Iterator[tuple[int, int, int, float]]:
        """Do the same with a fixed length."""
        hit, start, verify_s = self.hits(seed), 0, COSTS[self.cost](gamma + 1)
        while start < TOKENS:
            accepted = next((i for i in range(gamma) if not hit[start + i]), gamma)
            yield start, gamma, accepted + 1, DRAFTERS[self.drafter](gamma, start) + verify_s
            start += accepted + 1

    def rate(self, steps: Iterable[tuple[int, int, int, float]]) -> float:
        """Return the tokens per second of the steps that count."""
        counted = [(tokens, seconds) for start, _, tokens, seconds in steps if self.counts(start)]
        return sum(tokens for tokens, _ in counted) / sum(seconds for _, seconds in counted)

    def shares(self) -> tuple[float, float]:
        """Return the speed of `auto` over that of plain decoding, and over that of the best fixed length."""

        def speed(gamma: int, seeds: range) -> float:
            return sum(self.rate(self.fixed(gamma, seed)) for seed in seeds)

        best = max(range(LONGEST + 1), key=lambda gamma: speed(gamma, OTHERS))
        plain, fixed = speed(0, SEEDS), speed(best, SEEDS)
        reached = sum(self.rate(self.decode(build_policy("auto"), seed)) for seed in SEEDS)
        return reached / plain, reached / max(plain, fixed)


def draft_length(policy: DraftPolicy, has_model: bool = True) -> int:
    """Return how many tokens a policy drafts in a step, of a drafter that is equally sure of all."""
    limit = policy.begin_step(50)
    draft = Draft() if has_model else Draft(guess=Guess(HIT, 0.7))
    while len(draft.tokens) < limit and policy.expand(draft):
        draft.tokens.append(HIT)
        draft.sources.append(Sure(0.7) if has_model else Guess(HIT, 0.7))
    if len(draft.tokens) == limit:
        draft.guess = None
    return len(draft.tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cost", choices=[*COSTS], nargs="+", default=[*COSTS], help="curves of the target's times"
    )
    given = parser.parse_args(arguments)
    found: list[tuple[float, float]] = []
    for names in itertools.product(given.cost, ACCEPTANCE, DRAFTERS):
        situation = Situation(*names)
        of_plain, of_best = situation.shares()
        found.append((of_plain, of_best))
        if of_best < GOAL:
            print(f"{of_plain:.3f} of plain, {of_best:.3f} of the best fixed length: {situation}", flush=True)
    plain, best = zip(*found, strict=True)
    result = {
        "benchmark": "situations",
        "situations": len(found),
        "below_plain": sum(each < GOAL for each in plain),
        "below_best": sum(each < GOAL for each in best),
        "worst_of_plain": round(min(plain), 3),
        "worst_of_best": round(min(best), 3),
    }
    print(json.dumps(result))
    return int(min(best) < GOAL)


if __name__ == "__main__":
    sys.exit(main())
