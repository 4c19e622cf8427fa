"""The search of `specbench tune`: predictions for all candidates, a selection, a race, and its ending.

Measurements are stored immediately, in a run folder like a sweep's (``results.store``). Stored results are never
measured again, so the same call resumes a search: the race is replayed over the stored timings, which takes no time,
and continues from there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from specbench.base.errors import RunError
from specbench.bench.grid import Cell
from specbench.bench.passes import pass_costs
from specbench.decoding.theory import PassCosts
from specbench.results.lines import Generation, Key, Measurement
from specbench.results.run import Tuning
from specbench.tune.candidates import race_needs
from specbench.tune.race import Block, Race, Timing, relative_slowdown, run_race

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.bench.session import Session

_PLAIN_FAILURES = 3
"""Failures of plain decoding, without a success before, that end the search."""

_ENDING_S, _ENDING_SHARE = 3.0, 0.03
"""Seconds, and share of the time, for what comes after the race."""


def race_end(began: float, seconds: float) -> float:
    """Return when a race has to end, so that there is time for what comes after it."""
    return began + seconds - max(_ENDING_S, _ENDING_SHARE * seconds)


class Search:
    """Search for the fastest configuration: iterate over ``measure``, then read the attributes.

    Args:
        session: Measures the configurations (plain decoding first) on the prompts, in their order; ``repeats`` of its
            options limits the race.
        choose: Returns predicted speedups and what to race.
        families: What all but plain decoding belong to, by id: their drafters, without the draft length.
        seconds: Total time.
        until: When the race has to end, on the session's clock. Stored results take no time.
        asked: What has to be raced in any case, see ``race_needs``.

    Attributes:
        race: The race.
        rows: The configurations by id.
        plain: The id of plain decoding.
        predicted: Predicted speedups over plain decoding, by id.
        left_out: Why configurations were not raced, by id.
        errors: Why configurations failed in the race, by id.
        tokens: Of an output at most; ``None`` for as many as asked for.
    """

    race: Race

    def __init__(
        self,
        session: Session,
        choose: Callable[[Search], Tuning],
        families: Mapping[str, str],
        *,
        seconds: float,
        until: float,
        asked: Mapping[str, Collection[str]] = {},
        progress: Progress | None = None,
    ) -> None:
        self.session, self.sweep, self.store, self.engine = (
            session,
            session.sweep,
            session.store,
            session.engine,
        )
        self.families, self.clock = families, session.clock
        self.began, self.seconds, self.until = self.clock(), seconds, until
        self._choose, self._asked, self._progress = choose, asked, progress
        self.errors: dict[str, str] = {}
        self.tokens: int | None = None
        self.rows, self.plain = session.configs, self.sweep.configs[0].id
        self._stored: dict[Key, Measurement] = {each.key: each for each in self.store.measurements()}
        self._plain_failures = 0
        self._durations: dict[str, float] = {}
        self._places = Counter[Block]()
        self.predicted: Mapping[str, float] = {}
        self.left_out: Mapping[str, str] = {}

    def measure(self) -> Iterator[Race]:
        """Predict, select and race; yield whenever blocks were raced.

        A user who interrupts a race with a complete block gets the best so far.

        Raises:
            RunError: Plain decoding fails, passes cannot be timed, the time is up before anything could be predicted,
                or the store cannot be written. Stored measurements are kept.
            KeyboardInterrupt: Interrupted before the first block was complete; the current generation is lost.
        """
        tuning = self.store.run.tuning
        if tuning is None:  # later calls race the same, so that all raced configurations have equal blocks
            tuning = msgspec.structs.replace(self._choose(self), tokens=self.tokens)
        # New measurements can change an earlier answer.
        tuning = msgspec.structs.replace(tuning, ranking=[], verdict=None, answer=None)
        self.store.update(tuning=tuning, finished=None)
        self.predicted, self.left_out, self.tokens = tuning.predicted, tuning.left_out, tuning.tokens
        # All prompts once before any of them again: other prompts tell more than repeats.
        repeats, prompts = range(self.sweep.options.repeats), self.sweep.prompts
        blocks = [Block(prompt.id, repeat, prompt.category) for repeat in repeats for prompt in prompts]
        race = self.race = Race(tuning.raced, self.plain, limit=len(blocks), expected=tuning.predicted)
        try:
            yield from run_race(race, blocks, self._time, in_time=self._in_time, seed=self.sweep.options.seed)
            if not race.blocks and race.ending != "time":
                raise RunError(
                    "Outputs have no token after the first one, so there are no speeds to compare.",
                    "Choose other prompts.",
                )
            self.session.finish(in_time=lambda: self.left_s > 0)
        except KeyboardInterrupt:
            if not race.blocks:
                raise
            race.look(last=True)
            race.ending = "interrupted"
        self.store.update(tuning=msgspec.structs.replace(tuning, ranking=race.ranking, verdict=race.verdict))
        if not race.decided:  # --resume continues it
            self.store.update(finished=None)

    def needs(self, predicted: Mapping[str, float]) -> dict[str, Collection[str]]:
        """Return what has to be raced beside plain decoding, see ``race_needs``."""
        return race_needs(self.families, predicted, self._asked)

    @property
    def left_s(self) -> float:
        """Time that is left."""
        return self.until - self.clock()

    @property
    def block_s(self) -> float:
        """Duration of a block with the remaining candidates, according to their latest times."""
        return sum(self._durations.get(name, 0.0) for name in self.race.running)

    def report(self, stage: str, done: int, total: int | None) -> None:
        """Report progress."""
        if self._progress is not None:
            self._progress.update(stage, done, total)

    def measured(self, cell: Cell, tokens: int | None = None) -> Measurement:
        """Return the stored measurement of a cell, or measure and store it; ``tokens`` limits its output."""
        if cell.key not in self._stored:
            self._stored[cell.key] = self.store.append(self.session.measure(cell, tokens))
        return self._stored[cell.key]

    def seed(self, prompt: str, what: str) -> int:
        """Return a seed of sampling that all configurations of a block share."""
        return random.Random(f"{self.sweep.options.seed}/{what}/{prompt}").getrandbits(31)

    def cell(self, name: str, block: Block) -> Cell:
        """Return the cell of a candidate on a block."""
        seed, place = self.seed(block.prompt, str(block.repeat)), self._places[block]
        return Cell(name, block.prompt, 0, block.repeat, place, warmup=False, seed=seed)

    def _in_time(self, name: str, block: Block) -> bool:
        """Return whether a generation is stored, or would probably end in time."""
        expected_s = self._durations.get(name, 0.0)
        return self.cell(name, block).key in self._stored or self.clock() + expected_s <= self.until

    def _time(self, name: str, block: Block) -> Timing | None:
        """Return a candidate's timing on a block, from the store if it is there; ``None`` if it failed."""
        cell = self.cell(name, block)
        self._places[block] += 1
        measured = self.measured(cell, self.tokens)
        result = measured.result
        if isinstance(result, Generation):
            self._durations[name] = result.total_s
            slowdown = relative_slowdown(result.steps.nodes, result.steps.verify_s, self._single_costs)
            return Timing(result.new_tokens - result.first_tokens, result.decode_s, slowdown)
        self.errors[name] = str(measured.line.error)
        if name == self.plain:
            self._plain_failures += 1
            if self.plain not in self._durations and self._plain_failures >= _PLAIN_FAILURES:
                raise plain_failed(self.errors[name])
        return None

    @cached_property
    def _single_costs(self) -> PassCosts:
        """The times of single forward passes that are stored when the race begins."""
        return pass_costs(self.store.costs())


def plain_failed(error: str) -> RunError:
    """Return the error that there is no baseline."""
    return RunError(f"Plain decoding failed: {error.rstrip('.')}.", "Speedups need it as the baseline.")
