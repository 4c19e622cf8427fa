"""What a sweep compares, and in which order: pure functions of the options and the seed."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from specbench.base.errors import UsageError
from specbench.options import DecodingOptions
from specbench.results.lines import Key
from specbench.results.run import RunConfig, StoredRecipe
from specbench.specs.arrivals import Arrivals, Closed, Poisson, parse_arrivals
from specbench.specs.policies import PolicySpec, parse_policy

if TYPE_CHECKING:
    from specbench.bench.prompts import Prompt
    from specbench.recipe import Recipe
    from specbench.specs.drafters import DrafterSpec

LOOKUP_TOKENS = 10
"""``prompt_lookup_num_tokens`` of transformers' prompt lookup: the value its documentation uses."""

WARMUP_TOKENS = 16
"""Tokens of a warm-up: enough to meet every shape of pass once."""

MOST_BEAMS = 64
"""Each has keys and values of its own."""

LARGEST_BATCH = 256
"""Requests that may be under way at a time."""

Kind = Literal["plain", "speculative", "transformers", "assisted", "beam", "server"]

Salt = Literal["none", "shared", "each"]
"""Whether prompts get a first line of their own, which no cache of prompts can know: the same one for all servers, or
another one for each."""


# -- what is compared ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """One way of decoding that a sweep compares.

    Attributes:
        id: Its name in files; unique within a run.
        label: Its name in tables and figures.
        kind: ``plain`` and ``speculative`` go through specbench's loop; ``transformers`` is its ``generate``,
            ``assisted`` that with an assistant, ``beam`` its beam search; ``server`` is whatever a server does.
        drafter: The drafter's name, ``none`` without one; of a server its own.
        gamma: Tokens drafted in a step; ``None`` where something else decides.
        draft_policy: The draft policy, with those of its options that are not the defaults (``egag:scale=0.5``);
            ``none`` where nothing is drafted.
        temperature: 0 for greedy decoding.
        cache: Kind of key/value cache.
        baseline: Id of the plain configuration it is compared with.
        drafter_fingerprint: Of a drafter model's weights; ``None`` for drafters without any of their own.
        drafter_dtype: In which dtype its own model drafts; ``None`` without one, or where nobody says.
        beams: Texts that a beam search goes on with; ``None`` where none is searched.
        batch: Requests that are decoded at a time; ``None`` for one prompt after the other, by the loop for one.
        arrivals: How requests come, as ``parse_arrivals`` takes it; ``None`` without a batch.
        recipe: The whole of it, for specbench's own loop; ``None`` where something else decodes, or nothing will be.
    """

    id: str
    label: str
    kind: Kind
    drafter: str
    gamma: int | None
    draft_policy: str
    temperature: float
    cache: str
    baseline: str
    drafter_fingerprint: str | None = None
    drafter_dtype: str | None = None
    beams: int | None = None
    batch: int | None = None
    arrivals: str | None = None
    recipe: Recipe | None = None

    @property
    def policy_spec(self) -> PolicySpec:
        """The draft policy of a speculative configuration."""
        return parse_policy(self.draft_policy)

    def record(self) -> RunConfig:
        """As ``run.json`` stores it."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        recipe = None if self.recipe is None else msgspec.convert(self.recipe.to_json(), StoredRecipe)
        return RunConfig(**{**values, "recipe": recipe})

    @property
    def load(self) -> tuple[int, Arrivals] | None:
        """The batch and how its requests come."""
        if self.batch is None or self.arrivals is None:
            return None
        return self.batch, parse_arrivals(self.arrivals)


@dataclass(frozen=True)
class SweepOptions:
    """What defines the measurements of a sweep.

    Attributes:
        gammas: Draft lengths.
        policies: Draft policies by their names; ``fixed`` takes its length from ``gammas``.
        temperatures: 0 for greedy decoding.
        decoding: Of every output.
        repeats: How often everything is measured.
        warmup: Short generations of each configuration that are not counted.
        turns: How many turns of a conversation are run at most; ``None`` for all.
        seed: Of the order of configurations, and of sampling.
        cache: Kind of key/value cache.
        transformers: Add ``transformers``' own ``generate``.
        assisted: Add its assisted generation (with drafter models) and its prompt lookup.
        beams: Add its beam search with so many beams, at temperature 0.
        costs: What ``auto`` goes by, as ``parse_costs`` takes it; ``None`` lets it measure.
        keep_policy_state: Let policies carry what they learn from one prompt to the next.
        batches: How many requests are decoded at a time; none for one prompt after the other.
        arrivals: How requests come, as ``parse_arrivals`` takes it; none for as many clients as the batch is large.
        servers: Those that are measured in place of models, each by its name and that of its model.
        api: Which of their interfaces is asked.
        salt: How their caches of prompts are defeated.

    Raises:
        UsageError: A value outside its range, or something that a batch cannot do.
    """

    gammas: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    policies: tuple[str, ...] = ("fixed",)
    temperatures: tuple[float, ...] = (0.0,)
    decoding: DecodingOptions = field(default_factory=lambda: DecodingOptions(max_new_tokens=64))
    repeats: int = 3
    warmup: int = 1
    turns: int | None = None
    seed: int = 0
    cache: str = "dynamic"
    transformers: bool = False
    assisted: bool = False
    beams: tuple[int, ...] = ()
    costs: Mapping[str, Any] | None = None
    keep_policy_state: bool = False
    batches: tuple[int, ...] = ()
    arrivals: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    api: Literal["chat", "completions"] = "chat"
    salt: Salt = "none"

    @property
    def uses_transformers(self) -> bool:
        """Whether ``transformers`` decodes with the target, too."""
        return self.transformers or self.assisted or bool(self.beams)

    @property
    def policy_specs(self) -> tuple[PolicySpec, ...]:
        """The draft policies."""
        return tuple(map(parse_policy, self.policies))

    def __post_init__(self) -> None:
        for what, value, least in (
            ("number of new tokens", self.decoding.max_new_tokens, 2),
            ("number of repeats", self.repeats, 1),
            ("number of warm-ups", self.warmup, 0),
            ("number of turns", 1 if self.turns is None else self.turns, 1),
        ):
            if value < least:
                raise UsageError(f"The {what} is {value}.", f"Give at least {least}.")
        for what, values in (
            ("γ", self.gammas),
            ("temperature", self.temperatures),
            ("policy", self.policies),
            ("way for requests to come", tuple(str(parse_arrivals(each)) for each in self.arrivals)),
        ):
            if len(set(values)) < len(values):
                raise UsageError(f"A {what} is given twice.", "Give each once.")
        if self.beams and 0.0 not in self.temperatures:
            raise UsageError(
                "Beam search draws nothing, and temperature 0 is not among the temperatures.",
                "Leave beam out, or add --temperature 0.",
            )
        if self.servers and self.turns != 1:
            raise UsageError(
                "Servers answer the first turns of the prompts.", "Leave --turns out, or give 1."
            )
        self._check_batches()

    def _check_batches(self) -> None:
        if not self.batches:
            if self.arrivals:
                raise UsageError("--arrivals is for requests side by side.", "Add --batch N.")
            return
        if self.turns != 1:
            raise UsageError(
                "Requests side by side are the first turns of the prompts.", "Leave --turns out, or give 1."
            )
        for refused, what in (
            (self.transformers or self.assisted or self.beams, "transformers decodes"),
            (self.keep_policy_state, "A policy that carries on what it learnt (--keep-policy-state) decodes"),
        ):
            if refused:
                raise UsageError(f"{what} one prompt after the other.", "Leave it out, or leave --batch out.")

    @property
    def loads(self) -> list[tuple[int, Arrivals]]:
        """Every batch with every way for its requests to come."""
        return [
            (batch, arrivals)
            for batch in self.batches
            for arrivals in (map(parse_arrivals, self.arrivals) if self.arrivals else [Closed(batch)])
        ]


def build_configs(
    options: SweepOptions,
    drafters: Mapping[str, DrafterSpec],
    fingerprints: Mapping[str, str] | None = None,
    fitted: Callable[[PolicySpec, str, float], PolicySpec] = lambda policy, *_: policy,
    *,
    base: Recipe | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> list[SweepConfig]:
    """The grid: plain decoding at every temperature and batch, and drafters × policies × draft lengths beside it.

    A policy that reads distributions is left out with drafters that have none.

    Args:
        options: Their grid.
        drafters: By their names; plain ones are left out, for plain decoding is always there.
        fingerprints: Of the weights of those that are models with weights of their own.
        fitted: What a policy becomes with a drafter, by its name, at a temperature.
        base: What all recipes have in common; ``None``: configurations have none.
        dtypes: In which dtype those draft that are models with weights of their own.
    """
    drafting = {name: spec for name, spec in drafters.items() if not spec.is_plain}
    grid = [
        config
        for temperature in options.temperatures
        for load in (options.loads or (None,))
        for config in _configs_at(
            temperature, load, options, drafting, fingerprints or {}, fitted, dtypes or {}
        )
    ]
    return grid if base is None else [replace(each, recipe=_recipe(each, base, drafting)) for each in grid]


def _recipe(config: SweepConfig, base: Recipe, drafters: Mapping[str, DrafterSpec]) -> Recipe | None:
    """The recipe of a configuration for specbench's own loop."""
    if config.kind not in ("plain", "speculative"):
        return None
    base = replace(base, sampling=replace(base.sampling, temperature=config.temperature))
    if config.kind == "plain":
        return base.plain
    policy = (
        config.policy_spec
        if config.gamma is None
        else config.policy_spec.with_options({"gamma": config.gamma})
    )
    models = base.models
    if config.drafter_dtype == "int4":  # which `specbench tune` tries beside what auto means
        models = replace(models, drafter_dtype="int4")
    costs = base.costs if policy.takes("costs") else None
    return replace(base, drafter=drafters[config.drafter], policy=policy, costs=costs, models=models)


def _configs_at(
    temperature: float,
    load: tuple[int, Arrivals] | None,
    options: SweepOptions,
    drafters: Mapping[str, DrafterSpec],
    fingerprints: Mapping[str, str],
    fitted: Callable[[PolicySpec, str, float], PolicySpec],
    dtypes: Mapping[str, str],
) -> Iterator[SweepConfig]:
    """The configurations of one temperature and load, plain decoding first."""
    grid: list[tuple[Kind, str, str, str, int | None, str]] = [
        ("plain", "plain", "plain", "none", None, "none")
    ]
    for name, spec in drafters.items():
        for each in options.policy_specs:
            policy = fitted(each, name, temperature)
            written = str(policy)
            if policy.word == "fixed":
                end = f",siblings={policy.siblings}" if policy.siblings else ""
                if "verification" in policy.options:
                    end += f",verification={policy.options['verification']}"
                grid += [
                    ("speculative", f"{name}@{g}{end}", f"{name} γ={g}{end}", name, g, written)
                    for g in options.gammas
                ]
            elif policy.applies(spec):
                grid.append(("speculative", f"{name}@{written}", f"{name} {written}", name, None, written))
    own = "transformers"
    if options.transformers:
        grid.append(("transformers", own, f"{own} generate", "none", None, "none"))
    if options.assisted:
        grid.append(("assisted", f"{own}:lookup", f"{own} prompt lookup", "lookup", LOOKUP_TOKENS, own))
        models = [name for name, spec in drafters.items() if name in fingerprints and spec.model_part is spec]
        grid += [("assisted", f"{own}:{name}", f"{own} assisted, {name}", name, None, own) for name in models]
    beams = {f"{own}:beam={count}": count for count in options.beams if temperature == 0}
    grid += [
        ("beam", name, f"{own} beam search, {count} beams", "none", None, "none")
        for name, count in beams.items()
    ]
    end, label_end = _ends(temperature, load)
    batch, arrivals = load or (None, None)
    for kind, identifier, label, drafter, gamma, written in grid:
        yield SweepConfig(
            id=identifier + end,
            label=label + label_end,
            kind=kind,
            drafter=drafter,
            gamma=gamma,
            draft_policy=written,
            temperature=temperature,
            cache=options.cache if kind in ("plain", "speculative") else "dynamic",
            baseline="plain" + end,
            drafter_fingerprint=fingerprints.get(drafter),
            drafter_dtype=dtypes.get(drafter),
            beams=beams.get(identifier),
            batch=batch,
            arrivals=None if arrivals is None else str(arrivals),
        )


def _ends(temperature: float, load: tuple[int, Arrivals] | None) -> tuple[str, str]:
    """What the ids and the labels of configurations at a temperature and load end in."""
    end, label_end = (f",t={temperature:g}", f", T={temperature:g}") if temperature else ("", "")
    if load is None:
        return end, label_end
    batch, arrivals = load
    end, label_end = f"{end},b={batch}", f"{label_end}, batch {batch}"
    if arrivals != Closed(batch):
        end, label_end = f"{end},{arrivals}", f"{label_end}, {arrivals}"
    return end, label_end


def build_server_configs(options: SweepOptions, names: Sequence[str]) -> list[SweepConfig]:
    """Every server at every temperature and batch; the first is the baseline of the others.

    Args:
        options: Their grid.
        names: Of the servers.
    """
    return [
        SweepConfig(
            id=name + end,
            label=name + label_end,
            kind="server",
            drafter=name,
            gamma=None,
            draft_policy="none",
            temperature=temperature,
            cache="none",
            baseline=names[0] + end,
            batch=None if load is None else load[0],
            arrivals=None if load is None else str(load[1]),
        )
        for temperature in options.temperatures
        for load in (options.loads or (None,))
        for end, label_end in [_ends(temperature, load)]
        for name in names
    ]


# -- what runs when --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Prompts that are decoded side by side, and measured together.

    Attributes:
        id: Unique within a run, whatever other groups it may get later.
        prompts: Ids of those that are measured, in the order in which they come.
        beside: Ids of those that come behind them for as long as one of the group has not ended, so that no client is
            ever without a request; from the beginning again when all have come. They are not measured.
    """

    id: str
    prompts: tuple[str, ...]
    background: tuple[str, ...]


def make_groups(prompts: Sequence[Prompt], arrivals: Arrivals) -> list[PromptGroup]:
    """Prompts in groups: one for each client, in turn from the categories; all of them where they come by the clock."""
    from specbench.bench.prompts import interleave_categories

    names = [prompt.id for prompt in interleave_categories(prompts)]
    size = arrivals.clients if isinstance(arrivals, Closed) else len(names)
    groups = []
    for number, first in enumerate(range(0, len(names), size), start=1):
        mine = names[first : first + size]
        mark = zlib.crc32("\n".join(mine).encode("utf-8", "surrogatepass"))
        behind = () if isinstance(arrivals, Poisson) else (*names[first + size :], *names[: first + size])
        groups.append(PromptGroup(f"group-{number}-{mark:08x}", tuple(mine), behind))
    return groups


def check_batches(options: SweepOptions, prompts: int) -> None:
    """Refuse more clients than there are prompts.

    Raises:
        UsageError: Some prompt would be decoded beside itself.
    """
    clients = max((each.clients for _, each in options.loads if isinstance(each, Closed)), default=0)
    if clients > prompts:
        raise UsageError(
            f"{clients} requests at a time are more than the {prompts} prompts.",
            "Raise --limit, name more --prompts, or lower --batch.",
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """One generation to measure, or those of a group side by side.

    Attributes:
        config, prompt: Their ids; of a group its own.
        turn: Of the conversation, from 0.
        repeat: From 0.
        order: Place among the configurations that decode this turn back to back.
        warmup: Whether it only warms the machine up.
        seed: Of sampling, and of the times at which requests come; the same for all configurations of one turn and
            repeat.
        group: Of prompts side by side; ``None`` for a single one.
    """

    config: str
    prompt: str
    turn: int
    repeat: int
    order: int
    warmup: bool
    seed: int
    group: PromptGroup | None = None

    @property
    def key(self) -> Key:
        return self.config, self.prompt, self.turn, self.repeat, self.warmup


def plan(options: SweepOptions, prompts: Sequence[Prompt], configs: Sequence[SweepConfig]) -> Iterator[Cell]:
    """Everything there is to measure, in order; the same arguments give the same plan.

    First the warm-ups. Then, repeat by repeat, prompt by prompt and turn by turn, all configurations back to back in a
    fresh random order; of servers every other repeat reverses the order of the one before (ABBA). Of requests side by
    side it is group by group, in a random order of batches and groups, and all configurations of that batch back to
    back.
    """

    def block(
        name: str,
        turn: int,
        repeat: int,
        warmup: bool,
        mine: Sequence[SweepConfig],
        group: PromptGroup | None = None,
    ) -> Iterator[Cell]:
        reverse = bool(options.servers) and repeat % 2 == 1
        begin, end = f"{options.seed}/{'warmup' if warmup else 'repeat'}", f"{name}/{turn}"
        order = [config.id for config in mine]
        random.Random(f"order/{begin} {repeat - reverse}/{end}").shuffle(order)
        if reverse:
            order.reverse()
        seed = random.Random(f"sampling/{begin} {repeat}/{end}").getrandbits(31)
        for number, config in enumerate(order):
            yield Cell(config, name, turn, repeat, number, warmup, seed, group)

    if options.batches:
        loads = dict.fromkeys(load for config in configs if (load := config.load) is not None)
        groups = {load: make_groups(prompts, load[1]) for load in loads}
        at = {load: [config for config in configs if config.load == load] for load in loads}
        for repeat in range(options.warmup):
            for load in loads:
                group = groups[load][repeat % len(groups[load])]
                yield from block(group.id, 0, repeat, True, at[load], group)
        for repeat in range(options.repeats):
            blocks = [(load, group) for load in loads for group in groups[load]]
            random.Random(f"blocks/{options.seed}/{repeat}").shuffle(blocks)
            for load, group in blocks:
                yield from block(group.id, 0, repeat, False, at[load], group)
        return
    for repeat in range(options.warmup):
        yield from block(prompts[repeat % len(prompts)].id, 0, repeat, True, configs)
    for repeat in range(options.repeats):
        for prompt in prompts:
            for turn in range(num_turns(prompt, options)):
                yield from block(prompt.id, turn, repeat, False, configs)


def num_turns(prompt: Prompt, options: SweepOptions) -> int:
    """How many turns of a conversation are run."""
    return len(prompt.turns) if options.turns is None else min(len(prompt.turns), options.turns)


@dataclass(frozen=True)
class Sweep:
    """A sweep as a whole: options, prompts (at least one) and configurations."""

    options: SweepOptions
    prompts: tuple[Prompt, ...]
    configs: tuple[SweepConfig, ...]

    def plan(self) -> list[Cell]:
        """See ``plan``."""
        return list(plan(self.options, self.prompts, self.configs))
