"""Defaults of options from a `specbench.toml`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbench.base.errors import UsageError
from specbench.cli.console import say
from specbench.specs.models import split_options
from specbench.specs.policies import Fixed, parse_policy

NO_FILE = "none"
"""What ``--config`` takes in place of a file, to read none."""

_DRAFTING = {"drafter", "draft_policy", "gamma"}


def defaults_from_config(given: Mapping[str, Any], lists: Collection[str]) -> dict[str, Any]:
    """Return defaults for the options of a command, from the named file or the one in the folder.

    What is taken from a file that was not named is printed on stderr. ``given`` are the options on the command line,
    ``lists`` those that may be repeated. A target on the command line without options of its own is among the defaults
    too, with those of the file's.

    Raises:
        UsageError: The file is not a valid configuration.
    """
    from specbench.config import FILE_NAME, PROVISIONAL, read_config

    path = Path(given.get("config", FILE_NAME))
    if given.get("config") == NO_FILE or ("config" not in given and not path.is_file()):
        return {}
    config = read_config(path)
    target = config.given.get("target")
    asked = given.get("target", target)
    if target is not None and split_options(asked)[0].name != split_options(target)[0].name:
        say(f"{path} is for the target {target} and is left out.")
        return {}
    options = {name: value for name, value in config.given.items() if name not in given}
    if not _DRAFTING.isdisjoint(given):  # it is the policy of its own drafter
        options.pop("draft_policy", None)
    policy = parse_policy(options.get("draft_policy", "auto"))
    if isinstance(policy, Fixed) and policy.gamma is not None:
        options |= {"draft_policy": str(replace(policy, gamma=None)), "gamma": str(policy.gamma)}
    if target is not None:
        dtype = target.partition(":")[2] if "dtype" not in given and not split_options(asked)[1] else ""
        model = asked if "target" in given else target.partition(":")[0]
        if dtype or "target" not in given:
            options["target"] = f"{model}:{dtype}" if dtype else model
    if "config" not in given:
        used = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
        say(f"{path} sets {used or 'nothing'} (leave it out with --config none)")
    if config.provisional and "drafter" in options:
        say(f"{path} {PROVISIONAL}")
    return {name: [value] if name in lists else value for name, value in options.items()}


RUN_OPTIONS = {"sweep": "out", "tune": "results"}
"""Commands that continue a run, and their options for its folder."""

_OWN = {"out", "results", "resume", "config", "overwrite", "minutes", "json_output", "verbose", "quiet"}
"""Options of a call, which the next one does not inherit."""

_NOT_FROM_FILES = {"server", "engine", "engine_command", "arguments"}
"""Options that start programs or name addresses: no file gives them."""


def options_of_run(command: Any, ctx: Any, args: Sequence[str]) -> list[str]:
    """Return the options with which the run was made that ``--resume`` continues, without those that are given again.

    Raises:
        UsageError: It was made with an option that no file may give.
    """
    from specbench.experiment import newest_run
    from specbench.results.store import RunStore, read_run

    given, _, _ = command.make_parser(ctx).parse_args(args=list(args))
    named = given.get(RUN_OPTIONS[ctx.info_name])
    folder = newest_run(tuned=ctx.info_name == "tune") if named is None else Path(named)
    words = read_run(folder).command if folder is not None and RunStore.exists(folder) else []
    if ctx.info_name not in words:  # one of Python has none
        return []
    stored, _, _ = command.make_parser(ctx).parse_args(args=words[words.index(ctx.info_name) + 1 :])
    found: list[str] = []
    for option in (
        each for each in command.get_params(ctx) if each.name in stored.keys() - given.keys() - _OWN
    ):
        value = stored[option.name]
        for each in value if isinstance(value, list) else [value]:
            if each is None:
                continue
            if option.name in _NOT_FROM_FILES or re.search(r"\.py\b", str(each)):
                raise UsageError(
                    f"The run was made with {option.opts[0]} {each}, which is not taken from a file.",
                    "Give it again.",
                )
            flag = option.secondary_opts[0] if each is False else option.opts[0]
            found += [flag] if isinstance(each, bool) else [flag, str(each)]
    return found
