"""Measuring: all configurations decode every prompt, interleaved so that drift affects all of them alike.

``Sweep.plan`` gives the order. ``Session`` measures what is not in the store yet, so the same call resumes a sweep.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain
from time import perf_counter
from typing import Any

from specbench.base.errors import RunError, UsageError
from specbench.base.load import LoadSnapshot, count_stops, load_snapshot
from specbench.base.record import rounded
from specbench.bench.contexts import ContextPrompts
from specbench.bench.engines.engine import BenchEngine
from specbench.bench.grid import WARMUP_TOKENS, Cell, PromptGroup, Sweep
from specbench.bench.manifest import now
from specbench.bench.passes import cost_widths, pass_costs
from specbench.bench.serving import BenchRequest, Workload
from specbench.bench.stopping import until_answered
from specbench.decoding.clocks import Clock
from specbench.findings.catalog import Finding
from specbench.findings.review import disturbances, review
from specbench.options import DecodingOptions
from specbench.results.frames import paired_generations
from specbench.results.lines import CostLine, Generation, Group, Line, Measurement
from specbench.results.results import Results, load_results
from specbench.results.run import Mismatch
from specbench.results.store import RunStore
from specbench.results.summary import Summary
from specbench.rows import Condition, Row
from specbench.specs.policies import DynamicTree, StaticTree
from specbench.specs.sweeps import Closed, Poisson

COST_ROUNDS = 12
"""How often forward passes are timed in a sweep, spread over it."""


class Session:
    """An engine that measures a sweep into a store: single cells in any order, or all that the store lacks.

    Args:
        sweep: What to measure.
        store: Where to store the measurements; existing lines are not changed.
        engine: The engine that decodes.
        clock: Times limits.
        snapshot: Reads the machine load before and after each generation.
        notes: What the user should know about the models or servers.

    Attributes:
        measured, failed, found: The numbers of generations measured, of those that failed, and of those that the store
            had.
        problem: Why forward passes could not be timed; empty if they could.
        findings: What is doubtful about the run, once it is finished.
    """

    def __init__(
        self,
        sweep: Sweep,
        store: RunStore,
        engine: BenchEngine,
        *,
        clock: Clock = perf_counter,
        snapshot: Callable[[], LoadSnapshot] = load_snapshot,
        notes: Sequence[str] = (),
    ) -> None:
        self.sweep, self.store, self.engine, self.notes = sweep, store, engine, notes
        self.configs = {config.id: config for config in sweep.configs}
        self.clock, self._snapshot = clock, snapshot
        self._prompts = ContextPrompts(sweep.prompts, sweep.options.template, sweep.text, engine.count_tokens)
        self._answers: dict[tuple[str, str, int], dict[int, Sequence[int] | str]] = {}
        for each in store.measurements():  # conversations continue with the stored outputs of earlier turns
            line = each.line
            if isinstance(each.result, Generation) and not line.warmup:
                self._answers_of(line.config, line.prompt, line.repeat)[line.turn] = _said(each.result)
        self._encoded: dict[tuple[str, bool | None], Any] = {}
        self._fastest_mhz = 0.0
        self.measured = self.failed = self.found = 0
        self.problem = ""
        self.findings: list[Finding] = []
        count_stops()

    @cached_property
    def planned(self) -> list[Cell]:
        """Everything to measure, without warm-ups."""
        return [cell for cell in self.sweep.plan() if not cell.warmup]

    @property
    def left(self) -> list[Cell]:
        """What the store lacks."""
        done = self.store.done_keys()
        return [cell for cell in self.planned if cell.key not in done]

    def run(self) -> Iterator[str]:
        """Measure cell by cell and finish the run; before each cell yield what decodes next, and nothing at the end.

        A generation that fails is stored as failed, and the sweep continues. Warm-ups run whenever anything is left to
        measure, since each process has to be warmed up; their lines are stored once. Whoever stops iterating stops the
        sweep. A sweep with ``until`` also ends when that holds or the time is up.

        Raises:
            KeyboardInterrupt: Interrupted by the user; the generation in progress is lost.
            RunError: The store can no longer be written.
        """
        left = self.left
        self.found = len(self.planned) - len(left)
        cells = iter(left)
        if self.sweep.options.until is not None and left:
            cells = until_answered(left, self.planned, self.sweep, self.store, self.clock)
        if (first := next(cells, None)) is not None:  # else there is nothing to warm up for
            warmed = self.store.done_keys()
            for cell in self.sweep.plan():
                if cell.warmup:
                    yield f"warming up: {self.configs[cell.config].label}"
                    measurement = self.measure(cell)
                    if cell.key not in warmed:
                        self.store.append(measurement)
            for cell in self._with_costs(left, chain([first], cells)):
                yield self.configs[cell.config].label
                measured = self.store.append(self.measure(cell))
                self.measured += 1
                self.failed += measured.result is None
            yield ""
        self.finish()

    def run_all(self) -> Session:
        """Measure everything that is not in the store yet."""
        for _ in self.run():
            pass
        return self

    def finish(self, in_time: Callable[[], bool] = lambda: True) -> None:
        """Review the whole run, and mark it finished; for ``in_time`` see ``_differences``."""
        results = load_results(self.store.path)
        self.store.update(differences=self._differences(results, in_time))
        self.findings = [*review(Summary(replace(results, run=self.store.run)))]
        self.store.update(finished=now(), warnings=[finding.to_json() for finding in self.findings])

    def _differences(self, results: Results, in_time: Callable[[], bool]) -> list[Mismatch]:
        """Find greedy outputs that differ from plain decoding, with the gap between the logits of the two tokens.

        Of a conversation and its repeats, only the first difference is returned. Computing a gap takes a forward pass
        over the prompt; if ``in_time`` says that there is no time for it, only the position is returned.
        """
        keys = ["prompt", "turn", "repeat"]
        outputs = results.done.set_index(["config", *keys])["token_ids"].map(tuple).to_dict()
        pairs = paired_generations(results)
        differing = (
            pairs[pairs["identical"].eq(False)].sort_values(keys).drop_duplicates(["config", "prompt"])
        )
        found = []
        for config in self.sweep.configs:
            mine = differing[differing["config"] == config.id]
            for name, turn, repeat in mine[keys].itertuples(index=False, name=None):
                tokens = outputs[config.id, name, turn, repeat]
                *history, plain = (outputs[config.baseline, name, at, repeat] for at in range(turn + 1))
                if (
                    tokens == plain or name not in self._prompts.prompts
                ):  # texts of servers may differ nevertheless
                    continue
                known = None
                with suppress(Exception):  # the position alone is worth reporting
                    if in_time():
                        prompt = self.engine.encode(self._prompts.at(name, config.condition), history)
                        known = self.engine.difference(prompt, tokens, plain, self.sweep.options.decoding)
                both = enumerate(zip(tokens, plain, strict=False))
                found.append(
                    Mismatch(
                        config=config.id,
                        prompt=name,
                        turn=turn,
                        repeat=repeat,
                        position=next((i for i, (a, b) in both if a != b), min(len(tokens), len(plain))),
                        gap=None if known is None else rounded(known.gap),
                        gap_units=None if known is None else rounded(known.gap_units, 3),
                        numerical_tie=None if known is None else known.numerical_tie,
                    )
                )
        return found

    def _with_costs(self, left: Sequence[Cell], cells: Iterable[Cell]) -> Iterator[Cell]:
        """Yield cells, and time forward passes between them now and then."""
        # A machine may change its state within half a minute, so passes are timed close to what they are compared with.
        cells_at = Counter(self.configs[cell.config].condition.context for cell in left)
        seen, timed = Counter[int | None](), Counter[int | None]()
        before = None
        for cell in cells:
            at = self.configs[cell.config].condition.context
            # Only between blocks: within one, configurations run back to back.
            if (cell.order == 0 or at != before) and timed[at] * cells_at[at] <= COST_ROUNDS * seen[at]:
                self.measure_costs(at)
                timed[at] += 1
            yield cell
            seen[at] += 1
            before = at

    def _answers_of(self, config: str, prompt: str, repeat: int) -> dict[int, Sequence[int] | str]:
        return self._answers.setdefault((config, prompt, repeat), {})

    def measure(self, cell: Cell, most: int | None = None) -> Measurement:
        """Decode a cell, and return its line; for a warm-up, only the first tokens. Any failure becomes a failed line.

        ``most`` is the largest number of tokens, if it is smaller than that of the sweep, or than that of warm-ups.

        If the process was stopped while it decoded, the cell is decoded once more. If that happens again, the line has
        a warning.
        """
        most = most or (WARMUP_TOKENS if cell.warmup else self.sweep.options.decoding.max_new_tokens)
        measured = self._measure_once(cell, most)
        return self._measure_once(cell, most) if "stopped" in measured.line.warnings else measured

    def _measure_once(self, cell: Cell, most: int) -> Measurement:
        config = self.configs[cell.config]
        decoding = self.sweep.options.decoding
        if most < decoding.max_new_tokens:
            decoding = decoding.with_changes(max_new_tokens=most)
        before = self._snapshot()
        self._fastest_mhz = max(self._fastest_mhz, before.frequency_mhz or 0.0)
        started = round(time.time(), 3)
        result: Generation | Group | None = None
        error = None
        try:
            result = (
                self._generate(cell, config, decoding)
                if cell.group is None
                else self._generate_group(cell, config, cell.group, decoding)
            )
        except Exception as problem:  # other configurations may still work
            error = _message(problem)
        after = self._snapshot()
        line = Line(
            run_id=self.store.run.run_id,
            config=cell.config,
            prompt=cell.prompt,
            category=None if cell.group else self._prompts.prompts[cell.prompt].category,
            turn=cell.turn,
            repeat=cell.repeat,
            order=cell.order,
            warmup=cell.warmup,
            seed=cell.seed,
            started=started,
            load_average=before.load_average,
            status="failed" if result is None else "ok",
            error=error,
            steal_share=rounded(after.steal_share(before), 4),
            busy_elsewhere=rounded(after.busy_elsewhere(before), 2),
            warnings=[
                name
                for name in disturbances(before, after, self._fastest_mhz or None)
                if name != "machine-busy" or not self.sweep.options.servers  # a server may be what is busy
            ],
        )
        return Measurement(line, result)

    def output(self, config: Row, prompt: str) -> Sequence[int]:
        """Decode the first turn of a prompt, and store nothing."""
        encoded = self.engine.encode(self._prompts.at(prompt, config.condition), [])
        return self.engine.generate(config, encoded, self.sweep.options.decoding, seed=0).token_ids

    def _generate(self, cell: Cell, config: Row, decoding: DecodingOptions) -> Generation:
        """Decode a turn of a prompt."""
        answers = self._answers_of(cell.config, cell.prompt, cell.repeat)
        history = [answers[turn] for turn in range(cell.turn) if turn in answers]
        if len(history) < cell.turn:
            raise RunError("An earlier turn failed, so the conversation cannot continue.")
        prompt = self.engine.encode(self._prompts.at(cell.prompt, config.condition), history)
        found = self.engine.generate(config, prompt, decoding, seed=cell.seed)
        if not cell.warmup:
            answers[cell.turn] = _said(found)
        return found

    def _generate_group(
        self, cell: Cell, config: Row, group: PromptGroup, decoding: DecodingOptions
    ) -> Group:
        """Decode the prompts of a group together."""
        arrivals = config.condition.arrivals
        assert arrivals is not None
        clients, times = None, list[float]()
        if isinstance(arrivals, Poisson):
            times = arrivals.times(len(group.prompts), random.Random(f"arrivals/{cell.seed}"))
        elif isinstance(arrivals, Closed):
            clients = arrivals.clients
        requests = [self._request(name, cell, config.condition) for name in group.prompts]
        background = [self._request(name, cell, config.condition) for name in group.background]
        workload = Workload(requests, clients, background, times)
        return self.engine.generate_group(config, workload, decoding)

    def _request(self, name: str, cell: Cell, condition: Condition) -> BenchRequest:
        key = name, condition.thinking
        if key not in self._encoded:
            self._encoded[key] = self.engine.encode(self._prompts.at(name, condition), [])
        prompt = self._prompts.prompts[name]
        seed = random.Random(f"{cell.seed}/{name}").getrandbits(31)
        return BenchRequest(self._encoded[key], seed, name, prompt.category)

    def measure_costs(self, context: int | None = None) -> None:
        """Time forward passes of one request after so much context, unless that has failed before: see ``problem``.

        Those of servers cannot be timed, and those of several requests are not.
        """
        if self.problem or self.sweep.options.servers or self.sweep.options.batches:
            return
        stops = self._snapshot().stops
        try:
            costs = self._time_passes(context)
            if self._snapshot().stops > stops:  # the pause would be in one of the times
                costs = self._time_passes(context)
        except Exception as error:
            self.problem = _message(error)
            return
        self.store.append_costs(costs)
        with suppress(ValueError):  # a fit below 0 is not stored
            self.store.update(costs=pass_costs(self.store.costs()))

    def _time_passes(self, context: int | None) -> list[CostLine]:
        options = self.sweep.options
        trees = [spec.nodes for spec in options.policies if isinstance(spec, StaticTree | DynamicTree)]
        prompt = self.engine.encode(
            self._prompts.at(self.sweep.prompts[0].id, Condition(context=context)), []
        )
        widths = cost_widths(options.gammas, trees)
        return self.engine.measure_costs(prompt, widths, context)


def _said(output: Generation) -> Sequence[int] | str:
    """Return an output as later turns of its conversation have it."""
    return output.token_ids if output.server is None else output.server.text


_PATH = re.compile(r"(?<![\w.])(?:~|[A-Za-z]:)?[/\\](?:[^\s'\":,;/\\]+[/\\])+")


def _message(error: Exception) -> str:
    """Return an error as one line without local paths."""
    text = " ".join(str(error).split()) or "no message"
    if not isinstance(error, UsageError | RunError):
        text = f"{type(error).__name__}: {text}"
    return _PATH.sub("", text)[:300]
