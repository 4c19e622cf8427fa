"""Stored layers of a recipe's models, read while torch and transformers are imported."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from specbench.base.cache import LAYERS_FOLDER, MANIFEST, cache_folder, entries_in
from specbench.base.large_files import read_ahead
from specbench.options import quantized
from specbench.specs.drafters import SelfForm, SmallModel

if TYPE_CHECKING:
    from specbench.recipe import Recipe

LAYERS_FILE = "layers.safetensors"


def entry_name(model: str, kind: str) -> str:
    """Return the name of an entry for a model's packed layers, or those in int8 or int4."""
    return f"{model}, {kind}" if kind == "packed" else f"{model} in {kind}"


def read_layers_ahead(recipe: Recipe) -> None:
    """Begin to read the layers that were last used under the names of a recipe's models, as far as memory allows."""
    if recipe.models.device not in ("auto", "cpu"):
        return
    target = recipe.target.name
    names = {entry_name(target, quantized(recipe.models.dtype) or "packed")}
    for part in recipe.drafter.all_parts():
        if isinstance(part, SmallModel):
            kind = "int8" if part.dtype == "auto" else quantized(part.dtype) or "packed"
            names.add(entry_name(part.model.name, kind))
        elif isinstance(part, SelfForm):
            names.add(entry_name(target, "int8" if part.int8 else "int4"))
    with suppress(OSError):  # an entry that is removed meanwhile
        named = [each for each in entries_in(cache_folder() / LAYERS_FOLDER) if each.name in names]
        named.sort(key=lambda each: (each.path / MANIFEST).stat().st_mtime)
        last = {each.name: each for each in named}.values()
        if sum(each.size for each in last) <= psutil.virtual_memory().available // 4:
            read_ahead([each.path / LAYERS_FILE for each in last])
