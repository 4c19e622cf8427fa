"""The figure of trained heads: how their drafts were kept as they learnt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter, PercentFormatter

from specbench.results.heads import PLACES, distinct_trainings
from specbench.show.plots.canvas import (
    BLACK,
    COLORS,
    MARKERS,
    NoDataError,
    Run,
    figure,
    finish,
    grid_lines,
    new_figure,
    short,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from specbench.models.training_metadata import TrainingMetadata

_ALL = COLORS.index(BLACK)
_MOST = 4
"""Heads that are shown."""


@figure(
    "training",
    "what was kept of a trained head's drafts as it learnt, and tokens per step",
    table="Training",
)
def training(run: Run) -> Figure:
    told = [*distinct_trainings(run.run.heads).items()][:_MOST]
    if not told:
        raise NoDataError("no head was trained by specbench")
    body = new_figure(run, 2.5 * len(told) + 0.75)
    grid = body.subplots(len(told), 2, squeeze=False)
    colors: dict[str, int] = {}  # of categories
    for (left, right), (name, training) in zip(grid, told, strict=True):
        _places(left, training)
        _steps(right, training, colors)
        left.set_title(short(name, 34))
        right.set_title(
            f"{training.tokens or 0:,} tokens of text, {(training.seconds or 0.0) / 60:.0f} minutes"
        )
    return finish(
        body,
        run,
        "Training",
        "Of drafts tested at a place, the share kept; measured by the decoder, greedily and as a chain, on prompts that"
        " were not trained on. Of categories the best and the worst in the end.",
    )


def _places(axes: Axes, training: TrainingMetadata) -> None:
    """Acceptance by place of the draft against tokens trained on."""
    measured = [each for each in training.measured if each.accepted]
    depth = min(PLACES, max((len(each.accepted) for each in measured), default=0))
    for place in range(depth):
        points = [(each.tokens, each.accepted[place]) for each in measured if len(each.accepted) > place]
        _line(axes, points, place, f"place {place + 1}")
    axes.set_ylim(bottom=0.0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylabel("kept of those tested, by place")


def _steps(axes: Axes, training: TrainingMetadata, colors: dict[str, int]) -> None:
    """Tokens per step against tokens trained on: of all, and of the best and the worst category in the end."""
    measured = training.measured
    last = sorted(measured[-1].categories, key=lambda name: measured[-1].categories[name])
    _line(axes, [(each.tokens, each.tokens_per_step) for each in measured], _ALL, "all prompts")
    for category in dict.fromkeys([*last[-1:], *last[:1]]):
        number = colors.setdefault(category, len(colors) + PLACES + (len(colors) + PLACES >= _ALL))
        points = [
            (each.tokens, each.categories[category]) for each in measured if category in each.categories
        ]
        _line(axes, points, number, short(category, 18))
    axes.set_ylabel("tokens per step")


def _line(axes: Axes, points: Sequence[tuple[float, float]], number: int, name: str) -> None:
    x, y = zip(*points, strict=True)
    color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
    axes.plot(x, y, color=color, marker=marker, zorder=3, label=name)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k"))
    axes.set_xlabel("tokens trained on")
    grid_lines(axes)
