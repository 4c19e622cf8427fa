"""EAGLE-3 as its authors, AngelSlim, SpecForge, ``speculators`` and vLLM write it, P-EAGLE, and EAGLE-1 (and 2)."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig

from specbench.backends.torch.head_scorers import EagleScorer, ParallelScorer
from specbench.backends.torch.heads import Eagle1Head, EagleHead, EagleShape, ParallelEagleHead
from specbench.models.head_files import EAGLE_MASKS, HeadFiles
from specbench.models.heads.base import Tensors, usual
from specbench.models.heads.llama import check_layers, register


def _check(files: HeadFiles, target: PreTrainedConfig) -> None:
    """Refuse heads that differ from EAGLE-3's."""
    last = files.part("eagle_config").get("use_aux_hidden_state") is False
    check_layers(files, target, odd="it uses only the last hidden state" if last else None)


@register("eagle3", EagleScorer, check=_check)
def _eagle3(files: HeadFiles, shape: EagleShape) -> nn.Module:
    return EagleHead(shape)


# -- P-EAGLE ----------------------------------------------------------------------------------------

_AHEAD = 8
"""Tokens that it drafts in a forward pass unless its configuration says: what its authors train it for."""


def _convert(files: HeadFiles, stored: Tensors) -> tuple[Tensors, torch.Tensor | None]:
    tensors, target_tokens = usual(files, stored)
    tensors |= {name: tensors[name].flatten() for name in tensors.keys() & {"mask_hidden"}}
    return tensors, target_tokens


@register("peagle", ParallelScorer, convert=_convert, check=_check)
def _peagle(files: HeadFiles, shape: EagleShape) -> nn.Module:
    mask = files.token(next((key for key in EAGLE_MASKS if key in files.settings), EAGLE_MASKS[0]))
    methods = files.part("speculators_config").get("proposal_methods") or [{}]
    ahead = methods[0].get("speculative_tokens", _AHEAD) if isinstance(methods[0], dict) else None
    if type(ahead) is not int or ahead < 1:
        raise files.damaged("its speculative_tokens is no whole number above 0")
    return ParallelEagleHead(shape, ahead, mask)


# -- EAGLE-1 ----------------------------------------------------------------------------------------


def _check_one(files: HeadFiles, target: PreTrainedConfig) -> None:
    layers = files.number("num_hidden_layers", 1)
    check_layers(files, target, odd=None if layers == 1 else f"it has {layers} layers")


@register("eagle-1", EagleScorer, check=_check_one)
def _eagle1(files: HeadFiles, shape: EagleShape) -> nn.Module:
    return Eagle1Head(shape)
