"""Trained heads as scorers: their state in a context, and their logits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple, Self, TypeAlias, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from specbench.backends.torch.cache_layers import PreallocatedLayer
from specbench.backends.torch.caches import KVCache
from specbench.backends.torch.forward import concat
from specbench.backends.torch.head_forward import HeadInput, HeadOutput, choose_head_forward
from specbench.backends.torch.heads import MedusaHeads, ParallelEagleHead, RecurrentHead
from specbench.backends.torch.scorer import DeviceTokens, FittedLogits
from specbench.decoding.protocols import Batch, ForwardOutput, ForwardRequest
from specbench.decoding.records import depths_of
from specbench.decoding.tree import tree_rows

Part: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
"""Computes the outputs of a part of a head for the inputs of several requests; the same object for all clones."""

HeadSteps: TypeAlias = Generator[tuple[Part, Any], Any, Tensor]
"""A forward pass in progress: yields a part of the head and an input for it, is sent the output, and returns logits,
[rows, vocab]."""

Reading: TypeAlias = Generator[tuple[Part, HeadInput], HeadOutput]


class OfTarget(NamedTuple):
    """What a head has of its target.

    Attributes:
        embed: From token ids to the target's embeddings, unless the head has its own.
        layers: Layers whose hidden states it reads, see ``ForwardRequest``.
        fitted: Fits its logits to the target's vocabulary.
        context_limit: Its longest context, in tokens; ``None`` for no limit.
        dtype: Of the states and embeddings that it reads.
        config, cache: The target's, for heads that attend to its keys and values.
    """

    embed: Callable[[Tensor], Tensor]
    layers: Sequence[int]
    fitted: FittedLogits
    context_limit: int | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    config: PreTrainedConfig | None = None
    cache: KVCache | None = None


class HeadScorer:
    """Scorer that returns a head's logits as if the head were a model with the context as input.

    A forward pass is a generator that yields the inputs of the head one by one, so that the inputs of several requests
    can be computed together.

    Attributes:
        epoch: Number of contexts begun so far.
        longest: Maximum length of a branch of its drafts; ``None`` for no limit.
        target_cache: The target's cache; ``None`` if it does not attend to that.
    """

    takes_trees = reads_trees = True
    batch: Batch | None = None
    reads_in_parts = False
    reads_context = False  # before it drafts, in a pass that grows with the context
    longest: int | None = None
    target_cache: KVCache | None = None
    _caches: Sequence[Any] = ()  # a PreallocatedLayer for each layer that has keys and values

    def __init__(self, head: Any, target: OfTarget) -> None:
        self.model = self.head = head
        self.epoch, self.layers = 0, tuple(target.layers)
        self.context_limit, self.device, self._dtype = target.context_limit, target.device, target.dtype
        self.fitted = target.fitted
        self.vocabulary, self.vocab_size = target.fitted.vocabulary, target.fitted.vocab_size
        self._embed: Callable[[Tensor], Tensor] = getattr(head, "embed_tokens", None) or target.embed
        self._reset()

    def _reset(self) -> None:
        """Forget what is known of the context."""
        self._known = 0  # positions whose target states are known, or were read

    @property
    def cached_len(self) -> int:
        """Leading tokens of the context that it has read."""
        return self._known

    def reserve(self, request: ForwardRequest) -> bool:
        """Return true: a head needs no memory from a pool."""
        return True

    def clone_for(self, batch: Batch | None = None, target_cache: KVCache | None = None) -> Self:
        """Return a scorer of the same head for another request.

        Args:
            batch: May run its forward passes.
            target_cache: The cache of the request's target; ``None`` for a head that does not attend to it.
        """
        clone = copy.copy(self)
        clone.target_cache = target_cache
        clone._caches = [PreallocatedLayer() for _ in self._caches]
        clone.batch, clone.epoch = batch, 0
        clone._reset()
        return clone

    def begin(self) -> None:
        """Start a new context; nothing is kept of the last one."""
        self.epoch += 1
        for cache in self._caches:
            cache.reset()
        self._reset()

    def take_states(self, length: int, states: Tensor) -> None:
        """Receive the target's hidden states, [positions, layers, width], of the last positions before ``length``.

        They include at least all positions whose states were not received before.
        """
        raise NotImplementedError

    def can_read(self, context: Sequence[int], drafted: Sequence[int]) -> bool:
        """Return whether it has logits after ``context + drafted``."""
        within = self.context_limit is None or len(context) + len(drafted) <= self.context_limit
        short = self.longest is None or len(drafted) < self.longest
        return within and short and 1 < len(context) == self._known + 1

    def score(self, request: ForwardRequest) -> ForwardOutput:
        """Run a forward pass over the context and a draft, whose first nodes may have been read before."""
        return HeadBatch(self).score([request])[0]

    def steps(self, request: ForwardRequest, rows: int) -> HeadSteps:
        """Run a forward pass step by step; return the last logits over the tokens that it drafts, [rows, vocab]."""
        raise NotImplementedError

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:
        """Drop everything computed for drafts; accepted tokens are fed again, with the target's states."""
        raise NotImplementedError


class HeadBatch:
    """Runs forward passes of a head for several requests together."""

    def __init__(self, loaded: HeadScorer) -> None:
        self.loaded = loaded

    @torch.inference_mode()
    def score(self, requests: Sequence[ForwardRequest]) -> list[ForwardOutput]:
        """Run forward passes, see ``decoding.protocols.Batch``."""
        scorers = [cast("HeadScorer", request.scorer) for request in requests]
        running = {
            i: scorer.steps(request, len(request.tokens) + 1 if request.rows is None else request.rows)
            for i, (scorer, request) in enumerate(zip(scorers, requests, strict=True))
        }
        outputs: dict[int, Any] = {}
        logits: dict[int, Tensor] = {}
        try:
            while running:
                inputs: dict[int, Any] = {}
                for i, steps in running.items():
                    try:
                        inputs[i] = steps.send(outputs.get(i))
                    except StopIteration as end:
                        logits[i] = end.value
                running, outputs = {i: running[i] for i in inputs}, {}
                for part in dict.fromkeys(part for part, _ in inputs.values()):
                    same = [i for i, (own, _) in inputs.items() if own == part]
                    outputs |= zip(same, part([inputs[i][1] for i in same]), strict=True)
            return [ForwardOutput(scorer.fitted(logits[i])) for i, scorer in enumerate(scorers)]
        except BaseException:
            for scorer in scorers:  # drafts were read in part, and are read again
                scorer.rollback(scorer.cached_len)
            raise


class EagleScorer(HeadScorer):
    """An EAGLE head with keys and values of its own.

    It has an entry for every token of the context but the first: token t + 1 with the target's state at t. Drafts come
    after these, with its own outputs in place of the states.
    """

    reads_context = True

    def __init__(self, head: RecurrentHead, target: OfTarget) -> None:
        super().__init__(head, target)
        self._forward = choose_head_forward(head)
        self._caches = [PreallocatedLayer() for _ in head.layers]

    def _reset(self) -> None:
        super()._reset()
        self._states: list[Tensor] = []  # known and not read yet
        self._read = 0  # tokens that were read with the target's states
        self._last = torch.empty(0)  # states of the last of these
        self._features: list[Tensor] = []  # after the context, and after each node of the draft
        self._rows: list[Tensor] = []

    @property
    def cached_len(self) -> int:
        return self._read + 1 if self._read else 0

    def take_states(self, length: int, states: Tensor) -> None:
        fresh = length - self._known
        self._states.append(states[-fresh:].to(self.device, self._dtype))
        self._known = length

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:
        if self._read and self.cached_len > length:  # a timed forward pass is taken back, to be run again
            self._read -= 1
            self._states.insert(0, self._last)
        self._drop_drafts()

    def _drop_drafts(self) -> None:
        for cache in self._caches:
            cache.rollback(self._read)
        self._features, self._rows = self._features[:1], self._rows[:1]

    def steps(self, request: ForwardRequest, rows: int) -> HeadSteps:
        if self._read < len(request.context) - 1:
            yield from self._read_context(request.context)
        parents = range(-1, len(request.tokens) - 1) if request.parents is None else request.parents
        yield from self._read_draft(request.tokens, parents, chain=request.parents is None)
        return concat([row[None] for row in self._rows[-rows:]])

    def _read_context(self, context: Sequence[int]) -> Reading:
        """Read new tokens, each with the target's state at the one before it."""
        past = self._read
        ids, states = self._new_tokens(context)
        places = range(past, past + len(ids))
        output = yield self._forward, self._input(ids, self.head.fuse(states), places, None, 1)
        self._mark_read(context, states)
        self._features, self._rows = [output.features[-1]], [output.logits[0]]

    def _new_tokens(self, context: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the tokens to read, and the states that go with them, [tokens, layers, width]."""
        self._drop_drafts()
        states = self._states[0] if len(self._states) == 1 else torch.cat(self._states)
        return torch.tensor(context[self._read + 1 :], device=self.device), states

    def _mark_read(self, context: Sequence[int], states: Tensor) -> None:
        self._states, self._last, self._read = [], states[-1:], len(context) - 1

    def _read_draft(self, tokens: Sequence[int], parents: Sequence[int], *, chain: bool) -> Reading:
        """Read the nodes that were not read yet, those of one depth together."""
        while (first := len(self._rows) - 1) < len(tokens):
            end = next((i for i in range(first, len(tokens)) if parents[i] >= first), len(tokens))
            nodes = tokens[first:end]
            ids = nodes.tensor if isinstance(nodes, DeviceTokens) else torch.tensor([*nodes])
            features = torch.stack([self._features[parents[node] + 1] for node in range(first, end)])
            places: range | Tensor = range(self._read + first, self._read + end)
            mask = None
            if not chain:
                tree = parents[:end]
                (places,), mask = tree_rows(self._read - 1, tree, self._read + end, self.device, first + 1)
            given = self._input(ids.to(self.device), features, places, mask, end - first)
            output = yield self._forward, given
            self._features += output.features
            self._rows += output.logits

    def _input(
        self, ids: Tensor, features: Tensor, positions: range | Tensor, mask: Tensor | None, wanted: int
    ) -> HeadInput:
        return HeadInput(self._embed(ids), features, positions, mask, self._caches, wanted)


class ParallelScorer(EagleScorer):
    """P-EAGLE: reads masks after what is new of the context, and has all logits of a draft from this one pass."""

    def __init__(self, head: ParallelEagleHead, target: OfTarget) -> None:
        super().__init__(head, target)
        self.longest = head.ahead
        self._masks = head.mask_features().detach()

    def steps(self, request: ForwardRequest, rows: int) -> HeadSteps:
        if self._read < len(request.context) - 1:
            yield from self._read_context(request.context)
        return torch.stack([self._rows[depth] for depth in node_depths(request)[-rows:]])

    def _read_context(self, context: Sequence[int]) -> Reading:
        """Run the head over new tokens and masks after them; the next forward pass drops the masks."""
        past = self._read
        ids, states = self._new_tokens(context)
        ids = torch.cat((ids, ids.new_full((len(self._masks),), self.head.mask)))
        features = torch.cat((self.head.fuse(states), self._masks))
        places = range(past, past + len(ids))
        output = yield self._forward, self._input(ids, features, places, None, self.head.ahead)
        self._mark_read(context, states)
        self._rows = [*output.logits]

    def _drop_drafts(self) -> None:
        """Do nothing: the logits depend only on the context and stay valid."""
        for cache in self._caches:
            cache.rollback(self._read)


class MedusaScorer(HeadScorer):
    """Medusa heads, whose logits depend on the target's last hidden state and the depth in the draft, not on draft
    tokens. Each head is a part, and its input is that state, [1, width].
    """

    def __init__(self, heads: MedusaHeads, target: OfTarget) -> None:
        super().__init__(heads, target)
        self.longest = heads.heads
        self._parts = [partial(self._logits_of, head) for head in range(heads.heads)]

    def _logits_of(self, head: int, states: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.head.logits(concat(states), head).split(1)

    def _reset(self) -> None:
        super()._reset()
        self._state: Tensor | None = None
        self._rows: list[Tensor] = []

    def take_states(self, length: int, states: Tensor) -> None:
        self._state, self._rows = states[-1:, 0].to(self.device, self._dtype), []
        self._known = length

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:
        self._rows = []

    def steps(self, request: ForwardRequest, rows: int) -> HeadSteps:
        depths = node_depths(request)[-rows:]
        assert self._state is not None
        while len(self._rows) <= max(depths):
            self._rows.append((yield self._parts[len(self._rows)], self._state))
        return torch.cat([self._rows[depth] for depth in depths])


def node_depths(request: ForwardRequest) -> list[int]:
    """Return the depth in the draft of each row, from 0 after the context."""
    if request.parents is None:
        return [*range(len(request.tokens) + 1)]
    return [0, *depths_of(request.parents)]
