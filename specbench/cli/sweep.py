"""`specbench sweep`: measure a grid of drafters and draft lengths against plain decoding."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specbench.cli import options as opt
from specbench.cli.rule import left_out, refuse_siblings, with_trees
from specbench.options import LENGTH, CacheOptions, DecodingOptions, LengthOptions, ModelOptions
from specbench.recipe import Recipe
from specbench.specs.models import parse_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.bench.engines.own import Engine, ModelEngine
    from specbench.bench.engines.servers import ServerEngine
    from specbench.bench.estimate import TimeNeed
    from specbench.bench.grid import Cell, Sweep, SweepOptions
    from specbench.bench.prompts import Prompt
    from specbench.results.load import LoadSnapshot
    from specbench.results.results import Results
    from specbench.results.run import RunWarning
    from specbench.results.store import RunStore
    from specbench.specs.drafters import DrafterSpec
    from specbench.specs.rules import RuleSpec
    from specbench.specs.servers import ServerSpec

_DEFAULT_PROMPTS, _DEFAULT_LIMIT = "all", 12
_GROUPS = 3  # of prompts side by side that an interval takes at least
_FOLDER = Path("results")

_what = partial(typer.Option, rich_help_panel="What is compared")
_experiment = partial(typer.Option, rich_help_panel="Experiment")
_results = partial(typer.Option, rich_help_panel="Results")
_servers = partial(typer.Option, rich_help_panel="Servers in place of models")


@dataclass(frozen=True)
class _Compared:
    """What stands in the grid beside draft lengths."""

    drafter: Annotated[tuple[str, ...], opt.several_drafters(rich_help_panel="What is compared")] = ()
    temperature: Annotated[
        tuple[float, ...],
        _what("--temperature", "-t", metavar="X", help="0 (the default) for greedy decoding; repeatable."),
    ] = ()
    baseline: Annotated[
        tuple[str, ...],
        _what(
            "--baseline",
            metavar="NAME",
            help="Measure beside plain decoding: transformers, its own generate; beam:N, its beam search with N beams,"
            " whose answers are others. Repeatable.",
        ),
    ] = ()
    assisted: Annotated[
        Literal["transformers"] | None,
        _what(
            "--assisted",
            metavar="transformers",
            help="Measure its prompt lookup and, with drafter models, its assisted generation too.",
        ),
    ] = None
    batch: Annotated[
        str | None,
        _what(
            "--batch",
            metavar="RANGE",
            help="Decode so many requests at a time: 1,2,4,8 or a range as of --gamma. Plain decoding at the same batch"
            " is the baseline. Without it, one prompt follows the other.",
        ),
    ] = None
    arrivals: Annotated[
        tuple[str, ...],
        _what(
            "--arrivals",
            metavar="KIND",
            help="--batch: how requests come; repeatable. closed:N: from N clients that wait for their answers (as many"
            " as the batch); poisson:RATE: at random, so many per second.",
        ),
    ] = ()


@dataclass(frozen=True)
class _Servers:
    """Which servers are measured in place of models, and how."""

    server: Annotated[
        tuple[str, ...],
        _servers(
            "--server",
            metavar="NAME=URL[#MODEL]",
            help="Measure this server, which speaks the OpenAI protocol; repeatable, the first is the baseline. The"
            " model is the one it lists; --target names it here, for its tokenizer to check counts. A key is read from"
            " the environment variable SPECBENCH_KEY_NAME.",
        ),
    ] = ()
    api: Annotated[
        Literal["chat", "completions"],
        _servers(
            "--api", metavar="WHAT", help="What servers are asked: chat, by their template, or completions."
        ),
    ] = "chat"
    timeout: Annotated[
        float,
        _servers("--timeout", min=0.1, metavar="SECONDS", help="Wait so long for every piece of an answer."),
    ] = 300.0
    check_outputs: Annotated[
        bool,
        _servers(
            "--check-outputs",
            help="Load --target at the end, and say by how much it prefers one of two outputs that part.",
        ),
    ] = False


@dataclass(frozen=True)
class _Experiment:
    """Which prompts are decoded, and how often."""

    prompts: Annotated[tuple[str, ...], opt.prompt_sets(rich_help_panel="Experiment")] = ()
    category: Annotated[
        tuple[str, ...], _experiment("--category", metavar="NAME", help="Only these; repeatable.")
    ] = ()
    limit: Annotated[
        int | None,
        _experiment(
            "--limit",
            min=1,
            metavar="N",
            help="Prompts in all, taken in turn from the categories. Default: all of the sets or categories named,"
            f" {_DEFAULT_LIMIT} if none is.",
        ),
    ] = None
    turns: Annotated[
        int | None,
        _experiment(
            "--turns", min=1, metavar="N", help="At most so many turns of a conversation. Default: all."
        ),
    ] = None
    repeats: Annotated[int, _experiment("--repeats", "-r", metavar="N", help="Of everything.")] = 2
    warmup: Annotated[
        int,
        _experiment(
            "--warmup", metavar="N", help="Short generations of each configuration that do not count."
        ),
    ] = 1
    seed: Annotated[
        int, _experiment("--seed", min=0, metavar="N", help="Of the random order and of sampling.")
    ] = 0

    def chosen(self, batches: Sequence[int]) -> tuple[tuple[str, ...], int | None]:
        """The sets that prompts are taken from, and how many."""
        limit = self.limit
        if limit is None and not self.prompts and not self.category:
            limit = max(_DEFAULT_LIMIT, _GROUPS * max(batches, default=1))
        return self.prompts or (_DEFAULT_PROMPTS,), limit


@dataclass(frozen=True)
class _Results:
    """Where results go, and whether others are gone on with."""

    out: Annotated[
        Path | None,
        _results("--out", "-o", metavar="FOLDER", help="Where results go. Default: results/DATE-TARGET."),
    ] = None
    resume: Annotated[
        bool,
        _results(
            "--resume",
            help="Go on with the results in --out, or begin there; without --out with the newest unfinished run of this"
            " sweep in results/.",
        ),
    ] = False
    accept_changes: Annotated[
        bool,
        _results(
            "--accept-changes",
            help="With --resume: go on although the machine, versions or options have changed.",
        ),
    ] = False
    retry_failed: Annotated[
        bool, _results("--retry-failed", help="With --resume: measure again what failed.")
    ] = False
    dry_run: Annotated[
        bool, _results("--dry-run", help="Say what would run, how long, and in how much memory.")
    ] = False

    def __post_init__(self) -> None:
        from specbench.errors import UsageError

        if not self.resume and (self.accept_changes or self.retry_failed):
            raise UsageError("--accept-changes and --retry-failed need --resume.", "Add it.")
        if self.accept_changes and self.out is None:
            raise UsageError("--accept-changes needs --out.", "Name the folder of the run to go on with.")


def sweep(
    ctx: typer.Context,
    *,
    compared: _Compared,
    servers: _Servers,
    target: opt.TargetOption = opt.DEFAULT_TARGET,
    models: ModelOptions,
    rules: Annotated[
        opt.RulesOptions,
        opt.Fields(
            words={
                "gamma": "Draft lengths of the rule fixed: 1..8, 2..16..2 (with a step) or 1,2,4.",
                "length_policy": "Draft-length rule; repeatable. Default: fixed, which takes each γ in turn, and at"
                " temperature 0 auto too. Others: egag, confidence, entropy-bound, svip, heuristic; their options stand"
                " after a colon: egag:scale=0.5.",
            },
            gamma="1..8",
        ),
    ],
    length: LengthOptions,
    keep_policy_state: Annotated[
        bool,
        typer.Option(
            "--keep-policy-state",
            help="Let rules carry what they learn from one prompt to the next.",
            rich_help_panel=LENGTH,
        ),
    ] = False,
    experiment: _Experiment,
    decoding: Annotated[DecodingOptions, opt.Fields(without=opt.NOT_SWEPT, max_new_tokens=48)],
    caching: CacheOptions,
    results: _Results,
    quiet: Annotated[bool, opt.output("--quiet", "-q", help="No progress.")] = False,
    config: opt.ConfigOption = None,  # noqa: ARG001 - read by opt.GroupedCommand
    no_config: opt.NoConfigOption = False,  # noqa: ARG001
    traceback: opt.TracebackOption = False,  # noqa: ARG001 - read by specbench.cli.run
) -> None:
    """Measure drafters and draft lengths against plain decoding: what pays here, and by how much.

    Every configuration decodes every prompt, interleaved in random order. Each generation is stored as it ends: a
    sweep that was stopped goes on with --resume.
    """
    from specbench.results.load import load_snapshot

    start = load_snapshot()
    if servers.server:
        _sweep_servers(ctx, compared, servers, target, models, experiment, decoding, results, quiet, start)
        return
    _refuse_without_servers(ctx)
    from specbench.bench.engines.own import check_engine, load_engine
    from specbench.bench.grid import Sweep, build_configs
    from specbench.cli.progress import starting
    from specbench.results.store import RunStore

    caching = caching.with_kind(opt.cache_for(ctx, target, models, caching))
    base = Recipe(parse_model(target), costs=length.costs, models=models, caching=caching, decoding=decoding)
    options, drafters, notes = _compared_models(
        ctx, compared, experiment, rules, length, base, keep_policy_state=keep_policy_state
    )
    named, limit = experiment.chosen(options.batches)
    chosen = tuple(_prompts(experiment, options))
    sources = describe_sources(base, drafters, named, experiment.category, limit)
    folder = _folder(results, sources, options)
    if results.dry_run:
        grid = build_configs(options, {str(spec): spec for spec in drafters})
        _show_dry_run(Sweep(options, chosen, tuple(grid)), base, drafters, folder, start)
        return
    _refuse_taken(folder, results)
    with starting(quiet) as progress:
        check_engine(base, drafters, options, progress)
        RunStore.check_writable(folder)
        engine = load_engine(base, drafters, options, progress)
    notes += _notes_of(engine, decoding)
    fitted = partial(_calibrated, engine, notes)
    configs = build_configs(
        options, engine.specs, engine.fingerprints, fitted, base=base, dtypes=engine.drafter_dtypes
    )
    _check_costs(options, engine)
    job = _Job(Sweep(options, chosen, tuple(configs)), engine, folder, quiet)
    with job.open_store(sources, accept_changes=results.accept_changes) as store:
        job.say_at_start(start, job.found(store, retry_failed=results.retry_failed), notes)
        code = job.run(store, retry_failed=results.retry_failed)
    if code:
        raise typer.Exit(code)


def _compared_models(
    ctx: typer.Context,
    compared: _Compared,
    experiment: _Experiment,
    rules: opt.RulesOptions,
    length: LengthOptions,
    base: Recipe,
    *,
    keep_policy_state: bool,
) -> tuple[SweepOptions, tuple[DrafterSpec, ...], list[str]]:
    """The options of a sweep over models, its drafters, and what there is to say of rules that do not apply to them."""
    from specbench.bench.grid import (
        SweepOptions,
        parse_baselines,
        parse_batches,
        parse_gammas,
        parse_policies,
    )
    from specbench.specs.drafters import parse_drafter

    chained = opt.chained(base.models, base.caching)
    temperatures = tuple(_checked_temperatures(compared.temperature or [0.0]))
    asked, shared = with_trees(rules.length_policy, rules.tree, length.given)
    if chained is not None:
        shared = {"siblings": 0, **shared}
    policies = parse_policies(asked or _default_rules(temperatures), **shared)
    if chained:
        refuse_siblings(policies, chained)
    given = map(parse_drafter, dict.fromkeys(compared.drafter or [opt.DEFAULT_DRAFTER]))
    drafters = tuple(spec for spec in given if not spec.is_plain)
    gammas = parse_gammas(rules.gamma or "")
    if not any(rule.word == "fixed" for rule in policies):
        _refuse_gamma(ctx, policies)
        gammas = []
    batches = () if compared.batch is None else tuple(parse_batches(compared.batch))
    if batches:
        _refuse_fixed_shapes(base.caching.kind)
    notes = left_out(policies, drafters)
    reference, beams = parse_baselines(compared.baseline)
    options = SweepOptions(
        gammas=tuple(gammas),
        policies=tuple(map(str, policies)),
        temperatures=temperatures,
        decoding=base.decoding,
        repeats=experiment.repeats,
        warmup=experiment.warmup,
        turns=1 if batches and experiment.turns is None else experiment.turns,
        seed=experiment.seed,
        cache=base.caching.kind,
        transformers=reference,
        assisted=compared.assisted is not None,
        beams=beams,
        costs=None if length.costs is None else _costs(length.costs, policies),
        keep_policy_state=keep_policy_state,
        batches=batches,
        arrivals=compared.arrivals,
    )
    return options, drafters, notes


def _prompts(experiment: _Experiment, options: SweepOptions) -> list[Prompt]:
    from specbench.bench.grid import check_batches
    from specbench.bench.prompts import load_prompts

    named, limit = experiment.chosen(options.batches)
    prompts = load_prompts(named, experiment.category, limit)
    check_batches(options, len(prompts))
    return prompts


def _notes_of(engine: ModelEngine, decoding: DecodingOptions) -> list[str]:
    """What there is to say of the loaded models."""
    from specbench.cli.setting import tokenizer_notes

    model = engine.target.language_model
    notes = [*model.notes, *model.defaults.notes(applied=decoding.model_defaults)]
    notes += tokenizer_notes(engine.drafters.values())
    parting = opt.widths_differ(engine.target)
    return notes if parting is None else [*notes, parting]


def _sweep_servers(
    ctx: typer.Context,
    compared: _Compared,
    servers: _Servers,
    target: str,
    models: ModelOptions,
    experiment: _Experiment,
    decoding: DecodingOptions,
    results: _Results,
    quiet: bool,
    start: LoadSnapshot,
) -> None:
    """A sweep of servers in place of models."""
    from specbench.bench.engines.own import load_engine
    from specbench.bench.engines.servers import ServerEngine
    from specbench.bench.grid import Sweep, SweepOptions, build_server_configs, parse_batches
    from specbench.cli.progress import StageProgress
    from specbench.models.load import load_tokenizer
    from specbench.results.store import RunStore
    from specbench.specs.servers import parse_servers

    specs = parse_servers(servers.server)
    known = bool(opt.given(ctx, "target"))
    _refuse_with_servers(ctx, servers, known=known)
    batches = () if compared.batch is None else tuple(parse_batches(compared.batch))
    options = SweepOptions(
        gammas=(),
        policies=(),
        temperatures=tuple(_checked_temperatures(compared.temperature or [0.0])),
        decoding=decoding,
        repeats=experiment.repeats,
        warmup=experiment.warmup,
        turns=1 if experiment.turns is None else experiment.turns,
        seed=experiment.seed,
        cache="none",
        batches=batches,
        arrivals=compared.arrivals,
        servers=tuple(spec.name for spec in specs),
        api=servers.api,
    )
    named, limit = experiment.chosen(batches)
    prompts = tuple(_prompts(experiment, options))
    keys = _keys(specs)
    local = Recipe(parse_model(target), models=models)
    with StageProgress(quiet) as progress:
        tokenizer = load_tokenizer(local.target, progress=progress) if known else None
    engine = ServerEngine(
        specs,
        keys=keys,
        api=servers.api,
        tokenizer=tokenizer,
        local=(lambda: load_engine(local)) if servers.check_outputs else None,
        timeout_s=servers.timeout,
        decoding=decoding,
        temperature=max(options.temperatures),
    )
    try:
        options = replace(options, servers=tuple(each.described for each in engine.servers), salt=engine.salt)
        sources = {
            "target": engine.servers[0].model_name,
            "tokenizer": str(local.target) if known else None,
            "prompts": [Path(name).name for name in named],
            "categories": list(experiment.category),
            "limit": limit,
        }
        folder = _folder(results, sources, options)
        sweep = Sweep(options, prompts, tuple(build_server_configs(options, [spec.name for spec in specs])))
        if results.dry_run:
            for line in _planned(sweep, folder):
                _print(line)
            return
        _refuse_taken(folder, results)
        RunStore.check_writable(folder)
        job = _Job(sweep, engine, folder, quiet)
        with job.open_store(sources, accept_changes=results.accept_changes) as store:
            found = job.found(store, retry_failed=results.retry_failed)
            job.say_at_start(start, found, _server_notes(engine))
            code = job.run(store, retry_failed=results.retry_failed)
        if engine.unjudged:
            job.say(f"Outputs that part were not judged. {engine.unjudged}")
    finally:
        engine.close()
    if code:
        raise typer.Exit(code)


# -- what is asked for -----------------------------------------------------------------------------


_HOW_MODELS_DECODE = (
    "drafter", "baseline", "assisted", "gamma", "length_policy", "tree", "keep_policy_state", "cache",
    "bit_exact", "compiled", LengthOptions,
)  # fmt: skip


def _refuse_with_servers(ctx: typer.Context, servers: _Servers, *, known: bool) -> None:
    """Refuse what says how models decode."""
    from specbench.errors import UsageError

    taken = {"max_new_tokens", "ignore_eos", *(("model_defaults",) if servers.check_outputs else ())}
    others = [each.name for each in fields(DecodingOptions) if each.name not in taken]
    loading = () if servers.check_outputs else (ModelOptions,)
    if written := opt.given(ctx, *_HOW_MODELS_DECODE, *others, *loading):
        raise UsageError(
            f"{', '.join(written)}: servers decode in their own way, and have no such option here.",
            "Leave it out, or leave --server out.",
        )
    if servers.check_outputs and not known:
        raise UsageError("--check-outputs loads the target here.", "Name it by --target.")


def _refuse_without_servers(ctx: typer.Context) -> None:
    """Refuse what is for servers alone."""
    from specbench.errors import UsageError

    if written := opt.given(ctx, "api", "timeout", "check_outputs"):
        raise UsageError(f"{', '.join(written)}: for servers alone.", "Add --server NAME=URL.")


def _refuse_taken(folder: Path, results: _Results) -> None:
    """Refuse a folder with results that are not to be gone on with."""
    from specbench.errors import UsageError
    from specbench.results.store import RunStore

    if not results.resume and RunStore.exists(folder):
        raise UsageError(
            f"The folder {str(folder)!r} holds results already.",
            "Add --resume to go on with them, or give another --out.",
        )


def _keys(specs: Sequence[ServerSpec]) -> dict[str, str]:
    """The keys that the environment holds, by the names of their servers."""
    import os

    from specbench.errors import UsageError

    found = {
        spec.name: os.environ[spec.key_variable].strip() for spec in specs if spec.key_variable in os.environ
    }
    for spec in specs:
        key = found.get(spec.name, "-")
        if not key or not key.isascii() or not key.isprintable():
            raise UsageError(
                f"The environment variable {spec.key_variable} holds no key.", "Put it there, or unset it."
            )
    return found


def _server_notes(engine: ServerEngine) -> list[str]:
    notes = [note for server in engine.servers for note in server.notes]
    if engine.salt != "none":
        whose = ", so outputs cannot be compared" if engine.salt == "each" else ""
        notes.append(
            "Every prompt gets a first line of its own, for a cache of prompts that cannot be switched off"
            f"{whose}."
        )
    return notes


def _default_rules(temperatures: Sequence[float]) -> list[str]:
    """Every length of ``fixed``, and what ``generate`` does by default: ``auto`` at temperature 0."""
    return ["auto", "fixed"] if 0.0 in temperatures else ["fixed"]


def _refuse_gamma(ctx: typer.Context, rules: Sequence[RuleSpec]) -> None:
    """Refuse lengths that nothing is drafted by."""
    from specbench.errors import UsageError

    if opt.given(ctx, "gamma"):
        takes = next((rule for rule in rules if rule.takes("gamma")), None)
        raise UsageError(
            "The lengths of --gamma are those of the rule fixed, which is not among the rules.",
            "Add --length-policy fixed"
            + (f", or write --length-policy {takes.word}:gamma=N." if takes else ", or leave --gamma out."),
        )


def _refuse_fixed_shapes(cache: str) -> None:
    from specbench.errors import UsageError

    if cache in ("static", "compiled"):
        raise UsageError(
            "Passes of fixed shapes (--cache static, --compile) serve one prompt at a time.",
            "Leave them out, or leave --batch out.",
        )


def _costs(path: Path, rules: Sequence[RuleSpec]) -> Any:
    """The costs of a file, without the times of single steps, which belong to one generation alone."""
    from specbench.errors import UsageError
    from specbench.lengths import check_costs, load_costs

    if not any(rule.takes("costs") for rule in rules):
        raise UsageError(
            "--costs is for the rule auto, which is not among the rules.", "Add --length-policy auto."
        )
    data = load_costs(path)
    if isinstance(data, dict):
        data = {name: data.get(name) for name in ("target_pass_s", "drafter_pass_s")}
    check_costs(data)
    return data


def _check_costs(options: SweepOptions, engine: ModelEngine) -> None:
    """Refuse costs that lack one of the drafters, whose names are known only now."""
    from specbench.lengths import parse_costs

    if options.costs is not None:
        for name in engine.drafters:
            parse_costs(options.costs, name)


def _calibrated(
    engine: ModelEngine, notes: list[str], rule: RuleSpec, drafter: str, temperature: float
) -> RuleSpec:
    """A rule with what was calibrated for a drafter; what there is to say of it is added to the notes."""
    fitted, note = engine.calibrated(rule, drafter, temperature)
    if note:
        notes.append(note)
    return fitted


def _checked_temperatures(temperatures: Sequence[float]) -> Sequence[float]:
    from specbench.decoding.sampling import Sampling

    for value in temperatures:
        Sampling(temperature=value)  # raises for what is none
    return temperatures


def describe_sources(
    base: Recipe,
    drafters: Sequence[DrafterSpec],
    prompts: Sequence[str],
    categories: Sequence[str],
    limit: int | None,
) -> dict[str, Any]:
    """Where models and prompts come from, without paths: the rest of what ``run.json`` keeps as options."""
    from dataclasses import asdict

    def loading(load_options: Any) -> dict[str, Any]:
        values = asdict(load_options)
        if values["device_map"]:
            values["device_map"] = Path(values["device_map"]).name
        return values

    return {
        "target": str(base.target),
        "drafters": [str(spec) for spec in drafters],
        "target_options": loading(base.models.target),
        "drafter_options": loading(base.models.drafter),
        "prompts": [Path(name).name for name in prompts],
        "categories": list(categories),
        "limit": limit,
    }


def _folder(results: _Results, sources: dict[str, Any], options: SweepOptions) -> Path:
    """The folder of the run: the given one, with ``--resume`` the newest unfinished run like this one, or a new one."""
    import re
    from datetime import UTC, datetime

    from specbench.results.store import RunStore

    if results.out is not None:
        return results.out
    if results.resume:
        return _resumed(sources, options, retry_failed=results.retry_failed)
    target = re.sub(r"[^\w.-]+", "-", sources["target"]).strip("-.") or "model"
    name = f"{datetime.now(UTC).astimezone():%Y-%m-%d}-{target}"
    numbers = ("", *(f"-{number}" for number in range(2, 10_000)))
    return next(_FOLDER / (name + end) for end in numbers if not RunStore.exists(_FOLDER / (name + end)))


def _resumed(sources: dict[str, Any], options: SweepOptions, *, retry_failed: bool) -> Path:
    """The newest unfinished run like this one; with ``retry_failed`` a finished one will do."""
    from specbench.bench.manifest import option_changes, stored_options
    from specbench.errors import UsageError
    from specbench.results.store import stored_runs

    wanted = {**sources, **stored_options(options)}
    other = ""
    for path, run in stored_runs(_FOLDER):
        differing = option_changes(run.options, wanted)
        unfinished = not run.finished
        if not differing and (retry_failed or unfinished):
            return path
        if not differing:
            other = other or f"{path} holds it finished"
        elif unfinished:
            other = other or f"{path} is unfinished, but of another sweep ({'; '.join(differing)})"
    raise UsageError(
        f"There is no unfinished run of this sweep in {_FOLDER}/{f': {other}' if other else ''}.",
        "Name the run to go on with by --out, or leave --resume out to begin.",
    )


_BUSY = 1.25
"""How many times longer a sweep has to take because of others for that to be said."""


def _time_needed(need: TimeNeed, start: LoadSnapshot) -> str:
    """A time, or a range of times on a machine that others use."""
    from specbench.bench.estimate import slowdown
    from specbench.cli.sweep_display import duration

    longer = slowdown(start.load_average, start.cores)
    if longer < _BUSY:
        return f"takes about {duration(need.seconds)}, {need.source}"
    return (
        f"takes {duration(need.seconds)} to {duration(longer * need.seconds)}, for the machine is busy (a load of"
        f" {start.load_average:.1f} on {start.cores} cores), {need.source}"
    )


def _show_dry_run(
    sweep: Sweep, base: Recipe, drafters: Sequence[DrafterSpec], folder: Path, start: LoadSnapshot
) -> None:
    from specbench.bench.engines.own import check_engine
    from specbench.bench.estimate import estimate_memory, estimate_time
    from specbench.cli.progress import StageProgress

    with StageProgress() as progress:
        check_engine(base, drafters, sweep.options, progress)
        need = estimate_time(sweep, base, drafters, folder.parent, progress=progress)
        memory = estimate_memory(sweep, base, drafters, progress=progress)
    lines = [
        *_planned(sweep, folder),
        _time_needed(need, start),
        f"memory: {memory.total / 1e9:.1f} GB "
        f"({', '.join(f'{name} {size / 1e9:.1f}' for name, size in memory.parts.items())}); "
        f"{memory.available / 1e9:.1f} GB are free",
    ]
    if memory.total > memory.available:
        lines.append("This does not fit: choose a smaller model or a narrower dtype.")
    for line in lines:
        _print(line)


def _planned(sweep: Sweep, folder: Path) -> list[str]:
    """What would run, and where it would be stored."""
    cells = [cell for cell in sweep.plan() if not cell.warmup]
    categories = dict.fromkeys(prompt.category for prompt in sweep.prompts)
    return [
        f"{len(sweep.configs)} configurations: {', '.join(config.label for config in sweep.configs)}",
        f"{len(sweep.prompts)} prompts: {_categories(sweep.prompts)}" if categories else "",
        f"{_counted_cells(cells)} of up to {sweep.options.decoding.max_new_tokens} tokens "
        f"({sweep.options.repeats} repeats), stored in {folder}",
    ]


def _counted_cells(cells: Sequence[Cell]) -> str:
    requests = sum(len(cell.group.prompts) for cell in cells if cell.group is not None)
    if not requests:
        return f"{len(cells)} generations"
    return f"{len(cells)} groups of requests side by side, {requests} generations"


def _categories(prompts: Sequence[Prompt]) -> str:
    from collections import Counter

    return ", ".join(f"{name} {count}" for name, count in Counter(p.category for p in prompts).items())


def _print(line: str) -> None:
    """A line to stdout, broken between words on a terminal; names in it are data."""
    from rich.console import Console
    from rich.text import Text

    from specbench.textsafe import terminal_safe

    console = Console(highlight=False)
    console.print(Text(terminal_safe(line, console.encoding)), soft_wrap=not console.is_terminal)


# -- running it ------------------------------------------------------------------------------------


class _Job:
    """A sweep with its models loaded, or its servers reached."""

    def __init__(self, sweep: Sweep, engine: Engine[Any], folder: Path, quiet: bool) -> None:
        from rich.console import Console

        self.sweep, self.engine, self.folder, self.quiet = sweep, engine, folder, quiet
        self.console = Console(stderr=True, highlight=False)

    def open_store(self, sources: dict[str, Any], *, accept_changes: bool) -> RunStore:
        """A new run, or the stored one if it is the same as this."""
        from specbench.bench.manifest import command_line, open_run

        return open_run(
            self.folder,
            self.sweep,
            target=self.engine.describe_target(self.sweep.options.decoding),
            sources=sources,
            command=command_line(sys.argv[1:]),
            heads=self.engine.heads,
            advice="Restore that, give another --out, or add --accept-changes to go on all the same.",
            accept_changes=accept_changes,
        )

    def found(self, store: RunStore, *, retry_failed: bool) -> str:
        """How many of the generations that are to be measured are stored; empty if none is."""
        wanted = {cell.key for cell in self.sweep.plan() if not cell.warmup}
        count = len(wanted & store.done_keys(retry_failed=retry_failed))
        return f"{count} of {len(wanted)} {self._cells} are" if count else ""

    @property
    def _cells(self) -> str:
        return "groups of requests" if self.sweep.options.batches else "generations"

    def say_at_start(self, start: Any, found: str, notes: Sequence[str]) -> None:
        """What the machine is like, what is not measured, and what is there already."""
        from specbench.results.advice import at_start

        for note in notes:
            self.say(f"note: {note}")
        for warning in at_start(start):
            self._warn(warning)
        if found and not self.quiet:
            self.say(f"Going on with {self.folder}: {found} there.")

    def run(self, store: RunStore, *, retry_failed: bool) -> int:
        """Measure; show and write what there is then, whether it came to its end or not. The exit code."""
        from specbench.bench.runner import run_sweep
        from specbench.cli.signals import exit_code_of_interrupt
        from specbench.cli.sweep_display import SweepDisplay
        from specbench.results.results import load_results

        interrupted, failed = False, 0
        warnings: Sequence[RunWarning] = ()
        for problem in store.problems:
            self.say(problem)
        with SweepDisplay(self.sweep, self.console, quiet=self.quiet) as display:
            try:
                result = run_sweep(
                    self.sweep, store, self.engine, on_event=display.handle, retry_failed=retry_failed
                )
                warnings, failed = result.warnings, result.failed
            except KeyboardInterrupt:
                interrupted = True
        results = load_results(self.folder)
        try:
            if len(results.done):
                self._summarise(results)
        finally:  # also when nobody takes the table
            for warning in warnings:
                self._warn(warning)
            if interrupted:
                self.say(
                    f"Interrupted. {self.found(store, retry_failed=retry_failed) or f'No {self._cells} are'} in"
                    f" {self.folder}; to go on, run the same command with --out {self.folder} --resume."
                )
            else:
                self.say(f"Results are in {self.folder}: summary.csv, summary.md and every generation.")
                self.say(f"Next: specbench plot {self.folder}, specbench report {self.folder}")
            if failed:
                self.say(f"{failed} {self._cells} failed; to try them again, add --resume --retry-failed.")
        if interrupted:
            return exit_code_of_interrupt()
        return 1 if failed else 0

    def _summarise(self, results: Results) -> None:
        """The answer and the table in two files, and then on stdout, which may be closed."""
        from rich.console import Console

        from specbench.cli.sweep_display import show_answer
        from specbench.config import FILE_NAME
        from specbench.errors import RunError
        from specbench.files import write_text
        from specbench.results.requests import request_rows
        from specbench.results.store import write_csv
        from specbench.results.summary import categorize, summarize
        from specbench.show import tables
        from specbench.show.answer import answer_markdown, find_answers

        summary, categories, requests = summarize(results), categorize(results), request_rows(results)
        shown = [tables.summary_sheet(summary), *([tables.request_sheet(requests)] if requests else [])]
        try:
            write_csv(summary.frame, self.folder / "summary.csv")
            paragraphs = [
                part for each in find_answers(results, summary, categories) for part in answer_markdown(each)
            ]
            paragraphs += [tables.to_markdown(each) for each in shown]
            write_text(self.folder / "summary.md", "\n\n".join(paragraphs))
        except OSError as error:
            raise RunError(
                f"The summary in {str(self.folder)!r} cannot be written ({error.strerror}).",
                "What was measured is kept.",
            ) from error
        finally:
            console = Console(highlight=False)
            recipes = {each.id: each.recipe for each in self.sweep.configs if each.recipe is not None}
            more = ["--no-config"] if Path(FILE_NAME).is_file() else []
            for answer in find_answers(results, summary, categories, recipes, more):
                show_answer(answer, console)
            for each in shown:
                tables.render_terminal(each, console)

    def _warn(self, warning: RunWarning) -> None:
        self.say(f"{warning.severity}: {warning.message} {warning.advice}")

    def say(self, line: str) -> None:
        """A line to stderr."""
        from rich.text import Text

        from specbench.textsafe import terminal_safe

        text = Text(terminal_safe(line, self.console.encoding))
        self.console.print(text, soft_wrap=not self.console.is_terminal)
