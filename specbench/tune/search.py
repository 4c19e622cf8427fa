"""Carrying out `specbench tune`: short tries, a choice, and a race over real generations, all of it stored as it ends.

What is measured goes to a run's folder like a sweep's (``results.store``): tries are warm-ups there, races are ordinary
generations. What the folder holds is never measured again, so that going on after a crash is the same call: the race is
run once more over the stored timings, which takes no time, and goes on where they end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from specbench.base.errors import RunError
from specbench.base.textsafe import counted
from specbench.bench.grid import Cell, Sweep, SweepConfig
from specbench.bench.passes import PassTimes, SharedTimes
from specbench.bench.runner import CellRunner, finish_run
from specbench.decoding.theory import PassCosts, never_falling
from specbench.results.lines import Generation, Key, Measurement, StepLists
from specbench.results.load import LoadSnapshot, load_snapshot
from specbench.results.run import Tuning
from specbench.tune.batches import BATCHES, mean_rows, predicted_at
from specbench.tune.candidates import Chosen, Probe, choose, predict, probes_of
from specbench.tune.race import Block, Ending, Race, Timing, relative_slowdown, run_race

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.bench.engines.engine import BenchEngine
    from specbench.decoding.clocks import Clock
    from specbench.results.run import RunWarning
    from specbench.results.store import RunStore

_TRIED_PROMPTS, _TRIED_TOKENS = 4, 32
"""Of the tries that predictions rest on."""

_COST_ROUNDS = 3
"""How often single passes are timed, if that does not take long."""

_TIMING, _TRYING, _RACING = 0.05, 0.3, 0.6
"""Shares of the time: passes are not timed again after the first, tries end after the second, and candidates are chosen
so that their blocks fit into the third."""

_BATCHING = 0.05
"""Share of the time that is kept for passes which several requests share."""

_BLOCKS = 8
"""For so many blocks there should be time."""

_USUALLY_RACED = 5
"""Candidates in a race, about, of which nothing is known yet."""

_OTHERS = frozenset({"machine-busy", "steal"})
"""Warnings of ``results.advice`` that others use the machine."""

_PLAIN_FAILURES = 3
"""If it fails so often before it works, there is nothing to compare with."""


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        race: As it stood in the end.
        ending: Why it ended.
        predicted: Speedups over plain decoding that were predicted, by id.
        left_out: Why configurations were not raced, by id.
        batches: What throughput the leader is predicted to reach over that of plain decoding, by requests side by side,
            ascending, up to where it stops paying; empty where nothing was timed.
        block_s: What a block takes with those that were left, by the latest times.
        aside_s: What all but the race takes, such as loading.
        warnings: Whatever is doubtful about the run.
    """

    race: Race
    ending: Ending
    predicted: Mapping[str, float]
    left_out: Mapping[str, str]
    batches: Mapping[int, float]
    block_s: float
    aside_s: float
    warnings: tuple[RunWarning, ...]


class Search:
    """Finds the fastest configuration of a grid.

    Args:
        sweep: The grid, plain decoding first, its prompts in the order in which they are raced, and options; their
            ``repeats`` bound the race.
        store: Open; what it holds is not measured again.
        engine: Decodes.
        clock: Tells how long everything takes.
        seconds: For all of it.
        until: When that is over, on that clock. What the store holds takes none of it.
        kept: Groups of ids, such as what an engine has: of each the best is raced, see ``choose``.
        progress: Told about the stages.
        snapshot: Looks at the machine before and behind each generation.
    """

    def __init__(
        self,
        sweep: Sweep,
        store: RunStore,
        engine: BenchEngine[Sequence[int]],
        *,
        clock: Clock,
        seconds: float,
        until: float,
        kept: Iterable[Collection[str]] = (),
        progress: Progress | None = None,
        snapshot: Callable[[], LoadSnapshot] = load_snapshot,
    ) -> None:
        self._sweep, self._store, self._engine = sweep, store, engine
        self._clock, self._seconds, self._until = clock, seconds, until
        self._progress, self._kept = progress, kept
        self._runner = CellRunner(sweep, store, engine, snapshot)
        self._known: dict[Key, Measurement] = {each.key: each for each in store.measurements()}
        self._plain = sweep.configs[0]
        self._took: dict[str, float] = {}
        self._block: tuple[Block, int] | None = None
        self._plain_works = False
        self._plain_failures = 0

    def run(self, on_block: Callable[[Race], None] = lambda _: None) -> Found:
        """Try, choose and race.

        Raises:
            RunError: Plain decoding fails, passes cannot be timed, the time is up before anything could be predicted,
                or the store cannot be written any more. What is measured is kept.
            KeyboardInterrupt: The user stops before a block was raced; the generation in progress is lost.
        """
        self._forget_answer()
        kept_s = _BATCHING * self._seconds
        aside_s = self._seconds - (self._until - self._clock.now()) + kept_s
        predicted, chosen = self._chosen()
        blocks = self._blocks()
        race = Race(chosen.raced, self._plain.id, limit=len(blocks), expected=predicted)
        batches: dict[int, float] = {}
        warnings: tuple[RunWarning, ...] = ()
        try:
            ending = run_race(
                race,
                blocks,
                self._measure,
                clock=self._clock,
                until=self._until - kept_s,
                seed=self._sweep.options.seed,
                on_block=on_block,
                is_stored=lambda name, block: self._cell(name, block, 0).key in self._known,
            )
            if not race.blocks and ending != "time":
                raise _no_speeds()
            if race.verdict == "faster":
                batches = self._batches(race)
            warnings = finish_run(self._sweep, self._store, self._engine, in_time=self._in_time)
        except KeyboardInterrupt:
            if not race.blocks:
                raise
            race.look(last=True)
            ending = "interrupted"
        assert self._store.run.tuning is not None
        came_to = msgspec.structs.replace(
            self._store.run.tuning, ranking=list(race.ranking), verdict=race.verdict
        )
        self._store.update(tuning=came_to)
        if not race.decided:  # there is something to go on with
            self._store.update(finished=None)
        block_s = sum(self._took.get(name, 0.0) for name in race.running)
        return Found(race, ending, predicted, chosen.left_out, batches, block_s, aside_s, warnings)

    def _in_time(self) -> bool:
        return self._clock.now() < self._until

    def _forget_answer(self) -> None:
        """What a search came to before it goes on, lest it stand beside what is measured from now on."""
        tuning = self._store.run.tuning
        if tuning is not None and tuning.ranking:
            left = msgspec.structs.replace(tuning, ranking=[], verdict=None, answer=None)
            self._store.update(tuning=left, finished=None)

    # -- whom to race ------------------------------------------------------------------------------

    def _chosen(self) -> tuple[Mapping[str, float], Chosen]:
        """Predictions and choice, which stay as they are once they are stored: all in a race have the same blocks."""
        stored = self._store.run.tuning
        if stored is not None:
            return stored.predicted, Chosen(tuple(stored.raced), stored.left_out)
        probes, failed = self._tried()
        costs = self._costs()
        expected = predict(self._sweep.configs, probes, costs)
        predicted = {name: round(value, 4) for name, value in expected.items()}
        plain = self._measured(self._try(self._plain, 0), _TRIED_TOKENS).result
        chosen = choose(
            self._sweep.configs,
            predicted,
            plain_s=costs.target_s[1] * (self._sweep.options.decoding.max_new_tokens - 1),
            first_s=plain.ttft_s if isinstance(plain, Generation) else 0.0,
            seconds=_RACING * self._seconds,
            blocks=_BLOCKS,
            failed=failed,
            kept=self._kept,
        )
        self._store.update(
            tuning=Tuning(predicted=predicted, raced=list(chosen.raced), left_out=dict(chosen.left_out))
        )
        return predicted, chosen

    def _tried(self) -> tuple[dict[str, Probe], dict[str, str]]:
        """What short generations showed, by configuration, and why all failed that did, by drafter."""
        asked = [self._plain, *probes_of(self._sweep.configs)]
        number = min(_TRIED_PROMPTS, len(self._sweep.prompts))
        began = self._clock.now()
        steps: dict[str, list[StepLists]] = {config.id: [] for config in asked}
        failed: dict[str, str] = {}
        for prompt in range(number):
            for place, config in enumerate(asked):
                late = self._clock.now() - began > _TRYING * self._seconds
                if (prompt and late) or self._clock.now() > self._until:
                    break
                if self._progress is not None:
                    self._progress.update("trying drafters", prompt * len(asked) + place, number * len(asked))
                measured = self._measured(self._try(config, prompt), _TRIED_TOKENS)
                if isinstance(measured.result, Generation):
                    steps[config.id].append(measured.result.steps)
                else:
                    failed[config.drafter] = str(measured.line.error)
        if (error := failed.get(self._plain.drafter)) and not steps[self._plain.id]:
            raise RunError(
                f"Plain decoding failed: {error.rstrip('.')}.", "There is nothing to compare with then."
            )
        if self._clock.now() > self._until:
            raise self._too_late()
        return {name: Probe.of(each) for name, each in steps.items() if each}, failed

    def _try(self, config: SweepConfig, prompt: int) -> Cell:
        name = self._sweep.prompts[prompt].id
        return Cell(config.id, name, 0, 0, 0, warmup=True, seed=self._sampling_seed(name, "try"))

    def _costs(self) -> PassCosts:
        """Times of single passes: those that are stored, or new ones."""
        if not self._store.costs():
            began = self._clock.now()
            for done in range(_COST_ROUNDS):
                if done and self._clock.now() - began > _TIMING * self._seconds:
                    break
                if self._progress is not None:
                    self._progress.update("timing passes", done, _COST_ROUNDS)
                result = self._runner.measure_costs()
                if result.costs is None:
                    raise RunError(f"Single passes could not be timed: {result.error}")
        return PassTimes.of(self._store.costs()).medians()

    def _too_late(self) -> RunError:
        """Why nothing was compared, and how long it would take."""
        done = [each for each in self._known.values() if isinstance(each.result, Generation)]
        if not done:
            return RunError(
                "The time was up before anything could be tried.", "Give it more --minutes, and add --resume."
            )
        each_s = sum(output.total_s for each in done for _, output in each.outputs()) / len(done)
        wanted = len(probes_of(self._sweep.configs)) + 1 + _BLOCKS * _USUALLY_RACED
        minutes = math.ceil(wanted * each_s / 60 / _RACING)
        busy = sum(not _OTHERS.isdisjoint(each.line.warnings) for each in done)
        why = "The time was up before anything could be compared."
        if 2 * busy > len(done):
            why = (
                "The machine is too busy to decide: others used the processor during"
                f" {busy} of {counted(len(done), 'generation')}, and the time was up before anything could be compared."
            )
        return RunError(why, f"What was tried is kept; go on with --resume --minutes {minutes}.")

    # -- the race ----------------------------------------------------------------------------------

    def _blocks(self) -> list[Block]:
        """Every prompt once, then once more, and so on: other prompts tell more than other times of the same."""
        repeats = range(self._sweep.options.repeats)
        prompts = self._sweep.prompts
        return [Block(prompt.id, repeat, prompt.category) for repeat in repeats for prompt in prompts]

    def _measure(self, name: str, block: Block) -> Timing | None:
        """A candidate on a block, of the store if it is there."""
        place = self._block[1] + 1 if self._block is not None and self._block[0] == block else 0
        self._block = block, place
        cell = self._cell(name, block, place)
        began = self._clock.now()
        known = cell.key in self._known
        measured = self._measured(cell)
        result = measured.result
        if not isinstance(result, Generation):
            self._took[name] = 0.0 if known else self._clock.now() - began
            if name == self._plain.id:
                self._refuse_failing_plain(str(measured.line.error))
            return None
        self._took[name] = result.total_s if known else self._clock.now() - began
        self._plain_works |= name == self._plain.id
        tokens = result.new_tokens - result.first_tokens
        steps = result.steps
        slow = relative_slowdown(steps.nodes, steps.siblings, steps.verify_s, self._alone)
        return Timing(tokens, result.decode_s, slow)

    def _cell(self, name: str, block: Block, place: int) -> Cell:
        seed = self._sampling_seed(block.prompt, str(block.repeat))
        return Cell(name, block.prompt, 0, block.repeat, place, warmup=False, seed=seed)

    @cached_property
    def _alone(self) -> PassCosts:
        """Times of single passes, as the store has them when the race begins."""
        costs = PassTimes.of(self._store.costs()).medians()
        return msgspec.structs.replace(costs, target_s=never_falling(costs.target_s))

    def _refuse_failing_plain(self, error: str) -> None:
        self._plain_failures += 1
        if not self._plain_works and self._plain_failures >= _PLAIN_FAILURES:
            raise RunError(f"Plain decoding failed: {error.rstrip('.')}.", "Choose other prompts.")

    def _measured(self, cell: Cell, tokens: int = 0) -> Measurement:
        """What is stored of a cell, measured if it is not; of a try so many tokens."""
        if cell.key not in self._known:
            found = self._runner.measure(cell, tokens) if cell.warmup else self._runner.measure(cell)
            self._store.append(found)
            self._known[cell.key] = found
        return self._known[cell.key]

    def _sampling_seed(self, prompt: str, what: str) -> int:
        """The same for all configurations of a block."""
        return random.Random(f"{self._sweep.options.seed}/{what}/{prompt}").getrandbits(31)

    # -- many requests -----------------------------------------------------------------------------

    def _batches(self, race: Race) -> dict[int, float]:
        """What the leader is predicted to bring with several requests side by side, as far as there is time for it."""
        drafter = next(config.drafter for config in self._sweep.configs if config.id == race.leader)
        steps = [
            output.steps
            for each in self._known.values()
            if each.line.config == race.leader and not each.line.warmup
            for _, output in each.outputs()
        ]
        width = math.ceil(mean_rows(steps))
        prompt = self._engine.encode(self._sweep.prompts[0], [])
        found: dict[int, float] = {}
        took = 0.0
        for batch in BATCHES:
            timed = SharedTimes.of(self._store.costs())
            if {(batch, 1), (batch, width)} - set(timed.target) or (drafter, batch) not in timed.drafters:
                began = self._clock.now()
                if began + 2 * took > self._until:
                    break
                if self._progress is not None:
                    self._progress.update(f"timing passes of {batch} requests", 0, None)
                try:
                    times = self._engine.measure_shared_costs(prompt, batch, sorted({1, width}), [drafter])
                except Exception:  # whatever it is, the answer can do without
                    break
                self._store.append_costs(times.lines())
                timed = SharedTimes.of(self._store.costs())
                took = self._clock.now() - began
            found[batch] = predicted_at(batch, steps, drafter, timed.medians())
            if found[batch] < 1.0:
                break
        return found


def _no_speeds() -> RunError:
    return RunError(
        "No output has a token behind the first one, so that there are no speeds to compare.",
        "Give other prompts, or add --ignore-eos.",
    )
