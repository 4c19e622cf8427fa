"""Defaults of options from a `specbench.toml`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.cli.console import say
from specbench.specs.models import split_options
from specbench.specs.policies import Fixed, parse_policy

if TYPE_CHECKING:
    from specbench.config import Config

NO_FILE = "none"
"""What ``--config`` takes in place of a file, to read none."""

_LENGTH = {"draft_policy", "gamma"}


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
    config = _left(config, given)
    options = _options(config)
    if target is not None:
        dtype = target.partition(":")[2] if "dtype" not in given and not split_options(asked)[1] else ""
        model = asked if "target" in given else target.partition(":")[0]
        if dtype or "target" not in given:
            options["target"] = f"{model}:{dtype}" if dtype else model
    if "config" not in given:
        used = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
        say(f"{path} sets {used or 'nothing'} (leave it out with --config none)")
    if config.provisional and "drafter" in config.given:
        say(f"{path} {PROVISIONAL}")
    return {name: [value] if name in lists else value for name, value in options.items()}


def _left(config: Config, given: Collection[str]) -> Config:
    """Return the part of a configuration that applies; without its drafter, its draft policy does not apply either."""
    taken = {name for name in config.given if name in given}
    if "drafter" in given:
        taken |= {"draft_policy"}
    if not _LENGTH.isdisjoint(given):
        taken |= {"draft_policy"}
    return config.without(*taken)


def _options(config: Config) -> dict[str, str]:
    """Return the options of a configuration by name; the γ of a fixed policy becomes the option for γ."""
    policy = parse_policy(config.given.get("draft_policy", "auto"))
    if not isinstance(policy, Fixed) or policy.gamma is None:
        return dict(config.given)
    return {
        **config.given,
        "draft_policy": str(replace(policy, gamma=None)),
        "gamma": str(policy.gamma),
    }
