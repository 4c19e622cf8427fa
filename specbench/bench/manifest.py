"""What ``run.json`` says about a run, and whether another call may go on with it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from specbench._version import __version__
from specbench.bench.grid import Sweep, SweepOptions, turns_of
from specbench.errors import UsageError
from specbench.options import DecodingOptions, flag
from specbench.results.store import RunStore

if TYPE_CHECKING:
    from specbench.bench.prompts import Prompt


def describe_run(
    sweep: Sweep,
    *,
    target: Mapping[str, Any],
    environment: Mapping[str, Any],
    sources: Mapping[str, Any],
    command: Sequence[str] = (),
    heads: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """What ``run.json`` holds when a run begins; docs/results-format.md describes it.

    Args:
        sweep: What is measured.
        target: Name, fingerprint, dtype, device and width of the target.
        environment: The machine, see ``describe_environment``.
        sources: Options that say where models and prompts came from, by name and without paths.
        command: The command line, without paths (see ``command_line``).
        heads: How trained heads came about, by the names of their drafters.
    """
    options = sweep.options
    return {
        "specbench": __version__,
        "run_id": uuid4().hex,
        "command": list(command),
        "options": {**sources, **stored_options(options)},
        "environment": dict(environment),
        "target": dict(target),
        "configs": [config.to_json() for config in sweep.configs],
        **({"heads": dict(heads)} if heads else {}),
        "prompts": [
            {
                "id": prompt.id,
                "category": prompt.category,
                "turns": turns_of(prompt, options),
                "fingerprint": _fingerprint(prompt),
            }
            for prompt in sweep.prompts
        ],
        "seed": options.seed,
        "repeats": options.repeats,
        "warmup": options.warmup,
        "max_new_tokens": options.decoding.max_new_tokens,
        "ignore_eos": options.decoding.ignore_eos,
        "created": now(),
        "finished": None,
        "costs": None,
        "differences": None,
        "warnings": [],
        "changes": [],
    }


def stored_options(options: SweepOptions) -> dict[str, Any]:
    """The options of a sweep as JSON has them; those of decoding stand beside the others."""
    values = asdict(options)
    stored: dict[str, Any] = json.loads(json.dumps({**values.pop("decoding"), **values}))
    return stored


def _fingerprint(prompt: Prompt) -> str:
    text = json.dumps([prompt.system, *prompt.turns])
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:12]


def now() -> str:
    """The time as results write it: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line(arguments: Sequence[str]) -> list[str]:
    """A command line with every path cut down to its last part, and without addresses of servers."""
    return [_without_path(argument) for argument in arguments]


_SERVER = re.compile(r"(.*?[\w.-]+=)https?://[^#]*(?:#(.*))?", re.DOTALL)


def _without_path(argument: str) -> str:
    if (server := _SERVER.fullmatch(argument)) is not None:  # whose address may name a host
        return f"{server[1]}URL{f'#{_without_path(server[2])}' if server[2] else ''}"
    option, equals, value = argument.rpartition("=") if argument.startswith("--") else ("", "", argument)
    path = value.replace("\\", "/")
    hub_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?", path) and PurePath(path).suffix != ".jsonl"
    if "/" not in path or (hub_id and not Path(value).exists()):
        return argument
    return option + equals + (PurePath(path).name or ".")


_OF_A_CONFIG = {"cache": "another cache", "drafter_fingerprint": "other weights of its drafter"}
"""Fields of a configuration that its id leaves out."""

_SAME_MACHINE = ("cpu", "cores", "threads", "devices", "python", "torch", "transformers")


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """In what a run to go on with differs from what is asked for now: "what: then → now", empty if in nothing.

    Raises:
        UsageError: The target, the text of a prompt, where outputs end, or what stands behind a configuration's id is
            another one; such measurements are never put into one run, for they would be compared with each other.
    """
    for name, what in (("dtype", "dtype"), ("fingerprint", "model")):
        if old["target"].get(name) != new["target"].get(name):
            then, now = (f"{run['target'].get('name')}, {run['target'].get(name)}" for run in (old, new))
            raise UsageError(
                f"The target is another {what} now ({now}) than in this run ({then}).", "Give another --out."
            )
    applied = [run["target"].get("model_defaults") or {} for run in (old, new)]
    if applied[0] != applied[1]:
        then, now = (", ".join(each) or "none" for each in applied)
        raise UsageError(
            f"The model's own settings that are applied are others now ({now}) than in this run ({then}).",
            "Give another --out, or put --no-model-defaults as it was.",
        )
    texts = {prompt["id"]: prompt.get("fingerprint") for prompt in old["prompts"]}
    for prompt in new["prompts"]:
        if texts.get(prompt["id"], prompt["fingerprint"]) != prompt["fingerprint"]:
            raise UsageError(
                f"The prompt {prompt['id']!r} has another text than in this run.", "Give another --out."
            )
    for each in fields(DecodingOptions):
        now = new["options"][each.name]
        then = old["options"].get(each.name, now)
        if then != now:
            option = flag(DecodingOptions, each.name)
            raise UsageError(
                f"The outputs in this run were made with another {option} ({then} then, {now} now), and cannot be"
                " compared with others.",
                "Give another --out, or what was given then.",
            )
    known = {config["id"]: config for config in old["configs"]}
    for config in new["configs"]:
        for name, what in _OF_A_CONFIG.items():
            then = known.get(config["id"], {}).get(name, config[name])
            if then != config[name]:
                raise UsageError(
                    f"In this run {config['label']} was measured with {what} ({then} then, {config[name]} now).",
                    "Give another --out.",
                )
    pairs: list[tuple[str, Any, Any]] = [("specbench", old.get("specbench"), new["specbench"])]
    pairs += [(name, old["environment"].get(name), new["environment"].get(name)) for name in _SAME_MACHINE]
    pairs.append(("device", old["target"].get("device"), new["target"].get("device")))
    pairs += _options(old, new)
    if not option_changes(old, new):  # what is calibrated is no option
        asked = [config["id"] for config in new["configs"]]
        pairs.append(("configurations", asked if known.keys() >= set(asked) else list(known), asked))
    ids = [[prompt["id"] for prompt in run["prompts"]] for run in (old, new)]
    pairs.append(("prompts", ids[0], ids[1]))
    return _differing(pairs)


def option_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """In which options a stored run differs from one that is asked for: "option name: then → now".

    Args:
        old, new: Of both only ``options`` is read.
    """
    return _differing(_options(old, new))


def _options(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    names = dict.fromkeys([*old["options"], *new["options"]])
    # For options that a run from before does not know.
    defaults = stored_options(SweepOptions())
    return [
        (f"option {name}", old["options"].get(name, defaults.get(name)), new["options"].get(name))
        for name in names
    ]


def _differing(pairs: Sequence[tuple[str, Any, Any]]) -> list[str]:
    return [f"{name}: {_shown(then)} → {_shown(now)}" for name, then, now in pairs if then != now]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        text = ", ".join(map(str, value)) or "none"
        return text if len(text) < 60 else f"{len(value)} of them"
    return "none" if value is None else str(value)


def merge_runs(old: Mapping[str, Any], new: Mapping[str, Any], differing: Sequence[str]) -> dict[str, Any]:
    """The fields of ``run.json`` to change when a run goes on although something differs."""
    configs = {config["id"]: config for config in (*old["configs"], *new["configs"])}
    prompts = {prompt["id"]: prompt for prompt in (*old["prompts"], *new["prompts"])}
    fields = (
        "options",
        "environment",
        "specbench",
        "repeats",
        "warmup",
        "seed",
    )
    change = {
        "at": now(),
        "differing": list(differing),
        "environment": old["environment"],
        "options": old["options"],
    }
    return {
        **{name: new[name] for name in fields},
        **({"heads": heads} if (heads := {**old.get("heads", {}), **new.get("heads", {})}) else {}),
        "configs": list(configs.values()),
        "prompts": list(prompts.values()),
        "finished": None,
        "changes": [*old.get("changes", ()), change],
    }


def open_run(
    folder: Path,
    sweep: Sweep,
    *,
    target: Mapping[str, Any],
    sources: Mapping[str, Any],
    advice: str,
    command: Sequence[str] = (),
    heads: Mapping[str, Mapping[str, Any]] | None = None,
    accept_changes: bool = False,
) -> RunStore:
    """The folder of a run to measure into: a new one, or the stored one if it was made as this would be.

    Args:
        folder: With or without a run.
        sweep, target, sources, command, heads: See ``describe_run``.
        advice: What to do about a run that was made otherwise.
        accept_changes: Go on with such a run, and write down what differs.

    Raises:
        UsageError: The run was made otherwise, in what cannot be accepted or is not to be.
    """
    from specbench.bench.environment import describe_environment  # which imports torch

    run = describe_run(
        sweep,
        target=target,
        environment=describe_environment(),
        sources=sources,
        command=command,
        heads=heads,
    )
    if not RunStore.exists(folder):
        return RunStore.create(folder, run)
    store = RunStore.open(folder)
    try:
        differing = changes(store.run, run)
        if differing and not accept_changes:
            raise UsageError(
                f"The run in {str(folder)!r} was made otherwise ({'; '.join(differing)}).", advice
            )
        if differing:
            store.update(**merge_runs(store.run, run, differing))
    except BaseException:
        store.close()
        raise
    return store
