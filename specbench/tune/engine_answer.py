"""The answer of a search over an engine's settings: the command line, and draft lengths by batch size."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from specbench.base.record import Estimate
from specbench.results import stats

if TYPE_CHECKING:
    from specbench.export.start import EngineSetting, StartedEngine
    from specbench.specs.models import ModelSpec


Range: TypeAlias = tuple[int, int, int]
"""First and last batch size, and the draft length for them; 0 for no drafts."""


@dataclass(frozen=True)
class ScheduleRace:
    """A race of the draft lengths by batch size against plain decoding and the best single setting.

    Attributes:
        ranges: The draft lengths.
        single: Draft length of the best single setting; 0 for plain decoding.
        over_plain, over_single: Throughput over that of plain decoding and of the single setting, over all batch sizes.
        instead: The setting that is faster; ``None`` if none is.
    """

    ranges: Sequence[Range]
    single: int
    over_plain: Estimate
    over_single: Estimate
    instead: EngineSetting | None

    def lines(self) -> Iterator[str]:
        """Yield sentences on how it ended."""
        lengths = ", ".join(f"γ = {gamma} for {first} to {last}" for first, last, gamma in self.ranges)
        if math.isnan(self.over_plain.value):
            yield f"There was no time to run the schedule ({lengths}): raise --minutes."
            return
        alone = (
            f", {stats.ratio_text(self.over_single)} that of γ = {self.single} alone" if self.single else ""
        )
        yield (
            f"The schedule ({lengths}) was run under these batches: {stats.ratio_text(self.over_plain)} the throughput"
            f" of plain decoding{alone}."
        )
        if self.instead is not None:
            yield f"It is not faster than {self.instead.name}, which is the answer for this load."


def best_single(batches: Mapping[int, Mapping[int, float]]) -> int:
    """Return the draft length with the highest throughput over all batch sizes, as a geometric mean."""
    lengths = set.intersection(*(set(each) for each in batches.values()))
    return max(lengths, key=lambda gamma: math.prod(each[gamma] for each in batches.values()))


def schedule(batches: Mapping[int, Mapping[int, float]], gamma: int) -> list[Range]:
    """Return the first and last batch size of each range and its best draft length; ``gamma`` is for one request.

    A range ends with a measured batch size; neighbors with the same length are joined.
    """
    ranges: list[Range] = [(1, 1, gamma)]
    for batch, ratios in sorted(batches.items()):
        best = max(ratios, key=lambda each: ratios[each])
        first, last, length = ranges[-1]
        if length == best:
            ranges[-1] = first, batch, length
        else:
            ranges.append((last + 1, batch, best))
    return ranges


def start_command(
    engine: StartedEngine,
    target: ModelSpec,
    setting: EngineSetting,
    batches: Mapping[int, Mapping[int, float]],
    arguments: Sequence[str],
    wrapper: str,
) -> tuple[list[str], list[str]]:
    """Return the command line of a setting, and what must be done first or cannot be expressed.

    Args:
        engine, target: What is started.
        setting: The winner.
        batches: See ``StoredSearch``; draft lengths by batch size are set if they were measured.
        arguments, wrapper: The user's own options and command, see ``StartedEngine.command_line``.
    """
    options, needs = setting.options, list(setting.needs)
    ranges = schedule(batches, setting.gamma)
    if setting.gamma and len(ranges) > 1:
        options, needed, _ = engine.with_schedule(options, ranges)
        needs += [needed] if needed else []
    first = shlex.split(wrapper) or engine.server
    return [*first, *engine.words(target, options), *arguments], needs


def batch_lines(batches: Mapping[int, Mapping[int, float]]) -> Iterator[str]:
    """Yield a sentence for each batch size: the best draft length, and its throughput over plain decoding."""
    for batch, ratios in sorted(batches.items()):
        best = max(ratios, key=lambda gamma: ratios[gamma])
        drafting = max((gamma for gamma in ratios if gamma), key=lambda gamma: ratios[gamma], default=None)
        if drafting is None:
            continue
        gain = f"γ={drafting} has {stats.decimals(ratios[drafting])}× the throughput of plain decoding"
        yield f"In a batch of {batch} requests, {gain}" + (": better no drafts." if best == 0 else ".")
