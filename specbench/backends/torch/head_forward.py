"""Forward passes through a head of decoder layers: in torch operators, and in a single native call.

Reading the weights of a head of two layers takes a few percent of a small target's forward. In torch operators the head
takes an eighth of it, since every drafted token starts some forty of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specbench.backends.torch.attention import LONGEST_PASS, Span
from specbench.backends.torch.cache_layers import LayerGroup, PreallocatedLayer
from specbench.backends.torch.forward import concat
from specbench.backends.torch.heads import Attend, EagleHead, RecurrentHead
from specbench.backends.torch.trials import are_close
from specbench.decoding.tree import tree_rows
from specbench.kernels import HeadPasses, Request, forward_for_head

LONG_READING = 1024
"""Tokens from which on reading them takes less time in torch operators than in a native call."""


class HeadInput(NamedTuple):
    """Tokens of one request for a forward of a head, which follow those in its caches and are added to them."""

    embedded: Tensor  # their embeddings, [tokens, hidden]
    features: Tensor  # the features that go with them, [tokens, hidden]
    positions: range | Tensor  # [tokens]; a range if they are consecutive
    mask: Tensor | None  # bool [1, 1, tokens, cached + tokens], true where a token attends; None: causal
    caches: Sequence[Any]  # a PreallocatedLayer for each layer
    wanted: int  # number of last tokens whose logits are wanted


class HeadOutput(NamedTuple):
    """The outputs of a head for tokens."""

    features: Tensor  # the features that go with the tokens after them, [tokens, hidden]
    logits: Tensor  # of the last tokens, [wanted, vocab]


class HeadForward:
    """A forward pass through a head in torch operators, in ``dtype`` between products."""

    def __init__(self, head: RecurrentHead, dtype: torch.dtype | None = None) -> None:
        self.head = head
        self._dtype = dtype or next(head.parameters()).dtype

    def __call__(self, inputs: Sequence[HeadInput]) -> list[HeadOutput]:
        """Run a forward over the tokens of several requests, each of which attends to its own cache."""
        tokens = [len(given.embedded) for given in inputs]
        embedded = concat([given.embedded for given in inputs])[None].to(self._dtype)
        features = concat([given.features for given in inputs])[None].to(self._dtype)
        positions = torch.as_tensor(_positions(inputs), device=embedded.device)[None]
        out = self.head.read(embedded, features, positions, self.attends(inputs))[0]
        parts = zip(inputs, out.split(tokens), strict=True)
        logits = self.head.logits(concat([part[-given.wanted :] for given, part in parts]))
        outputs = self.head.recurring(out).split(tokens), logits.split([given.wanted for given in inputs])
        return [HeadOutput(*output) for output in zip(*outputs, strict=True)]

    def attends(self, inputs: Sequence[HeadInput]) -> list[Attend]:
        """Return how each layer attends: a request's tokens to its cache, which they join, and to each other."""
        spans = _spans(inputs, self.head.window)
        return [partial(_attend, layer, inputs, spans) for layer in range(len(self.head.layers))]


def _attend(
    layer: int,
    inputs: Sequence[HeadInput],
    spans: Sequence[Span],
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    parts = []
    for given, span in zip(inputs, spans, strict=True):
        keys, values = given.caches[layer].update(key[:, :, span.rows], value[:, :, span.rows])
        parts.append(span.attend(query.to(keys.dtype), keys, values, None).to(query.dtype))
    return concat(parts, dim=1)


def _spans(inputs: Sequence[HeadInput], window: int | None) -> list[Span]:
    """Return how the tokens of each request attend."""
    spans, end = list[Span](), 0
    for given in inputs:
        past, tokens, mask = given.caches[0].used, len(given.embedded), given.mask
        first, end = end, end + tokens
        is_cut = window is not None and past + tokens > window
        if mask is None and (tokens > LONGEST_PASS or past == 0 or (tokens == 1 and not is_cut)):
            spans.append(Span(slice(first, end), None, window or 0))
            continue
        device = given.embedded.device
        if mask is None:
            mask = torch.ones(1, 1, tokens, past + tokens, dtype=torch.bool, device=device).tril_(past)
        if is_cut and window is not None:
            # Entries of the context are at their positions; those of a draft, after them, are all in the window.
            before = torch.as_tensor(given.positions, device=device) - window
            mask = mask & (torch.arange(past + tokens, device=device) > before[:, None])
        spans.append(Span(slice(first, end), mask))
    return spans


def _positions(inputs: Sequence[HeadInput]) -> range | Tensor:
    if len(inputs) == 1:
        return inputs[0].positions
    return torch.cat([torch.as_tensor(given.positions, device=given.embedded.device) for given in inputs])


class NativeHeadForward(HeadForward):
    """A forward pass through an EAGLE-3 head in one native call for all requests, in float32 between products.

    Long readings go through torch operators, because in native passes every token reads all keys again.
    """

    head: EagleHead

    def __init__(self, head: EagleHead, native: HeadPasses) -> None:
        super().__init__(head, torch.float32)
        self._native = native

    def __call__(self, inputs: Sequence[HeadInput]) -> list[HeadOutput]:
        if any(len(given.embedded) >= LONG_READING for given in inputs):
            if len(inputs) == 1:
                return super().__call__(inputs)
            return [self([given])[0] for given in inputs]
        requests: list[Request] = []
        for given in inputs:
            past, tokens = given.caches[0].used, len(given.embedded)
            group = LayerGroup.extended(given.caches, tokens, self._native.empty)
            if group is None:
                for request, before in zip(requests, inputs, strict=False):
                    for cache in before.caches:
                        cache.rollback(request.past)
                return super().__call__(inputs)
            mask = None if given.mask is None else given.mask[0, 0]
            requests.append(Request(tokens, past, mask, buffers=group.buffers))
        x = torch.cat([given.features for given in inputs]).float()  # a copy, as it is overwritten
        ends = accumulate(request.rows for request in requests)
        wanted = [
            row for given, end in zip(inputs, ends, strict=True) for row in range(end - given.wanted, end)
        ]
        embedded = concat([given.embedded for given in inputs]).float()
        features, logits = self._native.run(embedded, x, _positions(inputs), requests, wanted)
        outputs = (
            features.split([request.rows for request in requests]),
            logits.split([given.wanted for given in inputs]),
        )
        return [HeadOutput(*output) for output in zip(*outputs, strict=True)]


def choose_head_forward(head: RecurrentHead) -> HeadForward:
    """Return the fastest forward of a head that gives right results, tried on it as it will draft."""
    native = forward_for_head(head) if isinstance(head, EagleHead) else None
    if native is None or not isinstance(head, EagleHead):
        return HeadForward(head)
    fast = NativeHeadForward(head, native)
    # With bfloat16 between products rows would be rounded to other bytes, which looks like a mistake.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")  # of norms, on purpose
        expected, native_rows = (_try(forward) for forward in (HeadForward(head, torch.float32), fast))
    same = all(are_close(*rows, _CLOSE) for rows in zip(native_rows, expected, strict=True))
    return fast if same else HeadForward(head)


_CLOSE = 0.01
"""How far the rows of the two forwards may differ, as a share of their spread; usually they are equal to the bit."""

_TRIAL = 5  # tokens that a trial reads before a tree of three


@torch.inference_mode()
def _try(forward: HeadForward) -> HeadOutput:
    """Return the output for some tokens and a tree after them."""
    head, parents = forward.head, (-1, -1, 1)
    hidden: int = head.shape.layer.hidden_size
    random = torch.Generator().manual_seed(0)
    embedded, features = torch.randn(2, _TRIAL + len(parents), hidden, generator=random)
    caches = [PreallocatedLayer() for _ in head.layers]
    context = HeadInput(embedded[:_TRIAL], features[:_TRIAL], torch.arange(_TRIAL), None, caches, _TRIAL)
    (first,) = forward([context])
    (positions,), mask = tree_rows(_TRIAL - 1, parents, len(embedded), torch.device("cpu"), 1)
    tree = HeadInput(embedded[_TRIAL:], features[_TRIAL:], positions, mask, caches, len(parents))
    (second,) = forward([tree])
    return HeadOutput(torch.cat((first.features, second.features)), torch.cat((first.logits, second.logits)))
