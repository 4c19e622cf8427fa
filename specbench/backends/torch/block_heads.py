"""Block drafters: heads that compute the hidden states of a block of tokens in one forward pass.

Their logits at a place may also depend on the draft tokens before it. Then these are drawn one after the other, which
takes no further pass through the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specbench.backends.torch.cache_layers import PreallocatedLayer
from specbench.backends.torch.forward import concat
from specbench.backends.torch.head_scorers import HeadScorer, HeadSteps, OfTarget, node_depths
from specbench.backends.torch.heads import Attend, DecoderLayer, EagleShape
from specbench.decoding.protocols import ForwardRequest

MarkovType = Literal["vanilla", "gated", "rnn"]
"""How DSpark's bias depends on what was drafted, by the names of its authors."""


class Block(NamedTuple):
    """A block after its forward pass.

    Attributes:
        hidden: [block, hidden].
        logits: Before they are conditioned on draft tokens, [drafted, vocab].
    """

    hidden: Tensor
    logits: Tensor


@dataclass(frozen=True)
class BlockShape:
    """The structure of a block drafter, without that of its layers.

    Attributes:
        block: Tokens of a block: the last token of the context, and masks.
        mask: The token that is read in place of one to be guessed.
        first: The first token of a block whose output predicts a draft token: 1, or 0, where the last token of the
            context predicts the token after it (DSpark; ``sample_from_anchor`` in configurations).
        windows: By layer how many positions a token sees, itself included; ``None`` for all. Empty for all layers.
        causal: By layer whether a token sees only those before it in its block. Empty for none.
        embedding_scale, logit_scale: Factors of embeddings and logits.
        logit_cap: Logits are ``cap · tanh(logits / cap)``; ``None`` for no cap.
        markov: DSpark's kind of bias, a ``MarkovType``, with ``rank`` numbers for each token; ``None`` for none.
        kernel, group: DFlash 2: taps of its convolutions, and channels that share one.
        selected: DFlash 2: the most probable tokens among which its selector, of ``rank`` numbers, chooses.
    """

    block: int
    mask: int
    first: int = 1
    windows: tuple[int | None, ...] = ()
    causal: tuple[bool, ...] = ()
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    markov: MarkovType | None = None
    rank: int = 0
    kernel: int = 0
    group: int = 0
    selected: int = 0

    @property
    def drafted(self) -> int:
        """The number of tokens that a block predicts."""
        return self.block - self.first


class DFlashHead(nn.Module):
    """DFlash (Chen et al. 2026, arXiv 2602.06036): a few decoder layers predict a block of tokens in one forward pass.

    The block is the last token with ``block - 1`` times the token ``mask`` after it. Its tokens see each other, and in
    every layer the features of the context as further keys and values. The output at a mask predicts the token there.
    """

    conditional = False
    """Whether the logits at a place depend on the draft tokens before it."""

    def __init__(self, shape: EagleShape, block: BlockShape) -> None:
        super().__init__()
        self.shape, self.block, config = shape, block, shape.layer
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if shape.embeds else None
        self.fc = shape.linear("fc", shape.states * shape.width, hidden)
        self.hidden_norm, self.norm = shape.norm(hidden), shape.norm(hidden)
        self.layers = nn.ModuleList(self._layer() for _ in range(shape.layers))
        self.lm_head = shape.linear("lm_head", hidden, shape.vocab)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def _layer(self) -> nn.Module:
        return DecoderLayer(self.shape)

    def keys_values(self, states: Tensor, positions: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """Return keys and values of positions of a context, by layer, see ``Attend``.

        Args:
            states: [batch, positions, states, width].
            positions: [batch, positions].
        """
        features = self.hidden_norm(self.fc(states.flatten(-2)))
        rotation = self.rotary_emb(features, positions)
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        return [attention.keys_values(features, rotation) for attention in attentions]

    def guess(self, embedded: Tensor, positions: Tensor, attends: Sequence[Attend]) -> Tensor:
        """Return the last hidden states of blocks, [batch, block, hidden]; those from ``first`` on predict tokens.

        Args:
            embedded: Embeddings of blocks, [batch, block, hidden].
            positions: [batch, block].
            attends: How each layer attends.
        """
        x = embedded * self.block.embedding_scale if self.block.embedding_scale != 1 else embedded
        rotation = self.rotary_emb(x, positions)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, rotation, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits, [..., vocab], which do not depend on draft tokens, from hidden states, see ``guess``."""
        logits: Tensor = self.lm_head(hidden)
        if self.block.logit_scale != 1:
            logits = logits * self.block.logit_scale
        cap = self.block.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def condition(self, blocks: Sequence[Block], tokens: Tensor) -> Tensor:
        """Return the logits of blocks after draft tokens.

        Args:
            blocks: ``n`` of them, or fewer, some repeated.
            tokens: The token before each place up to that of the logits, [n, depth]: the context's last one, and draft
                tokens.
        """
        raise NotImplementedError

    def _at(self, blocks: Sequence[Block], depth: int) -> tuple[Tensor, Tensor]:
        """Return the logits at a place, [n, vocab], and the hidden states up to it, [n, first + depth, hidden]."""
        hidden = torch.stack([block.hidden[: self.block.first + depth] for block in blocks])
        return torch.stack([block.logits[depth - 1] for block in blocks]), hidden


# -- DSpark ----------------------------------------------------------------------------------------


class DSparkHead(DFlashHead):
    """DSpark (arXiv 2607.05147): DFlash with a low-rank bias by the token before. Its confidence head is not used."""

    conditional = True

    def __init__(self, shape: EagleShape, block: BlockShape) -> None:
        super().__init__(shape, block)
        hidden = shape.layer.hidden_size
        self.markov_head = None
        if block.markov is not None:
            self.markov_head = MarkovHead(
                block.markov, shape.layer.vocab_size, shape.vocab, block.rank, hidden
            )

    def condition(self, blocks: Sequence[Block], tokens: Tensor) -> Tensor:
        logits, hidden = self._at(blocks, tokens.shape[1])
        if self.markov_head is not None:
            # A recurrent state also reads a first token of the block that predicts nothing.
            read = torch.cat((tokens[:, : self.block.first], tokens), dim=1)
            numbers = self.markov_head.markov_w1(read)
            logits = logits + self.markov_head.markov_w2(self.markov_head.latents(numbers, hidden)[:, -1])
        return logits


class MarkovHead(nn.Module):
    """DSpark's bias of the logits: ``markov_w2`` of a few numbers, which ``markov_w1`` has for the token before.

    They are taken as they are (``vanilla``), times a gate by the hidden state (``gated``), or pass through a recurrent
    state over the places of the block (``rnn``).
    """

    def __init__(self, kind: str, tokens: int, vocab: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(tokens, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def latents(self, before: Tensor, hidden: Tensor) -> Tensor:
        """Return the inputs of ``markov_w2`` at consecutive places of blocks, the first included, [n, depth, rank].

        Args:
            before: What ``markov_w1`` has for the tokens before the places, [n, depth, rank].
            hidden: Hidden states at the places, [n, depth, hidden].
        """
        if self.kind == "vanilla":
            return before
        if self.kind == "gated":
            gate: Tensor = self.gate_proj(torch.cat((hidden, before), dim=-1)).sigmoid()
            return gate * before
        state, outs = torch.zeros_like(before[:, 0]), []
        for place in range(before.shape[1]):
            read = torch.cat((state, before[:, place], hidden[:, place]), dim=-1)
            kept, fresh, out = self.joint_proj(read).chunk(3, dim=-1)
            kept = kept.sigmoid()
            state = kept * state + (1 - kept) * fresh.tanh()
            outs.append(out.tanh())
        return torch.stack(outs, dim=1)


# -- DFlash 2 --------------------------------------------------------------------------------------


class DFlash2Head(DFlashHead):
    """DFlash 2 of z-lab: DFlash with convolutions around attention and MLP, and a selector.

    The selector adds scores of pairs of tokens to the logits of the most probable tokens at a place; it rules all
    others out.
    """

    conditional = True

    def __init__(self, shape: EagleShape, block: BlockShape) -> None:
        super().__init__(shape, block)
        self.candidate_selector = CandidateSelector(shape, block)

    def _layer(self) -> nn.Module:
        return _ConvolvedLayer(self.shape, self.block)

    def condition(self, blocks: Sequence[Block], tokens: Tensor) -> Tensor:
        logits, hidden = self._at(blocks, tokens.shape[1])
        selected: Tensor = self.candidate_selector(logits, hidden[:, -1], tokens[:, -1])
        return selected


class CandidateSelector(nn.Module):
    """DFlash 2's selector: the score of a pair of tokens is ``Σ predecessor · projected hidden state · successor``."""

    def __init__(self, shape: EagleShape, block: BlockShape) -> None:
        super().__init__()
        self._selected = block.selected
        self.predecessor_codebook = nn.Parameter(torch.zeros(shape.layer.vocab_size, block.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(shape.layer.vocab_size, block.rank))
        self.hidden_projection = nn.Linear(shape.layer.hidden_size, block.rank, bias=False)

    def forward(self, logits: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return logits, [n, vocab], from those at places, the hidden states there, and the tokens before."""
        unary, candidates = logits.topk(self._selected, dim=-1)
        read = self.predecessor_codebook[tokens] * self.hidden_projection(hidden)
        scores = unary + (self.successor_codebook[candidates] @ read[..., None])[..., 0]
        return torch.full_like(logits, float("-inf")).scatter_(-1, candidates, scores)


class _ConvolvedLayer(DecoderLayer):
    def __init__(self, shape: EagleShape, block: BlockShape) -> None:
        super().__init__(shape)
        hidden = shape.layer.hidden_size
        self.attention_conv = _CausalConvolution(hidden, block.kernel, block.group)
        self.mlp_conv = _CausalConvolution(hidden, block.kernel, block.group)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normed, after = self.attention_conv(self.input_layernorm(x))
        x = x + self.attention_conv.convolve(self.self_attn(normed, rotation, attend), 1, after)
        normed, after = self.mlp_conv(self.post_attention_layernorm(x))
        return x + self.mlp_conv.convolve(self.mlp(normed), 1, after)


class _CausalConvolution(nn.Module):
    """Convolutions over the tokens of a block, one before a part of a layer and one after it.

    The kernels are those of ``base_kernel`` and, for each group of channels, a summand that the input determines.
    """

    def __init__(self, hidden: int, kernel: int, group: int) -> None:
        super().__init__()
        self._kernel, self._group = kernel, group
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * kernel * (hidden // group), bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the convolved input, [batch, block, hidden], and the kernels for the output."""
        before, after = self.kernel_projection(x).unflatten(-1, (2, self._kernel, -1)).unbind(-3)
        return self.convolve(x, 0, before), after

    def convolve(self, x: Tensor, which: int, added: Tensor) -> Tensor:
        """Convolve with the kernels before (0) or after (1) the part; ``added`` is [batch, block, kernel, groups]."""
        kernels = self.base_kernel[which] + added.repeat_interleave(self._group, dim=-1)
        out = kernels[..., 0, :] * x
        for tap in range(1, self._kernel):
            out[:, tap:] += kernels[:, tap:, tap] * x[:, :-tap]
        return out


# -- the scorer ------------------------------------------------------------------------------------


class BlockScorer(HeadScorer):
    """A block drafter with keys and values of the context.

    The logits of DFlash depend on the depth in the draft alone; those of others also on the draft tokens before. The
    layers run once for a context, and these logits are computed when they are wanted. So a pass has two parts: from the
    context's last token to a ``Block``, and from a block and paths (each the context's last token, and a branch of the
    draft) to their logits.
    """

    def __init__(self, head: DFlashHead, target: OfTarget) -> None:
        super().__init__(head, target)
        self.longest = head.block.drafted
        self._caches = [PreallocatedLayer() for _ in head.layers]
        self._parts = self._blocks, self._rows

    def _reset(self) -> None:
        super()._reset()
        self._block: Block | None = None

    @torch.inference_mode()
    def take_states(self, length: int, states: Tensor) -> None:
        fresh = states[states.shape[0] + self._known - length :].to(self.device, self._dtype)
        positions = torch.arange(self._known, length, device=self.device)
        added = self.head.keys_values(fresh[None], positions[None])
        for cache, entries in zip(self._caches, added, strict=True):
            cache.update(*entries)
        self._known, self._block = length, None

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:
        self._block = None

    def steps(self, request: ForwardRequest, rows: int) -> HeadSteps:
        if self._block is None:
            self._block = yield self._parts[0], (self, request.context[-1])
        assert self._block is not None
        if not self.head.conditional:
            return self._block.logits[node_depths(request)[-rows:]]
        return (yield self._parts[1], (self._block, _paths(request)[-rows:]))

    def _blocks(self, inputs: Sequence[tuple[BlockScorer, int]]) -> list[Block]:
        shape = self.head.block
        masks = [shape.mask] * (shape.block - 1)
        ids = torch.tensor([[last, *masks] for _, last in inputs], device=self.device)
        ranges = [[*range(scorer._known, scorer._known + shape.block)] for scorer, _ in inputs]
        positions = torch.tensor(ranges, device=self.device)
        caches = zip(*(scorer._caches for scorer, _ in inputs), strict=True)
        attends = [partial(_attend, shape, layer, own) for layer, own in enumerate(caches)]
        hidden = self.head.guess(self._embed(ids).to(self._dtype), positions, attends)
        logits = self.head.logits(hidden[:, shape.first :])
        return [Block(*block) for block in zip(hidden, logits, strict=True)]

    def _rows(self, inputs: Sequence[tuple[Block, Sequence[Sequence[int]]]]) -> list[Tensor]:
        """Compute rows of equal depth together."""
        wanted = [(block, path) for block, paths in inputs for path in paths]
        rows: list[Any] = [None] * len(wanted)
        for depth in {len(path) for _, path in wanted}:
            same = [i for i, (_, path) in enumerate(wanted) if len(path) == depth]
            tokens = torch.tensor([[*wanted[i][1]] for i in same], device=self.device)
            conditioned = self.head.condition([wanted[i][0] for i in same], tokens)
            for place, i in enumerate(same):
                rows[i] = conditioned[place]
        left = iter(rows)
        return [torch.stack([next(left) for _ in paths]) for _, paths in inputs]


def _attend(
    shape: BlockShape, layer: int, caches: Sequence[Any], query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Let all tokens of each block attend to its cache and to each other; the cache does not keep them."""
    window = shape.windows[layer] if shape.windows else None
    causal = bool(shape.causal and shape.causal[layer])
    outs = []
    for cache, *own in zip(caches, query.split(1), key.split(1), value.split(1), strict=True):
        past = cache.used
        keys, values = cache.update(*own[1:])
        cache.rollback(past)
        mask = _block_mask(past, shape.block, window, causal, query.device)
        outs.append(scaled_dot_product_attention(own[0], keys, values, attn_mask=mask, enable_gqa=True))
    return concat(outs).transpose(1, 2)


def _block_mask(
    past: int, block: int, window: int | None, causal: bool, device: torch.device
) -> Tensor | None:
    """Return which positions the tokens of a block see, bool [block, past + block]; ``None`` for all."""
    if not causal and (window is None or past + block <= window):
        return None
    distance = torch.arange(past, past + block, device=device)[:, None] - torch.arange(
        past + block, device=device
    )
    seen = distance >= (0 if causal else -block)
    return seen if window is None else seen & (distance < window)


def _paths(request: ForwardRequest) -> list[list[int]]:
    """Return, for the context and for each node, the context's last token and the draft tokens up to the node."""
    paths = [[request.context[-1]]]
    tokens = [int(token) for token in request.tokens]
    for token, parent in zip(tokens, request.parents or range(-1, len(tokens) - 1), strict=True):
        paths.append([*paths[parent + 1], token])
    return paths
