"""A run as a report: one HTML file that needs nothing else, and Markdown with its figures beside it.

A report opens with the answer in a sentence, says what is doubtful about it, shows tables and figures, and ends with
how and on what all was measured. Definitions of the figures: docs/metrics.md.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.decoding.records import PARTS
from specbench.decoding.theory import PassCosts
from specbench.errors import RunError, UsageError
from specbench.files import refuse_link, write_text
from specbench.results import frames, stats
from specbench.results.advice import RunWarning, review
from specbench.results.store import load_results
from specbench.show import tables
from specbench.show.answer import Answer, answer_markdown, find_answers
from specbench.show.plots import FIGURES, Look, draw_figures, figure_bytes, save_figure
from specbench.show.tables import markdown_row, markdown_text
from specbench.textsafe import counted, one_line

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Answer", "Picture", "Report", "make_report", "to_html", "to_markdown", "write_report"]


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure: its name, what it shows, and the bytes of a PNG; of another one for narrow screens, if there is one."""

    name: str
    about: str
    png: bytes
    narrow: bytes | None = None


@dataclass(frozen=True)
class Report:
    """What a report says, not escaped for anything yet.

    Attributes:
        name: Of the run.
        answers: One per temperature.
        warnings: What is doubtful.
        summary, categories, positions: Frames of ``specbench.results.frames``.
        pictures: Figures.
        missing: Why a figure is not there, by name.
        method: How it was measured, heading and text.
        costs: Heading and lines of the tables of single passes.
        facts: What it was measured on: groups of names and values.
    """

    name: str
    answers: list[Answer]
    warnings: list[RunWarning]
    summary: pd.DataFrame
    categories: pd.DataFrame
    positions: pd.DataFrame
    pictures: list[Picture]
    missing: dict[str, str]
    method: list[tuple[str, str]]
    costs: list[list[str]]
    facts: dict[str, list[tuple[str, str]]]


def write_report(folder: Path, out: Path | None = None) -> tuple[Report, list[Path]]:
    """Write ``report.html``, ``report.md`` and the figures that the latter shows, in ``plots/``.

    Args:
        folder: Of the run.
        out: Where to write; ``None`` for the run's folder.

    Returns:
        The report, and the paths of ``report.html`` and ``report.md``.

    Raises:
        UsageError: There is no run, no generation of it has finished, or a link stands where something is to be
            written. RunError: The report cannot be written.
    """
    df = load_results(folder)
    out = folder if out is None else out
    paths = [out / "report.html", out / "report.md"]
    try:
        refuse_link(out / "plots")
        (out / "plots").mkdir(parents=True, exist_ok=True)
        report = make_report(df, folder.resolve().name, out / "plots")
        for path, text in zip(paths, (to_html(report), to_markdown(report)), strict=True):
            write_text(path, text)
    except OSError as error:
        raise RunError(
            f"The report cannot be written to {str(out)!r} ({error.strerror}).", "Give another --out."
        ) from error
    return report, paths


def make_report(df: pd.DataFrame, name: str, plots: Path) -> Report:
    """Everything a report says about one run.

    Args:
        df: Rows of the run, from ``specbench.results.store.load_results``.
        name: Of the run.
        plots: An existing folder for the figures.

    Raises:
        UsageError: No generation has finished. RunError: A figure cannot be written.
    """
    run = frames.run_of(df)
    if not (df["status"] == "ok").any():
        raise UsageError(
            "There is nothing to report: no generation of this run has finished.", "Go on with its sweep."
        )
    steps = frames.step_arrays(df)
    summary, categories = frames.summary_frame(df, steps), frames.category_frame(df)
    pictures, missing = _pictures(df, plots)
    return Report(
        name=one_line(name),
        answers=find_answers(df, summary, categories),
        warnings=_warnings(df, run, summary),
        summary=summary,
        categories=categories,
        positions=frames.position_frame(df, steps),
        pictures=pictures,
        missing=missing,
        method=_method(df, run),
        costs=_costs(run),
        facts=_facts(run),
    )


_NARROW, _NARROW_DPI = 3.6, 150  # inches and resolution of a figure for narrow screens, which it fills


def _pictures(df: pd.DataFrame, folder: Path) -> tuple[list[Picture], dict[str, str]]:
    try:
        drawn = draw_figures(df)
    except UsageError as error:
        return [], dict.fromkeys(FIGURES, error.message)
    narrow = draw_figures(df, drawn.figures, Look(_NARROW)).figures
    pictures = []
    for name, figure in drawn.figures.items():
        path = folder / f"{name}.png"
        save_figure(figure, path)
        small = figure_bytes(narrow[name], "png", dpi=_NARROW_DPI) if name in narrow else None
        pictures.append(Picture(name, FIGURES[name][1], path.read_bytes(), small))
    return pictures, drawn.skipped


# --- What is doubtful, how and on what it was measured ----------------------------------------------


def _warnings(df: pd.DataFrame, run: Mapping[str, Any], summary: pd.DataFrame) -> list[RunWarning]:
    """The gravest first."""
    planned = (
        run.get("repeats", 1) * len(run["configs"]) * sum(each.get("turns", 1) for each in run["prompts"])
    )
    found = []
    if not run.get("finished"):
        found.append(
            RunWarning(
                "unfinished",
                "warning",
                f"The sweep has not come to its end: {len(df)} of {planned} generations are there.",
                "Go on with it: the same command with --resume.",
            )
        )
    differing = [what for change in run.get("changes") or () for what in change.get("differing", ())]
    if differing:
        found.append(
            RunWarning(
                "changed",
                "warning",
                f"The sweep was continued although something had changed ({'; '.join(differing)}).",
                "Measure anew for figures that belong together.",
            )
        )
    found += [
        RunWarning("lines", "warning", problem, "They are measured again with --resume.")
        for problem in df.attrs.get("problems", ())
    ]
    grave = {"error": 0, "warning": 1, "info": 2}
    return sorted([*found, *review(df, summary)], key=lambda warning: grave[warning.severity])


def _method(df: pd.DataFrame, run: Mapping[str, Any]) -> list[tuple[str, str]]:
    done = df[df["status"] == "ok"]
    categories = list(dict.fromkeys(done["category"].dropna().map(one_line)))
    repeats, configs = done["repeat"].nunique(), done["config"].nunique()
    temperatures = sorted(done["temperature"].dropna().unique())
    length = f"up to {run['max_new_tokens']} tokens" if run.get("max_new_tokens") else "their natural length"
    if run.get("ignore_eos"):
        length = length.replace("up to ", "") + " (end tokens are ignored)"
    warmups = run.get("warmup", 0)
    foreign = done["kind"].isin(["transformers", "assisted"]).any()
    return [
        (
            "Measured",
            f"{counted(done['prompt'].nunique(), 'prompt')} of {counted(len(categories), 'category', 'categories')}"
            f" ({', '.join(categories)}), {counted(configs, 'configuration')}, {counted(repeats, 'repeat')}; answers of"
            f" {length}; "
            + (
                "greedy."
                if temperatures == [0.0]
                else f"temperature {', '.join(f'{t:g}' for t in temperatures)}."
            ),
        ),
        (
            "Interleaving",
            "In every repeat all configurations decode the same prompt back to back, in a fresh random order"
            f" (seed {run.get('seed')}), so that drift of the machine hits all alike. Models stay loaded;"
            f" {counted(warmups, 'warm-up generation')} per configuration"
            f" {'does' if warmups == 1 else 'do'} not count.",
        ),
        (
            "Baseline",
            "Plain decoding is the same loop, with the same cache and the same weights, and a drafter that proposes"
            " nothing." + (" Rows named transformers are that library's own generate." if foreign else ""),
        ),
        (
            "Speedup",
            "Decode tokens/s over those of plain decoding for the same prompt, turn and repeat: the ratio of each"
            " pair, averaged within a prompt, then as a geometric mean over prompts. The time to first token is apart;"
            " 'with TTFT' includes it. 'Pooled' is all tokens over all seconds.",
        ),
        (
            "Intervals",
            f"{stats.CONFIDENCE:.0%}, over prompts: they say what other prompts of this kind would give. Repeats"
            " sharpen a prompt and never count as prompts. Faster or slower: it lies wholly above or below 1.",
        ),
        (
            "Acceptance",
            "'Accepted': accepted over drafted tokens; 'of tested': over those that were tested, behind no rejection;"
            " α: mean overlap of the drafter's and the target's distribution where tested. 'Tokens/step' counts the"
            " corrected or bonus token too.",
        ),
        (
            "Predicted",
            "What theory makes of the acceptance and of the measured times of single passes: 'predicted' from"
            " acceptance by position, 'i.i.d.' from α alone. Measured less means that something else takes time.",
        ),
        ("Definitions", "All figures with formula and pitfall: docs/metrics.md of specbench."),
    ]


def _costs(run: Mapping[str, Any]) -> list[list[str]]:
    """Lines of a table of single passes: what, milliseconds, in target passes with one token."""
    costs = PassCosts.from_json(run.get("costs") or {})
    if 1 not in costs.target_s:
        return []
    lines = [(f"target, {counted(n, 'token')}", s, f"v({n})") for n, s in costs.target_s.items()]
    lines += [(f"drafter {one_line(name)}, 1 token", s, "c") for name, s in costs.drafter_s.items()]
    return [[what, f"{1000 * s:.2f}", f"{sign} = {_share(s / costs.target_s[1])}"] for what, s, sign in lines]


_MACHINE = {
    "cpu": "processor", "cpu_capability": "instruction set", "physical_cores": "cores", "cores": "logical cores",
    "threads": "threads", "huge_pages": "huge pages", "ram_gb": "memory (GB)", "devices": "accelerators",
    "os": "system", "python": "Python",
    "torch": "torch", "transformers": "transformers", "specbench": "specbench", "git_commit": "commit",
}  # fmt: skip
_TARGET = {"name": "target", "dtype": "dtype", "device": "device", "fingerprint": "fingerprint"}


def _facts(run: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Machine, models and command; of what is recorded only fields that are known, so that nothing else gets out."""
    environment = {"specbench": run.get("specbench"), **run["environment"]}
    models = [(what, _shown(run["target"].get(name))) for name, what in _TARGET.items()]
    drafters = {config.get("drafter"): config.get("drafter_fingerprint") for config in run["configs"]}
    models += [
        ("drafter", one_line(name) + (f", fingerprint {one_line(weights)}" if weights else ""))
        for name, weights in drafters.items()
        if name not in (None, "none")
    ]
    command = shlex.join(["specbench", *map(one_line, run.get("command") or ())])
    made = [
        ("command", command),
        ("begun", _shown(run.get("created"))),
        ("ended", _shown(run.get("finished"))),
        ("run id", _shown(run["run_id"])),
    ]
    return {
        "Machine": [
            (what, _shown(environment.get(name))) for name, what in _MACHINE.items() if name in environment
        ],
        "Models": models,
        "Run": made,
    }


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(one_line, value)) or "none"
    return "–" if value is None else one_line(value)


def _share(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _sentence(text: str) -> str:
    """With a capital in front; a Greek letter is a symbol and stays small."""
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


# --- Markdown -------------------------------------------------------------------------------------


def to_markdown(report: Report) -> str:
    """The report as Markdown; its figures are linked as ``plots/<name>.png``."""
    parts = [f"# {markdown_text(report.name)}"]
    for answer in report.answers:
        parts += [*answer_markdown(answer), *_items(answer.details)]
    if report.warnings:
        warnings = [f"{each.severity}: {each.message} {each.advice}" for each in report.warnings]
        parts += ["## Warnings", *_items(warnings)]
    parts += ["## Summary", tables.to_markdown(report.summary).rstrip()]
    if len(report.categories):
        parts += ["## By category", tables.to_markdown(report.categories).rstrip()]
    if report.pictures:
        parts += ["## Figures"]
        parts += [
            f"![{markdown_text(_alt(each, _MARKDOWN_TABLES))}](plots/{each.name}.png)"
            for each in report.pictures
        ]
    if report.missing:
        parts += _items(_missing(report))
    if len(report.positions):
        parts += ["## Acceptance by position", *_folded(tables.to_markdown(report.positions).rstrip())]
    parts += ["## How it was measured", *_items(f"{name}: {text}" for name, text in report.method)]
    if report.costs:
        heading = [markdown_row(_COST_HEADINGS), "| --- | ---: | ---: |"]
        parts += ["\n".join([*heading, *map(markdown_row, report.costs)])]
    for group, facts in report.facts.items():
        parts += [
            f"## {group}",
            "\n".join([markdown_row(["", ""]), "| --- | --- |", *map(markdown_row, facts)]),
        ]
    return "\n\n".join(parts) + "\n"


def _folded(table: str) -> list[str]:
    """A table, behind its number of rows if it is long."""
    rows = table.count("\n") - 1
    return (
        [f"<details><summary>{rows} rows</summary>", table, "</details>"] if rows > _LONG_TABLE else [table]
    )


def _items(texts: Iterable[str]) -> list[str]:
    lines = [f"- {markdown_text(text)}" for text in texts]
    return ["\n".join(lines)] if lines else []


_MARKDOWN_TABLES = {
    "speedup": "Summary", "tokens-per-second": "Summary", "prediction": "Summary", "acceptance": "Summary",
    "time": "Summary", "positions": "Acceptance by position", "categories": "By category",
}  # fmt: skip
_HTML_TABLES = {
    **_MARKDOWN_TABLES, "speedup": "Speed", "tokens-per-second": "Speed", "prediction": "Speed",
    "acceptance": "Acceptance and time", "time": "Acceptance and time",
}  # fmt: skip
_COST_HEADINGS = ["pass", "ms", "relative"]


def _alt(picture: Picture, tables_of: Mapping[str, str]) -> str:
    """What stands in for a picture: what it shows, and which table has its figures."""
    table = tables_of.get(picture.name)
    return f"Chart: {picture.about}." + (f" Its figures stand in the table '{table}'." if table else "")


def _missing(report: Report) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, reason in report.missing.items():
        reasons.setdefault(reason, []).append(FIGURES[name][1])
    return [f"Not drawn: {', '.join(abouts)} ({reason.rstrip('.')})." for reason, abouts in reasons.items()]


# --- HTML -----------------------------------------------------------------------------------------


class _Html(str):
    """Markup. Any other string is escaped on its way into some."""

    __slots__ = ()


def _tag(element: str, /, *children: str, **attributes: str | float | bool | None) -> _Html:
    """An element; an attribute that is True stands without a value, one that is None or False not at all."""
    shown = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if element in ("meta", "img", "source"):
        return _Html(f"<{element}{shown}>")
    return _Html(f"<{element}{shown}>{_joined(children)}</{element}>")


def _joined(children: Iterable[str]) -> _Html:
    return _Html("".join(each if isinstance(each, _Html) else html.escape(each) for each in children))


def to_html(report: Report) -> str:
    """The report as one HTML file that loads nothing: pictures, style and script are inside."""
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(_STYLE)}'; script-src '{_hash(_SCRIPT)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = _tag(
        "head",
        _tag("meta", charset="utf-8"),
        _tag("meta", http_equiv="Content-Security-Policy", content=policy),
        _tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        _tag("meta", name="color-scheme", content="light dark"),
        _tag("meta", name="referrer", content="no-referrer"),
        _tag("title", f"{report.name} – specbench"),
        _tag("style", _Html(_STYLE)),
    )
    sections = list(_sections(report))
    contents = [_tag("a", title, href=f"#{_anchor(title)}") for title, _ in sections]
    body = _tag(
        "body",
        _tag(
            "header",
            _tag("p", _tag("span", "specbench", class_="brand"), " ", report.name, class_="run"),
            _tag("h1", "Does speculative decoding pay here?"),
            *map(_answer_html, report.answers),
            _warnings_html(report.warnings),
        ),
        _tag("nav", *contents, aria_label="Contents"),
        _tag(
            "main",
            *(_tag("section", _tag("h2", title), content, id=_anchor(title)) for title, content in sections),
        ),
        _tag("script", _Html(_SCRIPT)),
    )
    return f"<!doctype html>\n{_tag('html', head, body, lang='en')}\n"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower())


def _sections(report: Report) -> Iterator[tuple[str, _Html]]:
    """Title and content of each section that has any."""
    summary = tables.sheet_of(report.summary)
    yield "Speed", _joined([_speed_table("Speed", report.summary, summary), _notes(summary.notes)])
    yield (
        "Figures",
        _joined([_tag("div", *map(_figure, report.pictures), class_="figures"), _notes(_missing(report))]),
    )
    if len(report.categories):
        yield "By category", _category_table("By category", report.categories)
    steps = [i for i, heading in enumerate(summary.headings) if heading in _STEP_HEADINGS]
    if steps:
        yield "Acceptance and time", _table("Acceptance and time", summary, [0, *steps])
    if len(report.positions):
        yield "Acceptance by position", _table("Acceptance by position", tables.sheet_of(report.positions))
    yield "How it was measured", _joined([_definitions(report.method), _cost_table(report.costs)])
    groups = (
        [_tag("h3", group), _definitions(facts, class_="facts")] for group, facts in report.facts.items()
    )
    yield "Measured on", _joined(chain.from_iterable(groups))


def _answer_html(answer: Answer) -> _Html:
    kind = (answer.verdict or "cannot tell").replace(" ", "-")
    # A ratio and its interval stay together on a line; the first one is the answer itself.
    first, *others = [
        part if i % 2 == 0 else _tag("b" if i == 1 else "span", part, class_="ratio")
        for i, part in enumerate(re.split(f"({_RATIO})", answer.headline))
    ]
    return _joined(
        [
            _tag("p", first, *others, class_=f"answer {kind}"),
            *([_tag("pre", one_line(answer.command))] if answer.command else []),
            _tag("ul", *(_tag("li", each) for each in (answer.rivals, *answer.details) if each)),
        ]
    )


_RATIO = r"[\d.∞]+× \[[^\]]*\]\*?"


def _warnings_html(warnings: Sequence[RunWarning]) -> _Html:
    if not warnings:
        return _Html("")
    items = []
    for each in warnings:
        severity, advice = _tag("strong", f"{_sentence(each.severity)}: "), _tag("em", one_line(each.advice))
        items.append(_tag("li", severity, one_line(each.message), " ", advice, class_=each.severity))
    return _tag("ul", *items, class_="warnings", aria_label="Warnings")


_SHOWN = 0.62  # of the pixels of a figure: its letters are as tall as those of the tables, and sharp


def _figure(picture: Picture) -> _Html:
    narrow = picture.narrow and _tag(
        "source",
        media="(max-width: 48rem)",
        srcset=_data(picture.narrow),
        **_shown_size(picture.narrow, 0.85),
    )
    image = _tag(
        "img", src=_data(picture.png), alt=_alt(picture, _HTML_TABLES), **_shown_size(picture.png, _SHOWN)
    )
    return _tag(
        "figure",
        _tag("picture", narrow or _Html(""), image),
        _tag("figcaption", _sentence(picture.about) + "."),
        id=f"figure-{picture.name}",
    )


def _data(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _shown_size(png: bytes, share: float) -> dict[str, float]:
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))  # of the PNG's header
    return {"width": round(share * width), "height": round(share * height)}


def _definitions(pairs: Sequence[tuple[str, str]], class_: str | None = None) -> _Html:
    return _tag("dl", *(_joined([_tag("dt", name), _tag("dd", text)]) for name, text in pairs), class_=class_)


def _notes(notes: Sequence[str]) -> _Html:
    return _tag("ul", *(_tag("li", note) for note in notes), class_="notes") if notes else _Html("")


# --- Tables in HTML ---------------------------------------------------------------------------------

_LONG = 40  # characters of a name from which on it may take several lines
_LONG_TABLE = 16  # rows up to which a table is shown without being asked for
_STEP_HEADINGS = {"tokens/step", "accepted", "of tested", "α", "mean γ", *PARTS}
_Cell = Callable[[int, int], _Html | None]
"""What to put for the cell of a row and a column of a sheet instead of its text; ``None`` for the text."""


def _table(
    title: str,
    sheet: tables.Sheet,
    columns: Sequence[int] | None = None,
    cell: _Cell = lambda *_: None,
    *,
    folds: bool = True,
) -> _Html:
    """A table in a frame that scrolls sideways where it has to; the script makes its headings sort. A long one is
    behind its number of rows if it ``folds``."""
    chosen = range(len(sheet.headings)) if columns is None else columns
    head = _tag("tr", *(_tag("th", sheet.headings[i], scope="col") for i in chosen))
    lines = []
    for number, row in enumerate(sheet.rows):
        cells = []
        for i in chosen:
            shown = cell(number, i) or row[i]
            if i == 0:
                cells.append(_tag("th", shown, scope="row", class_="long" if len(row[0]) > _LONG else None))
            else:
                text = shown if isinstance(shown, _Html) else _breakable(shown)
                cells.append(_tag("td", text, data_value=_sort_value(sheet.values[number][i])))
        lines.append(_tag("tr", *cells, class_="best" if number in sheet.marked else None))
    whole = _tag("table", _tag("thead", head), _tag("tbody", *lines), data_sortable=True)
    frame = _tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=f"{title}, table")
    if folds and len(lines) > _LONG_TABLE:
        return _tag("details", _tag("summary", f"{len(lines)} rows"), frame)
    return frame


def _breakable(text: str) -> _Html:
    """The text of a cell, which may break before an interval but not within it."""
    parts = re.split(r"(\[[^\]]*\]\*?)", text)
    return _joined(_tag("span", part, class_="ratio") if i % 2 else part for i, part in enumerate(parts))


def _sort_value(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    return None if value is None or math.isnan(value) else repr(float(value))


def _speed_table(title: str, frame: pd.DataFrame, sheet: tables.Sheet) -> _Html:
    """The summary but for what is told of the steps: speedups first, each drawn beside its figure."""
    rows = frames.records(frame)
    scale = _Scale(rows)
    place = {heading: i for i, heading in enumerate(sheet.headings)}
    first = [place[heading] for heading in ("configuration", "speedup", "verdict") if heading in place]
    others = [i for heading, i in place.items() if heading not in _STEP_HEADINGS and i not in first]

    def cell(number: int, i: int) -> _Html | None:
        shown = sheet.rows[number][i]
        if i == place["speedup"]:
            return _joined([scale.draw(rows[number]), _breakable(shown)])
        if i == place.get("verdict") and shown in ("faster", "fastest", "slower"):
            return _tag("span", shown, class_="slower" if shown == "slower" else "faster")
        return None

    return _table(title, sheet, [*first, *others], cell, folds=False)


class _Scale:
    """Draws speedups of several rows to one logarithmic scale."""

    WIDTH, HEIGHT = 110.0, 14.0

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        values = [row["speedup"] for row in rows if row["speedup"] > 0]
        # A very wide interval would squeeze all others; it runs to the edge instead.
        lows = [max(row["speedup_low"], row["speedup"] / 2) for row in rows if row["speedup_low"] > 0]
        highs = [min(row["speedup_high"], row["speedup"] * 2) for row in rows if row["speedup_high"] > 0]
        self.low = math.log(min([0.8, *values, *lows])) - 0.03
        self.high = math.log(max([1.25, *values, *highs])) + 0.03

    def x(self, value: float) -> float:
        """Where a value is drawn, within the edges."""
        share = (math.log(value) - self.low) / (self.high - self.low) if value > 0 else 0.0
        return round(self.WIDTH * min(1.0, max(0.0, share)), 1)

    def draw(self, row: Mapping[str, Any]) -> _Html:
        """The interval as a line, the value as a dot, 1 as a dashed line; nothing without a value."""
        if not row["speedup"] > 0 or row["kind"] == "plain":
            return _Html("")
        middle = self.HEIGHT / 2
        parts = [_tag("line", x1=self.x(1.0), x2=self.x(1.0), y1=0, y2=self.HEIGHT, class_="one")]
        if not math.isnan(row["speedup_low"]):
            ends = self.x(row["speedup_low"]), self.x(row["speedup_high"])
            parts.append(_tag("line", x1=ends[0], x2=ends[1], y1=middle, y2=middle, class_="interval"))
        parts.append(_tag("circle", cx=self.x(row["speedup"]), cy=middle, r=3))
        kind = row["verdict"] if row["verdict"] in ("faster", "slower") else "unsure"
        return _tag(
            "svg",
            *parts,
            viewBox=f"0 0 {self.WIDTH:g} {self.HEIGHT:g}",
            width=self.WIDTH,
            height=self.HEIGHT,
            class_=kind,
            aria_hidden="true",
        )


_NO_INTERVAL = "[too few to say]"  # of tables.ratio_text


def _category_table(title: str, frame: pd.DataFrame) -> _Html:
    """The matrix of categories, marked where a speedup can be told from 1."""
    sheet = tables.sheet_of(frame)
    configs, categories = (list(dict.fromkeys(frame[name])) for name in ("config", "category"))
    verdicts = {(row["config"], row["category"]): row["verdict"] for row in frames.records(frame)}

    def cell(number: int, i: int) -> _Html | None:
        verdict = verdicts.get((configs[number], categories[i - 1])) if i else None
        if verdict not in ("faster", "slower"):
            return _breakable(sheet.rows[number][i].replace(_NO_INTERVAL, "[–]")) if i else None
        sign = _tag("span", "▲" if verdict == "faster" else "▼", role="img", aria_label=verdict)
        return _tag("span", _breakable(sheet.rows[number][i]), " ", sign, class_=verdict)

    return _joined(
        [
            _table(title, sheet, None, cell),
            _notes([*sheet.notes, "[–]: too few to say. ▲ ▼: the interval lies wholly above or below 1."]),
        ]
    )


def _cost_table(lines: list[list[str]]) -> _Html:
    if not lines:
        return _Html("")
    values = [[what, float(ms), float(times.split("= ")[1])] for what, ms, times in lines]
    sheet = tables.Sheet(_COST_HEADINGS, lines, values, [0, 0, 0], [])
    return _joined([_tag("h3", "Single passes"), _table("Single passes", sheet)])


_STYLE = """
:root { --page: #fff; --ink: #1b1f23; --soft: #59636e; --line: #d5dade; --band: #f5f7f8; --link: #0b5cad;
  --faster: #00568a; --slower: #a64100; --unsure: #6b7580; --paper: #fff; --shade: #0003; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14181c; --ink: #e4e8eb; --soft: #9aa5af; --line: #343c44; --band: #1c2228; --link: #7db7f0;
    --faster: #79b8e8; --slower: #f0a074; --unsure: #9aa5af; --paper: #e9ebed; --shade: #fff5; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(1rem, 4vw, 3rem) 4rem; max-width: 76rem; background: var(--page);
  color: var(--ink); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
a { color: var(--link); }
h1 { font-size: 1.05rem; font-weight: 600; color: var(--soft); margin: 1.25rem 0 .5rem; }
h2 { font-size: 1.3rem; margin: 2.75rem 0 .75rem; line-height: 1.25; }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .5rem; }
.run { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
.brand { font-weight: 700; color: var(--ink); }
.answer { margin: .25rem 0 1rem; padding: .1rem 0 .1rem 1rem; border-left: .3rem solid var(--unsure);
  font-size: clamp(1.2rem, 2.6vw, 1.65rem); line-height: 1.35; max-width: 46em; overflow-wrap: anywhere; }
.answer.faster { border-color: var(--faster); }
.answer.slower { border-color: var(--slower); }
p.answer, p.answer.faster, p.answer.slower { color: var(--ink); font-weight: 400; }
.answer b { font-weight: 650; }
pre { margin: 0 0 1rem; padding: .5rem .9rem; background: var(--band); white-space: pre-wrap; overflow-wrap: anywhere; }
.best > th { font-weight: 700; }
.ratio { white-space: nowrap; }
header ul { max-width: 62em; padding-left: 1.2rem; margin: .5rem 0 1rem; }
.warnings { list-style: none; padding: 0; }
.warnings li { margin: .5rem 0; padding: .55rem .9rem; background: var(--band);
  border-left: .25rem solid var(--unsure); }
.warnings .warning, .warnings .error { border-color: var(--slower); }
.warnings .error strong { color: var(--slower); }
.warnings em { font-style: normal; color: var(--soft); }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: 1.5rem 0 0; padding: .6rem 0;
  border: solid var(--line); border-width: 1px 0; font-size: .95rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .3rem; max-height: 85vh;
  width: fit-content; max-width: 100%; /* where it goes on behind the right edge, that edge is shaded */
  background: linear-gradient(to left, var(--page) 40%, transparent) right / 3.5rem 100% no-repeat local,
    linear-gradient(to left, var(--shade), transparent) right / 1.1rem 100% no-repeat scroll; }
summary { cursor: pointer; color: var(--link); padding: .2rem 0; }
.scroll:focus-visible, button:focus-visible { outline: 2px solid var(--link); outline-offset: 1px; }
table { border-collapse: separate; border-spacing: 0; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .6rem; text-align: right; border-bottom: 1px solid var(--line); font-weight: 400; }
tbody th { min-width: min(11rem, 30vw); }
th { background: var(--page); }
th:first-child { text-align: left; position: sticky; left: 0; z-index: 1; }
th.long { min-width: 16rem; white-space: normal; overflow-wrap: anywhere; }
thead th { position: sticky; top: 0; z-index: 1; background: var(--band); font-weight: 600; vertical-align: bottom; }
thead th:first-child { z-index: 2; }
tbody tr:last-child > * { border-bottom: 0; }
tbody tr:hover > * { background: var(--band); }
th button { all: unset; cursor: pointer; }
th button::after { content: "\\2195"; color: var(--soft); opacity: .55; padding-left: .25em; font-weight: 400; }
th[aria-sort=ascending] button::after { content: "\\2191"; opacity: 1; color: var(--ink); }
th[aria-sort=descending] button::after { content: "\\2193"; opacity: 1; color: var(--ink); }
svg { margin-right: .7rem; vertical-align: middle; color: var(--unsure); }
svg.faster { color: var(--faster); }
svg.slower { color: var(--slower); }
svg line { stroke: currentColor; stroke-width: 1.6; }
svg .one { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 2; }
svg circle { fill: currentColor; }
span.faster, span.slower { font-weight: 600; }
span.faster { color: var(--faster); }
span.slower { color: var(--slower); }
.notes { padding-left: 1.2rem; color: var(--soft); font-size: .9rem; max-width: 62em; }
figure { margin: 0 0 2rem; overflow-x: auto; }
figure img { display: block; max-width: 100%; height: auto; background: var(--paper); border: 1px solid var(--line);
  border-radius: .3rem; }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .35rem; }
@media (prefers-color-scheme: dark) { figure img { filter: brightness(.9); } }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: .5rem 1.5rem; margin: 0;
  max-width: 62em; }
dl.facts { gap: .2rem 1.5rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 34rem) {
  dl:not(.facts) { grid-template-columns: 1fr; gap: 0; }
  dl:not(.facts) dd { margin-bottom: .6rem; }
  td svg { display: none; }
  tbody th { min-width: 7rem; max-width: 9rem; white-space: normal; overflow-wrap: anywhere; }
}
@media print {
  :root { --page: #fff; --ink: #000; --soft: #444; --line: #bbb; --band: #f3f3f3; --link: #000; --faster: #00568a;
    --slower: #a64100; --unsure: #555; --paper: #fff; }
  @page { size: A4 landscape; margin: 12mm; }
  body { padding: 0; max-width: none; font-size: 10pt; }
  nav { display: none; }
  .scroll { overflow: visible; max-height: none; border: 0; background: none; }
  details::details-content { content-visibility: visible; } /* on paper nothing is folded */
  table { font-size: 7.5pt; }
  th, td { padding: .15rem .35rem; }
  th:first-child, thead th { position: static; }
  th button { display: contents; } /* or a heading repeated on the next page is empty */
  th button::after { content: none; }
  figure, tr, .warnings li, dd { break-inside: avoid; }
  .figures { display: grid; grid-template-columns: 1fr 1fr; gap: .5cm 1cm; align-items: start; }
  figure { overflow: visible; margin: 0; }
  figure img { max-height: 15cm; filter: none; }
  h2, h3 { break-after: avoid; }
}
"""

_SCRIPT = """
"use strict";
const byName = new Intl.Collator("en", { numeric: true });
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const body = table.tBodies[0], headings = [...table.tHead.rows[0].cells], original = [...body.rows];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    const key = (row) => row.cells[column].dataset.value;
    // Figures begin with the largest, names with A; a third press restores the order of the run.
    const orders = column ? ["descending", "ascending", null] : ["ascending", "descending", null];
    button.addEventListener("click", () => {
      const order = orders[(orders.indexOf(heading.getAttribute("aria-sort")) + 1) % 3];
      headings.forEach((each) => each.removeAttribute("aria-sort"));
      if (order) heading.setAttribute("aria-sort", order);
      const sign = order === "descending" ? -1 : 1;
      const compare = (a, b) => {
        if (!column) return sign * byName.compare(a.cells[0].textContent, b.cells[0].textContent);
        const [x, y] = [key(a), key(b)];
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
        return sign * (isNaN(x) ? x.localeCompare(y) : x - y);
      };
      body.append(...(order ? [...original].sort(compare) : original));
    });
  });
}
"""
