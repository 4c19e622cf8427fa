"""Trained heads: small modules that guess what a target writes next from its hidden states.

They are plain modules, differentiable over any number of positions: whoever decodes says how to attend to what was read
before (``head_scorers.py``), and whoever trains says it in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From queries, [batch, heads, tokens, size], keys and values, [batch, key/value heads, tokens, size], of these tokens
to what they attend to, [batch, tokens, heads, size]."""


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Every token attends to those before it and itself; see ``Attend``."""
    out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


@dataclass(frozen=True)
class EagleShape:
    """What an EAGLE head is made of.

    Attributes:
        states: Hidden states of the target at each position.
        width: Of each of them.
        vocab: Tokens it drafts.
        layer: Its decoder layers, Llama's.
        layers: How many there are.
        embeds: Whether it has embeddings of its own, and does not take the target's.
        biases: Names of the linear layers that have one, such as ``fc`` and ``q_proj``.
        head_norms: Whether queries and keys are normalized by head, as Qwen3's are.
        norm_before_residual: Whether what the layer adds to is the feature behind its norm, and not before it.
        norm_before_fc: Whether all states together are normalized first (EAGLE-3.1).
        fc_norm: Whether each state is normalized first (EAGLE-3.1).
        norm_output: Whether what recurs is the layer's output behind the final norm (EAGLE-3.1).
    """

    states: int
    width: int
    vocab: int
    layer: LlamaConfig
    layers: int = 1
    embeds: bool = False
    biases: frozenset[str] = frozenset()
    head_norms: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def linear(self, name: str, inputs: int, outputs: int) -> nn.Linear:
        """A linear layer, with a bias if there is one of its name."""
        return nn.Linear(inputs, outputs, name in self.biases)

    def norm(self, size: int) -> nn.RMSNorm:
        """A norm with the layer's epsilon."""
        return nn.RMSNorm(size, self.layer.rms_norm_eps)


class RecurrentHead(nn.Module):
    """Decoder layers, mostly one, over tokens and the target's hidden states.

    A token goes with the feature of the position before it, ``fuse(states)``; where the target has not been there yet,
    with what the head itself put out there, ``recurring(out)``. The logits behind the token are ``logits(out)``.

    Attributes:
        shape: What it is made of.
        embed_tokens: Its own embeddings; ``None`` where it takes the target's.
        layers: The first reads tokens and features, and each of the others what the one before puts out.
    """

    shape: EagleShape
    embed_tokens: nn.Embedding | None
    layers: nn.ModuleList

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The features of positions.

        Args:
            states: Of the target, lower layers first, [..., states, width].

        Returns:
            [..., hidden].
        """
        raise NotImplementedError

    def read(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        attends: Sequence[Attend],
    ) -> torch.Tensor:
        """The last layer's output at tokens.

        Args:
            embedded: The tokens' embeddings, [batch, tokens, hidden].
            features: That go with them, [batch, tokens, hidden].
            positions: Theirs, [batch, tokens].
            attends: How they attend, by layer.

        Returns:
            [batch, tokens, hidden], before any final norm.
        """
        raise NotImplementedError

    def recurring(self, out: torch.Tensor) -> torch.Tensor:
        """The feature that an output stands for, in the same shape."""
        raise NotImplementedError

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Over the tokens it drafts, [..., vocab], behind tokens with these outputs."""
        raise NotImplementedError

    def forward(self, embedded: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Texts from their beginning on, each token with the target's own states at the position before it.

        Args:
            embedded: See ``read``.
            states: [batch, tokens, states, width].

        Returns:
            Output, see ``read``, and logits.
        """
        positions = torch.arange(embedded.shape[1], device=embedded.device)[None]
        attends = [causal_attention] * len(self.layers)
        out = self.read(embedded, self.fuse(states), positions, attends)
        return out, self.logits(out)


class EagleHead(RecurrentHead):
    """EAGLE-3 (Li et al. 2025, arXiv 2503.01840): it reads states of several layers, and its first layer has 2·hidden
    inputs.

    Parameters are named as in files of ``speculators``.

    Args:
        shape: What it is made of.
    """

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.shape, config = shape, shape.layer
        hidden, wide = config.hidden_size, shape.states * shape.width
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if shape.embeds else None
        self.input_norm = shape.norm(wide) if shape.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(shape.norm(shape.width) for _ in range(shape.states)) if shape.fc_norm else None
        )
        self.fc = shape.linear("fc", wide, hidden)
        further = (_DecoderLayer(shape) for _ in range(1, shape.layers))
        self.layers = nn.ModuleList([_EagleLayer(shape), *further])
        self.norm = shape.norm(hidden)
        self.lm_head = shape.linear("lm_head", hidden, shape.vocab)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, states.unbind(-2), strict=True)
            states = torch.stack([norm(part) for norm, part in parts], dim=-2)
        wide = states.flatten(-2)
        if self.input_norm is not None:
            wide = self.input_norm(wide)
        fused: torch.Tensor = self.fc(wide)
        return fused

    def read(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        attends: Sequence[Attend],
    ) -> torch.Tensor:
        rotation, (first, *further) = self.rotary_emb(embedded, positions), self.layers
        out: torch.Tensor = first(embedded, features, rotation, attends[0])
        for layer, attend in zip(further, attends[1:], strict=True):
            out = layer(out, rotation, attend)
        return out

    def recurring(self, out: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(out) if self.shape.norm_output else out
        return normed

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.norm(out))
        return logits


class ParallelEagleHead(EagleHead):
    """P-EAGLE (Hui et al. 2026, arXiv 2602.01469): EAGLE-3 that guesses several tokens in one pass.

    Behind the last token it reads masks: one token's embedding, and in place of states that are not known yet
    parameters of its own. What comes out at the i-th mask tells the token i + 1 places behind the last one.

    Args:
        shape: What it is made of.
        ahead: Tokens that it guesses in a pass.
        mask: The token that stands for a mask.
    """

    def __init__(self, shape: EagleShape, ahead: int, mask: int) -> None:
        super().__init__(shape)
        self.ahead, self.mask = ahead, mask
        self.mask_hidden = nn.Parameter(torch.zeros(shape.states * shape.width))

    def mask_features(self) -> torch.Tensor:
        """The features of the masks of a pass, [ahead - 1, hidden]."""
        feature = self.fuse(self.mask_hidden.view(1, self.shape.states, self.shape.width))
        return feature.expand(self.ahead - 1, -1)


class Eagle1Head(RecurrentHead):
    """EAGLE-1 (Li et al. 2024, arXiv 2401.15077): it guesses the target's last hidden state behind the final norm, and
    the target's head makes logits of the guess. EAGLE-2 (arXiv 2406.16858) drafts trees with the same weights.

    Args:
        shape: What it is made of; its states are one, and as wide as its layer.
    """

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.shape, config = shape, shape.layer
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if shape.embeds else None
        self.fc = shape.linear("fc", 2 * hidden, hidden)
        self.layers = nn.ModuleList([_EagleOneLayer(shape)])
        self.lm_head = shape.linear("lm_head", hidden, shape.vocab)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return states.flatten(-2)

    def read(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        attends: Sequence[Attend],
    ) -> torch.Tensor:
        x, (attend,) = self.fc(torch.cat((embedded, features), dim=-1)), attends
        out: torch.Tensor = self.layers[0](x, self.rotary_emb(embedded, positions), attend)
        return out

    def recurring(self, out: torch.Tensor) -> torch.Tensor:
        return out

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(out)
        return logits


class _EagleLayer(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        hidden = shape.layer.hidden_size
        self._norm_before_residual = shape.norm_before_residual
        self.input_layernorm, self.hidden_norm = shape.norm(hidden), shape.norm(hidden)
        self.self_attn = _Attention(shape, 2 * hidden)
        self.post_attention_layernorm = shape.norm(hidden)
        self.mlp = _Gated(shape)

    def forward(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        normed = self.hidden_norm(features)
        residual = normed if self._norm_before_residual else features
        x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        residual = residual + self.self_attn(x, rotation, attend)
        out: torch.Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class _EagleOneLayer(nn.Module):
    """A layer of Llama's, without the norm before attention."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        hidden = shape.layer.hidden_size
        self.self_attn = _Attention(shape, hidden)
        self.post_attention_layernorm = shape.norm(hidden)
        self.mlp = _Gated(shape)

    def forward(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        x = x + self.self_attn(x, rotation, attend)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Gated(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        hidden, inner = shape.layer.hidden_size, shape.layer.intermediate_size
        self.gate_proj = shape.linear("gate_proj", hidden, inner)
        self.up_proj = shape.linear("up_proj", hidden, inner)
        self.down_proj = shape.linear("down_proj", inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Attention(nn.Module):
    def __init__(self, shape: EagleShape, inputs: int) -> None:
        super().__init__()
        config: Any = shape.layer
        hidden, self._size = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * self._size, config.num_key_value_heads * self._size
        self.q_proj = shape.linear("q_proj", inputs, queries)
        self.k_proj = shape.linear("k_proj", inputs, keys)
        self.v_proj = shape.linear("v_proj", inputs, keys)
        self.o_proj = shape.linear("o_proj", queries, hidden)
        self.q_norm = shape.norm(self._size) if shape.head_norms else nn.Identity()
        self.k_norm = shape.norm(self._size) if shape.head_norms else nn.Identity()

    def forward(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        query = _rotated(self.q_norm(self._by_head(self.q_proj(x))), rotation)
        out: torch.Tensor = self.o_proj(attend(query, *self.remembered(x, rotation)).flatten(-2))
        return out

    def remembered(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens, see ``Attend``."""
        key = _rotated(self.k_norm(self._by_head(self.k_proj(x))), rotation)
        return key, self._by_head(self.v_proj(x))

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        by_head: torch.Tensor = x.unflatten(-1, (-1, self._size)).transpose(1, 2)
        return by_head


def _rotated(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding (Su et al. 2021) of [batch, heads, tokens, size], by cosines and sines [batch, tokens, size]."""
    cosines, sines = (each.unsqueeze(1) for each in rotation)
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


class DFlashHead(nn.Module):
    """DFlash (Chen et al. 2026, arXiv 2602.06036): a few decoder layers guess a block of tokens in one pass.

    The block is the last token and masks behind it. All of it sees all of it, and in every layer the features of the
    context as further keys and values. What comes out at a mask tells the token there.

    Args:
        shape: What its layers are made of, and how many states of the target a feature is.
        layers: How many there are.
        block: Tokens of a block, the last one of the context among them.
        mask: The token that stands where one is to be guessed.
    """

    def __init__(self, shape: EagleShape, layers: int, block: int, mask: int) -> None:
        super().__init__()
        self.shape, self.block, self.mask, config = shape, block, mask, shape.layer
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if shape.embeds else None
        self.fc = shape.linear("fc", shape.states * shape.width, hidden)
        self.hidden_norm, self.norm = shape.norm(hidden), shape.norm(hidden)
        self.layers = nn.ModuleList(_DecoderLayer(shape) for _ in range(layers))
        self.lm_head = shape.linear("lm_head", hidden, shape.vocab)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def remembered(
        self, states: torch.Tensor, positions: torch.Tensor
    ) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """By layer, keys and values of positions of a context, see ``Attend``.

        Args:
            states: Of the target, lower layers first, [batch, positions, states, width].
            positions: [batch, positions].
        """
        features = self.hidden_norm(self.fc(states.flatten(-2)))
        rotation = self.rotary_emb(features, positions)
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        return [attention.remembered(features, rotation) for attention in attentions]

    def guess(
        self, embedded: torch.Tensor, positions: torch.Tensor, attends: Sequence[Attend]
    ) -> torch.Tensor:
        """Logits at the masks, [batch, block - 1, vocab].

        Args:
            embedded: Embeddings of the block, [batch, block, hidden].
            positions: [batch, block].
            attends: How it attends, by layer.
        """
        x, rotation = embedded, self.rotary_emb(embedded, positions)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, rotation, attend)
        logits: torch.Tensor = self.lm_head(self.norm(x[:, 1:]))
        return logits


class _DecoderLayer(nn.Module):
    """A layer of Llama's, or with norms of heads Qwen3's."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        hidden = shape.layer.hidden_size
        self.input_layernorm, self.post_attention_layernorm = shape.norm(hidden), shape.norm(hidden)
        self.self_attn = _Attention(shape, hidden)
        self.mlp = _Gated(shape)

    def forward(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MedusaHeads(nn.Module):
    """Medusa (Cai et al. 2024, arXiv 2401.10774): head i guesses the token i + 2 places behind a position.

    Parameters are named as in the files that vLLM reads.

    Args:
        heads: How many.
        blocks: Residual blocks of each.
        width: Of the target's hidden states.
        vocab: Tokens they draft.
        biased: Whether the blocks have biases.
        shared: Whether all have the same projection to the vocabulary.
    """

    def __init__(
        self, heads: int, blocks: int, width: int, vocab: int, *, biased: bool = False, shared: bool = False
    ) -> None:
        super().__init__()
        self.heads = heads
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(width, width, biased) for _ in range(blocks))})
            for _ in range(heads)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, vocab, bias=False) for _ in range(1 if shared else heads)
        )

    def guess(self, state: torch.Tensor, head: int) -> torch.Tensor:
        """What a head makes of the target's last hidden states behind its final norm, in the same shape."""
        block: Any = self.blocks[head]
        for layer in block["layers"]:
            state = state + silu(layer(state))
        return state

    def logits(self, state: torch.Tensor, head: int) -> torch.Tensor:
        """Of one head, [..., vocab], from the target's last hidden states behind its final norm, [..., width]."""
        logits: torch.Tensor = self.lm_heads[min(head, len(self.lm_heads) - 1)](self.guess(state, head))
        return logits

    def forward(self, states: torch.Tensor) -> Sequence[torch.Tensor]:
        """Of every head."""
        return [self.logits(states, head) for head in range(self.heads)]
