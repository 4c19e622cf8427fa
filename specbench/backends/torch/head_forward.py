"""The ways through a head of decoder layers: in torch's operators, and in a single call.

A head of two layers takes a few percent of a small target's pass, if nothing but its weights counted. In operators it
takes an eighth: for every token that it drafts some forty are started.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from specbench.backends.torch.cache_layers import LayerGroup, PreallocatedLayer
from specbench.backends.torch.forward import NATIVE_ENTRIES, RotaryTable
from specbench.backends.torch.heads import Attend, EagleHead, RecurrentHead, causal_attention
from specbench.backends.torch.kernels import native
from specbench.backends.torch.kernels.attention import LONGEST_PASS, attend, fold_mask
from specbench.backends.torch.kernels.llama_layers import joined_product, native_product, stack_of
from specbench.backends.torch.trials import are_close
from specbench.decoding.tree import tree_mask, tree_positions


class HeadInput(NamedTuple):
    """Tokens that a head reads behind those in caches of one request, which hold them afterwards.

    Attributes:
        embedded: Embeddings of the tokens, [tokens, hidden].
        features: That go with them, [tokens, hidden].
        positions: Theirs, [tokens]; a range where they stand one behind the other.
        mask: Bool [1, 1, tokens, held and tokens], true where a token attends; ``None`` for what comes before it, and
            itself.
        caches: ``PreallocatedLayer`` of each layer.
        wanted: Of how many tokens logits are wanted, counted from the end.
    """

    embedded: torch.Tensor
    features: torch.Tensor
    positions: range | torch.Tensor
    mask: torch.Tensor | None
    caches: Sequence[Any]
    wanted: int


class HeadOutput(NamedTuple):
    """What a head makes of tokens.

    Attributes:
        features: That go with the tokens behind them, [tokens, hidden].
        logits: Of the last ones, [wanted, vocab].
    """

    features: torch.Tensor
    logits: torch.Tensor


class HeadForward:
    """In operators.

    Args:
        head: The head.
        dtype: Of all that lies between products; ``None`` for the head's own.
    """

    def __init__(self, head: RecurrentHead, dtype: torch.dtype | None = None) -> None:
        self.head = head
        config: Any = head.shape.layer
        self._groups = config.num_attention_heads // config.num_key_value_heads
        self._dtype = dtype or next(head.parameters()).dtype

    def __call__(self, readings: Sequence[HeadInput]) -> list[HeadOutput]:
        """Read what several requests bring: every weight is read once for all of them, and each attends by itself."""
        tokens, spans = [len(each.embedded) for each in readings], [_span(each) for each in readings]
        embedded, features = (
            joined([*parts])[None].to(self._dtype)
            for parts in zip(*((each.embedded, each.features) for each in readings), strict=True)
        )
        positions = torch.as_tensor(_positions(readings), device=embedded.device)[None]
        attends = [self._by_request(layer, readings, spans) for layer in range(len(self.head.layers))]
        out = self.head.read(embedded, features, positions, attends)[0]
        parts = zip(readings, out.split(tokens), strict=True)
        logits = self.head.logits(joined([part[-each.wanted :] for each, part in parts]))
        rows = self.head.recurring(out).split(tokens), logits.split([each.wanted for each in readings])
        return [HeadOutput(*each) for each in zip(*rows, strict=True)]

    def _by_request(self, layer: int, readings: Sequence[HeadInput], spans: Sequence[_Span]) -> Attend:
        """Tokens of each request attend to what its cache of a layer holds and to each other; they stay in it."""
        tokens = [len(each.embedded) for each in readings]

        def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            parts = zip(*(each.split(tokens, dim=2) for each in (query, key, value)), strict=True)
            return joined(
                [
                    self._attended(span, each.caches[layer], *part)
                    for span, each, part in zip(spans, readings, parts, strict=True)
                ],
                dim=1,
            )

        return attended

    def _attended(
        self, span: _Span, cache: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        keys, values = cache.update(key, value)
        mask = span.mask
        if span.whole:
            return causal_attention(query, keys, values)
        if query.device.type == "cpu" and query.shape[2] <= LONGEST_PASS:
            folded = None if mask is None else fold_mask(mask, self._groups, query.dtype)
            return attend(query, keys, values, folded, None)
        out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)


class _Span(NamedTuple):
    """How tokens of a request attend.

    Attributes:
        mask: Bool [1, 1, tokens, held and tokens]; ``None`` for one token that sees everything.
        whole: There is nothing before them, and they attend causally.
    """

    mask: torch.Tensor | None
    whole: bool


def _span(reading: HeadInput) -> _Span:
    past, tokens, mask = reading.caches[0].used, len(reading.embedded), reading.mask
    whole = past == 0 and mask is None and tokens > 1
    if mask is None and tokens > 1 and not whole:
        device = reading.embedded.device
        mask = torch.ones(1, 1, tokens, past + tokens, dtype=torch.bool, device=device).tril_(past)
    return _Span(mask, whole)


def _positions(readings: Sequence[HeadInput]) -> range | torch.Tensor:
    """Of all, one behind the other."""
    if len(readings) == 1:
        return readings[0].positions
    return torch.cat([torch.as_tensor(each.positions, device=each.embedded.device) for each in readings])


def joined(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """One behind the other; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim)


class NativeHeadForward(HeadForward):
    """In one call, any number of requests; between products everything is float32, and so are keys and values.

    Args:
        head: An EAGLE-3 head.
        stack: Its layers.
    """

    head: EagleHead

    def __init__(self, head: EagleHead, stack: native.DecoderStack) -> None:
        super().__init__(head)
        config: Any = head.shape.layer
        self._stack, self._rotations = stack, RotaryTable(head.rotary_emb, config)
        self._layers = (len(head.layers),) if head.shape.norm_output else ()
        self._empty = torch.empty(1, config.num_key_value_heads, 0, config.head_dim)

    def __call__(self, readings: Sequence[HeadInput]) -> list[HeadOutput]:
        requests: list[native.NativeRequest] = []
        for each in readings:
            past, tokens = each.caches[0].used, len(each.embedded)
            held = LayerGroup.of([*each.caches], range(len(each.caches)), tokens, NATIVE_ENTRIES, self._empty)
            if held is None:
                for request, before in zip(requests, readings, strict=False):
                    for cache in before.caches:
                        cache.rollback(request.past)
                return super().__call__(readings)
            mask = None if each.mask is None else each.mask[0, 0]
            requests.append(native.NativeRequest(tokens, past, mask, entries=native.KVPointers(held.entries)))
        entries = requests[0].entries
        assert entries is not None
        x = torch.cat([each.features for each in readings]).float()  # not those that others hold
        ends = accumulate(request.rows for request in requests)
        wanted = [
            row for each, end in zip(readings, ends, strict=True) for row in range(end - each.wanted, end)
        ]
        logits, normed = self._stack(
            x,
            *self._rotations.of(_positions(readings)),
            entries,
            requests,
            wanted,
            self._layers,
            joined([each.embedded for each in readings]).float(),
        )
        features = (x if normed is None else normed[:, 0]).split([request.rows for request in requests])
        rows = logits.split([each.wanted for each in readings])
        return [HeadOutput(*each) for each in zip(features, rows, strict=True)]


def choose_head_forward(head: RecurrentHead) -> HeadForward:
    """The quickest way through a head that comes out right, tried on it as it will draft."""
    stack = _stack(head) if isinstance(head, EagleHead) else None
    if stack is None or not stack.quantizes_rows or not isinstance(head, EagleHead):
        return HeadForward(head)
    quicker = NativeHeadForward(head, stack)
    # With bfloat16 between products rows would be rounded to other bytes, and nobody could tell that from a mistake.
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Mismatch dtype between input and weight"
        )  # of norms, which is meant
        expected, found = (_tried(way) for way in (HeadForward(head, torch.float32), quicker))
    same = all(are_close(*rows, _CLOSE) for rows in zip(found, expected, strict=True))
    return quicker if same else HeadForward(head)


def _stack(head: EagleHead) -> native.DecoderStack | None:
    """``None`` where its products are no native ones, or its sizes are none that these passes are written for."""
    config: Any = head.shape.layer
    layers: list[Any] = list(head.layers)
    logits, made = native_product(head.lm_head), [_layer(layer) for layer in layers]
    if logits is None or head.norm.eps is None:
        return None
    return stack_of(
        made,
        head.norm.weight,
        logits,
        heads=config.num_attention_heads,
        shared=config.num_key_value_heads,
        size=config.head_dim,
        epsilon=head.norm.eps,
        scaling=config.head_dim**-0.5,
        embedding_norm=layers[0].input_layernorm.weight,
        adds_to_normed=head.shape.norm_before_residual,
    )


def _layer(layer: Any) -> native.Layer | None:
    attention, mlp = layer.self_attn, layer.mlp
    projections = joined_product([attention.q_proj, attention.k_proj, attention.v_proj])
    gates = joined_product([mlp.gate_proj, mlp.up_proj])
    output, down = native_product(attention.o_proj), native_product(mlp.down_proj)
    if projections is None or output is None or gates is None or down is None:
        return None
    before = layer.hidden_norm if hasattr(layer, "hidden_norm") else layer.input_layernorm
    of_heads = [
        norm.weight if isinstance(norm, nn.RMSNorm) else None for norm in (attention.q_norm, attention.k_norm)
    ]
    norms = (before.weight, layer.post_attention_layernorm.weight, *of_heads)
    return native.Layer(projections, output, gates, down, *norms)


_CLOSE = 0.01
"""Largest distance of two rows that both ways may give, over their spread: mostly they have the same bits."""

_TRIED = 5
"""Tokens that are read first in a trial; then a tree of two behind them."""


@torch.inference_mode()
def _tried(way: HeadForward) -> HeadOutput:
    """What comes of some tokens."""
    head, parents = way.head, (-1, -1, 1)
    hidden: int = head.shape.layer.hidden_size
    random = torch.Generator().manual_seed(0)
    embedded, features = torch.randn(2, _TRIED + len(parents), hidden, generator=random)
    caches = [PreallocatedLayer() for _ in head.layers]
    beginning = HeadInput(embedded[:_TRIED], features[:_TRIED], torch.arange(_TRIED), None, caches, _TRIED)
    (first,) = way([beginning])
    cpu = torch.device("cpu")
    positions = tree_positions(_TRIED - 1, parents, cpu)[0, 1:]
    mask = tree_mask(_TRIED - 1, parents, _TRIED + len(parents), cpu)[..., 1:, :]
    (then,) = way([HeadInput(embedded[_TRIED:], features[_TRIED:], positions, mask, caches, len(parents))])
    return HeadOutput(torch.cat((first.features, then.features)), torch.cat((first.logits, then.logits)))
