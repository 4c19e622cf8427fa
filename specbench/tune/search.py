"""The searches of `specbench tune`: predictions for all candidates, a selection, a race, and its ending.

``Search`` races specbench's own configurations: plain decoding of some prompts and the times of single passes predict
them all. ``engine_search.EngineSearch`` races the settings of a server.

Measurements are stored immediately, in a run folder like a sweep's (``results.store``). Stored results are never
measured again, so the same call resumes a search: the race is replayed over the stored timings, which takes no time,
and continues from there.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from specbench.base.errors import RunError
from specbench.base.load import LoadSnapshot, load_snapshot
from specbench.bench.engines.engine import BenchEngine
from specbench.bench.grid import Cell, Sweep
from specbench.bench.passes import pass_costs
from specbench.bench.session import Session
from specbench.decoding.theory import PassCosts
from specbench.results.lines import Generation, Key, Measurement
from specbench.results.run import Tuning
from specbench.tune.candidates import BLOCKS, best_of_each, race_needs, select
from specbench.tune.race import Block, Race, Timing, relative_slowdown, run_race

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.base.record import Estimate
    from specbench.decoding.clocks import Clock
    from specbench.results.run import RunWarning
    from specbench.results.store import RunStore

_COST_ROUNDS = 3
"""Rounds of timing single passes, if these are short."""

_TIMING, _ANSWERING = 0.05, 0.2
"""Shares of the time: no further timing round after the first, and no further plain output after the second."""

ANSWERS = 8
"""Plain outputs that predictions rest on, at most."""

_WARMUP_TOKENS = 8

_OUTPUTS = 16
"""Plain outputs in whose time a search is done that may take more time than it was given."""

_RACE_OUTPUTS, _SLOW_S, _FEWEST_TOKENS = 20, 180.0, 16
"""Plain outputs in whose time a small race is done; seconds that it may take at least without a limit; and tokens that
outputs have at least, however slow the target is."""

_SPARE = 1.25
"""Time for what has to be raced, as a multiple of what is predicted, if there is no limit."""

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
        asked: What has to be raced in any case, see ``race_needs``.
        snapshot: Reads the machine load before and after each generation.

    Attributes:
        more: Options that continue the search.
        race: The race.
        rows: The configurations by id.
        predicted: Predicted speedups over plain decoding, by id.
        left_out: Why configurations were not raced, by id.
        errors: Why configurations failed in the race, by id.
        tokens: Of an output at most; ``None`` for as many as asked for.
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
        asked: Mapping[str, Collection[str]] = {},
        progress: Progress | None = None,
        snapshot: Callable[[], LoadSnapshot] = load_snapshot,
    ) -> None:
        self._sweep, self._store, self._engine = sweep, store, engine
        self._clock, self._seconds, self._until, self._progress = clock, seconds, until, progress
        self._asked, self._began = asked, clock.now()
        self.errors: dict[str, str] = {}
        self.tokens: int | None = None
        self.rows = {each.id: each for each in sweep.configs}
        self._session = Session(sweep, store, engine, snapshot=snapshot)
        self._stored: dict[Key, Measurement] = {each.key: each for each in store.measurements()}
        self._plain = sweep.configs[0].id
        self._plain_failures: list[str] = []
        self._durations: dict[str, float] = {}
        self._places = Counter[Block]()
        self.predicted: Mapping[str, float] = {}
        self.left_out: Mapping[str, str] = {}
        self.warnings: tuple[RunWarning, ...] = ()
        self.batches: dict[int, dict[int, Estimate]] = {}

    # What the searches differ in.

    def _find(self) -> Tuning:
        """Return predicted speedups and what to race."""
        raise NotImplementedError

    def _measure_more(self) -> None:
        """Measure what the answer needs in addition to the race."""

    @property
    def overhead_s(self) -> float:
        """Time for everything except the race, if it does not begin when models are loaded."""
        return 0.0

    @property
    def _race_ends(self) -> float:
        """When the race has to be over, on the clock."""
        return self._until

    def _start_s(self, name: str) -> float:  # noqa: ARG002
        """Return how long a configuration takes until it can decode."""
        return 0.0

    def _several(self) -> int:
        """Return how many blocks to measure next."""
        return 1

    def _groups(self, running: Sequence[str], number: int) -> list[list[str]]:  # noqa: ARG002
        """Return the configurations that are measured together."""
        return [[*running]]

    # ...

    def measure(self) -> Iterator[Race]:
        """Predict, select, race, and measure what the answer needs in addition; yield whenever blocks were raced.

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
        self.predicted, self.left_out, self.tokens = tuning.predicted, tuning.left_out, tuning.tokens
        # All prompts once before any of them again: other prompts tell more than repeats.
        repeats, prompts = range(self._sweep.options.repeats), self._sweep.prompts
        blocks = [Block(prompt.id, repeat, prompt.category) for repeat in repeats for prompt in prompts]
        race = self.race = Race(tuning.raced, self._plain, limit=len(blocks), expected=tuning.predicted)
        try:
            yield from run_race(
                race, blocks, self._time, in_time=self._in_time, seed=self._sweep.options.seed, several=self._several,
                groups=self._groups,
            )  # fmt: skip
            if not race.blocks and race.ending != "time":
                raise RunError(
                    "Outputs have no token after the first one, so there are no speeds to compare.",
                    "Choose other prompts, or add --ignore-eos.",
                )
            self._measure_more()
            self._session.finish(in_time=lambda: self.left_s > 0)
            self.warnings = self._session.warnings
        except KeyboardInterrupt:
            if not race.blocks:
                raise
            race.look(last=True)
            race.ending = "interrupted"
        self._store.update(tuning=msgspec.structs.replace(tuning, ranking=race.ranking, verdict=race.verdict))
        if not race.decided:  # --resume continues it
            self._store.update(finished=None)

    @property
    def prompts(self) -> int:
        """How many there are."""
        return len(self._sweep.prompts)

    def drafter_of(self, name: str) -> str:
        """Return the drafter of a configuration; an engine's settings differ in more than that."""
        return self.rows[name].drafter

    def needs(self, predicted: Mapping[str, float]) -> dict[str, Collection[str]]:
        """Return what has to be raced beside plain decoding, see ``race_needs``."""
        drafting = [
            each for each in self._sweep.configs if each.id != each.baseline and each.condition.batch is None
        ]
        return race_needs({each.id: self.drafter_of(each.id) for each in drafting}, predicted, self._asked)

    @property
    def left_s(self) -> float:
        """Time that is left."""
        return self._until - self._clock.now()

    @property
    def block_s(self) -> float:
        """Duration of a block with the remaining candidates, according to their latest times."""
        return sum(self._durations.get(name, 0.0) for name in self.race.running)

    def _report(self, stage: str, done: int, total: int | None) -> None:
        if self._progress is not None:
            self._progress.update(stage, done, total)

    def _measure(self, cell: Cell, tokens: int | None = None) -> Measurement:
        """Return the stored measurement of a cell, or measure and store it; ``tokens`` limits its output."""
        if cell.key not in self._stored:
            self._stored[cell.key] = self._store.append(self._session.measure(cell, tokens))
        return self._stored[cell.key]

    def _seed(self, prompt: str, what: str) -> int:
        """Return a seed of sampling that all configurations of a block share."""
        return random.Random(f"{self._sweep.options.seed}/{what}/{prompt}").getrandbits(31)

    def _cell(self, name: str, block: Block, again: int = 0) -> Cell:
        """Return the cell of a candidate on a block; for ``again`` see ``run_race``."""
        repeat = block.repeat + again * self._sweep.options.repeats
        seed, place = self._seed(block.prompt, str(repeat)), self._places[block]
        return Cell(name, block.prompt, 0, repeat, place, warmup=False, seed=seed)

    def _in_time(self, name: str, block: Block, again: int) -> bool:
        """Return whether a generation is stored, or would probably end in time."""
        expected_s = self._durations.get(name, 0.0) + self._start_s(name)
        return (
            self._cell(name, block, again).key in self._stored
            or self._clock.now() + expected_s <= self._race_ends
        )

    def _time(self, name: str, block: Block, again: int) -> Timing | None:
        """Return a candidate's timing on a block, from the store if it is there; ``None`` if it failed."""
        cell = self._cell(name, block, again)
        self._places[block] += 1
        measured = self._measure(cell, self.tokens)
        result = measured.result
        if isinstance(result, Generation):
            self._durations[cell.config] = result.total_s
            slowdown = relative_slowdown(result.steps.nodes, result.steps.verify_s, self._single_costs)
            return Timing(result.new_tokens - result.first_tokens, result.decode_s, slowdown)
        self.errors[cell.config] = str(measured.line.error)
        if cell.config == self._plain:
            self._plain_failures.append(str(measured.line.error))
            if self._plain not in self._durations and len(self._plain_failures) >= _PLAIN_FAILURES:
                raise plain_failed(self._plain_failures[-1], "Choose other prompts.")
        return None

    @cached_property
    def _single_costs(self) -> PassCosts:
        """The times of single forward passes that are stored when the race begins."""
        return pass_costs(self._store.costs())


def plain_failed(error: str, hint: str) -> RunError:
    """Return the error that there is no baseline."""
    return RunError(f"Plain decoding failed: {error.rstrip('.')}.", hint)


class Search(StoredSearch[BenchEngine[Sequence[int]]]):
    """Search for the fastest configuration of a grid.

    Args:
        predict: Predicts speedups over plain decoding, by id, from its outputs by prompt and from times of passes; and
            returns errors by drafter.
        longer: Whether it may take more time where plain decoding is slow.
        sweep, store, engine, named: See ``StoredSearch``.
    """

    def __init__(
        self,
        sweep: Sweep,
        store: RunStore,
        engine: BenchEngine[Sequence[int]],
        *,
        predict: Callable[
            [Mapping[str, Sequence[int]], PassCosts], tuple[Mapping[str, float], Mapping[str, str]]
        ],
        longer: bool = False,
        **named: Any,
    ) -> None:
        super().__init__(sweep, store, engine, **named)
        self._predict, self._longer = predict, longer

    def _find(self) -> Tuning:
        costs = self._measure_costs()
        self.tokens = self._affordable(costs.target_s.get(1, 0.0))
        plain = self._decode_plainly()
        outputs = {name: each.token_ids for name, each in plain.items()}
        predicted, failed = self._predict(outputs, costs)
        plain_s = fmean(each.decode_s for each in plain.values())
        first_s = fmean(each.ttft_s for each in plain.values())
        needed = best_of_each(self.needs(predicted), predicted)
        rest_s = max(0, BLOCKS - len(plain)) * (first_s + plain_s)
        if self._longer:
            race_s = rest_s + BLOCKS * sum(first_s + plain_s / max(predicted[name], 0.1) for name in needed)
            self._until = max(self._until, self._clock.now() + _SPARE * race_s)
        left_s = self.left_s
        if left_s < 0:
            spent = self._seconds - left_s
            minutes = math.ceil(_MORE_TIME * max(self._seconds, spent) / 60)
            raise RunError(
                "The time was too short to compare anything.",
                f"Results so far are kept; continue with --resume --minutes {minutes}.",
            )
        drafting = [each for each in self._sweep.configs if each.kind == "speculative"]
        selected = select(
            predicted,
            lambda name: BLOCKS * (first_s + plain_s / max(predicted[name], 1e-9)),
            left_s - rest_s,
            {each.id: each.drafter for each in drafting},
            failed,
            lengths={each.id for each in drafting if each.gamma is not None},
            needed=needed,
        )
        return msgspec.structs.replace(selected, tokens=self.tokens)

    def _affordable(self, pass_s: float) -> int | None:
        """Return how many tokens an output may have so that there is time for a race; ``None`` for all."""
        decoding = self._sweep.options.decoding
        seconds = max(self.left_s, _SLOW_S if self._longer else 0.0)
        tokens = max(
            _FEWEST_TOKENS, decoding.min_new_tokens, int(seconds / _RACE_OUTPUTS / max(pass_s, 1e-9))
        )
        return tokens if tokens < decoding.max_new_tokens else None

    def _decode_plainly(self) -> dict[str, Generation]:
        """Decode the first prompts plainly, which is their share of the race too; return the outputs by prompt.

        Raises:
            RunError: None could be decoded.
        """
        first, began = self._sweep.prompts[0].id, self._clock.now()
        warmup = Cell(self._plain, first, 0, 0, 0, warmup=True, seed=self._seed(first, "warm-up"))
        self._measure(warmup, _WARMUP_TOKENS)
        found: dict[str, Generation] = {}
        for done, prompt in enumerate(self._sweep.prompts[:ANSWERS]):
            if found and self._clock.now() - began > _ANSWERING * self._seconds:
                break
            self._report("decoding plainly", done, ANSWERS)
            measured = self._measure(self._cell(self._plain, Block(prompt.id)), self.tokens)
            if isinstance(measured.result, Generation):
                found[prompt.id] = measured.result
                if self._longer and done == 0:
                    spent = self._seconds - self.left_s
                    more = max(0.0, spent + _OUTPUTS * measured.result.total_s - self._seconds)
                    self._seconds, self._until = self._seconds + more, self._until + more
            elif not found and done + 1 == min(_PLAIN_FAILURES, len(self._sweep.prompts)):
                error = str(measured.line.error)
                raise plain_failed(error, "Speedups need it as the baseline.")
        return found

    def _measure_costs(self) -> PassCosts:
        """Return the times of single passes: those that are stored, or new ones."""
        if not self._store.costs():
            began = self._clock.now()
            for done in range(_COST_ROUNDS):
                if done and self._clock.now() - began > _TIMING * self._seconds:
                    break
                self._report("timing passes", done, _COST_ROUNDS)
                if problem := self._session.measure_costs():
                    raise RunError(f"Single passes could not be timed: {problem}")
        return pass_costs(self._store.costs())
