"""The configurations and the order of a sweep, as pure functions of the options and the seed."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from specbench.base.errors import UsageError
from specbench.options import NO_OPTIONS, DecodingOptions, TemplateOptions
from specbench.results.lines import Key
from specbench.rows import Condition, LoadedName, OtherLibrary, Row, Server
from specbench.specs.policies import Fixed, PolicySpec
from specbench.specs.sweeps import Arrivals, Closed, Until

if TYPE_CHECKING:
    from specbench.bench.prompts import Prompt
    from specbench.recipe import Recipe
    from specbench.specs.drafters import DrafterSpec

WARMUP_TOKENS = 16
"""Tokens of a warm-up: enough for every shape of forward pass."""

MAX_BEAMS = 64
"""Largest beam search; each beam has keys and values of its own."""

MAX_BATCH = 256
"""Largest batch."""

MAX_CONTEXT = 1_000_000
"""Longest prompt of ``--context``, in tokens."""

Salt = Literal["none", "shared", "each"]
"""Whether prompts get a first line that no prompt cache knows: the same one for all servers, or one for each."""


@dataclass(frozen=True)
class SweepOptions:
    """The options of a sweep, stored in ``run.json``.

    Attributes:
        conditions: What everything is measured under.
        policies: Draft policies; ``fixed`` is measured with each of ``gammas``.
        warmup: Short generations of each configuration that are not counted.
        turns: Turns of a conversation; ``None`` for all.
        seed: Seed of the order of configurations, and of sampling.
        others: What is measured of ``transformers`` too: its own ``generate``; its assisted generation, with each
            drafter that is a model, and prompt lookup; beam searches, at temperature 0.
        context_text: Name and hash of the text in front of longer prompts.
        template: What chat templates are told of all prompts.
        servers: Servers to measure in place of models, each as its name and its model's name.
        salt: How prompt caches of servers are avoided.
        until, minutes: When to stop, and a time limit then; ``None`` to measure everything, and for no limit.

    Raises:
        UsageError: A value is out of range, or not possible with batches.
    """

    conditions: tuple[Condition, ...] = (Condition(),)
    gammas: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    policies: tuple[PolicySpec, ...] = (Fixed(),)
    decoding: DecodingOptions = field(default_factory=lambda: DecodingOptions(max_new_tokens=64))
    repeats: int = 3
    warmup: int = 1
    turns: int | None = None
    seed: int = 0
    others: tuple[OtherLibrary, ...] = ()
    context_text: str | None = None
    template: TemplateOptions = NO_OPTIONS
    servers: tuple[str, ...] = ()
    salt: Salt = "none"
    until: Until | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        for what, value, least in (
            ("number of new tokens", self.decoding.max_new_tokens, 2),
            ("number of repeats", self.repeats, 1),
            ("number of warm-ups", self.warmup, 0),
            ("number of turns", 1 if self.turns is None else self.turns, 1),
        ):
            if value < least:
                raise UsageError(f"The {what} is {value}.", f"Give at least {least}.")
        for what, values in (("γ", self.gammas), ("draft policy", self.policies)):
            if len(set(values)) < len(values):
                raise UsageError(f"A {what} is given twice.", "Give each once.")
        no_batch = "Leave it out, or leave --batch out."
        for wrong, what, hint in (
            (
                any(each.beams for each in self.others) and all(at.temperature for at in self.conditions),
                "Beam search needs temperature 0, which is not among the temperatures.",
                "Leave beam out, or add --temperature 0.",
            ),
            (
                (self.batches or self.contexts) and self.turns != 1,
                f"With {'--batch' if self.batches else '--context'} only the first turn of a conversation is decoded.",
                "Leave --turns out, or give 1.",
            ),
            (
                self.batches and self.contexts,
                "--context is for prompts that are decoded one after the other.",
                no_batch,
            ),
            (
                self.batches and self.until is not None,
                "--until is for prompts that are decoded one after the other.",
                no_batch,
            ),
            (
                self.batches and self.others,
                "transformers decodes one prompt after the other.",
                "Leave out --batch, or --baseline.",
            ),
        ):
            if wrong:
                raise UsageError(what, hint)

    @property
    def batches(self) -> list[int]:
        """Batch sizes; empty for one prompt after the other."""
        return [*dict.fromkeys(at.batch for at in self.conditions if at.batch is not None)]

    @property
    def warmest(self) -> float:
        """The highest temperature."""
        return max(at.temperature for at in self.conditions)

    @property
    def contexts(self) -> list[int]:
        """Lengths of prompts in tokens, ascending; empty for the prompts as they are."""
        return sorted({at.context for at in self.conditions if at.context is not None})


def build_rows(
    options: SweepOptions, drafters: Sequence[tuple[LoadedName, DrafterSpec]], base: Recipe
) -> list[Row]:
    """Build the grid: plain decoding, and drafters × draft policies × draft lengths, under every condition.

    A policy that uses the drafter's distributions is left out for drafters without them.

    Args:
        options: Options of the sweep.
        drafters: What is known of each drafter, and its spec; plain ones are skipped.
        base: A recipe with everything that all rows share.
    """
    drafting = [(name, spec) for name, spec in drafters if not spec.is_plain]
    decoders: list[tuple[Recipe | OtherLibrary, LoadedName | None]] = [(base.plain, None)]
    decoders += [
        (replace(base, drafter=spec, policy=policy.with_gamma(gamma)), name)
        for name, spec in drafting
        for policy in options.policies
        if policy.applies(spec)
        for gamma in (options.gammas if isinstance(policy, Fixed) else (None,))
    ]
    for other in options.others:
        decoders.append((other, None))
        decoders += [
            (other, name)
            for name, spec in drafting
            if other.kind == "assisted" and name.fingerprint is not None and spec.model_part is spec
        ]
    return [
        Row(decoder, at, name)
        for at in options.conditions
        for decoder, name in decoders
        if not (isinstance(decoder, OtherLibrary) and decoder.beams and at.temperature)
    ]


def left_out(base: Recipe, policies: Sequence[PolicySpec], drafters: Sequence[DrafterSpec]) -> list[str]:
    """Return a sentence for each policy that does not apply to a drafter.

    Raises:
        UsageError: One applies to none of them.
    """
    notes = []
    for policy in policies:
        blind = [drafter for drafter in drafters if not policy.applies(drafter)]
        if blind and len(blind) == len(drafters):
            replace(base, drafter=blind[0], policy=policy).check()
        if blind:
            names = ", ".join(map(str, blind))
            why = "it reads the drafter's distribution, and there is none"
            if policy.tree:
                why = "it drafts trees, and only chains can be drafted"
            notes.append(f"{policy} is left out with {names}: {why}.")
    return notes


def server_rows(options: SweepOptions, servers: Sequence[tuple[str, int | None]]) -> list[Row]:
    """Build the grid of servers: each, by its name and draft length, under every condition; the first is the baseline
    of the others.
    """
    return [
        Row(Server(name, servers[0][0], gamma), at) for at in options.conditions for name, gamma in servers
    ]


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Prompts that are decoded together, and measured together.

    Attributes:
        id: Name, unique within a run, also if the run gets more groups later.
        prompts: Ids of the measured prompts, in order.
        background: Ids of prompts that clients send afterwards, until the whole group has ended. They are repeated as
            needed and not measured.
    """

    id: str
    prompts: tuple[str, ...]
    background: tuple[str, ...]


def make_groups(prompts: Sequence[Prompt], arrivals: Arrivals) -> list[PromptGroup]:
    """Group prompts, interleaved by category: one for each client of a closed loop, all of them for an open loop."""
    from specbench.bench.prompts import interleave

    names = [prompt.id for prompt in interleave(prompts)]
    size = arrivals.clients if isinstance(arrivals, Closed) else len(names)
    groups = []
    for number, first in enumerate(range(0, len(names), size), start=1):
        mine = names[first : first + size]
        mark = zlib.crc32("\n".join(mine).encode("utf-8", "surrogatepass"))
        after = (*names[first + size :], *names[: first + size]) if isinstance(arrivals, Closed) else ()
        groups.append(PromptGroup(f"group-{number}-{mark:08x}", tuple(mine), after))
    return groups


def check_batches(options: SweepOptions, prompts: int) -> None:
    """Check that there are at least as many prompts as clients.

    Raises:
        UsageError: There are fewer, so that a prompt would be decoded twice at the same time.
    """
    loads = [at.arrivals for at in options.conditions]
    clients = max((each.clients for each in loads if isinstance(each, Closed)), default=0)
    if clients > prompts:
        raise UsageError(
            f"There are only {prompts} prompts for {clients} requests at a time.",
            "Raise --limit, name more --prompts, or lower --batch.",
        )


def check_contexts(options: SweepOptions, limit: int | None) -> None:
    """Check that the longest context leaves room for an output in the target's.

    Raises:
        UsageError: It does not.
    """
    longest, new = max(options.contexts, default=0), options.decoding.max_new_tokens
    if limit is not None and longest + new > limit:
        raise UsageError(
            f"The target takes {limit:,} tokens, and {longest:,} of context leave no room for {new} new ones.",
            f"Give --context up to {limit - new:,}.",
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement to make: a generation, or the generations of a group.

    Attributes:
        config, prompt: Ids of the configuration, and of the prompt or group.
        turn, repeat: Turn and repeat, counted from 0.
        order: Place among the configurations that decode this turn one after the other.
        seed: Seed of sampling and of arrivals; the same for all configurations of one turn and repeat.
        group: The group; ``None`` for a single prompt.
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


def num_turns(prompt: Prompt, options: SweepOptions) -> int:
    """Return how many turns of a conversation are run."""
    return len(prompt.turns) if options.turns is None else min(len(prompt.turns), options.turns)


@dataclass(frozen=True)
class Sweep:
    """A sweep: its options, prompts (at least one) and configurations.

    Attributes:
        text: The text in front of prompts; ``None`` without contexts.
        together: Number of drafters whose configurations can be measured in turn; ``None`` for all. With fewer, each
            repeat goes over all prompts for some of them, then for the next ones, and every second repeat back.
    """

    options: SweepOptions
    prompts: tuple[Prompt, ...]
    configs: tuple[Row, ...]
    together: int | None = None
    text: str | None = None

    def plan(self) -> list[Cell]:
        """Return everything to measure, in order; the same sweep has the same plan.

        Warm-ups come first. Then, for each repeat, prompt and turn, all configurations decode one after the other in a
        new random order; with servers, every second repeat reverses the order of the one before (ABBA). Batches are
        measured group by group, in a random order of batch sizes and groups. Contexts follow each other in a random
        order, and the configurations of one decode back to back.
        """
        options, cells = self.options, list[Cell]()
        at: dict[tuple[int | None, Arrivals | None], list[Row]] = {}
        for config in self.configs:
            at.setdefault((config.condition.batch, config.condition.arrivals), []).append(config)
        units = {load: self._units(load[1]) for load in at}
        for repeat in range(options.warmup):
            for load, configs in at.items():
                name, _, group = units[load][repeat % len(units[load])]
                cells += self._block(configs, name, 0, repeat, group, warmup=True)
        for repeat in range(options.repeats):
            blocks = [(load, unit) for load in at for unit in units[load]]
            if options.batches:
                random.Random(f"blocks/{options.seed}/{repeat}").shuffle(blocks)
            for part in self._parts(repeat):
                for load, (name, turns, group) in blocks:
                    some = [config for config in at[load] if config.drafter in part]
                    for turn in range(turns):
                        cells += self._block(some, name, turn, repeat, group)
        return cells

    def _units(self, arrivals: Arrivals | None) -> list[tuple[str, int, PromptGroup | None]]:
        """Return prompts with their numbers of turns, or groups, by name."""
        if arrivals is None:
            return [(prompt.id, num_turns(prompt, self.options), None) for prompt in self.prompts]
        return [(group.id, 1, group) for group in make_groups(self.prompts, arrivals)]

    def _block(
        self,
        configs: Sequence[Row],
        name: str,
        turn: int,
        repeat: int,
        group: PromptGroup | None,
        *,
        warmup: bool = False,
    ) -> Iterator[Cell]:
        """Yield what all configurations decode one after the other."""
        options = self.options
        reverse = bool(options.servers) and repeat % 2 == 1
        begin, end = f"{options.seed}/{'warmup' if warmup else 'repeat'}", f"{name}/{turn}"
        order = [config.id for config in configs]
        shuffle = random.Random(f"order/{begin} {repeat - reverse}/{end}").shuffle
        shuffle(order)
        if contexts := options.contexts:
            shuffle(contexts)
            at = {config.id: contexts.index(config.condition.context or 0) for config in configs}
            order.sort(key=at.__getitem__)
        if reverse:
            order.reverse()
        seed = random.Random(f"sampling/{begin} {repeat}/{end}").getrandbits(31)
        for number, config in enumerate(order):
            yield Cell(config, name, turn, repeat, number, warmup, seed, group)

    def _parts(self, repeat: int) -> list[list[str]]:
        """Return the drafters whose configurations are measured in turn, group by group."""
        names = [*dict.fromkeys(config.drafter for config in self.configs)]
        size = self.together or len(names)
        if repeat % 2:
            names.reverse()
        return [names[at : at + size] for at in range(0, len(names), size)]
