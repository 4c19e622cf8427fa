"""MTP layers as heads: those of a target's own checkpoint, and those that were trained for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specbench.backends.torch.mtp import MtpLayers, build_mtp_layers
from specbench.base.errors import RunError, UsageError
from specbench.base.progress import quiet_transformers
from specbench.base.textsafe import excerpt
from specbench.models.checkpoints import check_memory, fingerprint, text_config
from specbench.models.heads.base import HeadFiles
from specbench.models.heads.weights import TrainedHead, draft_tokens, load_head, widened
from specbench.models.mtp_layouts import BLOCK, JOINED, LAYOUTS, MtpTensors, find_mtp_tensors
from specbench.models.training_metadata import check_weights

_OTHER = "Choose another drafter."
_FAMILIES = ", ".join(layout.families for layout in LAYOUTS)


def checkpoint_files(folder: Path, config: PreTrainedConfig, name: str) -> HeadFiles:
    """Return the MTP layers of a target's checkpoint as the files of a head.

    Raises:
        UsageError: There are none.
    """
    text = text_config(config)
    if find_mtp_tensors(folder, text.num_hidden_layers) is None:
        gemma = text.model_type.startswith("gemma4")
        raise UsageError(
            f"The checkpoint of {name} has no MTP layer in a known layout ({_FAMILIES}).",
            "Name the folder of its assistant, a model of its own." if gemma else _OTHER,
        )
    return HeadFiles("mtp", "mtp", folder, {"transformer_layer_config": text.to_dict()})


class MtpHead(TrainedHead):
    """MTP layers; its tensors have the names that their files give them."""

    def with_layers(self, target: PreTrainedConfig, own_head: Callable[[], torch.Tensor]) -> Any:
        """Make the module of one MTP layer or of several; see ``TrainedHead.with_layers``."""
        found = tensors_of(self.files, text_config(target).num_hidden_layers)
        parts = [self._part(layer, found) for layer in range(found.layers)]
        blocks = [
            {name.removeprefix(BLOCK): part.pop(name) for name in [*part] if name.startswith(BLOCK)}
            for part in parts
        ]
        try:
            with quiet_transformers():
                layers = build_mtp_layers(
                    self._config(target),
                    blocks,
                    final_norm="norm.weight" in parts[0],
                    hidden_first=found.layout.hidden_first,
                    kind=found.layout.kind,
                )
        except Exception as error:  # what configurations, converters and shapes raise in there
            reason = excerpt(error).rstrip(".")
            raise UsageError(f"The MTP layer of {self.name} cannot be used: {reason}.", _OTHER) from error
        shared = None
        for layer, part in zip(layers, parts, strict=True):
            vocab, width = layer.lm_head.weight.shape
            drafted = vocab if self.target_tokens is None else len(self.target_tokens)
            layer.lm_head = torch.nn.Linear(width, drafted, bias=False, device="meta")
            if "lm_head.weight" not in part:
                layer.lm_head = shared = shared or layer.lm_head
                part["lm_head.weight"] = self._rows(own_head(), vocab)
            part |= {f"{BLOCK}{name}": tensor for name, tensor in layer.layers[0].state_dict().items()}
            self._fill(layer, part)
        return layers[0] if len(layers) == 1 else MtpLayers(layers, chained=found.layout.chained)

    def _part(self, layer: int, found: MtpTensors) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer, by their names in ``MtpLayer``."""
        placed = ((found.places[name], tensor) for name, tensor in self.tensors.items())
        part = {own: tensor for (number, own), tensor in placed if number == layer}
        if not layer or not found.layout.shared:
            return part
        return {name: own for name, own in self._part(0, found).items() if not name.startswith(BLOCK)} | part

    def _config(self, target: PreTrainedConfig) -> PreTrainedConfig:
        """Return the configuration of the layers: the target's, unless they are of another class."""
        settings = self.files.layer_settings
        named = settings.get("model_type")
        if named in (None, text_config(target).model_type) or named not in CONFIG_MAPPING:
            return target
        config: PreTrainedConfig = CONFIG_MAPPING[named](**settings)
        return config


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
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in names}
            if "d2t" in file.keys():  # noqa: SIM118 - it is no dict
                tensors |= {name: file.get_tensor(name) for name in ("d2t", "t2d")}
    tensors = widened(tensors, files.name)
    return MtpHead(
        files,
        tensors,
        draft_tokens(files, tensors),
        fingerprint(f"{found.layout.families} {found.layers}", tensors.items()),
    )


def load_any_head(files: HeadFiles, target_layers: int = 0, *, allow_pickle: bool = False) -> TrainedHead:
    """Read the weights of a head of any kind, see ``load_head`` and ``load_mtp``."""
    return (
        load_mtp(files, target_layers) if files.kind == "mtp" else load_head(files, allow_pickle=allow_pickle)
    )
