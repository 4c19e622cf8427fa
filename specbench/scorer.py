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
        start = self.cache.length
        if drafted and start == 0 and self.cache.prefill_apart:
            behind_context = self._forward(context, 1)
            return torch.cat([behind_context, self._forward(drafted, len(drafted))])[-rows:]
        tokens = [*context[start:], *drafted[max(0, start - len(context)) :]]
        widest = self.cache.widest_pass
        if widest is None or start == 0 or len(tokens) <= widest:
            return self._forward(tokens, rows)
        parts = [tokens[first : first + widest] for first in range(0, len(tokens), widest)]
        return torch.cat([self._forward(part, len(part)) for part in parts])[-rows:]

    def rollback(self, length: int) -> None:
        """Keep at most the first ``length`` tokens in the cache."""
        self.cache.rollback(length)

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[int], rows: int) -> torch.Tensor:
        arguments: dict[str, Any] = self.cache.model_arguments()
        if self._keeps_logits:
            arguments["logits_to_keep"] = rows
        ids = torch.tensor([tokens], device=self.device)
        logits: torch.Tensor = self.model(input_ids=ids, **arguments).logits[0, -rows:].to(self.output_device)
        self.cache.fed()
        return self._fit(logits)

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        width = logits.shape[-1]
        if self.vocab_size is None or width == self.vocab_size:
            return logits
        if width > self.vocab_size:
            return logits[..., : self.vocab_size]
        return torch.nn.functional.pad(logits, (0, self.vocab_size - width), value=float("-inf"))
