"""A target with an MTP layer that was trained for it, as one checkpoint in its family's layout."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from specbench.backends.torch.mtp import stored_layer
from specbench.base.errors import RunError, UsageError
from specbench.base.files import file_errors, write_text
from specbench.base.progress import Progress
from specbench.models.checkpoints import text_config, weight_files
from specbench.models.head_files import HeadFiles
from specbench.models.hub import HubModel
from specbench.models.mtp import load_mtp
from specbench.models.mtp_layouts import BLOCK, WRITTEN, Layout
from specbench.specs.models import ModelSpec

INDEX = "model.safetensors.index.json"
_LAYER_FILE = "model-mtp.safetensors"
_EMBEDDINGS = "embed_tokens.weight"
_OUTPUT_HEAD = "lm_head.weight"


def write_mtp_checkpoint(
    files: HeadFiles, target: ModelSpec, config: PreTrainedConfig, out: Path, progress: Progress | None = None
) -> None:
    """Write a target's checkpoint with a trained MTP layer in place of its own ones, if it has any.

    Files that do not change are hard links where the file system has them, otherwise copies. ``config.json`` is written
    last.

    Args:
        files: The layer, of a model type in ``WRITTEN``.
        target, config: The target, which is a folder or on the hub, and its configuration.
        out: A new or empty folder.

    Raises:
        UsageError: The layer is for another target, or of another class; the target has no safetensors files; or the
            folder is not empty. RunError: Files are damaged or cannot be written.
    """
    files.check(config, target.name)
    text = text_config(config)
    layout, count = WRITTEN[text.model_type]
    if files.layer_settings.get("model_type") != text.model_type:
        raise UsageError(
            f"The MTP layer {files.name} is not of the class of the layers of {target.name}, so no engine reads it.",
            "Export another drafter.",
        )
    if target.kind not in ("folder", "hub"):
        raise UsageError(
            f"The target {target.name} is no safetensors checkpoint, to which an MTP layer could be added.",
            "Name the model that it was made from as the target.",
        )
    with file_errors(f"{out} cannot be written"):
        if out.exists() and any(out.iterdir()):
            raise UsageError(f"The folder {out} is not empty.", "Name a new one.")
        out.mkdir(parents=True, exist_ok=True)
    folder = _folder(target, config, progress)
    weights = weight_files(folder, target.name, config, allow_pickle=False)
    layer = _layer_tensors(files, config, layout)
    if layout.appended:  # engines read these from the layer, too
        prefix = layout.written[0].replace("N", str(text.num_hidden_layers))
        embeddings, head = (_tensor_of(weights, name) for name in (_EMBEDDINGS, _OUTPUT_HEAD))
        if embeddings is None:
            raise RunError(f"The weights of {target.name} are incomplete: they lack {_EMBEDDINGS}.")
        layer[f"{prefix}{_EMBEDDINGS}"] = embeddings
        layer[f"{prefix}shared_head.head.weight"] = embeddings.clone() if head is None else head
    with file_errors(f"{out} cannot be written"):
        places = dict.fromkeys(layer, _LAYER_FILE)
        save_file(layer, out / _LAYER_FILE, {"format": "pt"})
        for number, path in enumerate(weights, start=1):
            # transformers reads no other file if there is a model.safetensors.
            name = f"model-{number:05}-of-{len(weights):05}.safetensors"
            places |= dict.fromkeys(_copy_weights(path, out / name, layout, text.num_hidden_layers), name)
        for path in folder.iterdir():
            if path.is_file() and path.suffix != ".safetensors" and path.name not in ("config.json", INDEX):
                _link(path, out / path.name)
        write_text(out / INDEX, json.dumps({"metadata": {}, "weight_map": places}, indent=1))
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        settings.get("text_config", settings)[count] = 1
        write_text(out / "config.json", json.dumps(settings, indent=1))


def _folder(target: ModelSpec, config: PreTrainedConfig, progress: Progress | None) -> Path:
    """Return the folder of a target's files; fetch its weights if they are on the hub."""
    if target.kind == "folder":
        return Path(target.source)
    hub = HubModel(target.source, target.revision, target.name, progress)
    hub.fetch_weights(config, allow_pickle=False, check_size=lambda _: None)
    return hub.folder


def _layer_tensors(files: HeadFiles, config: PreTrainedConfig, layout: Layout) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer without its output head, which is the target's, by their names in a checkpoint."""
    text = text_config(config)
    head = load_mtp(files, text.num_hidden_layers)
    module = head.with_layers(config, lambda: torch.empty(text.vocab_size, text.hidden_size, device="meta"))
    own = module.state_dict()
    block = {name.removeprefix(BLOCK): own[name] for name in own if name.startswith(BLOCK)}
    tensors = {name: own[name] for name in own if not name.startswith((BLOCK, "lm_head."))}
    tensors |= {f"{BLOCK}{name}": tensor for name, tensor in stored_layer(config, block).items()}
    return {layout.stored_name(name, text.num_hidden_layers): tensor for name, tensor in tensors.items()}


def _tensor_of(weights: list[Path], name: str) -> torch.Tensor | None:
    """Return the target's tensor whose name ends so."""
    for path in weights:
        with safe_open(path, "pt") as file:
            for each in file.keys():  # noqa: SIM118 - it is no dict
                if each.endswith(name) and not each.startswith("mtp.") and ".layers." not in each:
                    tensor: torch.Tensor = file.get_tensor(each)
                    return tensor
    return None


def _copy_weights(path: Path, place: Path, layout: Layout, layers: int) -> list[str]:
    """Link or copy a file of weights without tensors of MTP layers, and return the names of its tensors."""
    with safe_open(path, "pt") as file:
        names = [*file.keys()]
        kept = [name for name in names if layout.match(name, layers) is None]
        if kept == names:
            _link(path, place)
        elif kept:
            save_file({name: file.get_tensor(name) for name in kept}, place, {"format": "pt"})
    return kept


def _link(path: Path, place: Path) -> None:
    try:
        os.link(path.resolve(), place)
    except OSError:
        shutil.copyfile(path, place)
