"""``auto``: drafts another token as long as it is likely to pay for its time (docs/draft-policies.md)."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from specbench.decoding.theory import expected_tokens_by_position
from specbench.policies.acceptance import AcceptanceEstimator
from specbench.policies.base import ChainPolicy, is_guess
from specbench.policies.costs import CostTable, MeasuredCosts, passes_of
from specbench.specs.policies import Auto

if TYPE_CHECKING:
    from specbench.decoding.drafts import Draft
    from specbench.decoding.protocols import NewPrompt
    from specbench.decoding.records import Step

TOO_SLOW_NOTE = "too_slow"
"""Noted in steps without a draft, because drafts would lose time even if every token were accepted."""

_FEW, _ENOUGH = 2, 6
"""How many timed drafts it takes to call the drafter too slow, and to trust their times."""

_DISTURBED = 2.0
"""The first timed drafts may have been disturbed: the drafter may be this many times as fast."""

_EXPLORING = 0.01
"""Probing whether drafts pay again, and timing other lengths than the best known, may lose this share of the tokens."""

_SAVED = 3.0
"""So many tokens of that are saved while drafts pay."""

_DEBT = 0.5
"""A trial can cost far more tokens than expected. No more than this is owed, or the next ones would wait too long."""

_NEW = 0.03
"""The weight of a draft in the running mean of what drafts gained less than expected."""

_FORGOTTEN = 0.98
"""How much of that mean is left after a step without a draft."""

_TIMED = 3
"""How many samples of a length it takes to know its time."""

_NEARLY_ALL = 0.8

_STEPS = 50
"""How many of the latest steps the rate is measured over."""

_PRIOR_STEPS = 3.0
"""At first the rate is only expected; that counts like this many steps."""


def best_length(chances: Sequence[float], seconds: Sequence[float], rate: float) -> tuple[int, float]:
    """Return how many more tokens to draft, and by how many output tokens that is better than none.

    The length is the j that maximizes

        (a_1 + a_1·a_2 + ... + a_1···a_j)  -  R·t_j

    The sum is how many of j tokens are expected to be accepted (Leviathan et al. 2023, equation 1, with a chance for
    each position). R·t_j is what decoding gives otherwise in the time that they take. Where R is the highest rate that
    can be reached, this choice in every step reaches it (Dinkelbach 1967).

    Args:
        chances: a_1, a_2, ...: each token's chance of acceptance if those before it are accepted.
        seconds: t_1, t_2, ...: by how much so many tokens prolong the step.
        rate: R, in tokens per second.
    """
    length, gain = 0, 0.0
    accepted, tokens = 1.0, 0.0
    for j, (chance, time) in enumerate(zip(chances, seconds, strict=True), 1):
        accepted *= chance
        tokens += accepted
        if tokens - rate * time > gain:
            length, gain = j, tokens - rate * time
    return length, gain


class AutoLength(ChainPolicy):
    """Drafts the next token if ``best_length`` is not 0, by learned acceptance and by the costs of forward passes.

    Where not even the first token pays, nothing is drafted, except to probe now and then whether drafts pay again. A
    drafter without a model needs no probes: it is asked in every step, and its token is compared even if it was not
    drafted. In a cascade a token without a forward pass is weighed against the model's pass in the same way. Where the
    costs alone say that even drafts accepted in full lose time, there are no probes either.

    Attributes:
        table: The costs, which are measured unless others take their place between prompts.
    """

    table: CostTable

    def __init__(self, spec: Auto) -> None:
        self.table = MeasuredCosts()
        super().__init__(spec)

    def begin(self, prompt: NewPrompt) -> None:
        self.table.begin(prompt)
        self._estimator = AcceptanceEstimator(prompt.drafter)
        self._steps: deque[tuple[int, int, int]] = deque(maxlen=_STEPS)  # tokens, passes, rows
        self._drawn = self._passes = _PRIOR_STEPS  # tokens of the drafter's model, and its passes for them
        self._may_lose = 0.0  # tokens, by exploring
        self._idle = 0  # steps since the drafter's last pass
        self._has_model = True
        self._draft: Draft | None = None
        self._expected = 0.0  # tokens that the step's draft is expected to gain
        self._missed, self._spread = 0.0, 1.0  # by how many tokens drafts gained less; mean and variance
        self._limit = 0
        self._may_draw = False  # whether the model may draft in this step
        self._probing = self._too_slow = self._exact = False
        self._update_rate()

    def _update_rate(self) -> None:
        """Compute what a second is worth: the tokens per second of the latest steps, at least plain decoding's."""
        table = self.table
        self._verify_s = [0.0, *(table.verify_s(n) for n in range(1, self.gamma_max + 3))]
        tokens, seconds = (_PRIOR_STEPS * each for each in self._best_step(self._estimator.next_chance()))
        for emitted, passes, rows in self._steps:
            tokens += emitted
            seconds += table.step_s(passes, rows)
        self._plain_rate = 1.0 / self._verify_s[1]
        self._rate = max(tokens / seconds, self._plain_rate)

    def _best_step(self, chance: float) -> tuple[float, float]:
        """Return expected tokens and seconds of a step of the best fixed length, with this acceptance throughout."""
        tokens = expected_tokens_by_position([chance] * self.gamma_max)
        steps = [(each, self.table.drafting_s(g) + self._verify_s[g + 1]) for g, each in enumerate(tokens)]
        return max(steps, key=lambda step: step[0] / step[1])

    # -- deciding ----------------------------------------------------------------------------------

    def begin_step(self, budget: int) -> int:
        self._draft = None
        self._estimator.begin_step()
        self._update_rate()
        self._limit = int(min(super().begin_step(budget), self.table.longest))
        self._probing = self._too_slow = self._exact = False
        self._may_draw = self._limit > 0 and (not self._has_model or self._pays(budget))
        if self._limit > 0 and not self._may_draw:
            faster = _DISTURBED if self.table.timings < _ENOUGH else 1.0
            self._too_slow = self.table.timings >= _FEW and not self._would_pay(1.0, faster)
            self._may_draw = self._probing = not self._too_slow and self._may_probe()
        elif self._limit > 0 and (length := self._trial(min(self.gamma_max, budget))) is not None:
            self._limit, self._exact = length, True
        return self._limit

    def _trial(self, most: int) -> int | None:
        """Return a draft length of at most ``most`` to time, because it may be faster than those known; or ``None``.

        These are no draft, whose time all others are weighed against, the lengths beside the usual one, if nearly all
        drafts have one length, and one where the time may jump.
        """
        table, chance = self.table, self._estimator.next_chance()
        tokens = expected_tokens_by_position([chance] * most)
        rows = Counter(rows for _, _, rows in self._steps)
        usual, count = max(rows.items(), key=lambda each: each[1], default=(1, 0))
        beside: tuple[int, ...] = (usual, usual - 2) if count >= _NEARLY_ALL * len(self._steps) else ()
        for length in (0, *beside, self._behind_a_jump(tokens)):
            if not 0 <= length <= most or table.samples(length + 1) >= _TIMED:
                continue
            step_s = table.drafting_s(length) + self._verify_s[length + 1]
            if step_s * self._rate - tokens[length] <= self._may_lose:
                return length
        return None

    def _behind_a_jump(self, tokens: Sequence[float]) -> int:
        """Return a length that was not timed, and that would be the fastest if its pass took as long as the next
        narrower one that was; -1 if there is none.

        Between two timed ones it is the middle, which tells in which half a jump lies.
        """
        found, best, beyond = -1, self._rate, 2 * len(tokens)
        for below, above in pairwise([*self.table.timed, beyond]):
            for g in range(below, min(above - 1, len(tokens))):
                rate = tokens[g] / (self.table.drafting_s(g) + self._verify_s[below])
                if rate > best:
                    found, best = g if above == beyond else (below + above) // 2 - 1, rate
        return found

    def _pays(self, budget: int) -> bool:
        """Return whether the model's first token is worth its time.

        If the drafter must read something before, the rest of the output must repay that time too. As it is paid now,
        the gain has to be likely: acceptance is taken to be a standard deviation lower than learned. The output may end
        at any token, so half of what it may still have is expected.

        Args:
            budget: The most tokens of the rest of the output.
        """
        chance = self._estimator.next_chance()
        if self._gain(0, 0, chance, chance) <= self._margin:
            return False
        if not self.table.reading_s:
            return True
        tokens, seconds = self._best_step(self._estimator.next_chance(-1.0))
        return (self._verify_s[1] - seconds / tokens) * (budget / 2) >= self.table.reading_s

    def _would_pay(self, chance: float, faster: float) -> bool:
        """Return whether any draft would be worth its time with this acceptance and so much faster a drafter."""
        table, v = self.table, self._verify_s
        lengths = range(1, self.gamma_max + 1)
        seconds = [table.drafting_s(j) / faster + v[j + 1] - v[1] for j in lengths]
        return best_length([chance] * self.gamma_max, seconds, self._plain_rate)[0] > 0

    def _may_probe(self) -> bool:
        """Return whether the model drafts a token to find out if drafts pay."""
        table, v, chance = self.table, self._verify_s, self._estimator.next_chance()
        if not table.reading_s and table.timings < _FEW:
            return True
        # The few times so far may all have been disturbed.
        due = table.timings < _ENOUGH and self._idle >= 2 ** (table.timings - _FEW)
        if due and not table.reading_s and self._would_pay(chance, _DISTURBED):
            return True
        probe_s = max(table.drafting_s(1), table.restart_s) + v[2] - v[1] + table.reading_s
        return probe_s * self._plain_rate - chance <= self._may_lose

    def should_continue(self, draft: Draft) -> bool:
        self._draft = draft
        k = len(draft.tokens)
        self._estimator.read(draft, k)
        passes = k if draft.passes is None else draft.passes
        if is_guess(draft, k):
            self._has_model = draft.passes is not None
            chance = self._estimator.guess_chance(draft)
            free = self._limit if self._has_model or not self.table.timings else 0
            return self._exact or self._gain(k, passes, chance, chance, free) > (0.0 if k else self._margin)
        if not self._may_draw or self._probing:
            return self._probing and passes == 0
        chance = self._estimator.next_chance()
        return k == 0 or self._exact or self._gain(k, passes, chance, chance, int(draft.next_is_read)) > 0.0

    def prefers_model(self, draft: Draft) -> bool:
        if not self._may_draw or self._probing or not self.table.timings:
            return False
        k, passes, read = len(draft.tokens), draft.passes or 0, int(draft.next_is_read)
        self._estimator.read(draft, k)
        matched, drawn = self._estimator.guess_chance(draft), self._estimator.next_chance()
        # After the match either the model or copies continue.
        match = max(
            self._gain(k, passes, matched, drawn, 1 + read),
            self._gain(k, passes, matched, matched, self._limit),
        )
        return self._gain(k, passes, drawn, drawn, read) > match

    def _gain(self, k: int, passes: int, chance: float, later: float, free: int = 0) -> float:
        """Return how many output tokens the best longer draft is worth more than this one.

        Args:
            k: Tokens of the draft so far.
            passes: The drafter's passes for them.
            chance: The chance that the next token is accepted if those so far are.
            later: The same of each later one.
            free: How many of the next tokens need no pass.
        """
        v, more = self._verify_s, self._limit - k
        tokens_per_pass = max(1.0, self._drawn / self._passes)
        seconds = []
        for j in range(1, more + 1):
            further = max(1.0, (j - free) / tokens_per_pass) if j > free else 0.0
            seconds.append(self.table.drafting_s(further, passes) + v[k + 1 + j] - v[k + 1])
        chances = [self._estimator.survival * chance, *[later] * (more - 1)][:more]
        gain = best_length(chances, seconds, self._rate)[1]
        if k == 0:
            self._expected = gain
        return gain

    @property
    def _margin(self) -> float:
        """The gain, in tokens, that a draft must promise: by so much, at least, drafts gained less than expected.

        Drafts are made where acceptance is overestimated rather than where it is underestimated. The mean is taken a
        standard error lower, so that luck alone stops no drafts.
        """
        return max(0.0, self._missed - math.sqrt(self._spread * _NEW / (2 - _NEW)))

    # -- learning ----------------------------------------------------------------------------------

    def observe(self, step: Step) -> None:
        passes, draft = passes_of(step), self._draft
        self.table.observe(step)
        self._estimator.learn(draft, step)
        self._steps.append((len(step.tokens), passes, step.verified))
        self._idle = 0 if passes else self._idle + 1
        self._may_lose += _EXPLORING * len(step.tokens)
        if step.drafted and not (self._probing or self._exact):
            longer_s = self.table.step_s(passes, step.verified) - self._verify_s[1]
            off = self._expected - (len(step.tokens) - 1 - self._rate * longer_s) - self._missed
            self._missed += _NEW * off
            self._spread += _NEW * (off * off - self._spread)
        else:
            self._missed *= _FORGOTTEN
        if self._probing or self._exact:
            step_s = self.table.step_s(passes, step.verified)
            if self._probing:  # its pass has read what was emitted before
                step_s = max(step_s, self.table.verify_s(step.verified) + self.table.restart_s)
            self._may_lose = max(self._may_lose - (step_s * self._rate - len(step.tokens)), -_DEBT)
        if passes:
            self._may_lose = min(self._may_lose, _SAVED)
        if passes and draft is not None:
            drawn = sum(not is_guess(draft, i) for i in range(len(draft.tokens)))
            self._drawn += drawn
            self._passes += passes
        self._draft = None

    def notes(self) -> Mapping[str, float]:
        notes = {
            "rate": self._rate,
            "survival": self._estimator.survival,
            "probe": float(self._probing),
        }
        if self._too_slow:
            notes[TOO_SLOW_NOTE] = 1.0
        if self._steps and self.table.reading_s:
            notes["reading_s"] = self.table.reading_s
        return notes
