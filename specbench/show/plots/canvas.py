"""What all figures have in common: registry, the run as it is drawn, letters, colors, axes, legends and captions.

Colors are Okabe and Ito's (2008), with a dark red in place of their yellow, told apart by the color-blind; markers
carry the same distinction again.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib import rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from specbench.base.record import Estimate
from specbench.base.textsafe import counted, one_line
from specbench.results.requests import is_closed
from specbench.results.results import Results
from specbench.results.run import FOREIGN, Environment, RunConfig
from specbench.results.stats import Floats
from specbench.results.summary import SummaryRow, summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, _VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, SKY, _RED, BLACK, GRAY = "#CC79A7", "#56B4E9", "#882255", "#000000", "#7A7A7A"
COLORS = (BLUE, _VERMILLION, GREEN, PURPLE, ORANGE, SKY, _RED, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
WIDTH = 6.8  # inches: two columns of a paper
INK = "#303030"
DASHED = (0, (4, 3))
_LEVELS: Any = (DASHED, (0, (6, 2, 1, 2)), (0, (1, 1.5)), (0, (9, 3)))
_NAME = 30  # characters of a name in a figure
_DODGE = 0.08  # of the distance between two γ, so that intervals do not hide each other
STYLE: Any = {
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
SIZES = {
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


def letter_size(share: float) -> float:
    """A size of letters relative to that of the figure."""
    return share * float(rcParams["font.size"])


class NoDataError(Exception):
    """The run has nothing to show in this figure; the message says why."""


# --- Registry -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """A figure that a run may have.

    Attributes:
        build: Draws it.
        about: What it shows, in a line.
        table: Heading of the report's table that has its numbers; empty without one.
        of_servers: Whether servers can be drawn, of which no single steps are known.
    """

    build: Callable[[Run], Figure]
    about: str
    table: str
    of_servers: bool


FIGURES: dict[str, Kind] = {}
"""Every figure by name."""


def figure(
    name: str, about: str, *, table: str = "", of_servers: bool = False
) -> Callable[[Callable[[Run], Figure]], Callable[[Run], Figure]]:
    """Enter a function into ``FIGURES``; the arguments are the fields of ``Kind``.

    ``specbench plot --help`` finds the name in the source text, so ``@figure("name"`` begins a line.
    """

    def enter(build: Callable[[Run], Figure]) -> Callable[[Run], Figure]:
        FIGURES[name] = Kind(build, about, table, of_servers)
        return build

    return enter


# --- What is drawn --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Series:
    """Configurations that differ in γ only: one line.

    Attributes:
        name: The drafter, the draft policy and the temperature, as far as they tell series apart.
        parts: Of the name: drafter, policy, temperature and load; empty where there is nothing to tell apart.
        rows: By rising x.
        x: γ, or for a policy that decides by itself the mean of what it drafted.
        adapts: Whether a policy decides.
    """

    name: str
    parts: tuple[str, str, str, str]
    drafter: str
    rows: Sequence[SummaryRow]
    x: np.ndarray[Any, np.dtype[np.float64]]
    adapts: bool
    color: str
    marker: str

    def name_at(self, row: SummaryRow) -> str:
        """The name with the γ of one of its rows; without it where a policy decides."""
        return _joined(self.parts, f"γ = {row.config.gamma}")

    @property
    def face(self) -> str:
        """Fill of the markers: hollow where a policy decides γ."""
        return "white" if self.adapts else self.color


class Run:
    """A run and what several figures need of it."""

    def __init__(self, results: Results, look: Look) -> None:
        self.results = results
        self.look = look
        self.width = look.width or WIDTH
        self.run = results.run
        self.summary = summarize(results)
        self.rows = self.summary.rows
        self.plain = self._of_kind("plain")
        self.servers = self._of_kind("server")
        # Others' decoding has no γ that is known here: a level to compare with.
        self.levels = self._of_kind(*FOREIGN)
        self.series = _series_of(self._of_kind("speculative"))
        self.drafters = list(dict.fromkeys(each.drafter for each in self.series))

    def _of_kind(self, *kinds: str) -> list[SummaryRow]:
        return [row for row in self.rows if row.config.kind in kinds]

    @cached_property
    def caption(self) -> list[str]:
        """Machine, models, prompts and tokens."""
        run, target = self.run, self.run.target
        prompts, repeats = (self.results.done[name].nunique() for name in ("prompt", "repeat"))
        temperatures = sorted({row.config.temperature for row in self.rows})
        dtype = f" ({one_line(target.dtype)})" if target.dtype else ""
        most = "" if run.ignore_eos else "≤ "
        tokens = f" × {most}{run.max_new_tokens} tokens" if run.max_new_tokens else ""
        parts = [
            _machine(run.environment, target.device or "cpu"),
            f"target {short(target.name or 'unknown', 48)}{dtype}",
            f"{counted(prompts, 'prompt')}{tokens} × {counted(repeats, 'repeat')}",
            "greedy" if temperatures == [0.0] else f"temperature {', '.join(f'{t:g}' for t in temperatures)}",
            f"specbench {one_line(run.specbench)}".strip(),
        ]
        return [part for part in parts if part]

    @property
    def intervals(self) -> str:
        """What the intervals of speedups are over."""
        bases = {row.speedup.basis for row in self.rows} - {None}
        side_by_side = self.summary.side_by_side
        if bases == {"repeats"}:
            one = "group of prompts" if side_by_side else "prompt"
            return f"Bars: 95% intervals over the repeats of the one {one}; they hold within it only."
        over = "groups of prompts decoded side by side" if side_by_side else "prompts"
        return f"Bars: 95% intervals over {over}." if bases else "Too few prompts or repeats: no intervals."


def _series_of(rows: Sequence[SummaryRow]) -> list[Series]:
    """Lines of a figure, colored by what differs most: the drafter, the policy, the temperature or the load."""
    keys = list(dict.fromkeys(map(_key, rows)))
    values = [list(dict.fromkeys(column)) for column in zip(*keys, strict=True)]
    several = [len(each) > 1 for each in values]
    colored = max(range(len(values)), key=lambda i: len(values[i]), default=0)  # of equals the first
    out = []
    for number, key in enumerate(keys):
        mine = [row for row in rows if _key(row) == key and not math.isnan(_length(row))]
        if not mine:
            continue
        mine.sort(key=_length)
        parts = (
            short(key.drafter, _NAME) if several[0] else "",
            "" if key.policy == "fixed" else short(key.policy, 20),
            f"T = {key.temperature:g}" if several[2] else "",
            key.load if several[3] else "",
        )
        name = _joined(parts, "" if parts[0] else "fixed γ")
        color = COLORS[values[colored].index(key[colored]) % len(COLORS)]
        marker = MARKERS[number % len(MARKERS)]
        x = np.array([*map(_length, mine)])
        out.append(Series(name, parts, key.drafter, mine, x, key.policy != "fixed", color, marker))
    return out


class _Key(NamedTuple):
    """What all configurations of a series have in common."""

    drafter: str
    policy: str
    temperature: float
    load: str


def _key(row: SummaryRow) -> _Key:
    config = row.config
    return _Key(config.drafter, config.draft_policy, config.temperature, _load(config))


def _length(row: SummaryRow) -> float:
    """γ, or what a policy came to on average."""
    return row.mean_gamma if row.config.gamma is None else float(row.config.gamma)


def _joined(parts: tuple[str, str, str, str], gamma: str) -> str:
    """A name of its parts, with this in place of a policy where there is none."""
    drafter, policy, *others = parts
    return ", ".join(part for part in (drafter, policy or gamma, *others) if part)


def _load(config: RunConfig) -> str:
    """The batch, and how its requests came if not from as many clients; empty without one."""
    if config.batch is None:
        return ""
    batch = f"batch {config.batch}"
    return batch if is_closed(config) else f"{batch}, {one_line(config.arrivals or '')}"


def row_names(rows: Sequence[SummaryRow], run: Run) -> list[str]:
    """Names of configurations that stand below each other: a drafter is named where its rows begin, and an only one
    in the title."""
    names, before = [], None
    several = len({row.config.temperature for row in run.rows}) > 1
    for config in (row.config for row in rows):
        parts = [
            "" if config.draft_policy == "fixed" else short(config.draft_policy, 20),
            "" if config.gamma is None else f"γ = {config.gamma}",
            f"T = {config.temperature:g}" if several else "",
            _load(config),
        ]
        if config.kind != "speculative":
            parts = [short(config.label, _NAME)]
        elif config.drafter != before and len(run.drafters) > 1:
            parts = [f"{short(config.drafter, _NAME)}:", *parts]
        before = config.drafter
        names.append(" ".join(part for part in parts if part))
    return names


def _machine(environment: Environment, device: str) -> str:
    """What the target ran on."""
    devices = Counter(map(one_line, environment.devices or []))
    if device != "cpu" and devices:
        return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in devices.items())
    threads = environment.threads
    parts = (one_line(environment.cpu or ""), counted(threads, "thread") if threads else "")
    return ", ".join(part for part in parts if part)


def short(text: object, limit: int) -> str:
    """A name shortened in its middle: the ends of models' names say most."""
    name = one_line(text)
    if name.startswith("_"):  # matplotlib leaves such labels out of legends
        name = f" {name}"
    if len(name) <= limit:
        return name
    head = (limit - 1) // 2
    return f"{name[:head]}…{name[len(name) - (limit - 1 - head) :]}"


# --- Common parts ---------------------------------------------------------------------------------


def new_figure(run: Run, height: float, width: float | None = None) -> SubFigure:
    """What lies between title and caption of a new figure; its height, in inches, is that for letters of 8 points."""
    figure = Figure((run.look.width or width or WIDTH, height * letter_size(1.0) / 8), layout="constrained")
    FigureCanvasAgg(figure)  # one renderer for all layouts, which remembers how large each text is
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.06, h_pad=0.05, wspace=0.03, hspace=0.03)
    body = figure.subfigures()  # apart, so that a legend below it takes no place of the caption's
    assert isinstance(body, SubFigure)
    return body


def panels(
    run: Run, count: int, height: float, ylabel: str = "", narrowest: int = 20, **shared: Any
) -> tuple[SubFigure, list[Axes]]:
    """Panels of ``height`` inches beside each other, in as many rows as it takes.

    Args:
        run: What is drawn.
        count: Number of panels.
        height: Of one, as in ``new_figure``.
        ylabel: Of the first in every row.
        narrowest: Least width of a panel, in letters.
        **shared: Which axes they share, as ``Figure.subplots`` takes it.
    """
    lines = math.ceil(count / max(1, int(72 * run.width / (narrowest * run.look.font_size))))
    columns = math.ceil(count / lines)
    panel = narrowest * run.look.font_size / 72
    body = new_figure(run, height * lines + 0.75, min(WIDTH, 1.0 + 1.6 * panel * columns))
    grid = list(body.subplots(lines, columns, squeeze=False, **shared).flat)
    for axes in grid[count:]:
        axes.remove()
    for i, axes in enumerate(grid[:count]):
        axes.tick_params(labelbottom=i + columns >= count or not shared.get("sharex"))
        axes.set_ylabel("" if i % columns else ylabel)
    return body, grid[:count]


def finish(body: SubFigure, run: Run, title: str, *remarks: str) -> Figure:
    """Add the legend, the title above, with the drafter if there is only one, and the caption below."""
    _legend(body)
    figure = body.get_figure(root=True)
    assert isinstance(figure, Figure)
    if not run.look.framed:
        return figure
    if len(run.drafters) == 1:
        title = f"{title}: {short(run.drafters[0], 40)}"
    letters = 72 * figure.get_figwidth() / run.look.font_size  # in a line, if they are as wide as high
    titles = textwrap.wrap(title, int(1.35 * letters))
    figure.suptitle("\n".join(titles), x=0.01, ha="left")
    width = int(2.3 * letters)  # in characters of the caption's size
    lines = [""]
    for part in run.caption:  # broken between its parts only
        joined = f"{lines[-1]} · {part}" if lines[-1] else part
        lines = [*lines[:-1], joined] if len(joined) <= width else [*lines, part]
    lines = [*textwrap.wrap(" ".join(remark for remark in remarks if remark), width), *lines]
    _grow(figure, 1.45 * (len(titles) - 1) + 1.1 * max(0, len(lines) - 2))
    figure.supxlabel(
        "\n".join(lines), x=0.01, ha="left", fontsize=letter_size(0.79), color="#505050", linespacing=1.35
    )
    return figure


def _legend(body: SubFigure) -> None:
    """Name below the axes whatever has a label, each label once, in as many columns as fit."""
    found: dict[str, Any] = {}
    for axes in body.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if not found:
        return
    figure = body.get_figure(root=True)
    assert isinstance(figure, Figure)
    letters = 72 * figure.get_figwidth() / (0.58 * letter_size(0.94))
    names = [short(label, max(8, int(letters) - 8)) for label in found]
    columns = max(1, min(len(names), int(letters / (max(map(len, names)) + 5.5))))
    style: Any = {"frameon": False, "labelcolor": INK, "handlelength": 1.6, "columnspacing": 1.2}
    body.legend(list(found.values()), names, loc="outside lower left", ncols=columns, **style)
    _grow(figure, 1.4 * (math.ceil(len(names) / columns) + 0.3))


def _grow(figure: Figure, lines: float) -> None:
    """Make a figure higher by lines of text."""
    figure.set_figheight(figure.get_figheight() + lines * letter_size(1.0) / 72)


def grid_lines(axes: Axes, axis: str = "y") -> None:
    axes.grid(axis=axis, color="#E4E4E4", linewidth=0.6)  # type: ignore[arg-type]


def gamma_axis(axes: Axes, values: Sequence[float]) -> None:
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


def dodged(series: Sequence[Series]) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    """The x of every series, moved apart a little."""
    every = np.unique(np.concatenate([each.x for each in series]))
    step = float(np.diff(every).min()) if len(every) > 1 else 1.0
    step = min(1.0, max(step, (every[-1] - every[0]) / 20 if len(every) > 1 else 1.0))
    offsets = (np.arange(len(series)) - (len(series) - 1) / 2) * _DODGE * step * min(1.0, 8 / len(series))
    return [each.x + offset for each, offset in zip(series, offsets, strict=True)]


def fit_y(axes: Axes, rows: Sequence[SummaryRow], name: str, *include: float) -> None:
    """Limits that show every value, and of wide intervals at least a part; those that are cut get an arrowhead."""
    bottom, top = span(rows, name)
    bottom, top = min(bottom, *include), max(top, *include)
    margin = 0.06 * (top - bottom) or 0.1 * top
    axes.set_ylim(max(0.0, bottom - margin), top + margin)


def estimates(rows: Sequence[SummaryRow], name: str) -> tuple[Floats, Floats, Floats]:
    """Values of a figure of rows, and ends of their intervals; NaN where there is none."""
    found: list[Estimate] = [getattr(row, name) for row in rows]
    ends = [
        (each.value, *(math.nan if end is None else end for end in (each.low, each.high))) for each in found
    ]
    value, low, high = np.array(ends, dtype=np.float64).reshape(-1, 3).T
    return value, low, high


def all_rows(series: Sequence[Series]) -> list[SummaryRow]:
    """The rows of several series."""
    return [row for each in series for row in each.rows]


def span(rows: Sequence[SummaryRow], name: str) -> tuple[float, float]:
    """Lowest and highest value with their intervals, of each as much as lies within a factor of 1.6."""
    y, low, high = estimates(rows, name)
    low, high = np.fmax(low, y / 1.6), np.fmin(high, y * 1.6)
    low, high = np.fmin(low, y), np.fmax(high, y)
    return float(np.nanmin(low)), float(np.nanmax(high))


def mark_cut(axes: Axes, series: Sequence[Series], name: str) -> None:
    """Arrowheads where intervals go on beyond the axes."""
    bottom, top = axes.get_ylim()
    for each, x in zip(series, dodged(series), strict=True):
        _, low, high = estimates(each.rows, name)
        for cut, at, marker in ((high > top, top, "^"), (low < bottom, bottom, "v")):
            if cut.any():
                axes.plot(
                    x[cut], np.full(cut.sum(), at), marker, color=each.color, markersize=3, clip_on=False
                )


def draw_levels(axes: Axes, levels: Mapping[str, float]) -> None:
    """Horizontal lines to compare with, by name."""
    for number, (name, y) in enumerate(levels.items()):
        dashes = _LEVELS[number % len(_LEVELS)]
        axes.axhline(y, color=GRAY, linewidth=0.9, linestyle=dashes, zorder=1.5, label=name)


def draw_series(axes: Axes, series: Sequence[Series], figure_name: str) -> None:
    """Lines with intervals, in axes whose x is set.

    A policy stands at the mean γ it came to, on a level across the figure to compare the lengths with.
    """
    for each, x in zip(series, dodged(series), strict=True):
        y, low, high = estimates(each.rows, figure_name)
        there = np.isfinite(y)
        if not there.any():
            continue
        if each.adapts:
            axes.axhline(y[there][-1], color=each.color, linewidth=0.7, linestyle=(0, (1, 2)), zorder=1.6)
        axes.plot(
            x[there], y[there], linestyle="none" if each.adapts else "-", color=each.color, marker=each.marker,
            markerfacecolor=each.face, markeredgewidth=1.0, zorder=3, label=each.name,
        )  # fmt: skip
        sure = there & ~np.isnan(low) & ~np.isnan(high)
        axes.vlines(x[sure], low[sure], high[sure], color=each.color, linewidth=0.9, alpha=0.75, zorder=2.5)


def with_gamma(run: Run, name: str) -> list[Series]:
    """The series that have a figure."""
    found = [each for each in run.series if np.isfinite(estimates(each.rows, name)[0]).any()]
    if not found:
        raise NoDataError(WHY_NOT[name])
    return found


WHY_NOT = {
    "speedup": "no speculative configuration has a generation beside one of its baseline",
    "tokens_per_second": "no speculative configuration has finished a generation of two tokens or more",
    "acceptance_rate": "nothing was drafted",
    "predicted_speedup": "the costs of single passes were not measured, nothing was drafted, or others used the"
    " processor most of the time",
}


def hollow(series: Sequence[Series]) -> str:
    return (
        "Hollow, on a dotted level: a policy sets γ; it stands at the mean it drafted."
        if any(each.adapts for each in series)
        else ""
    )
