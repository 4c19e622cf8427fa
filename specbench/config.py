"""`specbench.toml`: defaults of the command line.

It is read from the current folder, which may come from somebody else. So it can set nothing that makes a command
trust, download or write anything new: only models by name, a drafter, a draft policy or tree, a cache and dtypes.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

from specbench.base.errors import UsageError, unknown
from specbench.base.files import reason, write_text
from specbench.base.textsafe import one_line, visible
from specbench.options import CacheKind, ModelOptions, quantized
from specbench.recipe import Recipe, drafter_argument
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import parse_model, split_options
from specbench.specs.policies import OwnPolicy, parse_policy

FILE_NAME = "specbench.toml"
VERSION = 1
PROVISIONAL = (
    "is provisional: it is not sure yet that nothing is faster. To find out: `specbench tune --resume`."
)
"""End of a sentence about a provisional configuration."""

_LARGEST = 10_000
"""Bytes of the longest file that is read."""

_PATH = re.compile(r"(?:^|[+|])\s*[~./\\]|://|\\|\.\.|^[A-Za-z]:|\.py:")
"""What gives away a path, a Python file or a web address."""
_NAME = re.compile(r"\w[\w.+-]*(?:/\w[\w.+-]*)?(?:@[\w./-]+)?")
"""A built-in name, a folder or file in the current folder, or a hub id with its revision."""


@dataclass(frozen=True)
class Config:
    """The contents of a `specbench.toml`.

    Attributes:
        given: Options by name, as the command line takes them; the others keep the command's own default. A target in
            another folder is in it by the folder's own name.
        fixed_gamma: The best fixed γ with this drafter, for engines that have no other policy.
        provisional: Whether `specbench tune` could not tell yet that this is faster than plain decoding.

    Raises:
        UsageError: An option does not take its value, or a model is not given by name.
    """

    given: Mapping[str, str] = field(default_factory=dict)
    provisional: bool = False
    fixed_gamma: int | None = None

    def __post_init__(self) -> None:
        for key, value in self.given.items():
            _CHECKS[key](value)

    def __str__(self) -> str:
        lines = [f"version = {VERSION}", *(f'{_key(name)} = "{value}"' for name, value in self.given.items())]
        if self.fixed_gamma is not None:
            lines += [f"fixed-gamma = {self.fixed_gamma}"]
        if self.provisional:
            lines += [f"# This setting {PROVISIONAL}", "provisional = true"]
        return "".join(f"{line}\n" for line in lines)


def config_from_recipe(
    recipe: Recipe, *, provisional: bool = False, fixed_gamma: int | None = None
) -> tuple[Config, str]:
    """Return the configuration of a recipe, and a note if the target has only its folder's name in it.

    The cache is left out where it is the default.
    """
    given = {"drafter": drafter_argument(recipe.drafter)}
    if recipe.policy is not None:
        given["draft_policy"] = str(recipe.policy)
    if recipe.caching.cache != ("dynamic" if quantized(recipe.models.dtype) is None else "preallocated"):
        given["cache"] = recipe.caching.cache
    models = ModelOptions(recipe.models.dtype)
    target = models.behind(recipe.target.argument)
    try:
        return Config({"target": target, **given}, provisional, fixed_gamma), ""
    except UsageError:
        config = Config({"target": models.behind(recipe.target.name), **given}, provisional, fixed_gamma)
        return config, f"It holds for that target alone: add --target {shlex.quote(target)}."


def read_config(path: Path) -> Config:
    """Read a configuration; a file that is none, or sets other options, is refused by a ``UsageError``."""
    shown = visible(str(path))
    try:
        data = path.read_bytes()
        if len(data) > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST:,} bytes")
        values = tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{shown} cannot be read: {reason(error)}.", "Check the path.") from None
    except ValueError as error:  # invalid TOML or UTF-8 as well
        raise UsageError(
            f"{shown} is no configuration: {one_line(error).rstrip('.')}.",
            "Correct or remove it, or add `--config none`.",
        ) from None
    try:
        return _config(values)
    except UsageError as error:
        raise UsageError(f"{shown}: {error.message}", error.hint) from None


def write_config(path: Path, config: Config) -> None:
    """Write a configuration atomically."""
    write_text(path, str(config))


def _config(values: Mapping[str, Any]) -> Config:
    if (version := values.get("version")) != VERSION:
        what = "It has no version" if version is None else f"Its version is {one_line(version)}"
        raise UsageError(
            f"{what}, and this specbench reads version {VERSION}.", f"Write version = {VERSION}."
        )
    names = {_key(name): name for name in (*_CHECKS, "provisional", "fixed_gamma")}
    for key, value in values.items():
        if key != "version" and key not in names:
            raise UsageError(f"It has the unknown key {key!r}.", f"The keys are {', '.join(names)}.")
        if key == "provisional" and not isinstance(value, bool):
            raise UsageError(f"{key} is {one_line(value)}.", "Write true or false.")
        if key == "fixed-gamma" and (type(value) is not int or value < 1):
            raise UsageError(f"{key} is {one_line(value)}.", "Write a number of 1 or more.")
        if key not in ("version", "provisional", "fixed-gamma") and not isinstance(value, str):
            raise UsageError(f"{key} is {one_line(value)}, which is not a string.", "Put it in quotes.")
    given = {names[key]: value for key, value in values.items() if isinstance(value, str)}
    return Config(given, values.get("provisional", False), values.get("fixed-gamma"))


def _key(name: str) -> str:
    return name.replace("_", "-")


# -- checks of values ------------------------------------------------------------------------------


def _check_model(text: str) -> None:
    if _PATH.search(text) or not _NAME.fullmatch(text):
        raise UsageError(
            f"{text!r} is no name of a model.",
            "A configuration names models by hub id, built-in name or folder next to it; give a path as an option.",
        )
    parse_model(text)


def _check_target(text: str) -> None:
    name, colon, _ = text.partition(":")
    _check_model(text if _PATH.search(text) else name)
    options = split_options(text)[1] if colon else {}
    if options.keys() - {"dtype"}:
        raise UsageError(f"{text!r} has other options than a dtype.", "Write MODEL or MODEL:dtype=DTYPE.")
    ModelOptions().with_options(text, options)


def _check_drafter(text: str) -> None:
    if _PATH.search(text):
        _check_model(text)  # refuses it
    for model in (each.model for each in parse_drafter(text).models):
        _check_model(str(model) if model.kind == "hub" else model.source)


def _check_policy(text: str) -> None:
    if isinstance(parse_policy(text), OwnPolicy):
        raise UsageError(f"{text!r} names a Python file.", "Give it as an option: --draft-policy.")


def _check_word(what: str, words: tuple[str, ...], text: str) -> None:
    if text not in words:
        raise unknown(what, text, words)


_CHECKS: Mapping[str, Callable[[str], object]] = {
    "target": _check_target,
    "drafter": _check_drafter,
    "draft_policy": _check_policy,
    "cache": partial(_check_word, "cache", get_args(CacheKind)),
}
