"""Block drafters in training: DFlash and DSpark.

Each block begins after another position of a text, and all blocks of a batch go through the layers together. Keys and
values of a text are computed once for all of its blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specbench.backends.torch.block_heads import BlockShape, DFlashHead, DSparkHead
from specbench.backends.torch.heads import EagleShape
from specbench.base.record import Json
from specbench.models.checkpoints import text_config
from specbench.train.students import (
    EVERY,
    FAMILY,
    LAYER_SETTINGS,
    Bias,
    Metrics,
    MetricsBuilder,
    Student,
    copied_text,
    group_by_text,
    layer_config,
    layer_weights,
    picked,
    start_from_highest,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbench.train.lessons import Lesson

_RANK = 64
"""Rank of DSpark's bias, at most the width of the hidden states."""

_RANDOM = 0.01
"""Standard deviation of the initial numbers of tokens for this bias, which begins as 0."""


class BlockAttention:
    """Attention of many blocks together: to the context before the block, and within it. See ``Attend``.

    Args:
        context: Keys and values of texts, each [texts, key/value heads, positions, size].
        lengths: The number of positions that each block attends to, [texts, blocks].
    """

    def __init__(self, context: tuple[torch.Tensor, torch.Tensor], lengths: torch.Tensor) -> None:
        self._keys, self._values = context
        positions = torch.arange(self._keys.shape[2], device=lengths.device)
        self._later = (positions >= lengths[..., None])[:, None, :, None]

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend from blocks of all texts, each text's one after the other, [texts · blocks, heads, block, size]."""
        texts, heads, positions, size = self._keys.shape

        def by_text(each: torch.Tensor) -> torch.Tensor:
            """Return [texts, key/value heads, blocks, rows, size]."""
            return each.reshape(texts, -1, heads, each.shape[1] // heads * each.shape[2], size).transpose(
                1, 2
            )

        rows = by_text(query) * size**-0.5
        before = (rows.flatten(2, 3) @ self._keys.mT).view(*rows.shape[:-1], positions)
        scores = (before.masked_fill(self._later, float("-inf")), rows @ by_text(key).mT)
        weights = torch.cat(scores, dim=-1).softmax(-1)
        out = (weights[..., :positions].flatten(2, 3) @ self._values).view(rows.shape)
        out = out + weights[..., positions:] @ by_text(value)
        return out.transpose(1, 2).reshape(query.shape).transpose(1, 2)


class DFlashStudent(Student):
    """A DFlash head that learns from blocks after all positions (Chen et al. 2026, arXiv 2602.06036).

    Embeddings and the projection to the draft vocabulary are the target's and are not trained.

    Args:
        model: The target; if it is of the Llama family, the head starts with its last layers.
        mask: The token that is read in place of one to be guessed.

    Attributes:
        every: See ``EVERY``.
    """

    kind = algorithm = "dflash"
    architecture = "DFlashDraftModel"

    def __init__(
        self, model: PreTrainedModel, head: torch.Tensor, depth: int, seed: int, layers: int, mask: int
    ) -> None:
        super().__init__(model, head, depth)
        self.every, config = EVERY, self._config
        shape = EagleShape(
            len(self.layers), config.hidden_size, len(head), layer_config(config), layers, head_norms=True
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = self._make(shape, mask)
        del self.head.lm_head
        for module in self.head.modules():
            if isinstance(module, torch.nn.RMSNorm):
                module.register_forward_pre_hook(_widen)
        self.started_from = _init_from_target(self.head, model)
        embeddings: Any = model.get_input_embeddings()
        embedded = embeddings(torch.tensor([mask], device=embeddings.weight.device))[0]
        self.register_buffer("_mask", embedded.detach().float(), persistent=False)

    def _make(self, shape: EagleShape, mask: int) -> DFlashHead:
        return DFlashHead(shape, BlockShape(self.depth + 1, mask, **_full_attention(shape.layers)))

    def continues(self, block: BlockShape) -> bool:
        """Return whether it reads and predicts blocks as a head of this structure does, whatever their length."""
        return replace(block, block=self.head.block.block) == self.head.block

    def forward(self, lesson: Lesson) -> Metrics:
        metrics, head = MetricsBuilder(lesson, self._rows), self.head
        states = lesson.states[:, :-1].to(head.norm.weight.dtype)
        texts, last = states.shape[:2]
        text, start = metrics.rows(0).nonzero(as_tuple=True)
        starts, there = group_by_text(text, start, texts)
        positions = torch.arange(last, device=states.device).expand(texts, -1)
        context = head.keys_values(states, positions)
        attends = [BlockAttention(each, starts + 1) for each in context]
        hidden = head.guess(*self._blocks(lesson, starts), attends)[there.flatten(), head.block.first :]
        places = torch.arange(1, self.depth + 1, device=start.device)
        before = lesson.ids[text[:, None], (start[:, None] + places).clamp(max=last)]
        always = (start + lesson.ids.sum()) % self.every == 0
        kept = torch.ones_like(start, dtype=torch.bool)
        for place in range(self.depth):
            kept = kept & metrics.rows(place)[text, start]
            rows = text[kept], start[kept]
            more = self._conditions(hidden[kept, : place + 1], before[kept, : place + 1])
            right = metrics.add(hidden[kept, place], place, rows, *more)
            reached, kept = kept, torch.zeros_like(kept)
            kept[reached] = right | always[reached]
        return metrics.build()

    def _blocks(self, lesson: Lesson, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embeddings, [texts · blocks, block, hidden], and positions, [texts · blocks, block]."""
        block = self.head.block.block
        anchors = picked(lesson.embedded, starts + 1).flatten(0, 1)[:, None]
        masks = self.get_buffer("_mask").expand(len(anchors), block - 1, -1)
        positions = starts.flatten()[:, None] + torch.arange(1, block + 1, device=starts.device)
        return torch.cat((anchors, masks), dim=1), positions

    def _conditions(
        self,
        hidden: torch.Tensor,  # noqa: ARG002
        before: torch.Tensor,  # noqa: ARG002
    ) -> tuple[Bias | None, torch.Tensor | None]:
        """Return the bias of logits and the log-odds of acceptance at the last of the given places.

        Args:
            hidden: Hidden states at the places, [n, depth, hidden].
            before: The tokens before them, [n, depth].
        """
        return None, None

    def settings(self) -> Json:
        layer = self.head.shape.layer.to_dict()
        layer |= {"model_type": "qwen3", "num_hidden_layers": self.head.shape.layers}
        return {
            "architectures": [self.architecture],
            "speculators_model_type": self.kind,
            "speculators_version": "0.9.0",
            "transformer_layer_config": {
                name: layer[name] for name in LAYER_SETTINGS if layer.get(name) is not None
            },
            "aux_hidden_state_layer_ids": [*self.layers],
            "block_size": self.head.block.block,
            "mask_token_id": self.head.block.mask,
            "sample_from_anchor": self.head.block.first == 0,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.head.named_parameters()}


class DSparkStudent(DFlashStudent):
    """A DSpark head (arXiv 2607.05147); each token is drafted after the text's own tokens before it.

    Its confidence head learns the acceptance rate Σ min(p, q).
    """

    kind = algorithm = "dspark"
    architecture = "DSparkDraftModel"
    head: DSparkHead

    def _make(self, shape: EagleShape, mask: int) -> DFlashHead:
        block = BlockShape(
            self.depth,
            mask,
            first=0,
            **_full_attention(shape.layers),
            markov="vanilla",
            rank=min(_RANK, shape.layer.hidden_size),
            confidence=True,
            confidence_reads_token=True,
        )
        head = DSparkHead(shape, block)
        assert head.markov_head is not None
        torch.nn.init.normal_(head.markov_head.markov_w1.weight, std=_RANDOM)
        torch.nn.init.zeros_(head.markov_head.markov_w2.weight)
        return head

    def _conditions(self, hidden: torch.Tensor, before: torch.Tensor) -> tuple[Bias, torch.Tensor]:
        markov = self.head.markov_head
        assert markov is not None
        numbers = markov.markov_w1(before)
        bias = Bias(markov.latents(numbers, hidden)[:, -1], markov.markov_w2.weight)
        return bias, self.head.confidence(hidden[:, -1], numbers[:, -1])

    def settings(self) -> Json:
        return super().settings() | {
            "markov_rank": self.head.block.rank,
            "markov_head_type": self.head.block.markov,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }


def _widen(norm: torch.nn.RMSNorm, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Convert the input of a norm to the dtype of its weight, where autocast has made it narrower."""
    return (given[0].to(norm.weight.dtype),)


def _full_attention(layers: int) -> dict[str, Any]:
    return {"windows": (None,) * layers, "causal": (False,) * layers}


def _init_from_target(head: DFlashHead, model: PreTrainedModel) -> str | None:
    """Initialize a head with the target's last layers if they fit; its features begin as the highest hidden state."""
    untyped: Any = model
    config = text_config(model.config)
    with torch.no_grad():
        start_from_highest(head.fc, config.hidden_size)
        if config.model_type not in FAMILY:
            return None
        decoder = untyped.get_decoder()
        for layer, like in zip(head.layers, decoder.layers[-len(head.layers) :], strict=True):
            layer.load_state_dict(layer_weights(like) | _head_norms(like))
        head.hidden_norm.weight.copy_(decoder.layers[-len(head.layers)].input_layernorm.weight)
        head.norm.weight.copy_(decoder.norm.weight)
    return copied_text(config.num_hidden_layers, len(head.layers))


def _head_norms(like: Any) -> dict[str, torch.Tensor]:
    """Return norms of queries and keys for a layer: its own, or the size that they have without a norm, on average."""
    found = {}
    for name in "qk":
        own = getattr(like.self_attn, f"{name}_norm", None)
        if own is None:
            weight = like.self_attn.get_submodule(f"{name}_proj").weight.float()
            size = (weight * like.input_layernorm.weight.float()).square().sum(1).mean().sqrt()
            norm = size.expand(like.self_attn.head_dim)
        else:
            norm = own.weight.float()
        found[f"self_attn.{name}_norm.weight"] = norm
    return found
