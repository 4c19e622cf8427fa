"""A model together with its cache: feed it a context, get logits, roll it back."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, cast, overload

import torch
from torch import Tensor

from specbench.backends.torch.caches import KVCache, NoKVCache, change_of_rotation, make_cache
from specbench.backends.torch.experts import ExpertChoices, ExpertCounter
from specbench.backends.torch.forward import HFForward, NativeForward, join_passes
from specbench.backends.torch.graph_forward import GraphForward
from specbench.backends.torch.kernels.surgery import quantizes_activations
from specbench.backends.torch.pools import PoolKind
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
    """Token ids that stay on their device; only reading one waits for the device."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self._tensors = list(tensors)
        self._read: list[int] | None = None

    @property
    def tensor(self) -> Tensor:
        """[length], on the device; if there is none, on the CPU."""
        return torch.stack(self._tensors) if self._tensors else torch.empty(0, dtype=torch.long)

    def append(self, token: Tensor) -> None:
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
            self._read = [int(token) for token in self.tensor.tolist()]
        return self._read


class FittedLogits:
    """Conversion of a drafter's logits to the size of its target's vocabulary, if requested.

    Args:
        vocab_size: The target's vocabulary size, to which logits are cut or padded with -inf (two models with one
            tokenizer can pad their vocabularies differently). ``None`` keeps their own size.
        places: The target's token of each logit, int64, of which ``vocabulary`` is made; ``None`` for the first ones.
    """

    def __init__(self, vocab_size: int | None, places: Tensor | None = None) -> None:
        self.vocab_size = vocab_size
        self.vocabulary = None if places is None else DraftVocabulary(places, vocab_size)

    def __call__(self, logits: Tensor) -> Tensor:
        """[rows, own tokens] -> [rows, own tokens] or [rows, vocab_size]."""
        width = logits.shape[-1]
        if self.vocabulary is not None or self.vocab_size is None or width == self.vocab_size:
            return logits
        if width > self.vocab_size:
            return logits[..., : self.vocab_size]
        return torch.nn.functional.pad(logits, (0, self.vocab_size - width), value=float("-inf"))


class Scorer:
    """Reads contexts with one causal language model in eval mode, batch size 1.

    Args:
        cache: A cache kind, or a cache to share with another scorer of the same keys and values.
        vocab_size, places: See ``FittedLogits``.
        context_limit: The longest context the model can read, in tokens; ``None`` for no limit.
        output_device: The device of the logits; ``None`` for that of the input embeddings. A drafter's have to be where
            the target's are.

    Attributes:
        forward: Runs its forward passes.
        epoch: Contexts begun so far.
    """

    batch: Batch | None = None
    _loaded: Scorer | None = None  # the scorer it is a clone of
    _owns_cache = True

    def __init__(
        self,
        model: PreTrainedModel,
        cache: CacheKind | KVCache = "dynamic",
        *,
        vocab_size: int | None = None,
        context_limit: int | None = None,
        output_device: torch.device | None = None,
        places: Tensor | None = None,
    ) -> None:
        self.model = model
        self.epoch = 0
        self._context_len = 0  # of the last forward pass
        weight = cast("Tensor", model.get_input_embeddings().weight)
        self.cache: KVCache = make_cache(cache, model.config) if isinstance(cache, str) else cache
        self.context_limit = context_limit
        self.device = weight.device
        self.output_device = output_device or self.device
        self.vocab_size = vocab_size
        self._fitted = FittedLogits(vocab_size, None if places is None else places.to(self.output_device))
        self.vocabulary = self._fitted.vocabulary
        self.embeddings = weight.shape[0]
        self._change = change_of_rotation(model.config)
        self.forward = choose_forward(model, self.cache, shared=not isinstance(cache, str))
        self._uncached_forward = HFForward(model, NoKVCache())
        self._batchable: dict[PoolKind, str | None] = {}  # shared by clones
        self._experts = ExpertCounter(model)

    def clone_for(self, cache: KVCache, batch: Batch | None = None, *, shares: bool = False) -> Scorer:
        """Return another scorer of this model with its settings; what was tried on the model is not tried again.

        Args:
            cache: The new scorer's; not a static one.
            batch: Runs its forward passes together with those of others.
            shares: Whether the cache belongs to another model, of which this one is a cheaper form.
        """
        clone = copy.copy(self)
        vars(clone).pop("takes_trees", None)
        clone.cache, clone.batch, clone.epoch = cache, batch, 0
        clone._loaded, clone._owns_cache = self, not shares
        clone._context_len = 0
        kind = NativeForward if isinstance(self.forward, NativeForward) else HFForward
        clone.forward = kind(self.model, cache)
        return clone

    @property
    def cached_len(self) -> int:
        """Leading tokens of the context whose keys and values are cached."""
        return self.cache.own_len if self._owns_cache else self.cache.length

    def reserve(self, request: ForwardRequest) -> bool:
        """Reserve memory for a pass, see ``decoding.protocols.Scorer``."""
        cache, end = self.cache, len(request.context) + len(request.tokens)
        if self._owns_cache and cache.own_len < cache.length:
            cache.rollback(cache.own_len)
        if not self._owns_cache or request.layers:  # hidden states are wanted of every token
            return cache.reserve(end)
        fed = len(request.tokens) + 1 if request.rows is None else request.rows  # at least
        return cache.reserve(end, request.context[: min(len(request.context) - 1, end - fed)])

    def require(self, request: ForwardRequest) -> None:
        """Reserve memory for a pass, and tell the cache of its prompt; raise ``UsageError`` if there is none."""
        if not self.reserve(request):
            raise UsageError(
                "The KV cache is full.", "Give it more memory, or decode fewer requests at a time."
            )
        if request.prompt is not None:
            self.cache.set_prompt(request.prompt)
        elif self.cache.length == 0:
            self.cache.set_prompt(len(request.context))

    def mark_read(self, request: ForwardRequest) -> None:
        """Note that the forward pass has been made."""
        self._context_len = len(request.context)
        if self._owns_cache:
            self.cache.publish(request.context)

    @property
    def reads_in_parts(self) -> bool:
        """Whether a long context may be read in several forward passes."""
        return not isinstance(self.cache, NoKVCache)

    def begin(self) -> None:
        """Start a new context. The model may have been changed before, not since."""
        self.epoch += 1
        self.cache.reset()

    def most_kept(self, cached_tokens: int) -> int:
        """Return how many of the first tokens stay in the cache for a context that begins with them.

        Sliding windows forget, rotations may change with the length, and recurrent layers store few states.
        """
        return 0 if self._change is not None else self.cache.most_kept(cached_tokens)

    def resume(self, cached_tokens: int) -> None:
        """Start a new context that begins like the last one, see ``decoding.protocols.Scorer``."""
        if self.most_kept(cached_tokens):
            self.epoch += 1
            self.rollback(cached_tokens)
        else:
            self.begin()

    @cached_property
    def rounding(self) -> torch.dtype:
        """The coarsest rounding before the logits: int8 if layers quantize activations, else the weights' dtype."""
        weight = cast("Tensor", self.model.get_input_embeddings().weight)
        return torch.int8 if quantizes_activations(self.model) else weight.dtype

    @property
    def reads_trees(self) -> bool:
        """Whether it can read trees at all; a drafter needs no more."""
        return self.cache.takes_trees and self._change is None

    @cached_property
    def takes_trees(self) -> bool:
        """Whether drafts can be trees: a trial on the model has given the same results as separate forward passes.

        Always false for an int8 target: the sums over the keys of a branch have another order, which int8 rounding
        magnifies.
        """
        if not self.reads_trees or self.rounding == torch.int8:
            return False
        if self._loaded is not None:
            return self._loaded.takes_trees
        try:
            return trees_are_right(self.model, self.cache, self.forward)
        finally:
            self.begin()

    def why_not_batchable(self, kind: PoolKind) -> str | None:
        """Return why requests in such a pool cannot share a forward pass, as a sentence; ``None`` if they can."""
        if kind not in self._batchable:
            self._batchable[kind] = why_not_batchable(self.model, kind, type(self.forward))
        return self._batchable[kind]

    def why_not_bit_exact(self) -> str | None:
        """Return why passes of other widths may give other logits; ``None`` if they do not. Empties the cache."""
        try:
            return why_widths_differ(self.model, self.cache, self.forward, self.context_limit)
        finally:
            self.begin()

    def require_bit_exact(self) -> None:
        """Raise ``UsageError`` if logits may depend on the width of the forward pass."""
        reason = self.why_not_bit_exact()
        if reason is not None:
            raise UsageError(
                f"Bit-exact forward passes are not available here. {reason}", "Leave --bit-exact out."
            )

    def score(self, request: ForwardRequest) -> ForwardOutput:
        """Run a forward pass, see ``decoding.protocols.Scorer``."""
        if self.batch is not None:
            return self.batch.score([request])[0]
        self.require(request)
        with self.watch_experts(request.counts_experts) as choices:
            parents = request.parents
            rows = self._feed_chain(request) if parents is None else self._feed_tree(request, parents)
        self.mark_read(request)
        return rows if choices is None else rows._replace(experts=choices.read())

    def watch_experts(self, wanted: bool) -> AbstractContextManager[ExpertChoices | None]:
        """Note the experts that passes within the block read; ``None`` unless that is ``wanted`` and possible."""
        if not wanted or isinstance(
            self.forward, GraphForward
        ):  # watching would compile captured passes again
            return nullcontext()
        return self._experts.watch()

    def logits(
        self,
        context: Sequence[int],
        drafted: Sequence[int] = (),
        rows: int | None = None,
        prompt: int | None = None,
    ) -> Tensor:
        """Return the logits of a forward pass over a chain; for the arguments see ``ForwardRequest``."""
        return self.score(ForwardRequest(self, context, drafted, rows=rows, prompt=prompt)).logits

    def _feed_chain(self, request: ForwardRequest) -> ForwardOutput:
        """Read a chain.

        The cache never contains both rotations of a model whose rotation changes with the length. If only the draft
        reaches beyond the change, its logits are computed without a cache; once the context itself does, the cache is
        filled again.
        """
        context, drafted, layers, change = request.context, request.tokens, request.layers, self._change
        rows = len(drafted) + 1 if request.rows is None else request.rows
        if change is None or not self.cache.length <= change < len(context) + len(drafted):
            return self._feed(context, drafted, rows, layers)
        if len(context) > change:
            self.cache.reset()
            return self._feed(context, drafted, rows, layers)
        beyond = len(context) + len(drafted) - change
        uncached = self._call([*context, *drafted], min(rows, beyond), layers, cached=False)
        if rows <= beyond:
            return uncached
        before = self._feed(context, drafted[: change - len(context)], rows - beyond, layers)
        if uncached.hidden is not None:
            uncached = uncached._replace(hidden=uncached.hidden[-beyond:])
        return join_passes([before, uncached], rows)

    def _feed(
        self, context: Sequence[int], drafted: Sequence[int], rows: int, layers: Sequence[int] = ()
    ) -> ForwardOutput:
        start = self.cache.length
        if drafted and start == 0 and self.cache.separate_prefill:
            prefill = self._call(context, 1, layers)
            return join_passes([prefill, self._call(drafted, len(drafted), layers)], rows)
        widest = self.cache.max_exact_tokens
        left = drafted[max(0, start - len(context)) :]
        if isinstance(left, DeviceTokens) and len(left) and widest is None:
            read = torch.tensor(context[start:], dtype=torch.long, device=self.device)
            return self._call(torch.cat([read, left.tensor.to(self.device)]), rows, layers)
        tokens = [*context[start:], *left]
        if widest is None or start == 0 or len(tokens) <= widest:
            return self._call(tokens, rows, layers)
        found = []
        for first in range(0, len(tokens), widest):
            part = tokens[first : first + widest]
            after = len(tokens) - first - len(part)
            wanted = min(len(part), max(1, rows - after))  # the language model head takes its time
            found.append(self._call(part, wanted, layers))
        return join_passes(found, rows)

    def _feed_tree(self, request: ForwardRequest, parents: Sequence[int]) -> ForwardOutput:
        """Read a tree, whose first nodes may have been read before."""
        context, tokens, layers = request.context, request.tokens, request.layers
        before = []
        rows = len(tokens) + 1 if request.rows is None else request.rows
        if self.cache.length == 0 and self.cache.separate_prefill:
            # Its last row has the bits that it has without a tree.
            before.append(self._feed(context, (), 1, layers))
        elif self.cache.length < len(context) - 1:
            before.append(self._feed(context[:-1], (), 1, layers))
        past = len(context) - 1
        fed = [context[-1], *tokens]
        first, widest = self.cache.length - past, self.cache.max_exact_tokens or len(fed)
        while first < len(fed):
            end = min(first + widest, len(fed))
            seen = parents[: end - 1]  # of the nodes read so far
            mask = tree_mask(past, seen, self.cache.key_len(end - first), self.device)[..., first:, :]
            positions = tree_positions(past, seen, self.device)[:, first:]
            wanted = min(end - first, max(1, rows - (len(fed) - end)))
            before.append(self._call(fed[first:end], wanted, layers, mask=mask, positions=positions))
            first = end
        return join_passes(before, rows)

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:
        """Roll back, see ``decoding.protocols.Scorer``; kept nodes of the last draft close up after its context."""
        root = self._context_len
        read = bisect_left(path, self.cache.length - root)
        if read < len(path):  # a drafter has not read its last draft
            length = min(length, root + read)
        kept = path[: max(0, length - root)]
        if kept and kept[-1] >= len(kept):
            self.cache.gather(root, [root + node for node in kept])
        if self._change is not None and length <= self._change < self.cache.length:
            self.cache.reset()  # its keys are rotated for longer contexts
        self.cache.rollback(length)

    @torch.inference_mode()
    def _call(
        self,
        tokens: Sequence[int] | Tensor,
        rows: int,
        layers: Sequence[int] = (),
        *,
        cached: bool = True,
        **extra: Tensor,
    ) -> ForwardOutput:
        ids = tokens[None] if isinstance(tokens, Tensor) else torch.tensor([tokens], device=self.device)
        output = (self.forward if cached else self._uncached_forward).run(ids, rows, layers, **extra)
        return output._replace(logits=self.fit(output.logits))

    def fit(self, logits: Tensor) -> Tensor:
        """Fit the model's logits, [rows, own width], see ``FittedLogits``."""
        return self._fitted(logits.to(self.output_device))
