"""A head and its teacher: one step of learning after the other, on one device or on several."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from specbench.base.errors import UsageError
from specbench.models.calibrations import TokenCounts
from specbench.models.checkpoints import text_config
from specbench.models.heads import shape_text
from specbench.train.lessons import Reading, Teacher, batches, padded
from specbench.train.state import restore_optimizer, stored_optimizer
from specbench.train.students import Student, make_student
from specbench.tune.vocabulary import ranked_tokens

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from specbench.models.heads import TrainedHead
    from specbench.models.target import Target
    from specbench.train.hidden_states import HiddenStates
    from specbench.train.settings import TrainingSettings
    from specbench.train.texts import Text

_DECAY = 0.8
"""Weight of a draft at each place beside the one before it; a place weighs what share of drafts gets there."""

_WARM_UP, _LOWEST = 0.05, 0.02
"""Share of the steps in which the learning rate rises, and what it falls to, of its highest."""

_TURNS = 4
"""Steps at most for which a text is read once."""

_READ_BYTES = 128 << 20
"""Of the texts that are read at a time for as many steps."""

_BETAS, _WEIGHT_DECAY = (0.9, 0.95), 0.01
_LARGEST_GRADIENT = 1.0


class Learnt(NamedTuple):
    """What came of a step, in all processes.

    Attributes:
        tokens: Of answers.
        losses: Mean cross-entropy by place of the draft.
        right: Share of the likeliest tokens that were the target's, by place.
    """

    tokens: int
    losses: tuple[float, ...]
    right: tuple[float, ...]


class Learner:
    """A head that learns from texts.

    The order of the texts follows from the seed, batch by batch; processes take turns. The target's pass over a text
    takes longer than a step that learns from it, so some batches are read together, and learnt from in several turns
    before others are read.

    Args:
        target: Whose texts they are.
        model: What gradients may go through, see ``Training``.
        texts: What it learns from.
        settings: How.
        group: The processes.
        start: A head to go on from; ``None`` to begin anew.
        states: The target's hidden states, to which those that lack are added; ``None`` to have it read the texts, now
            and again.

    Attributes:
        student: The head.
        head: The rows of the target's head that it drafts with.
        drafted: The tokens of these rows, ascending; ``None`` for all.
        epoch_steps: Steps in which each text is seen once.
        turns: How often a text is learnt from before others are read.

    Raises:
        UsageError: The head to go on from is none that is trained here.
    """

    def __init__(
        self,
        target: Target,
        model: PreTrainedModel,
        texts: Sequence[Text],
        settings: TrainingSettings,
        group: Accelerator,
        start: TrainedHead | None = None,
        states: HiddenStates | None = None,
    ) -> None:
        self._texts, self._settings, self._group = texts, settings, group
        if start is None:
            self.drafted = _draft_vocabulary(target, texts, settings.draft_vocab(target.vocab_size))
            layers = settings.head_layers(text_config(model.config).num_hidden_layers)
            self._teacher = Teacher(model, self.drafted)
            self.student: Any = make_student(
                settings.kind, model, self._teacher.head, settings.depth, settings.seed, layers
            )
        else:
            self.drafted = start.target_tokens
            self._teacher = Teacher(model, self.drafted)
            self.student = _student_like(start, model, self._teacher.head, settings)
        self.head = self._teacher.head
        self._names: Mapping[str, nn.Parameter] = dict(self.student.named_parameters())
        self._rate = settings.rate(self.head.shape[1])
        self._optimizer = torch.optim.AdamW(
            [*self._names.values()],
            self._rate,
            betas=_BETAS,
            weight_decay=_WEIGHT_DECAY,
            fused=self._teacher.device.type == "cpu",
        )
        self._module: Any = group.prepare_model(self.student)
        self._half = model.dtype == torch.bfloat16
        self._weights = torch.tensor(
            [_DECAY**place for place in range(settings.depth)], device=self.head.device
        )
        self._round, self._order = 0, self._batches(0)
        self.epoch_steps = max(1, len(self._order) // group.num_processes)
        self.turns = 1
        self._states = states
        width = (len(self.student.layers) + 1) * self.head.shape[1] * self.head.element_size()
        self._together = (
            1 if self.student.needs_cache else max(1, _READ_BYTES // (settings.batch_tokens * width))
        )
        self._chunk, self._readings = (0, 0), dict[int, Reading]()

    def plan(self, steps: int) -> None:
        """There will be about so many steps. All texts come before any of them is read again, and each of them is
        learnt from about equally often."""
        most = 1 if self.student.needs_cache or self._states is not None else _TURNS
        epochs = max(1, round(steps / self.epoch_steps))
        self.turns = round(epochs / -(-epochs // most))

    def _batches(self, number: int) -> list[list[int]]:
        return batches(self._texts, self._settings.batch_tokens, self._settings.seed, number)

    def _place(self, number: int) -> tuple[int, int, int]:
        """Which batch a step is about: in the how manieth round over all texts, among which that are read together,
        and its place in the round."""
        whole, rest = divmod(number, self.epoch_steps * self.turns)
        chunk, rest = divmod(rest, self._together * self.turns)
        first = chunk * self._together
        return whole, chunk, first + rest % min(self._together, self.epoch_steps - first)

    def _batch(self, whole: int, place: int) -> Sequence[Text]:
        """What this process reads."""
        if whole != self._round:
            self._round, self._order = whole, self._batches(whole)
        place = place * self._group.num_processes + self._group.process_index
        return [self._texts[text] for text in self._order[place % len(self._order)]]

    def _reading(self, number: int) -> tuple[Reading, int]:
        """What the target says about the texts of a step, and how many tokens of answers these have."""
        whole, chunk, place = self._place(number)
        texts = self._batch(whole, place)
        if (whole, chunk) != self._chunk:
            self._chunk, self._readings = (whole, chunk), {}
        if place not in self._readings:
            self._readings[place] = self._read(texts)
        return self._readings[place], sum(text.written for text in texts)

    def _read(self, texts: Sequence[Text]) -> Reading:
        batch = padded(texts, self._teacher.device)
        if self._states is not None:
            return self._teacher.recalled(batch, [self._recalled(text, self._states) for text in texts])
        return self._teacher.read(batch, self.student.layers, keeps_cache=self.student.needs_cache)

    def _recalled(self, text: Text, states: HiddenStates) -> torch.Tensor:
        """The target's states at a text, which it reads by itself where they are not known, and only once."""
        found = states.of(text.key, text.tokens)
        if found is None:
            found = self._teacher.states(text.tokens, states.layers)
            states.add(text.key, text.tokens, found)
        return found

    def step(self, number: int, steps: int) -> Learnt:
        """Learn from a batch.

        Args:
            number: Of the step, from 0.
            steps: How many there are, which decides the learning rate.
        """
        reading, written = self._reading(number)
        marks = self._gradients(reading)
        self._group.clip_grad_norm_([*self._names.values()], _LARGEST_GRADIENT)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * _course(number, steps)
        self._optimizer.step()
        self._optimizer.zero_grad()
        tokens = torch.tensor(written, device=self.head.device)
        right = marks.right / marks.counted.clamp_min(1)
        counts = self._group.reduce(tokens, "sum")
        figures = self._group.reduce(torch.stack((marks.losses.detach(), right)), "mean")
        losses, shares = figures.tolist()
        return Learnt(int(counts), tuple(losses), tuple(shares))

    def rehearse(self, number: int) -> tuple[float, float]:
        """Seconds that a batch takes to be read, and to compute what a step learns from it, which it does not."""
        began = time.monotonic()
        reading = self._read(self._batch(0, number))
        read = time.monotonic()
        self._gradients(reading)
        self._optimizer.zero_grad()
        return read - began, time.monotonic() - read

    def _gradients(self, reading: Reading) -> Any:
        lesson = self._teacher.lesson(reading)
        with torch.autocast(self._teacher.device.type, torch.bfloat16, enabled=self._half):
            marks = self._module(lesson)
            arrived = marks.counted / marks.counted[0].clamp_min(1)
            loss = (marks.losses * arrived * self._weights).sum()
        self._group.backward(loss)
        return marks

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that it has learnt and goes on from."""
        own = {f"own/{name}": parameter.detach() for name, parameter in self._names.items()}
        return own | stored_optimizer(self._optimizer, self._names)

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from there."""
        with torch.no_grad():
            for name, parameter in self._names.items():
                parameter.copy_(tensors[f"own/{name}"])
        rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("own/")}
        restore_optimizer(self._optimizer, self._names, rest)


def _course(number: int, steps: int) -> float:
    """The learning rate of a step, of its highest: it rises in a line, and falls along a cosine."""
    rise = min(1.0, (number + 1) / max(1.0, _WARM_UP * steps))
    return rise * (_LOWEST + (1 - _LOWEST) * 0.5 * (1 + math.cos(math.pi * number / steps)))


def check_start(start: TrainedHead, model: PreTrainedModel, settings: TrainingSettings) -> None:
    """Refuse a head to go on from whose tensors are not those of one that is trained here, before anything is written.

    Raises:
        UsageError: They are not.
    """
    _student_like(start, model, Teacher(model, start.target_tokens).head, settings)


def _student_like(
    start: TrainedHead, model: PreTrainedModel, head: torch.Tensor, settings: TrainingSettings
) -> Student:
    """A student with the weights of a head."""
    layers = start.files.number("num_hidden_layers", 1)
    student: Student = make_student(settings.kind, model, head, settings.depth, settings.seed, layers)
    own = student.tensors()
    odd = _misfit(start.tensors, own)
    if odd is None and (read := start.files.layers(model.config)) != student.layers:
        odd = f"it takes what the layers {_listed(read)} read, and would what {_listed(student.layers)} do"
    if odd is not None:
        raise UsageError(
            f"The head {start.name} is none that is trained here with these options: {odd}.",
            "Name one that specbench train wrote with the same --kind and --depth, or leave --start out.",
        )
    for name, tensor in own.items():
        tensor.copy_(start.tensors[name])
    student.started_from = f"the head {start.name}"
    return student


def _misfit(found: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> str | None:
    """The first tensor of a head that is not a student's, in words; ``None`` if all are, but for the target's rows."""
    for name, wanted in own.items():
        if name not in found:
            return f"it lacks the tensor {name}, {shape_text(wanted)}"
        if found[name].shape != wanted.shape:
            return f"its tensor {name} is {shape_text(found[name])}, and would be {shape_text(wanted)}"
    rest = (name for name in found if name not in own and not name.startswith("lm_head"))
    extra = next(rest, None)
    return (
        None
        if extra is None
        else f"it has a tensor {extra}, {shape_text(found[extra])}, that they do not make"
    )


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def _draft_vocabulary(target: Target, texts: Sequence[Text], number: int) -> torch.Tensor | None:
    """So many tokens that the target writes most often, ascending; ``None`` for all."""
    if number == target.vocab_size:
        return None
    written = [token for text in texts for token in text.tokens[text.start :]]
    read = (token for text in texts for token in text.tokens[: text.start])
    counts = TokenCounts(target.name, ranked_tokens(written, target.end_ids, read), len(written), ())
    return torch.tensor(counts.most_frequent(number, range(target.vocab_size)))
