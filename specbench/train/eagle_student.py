"""EAGLE-3 in training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from specbench.backends.torch.heads import EagleHead, EagleShape
from specbench.base.record import Json
from specbench.models.checkpoints import text_config
from specbench.train.students import (
    EVERY,
    FAMILY,
    Metrics,
    MetricsBuilder,
    Student,
    copied_text,
    group_by_text,
    layer_config,
    layer_settings,
    layer_weights,
    picked,
    start_from_highest,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbench.train.lessons import Lesson


class DraftAttention:
    """Attention of drafts after many positions together (EAGLE-3's training-time test).

    The first forward is causal attention over the context. In each later forward, a row is the next token of one draft,
    and each draft begins after another position of the context. The row attends to the context up to that position, and
    to the earlier tokens of its draft. See ``Attend`` of ``specbench.backends.torch.heads``.
    """

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._later = torch.empty(0)

    def select(self, drafts: torch.Tensor, starts: torch.Tensor) -> None:
        """Continue with some of the drafts.

        Args:
            starts: The positions after which these drafts began, [texts, drafts].
        """
        self._later = torch.arange(self._keys[0].shape[2], device=starts.device) > starts[:, None, :, None]
        for kept in (self._keys, self._values):
            kept[1:] = [picked(each.transpose(1, 2), drafts).transpose(1, 2) for each in kept[1:]]

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(groups, dim=1))
        self._values.append(value.repeat_interleave(groups, dim=1))
        if len(self._keys) == 1:
            out = scaled_dot_product_attention(query, self._keys[0], self._values[0], is_causal=True)
            return out.transpose(1, 2)
        query = query * query.shape[-1] ** -0.5
        scores = (query @ self._keys[0].mT).masked_fill(self._later, float("-inf"))
        own = [(query * keys).sum(-1, keepdim=True) for keys in self._keys[1:]]
        weights = torch.cat((scores, *own), dim=-1).softmax(-1)
        length = scores.shape[-1]
        out = weights[..., :length] @ self._values[0]
        for place, values in enumerate(self._values[1:]):
            out = out + weights[..., length + place, None] * values
        return out.transpose(1, 2)


class EagleStudent(Student):
    """An EAGLE-3 head that learns to continue its own outputs (Li et al. 2025, arXiv 2503.01840).

    Embeddings and the projection to the draft vocabulary are the target's and are not trained.

    Args:
        model: The target; if it is of the Llama family, the head starts with its last layers.
    """

    kind, algorithm = "eagle", "eagle3"

    def __init__(
        self, model: PreTrainedModel, head: torch.Tensor, depth: int, seed: int, layers: int
    ) -> None:
        super().__init__(model, head, depth)
        self.every = EVERY
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head, self.started_from = self._make(model, len(head), layers)
        del self.head.lm_head

    def _make(self, model: PreTrainedModel, vocab: int, layers: int) -> tuple[Any, str | None]:
        """Return a new head, and where its weights are from, see ``Student``."""
        config = self._config
        shape = EagleShape(len(self.layers), config.hidden_size, vocab, layer_config(config), layers)
        head = EagleHead(shape)
        return head, _init_from_target(head, model)

    def forward(self, lesson: Lesson) -> Metrics:
        metrics, head = MetricsBuilder(lesson, self._rows), self.head
        attends = [DraftAttention() for _ in head.layers]
        features = head.fuse(lesson.states[:, :-1].to(head.norm.weight.dtype)).float()
        texts, last = features.shape[:2]
        starts = torch.arange(last, device=features.device).expand(texts, -1)
        always = (starts + lesson.ids.sum()) % self.every == 0
        kept = metrics.rows(0)
        for place in range(self.depth):
            tokens = (starts + place + 1).clamp(max=last)
            out = head.read(picked(lesson.embedded, tokens), features, starts + place, attends)
            text, draft = kept.nonzero(as_tuple=True)
            rows = text, starts[text, draft]
            right = metrics.add(head.norm(out[text, draft]), place, rows)
            if place + 1 == self.depth:
                break
            continues = metrics.rows(place + 1)[rows] & (right | always[rows])
            drafts, kept = group_by_text(text[continues], draft[continues], texts)
            starts = picked(starts, drafts)
            features = picked(head.recurring(out), drafts)
            for attend in attends:
                attend.select(drafts, starts)
        return metrics.build()

    def settings(self) -> Json:
        shape = self.head.shape
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "transformer_layer_config": layer_settings(shape.layer) | {"num_hidden_layers": shape.layers},
            "eagle_aux_hidden_state_layer_ids": [*self.layers],
            "norm_before_residual": False,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.head.named_parameters()}


def _init_from_target(head: EagleHead, model: PreTrainedModel) -> str | None:
    """Initialize a head with the target's last layers if they fit; its features begin as the highest hidden state.

    The first layer's input is the embedding concatenated with the feature; it begins as if it were their sum.
    """
    untyped: Any = model
    config = text_config(model.config)
    with torch.no_grad():
        start_from_highest(head.fc, config.hidden_size)
        if config.model_type not in FAMILY:
            return None
        decoder = untyped.get_decoder()
        first, *further = head.layers
        like, *others = decoder.layers[-len(head.layers) :]
        weights = layer_weights(like)
        for name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"):
            weights[name] = torch.cat((weights[name], weights[name]), dim=1) * math.sqrt(0.5)
        first.load_state_dict(weights | {"hidden_norm.weight": weights["input_layernorm.weight"]})
        for layer, each in zip(further, others, strict=True):
            layer.load_state_dict(layer_weights(each))
        head.norm.weight.copy_(decoder.norm.weight)
    return copied_text(config.num_hidden_layers, len(head.layers))
