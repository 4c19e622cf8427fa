"""Experiments: what is to be measured, as data. ``opened`` loads, reaches or starts it; its session measures it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from specbench.base.errors import UsageError
from specbench.bench.contexts import fitting, load_context_text, text_name
from specbench.bench.grid import Sweep, SweepOptions, check_batches, check_contexts, left_out, server_rows
from specbench.bench.manifest import describe_models, describe_run, open_run
from specbench.bench.prompts import interleave, load_prompts, shuffled
from specbench.models.find import require_models
from specbench.results.store import RunStore, stored_runs
from specbench.specs.models import parse_model

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.bench.engines.engine import BenchEngine
    from specbench.bench.prompts import Prompt
    from specbench.bench.session import Session
    from specbench.models.load import ModelText
    from specbench.recipe import Recipe
    from specbench.rows import Row
    from specbench.specs.drafters import DrafterSpec
    from specbench.specs.servers import ServerSpec

FOLDER = Path("results")
"""Folder of runs whose own folder is not named."""

_LIMIT = 12
"""Prompts of a sweep that names no set."""

_GROUPS = 3
"""Groups of prompts side by side that an interval takes at least."""


class Opened(NamedTuple):
    """Systems that can decode: their engine, and what they add to an experiment.

    Attributes:
        options: Those of the experiment, with what is known of servers now.
        folder: Where the run goes.
        sources: What ``run.json`` says of models and servers, without paths.
        together: See ``Sweep``.
    """

    engine: BenchEngine
    options: SweepOptions
    rows: Sequence[Row]
    folder: Path
    sources: Mapping[str, Any]
    notes: Sequence[str] = ()
    together: int | None = None


FolderOf: TypeAlias = Callable[[str], Path]
"""Returns the folder of a run by its target's name, once it is known to be right and writable."""


class Systems(Protocol):
    """What decodes in an experiment."""

    def opened(
        self, options: SweepOptions, folder_of: FolderOf, progress: Progress | None
    ) -> AbstractContextManager[Opened]:
        """Load, reach or start the systems; end them afterwards.

        Raises:
            UsageError, RunError: Something is wrong with them.
        """
        ...


@dataclass(frozen=True)
class Models:
    """A target with drafters, in this process; ``base`` is what all rows share."""

    base: Recipe
    drafters: Sequence[DrafterSpec]

    @contextmanager
    def opened(
        self, options: SweepOptions, folder_of: FolderOf, progress: Progress | None
    ) -> Iterator[Opened]:
        for policy in options.policies:
            replace(self.base, policy=policy).check()
        notes = left_out(self.base, options.policies, self.drafters)
        if options.batches:
            self.base.check("batch")
        require_models(self.base.target, *(part.model for spec in self.drafters for part in spec.models))
        from specbench.bench.engines.own import load_engine
        from specbench.loaded import load_notes

        sources, folders = describe_models(self.base, self.drafters), list[Path]()

        def choose_folder(_: ModelText) -> None:
            folders.append(folder_of(sources["target"]))

        engine = load_engine(self.base, self.drafters, options, progress, before_weights=choose_folder)
        check_contexts(options, engine.target.language_model.context_limit)
        notes += load_notes(engine.target, engine.drafters, options.decoding)
        yield Opened(engine, options, engine.configs(options, self.base), folders[0], sources, notes)


@dataclass(frozen=True)
class Servers:
    """Servers that run already, and the model with their tokenizer; without one, their own counts are taken."""

    specs: Sequence[ServerSpec]
    tokenizer: str | None = None

    @contextmanager
    def opened(
        self, options: SweepOptions, folder_of: FolderOf, progress: Progress | None
    ) -> Iterator[Opened]:
        from specbench.bench.engines.servers import ServerEngine
        from specbench.models.load import load_tokenizer

        keys, model = server_keys(self.specs), None if self.tokenizer is None else parse_model(self.tokenizer)
        engine = ServerEngine(
            self.specs,
            keys=keys,
            tokenizer=None if model is None else load_tokenizer(model, progress=progress),
            decoding=options.decoding,
            temperature=options.warmest,
            template=options.template,
        )
        try:
            target = engine.servers[0].model_name
            sources = {"target": target, "tokenizer": None if model is None else str(model)}
            described = tuple(each.described for each in engine.servers)
            rows = server_rows(options, [(spec.name, None) for spec in self.specs])
            options = replace(options, gammas=(), policies=(), servers=described, salt=engine.salt)
            yield Opened(engine, options, rows, folder_of(target), sources, engine.notes)
        finally:
            engine.close()


def server_keys(specs: Sequence[ServerSpec]) -> dict[str, str]:
    """Return the keys in the environment, by server."""
    found = {
        spec.name: os.environ[spec.key_variable].strip() for spec in specs if spec.key_variable in os.environ
    }
    for spec in specs:
        key = found.get(spec.name, "-")
        if not key or not key.isascii() or not key.isprintable():
            raise UsageError(
                f"The environment variable {spec.key_variable} holds no key.",
                "Put the key there, or unset the variable.",
            )
    return found


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is measured: systems under conditions, on prompts, so many times, and until when.

    Attributes:
        systems: What decodes.
        options: Conditions, draft policies, repeats and everything else that ``run.json`` has.
        prompts: Names of sets or files; empty for all sets.
        limit: Number of prompts; ``None`` for all, or 12 if no set is named.
        tuned: Whether it is a search, which takes all prompts in turn from their categories, and may not grow.
    """

    systems: Systems
    options: SweepOptions
    prompts: Sequence[str] = ()
    limit: int | None = None
    tuned: bool = False


@contextmanager
def opened(
    experiment: Experiment,
    out: Path | None = None,
    *,
    resume: bool = False,
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> Iterator[Session]:
    """Return the session of an experiment, with its prompts read, its systems ready and its run open.

    Args:
        experiment: What to measure.
        out: The folder of the run; ``None`` for a new one in ``results/``, or with ``resume`` for the newest there.
        resume: Whether to continue a run, which may grow.
        command: For ``run.json``, without paths.
        progress: Receives the stages.

    Raises:
        UsageError: Something is wrong with it, or with the folder.
        RunError: It cannot be loaded, reached, started or stored.
    """
    from specbench.bench.session import Session

    options = experiment.options
    prompts = _prompts(experiment)
    text = load_context_text() if options.contexts else None
    if text is not None:
        options = replace(options, context_text=text_name(text))
    folder_of = partial(run_folder, out, resume=resume, tuned=experiment.tuned)
    with experiment.systems.opened(options, folder_of, progress) as ready:
        engine, options = ready.engine, ready.options
        prompts, more = fitting(prompts, options.contexts, engine.count_tokens)
        sweep = Sweep(options, prompts, tuple(ready.rows), ready.together, text)
        named = [Path(name).name for name in experiment.prompts or ("all",)]
        sources = {**ready.sources, "prompts": named, "limit": _limit(experiment)}
        sources |= {"tune": True} if experiment.tuned else {}
        run = describe_run(
            sweep, engine.describe_target(options.decoding), sources, command=command, heads=engine.heads
        )
        with open_run(ready.folder, run, may_grow=not experiment.tuned) as store:
            yield Session(sweep, store, engine, notes=[*ready.notes, *more])


def _prompts(experiment: Experiment) -> tuple[Prompt, ...]:
    """Return the prompts, in an order in which an experiment can end early."""
    options = experiment.options
    found = load_prompts(experiment.prompts or ("all",), _limit(experiment))
    if options.until is not None:  # the first ones have to stand for all
        found = interleave(shuffled(found, options.seed))
    elif experiment.tuned:
        found = interleave(found)
    check_batches(options, len(found))
    return tuple(found)


def _limit(experiment: Experiment) -> int | None:
    options = experiment.options
    if experiment.limit is not None or experiment.tuned or options.until is not None or experiment.prompts:
        return experiment.limit
    return max(_LIMIT, _GROUPS * max(options.batches, default=1))


def run_folder(out: Path | None, target: str, *, resume: bool, tuned: bool = False) -> Path:
    """Return the folder of a run, which can be written: the given one, or the newest or a new one in ``results/``.

    Raises:
        UsageError: There is no run to continue, or the folder holds results that are not to be continued.
    """
    if out is None and resume:
        out = newest_run(tuned=tuned)
        if out is None:
            what = "unfinished run of `specbench tune`" if tuned else "run of `specbench sweep`"
            raise UsageError(
                f"There is no {what} in {FOLDER}/.",
                "Name one with --out, or leave --resume out to begin one.",
            )
    elif out is None:
        out = new_folder(target, "-tune" * tuned)
    elif not resume:
        RunStore.check_empty(out)
    elif not tuned and not RunStore.exists(out):
        raise UsageError(f"There is no run in {out}.", "Leave --resume out to begin one there.")
    RunStore.check_writable(out)
    return out


def newest_run(*, tuned: bool = False) -> Path | None:
    """Return the newest run in ``results/``: of a sweep, or an unfinished one of a search; ``None`` without any."""
    runs = ((path, run) for path, run in stored_runs(FOLDER) if bool(run.options.get("tune")) == tuned)
    return next((path for path, run in runs if not (tuned and run.finished)), None)


def new_folder(target: str, ending: str = "") -> Path:
    """Return a folder in results/ that holds no run, named after the day and the target."""
    target = re.sub(r"[^\w.-]+", "-", target).strip("-.") or "model"
    name = f"{datetime.now(UTC).astimezone():%Y-%m-%d}-{target}{ending}"
    numbers = ("", *(f"-{number}" for number in range(2, 10_000)))
    return next(FOLDER / (name + end) for end in numbers if not RunStore.exists(FOLDER / (name + end)))
