"""The progress of a training for a tracker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench.train.settings import Measured, TrainingProgress

if TYPE_CHECKING:
    from specbench.base.trackers import Tracker


class TrackedTraining(TrainingProgress):
    """Gives the progress of a training to a tracker, and passes it on.

    Args:
        tracker: Receives ``loss`` at every step, and ``tokens_per_step``, ``accepted/POSITION`` and
            ``tokens_per_step/CATEGORY`` at every measurement.
        shown: Receives everything too.
    """

    def __init__(self, tracker: Tracker, shown: TrainingProgress | None = None) -> None:
        self._tracker, self._shown = tracker, shown or TrainingProgress()
        self._step = 0

    def report_writing(self, tokens: int, wanted: int | None, left_s: float | None) -> None:
        self._shown.report_writing(tokens, wanted, left_s)

    def report_step(self, step: int, steps: int, loss: float, left_s: float) -> None:
        self._step = step
        self._tracker.log({"loss": loss}, step)
        self._shown.report_step(step, steps, loss, left_s)

    def report_measurement(self, measured: Measured, *, best: bool) -> None:
        accepted = {f"accepted/{i}": share for i, share in enumerate(measured.accepted, 1)}
        categories = {f"tokens_per_step/{name}": value for name, value in measured.categories.items()}
        values = {"tokens": float(measured.tokens), "tokens_per_step": measured.tokens_per_step}
        self._tracker.log({**values, **accepted, **categories}, self._step)
        self._shown.report_measurement(measured, best=best)
