"""Carrying out a sweep: every configuration decodes every prompt, interleaved so that drift hits all of them alike.

``grid.plan`` says what runs when; ``run_sweep`` measures what the store does not hold yet, so that going on
after a crash is the same call.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from specbench.base.errors import RunError, UsageError
from specbench.base.record import Json, rounded
from specbench.bench.engines.engine import BenchEngine, Outcome
from specbench.bench.grid import WARMUP_TOKENS, Cell, PromptGroup, Sweep, SweepConfig
from specbench.bench.manifest import now
from specbench.bench.passes import TREE_NODES, PassTimes, SharedTimes, cost_widths, shared_widths
from specbench.bench.serving import BenchRequest, Encoded, Workload
from specbench.decoding.clocks import Clock, WallClock
from specbench.options import DecodingOptions
from specbench.results.advice import during, review
from specbench.results.lines import Generation, Group, Line, Measurement, RequestLine, StepLists
from specbench.results.load import LoadSnapshot, count_stops, load_snapshot
from specbench.results.results import load_results
from specbench.results.run import OTHER_ANSWERS, Mismatch, RunWarning
from specbench.results.store import RunStore
from specbench.specs.arrivals import Poisson

if TYPE_CHECKING:
    from specbench.backends.torch.parity import Difference
    from specbench.bench.prompts import Prompt

COST_ROUNDS = 12
"""How often single passes are timed in a sweep, spread over it."""

SHARED_COST_ROUNDS = 8
"""How often passes that several requests share are, which take longer, spread over the generations of as many."""


@dataclass(frozen=True, slots=True)
class SweepStarted:
    """What there is to measure is known.

    Attributes:
        measurements: Of the plan, those that are stored already.
        total: How many the plan has.
    """

    measurements: Sequence[Measurement]
    total: int


@dataclass(frozen=True, slots=True)
class CellStarted:
    """A generation begins."""

    cell: Cell
    config: SweepConfig


@dataclass(frozen=True, slots=True)
class CellDone:
    """A generation has ended and is stored.

    Attributes:
        cell, config: What it was.
        measurement: What came of it.
        seconds: Wall time it took, with everything around it.
        done, total: Measured generations of the plan, warm-ups left out.
        seconds_left: Estimated from what was measured so far; ``None`` while nothing was.
    """

    cell: Cell
    config: SweepConfig
    measurement: Measurement
    seconds: float
    done: int
    total: int
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class CostsMeasured:
    """Single passes have been timed once more; ``costs`` is ``None`` and ``error`` says why if they could not be."""

    costs: PassTimes | SharedTimes | None
    error: str | None = None


Event = SweepStarted | CellStarted | CellDone | CostsMeasured


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a call of ``run_sweep`` did: generations measured, failed among them, and found measured already."""

    measured: int
    failed: int
    found: int
    warnings: tuple[RunWarning, ...]


_LATEST = 5


class TimeLeft:
    """How long the rest of a plan takes, from how long each configuration's latest generations took.

    Args:
        remaining: What is left to do, without warm-ups.
        warmup_factor: How many times longer a measured generation is than a warm-up.
    """

    def __init__(self, remaining: Iterable[Cell], warmup_factor: float) -> None:
        self._factor = warmup_factor
        self._left = Counter(cell.config for cell in remaining)
        self._seconds: dict[tuple[str, bool], deque[float]] = {}

    def record(self, cell: Cell, seconds: float) -> None:
        """A generation took so long."""
        # The latest few: a machine that was busy is quiet again some time.
        self._seconds.setdefault((cell.config, cell.warmup), deque(maxlen=_LATEST)).append(seconds)
        if not cell.warmup:
            self._left[cell.config] -= 1

    def seconds(self) -> float | None:
        """Seconds left, ``None`` before anything was recorded."""
        means = {config: self._mean(config) for config in self._left}
        known = [mean for mean in means.values() if mean is not None]
        if not known:
            return None
        usual = sum(known) / len(known)
        return sum(count * (means[config] or usual) for config, count in self._left.items())

    def _mean(self, config: str) -> float | None:
        for warmup, factor in ((False, 1.0), (True, self._factor)):
            seconds = self._seconds.get((config, warmup))
            if seconds:
                return factor * sum(seconds) / len(seconds)
        return None


def run_sweep(
    sweep: Sweep,
    store: RunStore,
    engine: BenchEngine[Encoded],
    *,
    clock: Clock | None = None,
    on_event: Callable[[Event], None] | None = None,
    retry_failed: bool = False,
    snapshot: Callable[[], LoadSnapshot] = load_snapshot,
) -> SweepResult:
    """Measure what the store lacks, one line at a time.

    A generation that fails is stored as failed, and the sweep goes on. The warm-ups are run whenever anything is left
    to measure, for each process has to be warmed up; their lines are stored once.

    Args:
        sweep: What there is to measure.
        store: Open; its lines are kept and not measured again.
        engine: Decodes.
        clock: Times the generations as a whole, for the estimate of the time left.
        on_event: Told what happens, between the measurements.
        retry_failed: Measure again what failed.
        snapshot: Looks at the machine before and behind each generation.

    Raises:
        KeyboardInterrupt: The user stops; the generation in progress is lost.
        RunError: The store cannot be written any more.
    """
    clock = clock or WallClock()
    tell: Callable[[Event], None] = on_event or (lambda _: None)
    cells = sweep.plan()
    done = store.done_keys(retry_failed=retry_failed)
    stored = store.done_keys()
    total = sum(not cell.warmup for cell in cells)
    left = [cell for cell in cells if not cell.warmup and cell.key not in done]
    if not left:
        return SweepResult(0, 0, total, finish_run(sweep, store, engine))
    runner = CellRunner(sweep, store, engine, snapshot)
    time_left = TimeLeft(
        left,
        sweep.options.decoding.max_new_tokens / min(WARMUP_TOKENS, sweep.options.decoding.max_new_tokens),
    )
    failed = 0
    planned = {cell.key for cell in cells if not cell.warmup} & done
    tell(SweepStarted([each for each in store.measurements() if each.key in planned], total))

    def run(cell: Cell, count: int) -> None:
        nonlocal failed
        config = runner.configs[cell.config]
        tell(CellStarted(cell, config))
        began = clock.now()
        measurement = runner.measure(cell)
        seconds = clock.now() - began
        if not cell.warmup or cell.key not in stored:
            store.append(measurement)
        failed += not cell.warmup and measurement.result is None
        time_left.record(cell, seconds)
        tell(CellDone(cell, config, measurement, seconds, count, total, time_left.seconds()))

    found = total - len(left)
    for cell in cells:
        if cell.warmup:
            run(cell, found)
    # A machine may be in one state for half a minute and in another for the next: passes are timed beside what they are
    # held against.
    of_batch = Counter(runner.configs[cell.config].batch for cell in left)
    seen, timed = Counter[int | None](), Counter[int | None]()
    for number, cell in enumerate(left):
        batch = runner.configs[cell.config].batch
        rounds = COST_ROUNDS if batch is None else SHARED_COST_ROUNDS
        # Only between the blocks, for in a block configurations run back to back.
        if cell.order == 0 and timed[batch] * of_batch[batch] <= rounds * seen[batch] and runner.costs_work:
            tell(runner.measure_costs(batch))
            timed[batch] += 1
        run(cell, found + number + 1)
        seen[batch] += 1
    return SweepResult(len(left), failed, found, finish_run(sweep, store, engine))


class CellRunner(Generic[Encoded]):
    """Measures single cells of a sweep; in which order is up to who asks.

    Attributes:
        configs: By id.
        costs_work: Whether single passes could be timed so far.
    """

    def __init__(
        self,
        sweep: Sweep,
        store: RunStore,
        engine: BenchEngine[Encoded],
        snapshot: Callable[[], LoadSnapshot],
    ) -> None:
        self.configs = {config.id: config for config in sweep.configs}
        self._prompts = {prompt.id: prompt for prompt in sweep.prompts}
        self._sweep, self._store, self._engine, self._snapshot = sweep, store, engine, snapshot
        self._answers = _answers(store.measurements())
        self._encoded: dict[str, Encoded] = {}
        self._fastest_mhz = 0.0
        self.costs_work = not sweep.options.servers  # their passes are theirs
        count_stops()

    def measure(self, cell: Cell, warmup_tokens: int = WARMUP_TOKENS) -> Measurement:
        """Decode one cell; whatever goes wrong in there becomes a failed line. Of a warm-up only the first tokens.

        A cell during which the process was stopped is decoded once more. It keeps the warning if that happens again.
        """
        measured = self._measured(cell, warmup_tokens)
        return self._measured(cell, warmup_tokens) if "stopped" in measured.line.warnings else measured

    def _measured(self, cell: Cell, warmup_tokens: int) -> Measurement:
        config = self.configs[cell.config]
        decoding = self._sweep.options.decoding
        if cell.warmup:
            decoding = decoding.with_changes(max_new_tokens=min(warmup_tokens, decoding.max_new_tokens))
        before = self._snapshot()
        self._fastest_mhz = max(self._fastest_mhz, before.frequency_mhz or 0.0)
        started = round(time.time(), 3)
        result: Generation | Group | None = None
        error = None
        try:
            result = (
                self._generated(cell, config, decoding)
                if cell.group is None
                else self._served(cell, config, cell.group, decoding)
            )
        except Exception as problem:  # whatever it is, the other configurations may still work
            error = _message(problem)
        after = self._snapshot()
        line = Line(
            run_id=self._store.run.run_id,
            config=cell.config,
            prompt=cell.prompt,
            category=None if cell.group else self._prompts[cell.prompt].category,
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
                warning.id
                for warning in during(before, after, self._fastest_mhz or None)
                if warning.id != "machine-busy"
                or not self._sweep.options.servers  # which may be what is busy
            ],
        )
        return Measurement(line, result)

    def _generated(self, cell: Cell, config: SweepConfig, decoding: DecodingOptions) -> Generation:
        """Decode a turn of a prompt."""
        answers = self._answers.setdefault((cell.config, cell.prompt, cell.repeat), {})
        history = [answers.get(turn) for turn in range(cell.turn)]
        known = [answer for answer in history if answer is not None]
        if len(known) < len(history):
            raise RunError("An earlier turn failed, so there is no conversation to go on with.")
        outcome = self._engine.generate(
            config,
            self._engine.encode(self._prompts[cell.prompt], known),
            decoding,
            seed=cell.seed,
        )
        if not cell.warmup:
            answers[cell.turn] = outcome.token_ids
        return Generation(**_measured(outcome), peak_memory_bytes=outcome.peak_memory_bytes)

    def _served(
        self, cell: Cell, config: SweepConfig, group: PromptGroup, decoding: DecodingOptions
    ) -> Group:
        """Decode the prompts of a group side by side."""
        load = config.load
        assert load is not None
        _, arrivals = load
        count, clients, times = len(group.prompts), None, []
        if isinstance(arrivals, Poisson):
            times = arrivals.times(count, random.Random(f"arrivals/{cell.seed}"))
        else:
            clients = arrivals.clients
        served = self._engine.generate_group(
            config,
            Workload(
                [self._asked(name, cell) for name in group.prompts],
                clients,
                [self._asked(name, cell) for name in group.background],
                times,
            ),
            decoding,
        )
        return Group(
            clients=clients,
            seconds=round(served.seconds, 9),
            tokens=served.tokens,
            pool=served.pool,
            peak_memory_bytes=served.peak_memory_bytes,
            speculation=served.speculation,
            requests=[
                RequestLine(
                    **_measured(each.outcome),
                    prompt=name,
                    category=self._prompts[name].category,
                    arrived_s=round(each.arrived_s, 9),
                    queued_s=round(each.queued_s, 9),
                )
                for name, each in zip(group.prompts, served.requests, strict=True)
            ],
        )

    def _asked(self, name: str, cell: Cell) -> BenchRequest[Encoded]:
        if name not in self._encoded:
            self._encoded[name] = self._engine.encode(self._prompts[name], [])
        return BenchRequest(self._encoded[name], random.Random(f"{cell.seed}/{name}").getrandbits(31))

    def measure_costs(self, batch: int | None = None) -> CostsMeasured:
        """Time single passes, or those that so many requests share, unless that fails: the sweep can do without."""
        stops = self._snapshot().stops
        try:
            costs = self._costs(batch)
            if self._snapshot().stops > stops:  # the pause would be in one of the times
                costs = self._costs(batch)
        except Exception as error:
            self.costs_work = False
            return CostsMeasured(None, _message(error))
        self._store.append_costs(costs.lines())
        if batch is None:
            self._store.update(costs=PassTimes.of(self._store.costs()).medians())
        else:
            self._store.update(shared_costs=SharedTimes.of(self._store.costs()).medians())
        return CostsMeasured(costs)

    def _costs(self, batch: int | None) -> PassTimes | SharedTimes:
        gammas, trees = self._sweep.options.gammas, self._nodes
        prompt = self._engine.encode(self._sweep.prompts[0], [])
        if batch is None:
            return self._engine.measure_costs(prompt, cost_widths(gammas, trees), TREE_NODES if trees else ())
        return self._engine.measure_shared_costs(prompt, batch, shared_widths(gammas, trees))

    @property
    def _nodes(self) -> list[int]:
        """The most nodes of each tree."""
        return [policy.nodes for policy in self._sweep.options.policy_specs if policy.nodes]


def _answers(measurements: Iterable[Measurement]) -> dict[tuple[str, str, int], dict[int, Sequence[int]]]:
    """The outputs of earlier turns by configuration, prompt and repeat: what a conversation goes on with."""
    answers: dict[tuple[str, str, int], dict[int, Sequence[int]]] = {}
    for each in measurements:
        line = each.line
        if isinstance(each.result, Generation) and not line.warmup:
            turns = answers.setdefault((line.config, line.prompt, line.repeat), {})
            turns[line.turn] = tuple(each.result.token_ids)
    return answers


def _measured(outcome: Outcome) -> Json:
    """The fields of ``Measured``."""
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "new_tokens": outcome.tokens,
        "token_ids": list(outcome.token_ids),
        "finish_reason": outcome.finish_reason,
        "first_tokens": outcome.first_tokens,
        "ttft_s": round(outcome.ttft_s, 9),
        "prefill_s": round(outcome.prefill_s, 9),
        "decode_s": round(outcome.decode_s, 9),
        "total_s": round(outcome.ttft_s + outcome.decode_s, 9),
        "log_probability": rounded(outcome.log_probability),
        "steps": StepLists.of(outcome.steps),
        "server": outcome.server,
    }


_PATH = re.compile(r"(?<![\w.])(?:~|[A-Za-z]:)?[/\\](?:[^\s'\":,;/\\]+[/\\])+")


def _message(error: Exception) -> str:
    """An error as one line without local paths."""
    text = " ".join(str(error).split()) or "no message"
    if not isinstance(error, UsageError | RunError):
        text = f"{type(error).__name__}: {text}"
    return _PATH.sub("", text)[:300]


# -- the end ---------------------------------------------------------------------------------------


def finish_run(
    sweep: Sweep,
    store: RunStore,
    engine: BenchEngine[Encoded],
    *,
    in_time: Callable[[], bool] = lambda: True,
) -> tuple[RunWarning, ...]:
    """Look at the whole run once more, and mark it finished; for ``in_time`` see ``find_differences``."""
    store.update(differences=find_differences(sweep, store.measurements(), engine, in_time=in_time))
    warnings = tuple(review(load_results(store.path)))
    store.update(finished=now(), warnings=list(warnings))
    return warnings


def find_differences(
    sweep: Sweep,
    measurements: Iterable[Measurement],
    engine: BenchEngine[Encoded],
    *,
    in_time: Callable[[], bool] = lambda: True,
) -> list[Mismatch]:
    """Greedy outputs that are not those of plain decoding, each with the gap of the target's logits of the two tokens.

    Beam search is left out, which looks for other answers, and so are servers that were asked other prompts each.
    Of a conversation only the first differing turn is told, for behind it the prompts differ as well; of the repeats
    only the first.

    Each takes the target a pass over the prompt: from when there is no time for one, by ``in_time``, only where outputs
    part is told.
    """
    outputs = {
        (each.line.config, prompt, each.line.turn, each.line.repeat): tuple(output.token_ids)
        for each in measurements
        if not each.line.warmup
        for prompt, output in each.outputs()
    }
    keys = sorted(outputs)
    prompts = {prompt.id: prompt for prompt in sweep.prompts}
    found: dict[tuple[str, str], Mismatch] = {}
    if sweep.options.salt == "each":
        return []
    for config in sweep.configs:
        if config.temperature or config.id == config.baseline or config.kind in OTHER_ANSWERS:
            continue
        for which, name, turn, repeat in keys:
            if which != config.id or name not in prompts:
                continue
            pair = [
                [outputs.get((one, name, earlier, repeat)) for earlier in range(turn + 1)]
                for one in (config.id, config.baseline)
            ]
            tokens, plain = pair[0][-1], pair[1][-1]
            if (config.id, name) in found or tokens is None or plain is None or tokens == plain:
                continue
            history = [answer for answer in pair[1][:-1] if answer is not None]
            if pair[0][:-1] != pair[1][:-1] or len(history) < turn:
                continue
            asked = engine if in_time() else None
            known = _difference(asked, prompts[name], history, tokens, plain, sweep.options.decoding)
            found[config.id, name] = Mismatch(
                config=config.id,
                prompt=name,
                turn=turn,
                repeat=repeat,
                position=_first_difference(tokens, plain),
                gap=None if known is None else rounded(known.gap),
                gap_units=None if known is None else rounded(known.gap_units, 3),
                numerical_tie=None if known is None else known.numerical_tie,
            )
    return list(found.values())


def _first_difference(tokens: Sequence[int], plain: Sequence[int]) -> int:
    pairs = enumerate(zip(tokens, plain, strict=False))
    return next((i for i, pair in pairs if pair[0] != pair[1]), min(len(tokens), len(plain)))


def _difference(
    engine: BenchEngine[Encoded] | None,
    prompt: Prompt,
    history: Sequence[Sequence[int]],
    tokens: Sequence[int],
    plain: Sequence[int],
    decoding: DecodingOptions,
) -> Difference | None:
    """What the target says of the place where two outputs part; ``None`` if nobody is to ask it, or it fails."""
    if engine is None:
        return None
    try:
        return engine.difference(engine.encode(prompt, history), tokens, plain, decoding)
    except Exception:  # the position alone is worth telling
        return None
