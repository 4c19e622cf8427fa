"""LiLiCorr, as SGLang and vLLM read it; the latter has other names for ``feature_mlp`` and ``mlp``.

lilicorr.{token,pass_hidden,context}_proj.weight, .bias       [size, hidden]; no token_proj if these are equal
lilicorr.feature_mlp.{0,1,3}.weight, .bias                    [5], [size, 5], [size, size]
lilicorr.slot_embedding                                       [1, 1, drafted, 1, size]
lilicorr.rank_embedding                                       [1, 1, 1, candidates, size]
lilicorr.relative_slot_bias, .same_slot_bias                  [heads, 2·block - 1], [heads]
lilicorr.layers.I.attn.in_proj_weight, .in_proj_bias          [3·size, size], [3·size]
lilicorr.layers.I.{attn.out_proj,mlp.0,mlp.2}.weight, .bias   [size, size], [inner, size], [size, inner]
lilicorr.layers.I.{attn,mlp}_norm.weight                      [size]
lilicorr.{output,anchor}_norm.weight                          [size]
lilicorr.factor_input_proj.weight, .bias                      [size, 3·size]
lilicorr.{out,in,anchor_out}_head.weight, .bias               [factors, size]
...                                                           of DFlash; with ``conv_kernel_size`` also convolutions
"""

from __future__ import annotations

import torch
from torch import nn

from specbench.backends.torch.block_heads import LatticeShape, LiLiCorrHead
from specbench.backends.torch.heads import EagleShape
from specbench.base.record import Count
from specbench.models.heads.base import HeadFiles, Tensors, unsupported, usual
from specbench.models.heads.dflash import Factor, block_shape, conv_group, register

_OF_VLLM = {
    "feature_norm.": "feature_mlp.0.",
    "feature_mlp.up_proj.": "feature_mlp.1.",
    "feature_mlp.down_proj.": "feature_mlp.3.",
    ".mlp.up_proj.": ".mlp.0.",
    ".mlp.down_proj.": ".mlp.2.",
}
"""Parts of vLLM's names for which SGLang and the training have others."""


def _convert(files: HeadFiles, stored: Tensors) -> tuple[Tensors, torch.Tensor | None]:
    tensors, target_tokens = usual(files, stored)
    for theirs, ours in _OF_VLLM.items():
        own = [name for name in tensors if name.startswith("lilicorr.") and theirs in name]
        tensors |= {name.replace(theirs, ours): tensors.pop(name) for name in own}
    return tensors, target_tokens


@register("lilicorr", convert=_convert)
def _lilicorr(files: HeadFiles, shape: EagleShape) -> nn.Module:
    wide = shape.layer.hidden_size
    if shape.embeds or shape.vocab != shape.layer.vocab_size:
        raise unsupported(files.name, "its candidates are not from the target's vocabulary and embeddings")
    size = files.setting("lilicorr_hidden_size", Count) or wide
    lattice = LatticeShape(
        candidates=min(files.number("lilicorr_candidate_topk"), shape.vocab),
        hidden=size,
        layers=files.number("lilicorr_num_layers"),
        heads=files.number("lilicorr_num_heads"),
        inner=int(size * files.setting("lilicorr_mlp_ratio", Factor)),
        factors=files.number("lilicorr_factor_dim"),
        epsilon=files.setting("lilicorr_vector_eps", Factor),
        scale=files.setting("lilicorr_logit_scale", Factor),
    )
    if size % lattice.heads:
        raise files.damaged(f"its lilicorr_num_heads does not divide the size {size}")
    block = block_shape(
        files, kernel=files.setting("conv_kernel_size", Count, 0), group=conv_group(files, wide)
    )
    return LiLiCorrHead(shape, block, lattice)
