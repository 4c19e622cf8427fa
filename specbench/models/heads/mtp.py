"""MTP layers: those of a target's own checkpoint, and those that were trained for it.

``mtp_layouts.py`` has what checkpoints call their tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from specbench.backends.torch.head_scorers import EagleScorer
from specbench.backends.torch.mtp import build_mtp_layer
from specbench.base.errors import RunError, UsageError
from specbench.base.progress import quiet_transformers
from specbench.base.textsafe import excerpt
from specbench.models.checkpoints import check_memory, text_config
from specbench.models.files import read_settings
from specbench.models.head_files import HeadFiles
from specbench.models.heads.base import OwnHead, Tensors, TrainedHead, register, without_maps
from specbench.models.mtp_layouts import BLOCK, JOINED, LAYOUTS, MtpTensors, find_mtp_tensors
from specbench.models.quantized import stored_weights

_OTHER = "Choose another drafter."
_FAMILIES = ", ".join(layout.families for layout in LAYOUTS)


def checkpoint_files(folder: Path, config: PreTrainedConfig, name: str) -> HeadFiles:
    """Return the MTP layers of a target's checkpoint as the files of a head.

    Raises:
        UsageError: There are none.
    """
    text: Any = text_config(config)
    if find_mtp_tensors(folder, text.num_hidden_layers) is None:
        gemma = text.model_type.startswith("gemma4")
        raise UsageError(
            f"The checkpoint of {name} has no MTP layer in a known layout ({_FAMILIES}).",
            "Name the folder of its assistant, a model of its own." if gemma else _OTHER,
        )
    settings = {key: getattr(text, key) for key in ("model_type", "hidden_size", "vocab_size")}
    return HeadFiles("mtp", "mtp", folder, settings)


def _tensors_of(files: HeadFiles, target_layers: int) -> MtpTensors:
    found = find_mtp_tensors(files.folder, target_layers)
    if found is None:
        raise RunError(f"The weights of {files.name} are incomplete: they lack {JOINED[-1]} of an MTP layer.")
    return found


def _read(files: HeadFiles, target_layers: int) -> Tensors:
    """Read MTP layers, from safetensors files only, and of these no other tensors."""
    found = _tensors_of(files, target_layers)
    check_memory(4 * found.weights, name=files.name)
    told: Mapping[str, Any] = {}
    if not found.plain:
        settings = read_settings(files.folder, files.name)
        parts = (settings, settings.get("text_config") or {})
        told = next((own for part in parts if (own := part.get("quantization_config"))), {})
        if not told:
            raise UsageError(f"The MTP layers of {files.name} are quantized, and it is not told how.", _OTHER)
    weights = stored_weights(sorted({*found.files.values()}), told, torch.float32)
    return {name: weights[name][...] for name in (*found.places, "d2t", "t2d") if name in weights}


@register("mtp", EagleScorer, read=_read, convert=without_maps)
def _module(head: TrainedHead, target: PreTrainedConfig, own_head: OwnHead) -> nn.Module:
    """Make an MTP layer; the tensors have the names that their files give them."""
    found = _tensors_of(head.files, text_config(target).num_hidden_layers)
    part = {found.places[name]: tensor for name, tensor in head.tensors.items()}
    block = {name.removeprefix(BLOCK): part.pop(name) for name in [*part] if name.startswith(BLOCK)}
    try:
        with quiet_transformers():
            norm, first = "norm.weight" in part, found.layout.hidden_first
            layer = build_mtp_layer(target, block, final_norm=norm, hidden_first=first)
    except Exception as error:  # what configurations, converters and shapes raise in there
        reason = excerpt(error).rstrip(".")
        raise UsageError(f"The MTP layer of {head.name} cannot be used: {reason}.", _OTHER) from error
    vocab, width = layer.lm_head.weight.shape
    drafted = vocab if head.target_tokens is None else len(head.target_tokens)
    layer.lm_head = nn.Linear(width, drafted, bias=False, device="meta")
    if "lm_head.weight" not in part:
        part["lm_head.weight"] = head.rows(own_head, vocab)
    part |= {f"{BLOCK}{name}": tensor for name, tensor in layer.layers[0].state_dict().items()}
    head.fill(layer, part)
    return layer
