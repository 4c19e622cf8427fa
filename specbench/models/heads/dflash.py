"""DFlash, DFlash 2 and DSpark, as their authors and ``speculators`` write them."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta
from torch import nn

from specbench.backends.torch.block_heads import (
    BlockScorer,
    BlockShape,
    DFlash2Head,
    DFlashHead,
    DSparkHead,
    MarkovType,
)
from specbench.backends.torch.heads import EagleShape
from specbench.base.record import Count
from specbench.models.head_files import HeadFiles
from specbench.models.heads.llama import register

Factor = Annotated[float, Meta(gt=0, lt=1e300)]


def block_shape(
    files: HeadFiles, *, anchored: bool = False, non_causal: bool = False, **own: Any
) -> BlockShape:
    """Return the structure of a block drafter.

    Args:
        anchored, non_causal: Defaults of the settings ``sample_from_anchor`` and ``sliding_window_non_causal``.
        own: What it has of its own.
    """
    windows = _windows(files)
    non_causal = files.setting("sliding_window_non_causal", bool, non_causal)
    causal = [window is not None and not non_causal for window in windows]
    if (always := files.setting("is_causal", bool | None)) is not None:
        causal = [always] * len(windows)
    block = BlockShape(
        files.number("block_size"),
        files.token("mask_token_id"),
        first=0 if files.setting("sample_from_anchor", bool, anchored) else 1,
        windows=tuple(windows),
        causal=tuple(causal),
        embedding_scale=files.setting("input_embedding_scale", Factor, 1.0),
        logit_scale=files.setting("output_multiplier", Factor, 1.0),
        logit_cap=files.setting("final_logit_softcapping", Factor | None),
        **own,
    )
    if block.drafted < 1:
        raise files.damaged("its block_size is too small")
    return block


def _windows(files: HeadFiles) -> list[int | None]:
    """Return by layer how many positions a token sees; ``None`` for all."""
    given, count = files.layer_settings, files.number("num_hidden_layers", 1)
    kinds, window = given.get("layer_types"), given.get("sliding_window")
    if not isinstance(kinds, list) or not given.get("use_sliding_window", True):
        return [None] * count
    windowed = [each == "sliding_attention" for each in kinds[:count]]
    if any(windowed) and (type(window) is not int or window < 1):
        raise files.damaged("its sliding_window is no whole number above 0")
    return [window if each else None for each in windowed]


def conv_group(files: HeadFiles, hidden: int, default: int = 0) -> int:
    """Return how many channels share a kernel of convolutions; 0 without these."""
    group = int(files.setting("conv_group_size", Count, default))
    if group and hidden % group:
        raise files.damaged(f"its conv_group_size does not divide the hidden size, {hidden}")
    return group


@register("dflash", BlockScorer)
def _dflash(files: HeadFiles, shape: EagleShape) -> nn.Module:
    return DFlashHead(shape, block_shape(files))


@register("dflash2", BlockScorer)
def _dflash2(files: HeadFiles, shape: EagleShape) -> nn.Module:
    if shape.vocab != shape.layer.vocab_size:
        raise files.damaged("its draft_vocab_size is not the target's, as DFlash 2 needs")
    block = block_shape(
        files,
        non_causal="speculators_model_type" in files.settings,
        kernel=files.number("conv_kernel_size", 2),
        group=conv_group(files, shape.layer.hidden_size, 16),
        rank=files.number("selector_rank", 256),
        selected=min(files.number("selector_top_k", 16), shape.vocab),
    )
    return DFlash2Head(shape, block)


@register("dspark", BlockScorer)
def _dspark(files: HeadFiles, shape: EagleShape) -> nn.Module:
    rank = files.setting("markov_rank", Count, 256)
    markov = files.setting("markov_head_type", MarkovType, "vanilla")
    return DSparkHead(shape, block_shape(files, anchored=True, markov=markov if rank else None, rank=rank))
