"""A sweep by names, as the command line and Python callers ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from specbench.base.errors import UsageError
from specbench.bench.axes import (
    parse_baselines,
    parse_batches,
    parse_contexts,
    parse_gammas,
    parse_policies,
    parse_thinking,
)
from specbench.bench.grid import SweepOptions
from specbench.experiment import Experiment, Models, Servers, Systems, opened
from specbench.models.default import default_drafter
from specbench.options import (
    NO_OPTIONS,
    CacheOptions,
    DecodingOptions,
    ModelOptions,
    SamplingOptions,
    TemplateOptions,
)
from specbench.recipe import Recipe
from specbench.rows import conditions_of
from specbench.specs.drafters import parse_drafter
from specbench.specs.own_code import name_of
from specbench.specs.policies import Fixed
from specbench.specs.servers import parse_servers
from specbench.specs.sweeps import parse_arrivals, parse_until
from specbench.started import Started

if TYPE_CHECKING:
    from specbench.results.results import Results
    from specbench.results.run import Run
    from specbench.rows import Row

_GAMMAS = tuple(range(1, 9))


def experiment(
    target: str,
    drafter: Sequence[str | type] = (),
    *,
    gamma: str | None = None,
    draft_policy: Sequence[str | type] = (),
    temperature: Sequence[float] = (),
    baseline: Sequence[str] = (),
    batch: str | None = None,
    arrivals: Sequence[str] = (),
    context: str | None = None,
    thinking: str | None = None,
    server: Sequence[str] = (),
    engine: str | None = None,
    engine_command: str = "",
    arguments: Sequence[str] = (),
    prompts: Sequence[str] = (),
    limit: int | None = None,
    turns: int | None = None,
    repeats: int = 2,
    warmup: int = 1,
    seed: int = 0,
    until: str | None = None,
    minutes: float | None = None,
    decoding: DecodingOptions | None = None,
    models: ModelOptions | None = None,
    caching: CacheOptions | None = None,
    template: TemplateOptions = NO_OPTIONS,
) -> Experiment:
    """Return what ``specbench sweep`` measures with options of these names (``specbench sweep --help``).

    Args:
        target: With servers the model that has their tokenizer, or "" for their own counts.
        drafter, draft_policy: Names, or classes of your own, made without arguments; empty for the defaults.
        arguments: Options that each server of ``engine`` gets.
        warmup: Short generations of each configuration that are not counted.
        decoding: 48 new tokens by default.

    Raises:
        UsageError: A name or value is none, or some of them do not go together.
    """
    (target,), drafters = _names("target", [target]), _names("drafter", drafter)
    gammas, batches, contexts = parse_gammas(gamma), parse_batches(batch), parse_contexts(context)
    decoding = decoding or DecodingOptions(max_new_tokens=48)
    conditions = conditions_of(
        temperature=[SamplingOptions(each).temperature for each in temperature],
        batch=batches or ([0] if server and arrivals else []),
        arrivals=map(parse_arrivals, arrivals),
        context=contexts,
        thinking=parse_thinking(thinking),
    )
    usual = ["fixed"] if engine or all(at.temperature for at in conditions) else ["auto", "fixed"]
    policies = parse_policies(_names("draft_policy", draft_policy) or usual)
    if gammas and engine is None and Fixed() not in policies:
        policies = (*policies, Fixed())
    options = SweepOptions(
        conditions,
        gammas=tuple(gammas or _GAMMAS) if Fixed() in policies else (),
        policies=policies,
        decoding=decoding,
        repeats=repeats,
        warmup=warmup,
        turns=turns or (1 if server or engine or batches or contexts else None),
        seed=seed,
        others=parse_baselines(baseline),
        template=template,
        until=None if until is None else parse_until(until),
        minutes=None if until is None else minutes,
    )
    systems: Systems
    if server:
        systems = Servers(parse_servers(server), target or None)
    elif engine is not None:
        systems = Started.of(
            engine, target, drafters, options.warmest, command=engine_command, arguments=arguments,
            gammas=gammas, policies=policies,
        )  # fmt: skip
    else:
        systems = _models(target, drafters, caching, models or ModelOptions(), decoding, template)
    return Experiment(systems=systems, options=options, prompts=prompts, limit=limit)


def _models(target: str, drafters: Sequence[str], caching: CacheOptions | None, *groups: Any) -> Models:
    """Return a target with drafters, or with its default one, and with its default cache unless another is chosen."""
    base = Recipe.of_target(target, caching or CacheOptions(), *groups)
    if caching is None:
        from specbench.models.default import with_default_cache

        base = with_default_cache(base)
    specs = [*map(parse_drafter, dict.fromkeys(drafters))] or [default_drafter(base)]
    return Models(base, [spec for spec in specs if not spec.is_plain])


def measured_again(run: Run, row: Row, address: str) -> Experiment:
    """Return the experiment that measures a row of a run of servers again, with the same prompts, on the server ``new``
    at an address.

    Raises:
        UsageError: It is no row of servers, or the address is none.
    """
    if row.kind != "server":
        raise UsageError(
            f"{row.label} was not measured on a server.",
            "Measure the baseline with `specbench sweep --server`.",
        )
    stored = run.options
    names = {field.name for field in fields(DecodingOptions)}
    asked = experiment(
        stored.get("tokenizer") or "",
        server=[f"new={address}"],
        prompts=stored.get("prompts") or (),
        limit=stored.get("limit"),
        repeats=run.repeats,
        warmup=run.warmup,
        turns=stored.get("turns"),
        seed=run.seed or 0,
        decoding=msgspec.convert({name: stored[name] for name in names & stored.keys()}, DecodingOptions),
        template=msgspec.convert(stored.get("template") or {}, TemplateOptions),
    )
    return replace(asked, options=replace(asked.options, conditions=(row.condition,)))


def _names(what: str, given: Sequence[str | type]) -> list[str]:
    """Return names, and classes by theirs."""
    if isinstance(given, str) or not all(isinstance(each, str | type) for each in given):
        raise UsageError(
            f"A sweep takes names and classes, and {what} holds something else.",
            "Give the class of an object, or measure it with speculative_generate.",
        )
    return [each if isinstance(each, str) else name_of(each) for each in given]


def sweep(
    target: str,
    drafters: Sequence[str | type] | None,
    out: str | Path,
    *,
    resume: bool = False,
    **asked: Any,
) -> Results:
    """Measure drafters and draft policies against plain decoding, as ``specbench sweep`` does.

    Args:
        target, drafters: As ``--target`` and ``--drafter`` take them, or classes of drafters of your own; ``None`` for
            the target's default drafter.
        out: The folder of the run.
        resume: Continue the run in the folder, also with more rows or prompts.
        asked: Other options of ``specbench sweep`` by their names: ``gamma="1..4"``, ``draft_policy=["auto"]``,
            ``limit=12``; see ``specbench.sweeps.experiment``.

    Returns:
        Data frames of the run.

    Raises:
        UsageError: An argument is wrong, or the folder has results already.
        RunError: The target cannot be loaded, or results cannot be written.

    Examples:
        >>> measured = sweep(
        ...     "smollm2-135m", ["lookup"], folder / "sweep", draft_policy=["auto"], limit=2, repeats=1, warmup=0,
        ...     decoding=DecodingOptions(max_new_tokens=4),
        ... )
        >>> sorted(measured.generations["label"].unique())
        ['lookup auto', 'plain']
    """
    from specbench.results.results import load_results

    with opened(experiment(target, drafters or (), **asked), Path(out), resume=resume) as session:
        session.run_all()
    return load_results(out)
