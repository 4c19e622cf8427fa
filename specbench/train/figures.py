"""What a training has measured and how quick it is, as its records tell."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from specbench.base.files import file_errors
from specbench.base.record import Json
from specbench.models.heads import TrainedHead
from specbench.models.training_metadata import TRAINING_FILE
from specbench.train.learner import Learnt
from specbench.train.settings import Measured

if TYPE_CHECKING:
    pass


_RECORDS = 200
"""Points of the loss curve."""


class Silent:
    """A watch that nobody looks at."""

    def wrote(self, tokens: int, wanted: int | None, left_s: float | None) -> None:
        pass

    def trained(self, step: int, steps: int, loss: float, left_s: float) -> None:
        pass

    def measured(self, measured: Measured, *, best: bool) -> None:
        pass


def earlier(start: TrainedHead) -> Json:
    """What is known of a head that a training went on from: the story of its own, too, where it was trained here."""
    path = start.files.folder / TRAINING_FILE
    with file_errors(f"The file {str(path)!r} cannot be read"):
        training = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return {"name": start.name, "fingerprint": start.fingerprint, "training": training}


@dataclass
class Stand:
    """How far a training has come; all of it is stored.

    Attributes:
        step, tokens: Made, and trained on.
        steps: To be made; 0 before that is settled.
        measured_next: The step behind which it is measured again.
        since: Sums since the last point of the curve: of losses and shares of right tokens by place, and how many.
        heard, losses: Losses of the first place since the last measure: how many, and their sum.
        curve: Points of the loss curve.
        measures_made: How often it was measured, untrained the first time.
        measures: What came of it, as ``Measured`` says it; of the main process alone.
        stale: Measures since the best one.
        ended: Whether to stop.
        measure_s, first_measure_s: How long the last measure took, and the first one.
        reached: How many tokens of each held-out prompt are decoded in a measure: those of the first one.
        step_cost: See ``Measured``.
        seconds: All of it so far.
    """

    step: int = 0
    tokens: int = 0
    steps: int = 0
    measured_next: int = 0
    since: list[list[float]] = field(default_factory=list)
    heard: int = 0
    losses: float = 0.0
    curve: list[Json] = field(default_factory=list)
    measures_made: int = 0
    measures: list[Json] = field(default_factory=list)
    stale: int = 0
    ended: bool = False
    measure_s: float = 0.0
    first_measure_s: float = 0.0
    reached: list[int] = field(default_factory=list)
    step_cost: float | None = None
    seconds: float = 0.0

    @classmethod
    def of(cls, facts: Json) -> Stand:
        """As it was stored."""
        return cls(**facts)

    @property
    def loss(self) -> float:
        """Of the first place, at the last point of the curve."""
        return float(self.curve[-1]["loss"][0]) if self.curve else self.mean_loss or 0.0

    @property
    def mean_loss(self) -> float | None:
        """Of the first place since the last measure."""
        return self.losses / self.heard if self.heard else None

    def measures_left(self, measures: int) -> int:
        """Of so many, besides that of the untrained head."""
        return max(0, measures + 1 - self.measures_made)

    def plan(self, steps: int, measures: int) -> None:
        """There will be so many steps, and so many measures in all, from now on at the same distances."""
        self.steps = steps
        self.measured_next = self.step + -(-(steps - self.step) // max(1, self.measures_left(measures)))

    def took(self, learnt: Learnt) -> None:
        """A step was made; every so many steps there is a point of the curve."""
        self.step += 1
        self.tokens += learnt.tokens
        self.heard, self.losses = self.heard + 1, self.losses + learnt.losses[0]
        self.since.append([*learnt.losses, *learnt.right])
        if len(self.since) < -(-self.steps // _RECORDS) and self.step < self.steps:
            return
        means = [sum(column) / len(self.since) for column in zip(*self.since, strict=True)]
        depth = len(means) // 2
        self.curve.append(
            {"step": self.step, "tokens": self.tokens, "loss": means[:depth], "right": means[depth:]}
        )
        self.since = []

    def add(self, measured: Measured, patience: int) -> bool:
        """It was measured; whether it has done best so far."""
        best = all(measured.tokens_per_step > each["tokens_per_step"] for each in self.measures)
        self.stale = 0 if best else self.stale + 1
        self.ended = self.stale >= patience
        self.measures.append(asdict(measured))
        self.heard, self.losses = 0, 0.0
        return best


class Pace:
    """Seconds that a step takes, since one of them."""

    def __init__(self, first: int) -> None:
        self._first, self._began = first, time.monotonic()

    def of(self, step: int) -> float:
        return (time.monotonic() - self._began) / max(1, step - self._first)

    def before_measure(self, stand: Stand) -> float:
        """The same where a measure has been made since the last step."""
        return max(0.0, time.monotonic() - self._began - stand.measure_s) / max(1, stand.step - self._first)
