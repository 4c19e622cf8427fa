"""The costs of forward passes that several requests share, and one request's part of them (docs/design.md)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median_low
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from specbench.decoding.protocols import DraftPolicy, NewPrompt
from specbench.decoding.theory import SLOPE, fit_line
from specbench.policies.auto import AutoLength
from specbench.policies.costs import ASSUMED_C, INSTANT, LATEST, CostTable, passes_of

if TYPE_CHECKING:
    from specbench.decoding.records import SharedPass, Step

_READING = 8
"""A request that brings more new tokens than this to a pass, drafts aside, is reading its prompt."""

_PLAIN = 64
"""Every this many rounds no request drafts, so that the time of a plain pass stays known."""

_OLD = 128
"""Rounds after which times of passes with drafts expire: a disturbed machine may have made drafts look too slow, and
without drafts nothing corrects that."""

_KNOWN = 2
"""How many passes of a drafter are timed before their time counts; the first may be disturbed."""

_ROUNDS = 50
"""How many rounds the rate of requests is measured over."""

_RELEARNING = 0.015
"""Reading a context only to time drafts again may take this share of the time since the last draft."""


class _Sample(NamedTuple):
    """The time of a pass.

    Attributes:
        round: Its round.
        seconds: Its duration; of a drafter's pass, over the number of requests that drafted in it.
        number: Of a target's pass the draft tokens, of a drafter's pass how many came before in its round.
    """

    round: int
    seconds: float
    number: int


class BatchCosts:
    """The times of the forward passes that a scheduler's requests share.

    With a batch of a given size a round without drafts takes a fixed time, and each draft token prolongs it by a fixed
    time. Sizes that were not seen are taken to be like the nearest one.

    Attributes:
        size: Requests in the target's last pass.
        rounds: Passes of the target so far.
    """

    def __init__(self) -> None:
        self.size, self.rounds = 1, 0
        self._plain: dict[int, deque[float]] = {}  # seconds, by batch size
        self._drafted: dict[int, deque[_Sample]] = {}
        self._drafts: WeakKeyDictionary[object, deque[_Sample]] = WeakKeyDictionary()
        self._readings: WeakKeyDictionary[object, deque[float]] = WeakKeyDictionary()  # seconds per token
        self._target_readings: deque[float] = deque(maxlen=LATEST)
        self._in_round: Counter[object] = Counter()  # passes by model
        self._row_s: float | None = None  # until the next pass
        self._drafting_s = 0.0  # of this round
        self._rounds_s: deque[float] = deque(maxlen=_ROUNDS)

    def observe(self, made: SharedPass) -> None:
        """Learn from the time of a shared forward pass."""
        new = [fed - drafted for fed, drafted in zip(made.fed, made.drafted, strict=True)]
        if max(new) > _READING:
            readings = self._target_readings
            if not made.target:
                readings = self._readings.setdefault(made.model, deque(maxlen=LATEST))
            readings.append(made.seconds / sum(made.fed))
        if made.target:
            self._end_round(made, reading=max(new) > _READING)
        elif max(new) <= _READING:
            passes = self._drafts.setdefault(made.model, deque(maxlen=4 * LATEST))
            share_s = made.seconds / len(made.requests)
            passes.append(_Sample(self.rounds, share_s, self._in_round[made.model]))
            self._in_round[made.model] += 1
            self._drafting_s += made.seconds

    def _end_round(self, made: SharedPass, *, reading: bool) -> None:
        self.rounds += 1
        self.size = len(made.requests)
        self._in_round.clear()
        self._row_s = None
        drafting_s, self._drafting_s = self._drafting_s, 0.0
        if reading:
            return
        self._rounds_s.append((drafting_s + made.seconds) / self.size)
        more_rows = sum(made.fed) - self.size
        if more_rows:
            rounds = self._drafted.setdefault(self.size, deque(maxlen=4 * LATEST))
            rounds.append(_Sample(self.rounds, max(made.seconds, INSTANT), more_rows))
        else:
            self._plain.setdefault(self.size, deque(maxlen=LATEST)).append(made.seconds)

    @property
    def round_s(self) -> float:
        """The mean time of the latest rounds over their batch size."""
        return fmean(self._rounds_s) if self._rounds_s else self.plain_s / self.size

    def is_recent(self, made: _Sample) -> bool:
        """Return whether a time still counts."""
        return made.round > self.rounds - _OLD

    @property
    def knows_rows(self) -> bool:
        """Whether passes with drafts were timed lately."""
        return any(self.is_recent(rounds[-1]) for rounds in self._drafted.values())

    @property
    def round_without_drafts(self) -> bool:
        """Whether no request drafts in this round."""
        return not self._plain or self.rounds % _PLAIN == 0

    @property
    def plain_s(self) -> float:
        """The time of a round of the present batch size without drafts; 1 before any."""
        size = self._nearest(self._plain)
        return 1.0 if size is None else max(median_low(self._plain[size]), INSTANT)

    @property
    def row_s(self) -> float:
        """By how much a draft token prolongs a round of the present batch size."""
        if self._row_s is None:
            self._row_s = self._fitted_row_s()
        return self._row_s

    def _fitted_row_s(self) -> float:
        plain_s = self.plain_s
        size = self._nearest(size for size, rounds in self._drafted.items() if self.is_recent(rounds[-1]))
        if size is None:  # as in reading a prompt, where a token costs least
            return median_low(self._target_readings) if self._target_readings else SLOPE * plain_s
        rounds = [made for made in self._drafted[size] if self.is_recent(made)]
        # By relative errors: a long time, as disturbed ones are, weighs little.
        points = [(made.number, made.seconds, made.seconds**-2) for made in rounds]
        start_s, slope_s = fit_line([*points, (0, plain_s, plain_s**-2)])
        # That a round has drafts at all may cost something too. Its draft tokens share it.
        tokens = median_low(made.number for made in rounds)
        return slope_s + max(0.0, start_s - plain_s) / tokens

    def _nearest(self, sizes: Iterable[int]) -> int | None:
        return min(sizes, key=lambda size: abs(size - self.size), default=None)

    def draft_passes(self, model: object) -> Sequence[_Sample]:
        """Return the latest passes of a drafter's model."""
        return self._drafts.get(model, ())

    def read_s(self, model: object, share: float) -> float:
        """Return a drafter's seconds per token of a context; before it has read one, a share of the target's."""
        if readings := self._readings.get(model):
            return median_low(readings)
        return share * median_low(self._target_readings) if self._target_readings else 0.0


class RequestCosts(CostTable):
    """One request's part of the costs of a batch.

    With V the time of a round of B requests without drafts and s what each draft token adds to it, n tokens cost

        v(n) = V / B + (n - 1) · s

    Those who draft share the time of the drafter's passes equally.

    The value of time maximizes the mean of log(t_i / T), with t_i tokens of each request in a round of T seconds
    (proportional fairness: Kelly 1997): a draft kept with probability P adds P / t for a request of t tokens, and a
    round longer by x subtracts x / T for each of the B. So it pays iff P > R·x with R = B·t / T, and a request's step
    counts as T / B.

    Args:
        batch: The batch.
        models: Run the passes of this request's drafter; none for one without a model.
    """

    def __init__(self, batch: BatchCosts, models: Sequence[object]) -> None:
        self._batch, self._models = batch, models
        self.begin(NewPrompt())

    def begin(self, prompt: NewPrompt) -> None:
        super().begin(prompt)
        self._reads, self._longest = prompt.unread > 0, 1

    def _passes(self) -> list[_Sample]:
        made = [sample for model in self._models for sample in self._batch.draft_passes(model)]
        return [sample for sample in made if self._batch.is_recent(sample)]

    @property
    def timings(self) -> float:  # type: ignore[override]
        return len(self._passes()) if self._models else float("inf")

    @property
    def first_s(self) -> float:  # type: ignore[override]
        return self._draft_s(lambda sample: sample.number == 0)

    @property
    def later_s(self) -> float:  # type: ignore[override]
        return self._draft_s(lambda sample: sample.number > 0)

    def _draft_s(self, wanted: Callable[[_Sample], bool]) -> float:
        if not self._models:
            return 0.0
        passes = self._passes()
        if not passes:
            return ASSUMED_C * self.verify_s(1)
        alike = [sample for sample in passes if wanted(sample)] or passes
        return median_low(sample.seconds for sample in alike[-LATEST:])

    @property
    def longest(self) -> float:  # type: ignore[override]
        batch = self._batch
        if batch.round_without_drafts:
            return 0
        passes = self._passes()
        if batch.knows_rows and (not self._models or len(passes) >= _KNOWN):
            return 2 * max(self._longest, 2)
        # After a long time without drafts, measuring them again may not cost much.
        last = max((made.round for model in self._models for made in batch.draft_passes(model)), default=None)
        if last is None or self.reading_s <= _RELEARNING * (batch.rounds - last) * self.verify_s(1):
            return 1
        return 0

    @property
    def reading_s(self) -> float:
        if self._unread <= _READING:
            return 0.0
        return self._unread * sum(self._batch.read_s(model, self._share) for model in self._models)

    def verify_s(self, n: int) -> float:
        return self._batch.plain_s / self._batch.size + (n - 1) * self._batch.row_s

    def step_s(self, passes: int, n: int) -> float:
        return self._batch.round_s

    def observe(self, step: Step) -> None:
        self._longest = max(self._longest, step.verified - 1)
        super().observe(step)
        if self._reads and not passes_of(step):
            self._unread += len(step.tokens)


def share_costs(policy: DraftPolicy, batch: BatchCosts, models: Sequence[object]) -> None:
    """Let a request's policy decide by the costs of its batch, if it is ``auto``; see ``RequestCosts``."""
    if isinstance(policy, AutoLength):
        policy.table = RequestCosts(batch, models)
