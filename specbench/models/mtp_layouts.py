"""The layouts in which checkpoints store MTP layers, recognized by the names of their tensors.

An MTP (multi-token prediction) layer normalizes a token's embedding and the target's hidden state at the position
before it, joins both by a linear layer, and runs a decoder layer of the target's own class. A norm may follow, and then
the target's output head. The names are those that the checkpoints of each family have and vLLM reads.

Only ``config.json`` and the headers of safetensors files are read here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specbench.models.files import Header, read_headers, read_settings
from specbench.models.find import find_model
from specbench.specs.models import ModelSpec

BLOCK = "layers.0."
"""Prefix of the decoder layer's tensors in ``MtpLayer``."""

JOINED = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
"""Tensors that every MTP layer has, by their names in ``MtpLayer``."""

FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Layout:
    """A way to name the tensors of MTP layers.

    Attributes:
        families: Models whose checkpoints use it.
        pattern: Matches a tensor's name, with the groups ``layer`` (a number), ``part`` and maybe ``rest``.
        parts: Beginnings of a name without the layer (``part`` + ``rest``), and what replaces them; ``None`` for
            tensors that are left out, since they are the target's. All others are the decoder layer's.
        appended: Whether the layers are numbered after those of the target.
        hidden_first: Whether the hidden state comes before the embedding in the input of the linear layer.
    """

    families: str
    pattern: re.Pattern[str]
    parts: Mapping[str, str | None]
    appended: bool = False
    hidden_first: bool = False

    def own_name(self, name: str, target_layers: int) -> str | None:
        """Return a tensor's name in ``MtpLayer``; ``None`` if it is not one of the first MTP layer."""
        found = self.pattern.fullmatch(name)
        if found is None:
            return None
        groups = found.groupdict()
        layer, part = int(groups["layer"] or 0), groups["part"] + (groups.get("rest") or "")
        if layer != (target_layers if self.appended else 0):
            return None
        for beginning, own in self.parts.items():
            if part.startswith(beginning):
                return None if own is None else own + part.removeprefix(beginning)
        return BLOCK + part


_SAME = {part: part for part in ("enorm.", "hnorm.", "eh_proj.")}
_LAYERNORMS = {
    "token_layernorm.": "enorm.",
    "hidden_layernorm.": "hnorm.",
    "input_proj.": "eh_proj.",
    "final_layernorm.": "norm.",
}

_DEEPSEEK = Layout(
    "DeepSeek-V3, GLM-4.5",
    re.compile(r"(?:language_model\.)?(?:model\.)?(?:language_model\.)?layers\.(?P<layer>\d+)\.(?P<part>.+)"),
    {
        **_SAME,
        "shared_head.norm.": "norm.",
        "shared_head.head.": "lm_head.",
        "embed_tokens.": None,
    },
    appended=True,
)
_QWEN = Layout(
    "Qwen3-Next, Qwen3.5, Mellum",
    re.compile(r"mtp\.(?:layers\.(?P<layer>\d+)\.)?(?P<part>.+)"),
    {
        "fc.": "eh_proj.",
        "pre_fc_norm_embedding.": "enorm.",
        "pre_fc_norm_hidden.": "hnorm.",
        "norm.": "norm.",
        "embed_tokens.": None,
    },
)
LAYOUTS = (
    _DEEPSEEK,
    _QWEN,
    Layout(
        "MiMo", re.compile(r"model\.mtp_layers\.(?P<layer>\d+)\.(?P<part>.+)"), _LAYERNORMS, hidden_first=True
    ),
    Layout(
        "Ernie 4.5",
        re.compile(r"(?:model|ernie)\.(?P<part>mtp_\w+\.)(?P<layer>\d+)\.(?P<rest>.+)"),
        {
            "mtp_emb_norm.": "enorm.",
            "mtp_hidden_norm.": "hnorm.",
            "mtp_linear_proj.": "eh_proj.",
            "mtp_block.": BLOCK,
        },
    ),
    Layout(
        "speculators",
        re.compile(r"(?:mtp_layers\.(?P<layer>\d+)\.|(?=lm_head\.))(?P<part>.+)"),
        {**_LAYERNORMS, "lm_head.": "lm_head.", "embed_tokens.": None},
    ),
)


@dataclass(frozen=True)
class MtpTensors:
    """The tensors of the first MTP layer in a folder, the only one that drafts.

    Attributes:
        layout: How they are named.
        places: The name of each tensor in ``MtpLayer``, by its name in the file.
        files: The file of each tensor.
        weights: Number of their weights.
        plain: Whether none of them is quantized.
    """

    layout: Layout
    places: Mapping[str, str]
    files: Mapping[str, Path]
    weights: int
    plain: bool


def has_mtp_layers(target: ModelSpec) -> bool:
    """Return whether a target's checkpoint has MTP layers that draft for it, without loading or fetching weights.

    Of a hub model that is not in the cache the headers are fetched. False if it cannot be told: loading the target
    reports why.
    """
    if target.kind not in ("folder", "hub"):
        return False
    try:
        files = find_model(target)
        config = read_settings(files.folder, target.name)
        text = config.get("text_config") or config
        layers, quantized = text["num_hidden_layers"], "quantization_config" in {**config, **text}
        found = mtp_tensors_in(files.headers(), layers)
    except Exception:  # what networks, damaged files and odd configurations raise
        return False
    return found is not None and (found.plain or quantized)


def find_mtp_tensors(folder: Path, target_layers: int) -> MtpTensors | None:
    """Return the tensors of MTP layers in the safetensors files of a folder; ``None`` if there are none.

    All files of the folder itself are searched, since some checkpoints have the layers in a file that their index does
    not list. Files that are no safetensors files are skipped: loading the model reports them.
    """
    return mtp_tensors_in(read_headers(folder), target_layers)


def mtp_tensors_in(headers: Mapping[str, Header], target_layers: int) -> MtpTensors | None:
    """Return the tensors of MTP layers among those of a checkpoint; ``None`` if there are none."""
    for layout in LAYOUTS:
        named = ((name, layout.own_name(name, target_layers)) for name in headers)
        places = {name: own for name, own in named if own is not None}
        if {*JOINED} <= {*places.values()}:
            return MtpTensors(
                layout,
                places,
                files={name: headers[name].path for name in places},
                weights=sum(math.prod(headers[name].shape) for name in places),
                plain=all(headers[name].dtype in FLOATS for name in places),
            )
    return None
