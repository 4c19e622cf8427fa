"""Block drafters as scorers: keys and values of the context, a block after it, and logits after draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specbench.backends.torch.block_heads import Block, Conditioned, DFlashHead
from specbench.backends.torch.cache_layers import PreallocatedLayer
from specbench.backends.torch.forward import concat
from specbench.backends.torch.head_scorers import HeadScorer, HeadSteps, OfTarget, node_depths
from specbench.backends.torch.heads import Attend
from specbench.decoding.protocols import ForwardRequest


class BlockScorer(HeadScorer):
    """A block drafter with keys and values of the context.

    The logits of DFlash depend on the depth in the draft alone; those of others also on the draft tokens before. The
    layers run once for a context, and these logits are computed when they are wanted. So a pass has two parts:

    - "block": from the context's last token to a ``Block``
    - "rows": from a block and paths (each the context's last token, and a branch of the draft) to their logits
    """

    def __init__(self, head: DFlashHead, target: OfTarget) -> None:
        super().__init__(head, target)
        self.longest, self.predicts_acceptance = head.block.drafted, head.block.confidence
        self._caches = [PreallocatedLayer() for _ in head.layers]

    def _reset(self) -> None:
        super()._reset()
        self._block: Block | None = None

    @torch.inference_mode()
    def take_states(self, length: int, states: Tensor) -> None:
        fresh = states[states.shape[0] + self._known - length :].to(self.device, self._dtype)
        positions = torch.arange(self._known, length, device=self.device)
        added = self.head.keys_values(fresh[None], positions[None])
        for cache, entries in zip(self._caches, added, strict=True):
            cache.update(*entries)
        self._known, self._block = length, None

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:  # noqa: ARG002
        self._block = None

    def steps(self, request: ForwardRequest, rows: int) -> HeadSteps:
        if self._block is None:
            self._block = yield "block", (self, request.context[-1])
        assert self._block is not None
        if not self.head.conditional:
            return self._block.logits[node_depths(request)[-rows:]]
        logits, self.acceptance = yield "rows", (self._block, _paths(request)[-rows:])
        return cast("Tensor", logits)

    def compute(self, part: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        return self._blocks(inputs) if part == "block" else self._rows(inputs)

    def _blocks(self, inputs: Sequence[tuple[BlockScorer, int]]) -> list[Block]:
        shape = self.head.block
        masks = [shape.mask] * (shape.block - 1)
        ids = torch.tensor([[last, *masks] for _, last in inputs], device=self.device)
        ranges = [[*range(each._known, each._known + shape.block)] for each, _ in inputs]
        positions = torch.tensor(ranges, device=self.device)
        layers = range(len(self.head.layers))
        attends = [self._attend_to([each._caches[layer] for each, _ in inputs], layer) for layer in layers]
        hidden = self.head.guess(self._embed(ids).to(self._dtype), positions, attends)
        logits = self.head.logits(hidden[:, shape.first :])
        return [Block(*each) for each in zip(hidden, logits, strict=True)]

    def _rows(self, inputs: Sequence[tuple[Block, Sequence[Sequence[int]]]]) -> list[Conditioned]:
        """Compute rows of equal depth together."""
        wanted = [(block, path) for block, paths in inputs for path in paths]
        logits: list[Any] = [None] * len(wanted)
        acceptance: list[Any] = [None] * len(wanted)
        for depth in {len(path) for _, path in wanted}:
            same = [i for i, (_, path) in enumerate(wanted) if len(path) == depth]
            tokens = torch.tensor([[*wanted[i][1]] for i in same], device=self.device)
            conditioned, accepted = self.head.condition([wanted[i][0] for i in same], tokens)
            for place, i in enumerate(same):
                logits[i] = conditioned[place]
                acceptance[i] = None if accepted is None else accepted[place]
        found: list[Conditioned] = []
        ends = accumulate(len(paths) for _, paths in inputs)
        for (_, paths), end in zip(inputs, ends, strict=True):
            part = slice(end - len(paths), end)
            predicted = None if acceptance[end - 1] is None else torch.stack(acceptance[part])
            found.append((torch.stack(logits[part]), predicted))
        return found

    def _attend_to(self, caches: Sequence[Any], layer: int) -> Attend:
        """Let all tokens of each block attend to its cache and to each other; the cache does not keep them."""
        shape = self.head.block
        window = shape.windows[layer] if shape.windows else None
        causal = bool(shape.causal and shape.causal[layer])

        def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            rows = zip(caches, *(each.split(1) for each in (query, key, value)), strict=True)
            return concat([_attend_with(cache, window, causal, *row) for cache, *row in rows])

        return attended


def _attend_with(
    cache: Any, window: int | None, causal: bool, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    past, block = cache.used, key.shape[2]
    keys, values = cache.update(key, value)
    cache.rollback(past)
    mask = _block_mask(past, block, window, causal, query.device)
    out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


def _block_mask(
    past: int, block: int, window: int | None, causal: bool, device: torch.device
) -> Tensor | None:
    """Return which positions the tokens of a block see, bool [block, past + block]; ``None`` for all."""
    if not causal and (window is None or past + block <= window):
        return None
    distance = torch.arange(past, past + block, device=device)[:, None] - torch.arange(
        past + block, device=device
    )
    seen = distance >= (0 if causal else -block)
    return seen if window is None else seen & (distance < window)


def _paths(request: ForwardRequest) -> list[list[int]]:
    """Return for the context and each node the context's last token and the draft tokens up to the node."""
    found = [[request.context[-1]]]
    tokens = [int(token) for token in request.tokens]
    for token, parent in zip(tokens, request.parents or range(-1, len(tokens) - 1), strict=True):
        found.append([*found[parent + 1], token])
    return found
