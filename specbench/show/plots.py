"""Figures of one run, each a ``matplotlib.figure.Figure`` of its own; no state of pyplot, no window.

Every builder takes a ``_Run`` and raises ``_NoDataError`` with a reason where the run has nothing to show in its
figure. Colours are Okabe and Ito's (2008), with a dark red in place of their yellow, told apart by the colour-blind;
markers carry the same distinction again.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib import rc_context, rcParams
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter
from matplotlib.transforms import ScaledTranslation, blended_transform_factory

from specbench.decoding.records import PARTS
from specbench.errors import UsageError
from specbench.files import explained, write_bytes
from specbench.results import frames
from specbench.results.stats import decimals
from specbench.textsafe import counted, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation

__all__ = ["FIGURES", "FORMATS", "Drawn", "Look", "draw_figures", "figure_bytes", "save_figure"]

FORMATS = ("png", "svg", "pdf")

_BLUE, _VERMILLION, _GREEN, _ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
_PURPLE, _SKY, _RED, _BLACK, _GREY = "#CC79A7", "#56B4E9", "#882255", "#000000", "#7A7A7A"
_COLORS = (_BLUE, _VERMILLION, _GREEN, _PURPLE, _ORANGE, _SKY, _RED, _BLACK)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_PART_COLORS = {"draft": _ORANGE, "verify": _BLUE, "accept": _GREEN, "rollback": _PURPLE, "other": "#B0B0B0"}

_WIDTH = 6.8  # inches: two columns of a paper
_NARROW = 0.7  # inches per point of the letters: less, and panels and names stand below each other
_NAME = 30  # characters of a name in a figure
_PANELS = 4  # in a row
_DODGE = 0.08  # of the distance between two γ, so that intervals do not hide each other
_FEW, _TOO_FEW = 30, 10  # drafts at a position below which its rate is marked as uncertain, and not drawn
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same everywhere
    "figure.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.edgecolor": "#404040",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "xtick.color": "#404040",
    "ytick.color": "#404040",
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.6,
    "savefig.dpi": 200,
    "figure.dpi": 200,
    "text.parse_math": False,  # a dollar sign in a model's name is a dollar sign
    "text.usetex": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "specbench",
    "pdf.fonttype": 42,
}


_SIZES = {
    "font.size": 1.0, "axes.titlesize": 1.0, "axes.labelsize": 1.0, "xtick.labelsize": 0.94, "ytick.labelsize": 0.94,
    "legend.fontsize": 0.94, "figure.titlesize": 1.19,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Look:
    """How figures are laid out.

    Attributes:
        width: In inches; ``None`` for the width that suits each figure.
        font_size: Of the letters, in points; those of notes are smaller, those of titles larger.
        framed: With a title above, and below what the figure shows and what it was measured on; papers say these in
            their captions.
    """

    width: float | None = None
    font_size: float = 8.0
    framed: bool = True


def _points(share: float) -> float:
    """A size of letters relative to that of the figure."""
    return share * float(rcParams["font.size"])


class _NoDataError(Exception):
    """The run has nothing to show in this figure; the message says why."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The figures of a run by name, and why others could not be drawn, by name."""

    figures: dict[str, Figure]
    skipped: dict[str, str]


def draw_figures(df: pd.DataFrame, only: Collection[str] | None = None, look: Look | None = None) -> Drawn:
    """Draw a run.

    Args:
        df: Its rows, from ``specbench.results.store.load_results``.
        only: Names of ``FIGURES``; ``None`` for all of them.
        look: How they are laid out.

    Raises:
        UsageError: There is no figure of such a name, the rows come from several runs, or nothing can be drawn.
    """
    unknown = [name for name in only or () if name not in FIGURES]
    if unknown:
        raise UsageError(f"There is no figure {unknown[0]!r}.", f"Choose from {', '.join(FIGURES)}.")
    frames.run_of(df)
    if not (df["status"] == "ok").any():
        raise UsageError(
            "There is nothing to plot: no generation of this run has finished.", "Go on with its sweep."
        )
    look = look or Look()
    run = _Run(df, look)
    figures: dict[str, Figure] = {}
    skipped: dict[str, str] = {}
    style: Any = {**_STYLE, **{name: share * look.font_size for name, share in _SIZES.items()}}
    with rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # names may hold any letter
        warnings.filterwarnings("error", message="constrained_layout not applied")
        for name, (build, _) in FIGURES.items():
            if only is None or name in only:
                try:
                    figures[name] = _settled(build(run))
                except _NoDataError as reason:
                    skipped[name] = str(reason)
                except UserWarning:
                    skipped[name] = "its letters do not fit into its width"
    if not figures:
        raise UsageError(
            f"There is nothing to plot: {'; '.join(dict.fromkeys(skipped.values()))}.", "Measure more."
        )
    return Drawn(figures, skipped)


def _settled(figure: Figure) -> Figure:
    """Lay it out for good: done anew at every saving, the layout would wander a little each time."""
    figure.draw_without_rendering()
    figure.draw_without_rendering()  # once more, with the ticks that go with the room there is
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
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        content = BytesIO()
        figure.savefig(content, format=kind, metadata=metadata, dpi=dpi or "figure")
    return content.getvalue()


# --- What is drawn --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Series:
    """Configurations that differ in γ only: one line.

    Attributes:
        name: The drafter, the length rule and the temperature, as far as they tell series apart.
        name_at_gamma: The same with a place for γ; without one where a rule decides.
        rows: Of the summary, by rising x.
        x: γ, or for a rule that decides by itself the mean of what it drafted.
        adapts: Whether a rule decides.
    """

    name: str
    name_at_gamma: str
    drafter: str
    rows: pd.DataFrame
    x: np.ndarray[Any, np.dtype[np.float64]]
    adapts: bool
    color: str
    marker: str

    @property
    def face(self) -> str:
        """Fill of the markers: hollow where a rule decides γ."""
        return "white" if self.adapts else self.color


class _Run:
    """A run and what several figures need of it."""

    def __init__(self, df: pd.DataFrame, look: Look) -> None:
        self.df = df
        self.look = look
        self.width = look.width or _WIDTH
        self.narrow = self.width < _NARROW * look.font_size
        self.run = frames.run_of(df)
        self.steps = frames.step_arrays(df)
        self.summary = frames.summary_frame(df, self.steps)
        kinds = self.summary["kind"]
        self.plain = self.summary[kinds == "plain"]
        # Others' decoding has no γ that is known here: a level to compare with.
        self.levels = self.summary[kinds.isin(["transformers", "assisted"])]
        self.series = _series_of(self.summary[kinds == "speculative"])
        self.drafters = list(dict.fromkeys(each.drafter for each in self.series))

    @cached_property
    def caption(self) -> list[str]:
        """Machine, models, prompts and tokens."""
        target, options = self.run.get("target") or {}, self.run
        finished = (self.df["status"] == "ok").to_numpy()
        prompts, repeats = (
            pd.unique(self.df[name].to_numpy()[finished]).size for name in ("prompt", "repeat")
        )
        temperatures = sorted(self.summary["temperature"].dropna().unique())
        dtype = f" ({one_line(target['dtype'])})" if target.get("dtype") else ""
        most = "" if options.get("ignore_eos") else "≤ "
        tokens = f" × {most}{options['max_new_tokens']} tokens" if options.get("max_new_tokens") else ""
        parts = [
            _machine(self.run.get("environment") or {}, str(target.get("device", "cpu"))),
            f"target {_short(target.get('name') or 'unknown', 48)}{dtype}",
            f"{counted(prompts, 'prompt')}{tokens} × {counted(repeats, 'repeat')}",
            "greedy" if temperatures == [0.0] else f"temperature {', '.join(f'{t:g}' for t in temperatures)}",
            f"specbench {one_line(self.run.get('specbench') or '')}".strip(),
        ]
        return [part for part in parts if part]

    @property
    def intervals(self) -> str:
        """What the intervals of speedups are over."""
        bases = set(self.summary["speedup_basis"].dropna())
        if bases == {"repeats"}:
            return "Bars: 95% intervals over the repeats of the one prompt; they hold within it only."
        return "Bars: 95% intervals over prompts." if bases else "Too few prompts or repeats: no intervals."


def _series_of(rows: pd.DataFrame) -> list[_Series]:
    """Lines of a figure, coloured by what differs most: the drafter, the rule or the temperature."""
    keys = rows[["drafter", "policy", "temperature"]].drop_duplicates()
    values = {name: list(dict.fromkeys(keys[name])) for name in keys.columns}
    colored = max(values, key=lambda name: len(values[name]))  # of equals the first
    out = []
    for number, key in enumerate(frames.records(keys)):
        mine = rows[(rows[list(key)] == pd.Series(key)).all(axis=1)]
        x = mine["gamma"].astype(float).fillna(mine["mean_gamma"])
        mine = mine[x.notna()].assign(x=x[x.notna()]).sort_values("x")
        if mine.empty:
            continue
        drafter = _short(key["drafter"], _NAME) if len(values["drafter"]) > 1 else ""
        rule = "" if key["policy"] == "fixed" else _short(key["policy"], 20)
        temperature = f"T = {key['temperature']:g}" if len(values["temperature"]) > 1 else ""
        name, name_at_gamma = (
            ", ".join(part for part in (drafter, rule or gamma, temperature) if part)
            for gamma in ("" if drafter else "fixed γ", "γ = {:g}")
        )
        color = _COLORS[values[colored].index(key[colored]) % len(_COLORS)]
        marker = _MARKERS[number % len(_MARKERS)]
        adapts = key["policy"] != "fixed"
        out.append(
            _Series(name, name_at_gamma, key["drafter"], mine, mine["x"].to_numpy(), adapts, color, marker)
        )
    return out


def _row_names(rows: Sequence[dict[str, Any]], run: _Run) -> list[str]:
    """Names of configurations that stand below each other: a drafter is named where its rows begin, and an only one
    in the title."""
    names, before = [], None
    for row in rows:
        parts = [
            "" if row["policy"] == "fixed" else _short(row["policy"], 20),
            "" if math.isnan(row["gamma"]) else f"γ = {row['gamma']:g}",
            f"T = {row['temperature']:g}" if run.summary["temperature"].nunique() > 1 else "",
        ]
        if row["kind"] != "speculative":
            parts = [_short(row["label"], _NAME)]
        elif row["drafter"] != before and len(run.drafters) > 1:
            parts = [f"{_short(row['drafter'], _NAME)}:", *parts]
        before = row["drafter"]
        names.append(" ".join(part for part in parts if part))
    return names


def _machine(environment: dict[str, Any], device: str) -> str:
    """What the target ran on."""
    devices = Counter(map(one_line, environment.get("devices") or []))
    if device != "cpu" and devices:
        return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in devices.items())
    threads = environment.get("threads")
    return ", ".join(
        part
        for part in (one_line(environment.get("cpu") or ""), counted(threads, "thread") if threads else "")
        if part
    )


def _short(text: object, limit: int) -> str:
    """A name shortened in its middle: the ends of models' names say most."""
    name = one_line(text)
    if len(name) <= limit:
        return name
    head = (limit - 1) // 2
    return f"{name[:head]}…{name[len(name) - (limit - 1 - head) :]}"


def _two_lines(name: str) -> str:
    """A long name over two lines, for the title of a narrow panel."""
    if len(name) <= 22:
        return name
    breaks = [i + 1 for i, letter in enumerate(name) if letter in "-_/,: " and 0 < i < len(name) - 1]
    at = min(breaks or [len(name) // 2], key=lambda i: abs(i - len(name) / 2))
    return f"{name[:at].rstrip()}\n{name[at:].lstrip()}"


# --- Common parts ---------------------------------------------------------------------------------


def _new_figure(run: _Run, height: float, width: float | None = None) -> Figure:
    """A figure; its height, in inches, is that for letters of 8 points."""
    size = (run.look.width or width or _WIDTH, height * _points(1.0) / 8)
    figure = Figure(figsize=size, layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.06, h_pad=0.05, wspace=0.03, hspace=0.03)
    return figure


def _two(run: _Run, height: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """Two panels beside each other, or below each other where there is no room."""
    figure = _new_figure(run, height * (1.7 if run.narrow else 1.0))
    grid = figure.subplots(*((2, 1) if run.narrow else (1, 2)), squeeze=False, **shared)
    return figure, list(grid.flat)


def _inscribe(figure: Figure, run: _Run, title: str, *remarks: str) -> None:
    """Title above, with the drafter if there is one only, and caption below."""
    if not run.look.framed:
        return
    if len(run.drafters) == 1:
        title = f"{title}: {_short(run.drafters[0], 40)}"
    letters = 72 * figure.get_figwidth() / run.look.font_size  # in a line, if they are as wide as high
    titles = textwrap.wrap(title, int(1.35 * letters))
    figure.suptitle("\n".join(titles), x=0.01, ha="left")
    width = int(2.3 * letters)  # in characters of the caption's size
    lines = [""]
    for part in run.caption:  # broken between its parts only
        joined = f"{lines[-1]} · {part}" if lines[-1] else part
        lines = [*lines[:-1], joined] if len(joined) <= width else [*lines, part]
    lines = [*textwrap.wrap(" ".join(remark for remark in remarks if remark), width), *lines]
    more = 1.45 * (len(titles) - 1) + 1.1 * max(0, len(lines) - 2)
    figure.set_figheight(figure.get_figheight() + more * _points(1.0) / 72)
    figure.supxlabel(
        "\n".join(lines), x=0.01, ha="left", fontsize=_points(0.79), color="#505050", linespacing=1.35
    )


def _grid(axes: Axes, axis: str = "y") -> None:
    axes.grid(axis=axis, color="#E4E4E4", linewidth=0.6)  # type: ignore[arg-type]


def _gamma_axis(axes: Axes, values: Sequence[float]) -> None:
    """Whole γ only, as those measured where they are few; every value lies within it."""
    shown = sorted({round(value) for value in values})
    axes.set_xlabel("γ (tokens drafted per step)")
    # Labels too close to each other would run together.
    if len(shown) <= 12 and (len(shown) < 2 or min(np.diff(shown)) >= (shown[-1] - shown[0]) / 24):
        axes.xaxis.set_major_locator(FixedLocator(shown))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    first, last = min((*shown, *values)), max((*shown, *values))
    margin = max(0.35, 0.05 * (last - first))
    axes.set_xlim(first - margin, last + margin)


def _dodged(series: Sequence[_Series]) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    """The x of every series, moved apart a little."""
    every = np.unique(np.concatenate([each.x for each in series]))
    step = float(np.diff(every).min()) if len(every) > 1 else 1.0
    step = min(1.0, max(step, (every[-1] - every[0]) / 20 if len(every) > 1 else 1.0))
    offsets = (np.arange(len(series)) - (len(series) - 1) / 2) * _DODGE * step * min(1.0, 8 / len(series))
    return [each.x + offset for each, offset in zip(series, offsets, strict=True)]


class _End(NamedTuple):
    """Where a line ends, and what it is: its name, and how it is drawn; a level has no marker."""

    x: float
    y: float
    name: str
    color: str
    marker: str = ""
    face: str = ""


def _draw_series(axes: Axes, series: Sequence[_Series], figure_name: str) -> list[_End]:
    """Lines with intervals, in axes whose x is set; returns where each ends.

    A rule stands at the mean γ it came to, on a level across the figure to compare the lengths with.
    """
    ends = []
    for each, x in zip(series, _dodged(series), strict=True):
        y, low, high = (
            each.rows[f"{figure_name}{end}"].to_numpy(dtype=float) for end in ("", "_low", "_high")
        )
        there = np.isfinite(y)
        if not there.any():
            continue
        if each.adapts:
            axes.axhline(y[there][-1], color=each.color, linewidth=0.7, linestyle=(0, (1, 2)), zorder=1.6)
        axes.plot(
            x[there], y[there], linestyle="none" if each.adapts else "-", color=each.color, marker=each.marker,
            markerfacecolor=each.face, markeredgewidth=1.0, zorder=3,
        )  # fmt: skip
        sure = there & ~np.isnan(low) & ~np.isnan(high)
        axes.vlines(x[sure], low[sure], high[sure], color=each.color, linewidth=0.9, alpha=0.75, zorder=2.5)
        end = axes.get_xlim()[1] if each.adapts else float(x[there][-1])
        ends.append(_End(end, float(y[there][-1]), each.name, each.color, each.marker, each.face))
    return ends


def _fit_y(axes: Axes, frames: Sequence[pd.DataFrame], name: str, *include: float) -> None:
    """Limits that show every value, and of wide intervals at least a part; those that are cut get an arrowhead."""
    bottom, top = _span(pd.concat(list(frames)), name)
    bottom, top = min(bottom, *include), max(top, *include)
    margin = 0.06 * (top - bottom) or 0.1 * top
    axes.set_ylim(max(0.0, bottom - margin), top + margin)


def _span(rows: pd.DataFrame, name: str) -> tuple[float, float]:
    """Lowest and highest value with their intervals, of each as much as lies within a factor of 1.6."""
    y = rows[name].to_numpy(dtype=float)
    low = np.fmax(rows[f"{name}_low"].to_numpy(dtype=float), y / 1.6)
    high = np.fmin(rows[f"{name}_high"].to_numpy(dtype=float), y * 1.6)
    low, high = np.fmin(low, y), np.fmax(high, y)
    return float(np.nanmin(low)), float(np.nanmax(high))


def _mark_cut(axes: Axes, series: Sequence[_Series], name: str) -> None:
    bottom, top = axes.get_ylim()
    for each, x in zip(series, _dodged(series), strict=True):
        low, high = (each.rows[f"{name}{end}"].to_numpy(dtype=float) for end in ("_low", "_high"))
        for cut, at, marker in ((high > top, top, "^"), (low < bottom, bottom, "v")):
            if cut.any():
                axes.plot(
                    x[cut], np.full(cut.sum(), at), marker, color=each.color, markersize=3, clip_on=False
                )


def _level(axes: Axes, y: float, name: str) -> _End:
    """A horizontal line to compare with; returns its end as ``_draw_series`` does."""
    axes.axhline(y, color=_GREY, linewidth=0.9, linestyle=_DASHED, zorder=1.5)
    return _End(axes.get_xlim()[1], y, name, _GREY)


_DASHED = (0, (4, 3))
_KEY_AT, _NAME_AT = 13.0, 20.0  # points from the axes to the marker beside a name, and to the name


def _label_ends(axes: Axes, ends: Sequence[_End], run: _Run) -> None:
    """Name every line, with its marker, at its right end in the margin; names that would collide move apart, with a
    leader line. In a narrow figure they stand below.

    Args:
        axes: With its limits set.
        ends: The lines.
        run: Of the figure.
    """
    if not ends:
        return
    if run.narrow:
        _legend_below(axes, ends, run)
        return
    figure = axes.figure
    assert isinstance(figure, Figure)

    def beside(points: float) -> Any:
        return axes.get_yaxis_transform() + ScaledTranslation(points / 72, 0, figure.dpi_scale_trans)

    labels: list[Annotation] = [
        axes.annotate(
            end.name,
            (end.x, end.y),
            xytext=(1.0, end.y),
            textcoords=beside(_NAME_AT if end.marker else _KEY_AT),
            color=_INK,
            va="center",
            fontsize=_points(0.94),
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": end.color,
                "linewidth": 0.6,
                "alpha": 0.6,
                "shrinkA": _NAME_AT - _KEY_AT + 5 if end.marker else 2,
                "shrinkB": 4,
                "relpos": (0.0, 0.5),
            },
        )
        for end in ends
    ]
    figure.draw_without_rendering()  # lays the axes out, with room for the labels
    boxes = [Text.get_window_extent(label) for label in labels]  # an annotation's own has its arrow in it
    wanted = [axes.transData.transform((0.0, end.y))[1] for end in ends]
    floor, ceiling = axes.transAxes.transform([(0.0, -0.04), (0.0, 1.04)])[:, 1]
    placed = _spread(wanted, [box.height + 1.5 for box in boxes], float(floor), float(ceiling))
    for end, label, pixel in zip(ends, labels, placed, strict=True):
        y = float(axes.transData.inverted().transform((0.0, pixel))[1])
        label.xyann = (1.0, y)
        if end.marker:
            key = _key(end, [1.0], [y])
            key.set(transform=beside(_KEY_AT), clip_on=False)
            figure.add_artist(key)


_INK = "#303030"


def _key(end: _End, x: Sequence[float], y: Sequence[float]) -> Line2D:
    """A piece of a line as it is drawn."""
    return Line2D(
        x, y, color=end.color, marker=end.marker or None, markerfacecolor=end.face or None, markeredgewidth=1.0,
        linestyle="-" if end.marker else _DASHED, linewidth=1.4 if end.marker else 0.9,
    )  # fmt: skip


def _legend_below(axes: Axes, ends: Sequence[_End], run: _Run) -> None:
    """Name the lines below the axes, in as many columns as have room."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    size = _points(0.94)
    widest = max(len(end.name) for end in ends) * 0.58 * size + 3.2 * size
    columns = max(1, min(len(ends), int(72 * (run.width - 0.1) / widest)))
    lines = math.ceil(len(ends) / columns)
    figure.set_figheight(figure.get_figheight() + 1.5 * size / 72 * (lines + 0.5))
    below = ScaledTranslation(0, -4.0 * size / 72, figure.dpi_scale_trans)
    legend = axes.legend(
        [_key(end, [0, 1], [0, 0]) for end in ends],
        [end.name for end in ends],
        loc="upper left",
        bbox_to_anchor=(0.02, 0.0),
        bbox_transform=blended_transform_factory(figure.transFigure, axes.transAxes) + below,
        borderaxespad=0.0,
        ncols=columns,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.2,
        labelcolor=_INK,
    )
    # It may be wider than the axes, which the layout cannot follow; blank lines keep its place.
    legend.set_in_layout(False)
    blank = "\n".join(" " * lines)
    axes.text(0.5, 0.0, blank, va="top", transform=axes.transAxes + below, fontsize=1.3 * size)


def _spread(wanted: Sequence[float], sizes: Sequence[float], floor: float, ceiling: float) -> list[float]:
    """Centres as close to those wanted as can be without overlap: neighbours that collide share their mean."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[tuple[list[int], float, float]] = []  # members, height, centre

    def bounded(height: float, center: float) -> float:
        return min(max(center, floor + height / 2), max(ceiling - height / 2, floor + height / 2))

    for i in order:
        block = ([i], sizes[i], bounded(sizes[i], wanted[i]))
        while blocks and blocks[-1][2] + blocks[-1][1] / 2 > block[2] - block[1] / 2:
            members, height, _ = blocks.pop()
            together, tall = members + block[0], height + block[1]
            offset, centers = -tall / 2, []
            for member in together:
                centers.append(wanted[member] - (offset + sizes[member] / 2))
                offset += sizes[member]
            block = (together, tall, bounded(tall, sum(centers) / len(centers)))
        blocks.append(block)
    placed = [0.0] * len(wanted)
    for members, height, center in blocks:
        at = center - height / 2
        for member in members:
            placed[member] = at + sizes[member] / 2
            at += sizes[member]
    return placed


def _with_gamma(run: _Run, name: str) -> list[_Series]:
    """The series that have a figure."""
    found = [each for each in run.series if each.rows[name].notna().any()]
    if not found:
        raise _NoDataError(_WHY_NOT[name])
    return found


_WHY_NOT = {
    "speedup": "no speculative configuration has a generation beside one of its baseline",
    "tokens_per_second": "no speculative configuration has finished a generation of two tokens or more",
    "acceptance_rate": "nothing was drafted",
    "predicted_speedup": "the costs of single passes were not measured, or nothing was drafted",
}


def _panels(run: _Run, count: int, height: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """Panels in rows, of the same size whatever their number; those left over are taken away."""
    most = 2 if run.narrow else _PANELS
    columns = min(count, most) if run.narrow or count not in (5, 6) else 3
    lines = math.ceil(count / columns)
    figure = _new_figure(run, height * lines + 0.75, min(_WIDTH, 1.0 + 2.3 * columns))
    grid = figure.subplots(lines, columns, squeeze=False, **shared)
    for axes in grid.flat[count:]:
        axes.remove()
    for i, axes in enumerate(grid.flat[:count]):
        if i + columns >= count:  # nothing below
            axes.tick_params(labelbottom=True)
    return figure, list(grid.flat[:count])


# --- The figures ----------------------------------------------------------------------------------


def _speedup(run: _Run) -> Figure:
    series = _with_gamma(run, "speedup")
    figure = _new_figure(run, 3.0 if run.narrow else 3.6)
    axes = figure.subplots()
    _gamma_axis(axes, [x for each in series for x in each.x])
    ends = _draw_series(axes, series, "speedup")
    levels = [row for row in frames.records(run.levels) if not math.isnan(row["speedup"])]
    _fit_y(axes, [each.rows for each in series], "speedup", 1.0, *(row["speedup"] for row in levels))
    _mark_cut(axes, series, "speedup")
    ends.append(_level(axes, 1.0, "plain = 1"))
    ends += [_level(axes, row["speedup"], _ratio_name(row, "speedup")) for row in levels]
    axes.set_ylabel("speedup (×)" if run.narrow else "speedup over plain decoding (×)")
    _grid(axes)
    _inscribe(figure, run, "Speedup against draft length", run.intervals, _hollow(series))
    _label_ends(axes, ends, run)
    return figure


def _ratio_name(row: dict[str, Any], name: str) -> str:
    label, value, low, high = (
        _short(row["label"], 22),
        *(row[f"{name}{end}"] for end in ("", "_low", "_high")),
    )
    interval = "" if math.isnan(low) else f" [{decimals(low)}, {decimals(high)}]"
    return f"{label} {decimals(value)}{interval}"


def _hollow(series: Sequence[_Series]) -> str:
    return (
        "Hollow, on a dotted level: a rule sets γ; it stands at the mean it drafted."
        if any(each.adapts for each in series)
        else ""
    )


def _tokens_per_second(run: _Run) -> Figure:
    series = _with_gamma(run, "tokens_per_second")
    figure = _new_figure(run, 3.0 if run.narrow else 3.6)
    axes = figure.subplots()
    _gamma_axis(axes, [x for each in series for x in each.x])
    ends = _draw_series(axes, series, "tokens_per_second")
    levels = [
        row
        for row in frames.records(pd.concat([run.plain, run.levels]))
        if not math.isnan(row["tokens_per_second"])
    ]
    known = [row["tokens_per_second"] for row in levels]
    _fit_y(axes, [each.rows for each in series], "tokens_per_second", *known)
    _mark_cut(axes, series, "tokens_per_second")
    ends += [
        _level(
            axes,
            row["tokens_per_second"],
            f"{_short(row['label'], 22)} {decimals(row['tokens_per_second'])}",
        )
        for row in levels
    ]
    axes.set_ylabel("decode speed (tokens/s)")
    _grid(axes)
    remark = "Geometric means over prompts; time to first token apart."
    _inscribe(figure, run, "Decode speed against draft length", remark, run.intervals, _hollow(series))
    _label_ends(axes, ends, run)
    return figure


def _acceptance(run: _Run) -> Figure:
    series = _with_gamma(run, "acceptance_rate")
    figure, (left, right) = _two(run, 3.2, sharey=True)
    panels = ((left, "acceptance_rate", "accepted / drafted"), (right, "alpha", "α of tested drafts"))
    for axes, name, title in panels:
        _gamma_axis(axes, [x for each in series for x in each.x])
        ends = _draw_series(axes, series, name)
        axes.set_ylim(0.0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_title(title)
        _grid(axes)
        axes.set_ylabel("share of tokens" if axes is left or run.narrow else "")
    remarks = (
        "Accepted / drafted falls with γ also where α, the acceptance to be expected of a draft that is tested, stays:"
        " what stands behind a rejection is drafted in vain.",
        "Bars: 95% intervals over prompts." if run.summary["alpha_low"].notna().any() else "",
        _hollow(series),
    )
    _inscribe(figure, run, "Acceptance against draft length", *remarks)
    _label_ends(right, ends, run)
    return figure


def _positions(run: _Run) -> Figure:
    frame = frames.position_frame(run.df, run.steps)
    if frame.empty:
        raise _NoDataError("nothing was drafted")
    if not (frame["tested"] >= _TOO_FEW).any():
        raise _NoDataError(f"at no position {_TOO_FEW} drafts were tested")
    by_config = dict(list(frame.groupby("config", sort=False)))
    chosen = [(each, each.rows.iloc[-1]) for each in run.series if each.rows.iloc[-1]["config"] in by_config]
    figure, (left, right) = _two(run, 3.2, sharey=True)
    panels = ((left, "rate", "of those tested"), (right, "rate_of_drafted", "of those drafted"))
    few = False
    for axes, name, title in panels:
        ends = []
        for each, row in chosen:
            mine = by_config[row["config"]]
            mine = mine[mine["tested" if name == "rate" else "drafted"] >= _TOO_FEW]
            if mine.empty:
                continue
            counted = mine["tested" if name == "rate" else "drafted"].to_numpy()
            x, y = mine["position"].to_numpy(dtype=float), mine[name].to_numpy(dtype=float)
            sure = counted >= _FEW
            few |= not sure.all()
            axes.plot(x, y, color=each.color, linestyle="--" if each.adapts else "-", zorder=2.5)
            axes.plot(x[sure], y[sure], linestyle="none", marker=each.marker, color=each.color, zorder=3)
            axes.plot(
                x[~sure],
                y[~sure],
                linestyle="none",
                marker=each.marker,
                color=each.color,
                markerfacecolor="white",
                zorder=3,
            )
            name_of = each.name_at_gamma.format(row["gamma"])
            ends.append(_End(float(x[-1]), float(y[-1]), name_of, each.color, each.marker, each.color))
        _gamma_axis(axes, frame.loc[frame["drafted"] >= _TOO_FEW, "position"].tolist())
        axes.set_xlabel("position in the draft")
        axes.set_ylim(0.0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_title(f"accepted, {title}")
        _grid(axes)
        axes.set_ylabel("share of tokens" if axes is left or run.narrow else "")
    remark = "Tested: all drafts before it were accepted. Of fixed γ the largest; dashed: a rule sets γ."
    note = f"Hollow: fewer than {_FEW} drafts; fewer than {_TOO_FEW} are not shown." if few else ""
    _inscribe(figure, run, "Acceptance by position", remark, note)
    _label_ends(right, ends, run)
    return figure


def _time(run: _Run) -> Figure:
    rows = [row for each in run.series for row in frames.records(each.rows) if row["ms_per_token"] > 0]
    rows.sort(key=lambda row: run.drafters.index(row["drafter"]))
    if not rows:
        raise _NoDataError("no speculative configuration has finished a step")
    # Rows of bars from the top down, with a gap between drafters.
    places = np.array([i + 0.6 * run.drafters.index(row["drafter"]) for i, row in enumerate(rows)])
    figure = _new_figure(run, (1.55 if run.narrow else 1.35) + 0.17 * (places[-1] + 1))
    axes = figure.subplots()
    left = np.zeros(len(rows))
    total, read = (
        np.array([row[name] for row in rows], dtype=float) for name in ("ms_per_token", "share_draft_prefill")
    )
    for part in PARTS:
        wide = total * np.array([row[f"share_{part}"] for row in rows], dtype=float)
        color = _PART_COLORS[part]
        axes.barh(places, wide, 0.78, left=left, color=color, label=part, edgecolor="white", linewidth=0.3)
        if part == "draft" and (total * read > 0.01 * total.max()).any():
            name = "(of it the prompt)"
            axes.barh(
                places,
                total * read,
                0.78,
                color="none",
                edgecolor="#5A3C00",
                hatch="////",
                linewidth=0,
                label=name,
            )
        left += wide
    plain = run.plain["ms_per_token"].dropna()
    for base in plain:
        axes.axvline(base, color=_BLACK, linewidth=0.9, linestyle=_DASHED)
    if len(plain):
        top = axes.get_xaxis_transform()
        axes.text(
            plain.iloc[0], 1.01, "plain", transform=top, ha="center", va="bottom", fontsize=_points(0.88)
        )
    axes.set_yticks(places, _row_names(rows, run))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.set_xlim(0, 1.05 * max(total.max(), plain.max() if len(plain) else 0.0))
    axes.set_xlabel("time per token (ms)")
    _grid(axes, "x")
    above = axes.transAxes + ScaledTranslation(0, _points(1.4) / 72, figure.dpi_scale_trans)
    axes.legend(
        loc="lower right" if run.narrow else "lower left",
        bbox_to_anchor=(1.0 if run.narrow else 0.0, 1.0),
        bbox_transform=above,
        borderaxespad=0.0,
        ncols=3 if run.narrow else 6,
        frameon=False,
        handlelength=1.0,
        handletextpad=0.5,
        columnspacing=1.2,
    )
    remark = "Time of all steps over all emitted tokens; time to first token apart. Dashed: plain decoding."
    _inscribe(figure, run, "Where the time goes", remark)
    return figure


def _prediction(run: _Run) -> Figure:
    series = _with_gamma(run, "predicted_speedup")
    figure, panels = _two(run, 3.3, sharex=True, sharey=True)
    names = (
        ("predicted_speedup", "from acceptance by position"),
        ("predicted_speedup_iid", "from α alone (i.i.d. tests)"),
    )
    rows = pd.concat([each.rows for each in series])
    spans = [_span(rows, name) for name in ("speedup", "predicted_speedup", "predicted_speedup_iid")]
    low, high = min(1.0, *(span[0] for span in spans)) / 1.04, max(1.0, *(span[1] for span in spans)) * 1.04
    for axes, (name, title) in zip(panels, names, strict=True):
        axes.plot((low, high), (low, high), color=_GREY, linewidth=0.9, zorder=1)
        axes.axhline(1.0, color="#BBBBBB", linewidth=0.7, zorder=0.9)
        axes.axvline(1.0, color="#BBBBBB", linewidth=0.7, zorder=0.9)
        for each in series:
            x, x_low, x_high = (
                each.rows[f"{name}{end}"].to_numpy(dtype=float) for end in ("", "_low", "_high")
            )
            y, y_low, y_high = (
                each.rows[f"speedup{end}"].to_numpy(dtype=float) for end in ("", "_low", "_high")
            )
            axes.vlines(x, y_low, y_high, color=each.color, linewidth=0.7, alpha=0.5)
            axes.hlines(y, x_low, x_high, color=each.color, linewidth=0.7, alpha=0.5)
            axes.plot(
                x,
                y,
                linestyle="none",
                marker=each.marker,
                color=each.color,
                markerfacecolor=each.face,
                zorder=3,
            )
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.set_aspect("equal", adjustable="box")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.set_xlabel("predicted speedup (×)")
        axes.set_ylabel("measured speedup (×)" if axes is panels[0] or run.narrow else "")
        axes.set_title(title)
        _grid(axes, "both")
    remarks = (
        "One mark per γ. Predicted from the times of single passes: c of the drafter, v(γ+1) of the target.",
        "On the line they agree; below it something else takes time.",
        run.intervals,
    )
    _inscribe(figure, run, "Predicted against measured speedup", *remarks)
    named = [_End(high, 0.0, each.name, each.color, each.marker, each.face) for each in series]
    if run.narrow:
        _legend_below(panels[-1], named, run)
    else:
        keys = [_key(end, [0], [0]) for end in named]
        for key in keys:
            key.set_linestyle("none")
        figure.legend(
            keys, [end.name for end in named], loc="outside right center", frameon=False, handletextpad=0.2
        )
    return figure


def _categories(run: _Run) -> Figure:
    frame = frames.category_frame(run.df)
    frame = frame[frame["speedup"].notna()]
    if frame.empty:
        raise _NoDataError(_WHY_NOT["speedup"])
    known = {row["config"]: row for row in frames.records(run.summary)}
    rows = [known[config] for config in dict.fromkeys(frame["config"])]
    row_of = {row["config"]: i for i, row in enumerate(rows)}
    names = _row_names(rows, run)
    categories = list(dict.fromkeys(frame["category"]))
    without = frame[frame["speedup_low"].isna()]
    plain_cells = len(without) == len(frame)  # ratios alone take less room
    line = 0.17 if plain_cells else 0.27  # inches of a row
    heads = {name: _short(name, 18).replace("-", "-\n", 1) for name in categories}
    longest = max(len(part) for head in heads.values() for part in head.split("\n"))
    wide = max(0.046 if plain_cells else 0.07, 0.0068 * longest) * _points(1.0)  # inches of a cell
    beside = 0.25 + 0.0068 * _points(1.0) * max(map(len, names)) + (0.0 if run.narrow else 0.6)
    width = run.look.width or max(4.2, min(9.5, beside + 1.1 * wide * len(categories)))
    lines = math.ceil(len(categories) / max(1, int((width - beside) / wide)))
    each = math.ceil(len(categories) / lines)  # categories beside each other
    figure = _new_figure(run, 0.85 + lines * (0.45 + line * len(rows)), width)
    panels = figure.subplots(lines, 1, squeeze=False)[:, 0]
    widest = max(float(np.abs(np.log(frame["speedup"])).max()), math.log(1.25))
    cells = frames.records(frame)
    for number, axes in enumerate(panels):
        mine = categories[number * each : (number + 1) * each]
        column_of = {category: i for i, category in enumerate(mine)}
        here = [cell for cell in cells if cell["category"] in column_of]
        grid = np.full((len(rows), len(mine)), np.nan)
        for cell in here:
            grid[row_of[cell["config"]], column_of[cell["category"]]] = math.log(cell["speedup"])
        image = axes.imshow(grid, cmap=_SLOWER_FASTER, norm=TwoSlopeNorm(0.0, -widest, widest), aspect="auto")
        for cell in here:
            ink = "white" if abs(math.log(cell["speedup"])) > 0.72 * widest else "black"
            _write_cell(axes, column_of[cell["category"]], row_of[cell["config"]], cell, ink)
        axes.set_xticks(range(len(mine)), [heads[name] for name in mine])
        axes.set_xlim(-0.5, each - 0.5)
        axes.xaxis.tick_top()
        axes.set_yticks(range(len(rows)), names)
        axes.tick_params(length=0, labelsize=_points(0.85))
        axes.spines[:].set_visible(False)
        for i in range(1, len(rows)):
            if rows[i]["drafter"] != rows[i - 1]["drafter"]:
                axes.axhline(i - 0.5, color="white", linewidth=2.5)
    if not run.narrow:
        _speedup_bar(figure, panels, image, widest, lines * line * len(rows))
    counts = frame["prompts"]
    prompts = f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
    means = f"Geometric means over prompts ({prompts} per category)"
    remarks = (
        f"{means}." if plain_cells else f"{means}, below them the 95% intervals. Bold: 1 is not in it.",
        "*: one prompt; over its repeats." if (frame["speedup_basis"] == "repeats").any() else "",
        f"No interval: {'one run of one prompt' if (without['prompts'] == 1).all() else 'too few prompts'}."
        if len(without)
        else "",
    )
    _inscribe(figure, run, "Speedup by category", *remarks)
    return figure


_SLOWER_FASTER = LinearSegmentedColormap.from_list(
    "slower-faster", ["#B34A00", "#F3B58A", "#F7F7F7", "#8DBEE0", "#00568A"]
)


def _write_cell(axes: Axes, x: int, y: int, cell: dict[str, Any], ink: str) -> None:
    """A ratio, above its interval if it has one."""
    low, high = cell["speedup_low"], cell["speedup_high"]
    weight = "normal" if cell["verdict"] == "cannot tell" else "bold"
    middle: Any = {"ha": "center", "va": "center", "color": ink}
    ratio, size = decimals(cell["speedup"]), _points(0.83)
    alone = math.isnan(low)
    axes.text(x, y if alone else y - 0.17, ratio, fontsize=size, weight=weight, **middle)
    if not alone:
        star = "*" if cell["speedup_basis"] == "repeats" else ""
        axes.text(x, y + 0.24, f"{_end(low)}–{_end(high)}{star}", fontsize=_points(0.63), **middle)


def _speedup_bar(figure: Figure, panels: Any, image: Any, widest: float, height: float) -> None:
    """The scale of the colours, in speedups; ``height`` is that of the cells in inches."""
    ratios = (0.2, 0.25, 0.33, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0)
    ticks = [ratio for ratio in ratios if abs(math.log(ratio)) <= widest]
    if height < 0.17 * len(ticks):  # no room for all
        ticks = [ticks[0], 1.0, ticks[-1]]
    bar = figure.colorbar(
        image,
        ax=list(panels),
        ticks=[math.log(tick) for tick in ticks],
        fraction=0.025,
        pad=0.01,
        aspect=max(12, height / 0.27),
    )
    bar.ax.set_yticklabels([f"{tick:g}" for tick in ticks])
    bar.ax.tick_params(labelsize=_points(0.81), length=2)
    bar.ax.spines[:].set_visible(False)
    bar.set_label("speedup (×)", fontsize=_points(0.88))


def _end(value: float) -> str:
    """An end of an interval in a cell; what two prompts leave open is not worth its digits."""
    return "0" if value < 0.005 else ">99" if value > 99 else f"{value:.2f}" if value < 10 else f"{value:.0f}"


_RARE = 0.01  # share of steps, below which the last numbers of accepted drafts are not drawn


def _accepted_length(run: _Run) -> Figure:
    frame = frames.accepted_frame(run.df, run.steps)
    by_config = dict(list(frame.groupby("config", sort=False)))
    chosen = []
    for each in run.series:
        rows = each.rows[each.rows["config"].isin(list(by_config))]
        # With one draft there is no length to speak of: a step accepts it or not.
        rows = rows[[by_config[config]["accepted"].max() > 1 for config in rows["config"]]]
        if len(rows):
            ranked = rows["speedup"].fillna(0.0) if rows["speedup"].notna().any() else rows["tokens_per_step"]
            chosen.append((each, rows.iloc[int(ranked.to_numpy().argmax())]))
    if not chosen:
        raise _NoDataError("no step drafted more than one token" if by_config else "nothing was drafted")
    figure, panels = _panels(run, len(chosen), 2.0, sharey=True)
    cut = False
    for axes, (each, row) in zip(panels, chosen, strict=True):
        mine = by_config[row["config"]]
        mean = float((mine["accepted"] * mine["share"]).sum())
        undrafted = float(mine["undrafted"].iloc[0])
        seen = mine["accepted"][(mine[["share", "share_iid"]] >= _RARE).any(axis=1)].max()
        cut |= bool(mine["accepted"].max() > seen)
        mine = mine[mine["accepted"] <= seen]
        x = mine["accepted"].to_numpy()
        axes.bar(x, mine["share"], 0.8, color=each.color)
        axes.plot(
            x,
            mine["share_iid"],
            linestyle="none",
            marker="o",
            markersize=3.5,
            color=_BLACK,
            markerfacecolor="white",
            zorder=3,
        )
        below = f"mean {mean:.2f}" + (f"; {undrafted:.0%} empty" if undrafted >= 0.005 else "")
        name = _two_lines(each.name_at_gamma.format(row["gamma"]))
        axes.set_title(name, fontsize=_points(0.94), pad=_points(1.75))
        axes.text(0.0, 1.03, below, transform=axes.transAxes, fontsize=_points(0.79), color="#505050")
        axes.xaxis.set_major_locator(FixedLocator(x[:: max(1, math.ceil(len(x) / 7))].tolist()))
        axes.set_xlim(-0.6, max(x.max(), 4) + 0.6)
        axes.set_xlabel("accepted drafts")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        _grid(axes)
        if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            axes.set_ylabel("share of steps")
    top = max(float(by_config[row["config"]][["share", "share_iid"]].max().max()) for _, row in chosen)
    panels[0].set_ylim(0, 1.08 * top)
    remarks = (
        "Steps that drafted something; of fixed γ above 1 the fastest.",
        "Circles: what α would give if tests passed independently.",
        f"Numbers with shares below {_RARE:.0%} at the end are not shown." if cut else "",
        "Empty: share of all steps that drafted nothing." if (frame["undrafted"] >= 0.005).any() else "",
    )
    _inscribe(figure, run, "Accepted drafts per step", *remarks)
    return figure


def _generation(run: _Run) -> Figure:
    row = _one_generation(run)
    drafted, accepted = np.asarray(row["steps_drafted"]), np.asarray(row["steps_accepted"])
    first = int(row["new_tokens"]) - int(np.sum(row["steps_emitted"]))
    edges = first + np.concatenate(([0], np.cumsum(row["steps_emitted"])))
    notes = _drawable(_notes(row["steps_policy"], len(drafted)))
    figure = _new_figure(run, (3.8 if notes else 2.7) * (0.9 if run.narrow else 1.0))
    both = figure.subplots(
        2 if notes else 1, 1, sharex=True, squeeze=False, height_ratios=[1.2, 1.0] if notes else None
    )[:, 0]
    upper = both[0]
    upper.stairs(accepted, edges, fill=True, color=_SKY, alpha=0.75, label="accepted")
    upper.stairs(drafted, edges, color=_BLUE, linewidth=1.2, baseline=None, label="drafted (γ)")
    upper.set_ylim(0, max(1, int(drafted.max(initial=1))) * 1.12)
    upper.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    upper.set_ylabel("tokens in the step")
    upper.set_xlim(edges[0], edges[-1])
    _grid(upper)
    upper.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.2,
        ncols=2,
        frameon=False,
        labelcolor=_INK,
    )
    end = float(edges[-1])
    if notes:
        lower = both[1]
        noted = []
        for number, (name, values) in enumerate(notes.items()):
            color = _COLORS[(number + 1) % len(_COLORS)]
            lower.plot(
                (edges[:-1] + edges[1:]) / 2,
                values,
                color=color,
                linewidth=1.2,
                linestyle=("-", "--", ":")[number % 3],
            )
            there = np.flatnonzero(np.isfinite(values))
            noted.append(_End(end, float(values[there[-1]]), _short(name, 20), color))
        lower.set_ylabel(
            "entropy / log V" if all(name.startswith("H") for name in notes) else "noted by the rule"
        )
        lower.set_ylim(bottom=min(0.0, *(float(np.nanmin(values)) for values in notes.values())))
        _grid(lower)
    both[-1].set_xlabel("token of the output")
    which = f"Prompt {_short(row['prompt'], 40)}, {_short(row['label'], 48)}: the most usual in its tokens per step."
    remark = "A column is a step, as wide as the tokens it emitted."
    meanings = [f"{name}: {_NOTES[name]}." for name in notes if name in _NOTES]
    _inscribe(figure, run, "One generation, step by step", which, remark, *meanings)
    if notes:
        _label_ends(lower, noted, run)
    return figure


_NOTES = {
    "H_norm": "entropy of the drafter's prediction over log V, V the size of the vocabulary (0: certain, 1: no idea)",
    "H_ema": "its moving average, which sets γ",
    "survival": "chance that the whole draft is accepted, as the rule sees it",
    "lambda": "the least chance of acceptance to go on drafting",
    "threshold": "the least probability of a draft to go on drafting",
}
"""What the notes of rules mean."""


def _one_generation(run: _Run) -> dict[str, Any]:
    """Of one configuration the generation with the most usual number of tokens per step. The configuration is one whose
    rule notes an entropy, or else anything, or else the fastest; γ above 1 goes first."""
    df = run.df
    # As arrays: pandas copies a frame's attributes, here a whole run.json, whenever a column is taken.
    configs, drafted, policies = (df[name].to_numpy() for name in ("config", "steps_drafted", "steps_policy"))
    chosen = ((df["status"] == "ok") & (df["kind"] == "speculative")).to_numpy()
    drafting = [int(i) for i in np.flatnonzero(chosen) if np.any(drafted[i])]
    if not drafting:
        raise _NoDataError("nothing was drafted")
    noting = [i for i in drafting if _drawable(_notes(policies[i], len(drafted[i])))]
    noting.sort(key=lambda i: not any(name.startswith("H") for name in policies[i]))
    longer = {configs[i] for i in drafting if np.max(drafted[i]) > 1}
    speedups = run.summary.set_index("config")["speedup"].fillna(0.0)
    names = [name for name in dict.fromkeys(configs[drafting]) if name in longer or not longer]
    config = str(configs[noting[0]] if noting else speedups.reindex(names).idxmax())
    emitted = df["steps_emitted"].to_numpy()
    usual = float(run.summary.set_index("config")["tokens_per_step"].loc[config])
    mine = [i for i in noting or drafting if configs[i] == config]
    place = min(mine, key=lambda i: abs(float(np.mean(emitted[i])) - usual))
    return {str(name): df[name].iat[place] for name in df.columns}


def _notes(policy: Any, steps: int) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """What the rule noted in every step."""
    found = {one_line(name): np.asarray(values, dtype=float) for name, values in (policy or {}).items()}
    return {name: values for name, values in found.items() if steps and len(values) == steps}


def _drawable(
    notes: dict[str, np.ndarray[Any, np.dtype[np.float64]]],
) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Notes that are shares or entropies: γ has an axis of its own, and times and rates have another scale.

    An average without a memory repeats what it is of, and is left out, as is what never changes.
    """
    others = ("gamma", "γ", "rate", "probe", "drafter_pass_s", "rest_s")
    found: dict[str, np.ndarray[Any, np.dtype[np.float64]]] = {}
    for name, values in notes.items():
        repeated = any(np.array_equal(values, known, equal_nan=True) for known in found.values())
        finite = values[np.isfinite(values)]
        if not name.lower().startswith(others) and not repeated and len(finite) and np.ptp(finite) > 0:
            found[name] = values
    return found


FIGURES: dict[str, tuple[Callable[[_Run], Figure], str]] = {
    "speedup": (_speedup, "speedup against γ, one line per drafter"),
    "tokens-per-second": (_tokens_per_second, "decode speed against γ"),
    "acceptance": (_acceptance, "acceptance rate and α against γ"),
    "positions": (_positions, "acceptance by position in the draft"),
    "time": (_time, "where the time goes"),
    "prediction": (_prediction, "predicted against measured speedup"),
    "categories": (_categories, "speedup by category and configuration"),
    "accepted-length": (_accepted_length, "accepted drafts per step"),
    "generation": (_generation, "draft length, acceptance and entropy over one generation"),
}
"""Every figure by name: what draws it, and a line about it."""
