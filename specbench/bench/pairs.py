"""One prompt decoded in turns, with a drafter and plainly: how much faster, how sure that is, and what explains it.

The unit of the interval is a repeat of this one prompt. It says nothing about other prompts: a sweep does. What a
single generation tells without a plain one beside it, ``predict`` says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

from specbench.base.record import Json, to_dict
from specbench.decoding.clocks import Clock, WallClock
from specbench.decoding.metrics import time_split, tokens_per_second, tokens_per_step
from specbench.policies.costs import MeasuredCosts
from specbench.results.advice import disturbed, during
from specbench.results.load import LoadSnapshot, load_snapshot
from specbench.results.run import RunWarning

if TYPE_CHECKING:
    from specbench.decoding.records import Generation, Step

LEAST, MOST = 3, 12
"""Pairs of generations, if nobody asks for a number."""

ENOUGH_S = 10.0
"""Beyond the fewest, pairs are added as long as all of them together take no longer."""

_TOLERANCE = 1.05
_UNUSUAL = 1.25
_FEWEST_STEPS = 8
"""Fewer say nothing about the usual one."""


class Pairs:
    """Decodes with the drafter and plainly, in the order ABBA so that drift hits both alike, until there is enough.

    Args:
        decode: Decodes the prompt once, plainly if told so. Whatever it raises goes through; what is measured stays.
        repeats: Number of pairs; ``None`` for 3, and more while they are short.
        clock: Times the pairs as a whole.
        snapshot: Looks at the machine before and behind each generation.

    Attributes:
        speculative, plain: The finished generations; pair i is made of the i-th of each.
    """

    def __init__(
        self,
        decode: Callable[[bool], Generation],
        repeats: int | None = None,
        *,
        clock: Clock | None = None,
        snapshot: Callable[[], LoadSnapshot] = load_snapshot,
    ) -> None:
        self.speculative: list[Generation] = []
        self.plain: list[Generation] = []
        self._decode, self._repeats = decode, repeats
        self._clock, self._snapshot = clock or WallClock(), snapshot
        self._disturbances: Counter[str] = Counter()
        self._fastest_mhz = 0.0

    def measure(self) -> None:
        """Decode until there is enough."""
        began = self._clock.now()
        while not self._enough(self._clock.now() - began):
            # What comes first in a pair comes second in the next one.
            plain_first = len(self.plain) % 2 == 1
            for plain in (plain_first, not plain_first):
                before = self._snapshot()
                self._fastest_mhz = max(self._fastest_mhz, before.frequency_mhz or 0.0)
                (self.plain if plain else self.speculative).append(self._decode(plain))
                found = during(before, self._snapshot(), self._fastest_mhz or None)
                self._disturbances.update({warning.id for warning in found})

    def _enough(self, seconds: float) -> bool:
        pairs = min(len(self.plain), len(self.speculative))
        if self._repeats is not None:
            return pairs >= self._repeats
        return pairs >= LEAST and (pairs >= MOST or seconds * (pairs + 1) / pairs > ENOUGH_S)

    def figures(self) -> Json:
        """The comparison, ready for JSON, of the pairs that are whole; a field is ``None`` where there is too little.

        Returns:
            ``speedup``: geometric mean of the pairs' ratios of decode speeds; ``speedup_interval``: its 95% interval
            over the pairs; ``speedup_total``: the same of whole times; ``speedup_explained``: what the tokens per step
            allow, and ``explained``, how (``explain``); ``repeats``: the raw times of each pair; ``warnings``: as in
            ``run.json``.
        """
        from specbench.results.stats import geometric_mean

        pairs = list(zip(self.speculative, self.plain, strict=False))
        repeats: list[Json] = [
            {
                "first": "speculative" if number % 2 == 0 else "plain",
                "speculative": _times(fast),
                "plain": _times(slow),
                "speedup": _ratio(
                    tokens_per_second(fast.prefill, fast.steps), tokens_per_second(slow.prefill, slow.steps)
                ),
                "speedup_total": _ratio(_total_rate(fast), _total_rate(slow)),
            }
            for number, (fast, slow) in enumerate(pairs)
        ]

        def mean(name: str) -> tuple[float | None, list[float] | None]:
            ratios = [math.nan if each[name] is None else each[name] for each in repeats]
            estimate = geometric_mean(ratios, [0] * len(ratios), range(len(ratios)))
            if math.isnan(estimate.value):
                return None, None
            interval = None
            if estimate.low is not None and estimate.high is not None:
                interval = [estimate.low, estimate.high]
            return estimate.value, interval

        speedup, interval = mean("speedup")
        explanation = explain([fast for fast, _ in pairs], [slow for _, slow in pairs])
        doubt = None if explanation is None or speedup is None else unexplained(speedup, explanation)
        count = len(self.speculative) + len(self.plain)
        warnings = [*disturbed(count, self._disturbances), *([doubt] if doubt else [])]
        return {
            "speedup": speedup,
            "speedup_interval": interval,
            "speedup_total": mean("speedup_total")[0],
            "speedup_explained": explanation and explanation.usual,
            "explained": explanation and asdict(explanation),
            "repeats": repeats,
            "warnings": [to_dict(warning) for warning in warnings],
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a speedup can be, given what the steps emitted and what their passes usually took.

    Attributes:
        tokens: Emitted in a step, on average. No speedup is higher: a step holds at least one target pass.
        step: What a step usually took, in plain steps.
        drafting: The part of it that was drafting.
        usual: ``tokens / step``, E / (γ·c + v) with the costs measured here.
        lowest: The speedup if verifying n tokens took as long as n plain steps.
        plain_s: Seconds of a plain step.
        plain_steps: How many of them were timed; with none it is concluded from wider passes.
    """

    tokens: float
    step: float
    drafting: float
    usual: float
    lowest: float
    plain_s: float
    plain_steps: int


def explain(speculative: Sequence[Generation], plain: Sequence[Generation]) -> Explanation | None:
    """What explains a speedup: every step counted with the median time of those that drafted and verified as much.

    A disturbance lengthens some steps and not their median. Reading the prompt by the drafter counts as it was.

    Returns:
        ``None`` where one side has no step.
    """
    steps = [step for generation in speculative for step in generation.steps]
    one = [step.times.total_s for generation in plain for step in generation.steps]
    return _explained(steps, median(one), len(one)) if one and median(one) > 0 else None


def predict(generation: Generation) -> Explanation | None:
    """What explains the speed of a generation, without a plain one beside it.

    A plain step takes what its steps without a draft did, apart from looking for one; where there are none, what its
    wider passes let expect (``MeasuredCosts``).

    Returns:
        ``None`` of plain decoding, and with too few steps.
    """
    steps = generation.steps
    if generation.drafter == "none" or len(steps) < _FEWEST_STEPS:
        return None
    costs = MeasuredCosts()
    for step in steps:
        costs.observe(step, caught_up=True, passes=_passes(step))
    return _explained(steps, costs.verify_s(1)[1], sum(step.verified == 1 for step in steps))


def _explained(steps: Sequence[Step], plain_s: float, plain_steps: int) -> Explanation | None:
    """See ``explain``; for the last two arguments ``Explanation``."""
    tokens = tokens_per_step(steps)
    if tokens is None:
        return None
    drafting = _by_median(steps, _passes, lambda step: step.times.draft_s - step.times.draft_prefill_s)
    rest = _by_median(steps, lambda step: step.verified, lambda step: step.times.total_s - step.times.draft_s)
    prefill = sum(step.times.draft_prefill_s for step in steps)
    unit = plain_s * len(steps)
    drafts = (prefill + sum(drafting[_passes(step)] for step in steps)) / unit
    others = sum(rest[step.verified] for step in steps) / unit
    return Explanation(
        tokens=tokens,
        step=drafts + others,
        drafting=drafts,
        usual=tokens / (drafts + others),
        lowest=tokens / (drafts + sum(step.verified for step in steps) / len(steps)),
        plain_s=plain_s,
        plain_steps=plain_steps,
    )


def _passes(step: Step) -> int:
    return step.gamma if step.passes is None else step.passes


def _by_median(
    steps: Iterable[Step], kind: Callable[[Step], Hashable], seconds: Callable[[Step], float]
) -> dict[Hashable, float]:
    times: dict[Hashable, list[float]] = {}
    for step in steps:
        times.setdefault(kind(step), []).append(seconds(step))
    return {key: median(values) for key, values in times.items()}


def unexplained(speedup: float, explanation: Explanation) -> RunWarning | None:
    """A warning if tokens per step and times of passes do not explain a speedup."""
    usual = explanation.usual
    brought = f"{explanation.tokens:.2f} tokens per step"
    if speedup > explanation.tokens * _TOLERANCE:
        message = f"{speedup:.2f}× is more than {brought} can bring: plain decoding was disturbed."
    elif speedup * _TOLERANCE < explanation.lowest:
        message = (
            f"{speedup:.2f}× is less than {brought} bring however slow a pass over several tokens is: decoding with"
            " the drafter was disturbed."
        )
    elif not 1 / _UNUSUAL < speedup / usual < _UNUSUAL:
        message = (
            f"{brought} and the usual times of the passes explain {usual:.2f}×, not {speedup:.2f}×: some steps took"
            " much longer than others like them."
        )
    else:
        return None
    data = asdict(explanation) | {"speedup": speedup}
    advice = "Measure again on a quiet machine, with more --repeats."
    return RunWarning("speedup-unexplained", "warning", message, advice, data)


def _times(generation: Generation) -> Json:
    split = time_split(generation.prefill, generation.steps)
    return {
        "new_tokens": len(generation.token_ids),
        "ttft_s": split.ttft_s,
        "decode_s": split.decode_s,
        "tokens_per_second": tokens_per_second(generation.prefill, generation.steps),
    }


def _total_rate(generation: Generation) -> float | None:
    """Tokens per second from the start, prefill included."""
    split = time_split(generation.prefill, generation.steps)
    seconds = split.ttft_s + split.decode_s
    return len(generation.token_ids) / seconds if seconds else None


def _ratio(fast: float | None, slow: float | None) -> float | None:
    return fast / slow if fast and slow else None
