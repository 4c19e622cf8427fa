"""Which way of decoding is fastest? A race in blocks, in which whoever surely is not rests.

In a block all that are in question decode one prompt back to back, in random order, so that whatever the machine does
for longer meets all alike. What it does to one generation alone is seen in the time of its passes of the target:
differences of log speeds are put right by it (``held_up``). Now and then there is a look at how much faster than the
leader each of the others may be: the mean of these differences over prompts has an upper bound, of Student's t. Who
surely is not ``MARGIN`` faster rests, and comes back should another leader, with whom it may be, take over. The race is
decided when nobody is left who may be: the leader then is as good as the best, up to the margin (an indifference zone:
Bechhofer 1954). Measuring the leader and those whose bounds reach beyond it, until none does, is LUCB (Kalyanakrishnan
et al. 2012).

Who leads is told by what was measured and by what was predicted, each by how sure it is: where others use the machine
and the time is short, measurements alone often have the wrong one ahead.

Error control: a race comes to a wrong choice only if the bound of the truly fastest over what is chosen is too low, at
one of the looks. What is chosen might be any of the others, so a look's level is shared out among them (Bonferroni, as
in Hsu's 1981 comparisons with the best; the leader's own comparisons need no share, for all of them have to hold).
Half of the chance of an error there may be in all is spent in equal parts on the looks on the way, whose number is
bounded by that of the blocks, the other half on the one when the time is up.

Nothing here decodes or knows a model: ``run_race`` asks for the time of one candidate on one block.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from specbench.base.record import Estimate
from specbench.decoding.clocks import Clock
from specbench.decoding.theory import PassCosts
from specbench.results import stats

ERROR = 0.05
"""Chance that another candidate is more than ``MARGIN`` faster than the choice of a race that is decided."""

MARGIN = 0.05
"""How far behind the fastest a choice may be, as a share of its speed."""

NARROW = 0.05
"""Half the width of the interval of the leader's speed over plain decoding, as a share of it, that is enough."""

_ORDINARY = 1.345
"""Times the scatter of what is usual: what lies beyond counts no more than that. 1.345 is Huber's usual constant."""

_QUARTILE = 0.3186
"""A quarter of normal values of standard deviation 1 are nearer to 0."""

_OWN = 0.02
"""By how much passes of the same width differ in time between two candidates: the usual size of the log of it."""

_PREDICTED = 0.08
"""By how much a predicted speedup is off: the usual size of the log of it."""

_ONE_SIGMA = 0.1587
"""A normal value is more than a standard deviation above its mean as often as this."""

_FIRST_LOOK = 6
"""Blocks; with fewer a bound says next to nothing, and a look would waste its share of the error."""

_ABREAST = 3
"""Beside plain decoding and the leader at least so many of those in question decode a block, or half of them."""

_SLACK = -math.log1p(-MARGIN)
"""``MARGIN`` as a difference of log speeds."""

Ending = Literal["decided", "time", "blocks", "interrupted"]
"""Why a race ended: nothing was left to tell apart, the time was up, there were no more blocks, or the user stopped."""

Verdict = Literal["faster", "equal", "plain", "open"]
"""The leader is surely faster than plain decoding; it leads, but surely nobody is by more than the margin; plain
decoding leads, and surely nobody is faster by more than that; or that cannot be told."""


@dataclass(frozen=True, slots=True)
class Block:
    """What all decode back to back.

    Attributes:
        prompt: Its id.
        repeat: 0 for the first time, then once more.
        category: Of the prompt. Prompts come from all categories in turn.
    """

    prompt: str
    repeat: int = 0
    category: str = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """What one candidate did in a block.

    Attributes:
        tokens: Behind the first emission.
        seconds: For them.
        slowness: Time of the target's passes in it over what such passes take alone, in any unit of its own: it is only
            held against that of other generations.
    """

    tokens: int
    seconds: float
    slowness: float = 1.0


@dataclass(frozen=True, slots=True)
class Fall:
    """Why somebody is not measured any more.

    Attributes:
        blocks: After how many.
        leader: Who led then.
        most: Surely its speed is no more than this times the leader's; ``None`` if it failed.
    """

    blocks: int
    leader: str
    most: float | None


class _Paired(NamedTuple):
    """Two candidates on the prompts that both were measured on.

    Attributes:
        categories: Of the prompts.
        means: Mean difference of their log speeds at each, shape [prompts].
        doubt: See ``held_up``.
    """

    categories: Sequence[str]
    means: stats.Floats
    doubt: float


class Race:
    """The state of a race.

    Args:
        candidates: The most promising first.
        plain: Plain decoding, one more of them, which is measured to the end: all speedups are over it.
        limit: How many blocks there may be.
        expected: Speedups over plain decoding that were predicted, of all candidates; without, measurements alone tell.
        error: Chance that another one is more than ``MARGIN`` faster than what a decided race chooses.

    Attributes:
        names: Of all, plain decoding first.
        leader: Who is ahead, see ``_lead``.
        running: Those that decode the next block, plain decoding first.
        fallen: Those that are not in question any more.
        blocks: How many blocks there were.
        level: Chance that a bound is too low, as of the latest look.
        verdict: What could be said then of the leader and plain decoding.
        open: Those beside the leader that kept the race from being decided then.
        decided: Whether nobody is left to be told from the leader; from then on it stays what it is.
    """

    def __init__(
        self,
        candidates: Sequence[str],
        plain: str,
        *,
        limit: int,
        expected: Mapping[str, float] | None = None,
        error: float = ERROR,
    ) -> None:
        self._expected = None if expected is None else {**expected, plain: 1.0}
        self.plain = self.leader = plain
        self.names = [plain, *candidates]
        self.running = list(self.names)
        self.fallen: dict[str, Fall] = {}
        self.blocks = 0
        self.verdict: Verdict = "open"
        self.open: list[str] = []
        self.decided = False
        self._logs: dict[str, dict[Block, tuple[float, float]]] = {name: {} for name in self.names}
        self._paired: dict[tuple[str, str], _Paired] = {}  # until the next block
        self._share = error / 2 / max(1, len(candidates))
        self._looks = max(1, sum(map(_is_due, range(limit + 1))))
        self.level = self._share / self._looks

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
        if self.leader in self.fallen:
            self.leader, self.decided = self.plain, False
            self.fallen = {name: fall for name, fall in self.fallen.items() if fall.most is None}
        logs = {name: _logs(timings[name]) for name in self.running}
        if None in logs.values():
            return
        self.blocks += 1
        self._paired.clear()
        for name, each in logs.items():
            assert each is not None
            self._logs[name][block] = each
        if not self.decided:
            over = self.leader
            self.leader = max(self.running, key=lambda name: self._lead(name, over))
        self._choose()

    @property
    def due(self) -> bool:
        """Whether there should be a look: after 6, 8, 12, 16, 24, 32, ... blocks."""
        return _is_due(self.blocks)

    def look(self, *, last: bool = False) -> None:
        """See what can be told, and who is in question.

        Args:
            last: Whether the time is up, or there are no more blocks.
        """
        if self.decided:
            return
        self.level = self._share if last else self._share / self._looks
        able = [name for name in self.names if name not in self.fallen or self.fallen[name].most is not None]
        self.verdict = self._judged(able)
        self.open = [name for name in able if name != self.leader and self._keeps_open(name)]
        self.decided = self.verdict != "open" and not self.open
        for name in able:
            if name in (self.plain, self.leader, *self.open):
                self.fallen.pop(name, None)
            elif name not in self.fallen:
                self.fallen[name] = Fall(self.blocks, self.leader, self.most(name, self.leader))
        self._choose()

    def _choose(self) -> None:
        """Who decodes the next block: plain decoding, the leader, and of the others those likeliest to be ahead.

        And one of whom the least is known, by the level of the last look, that all have to fall to.
        """
        both = (self.plain, self.leader)
        others = [name for name in self.names if name not in self.fallen and name not in both]
        if self.blocks >= _FIRST_LOOK:
            most = max(_ABREAST, math.ceil(len(others) / 2)) - 1
            others.sort(key=lambda name: -self._bound(name, self.leader, ERROR))
            rest = sorted(others[most:], key=lambda name: -self._bound(name, self.leader, self._share))
            others = [*others[:most], *rest[:1]]
        self.running = [name for name in self.names if name in (*both, *others)]

    def _judged(self, able: Sequence[str]) -> Verdict:
        if self.leader != self.plain and self.most(self.plain, self.leader) < 1.0:
            return "faster"
        if any(self._may_beat(name, self.plain) for name in able if name != self.plain):
            return "open"
        return "plain" if self.leader == self.plain else "equal"

    def _keeps_open(self, name: str) -> bool:
        """Whether somebody may be faster, by more than the margin, than what else would be chosen."""
        if self.verdict == "open":
            return name == self.plain or self._may_beat(name, self.leader) or self._may_beat(name, self.plain)
        return self.verdict == "faster" and self._may_beat(name, self.leader)

    def _may_beat(self, name: str, over: str) -> bool:
        return self.most(name, over) * (1.0 - MARGIN) > 1.0

    @property
    def rivals(self) -> list[str]:
        """Those in question that may be more than ``MARGIN`` faster than the leader, but for plain decoding."""
        return [name for name in self.open if name != self.plain and self._may_beat(name, self.leader)]

    def verdict_of(self, name: str) -> stats.Verdict:
        """What the bounds allow to say of a candidate and plain decoding; of the leader it is the race's verdict."""
        if name == self.leader:
            return "faster" if self.verdict == "faster" else "cannot tell"
        if self.most(self.plain, name) < 1.0:
            return "faster"
        return "slower" if self.most(name, self.plain) < 1.0 else "cannot tell"

    # -- how it stands -----------------------------------------------------------------------------

    def most(self, name: str, over: str) -> float:
        """By what factor one may be faster than another at most, by the level of the latest look."""
        return float(np.exp(self._bound(name, over, self.level)))

    def ratio(self, name: str, over: str, category: str | None = None) -> Estimate:
        """Speed over speed with its 95% interval, in the blocks that both were measured in, or those of a category."""
        blocks, logs, _ = self._differences(name, over)
        chosen = [i for i, block in enumerate(blocks) if category in (None, block.category)]
        return stats.geometric_mean(
            np.exp(logs[chosen]), [blocks[i].prompt for i in chosen], [blocks[i].repeat for i in chosen]
        )

    def categories(self, name: str) -> list[str]:
        """Of the prompts that somebody was measured on, in alphabetical order."""
        return sorted({block.category for block in self._logs[name]} - {""})

    def _differences(self, name: str, over: str) -> tuple[list[Block], stats.Floats, float]:
        """The blocks that both were measured in, how far apart their log speeds are, and what ``held_up`` doubts."""
        mine, others = self._logs[name], self._logs[over]
        blocks = [block for block in mine if block in others]
        ours, theirs = (np.array([each[block] for block in blocks]).reshape(-1, 2) for each in (mine, others))
        speed, slow = (ours - theirs).T
        held, doubt = held_up(slow)
        return blocks, speed + held, doubt

    def _by_prompt(self, name: str, over: str) -> _Paired:
        if (name, over) not in self._paired:
            blocks, logs, doubt = self._differences(name, over)
            categories = {block.prompt: block.category for block in blocks}
            prompts, means = stats.nested_means(
                logs, [block.prompt for block in blocks], [block.repeat for block in blocks]
            )
            self._paired[name, over] = _Paired(
                [categories[prompt] for prompt in prompts.tolist()], means, doubt
            )
        return self._paired[name, over]

    def _bound(self, name: str, over: str, error: float) -> float:
        paired = self._by_prompt(name, over)
        return stats.upper_bound(paired.means, error, paired.categories, doubt=paired.doubt)

    def _ahead(self, name: str, over: str) -> float:
        return float(self._by_prompt(name, over).means.mean())

    def _lead(self, name: str, over: str) -> float:
        """How far one is ahead in log speed by what was measured and predicted, each by how sure it is."""
        ahead = self._ahead(name, over)
        if self._expected is None or name == over:
            return ahead
        expected = math.log(self._expected[name] / self._expected[over])
        off = _PREDICTED**2 * (2 - (self.plain in (name, over)))
        doubt = self._bound(name, over, _ONE_SIGMA) - ahead  # infinite with a single prompt
        trust = off / (off + doubt**2)
        return trust * ahead + (1.0 - trust) * expected

    @property
    def ranking(self) -> list[str]:
        """Everybody who was measured, the leader first, the others by their speed over its own in shared blocks."""
        rest = [name for name in self.names if name != self.leader and self.measured(name)]
        return [self.leader, *sorted(rest, key=lambda name: -self._ahead(name, self.leader))]

    def measured(self, name: str) -> int:
        """In how many blocks somebody was measured."""
        return len(self._logs[name])

    @property
    def known(self) -> bool:
        """Whether the leader's speedup is known well."""
        if self.leader == self.plain:
            return True
        speedup = self.ratio(self.leader, self.plain)
        if speedup.low is None or speedup.high is None:
            return False
        return (speedup.high - speedup.low) / 2 / speedup.value <= NARROW

    def blocks_wanted(self) -> int | None:
        """About how many blocks more would decide the race; ``None`` if that cannot be told yet.

        A bound comes nearer to its mean with the root of their number. It has to come as near as the margin and what
        somebody is behind; or, of plain decoding, as near as what that is behind, if that is more.
        """
        wanted = self.blocks
        for name in self.open:
            ahead = self._ahead(name, self.leader)
            half = math.log(self.most(name, self.leader)) - ahead
            if not math.isfinite(half):
                return None
            enough = max(-ahead, _SLACK + ahead) if name == self.plain else _SLACK - ahead
            wanted = max(wanted, math.ceil(self.measured(name) * (half / enough) ** 2))
        return wanted - self.blocks


def _is_due(blocks: int) -> bool:
    rest = blocks
    while rest and rest % 2 == 0:
        rest //= 2
    return blocks >= _FIRST_LOOK and rest in (1, 3)


def _logs(timing: Timing | None) -> tuple[float, float] | None:
    """Of speed and of slowness."""
    if timing is None or timing.tokens <= 0 or timing.seconds <= 0:
        return None
    return math.log(timing.tokens / timing.seconds), math.log(timing.slowness)


def slowness(
    nodes: Iterable[int], siblings: Iterable[int], verify_s: Iterable[float], costs: PassCosts
) -> float:
    """See ``Timing``; 1 where nothing tells.

    Args:
        nodes, siblings, verify_s: Of the steps of a generation.
        costs: Times of single passes.
    """
    if not costs.target_s:
        return 1.0
    drafts = zip(nodes, siblings, strict=True)
    alone = sum(costs.target_pass_s(1 + int(drafted) + int(beside)) for drafted, beside in drafts)
    took = sum(verify_s)
    return took / alone if took > 0 and alone > 0 else 1.0


def held_up(slowness: stats.Floats) -> tuple[stats.Floats, float]:
    """What held one of two up and not the other, block by block, as differences of log seconds.

    Two candidates differ by chance in how slow their passes are, and always by how much longer passes take within their
    steps than alone. The latter is their own and no disturbance. It is small, ``_OWN`` or so, and is taken for what
    that and all blocks together say, each by how sure it is (a normal prior). All blocks together say Huber's (1964)
    mean, which no few of them can move far, in one step from the median (Bickel 1975), with the scale of the quarter of
    the blocks nearest to that, as most may be disturbed.

    Args:
        slowness: Differences of the log slowness of two candidates by block, shape [blocks].

    Returns:
        What to add to differences of log speeds, of the same shape: with it they scatter as their mean does. And the
        standard deviation of what that takes for granted.
    """
    count = len(slowness)
    if count < 2:
        return np.zeros(count), 0.0
    middle = float(np.median(slowness))
    off = slowness - middle
    usual = _ORDINARY * float(np.quantile(np.abs(off), 0.25)) / _QUARTILE
    own = middle + np.clip(off, -usual, usual) / float((np.abs(off) <= usual).mean())
    trust = _OWN**2 / (_OWN**2 + float(own.var(ddof=1)) / count)
    return slowness - trust * own, (1.0 - trust) * _OWN


def run_race(
    race: Race,
    blocks: Sequence[Block],
    measure: Callable[[str, Block], Timing | None],
    *,
    clock: Clock,
    until: float = math.inf,
    seed: int = 0,
    on_block: Callable[[Race], None] = lambda _: None,
    known: Callable[[str, Block], bool] = lambda *_: False,
) -> Ending:
    """Run a race to its end. The same timings, seed and no end of time give the same race.

    Args:
        race: A new one.
        blocks: In their order, no more than the race was told.
        measure: The time of a candidate on a block; ``None`` if it failed. Whatever it raises goes through.
        clock: Tells how long blocks take, with everything around them.
        until: When to stop, on that clock. A block is not begun if it would probably end later.
        seed: Of the order within blocks.
        on_block: Told after every block.
        known: Whether the time of a candidate on a block is there already: blocks of such ones alone need no time.
    """
    took: dict[str, float] = {}
    ending: Ending = "blocks"
    for block in blocks:
        end = math.inf if all(known(name, block) for name in race.running) else until
        timings = _measured(race, block, measure, took, clock, end, seed)
        if timings is None:
            ending = "time"
            break
        before = race.blocks
        race.take(block, timings)
        due = race.due and race.blocks > before
        if due:
            race.look()
        on_block(race)
        if due and race.decided and race.known:
            return "decided"
    if race.blocks:
        race.look(last=True)
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
