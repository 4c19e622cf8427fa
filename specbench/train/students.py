"""Heads in training: the drafts of each kind of head for a lesson, their losses, and their files.

Place i of a draft is the token i + 2 positions after the last one with known hidden states. The token in between is the
target's own, with which the context ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import LlamaConfig, PreTrainedConfig

from specbench.base.record import Json
from specbench.models.checkpoints import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbench.train.lessons import Lesson

_ROWS = 256
"""Rows whose logits are computed together."""

EVERY = 4
"""One in this many drafts continues after a wrong token; decoding would reject all of them there."""


class Metrics(NamedTuple):
    """Results of a head by place in the draft, over the drafts that reach this place.

    Attributes:
        losses: Mean cross-entropy with the target's distributions over the draft vocabulary, [depth]; differentiable.
        right: How often its most probable token was the target's, [depth].
    """

    losses: torch.Tensor
    right: torch.Tensor
    counted: torch.Tensor


class Student(nn.Module):
    """A head in training.

    Args:
        depth: Tokens it learns to draft.

    Attributes:
        kind: One of ``specbench.train.learner.KINDS``.
        algorithm: Its name in the files of ``speculators``; ``None`` if it is stored in another format.
        layers: The target's layers whose hidden states it reads.
        started_from: What its weights were initialized from, in words; ``None`` for random ones.
    """

    kind: str
    algorithm: str | None
    started_from: str | None

    def __init__(self, model: PreTrainedModel, head: torch.Tensor, depth: int) -> None:
        super().__init__()
        self.depth, self._rows, self._config = depth, head, text_config(model.config)
        self.layers = read_layers(self.kind, self._config.num_hidden_layers)

    def forward(self, lesson: Lesson) -> Metrics:
        """Draft after every position of the answers."""
        raise NotImplementedError

    def settings(self) -> Json:
        """Return its ``config.json``, without the draft vocabulary and the target."""
        raise NotImplementedError

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return its weights by their names in a file."""
        raise NotImplementedError


def read_layers(kind: str, total: int) -> tuple[int, ...]:
    """Return the layers whose states a kind of head reads, of a target with ``total`` layers."""
    if kind in ("medusa", "mtp"):
        return (total,)
    return tuple(sorted(max(0, min(layer, total - 1)) for layer in (2, total // 2, total - 3)))


class _SoftCrossEntropy(torch.autograd.Function):
    """The sum over rows of -Σ p log q, with logits and gradients computed in parts to save memory."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        p: torch.Tensor,
        rows: torch.Tensor,
        choices: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = torch.empty_like(hidden)
        loss = hidden.new_zeros((), dtype=torch.float32)
        right = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
        for first in range(0, len(hidden), _ROWS):
            part = slice(first, first + _ROWS)
            wanted = p[rows[part]]
            log_q = (hidden[part].to(head.dtype) @ head.T).float().log_softmax(-1)
            loss -= torch.linalg.vecdot(wanted, log_q).sum()
            of_choice = log_q.gather(1, choices[rows[part], None])[:, 0]
            right[part] = of_choice >= log_q.amax(-1)
            gradient[part] = log_q.exp_().sub_(wanted).to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None, None, None


def soft_cross_entropy(
    hidden: torch.Tensor, head: torch.Tensor, p: torch.Tensor, rows: torch.Tensor, choices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare a head with the target.

    Args:
        hidden: Inputs of the output head, [n, width]; only they get a gradient.
        p: The target's distributions, [any, vocab].
        rows: Index into ``p`` of each row, [n].
        choices: The most probable token of each row of ``p``.

    Returns:
        The summed cross-entropy, which is differentiable, and whether the most probable tokens agree, [n].
    """
    apply: Any = _SoftCrossEntropy.apply
    loss, right = apply(hidden, head, p, rows, choices)
    return loss, right


class MetricsBuilder:
    """Collector of metrics, for one place of the draft after the other."""

    def __init__(self, lesson: Lesson, head: torch.Tensor) -> None:
        self._lesson, self._head = lesson, head
        self._reached = torch.ones_like(lesson.places[:, 1:], dtype=torch.bool)
        self._losses: list[torch.Tensor] = []
        self._right: list[torch.Tensor] = []
        self._counted: list[int] = []

    def rows(self, place: int) -> torch.Tensor:
        """Return the positions after which a draft reaches this place, bool [texts, longest - 1]."""
        self._reached = self._reached & (self._wanted(place) >= 0)
        return self._reached

    def _wanted(self, place: int) -> torch.Tensor:
        """Return the rows of ``p`` that drafts at this place are compared with, [texts, longest - 1]."""
        return shift_left(self._lesson.places, place + 1, -1)

    def add(
        self, hidden: torch.Tensor, place: int, rows: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Add drafts at a place, and return which of them drafted the target's most probable token, [n].

        Args:
            hidden: Inputs of the target's output head, [n, width].
            rows: The result of ``rows`` or a part of it, as a mask or as indices of texts and positions.
        """
        lesson = self._lesson
        loss, right = soft_cross_entropy(
            hidden, self._head, lesson.p, self._wanted(place)[rows], lesson.choices
        )
        self._losses.append(loss / max(1, len(hidden)))
        self._right.append(right.sum())
        self._counted.append(len(hidden))
        return right

    def build(self) -> Metrics:
        counted = torch.tensor(self._counted, device=self._right[0].device)
        return Metrics(torch.stack(self._losses), torch.stack(self._right), counted)


def shift_left(x: torch.Tensor, by: int, fill: float = 0) -> torch.Tensor:
    """Move values to earlier positions, [texts, longest, ...] -> [texts, longest - 1, ...]."""
    padding = [0, 0] * (x.dim() - 2) + [0, by - 1]
    return pad(x[:, by:], padding, value=fill)


# -- what several kinds share -----------------------------------------------------------------------


def group_by_text(text: torch.Tensor, draft: torch.Tensor, texts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the drafts of each text, padded with 0, and a mask of those that are not padding.

    Both are [texts, most drafts of a text]; ``text``, ascending, and ``draft`` number each draft's text and the draft
    within it, [n].
    """
    counts = text.bincount(minlength=texts)
    column = torch.arange(len(text), device=text.device) - (counts.cumsum(0) - counts)[text]
    widest = max(1, int(counts.max()))
    places = text.new_zeros(texts, widest)
    places[text, column] = draft
    return places, torch.arange(widest, device=text.device) < counts[:, None]


def picked(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Select from [texts, any, ...] by the indices of each text, [texts, n] -> [texts, n, ...]."""
    return x[torch.arange(len(x), device=x.device)[:, None], places]


_LAYER_SETTINGS = (
    "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "rope_parameters", "rope_theta", "rope_scaling", "max_position_embeddings",
    "vocab_size", "num_hidden_layers", "attention_bias", "mlp_bias",
)  # fmt: skip


def layer_settings(config: PreTrainedConfig) -> Json:
    """Return what a head's ``config.json`` says of its decoder layers."""
    known = config.to_dict()
    return {name: known[name] for name in _LAYER_SETTINGS if known.get(name) is not None}


def layer_config(target: PreTrainedConfig) -> LlamaConfig:
    """Return the configuration of decoder layers of the target's size."""
    own: Any = target  # its attributes have the usual names, also where to_dict() has others
    known: Json = {
        "hidden_size": own.hidden_size,
        "intermediate_size": getattr(own, "intermediate_size", None) or 4 * own.hidden_size,
        "num_attention_heads": own.num_attention_heads,
        "num_key_value_heads": getattr(own, "num_key_value_heads", None) or own.num_attention_heads,
        "head_dim": getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads,
        "rms_norm_eps": getattr(own, "rms_norm_eps", None) or 1e-5,
        "max_position_embeddings": getattr(own, "max_position_embeddings", None) or 2048,
        "vocab_size": own.vocab_size,
    }
    if own.model_type in FAMILY:
        names = ("rope_parameters", "rope_theta", "rope_scaling")
        known |= {name: value for name in names if (value := getattr(own, name, None))}
    return LlamaConfig(**known)


FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Models whose decoder layers are Llama's, except for biases and norms of attention heads."""


def layer_weights(layer: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a decoder layer that all of the Llama family have."""
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    names = [*attention, *mlp, "input_layernorm", "post_attention_layernorm"]
    return {f"{name}.weight": layer.get_submodule(name).weight.float() for name in names}


_SMALL = 0.1
"""Factor of the random initial weights of the layer that joins states."""


def start_from_highest(fc: nn.Linear, width: int) -> None:
    """Let the layer that joins states begin as the highest of them, [width]."""
    fc.weight.mul_(_SMALL)
    fc.weight[:, -width:] += torch.eye(width)


def copied_text(total: int, layers: int) -> str:
    """Describe a head that begins as the last layers of a target of ``total`` layers."""
    named = ", ".join(f"layer {layer}" for layer in range(total - layers, total))
    return f"{named} and the final norm of the target"
