"""An engine without models: outputs, times and failures are what the script says."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from specbench.base.load import LoadSnapshot
from specbench.bench.engines.engine import BenchEngine
from specbench.bench.grid import Sweep, SweepOptions, build_rows
from specbench.bench.manifest import describe_run
from specbench.bench.prompts import Prompt
from specbench.bench.serving import BenchRequest, Workload
from specbench.bench.session import Session
from specbench.decoding.records import Step, StepTimes
from specbench.options import DecodingOptions
from specbench.recipe import Recipe
from specbench.results.lines import (
    STEP_FIGURES,
    CostLine,
    Generation,
    Group,
    MeasuredOutput,
    Pool,
    RequestLine,
    StepLists,
)
from specbench.results.run import Environment, Run, TargetModel
from specbench.results.store import RunStore
from specbench.rows import Condition, LoadedName, Row, conditions_of
from specbench.specs.drafters import DrafterSpec, Lookup, NGram, Plain, SelfForm, SmallModel, parse_drafter
from specbench.specs.models import ModelSpec
from specbench.specs.policies import parse_policy
from specbench.specs.sweeps import parse_until

if TYPE_CHECKING:
    from specbench.backends.torch.parity import Difference

ENVIRONMENT = Environment(
    cpu="Test CPU", cores=2, threads=2, devices=[], python="3", torch="2", transformers="5"
)
TARGET = TargetModel(name="scripted", fingerprint="f00", dtype="float32", device="cpu", vocab_size=100)


def taking(made: Generation, decode_s: float, **changed: Any) -> Generation:
    """The same output, decoded in another time."""
    return structs.replace(made, decode_s=decode_s, total_s=made.ttft_s + decode_s, **changed)


def verifying(steps: StepLists, seconds: Sequence[float]) -> StepLists:
    """The same steps, which take these times and verify all the while."""
    none = {name: [0.0] * len(seconds) for name, kind in STEP_FIGURES.items() if kind is float}
    return structs.replace(steps, **none | {"verify_s": [*seconds]})


def in_group(made: Generation, asked: BenchRequest, **times: float) -> RequestLine:
    """An output as one of several that were decoded side by side."""
    fields = {name: getattr(made, name) for name in MeasuredOutput.__struct_fields__}
    return RequestLine(**fields, prompt=asked.name, category=asked.category, **times)


class ScriptedEngine(BenchEngine):
    """Emits tokens made from prompt, history and seed alone, as a lossless engine would; keeps every call.

    Args:
        fails: Raises for a generation by returning the error to raise, else ``None``.
        spoils: Whether a configuration changes its last token.
        tie: What ``difference`` says.
        reference_s: Time per token of transformers' own generate; plain decoding takes 0.01.
        slower: How many times longer a configuration takes for a prompt because of those beside it, or its context.
    """

    def __init__(
        self,
        *,
        fails: Callable[[Row, Sequence[int]], BaseException | None] = lambda config, prompt: None,
        spoils: Callable[[Row], bool] = lambda config: False,
        tie: bool | None = None,
        reference_s: float = 0.02,
        slower: Callable[[Row, Sequence[int]], float] = lambda config, prompt: 1.0,
    ) -> None:
        self.reference_s, self.slower = reference_s, slower
        self.fails, self.spoils, self.tie = fails, spoils, tie
        self.calls: list[tuple[str, tuple[int, ...], int]] = []
        self.cost_calls: list[tuple[int, ...]] = []
        self.workloads: list[tuple[str, Workload]] = []

    def describe_target(self, decoding: DecodingOptions) -> TargetModel:
        return TARGET

    def encode(self, prompt: Prompt, answers: Sequence[Sequence[int]]) -> list[int]:
        ids = [
            zlib.crc32(f"{prompt.system}/{turn}".encode()) % 100 for turn in prompt.turns[: len(answers) + 1]
        ]
        return [*ids, *(token for answer in answers for token in answer)]

    def count_tokens(self, prompt: Prompt) -> int:
        return len(" ".join(prompt.turns[:1]).split())

    def generate(
        self, config: Row, prompt: Sequence[int], decoding: DecodingOptions, *, seed: int
    ) -> Generation:
        tokens_asked = decoding.max_new_tokens
        self.calls.append((config.id, tuple(prompt), tokens_asked))
        error = self.fails(config, prompt)
        if error is not None:
            raise error
        key = f"{list(prompt)}/{seed if config.condition.temperature else ''}"
        tokens = [zlib.crc32(f"{key}/{i}".encode()) % 100 for i in range(tokens_asked)]
        if self.spoils(config):
            tokens[-1] = (tokens[-1] + 1) % 100
        steps = _steps(config, tokens[1:]) if config.kind in ("plain", "speculative") else ()
        return Generation.of(
            tokens,
            0.1,
            (sum(step.times.total_s for step in steps) or self.reference_s * (tokens_asked - 1))
            * (1.0 if config.condition.context is None else self.slower(config, prompt)),
            steps,
            prompt_tokens=len(prompt),
            finish_reason="length",
            peak_memory_bytes=1000,
        )

    def generate_group(self, config: Row, workload: Workload, decoding: DecodingOptions) -> Group:
        self.workloads.append((config.id, workload))
        served = []
        for number, asked in enumerate(workload.requests):
            alone = self.generate(config, asked.prompt, decoding, seed=asked.seed)
            alone = taking(alone, alone.decode_s * self.slower(config, asked.prompt))
            arrived_s = workload.times[number] if workload.times else 0.0
            served.append(in_group(alone, asked, arrived_s=arrived_s, queued_s=0.025))
        ends = [each.arrived_s + each.total_s for each in served]
        pool = Pool(block=16, blocks=100, peak=10 * len(served), bytes=1000)
        return Group(
            requests=served, clients=workload.clients, seconds=max(ends), tokens=1000, pool=pool,
            peak_memory_bytes=2000,
        )  # fmt: skip

    def measure_costs(
        self,
        prompt: Sequence[int],
        widths: Sequence[int],
        context: int | None = None,
    ) -> list[CostLine]:
        self.cost_calls.append(tuple(widths))
        more = 0.0 if context is None else 0.001 * context
        return cost_lines(
            {n: [0.3 + more, round(0.1 + more + n / 1000, 9), 0.01 + more] for n in widths},
            {"d": [0.02 + more, 0.01 + more, 0.03 + more]},
            context or 256,
        )

    def difference(
        self, prompt: Sequence[int], tokens: Sequence[int], plain: Sequence[int], decoding: DecodingOptions
    ) -> Difference | None:
        if self.tie is None:
            return None
        from specbench.backends.torch.parity import (
            Difference,  # imports torch, which a process that is killed has no time for
        )

        position = next(i for i, pair in enumerate(zip(tokens, plain, strict=True)) if pair[0] != pair[1])
        gap = 0.001 if self.tie else 2.0
        return Difference(
            position, (tokens[position], plain[position]), (9.0, 9.0 - gap), gap, gap * 100, self.tie
        )


def _steps(config: Row, tokens: Sequence[int]) -> tuple[Step, ...]:
    """Steps in which every draft is accepted."""
    steps = []
    at = 0
    while at < len(tokens):
        gamma = min(config.gamma or 0, len(tokens) - at - 1)
        emitted = tuple(tokens[at : at + gamma + 1])
        steps.append(
            Step(
                index=len(steps),
                position=at,
                drafted=emitted[:gamma],
                accepted=gamma,
                tested=gamma,
                tokens=emitted,
                closing="bonus" if gamma else "target",
                expected_acceptance=(1.0,) * gamma,
                times=StepTimes(draft_s=0.001 * gamma, verify_s=0.01),
                policy={"noted": 0.5} if gamma else {},
            )
        )
        at += gamma + 1
    return tuple(steps)


def prompts(single: int = 3, conversations: int = 0) -> tuple[Prompt, ...]:
    """Prompts of one turn, and conversations of three."""
    return (
        *(Prompt(f"one-{i}", "chat", (f"Question {i}",)) for i in range(single)),
        *(Prompt(f"many-{i}", "talk", ("First", f"Second {i}", "Third")) for i in range(conversations)),
    )


BASE = Recipe(ModelSpec("hub", "org/scripted"))
"""What the configurations have in common."""


def specs_of(*names: str) -> dict[str, DrafterSpec]:
    """The specs of drafters by their names in results; what is no word stands for a model."""
    words = {kind.word for kind in (Plain, Lookup, NGram, SelfForm)}
    return {
        name: parse_drafter(name) if name.partition(":")[0] in words else SmallModel(ModelSpec("hub", name))
        for name in names
    }


def grid_of(options: SweepOptions, *names: str, base: Recipe = BASE, **fingerprints: str) -> list[Row]:
    """The grid of drafters by their names, with fingerprints of models."""
    drafters = [
        (LoadedName(name, fingerprint=fingerprints.get(name)), spec)
        for name, spec in specs_of(*names).items()
    ]
    return build_rows(options, drafters, base)


def make_sweep(
    asked: Sequence[Prompt] | None = None, drafters: Sequence[str] = ("d",), **options: Any
) -> Sweep:
    """A small sweep; for ``options`` see ``SweepOptions`` and ``conditions_of``."""
    axes = {name: options.pop(name) for name in Condition.__struct_fields__ if name in options}
    defaults: dict[str, Any] = {"gammas": (1, 2), "repeats": 2, "warmup": 1}
    options.setdefault("decoding", DecodingOptions(max_new_tokens=options.pop("max_new_tokens", 5)))
    options["policies"] = tuple(map(parse_policy, options.get("policies", ("fixed",))))
    options["until"] = parse_until(options["until"]) if "until" in options else None
    made = SweepOptions(conditions_of(**axes), **{**defaults, **options})
    return Sweep(made, tuple(asked or prompts()), tuple(grid_of(made, *drafters)))


def describe(sweep: Sweep, **changed: Any) -> Run:
    """The ``run.json`` of a sweep over the scripted engine."""
    run = describe_run(sweep, TARGET, {"target": "scripted"}, environment=ENVIRONMENT)
    return msgspec.structs.replace(run, **changed)


def new_store(path: Path, sweep: Sweep) -> RunStore:
    """A store for a sweep over the scripted engine."""
    return RunStore.create(path, describe(sweep))


def cost_lines(
    target: Mapping[int, list[float]], drafters: Mapping[str, list[float]], context: int
) -> list[CostLine]:
    """Times of single passes, by tokens and by drafter."""
    lines = [
        CostLine(kind="target", tokens=n, seconds=seconds, context_tokens=context)
        for n, seconds in target.items()
    ]
    return lines + [
        CostLine(kind="drafter", drafter=name, seconds=seconds, context_tokens=context)
        for name, seconds in drafters.items()
    ]


def quiet() -> LoadSnapshot:
    """The load of a quiet machine."""
    return LoadSnapshot(2, 0.1, 0.0, 0.0, 0.0, 0.0, None, 100, 90, 0)


def measure(path: Path, sweep: Sweep, engine: ScriptedEngine | None = None, **options: Any) -> Session:
    """Run a sweep into a folder, which may hold a part of it, on a quiet machine."""
    with RunStore.open(path) if RunStore.exists(path) else new_store(path, sweep) as store:
        return Session(sweep, store, engine or ScriptedEngine(), **{"snapshot": quiet, **options}).run_all()
