"""Block drafters before their weights are loaded: their structure, from the configurations of their tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specbench.backends.torch.block_heads import MARKOV_TYPES, BlockShape, DFlash2Head, DFlashHead, DSparkHead
from specbench.base.errors import RunError, UsageError
from specbench.base.textsafe import excerpt

if TYPE_CHECKING:
    from specbench.backends.torch.heads import EagleShape
    from specbench.models.head_files import HeadFiles

BLOCK_KINDS = ("dflash", "dflash2", "dspark")

_HEADS: Mapping[str, type[DFlashHead]] = {"dflash": DFlashHead, "dflash2": DFlash2Head, "dspark": DSparkHead}


def block_head(files: HeadFiles, shape: EagleShape) -> DFlashHead:
    """Make a block drafter without weights.

    Raises:
        UsageError: It is of a variant that is not supported. RunError: Its configuration is damaged.
    """
    settings = _Settings(files)
    projector = files.of_block("projector_type")
    if projector not in (None, files.kind):
        raise UsageError(
            f"The head {files.name} is of a kind that is not supported: its projector_type is {excerpt(projector)!r}.",
            "Choose another head.",
        )
    windows, causal = _attention(files, shape.layers)
    common: dict[str, Any] = {
        "block": settings.number("block_size"),
        "mask": files.token("mask_token_id", files.of_block("mask_token_id")),
        "first": 0 if settings.flag("sample_from_anchor", files.kind == "dspark") else 1,
        "windows": windows,
        "causal": causal,
        "embedding_scale": settings.factor("input_embedding_scale") or 1.0,
        "logit_scale": settings.factor("output_multiplier") or 1.0,
        "logit_cap": settings.factor("final_logit_softcapping"),
    }
    if files.kind == "dspark":
        common |= _markov(settings)
    if files.kind == "dflash2":
        common |= _selector(settings, shape)
    block = BlockShape(**common)
    if block.drafted < 1:
        raise settings.damaged("block_size", "is too small")
    return _HEADS[files.kind](shape, block)


class _Settings:
    """The settings of a block drafter, which may be in a section of its configuration."""

    def __init__(self, files: HeadFiles) -> None:
        self._files = files

    def damaged(self, key: str, why: str) -> RunError:
        return RunError(f"The config.json of {self._files.name} is damaged: its {key} {why}.")

    def number(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._files.of_block(key)
        value = default if value is None else value
        if type(value) is not int or value < least:
            raise self.damaged(key, f"is no whole number of at least {least}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._files.of_block(key)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.damaged(key, "is neither true nor false")
        return value

    def factor(self, key: str) -> float | None:
        value = self._files.of_block(key)
        if value is not None and (type(value) not in (int, float) or not 0 < value < float("inf")):
            raise self.damaged(key, "is no number above 0")
        return None if value is None else float(value)

    def text(self, key: str, default: str) -> str:
        value = self._files.of_block(key)
        return default if value is None else str(value)


def _markov(settings: _Settings) -> dict[str, Any]:
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


def _selector(settings: _Settings, shape: EagleShape) -> dict[str, Any]:
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


def _attention(files: HeadFiles, layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return by layer how many positions a token sees, and whether it sees only those before it in its block.

    Where the configuration does not say, layers with a window are causal, but not those of ``speculators``' DFlash 2.
    """
    given = files.layer_settings
    kinds, window = given.get("layer_types"), given.get("sliding_window")
    sliding = [False] * layers
    if isinstance(kinds, list) and given.get("use_sliding_window", True):
        sliding = [kind == "sliding_attention" for kind in kinds[:layers]]
    if any(sliding) and (type(window) is not int or window < 1):
        raise RunError(
            f"The config.json of {files.name} is damaged: its sliding_window is no whole number above 0."
        )
    causal = files.of_block("is_causal")
    if causal is not None:
        return tuple(window if each else None for each in sliding), (bool(causal),) * layers
    non_causal = files.of_block("sliding_window_non_causal")
    if non_causal is None:
        non_causal = files.kind == "dflash2" and "speculators_model_type" in files.settings
    return tuple(window if each else None for each in sliding), tuple(
        each and not non_causal for each in sliding
    )
