"""Adapters in the folders that `peft` writes: it merges them into their base model when this is loaded."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.base.errors import RunError, UsageError
from specbench.base.progress import quiet_transformers
from specbench.base.textsafe import excerpt
from specbench.models.files import ADAPTER, pickled, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_NO_WEIGHTS = re.compile(".*PROMPT.*|P_TUNING|PREFIX_TUNING|CPT|XLORA")
"""Kinds that change something else than the weights of a model."""
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Adapter:
    """An adapter in a folder.

    Attributes:
        raw: Its configuration, of which `peft` reads the most.
    """

    folder: Path
    name: str
    raw: dict[str, Any]

    def merge(self, model: Any, base: str, *, allow_pickle: bool) -> tuple[PreTrainedModel, str, str]:
        """Merge it into its base model; return the merged model, a hash of the adapter, and a sentence for the user.

        Args:
            model: As it was loaded; of a model with several parts all of it (``text_only``).

        Raises:
            UsageError: It does not fit this model, has parts that cannot be merged, or `peft` is not installed.
            RunError: Its weights are damaged.
        """
        import torch
        from torch import nn

        from specbench.models.checkpoints import fingerprint, read_tensors
        from specbench.models.composites import text_model

        try:
            from peft import PeftConfig, PeftModel
        except ImportError as error:
            raise UsageError(
                "Adapters need the package peft.", "Install it: pip install 'specbench-llm[lora]'."
            ) from error
        path = next((self.folder / name for name in _WEIGHTS if (self.folder / name).is_file()), None)
        if path is None:
            raise UsageError(f"The adapter {self.name} has no {_WEIGHTS[0]}.")
        if path.suffix == ".bin" and not allow_pickle:
            raise pickled(f"The adapter {self.name} is")
        tensors = read_tensors(path, f"the adapter {self.name}")
        if any(weight.is_meta for weight in model.parameters()):
            raise self.refused("a device map keeps layers of its base out of memory")
        causal = text_model(model)
        inside = {name for name, _ in causal.named_modules()} - {name for name, _ in model.named_modules()}
        if any(key.startswith(tuple(f"{_PREFIX}{name}." for name in inside)) for key in tensors):
            model = causal  # it was trained for the text part alone
        ends = embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        try:
            with quiet_transformers(), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                config = PeftConfig.from_peft_type(**self.raw | {"inference_mode": True})
                known = {field.name for field in dataclasses.fields(config)} | {"unsloth_fixed"}
                if strange := [key for key, value in self.raw.items() if value and key not in known]:
                    raise ValueError(f"it does not know {strange[0]}")
                tuned: Any = PeftModel(model, config)
                keys = tuned.load_adapter(str(self.folder), "default", torch_device="cpu")
                same = ends == (model.get_input_embeddings(), model.get_output_embeddings())
                if not same and head is not None and head.weight is embeddings.weight:
                    head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)
                if not keys.missing_keys and not keys.unexpected_keys:
                    model = tuned.merge_and_unload()
        except Exception as error:  # what peft says of odd configurations and shapes
            raise self.refused(f"peft says {excerpt(error, 500)!r}", base) from error
        if wrong := keys.missing_keys or keys.unexpected_keys:
            place = min(wrong).removeprefix(_PREFIX).replace(".default", "")
            lacks = "it has no weights for" if keys.missing_keys else "there is no"
            raise self.refused(f"{lacks} {excerpt(place)}", base)
        note = f"The adapter {self.name} ({excerpt(self.raw['peft_type'])}) was merged into {base}."
        named = self.raw.get("base_model_name_or_path")
        if named and Path(named).name != base.partition("@")[0].rpartition("/")[2]:
            note += f" It names another base, {excerpt(named)}."
        return model, fingerprint(json.dumps(self.raw, sort_keys=True), tensors.items()), note

    def refused(self, reason: str, base: str | None = None) -> UsageError:
        into = f" into {base}" if base else ""
        named = self.raw.get("base_model_name_or_path")
        hint = f"Its base is {excerpt(named)}." if named and base else None
        return UsageError(f"The adapter {self.name} cannot be merged{into}: {reason}.", hint)


def read_adapter(folder: Path) -> Adapter:
    """Read the configuration of an adapter, without its weights.

    Raises:
        UsageError: It is no adapter, or changes no weights. RunError: It is damaged.
    """
    name, path = folder.resolve().name, folder / ADAPTER
    if not path.is_file():
        raise UsageError(f"The folder {str(folder)!r} is no adapter: it has no {ADAPTER}.")
    raw = read_json(path)
    for key in ("peft_type", "task_type", "base_model_name_or_path"):
        if not isinstance(raw.get(key) or "", str):
            raise RunError(f"The file {str(path)!r} is damaged: {key} has an invalid value.")
    kind, task = str(raw.get("peft_type")), raw.get("task_type")
    made = Adapter(folder, name, raw)
    if _NO_WEIGHTS.fullmatch(kind):
        raise made.refused(f"adapters of the kind {excerpt(kind)} do not change weights")
    if task not in (None, "", "CAUSAL_LM"):
        raise made.refused(f"it was trained for another task ({excerpt(task)})")
    return made
