"""Frames of figures (``specbench.results.frames``) as tables for terminals and Markdown."""

from __future__ import annotations

import dataclasses
import html
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from specbench.decoding.records import PARTS
from specbench.results import stats
from specbench.results.frames import PERCENTILES, estimate_of, records, winners
from specbench.results.heads import PLACES
from specbench.results.rows import OTHER_ANSWERS, PLAIN
from specbench.textsafe import counted, one_line, terminal_safe

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table as text, not escaped for anything yet.

    Attributes:
        headings: One per column; the first column names the rows, the others hold figures.
        rows: Cells, one list per row.
        values: What to sort the cells by, shaped as ``rows``: text in the first column, numbers elsewhere (NaN: none).
        ranks: How soon a column may be left out where there is no room: the highest first, 0 never.
        notes: Sentences to stand below.
        marked: Rows that stand out, by number.
    """

    headings: list[str]
    rows: list[list[str]]
    values: list[list[Any]]
    ranks: list[int]
    notes: list[str]
    marked: frozenset[int] = frozenset()


def sheet_of(frame: pd.DataFrame) -> Sheet:
    """A frame of this module as text; a category frame becomes a matrix of configurations and categories."""
    kind = frame.attrs.get("kind")
    if kind == "summary":
        return _summary_sheet(frame)
    if kind == "category":
        return _category_sheet(frame)
    if kind == "position":
        return dataclasses.replace(_plain_sheet(frame, _POSITION_COLUMNS), notes=_position_notes(frame))
    if kind == "heads":
        return dataclasses.replace(_plain_sheet(frame, _HEAD_COLUMNS), notes=_head_notes(frame))
    if kind == "training":
        return dataclasses.replace(_plain_sheet(frame, _TRAINING_COLUMNS), notes=_training_notes(frame))
    if kind == "requests":
        return dataclasses.replace(_plain_sheet(frame, _REQUEST_COLUMNS), notes=_request_notes(frame))
    raise ValueError("not a frame of figures made by this module")


def _too_few(one: str) -> str:
    return (
        f"Too few to say: one run of one {one}, or an interval whose ends are more than a factor of {stats.WIDEST:g}"
        " apart."
    )


def notes(frame: pd.DataFrame) -> list[str]:
    """What to say below a summary: what the intervals are over, and every figure that could be misread."""
    out, over = [], frame.attrs.get("over", PLAIN)
    compared = frame[frame["speedup_low"].notna()]
    side_by_side = bool(frame["batch"].notna().any())
    if side_by_side:
        out.append(
            "With a batch, tokens/s are the throughput of all requests, from the arrival of each to its end, and the"
            f" speedup is the ratio of throughputs over {over} at the same batch."
        )
    unit, one = ("groups of prompts", "group of prompts") if side_by_side else ("prompts", "prompt")
    if (compared["speedup_basis"] == "prompts").any():
        out.append(f"Speedups are geometric means over {unit}; in brackets the 95% interval over {unit}.")
    slower = frame.loc[frame["verdict"] == "slower", "prompts"]
    if len(slower) and not side_by_side:
        out.append(stats.unseen_text(int(slower.min())))
    if (frame["speedup_basis"] == "repeats").any():
        out.append(
            f"*: one {one}; the interval is over its repeats, holds within that {one.split()[0]} only, and is no"
            " verdict."
        )
    if (
        (frame["config"] != frame["baseline"]) & frame["speedup"].notna() & frame["speedup_low"].isna()
    ).any():
        out.append(_too_few(one))
    if frame.attrs.get("disturbance"):
        out.append(frame.attrs["disturbance"])
    if frame["provisional"].any():
        out.append(stats.PROVISIONAL)
    if frame.attrs.get("withheld"):
        out.append(frame.attrs["withheld"])
    out += [
        f"{row['label']}: all tokens over all seconds give {_ratio_text(row, 'pooled_speedup')}, "
        f"the mean over {unit} {_ratio_text(row, 'speedup')}: its {unit.split()[0]} fare differently."
        for row in records(frame)
        if _means_differ(row)
    ]
    differing: dict[str, list[dict[str, Any]]] = {}
    for row in records(frame):
        if row["identical_share"] < 1:
            differing.setdefault(row["difference"], []).append(row)
    for rows in differing.values():
        label = f"{rows[0]['label']}: " if len(rows) == 1 else f"{len(rows)} configurations: "
        out.append(label + identity_text(rows, frame.attrs.get("dtype"), over))
    for row in records(frame):
        if row["failures"]:
            out.append(
                f"{row['label']}: {counted(row['failures'], 'generation')} failed and count nowhere else."
            )
    out += [
        f"{row['label']} looks for more probable answers than plain decoding's: its ratio is one of speeds alone."
        for row in records(frame)
        if row["kind"] in OTHER_ANSWERS
    ]
    without = frame[(frame["config"] != frame["baseline"]) & frame["speedup"].isna()]
    out += [f"{label}: no generation of its baseline to compare with." for label in without["label"]]
    out += _server_notes(frame)
    return [one_line(note) for note in out]


def _server_notes(frame: pd.DataFrame) -> list[str]:
    """What the figures of servers rest on."""
    out = []
    if (frame["step_source"] == "bursts").any():
        out.append(
            "~: estimated from the bursts in which tokens came, for the server does not say what it accepted."
        )
    if frame["speedup_first"].notna().any():
        out.append(
            "First time: the speedup over the first repeat, when a server has not seen the prompts yet; again: how"
            " many times as fast it answers them when they come again."
        )
    return out


def identity_text(rows: Sequence[Mapping[str, Any]], dtype: str | None, over: str = PLAIN) -> str:
    """Whether the outputs of rows of a summary are those of the baseline, and why some are not.

    Args:
        rows: At least one, with a number as ``identical_share`` and one ``difference``.
        dtype: Of the target.
        over: The baseline, in words.
    """
    shares = sorted(row["identical_share"] for row in rows)
    if shares[0] == 1:
        return f"The outputs are token for token those of {over}."
    several = f" to {_percent(shares[-1])}" if shares[-1] > shares[0] else ""
    share = f"{_percent(shares[0])}{several} of the outputs are token for token those of {over}"
    if rows[0]["difference"] == "ties":
        rounding = one_line(dtype or "bfloat16")
        return (
            f"Outputs part from {over}'s only where two tokens tie within the rounding of {rounding}, which was"
            f" checked at each place: either is the target's own choice. {share}."
        )
    if rows[0]["difference"] == "beyond rounding":
        return f"{share}; rounding does not explain all of the others: see the warnings."
    if over != PLAIN:
        return f"{share}; --check-outputs tells whether rounding explains the others."
    return f"{share}; whether rounding explains the others is checked at the end of a sweep."


def verdict_text(verdict: str | None, provisional: bool) -> str:
    """A verdict as tables show it, a dash for a baseline's."""
    if not isinstance(verdict, str):
        return "–"
    return f"{verdict}, provisional" if provisional else verdict


def _means_differ(row: Mapping[str, Any]) -> bool:
    """Whether pooled and per-prompt speedup would be read differently: opposite sides of 1, or outside the interval."""
    mean, pooled = row["speedup"], row["pooled_speedup"]
    if (
        row["config"] == row["baseline"]
        or math.isnan(mean)
        or math.isnan(pooled)
        or abs(math.log(pooled / mean)) < 0.02
    ):
        return False
    outside = pooled < row["speedup_low"] or pooled > row["speedup_high"]
    return (mean - 1.0) * (pooled - 1.0) < 0 or bool(outside)


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    key: str
    rank: int
    text: Callable[[Mapping[str, Any]], str]


def _percent(value: float) -> str:
    """A share; 99.97% is not 100%."""
    if math.isnan(value):
        return "–"
    whole = round(100 * value)
    return f"{100 * value:.1f}%" if whole in (0, 100) and whole != 100 * value else f"{whole}%"


def _bytes(value: float) -> str:
    if math.isnan(value) or value <= 0:
        return "–"
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def _ratio_text(row: Mapping[str, Any], name: str) -> str:
    return stats.ratio_text(estimate_of(row, name), "")


def _speedup_text(name: str) -> Callable[[Mapping[str, Any]], str]:
    def text(row: Mapping[str, Any]) -> str:
        is_baseline = row["config"] == row["baseline"] and math.isnan(row[f"{name}_low"])
        return "1 (baseline)" if is_baseline and row[name] == 1.0 else _ratio_text(row, name)

    return text


def _as(form: Callable[[float], str], key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: form(row[key])


def _count(value: float) -> str:
    return "–" if math.isnan(value) else str(int(value))


def _milliseconds(value: float) -> str:
    return stats.decimals(1000.0 * value)


def _tokens_per_step(row: Mapping[str, Any]) -> str:
    """With a sign where it is an estimate."""
    return ("~" if row["step_source"] == "bursts" else "") + stats.decimals(row["tokens_per_step"])


_SUMMARY_COLUMNS = [
    _Column("configuration", "label", 0, lambda row: str(row["label"])),
    _Column("tokens/s", "tokens_per_second", 1, _as(stats.decimals, "tokens_per_second")),
    _Column("speedup", "speedup", 0, _speedup_text("speedup")),
    _Column("verdict", "verdict", 0, lambda row: verdict_text(row["verdict"], row["provisional"])),
    _Column("first time", "speedup_first", 6, _speedup_text("speedup_first")),
    _Column("again", "warming", 6, lambda row: _ratio_text(row, "warming")),
    _Column("with TTFT", "speedup_total", 14, _speedup_text("speedup_total")),
    _Column("pooled", "pooled_speedup", 15, _speedup_text("pooled_speedup")),
    _Column("tokens/step", "tokens_per_step", 4, _tokens_per_step),
    _Column("accepted", "acceptance_rate", 5, _as(_percent, "acceptance_rate")),
    _Column("of tested", "acceptance_tested", 16, _as(_percent, "acceptance_tested")),
    _Column("α", "alpha", 6, _as(stats.decimals, "alpha")),
    _Column("mean γ", "mean_gamma", 12, _as(stats.decimals, "mean_gamma")),
    _Column("nodes", "mean_nodes", 12, _as(stats.decimals, "mean_nodes")),
    _Column("predicted", "predicted_speedup", 8, lambda row: _ratio_text(row, "predicted_speedup")),
    _Column(
        "predicted (i.i.d.)",
        "predicted_speedup_iid",
        18,
        lambda row: _ratio_text(row, "predicted_speedup_iid"),
    ),
    _Column("cached", "cached_share", 12, _as(_percent, "cached_share")),
    _Column("TTFT ms", "ttft_s", 9, _as(_milliseconds, "ttft_s")),
    *(_Column(part, f"share_{part}", 10, _as(_percent, f"share_{part}")) for part in PARTS),
    _Column("log p/token", "log_probability", 11, _as(stats.decimals, "log_probability")),
    _Column("memory", "peak_memory_bytes", 13, _as(_bytes, "peak_memory_bytes")),
    _Column("identical", "identical_share", 13, _as(_percent, "identical_share")),
    _Column("prompts", "prompts", 17, _as(_count, "prompts")),
    _Column("failed", "failures", 7, _as(_count, "failures")),
]


def _scaled(by: float) -> Callable[[float], str]:
    return lambda value: stats.decimals(by * value)


def _percentile_columns(name: str, figure: str, rank: int, by: float) -> list[_Column]:
    """A column for each percentile of a latency; the median is the last to be left out."""
    return [
        _Column(f"{name} p{percent}", key, rank + 5 * number, _as(_scaled(by), key))
        for number, percent in enumerate(PERCENTILES)
        for key in [f"{figure}_p{percent}"]
    ]


_REQUEST_COLUMNS = [
    _Column("configuration", "label", 0, lambda row: str(row["label"])),
    _Column("requests", "requests", 9, _as(_count, "requests")),
    _Column("tokens/s", "throughput", 0, _as(stats.decimals, "throughput")),
    *_percentile_columns("ms/token", "token_s", 1, 1000.0),
    *_percentile_columns("TTFT ms", "ttft_s", 2, 1000.0),
    *_percentile_columns("whole s", "latency_s", 3, 1.0),
    *_percentile_columns("waited s", "queued_s", 4, 1.0),
    _Column("accepted", "acceptance_rate", 8, _as(_percent, "acceptance_rate")),
    _Column("blocks", "pool_peak_blocks", 10, _as(_count, "pool_peak_blocks")),
    _Column("pool", "pool_peak_bytes", 10, _as(_bytes, "pool_peak_bytes")),
]


def _least(key: str) -> Callable[[Mapping[str, Any]], str]:
    """A share, with a sign where it may be more."""
    return lambda row: ("≥ " if row["least"] and row[key] < 1 else "") + _percent(row[key])


_POSITION_COLUMNS = [
    _Column("configuration", "label", 0, lambda row: str(row["label"])),
    _Column("position", "position", 0, _as(_count, "position")),
    _Column("drafted", "drafted", 2, _as(_count, "drafted")),
    _Column("tested", "tested", 1, _as(_count, "tested")),
    _Column("accepted", "accepted", 1, _as(_count, "accepted")),
    _Column("accepted/tested", "rate", 0, _least("rate")),
    _Column("accepted/drafted", "rate_of_drafted", 0, _least("rate_of_drafted")),
    _Column("α", "alpha", 1, _as(stats.decimals, "alpha")),
]


_HEAD_COLUMNS = [
    _Column("configuration", "label", 0, lambda row: str(row["label"])),
    _Column("category", "category", 0, lambda row: str(row["category"])),
    _Column("tokens/step", "tokens_per_step", 0, _as(stats.decimals, "tokens_per_step")),
    _Column("when trained", "trained", 3, _as(stats.decimals, "trained")),
    _Column("first kept", "first", 1, _as(_percent, "first")),
    _Column("second kept", "second", 2, _as(_percent, "second")),
    _Column("speedup", "speedup", 0, lambda row: _ratio_text(row, "speedup")),
]


_TRAINING_COLUMNS = [
    _Column("drafter", "drafter", 0, lambda row: str(row["drafter"])),
    _Column("tokens trained on", "tokens", 0, lambda row: f"{row['tokens']:,}"),
    _Column("tokens/step", "tokens_per_step", 0, _as(stats.decimals, "tokens_per_step")),
    *(
        _Column(f"{place}. kept", f"kept_{place}", place - 1, _as(_percent, f"kept_{place}"))
        for place in range(1, PLACES + 1)
    ),
]


def _plain_sheet(frame: pd.DataFrame, columns: Sequence[_Column]) -> Sheet:
    lines = records(frame)
    rows = [[one_line(column.text(line)) for column in columns] for line in lines]
    values = [[line[column.key] for column in columns] for line in lines]
    return Sheet(
        [column.heading for column in columns], rows, values, [column.rank for column in columns], []
    )


_FOR_P95, _FOR_P99 = 20, 100
"""Requests from which on these percentiles are not near to the largest value."""


def _request_notes(frame: pd.DataFrame) -> list[str]:
    out = [
        "Of all requests: ms/token behind the first emission, TTFT and the whole time from a request's arrival, which"
        " include the wait for its turn; blocks and bytes are the most of the target's pool that were taken."
    ]
    if len(frame) and frame["requests"].min() < _FOR_P99:
        out.append(
            f"The 99th percentile of fewer than {_FOR_P99} requests lies close to the slowest of them, and the 95th of"
            f" fewer than {_FOR_P95}."
        )
    return out


def _position_notes(frame: pd.DataFrame) -> list[str]:
    if not frame["least"].any():
        return []
    return [
        "≥: the server's drafts are of several lengths, and it does not tell how many reach this position: counted as"
        " if all did."
    ]


def _head_notes(frame: pd.DataFrame) -> list[str]:
    """Where each configuration with a trained head loses."""
    out = [
        "Kept: of the drafts tested at that place. When trained: tokens per step, greedily and as a chain, on prompts"
        " of a category of that name that it was not trained on."
    ]
    if frame["drafter"].str.contains("+", regex=False).any():
        out.append("Of a cascade the drafts of both parts count.")
    for label, mine in frame.groupby("label", sort=False):
        slower = mine[mine["verdict"] == "slower"]["category"]
        if len(slower):
            surely = " provisionally" if mine["provisional"].eq(True).any() else ""
            out.append(f"{label}{surely} loses to plain decoding on {', '.join(slower)}.")
        known = mine[mine["first"].notna()]
        if len(known) > 1:
            worst = min(records(known), key=lambda row: float(row["first"]))
            share = _percent(worst["first"])
            out.append(f"{label} drafts worst on {worst['category']}: {share} of its first drafts are kept.")
    return [one_line(note) for note in out]


def _training_notes(frame: pd.DataFrame) -> list[str]:
    """How that was measured, and which measure is of the head that drafts."""
    kept = records(frame[frame["best"]])
    return [
        "Measured by the decoder, greedily and as a chain, on prompts that were not trained on; kept: of the drafts"
        " tested at that place.",
        *(
            one_line(f"{row['drafter']} is the head as it was behind {row['tokens']:,} tokens.")
            for row in kept
        ),
    ]


def _summary_sheet(frame: pd.DataFrame) -> Sheet:
    """Columns without a single figure are left out, and so is what would only say that all is well."""
    columns = [column for column in _SUMMARY_COLUMNS if column.rank == 0 or frame[column.key].notna().any()]
    if not frame["failures"].any():
        columns = [column for column in columns if column.key != "failures"]
    sheet = _plain_sheet(frame, columns)
    best = winners(frame)
    marked = frozenset(number for number, config in enumerate(frame["config"]) if config in best)
    for number in marked:
        sheet.rows[number][sheet.headings.index("verdict")] = verdict_text(
            "fastest measured", frame["provisional"].iloc[number]
        )
    return dataclasses.replace(sheet, notes=notes(frame), marked=marked)


def _category_sheet(frame: pd.DataFrame) -> Sheet:
    categories = list(dict.fromkeys(frame["category"]))
    labels = dict(zip(frame["config"], frame["label"], strict=True))
    cells = {(row["config"], row["category"]): row for row in records(frame)}
    rows, values = [], []
    for config, label in labels.items():
        found = [cells.get((config, category)) for category in categories]
        rows.append(
            [one_line(label), *("–" if row is None else _ratio_text(row, "speedup") for row in found)]
        )
        values.append([label, *(_NAN if row is None else row["speedup"] for row in found)])
    over = frame.attrs.get("over", PLAIN)
    said = [f"Speedup over {over}, geometric mean over the category's prompts, with its 95% interval."]
    if frame["speedup_low"].isna().any():
        said.append(_too_few("prompt"))
    if (frame["speedup_basis"] == "repeats").any():
        said.append("*: one prompt; the interval is over its repeats and holds within that prompt only.")
    headings = ["configuration", *map(one_line, categories)]
    return Sheet(headings, rows, values, [0] * len(headings), said)


# --- Terminal and Markdown ------------------------------------------------------------------------

_LABEL_CELLS = 28  # a longer name takes several lines
_VERDICT_CELLS = 12
_INDENT = "  "  # of a name's other lines
_BREAKS = " ,:/+"  # signs of a name behind which a line may end
_BETWEEN = 2  # cells between columns, one of them the box's own


def terminal_table(frame: pd.DataFrame, width: int = 80, encoding: str = "utf-8") -> Table:
    """A frame as a table for a console of that many cells, with the columns that matter least left out as needed.

    A matrix of categories keeps as many of them as there is room for; ``render_terminal`` shows the others below.
    """
    sheet = _encoded(sheet_of(frame), encoding)
    return _table(sheet, _kept_columns(sheet, width), width)


def render_terminal(frame: pd.DataFrame, console: Console) -> None:
    """Print a frame on a console, readable from 60 columns up, with its notes below."""
    from rich.text import Text

    sheet = _encoded(sheet_of(frame), console.encoding)
    kept = _kept_columns(sheet, console.width)
    console.print(_table(sheet, kept, console.width))
    if frame.attrs["kind"] == "category":
        while (begin := kept[-1] + 1) < len(sheet.headings):
            kept = _fitting(sheet, begin, console.width)
            console.print(_table(sheet, kept, console.width))
    else:
        hidden = [heading for i, heading in enumerate(sheet.headings) if i not in kept]
        if hidden:
            sheet.notes.append(
                f"{counted(len(hidden), 'more column')}: in summary.md, or on a wider terminal."
            )
    for note in sheet.notes:
        console.print(Text(note, style="dim"), soft_wrap=False)


def to_markdown(frame: pd.DataFrame) -> str:
    """A frame as a Markdown table with its notes below, all of its columns in it."""
    sheet = sheet_of(frame)
    lines = [
        markdown_row(sheet.headings),
        f"| --- | {' | '.join('---:' for _ in sheet.headings[1:])} |",
        *map(markdown_row, sheet.rows),
    ]
    if sheet.notes:
        lines += ["", *(f"- {markdown_text(note)}" for note in sheet.notes)]
    return "\n".join(lines) + "\n"


def markdown_row(cells: Iterable[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(markdown_text, cells))} |"


_MARKDOWN = str.maketrans({each: "\\" + each for each in "\\`*_{}[]|#~$"})


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no HTML, no way out of its cell or line."""
    return html.escape(one_line(text).translate(_MARKDOWN), quote=False)


def spelled_out(text: str, encoding: str) -> str:
    """Text for a console: signs that its encoding lacks become words."""
    if encoding.lower().startswith("utf"):
        return text
    for sign, word in {
        "γ": "gamma",
        "α": "alpha",
        "–": "-",
        "…": "...",
        "∞": "inf",
        "×": "x",
        "≥": ">=",
    }.items():
        text = text.replace(sign, word)
    return terminal_safe(text, encoding)


def _encoded(sheet: Sheet, encoding: str) -> Sheet:
    """Signs that the console lacks are spelled out, and long verdicts take several lines."""

    def said(text: str) -> str:
        return spelled_out(text, encoding)

    def cell(heading: str, text: str) -> str:
        return textwrap.fill(said(text), _VERDICT_CELLS) if heading == "verdict" else said(text)

    return dataclasses.replace(
        sheet,
        headings=[*map(said, sheet.headings)],
        rows=[[*map(cell, sheet.headings, row)] for row in sheet.rows],
        notes=[*map(said, sheet.notes)],
    )


def shortened(text: str, cells: int) -> str:
    """Text in no more than so many cells of a terminal: a longer one loses its middle."""
    from rich.cells import cell_len, chop_cells

    if cell_len(text) <= cells:
        return text
    head = chop_cells(text, (cells - 1) // 2)[0]
    tail = chop_cells(text[::-1], cells - 1 - cell_len(head))[0][::-1]
    return f"{head}…{tail}"


def _in_lines(text: str, cells: int) -> str:
    """A name in lines of at most so many cells, broken where its parts end, all but the first indented."""
    from rich.cells import cell_len, chop_cells

    lines: list[str] = []
    while text:
        indent = _INDENT if lines else ""
        line = chop_cells(text, cells - len(indent))[0]
        if cell_len(text) > cells - len(indent):
            end = max(line.rfind(sign) for sign in _BREAKS) + 1
            line = line[:end] if end > len(line) // 2 else line
        lines.append(indent + line.rstrip())
        text = text[len(line) :]
    return "\n".join(lines)


def _widths(sheet: Sheet) -> list[int]:
    from rich.cells import cell_len

    headings = [max(map(cell_len, _broken(heading).split("\n"))) for heading in sheet.headings]
    columns = ["\n".join(column).split("\n") for column in zip(*sheet.rows, strict=True)]
    cells = [max(map(cell_len, lines)) for lines in columns] or headings
    widths = [max(pair) for pair in zip(headings, cells, strict=True)]
    return [min(widths[0], _LABEL_CELLS), *widths[1:]]


def _broken(heading: str) -> str:
    """A long heading in two lines, broken at a space or before a slash."""
    if len(heading) <= 7:
        return heading
    return heading.replace(" ", "\n", 1) if " " in heading else heading.replace("/", "\n/", 1)


def _kept_columns(sheet: Sheet, width: int) -> list[int]:
    """The columns to show, in order: the least important go until the rest fits; a matrix keeps its first ones."""
    if not any(sheet.ranks):
        return _fitting(sheet, 1, width)
    widths = _widths(sheet)
    kept = list(range(len(widths)))
    while sum(widths[i] + _BETWEEN for i in kept) - _BETWEEN > width:
        last = max(sheet.ranks[i] for i in kept)
        if not last:
            break
        kept = [i for i in kept if sheet.ranks[i] < last]  # columns of one rank belong together
    return kept


def _fitting(sheet: Sheet, begin: int, width: int) -> list[int]:
    """The first column and as many from ``begin`` on as fit, at least one."""
    widths = _widths(sheet)
    kept, used = [0], widths[0]
    for i in range(begin, len(widths)):
        used += _BETWEEN + widths[i]
        if used > width and len(kept) > 1:
            break
        kept.append(i)
    return kept


def _table(sheet: Sheet, kept: Sequence[int], width: int) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    widths = _widths(sheet)
    over = max(0, sum(widths[i] + _BETWEEN for i in kept) - _BETWEEN - width)
    label_cells = max(8, widths[0] - over)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, _BETWEEN - 1, 0, 0), show_edge=False)
    for i in kept:
        heading = Text(_broken(sheet.headings[i]))
        table.add_column(heading, justify="left" if i == 0 else "right", vertical="bottom", no_wrap=True)
    for number, row in enumerate(sheet.rows):
        cells = [_in_lines(row[0], label_cells), *(row[i] for i in kept[1:])]
        # As Text: what looks like markup in a name stays as it is.
        table.add_row(*map(Text, cells), style="bold" if number in sheet.marked else "")
    return table
