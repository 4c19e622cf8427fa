"""The contents of ``run.json``, and whether a run can be resumed with other options."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from specbench._version import __version__
from specbench.base.errors import UsageError
from specbench.bench.grid import Sweep, SweepOptions, num_turns
from specbench.options import DecodingOptions, flag
from specbench.results.run import Environment, PromptInfo, Run, TargetModel
from specbench.results.store import RunStore

if TYPE_CHECKING:
    from specbench.bench.prompts import Prompt
    from specbench.models.training_metadata import TrainingMetadata
    from specbench.recipe import Recipe
    from specbench.specs.drafters import DrafterSpec


def describe_run(
    sweep: Sweep,
    target: TargetModel,
    sources: Mapping[str, Any],
    *,
    environment: Environment | None = None,
    command: Sequence[str] = (),
    heads: Mapping[str, TrainingMetadata] | None = None,
) -> Run:
    """Return the contents of ``run.json`` when a run begins.

    ``sources`` (the options that name models and prompts) and ``command`` (see ``command_line``) must not have paths.
    """
    from specbench.bench.environment import describe_environment  # which imports torch

    options = sweep.options
    return Run(
        specbench=__version__,
        run_id=uuid4().hex,
        command=list(command),
        options={**sources, **stored_options(options)},
        environment=environment or describe_environment(),
        target=target,
        configs=[*sweep.configs],
        prompts=[
            PromptInfo(
                id=prompt.id,
                category=prompt.category,
                turns=num_turns(prompt, options),
                fingerprint=prompt_fingerprint(prompt),
            )
            for prompt in sweep.prompts
        ],
        heads=dict(heads or {}),
        seed=options.seed,
        repeats=options.repeats,
        warmup=options.warmup,
        max_new_tokens=options.decoding.max_new_tokens,
        ignore_eos=options.decoding.ignore_eos,
        created=now(),
    )


def describe_models(base: Recipe, drafters: Sequence[DrafterSpec]) -> dict[str, Any]:
    """Return where models come from, without paths, as ``run.json`` keeps it among the options."""
    return {
        "target": str(base.target),
        "drafters": [str(spec) for spec in drafters],
        "target_options": asdict(base.models.target),
    }


def stored_options(options: SweepOptions) -> dict[str, Any]:
    """Return the options of a sweep as JSON data, with the decoding options at the same level."""
    values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(options))
    written = {
        "conditions": [at.name for at in options.conditions],
        "policies": [*map(str, options.policies)],
        "until": None if options.until is None else str(options.until),
    }
    return {**values.pop("decoding"), **values, **written}


def prompt_fingerprint(prompt: Prompt) -> str:
    """Return a hash of a prompt's text."""
    text = json.dumps([prompt.system, *prompt.turns])
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:12]


def now() -> str:
    """Return the current time in the format of results: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line(arguments: Sequence[str]) -> list[str]:
    """Return a command line without addresses of servers and keys, and with only the last part of each path."""
    hidden = [before == "--api-key" for before in ("", *arguments)]
    return ["KEY" if hide else _without_path(each) for each, hide in zip(arguments, hidden, strict=False)]


_SERVER = re.compile(r"((?:.*?[\w.-]+=)?)https?://[^#]*(?:#(.*))?", re.DOTALL)


def _without_path(argument: str) -> str:
    if (server := _SERVER.fullmatch(argument)) is not None:  # whose address may name a host
        return f"{server[1]}URL{f'#{_without_path(server[2])}' if server[2] else ''}"
    option, equals, value = argument.rpartition("=") if argument.startswith("--") else ("", "", argument)
    path = value.replace("\\", "/")
    hub_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?", path) and PurePath(path).suffix != ".jsonl"
    if "/" not in path or (hub_id and not Path(value).exists()):
        return argument
    return option + equals + (PurePath(path).name or ".")


_SAME_MACHINE = ("cpu", "cores", "threads", "devices", "python", "torch", "transformers")


def refuse_other(old: Run, new: Run) -> None:
    """Refuse to continue a run whose measurements could not be compared.

    Raises:
        UsageError: The machine, a version, the target, the text of a prompt, a decoding option or the configuration of
            an id has changed.
    """
    for what, stored, value in _same_in_a_run(old, new):
        if stored != value:
            raise UsageError(
                f"The {what} of this run was {_shown(stored)}, and is {_shown(value)} now, so measurements cannot be"
                " compared.",
                "Give another --out, or the same as then.",
            )


def _same_in_a_run(old: Run, new: Run) -> Iterator[tuple[str, Any, Any]]:
    """Yield what cannot differ between the measurements of a run: its name, and its values then and now."""
    for name in _SAME_MACHINE:
        yield name, getattr(old.environment, name), getattr(new.environment, name)
    yield "version of specbench", old.specbench, new.specbench
    yield "device", old.target.device, new.target.device
    yield "target's dtype", old.target.dtype, new.target.dtype
    yield "target's model", old.target.fingerprint, new.target.fingerprint
    defaults, own = old.target.model_defaults or {}, new.target.model_defaults or {}
    yield "model's own generation settings", defaults, own
    texts = {prompt.id: prompt.fingerprint for prompt in old.prompts}
    for prompt in new.prompts:
        yield f"prompt {prompt.id!r}", texts.get(prompt.id, prompt.fingerprint), prompt.fingerprint
    for each in fields(DecodingOptions):
        value = new.options[each.name]
        yield flag(DecodingOptions, each.name), old.options.get(each.name, value), value
    known = {config.id: config for config in old.configs}
    for config in new.configs:  # what is not part of their ids
        then = known.get(config.id, config)
        yield f"cache of {config.label}", then.cache, config.cache
        yield f"drafter of {config.label}", then.fingerprint, config.fingerprint


def _shown(value: Any) -> str:
    return "none" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def merge_runs(old: Run, new: Run) -> Run:
    """Return the description of a resumed run."""
    configs = {config.id: config for config in (*old.configs, *new.configs)}
    prompts = {prompt.id: prompt for prompt in (*old.prompts, *new.prompts)}
    return msgspec.structs.replace(
        old,
        options=new.options,
        repeats=new.repeats,
        warmup=new.warmup,
        seed=new.seed,
        heads={**old.heads, **new.heads},
        configs=list(configs.values()),
        prompts=list(prompts.values()),
        finished=None,
    )


def open_run(folder: Path, run: Run, *, may_grow: bool = True) -> RunStore:
    """Open a run to measure into: a new one, or the stored one if its measurements are comparable.

    Raises:
        UsageError: They are not, or the run has other options and may not grow.
    """
    if not RunStore.exists(folder):
        return RunStore.create(folder, run)
    store = RunStore.open(folder)
    try:
        refuse_other(store.run, run)
        merged = merge_runs(store.run, run)
        ids, known = ([config.id for config in each.configs] for each in (merged, store.run))
        if may_grow:
            store.replace(merged)
        elif (merged.options, ids) != (store.run.options, known):
            raise UsageError(
                f"The run in {str(folder)!r} has other options.", "Restore them, or name another folder."
            )
    except BaseException:
        store.close()
        raise
    return store
