"""LoRA adapters, in the folders that `peft` writes: they are merged into their base model when it is loaded.

A weight W becomes W + (alpha / r) B A, computed in float32. Everything that an adapter asks for is done or refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specbench.base.errors import RunError, UsageError
from specbench.base.record import Record, wrong_field
from specbench.base.textsafe import excerpt
from specbench.models.checkpoints import ADAPTER, fingerprint, pickled, read_tensors
from specbench.specs.models import ModelSpec, parse_model

_WEIGHTS = "adapter_model.safetensors"
_MERGE = "Merge it into its base model with peft, and name the merged model."

_IGNORED = re.compile(
    "task_type|auto_mapping|peft_(type|version)|base_model_(name_or_path|class)|revision|inference_mode|r|target_modules"
    "|exclude_modules|lora_(alpha|dropout)|fan_in_fan_out|bias|use_rslora|modules_to_save|init_lora_weights"
    "|layers_(to_transform|pattern)|(rank|alpha)_pattern|megatron_(config|core)|eva_config|qalora_group_size"
    "|runtime_config|ensure_weight_tying|parent_library|unsloth_fixed"
)
"""Settings that are read, or say only how it was trained; others must be off."""

_PARTS = re.compile(
    r"(?:base_model\.model\.)?(.+?)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.default)?(?:\.weight)?"
)
_SAVED = re.compile(
    r"(?:base_model\.model\.)?(.+?)(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.(weight|bias)"
)

Factor = Annotated[float, Meta(gt=-1e6, lt=1e6)]


class _Settings(Record):
    """What is read of an adapter_config.json."""

    peft_type: str
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    lora_alpha: Factor = 8.0
    use_rslora: bool = False
    alpha_pattern: dict[str, Factor] | None = None
    fan_in_fan_out: bool = False
    bias: str = "none"
    init_lora_weights: bool | str = True


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in a folder.

    Attributes:
        base: The base model that its configuration names; ``None`` if it names none.
    """

    folder: Path
    name: str
    settings: _Settings

    @property
    def base(self) -> str | None:
        return self.settings.base_model_name_or_path or None

    def merge(self, model: PreTrainedModel, base: str, *, allow_pickle: bool) -> tuple[str, str]:
        """Merge it into its base model's weights; return a hash of it, and a sentence for the user.

        Raises:
            UsageError: It does not fit this model, or has parts that cannot be merged.
            RunError: Its weights are damaged.
        """
        tensors = self._read(allow_pickle)
        pairs: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            if part := _PARTS.fullmatch(key):
                pairs.setdefault(part[1], {})[part[2]] = tensor.float()
            elif saved := _SAVED.fullmatch(key):
                self._restore(model, base, saved[1], saved[2], tensor)
            else:
                raise self._refused(f"its tensor {excerpt(key)} is of no known kind")
        for path, parts in pairs.items():
            self._add(model, base, path, parts)
        ranks = sorted({len(parts[kind]) for parts in pairs.values() for kind in parts if kind.endswith("A")})
        content = fingerprint(repr(self.settings), tensors.items())
        rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        note = f"The adapter {self.name} (LoRA of {rank}) was merged into {base}."
        if self.base and Path(self.base).name != base.partition("@")[0].rpartition("/")[2]:
            note += f" It names another base, {excerpt(self.base)}."
        return content, note

    def _add(self, model: PreTrainedModel, base: str, path: str, parts: Mapping[str, Tensor]) -> None:
        """Add an adapter's product to a layer's weight."""
        kinds = sorted(parts)
        if kinds not in (["lora_A", "lora_B"], ["lora_embedding_A", "lora_embedding_B"]):
            raise self._refused(f"of {excerpt(path)} it has only {kinds[0]}")
        down, up = (parts[kind] for kind in kinds)
        layer = self._layer(model, base, path)
        if not isinstance(layer, nn.Linear | nn.Embedding | Conv1D):
            raise self._refused(f"it changes {excerpt(path)}, which is no linear layer")
        if down.dim() != 2 or up.dim() != 2 or len(down) != up.shape[1]:
            raise self._refused(f"its matrices for {excerpt(path)} do not fit each other")
        rank = len(down)
        alpha = self._alpha(path)
        # Embeddings are stored by token; Conv1D, GPT-2's linear layer, by input.
        turned = kinds[0] == "lora_embedding_A" or isinstance(layer, Conv1D)
        weight = layer.weight
        if (up.shape[0], down.shape[1]) != tuple(weight.shape[::-1] if turned else weight.shape):
            raise self._other_base(base, f"{excerpt(path)} has another shape there")
        delta = up.to(weight.device) @ down.to(weight.device)
        delta *= alpha / (math.sqrt(rank) if self.settings.use_rslora else rank)
        weight.data = (weight.data.float() + (delta.t() if turned else delta)).to(weight.dtype)

    def _alpha(self, path: str) -> float:
        for key, value in (self.settings.alpha_pattern or {}).items():
            name = key.replace("\\.", ".").strip("^$")
            if not re.fullmatch(r"[\w.]+", name):
                raise self._refused(f"its alpha_pattern {excerpt(key)} is no name of layers")
            if path == name or path.endswith(f".{name}"):
                return value
        return self.settings.lora_alpha

    def _restore(self, model: PreTrainedModel, base: str, path: str, kind: str, tensor: Tensor) -> None:
        """Replace a weight that was trained as a whole (``modules_to_save``)."""
        layer = self._layer(model, base, path)
        weight: Any = getattr(layer, kind, None)
        if weight is None or weight.shape != tensor.shape:
            raise self._other_base(base, f"{excerpt(path)}.{kind} has another shape there")
        weight.data = tensor.to(weight.device, weight.dtype)

    def _layer(self, model: PreTrainedModel, base: str, path: str) -> Any:
        """Return the layer that the adapter calls so; a model with several parts may have been stripped of some."""
        named = dict(model.named_modules())
        tail = path[path.index("layers.") :] if "layers." in path else path
        ends = [name for name in named if name == tail or name.endswith(f".{tail}")]
        layer = named.get(path) or (named[ends[0]] if len(ends) == 1 else None)
        if layer is None:
            raise self._other_base(base, f"there is no {excerpt(path)}")
        if sum(layer.weight is each for module in named.values() for each in module._parameters.values()) > 1:
            raise self._refused(f"it changes {excerpt(path)}, whose weights {base} uses in two places")
        if layer.weight.is_meta:
            raise self._refused("a device map keeps layers of its base out of memory")
        return layer

    def _read(self, allow_pickle: bool) -> dict[str, Tensor]:
        paths = [self.folder / name for name in (_WEIGHTS, "adapter_model.bin")]
        path = next((each for each in paths if each.is_file()), None)
        if path is None:
            raise UsageError(f"The adapter {self.name} has no {_WEIGHTS}.")
        if path.suffix == ".bin" and not allow_pickle:
            raise pickled(f"The adapter {self.name} is")
        return read_tensors(path, f"the adapter {self.name}")

    def _refused(self, reason: str) -> UsageError:
        return UsageError(f"The adapter {self.name} cannot be merged: {reason}.", _MERGE)

    def _other_base(self, base: str, reason: str) -> UsageError:
        return UsageError(
            f"The adapter {self.name} was not trained for {base}: {reason}.",
            f"Its base is {excerpt(self.base)}." if self.base else "Name its base model.",
        )


def with_base(spec: ModelSpec) -> tuple[ModelSpec, Adapter | None]:
    """Return the model to load, and the adapter to merge into it, of a model that has an adapter or is one.

    Raises:
        UsageError: The adapter is none, is of another kind than LoRA, or its base model is not to be found.
    """
    if spec.adapter is not None:
        return replace(spec, adapter=None), read_adapter(Path(spec.adapter).expanduser())
    folder = Path(spec.source)
    if spec.kind != "folder" or not is_adapter(folder):
        return spec, None
    adapter = read_adapter(folder)
    hint = f"Name it: BASE:adapter={spec.name}, with the base model's folder or hub id as BASE."
    if adapter.base is None:
        raise UsageError(f"The adapter {adapter.name} does not say what its base model is.", hint)
    for path in (Path(adapter.base), folder / adapter.base):
        if path.is_dir() and not is_adapter(path):
            return ModelSpec("folder", str(path)), adapter
    try:
        base = parse_model(adapter.base)
    except UsageError:
        base = None
    if base is None or base.kind != "hub":
        raise UsageError(
            f"The base model of the adapter {adapter.name} is not to be found: {excerpt(adapter.base)}.", hint
        )
    return replace(base, revision=adapter.settings.revision), adapter


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter, and no model."""
    return (folder / ADAPTER).is_file() and not any(
        each.suffix in (".safetensors", ".bin") and not each.name.startswith("adapter_")
        for each in folder.iterdir()
    )


def read_adapter(folder: Path) -> Adapter:
    """Read the configuration of an adapter, without its weights; see ``with_base`` for errors."""
    name, path = folder.resolve().name, folder / ADAPTER
    if not path.is_file():
        raise UsageError(f"The folder {str(folder)!r} is no adapter: it has no {ADAPTER}.")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        settings = msgspec.convert(raw, _Settings)
    except msgspec.ValidationError as error:
        raise RunError(
            f"The file {str(path)!r} is damaged: {wrong_field(error)} has an invalid value."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"The file {str(path)!r} is damaged: it is not a JSON object.") from error
    made = Adapter(folder, name, settings)
    if settings.peft_type != "LORA":
        raise made._refused(f"it is of the kind {excerpt(settings.peft_type)}, and only LoRA is")
    if settings.task_type not in (None, "", "CAUSAL_LM"):
        raise made._refused(f"it was trained for another task ({excerpt(settings.task_type)})")
    if settings.bias != "none":
        raise made._refused("it was trained with biases")
    start = settings.init_lora_weights
    if isinstance(start, str) and start.lower() not in ("gaussian", "eva", "orthogonal"):
        raise made._refused(f"it began with a change of the base model's weights ({excerpt(start)})")
    asked = next((key for key, value in raw.items() if value and not _IGNORED.fullmatch(key)), None)
    if asked is not None:
        raise made._refused(f"it is more than plain LoRA ({excerpt(asked)})")
    return made
