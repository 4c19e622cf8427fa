"""The search of `specbench tune --engine`: short tries of servers, a selection, a race, and batches.

As in ``search``, everything is stored as soon as it is measured, and the same call continues a search. Three things
differ, because the passes of a server cannot be timed and every setting is a process of its own:

- A family of settings that differ only in their draft length is predicted from two of them. The longer one tells how
  many tokens shorter drafts would have got accepted, by position; both tell how long a step takes, which is taken to
  grow linearly with the draft length.
- If not all servers of a block fit into memory, several blocks are taken together, and the servers are measured group
  by group, in the reverse order the next time. If two fit, each group has plain decoding in it, and its times are
  divided by how much slower plain decoding was in it than in the first group.
- Batches are measured, with the draft lengths of the winner's family. The schedule that follows from them is started as
  a server, and raced under the same load.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from msgspec.structs import replace

from specbench.bench.engines.launched import CommandLine, LaunchedEngine
from specbench.bench.grid import Cell, PromptGroup, Sweep, make_groups
from specbench.bench.stopping import look_due
from specbench.export.start import SCHEDULE
from specbench.results import stats
from specbench.results.lines import Generation, Group
from specbench.results.run import Tuning
from specbench.rows import Row
from specbench.specs.sweeps import Closed
from specbench.tune.candidates import BLOCKS, best_of_each, select_in_time, slower_lengths
from specbench.tune.engine_answer import Range, ScheduleRace, best_single, schedule
from specbench.tune.race import Block, Race, Timing, Timings, run_blocks, shuffled
from specbench.tune.search import StoredSearch, plain_failed

if TYPE_CHECKING:
    from specbench.export.start import EngineSetting
    from specbench.results.store import RunStore

Named = TypeVar("Named", int, str)

_SHORT = 2
"""Draft length of the shorter try of a family; the other is its longest."""

_LENGTHS = 3
"""Draft lengths of a family that are raced at most."""

_TRYING, _RACING, _BATCHING = 0.35, 0.85, 0.3
"""Shares of the time: no further tries after the first, the race ends by the second, or by that minus the third if
batches are to be measured."""

_TRIED_PROMPTS, _TRIED_TOKENS = 4, 32
"""Prompts of the short tries, and tokens of each."""

_GROUPS = 3
"""Groups of requests that each setting decodes at a batch size, at most."""

_SCHEDULING, _ROUNDS = 0.1, 8
"""Share of the time that is kept for a race of the draft lengths by batch size, and its rounds at most."""


class EngineSearch(StoredSearch[LaunchedEngine]):
    """Search for the fastest setting of an engine.

    Args:
        sweep: One configuration for each setting (plain decoding first), then those for each batch size.
        settings: The settings by the ids of their configurations without a batch.
        scheduled: Returns the command line of a setting with a draft length by batch size; ``None`` without one.
        store, engine, named: See ``StoredSearch``.

    Attributes:
        schedule: The race of the draft lengths by batch size; ``None`` if there was none.
    """

    more = "--resume"

    def __init__(
        self,
        sweep: Sweep,
        settings: Mapping[str, EngineSetting],
        store: RunStore,
        engine: LaunchedEngine,
        *,
        scheduled: Callable[[EngineSetting, Sequence[Range]], CommandLine | None] = lambda *_: None,
        **named: Any,
    ) -> None:
        super().__init__(sweep, store, engine, **named)
        self._settings, self._scheduled = settings, scheduled
        self.schedule: ScheduleRace | None = None

    @property
    def overhead_s(self) -> float:
        return sum(each.seconds for each in self._engine.starts.values())

    def drafter_of(self, name: str) -> str:
        return self._settings[name].family

    def _measure_more(self) -> None:
        if self.race.leader != self._plain and self.race.verdict in ("faster", "open"):
            winner = self._settings[self.race.leader]
            self.batches = self._measure_batches(winner)
            self.schedule = self._race_schedule(winner)

    # -- what to race ------------------------------------------------------------------------------

    def _find(self) -> Tuning:
        names = [self._plain, *tries_of(self._settings)]
        families = {name: each.family for name, each in self._settings.items() if each.family}
        together = self._engine.fits(names)
        tried, failed = self._try({name: self._settings[name].family for name in names}, in_turn=together)
        plain = tried[self._plain]
        mean_s = float(np.mean([each.total_s / max(1, each.new_tokens) for each in plain]))
        plain_s = BLOCKS * mean_s * self._sweep.options.decoding.max_new_tokens
        start_s = max((start.seconds for start in self._engine.starts.values()), default=0.0)
        predicted = {
            name: round(value, 4)
            for name, value in predict(self._settings, tried, plain).items()
            if value > 0 and families[name] not in failed
        }
        others = slower_lengths(predicted, families, _LENGTHS)
        selected = select_in_time(
            left := {name: value for name, value in predicted.items() if name not in others},
            lambda name: plain_s / predicted[name] + (0.0 if name in self._engine.running else start_s),
            max(0.0, _RACING * self._seconds - (self._clock.now() - self._began)) - plain_s,
            {name: family for name, family in families.items() if name not in others},
            failed,
            best_of_each(self.needs(left), left),
        )
        left_out = selected.left_out | dict.fromkeys(others, "other draft lengths are predicted to be faster")
        return replace(selected, predicted=predicted, left_out=left_out)

    def _try(
        self, families: Mapping[str, str], *, in_turn: bool
    ) -> tuple[dict[str, list[Generation]], dict[str, str]]:
        """Measure short generations.

        Args:
            families: What to try, plain decoding first, and their families: if one fails, the others are not tried.
            in_turn: Whether all decode a prompt before the next prompt begins.

        Returns:
            The generations by id, and the errors by family.

        Raises:
            RunError: Plain decoding failed.
        """
        tried: dict[str, list[Generation]] = {name: [] for name in families}
        failed: dict[str, str] = {}
        prompts = self._sweep.prompts[:_TRIED_PROMPTS]
        pairs = [(name, prompt.id) for name in families for prompt in prompts]
        if in_turn:
            pairs = [(name, prompt.id) for prompt in prompts for name in families]
        for done, (name, prompt) in enumerate(pairs):
            family = families[name]
            late = self._clock.now() - self._began > _TRYING * self._seconds and tried[name]
            if late or (family in failed and name != self._plain):
                continue
            self._report("trying drafters", done, len(pairs))
            cell = Cell(name, prompt, 0, 0, 0, warmup=True, seed=self._seed(prompt, "try"))
            measured = self._measure(cell, _TRIED_TOKENS)
            if isinstance(measured.result, Generation):
                tried[name].append(measured.result)
            else:
                failed[family] = str(measured.line.error)
        if not tried[self._plain]:
            raise plain_failed(failed[families[self._plain]], "Speedups need it as the baseline.")
        return tried, failed

    # -- the race ----------------------------------------------------------------------------------

    def _run(self, blocks: Sequence[Block]) -> Iterator[Race]:
        """Run the race, block by block, or several blocks at a time if not all servers fit."""
        share = _RACING - (_BATCHING if self._sweep.options.batches else 0.0)
        until = self._until - (1.0 - share) * self._seconds
        race, rounds = self.race, count()
        return run_blocks(
            race,
            blocks,
            lambda chunk: self._measure_chunk(chunk, next(rounds), until),
            lambda: 1 if self._engine.fits(race.running) else _blocks_to_look(race.blocks),
        )

    def _measure_chunk(self, chunk: Sequence[Block], number: int, until: float) -> list[Timings] | None:
        """Return the timings of all running settings on some blocks; ``None`` if the time is over before."""
        timings: list[Timings] = [{} for _ in chunk]
        first: dict[Block, Timing] = {}
        for place, group in enumerate(self._groups(self.race.running, number)):
            here: dict[Block, Timing] = {}
            for block, row in zip(chunk, timings, strict=True):
                for name in shuffled(group, block, self._sweep.options.seed):
                    again = place if name == self._plain else 0
                    cell = self._cell(name, block, again)
                    if not self._in_time(cell, until):
                        return None
                    timing = self._time(cell)
                    if name == self._plain and timing is not None:
                        here[block] = timing
                    if name not in row:
                        row[name] = timing
            first = first or here
            slower = _slowdown(here, first)
            for row in timings:
                for name in group:
                    if name != self._plain and (timing := row[name]) is not None:
                        row[name] = Timing(timing.tokens, timing.seconds / slower)
        return timings

    def _groups(self, running: Sequence[str], number: int) -> list[list[str]]:
        """Return the settings that are measured together: all if they fit, else groups with plain decoding in each."""
        limit = self._engine.limit or max(1, self._engine.capacity)
        if all(name in self._engine.running for name in running):
            return [list(running)]
        others = [name for name in running if name != self._plain]
        random.Random(f"groups/{self._sweep.options.seed}/{number // 2}").shuffle(others)
        if number % 2:
            others.reverse()
        if limit == 1:
            return [[name] for name in (self._plain, *others)]
        size = limit - 1
        return [[self._plain, *others[at : at + size]] for at in range(0, max(1, len(others)), size)]

    def _in_time(self, cell: Cell, until: float) -> bool:
        if cell.key in self._stored:
            return True
        name, start = cell.config, self._engine.starts.get(cell.config)
        start_s = 0.0 if name in self._engine.running or start is None else start.seconds
        return self._clock.now() + self._durations.get(name, 0.0) + start_s <= until

    def _cell(self, name: str, block: Block, again: int) -> Cell:
        """Return the cell of a setting on a block; plain decoding is measured ``again`` with other settings."""
        repeat = block.repeat + again * self._sweep.options.repeats
        return Cell(
            name, block.prompt, 0, repeat, 0, warmup=False, seed=self._seed(block.prompt, str(repeat))
        )

    # -- batches -----------------------------------------------------------------------------------

    def _measure_batches(self, winner: EngineSetting) -> dict[int, dict[int, float]]:
        """Return throughput over plain decoding by batch size and draft length, as far as there is time.

        The draft lengths are the winner's, half of it and 1: the best length does not grow with the batch.
        """
        of_family, lengths = self._by_length(winner), (0, winner.gamma, max(1, winner.gamma // 2), 1)
        servers = {gamma: of_family[gamma].name for gamma in dict.fromkeys(lengths) if gamma in of_family}
        # Once the schedule that follows from them has been raced, they are what they are.
        until = -math.inf if self._has_schedule else self._until - _SCHEDULING * self._seconds
        found: dict[int, dict[int, float]] = {}
        for batch in self._sweep.options.batches:
            configs = {gamma: self._at(server, batch) for gamma, server in servers.items()}
            logs: dict[int, list[float]] = {gamma: [] for gamma in configs}
            for repeat, group in enumerate(self._groups_of(batch)[:_GROUPS]):
                began = self._clock.now()
                for gamma, speed in self._log_speeds(configs, group, repeat, until).items():
                    logs[gamma].append(speed)
                if not self._has_schedule and self._clock.now() + (self._clock.now() - began) > until:
                    break
            if not logs[0]:
                break
            speeds = {
                gamma: float(np.mean(each)) for gamma, each in logs.items() if len(each) == len(logs[0])
            }
            found[batch] = {gamma: round(math.exp(log - speeds[0]), 4) for gamma, log in speeds.items()}
        return found

    def _race_schedule(self, winner: EngineSetting) -> ScheduleRace | None:
        """Race the draft lengths by batch size, as a server of its own, against plain decoding and the best single
        setting, in rounds over all batch sizes; ``None`` if they are one length, or the engine cannot do that.
        """
        ranges = schedule(self.batches, winner.gamma)
        command = self._scheduled(winner, ranges) if len(ranges) > 1 else None
        if command is None:
            return None
        self._engine.add(SCHEDULE, command)
        single, of_family = best_single(self.batches), self._by_length(winner)
        plain, alone = (of_family[gamma].name for gamma in (0, single))
        servers = dict.fromkeys((plain, alone, SCHEDULE))
        groups = {batch: self._groups_of(batch) for batch in self.batches}
        logs: dict[str, list[float]] = {name: [] for name in servers}
        start_s = max((start.seconds for start in self._engine.starts.values()), default=0.0)
        in_time = self._has_schedule or self._clock.now() + start_s < self._until
        for number in range(_ROUNDS if in_time else 0):
            means = dict.fromkeys(servers, 0.0)
            for batch, each in groups.items():
                configs = {name: self._at(name, batch) for name in servers}
                speeds = self._log_speeds(configs, each[number % len(each)], _GROUPS + number, self._until)
                for name in servers:
                    means[name] += speeds.get(name, math.nan) / len(groups)
            if any(map(math.isnan, means.values())):
                break  # the time is over, or one of them fails
            for name, mean in means.items():
                logs[name].append(mean)
        distinct = min(map(len, groups.values()))  # rounds with the same prompts are repeats
        units = [number % distinct for number in range(len(logs[SCHEDULE]))]
        over_plain, over_single = (
            stats.geometric_mean(np.exp(np.subtract(logs[SCHEDULE], logs[name])), units, range(len(units)))
            for name in (plain, alone)
        )
        speeds = {SCHEDULE: over_plain.value, plain: 1.0, alone: over_plain.value / over_single.value}
        fastest = max(speeds, key=lambda name: speeds[name])
        instead = next((each for each in (of_family[0], of_family[single]) if each.name == fastest), None)
        return ScheduleRace(ranges, single, over_plain, over_single, instead)

    def _by_length(self, winner: EngineSetting) -> dict[int, EngineSetting]:
        """Return plain decoding and the settings of the winner's family by draft length."""
        family = (each for each in self._settings.values() if each.family == winner.family)
        return {0: self._settings[self._plain], **{each.gamma: each for each in family}}

    @property
    def _has_schedule(self) -> bool:
        """Whether the schedule was raced in an earlier call."""
        return any(key[0].startswith(SCHEDULE) for key in self._stored)

    def _at(self, server: str, batch: int) -> Row:
        """Return the configuration of a server at a batch size."""
        return next(
            each for each in self._sweep.configs if (each.drafter, each.condition.batch) == (server, batch)
        )

    def _groups_of(self, batch: int) -> list[PromptGroup]:
        return make_groups(self._sweep.prompts, Closed(batch))

    def _log_speeds(
        self, configs: Mapping[Named, Row], group: PromptGroup, repeat: int, until: float
    ) -> dict[Named, float]:
        """Return the logarithms of tokens per second on a group, of those that there is time for and that work.

        Server by server, since batches fill the machine, and forth and back, so that drift is alike.
        """
        found = {}
        for place, name in enumerate(list(configs)[:: -1 if repeat % 2 else 1]):
            config = configs[name]
            seed = random.Random(f"{self._sweep.options.seed}/{group.id}").getrandbits(31)
            cell = Cell(config.id, group.id, 0, repeat, place, warmup=False, seed=seed, group=group)
            if cell.key not in self._stored and self._clock.now() > until:
                break
            self._report(f"batches of {config.condition.batch}: {config.drafter}", 0, None)
            result = self._measure(cell).result
            if isinstance(result, Group) and result.seconds > 0 and result.tokens:
                found[name] = math.log(result.tokens / result.seconds)
        return found


def _blocks_to_look(done: int) -> int:
    """Return the number of blocks until the next look, at most 16."""
    return next((number for number in range(1, 16) if look_due(done + number)), 16)


def _slowdown(here: Mapping[Block, Timing], first: Mapping[Block, Timing]) -> float:
    """Return how much longer plain decoding took here than in the first group, on the same blocks."""
    logs = [
        math.log(here[block].seconds / here[block].tokens * first[block].tokens / first[block].seconds)
        for block in here.keys() & first.keys()
        if min(here[block].seconds, first[block].seconds) > 0
        and min(here[block].tokens, first[block].tokens) > 0
    ]
    return math.exp(float(np.mean(logs))) if logs else 1.0


# -- predictions -----------------------------------------------------------------------------------


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

    What was tried has its measured speedup. The others are predicted from the two tries of their family; from the
    measured speedups alone if the server does not count accepted tokens by position.
    """
    plain_s = _seconds_per_token(plain)
    found = {
        name: plain_s / _seconds_per_token(each)
        for name, each in tried.items()
        if each and settings[name].family
    }
    for name, setting in settings.items():
        if name in found or not setting.family:
            continue
        there = [each for each in tried if settings[each].family == setting.family and tried[each]]
        if len(there) < 2:
            continue
        short, long = sorted(there, key=lambda each: settings[each].gamma)[:: len(there) - 1]
        share = (setting.gamma - settings[short].gamma) / (settings[long].gamma - settings[short].gamma)
        rates = _kept_per_step(tried[long])
        if rates is None:
            logs = [math.log(found[each]) for each in (short, long)]
            found[name] = math.exp(logs[0] + min(1.0, max(0.0, share)) * (logs[1] - logs[0]))
            continue
        steps_s = [_seconds_per_step(tried[each]) for each in (short, long)]
        step_s = max(steps_s[0] + share * (steps_s[1] - steps_s[0]), min(steps_s) / 2)
        # The two tries differ from what these rates say of them; the same correction holds in between.
        errors = [
            math.log(found[each] * seconds / ((1.0 + sum(rates[: settings[each].gamma])) * plain_s))
            for each, seconds in zip((short, long), steps_s, strict=True)
        ]
        error = errors[0] + min(1.0, max(0.0, share)) * (errors[1] - errors[0])
        found[name] = plain_s * (1.0 + sum(rates[: setting.gamma])) / step_s * math.exp(error)
    return found


def _seconds_per_token(generations: Sequence[Generation]) -> float:
    tokens = sum(each.new_tokens - each.first_tokens for each in generations)
    return sum(each.decode_s for each in generations) / max(1, tokens)


def _steps(generation: Generation) -> int:
    """Return the number of steps: every step emits one token more than it accepts."""
    accepted = 0 if generation.server is None else generation.server.accepted or 0
    return max(1, generation.new_tokens - 1 - accepted)


def _seconds_per_step(generations: Sequence[Generation]) -> float:
    return sum(each.decode_s for each in generations) / sum(map(_steps, generations))


def _kept_per_step(generations: Sequence[Generation]) -> list[float] | None:
    """Return accepted tokens per step by position; ``None`` if the server does not count them."""
    counted = [each for each in generations if each.server is not None and each.server.accepted_at]
    if not counted:
        return None
    kept = [each.server.accepted_at or [] for each in counted if each.server is not None]
    steps = sum(map(_steps, counted))
    longest = max(map(len, kept))
    return [sum(each[at] for each in kept if at < len(each)) / steps for at in range(longest)]
