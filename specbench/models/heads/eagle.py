"""EAGLE-3 as its authors, AngelSlim, SpecForge, ``speculators`` and vLLM write it, P-EAGLE, and EAGLE-1 (and 2)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedConfig

from specbench.backends.torch.head_scorers import EagleScorer, ParallelScorer
from specbench.backends.torch.heads import Eagle1Head, EagleHead, EagleShape, ParallelEagleHead
from specbench.models.heads.base import HeadFiles, Tensors, usual
from specbench.models.heads.llama import check_layers, register


def _check(files: HeadFiles, target: PreTrainedConfig) -> None:
    """Refuse heads that differ from EAGLE-3's."""
    last = files.part("eagle_config").get("use_aux_hidden_state") is False
    check_layers(files, target, odd="it uses only the last hidden state" if last else None)


def _layers(files: HeadFiles, total: int) -> Sequence[int]:
    """Return the target's layers whose inputs are read."""
    named = _named_layers(files)
    return files.within([2, total // 2, total - 3] if named is None else named, total - 1)


def _named_layers(files: HeadFiles) -> list[int] | None:
    """Return the layers that the configuration names; in a section of its own it names them by their outputs."""
    key = "eagle_aux_hidden_state_layer_ids"
    shift = 1 if files.settings.get(key) is None else 0
    named = files.setting(key, list[int] | None, files.part("eagle_config").get(key))
    return named and [each + shift for each in named]


_OF_EAGLE3 = {"check": _check, "layers": _layers}


@register(
    "eagle3",
    EagleScorer,
    names=("eagle3",),
    claims=lambda files, named: named is None and "draft_vocab_size" in files.settings,
    **_OF_EAGLE3,
)
def _eagle3(files: HeadFiles, shape: EagleShape) -> nn.Module:
    return EagleHead(shape)


# -- P-EAGLE ----------------------------------------------------------------------------------------

_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Names that tools give the token it reads in place of one to be guessed."""

_AHEAD = 8
"""Tokens that it drafts in a forward pass unless its configuration says: what its authors train it for."""


def _convert(files: HeadFiles, stored: Tensors) -> tuple[Tensors, torch.Tensor | None]:
    tensors, target_tokens = usual(files, stored)
    tensors |= {name: tensors[name].flatten() for name in tensors.keys() & {"mask_hidden"}}
    return tensors, target_tokens


@register(
    "peagle",
    ParallelScorer,
    names=("peagle",),
    claims=lambda files, named: named == "eagle3" and any(key in files.settings for key in _MASKS),
    convert=_convert,
    **_OF_EAGLE3,
)
def _peagle(files: HeadFiles, shape: EagleShape) -> nn.Module:
    mask = files.token(next((key for key in _MASKS if key in files.settings), _MASKS[0]))
    methods = files.part("speculators_config").get("proposal_methods") or [{}]
    ahead = methods[0].get("speculative_tokens", _AHEAD) if isinstance(methods[0], dict) else None
    if type(ahead) is not int or ahead < 1:
        raise files.damaged("its speculative_tokens is no whole number above 0")
    return ParallelEagleHead(shape, ahead, mask)


# -- EAGLE-1 ----------------------------------------------------------------------------------------


def _claims_llama(files: HeadFiles, named: str | None) -> bool:
    """Return whether a configuration is that of its authors, which is a Llama's of one layer.

    It is if it has an option that only heads have, or if the names of the weights say so; of weights that are pickled
    or not fetched yet, if there is no tokenizer.
    """
    settings = files.settings
    llama = settings.get("model_type") == "llama" and settings.get("num_hidden_layers") == 1
    if named is not None or not llama or "draft_vocab_size" in settings:
        return False
    if "bias" in settings:
        return True
    if files.hub is not None:
        return not any(files.folder.glob("tokenizer*"))
    with suppress(OSError, SafetensorError), safe_open(files.folder / "model.safetensors", "pt") as file:
        return "fc.weight" in file.keys()  # noqa: SIM118 - it is no dict
    return (files.folder / "pytorch_model.bin").is_file() and not any(files.folder.glob("tokenizer*"))


def _check_one(files: HeadFiles, target: PreTrainedConfig) -> None:
    layers = files.number("num_hidden_layers", 1)
    check_layers(files, target, odd=None if layers == 1 else f"it has {layers} layers")


@register("eagle-1", EagleScorer, names=("eagle",), claims=_claims_llama, check=_check_one)
def _eagle1(files: HeadFiles, shape: EagleShape) -> nn.Module:
    return Eagle1Head(shape)
