"""Block drafters before their weights are loaded: their structure, from the configurations of their tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from specbench.backends.torch.block_heads import MARKOV_TYPES, BlockShape, DFlash2Head, DFlashHead, DSparkHead
from specbench.base.errors import RunError, UsageError

if TYPE_CHECKING:
    from specbench.backends.torch.heads import EagleShape

BLOCK_KINDS = ("dflash", "dflash2", "dspark")

_HEADS: Mapping[str, type[DFlashHead]] = {"dflash": DFlashHead, "dflash2": DFlash2Head, "dspark": DSparkHead}


def block_head(
    kind: str, settings: BlockSettings, layer: Mapping[str, Any], shape: EagleShape, *, speculators: bool
) -> DFlashHead:
    """Make a block drafter without weights.

    Args:
        kind: One of ``BLOCK_KINDS``.
        settings: The settings of its block.
        layer: Those of its decoder layers.
        shape: The structure of these layers.
        speculators: Whether the configuration is of ``speculators``.

    Raises:
        UsageError: It is of a variant that is not supported. RunError: Its configuration is damaged.
    """
    projector = settings.find("projector_type")
    if projector not in (None, kind):
        raise UsageError(
            f"The head {settings.name} is of a kind that is not supported: it has projector_type.",
            "Choose another head.",
        )
    mask = settings.find("mask_token_id")
    if type(mask) is not int or not 0 <= mask < shape.layer.vocab_size:
        raise settings.damaged("mask_token_id", "is no token")
    windows, causal = _attention(settings, layer, shape.layers, non_causal=speculators and kind == "dflash2")
    common: dict[str, Any] = {
        "block": settings.number("block_size"),
        "mask": mask,
        "first": 0 if settings.flag("sample_from_anchor", kind == "dspark") else 1,
        "windows": windows,
        "causal": causal,
        "embedding_scale": settings.factor("input_embedding_scale") or 1.0,
        "logit_scale": settings.factor("output_multiplier") or 1.0,
        "logit_cap": settings.factor("final_logit_softcapping"),
    }
    if kind == "dspark":
        common |= _markov(settings)
    if kind == "dflash2":
        common |= _selector(settings, shape)
    block = BlockShape(**common)
    if block.drafted < 1:
        raise settings.damaged("block_size", "is too small")
    return _HEADS[kind](shape, block)


class BlockSettings:
    """The settings of a block drafter, which may be in a section of its configuration."""

    def __init__(self, name: str, find: Callable[[str], Any]) -> None:
        self.name, self.find = name, find

    def damaged(self, key: str, why: str) -> RunError:
        return RunError(f"The config.json of {self.name} is damaged: its {key} {why}.")

    def number(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.find(key)
        value = default if value is None else value
        if type(value) is not int or value < least:
            raise self.damaged(key, f"is no whole number of at least {least}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.find(key)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.damaged(key, "is neither true nor false")
        return value

    def factor(self, key: str) -> float | None:
        value = self.find(key)
        if value is not None and (type(value) not in (int, float) or not 0 < value < float("inf")):
            raise self.damaged(key, "is no number above 0")
        return None if value is None else float(value)

    def text(self, key: str, default: str) -> str:
        value = self.find(key)
        return default if value is None else str(value)


def _markov(settings: BlockSettings) -> dict[str, Any]:
    rank = settings.number("markov_rank", 256, least=0)
    kind = settings.text("markov_head_type", "vanilla")
    if kind not in MARKOV_TYPES:
        raise settings.damaged("markov_head_type", f"is none of {', '.join(MARKOV_TYPES)}")
    confidence = settings.flag("enable_confidence_head", True)
    reads = confidence and settings.flag("confidence_head_with_markov", True)
    if reads and not rank:
        raise settings.damaged("confidence_head_with_markov", "needs a markov_rank above 0")
    return {
        "markov": kind if rank else None,
        "rank": rank,
        "confidence": confidence,
        "confidence_reads_token": reads,
    }


def _selector(settings: BlockSettings, shape: EagleShape) -> dict[str, Any]:
    group = settings.number("conv_group_size", 16)
    if shape.layer.hidden_size % group:
        raise settings.damaged(
            "conv_group_size", f"does not divide the hidden size, {shape.layer.hidden_size}"
        )
    if shape.vocab != shape.layer.vocab_size:
        raise settings.damaged("draft_vocab_size", "is not the target's, as DFlash 2 needs")
    return {
        "kernel": settings.number("conv_kernel_size", 2),
        "group": group,
        "rank": settings.number("selector_rank", 256),
        "selected": min(settings.number("selector_top_k", 16), shape.vocab),
    }


def _attention(
    settings: BlockSettings, layer: Mapping[str, Any], layers: int, *, non_causal: bool
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return by layer how many positions a token sees, and whether it sees only those before it in its block.

    Args:
        settings: Those of the block.
        layer: Those of the decoder layers.
        layers: Number of layers.
        non_causal: Whether layers with a window are not causal unless the configuration says so.
    """
    kinds, window = layer.get("layer_types"), layer.get("sliding_window")
    sliding = [False] * layers
    if isinstance(kinds, list) and layer.get("use_sliding_window", True):
        sliding = [kind == "sliding_attention" for kind in kinds[:layers]]
    if any(sliding) and (type(window) is not int or window < 1):
        raise settings.damaged("sliding_window", "is no whole number above 0")
    windows = tuple(window if each else None for each in sliding)
    if settings.find("is_causal") is not None:
        return windows, (settings.flag("is_causal", False),) * layers
    non_causal = settings.flag("sliding_window_non_causal", non_causal)
    return windows, tuple(each and not non_causal for each in sliding)
