"""A model together with its cache: feed it a context, get logits, roll it back."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from specbench.backends.torch.caches import KVCache, make_cache
from specbench.backends.torch.experts import ExpertChoices, ExpertCounter
from specbench.backends.torch.forward import join_passes
from specbench.backends.torch.trials import (
    choose_forward,
    trees_are_right,
    why_not_batchable,
    why_widths_differ,
)
from specbench.base.errors import UsageError
from specbench.decoding.logits import DraftVocabulary
from specbench.decoding.protocols import Batch, ForwardOutput, ForwardRequest
from specbench.decoding.tree import tree_rows
from specbench.kernels import layers_of
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

    def __getitem__(self, index: Any) -> Any:
        return DeviceTokens(self._tensors[index]) if isinstance(index, slice) else self._values()[index]

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
        self._fitted = FittedLogits(vocab_size, None if places is None else places.to(self.output_device))
        self.vocab_size, self.vocabulary = vocab_size, self._fitted.vocabulary
        self.embeddings = weight.shape[0]
        self.forward = choose_forward(model, self.cache, shared=not isinstance(cache, str))
        self._batchable: list[str | None] = []  # the trial's result, shared by clones
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
        clone.cache, clone.batch, clone.epoch, clone._context_len = cache, batch, 0, 0
        clone._loaded, clone._owns_cache = self, not shares
        clone.forward = self.forward.over(cache)
        return clone

    @property
    def cached_len(self) -> int:
        """Leading tokens of the context whose keys and values are cached."""
        return self.cache.own_len if self._owns_cache else self.cache.length

    def reserve(self, request: ForwardRequest) -> bool:
        """Reserve memory for a pass, see ``decoding.protocols.Scorer``."""
        context, end = request.context, len(request.context) + len(request.tokens)
        if not self._owns_cache:
            return self.cache.reserve(end)
        fed = len(request.tokens) + 1 if request.rows is None else request.rows  # at least
        shared = 0 if request.layers else min(len(context) - 1, end - fed)  # states are wanted of every token
        return self.cache.reserve(end, context, shared)

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
        return self.cache.reads_in_parts

    def begin(self) -> None:
        """Start a new context, see ``decoding.protocols.Scorer``. The model must not change before the next one."""
        self.epoch += 1
        self.cache.reset()

    @cached_property
    def rounding(self) -> torch.dtype:
        """The coarsest rounding before the logits: int8 if layers quantize activations, else the weights' dtype."""
        weight = cast("Tensor", self.model.get_input_embeddings().weight)
        return torch.int8 if layers_of(self.model).round_rows else weight.dtype

    @property
    def reads_trees(self) -> bool:
        """Whether it can read trees at all; a drafter needs no more."""
        return self.cache.takes_trees

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

    def why_not_batchable(self) -> str | None:
        """Return why requests cannot share a forward pass, as a sentence; ``None`` if they can."""
        if not self._batchable:
            self._batchable.append(why_not_batchable(self.model, type(self.forward)))
        return self._batchable[0]

    def why_not_bit_exact(self) -> str | None:
        """Return why passes of other widths may give other logits; ``None`` if they do not. Empties the cache."""
        try:
            return why_widths_differ(self.model, self.cache, self.forward, self.context_limit)
        finally:
            self.begin()

    @torch.inference_mode()
    def score(self, request: ForwardRequest) -> ForwardOutput:
        """Run a forward pass, see ``decoding.protocols.Scorer``."""
        if self.batch is not None:
            return self.batch.score([request])[0]
        self.require(request)
        rows = len(request.tokens) + 1 if request.rows is None else request.rows
        with self.watch_experts(request.counts_experts) as choices:
            output = self._read(request, rows)
        self.mark_read(request)
        experts = None if choices is None else choices.read()
        return ForwardOutput(self.fit(output.logits), output.hidden, experts)

    def watch_experts(self, wanted: bool) -> AbstractContextManager[ExpertChoices | None]:
        """Note the experts that passes within the block read; ``None`` unless that is ``wanted`` and possible."""
        return self._experts.watch() if wanted and self.forward.shows_experts else nullcontext()

    def logits(
        self,
        context: Sequence[int],
        drafted: Sequence[int] = (),
        rows: int | None = None,
        prompt: int | None = None,
    ) -> Tensor:
        """Return the logits of a forward pass over a chain; for the arguments see ``ForwardRequest``."""
        return self.score(ForwardRequest(self, context, drafted, rows=rows, prompt=prompt)).logits

    def _read(self, request: ForwardRequest, rows: int) -> ForwardOutput:
        """Read what the cache lacks of context and draft, in the passes that it asks for."""
        context, tokens, parents = request.context, request.tokens, request.parents
        first, past, end = self.cache.length, len(context) - 1, len(context) + len(tokens)
        ids = self._ids(context[first:], tokens[max(0, first - len(context)) :])
        outputs = []
        for fed in self.cache.passes(len(context), len(tokens), tree=parents is not None):
            positions = mask = None
            if parents is not None and fed.stop > len(context):
                seen = parents[: fed.stop - len(context)]  # of the nodes read so far
                keys = self.cache.key_len(len(fed))
                positions, mask = tree_rows(past, seen, keys, self.device, fed.start - past)
            wanted = min(len(fed), max(1, rows - (end - fed.stop)))  # the language model head takes its time
            part = ids[:, fed.start - first : fed.stop - first]
            outputs.append(self.forward.run(part, wanted, request.layers, positions, mask))
        return outputs[0] if len(outputs) == 1 else join_passes(outputs, rows)

    def _ids(self, context: Sequence[int], drafted: Sequence[int]) -> Tensor:
        """Return these tokens as a model reads them, [1, tokens]; draft tokens stay on their device."""
        if not isinstance(drafted, DeviceTokens) or not len(drafted):
            return torch.tensor([[*context, *drafted]], device=self.device)
        known = torch.tensor(context, dtype=torch.long, device=self.device)
        return torch.cat([known, drafted.tensor.to(self.device)])[None]

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:
        """Roll back, see ``decoding.protocols.Scorer``; kept nodes of the last draft close up after its context."""
        root = self._context_len
        read = bisect_left(path, self.cache.length - root)
        if read < len(path):  # a drafter has not read its last draft
            length = min(length, root + read)
        kept = path[: max(0, length - root)]
        if kept and kept[-1] >= len(kept):
            self.cache.gather(root, [root + node for node in kept])
        self.cache.rollback(length)

    def fit(self, logits: Tensor) -> Tensor:
        """Fit the model's logits, [rows, own width], see ``FittedLogits``."""
        return self._fitted(logits.to(self.output_device))
