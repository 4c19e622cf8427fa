"""Figures of one run, each a ``matplotlib.figure.Figure`` of its own, without the state of pyplot or a window.

The function of a figure draws a ``canvas.PlotData``, or raises ``NoDataError`` with the reason why there is nothing to
show.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from io import BytesIO
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from specbench.base.errors import UsageError, unknown
from specbench.base.files import file_errors, write_bytes
from specbench.results.results import Results
from specbench.results.summary import Summary
from specbench.show.figures import FIGURES
from specbench.show.plots import acceptance, speed, steps
from specbench.show.plots.canvas import STYLE, NoDataError, PlotData

FORMATS = ("png", "svg", "pdf")

_DRAW: Mapping[str, Callable[[PlotData], Figure]] = {
    "speedup": speed.speedup,
    "batches": speed.speedup_by_batch,
    "contexts": speed.speedup_by_context,
    "positions": acceptance.positions,
    "time": steps.time,
}


def draw_figures(
    run: Results | Summary, only: Collection[str] | None = None
) -> tuple[dict[str, Figure], dict[str, str]]:
    """Draw figures of a run.

    Args:
        run: The run, or its figures.
        only: Names of ``FIGURES``; ``None`` for all of them.

    Returns:
        The figures by name, and, for those that could not be drawn, the reason by name.

    Raises:
        UsageError: There is no figure of such a name, or nothing can be drawn.
    """
    for name in only or ():
        if name not in FIGURES:
            raise unknown("figure", name, FIGURES)
    summary = Summary(run) if isinstance(run, Results) else run
    if summary.results.done.empty:
        raise UsageError(
            "There is nothing to plot: no generation of this run has finished.", "Continue its sweep."
        )
    data = PlotData(summary)
    figures: dict[str, Figure] = {}
    skipped: dict[str, str] = {}
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # names may hold any letter
        for name in FIGURES:
            if only is None or name in only:
                try:
                    figures[name] = _freeze_layout(_DRAW[name](data))
                except NoDataError as reason:
                    skipped[name] = str(reason)
    if not figures:
        raise UsageError(
            f"There is nothing to plot: {'; '.join(dict.fromkeys(skipped.values()))}.", "Measure more."
        )
    return figures, skipped


def _freeze_layout(figure: Figure) -> Figure:
    """Compute the layout and ticks of a figure once, so that saving it does not change them.

    Without this, each saving changes the layout a little. Ticks change too: matplotlib chooses as many as fit the
    current letter size, which is another one when a figure is saved.
    """
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    engine.execute(figure)  # once more, with the ticks that fit the final size
    figure.set_layout_engine("none")
    for axes in figure.findobj(Axes):
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(FixedLocator([*axis.get_majorticklocs()]))
            axis.set_minor_locator(FixedLocator([*axis.get_minorticklocs()]))
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's extension; the same figure gives the same bytes.

    Raises:
        UsageError: The path is a symbolic link. RunError: The file cannot be written.
    """
    with file_errors(f"{str(path)!r} cannot be written", "Give another --out."):
        write_bytes(path, figure_bytes(figure, path.suffix[1:]))


def figure_bytes(figure: Figure, kind: str, dpi: float | None = None, *, letters: bool = False) -> bytes:
    """Return a figure as a file of one of ``FORMATS``; an SVG holds its texts as outlines, or as ``letters``."""
    title = {"Title": figure.get_label()} if kind != "png" else {}
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    style = {**STYLE, "svg.fonttype": "none" if letters else "path"}
    with rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        content = BytesIO()
        figure.savefig(content, format=kind, metadata={**title, **undated}, dpi=dpi or "figure")
    return content.getvalue()
