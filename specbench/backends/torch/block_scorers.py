"""Block drafters as scorers: keys and values of the context, and the logits of a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from specbench.backends.torch.block_heads import DFlashHead
from specbench.backends.torch.cache_layers import PreallocatedLayer
from specbench.backends.torch.forward import concat
from specbench.backends.torch.head_scorers import Embed, HeadScorer, HeadSteps, node_depths
from specbench.backends.torch.heads import Attend
from specbench.backends.torch.scorer import FittedLogits
from specbench.decoding.protocols import ForwardRequest


class BlockInput(NamedTuple):
    """The beginning of a block for DFlash."""

    last: int  # the context's last token
    position: int  # its position
    caches: Sequence[Any]  # keys and values of the context, by layer


class DFlashScorer(HeadScorer[BlockInput, Tensor]):
    """DFlash with keys and values of the context; its logits depend on the depth in the draft, not on draft tokens."""

    def __init__(
        self,
        head: DFlashHead,
        embed: Embed,
        layers: Sequence[int],
        fitted: FittedLogits,
        context_limit: int | None,
    ) -> None:
        config: Any = head.shape.layer
        weight = head.norm.weight
        super().__init__(layers, weight.device, fitted, context_limit, config.vocab_size)
        self.head, self.longest, self._dtype = head, head.block - 1, weight.dtype
        self._embed = head.embed_tokens or embed
        self._caches = [PreallocatedLayer() for _ in head.layers]

    def _reset(self) -> None:
        super()._reset()
        self._rows: Tensor | None = None

    @property
    def model(self) -> nn.Module:
        return self.head

    def resume(self, cached_tokens: int) -> None:
        super().resume(cached_tokens)
        self._rows = None
        for cache in self._caches:
            cache.rollback(cached_tokens)

    @torch.inference_mode()
    def take_states(self, length: int, states: Tensor) -> None:
        fresh = states[states.shape[0] + self._known - length :].to(self.device, self._dtype)
        positions = torch.arange(self._known, length, device=self.device)
        added = self.head.keys_values(fresh[None], positions[None])
        for cache, entries in zip(self._caches, added, strict=True):
            cache.update(*entries)
        self._known, self._rows = length, None

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:  # noqa: ARG002
        self._rows = None

    def steps(self, request: ForwardRequest, rows: int) -> HeadSteps[BlockInput, Tensor]:
        if self._rows is None:
            self._rows = yield BlockInput(request.context[-1], self._known, self._caches)
        return self._rows[node_depths(request)[-rows:]]

    def compute(self, inputs: Sequence[BlockInput]) -> list[Tensor]:
        block, masks = self.head.block, [self.head.mask] * (self.head.block - 1)
        ids = torch.tensor([[each.last, *masks] for each in inputs], device=self.device)
        ranges = [[*range(each.position, each.position + block)] for each in inputs]
        positions = torch.tensor(ranges, device=self.device)
        layers = range(len(self.head.layers))
        attends = [_attend_to([each.caches[layer] for each in inputs]) for layer in layers]
        return [*self.head.guess(self._embed(ids).to(self._dtype), positions, attends)]


def _attend_to(caches: Sequence[Any]) -> Attend:
    """Let all tokens of each request attend to its cache and to each other; the cache does not get them."""

    def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = zip(caches, *(each.split(1) for each in (query, key, value)), strict=True)
        return concat([_attend_with(cache, *row) for cache, *row in rows])

    return attended


def _attend_with(cache: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    keys = torch.cat((cache.keys[:, :, : cache.used], key), dim=2)
    values = torch.cat((cache.values[:, :, : cache.used], value), dim=2)
    return scaled_dot_product_attention(query, keys, values, enable_gqa=True).transpose(1, 2)
