"""Heads at work: what they have read of a context, with the target's hidden states or their own, and their rows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from specbench.backends.torch.cache_layers import PreallocatedLayer
from specbench.backends.torch.head_forward import (
    HeadForward,
    HeadInput,
    HeadOutput,
    choose_head_forward,
    joined,
)
from specbench.backends.torch.heads import Attend, DFlashHead, MedusaHeads, ParallelEagleHead, RecurrentHead
from specbench.backends.torch.scorer import DeviceTokens, FittedLogits
from specbench.decoding.protocols import Batch, ForwardOutput, ForwardRequest
from specbench.decoding.tree import tree_mask, tree_positions

Wanted = TypeVar("Wanted")
Given = TypeVar("Given")

Reads: TypeAlias = Generator[Wanted, Given, torch.Tensor]
"""A pass under way: it asks for what the head is to do, and returns the last rows, [rows, vocab]."""

Embed = Callable[[torch.Tensor], torch.Tensor]
"""From token ids to their embeddings."""


class HeadScorer(Generic[Wanted, Given]):
    """Gives a head's rows as if it were a model that reads the context.

    A pass asks for what it wants of the head piece by piece, so that pieces of several requests can be made in one.

    Args:
        layers: Of which of the target's layers it takes the hidden states, see ``ForwardRequest``.
        device: The head's.
        fitted: Makes its logits those of the target's tokens.
        context_limit: The longest context it can read, in tokens; ``None`` for no limit.
        embeddings: How many tokens it can read.

    Attributes:
        epoch: Contexts begun so far.
        batch: See ``decoding.protocols.Scorer``.
        longest: The most tokens of a branch of its drafts; ``None`` for any number.
    """

    takes_trees = reads_trees = True
    batch: Batch | None = None
    reads_in_parts = False
    longest: int | None = None

    def __init__(
        self,
        layers: Sequence[int],
        device: torch.device,
        fitted: FittedLogits,
        context_limit: int | None,
        embeddings: int,
    ) -> None:
        self.layers = tuple(layers)
        self.device, self.context_limit, self.embeddings = device, context_limit, embeddings
        self.vocabulary, self.vocab_size = fitted.vocabulary, fitted.vocab_size
        self.epoch = 0
        self.fitted = fitted
        self._known = 0  # positions at which the target's states are known, or were read

    @property
    def model(self) -> nn.Module:
        """The head."""
        raise NotImplementedError

    @property
    def cached_len(self) -> int:
        """How many of the first tokens of the context it has read."""
        raise NotImplementedError

    def reserve(self, asked: ForwardRequest) -> bool:  # noqa: ARG002
        """There is always room."""
        return True

    def twin(self, batch: Batch | None = None) -> HeadScorer[Wanted, Given]:
        """The same head for another request, whose passes are made with those of others where there is a batch."""
        made = self._twin()
        made.batch = batch
        return made

    def _twin(self) -> HeadScorer[Wanted, Given]:
        raise NotImplementedError

    def begin(self) -> None:
        """Start on a new context."""
        self.epoch += 1
        self._known = 0

    def resume(self, kept: int) -> None:
        """Start on a context whose first ``kept + 1`` tokens are the last one's: of these the target's states hold."""
        self.epoch += 1
        self._known = kept

    def take_states(self, length: int, states: torch.Tensor) -> None:
        """Take in the target's states.

        Args:
            length: They end with those of position ``length - 1``.
            states: [positions, layers, width], all that are new among them.
        """
        raise NotImplementedError

    def can_read(self, context: Sequence[int], drafted: Sequence[int]) -> bool:
        """Whether there are logits behind ``context + drafted``."""
        within = self.context_limit is None or len(context) + len(drafted) <= self.context_limit
        short = self.longest is None or len(drafted) < self.longest
        return within and short and 1 < len(context) == self._known + 1

    def score(self, asked: ForwardRequest) -> ForwardOutput:
        """The rows behind the context and a draft, of whose first nodes some may have been read before."""
        return HeadBatch(self).score([asked])[0]

    def reads(self, asked: ForwardRequest, rows: int) -> Reads[Wanted, Given]:
        """A pass: the last rows over the tokens that it drafts, [rows, vocab]."""
        raise NotImplementedError

    def made(self, wanted: Sequence[Wanted]) -> Sequence[Given]:
        """What passes of this head ask for, made in one."""
        raise NotImplementedError

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:
        """Drop what was read of drafts: what was kept of them is read again, with the target's states."""
        raise NotImplementedError


AnyHeadScorer: TypeAlias = HeadScorer[Any, Any]


class HeadBatch:
    """Makes passes of a head for several requests: what they want of it at a time is made in one.

    Args:
        loaded: The head.
    """

    def __init__(self, loaded: AnyHeadScorer) -> None:
        self._loaded = loaded

    @property
    def loaded(self) -> AnyHeadScorer:
        return self._loaded

    @torch.inference_mode()
    def score(self, asked: Sequence[ForwardRequest]) -> list[ForwardOutput]:
        """See ``decoding.protocols.Batch``."""
        scorers = [cast("AnyHeadScorer", each.scorer) for each in asked]
        under_way = {
            i: scorer.reads(each, len(each.tokens) + 1 if each.rows is None else each.rows)
            for i, (scorer, each) in enumerate(zip(scorers, asked, strict=True))
        }
        given: dict[int, Any] = {}
        logits: dict[int, torch.Tensor] = {}
        try:
            while under_way:
                wanted: dict[int, Any] = {}
                for i, reads in under_way.items():
                    try:
                        wanted[i] = reads.send(given.get(i))
                    except StopIteration as end:
                        logits[i] = end.value
                under_way = {i: under_way[i] for i in wanted}
                given = dict(
                    zip(wanted, self._loaded.made([*wanted.values()]) if wanted else (), strict=True)
                )
            return [ForwardOutput(scorer.fitted(logits[i])) for i, scorer in enumerate(scorers)]
        except BaseException:
            for scorer in scorers:  # drafts were read in part, and are read again
                scorer.rollback(scorer.cached_len)
            raise


class EagleScorer(HeadScorer[HeadInput, HeadOutput]):
    """An EAGLE head with keys and values of its own.

    It holds an entry for every token of the context but the first one: token t + 1 with the target's state at t. Drafts
    stand behind these, with its own outputs in place of the states.

    Args:
        head: The head.
        embed: The target's embeddings, unless it has its own.
        layers, fitted, context_limit: See ``HeadScorer``.
        way: Through the head; ``None`` for the quickest.
    """

    def __init__(
        self,
        head: RecurrentHead,
        embed: Embed,
        layers: Sequence[int],
        fitted: FittedLogits,
        context_limit: int | None,
        way: HeadForward | None = None,
    ) -> None:
        config: Any = head.shape.layer
        weight = next(head.parameters())
        super().__init__(layers, weight.device, fitted, context_limit, config.vocab_size)
        self.head, self._embed, self._dtype = head, head.embed_tokens or embed, weight.dtype
        self._way = way or choose_head_forward(head)
        self._caches: list[Any] = [PreallocatedLayer() for _ in head.layers]
        self._states: list[torch.Tensor] = []  # that are known and not read
        self._read = 0  # tokens that were read with them
        self._last = torch.empty(0)  # states of the last of these
        self._features: list[torch.Tensor] = []  # behind the context, and behind each node of the draft
        self._rows: list[torch.Tensor] = []

    def _twin(self) -> EagleScorer:
        return type(self)(self.head, self._embed, self.layers, self.fitted, self.context_limit, self._way)

    @property
    def model(self) -> nn.Module:
        return self.head

    @property
    def cached_len(self) -> int:
        return self._read + 1 if self._read else 0

    def begin(self) -> None:
        super().begin()
        for cache in self._caches:
            cache.reset()
        self._read = 0
        self._states, self._features, self._rows = [], [], []

    def resume(self, kept: int) -> None:
        super().resume(kept)
        unread = [torch.cat(self._states)[: kept - self._read]] if kept > self._read else []
        self._read, self._states = min(self._read, kept), unread
        self._features, self._rows = [], []
        self._drop_drafts()

    def take_states(self, length: int, states: torch.Tensor) -> None:
        fresh = length - self._known
        self._states.append(states[-fresh:].to(self.device, self._dtype))
        self._known = length

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:  # noqa: ARG002
        if self._read and self.cached_len > length:  # as a timed pass is taken back, to be made again
            self._read -= 1
            self._states.insert(0, self._last)
        self._drop_drafts()

    def _drop_drafts(self) -> None:
        for cache in self._caches:
            cache.rollback(self._read)
        self._features, self._rows = self._features[:1], self._rows[:1]

    def reads(self, asked: ForwardRequest, rows: int) -> Reads[HeadInput, HeadOutput]:
        if self._read < len(asked.context) - 1:
            yield from self._read_context(asked.context)
        parents = range(-1, len(asked.tokens) - 1) if asked.parents is None else asked.parents
        yield from self._read_draft(asked.tokens, parents, chain=asked.parents is None)
        return joined([row[None] for row in self._rows[-rows:]])

    def made(self, wanted: Sequence[HeadInput]) -> list[HeadOutput]:
        return self._way(wanted)

    def _read_context(self, context: Sequence[int]) -> Generator[HeadInput, HeadOutput]:
        """Read what is new, each token with the target's state at the one before it."""
        past = self._read
        ids, states = self._news(context)
        found = yield self._reading(ids, self.head.fuse(states), range(past, past + len(ids)), None, 1)
        self._was_read(context, states)
        self._features, self._rows = [found.features[-1]], [found.logits[0]]

    def _news(self, context: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens that are new, and the states that go with them, [tokens, layers, width]."""
        self._drop_drafts()
        states = self._states[0] if len(self._states) == 1 else torch.cat(self._states)
        return torch.tensor(context[self._read + 1 :], device=self.device), states

    def _was_read(self, context: Sequence[int], states: torch.Tensor) -> None:
        """The pass over these has been made."""
        self._states, self._last, self._read = [], states[-1:], len(context) - 1

    def _read_draft(
        self, tokens: Sequence[int], parents: Sequence[int], *, chain: bool
    ) -> Generator[HeadInput, HeadOutput]:
        """Read the nodes that were not read yet, those of one depth together."""
        while (first := len(self._rows) - 1) < len(tokens):
            end = next((i for i in range(first, len(tokens)) if parents[i] >= first), len(tokens))
            nodes = tokens[first:end]
            ids = nodes.tensor if isinstance(nodes, DeviceTokens) else torch.tensor([*nodes])
            features = torch.stack([self._features[parents[node] + 1] for node in range(first, end)])
            positions: range | torch.Tensor = range(self._read + first, self._read + end)
            mask = None
            if not chain:
                last = self._read - 1
                positions = tree_positions(last, parents[:end], self.device)[0, first + 1 :]
                mask = tree_mask(last, parents[:end], self._read + end, self.device)[..., first + 1 :, :]
            found = yield self._reading(ids.to(self.device), features, positions, mask, end - first)
            self._features += found.features
            self._rows += found.logits

    def _reading(
        self,
        ids: torch.Tensor,
        features: torch.Tensor,
        positions: range | torch.Tensor,
        mask: torch.Tensor | None,
        wanted: int,
    ) -> HeadInput:
        return HeadInput(self._embed(ids), features, positions, mask, self._caches, wanted)


class ParallelScorer(EagleScorer):
    """P-EAGLE: with what is new of the context it reads masks, and has all rows of a draft by one pass. Of the draft
    itself it sees how long it is.

    Args:
        head: The head.
        embed, layers, fitted, context_limit, way: See ``EagleScorer``.
    """

    head: ParallelEagleHead

    def __init__(
        self,
        head: ParallelEagleHead,
        embed: Embed,
        layers: Sequence[int],
        fitted: FittedLogits,
        context_limit: int | None,
        way: HeadForward | None = None,
    ) -> None:
        super().__init__(head, embed, layers, fitted, context_limit, way)
        self.longest = head.ahead
        self._masks = head.mask_features().detach()

    def reads(self, asked: ForwardRequest, rows: int) -> Reads[HeadInput, HeadOutput]:
        if self._read < len(asked.context) - 1:
            yield from self._read_context(asked.context)
        return torch.stack([self._rows[depth] for depth in _depths(asked)[-rows:]])

    def _read_context(self, context: Sequence[int]) -> Generator[HeadInput, HeadOutput]:
        """Read what is new, and masks behind it, which the next pass drops."""
        past = self._read
        ids, states = self._news(context)
        ids = torch.cat((ids, ids.new_full((len(self._masks),), self.head.mask)))
        features = torch.cat((self.head.fuse(states), self._masks))
        found = yield self._reading(ids, features, range(past, past + len(ids)), None, self.head.ahead)
        self._was_read(context, states)
        self._rows = [*found.logits]

    def _drop_drafts(self) -> None:
        """Rows are dropped with what they stand behind."""
        for cache in self._caches:
            cache.rollback(self._read)


class Guess(NamedTuple):
    """What a Medusa head is to guess.

    Attributes:
        state: From the target's last hidden state, [1, width].
        head: Which one.
    """

    state: torch.Tensor
    head: int


class MedusaScorer(HeadScorer[Guess, torch.Tensor]):
    """Medusa heads: of a draft they see how long it is.

    Args:
        heads: The heads.
        layer: The target's last one.
        dtype: Of what they are given.
        device, fitted, embeddings: See ``HeadScorer``.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        fitted: FittedLogits,
        embeddings: int,
    ) -> None:
        super().__init__((layer,), device, fitted, None, embeddings)
        self.heads, self.longest, self._dtype = heads, heads.heads, dtype
        self._state: torch.Tensor | None = None
        self._rows: list[torch.Tensor] = []

    def _twin(self) -> MedusaScorer:
        return MedusaScorer(
            self.heads, self.layers[0], self._dtype, self.device, self.fitted, self.embeddings
        )

    @property
    def model(self) -> nn.Module:
        return self.heads

    @property
    def cached_len(self) -> int:
        return self._known

    def begin(self) -> None:
        super().begin()
        self._state, self._rows = None, []

    def resume(self, kept: int) -> None:
        super().resume(kept)
        self._state, self._rows = None, []

    def take_states(self, length: int, states: torch.Tensor) -> None:
        self._state, self._rows = states[-1:, 0].to(self.device, self._dtype), []
        self._known = length

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:  # noqa: ARG002
        self._rows = []

    def reads(self, asked: ForwardRequest, rows: int) -> Reads[Guess, torch.Tensor]:
        depths = _depths(asked)[-rows:]
        assert self._state is not None
        while len(self._rows) <= max(depths):
            self._rows.append((yield Guess(self._state, len(self._rows))))
        return torch.cat([self._rows[depth] for depth in depths])

    def made(self, wanted: Sequence[Guess]) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for head in {each.head for each in wanted}:
            places = [i for i, each in enumerate(wanted) if each.head == head]
            logits = self.heads.logits(joined([wanted[i].state for i in places]), head)
            found |= zip(places, logits.split(1), strict=True)
        return [found[i] for i in range(len(wanted))]


def _depths(asked: ForwardRequest) -> list[int]:
    """How many tokens of the draft lead to its rows: to the context's own, and to each node's."""
    depths = [0]
    for parent in range(-1, len(asked.tokens) - 1) if asked.parents is None else asked.parents:
        depths.append(depths[parent + 1] + 1)
    return depths


class Block(NamedTuple):
    """What DFlash is to guess.

    Attributes:
        last: The context's last token.
        place: Its position.
        caches: What the context is known by, of each layer.
    """

    last: int
    place: int
    caches: Sequence[Any]


class DFlashScorer(HeadScorer[Block, torch.Tensor]):
    """DFlash with keys and values of the context: of a draft it sees how long it is.

    Args:
        head: The head.
        embed: The target's embeddings, unless it has its own.
        layers, fitted, context_limit: See ``HeadScorer``.
    """

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
        self._caches: list[Any] = [PreallocatedLayer() for _ in head.layers]
        self._rows: torch.Tensor | None = None

    def _twin(self) -> DFlashScorer:
        return DFlashScorer(self.head, self._embed, self.layers, self.fitted, self.context_limit)

    @property
    def model(self) -> nn.Module:
        return self.head

    @property
    def cached_len(self) -> int:
        return self._known

    def begin(self) -> None:
        super().begin()
        self._rows = None
        for cache in self._caches:
            cache.reset()

    def resume(self, kept: int) -> None:
        super().resume(kept)
        self._rows = None
        for cache in self._caches:
            cache.rollback(kept)

    @torch.inference_mode()
    def take_states(self, length: int, states: torch.Tensor) -> None:
        fresh = states[states.shape[0] + self._known - length :].to(self.device, self._dtype)
        positions = torch.arange(self._known, length, device=self.device)
        for cache, added in zip(
            self._caches, self.head.remembered(fresh[None], positions[None]), strict=True
        ):
            cache.update(*added)
        self._known, self._rows = length, None

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:  # noqa: ARG002
        self._rows = None

    def reads(self, asked: ForwardRequest, rows: int) -> Reads[Block, torch.Tensor]:
        if self._rows is None:
            self._rows = yield Block(asked.context[-1], self._known, self._caches)
        return self._rows[_depths(asked)[-rows:]]

    def made(self, wanted: Sequence[Block]) -> list[torch.Tensor]:
        block, masks = self.head.block, [self.head.mask] * (self.head.block - 1)
        ids = torch.tensor([[each.last, *masks] for each in wanted], device=self.device)
        positions = torch.tensor(
            [[*range(each.place, each.place + block)] for each in wanted], device=self.device
        )
        attends = [_beside([each.caches[layer] for each in wanted]) for layer in range(len(self.head.layers))]
        return [*self.head.guess(self._embed(ids).to(self._dtype), positions, attends)]


def _beside(caches: Sequence[Any]) -> Attend:
    """All tokens of a row attend to what its cache holds and to each other."""

    def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows = zip(caches, *(each.split(1) for each in (query, key, value)), strict=True)
        return joined([_with(cache, *row) for cache, *row in rows])

    return attended


def _with(cache: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    keys = torch.cat((cache.keys[:, :, : cache.used], key), dim=2)
    values = torch.cat((cache.values[:, :, : cache.used], value), dim=2)
    return scaled_dot_product_attention(query, keys, values, enable_gqa=True).transpose(1, 2)
