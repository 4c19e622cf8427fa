"""A model together with its cache: feed it a context, get logits, roll it back."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from specbench.caches import CacheKind, KVCache, make_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Scorer"]


class Scorer:
    """Reads contexts with one causal language model, batch size 1.

    Args:
        model: A ``transformers`` causal language model in eval mode.
        cache: A cache kind, or a cache to share with another scorer over the same keys and values.
        vocab_size: Width of the logits to return; the model's own are cut or padded with -inf to it. ``None`` for the
            model's own width. (Two models of one tokenizer may pad their vocabularies differently.)
        context_limit: The longest context the model can read, in tokens; ``None`` for no limit.
        output_device: Where the logits go; ``None`` for the device of the input embeddings. (A drafter's distributions
            have to lie beside the target's, and a model spread over devices ends on another one than it began on.)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: CacheKind | KVCache = "dynamic",
        *,
        vocab_size: int | None = None,
        context_limit: int | None = None,
        output_device: torch.device | None = None,
    ) -> None:
        self.model = model
        weight = cast("torch.Tensor", model.get_input_embeddings().weight)
        self.cache: KVCache = (
            make_cache(cache, model.config, weight.dtype) if isinstance(cache, str) else cache
        )
        self.context_limit = context_limit
        self.device = weight.device
        self.output_device = output_device or self.device
        self.vocab_size = vocab_size
        self.embeddings = weight.shape[0]
        self._change = _change_of_rotation(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def begin(self) -> None:
        """Start on a new context."""
        self.cache.reset()

    def logits(
        self, context: Sequence[int], drafted: Sequence[int] = (), rows: int | None = None
    ) -> torch.Tensor:
        """Feed what the cache lacks of ``context + drafted`` and return the logits behind its last tokens.

        Args:
            context: All tokens so far.
            drafted: Tokens that continue it and may be rolled back.
            rows: Number of positions wanted, counted from the end; ``None`` for the context's last and every draft.

        Returns:
            [rows, vocab], in the model's dtype; with ``rows=None`` row i is what stands behind ``drafted[:i]``.
        """
        rows = len(drafted) + 1 if rows is None else rows
        if self._change is not None and self.cache.length <= self._change < len(context) + len(drafted):
            return self._across_change(context, drafted, rows, self._change)
        return self._feed(context, drafted, rows)

    def _across_change(
        self, context: Sequence[int], drafted: Sequence[int], rows: int, change: int
    ) -> torch.Tensor:
        """Logits where a context of more than ``change`` tokens has all its positions rotated otherwise.

        The cache never holds both kinds: it stays in front of the change as long as drafts alone pass it, whose logits
        are computed without a cache, and is filled anew when the context itself has passed it.
        """
        if len(context) > change:
            self.cache.reset()
            return self._feed(context, drafted, rows)
        behind = len(context) + len(drafted) - change
        whole = self._forward([*context, *drafted], min(rows, behind), cached=False)
        if rows <= behind:
            return whole
        before = self._feed(context, drafted[: change - len(context)], rows - behind)
        return torch.cat([before, whole])

    def _feed(self, context: Sequence[int], drafted: Sequence[int], rows: int) -> torch.Tensor:
        start = self.cache.length
        if drafted and start == 0 and self.cache.prefill_apart:
            behind_context = self._forward(context, 1)
            return torch.cat([behind_context, self._forward(drafted, len(drafted))])[-rows:]
        tokens = [*context[start:], *drafted[max(0, start - len(context)) :]]
        widest = self.cache.widest_pass
        if widest is None or start == 0 or len(tokens) <= widest:
            return self._forward(tokens, rows)
        found = []
        for first in range(0, len(tokens), widest):
            part = tokens[first : first + widest]
            behind = len(tokens) - first - len(part)
            found.append(self._forward(part, min(len(part), max(1, rows - behind))))  # a head takes its time
        return torch.cat(found)[-rows:]

    def rollback(self, length: int) -> None:
        """Keep at most the first ``length`` tokens in the cache."""
        if self._change is not None and length <= self._change < self.cache.length:
            self.cache.reset()  # its keys are rotated for longer contexts
        self.cache.rollback(length)

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[int], rows: int, *, cached: bool = True) -> torch.Tensor:
        arguments: dict[str, Any] = self.cache.model_arguments() if cached else {"use_cache": False}
        if self._keeps_logits:
            arguments["logits_to_keep"] = rows
        ids = torch.tensor([tokens], device=self.device)
        logits: torch.Tensor = self.model(input_ids=ids, **arguments).logits[0, -rows:].to(self.output_device)
        if cached:
            self.cache.fed()
        return self._fit(logits)

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        width = logits.shape[-1]
        if self.vocab_size is None or width == self.vocab_size:
            return logits
        if width > self.vocab_size:
            return logits[..., : self.vocab_size]
        return torch.nn.functional.pad(logits, (0, self.vocab_size - width), value=float("-inf"))


def _change_of_rotation(model: PreTrainedModel) -> int | None:
    """The longest context with the short factors of "longrope" (Ding et al. 2024); longer ones have the long ones.

    ``transformers`` chooses by the last position of a pass; its ``generate`` computes everything anew at the change.
    """
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    for kind in [rope, *rope.values()]:  # of all layers, or by their type
        if isinstance(kind, dict) and kind.get("rope_type") == "longrope":
            return int(kind["original_max_position_embeddings"])
    return None
