"""EAGLE-3 and Medusa heads in training.

Place i of a draft is the token i + 2 positions after the last one with known hidden states. The token in between is the
target's own, with which the context ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from transformers import LlamaConfig

from specbench.backends.torch.heads import EagleHead, EagleShape, MedusaHeads
from specbench.base.record import Json
from specbench.models.checkpoints import text_config
from specbench.train.batches import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_EVERY = 4
"""One in this many drafts continues after a wrong token; decoding would reject all of them there."""

_DECAY = 0.8
"""Weight of the loss at each draft position relative to the one before, times the share of drafts that get there."""

_WIDTH = 576
"""Width of hidden states above which the learning rate falls in proportion (Yang et al. 2022, arXiv 2203.03466)."""


_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Models whose decoder layers are Llama's, except for biases and norms of attention heads."""

_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "max_position_embeddings", "vocab_size",
)  # fmt: skip
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")
_MORE = ("model_type", "hidden_act", "num_hidden_layers", "attention_bias", "mlp_bias")


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
            kept[1:] = [_picked(entries.transpose(1, 2), drafts).transpose(1, 2) for entries in kept[1:]]

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


class EagleStudent(nn.Module):
    """An EAGLE-3 head that learns to continue its own outputs (Li et al. 2025, arXiv 2503.01840).

    Embeddings and the projection to the draft vocabulary are the target's and are not trained.

    Args:
        model: The target; if it is of the Llama family, the head starts with its last layers.
        draft_vocab: Token ids of the draft vocabulary, ascending, [vocab].
        depth: Tokens it learns to draft.

    Attributes:
        algorithm: Its name in the files of ``speculators``; ``None`` if it is stored in another format.
        rows: The rows of the target's output head that it drafts with, [vocab, width].
        layers: The target's layers whose hidden states it reads.
    """

    algorithm: str | None = "eagle3"

    def __init__(self, model: PreTrainedModel, draft_vocab: torch.Tensor, depth: int) -> None:
        super().__init__()
        output_head: Any = model.get_output_embeddings()
        self.draft_vocab, self.depth, self.every = draft_vocab, depth, _EVERY
        self.rows: torch.Tensor = output_head.weight.detach()[draft_vocab]
        self.config = text_config(model.config)
        self.layers = self.read_layers(self.config.num_hidden_layers)
        self.head = self.make_head(model)

    @property
    def rate(self) -> float:
        """The highest learning rate."""
        return 1.6e-3 / max(1.0, self.rows.shape[1] / _WIDTH)

    def read_layers(self, total: int) -> tuple[int, ...]:
        """Return the layers whose hidden states it reads, of a target with ``total`` layers."""
        return tuple(sorted(max(0, min(layer, total - 1)) for layer in (2, total // 2, total - 3)))

    def make_head(self, model: PreTrainedModel) -> Any:
        """Return a new head without a projection to the vocabulary, of two layers if the target has so many."""
        config = self.config
        layers = min(2, config.num_hidden_layers)
        shape = EagleShape(
            len(self.layers), config.hidden_size, len(self.draft_vocab), layer_config(config), layers
        )
        head = EagleHead(shape)
        del head.lm_head
        _init_from_target(head, model)
        return head

    def forward(self, **batch: torch.Tensor) -> Batch:
        """Draft after every position of the answers in a batch, see ``Batches``.

        Returns:
            ``loss``, and by place in the draft ``losses``, the mean cross-entropy with the target's distributions, and
            ``counted``, the number of drafts that reach it, [depth].
        """
        p, choices = batch["logits"].float().softmax(-1), batch["logits"].argmax(-1)
        losses: list[tuple[torch.Tensor, int]] = []
        head, embedded, states = self.head, batch["embedded"], batch["states"][:, :-1]
        attends = [DraftAttention() for _ in head.layers]
        features = head.fuse(states.to(head.norm.weight.dtype)).float()
        texts, last = features.shape[:2]
        starts = torch.arange(last, device=features.device).expand(texts, -1)
        wanted = wanted_rows(batch["places"], 0)
        kept = wanted >= 0
        for place in range(self.depth):
            tokens = (starts + place + 1).clamp(max=last)
            out = head.read(_picked(embedded, tokens), features, starts + place, attends)
            logits = self.logits(head.norm(out[kept]))
            losses.append(_loss_of(logits, p[wanted[kept]]))
            if place + 1 == self.depth:
                break
            right = torch.zeros_like(kept)
            right[kept] = logits.argmax(-1) == choices[wanted[kept]]
            wanted = wanted_rows(batch["places"], place + 1).gather(1, starts)
            kept = kept & (wanted >= 0) & (right | ((starts + batch["ids"].sum()) % self.every == 0))
            # Of each text the drafts that continue, in order; padded to the same number for all.
            chosen = kept.int().argsort(dim=1, descending=True, stable=True)[
                :, : max(1, int(kept.sum(1).max()))
            ]
            starts, wanted, kept = (rows.gather(1, chosen) for rows in (starts, wanted, kept))
            features = _picked(head.recurring(out), chosen)
            for attend in attends:
                attend.select(chosen, starts)
        return _join_losses(losses)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits over the draft vocabulary, [..., vocab], for normalized states, [..., width]."""
        return (states.to(self.rows.dtype) @ self.rows.T).float()

    def settings(self) -> Json:
        """Return what ``config.json`` says of this kind of head."""
        shape = self.head.shape
        return {
            "architectures": ["Eagle3Speculator"],
            "transformer_layer_config": layer_settings(shape.layer) | {"num_hidden_layers": shape.layers},
            "eagle_aux_hidden_state_layer_ids": [*self.layers],
            "norm_before_residual": False,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return its weights by their names in a file."""
        return {name: tensor.detach() for name, tensor in self.head.named_parameters()}


class MedusaStudent(EagleStudent):
    """Medusa heads of one block each, on the target's own projection to the vocabulary (Cai et al. 2024).

    Each begins as the target's own output. None reads what another has drafted, so all learn from every position.
    """

    algorithm = None

    @property
    def rate(self) -> float:
        return 1e-3

    def read_layers(self, total: int) -> tuple[int, ...]:
        return (total,)

    def make_head(self, model: PreTrainedModel) -> Any:  # noqa: ARG002
        heads = MedusaHeads(self.depth, 1, self.config.hidden_size, 1, shared=True)
        del heads.lm_heads
        for parameter in heads.parameters():
            nn.init.zeros_(parameter)
        return heads

    def forward(self, **batch: torch.Tensor) -> Batch:
        p, states = batch["logits"].float().softmax(-1), batch["states"][:, :-1, 0].float()
        losses, reached = [], torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        for place in range(self.depth):
            wanted = wanted_rows(batch["places"], place)
            reached = reached & (wanted >= 0)
            losses.append(_loss_of(self.logits(self.head.guess(states[reached], place)), p[wanted[reached]]))
        return _join_losses(losses)

    def settings(self) -> Json:
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": self.config.hidden_size,
            "vocab_size": self.config.vocab_size,
            "num_heads": self.depth,
            "num_hidden_layers": 1,
            "original_lm_head": True,
        }


def _loss_of(logits: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the mean cross-entropy of drafts at a place with the target's distributions, and their number."""
    return cross_entropy(logits, p, reduction="sum") / max(1, len(logits)), len(logits)


def _join_losses(losses: Sequence[tuple[torch.Tensor, int]]) -> Batch:
    """Return what ``EagleStudent.forward`` does, of the losses by place in the draft."""
    by_place = torch.stack([loss for loss, _ in losses])
    counted = torch.tensor([count for _, count in losses], device=by_place.device)
    weights = _DECAY ** torch.arange(len(losses), device=by_place.device) * counted / counted[0].clamp_min(1)
    return {"loss": (by_place * weights).sum(), "losses": by_place.detach(), "counted": counted}


def wanted_rows(places: torch.Tensor, place: int) -> torch.Tensor:
    """Return the rows of a batch's ``logits`` that the drafts at a place are compared with, [texts, longest - 1].

    -1 where a draft cannot have this place: the text ends before, or its token is not in the draft vocabulary.
    """
    longest = places.shape[1]
    return pad(places, [0, place], value=-1)[:, place + 1 : place + longest]


def _picked(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Select from [texts, any, ...] by the indices of each text, [texts, n] -> [texts, n, ...]."""
    return x[torch.arange(len(x), device=x.device)[:, None], places]


def _init_from_target(head: EagleHead, model: PreTrainedModel) -> None:
    """Initialize a head with the target's last layers if they fit.

    Its features begin as the highest hidden state. The first layer's input is the embedding concatenated with the
    feature; it begins as if it were their sum.
    """
    untyped: Any = model
    config = text_config(model.config)
    start_from_highest(head.fc, config.hidden_size)
    if config.model_type not in _FAMILY:
        return
    decoder = untyped.get_decoder()
    for place, layer in enumerate(head.layers):
        known = decoder.layers[place - len(head.layers)].state_dict()
        weights = {name: known[name].float() for name in layer.state_dict() if name in known}
        if place == 0:
            for name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"):
                weights[name] = torch.cat((weights[name], weights[name]), dim=1) * math.sqrt(0.5)
            weights["hidden_norm.weight"] = weights["input_layernorm.weight"]
        layer.load_state_dict(weights)
    head.norm.load_state_dict({"weight": decoder.norm.weight})


def layer_settings(config: PreTrainedConfig) -> Json:
    """Return what a head's ``config.json`` says of its decoder layers."""
    known = config.to_dict()
    return {name: known[name] for name in (*_SIZES, *_ROPE, *_MORE) if known.get(name) is not None}


def layer_config(target: PreTrainedConfig) -> LlamaConfig:
    """Return the configuration of decoder layers of the target's size."""
    names = (*_SIZES, *_ROPE) if target.model_type in _FAMILY else _SIZES
    # Attributes have the usual names, also where to_dict() has others.
    known = {name: value for name in names if (value := getattr(target, name, None)) is not None}
    return LlamaConfig(**{"intermediate_size": 4 * known["hidden_size"], **known})


def start_from_highest(fc: nn.Linear, width: int) -> None:
    """Let the layer that joins states begin as the highest of them, [width], with small random weights for the rest."""
    with torch.no_grad():
        fc.weight.mul_(0.1)
        fc.weight[:, -width:] += torch.eye(width)
