"""Figures of one run, each a ``matplotlib.figure.Figure`` of its own; no state of pyplot, no window.

A builder takes a ``canvas.Run`` and raises ``NoDataError`` with a reason where the run has nothing to show in its
figure. Each stands in the file of its kind, and in ``FIGURES``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from specbench.errors import UsageError
from specbench.files import explained, write_bytes
from specbench.results.results import Results
from specbench.show.plots.acceptance import acceptance, accepted_length, positions
from specbench.show.plots.batches import latency, speedup_by_batch
from specbench.show.plots.canvas import SIZES, STYLE, Look, NoDataError, Run, lay_out
from specbench.show.plots.heads import training
from specbench.show.plots.servers import servers
from specbench.show.plots.speed import by_category, prediction, speedup, tokens_per_second
from specbench.show.plots.steps import generation, time
from specbench.show.plots.trees import rank_rates, trees

__all__ = ["FIGURES", "FORMATS", "Drawn", "Look", "draw_figures", "figure_bytes", "save_figure"]

FORMATS = ("png", "svg", "pdf")


@dataclass(frozen=True, slots=True)
class Drawn:
    """The figures of a run by name, and why others could not be drawn, by name."""

    figures: dict[str, Figure]
    skipped: dict[str, str]


def draw_figures(results: Results, only: Collection[str] | None = None, look: Look | None = None) -> Drawn:
    """Draw a run.

    Args:
        results: The run.
        only: Names of ``FIGURES``; ``None`` for all of them.
        look: How they are laid out.

    Raises:
        UsageError: There is no figure of such a name, or nothing can be drawn.
    """
    unknown = [name for name in only or () if name not in FIGURES]
    if unknown:
        raise UsageError(f"There is no figure {unknown[0]!r}.", f"Choose from {', '.join(FIGURES)}.")
    if results.done.empty:
        raise UsageError(
            "There is nothing to plot: no generation of this run has finished.", "Go on with its sweep."
        )
    look = look or Look()
    run = Run(results, look)
    figures: dict[str, Figure] = {}
    skipped: dict[str, str] = {}
    style: Any = {**STYLE, **{name: share * look.font_size for name, share in SIZES.items()}}
    with rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # names may hold any letter
        warnings.filterwarnings("error", message="constrained_layout not applied")
        for name, (build, _) in FIGURES.items():
            if only is None or name in only:
                try:
                    figures[name] = _settled(build(run))
                except NoDataError as reason:
                    untold = run.servers and name not in _OF_SERVERS
                    skipped[name] = "no server tells its single steps" if untold else str(reason)
                except UserWarning:
                    skipped[name] = "its letters do not fit into its width"
    if not figures:
        raise UsageError(
            f"There is nothing to plot: {'; '.join(dict.fromkeys(skipped.values()))}.", "Measure more."
        )
    return Drawn(figures, skipped)


def _settled(figure: Figure) -> Figure:
    """Lay it out for good: done anew at every saving, the layout would wander a little each time."""
    lay_out(figure)
    lay_out(figure)  # once more, with the ticks that go with the room there is
    figure.set_layout_engine("none")
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the name's ending says; the same figure gives the same bytes.

    Raises:
        UsageError: A symbolic link stands there. RunError: The file cannot be written.
    """
    with explained(f"{str(path)!r} cannot be written", "Give another --out."):
        write_bytes(path, figure_bytes(figure, path.suffix[1:]))


def figure_bytes(figure: Figure, kind: str, dpi: float | None = None) -> bytes:
    """A figure as a file of one of ``FORMATS``; ``dpi`` other than the usual makes a smaller one."""
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        content = BytesIO()
        figure.savefig(content, format=kind, metadata=metadata, dpi=dpi or "figure")
    return content.getvalue()


FIGURES: dict[str, tuple[Callable[[Run], Figure], str]] = {
    "speedup": (speedup, "speedup against γ, one line per drafter"),
    "servers": (servers, "speed of servers, and how each stands to the first"),
    "batches": (speedup_by_batch, "speedup against batch, one line per drafter and rule"),
    "latency": (latency, "throughput against latency, with and without speculation"),
    "tokens-per-second": (tokens_per_second, "decode speed against γ"),
    "acceptance": (acceptance, "acceptance rate and α against γ"),
    "positions": (positions, "acceptance by position in the draft"),
    "time": (time, "where the time goes"),
    "prediction": (prediction, "predicted against measured speedup"),
    "categories": (by_category, "speedup by category and configuration"),
    "accepted-length": (accepted_length, "accepted drafts per step"),
    "trees": (trees, "tokens per step by tree and way to verify, and speed against rows"),
    "ranks": (rank_rates, "acceptance in trees by rank and depth"),
    "training": (training, "what was kept of a trained head's drafts as it learnt, and tokens per step"),
    "generation": (generation, "draft length, acceptance and entropy over one generation"),
}
"""Every figure by name: what draws it, and a line about it."""

_OF_SERVERS = ("servers", "batches", "latency", "positions", "categories")
"""Those that can be drawn of servers."""
