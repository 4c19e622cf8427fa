"""Common parts of all figures: data, names and colors of lines, axes, legends and captions.

Colors are those of Okabe and Ito (2008), which the color-blind can distinguish, with a dark red in place of their
yellow. Lines that differ in color differ in their markers too.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import BarContainer
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FixedLocator, MaxNLocator

from specbench.base.textsafe import counted, one_line
from specbench.results.metrics import Figures
from specbench.results.run import FOREIGN, Environment
from specbench.results.stats import Floats
from specbench.results.summary import Summary
from specbench.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, VERMILION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, SKY, _RED, BLACK, GRAY = "#CC79A7", "#56B4E9", "#882255", "#000000", "#7A7A7A"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, _RED, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
WIDTH = 6.8  # inches: two columns of a paper
FONT_SIZE = 8.0  # points
INK = "#303030"
DASHED = (0, (4, 3))
_LEVELS: Any = (DASHED, (0, (6, 2, 1, 2)), (0, (1, 1.5)), (0, (9, 3)))
NAME = 30  # characters of a name in a figure
_MOST_TICKS = 12  # γ that are all named
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same everywhere
    "font.size": FONT_SIZE,
    "axes.titlesize": FONT_SIZE,
    "axes.labelsize": FONT_SIZE,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.5,
    "figure.titlesize": 9.5,
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
    "svg.hashsalt": "specbench",
    "pdf.fonttype": 42,
}


class NoDataError(Exception):
    """The run has nothing to show in this figure; the message says why."""


# --- What is drawn --------------------------------------------------------------------------------


_Key = tuple[str, str, float, str]


def _key(config: Row) -> _Key:
    """Return what configurations of one series share: they differ in γ only."""
    return config.drafter, config.draft_policy, config.condition.temperature, _load(config)


@dataclass(frozen=True, slots=True)
class Series:
    """Configurations that a figure shows as one line.

    Attributes:
        parts: Drafter, draft policy, temperature and workload; a part that is the same in all series is empty.
        rows: Rows of the summary, by rising x.
        x: γ, or the mean draft length if the policy adapts it; or the logarithm of a batch size or context.
        adapts: Whether the draft policy adapts the draft length, which hollow markers show.
        color, marker: The same in all figures of a run.
    """

    parts: tuple[str, str, str, str]
    rows: Sequence[Figures]
    x: Floats
    adapts: bool
    color: str
    marker: str

    @property
    def name(self) -> str:
        return self._joined("" if self.parts[0] else "fixed γ")

    def name_at(self, row: Figures) -> str:
        """Return the series' name, with the γ of a row if γ is fixed."""
        return self._joined(f"γ={row.config.gamma}")

    def _joined(self, gamma: str) -> str:
        drafter, policy, *others = self.parts
        return ", ".join(part for part in (drafter, policy or gamma, *others) if part)

    @property
    def style(self) -> dict[str, Any]:
        """Return the style of the markers."""
        face = "white" if self.adapts else self.color
        return {"color": self.color, "marker": self.marker, "markerfacecolor": face, "zorder": 3}


class PlotData:
    """A run, with the data that several figures need."""

    def __init__(self, summary: Summary) -> None:
        self.summary, self.results, self.run = summary, summary.results, summary.run
        self.rows = summary.rows
        self.plain = self._of_kind("plain")
        self.servers = self._of_kind("server")
        # The γ of other libraries' decoding is unknown: a level to compare with.
        self.levels = self._of_kind(*FOREIGN)
        self._keys = list(dict.fromkeys(_key(row.config) for row in self._of_kind("speculative", "server")))
        self._varied = [list(dict.fromkeys(column)) for column in zip(*self._keys, strict=True)] or [[]] * 4
        # Colors show the most important difference; a workload is one only if there is no other.
        self._colored = max(
            range(4), key=lambda i: (len(self._varied[i]) > 1 and i < 3, len(self._varied[i]))
        )
        by_key: dict[_Key, list[Figures]] = {}
        for row in self._of_kind("speculative"):
            if not math.isnan(_length(row)):
                by_key.setdefault(_key(row.config), []).append(row)
        self.series = [
            self.make_series(mine, [*map(_length, mine)])
            for mine in (sorted(rows, key=_length) for rows in by_key.values())
        ]
        self.drafters = list(dict.fromkeys(each.rows[0].config.drafter for each in self.series))

    def _of_kind(self, *kinds: str) -> list[Figures]:
        return [row for row in self.rows if row.config.kind in kinds]

    def mark(self, config: Row) -> tuple[str, str]:
        """Return the color and the marker of a configuration, the same in all figures; black is the baseline."""
        key = _key(config)
        baseline = config.kind == "plain" or config.id == config.baseline
        if baseline or key not in self._keys:
            return (BLACK if baseline else GRAY), "*"
        color = self._varied[self._colored].index(key[self._colored])
        return COLORS[color % len(COLORS)], MARKERS[self._keys.index(key) % len(MARKERS)]

    def make_series(
        self, rows: Sequence[Figures], x: Sequence[float] | Floats, *, loads: bool = False
    ) -> Series:
        """Return a series; over ``loads`` the workload is not named, as it is what differs."""
        config = rows[0].config
        several = [len(each) > 1 for each in self._varied]
        server = config.kind == "server"
        policy = "" if config.draft_policy == "fixed" or server else short(config.draft_policy, 20)
        if loads and not policy and not server:
            policy = f"γ={config.gamma}"
        parts = (
            short(config.drafter, NAME) if several[0] or server else "",
            policy,
            f"T = {config.condition.temperature:g}" if several[2] else "",
            _load(config) if several[3] and not loads else "",
        )
        color, marker = self.mark(config)
        adapts = config.draft_policy != "fixed" and config.kind == "speculative"
        return Series(parts, rows, np.array(x, dtype=float), adapts, color, marker)

    @cached_property
    def caption(self) -> list[str]:
        """Machine, models, prompts and tokens."""
        run, target = self.run, self.run.target
        prompts, repeats = (self.results.done[name].nunique() for name in ("prompt", "repeat"))
        temperatures = sorted({row.config.condition.temperature for row in self.rows})
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
        """A sentence on the intervals of speedups: whether they are over prompts, groups or repeats."""
        bases = {row.speedup.basis for row in self.rows} - {None}
        side_by_side = self.summary.side_by_side
        if bases == {"repeats"}:
            one = "group of prompts" if side_by_side else "prompt"
            return f"Bars: 95% intervals over the repeats of the only {one}; they hold within it only."
        over = "groups of prompts" if side_by_side else "prompts"
        return f"Bars: 95% intervals over {over}." if bases else "Too few prompts or repeats: no intervals."


def _length(row: Figures) -> float:
    """Return γ, or the mean draft length if the policy adapts it."""
    return row.mean_gamma.value if row.config.gamma is None else float(row.config.gamma)


def _load(config: Row) -> str:
    """Return all of a condition but its temperature as text."""
    return one_line(msgspec.structs.replace(config.condition, temperature=0.0).words.removeprefix(", "))


def row_names(rows: Sequence[Figures], run: PlotData) -> list[str]:
    """Return row labels, without the drafter if it is the only one, which the title names."""
    only = f"{run.drafters[0]} " if len(run.drafters) == 1 else ""
    return [short(row.config.label.removeprefix(only), NAME) for row in rows]


def _machine(environment: Environment, device: str) -> str:
    devices = Counter(map(one_line, environment.devices or []))
    if device != "cpu" and devices:
        return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in devices.items())
    threads = environment.threads
    parts = (one_line(environment.cpu or ""), counted(threads, "thread") if threads else "")
    return ", ".join(part for part in parts if part)


def short(text: object, limit: int) -> str:
    """Shorten a name by cutting out its middle, since the ends of models' names say most."""
    name = one_line(text)
    if name.startswith("_"):  # matplotlib leaves such labels out of legends
        name = f" {name}"
    if len(name) <= limit:
        return name
    head = (limit - 1) // 2
    return f"{name[:head]}…{name[len(name) - (limit - 1 - head) :]}"


# --- Common parts ---------------------------------------------------------------------------------


def new_figure(height: float) -> SubFigure:
    """Return the part of a new figure between title and caption; its height is in inches."""
    figure = Figure((WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)  # one renderer for all layouts, which caches the size of each text
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.06, h_pad=0.05, wspace=0.03, hspace=0.03)
    body = figure.subfigures()  # separate, so that a legend below it does not overlap the caption
    assert isinstance(body, SubFigure)
    return body


def two_panels(height: float, ylabel: str = "") -> tuple[SubFigure, list[Axes]]:
    """Return two axes next to each other with a common y axis; the height is in inches, without title and caption."""
    body = new_figure(height + 0.75)
    both = list(body.subplots(1, 2, sharey=True))
    both[0].set_ylabel(ylabel)
    return body, both


def finish(body: SubFigure, run: PlotData, title: str, *remarks: str) -> Figure:
    """Add the legend, the title with the drafter if there is only one, and the caption."""
    _legend(body)
    figure = body.get_figure(root=True)
    assert isinstance(figure, Figure)
    if len(run.drafters) == 1:
        title = f"{title}: {short(run.drafters[0], 40)}"
    figure.set_label(title)  # of the file
    letters = 72 * figure.get_figwidth() / FONT_SIZE  # in a line, if they are as wide as high
    titles = textwrap.wrap(title, int(1.35 * letters))
    figure.suptitle("\n".join(titles), x=0.01, ha="left")
    width = int(2.3 * letters)  # in characters of the caption's size
    lines = [""]
    for part in run.caption:  # broken between its parts only
        joined = f"{lines[-1]} · {part}" if lines[-1] else part
        lines = [*lines[:-1], joined] if len(joined) <= width else [*lines, part]
    lines = [*textwrap.wrap(" ".join(filter(None, remarks)), width), *lines]
    _grow(figure, 1.45 * (len(titles) - 1) + 1.1 * max(0, len(lines) - 2))
    style: Any = {"fontsize": 0.79 * FONT_SIZE, "color": "#505050", "linespacing": 1.35}
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", **style)
    return figure


def _legend(body: SubFigure) -> None:
    """Draw a legend below the axes with each label once, in as many columns as fit."""
    found: dict[str, Any] = {}
    for axes in body.axes:
        labeled = zip(*axes.get_legend_handles_labels(), strict=True)
        for handle, label in sorted(labeled, key=lambda each: not isinstance(each[0], BarContainer)):
            found.setdefault(label, handle)  # bars in their order, and then lines
    if not found:
        return
    figure = body.get_figure(root=True)
    assert isinstance(figure, Figure)
    letters = 72 * figure.get_figwidth() / (0.58 * 7.5)
    names = [short(label, max(8, int(letters) - 8)) for label in found]
    columns = max(1, min(len(names), int(letters / (max(map(len, names)) + 6.2))))
    style: Any = {"frameon": False, "labelcolor": INK, "handlelength": 2.3, "columnspacing": 1.2}
    body.legend(list(found.values()), names, loc="outside lower left", ncols=columns, **style)
    _grow(figure, 1.4 * (math.ceil(len(names) / columns) + 0.3))


def _grow(figure: Figure, lines: float) -> None:
    figure.set_figheight(figure.get_figheight() + lines * FONT_SIZE / 72)


def grid_lines(axes: Axes, axis: str = "y") -> None:
    axes.grid(axis=axis, color="#E4E4E4", linewidth=0.6)  # type: ignore[arg-type]


def gamma_axis(axes: Axes, values: Sequence[float]) -> None:
    """Make x an axis of whole γ that includes all values."""
    axes.set_xlabel("γ (tokens drafted per step)")
    lengths = sorted({each for each in values if float(each).is_integer()})  # policies draft 3.4 on average
    few = FixedLocator(lengths) if 0 < len(lengths) <= _MOST_TICKS else None
    axes.xaxis.set_major_locator(few or MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
    first, last = min(values), max(values)
    margin = max(0.35, 0.05 * (last - first))
    axes.set_xlim(first - margin, last + margin)


def draw_levels(line: Callable[..., Any], levels: Mapping[str, float]) -> None:
    """Draw named levels to compare values with; ``line`` is the axes' ``axhline`` or ``axvline``."""
    for number, (name, at) in enumerate(levels.items()):
        dashes = _LEVELS[number % len(_LEVELS)]
        line(at, color=GRAY, linewidth=0.9, linestyle=dashes, zorder=1.5, label=short(name, 60))
