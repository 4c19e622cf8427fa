"""The figure of trained heads: how their drafts were kept as they learnt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter, PercentFormatter

from specbench.results.heads import PLACES, distinct_stories
from specbench.show.plots.canvas import (
    COLORS,
    MARKERS,
    WIDTH,
    End,
    NoDataError,
    Run,
    grid_lines,
    inscribe,
    label_ends,
    new_figure,
    short,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from specbench.models.stories import HeadStory

_MOST = 4
"""Heads that are shown."""


def training(run: Run) -> Figure:
    told = [*distinct_stories(run.run.heads).items()][:_MOST]
    if not told:
        raise NoDataError("no head was trained by specbench")
    figure = new_figure(run, 2.5 * len(told) + 0.75, WIDTH)
    grid = figure.subplots(len(told), 2, squeeze=False)
    for (left, right), (name, story) in zip(grid, told, strict=True):
        label_ends(left, _places(left, story), run)
        label_ends(right, _steps(right, story), run)
        left.set_title(short(name, 34))
        right.set_title(f"{story.tokens or 0:,} tokens of text, {(story.seconds or 0.0) / 60:.0f} minutes")
    inscribe(
        figure,
        run,
        "Training",
        "Of drafts tested at a place, the share kept; measured by the decoder, greedily and as a chain, on prompts that"
        " were not trained on.",
    )
    return figure


def _places(axes: Axes, story: HeadStory) -> list[End]:
    """Acceptance by place of the draft against tokens trained on."""
    measured = [each for each in story.measured if each.accepted]
    depth = min(PLACES, max((len(each.accepted) for each in measured), default=0))
    ends = []
    for place in range(depth):
        points = [(each.tokens, each.accepted[place]) for each in measured if len(each.accepted) > place]
        ends.append(_line(axes, points, place, f"{place + 1}."))
    axes.set_ylim(bottom=0.0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylabel("kept of those tested, by place")
    return ends


def _steps(axes: Axes, story: HeadStory) -> list[End]:
    """Tokens per step against tokens trained on: of all, and of the best and the worst category in the end."""
    measured = story.measured
    last = sorted(measured[-1].categories, key=lambda name: measured[-1].categories[name])
    ends = [_line(axes, [(each.tokens, each.tokens_per_step) for each in measured], 0, "all")]
    for number, category in enumerate(dict.fromkeys([*last[-1:], *last[:1]]), start=1):
        points = [
            (each.tokens, each.categories[category]) for each in measured if category in each.categories
        ]
        ends.append(_line(axes, points, number, short(category, 18)))
    axes.set_ylabel("tokens per step")
    return ends


def _line(axes: Axes, points: Sequence[tuple[float, float]], number: int, name: str) -> End:
    x, y = zip(*points, strict=True)
    color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
    axes.plot(x, y, color=color, marker=marker, zorder=3)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k"))
    axes.set_xlabel("tokens trained on")
    grid_lines(axes)
    return End(float(x[-1]), float(y[-1]), name, color, marker, color)
