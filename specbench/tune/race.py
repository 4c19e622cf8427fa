"""Race drafting configurations in blocks until the fastest is known.

In a block, every candidate that is still running decodes one prompt back to back, in random order, so that slow drifts
of the machine affect all alike. Disturbances of a single generation show in the time of its target passes and are
corrected for (``noise_correction``). After some blocks the results are evaluated (a look): the mean difference of log
speeds over prompts gets an upper bound (Student's t). A candidate whose bound shows that it is not ``MARGIN`` faster
than the leader is eliminated; it returns if it could be faster than a later leader. The race is decided when no
candidate can be faster: the leader is then the best, up to the margin (an indifference zone: Bechhofer 1954).
Measuring the leader and the candidates whose bounds exceed it is LUCB (Kalyanakrishnan et al. 2012).

The leader is chosen from measurements and predictions, weighted by their precision: on a busy machine and in a short
time, measurements alone often put the wrong candidate ahead.

Error control: the choice is wrong only if the bound of the truly fastest candidate over the chosen one is too low at
one of the looks. Any other candidate could be chosen, so the error probability of a look is divided among them
(Bonferroni, as in Hsu's 1981 comparisons with the best; the leader's own comparisons need no share, since all of them
have to hold). Half of the total error is divided equally among the looks, whose number follows from the number of
blocks; the other half is for the last look, when the time is over.

Nothing here decodes or knows a model: ``run_race`` asks ``measure`` for the time of one candidate on one block.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from specbench.base.record import Estimate
from specbench.bench.stopping import FIRST_LOOK, Ending, look_due
from specbench.decoding.theory import PassCosts
from specbench.results import stats

ERROR = 0.05
"""Probability that a decided race chooses a candidate while another is more than ``MARGIN`` faster."""

MARGIN = 0.05
"""Largest speed loss of the choice against the fastest candidate, as a share."""

NARROW = 0.05
"""Half-width of the interval of the leader's speedup, as a share of it, at which measuring may stop."""

_HUBER = 1.345
"""Huber's usual constant: differences beyond this many standard deviations are clipped."""

_QUARTILE = 0.3186
"""A standard normal value is within this distance of 0 with probability 1/4."""

_OWN_SCALE = 0.02
"""How much the passes of two candidates differ in log time on an undisturbed machine: prior standard deviation."""

_PREDICTION_SCALE = 0.08
"""Standard deviation of the log of a predicted speedup's error."""

_ONE_SIGMA = 0.1587
"""Probability that a normal value exceeds its mean by a standard deviation."""

_MIN_RUNNING = 3
"""Challengers that decode a block at least, in addition to plain decoding and the leader (or half of them, if more)."""

_SLACK = -math.log1p(-MARGIN)
"""``MARGIN`` as a difference of log speeds."""

Verdict = Literal["faster", "equal", "plain", "open"]
"""``faster``: the leader is surely faster than plain decoding. ``equal``: the leader drafts, and surely nothing is
faster than plain decoding by more than the margin. ``plain``: the same, with plain decoding as the leader. ``open``:
not known."""


@dataclass(frozen=True, slots=True)
class Block:
    """One prompt that all running candidates decode.

    Attributes:
        repeat: 0 the first time this prompt is used.
    """

    prompt: str
    repeat: int = 0
    category: str = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """One candidate's result on a block.

    Attributes:
        tokens: Number of tokens after the first emission.
        slowdown: See ``relative_slowdown``; only compared with the slowdown of other generations.
    """

    tokens: int
    seconds: float
    slowdown: float = 1.0


Timings: TypeAlias = dict[str, Timing | None]
"""The results of candidates on a block; ``None`` for a failure."""


_Pair: TypeAlias = tuple[Sequence[str], stats.Floats, float]
"""Of two candidates: the categories of the prompts that both were measured on, the mean differences of their log
speeds on each, and the doubt of these, see ``noise_correction``.
"""


class Race:
    """The state of a race.

    Args:
        candidates: The candidates, the most promising first.
        plain: Plain decoding, which is always measured, since it is the baseline of all speedups.
        limit: Largest number of blocks.
        expected: Predicted speedups of all candidates; without them, measurements alone decide who leads.

    Attributes:
        leader: The candidate that is ahead, see ``_lead``.
        running: Candidates that decode the next block, plain decoding first.
        failed: Candidates that have failed.
        eliminated: Other candidates that are no longer measured, and how many blocks had been decoded before.
        level: Probability that a bound is too low, as of the latest look.
        verdict: Verdict on the leader against plain decoding, as of the latest look.
        open: Candidates that prevented a decision at the latest look.
        decided: Whether the race is decided; once true, the leader stays.
        ending: Why measuring ended; ``None`` before.
    """

    def __init__(
        self,
        candidates: Sequence[str],
        plain: str,
        *,
        limit: int,
        expected: Mapping[str, float] | None = None,
    ) -> None:
        self._expected = None if expected is None else {**expected, plain: 1.0}
        self.plain = self.leader = plain
        self.names = [plain, *candidates]
        self.running = list(self.names)
        self.failed: set[str] = set()
        self.eliminated: dict[str, int] = {}
        self.blocks = 0
        self.verdict: Verdict = "open"
        self.open: list[str] = []
        self.decided = self.is_sure = False
        self.ending: Ending | None = None
        self._logs: dict[str, dict[Block, tuple[float, float]]] = {name: {} for name in self.names}
        self._pairs: dict[tuple[str, str], _Pair] = {}  # cleared by each block
        self._share = ERROR / 2 / max(1, len(candidates))
        self._looks = max(1, sum(map(look_due, range(limit + 1))))
        self.level = self._share / self._looks

    # -- blocks and looks --------------------------------------------------------------------------

    def add(self, block: Block, timings: Timings) -> None:
        """Add the timings of a block, then look if that became due.

        A failure eliminates a candidate. A block does not count if plain decoding fails, or any candidate emits nothing
        after the first token.
        """
        due = self._add_block(block, timings) and look_due(self.blocks)
        self._choose_running()
        if due:
            self.look()
            self.is_sure = self.decided and self._speedup_is_known

    def _add_block(self, block: Block, timings: Timings) -> bool:
        """Add the timings of a block, and return whether it counts."""
        if timings[self.plain] is None:
            return False
        for name in [name for name in self.running if timings[name] is None]:
            self.running.remove(name)
            self.failed.add(name)
        if self.leader in self.failed:
            self.leader, self.decided = self.plain, False
            self.eliminated = {}
        logs = {name: _logs(timings[name]) for name in self.running}
        if None in logs.values():
            return False
        self.blocks += 1
        self._pairs.clear()
        for name, each in logs.items():
            assert each is not None
            self._logs[name][block] = each
        if not self.decided:
            over = self.leader
            self.leader = max(self.running, key=lambda name: self._lead(name, over))
        return True

    def look(self, *, last: bool = False) -> None:
        """Evaluate the results: update the verdict and eliminate candidates.

        Args:
            last: Whether the time is over or there are no more blocks.
        """
        if self.decided:
            return
        self.level = self._share if last else self._share / self._looks
        able = [name for name in self.names if name not in self.failed]
        self.verdict = self._find_verdict(able)
        self.open = [name for name in able if name != self.leader and self._keeps_open(name)]
        self.decided = self.verdict != "open" and not self.open
        for name in able:
            if name in (self.plain, self.leader, *self.open):
                self.eliminated.pop(name, None)
            else:
                self.eliminated.setdefault(name, self.blocks)
        self._choose_running()

    def _choose_running(self) -> None:
        """Choose the candidates for the next block: plain decoding, the leader, and challengers.

        The challengers are those likeliest to be ahead, and the one with the least certain bound.
        """
        both = (self.plain, self.leader)
        out = {*both, *self.failed, *self.eliminated}
        others = [name for name in self.names if name not in out]
        if self.blocks >= FIRST_LOOK:
            count = max(_MIN_RUNNING, math.ceil(len(others) / 2)) - 1
            others.sort(key=lambda name: -self._log_bound(name, self.leader, ERROR))
            rest = sorted(others[count:], key=lambda name: -self._log_bound(name, self.leader, self._share))
            others = [*others[:count], *rest[:1]]
        self.running = [name for name in self.names if name in (*both, *others)]

    def _find_verdict(self, able: Sequence[str]) -> Verdict:
        if self.leader != self.plain and stats.verdict(self.speedup(self.leader)) == "faster":
            return "faster"
        if any(self._may_beat(name, self.plain) for name in able if name != self.plain):
            return "open"
        return "plain" if self.leader == self.plain else "equal"

    def _keeps_open(self, name: str) -> bool:
        """Return whether a candidate can be faster than the choice by more than the margin."""
        if self.verdict == "open":
            return name == self.plain or self._may_beat(name, self.leader) or self._may_beat(name, self.plain)
        return self.verdict == "faster" and self._may_beat(name, self.leader)

    def _may_beat(self, name: str, over: str) -> bool:
        return self.upper_bound(name, over) * (1.0 - MARGIN) > 1.0

    @property
    def rivals(self) -> list[str]:
        """Return the candidates other than plain decoding that can be more than ``MARGIN`` faster than the leader."""
        return [name for name in self.open if name != self.plain and self._may_beat(name, self.leader)]

    def verdict_of(self, name: str) -> stats.Verdict:
        """Return the verdict on a candidate against plain decoding; for the leader, that of the race."""
        if name == self.leader:
            return "faster" if self.verdict == "faster" else "cannot tell"
        return stats.verdict(self.speedup(name))

    # -- figures -----------------------------------------------------------------------------------

    def upper_bound(self, name: str, over: str) -> float:
        """Return the upper bound of one speed over another, at the level of the latest look."""
        return float(np.exp(self._log_bound(name, over, self.level)))

    def speedup(self, name: str) -> Estimate:
        """Return a candidate's speed over plain decoding, with the bounds by which the race decides."""
        ratio = self.ratio(name, self.plain)
        ends = 1.0 / self.upper_bound(self.plain, name), self.upper_bound(name, self.plain)
        low, high = ends if ends[1] <= stats.WIDEST * ends[0] else (None, None)
        return Estimate(ratio.value, low, high, ratio.prompts, None if low is None else "prompts")

    def ratio(self, name: str, over: str, category: str | None = None) -> Estimate:
        """Return one speed over another with its 95% interval, in their shared blocks or those of a category."""
        blocks, logs, _ = self._differences(name, over)
        chosen = [i for i, block in enumerate(blocks) if category in (None, block.category)]
        return stats.geometric_mean(
            np.exp(logs[chosen]), [blocks[i].prompt for i in chosen], [blocks[i].repeat for i in chosen]
        )

    def categories(self, name: str) -> list[str]:
        """Return the categories that a candidate was measured on, in alphabetical order."""
        return sorted({block.category for block in self._logs[name]} - {""})

    def _differences(self, name: str, over: str) -> tuple[list[Block], stats.Floats, float]:
        """Return the shared blocks, their corrected differences of log speed, and the uncertainty of the correction."""
        mine, others = self._logs[name], self._logs[over]
        blocks = [block for block in mine if block in others]
        ours, theirs = (np.array([each[block] for block in blocks]).reshape(-1, 2) for each in (mine, others))
        speed, slowdown = (ours - theirs).T
        correction, doubt = noise_correction(slowdown)
        return blocks, speed + correction, doubt

    def _pair(self, name: str, over: str) -> _Pair:
        if (name, over) not in self._pairs:
            blocks, logs, doubt = self._differences(name, over)
            categories = {block.prompt: block.category for block in blocks}
            prompts, means = stats.nested_means(
                logs, [block.prompt for block in blocks], [block.repeat for block in blocks]
            )
            self._pairs[name, over] = [categories[each] for each in prompts.tolist()], means, doubt
        return self._pairs[name, over]

    def _log_bound(self, name: str, over: str, error: float) -> float:
        categories, means, doubt = self._pair(name, over)
        return stats.upper_bound(means, error, categories, doubt=doubt)

    def _log_ratio(self, name: str, over: str) -> float:
        return float(self._pair(name, over)[1].mean())

    def _lead(self, name: str, over: str) -> float:
        """Return the log ratio of two speeds as measured and as predicted, each weighted by its precision."""
        measured = self._log_ratio(name, over)
        if self._expected is None or name == over:
            return measured
        expected = math.log(self._expected[name] / self._expected[over])
        variance = _PREDICTION_SCALE**2 * (2 - (self.plain in (name, over)))
        doubt = self._log_bound(name, over, _ONE_SIGMA) - measured  # infinite with a single prompt
        weight = variance / (variance + doubt**2)
        return weight * measured + (1.0 - weight) * expected

    @property
    def ranking(self) -> list[str]:
        """Return all measured candidates:
        the leader first, the others by their speed relative to it in shared blocks.
        """
        rest = [name for name in self.names if name != self.leader and self.num_blocks(name)]
        return [self.leader, *sorted(rest, key=lambda name: -self._log_ratio(name, self.leader))]

    @property
    def measured(self) -> list[str]:
        """The candidates that draft, were measured and did not fail."""
        drafting = (name for name in self.names if name not in {self.plain, *self.failed})
        return [name for name in drafting if self.num_blocks(name)]

    @property
    def best(self) -> str | None:
        """The leader, or else the fastest candidate that drafts; those that are out only if there is no other."""
        if self.leader != self.plain:
            return self.leader
        running = [name for name in self.measured if name not in self.eliminated]
        return max(
            running or self.measured, key=lambda name: self.ratio(name, self.plain).value, default=None
        )

    def num_blocks(self, name: str) -> int:
        """Return the number of blocks that a candidate was measured in."""
        return len(self._logs[name])

    @property
    def _speedup_is_known(self) -> bool:
        """Return whether the interval of the leader's speedup is narrow enough."""
        if self.leader == self.plain:
            return True
        speedup = self.ratio(self.leader, self.plain)
        if speedup.low is None or speedup.high is None:
            return False
        return (speedup.high - speedup.low) / 2 / speedup.value <= NARROW

    def blocks_needed(self) -> int | None:
        """Return roughly how many more blocks would decide the race; ``None`` if that cannot be estimated yet.

        The distance of a bound from its mean decreases with the square root of the number of blocks. It has to reach
        the margin plus the candidate's distance from the leader; for plain decoding, that distance if it is larger.
        """
        needed = self.blocks
        for name in self.open:
            ahead = self._log_ratio(name, self.leader)
            half = math.log(self.upper_bound(name, self.leader)) - ahead
            if not math.isfinite(half):
                return None
            enough = max(-ahead, _SLACK + ahead) if name == self.plain else _SLACK - ahead
            needed = max(needed, math.ceil(self.num_blocks(name) * (half / enough) ** 2))
        return needed - self.blocks


def _logs(timing: Timing | None) -> tuple[float, float] | None:
    """Return the logs of speed and slowdown."""
    if timing is None or timing.tokens <= 0 or timing.seconds <= 0:
        return None
    return math.log(timing.tokens / timing.seconds), math.log(timing.slowdown)


def relative_slowdown(nodes: Iterable[int], verify_s: Iterable[float], costs: PassCosts) -> float:
    """Return the time of the target's forwards in a generation over the time of equal forwards alone; 1 if unknown."""
    if not costs.target_s:
        return 1.0
    alone = sum(costs.target_pass_s(1 + int(drafted)) for drafted in nodes)
    measured = sum(verify_s)
    return measured / alone if measured > 0 and alone > 0 else 1.0


def noise_correction(slowdown: stats.Floats) -> tuple[stats.Floats, float]:
    """Return the disturbance by block of one of two candidates relative to the other, as differences of log seconds.

    The slowdown of two candidates differs for two reasons. One is chance disturbances. The other is constant: forwards
    take longer within steps than alone, and by different amounts. This constant is not a disturbance. It is small
    (``_OWN_SCALE``) and is estimated from that prior and from all blocks, each weighted by its precision. The estimate
    from the blocks is Huber's (1964) mean, which is robust to a few outliers, in one step from the median (Bickel
    1975). Its scale is that of the quarter of the blocks nearest to the median, since most blocks can be disturbed.

    Args:
        slowdown: Differences of the log slowdown of two candidates by block, shape [blocks].

    Returns:
        The correction to add to differences of log speed, of the same shape, and the standard deviation of its
        constant.
    """
    count = len(slowdown)
    if count < 2:
        return np.zeros(count), 0.0
    middle = float(np.median(slowdown))
    off = slowdown - middle
    usual = _HUBER * float(np.quantile(np.abs(off), 0.25)) / _QUARTILE
    own = middle + np.clip(off, -usual, usual) / float((np.abs(off) <= usual).mean())
    weight = _OWN_SCALE**2 / (_OWN_SCALE**2 + float(own.var(ddof=1)) / count)
    return slowdown - weight * own, (1.0 - weight) * _OWN_SCALE


def run_race(
    race: Race,
    blocks: Sequence[Block],
    measure: Callable[[str, Block], Timing | None],
    *,
    in_time: Callable[[str, Block], bool] = lambda *_: True,
    seed: int = 0,
) -> Iterator[Race]:
    """Run a race to its end; yield it after each block. The same timings and seed give the same race.

    Args:
        blocks: The blocks in order, at most the race's limit.
        measure: Returns the timing of a candidate on a block; ``None`` if it failed. Its exceptions pass through.
        in_time: Takes the same, and returns whether there is time for it.
    """
    for block in blocks:
        timings: Timings = {}
        order = list(race.running)
        random.Random(f"{seed}/{block.repeat}/{block.prompt}").shuffle(order)
        for name in order:
            if not in_time(name, block):
                race.ending = "time"
                break
            timings[name] = measure(name, block)
        if race.ending == "time":
            break
        race.add(block, timings)
        yield race
        if race.is_sure:
            break
    if race.blocks:
        race.look(last=True)
    race.ending = "decided" if race.decided else race.ending or "blocks"
