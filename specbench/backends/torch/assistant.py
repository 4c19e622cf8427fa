"""Gemma 4's assistant: decoder layers without keys and values of their own, which attend to those of the target.

The layers are those of ``transformers``. They read a token's embedding and the target's hidden state before it, at the
position of the context's last token, whichever token of a draft they read. So a draft adds nothing that others attend
to, and the tokens of a tree see what those of a chain see.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from specbench.backends.torch.forward import concat
from specbench.backends.torch.head_forward import HeadForward, HeadInput
from specbench.backends.torch.head_scorers import EagleScorer, HeadSteps, OfTarget, Reading
from specbench.backends.torch.heads import Attend, EagleShape, RecurrentHead
from specbench.backends.torch.mtp import PASSED, passed_attention
from specbench.decoding.protocols import ForwardRequest


def shared_layers(target: PreTrainedConfig, own: PreTrainedConfig) -> dict[str, tuple[int, int]]:
    """Return, by kind of attention, which layer of the target an assistant's layers attend to, and to how many of its
    last positions. It is the target's last layer of this kind that computes keys and values.

    Args:
        target: The configuration of the target's language model.
        own: That of the assistant's layers.
    """
    text, layers = cast("Any", target), cast("Any", own)
    computing = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)
    last = {kind: number for number, kind in enumerate(text.layer_types[:computing])}
    every = text.max_position_embeddings
    # The last token itself is not cached. Counted from the last cached position, the assistant's window has one more.
    within = min(text.sliding_window - 1, layers.sliding_window + 1)
    return {kind: (number, within if kind == "sliding_attention" else every) for kind, number in last.items()}


class Assistant(RecurrentHead):
    """An assistant. Parameters have the names of its checkpoint, without ``model.``.

    Args:
        config: Of its layers.
        width: Width of the target's hidden states.
        centroids: Number of groups of tokens, and how many of them get logits; ``None`` if all tokens get theirs.
    """

    def __init__(self, config: PreTrainedConfig, width: int, centroids: tuple[int, int] | None) -> None:
        super().__init__()
        AttentionInterface.register(PASSED, passed_attention)
        text: Any = copy.deepcopy(config)
        model_class: Any = MODEL_MAPPING[type(text)]
        # ``transformers`` 5.23 finds no layer to share with if all layers share.
        reuse = property(lambda own: ["reuse"] * own.num_hidden_layers)
        text.__class__ = type(type(text).__name__, (type(text),), {"kv_sharing_modes": reuse})
        text.vocab_size, vocab = 1, text.vocab_size  # its embeddings are not read
        model = model_class._from_config(text, attn_implementation=PASSED)
        self.shape = EagleShape(1, width, vocab, cast("LlamaConfig", config))
        self.embed_tokens = None
        self.layers, self.norm = model.layers, model.norm
        self.kinds: Sequence[str] = text.layer_types
        with torch.device("cpu"):  # no submodule: a conversion would round its frequencies
            self._rotary = (type(model.rotary_emb)(text),)
        self.pre_projection = nn.Linear(2 * width, text.hidden_size, bias=False)
        self.post_projection = nn.Linear(text.hidden_size, width, bias=False)
        self.masked_embedding = None if centroids is None else Centroids(text.hidden_size, vocab, *centroids)
        self.lm_head = (
            nn.Linear(text.hidden_size, vocab, bias=False)
            if centroids is None
            else nn.Embedding(vocab, text.hidden_size)  # of which rows are taken
        )

    def read(
        self, embedded: Tensor, features: Tensor, positions: Tensor, attends: Sequence[Attend]
    ) -> Tensor:
        x = self.pre_projection(torch.cat((embedded, features), dim=-1))
        rotations = {kind: self._rotary[0](x, positions, layer_type=kind) for kind in {*self.kinds}}
        for layer, kind, attend in zip(self.layers, self.kinds, attends, strict=True):
            x = layer(
                x,
                shared_kv_states={kind: (None, None)},  # ``attend`` has them
                position_embeddings=rotations[kind],
                position_ids=positions,
                attend=attend,
            )
        return x

    def recurring(self, out: Tensor) -> Tensor:
        return self.post_projection(self.norm(out))

    def logits(self, out: Tensor) -> Tensor:
        normed = self.norm(out)
        return (
            self.lm_head(normed)
            if self.masked_embedding is None
            else self.masked_embedding(normed, cast("Tensor", self.lm_head.weight))
        )


class Centroids(nn.Module):
    """Groups of tokens around centroids: only tokens of the groups that fit best get logits.

    Args:
        width: Width of the outputs.
        vocab, groups, best: Numbers of tokens, of groups, and of groups that get logits.
    """

    token_ordering: Tensor

    def __init__(self, width: int, vocab: int, groups: int, best: int) -> None:
        super().__init__()
        self.centroids = nn.Linear(width, groups, bias=False)
        self.register_buffer("token_ordering", torch.empty(vocab, dtype=torch.long))  # group by group
        self._groups, self._best = groups, best

    def forward(self, out: Tensor, weight: Tensor) -> Tensor:
        """Return logits, [rows, vocab]; those of other tokens are the lowest of the row less 1.

        Args:
            out: Outputs, [rows, width].
            weight: Of the output head, [vocab, width].
        """
        best = self.centroids(out).topk(self._best, dim=-1).indices
        tokens = self.token_ordering.view(self._groups, -1)[best].flatten(1)
        logits = (weight[tokens] @ out[:, :, None])[..., 0]
        rest = logits.amin(dim=-1, keepdim=True) - 1
        return rest.expand(-1, len(weight)).scatter(1, tokens, logits)


SharedKV = Mapping[str, tuple[Tensor, ...]]
"""Keys and values of the target, [1, heads, positions, head size], by kind of attention."""


class AssistantForward(HeadForward):
    """A forward pass through an assistant, whose inputs have a single ``SharedKV`` as cache."""

    head: Assistant

    def attends(self, inputs: Sequence[HeadInput]) -> list[Attend]:
        return [partial(_attend, kind, inputs) for kind in self.head.kinds]


def _attend(kind: str, inputs: Sequence[HeadInput], query: Tensor, _key: None, _value: None) -> Tensor:
    """Let every token attend to every position of the target, [1, tokens, heads, head size]."""
    outs = []
    for part, given in zip(query.split([len(given.embedded) for given in inputs], 2), inputs, strict=True):
        keys, values = given.caches[0][kind]
        folded = part.reshape(1, keys.shape[1], -1, part.shape[-1])  # the heads that share keys are neighbors
        out = scaled_dot_product_attention(folded, keys, values)
        outs.append(out.view(*part.shape[:3], -1).transpose(1, 2))
    return concat(outs, dim=1)


class AssistantScorer(EagleScorer):
    """An assistant, which attends to the keys and values that the target has of the context."""

    def __init__(self, head: Assistant, target: OfTarget, shared: Mapping[str, tuple[int, int]]) -> None:
        super().__init__(head, target)
        self._forward, self._caches = AssistantForward(head), ()
        self.target_cache, self._layers_of = target.cache, shared

    def _reset(self) -> None:
        super()._reset()
        self._shared: SharedKV = {}

    def can_read(self, context: Sequence[int], drafted: Sequence[int]) -> bool:
        return (
            super().can_read(context, drafted)
            and self._is_cached(context)
            and bool(self._states or self._rows)
        )

    def _is_cached(self, context: Sequence[int]) -> bool:
        assert self.target_cache is not None
        return self.target_cache.length == len(context) - 1

    def steps(self, request: ForwardRequest, rows: int) -> HeadSteps:
        """Run a forward pass; all tokens are alike if the target's cache was freed after the draft began."""
        if not self._is_cached(request.context):
            return torch.zeros(rows, self.head.shape.vocab, device=self.device)
        return (yield from super().steps(request, rows))

    def _read_context(self, context: Sequence[int]) -> Reading:
        """Read the last token, with the target's state before it."""
        assert self.target_cache is not None
        _, states = self._new_tokens(context)
        state = states[-1:]
        self._shared = {
            kind: tuple(kv.to(self.device, self._dtype) for kv in self.target_cache.last_entries(*layer))
            for kind, layer in self._layers_of.items()
        }
        last = torch.tensor(context[-1:], device=self.device)
        output = yield self._forward, self._at(len(context) - 1, last, self.head.fuse(state))
        self._mark_read(context, state)
        self._features, self._rows = [output.features[0]], [output.logits[0]]

    def _input(
        self, ids: Tensor, features: Tensor, positions: range | Tensor, mask: Tensor | None, wanted: int
    ) -> HeadInput:
        return self._at(self._read, ids, features)

    def _at(self, position: int, ids: Tensor, features: Tensor) -> HeadInput:
        """Return tokens to be read at the position of the context's last token."""
        positions = torch.full_like(ids, position)
        return HeadInput(self._embed(ids), features, positions, None, [self._shared], len(ids))
