"""The answer of a search over an engine's settings: the command line, and draft lengths by batch size."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from specbench.results import stats

if TYPE_CHECKING:
    from specbench.export.start import EngineSetting, StartedEngine
    from specbench.specs.models import ModelSpec


def schedule(batches: Mapping[int, Mapping[int, float]], gamma: int) -> list[tuple[int, int, int]]:
    """Return the first and last batch size of each range and its best draft length; ``gamma`` is for one request.

    A range ends with a measured batch size; neighbors with the same length are joined.
    """
    ranges: list[tuple[int, int, int]] = [(1, 1, gamma)]
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
        options, needed = engine.with_schedule(options, ranges)
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
