"""The searches of `specbench tune`: short tries of all candidates, predictions, a selection, a race, and its ending.

``Search`` races specbench's own configurations, ``engine_search.EngineSearch`` the settings of a server.

Measurements are stored immediately, in a run folder like a sweep's (``results.store``): tries as warm-ups, races as
ordinary generations. Stored results are never measured again, so the same call resumes a search: the race is replayed
over the stored timings, which takes no time, and continues from there.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from specbench.base.errors import RunError
from specbench.base.load import LoadSnapshot, load_snapshot
from specbench.bench.engines.engine import BenchEngine
from specbench.bench.grid import Cell, Sweep
from specbench.bench.passes import pass_costs
from specbench.bench.runner import CellRunner, finish_run
from specbench.decoding.theory import PassCosts, never_falling
from specbench.results.lines import Generation, Key, Measurement
from specbench.results.run import Tuning
from specbench.tune.candidates import Probe, predict, probes_of, select
from specbench.tune.race import Block, Race, Timing, relative_slowdown, run_race

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.decoding.clocks import Clock
    from specbench.results.run import RunWarning
    from specbench.results.store import RunStore

TRIED_PROMPTS, TRIED_TOKENS = 4, 32
_COST_ROUNDS = 3
"""Rounds of timing single passes, if these are short."""

_TIMING, _TRYING, _RACING = 0.05, 0.3, 0.6
"""Shares of the time: no further timing round after the first, no further tries after the second, and candidates are
selected so that their blocks fit into the third."""

_MORE_TIME = 4
"""Time to advise where it was too short, as a multiple of what was spent."""

_PLAIN_FAILURES = 3
"""Failures of plain decoding, without a success before, that end the search."""

Raced = TypeVar("Raced", bound=BenchEngine[Any])


class StoredSearch(Generic[Raced]):
    """What both searches share: iterate over ``measure``, then read the attributes.

    Args:
        sweep: The configurations (plain decoding first), prompts in the order of the race, and options; ``repeats``
            limits the race.
        seconds: Total time.
        until: When the time is over, on the clock. Stored results take no time.
        snapshot: Reads the machine load before and after each generation.

    Attributes:
        more: Options that continue the search.
        race: The race.
        predicted: Predicted speedups over plain decoding, by id.
        left_out: Why configurations were not raced, by id.
        warnings: What is doubtful about the run.
        batches: Throughput over plain decoding, by batch size and draft length; 0 stands for plain decoding.
    """

    more = "--resume --overwrite"
    race: Race

    def __init__(
        self,
        sweep: Sweep,
        store: RunStore,
        engine: Raced,
        *,
        clock: Clock,
        seconds: float,
        until: float,
        progress: Progress | None = None,
        snapshot: Callable[[], LoadSnapshot] = load_snapshot,
    ) -> None:
        self._sweep, self._store, self._engine = sweep, store, engine
        self._clock, self._seconds, self._until, self._progress = clock, seconds, until, progress
        self._began = clock.now()
        self._runner = CellRunner(sweep, store, engine, snapshot)
        self._stored: dict[Key, Measurement] = {each.key: each for each in store.measurements()}
        self._plain = sweep.configs[0].id
        self._plain_failures: list[str] = []
        self._durations: dict[str, float] = {}
        self.predicted: Mapping[str, float] = {}
        self.left_out: Mapping[str, str] = {}
        self.warnings: tuple[RunWarning, ...] = ()
        self.batches: dict[int, dict[int, float]] = {}

    # What the searches differ in.

    def _find(self) -> Tuning:
        """Try the candidates; return predicted speedups and what to race."""
        raise NotImplementedError

    def _run(self, blocks: Sequence[Block]) -> Iterator[Race]:
        """Race; yield whenever blocks were measured."""
        raise NotImplementedError

    def _measure_more(self) -> None:
        """Measure what the answer needs in addition to the race."""

    @property
    def overhead_s(self) -> float:
        """Time for everything except the race, such as loading."""
        raise NotImplementedError

    # ...

    def measure(self) -> Iterator[Race]:
        """Try, select, race, and measure what the answer needs in addition; yield whenever blocks were raced.

        A user who interrupts a race with a complete block gets the best so far.

        Raises:
            RunError: Plain decoding fails, passes cannot be timed, the time is up before anything could be predicted,
                or the store cannot be written. Stored measurements are kept.
            KeyboardInterrupt: Interrupted before the first block was complete; the current generation is lost.
        """
        tuning = self._store.run.tuning
        if tuning is None:  # later calls race the same, so that all raced configurations have equal blocks
            tuning = self._find()
        # New measurements can change an earlier answer.
        tuning = msgspec.structs.replace(tuning, ranking=[], verdict=None, answer=None)
        self._store.update(tuning=tuning, finished=None)
        self.predicted, self.left_out = tuning.predicted, tuning.left_out
        # All prompts once before any of them again: other prompts tell more than repeats.
        repeats, prompts = range(self._sweep.options.repeats), self._sweep.prompts
        blocks = [Block(prompt.id, repeat, prompt.category) for repeat in repeats for prompt in prompts]
        race = self.race = Race(tuning.raced, self._plain, limit=len(blocks), expected=tuning.predicted)
        try:
            yield from self._run(blocks)
            if not race.blocks and race.ending != "time":
                raise RunError(
                    "Outputs have no token after the first one, so there are no speeds to compare.",
                    "Choose other prompts, or add --ignore-eos.",
                )
            self._measure_more()
            self.warnings = finish_run(
                self._sweep, self._store, self._engine, in_time=lambda: self._clock.now() < self._until
            )
        except KeyboardInterrupt:
            if not race.blocks:
                raise
            race.look(last=True)
            race.ending = "interrupted"
        self._store.update(tuning=msgspec.structs.replace(tuning, ranking=race.ranking, verdict=race.verdict))
        if not race.decided:  # --resume continues it
            self._store.update(finished=None)

    @property
    def block_s(self) -> float:
        """Duration of a block with the remaining candidates, according to their latest times."""
        return sum(self._durations.get(name, 0.0) for name in self.race.running)

    def _report(self, stage: str, done: int, total: int | None) -> None:
        if self._progress is not None:
            self._progress.update(stage, done, total)

    def _measure(self, cell: Cell, tokens: int = 0) -> Measurement:
        """Return the stored measurement of a cell, or measure and store it; ``tokens`` limits a try."""
        if cell.key not in self._stored:
            found = self._runner.measure(cell, tokens) if cell.warmup else self._runner.measure(cell)
            self._stored[cell.key] = self._store.append(found)
        return self._stored[cell.key]

    def _seed(self, prompt: str, what: str) -> int:
        """Return a seed of sampling that all configurations of a block share."""
        return random.Random(f"{self._sweep.options.seed}/{what}/{prompt}").getrandbits(31)

    def _try(
        self, families: Mapping[str, str], share: float, *, until: float = math.inf, in_turn: bool = True
    ) -> tuple[dict[str, list[Generation]], dict[str, str]]:
        """Measure short generations.

        Args:
            families: What to try, plain decoding first, and their families: if one fails, the others are not tried.
            share: Share of the time after which nothing is tried twice.
            until: When to stop, on the clock.
            in_turn: Whether all decode a prompt before the next prompt begins.

        Returns:
            The generations by id, and the errors by family.

        Raises:
            RunError: Plain decoding failed.
        """
        tried: dict[str, list[Generation]] = {name: [] for name in families}
        failed: dict[str, str] = {}
        prompts = self._sweep.prompts[:TRIED_PROMPTS]
        pairs = [(name, prompt.id) for name in families for prompt in prompts]
        if in_turn:
            pairs = [(name, prompt.id) for prompt in prompts for name in families]
        for done, (name, prompt) in enumerate(pairs):
            now, family = self._clock.now(), families[name]
            late = now - self._began > share * self._seconds and tried[name]
            if late or (family in failed and name != self._plain) or (done and now > until):
                continue
            self._report("trying drafters", done, len(pairs))
            cell = Cell(name, prompt, 0, 0, 0, warmup=True, seed=self._seed(prompt, "try"))
            measured = self._measure(cell, TRIED_TOKENS)
            if isinstance(measured.result, Generation):
                tried[name].append(measured.result)
            else:
                failed[family] = str(measured.line.error)
        if not tried[self._plain]:
            raise _plain_failed(failed[families[self._plain]], "Speedups need it as the baseline.")
        return tried, failed

    def _time(self, cell: Cell) -> Timing | None:
        """Return a candidate's timing on a block, from the store if it is there; ``None`` if it failed."""
        measured = self._measure(cell)
        result = measured.result
        if isinstance(result, Generation):
            self._durations[cell.config] = result.total_s
            slowdown = relative_slowdown(result.steps.nodes, result.steps.verify_s, self._single_costs)
            return Timing(result.new_tokens - result.first_tokens, result.decode_s, slowdown)
        if cell.config == self._plain:
            self._plain_failures.append(str(measured.line.error))
            if self._plain not in self._durations and len(self._plain_failures) >= _PLAIN_FAILURES:
                raise _plain_failed(self._plain_failures[-1], "Choose other prompts.")
        return None

    @cached_property
    def _single_costs(self) -> PassCosts:
        """The times of single forward passes that are stored when the race begins."""
        costs = pass_costs(self._store.costs())
        return msgspec.structs.replace(costs, target_s=never_falling(costs.target_s))


def _plain_failed(error: str, hint: str) -> RunError:
    return RunError(f"Plain decoding failed: {error.rstrip('.')}.", hint)


class Search(StoredSearch[BenchEngine[Sequence[int]]]):
    """Search for the fastest configuration of a grid.

    Args:
        kept: Groups of ids, such as the configurations that an engine supports; the best of each is raced, see
            ``select``.
        sweep, store, engine, named: See ``StoredSearch``.
    """

    def __init__(
        self,
        sweep: Sweep,
        store: RunStore,
        engine: BenchEngine[Sequence[int]],
        *,
        kept: Iterable[Collection[str]] = (),
        **named: Any,
    ) -> None:
        super().__init__(sweep, store, engine, **named)
        self._kept = kept
        self._loading_s = self._seconds - (self._until - self._clock.now())
        self._places = Counter[Block]()

    @property
    def overhead_s(self) -> float:
        return self._loading_s

    def _find(self) -> Tuning:
        configs = self._sweep.configs
        families = {config.id: config.drafter for config in (configs[0], *probes_of(configs))}
        tried, failed = self._try(families, _TRYING, until=self._until)
        if self._clock.now() > self._until:
            spent = self._seconds - (self._until - self._clock.now())
            minutes = math.ceil(_MORE_TIME * max(self._seconds, spent) / 60)
            raise RunError(
                "The time was too short to compare anything.",
                f"Results so far are kept; continue with --resume --minutes {minutes}.",
            )
        costs = self._measure_costs()
        probes = {name: Probe.of(each.steps for each in made) for name, made in tried.items() if made}
        return select(
            configs,
            predict(configs, probes, costs),
            plain_s=costs.target_s[1] * (self._sweep.options.decoding.max_new_tokens - 1),
            first_s=tried[self._plain][0].ttft_s,
            seconds=_RACING * self._seconds,
            failed=failed,
            kept=self._kept,
        )

    def _measure_costs(self) -> PassCosts:
        """Return the times of single passes: those that are stored, or new ones."""
        if not self._store.costs():
            began = self._clock.now()
            for done in range(_COST_ROUNDS):
                if done and self._clock.now() - began > _TIMING * self._seconds:
                    break
                self._report("timing passes", done, _COST_ROUNDS)
                if problem := self._runner.measure_costs():
                    raise RunError(f"Single passes could not be timed: {problem}")
        return pass_costs(self._store.costs())

    def _run(self, blocks: Sequence[Block]) -> Iterator[Race]:
        return run_race(
            self.race,
            blocks,
            self._measure_candidate,
            clock=self._clock,
            until=self._until,
            seed=self._sweep.options.seed,
            is_stored=lambda name, block: self._cell(name, block).key in self._stored,
        )

    def _measure_candidate(self, name: str, block: Block) -> Timing | None:
        self._places[block] += 1
        return self._time(self._cell(name, block, self._places[block] - 1))

    def _cell(self, name: str, block: Block, place: int = 0) -> Cell:
        seed = self._seed(block.prompt, str(block.repeat))
        return Cell(name, block.prompt, 0, block.repeat, place, warmup=False, seed=seed)
