"""What a loaded model may do, tried out on it: after all that is done to its layers, and on its own kernels.

A pass in few operators, one of fixed shapes, one over a tree and one over several requests have to give what ordinary
passes give; and some models give the same bits in a pass of any width, so that greedy outputs cannot part at ties.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from specbench.backends.torch.caches import (
    KVCache,
    NoKVCache,
    PreallocatedKVCache,
    StaticKVCache,
    rotates_by_length,
)
from specbench.backends.torch.forward import Forward, FusedForward, HFForward, NativeForward, RaggedForward
from specbench.backends.torch.graph_forward import GraphForward
from specbench.backends.torch.kernels.attention import KEY_BLOCK, is_folded, takes_ragged
from specbench.backends.torch.kernels.graphs import compiled, cuda_capture
from specbench.backends.torch.kernels.linear import PackedLinear, median_is_decided
from specbench.backends.torch.kernels.surgery import (
    first_layers,
    float32_sample,
    has_layer,
    quantizes_activations,
)
from specbench.backends.torch.pools import BatchedCache, KVPool, PoolKind, RequestTokens
from specbench.base.errors import UsageError
from specbench.decoding.tree import tree_mask, tree_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = (1, 2, 3, 5, 8, 13)
"""What is read in trials of fixed shapes, of trees and of speed, as far as the vocabulary reaches."""

_PARTS = ((1, 2, 3, 5), (8,), (13, 21, 34))
"""The same for short passes, one behind the other."""

_CLOSE = 0.05
"""Largest distance of two rows of logits that rounding explains, over their spread: bfloat16 leaves up to 0.04."""

_CLOSE_SHORT = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02, torch.int8: 0.3}
"""The same for a short pass by what it rounds to: tiny models, the worst, leave a third to a half of it."""

_NOT_POSSIBLE = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
"""What models raise that cannot take a pass of this kind."""


def choose_forward(model: PreTrainedModel, cache: KVCache, *, shared: bool = False) -> Forward:
    """The quickest way through a model that comes out right.

    Args:
        model: As it will decode: packed, quantized, cut to some of its layers. What is changed later is noticed by the
            pass when the next context begins.
        cache: Its keys and values.
        shared: Whether another model of the same layers has been tried on this cache.

    Raises:
        UsageError: The cache asks for fixed shapes, which this model cannot have, or for a compiler, which is missing.
    """
    if isinstance(cache, StaticKVCache):
        device = _embeddings(model).device
        forward = compiled(model.forward, device) if cache.compiled else None
        if not shared and not _fixed_shapes_are_right(model):
            raise UsageError(
                "This model's passes cannot have fixed shapes: it goes by more than positions and masks.",
                "Use --cache dynamic for this model.",
            )
        return GraphForward(model, cache, cuda_capture if device.type == "cuda" else None, forward)
    if not isinstance(cache, NoKVCache):
        for kind in (NativeForward, FusedForward):
            short = kind(model, cache)
            if (
                short.is_available()
                and _short_is_right(model, cache, kind)
                and _short_is_quick(model, cache, short)
            ):
                return short
    return HFForward(model, cache)


# -- fixed shapes ------------------------------------------------------------------------------------


@torch.inference_mode()
def _fixed_shapes_are_right(model: PreTrainedModel) -> bool:
    """Whether passes over a static cache give what one without a cache gives."""
    # In bfloat16 rounding alone may be as large as a mistake, with tokens that make no text.
    sample = float32_sample(model) or model
    ids = _trial_ids(sample)
    expected = HFForward(sample, NoKVCache())(ids, len(_TOKENS))
    forward = GraphForward(sample, StaticKVCache(sample.config))
    try:
        parts = [forward(part, part.shape[1]) for part in ids.split([4, 1, 1], dim=1)]
    except _NOT_POSSIBLE:
        return False
    return are_close(torch.cat(parts), expected)


def _trial_ids(model: PreTrainedModel) -> torch.Tensor:
    """Token ids, [1, 6]."""
    embeddings = _embeddings(model)
    return torch.tensor([_TOKENS], device=embeddings.device) % len(embeddings)


def _embeddings(model: PreTrainedModel) -> torch.Tensor:
    return cast("torch.Tensor", model.get_input_embeddings().weight)


def are_close(found: torch.Tensor, expected: torch.Tensor, limit: float = _CLOSE) -> bool:
    """Whether every row of logits is another's up to rounding."""
    known = expected.isfinite()
    found, expected = (each.float().where(known, 0.0) for each in (found, expected))
    apart = (found - expected).norm(dim=-1)
    size = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return bool((apart <= limit * size).all())


# -- passes in few operators -------------------------------------------------------------------------


@torch.inference_mode()
def _short_is_right(model: PreTrainedModel, cache: KVCache, way: type[FusedForward]) -> bool:
    """Whether three passes through the first layers give what the model's own ``forward`` gives, up to rounding.

    What they add to the cache is taken off again.

    Never for models elsewhere than on a CPU, or whose attention is not folded.
    """
    if model.device.type != "cpu" or not is_folded(model.config):
        return False
    try:
        sample = first_layers(model, min(2, model.config.get_text_config(decoder=True).num_hidden_layers))
    except (ValueError, UsageError):
        return False
    past, passes = cache.length, []
    for kind in (HFForward, way):
        forward = kind(sample, cache)
        parts = [torch.tensor([part]) % len(_embeddings(sample)) for part in _PARTS]
        passes.append(torch.cat([forward(ids, ids.shape[1]) for ids in parts]))
        cache.rollback(past)
    expected, found = passes
    limit = _CLOSE_SHORT.get(torch.int8 if quantizes_activations(sample) else model.dtype, 0.0)
    return are_close(found, expected, limit)


_TIMED_BYTES = 100_000_000
"""Weights of a model that are read when passes are timed, if it has so many: more than caches hold."""

_TIMED_TOKENS = (1, 5)
"""Of passes that are timed: one that decodes, and one that verifies."""

_TIMED_PAIRS = 5

_MOST_SLOWER = 1.05
"""What passes in one call may take, in passes in few operators, to be taken: noise alone is not to decide, for a last
bit of the logits goes by it."""

_times: dict[tuple[int, ...], float] = {}
"""What passes in one call took, in passes in few operators, by the sizes of models."""


def _short_is_quick(model: PreTrainedModel, cache: KVCache, way: FusedForward) -> bool:
    """Whether a way takes no longer than the next one; measured where both read the same weights."""
    stack = way.stack() if isinstance(way, NativeForward) and has_layer(model, PackedLinear) else None
    if stack is None:
        return True
    sizes = (*stack.sizes, torch.get_num_threads())
    if sizes not in _times:
        _times[sizes] = _time_in_one_call(model, cache, stack.layers_of(_TIMED_BYTES))
    return _times[sizes] < _MOST_SLOWER


@torch.inference_mode()
def _time_in_one_call(model: PreTrainedModel, cache: KVCache, layers: int) -> float:
    """Time of passes in one call through the first layers and the head, over that in few operators, in turn.

    What they add to the cache, which is the one of all layers where some were left out, is taken off again.
    """
    sample = first_layers(model, layers)
    ids = _trial_ids(sample)
    before = cache.length
    HFForward(sample, cache)(ids, 1)
    past, ways = cache.length, (NativeForward(sample, cache), FusedForward(sample, cache))

    def seconds(way: Forward) -> float:
        began = time.perf_counter()
        for tokens in _TIMED_TOKENS:
            way(ids[:, :tokens], tokens)
            cache.rollback(past)
        return time.perf_counter() - began

    ratios = []
    for pair in range(_TIMED_PAIRS + 1):
        took = {way: seconds(way) for way in (ways if pair % 2 else reversed(ways))}
        if pair:  # the first meets the machine cold
            ratios.append(took[ways[0]] / took[ways[1]])
        if median_is_decided(ratios, _MOST_SLOWER, _TIMED_PAIRS):
            break
    cache.rollback(before)
    return statistics.median(ratios)


# -- trees -------------------------------------------------------------------------------------------


@torch.inference_mode()
def trees_are_right(model: PreTrainedModel, cache: KVCache, forward: Forward) -> bool:
    """Whether a pass over a tree gives what separate passes give. Empties the cache.

    Both begin behind the same tokens, for the first ones, which no cache holds yet, may be read another way: in
    bfloat16 rounding alone is large with tokens that make no text. Of layers that are known the first of every
    kind tell.
    """
    if isinstance(forward, FusedForward) and (sample := _one_of_each_kind(model)) is not None:
        model, forward = sample, type(forward)(sample, cache)
    ids = _trial_ids(model)
    past = ids.shape[1] - 1
    tokens, parents = ids.new_tensor([[3, 4, 6, 7, 5]]), (-1, 0, 0, -1, 3)
    try:
        cache.reset()
        forward(ids[:, :past], 1)
        cache.rollback(past)
        tree = torch.cat([ids[:, past:], tokens], dim=1)
        mask = tree_mask(past, parents, cache.keys(tree.shape[1]), ids.device)
        found = forward(tree, len(parents), tree_positions(past, parents, ids.device), mask)
        apart: dict[int, torch.Tensor] = {}
        for branch in ([0, 1], [0, 2], [3, 4]):
            cache.reset()
            forward(ids[:, :past], 1)
            chain = torch.cat([ids[:, past:], tokens[:, branch]], dim=1)
            apart.update(zip(branch, forward(chain, len(branch)), strict=True))
    except _NOT_POSSIBLE:
        return False
    finally:
        cache.reset()
    return are_close(found, torch.stack([apart[node] for node in range(len(parents))]))


def _one_of_each_kind(model: PreTrainedModel) -> PreTrainedModel | None:
    """A model's first layers, those with a window and those without among them; ``None`` if none were found."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ()
    count = max([1, *(kinds.index(kind) for kind in {*kinds})]) + 1
    try:
        return first_layers(model, min(count, config.num_hidden_layers))
    except (ValueError, UsageError):
        return None


# -- several requests --------------------------------------------------------------------------------


def why_not_batchable(model: PreTrainedModel, kind: PoolKind, way: type[Forward]) -> str | None:
    """Why a model cannot make one pass of several requests', in a sentence; ``None`` if it can.

    Its attention is one that takes them from now on.

    Args:
        model: See ``choose_forward``.
        kind: Of the pool.
        way: How its passes over one context are made.
    """
    config = model.config.get_text_config(decoder=True)
    if rotates_by_length(model.config):
        return "How it rotates positions depends on the longest context of a pass."
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "Some of its layers attend within chunks of the context."
    if not takes_ragged(model):
        return "Its attention is not the scaled dot-product attention of transformers."
    rounding = torch.int8 if quantizes_activations(model) else model.dtype
    limit = _CLOSE_SHORT[torch.int8] if rounding == torch.int8 else _CLOSE
    # In bfloat16 rounding alone may be as large as a mistake, with tokens that make no text.
    right = _ragged_is_right(float32_sample(model) or model, kind, limit, HFForward)
    if right and issubclass(way, FusedForward):
        few = first_layers(model, min(2, config.num_hidden_layers))
        right = _ragged_is_right(few, kind, _CLOSE_SHORT.get(rounding, 0.0), way)
    return None if right else "A pass over several requests gives other logits than a pass over each."


_CONTEXTS = ((1, 2, 3, 5, 8, 3, 4), (13, 21), (34,))
"""Of three requests."""

_LATE = (3, 1, 1)
"""So many of their last tokens are read together; what is before them in another pass, as far as there is anything."""


@torch.inference_mode()
def _ragged_is_right(model: PreTrainedModel, kind: PoolKind, limit: float, way: type[Forward]) -> bool:
    """Whether passes over three requests, a tree among them, give what passes over each without a cache give."""
    size, cpu = len(_embeddings(model)), torch.device("cpu")
    contexts = [[token % size for token in context] for context in _CONTEXTS]
    nodes = [token % size for token in (3, 4, 6, 7, 5)]
    parents: Sequence[int] = (-1, 0, 0, -1, 3)
    branches: Sequence[Sequence[int]] = ((0, 1), (0, 2), (3, 4))
    pool = KVPool(model.config, kind, 96, slots=3)
    slots = [pool.slot() for _ in contexts]
    if not slots[0].takes_trees:
        nodes, parents, branches = nodes[:2], parents[:2], branches[:1]
    forward, alone = RaggedForward(model, way), HFForward(model, NoKVCache())
    device = _embeddings(model).device

    def read(fed: Sequence[Sequence[int]], parts: Sequence[RequestTokens]) -> torch.Tensor:
        for part in parts:
            part.slot.require(part.end)
        order = sorted(range(len(parts)), key=lambda i: parts[i].slot.place)
        ids = torch.tensor([[token for i in order for token in fed[i]]], device=device)
        joined = BatchedCache(pool, [parts[i] for i in order], device)
        found = forward(ids, joined, torch.arange(ids.shape[1], device=device)).logits
        rows = dict(zip(order, found.split([len(fed[i]) for i in order]), strict=True))
        return torch.cat([rows[i] for i in range(len(parts))])

    def expected(tokens: Sequence[int], rows: int) -> torch.Tensor:
        return alone(torch.tensor([tokens], device=device), rows)

    early = [context[:-late] for context, late in zip(contexts, _LATE, strict=True)]
    fed = [context[-late:] for context, late in zip(contexts, _LATE, strict=True)]
    fed[2] += nodes
    seen = tree_mask(0, parents, len(fed[2]), cpu)[0, 0].numpy()
    try:
        read(
            early[:2],
            [RequestTokens(slot, range(len(part))) for slot, part in zip(slots, early[:2], strict=False)],
        )
        parts = [
            RequestTokens(slot, range(slot.length, slot.length + late))
            for slot, late in zip(slots, _LATE, strict=True)
        ]
        parts[2] = RequestTokens(slots[2], tree_positions(0, parents, cpu)[0].tolist(), seen)
        found = read(fed, parts)
        rows = [expected(context, late) for context, late in zip(contexts, _LATE, strict=True)]
        by_node: dict[int, torch.Tensor] = {}
        for branch in branches:
            behind = expected([*contexts[2], *(nodes[node] for node in branch)], len(branch))
            by_node.update(zip(branch, behind, strict=True))
        return are_close(
            found, torch.cat([*rows, torch.stack([by_node[node] for node in range(len(nodes))])]), limit
        )
    except _NOT_POSSIBLE:
        return False


# -- passes of any width -----------------------------------------------------------------------------

_READ = 40
"""Tokens that are really read: in front of the edge they are repeated, which takes no time."""

_BEFORE, _BEHIND = 3, 6
"""How far from the edge of a block of keys single tokens begin and end."""

_WIDTHS = (2, 3, 5, 9, 17, 32)

_WIDTHS_WITH_STATES = (1, 5, 32)
"""Those that are read once more with hidden states, as heads ask for them, which plain decoding does without."""


@torch.inference_mode()
def why_widths_differ(
    model: PreTrainedModel, cache: KVCache, forward: Forward, context_limit: int | None
) -> str | None:
    """Why passes of different widths may give different logits here, in a sentence; ``None`` if they do not.

    Reads random tokens with passes of one token and of several over the edge of a block of keys (as far as the model's
    context goes), some of them with hidden states, one layer twice, and compares the logits bit by bit. Empties the
    cache. Takes about 20 passes.
    """
    embeddings = _embeddings(model)
    if embeddings.device.type != "cpu":
        return f"Kernels on {embeddings.device.type} choose the order of their sums by the shape of a pass."
    if not isinstance(cache, PreallocatedKVCache) or cache.max_exact_tokens is None:
        return "It takes the preallocated cache, and a model with scaled dot-product attention and no sliding window."
    widest, start = max(_WIDTHS), KEY_BLOCK - _BEFORE
    if context_limit is not None:
        start = min(start, context_limit - widest)
    if start < 1:
        return f"The context of {context_limit} tokens is too short to try it out."
    choice = random.Random(0)
    ids = torch.tensor([[choice.randrange(len(embeddings)) for _ in range(start + widest)]])

    def read(length: int, width: int, layers: Sequence[int] = ()) -> torch.Tensor:
        cache.rollback(length)
        return forward.rows(ids[:, length : length + width], width, layers).logits

    cache.reset()
    forward(ids[:, : min(_READ, start)], 1)
    cache.repeat(start)
    alone = [read(start + i, 1)[0] for i in range(min(widest, KEY_BLOCK + _BEHIND - start))]
    last = model.config.get_text_config(decoder=True).num_hidden_layers
    with_states = [(width, (last, 0, last)) for width in _WIDTHS_WITH_STATES]
    try:
        for width, layers in [*((width, ()) for width in _WIDTHS), *with_states]:
            try:
                together = read(start, width, layers)
            except _NOT_POSSIBLE:
                if layers:  # nor can a head draft for this model
                    break
                raise
            if any(not torch.equal(one, many) for one, many in zip(alone, together, strict=False)):
                more = " that also gives hidden states" if layers else ""
                return f"On this processor, a pass of {width} tokens{more} gives other logits than passes of one."
    finally:
        cache.reset()
    return None
