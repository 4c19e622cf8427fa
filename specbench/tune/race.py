"""Which way of decoding is fastest? A race in blocks, in which whoever surely loses drops out.

In a block all that are left decode one prompt back to back, in random order, so that whatever the machine does meets
all alike. Now and then there is a look: the ratio of each one's speed to the leader's, paired by prompt, gets an
interval (``stats.geometric_mean``), and who lies below 1 with all of it is out. Races of this kind, with blocks, are
those of Moore and Lee 1994 and, over instances as here, of Birattari et al. 2002.

Error control: the fastest drops out only if its interval misses, against one of the others, at one of the looks. So a
look's level is shared out among the others (Bonferroni), and the k-th look spends 1 / (k (k + 1)) of the chance of an
error there may be in all (alpha spending, Lan and DeMets 1983), which adds up to 1 for any number of looks.

Nothing here decodes or knows a model: ``run_race`` asks for the time of one candidate on one block.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specbench.decoding.clocks import Clock
from specbench.results import stats

__all__ = ["ERROR", "MARGIN", "Block", "Ending", "Fall", "Race", "Timing", "Verdict", "run_race"]

ERROR = 0.05
"""Chance that the fastest ever drops out."""

MARGIN = 0.05
"""Speeds that surely differ by less count as equal, and need not be told apart."""

NARROW = 0.05
"""Half the width of the interval of the leader's speed over plain decoding, as a share of it, that is enough."""

_FIRST_LOOK = 6
"""Blocks; with fewer an interval says next to nothing, and a look would waste half of what may be spent."""

Ending = Literal["decided", "time", "blocks"]
"""Why a race ended: nothing was left to tell apart, the time was up, or there were no more blocks."""

Verdict = Literal["faster", "equal", "plain", "open"]
"""The leader is surely faster than plain decoding; they are surely equal; plain decoding leads, and nobody is left who
might be faster; or that cannot be told."""


@dataclass(frozen=True, slots=True)
class Block:
    """What all decode back to back: a prompt, for the first time (0) or once more."""

    prompt: str
    repeat: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """What one candidate did in a block: tokens behind the first emission, and seconds for them."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fall:
    """Why somebody dropped out.

    Attributes:
        blocks: After how many.
        leader: Who led then.
        ratio: Of its speed to the leader's, at the level of that look; ``None`` if it failed.
    """

    blocks: int
    leader: str
    ratio: stats.Estimate | None


class Race:
    """The state of a race.

    Args:
        candidates: The most promising first.
        plain: Plain decoding, one more of them, which is measured to the end: all speedups are over it.
        error: Chance that the fastest ever drops out.

    Attributes:
        running: Those that are measured, plain decoding first.
        fallen: Those that are not any more.
        blocks: How many blocks there were.
    """

    def __init__(self, candidates: Sequence[str], plain: str, *, error: float = ERROR) -> None:
        self.plain = plain
        self.running: list[str] = [plain, *candidates]
        self.fallen: dict[str, Fall] = {}
        self.blocks = 0
        self._logs: dict[str, dict[Block, float]] = {name: {} for name in self.running}
        self._others = max(1, len(candidates))
        self._error, self._looks = error, 0

    # -- what happens ------------------------------------------------------------------------------

    def take(self, block: Block, timings: Mapping[str, Timing | None]) -> None:
        """Take in a block.

        Args:
            block: Which.
            timings: Of all that are running; ``None``: it failed, and drops out. A block in which plain decoding fails,
                or somebody emits nothing behind the first token, counts for nobody.
        """
        if timings[self.plain] is None:
            return
        for name in [name for name in self.running if timings[name] is None]:
            self.running.remove(name)
            self.fallen[name] = Fall(self.blocks, self.leader, None)
        speeds = {name: _log_speed(timings[name]) for name in self.running}
        if None in speeds.values():
            return
        self.blocks += 1
        for name, speed in speeds.items():
            assert speed is not None
            self._logs[name][block] = speed

    @property
    def due(self) -> bool:
        """Whether there should be a look: after 6, 8, 12, 16, 24, 32, ... blocks."""
        rest = self.blocks
        while rest and rest % 2 == 0:
            rest //= 2
        return self.blocks >= _FIRST_LOOK and rest in (1, 3)

    def look(self) -> None:
        """Drop whoever is surely slower than the leader."""
        self._looks += 1
        leader = self.leader
        for name in [name for name in self.running if name not in (leader, self.plain)]:
            ratio = self.ratio(name, leader)
            if _is_below(ratio, 1.0):
                self.running.remove(name)
                self.fallen[name] = Fall(self.blocks, leader, ratio)

    # -- how it stands -----------------------------------------------------------------------------

    @property
    def leader(self) -> str:
        """Who has the highest geometric mean of speeds over prompts, of those that are running."""
        return max(self.running, key=self._mean)

    def _mean(self, name: str) -> float:
        logs = self._logs[name]
        if not logs:
            return -math.inf
        blocks = list(logs)
        _, means = stats.nested_means(
            [logs[block] for block in blocks],
            [block.prompt for block in blocks],
            [block.repeat for block in blocks],
        )
        return float(means.mean())

    @property
    def confidence(self) -> float:
        """Of the intervals at the latest look: of each, one end may miss with that look's share of the error."""
        looks = max(1, self._looks)
        return 1.0 - 2.0 * self._error / (looks * (looks + 1) * self._others)

    def ratio(self, name: str, over: str, confidence: float | None = None) -> stats.Estimate:
        """Speed over speed, in the blocks that both were measured in.

        Args:
            name, over: Any two.
            confidence: ``None`` for that of the latest look.
        """
        ours, theirs = self._logs[name], self._logs[over]
        blocks = [block for block in ours if block in theirs]
        return stats.geometric_mean(
            np.exp([ours[block] - theirs[block] for block in blocks]),
            [block.prompt for block in blocks],
            [block.repeat for block in blocks],
            self.confidence if confidence is None else confidence,
        )

    def measured(self, name: str) -> int:
        """In how many blocks somebody was measured."""
        return len(self._logs[name])

    @property
    def verdict(self) -> Verdict:
        """What can be said of the leader and plain decoding."""
        if self.leader == self.plain:
            return "open" if self.open else "plain"
        if _is_below(self.ratio(self.plain, self.leader), 1.0):
            return "faster"
        return "open" if self.plain in self.open else "equal"

    @property
    def open(self) -> list[str]:
        """Those that are neither surely slower than the leader nor surely equal to it."""
        leader = self.leader
        return [name for name in self.running if name != leader and not _is_settled(self.ratio(name, leader))]

    @property
    def decided(self) -> bool:
        """Whether more blocks would change little: nobody is open, and the leader's speedup is known well."""
        return self.blocks >= _FIRST_LOOK and not self.open and self._half_width() <= NARROW

    def _half_width(self) -> float:
        """Of the interval of the leader's speedup; 0 if plain decoding leads."""
        if self.leader == self.plain:
            return 0.0
        speedup = self.ratio(self.leader, self.plain, stats.CONFIDENCE)
        if speedup.low is None or speedup.high is None:
            return math.inf
        return (speedup.high - speedup.low) / 2 / speedup.value

    def blocks_wanted(self) -> int | None:
        """About how many blocks more would tell the open ones from the leader; ``None`` if that cannot be told yet.

        An interval becomes narrower with the root of their number. It has to be as narrow as the difference, or as what
        is left between that and ``MARGIN``.
        """
        wanted, leader = self.blocks, self.leader
        for name in self.open:
            ratio = self.ratio(name, leader)
            if ratio.low is None or ratio.high is None or ratio.low == 0.0:
                return None
            behind = -math.log(ratio.value)
            enough = max(behind, -math.log1p(-MARGIN) - behind)
            half = math.log(ratio.high / ratio.low) / 2
            wanted = max(wanted, math.ceil(self.blocks * (half / enough) ** 2))
        return wanted - self.blocks


def _log_speed(timing: Timing | None) -> float | None:
    if timing is None or timing.tokens <= 0 or timing.seconds <= 0:
        return None
    return math.log(timing.tokens / timing.seconds)


def _is_below(ratio: stats.Estimate, value: float) -> bool:
    return ratio.high is not None and ratio.high < value


def _is_settled(ratio: stats.Estimate) -> bool:
    """Surely below 1, or surely within the margin around it."""
    if ratio.low is None or ratio.high is None:
        return False
    return ratio.high < 1.0 or (ratio.low >= 1.0 - MARGIN and ratio.high <= 1.0 / (1.0 - MARGIN))


def run_race(
    race: Race,
    blocks: Iterable[Block],
    measure: Callable[[str, Block], Timing | None],
    *,
    clock: Clock,
    until: float = math.inf,
    seed: int = 0,
    on_block: Callable[[Race], None] = lambda _: None,
) -> Ending:
    """Run a race to its end. The same timings, seed and no end of time give the same race.

    Args:
        race: A new one.
        blocks: In their order.
        measure: The time of a candidate on a block; ``None`` if it failed. Whatever it raises goes through.
        clock: Tells how long blocks take, with everything around them.
        until: When to stop, on that clock. A block is not begun if it would probably end later.
        seed: Of the order within blocks.
        on_block: Told after every block.
    """
    took: dict[str, float] = {}
    ending: Ending = "blocks"
    for block in blocks:
        timings = _measured(race, block, measure, took, clock, until, seed)
        if timings is None:
            ending = "time"
            break
        before = race.blocks
        race.take(block, timings)
        due = race.due and race.blocks > before
        if due:
            race.look()
        on_block(race)
        if due and race.decided:
            return "decided"
    if race.blocks and not race.due:
        race.look()
    return "decided" if race.decided else ending


def _measured(
    race: Race,
    block: Block,
    measure: Callable[[str, Block], Timing | None],
    took: dict[str, float],
    clock: Clock,
    until: float,
    seed: int,
) -> dict[str, Timing | None] | None:
    """The timings of all that are running, or ``None`` if the time is up before."""
    if clock.now() + sum(took.get(name, 0.0) for name in race.running) > until:
        return None
    order = list(race.running)
    random.Random(f"{seed}/{block.repeat}/{block.prompt}").shuffle(order)
    timings: dict[str, Timing | None] = {}
    for name in order:
        began = clock.now()
        if began > until:
            return None
        timings[name] = measure(name, block)
        took[name] = clock.now() - began
    return timings
