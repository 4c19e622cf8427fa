"""The figure of trained heads: acceptance and tokens per step during training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter

from specbench.results.heads import PLACES, distinct_trainings
from specbench.show.plots import canvas
from specbench.show.plots.canvas import NoDataError, PlotData, figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from specbench.models.training_metadata import TrainingMetadata

_ALL = canvas.COLORS.index(canvas.BLACK)
_MOST = 4
"""Heads that are shown."""


@figure("training", "a trained head's acceptance and tokens per step during training", table="Training")
def training(run: PlotData) -> Figure:
    heads = [*distinct_trainings(run.run.heads).items()][:_MOST]
    if not heads:
        raise NoDataError("no head was trained by specbench")
    body = canvas.new_figure(run, 2.5 * len(heads) + 0.75)
    grid = body.subplots(len(heads), 2, squeeze=False)
    colors: dict[str, int] = {}  # of categories
    for (left, right), (name, training) in zip(grid, heads, strict=True):
        _acceptance(left, training)
        _tokens_per_step(right, training, colors)
        left.set_title(canvas.short(name, 34))
        right.set_title(
            f"{training.tokens or 0:,} tokens of text, {(training.seconds or 0.0) / 60:.0f} minutes"
        )
    remark = (
        "Acceptance of the drafts tested at each position; measured by the decoder, greedily and with chains, on"
        " prompts that were not trained on. Only the best and the worst category at the end."
    )
    return canvas.finish(body, run, "Training", remark)


def _acceptance(axes: Axes, training: TrainingMetadata) -> None:
    depth = max((len(each.accepted) for each in training.measured), default=0)
    for place in range(min(PLACES, depth)):
        points = [
            (each.tokens, each.accepted[place]) for each in training.measured if len(each.accepted) > place
        ]
        _line(axes, points, place, f"position {place + 1}")
    canvas.share_axis(axes, None)
    axes.set_ylabel("accepted, of those tested")


def _tokens_per_step(axes: Axes, training: TrainingMetadata, colors: dict[str, int]) -> None:
    """Draw tokens per step by number of training tokens:
    for all prompts, and for the finally best and worst category.
    """
    measured = training.measured
    last = sorted(measured[-1].categories, key=lambda name: measured[-1].categories[name])
    _line(axes, [(each.tokens, each.tokens_per_step) for each in measured], _ALL, "all prompts")
    for category in dict.fromkeys([*last[-1:], *last[:1]]):
        number = colors.setdefault(category, len(colors) + PLACES + (len(colors) + PLACES >= _ALL))
        points = [
            (each.tokens, each.categories[category]) for each in measured if category in each.categories
        ]
        _line(axes, points, number, canvas.short(category, 18))
    axes.set_ylabel("tokens per step")


def _line(axes: Axes, points: Sequence[tuple[float, float]], number: int, name: str) -> None:
    x, y = zip(*points, strict=True)
    color, marker = (each[number % len(each)] for each in (canvas.COLORS, canvas.MARKERS))
    axes.plot(x, y, color=color, marker=marker, zorder=3, label=name)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k"))
    axes.set_xlabel("tokens trained on")
    canvas.grid_lines(axes)
