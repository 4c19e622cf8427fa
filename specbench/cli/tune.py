"""`specbench tune`: find the fastest way to decode with a target, here and on these prompts."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import textwrap
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench.base.errors import RunError, UsageError
from specbench.cli import options as opt
from specbench.cli.console import write_out
from specbench.cli.progress import StageProgress, starting
from specbench.cli.signals import exit_code_of_interrupt
from specbench.cli.sweep_run import RunJob, describe_sources
from specbench.options import (
    DECODING,
    MODELS,
    CacheName,
    DecodingOptions,
    ModelOptions,
    quantized,
)
from specbench.recipe import Recipe
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import parse_model

if TYPE_CHECKING:
    from specbench.base.errors import UsageError
    from specbench.bench.grid import Sweep
    from specbench.cli.progress import StageProgress
    from specbench.recipe import Recipe
    from specbench.results.results import Results
    from specbench.results.store import RunStore
    from specbench.tune.answer import TuneAnswer
    from specbench.tune.loading import LoadedCandidates
    from specbench.tune.race import Race
    from specbench.tune.search import Found

_FOLDER = Path("results")
_REPEATS = 3
"""How often a prompt is decoded at most."""

_MOST = 1_000_000
"""Prompts: more than there are, for all of them in turn from the categories."""

_decoding, _option = opt.panel(DECODING), opt.panel("Options")

_ENDING_S, _ENDING_SHARE = 3.0, 0.03
"""Of the time, for what comes behind the race."""


@dataclass(frozen=True)
class _Results:
    """Where the answer and the measurements go."""

    out: Annotated[Path, opt.output("--out -o", "FILE", "File for the configuration found.")] = Path(
        "specbench.toml"
    )
    overwrite: Annotated[bool, opt.output("--overwrite", None, "Overwrite --out.")] = False
    results: Annotated[
        Path | None,
        opt.output("--results", "FOLDER", "Folder of the run. Default: results/DATE-TARGET-tune."),
    ] = None
    resume: Annotated[
        bool,
        opt.output(
            "--resume",
            None,
            "Continue the run in --results. Without --results: the newest unfinished one of `specbench tune` in"
            " results/.",
        ),
    ] = False


@dataclass(frozen=True)
class _Search:
    """What is tried, on which prompts, and for how long."""

    drafter: Annotated[
        tuple[str, ...],
        opt.drafters_option(
            MODELS,
            "Drafter to try too: a model, a trained head, or a word of `specbench drafters`; repeatable.",
        ),
    ] = ()
    prompts: Annotated[tuple[str, ...], opt.prompts_option()] = ()
    category: Annotated[
        tuple[str, ...],
        opt.prompt_option("--category", "NAME", "Category of prompts; repeatable. Default: all."),
    ] = ()
    temperature: Annotated[
        float, _decoding("--temperature -t", "X", "Temperature; 0 for greedy decoding.", min=0.0)
    ] = 0.0
    cache: Annotated[
        CacheName | None,
        _decoding(
            "--cache",
            "KIND",
            "KV cache: dynamic, preallocated, static or none. Default: preallocated where forward passes are faster"
            " with it.",
        ),
    ] = None
    minutes: Annotated[float, _option("--minutes", "X", "Time for everything; it may end sooner.")] = 6.0
    seed: Annotated[int, _option("--seed", "N", "Seed of the random order and of sampling.", min=0)] = 0


def tune(
    *,
    target: opt.TargetOption = opt.DEFAULT_TARGET,
    search: _Search,
    models: ModelOptions,
    decoding: Annotated[DecodingOptions, opt.Fields(without=opt.NOT_SWEPT, max_new_tokens=48)],
    results: _Results,
    json_output: opt.JsonOption = False,
    verbose: opt.VerboseOption = False,
    quiet: Annotated[bool, opt.output("--quiet -q", None, "No progress.")] = False,
) -> None:
    """Find the fastest drafter, draft policy and KV cache for a target on this machine, and write specbench.toml.

    Drafters without a model, forms of the target itself, the named models and cascades of them are tried on a few
    tokens. The promising ones are raced, prompt by prompt and in turn, until they can be told apart or the time is up.
    Other commands read the specbench.toml; it is provisional if the time was too short to be sure. Exit code 1: no
    configuration was found.
    """
    from specbench.base.files import file_errors, require_writable
    from specbench.bench.axes import parse_policies
    from specbench.bench.engines.own import check_engine
    from specbench.bench.grid import Sweep, SweepOptions
    from specbench.bench.prompts import load_prompts
    from specbench.decoding.clocks import WallClock
    from specbench.decoding.sampling import Sampling
    from specbench.results.load import load_snapshot
    from specbench.results.store import RunStore, read_run
    from specbench.tune.candidates import GAMMAS, rules_to_try

    clock, start = WallClock(), load_snapshot()
    began = clock.now()
    if not search.minutes > 0:
        raise UsageError(f"The time is {search.minutes:g} minutes.", "Give more than 0.")
    Sampling(temperature=search.temperature)  # raises for what is none
    if results.out.exists() and not results.overwrite:
        raise _there_already(results.out)
    with file_errors(f"{str(results.out)!r} cannot be written", "Give another --out.", kind=UsageError):
        require_writable(results.out.parent)
    given = [spec for spec in map(parse_drafter, dict.fromkeys(search.drafter)) if not spec.is_plain]
    named = search.prompts or ("all",)
    chosen = load_prompts(named, search.category, _MOST)
    base = Recipe(parse_model(target), models=models, decoding=decoding)
    sources = {**describe_sources(base, given, named, search.category, None), "tune": True}
    folder = _folder(results, sources["target"])
    stored = read_run(folder) if results.resume and RunStore.exists(folder) else None
    if RunStore.exists(folder) and stored is None:
        raise UsageError(
            f"The folder {str(folder)!r} holds results already.",
            "Add --resume to go on with them, or give other --results.",
        )
    kind: Any = search.cache if stored is None else stored.configs[0].cache
    policies = parse_policies(
        rules_to_try(greedy=search.temperature == 0, chained=quantized(models.dtype) is not None)
    )
    options = SweepOptions(
        gammas=GAMMAS,
        policies=tuple(map(str, policies)),
        temperatures=(search.temperature,),
        decoding=decoding,
        repeats=_REPEATS,
        warmup=0,
        turns=1,
        seed=search.seed,
    )
    with starting(quiet) as progress:
        from specbench.base.progress import quiet_transformers
        from specbench.tune.loading import load_candidates

        with quiet_transformers():
            check_engine(base, given, options, progress)
            try:
                RunStore.check_writable(folder)
            except UsageError as error:  # whose advice is that of a sweep
                raise UsageError(error.message, "Give other --results.") from error
            loaded = load_candidates(
                parse_model(target),
                given,
                models,
                Sweep(options, tuple(chosen), ()),
                cache=kind,
                progress=progress,
            )
    job = _Job(_sweep(options, chosen, loaded, base), loaded, folder, quiet)
    with job.open_store(sources) as store, StageProgress(quiet, animated=False) as progress:
        job.say_at_start(start, job.notes, None if stored is None else "")
        until = began + 60 * search.minutes - max(_ENDING_S, _ENDING_SHARE * 60 * search.minutes)
        found = job.search(store, clock, 60 * search.minutes, until, progress)
        answer = job.answer(found, store)
    job.tell(answer, found, results.out, search.cache, json_output=json_output, verbose=verbose)
    if found.ending == "interrupted":
        raise typer.Exit(exit_code_of_interrupt())


def _there_already(out: Path) -> UsageError:
    """A refusal to overwrite, with the command as it was typed, once with the next free name and once to overwrite."""
    free = next(path for n in count(2) if not (path := out.with_name(f"{out.stem}-{n}{out.suffix}")).exists())
    words = [*sys.argv[1:], "--overwrite"], [*sys.argv[1:], "--out", str(free)]
    return UsageError(
        f"{str(out)!r} is there already.",
        "Overwrite it, or give another --out:",
        [shlex.join(["specbench", *each]) for each in words],
    )


def _sweep(options: Any, prompts: Any, loaded: LoadedCandidates, base: Recipe) -> Sweep:
    """The grid of everything that is loaded."""
    from specbench.bench.grid import Sweep
    from specbench.tune.loading import configurations

    options = replace(options, cache=loaded.cache)
    base = replace(base, caching=base.caching.with_kind(loaded.cache))
    return Sweep(options, tuple(prompts), tuple(configurations(options, loaded.engine, base)))


def _folder(results: _Results, target: str) -> Path:
    """The folder of the run: the given one, with ``--resume`` the newest that left something open, or a new one."""
    from specbench.results.store import RunStore, stored_runs

    if results.results is not None:
        return results.results
    if results.resume:
        for path, run in stored_runs(_FOLDER):
            if run.options.get("tune") and not run.finished:
                return path
        raise UsageError(
            f"There are no results of `specbench tune` in {_FOLDER}/ that left something open.",
            "Name some by --results, or leave --resume out to begin.",
        )
    name = re.sub(r"[^\w.-]+", "-", target).strip("-.") or "model"
    name = f"{datetime.now(UTC).astimezone():%Y-%m-%d}-{name}-tune"
    numbers = ("", *(f"-{number}" for number in range(2, 10_000)))
    return next(_FOLDER / (name + end) for end in numbers if not RunStore.exists(_FOLDER / (name + end)))


def _wrapped(text: str) -> str:
    """Text for stdout: on a terminal sentences are broken between words, tables and commands stay as they are."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "".join(
        f"{textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)}\n"
        if len(line) > width and "  " not in line.strip() and not line.startswith("    ")
        else f"{line}\n"
        for line in text.splitlines()
    )


class _Job(RunJob):
    """A search with its models loaded."""

    advice = "Restore that, or give other --results."

    def __init__(self, sweep: Sweep, loaded: LoadedCandidates, folder: Path, quiet: bool) -> None:
        super().__init__(sweep, loaded.engine, folder, quiet)
        self.loaded = loaded

    @property
    def notes(self) -> list[str]:
        """What there is to say of the models."""
        from specbench.cli.setting import tokenizer_notes

        return [*self.loaded.notes, *tokenizer_notes(self.loaded.engine.drafters.values())]

    def search(
        self, store: RunStore, clock: Any, seconds: float, until: float, progress: StageProgress
    ) -> Found:
        """Try, choose and race.

        An interrupt leaves everything measured in its place, and says how to go on; once something was raced, the
        search ends with what is best so far.
        """
        from specbench.tune.loading import exportable
        from specbench.tune.search import Search

        search = Search(
            self.sweep,
            store,
            self.loaded.engine,
            clock=clock,
            seconds=seconds,
            until=until,
            kept=exportable(self.sweep.configs, self.loaded.engine),
            progress=progress,
        )

        def show(race: Race) -> None:
            shown = self._standing(race, until - clock.now())
            progress.update(f"racing: {shown}", 0, None)
            if race.look_due and not self.quiet and not self.console.is_terminal:
                self.say(shown)

        try:
            found = search.run(show)
        except KeyboardInterrupt:
            self._say_interrupted()
            raise
        if found.ending == "interrupted":
            self._say_interrupted()
        return found

    def _say_interrupted(self) -> None:
        self.say(
            f"Interrupted. What is measured is in {self.folder}; to go on, run the same command with --results"
            f" {self.folder} --resume --overwrite."
        )

    def answer(self, found: Found, store: RunStore) -> TuneAnswer:
        """What the search came to, which is stored for everything that shows the run."""
        from msgspec.structs import replace

        from specbench.results.results import load_results
        from specbench.tune.answer import find_answer, stored_answer

        answer = find_answer(found, self.sweep.configs, load_results(self.folder))
        assert store.run.tuning is not None
        store.update(tuning=replace(store.run.tuning, answer=stored_answer(answer, found)))
        return answer

    def _standing(self, race: Race, left_s: float) -> str:
        """Who is in the race, in a line."""
        from specbench.cli.sweep_display import duration
        from specbench.results.stats import decimals

        labels = {config.id: config.label for config in self.sweep.configs}
        lead = labels[race.leader]
        if race.leader != race.plain:
            lead += f" {decimals(race.ratio(race.leader, race.plain).value)} × plain"
        left = f"at most {duration(max(0.0, left_s))} left"
        if race.decided:
            return f"{race.blocks} blocks, decided for {lead}; its speedup is measured on, {left}"
        others = [labels[name] for name in race.running if name not in (race.leader, race.plain)]
        names = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
        among = f"with {names}" if others else "nobody else"
        return f"{race.blocks} blocks, leading {lead}; {among} in the race, {left}"

    def tell(
        self,
        answer: TuneAnswer,
        found: Found,
        out: Path,
        cache: str | None,
        *,
        json_output: bool,
        verbose: bool,
    ) -> None:
        """Write and print the answer."""
        from specbench.results.results import load_results
        from specbench.results.summary import summarize
        from specbench.show import tables
        from specbench.show.document import spelled_out, to_markdown
        from specbench.tune.answer import as_json, as_markdown, exports, exports_json, full_text, short_text

        results = load_results(self.folder)
        summary = summarize(results)
        table = to_markdown(tables.summary_sheet(summary))
        self.write_summary(summary, "\n".join([as_markdown(answer), table]))
        written = self._write_configuration(answer, out, cache)
        exported = exports(results, self.folder) if found.race.verdict == "faster" else None
        if json_output:
            facts = {
                **as_json(answer, found),
                "configuration": str(out) if written else None,
                "results": str(self.folder),
                "exports": exports_json(exported or []),
            }
            write_out(json.dumps(facts, allow_nan=False) + "\n")
        else:
            command = self._command(results)
            text = (full_text if verbose else short_text)(answer, command, exported)
            encoding = sys.stdout.encoding or "utf-8"
            write_out(spelled_out(_wrapped(text), encoding))
        for warning in found.warnings:
            self.warn(warning)
        if written:
            provisional = " (provisional)" if answer.provisional else ""
            commands = "generate, chat, serve, sweep and check"
            self.say(f"Saved: {out}{provisional}, which {commands} read in this folder or with --config.")
        self.say(f"Results: {self.folder}; specbench report {self.folder} shows them.")

    def _command(self, results: Results) -> str:
        """What decodes as the answer says, with models as they were typed, which nothing stored repeats."""
        from specbench.results.summary import categorize, summarize
        from specbench.show.answer import find_answers

        (answer,) = find_answers(results, summarize(results), categorize(results), self.recipes)
        return answer.command

    def _write_configuration(self, answer: TuneAnswer, out: Path, cache: str | None) -> bool:
        """The configuration, if one can say the answer; what it cannot say is told."""
        from specbench.base.files import reason
        from specbench.config import config_from_recipe, write_config

        recipe = answer.winner.recipe
        assert recipe is not None
        usual = "dynamic" if quantized(recipe.models.dtype) is None else "preallocated"
        try:
            config, note = config_from_recipe(recipe, provisional=answer.provisional)
        except UsageError as error:
            self.say(f"note: {out} is not written: {error}")
            return False
        try:
            write_config(
                out, config.without("cache") if cache is None and recipe.caching.cache == usual else config
            )
        except OSError as error:
            raise RunError(
                f"{str(out)!r} cannot be written ({reason(error)}).",
                f"What was measured is in {str(self.folder)!r}; give another --out with --resume.",
            ) from error
        if note:
            self.say(f"note: {note}")
        return True
