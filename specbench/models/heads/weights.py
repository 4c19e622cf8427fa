"""Weights of trained heads, under one naming scheme.

Supported formats, by who writes them. EAGLE-3: its authors, AngelSlim and SpecForge (``midlayer.*``), ``speculators``
and vLLM (``layers.0.*``). P-EAGLE: ``speculators`` and vLLM. EAGLE-1 (and 2): its authors, vLLM and ``speculators``.
DFlash: its authors and ``speculators``. Medusa: its authors and vLLM. The configuration determines the tensors that a
head must have, with their shapes; all others are refused.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specbench.backends.torch.heads import MedusaHeads
from specbench.base.errors import RunError, UsageError
from specbench.base.textsafe import excerpt
from specbench.models.checkpoints import check_memory, fingerprint, weight_files
from specbench.models.heads.base import HeadFiles
from specbench.models.training_metadata import PACKED_WEIGHTS, check_weights

_UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
"""Tensors that training leaves in a head's file."""

_FETCH_AGAIN = "Fetch it again."

_MOST_UNPACKED = 8
"""Bytes for each packed one, at most: Huffman codes have at least one bit."""


@dataclass(frozen=True, eq=False)
class TrainedHead:
    """A head's weights.

    Attributes:
        tensors: Its tensors, by their names in the module.
        target_tokens: The target's token for each of the head's logits; ``None`` if both count tokens in the same way.
    """

    files: HeadFiles
    tensors: Mapping[str, torch.Tensor]
    target_tokens: torch.Tensor | None
    fingerprint: str

    @property
    def name(self) -> str:
        return self.files.name

    def with_layers(self, target: PreTrainedConfig, own_head: Callable[[], torch.Tensor]) -> Any:
        """Make the module of a head of decoder layers.

        Args:
            own_head: Returns the weight of the target's output head, [vocab, width]; used if the file has none.

        Raises:
            UsageError: Tensors are missing, unexpected or of another shape.
        """
        tensors = dict(self.tensors)
        head: Any = self.files.with_layers([*tensors], len(self.files.layers(target)))
        head.rotary_emb = LlamaRotaryEmbedding(head.shape.layer)
        if "lm_head.weight" not in tensors:
            tensors["lm_head.weight"] = self._rows(own_head(), head.shape.layer.vocab_size)
        self._fill(head, tensors)
        return head

    def medusa(self, own_head: Callable[[], torch.Tensor]) -> MedusaHeads:
        """Make the module of Medusa heads; see ``with_layers``."""
        tensors = dict(self.tensors)
        if self.files.settings.get("original_lm_head") and "lm_heads.0.weight" not in tensors:
            tensors["lm_heads.0.weight"] = self._rows(own_head(), self.files.number("vocab_size"))
        heads = self.files.medusa(tensors)
        self._fill(heads, tensors)
        return heads

    def _rows(self, head: torch.Tensor, vocab: int) -> torch.Tensor:
        """Return the rows of the target's output head for the tokens that this head drafts."""
        return (
            head[:vocab] if self.target_tokens is None else head[:vocab][self.target_tokens.to(head.device)]
        )

    def _fill(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        self._check(module.state_dict(), tensors)
        module.load_state_dict(dict(tensors), assign=True)
        module.eval().requires_grad_(False)

    def _check(self, expected: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        other = "Fetch it again, or correct its config.json."
        if missing := [name for name in expected if name not in tensors]:
            raise UsageError(f"The head {self.name} lacks the tensor {missing[0]}.", other)
        if extra := [name for name in tensors if name not in expected]:
            raise UsageError(
                f"The head {self.name} has a tensor that its config.json does not describe: {extra[0]}.",
                other,
            )
        for name, wanted in expected.items():
            if tensors[name].shape != wanted.shape:
                raise UsageError(
                    f"The tensor {name} of the head {self.name} is {shape_text(tensors[name])}, but its config.json"
                    f" says {shape_text(wanted)}.",
                    other,
                )


class AssistantHead(TrainedHead):
    """The weights of Gemma 4's assistant."""

    def with_layers(self, target: PreTrainedConfig, own_head: Callable[[], torch.Tensor]) -> Any:  # noqa: ARG002
        """Make its module; see ``TrainedHead.with_layers``. It has an output head of its own."""
        module = self.files.with_layers()
        order = self.tensors.get("masked_embedding.token_ordering")
        if order is not None and not torch.equal(order.flatten().sort().values, torch.arange(order.numel())):
            raise UsageError(
                f"The tensor token_ordering of the head {self.name} is no order of all tokens.", _FETCH_AGAIN
            )
        self._fill(module, self.tensors)
        return module


def shape_text(tensor: torch.Tensor) -> str:
    """Return a tensor's shape as text, such as 2×3."""
    return "×".join(map(str, tensor.shape))


def load_head(files: HeadFiles, *, allow_pickle: bool = False) -> TrainedHead:
    """Read a head's weights.

    Raises:
        UsageError: The weights are pickled, lack scales, or have an invalid draft vocabulary.
        RunError: The weights are missing or damaged, differ from the head's ``training.json``, or do not fit into
        memory.
    """
    if files.hub is not None:
        files.hub.fetch_weights(PreTrainedConfig(), allow_pickle=allow_pickle, check_size=lambda _: None)
    check_weights(files.folder, files.name)
    paths = _weight_files(files, allow_pickle)
    sizes = (path.stat().st_size * (_MOST_UNPACKED if path.suffix == ".gz" else 1) for path in paths)
    check_memory(2 * sum(sizes), name=files.name)
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        found |= _read(path, files.name)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in widened(found, files.name).items():
        own = _medusa_name(name) if files.kind == "medusa" else _eagle_name(name)
        if own not in _UNUSED:
            tensors[own] = tensor.flatten() if own == "mask_hidden" else tensor
    if files.kind == "assistant" and (tied := tensors.pop("embed_tokens.weight", None)) is not None:
        tensors.setdefault("lm_head.weight", tied)
    tokens_of = _medusa_tokens if files.kind == "medusa" else draft_tokens
    made = AssistantHead if files.kind == "assistant" else TrainedHead
    return made(
        files,
        tensors,
        tokens_of(files, tensors),
        fingerprint(f"{files.kind} {files.settings}", tensors.items()),
    )


def widened(tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """Convert int8 weights to float32; the tensor ``X_scale`` has the scale of each row of the weight X."""
    wide = dict(tensors)
    for key, tensor in tensors.items():
        if tensor.dtype != torch.int8:
            continue
        scales = wide.pop(f"{key}_scale", None)
        if scales is None or scales.shape != tensor.shape[:1] or not scales.is_floating_point():
            raise UsageError(f"The head {name} lacks the scales of {key}.", _FETCH_AGAIN)
        wide[key] = tensor.float() * scales.float()[:, None]
    return wide


def _weight_files(files: HeadFiles, allow_pickle: bool) -> list[Path]:
    """Return the files of the weights; packaged heads and Medusa's authors use other file names than the usual ones."""
    packed = files.folder / PACKED_WEIGHTS
    if packed.is_file():
        return [packed]
    named = files.folder / "medusa_lm_head.safetensors"
    if files.kind == "medusa" and named.is_file():
        return [named]
    pickled = files.folder / "medusa_lm_head.pt"
    if files.kind == "medusa" and pickled.is_file() and allow_pickle:
        return [pickled]
    return weight_files(files.folder, files.name, PreTrainedConfig(), allow_pickle)


def _read(path: Path, name: str) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                content = file.read(_MOST_UNPACKED * path.stat().st_size)
                if file.read(1):
                    raise ValueError("they unpack to too much")
            return load(content)
        read = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(read, dict) or not all(isinstance(each, torch.Tensor) for each in read.values()):
            raise ValueError("it has no named tensors")
    except Exception as error:  # what unpicklers and parsers raise
        reason = excerpt(error).rstrip(".")
        raise RunError(f"The weights of {name} in {path.name!r} are damaged: {reason}.") from error
    return read


def _eagle_name(name: str) -> str:
    name = re.sub(r"^fusion_fc\.", "fc.", name.removeprefix("model."))
    return re.sub(r"^(midlayer|transformer)\.", "layers.0.", name)


def _medusa_name(name: str) -> str:
    """Map a tensor name of Medusa's authors: ``i.j.linear`` are the blocks of head i, and ``i.j`` is its projection."""
    name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    if name == "lm_head.weight":
        return "lm_heads.0.weight"
    name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
    return re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)


def draft_tokens(files: HeadFiles, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Remove EAGLE's maps of the draft vocabulary from the tensors, and return the target's tokens.

    The target's token of draft token d is d + d2t[d]; the mask t2d marks all of these tokens.
    """
    steps, marks = tensors.pop("d2t", None), tensors.pop("t2d", None)
    target_tokens = _target_tokens(
        files, "draft_vocab_size", "d2t", steps, torch.arange(0 if steps is None else len(steps))
    )
    marked = target_tokens if marks is None else marks.flatten().nonzero()[:, 0]
    if target_tokens is not None and not torch.equal(marked.sort().values, target_tokens.sort().values):  # type: ignore[union-attr]
        raise UsageError(
            f"The maps t2d and d2t of the head {files.name} contradict each other.", _FETCH_AGAIN
        )
    return target_tokens


def _medusa_tokens(files: HeadFiles, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Remove the map of the draft vocabulary from the tensors, and trim projections to it if they have all tokens."""
    target_tokens = _target_tokens(
        files, "truncated_vocab_size", "token_map", tensors.pop("token_map", None), torch.tensor(0)
    )
    if target_tokens is not None:
        for name in [name for name in tensors if name.startswith("lm_heads.")]:
            if len(tensors[name]) > len(target_tokens):
                tensors[name] = tensors[name][target_tokens]
    return target_tokens


def _target_tokens(
    files: HeadFiles, key: str, name: str, found: torch.Tensor | None, base: torch.Tensor
) -> torch.Tensor | None:
    """Return the target tokens of a draft vocabulary, ``base`` + ``found``; ``None`` without one.

    Args:
        key: Setting with the size of the draft vocabulary.
        name, found: The map's name, and the map if there is one.

    Raises:
        UsageError: The map is missing, maps to a token that does not exist, or maps to a token twice.
    """
    if found is None:
        if files.number(key, 1) != files.number("vocab_size", 1) and key in files.settings:
            raise UsageError(
                f"The head {files.name} drafts {files.settings[key]} tokens, but lacks the tensor {name} that lists"
                f" them.",
                _FETCH_AGAIN,
            )
        return None
    vocab = files.number("vocab_size")
    if found.shape != (files.number(key, vocab),) or found.is_floating_point():
        raise UsageError(
            f"The tensor {name} of the head {files.name} does not describe its draft vocabulary.",
            _FETCH_AGAIN,
        )
    target_tokens = base + found.long()
    if (
        len(target_tokens.unique()) < len(target_tokens)
        or int(target_tokens.min()) < 0
        or int(target_tokens.max()) >= vocab
    ):
        raise UsageError(
            f"The head {files.name} drafts tokens beyond the {vocab} of its target, or some of them twice.",
            _FETCH_AGAIN,
        )
    return target_tokens
