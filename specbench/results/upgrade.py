"""Upgrades of runs that an earlier version stored: the only module that knows the older formats."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import structs

from specbench.base.errors import UsageError
from specbench.base.textsafe import one_line
from specbench.options import CacheOptions, DecodingOptions, LoadOptions, ModelOptions, SamplingOptions
from specbench.recipe import Recipe, options_of, with_models
from specbench.results.run import VERSION, Run, RunConfig, StoredRecipe
from specbench.specs.drafters import Cascade, DrafterSpec, SmallModel, parse_drafter
from specbench.specs.models import BUILTIN_MODELS, PACKAGED_HEADS, ModelSpec
from specbench.specs.policies import PolicySpec, parse_policy

_DTYPE = re.compile(r" \((\w+)\)")
"""What version 1 had behind the name of a drafter's model."""


def upgraded(run: Run) -> Run:
    """Return a run of any version in its present form.

    In version 1, configurations had no ``recipe``, and ``drafter_dtype`` was part of the drafter's name.
    """
    configs = [_with_recipe(each, run) for each in run.configs] if run.schema == 1 else run.configs
    return structs.replace(run, configs=configs, schema=VERSION)


def rename_fields(run: Any) -> Any:
    """Rename the fields of a decoded ``run.json`` to this version's names.

    Until version 2, the draft policy was called ``policy`` in a configuration, ``rule`` in its recipe, and
    ``--length-policy`` on the command line.
    """
    configs = run.get("configs") if isinstance(run, dict) else None
    for config in configs if isinstance(configs, list) else ():
        _rename(config, "policy")
        if isinstance(config, dict):
            _rename(config.get("recipe"), "rule")
    command = run.get("command") if isinstance(run, dict) else None
    if isinstance(command, list):
        run["command"] = ["--draft-policy" if word == "--length-policy" else word for word in command]
    return run


def _rename(data: Any, old: str) -> None:
    if isinstance(data, dict) and old in data:
        data["draft_policy"] = data.pop(old)


def _with_recipe(config: RunConfig, run: Run) -> RunConfig:
    if config.kind not in ("plain", "speculative"):
        return config
    dtypes = _DTYPE.findall(config.drafter)
    dtype = dtypes[-1] if dtypes else None
    recipe = None
    with suppress(UsageError, TypeError):  # a drafter or an option of another version
        recipe = msgspec.convert(_recipe(config, run, dtype).to_json(), StoredRecipe)
    return structs.replace(config, recipe=recipe, drafter_dtype=dtype)


def _recipe(config: RunConfig, run: Run, drafter_dtype: str | None) -> Recipe:
    options, said = run.options, run.command
    target, drafter = (
        options_of(LoadOptions, options.get(f"{each}_options") or {}) for each in ("target", "drafter")
    )
    name = options.get("target")
    compiled = config.cache == "compiled"
    recipe = Recipe(
        _model(one_line(name if isinstance(name, str) else run.target.name or "model")),
        models=ModelOptions(
            dtype=target.dtype,
            device=target.device,
            device_map=target.device_map,
            drafter_dtype="int4" if drafter_dtype == "int4" else drafter.dtype,
            drafter_device=drafter.device,
            allow_pickle="--allow-pickle" in said,
            any_target=drafter.any_target,
        ),
        caching=CacheOptions(
            cache="static" if compiled else config.cache,  # type: ignore[arg-type]
            bit_exact="--bit-exact" in said,
            compiled=compiled,
        ),
        decoding=options_of(DecodingOptions, options),
        sampling=SamplingOptions(temperature=config.temperature),
    )
    if config.kind == "plain":
        return recipe
    policy: PolicySpec = parse_policy(config.draft_policy)
    if config.gamma is not None:
        policy = policy.with_options({"gamma": config.gamma})
    return replace(recipe, drafter=_drafter(config.drafter), policy=policy)


def _model(name: str) -> ModelSpec:
    """Return the spec of a model from the name that version 1 stored."""
    if name in BUILTIN_MODELS or name in PACKAGED_HEADS:
        return ModelSpec("builtin" if name in BUILTIN_MODELS else "packaged", name)
    if name.lower().endswith(".gguf"):
        return ModelSpec("gguf", name)
    source, _, revision = name.partition("@")
    return ModelSpec("hub", source, revision or None) if "/" in name else ModelSpec("folder", name)


def _drafter(name: str) -> DrafterSpec:
    """Return the spec of a drafter from the name that version 1 stored; its models need not exist on this machine."""
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
