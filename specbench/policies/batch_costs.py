"""What forward passes cost that several requests share, and one request's part of that (docs/requests.md)."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

from specbench.base.record import Json
from specbench.decoding.theory import SLOPE
from specbench.policies.auto import TIMINGS, AutoLength
from specbench.policies.costs import (
    ASSUMED_C,
    FIRST_REACH,
    LATEST_PASSES,
    CostSource,
    GivenCosts,
    costs_to_dict,
)
from specbench.policies.width_times import INSTANT, WidthTimes

if TYPE_CHECKING:
    from specbench.decoding.records import SharedPass, Step
    from specbench.decoding.request import DraftPlan

_CATCHING_UP = 8
"""A request with more new tokens than this, besides its drafts, reads a prompt."""

_MEMORY = 0.98
"""The weight of a round or step over that of the next one."""

_PRIOR_STEPS = 3.0
"""How many steps of one token a request is assumed to have had."""

_DRAFTS = 4 * LATEST_PASSES
"""How many of each drafter's latest passes are kept."""

_PLAIN = 64
"""Every this many rounds no request drafts, so that the time of a plain pass stays known."""

_SCOUTED = 3
"""Passes with drafts of one request that are timed before all may draft; the median of fewer may be disturbed."""

_OLD = 128
"""Rounds after which times of passes with drafts expire: a disturbed machine may have made drafts look too slow, and
without drafts nothing corrects that."""

_RELEARNING = 0.015
"""The share of the time of plain rounds since then that reading a context to measure again may take."""


class _DraftPass(NamedTuple):
    """A pass of a drafter's model.

    Attributes:
        seconds: Its duration.
        requests: How many requests drafted in it.
        before: How many passes the model had run before in this round.
        round: Its round.
        scouted: Whether one request drafted before all may.
    """

    seconds: float
    requests: int
    before: int
    round: int
    scouted: bool


class BatchCosts:
    """The times of the forward passes that a scheduler's requests share.

    A pass with drafts takes longer than a plain one by more than its rows, as requests with equally many rows attend in
    one call. So plain passes are timed by number of requests, and passes with drafts by number of rows.

    Attributes:
        rows: Rows of the target's last pass: one per request and one per draft token.
        requests: Requests in it.
        drafters: Requests in it with drafts.
        rounds: Passes of the target so far.
        plain_s: Seconds of passes without drafts, by requests.
        drafted_s: Seconds of passes with drafts, by rows.
    """

    def __init__(self) -> None:
        self.rows = self.requests = 1
        self.drafters = self.rounds = 0
        self.plain_s, self.drafted_s = WidthTimes(first=None), WidthTimes(first=None)
        self._rounds = self._lasted = 0.0  # of the latest ones: how many, and how long, in plain rounds
        self._drafts: WeakKeyDictionary[object, deque[_DraftPass]] = WeakKeyDictionary()
        self._readings: WeakKeyDictionary[object, deque[float]] = WeakKeyDictionary()  # seconds per token
        self._in_round: Counter[object] = Counter()  # by model
        self._scout: ReferenceType[object] | None = None
        self._scouting = 0  # in which round its last step ended, or it became it
        self._test_round = -1  # the round in which everybody may
        self._forgot = False  # whether a drafter's passes were known before
        self._asked_at = 0  # the round of a drafter's last pass
        self._known: dict[int, float] = {}  # of the target's passes, by rows, until there is another one

    def observe(self, made: SharedPass) -> None:
        """Learn from the time of a shared forward pass."""
        requests = len(made.requests)
        reading = any(
            fed - drafted > _CATCHING_UP for fed, drafted in zip(made.fed, made.drafted, strict=True)
        )
        if made.target:
            self._known.clear()
            self.rounds += 1
            self._in_round.clear()
            self.rows, self.requests = requests + sum(made.drafted) if reading else sum(made.fed), requests
            self.drafters = sum(each > 0 for each in made.drafted)
            if not reading:
                self._timed(made.seconds)
            self._forget()
            if self._timed_any:
                self._rounds = _MEMORY * self._rounds + 1.0
                self._lasted = _MEMORY * self._lasted + self._in_plain_rounds(self.target_s(self.rows))
        elif reading:
            readings = self._readings.setdefault(made.model, deque(maxlen=LATEST_PASSES))
            readings.append(made.seconds / sum(made.fed))
        else:
            passes = self._drafts.setdefault(made.model, deque(maxlen=_DRAFTS))
            scouted = self.drafted_s.count < _SCOUTED
            passes.append(
                _DraftPass(made.seconds, requests, self._in_round[made.model], self.rounds, scouted)
            )
            self._in_round[made.model] += 1
            self._asked_at = self.rounds
            if self._timed_any:
                self._lasted += self._in_plain_rounds(median_low(each.seconds for each in passes))

    def _forget(self) -> None:
        """Drop what was learned of drafts long ago: they are then tried again, by one request first."""
        self.drafted_s.forget(self.rounds - _OLD)
        for passes in self._drafts.values():
            while passes and passes[0].round < self.rounds - _OLD:
                passes.popleft()
                self._forgot = True

    def affords(self, reading_s: float) -> bool:
        """Return whether a context may be read for so long to measure drafts: always the first time, then if enough
        time has passed."""
        since = self.rounds - self._asked_at
        return not self._forgot or reading_s <= _RELEARNING * since * self.target_s(self.requests)

    def _timed(self, seconds: float) -> None:
        """Record the time of the target's last pass, in which no prompt was read."""
        if self.rows == self.requests:
            self.plain_s.add(self.requests, seconds)
            return
        # A number of rows hardly ever repeats: those within half a row per request count as one.
        self.drafted_s.add(self.rows, seconds, max(1, self.requests // 2), self.rounds)

    def target_s(self, rows: int) -> float:
        """Return the seconds of a pass of the last one's requests over that many rows; 1 row takes 1 before any."""
        if rows not in self._known:
            self._known[rows] = self._target_s(rows)
        return self._known[rows]

    def _target_s(self, rows: int) -> float:
        if not self.plain_s.any:
            return self.drafted_s(rows)
        plain = self.plain_s(self.requests)
        if rows <= self.requests:
            return plain
        if not self.drafted_s.any:
            return plain * (1 + SLOPE * (rows - self.requests))
        widest = self.drafted_s.widest
        if len(self.drafted_s.seen) > 1 or not self.requests < widest < rows:
            return max(plain, self.drafted_s(rows))
        # The unevenness is not yet known from the time of a row: the row is assumed to take it all.
        known = max(plain, self.drafted_s(widest))
        return known + (known - plain) / (widest - self.requests) * (rows - widest)

    @property
    def uneven_s(self) -> float:
        """By how much more than its row the first draft token prolongs a pass of the last one's requests."""
        alone, first, second = (self.target_s(self.requests + drafts) for drafts in range(3))
        return max(0.0, first - alone - (second - first))

    @property
    def _timed_any(self) -> bool:
        return self.plain_s.any or self.drafted_s.any

    def _in_plain_rounds(self, seconds: float) -> float:
        return seconds / self.target_s(self.requests)

    @property
    def stretch(self) -> float:
        """The mean duration of rounds over that of a plain one; older rounds weigh less."""
        return self._lasted / self._rounds if self._rounds else 1.0

    @property
    def plain(self) -> bool:
        """Whether no request drafts in this round: the cost of more rows is only known next to a pass without any."""
        return not self.plain_s.any or self.rounds % _PLAIN == 0

    def drafts(self, model: object) -> Sequence[_DraftPass]:
        """Return the latest passes of a drafter's model."""
        return self._drafts.get(model, ())

    def read_s(self, model: object) -> float:
        """Return a drafter's seconds per token of a long context; 0 before it has read one."""
        readings = self._readings.get(model)
        return median_low(readings) if readings else 0.0

    def may_scout(self, request: object) -> bool:
        """Return whether a request may draft while its cost is unknown: one at a time may.

        One that has not finished a step for long has ended or waits, and another takes its place.
        """
        if self._scout is None or self._scout() is None or self.rounds - self._scouting > _PLAIN:
            self._scout, self._scouting = ref(request), self.rounds
        return self._scout() is request

    def finished_step(self, request: object) -> None:
        """Note that a request has finished a step."""
        if self._scout is not None and self._scout() is request:
            self._scouting = self.rounds

    def may_test(self, due: bool) -> bool:
        """Return whether requests that draft nothing may test in this round if it pays again: all of them, or none.

        A pass costs about the same for one as for all, and each pays its share.

        Args:
            due: One of them has saved enough; all test in the next round.
        """
        now = self._test_round == self.rounds
        if due and not now:
            self._test_round = self.rounds + 1
        return now


class RequestCosts(CostSource):
    """One request's part of the costs of a batch.

    With V(N) the time of the target's pass over N rows, B requests in it and o rows of the others, n rows cost

        v(n) = V(B) / B + V(o + n) - V(o + 1)

    its share of a plain pass, and the time by which its additional rows delay all. The requests that draft share
    equally what a pass with drafts takes beyond its rows. A drafter's pass is shared by those who draft in it; later
    passes of a round have fewer.

    The value of time maximizes the mean of log(t_i / T), with t_i tokens of each request in a round of T seconds
    (proportional fairness: Kelly 1997): a draft kept with probability P adds P / t for a request of t tokens, and a
    round longer by x subtracts x / T for each of the B. So it pays iff P > R·x with

        R = B·t / T

    which for one request is its tokens per second. R is never below B / V(B), plain decoding: where all draft too much
    T is long, and a row would seem to prolong it by little.

    Args:
        batch_costs: The batch.
        models: Run the passes of this request's drafter; none for one without a model.
        prompt: How many tokens the drafter has to read before it can draft.
    """

    def __init__(self, batch_costs: BatchCosts, models: Sequence[object], prompt: int = 0) -> None:
        self._load, self._models, self._prompt = batch_costs, models, prompt
        self.reset()

    def reset(self) -> None:
        self._rows, self._longest = 1, 0
        self._unread = self._prompt
        self._steps = self._tokens = _PRIOR_STEPS

    @property
    def _passes(self) -> list[_DraftPass]:
        return [each for model in self._models for each in self._load.drafts(model)]

    @property
    def timings(self) -> float:
        if not self._models:
            return math.inf
        return len(self._passes) if self._is_known else 0

    def next_draft_s(self, passes: int) -> float:
        if not self._models:
            return 0.0
        latest = self._passes
        if not latest:
            return ASSUMED_C * self.verify_s(1)[1]
        if all(each.scouted for each in latest):  # all would take part
            latest = [each._replace(requests=max(each.requests, self._load.requests)) for each in latest]
        else:
            latest = [each for each in latest if not each.scouted]
        # After the longest drafts seen, as many requests are assumed to draft as at their end.
        longest = max(each.before for each in latest)
        place = min((each.before for each in latest if each.before >= passes), default=longest)
        alike = [each for each in latest if each.before == place][-LATEST_PASSES:]
        return median_low(each.seconds / each.requests for each in alike)

    @property
    def reach(self) -> float:
        if self._load.plain:
            return 0
        if not self._is_known and not (self._load.affords(self.catching_up_s) and self._load.may_scout(self)):
            return 0
        return max(FIRST_REACH, 2 * self._longest) if self.timings else FIRST_REACH

    @property
    def _is_known(self) -> bool:
        return not self._models or (len(self._passes) >= TIMINGS and self._load.drafted_s.count >= _SCOUTED)

    @property
    def catching_up_s(self) -> float:
        if self._unread <= _CATCHING_UP:
            return 0.0
        return self._unread * sum(map(self._load.read_s, self._models))

    def samples(self, n: int) -> float:  # noqa: ARG002
        return math.inf  # widths differ by the others' rows

    def verify_s(self, widest: int) -> Sequence[float]:
        batch_costs = self._load
        others = max(0, batch_costs.rows - self._rows)
        alone = batch_costs.target_s(batch_costs.requests) / batch_costs.requests
        base = alone - batch_costs.target_s(others + 1)
        if others >= batch_costs.requests:
            base += batch_costs.uneven_s / (max(0, batch_costs.drafters - (self._rows > 1)) + 1)
        seconds = [max(base + batch_costs.target_s(others + n), INSTANT) for n in range(2, widest + 1)]
        return [0.0, alone, *seconds]

    def rate(self, reached: float, plain: float) -> float:  # noqa: ARG002
        return plain * max(1.0, self._tokens / self._steps / self._load.stretch)

    def may_test(self, due: bool) -> bool:
        return self._load.may_test(due) and (due or not self.catching_up_s)

    def observe(
        self,
        step: Step,
        caught_up: bool,  # noqa: ARG002
        passes: int | None = None,
    ) -> None:
        self._steps = _MEMORY * self._steps + 1.0
        self._tokens = _MEMORY * self._tokens + len(step.tokens)
        self._rows = step.verified
        self._longest = max(self._longest, step.verified - 1)
        self._unread = 0 if (step.gamma if passes is None else passes) else self._unread + len(step.tokens)
        self._load.finished_step(self)

    def to_dict(self) -> Json:
        seconds = self.verify_s(self._longest + 1)
        return costs_to_dict(self.draft_s if self.timings else None, dict(enumerate(seconds[1:], 1)))


def share_costs(
    policy: DraftPlan, batch_costs: BatchCosts, models: Sequence[object], prompt: int = 0
) -> None:
    """Make a request's policy use the costs of its batch, if it measures costs; see ``RequestCosts``."""
    auto = policy.policy
    if isinstance(auto, AutoLength) and not isinstance(auto.cost_source, GivenCosts):
        auto.cost_source = RequestCosts(batch_costs, models, prompt)
