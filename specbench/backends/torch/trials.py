"""Trials of a loaded model, after all changes to its layers, with this machine's kernels.

Native, static, tree and batched forward passes must give the same results as ordinary ones. Some models also
give bitwise equal logits in forwards of any size, so that greedy outputs cannot differ at ties.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from specbench.backends.torch.attention import KEY_BLOCK, enable_ragged, is_folded
from specbench.backends.torch.cache_layers import PreallocatedLayer
from specbench.backends.torch.caches import (
    KVCache,
    NoKVCache,
    StaticKVCache,
    make_cache,
)
from specbench.backends.torch.forward import Forward, HFForward, NativeForward, RaggedForward
from specbench.backends.torch.graph_forward import GraphForward, compiled, cuda_capture
from specbench.backends.torch.pools import BatchedCache, KVPool, PooledCache, RequestTokens
from specbench.backends.torch.submodels import first_layers, float32_sample
from specbench.base.errors import UsageError
from specbench.decoding.tree import tree_rows
from specbench.kernels import layers_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = (1, 2, 3, 5, 8, 13)
"""Token ids of trials of static forwards and trees, modulo the vocabulary."""

_CHUNKS = ((1, 2, 3, 5), (8,), (13, 21, 34))  # token ids of consecutive native forwards

_TREE_TOKENS, _PARENTS = (3, 4, 6, 7, 5), (-1, 0, 0, -1, 3)
_BRANCHES = ((0, 1), (0, 2), (3, 4))  # a tree, with the nodes of its branches
_CLOSE = 0.05
"""How far rounding can move a row of logits, as a share of its spread: up to 0.04 was seen in bfloat16."""

_CLOSE_NATIVE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02, torch.int8: 0.3}
"""The same for native forwards, by dtype: the worst seen, in tiny models, was a third to a half of this."""

_NOT_POSSIBLE = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
"""What models raise that cannot run a forward of this kind."""


def choose_forward(model: PreTrainedModel, cache: KVCache, *, shared: bool = False) -> Forward:
    """Return the fastest forward of a model, as it will decode, that gives right results.

    Later changes of the model are noticed when the next context begins.

    Args:
        shared: Whether another model of the same layers has been tried on this cache.

    Raises:
        UsageError: The cache needs static shapes, which this model cannot have, or a compiler, which is missing.
    """
    if isinstance(cache, StaticKVCache):
        device = _embeddings(model).device
        forward = compiled(model, device) if cache.compiled else None
        if not shared and not _static_is_right(model):
            raise UsageError(
                "The static cache does not support this model: it depends on more than positions and masks.",
                "Use --cache dynamic for this model.",
            )
        return GraphForward(model, cache, cuda_capture if device.type == "cuda" else None, forward)
    if not isinstance(cache, NoKVCache):
        native = NativeForward(model, cache)
        if native.is_available() and _native_is_right(model, cache):
            return native
    return HFForward(model, cache)


def are_close(logits: Tensor, expected: Tensor, limit: float = _CLOSE) -> bool:
    """Return whether every row of logits equals another up to rounding."""
    return bool((_distances(logits, expected) <= limit).all())


def _distances(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the distances of rows of logits, over their spread."""
    known = expected.isfinite()
    logits, expected = (rows.float().where(known, 0.0) for rows in (logits, expected))
    size = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return (logits - expected).norm(dim=-1) / size.clamp_min(torch.finfo(torch.float32).tiny)


def _embeddings(model: PreTrainedModel) -> Tensor:
    return cast("Tensor", model.get_input_embeddings().weight)


def _trial_ids(model: PreTrainedModel) -> Tensor:
    """Return token ids, [1, 6]."""
    embeddings = _embeddings(model)
    return torch.tensor([_TOKENS], device=embeddings.device) % len(embeddings)


@torch.inference_mode()
def _static_is_right(model: PreTrainedModel) -> bool:
    """Return whether forwards over a static cache give the same logits as one without a cache."""
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


# -- native forwards ------------------------------------------------------------------------------------


@torch.inference_mode()
def _native_is_right(model: PreTrainedModel, cache: KVCache) -> bool:
    """Return whether three native forwards through the first layers equal the model's own, up to rounding.

    Always false for models that are not on a CPU or whose attention is not folded. The cache is rolled back. Sliding
    windows are tried once more, shorter than the context.
    """
    if model.device.type != "cpu" or not is_folded(model.config):
        return False
    sample = _one_of_each_kind(model, least=2)
    if sample is None or not _native_equals_own(sample, cache):
        return False
    short = _with_short_windows(sample)
    return short is None or _native_equals_own(short, make_cache(cache.kind, short.config))


def _native_equals_own(sample: PreTrainedModel, cache: KVCache) -> bool:
    past, logits = cache.length, []
    for forward_type in (HFForward, NativeForward):
        forward = forward_type(sample, cache)
        chunks = [torch.tensor([chunk]) % len(_embeddings(sample)) for chunk in _CHUNKS]
        logits.append(torch.cat([forward(ids, ids.shape[1]) for ids in chunks]))
        cache.rollback(past)
    expected, found = logits
    if not layers_of(sample).round_rows:
        return are_close(found, expected, _CLOSE_NATIVE.get(sample.dtype, 0.0))
    # Where one activation in a row becomes another byte, the row is far off, but most are not.
    distances, limit = _distances(found, expected), _CLOSE_NATIVE[torch.int8]
    return bool(distances.median() <= limit / 2 and distances.max() <= 1.5 * limit)


_SHORT_WINDOW = 3


def _with_short_windows(sample: PreTrainedModel) -> PreTrainedModel | None:
    """Return a sample, from ``first_layers``, with windows of few positions; ``None`` without windows."""
    windows = {getattr(layer, "sliding_window", None) for layer in DynamicCache(config=sample.config).layers}
    if not windows - {None}:
        return None
    short = first_layers(sample, sample.config.num_hidden_layers)
    short.config.sliding_window = _SHORT_WINDOW
    return short


# -- trees -------------------------------------------------------------------------------------------


@torch.inference_mode()
def trees_are_right(model: PreTrainedModel, cache: KVCache, forward: Forward) -> bool:
    """Return whether a forward over a tree gives the same logits as one over each branch. Empties the cache.

    Both follow the same cached tokens, since a forward over an empty cache can round differently, and in bfloat16
    rounding is large for tokens that are not real text. For layers of known kinds, the first one of each kind is
    enough.
    """
    if isinstance(forward, NativeForward) and (sample := _one_of_each_kind(model)) is not None:
        model, forward = sample, NativeForward(sample, cache)
    ids = _trial_ids(model)
    past = ids.shape[1] - 1
    tokens = ids.new_tensor([_TREE_TOKENS])
    try:
        cache.reset()
        forward(ids[:, :past], 1)
        cache.rollback(past)
        tree = torch.cat([ids[:, past:], tokens], dim=1)
        keys = cache.key_len(tree.shape[1])
        of_tree = forward(tree, len(_PARENTS), *tree_rows(past, _PARENTS, keys, ids.device))

        def read(branch: Sequence[int]) -> Tensor:
            cache.reset()
            forward(ids[:, :past], 1)
            return forward(torch.cat([ids[:, past:], tokens[:, [*branch]]], dim=1), len(branch))

        expected = _by_node(_BRANCHES, read)
    except _NOT_POSSIBLE:
        return False
    finally:
        cache.reset()
    return are_close(of_tree, expected)


def _by_node(branches: Sequence[Sequence[int]], read: Callable[[Sequence[int]], Tensor]) -> Tensor:
    """Return the logits after each node of a tree, from passes over its branches."""
    by_node = {node: row for branch in branches for node, row in zip(branch, read(branch), strict=True)}
    return torch.stack([by_node[node] for node in sorted(by_node)])


def _one_of_each_kind(model: PreTrainedModel, least: int = 1) -> PreTrainedModel | None:
    """Return a model's first layers, at least ``least``, with and without windows and rotation if there are both;
    ``None`` if none were found.
    """
    config = model.config.get_text_config(decoder=True)
    known = [getattr(config, name, None) for name in ("layer_types", "no_rope_layers")]
    kinds = list(zip(*(values for values in known if values), strict=False))
    count = max([least, *(kinds.index(kind) + 1 for kind in {*kinds})])
    try:
        return first_layers(model, min(count, config.num_hidden_layers))
    except (ValueError, UsageError):
        return None


# -- several requests --------------------------------------------------------------------------------


def why_not_batchable(model: PreTrainedModel, forward_type: type[Forward]) -> str | None:
    """Return why a model cannot read several requests in one forward, as a sentence; ``None`` if it can.

    It uses an attention function for several requests from now on. ``forward_type`` is how its forwards over one
    context are made.
    """
    config = model.config.get_text_config(decoder=True)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "Some of its layers attend within chunks of the context."
    attends = any(isinstance(layer, CacheLayerMixin) for layer in DynamicCache(config=config).layers)
    if attends and not enable_ragged(model):
        return "Its attention is not the scaled dot-product attention of transformers."
    rounding = torch.int8 if layers_of(model).round_rows else model.dtype
    limit = _CLOSE_NATIVE[torch.int8] if rounding == torch.int8 else _CLOSE
    try:
        # In bfloat16 rounding alone may be as large as a mistake, with tokens that make no text.
        right = _ragged_is_right(float32_sample(model) or model, limit, HFForward)
        sample = _one_of_each_kind(model, least=2) if issubclass(forward_type, NativeForward) else None
        for small in (sample, None if sample is None else _with_short_windows(sample)):
            if right and small is not None:
                right = _ragged_is_right(small, _CLOSE_NATIVE.get(rounding, 0.0), forward_type)
    except _NOT_POSSIBLE as error:
        reason = str(error).strip().partition("\n")[0]
        return f"A forward pass over several requests fails ({reason})."
    return None if right else "A forward pass over several requests gives different logits."


_CONTEXTS = ((1, 2, 3, 5, 8, 3, 4), (13, 21), (34,))  # of three requests
_LAST = (3, 1, 1)
"""How many of each request's last tokens the shared forward reads; an earlier forward reads those before."""


@torch.inference_mode()
def _ragged_is_right(model: PreTrainedModel, limit: float, forward_type: type[Forward]) -> bool:
    """Return whether forwards over three requests, one with a tree, equal separate forwards.

    The separate ones are without a cache, and for recurrent models, whose short passes may have bounds of their own,
    with one for each request.
    """
    size = len(_embeddings(model))
    contexts = [[token % size for token in context] for context in _CONTEXTS]
    nodes = [token % size for token in _TREE_TOKENS]
    parents: Sequence[int] = _PARENTS
    branches: Sequence[Sequence[int]] = _BRANCHES
    pool = KVPool(model.config, 96)
    caches = [PooledCache(pool) for _ in contexts]
    if not caches[0].takes_trees:
        nodes, parents, branches = nodes[:2], parents[:2], branches[:1]
    forward, alone = RaggedForward(model, forward_type), HFForward(model, NoKVCache())
    device = _embeddings(model).device
    recurrent = caches[0].recurrent is not None

    def read(fed: Sequence[Sequence[int]], parts: Sequence[RequestTokens]) -> Tensor:
        for part in parts:
            part.cache.require(part.end)
        ids = torch.tensor([[token for tokens in fed for token in tokens]], device=device)
        return forward(
            ids, BatchedCache(pool, parts, device), torch.arange(ids.shape[1], device=device)
        ).logits

    def expected(tokens: Sequence[int], rows: int) -> Tensor:
        ids = torch.tensor([tokens], device=device)
        if not recurrent:
            return alone(ids, rows)
        own = HFForward(model, make_cache("dynamic", model.config))
        if len(tokens) > rows:
            own(ids[:, :-rows], 1)
        return own(ids[:, -rows:], rows)

    def after(branch: Sequence[int]) -> Tensor:
        return expected([*contexts[2], *(nodes[node] for node in branch)], len(branch))

    early = [context[:-last] for context, last in zip(contexts, _LAST, strict=True)]
    read(early[:2], [RequestTokens(caches[i], range(len(early[i]))) for i in range(2)])
    fed = [context[-last:] for context, last in zip(contexts, _LAST, strict=True)]
    fed[2] += nodes
    positions, mask = tree_rows(0, parents, len(fed[2]), torch.device("cpu"))
    parts = [
        RequestTokens(cache, range(cache.length, cache.length + last))
        for cache, last in zip(caches[:2], _LAST, strict=False)
    ]
    parts.append(RequestTokens(caches[2], positions[0].tolist(), mask[0, 0].numpy()))
    together = read(fed, parts)
    rows = [expected(context, last) for context, last in zip(contexts, _LAST, strict=True)]
    return are_close(together, torch.cat([*rows, _by_node(branches, after)]), limit)


# -- forwards of any width ---------------------------------------------------------------------------

_READ = 40  # tokens that are really read; before the edge of a block they are repeated, which takes no time

_BEFORE, _AFTER = 3, 6
"""Tokens before and after the edge of a block of keys that are read one by one."""

_WIDTHS = (2, 3, 5, 9, 17, 32)

_WIDTHS_WITH_STATES = (1, 5, 32)
"""The widths that are tried once more with hidden states, because heads ask for these."""


@torch.inference_mode()
def why_widths_differ(
    model: PreTrainedModel, cache: KVCache, forward: Forward, context_limit: int | None
) -> str | None:
    """Return why forwards of different widths may give different logits here; ``None`` if they do not.

    Reads random tokens one by one and several at a time, over the edge of a block of keys where the context reaches so
    far, also with hidden states and one layer twice, and compares the logits bit by bit. Empties the cache. Takes about
    20 forwards.
    """
    embeddings = _embeddings(model)
    if embeddings.device.type != "cpu":
        return (
            f"Kernels on {embeddings.device.type} choose the order of sums by the shape of the forward pass."
        )
    if cache.max_exact_tokens is None:
        return "They need the preallocated cache, scaled dot-product attention and no sliding window."
    widest, start = max(_WIDTHS), KEY_BLOCK - _BEFORE
    if context_limit is not None:
        start = min(start, context_limit - widest)
    if start < 1:
        return f"The context of {context_limit} tokens is too short to test bit-exact forward passes."
    choice = random.Random(0)
    ids = torch.tensor([[choice.randrange(len(embeddings)) for _ in range(start + widest)]])

    def read(length: int, width: int, layers: Sequence[int] = ()) -> Tensor:
        cache.rollback(length)
        return forward.run(ids[:, length : length + width], width, layers, None, None).logits

    cache.reset()
    forward(ids[:, : min(_READ, start)], 1)
    for layer in cache.held.layers:
        if isinstance(layer, PreallocatedLayer):
            layer.repeat(start)
    alone = [read(start + i, 1)[0] for i in range(min(widest, KEY_BLOCK + _AFTER - start))]
    last = model.config.get_text_config(decoder=True).num_hidden_layers
    with_states = [(width, (last, 0, last)) for width in _WIDTHS_WITH_STATES]
    try:
        for width, layers in [*((width, ()) for width in _WIDTHS), *with_states]:
            try:
                together = read(start, width, layers)
            except _NOT_POSSIBLE:
                if layers:  # no head can draft for this model either
                    break
                raise
            if any(not torch.equal(one, many) for one, many in zip(alone, together, strict=False)):
                more = " that also gives hidden states" if layers else ""
                return (
                    f"Here a forward pass of {width} tokens{more} gives different logits from those of one."
                )
    finally:
        cache.reset()
    return None
