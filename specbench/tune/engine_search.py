"""The search of `specbench tune --engine`: short tries of servers, a selection, a race, and batches.

As in ``search``, everything is stored as soon as it is measured, and the same call continues a search. Three things
differ, because the passes of a server cannot be timed and every setting is a process of its own:

- A family of settings that differ only in their draft length is predicted from two of them. The longer one tells how
  many tokens shorter drafts would have got accepted, by position; both tell how long a step takes, which is taken to
  grow linearly with the draft length.
- If not all servers of a block fit into memory, several blocks are taken together, and the servers are measured group
  by group, in the reverse order the next time. If two fit, each group has plain decoding in it.
- Batches are measured, with the draft lengths of the winner's family.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench.bench.engines.launched import LaunchedEngine
from specbench.bench.grid import Cell, PromptGroup, Sweep, make_groups
from specbench.bench.stopping import look_due
from specbench.results import stats
from specbench.results.lines import Generation, Group
from specbench.results.run import Tuning
from specbench.rows import Row
from specbench.specs.sweeps import Closed
from specbench.tune.candidates import BLOCKS, best_of_each, select
from specbench.tune.search import StoredSearch, plain_failed

if TYPE_CHECKING:
    from specbench.base.record import Estimate
    from specbench.export.start import EngineSetting
    from specbench.results.store import RunStore

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


class EngineSearch(StoredSearch[LaunchedEngine]):
    """Search for the fastest setting of an engine.

    Args:
        sweep: One configuration for each setting (plain decoding first), then those for each batch size.
        settings: The settings by the ids of their configurations without a batch.
        store, engine, named: See ``StoredSearch``.
    """

    more = "--resume"

    def __init__(
        self,
        sweep: Sweep,
        settings: Mapping[str, EngineSetting],
        store: RunStore,
        engine: LaunchedEngine,
        **named: Any,
    ) -> None:
        super().__init__(sweep, store, engine, **named)
        self._settings = settings

    @property
    def overhead_s(self) -> float:
        return sum(each.seconds for each in self._engine.starts.values())

    def drafter_of(self, name: str) -> str:
        return self._settings[name].family

    def _measure_more(self) -> None:
        if self.race.leader != self._plain and self.race.verdict in ("faster", "open"):
            winner = self._settings[self.race.leader]
            self.batches = self._measure_batches(winner)

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
            name: value
            for name, value in predict(self._settings, tried, plain).items()
            if value > 0 and families[name] not in failed
        }
        return select(
            predicted,
            lambda name: plain_s / predicted[name] + (0.0 if name in self._engine.running else start_s),
            max(0.0, _RACING * self._seconds - (self._clock.now() - self._began)) - plain_s,
            families,
            failed,
            lengths=families,
            most=_LENGTHS,
            needed=best_of_each(self.needs(predicted), predicted),
        )

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

    @property
    def _race_ends(self) -> float:
        share = _RACING - (_BATCHING if self._sweep.options.batches else 0.0)
        return self._until - (1.0 - share) * self._seconds

    def _start_s(self, name: str) -> float:
        start = self._engine.starts.get(name)
        return 0.0 if name in self._engine.running or start is None else start.seconds

    def _several(self) -> int:
        """Return 1 if all servers fit, else the number of blocks until the next look, at most 16."""
        if self._engine.fits(self.race.running):
            return 1
        return next((number for number in range(1, 16) if look_due(self.race.blocks + number)), 16)

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

    # -- batches -----------------------------------------------------------------------------------

    def _measure_batches(self, winner: EngineSetting) -> dict[int, dict[int, Estimate]]:
        """Return throughput over plain decoding by batch size and draft length, as far as there is time.

        The draft lengths are the winner's, half of it and 1: the best length does not grow with the batch.
        """
        of_family = {
            each.gamma: each.name for each in self._settings.values() if each.family == winner.family
        }
        lengths = (winner.gamma, max(1, winner.gamma // 2), 1)
        servers = {0: self._settings[self._plain].name}
        servers |= {gamma: of_family[gamma] for gamma in lengths if gamma in of_family}
        found: dict[int, dict[int, Estimate]] = {}
        for batch in self._sweep.options.batches:
            configs = {gamma: self._at(server, batch) for gamma, server in servers.items()}
            logs: dict[int, list[float]] = {gamma: [] for gamma in configs}
            for repeat, group in enumerate(make_groups(self._sweep.prompts, Closed(batch))[:_GROUPS]):
                began = self._clock.now()
                for gamma, speed in self._log_speeds(configs, group, repeat).items():
                    logs[gamma].append(speed)
                if self._clock.now() + (self._clock.now() - began) > self._until:
                    break
            if not logs[0]:
                break
            found[batch] = {
                gamma: stats.geometric_mean(np.exp(np.subtract(each, logs[0])), range(len(each)))
                for gamma, each in logs.items()
                if len(each) == len(logs[0])
            }
        return found

    def _at(self, server: str, batch: int) -> Row:
        """Return the configuration of a server at a batch size."""
        return next(
            each for each in self._sweep.configs if (each.drafter, each.condition.batch) == (server, batch)
        )

    def _log_speeds(self, configs: Mapping[int, Row], group: PromptGroup, repeat: int) -> dict[int, float]:
        """Return the logarithms of tokens per second on a group, of those that there is time for and that work.

        Server by server, since batches fill the machine, and forth and back, so that drift is alike.
        """
        found = {}
        for place, name in enumerate(list(configs)[:: -1 if repeat % 2 else 1]):
            config = configs[name]
            seed = random.Random(f"{self._sweep.options.seed}/{group.id}").getrandbits(31)
            cell = Cell(config.id, group.id, 0, repeat, place, warmup=False, seed=seed, group=group)
            if cell.key not in self._stored and self._clock.now() > self._until:
                break
            self._report(f"batches of {config.condition.batch}: {config.drafter}", 0, None)
            result = self._measure(cell).result
            if isinstance(result, Group) and result.seconds > 0 and result.tokens:
                found[name] = math.log(result.tokens / result.seconds)
        return found


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
