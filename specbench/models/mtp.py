"""MTP layers as heads: those of a target's own checkpoint, and those that were trained for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

from specbench.backends.torch.mtp import build_mtp_layers
from specbench.base.errors import RunError, UsageError
from specbench.base.progress import quiet_transformers
from specbench.base.textsafe import excerpt
from specbench.models.checkpoints import check_memory, fingerprint, safetensors_elements, text_config
from specbench.models.head_files import HeadFiles
from specbench.models.heads import TrainedHead, draft_tokens
from specbench.models.mtp_layouts import BLOCK, JOINED, LAYOUTS, MtpTensors, find_mtp_tensors
from specbench.models.training_metadata import check_weights

_OTHER = "Choose another drafter."
_FAMILIES = ", ".join(layout.families for layout in LAYOUTS)


def checkpoint_files(folder: Path, config: PreTrainedConfig, name: str) -> HeadFiles:
    """Return the MTP layers of a target's checkpoint as the files of a head.

    Args:
        folder: The target's folder.
        config: Its configuration.
        name: Its name.

    Raises:
        UsageError: The checkpoint has no MTP layers.
    """
    text = text_config(config)
    if find_mtp_tensors(folder, text.num_hidden_layers) is None:
        raise UsageError(
            f"The checkpoint of {name} has no MTP layer in a known layout ({_FAMILIES}).", _OTHER
        )
    return HeadFiles("mtp", "mtp", folder, {"transformer_layer_config": text.to_dict()})


class MtpHead(TrainedHead):
    """MTP layers; its tensors are called ``N.NAME``, by layer and name in ``MtpLayer``."""

    def with_layers(self, target: PreTrainedConfig, own_head: Callable[[], torch.Tensor]) -> Any:
        """Make the module of an MTP layer; see ``TrainedHead.with_layers``."""
        found = tensors_of(self.files, text_config(target).num_hidden_layers)
        layout, tensors = found.layout, dict(self.tensors)
        if found.layers > 1:
            raise UsageError(
                f"{self.name} has {found.layers} MTP layers, and one that drafts all tokens is supported.",
                _OTHER,
            )
        own = {name.removeprefix("0."): tensor for name, tensor in tensors.items()}
        block = {name.removeprefix(BLOCK): own.pop(name) for name in [*own] if name.startswith(BLOCK)}
        try:
            with quiet_transformers():
                (layer,) = build_mtp_layers(
                    target, [block], final_norm="norm.weight" in own, hidden_first=layout.hidden_first
                )
        except Exception as error:  # what configurations, converters and shapes raise in there
            reason = excerpt(error).rstrip(".")
            raise UsageError(f"The MTP layer of {self.name} cannot be used: {reason}.", _OTHER) from error
        own |= {f"{BLOCK}{name}": tensor for name, tensor in layer.layers[0].state_dict().items()}
        if "lm_head.weight" not in own:
            own["lm_head.weight"] = self._rows(own_head(), layer.shape.layer.vocab_size)
        self._fill(layer, own)
        return layer


def tensors_of(files: HeadFiles, target_layers: int) -> MtpTensors:
    """Return the tensors of MTP layers in a folder; raise ``RunError`` if there are none."""
    found = find_mtp_tensors(files.folder, target_layers)
    if found is None:
        raise RunError(f"The weights of {files.name} are incomplete: they lack {JOINED[-1]} of an MTP layer.")
    return found


def load_mtp(files: HeadFiles, target_layers: int) -> MtpHead:
    """Read MTP layers, from safetensors files only, and of these no other tensors.

    Raises:
        UsageError: They are quantized. RunError: The weights are missing or damaged, or do not fit into memory.
    """
    check_weights(files.folder, files.name)
    found = tensors_of(files, target_layers)
    if not found.plain:
        raise UsageError(f"The MTP layers of {files.name} are quantized, which is not supported.", _OTHER)
    check_memory(4 * found.weights, name=files.name)
    by_file: defaultdict[Path, list[str]] = defaultdict(list)
    for name, path in found.files.items():
        by_file[path].append(name)
    tensors: dict[str, torch.Tensor] = {}
    for path, names in by_file.items():
        safetensors_elements(path)  # or the refusal of a damaged file
        with safe_open(path, "pt") as file:
            for name in names:
                layer, own = found.places[name]
                tensors[f"{layer}.{own}"] = file.get_tensor(name)
            if "d2t" in file.keys():  # noqa: SIM118 - it is no dict
                tensors |= {name: file.get_tensor(name) for name in ("d2t", "t2d")}
    return MtpHead(
        files,
        tensors,
        draft_tokens(files, tensors),
        fingerprint(f"{found.layout.families} {found.layers}", tensors.items()),
    )
