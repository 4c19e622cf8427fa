"""A model together with its cache: feed it a context, get logits, roll it back."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, cast, overload

import torch

from specbench.backends.torch.caches import KVCache, NoKVCache, change_of_rotation, make_cache
from specbench.backends.torch.forward import Forward, FusedForward, HFForward
from specbench.backends.torch.kernels.surgery import quantizes_activations
from specbench.backends.torch.pools import PooledCache, PoolKind
from specbench.backends.torch.trials import (
    choose_forward,
    trees_are_right,
    why_not_batchable,
    why_widths_differ,
)
from specbench.base.errors import UsageError
from specbench.decoding.logits import DraftVocabulary
from specbench.decoding.protocols import Batch, ForwardOutput, ForwardRequest
from specbench.decoding.tree import tree_mask, tree_positions
from specbench.options import CacheKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DeviceTokens(Sequence[int]):
    """Token ids that stay on their device until somebody reads one: only that waits for the device."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._tensors = list(tensors)
        self._read: list[int] | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """[length], on the device."""
        return torch.stack(self._tensors)

    def append(self, token: torch.Tensor) -> None:
        """Add one, a tensor of no dimension."""
        self._tensors.append(token)
        self._read = None

    def __len__(self) -> int:
        return len(self._tensors)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> DeviceTokens: ...

    def __getitem__(self, index: int | slice) -> int | DeviceTokens:
        if isinstance(index, slice):
            return DeviceTokens(self._tensors[index])
        return self._values()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values())

    def _values(self) -> list[int]:
        if self._read is None:
            self._read = [int(token) for token in self.tensor.tolist()] if self._tensors else []
        return self._read


class FittedLogits:
    """Makes a drafter's logits as wide as its target's, or leaves them to its vocabulary.

    Args:
        vocab_size: Width of the target's; logits are cut or padded with -inf to it. ``None`` for their own width. (Two
            models of one tokenizer may pad their vocabularies differently.)
        places: By logit, which of the target's tokens it belongs to, int64. ``None``: the first is the first.

    Attributes:
        vocabulary: Of these places, if there are any: logits are its own then.
    """

    def __init__(self, vocab_size: int | None, places: torch.Tensor | None = None) -> None:
        self.vocab_size = vocab_size
        self.vocabulary = None if places is None else DraftVocabulary(places, vocab_size)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, own tokens] -> [rows, own tokens] or [rows, vocab_size]."""
        width = logits.shape[-1]
        if self.vocabulary is not None or self.vocab_size is None or width == self.vocab_size:
            return logits
        if width > self.vocab_size:
            return logits[..., : self.vocab_size]
        return torch.nn.functional.pad(logits, (0, self.vocab_size - width), value=float("-inf"))


class Scorer:
    """Reads contexts with one causal language model, batch size 1.

    Args:
        model: A ``transformers`` causal language model in eval mode.
        cache: A cache kind, or a cache to share with another scorer over the same keys and values.
        vocab_size, places: See ``FittedLogits``.
        context_limit: The longest context the model can read, in tokens; ``None`` for no limit.
        output_device: Where the logits go; ``None`` for the device of the input embeddings. (A drafter's distributions
            have to lie beside the target's, and a model spread over devices ends on another one than it began on.)

    Attributes:
        epoch: Contexts begun so far.
        batch: See ``decoding.protocols.Scorer``.
    """

    batch: Batch | None = None
    _loaded: Scorer | None = None  # whose twin it is
    _owns_slot = True

    def __init__(
        self,
        model: PreTrainedModel,
        cache: CacheKind | KVCache = "dynamic",
        *,
        vocab_size: int | None = None,
        context_limit: int | None = None,
        output_device: torch.device | None = None,
        places: torch.Tensor | None = None,
    ) -> None:
        self.model = model
        self.epoch = 0
        self._root = 0  # length of the last pass's context
        weight = cast("torch.Tensor", model.get_input_embeddings().weight)
        self.cache: KVCache = make_cache(cache, model.config) if isinstance(cache, str) else cache
        self.context_limit = context_limit
        self.device = weight.device
        self.output_device = output_device or self.device
        self.vocab_size = vocab_size
        self._fitted = FittedLogits(vocab_size, None if places is None else places.to(self.output_device))
        self.vocabulary = self._fitted.vocabulary
        self.embeddings = weight.shape[0]
        self._change = change_of_rotation(model.config)
        self._pass = choose_forward(model, self.cache, shared=not isinstance(cache, str))
        self._uncached_pass = HFForward(model, NoKVCache())
        self._ragged: dict[PoolKind, str | None] = {}  # by kind of pool; twins share what was tried

    def twin(self, cache: KVCache, batch: Batch | None = None, *, shares: bool = False) -> Scorer:
        """Another scorer of this model, with its settings; what was tried out for one holds for the other.

        Args:
            cache: The twin's; of no fixed shapes.
            batch: Who makes its passes together with those of others.
            shares: Whether the cache is one of another model's, of which this one is a cheaper form.
        """
        twin = copy.copy(self)
        vars(twin).pop("takes_trees", None)
        twin.cache, twin.batch, twin.epoch = cache, batch, 0
        twin._loaded, twin._owns_slot = self, not shares
        twin._root = 0
        kind = type(self._pass) if isinstance(self._pass, FusedForward) else HFForward
        twin._pass = kind(self.model, cache)
        return twin

    @property
    def cached_len(self) -> int:
        """How many of the first tokens of the context it holds."""
        length = self.cache.length
        return (
            min(self.cache.own, length) if isinstance(self.cache, PooledCache) and self._owns_slot else length
        )

    def reserve(self, asked: ForwardRequest) -> bool:
        """Make room for a pass, see ``decoding.protocols.Scorer``: in a pool; other caches grow by themselves."""
        slot = self.cache
        if not isinstance(slot, PooledCache):
            return True
        end = len(asked.context) + len(asked.tokens)
        if not self._owns_slot:
            return slot.reserve(end)
        if slot.own < slot.length:
            slot.rollback(slot.own)
        if asked.layers:  # wanted of every token
            return slot.reserve(end)
        fed = len(asked.tokens) + 1 if asked.rows is None else asked.rows  # at the least
        return slot.reserve(end, asked.context[: min(len(asked.context) - 1, end - fed)])

    def require(self, asked: ForwardRequest) -> None:
        """Make room for a pass.

        Raises:
            UsageError: There is none.
        """
        if not self.reserve(asked):
            raise UsageError(
                "The memory for keys and values is full.", "Give it more, or fewer requests at a time."
            )

    def mark_read(self, asked: ForwardRequest) -> None:
        """The pass has been made."""
        self._root = len(asked.context)
        if isinstance(self.cache, PooledCache) and self._owns_slot:
            self.cache.own = self.cache.length
            self.cache.publish(asked.context)

    @property
    def reads_in_parts(self) -> bool:
        """Whether it holds what it has read."""
        return not isinstance(self.cache, NoKVCache)

    def begin(self) -> None:
        """Start on a new context. Whoever changed the model did so before."""
        self.epoch += 1
        self.cache.reset()

    def resume(self, kept: int) -> None:
        """Start on a new context, see ``decoding.protocols.Scorer``.

        Layers that forget (sliding windows, convolutions) and rotations that change with the length begin anew.
        """
        if self.reads_trees:
            self.epoch += 1
            self.rollback(kept)
        else:
            self.begin()

    @property
    def way(self) -> type[Forward]:
        """How its passes are made."""
        return type(self._pass)

    @cached_property
    def rounding(self) -> torch.dtype:
        """What rounds most coarsely on the way to the logits: int8 in layers that round what they are given to bytes,
        else the weights' dtype."""
        weight = cast("torch.Tensor", self.model.get_input_embeddings().weight)
        return torch.int8 if quantizes_activations(self.model) else weight.dtype

    @property
    def reads_trees(self) -> bool:
        """Whether there are passes over trees at all; a drafter needs no more."""
        return self.cache.takes_trees and self._change is None

    @cached_property
    def takes_trees(self) -> bool:
        """Whether drafts may be trees: a trial on the model as it is gives what separate passes give.

        Never of an int8 target: a branch's rows sum their keys in another order, and bytes make much of that.
        """
        if not self.reads_trees or self.rounding == torch.int8:
            return False
        if self._loaded is not None:
            return self._loaded.takes_trees
        try:
            return trees_are_right(self.model, self.cache, self._pass)
        finally:
            self.begin()

    def why_not_batchable(self, kind: PoolKind) -> str | None:
        """Why several requests in a pool cannot share a pass, in a sentence; ``None`` if they can. Tried out once."""
        if kind not in self._ragged:
            self._ragged[kind] = why_not_batchable(self.model, kind, self.way)
        return self._ragged[kind]

    def why_not_bit_exact(self) -> str | None:
        """Why passes of different widths may give different logits, in a sentence; ``None`` if they do not.

        Tried out, so that the context in the cache is lost.
        """
        try:
            return why_widths_differ(self.model, self.cache, self._pass, self.context_limit)
        finally:
            self.begin()

    def require_bit_exact(self) -> None:
        """Refuse a model whose logits depend on the width of the pass.

        Raises:
            UsageError: They do, or nothing is known.
        """
        reason = self.why_not_bit_exact()
        if reason is not None:
            raise UsageError(f"Bit-exact passes cannot be had here. {reason}", "Leave --bit-exact out.")

    def score(self, asked: ForwardRequest) -> ForwardOutput:
        """Make a pass, see ``decoding.protocols.Scorer``."""
        if self.batch is not None:
            return self.batch.score([asked])[0]
        self.require(asked)
        if asked.parents is not None:
            rows = self._feed_tree(asked.context, asked.tokens, asked.parents, asked.rows, asked.layers)
        else:
            rows = self._feed_chain(asked.context, asked.tokens, asked.rows, asked.layers)
        self.mark_read(asked)
        return rows

    def logits(
        self, context: Sequence[int], drafted: Sequence[int] = (), rows: int | None = None
    ) -> torch.Tensor:
        """The logits of a pass over a chain, made at once; for the arguments see ``ForwardRequest``."""
        return self.score(ForwardRequest(self, context, drafted, rows=rows)).logits

    def _feed_chain(
        self, context: Sequence[int], drafted: Sequence[int], rows: int | None, layers: Sequence[int]
    ) -> ForwardOutput:
        rows = len(drafted) + 1 if rows is None else rows
        if self._change is not None and self.cache.length <= self._change < len(context) + len(drafted):
            return self._across_change(context, drafted, rows, self._change, layers)
        return self._feed(context, drafted, rows, layers)

    def _across_change(
        self, context: Sequence[int], drafted: Sequence[int], rows: int, change: int, layers: Sequence[int]
    ) -> ForwardOutput:
        """Rows where a context of more than ``change`` tokens has all its positions rotated otherwise.

        The cache never holds both kinds: it stays in front of the change as long as drafts alone pass it, whose logits
        are computed without a cache, and is filled anew when the context itself has passed it.
        """
        if len(context) > change:
            self.cache.reset()
            return self._feed(context, drafted, rows, layers)
        behind = len(context) + len(drafted) - change
        whole = self._forward([*context, *drafted], min(rows, behind), layers, cached=False)
        if rows <= behind:
            return whole
        before = self._feed(context, drafted[: change - len(context)], rows - behind, layers)
        if whole.hidden is not None:
            whole = whole._replace(hidden=whole.hidden[-behind:])
        return _joined([before, whole], rows)

    def _feed(
        self, context: Sequence[int], drafted: Sequence[int], rows: int, layers: Sequence[int] = ()
    ) -> ForwardOutput:
        start = self.cache.length
        if drafted and start == 0 and self.cache.separate_prefill:
            behind_context = self._forward(context, 1, layers)
            return _joined([behind_context, self._forward(drafted, len(drafted), layers)], rows)
        widest = self.cache.max_exact_tokens
        left = drafted[max(0, start - len(context)) :]
        if isinstance(left, DeviceTokens) and len(left) and widest is None:
            read = torch.tensor(context[start:], dtype=torch.long, device=self.device)
            return self._forward(torch.cat([read, left.tensor.to(self.device)]), rows, layers)
        tokens = [*context[start:], *left]
        if widest is None or start == 0 or len(tokens) <= widest:
            return self._forward(tokens, rows, layers)
        found = []
        for first in range(0, len(tokens), widest):
            part = tokens[first : first + widest]
            behind = len(tokens) - first - len(part)
            wanted = min(len(part), max(1, rows - behind))  # a head takes its time
            found.append(self._forward(part, wanted, layers))
        return _joined(found, rows)

    def _feed_tree(
        self,
        context: Sequence[int],
        tokens: Sequence[int],
        parents: Sequence[int],
        rows: int | None,
        layers: Sequence[int],
    ) -> ForwardOutput:
        """Rows of a tree, of whose first nodes some may have been read before."""
        before = []
        rows = len(tokens) + 1 if rows is None else rows
        if self.cache.length == 0 and self.cache.separate_prefill:
            before.append(
                self._feed(context, (), 1, layers)
            )  # its last row has the bits that it has without a tree
        elif self.cache.length < len(context) - 1:
            before.append(self._feed(context[:-1], (), 1, layers))
        past = len(context) - 1
        fed = [context[-1], *tokens]
        first, widest = self.cache.length - past, self.cache.max_exact_tokens or len(fed)
        while first < len(fed):
            end = min(first + widest, len(fed))
            seen = parents[: end - 1]  # of the nodes read so far
            part = self._forward(
                fed[first:end],
                min(end - first, max(1, rows - (len(fed) - end))),
                layers,
                attention_mask=tree_mask(past, seen, self.cache.keys(end - first), self.device)[
                    ..., first:, :
                ],
                position_ids=tree_positions(past, seen, self.device)[:, first:],
            )
            before.append(part)
            first = end
        return _joined(before, rows)

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:
        """Roll back, see ``decoding.protocols.Scorer``: what is kept of the last draft closes up behind its context."""
        root = self._root
        held = bisect_left(path, self.cache.length - root)
        if held < len(path):  # a drafter has not read its last draft, nor what was verified beside its drafts
            length = min(length, root + held)
        kept = path[: max(0, length - root)]
        if kept and kept[-1] >= len(kept):
            self.cache.gather(root, [root + node for node in kept])
        if self._change is not None and length <= self._change < self.cache.length:
            self.cache.reset()  # its keys are rotated for longer contexts
        self.cache.rollback(length)

    @torch.inference_mode()
    def _forward(
        self,
        tokens: Sequence[int] | torch.Tensor,
        rows: int,
        layers: Sequence[int] = (),
        *,
        cached: bool = True,
        **extra: torch.Tensor,
    ) -> ForwardOutput:
        ids = tokens[None] if isinstance(tokens, torch.Tensor) else torch.tensor([tokens], device=self.device)
        logits, hidden = (self._pass if cached else self._uncached_pass).rows(ids, rows, layers, **extra)
        return ForwardOutput(self.fit(logits), hidden)

    def fit(self, logits: torch.Tensor) -> torch.Tensor:
        """The model's logits, [rows, own width], as a pass gives them."""
        return self._fitted(logits.to(self.output_device))


def _joined(parts: Sequence[ForwardOutput], rows: int) -> ForwardOutput:
    """The last so many rows of passes one behind the other, and all hidden states."""
    logits = torch.cat([part.logits for part in parts])[-rows:]
    hidden = [part.hidden for part in parts if part.hidden is not None]
    return ForwardOutput(logits, torch.cat(hidden) if hidden else None)
