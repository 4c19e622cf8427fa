"""The search of `specbench tune`: short tries of all drafters, a selection, and a race over real generations.

Measurements are stored immediately, in a run folder like a sweep's (``results.store``): tries as warm-ups, races as
ordinary generations. Stored results are never measured again, so the same call resumes a search: the race is replayed
over the stored timings, which takes no time, and continues from there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from specbench.base.errors import RunError
from specbench.bench.engines.engine import BenchEngine
from specbench.bench.grid import Cell, Sweep
from specbench.bench.passes import pass_costs
from specbench.bench.runner import CellRunner, finish_run
from specbench.decoding.theory import PassCosts, never_falling
from specbench.results.lines import Generation, Key, Measurement, StepLists
from specbench.results.load import LoadSnapshot, load_snapshot
from specbench.results.run import Tuning
from specbench.rows import Row
from specbench.tune.candidates import Probe, Selection, predict, probes_of, select
from specbench.tune.race import Block, Ending, Race, Timing, relative_slowdown, run_race

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

BLOCKS = 8
"""Blocks that the time should suffice for."""

_MORE_TIME = 4
"""Time to advise where it was too short, as a multiple of what was spent."""

_PLAIN_FAILURES = 3
"""Failures of plain decoding, without a success before, that end the search."""


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        predicted: Predicted speedups over plain decoding, by id.
        left_out: Why configurations were not raced, by id.
        block_s: Duration of a block with the remaining candidates, according to their latest times.
        overhead_s: Time for everything except the race, such as loading.
        more: Options that continue the search.
        batches: Throughput over plain decoding, by batch size and draft length; 0 stands for plain decoding.
    """

    race: Race
    ending: Ending
    predicted: Mapping[str, float]
    left_out: Mapping[str, str]
    block_s: float
    overhead_s: float
    warnings: tuple[RunWarning, ...]
    more: str
    batches: Mapping[int, Mapping[int, float]] = field(default_factory=dict)


Raced = TypeVar("Raced", bound=BenchEngine[Any])


class StoredSearch(Generic[Raced]):
    """What the searches of `specbench tune` share: a selection, a race, and batches, all stored at once.

    Args:
        sweep: The configurations (plain decoding first), prompts in the order of the race, and options; ``repeats``
            limits the race.
        seconds: Total time.
        until: When the time is over, on the clock. Stored results take no time.
        snapshot: Reads the machine load before and after each generation.
    """

    more = "--resume --overwrite"
    """Options that continue the search."""

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
        self._runner = CellRunner(sweep, store, engine, snapshot)
        self._stored: dict[Key, Measurement] = {each.key: each for each in store.measurements()}
        self._plain = sweep.configs[0].id
        self._durations: dict[str, float] = {}
        self._batches: dict[int, dict[int, float]] = {}

    def _find(self) -> tuple[Mapping[str, float], Selection]:
        """Try, and return predicted speedups and what to race."""
        raise NotImplementedError

    def _race(self, race: Race, blocks: Sequence[Block], on_block: Callable[[Race], None]) -> Ending:
        raise NotImplementedError

    def _measure_more(self, race: Race) -> None:
        """Measure what the answer needs in addition to the race."""

    def _overhead_s(self) -> float:
        """Return ``Found.overhead_s``."""
        raise NotImplementedError

    def run(self, on_block: Callable[[Race], None] = lambda _: None) -> Found:
        """Try, select, race, and measure what the answer needs in addition.

        Raises:
            RunError: Plain decoding fails, passes cannot be timed, the time is up before anything could be predicted,
                or the store cannot be written. Stored measurements are kept.
            KeyboardInterrupt: Interrupted before the first block was complete; the current generation is lost.
        """
        tuning = self._store.run.tuning
        if tuning is not None and tuning.ranking:  # new measurements can change an earlier answer
            tuning = msgspec.structs.replace(tuning, ranking=[], verdict=None, answer=None)
            self._store.update(tuning=tuning, finished=None)
        predicted, selection = self._select()
        # All prompts once before any of them again: other prompts tell more than repeats.
        repeats, prompts = range(self._sweep.options.repeats), self._sweep.prompts
        blocks = [Block(prompt.id, repeat, prompt.category) for repeat in repeats for prompt in prompts]
        race = Race(selection.raced, self._plain, limit=len(blocks), expected=predicted)
        warnings: tuple[RunWarning, ...] = ()
        try:
            ending = self._race(race, blocks, on_block)
            self._measure_more(race)
            warnings = finish_run(
                self._sweep, self._store, self._engine, in_time=lambda: self._clock.now() < self._until
            )
        except KeyboardInterrupt:
            if not race.blocks:
                raise
            race.look(last=True)
            ending = "interrupted"
        tuning = self._store.run.tuning
        assert tuning is not None
        tuning = msgspec.structs.replace(tuning, ranking=list(race.ranking), verdict=race.verdict)
        self._store.update(tuning=tuning)
        if not race.decided:  # --resume continues it
            self._store.update(finished=None)
        block_s = sum(self._durations.get(name, 0.0) for name in race.running)
        return Found(
            race,
            ending,
            predicted,
            selection.left_out,
            block_s,
            self._overhead_s(),
            warnings,
            self.more,
            self._batches,
        )

    def _select(self) -> tuple[Mapping[str, float], Selection]:
        """Return predictions and selection.
        Once stored they are not changed, so that all raced configurations have equal blocks.
        """
        stored = self._store.run.tuning
        if stored is not None:
            return stored.predicted, Selection(tuple(stored.raced), stored.left_out)
        predicted, selection = self._find()
        self._store.update(
            tuning=Tuning(
                predicted=dict(predicted), raced=list(selection.raced), left_out=dict(selection.left_out)
            )
        )
        return predicted, selection

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
        self._block: tuple[Block, int] | None = None
        self._plain_works = False
        self._plain_failures = 0

    def _overhead_s(self) -> float:
        return self._loading_s

    def _race(self, race: Race, blocks: Sequence[Block], on_block: Callable[[Race], None]) -> Ending:
        ending = run_race(
            race,
            blocks,
            self._measure_block,
            clock=self._clock,
            until=self._until,
            seed=self._sweep.options.seed,
            on_block=on_block,
            is_stored=lambda name, block: self._cell(name, block, 0).key in self._stored,
        )
        if not race.blocks and ending != "time":
            raise RunError(
                "Outputs have no token after the first one, so there are no speeds to compare.",
                "Choose other prompts, or add --ignore-eos.",
            )
        return ending

    # -- what to race ------------------------------------------------------------------------------

    def _find(self) -> tuple[Mapping[str, float], Selection]:
        probes, failed = self._try_drafters()
        costs = self._measure_costs()
        expected = predict(self._sweep.configs, probes, costs)
        predicted = {name: round(value, 4) for name, value in expected.items()}
        plain = self._measure(self._try_cell(self._sweep.configs[0], 0), TRIED_TOKENS).result
        return predicted, select(
            self._sweep.configs,
            predicted,
            plain_s=costs.target_s[1] * (self._sweep.options.decoding.max_new_tokens - 1),
            first_s=plain.ttft_s if isinstance(plain, Generation) else 0.0,
            seconds=_RACING * self._seconds,
            blocks=BLOCKS,
            failed=failed,
            kept=self._kept,
        )

    def _try_drafters(self) -> tuple[dict[str, Probe], dict[str, str]]:
        """Return the steps of short generations by configuration, and errors by drafter."""
        plain = self._sweep.configs[0]
        tried = [plain, *probes_of(self._sweep.configs)]
        number = min(TRIED_PROMPTS, len(self._sweep.prompts))
        began = self._clock.now()
        steps: dict[str, list[StepLists]] = {config.id: [] for config in tried}
        failed: dict[str, str] = {}
        for prompt in range(number):
            for place, config in enumerate(tried):
                late = self._clock.now() - began > _TRYING * self._seconds
                if (prompt and late) or self._clock.now() > self._until:
                    break
                self._report("trying drafters", prompt * len(tried) + place, number * len(tried))
                measured = self._measure(self._try_cell(config, prompt), TRIED_TOKENS)
                if isinstance(measured.result, Generation):
                    steps[config.id].append(measured.result.steps)
                else:
                    failed[config.drafter] = str(measured.line.error)
        if (error := failed.get(plain.drafter)) and not steps[plain.id]:
            raise RunError(
                f"Plain decoding failed: {error.rstrip('.')}.", "Speedups need it as the baseline."
            )
        if self._clock.now() > self._until:
            spent = self._seconds - (self._until - self._clock.now())
            minutes = math.ceil(_MORE_TIME * max(self._seconds, spent) / 60)
            raise RunError(
                "The time was too short to compare anything.",
                f"Results so far are kept; continue with --resume --minutes {minutes}.",
            )
        return {name: Probe.from_steps(each) for name, each in steps.items() if each}, failed

    def _try_cell(self, config: Row, prompt: int) -> Cell:
        name = self._sweep.prompts[prompt].id
        return Cell(config.id, name, 0, 0, 0, warmup=True, seed=self._seed(name, "try"))

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

    # -- the race ----------------------------------------------------------------------------------

    def _measure_block(self, name: str, block: Block) -> Timing | None:
        """Return a candidate's timing on a block, from the store if it is there; ``None`` if it failed."""
        place = self._block[1] + 1 if self._block is not None and self._block[0] == block else 0
        self._block = block, place
        cell = self._cell(name, block, place)
        began = self._clock.now()
        stored = cell.key in self._stored
        measured = self._measure(cell)
        result = measured.result
        if not isinstance(result, Generation):
            self._durations[name] = 0.0 if stored else self._clock.now() - began
            if name == self._plain:
                self._plain_failures += 1
                if not self._plain_works and self._plain_failures >= _PLAIN_FAILURES:
                    error = str(measured.line.error).rstrip(".")
                    raise RunError(f"Plain decoding failed: {error}.", "Choose other prompts.")
            return None
        self._durations[name] = result.total_s if stored else self._clock.now() - began
        self._plain_works |= name == self._plain
        steps = result.steps
        slowdown = relative_slowdown(steps.nodes, steps.verify_s, self._single_costs)
        return Timing(result.new_tokens - result.first_tokens, result.decode_s, slowdown)

    def _cell(self, name: str, block: Block, place: int) -> Cell:
        seed = self._seed(block.prompt, str(block.repeat))
        return Cell(name, block.prompt, 0, block.repeat, place, warmup=False, seed=seed)

    @cached_property
    def _single_costs(self) -> PassCosts:
        """The times of single forward passes that are stored when the race begins."""
        costs = pass_costs(self._store.costs())
        return msgspec.structs.replace(costs, target_s=never_falling(costs.target_s))
