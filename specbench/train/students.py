"""Heads while they learn: what each drafts from a lesson, how far that is from the target, and what is kept of it.

Everywhere place i of a draft stands for the token i + 2 places behind the position whose hidden states are the last
that are known: the token between them is the target's own, and the context ends with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import LlamaConfig, PreTrainedConfig

from specbench.backends.torch.heads import EagleHead, EagleShape, MedusaHeads
from specbench.base.record import Json
from specbench.models.checkpoints import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbench.train.lessons import Lesson

KINDS = ("eagle", "medusa", "pass")

_ROWS = 256
"""Rows whose logits are computed at once."""

_EVERY = 4
"""See ``EagleStudent``."""


class Marks(NamedTuple):
    """How a head did, by place of the draft, over the drafts that got there.

    Attributes:
        losses: Mean cross-entropy with the target's distribution over the draft vocabulary, [depth]; it can be learnt
            from.
        right: How often its likeliest token was the target's, [depth].
        counted: Drafts, [depth].
    """

    losses: torch.Tensor
    right: torch.Tensor
    counted: torch.Tensor


class Student(Protocol):
    """A head while it learns; a module.

    Attributes:
        kind: One of ``KINDS``.
        depth: Tokens it learns to draft.
        layers: Of which of the target's layers it reads the states, see ``ForwardRequest``.
        needs_cache: Whether it reads more with the target's keys and values.
        started_from: What of the target it was started from, in words; ``None`` for random numbers.
    """

    kind: str
    depth: int
    layers: tuple[int, ...]
    needs_cache: bool
    started_from: str | None

    def __call__(self, lesson: Lesson) -> Marks:
        """Draft behind every position of the answers."""
        ...

    def settings(self) -> Json:
        """Its ``config.json``, but for what it says of the draft vocabulary and the target."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """What it has learnt, by the names of a file."""
        ...


def read_layers(kind: str, total: int) -> tuple[int, ...]:
    """Which layers' states a head of a kind reads, of a target that has so many."""
    if kind == "pass":
        return ()
    if kind == "medusa":
        return (total,)
    return tuple(sorted(max(0, min(layer, total - 1)) for layer in (2, total // 2, total - 3)))


class _SoftCrossEntropy(torch.autograd.Function):
    """The sum over rows of -Σ p log q for logits that are never there all at once, nor their gradients."""

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
            difference = log_q.exp_().sub_(wanted)
            gradient[part] = (difference.to(head.dtype) @ head).to(gradient.dtype)
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
    """Cross-entropy of a head's distributions with the target's, summed, and where their likeliest tokens agree, [n].

    Args:
        hidden: What is multiplied by the head, [n, width]; the gradient goes there alone.
        head: [vocab, width].
        p: The target's distributions, [any, vocab].
        rows: Which of these each row is compared with, [n].
        choices: The likeliest of each of ``p``.
    """
    apply: Any = _SoftCrossEntropy.apply
    loss, right = apply(hidden, head, p, rows, choices)
    return loss, right


class _Marking:
    """Adds up marks, place by place."""

    def __init__(self, lesson: Lesson, head: torch.Tensor) -> None:
        self._lesson, self._head = lesson, head
        self._reached = torch.ones_like(lesson.places[:, 1:], dtype=torch.bool)
        self._losses: list[torch.Tensor] = []
        self._right: list[torch.Tensor] = []
        self._counted: list[int] = []

    def rows(self, place: int) -> torch.Tensor:
        """Bool [texts, longest - 1]: behind which positions a draft gets as far as this place, asked in order."""
        self._reached = self._reached & (self._wanted(place) >= 0)
        return self._reached

    def _wanted(self, place: int) -> torch.Tensor:
        """Where the target's distributions are that drafts at this place are compared with, [texts, longest - 1]."""
        return ahead(self._lesson.places, place + 1, -1)

    def add(
        self, hidden: torch.Tensor, place: int, rows: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Mark drafts.

        Args:
            hidden: What is multiplied by the target's head, for these rows, [n, width].
            place: Of the draft.
            rows: As ``rows`` gave them, or some of them; or the texts and positions of these.

        Returns:
            Which of them drafted the target's likeliest token, [n].
        """
        lesson = self._lesson
        loss, right = soft_cross_entropy(
            hidden, self._head, lesson.p, self._wanted(place)[rows], lesson.choices
        )
        self._losses.append(loss / max(1, len(hidden)))
        self._right.append(right.sum())
        self._counted.append(len(hidden))
        return right

    def marks(self) -> Marks:
        """Of all places."""
        counted = torch.tensor(self._counted, device=self._right[0].device)
        return Marks(torch.stack(self._losses), torch.stack(self._right), counted)


def ahead(x: torch.Tensor, by: int, filling: float = 0) -> torch.Tensor:
    """What stands so many positions further on, [texts, longest, ...] -> [texts, longest - 1, ...]."""
    room = [0, 0] * (x.dim() - 2) + [0, by - 1]
    return pad(x[:, by:], room, value=filling)


# -- EAGLE-3 ---------------------------------------------------------------------------------------


class DraftAttention:
    """Attention of drafts behind many positions at once (EAGLE-3's training-time test).

    The first pass is the context itself, causal. From then on a row is the next token of a draft that was begun behind
    one of its positions: it attends to the context up to there, and to that draft's own tokens, its own row of the
    passes before among them. See ``Attend`` of ``specbench.backends.torch.heads``.
    """

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._later = torch.empty(0)

    def go_on(self, drafts: torch.Tensor, behind: torch.Tensor) -> None:
        """The next pass is about some of the last one's drafts.

        Args:
            drafts: Their places among these, [texts, drafts].
            behind: The positions behind which they were begun, [texts, drafts].
        """
        self._later = torch.arange(self._keys[0].shape[2], device=behind.device) > behind[:, None, :, None]
        for kept in (self._keys, self._values):
            kept[1:] = [_picked(each.transpose(1, 2), drafts).transpose(1, 2) for each in kept[1:]]

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


def _side_by_side(text: torch.Tensor, draft: torch.Tensor, texts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts by their texts, filled up with place 0.

    Args:
        text: Of each draft, ascending, [n].
        draft: Its place in the text, [n].
        texts: How many there are.

    Returns:
        Places, and which of them are no filling, both [texts, most of a text].
    """
    counts = text.bincount(minlength=texts)
    column = torch.arange(len(text), device=text.device) - (counts.cumsum(0) - counts)[text]
    widest = max(1, int(counts.max()))
    places = text.new_zeros(texts, widest)
    places[text, column] = draft
    return places, torch.arange(widest, device=text.device) < counts[:, None]


def _picked(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[texts, any, ...] at these places of each text, [texts, n] -> [texts, n, ...]."""
    return x[torch.arange(len(x), device=x.device)[:, None], places]


class EagleStudent(nn.Module):
    """An EAGLE-3 head that learns to go on from its own outputs (Li et al. 2025, arXiv 2503.01840).

    Embeddings and the projection to the draft vocabulary are the target's, and stay so.

    Args:
        model: The target; a layer of the Llama family is what its own is started from.
        head: See ``Teacher``.
        depth: Tokens it learns to draft.
        seed: Of what is random at the beginning.
        layers: Decoder layers.

    Attributes:
        every: Of drafts whose last token was not right, which the decoder would drop, one in so many is gone on from.
    """

    kind = "eagle"
    needs_cache = False

    def __init__(
        self, model: PreTrainedModel, head: torch.Tensor, depth: int, seed: int, layers: int
    ) -> None:
        super().__init__()
        self.depth, config = depth, text_config(model.config)
        self.every = _EVERY
        self.layers = read_layers(self.kind, config.num_hidden_layers)
        shape = EagleShape(len(self.layers), config.hidden_size, len(head), _layer_like(config), layers)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = EagleHead(shape)
        self._rows = head
        del self.head.lm_head
        self.started_from = _start(self.head, model)

    def forward(self, lesson: Lesson) -> Marks:
        """See ``Student``."""
        marking, head = _Marking(lesson, self._rows), self.head
        attends = [DraftAttention() for _ in head.layers]
        features = head.fuse(lesson.states[:, :-1].to(head.norm.weight.dtype)).float()
        texts, last = features.shape[:2]
        behind = torch.arange(last, device=features.device).expand(texts, -1)
        always = (behind + lesson.ids.sum()) % self.every == 0
        kept = marking.rows(0)
        for place in range(self.depth):
            tokens = (behind + place + 1).clamp(max=last)
            out = head.read(_picked(lesson.embedded, tokens), features, behind + place, attends)
            text, draft = kept.nonzero(as_tuple=True)
            begun = text, behind[text, draft]
            right = marking.add(head.norm(out[text, draft]), place, begun)
            if place + 1 == self.depth:
                break
            goes_on = marking.rows(place + 1)[begun] & (right | always[begun])
            drafts, kept = _side_by_side(text[goes_on], draft[goes_on], texts)
            behind = _picked(behind, drafts)
            features = _picked(head.recurring(out), drafts)
            for attend in attends:
                attend.go_on(drafts, behind)
        return marking.marks()

    def settings(self) -> Json:
        """See ``Student``."""
        layer = self.head.shape.layer.to_dict() | {"num_hidden_layers": self.head.shape.layers}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "transformer_layer_config": {name: layer[name] for name in _LAYER if layer.get(name) is not None},
            "eagle_aux_hidden_state_layer_ids": [*self.layers],
            "norm_before_residual": False,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """See ``Student``."""
        return {name: tensor.detach() for name, tensor in self.head.named_parameters()}


_LAYER = (
    "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "rope_parameters", "rope_theta", "rope_scaling", "max_position_embeddings",
    "vocab_size", "num_hidden_layers", "attention_bias", "mlp_bias",
)  # fmt: skip


def _layer_like(target: PreTrainedConfig) -> LlamaConfig:
    """The configuration of decoder layers of the size of the target's."""
    own = target.to_dict()
    size = own.get("head_dim") or own["hidden_size"] // own["num_attention_heads"]
    known: Json = {
        "hidden_size": own["hidden_size"],
        "intermediate_size": own.get("intermediate_size") or 4 * own["hidden_size"],
        "num_attention_heads": own["num_attention_heads"],
        "num_key_value_heads": own.get("num_key_value_heads") or own["num_attention_heads"],
        "head_dim": size,
        "rms_norm_eps": own.get("rms_norm_eps") or 1e-5,
        "max_position_embeddings": own.get("max_position_embeddings") or 2048,
        "vocab_size": own["vocab_size"],
    }
    if own.get("model_type") in _FAMILY:
        rope = {
            name: own[name] for name in ("rope_parameters", "rope_theta", "rope_scaling") if own.get(name)
        }
        known |= rope
    return LlamaConfig(**known)


_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Models whose decoder layers are Llama's, but for biases and norms of heads."""


def _start(head: EagleHead, model: PreTrainedModel) -> str | None:
    """Give a head the weights of the target's last layers where these fit; its features begin as the highest state.

    What reads two inputs side by side, the embedding and the feature, begins as if it read their sum.
    """
    untyped: Any = model
    config = text_config(model.config)
    width = config.hidden_size
    with torch.no_grad():
        head.fc.weight.mul_(_SMALL)
        head.fc.weight[:, -width:] += torch.eye(width)
        if config.model_type not in _FAMILY:
            return None
        decoder = untyped.get_decoder()
        first, *further = head.layers
        like, *others = decoder.layers[-len(head.layers) :]
        weights = _weights_of(like)
        for name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"):
            weights[name] = torch.cat((weights[name], weights[name]), dim=1) * math.sqrt(0.5)
        first.load_state_dict(weights | {"hidden_norm.weight": weights["input_layernorm.weight"]})
        for layer, each in zip(further, others, strict=True):
            layer.load_state_dict(_weights_of(each))
        head.norm.weight.copy_(decoder.norm.weight)
    total, own = config.num_hidden_layers, len(head.layers)
    named = ", ".join(f"layer {layer}" for layer in range(total - own, total))
    return f"{named} and the final norm of the target"


def _weights_of(layer: Any) -> dict[str, torch.Tensor]:
    """Of a decoder layer, those that all of the Llama family have."""
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    names = [*attention, *mlp, "input_layernorm", "post_attention_layernorm"]
    return {f"{name}.weight": layer.get_submodule(name).weight.float() for name in names}


_SMALL = 0.1
"""What the random beginning of the layer that joins states is multiplied by, beside the one that is passed on."""


# -- Medusa ----------------------------------------------------------------------------------------


class MedusaStudent(nn.Module):
    """Medusa heads of one block each, on the target's own projection to the vocabulary (Cai et al. 2024).

    Args:
        model: The target.
        head: See ``Teacher``.
        depth: How many heads.
    """

    kind = "medusa"
    needs_cache = False
    started_from = "the head of the target"

    def __init__(self, model: PreTrainedModel, head: torch.Tensor, depth: int) -> None:
        super().__init__()
        self.depth, config = depth, text_config(model.config)
        self._config, self._rows = config, head
        self.layers = read_layers(self.kind, config.num_hidden_layers)
        self.heads = MedusaHeads(depth, 1, config.hidden_size, 1, shared=True)
        del self.heads.lm_heads
        for parameter in self.heads.parameters():
            nn.init.zeros_(parameter)

    def forward(self, lesson: Lesson) -> Marks:
        """See ``Student``."""
        marking = _Marking(lesson, self._rows)
        states = lesson.states[:, :-1, 0].float()
        for place in range(self.depth):
            rows = marking.rows(place)
            marking.add(self.heads.guess(states[rows], place), place, rows)
        return marking.marks()

    def settings(self) -> Json:
        """See ``Student``."""
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": self._config.hidden_size,
            "vocab_size": self._config.vocab_size,
            "num_heads": self.depth,
            "num_hidden_layers": 1,
            "original_lm_head": True,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """See ``Student``."""
        return {name: tensor.detach() for name, tensor in self.heads.named_parameters()}


# -- PaSS ------------------------------------------------------------------------------------------


class PassStudent(nn.Module):
    """Look-ahead embeddings of a target that stays as it is (Monea et al. 2023, arXiv 2311.13581).

    The target reads them behind some positions of each text; gradients go through it to them.

    Args:
        model: The target, of ordinary layers.
        head: See ``Teacher``.
        depth: How many.
        seed: Of what is random at the beginning.
    """

    kind = "pass"
    needs_cache = True
    layers: tuple[int, ...] = ()
    started_from = None

    def __init__(self, model: PreTrainedModel, head: torch.Tensor, depth: int, seed: int) -> None:
        super().__init__()
        self.depth, self._rows = depth, head
        self._target: tuple[Any] = (model,)  # no part of this module
        own: Any = model.get_input_embeddings()
        embeddings = own.weight.detach().float()
        noise = torch.randn(depth, embeddings.shape[1], generator=torch.Generator().manual_seed(seed))
        self.ahead = nn.Parameter(embeddings.mean(0) + embeddings.std(0) * noise.to(embeddings.device))

    def forward(self, lesson: Lesson) -> Marks:
        """See ``Student``."""
        (model,) = self._target
        marking = _Marking(lesson, self._rows)
        texts, longest = lesson.ids.shape
        stride = 2 * self.depth
        first = int(lesson.ids.sum()) % min(stride, longest - 1)
        behind = torch.arange(first, longest - 1, stride, device=lesson.ids.device)
        out = self._read(model, lesson, behind).unflatten(1, (len(behind), self.depth))
        chosen = torch.zeros(longest - 1, dtype=torch.bool, device=lesson.ids.device)
        chosen[behind] = True
        for place in range(self.depth):
            rows = marking.rows(place) & chosen
            marking.add(out[:, :, place][rows[:, behind]], place, rows)
        assert texts == len(out)
        return marking.marks()

    def _read(self, model: Any, lesson: Lesson, behind: torch.Tensor) -> torch.Tensor:
        """The target's last states at the embeddings behind these positions, [texts, positions · depth, width]."""
        texts, longest = lesson.ids.shape
        rows = len(behind) * self.depth
        place = torch.arange(self.depth, device=behind.device)
        own = torch.arange(rows, device=behind.device)
        group, before = own // self.depth, own % self.depth
        context = torch.arange(longest, device=behind.device) <= behind[group, None]
        draft = (group == group[:, None]) & (before <= before[:, None])
        mask = torch.cat((context, draft), dim=1).expand(texts, 1, -1, -1)
        positions = (behind[:, None] + 1 + place).flatten().expand(texts, -1)
        embedded = self.ahead.to(model.dtype).repeat(len(behind), 1).expand(texts, -1, -1)
        last = text_config(model.config).num_hidden_layers
        output = model(
            inputs_embeds=embedded,
            past_key_values=lesson.cache,
            position_ids=positions,
            attention_mask=mask,
            output_hidden_states=[last],
            logits_to_keep=1,
        )
        out: torch.Tensor = output.hidden_states[last]
        return out

    def settings(self) -> Json:
        """See ``Student``."""
        config = text_config(self._target[0].config)
        return {
            "model_type": "pass",
            "look_ahead": self.depth,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """See ``Student``."""
        return {"ahead": self.ahead.detach()}


_MAKERS: Mapping[str, Any] = {
    "eagle": EagleStudent,
    "medusa": lambda model, head, depth, seed, layers: MedusaStudent(model, head, depth),  # noqa: ARG005
    "pass": lambda model, head, depth, seed, layers: PassStudent(model, head, depth, seed),  # noqa: ARG005
}


def make_student(
    kind: str, model: PreTrainedModel, head: torch.Tensor, depth: int, seed: int, layers: int = 1
) -> Any:
    """A head at the beginning, a module that is a ``Student``; for the arguments see ``EagleStudent``."""
    return _MAKERS[kind](model, head, depth, seed, layers).to(head.device)
