"""EAGLE-3 as its authors, AngelSlim, SpecForge, ``speculators`` and vLLM write it, P-EAGLE, and EAGLE-1 (and 2)."""

from __future__ import annotations

import torch
from torch import nn

from specbench.backends.torch.head_scorers import EagleScorer, ParallelScorer
from specbench.backends.torch.heads import Eagle1Head, EagleHead, EagleShape, ParallelEagleHead
from specbench.models.head_files import EAGLE_MASKS, HeadFiles
from specbench.models.heads.base import Tensors, usual
from specbench.models.heads.llama import register


@register("eagle3", EagleScorer)
def _eagle3(files: HeadFiles, shape: EagleShape) -> nn.Module:
    return EagleHead(shape)


# -- P-EAGLE ----------------------------------------------------------------------------------------

_AHEAD = 8
"""Tokens that it drafts in a forward pass unless its configuration says: what its authors train it for."""


def _convert(files: HeadFiles, stored: Tensors) -> tuple[Tensors, torch.Tensor | None]:
    tensors, target_tokens = usual(files, stored)
    tensors |= {name: tensors[name].flatten() for name in tensors.keys() & {"mask_hidden"}}
    return tensors, target_tokens


@register("peagle", ParallelScorer, convert=_convert)
def _peagle(files: HeadFiles, shape: EagleShape) -> nn.Module:
    mask = files.token(next((key for key in EAGLE_MASKS if key in files.settings), EAGLE_MASKS[0]))
    ahead = _AHEAD if files.proposed is None else files.proposed
    if type(ahead) is not int or ahead < 1:
        raise files.damaged("its speculative_tokens is no whole number above 0")
    return ParallelEagleHead(shape, ahead, mask)


# -- EAGLE-1 ----------------------------------------------------------------------------------------


@register("eagle-1", EagleScorer)
def _eagle1(files: HeadFiles, shape: EagleShape) -> nn.Module:
    return Eagle1Head(shape)
