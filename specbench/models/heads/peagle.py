"""P-EAGLE, as ``speculators`` and vLLM write it.

mask_hidden    [states·width], in any form: what masks have in place of states
...            of EAGLE-3, see ``eagle.py``
"""

from __future__ import annotations

import torch
from torch import nn

from specbench.backends.torch.head_scorers import ParallelScorer
from specbench.backends.torch.heads import EagleShape, ParallelEagleHead
from specbench.models.heads.base import HeadFiles, Tensors, usual
from specbench.models.heads.eagle import assumed, check, layers
from specbench.models.heads.llama import register

_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Names that tools give the token it reads in place of one to be guessed."""

_AHEAD = 8
"""Tokens that it drafts in a forward pass unless its configuration says: what its authors train it for."""


def _claims(files: HeadFiles, named: str | None) -> bool:
    return named == "eagle3" and any(key in files.settings for key in _MASKS)


def _convert(files: HeadFiles, stored: Tensors) -> tuple[Tensors, torch.Tensor | None]:
    tensors, target_tokens = usual(files, stored)
    tensors |= {name: tensors[name].flatten() for name in tensors.keys() & {"mask_hidden"}}
    return tensors, target_tokens


@register(
    "peagle",
    ParallelScorer,
    names=("peagle",),
    claims=_claims,
    check=check,
    layers=layers,
    assumed=assumed,
    convert=_convert,
)
def _peagle(files: HeadFiles, shape: EagleShape) -> nn.Module:
    mask = files.token(next((key for key in _MASKS if key in files.settings), _MASKS[0]))
    methods = files.part("speculators_config").get("proposal_methods") or [{}]
    ahead = methods[0].get("speculative_tokens", _AHEAD) if isinstance(methods[0], dict) else None
    if type(ahead) is not int or ahead < 1:
        raise files.damaged("its speculative_tokens is no whole number above 0")
    return ParallelEagleHead(shape, ahead, mask)
