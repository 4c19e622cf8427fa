"""Block drafters before their weights are loaded: their structure, from the configurations of their tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from specbench.backends.torch.block_heads import BlockShape, DFlash2Head, DFlashHead, DSparkHead, MarkovType
from specbench.base.errors import RunError, UsageError
from specbench.base.record import Count, Record, wrong_field

if TYPE_CHECKING:
    from specbench.backends.torch.heads import EagleShape

BLOCK_KINDS = ("dflash", "dflash2", "dspark")

_HEADS: Mapping[str, type[DFlashHead]] = {"dflash": DFlashHead, "dflash2": DFlash2Head, "dspark": DSparkHead}

_Size = Annotated[int, Meta(ge=1)]
_Factor = Annotated[float, Meta(gt=0, lt=1e300)]


class _Settings(Record):
    """The settings of a block, under the names and with the defaults of their tools."""

    block_size: _Size
    mask_token_id: Count
    projector_type: Any = None
    sample_from_anchor: bool | None = None
    input_embedding_scale: _Factor = 1.0
    output_multiplier: _Factor = 1.0
    final_logit_softcapping: _Factor | None = None
    is_causal: bool | None = None
    sliding_window_non_causal: bool | None = None
    # DSpark
    markov_rank: Count = 256
    markov_head_type: MarkovType = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    # DFlash 2
    conv_group_size: _Size = 16
    conv_kernel_size: _Size = 2
    selector_rank: _Size = 256
    selector_top_k: _Size = 16


def block_head(files: Any, shape: EagleShape) -> DFlashHead:
    """Make a block drafter without weights, of ``HeadFiles``.

    Raises:
        UsageError: It is of a variant that is not supported. RunError: Its configuration is damaged.
    """

    kind, name, layer = files.kind, files.name, files.layer_settings

    def damaged(key: str, why: str) -> RunError:
        return RunError(f"The config.json of {name} is damaged: its {key} {why}.")

    given = {key: value for key in _Settings.__struct_fields__ if (value := files.of_block(key)) is not None}
    try:
        settings = msgspec.convert(given, _Settings)
    except ValueError as error:
        raise damaged(wrong_field(error), "is missing or has an invalid value") from None
    if settings.projector_type not in (None, kind):
        raise UsageError(
            f"The head {name} is of a kind that is not supported: it has projector_type.",
            "Choose another head.",
        )
    if settings.mask_token_id >= shape.layer.vocab_size:
        raise damaged("mask_token_id", "is no token")
    # By layer how many positions a token sees; those with a window may see only what is before them in the block.
    kinds, window = layer.get("layer_types"), layer.get("sliding_window")
    sliding = [False] * shape.layers
    if isinstance(kinds, list) and layer.get("use_sliding_window", True):
        sliding = [each == "sliding_attention" for each in kinds[: shape.layers]]
    if any(sliding) and (type(window) is not int or window < 1):
        raise damaged("sliding_window", "is no whole number above 0")
    non_causal = settings.sliding_window_non_causal
    if non_causal is None:
        non_causal = "speculators_model_type" in files.settings and kind == "dflash2"
    causal = [each and not non_causal for each in sliding]
    if settings.is_causal is not None:
        causal = [settings.is_causal] * shape.layers
    anchored = settings.sample_from_anchor
    common: dict[str, Any] = {
        "block": settings.block_size,
        "mask": settings.mask_token_id,
        "first": 0 if (kind == "dspark" if anchored is None else anchored) else 1,
        "windows": tuple(window if each else None for each in sliding),
        "causal": tuple(causal),
        "embedding_scale": settings.input_embedding_scale,
        "logit_scale": settings.output_multiplier,
        "logit_cap": settings.final_logit_softcapping,
    }
    if kind == "dspark":
        confidence, rank = settings.enable_confidence_head, settings.markov_rank
        reads = confidence and settings.confidence_head_with_markov
        if reads and not rank:
            raise damaged("confidence_head_with_markov", "needs a markov_rank above 0")
        common |= {"markov": settings.markov_head_type if rank else None, "rank": rank}
        common |= {"confidence": confidence, "confidence_reads_token": reads}
    if kind == "dflash2":
        group = settings.conv_group_size
        if shape.layer.hidden_size % group:
            raise damaged("conv_group_size", f"does not divide the hidden size, {shape.layer.hidden_size}")
        if shape.vocab != shape.layer.vocab_size:
            raise damaged("draft_vocab_size", "is not the target's, as DFlash 2 needs")
        common |= {"kernel": settings.conv_kernel_size, "group": group, "rank": settings.selector_rank}
        common |= {"selected": min(settings.selector_top_k, shape.vocab)}
    block = BlockShape(**common)
    if block.drafted < 1:
        raise damaged("block_size", "is too small")
    return _HEADS[kind](shape, block)
