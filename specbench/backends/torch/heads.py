"""Trained heads: small modules that predict what a target writes next from its hidden states.

They are plain modules, differentiable over any number of positions. Their attention to earlier tokens is an argument:
``head_forward.py`` passes one for decoding, the training another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes attention, [batch, tokens, heads, size], from queries, [batch, heads, tokens, size], and keys and values,
[batch, key/value heads, tokens, size], of these tokens."""


@dataclass(frozen=True)
class EagleShape:
    """The structure of an EAGLE head."""

    states: int  # hidden states of the target at each position
    width: int  # of each state
    vocab: int  # number of tokens it drafts
    layer: LlamaConfig  # configuration of its decoder layers, Llama's
    layers: int = 1  # number of decoder layers
    embeds: bool = False  # whether it has its own embeddings, in place of the target's
    biases: frozenset[str] = frozenset()  # names of linear layers with a bias, such as fc and q_proj
    head_norms: bool = False  # whether queries and keys are normalized by head, as Qwen3's are
    norm_before_residual: bool = False  # whether the layer adds to the normalized feature, not to the feature
    norm_before_fc: bool = False  # whether all states together are normalized first (EAGLE-3.1)
    fc_norm: bool = False  # whether each state is normalized first (EAGLE-3.1)
    # whether the recurrent feature is the layer's output after the final norm (EAGLE-3.1)
    norm_output: bool = False

    def linear(self, name: str, inputs: int, outputs: int) -> nn.Linear:
        """Make a linear layer, with a bias if its name is among those that have one."""
        return nn.Linear(inputs, outputs, name in self.biases)

    def norm(self, size: int) -> nn.RMSNorm:
        """Make a norm with the layer's epsilon."""
        return nn.RMSNorm(size, self.layer.rms_norm_eps)


class RecurrentHead(nn.Module):
    """Decoder layers, mostly one, over tokens and the target's hidden states.

    The first layer reads a token's embedding and the feature of the position before it; a further layer reads the
    output of the layer before. A feature is ``fuse(states)``, or ``recurring(out)`` of the head's own output where the
    target's states are not known. ``logits(out)`` are those after the token. ``embed_tokens`` is ``None`` if the head
    uses the target's embeddings. A token attends to the ``window`` positions up to its own; ``None`` for all.
    """

    shape: EagleShape
    embed_tokens: nn.Embedding | None
    layers: nn.ModuleList
    norm: nn.Module
    lm_head: nn.Module
    window: int | None = None

    def fuse(self, states: Tensor) -> Tensor:
        """Return features, [..., hidden], from the target's states, lower layers first, [..., states, width]."""
        return states.flatten(-2)

    def read(
        self, embedded: Tensor, features: Tensor, positions: Tensor, attends: Sequence[Attend]
    ) -> Tensor:
        """Return the last layer's output at tokens, [batch, tokens, hidden], before any final norm.

        Args:
            embedded, features: Of the tokens, [batch, tokens, hidden].
            positions: [batch, tokens].
            attends: How each layer attends.
        """
        raise NotImplementedError

    def recurring(self, out: Tensor) -> Tensor:
        """Return the feature that an output stands for, in the same shape."""
        return out

    def logits(self, out: Tensor) -> Tensor:
        """Return logits over the tokens it drafts, [..., vocab], after tokens with these outputs."""
        return self.lm_head(self.norm(out))


class EagleHead(RecurrentHead):
    """EAGLE-3 (Li et al. 2025, arXiv 2503.01840): it reads states of several layers, and its first layer has 2·hidden
    inputs.

    Parameters have the names of ``speculators``' files.
    """

    norm: nn.RMSNorm

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
        further = (DecoderLayer(shape) for _ in range(1, shape.layers))
        self.layers = nn.ModuleList([_EagleLayer(shape), *further])
        self.norm = shape.norm(hidden)
        self.lm_head = shape.linear("lm_head", hidden, shape.vocab)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def fuse(self, states: Tensor) -> Tensor:
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, states.unbind(-2), strict=True)
            states = torch.stack([norm(part) for norm, part in parts], dim=-2)
        wide = states.flatten(-2)
        if self.input_norm is not None:
            wide = self.input_norm(wide)
        return self.fc(wide)

    def read(
        self, embedded: Tensor, features: Tensor, positions: Tensor, attends: Sequence[Attend]
    ) -> Tensor:
        rotation, (first, *further) = self.rotary_emb(embedded, positions), self.layers
        out: Tensor = first(embedded, features, rotation, attends[0])
        for layer, attend in zip(further, attends[1:], strict=True):
            out = layer(out, rotation, attend)
        return out

    def recurring(self, out: Tensor) -> Tensor:
        return self.norm(out) if self.shape.norm_output else out


class ParallelEagleHead(EagleHead):
    """P-EAGLE (Hui et al. 2026, arXiv 2602.01469): EAGLE-3 that predicts ``ahead`` tokens in one forward pass.

    After the last token it reads masks: the embedding of the token ``mask``, with parameters of its own in place of
    states. The output at the i-th mask predicts the token i + 1 places after the last one.
    """

    def __init__(self, shape: EagleShape, ahead: int, mask: int) -> None:
        super().__init__(shape)
        self.ahead, self.mask = ahead, mask
        self.mask_hidden = nn.Parameter(torch.zeros(shape.states * shape.width))

    def mask_features(self) -> Tensor:
        """Return the features of the masks of a forward pass, [ahead - 1, hidden]."""
        feature = self.fuse(self.mask_hidden.view(1, self.shape.states, self.shape.width))
        return feature.expand(self.ahead - 1, -1)


class Eagle1Head(RecurrentHead):
    """EAGLE-1 (Li et al. 2024, arXiv 2401.15077): it predicts the target's last hidden state after the final norm,
    of which the target's head makes logits. EAGLE-2 (arXiv 2406.16858) drafts trees with the same weights.
    """

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.shape, config = shape, shape.layer
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if shape.embeds else None
        self.fc = shape.linear("fc", 2 * hidden, hidden)
        self.layers = nn.ModuleList([DecoderLayer(shape, input_norm=False)])
        self.norm = nn.Identity()  # its outputs are those after the target's
        self.lm_head = shape.linear("lm_head", hidden, shape.vocab)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def read(
        self, embedded: Tensor, features: Tensor, positions: Tensor, attends: Sequence[Attend]
    ) -> Tensor:
        x, (attend,) = self.fc(torch.cat((embedded, features), dim=-1)), attends
        return self.layers[0](x, self.rotary_emb(embedded, positions), attend)


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
        self, embedded: Tensor, features: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        normed = self.hidden_norm(features)
        residual = normed if self._norm_before_residual else features
        x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        residual = residual + self.self_attn(x, rotation, attend)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class _Gated(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        hidden, inner = shape.layer.hidden_size, shape.layer.intermediate_size
        self.gate_proj = shape.linear("gate_proj", hidden, inner)
        self.up_proj = shape.linear("up_proj", hidden, inner)
        self.down_proj = shape.linear("down_proj", inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


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

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        query = _rotate(self.q_norm(self._by_head(self.q_proj(x))), rotation)
        return self.o_proj(attend(query, *self.keys_values(x, rotation)).flatten(-2))

    def keys_values(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values of tokens, see ``Attend``."""
        key = _rotate(self.k_norm(self._by_head(self.k_proj(x))), rotation)
        return key, self._by_head(self.v_proj(x))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._size)).transpose(1, 2)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate [batch, heads, tokens, size] by cosines and sines, [batch, tokens, size] (Su et al. 2021)."""
    cosines, sines = (part.unsqueeze(1) for part in rotation)
    return x * cosines + rotate_half(x) * sines


class DecoderLayer(nn.Module):
    """A layer of Llama's, with norms of heads Qwen3's; EAGLE-1's has no norm before attention."""

    def __init__(self, shape: EagleShape, *, input_norm: bool = True) -> None:
        super().__init__()
        hidden = shape.layer.hidden_size
        self.input_layernorm = shape.norm(hidden) if input_norm else nn.Identity()
        self.post_attention_layernorm = shape.norm(hidden)
        self.self_attn = _Attention(shape, hidden)
        self.mlp = _Gated(shape)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class MedusaHeads(nn.Module):
    """Medusa (Cai et al. 2024, arXiv 2401.10774): head i predicts the token i + 2 places after a position.

    Parameters have the names of the files that vLLM reads. Each head has ``blocks`` residual blocks; the projection to
    the vocabulary may be ``shared``.
    """

    def __init__(self, heads: int, blocks: int, width: int, vocab: int, *, shared: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"layers": nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))}
            )
            for _ in range(heads)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, vocab, bias=False) for _ in range(1 if shared else heads)
        )

    def guess(self, state: Tensor, head: int) -> Tensor:
        """Transform the target's last hidden states after its final norm, in the same shape."""
        block: Any = self.blocks[head]
        for layer in block["layers"]:
            state = state + silu(layer(state))
        return state

    def logits(self, state: Tensor, head: int) -> Tensor:
        """Return one head's logits, [..., vocab], for states as in ``guess``, [..., width]."""
        return self.lm_heads[min(head, len(self.lm_heads) - 1)](self.guess(state, head))

    def forward(self, states: Tensor) -> Sequence[Tensor]:
        """Return the logits of every head."""
        return [self.logits(states, head) for head in range(self.heads)]
