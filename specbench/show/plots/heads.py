"""The figure of trained heads: acceptance and tokens per step during training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib import colormaps
from matplotlib.ticker import FuncFormatter

from specbench.results.heads import PLACES, distinct_trainings
from specbench.show.plots import canvas
from specbench.show.plots.canvas import NoDataError, PlotData, figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST = 4  # heads that are shown


@figure("training", "a trained head's acceptance and tokens per step during training", table="Training")
def training(run: PlotData) -> Figure:
    heads = [*distinct_trainings(run.run.heads).items()][:_MOST]
    if not heads:
        raise NoDataError("no head was trained by specbench")
    body = canvas.new_figure(run, 2.5 * len(heads) + 0.75)
    shades = colormaps["cividis"]  # no color of a drafter
    for (left, right), (name, head) in zip(body.subplots(len(heads), 2, squeeze=False), heads, strict=True):
        measured = head.measured
        for place in range(min(PLACES, max((len(each.accepted) for each in measured), default=0))):
            points = [(each.tokens, each.accepted[place]) for each in measured if len(each.accepted) > place]
            _line(left, points, f"position {place + 1}", shades(0.85 * place / PLACES), "-")
        canvas.share_axis(left, None)
        left.set_ylabel("accepted, of those tested")
        left.set_title(canvas.short(name, 34))
        last = sorted(measured[-1].categories, key=lambda name: measured[-1].categories[name])
        _line(right, [(each.tokens, each.tokens_per_step) for each in measured], "all prompts", "black", "-")
        for dashes, category in zip(("--", ":"), dict.fromkeys([*last[-1:], *last[:1]]), strict=False):
            points = [
                (each.tokens, each.categories[category]) for each in measured if category in each.categories
            ]
            _line(right, points, canvas.short(category, 18), canvas.GRAY, dashes)
        right.set_ylabel("tokens per step")
        right.set_title(f"{head.tokens or 0:,} tokens of text, {(head.seconds or 0.0) / 60:.0f} minutes")
    remark = (
        "Acceptance of the drafts tested at each position; measured by the decoder, greedily and with chains, on"
        " prompts that were not trained on. Only the best and the worst category at the end."
    )
    return canvas.finish(body, run, "Training", remark)


def _line(axes: Axes, points: Sequence[tuple[float, float]], name: str, color: object, dashes: str) -> None:
    x, y = zip(*points, strict=True)
    axes.plot(x, y, dashes, color=color, marker=".", zorder=3, label=name)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k"))
    axes.set_xlabel("tokens trained on")
    canvas.grid_lines(axes)
