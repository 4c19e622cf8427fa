"""The options of a run that ``--resume`` continues."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specbench.base.errors import UsageError

_OWN = {"out", "resume", "minutes", "json_output", "verbose", "quiet"}
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
    named = given.get("out")
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
