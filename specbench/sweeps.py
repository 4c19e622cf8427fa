"""A sweep by names, as the command line and Python callers ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.base.errors import UsageError
from specbench.bench.axes import parse_baselines, parse_policies
from specbench.bench.grid import SweepOptions
from specbench.experiment import Experiment, Models, Servers, Systems, opened
from specbench.models.default import default_drafter
from specbench.options import NO_OPTIONS, CacheOptions, DecodingOptions, ModelOptions, TemplateOptions
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

_GAMMAS = tuple(range(1, 9))


def experiment(
    target: str,
    drafters: Sequence[str | type] | None = None,
    *,
    gammas: Sequence[int] | None = None,
    policies: Sequence[str | type] | None = None,
    temperatures: Sequence[float] = (),
    baselines: Sequence[str] = (),
    batches: Sequence[int] = (),
    arrivals: Sequence[str] = (),
    contexts: Sequence[int] = (),
    thinking: Sequence[bool] = (),
    servers: Sequence[str] = (),
    engine: str | None = None,
    engine_command: str = "",
    engine_arguments: Sequence[str] = (),
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
    """Return what ``specbench sweep`` measures with options of these names.

    Args:
        target: As ``--target`` takes it; with ``servers`` the model that has their tokenizer, or "" for their counts.
        drafters: As ``--drafter`` takes them, or classes of your own; ``None`` for the target's default drafter.
        gammas: Draft lengths that are measured with the policy ``fixed``; ``None`` for 1 to 8 where that is measured.
        policies: As ``--draft-policy`` takes them, or classes of your own, made without arguments; ``None`` for
            ``fixed``, and at temperature 0 also ``auto``.
        temperatures: 0 is greedy, and the default.
        baselines, arrivals, servers, engine, until: As the options of these names take them.
        batches: Batch sizes; empty for one prompt after the other.
        contexts: Lengths of prompts in tokens; empty for the prompts as they are.
        thinking: What chat templates are told; empty for nothing.
        engine_command, engine_arguments: Starts a server of ``engine``; options that each of them gets.
        prompts: Built-in sets, "all", public benchmarks, or files; empty for all sets.
        limit: Number of prompts; ``None`` for all, or 12 if no set is named.
        turns: Most turns of a conversation; ``None`` for all, with servers, batches and contexts for 1.
        repeats: How often each prompt is decoded with each configuration.
        warmup: Short generations of each configuration that are not counted.
        seed: Seed of the random order and of sampling.
        minutes: Time limit with ``until``; ``None`` for none.
        decoding: Limits of outputs; 48 new tokens by default.
        models, caching, template: How weights are loaded, the KV cache, and what chat templates are told.

    Raises:
        UsageError: A name or value is none, or some of them do not go together.
    """
    if not isinstance(target, str):
        raise UsageError(
            "The target of a sweep is a name.", "Measure a model of your own with speculative_generate."
        )
    drafters, policies = _names("drafters", drafters), _names("policies", policies)
    decoding = decoding or DecodingOptions(max_new_tokens=48)
    conditions = conditions_of(
        temperature=temperatures,
        batch=batches or ([0] if servers and arrivals else []),
        arrivals=map(parse_arrivals, arrivals),
        context=contexts,
        thinking=thinking,
    )
    greedy = not all(at.temperature for at in conditions)
    usual = ["auto", "fixed"] if greedy and engine is None else ["fixed"]
    parsed = parse_policies(usual if policies is None else policies)
    if gammas and engine is None and Fixed() not in parsed:
        parsed = (*parsed, Fixed())
    lengths = (gammas or _GAMMAS) if Fixed() in parsed else ()
    options = SweepOptions(
        conditions,
        gammas=tuple(lengths),
        policies=parsed,
        decoding=decoding,
        repeats=repeats,
        warmup=warmup,
        turns=turns or (1 if servers or engine or batches or contexts else None),
        seed=seed,
        others=parse_baselines(baselines),
        template=template,
        until=None if until is None else parse_until(until),
    )
    systems: Systems
    if servers:
        specs = parse_servers(servers)
        options = replace(options, gammas=(), policies=(), servers=tuple(spec.name for spec in specs))
        systems = Servers(specs, target or None)
    elif engine is not None:
        compared: dict[str, Any] = {"gammas": gammas, "policies": parsed}
        systems = Started.of(
            engine, target, drafters or (), decoding, max(at.temperature for at in conditions),
            command=engine_command, arguments=engine_arguments, usual=drafters is None, **compared,
        )  # fmt: skip
        options = systems.options(options)
    else:
        base = Recipe.of_target(
            target, models or ModelOptions(), caching or CacheOptions(), decoding, template
        )
        if caching is None:
            from specbench.models.default import with_default_cache

            base = with_default_cache(base)
        named = [default_drafter(base)] if drafters is None else map(parse_drafter, dict.fromkeys(drafters))
        systems = Models(base, [spec for spec in named if not spec.is_plain])
    return Experiment(systems=systems, options=options, prompts=prompts, limit=limit, minutes=minutes)


def _names(what: str, given: Sequence[str | type] | None) -> list[str] | None:
    """Return names, and classes by theirs."""
    if isinstance(given, str) or not all(isinstance(each, str | type) for each in given or ()):
        raise UsageError(
            f"A sweep takes names and classes, and {what} holds something else.",
            "Give the class of an object, or measure it with speculative_generate.",
        )
    return None if given is None else [each if isinstance(each, str) else name_of(each) for each in given]


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
        asked: Everything else that is asked for, see ``specbench.sweeps.experiment``: ``policies``, ``gammas``,
            ``prompts``, ``limit``, ``repeats``, ``temperatures``, ``batches``, ``servers``, ``until`` and others.

    Returns:
        Data frames of the run.

    Raises:
        UsageError: An argument is wrong, or the folder has results already.
        RunError: The target cannot be loaded, or results cannot be written.

    Examples:
        >>> measured = sweep(
        ...     "smollm2-135m", ["lookup"], folder / "sweep", policies=["auto"], limit=2, repeats=1, warmup=0,
        ...     decoding=DecodingOptions(max_new_tokens=4),
        ... )
        >>> sorted(measured.generations["label"].unique())
        ['lookup auto', 'plain']
    """
    from specbench.results.results import load_results

    with opened(experiment(target, drafters, **asked), Path(out), resume=resume) as session:
        session.run_all()
    return load_results(out)
