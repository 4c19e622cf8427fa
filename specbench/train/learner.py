"""Train a head on the target's texts, step by step."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from specbench.base.errors import UsageError
from specbench.models.checkpoints import text_config
from specbench.models.heads.base import shape_text
from specbench.train.eagle_student import EagleStudent
from specbench.train.lessons import TargetOutput, Teacher, make_batches, pad_batch
from specbench.train.medusa_student import MedusaStudent
from specbench.train.mtp_student import MtpStudent
from specbench.train.state import restore_optimizer, stored_optimizer
from specbench.train.students import Metrics, Student

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbench.models.heads import TrainedHead
    from specbench.models.target import Target
    from specbench.train.settings import TrainingSettings
    from specbench.train.texts import Text

KINDS = ("eagle", "mtp", "medusa")
"""Kinds of heads that can be trained."""

_DECAY = 0.8
"""Weight of the loss at each draft position relative to the one before, times the share of drafts that get there."""

_WARM_UP, _MIN_RATE = 0.05, 0.02
"""Share of the steps in which the learning rate rises, and its final value as a share of the largest."""

_MAX_TURNS = 4
"""Most steps for which one forward of the target over a batch is used."""

_KEPT_BYTES = 128 << 20
"""Size of the target's outputs that are kept for these."""

_BETAS, _WEIGHT_DECAY = (0.9, 0.95), 0.01
_MAX_GRADIENT = 1.0


def make_student(
    kind: str, model: PreTrainedModel, head: torch.Tensor, depth: int, seed: int, layers: int = 1
) -> Student:
    """Return a new head; for the arguments see ``EagleStudent``."""
    if kind == "medusa":
        return MedusaStudent(model, head, depth).to(head.device)
    student = MtpStudent if kind == "mtp" else EagleStudent
    return student(model, head, depth, seed, layers).to(head.device)


class Learner:
    """Trainer of a head on texts.

    The seed determines the order of the batches. The target's forward over a batch takes
    longer than a training step. So several batches are run through the target together, and each is trained on several
    times before the next ones are run.

    Args:
        start: A head to continue from; ``None`` to begin from scratch.

    Attributes:
        head: The rows of the target's output head that it drafts with.
        draft_vocab: The tokens of these rows, ascending; ``None`` for all.
        turns: How often a batch is trained on before the next batches are run through the target.
    """

    def __init__(
        self,
        target: Target,
        texts: Sequence[Text],
        settings: TrainingSettings,
        start: TrainedHead | None = None,
    ) -> None:
        self._texts, self._settings = texts, settings
        model = target.language_model.model
        if start is None:
            self.draft_vocab = _draft_vocabulary(target, texts, settings.draft_vocab(target.vocab_size))
            layers = settings.head_layers(text_config(model.config).num_hidden_layers)
            self._teacher = Teacher(model, self.draft_vocab)
            self.student = make_student(
                settings.kind, model, self._teacher.head, settings.depth, settings.seed, layers
            )
        else:
            self.draft_vocab = start.target_tokens
            self._teacher = Teacher(model, self.draft_vocab)
            self.student = _student_from(start, model, self._teacher.head, settings)
        self.head = self._teacher.head
        self._parameters: Mapping[str, nn.Parameter] = dict(self.student.named_parameters())
        self._rate = settings.rate(self.head.shape[1])
        self._optimizer = torch.optim.AdamW(
            [*self._parameters.values()],
            self._rate,
            betas=_BETAS,
            weight_decay=_WEIGHT_DECAY,
            fused=self._teacher.device.type == "cpu",
        )
        self._half = model.dtype == torch.bfloat16
        self._weights = torch.tensor(
            [_DECAY**place for place in range(settings.depth)], device=self.head.device
        )
        self._epoch, self._order = 0, self._batches(0)
        self.epoch_steps = max(1, len(self._order))
        self.turns = 1
        batch_bytes = settings.batch_tokens * self.head.shape[1] * self.head.element_size()
        batch_bytes *= len(self.student.layers) + 1
        self._chunk_size = max(1, _KEPT_BYTES // batch_bytes)
        self._chunk, self._outputs = (0, 0), dict[int, TargetOutput]()

    def plan(self, steps: int) -> None:
        """Set ``turns`` so that in about ``steps`` steps all texts are used about equally often."""
        epochs = max(1, round(steps / self.epoch_steps))
        self.turns = round(epochs / -(-epochs // _MAX_TURNS))

    def _batches(self, epoch: int) -> list[list[int]]:
        return make_batches(self._texts, self._settings.batch_tokens, self._settings.seed, epoch)

    def _place(self, step: int) -> tuple[int, int, int]:
        """Return a step's epoch, its chunk of batches that are run through the target together, and its batch."""
        whole, rest = divmod(step, self.epoch_steps * self.turns)
        chunk, rest = divmod(rest, self._chunk_size * self.turns)
        first = chunk * self._chunk_size
        return whole, chunk, first + rest % min(self._chunk_size, self.epoch_steps - first)

    def _batch(self, epoch: int, place: int) -> Sequence[Text]:
        """Return the texts of a batch."""
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._batches(epoch)
        return [self._texts[text] for text in self._order[place]]

    def _read(self, texts: Sequence[Text]) -> TargetOutput:
        return self._teacher.read(*pad_batch(texts, self._teacher.device), self.student.layers)

    def step(self, number: int, steps: int) -> tuple[int, list[float], list[float]]:
        """Train on a batch; return its tokens, and by position in the draft the mean cross-entropy, and the share of
        drafts whose most probable token was also the target's.
        """
        epoch, chunk, place = self._place(number)
        texts = self._batch(epoch, place)
        if (epoch, chunk) != self._chunk:
            self._chunk, self._outputs = (epoch, chunk), {}
        if place not in self._outputs:
            self._outputs[place] = self._read(texts)
        metrics = self._backward(self._outputs[place])
        nn.utils.clip_grad_norm_([*self._parameters.values()], _MAX_GRADIENT)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * _rate_factor(number, steps)
        self._optimizer.step()
        self._optimizer.zero_grad()
        right = metrics.right / metrics.counted.clamp_min(1)
        losses, shares = torch.stack((metrics.losses.detach(), right)).tolist()
        return sum(text.written for text in texts), losses, shares

    def time_step(self) -> tuple[float, float]:
        """Return the seconds to run the target over a batch, and to compute gradients, which are discarded."""
        began = time.monotonic()
        output = self._read(self._batch(0, 0))
        read = time.monotonic()
        self._backward(output)
        self._optimizer.zero_grad()
        return read - began, time.monotonic() - read

    def _backward(self, output: TargetOutput) -> Metrics:
        lesson = self._teacher.lesson(output)
        with torch.autocast(self._teacher.device.type, torch.bfloat16, enabled=self._half):
            metrics: Metrics = self.student(lesson)
            reached = metrics.counted / metrics.counted[0].clamp_min(1)
            loss = (metrics.losses * reached * self._weights).sum()
        torch.autograd.backward(loss)
        return metrics

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors needed to continue: parameters and the optimizer's averages."""
        own = {f"own/{name}": parameter.detach() for name, parameter in self._parameters.items()}
        return own | stored_optimizer(self._optimizer, self._parameters)

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue from the tensors of another learner."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[f"own/{name}"])
        rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("own/")}
        restore_optimizer(self._optimizer, self._parameters, rest)


def _rate_factor(number: int, steps: int) -> float:
    """Return a step's learning rate relative to the largest one: linear warm-up, then a cosine."""
    rise = min(1.0, (number + 1) / max(1.0, _WARM_UP * steps))
    return rise * (_MIN_RATE + (1 - _MIN_RATE) * 0.5 * (1 + math.cos(math.pi * number / steps)))


def check_start(start: TrainedHead, target: Target, settings: TrainingSettings) -> None:
    """Check the head to continue from, before anything is written."""
    files, model = start.files, target.language_model.model
    kind = "eagle" if files.kind == "eagle3" else files.kind
    if kind != settings.kind:
        raise UsageError(
            f"The head {start.name} is of kind {kind}, not {settings.kind}.",
            f"Give --kind {kind}." if kind in KINDS else "Choose another --start.",
        )
    files.check(model.config, target.name)
    files.check_weights(target.language_model.identity, target.name, "Choose another --start.")
    _student_from(start, model, Teacher(model, start.target_tokens).head, settings)


def _student_from(
    start: TrainedHead, model: PreTrainedModel, head: torch.Tensor, settings: TrainingSettings
) -> Student:
    """Return a student with the weights of a head."""
    layers = start.files.number("num_hidden_layers", 1)
    student = make_student(settings.kind, model, head, settings.depth, settings.seed, layers)
    own = student.tensors()
    difference = _find_difference(start.tensors, own)
    if difference is None and (read := start.files.layers(model.config)) != student.layers:
        listed, wanted = (", ".join(map(str, each)) for each in (read, student.layers))
        difference = f"it reads the states of layers {listed} instead of {wanted}"
    if difference is not None:
        raise UsageError(
            f"The head {start.name} cannot be trained further with these options: {difference}.",
            "Choose one that specbench train wrote with the same --kind and --depth, or leave --start out.",
        )
    for name, tensor in own.items():
        tensor.copy_(start.tensors[name])
    student.started_from = f"the head {start.name}"
    return student


def _find_difference(found: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> str | None:
    """Return how a head's tensors differ from a student's, ignoring rows of the target; ``None`` if they do not."""
    for name, wanted in own.items():
        if name not in found:
            return f"it lacks the tensor {name}, {shape_text(wanted)}"
        if found[name].shape != wanted.shape:
            return f"its tensor {name} is {shape_text(found[name])} instead of {shape_text(wanted)}"
    extra = next((name for name in found if name not in own and not name.startswith("lm_head")), None)
    return None if extra is None else f"it has another tensor {extra}, {shape_text(found[extra])}"


def _draft_vocabulary(target: Target, texts: Sequence[Text], number: int) -> torch.Tensor | None:
    """Return the tokens that the target writes most often, ascending; ``None`` for all."""
    if number == target.vocab_size:
        return None
    written = Counter(token for text in texts for token in text.tokens[text.start :])
    read = Counter(token for text in texts for token in text.tokens[: text.start])
    ranked = [token for counts in (written, read) for token, _ in counts.most_common()]
    # Tokens that were not seen come last, by id: tokenizers number their merges by frequency.
    order = dict.fromkeys([*target.end_ids, *ranked, *range(target.vocab_size)])
    return torch.tensor(sorted([token for token in order if token < target.vocab_size][:number]))
