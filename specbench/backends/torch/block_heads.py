"""Block drafters: heads that predict a block of tokens in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specbench.backends.torch.heads import Attend, DecoderLayer, EagleShape


class DFlashHead(nn.Module):
    """DFlash (Chen et al. 2026, arXiv 2602.06036): a few decoder layers predict a block of tokens in one forward pass.

    The block is the last token with ``block - 1`` times the token ``mask`` after it. Its tokens see each other, and in
    every layer the features of the context as further keys and values. The output at a mask predicts the token there.
    """

    def __init__(self, shape: EagleShape, layers: int, block: int, mask: int) -> None:
        super().__init__()
        self.shape, self.block, self.mask, config = shape, block, mask, shape.layer
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if shape.embeds else None
        self.fc = shape.linear("fc", shape.states * shape.width, hidden)
        self.hidden_norm, self.norm = shape.norm(hidden), shape.norm(hidden)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(layers))
        self.lm_head = shape.linear("lm_head", hidden, shape.vocab)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def keys_values(self, states: Tensor, positions: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """Return keys and values of positions of a context, by layer,
        see ``Attend``; arguments as of ``RecurrentHead``.
        """
        features = self.hidden_norm(self.fc(states.flatten(-2)))
        rotation = self.rotary_emb(features, positions)
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        return [attention.keys_values(features, rotation) for attention in attentions]

    def guess(self, embedded: Tensor, positions: Tensor, attends: Sequence[Attend]) -> Tensor:
        """Return logits at the masks, [batch, block - 1, vocab],
        from embeddings, [batch, block, hidden], and positions.
        """
        x, rotation = embedded, self.rotary_emb(embedded, positions)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, rotation, attend)
        logits: Tensor = self.lm_head(self.norm(x[:, 1:]))
        return logits
