"""The drafter and the KV cache that are taken where none are named."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.options import CacheOptions, ModelOptions, quantized
from specbench.specs.drafters import DrafterSpec, parse_drafter
from specbench.specs.models import CHECKPOINT_MTP

if TYPE_CHECKING:
    from specbench.recipe import Recipe

DEFAULT_DRAFTER = "lookup"
"""It needs no model of its own, and costs almost nothing where it does not help."""


def default_drafter(recipe: Recipe) -> DrafterSpec:
    """Return the default drafter of a recipe's target.

    The built-in model drafts for itself in int4 where it has not been quantized and the passes are native, which makes
    them fast. Of another target an int4 copy can take more time and memory than a first run should.
    """
    from specbench.models.mtp_layouts import has_mtp_layers

    word = DEFAULT_DRAFTER
    with suppress(UsageError):  # of a target or a device that is none; loading them says so
        if recipe.target.kind == "builtin":
            word = "lookup+self:int4" if _passes_in_int4(recipe.models) else word
        elif has_mtp_layers(recipe.target):
            word = CHECKPOINT_MTP.name
    return parse_drafter(word)


def with_default_cache(recipe: Recipe) -> Recipe:
    """Return a recipe with the default KV cache of an int8 or int4 target, whose configuration is read."""
    if quantized(recipe.models.dtype) is None:
        return recipe
    from specbench.models.load import load_config
    from specbench.models.target import default_cache

    return recipe.with_groups(CacheOptions(default_cache(load_config(recipe.target), quantized=True)))


def _passes_in_int4(models: ModelOptions) -> bool:
    """Return whether a target that is loaded so has native passes in int4."""
    from specbench.kernels import is_available
    from specbench.models.devices import resolve_device

    return quantized(models.dtype) is None and is_available() and resolve_device(models.device).type == "cpu"
