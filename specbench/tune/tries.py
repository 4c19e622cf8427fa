"""What to race of the settings of a server: predicted from short tries, because its passes cannot be timed.

A family of settings that differ only in their draft length is predicted from two of them. The longer one tells how many
tokens shorter drafts would have got accepted, by position; both tell how long a step takes, which is taken to grow
linearly with the draft length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from specbench.bench.grid import Cell
from specbench.results.lines import Generation
from specbench.tune.candidates import BLOCKS, best_of_each, select
from specbench.tune.search import Search, plain_failed, race_end

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.bench.session import Session
    from specbench.export.start import EngineSetting
    from specbench.results.run import Tuning
    from specbench.started import Started

_SHORT = 2
"""Draft length of the shorter try of a family; the other is its longest."""

_LENGTHS = 3
"""Draft lengths of a family that are raced at most."""

_TRYING = 0.35
"""Share of the time after which no further tries begin."""

_TRIED_PROMPTS, _TRIED_TOKENS = 4, 32
"""Prompts of the short tries, and tokens of each."""


def search_settings(
    session: Session, started: Started, began: float, seconds: float, progress: Progress
) -> Search:
    """Return the search among the settings of servers that are started."""
    settings = dict(zip(session.configs, started.settings, strict=True))
    named: dict[str, list[str]] = {}
    for name, each in settings.items():
        if each.family and each.family not in started.engine.ngrams:
            named.setdefault(each.family, []).append(name)
    return Search(
        session,
        partial(choose, settings=settings),
        {name: each.family for name, each in settings.items() if each.family},
        seconds=seconds,
        until=race_end(began, seconds),
        asked=named,
        progress=progress,
    )


def choose(search: Search, settings: Mapping[str, EngineSetting]) -> Tuning:
    """Try some settings, predict all from that, and choose what to race.

    Args:
        search: The search.
        settings: The settings by the ids of their configurations.

    Raises:
        RunError: Plain decoding failed.
    """
    tried, failed = _try(search, [search.plain, *tries_of(settings)])
    plain = tried[search.plain]
    mean_s = fmean(each.total_s / max(1, each.new_tokens) for each in plain)
    plain_s = BLOCKS * mean_s * search.sweep.options.decoding.max_new_tokens
    predicted = {
        name: value
        for name, value in predict(settings, tried, plain).items()
        if value > 0 and search.families[name] not in failed
    }
    return select(
        predicted,
        lambda name: plain_s / predicted[name] + search.start_s(name),
        max(0.0, search.left_s) - plain_s,
        search.families,
        failed,
        lengths=search.families,
        most=_LENGTHS,
        needed=best_of_each(search.needs(predicted), predicted),
    )


def _try(search: Search, names: Sequence[str]) -> tuple[dict[str, list[Generation]], dict[str, str]]:
    """Measure short generations, plain decoding first; return them by id, and errors by family.

    If one fails, others of its family are not tried.
    """
    tried: dict[str, list[Generation]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    prompts = [each.id for each in search.sweep.prompts[:_TRIED_PROMPTS]]
    pairs = [(name, prompt) for name in names for prompt in prompts]
    if search.fits(names):
        pairs.sort(key=lambda pair: prompts.index(pair[1]))
    for done, (name, prompt) in enumerate(pairs):
        family = search.families.get(name, "")
        late = search.clock() - search.began > _TRYING * search.seconds and tried[name]
        if late or (family in failed and name != search.plain):
            continue
        search.report("trying drafters", done, len(pairs))
        cell = Cell(name, prompt, 0, 0, 0, warmup=True, seed=search.seed(prompt, "try"))
        measured = search.measured(cell, _TRIED_TOKENS)
        if isinstance(measured.result, Generation):
            tried[name].append(measured.result)
        else:
            failed[family] = str(measured.line.error)
    if not tried[search.plain]:
        raise plain_failed(failed[""])
    return tried, failed


def tries_of(settings: Mapping[str, EngineSetting]) -> list[str]:
    """Return the settings to try: of each family the longest drafts and those of ``_SHORT`` tokens, or the shortest."""
    families: dict[str, list[str]] = {}
    for name, setting in settings.items():
        if setting.family:
            families.setdefault(setting.family, []).append(name)
    tried: list[str] = []
    for names in families.values():
        by_length = sorted(names, key=lambda name: settings[name].gamma)
        short = next((name for name in by_length if settings[name].gamma >= _SHORT), by_length[0])
        tried += dict.fromkeys((by_length[-1], short))
    return tried


def predict(
    settings: Mapping[str, EngineSetting],
    tried: Mapping[str, Sequence[Generation]],
    plain: Sequence[Generation],
) -> dict[str, float]:
    """Return predicted speedups over plain decoding, for the settings of families that were tried.

    What was tried has its measured speedup. For the others it is the expected tokens of a step over its cost, which is
    linear in the draft length and known from the two tries of their family; or a speedup between those of the tries, if
    the server does not count accepted tokens by position.
    """
    plain_s = _seconds_per_token(plain)
    found = {
        name: plain_s / _seconds_per_token(each)
        for name, each in tried.items()
        if each and settings[name].family
    }
    for name, setting in settings.items():
        there = [each for each in tried if settings[each].family == setting.family and tried[each]]
        if name in found or not setting.family or len(there) < 2:
            continue
        short, long = sorted(there, key=lambda each: settings[each].gamma)[:: len(there) - 1]
        share = (setting.gamma - settings[short].gamma) / (settings[long].gamma - settings[short].gamma)
        rates = _kept_per_step(tried[long])
        if rates is None:
            logs = [math.log(found[each]) for each in (short, long)]
            found[name] = math.exp(logs[0] + min(1.0, max(0.0, share)) * (logs[1] - logs[0]))
            continue
        tokens = {each: 1.0 + sum(rates[: settings[each].gamma]) for each in (short, long, name)}
        # A step's time over that of a plain token, from what was measured.
        costs = [tokens[each] / found[each] for each in (short, long)]
        cost = max(costs[0] + share * (costs[1] - costs[0]), min(costs) / 2)
        found[name] = tokens[name] / cost
    return found


def _seconds_per_token(generations: Sequence[Generation]) -> float:
    tokens = sum(each.new_tokens - each.first_tokens for each in generations)
    return sum(each.decode_s for each in generations) / max(1, tokens)


def _steps(generation: Generation) -> int:
    """Return the number of steps: every step emits one token more than it accepts."""
    accepted = 0 if generation.server is None else generation.server.accepted or 0
    return max(1, generation.new_tokens - 1 - accepted)


def _kept_per_step(generations: Sequence[Generation]) -> list[float] | None:
    """Return accepted tokens per step by position; ``None`` if the server does not count them."""
    counted = [each for each in generations if each.server is not None and each.server.accepted_at]
    if not counted:
        return None
    kept = [each.server.accepted_at or [] for each in counted if each.server is not None]
    steps = sum(map(_steps, counted))
    longest = max(map(len, kept))
    return [sum(each[at] for each in kept if at < len(each)) / steps for at in range(longest)]
