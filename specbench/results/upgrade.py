"""Runs that an earlier version stored, as this one stores them: the one place that knows how those were written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specbench.errors import UsageError
from specbench.options import CacheOptions, DecodingOptions, LoadOptions, ModelOptions, SamplingOptions
from specbench.recipe import Recipe, options_of, with_models
from specbench.specs.drafters import Cascade, DrafterSpec, SmallModel, parse_drafter
from specbench.specs.models import BUILTIN_MODELS, PACKAGED_HEADS, ModelSpec
from specbench.specs.rules import RuleSpec, parse_rule
from specbench.textsafe import one_line

_DTYPE = re.compile(r" \((\w+)\)")
"""What version 1 had behind the name of a drafter's model."""


def upgraded(run: dict[str, Any], version: int) -> dict[str, Any]:
    """What ``run.json`` holds, in its present form.

    Args:
        run: Of the shape that its version has.
        version: 1: configurations had no ``recipe`` and no ``drafter_dtype``, which stood in the drafter's name.
    """
    if run["schema"] == version:
        return run
    configs = [_with_recipe(config, run) for config in run["configs"]]
    return {**run, "configs": configs, "schema": version}


def _with_recipe(config: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    if config["kind"] not in ("plain", "speculative"):
        return {**config, "recipe": None, "drafter_dtype": None}
    dtypes = _DTYPE.findall(config["drafter"])
    try:
        recipe = _recipe(config, run, dtypes[-1] if dtypes else None).to_json()
    except (UsageError, TypeError):  # a drafter or an option of another version
        recipe = None
    return {**config, "recipe": recipe, "drafter_dtype": dtypes[-1] if dtypes else None}


def _recipe(config: Mapping[str, Any], run: Mapping[str, Any], drafter_dtype: str | None) -> Recipe:
    options, said = run["options"], run.get("command", ())
    target, drafter = (
        options_of(LoadOptions, options.get(f"{each}_options") or {}) for each in ("target", "drafter")
    )
    name = options.get("target")
    compiled = config["cache"] == "compiled"
    recipe = Recipe(
        _model(one_line(name if isinstance(name, str) else run["target"].get("name") or "model")),
        models=ModelOptions(
            dtype=target.dtype,
            device=target.device,
            device_map=target.device_map,
            drafter_dtype="int4" if drafter_dtype == "int4" else drafter.dtype,
            drafter_device=drafter.device,
            drafter_device_map=drafter.device_map,
            allow_pickle="--allow-pickle" in said,
            any_target=drafter.any_target,
        ),
        caching=CacheOptions(
            cache="static" if compiled else config["cache"],
            bit_exact="--bit-exact" in said,
            compiled=compiled,
        ),
        decoding=options_of(DecodingOptions, options),
        sampling=SamplingOptions(temperature=config["temperature"]),
    )
    if config["kind"] == "plain":
        return recipe
    rule: RuleSpec = parse_rule(config["policy"])
    if config["gamma"] is not None:
        rule = rule.with_options({"gamma": config["gamma"]})
    return replace(recipe, drafter=_drafter(config["drafter"]), rule=rule)


def _model(name: str) -> ModelSpec:
    """A model by the name that version 1 gave it."""
    if name in BUILTIN_MODELS or name in PACKAGED_HEADS:
        return ModelSpec("builtin" if name in BUILTIN_MODELS else "packaged", name)
    if name.lower().endswith(".gguf"):
        return ModelSpec("gguf", name)
    source, _, revision = name.partition("@")
    return ModelSpec("hub", source, revision or None) if "/" in name else ModelSpec("folder", name)


def _drafter(name: str) -> DrafterSpec:
    """A drafter by the name that version 1 gave it, whose models need not be here."""
    bare = _DTYPE.sub("", one_line(name))
    try:
        return with_models(parse_drafter(bare), lambda model: _model(model.name))
    except UsageError:
        front, plus, model = bare.rpartition("+")
        if re.search("[:|]", model):  # no name, but what another version had
            raise
        back = SmallModel(_model(model))
        if not plus:
            return back
        cascade = parse_drafter(f"{front}+self:int8")
        assert isinstance(cascade, Cascade)
        return replace(cascade, back=back)
