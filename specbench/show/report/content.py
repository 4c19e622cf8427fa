"""The content of a report, before it is escaped for HTML or Markdown.

A report begins with the answer in a sentence and with warnings, then shows tables and figures, and ends with the method
of measurement and the machine. Definitions of the metrics: docs/metrics.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.base.errors import UsageError
from specbench.base.textsafe import counted, one_line
from specbench.decoding.theory import SharedCosts
from specbench.results import stats
from specbench.results.acceptance import positions
from specbench.results.advice import review
from specbench.results.heads import head_rows, training_rows
from specbench.results.requests import request_rows
from specbench.results.results import Results
from specbench.results.run import FOREIGN, Run, RunWarning, StoredSuite
from specbench.results.summary import Categories, Summary, baseline_name, categorize, summarize
from specbench.results.turns import turn_rows
from specbench.show import tables
from specbench.show.answer import Answer, find_answers
from specbench.show.document import Sheet
from specbench.show.plots import FIGURES, Look, draw_figures, figure_bytes, save_figure
from specbench.show.report.charts import Chart, make_charts

if TYPE_CHECKING:
    import pandas as pd

LONG_TABLE = 16
"""Rows above which a table is folded."""

SUMMARY, CATEGORIES = "Summary", "By category"
"""Titles of two tables."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure: its name, a description, a PNG, and possibly a second PNG for narrow screens."""

    name: str
    about: str
    png: bytes
    narrow: bytes | None = None


@dataclass(frozen=True)
class Report:
    """The content of a report.

    Attributes:
        name: Name of the run.
        answers: The answers, one per temperature.
        warnings: Warnings, the gravest first.
        summary, categories: Metrics of all configurations.
        tables: Tables by title, in order.
        pictures: Figures.
        charts: Charts of the page, by the name of the picture that they replace there.
        missing: Sentences on which figures are missing and why.
        method: How everything was measured, as titles and texts.
        costs: Times of single forward passes.
        facts: Machine, versions and models, as groups of names and values.
    """

    name: str
    answers: list[Answer]
    warnings: list[RunWarning]
    summary: Summary
    categories: Categories
    tables: dict[str, Sheet]
    pictures: list[Picture]
    charts: dict[str, Chart]
    missing: list[str]
    method: list[tuple[str, str]]
    costs: Sheet
    facts: dict[str, list[tuple[str, str]]]


def make_report(results: Results, name: str, plots: Path) -> Report:
    """Return the content of a report about one run.

    Args:
        results: The run.
        name: Name of the run.
        plots: An existing folder for the figures.

    Raises:
        UsageError: No generation has finished. RunError: A figure cannot be written.
    """
    if results.done.empty:
        raise UsageError(
            "There is nothing to report: no generation of this run has finished.", "Continue its sweep."
        )
    summary, categories = summarize(results), categorize(results)
    pictures, missing = _pictures(results, plots)
    sheets = {
        "Batches of requests": tables.request_sheet(request_rows(results)),
        "Conversations by turn": tables.turn_sheet(turn_rows(results)),
        CATEGORIES: tables.category_sheet(categories, summary),
        "Trained heads": tables.head_sheet(head_rows(results)),
        "Training": tables.training_sheet(training_rows(results)),
        "Acceptance by position": tables.position_sheet(positions(results)),
    }
    folded = {
        title: replace(each, folded=len(each.rows) > LONG_TABLE)
        for title, each in sheets.items()
        if each.rows
    }
    lines = list(_costs(results.run))
    return Report(
        name=one_line(name),
        answers=find_answers(results, summary, categories),
        warnings=_warnings(results, summary),
        summary=summary,
        categories=categories,
        tables={SUMMARY: tables.summary_sheet(summary), **folded},
        pictures=pictures,
        charts=make_charts(results) if pictures else {},
        missing=_why_missing(missing),
        method=_method(results),
        costs=Sheet(
            ["pass", "ms", "relative"],
            [[what, f"{1000 * s:.2f}", f"{sign} = {_share(times)}"] for what, s, sign, times in lines],
            [[what, 1000 * s, times] for what, s, _, times in lines],
        ),
        facts=_facts(results.run),
    )


_NARROW, _NARROW_DPI = 3.6, 150  # inches and resolution of a figure for narrow screens, which it fills


def _pictures(results: Results, folder: Path) -> tuple[list[Picture], dict[str, str]]:
    """Return the figures of a run, and sentences on why others are missing."""
    try:
        drawn = draw_figures(results)
    except UsageError as error:
        return [], dict.fromkeys(FIGURES, error.message)
    narrow = draw_figures(results, drawn.figures, Look(_NARROW)).figures
    pictures = []
    for name, figure in drawn.figures.items():
        path = folder / f"{name}.png"
        save_figure(figure, path)
        small = figure_bytes(narrow[name], "png", dpi=_NARROW_DPI) if name in narrow else None
        pictures.append(Picture(name, FIGURES[name].about, path.read_bytes(), small))
    return pictures, drawn.skipped


def _why_missing(missing: Mapping[str, str]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, reason in missing.items():
        reasons.setdefault(reason.rstrip("."), []).append(FIGURES[name].about)
    return [f"Not drawn: {', '.join(abouts)} ({reason})." for reason, abouts in reasons.items()]


def alternative(picture: Picture, renamed: Mapping[str, str] | None = None) -> str:
    """Return the alternative text of a picture, which names the table with its numbers."""
    table = FIGURES[picture.name].table
    table = (renamed or {}).get(table, table)
    return f"Chart: {picture.about}." + (f" Its figures are in the table '{table}'." if table else "")


# --- What is doubtful, how and on what it was measured ----------------------------------------------


def _warnings(results: Results, summary: Summary) -> list[RunWarning]:
    run, measured = results.run, len(results.generations)
    found = []
    if not run.finished and not _is_tuned(run):
        searched = bool(run.options.get("tune") or run.tuning)  # which measures only part of its grid
        planned = run.repeats * len(run.configs) * sum(prompt.turns for prompt in run.prompts)
        there = counted(measured, "generation") if searched else f"{measured} of {planned} generations"
        found.append(
            RunWarning(
                "unfinished",
                "warning",
                f"The {'search' if searched else 'sweep'} is not finished: it has {there}.",
                "Continue it: the same command with --resume.",
            )
        )
    differing = [what for change in run.changes for what in change.differing]
    if differing:
        changed = f"The sweep was continued although something had changed ({'; '.join(differing)})."
        advice = "Measure again to get all results from one setup."
        found.append(RunWarning("changed", "warning", changed, advice))
    advice = "They are measured again with --resume."
    found += [RunWarning("lines", "warning", problem, advice) for problem in results.problems]
    gravity = ("error", "warning", "info").index
    return sorted([*found, *review(results, summary)], key=lambda warning: gravity(warning.severity))


def _is_tuned(run: Run) -> bool:
    return run.tuning is not None and run.tuning.answer is not None


def _method(results: Results) -> list[tuple[str, str]]:
    run, done = results.run, results.done
    categories = list(dict.fromkeys(done["category"].dropna().map(one_line)))
    prompts, configs, repeats = (done[name].nunique() for name in ("prompt", "config", "repeat"))
    temperatures = ", ".join(f"{each:g}" for each in sorted(done["temperature"].dropna().unique()))
    length = f"up to {run.max_new_tokens} tokens" if run.max_new_tokens else "their natural length"
    if run.ignore_eos:
        length = length.replace("up to ", "") + " (end tokens are ignored)"
    side_by_side = bool((done["group"] != "").any())
    servers = bool((done["kind"] == "server").any())
    unit, units = ("group of prompts", "groups of prompts") if side_by_side else ("prompt", "prompts")
    over = baseline_name(run)
    plain = "Plain decoding is the same loop, with the same cache and weights, and a drafter that proposes nothing."
    if done["kind"].isin(FOREIGN).any():
        plain += " Rows named transformers are that library's own generate."
    return [
        (
            "Measured",
            f"{counted(prompts, 'prompt')} of {counted(len(categories), 'category', 'categories')}"
            f" ({', '.join(categories)}), {counted(configs, 'configuration')}, {counted(repeats, 'repeat')}; answers of"
            f" {length}; {'greedy' if temperatures == '0' else f'temperature {temperatures}'}.",
        ),
        *([("Suites", " ".join(map(_suite_text, run.suites)))] if run.suites else []),
        *(_method_of_batches(done) if side_by_side else ()),
        *(_method_of_contexts(run, done) if done["context"].notna().any() else ()),
        (
            "Interleaving",
            f"In every repeat all configurations{' of a batch' if side_by_side else ''} decode the same {unit} back to"
            f" back, in a new random order (seed {run.seed}), so that drift of the machine affects all equally."
            f" {'Every other repeat reverses the order of the one before' if servers else 'Models stay loaded'};"
            f" {counted(run.warmup, 'warm-up generation')} per configuration"
            f" {'does' if run.warmup == 1 else 'do'} not count.",
        ),
        *(_method_of_servers(run) if servers else ()),
        ("Baseline", f"{over} is the first server that was named." if servers else plain),
        (
            "Speedup",
            f"Throughput of a group of requests over that of {over} with the same prompts, batch and repeat, averaged"
            " within a group, then as a geometric mean over groups. By category: each request's tokens/s from its"
            " arrival to its end."
            if side_by_side
            else f"Decode tokens/s over those of {over} for the same prompt, turn and repeat: the ratio of each pair,"
            " averaged within a prompt, then as a geometric mean over prompts. It excludes the time to first token,"
            " which 'with TTFT' includes. 'Pooled' is all tokens over all seconds.",
        ),
        (
            "Intervals",
            f"{stats.CONFIDENCE:.0%}, over {units}: what other {units} of this kind would give. Repeats make each"
            f" {unit} more precise and never count as {units}. Faster or slower: the interval lies wholly above or"
            " below 1.",
        ),
        *([] if servers else [("Energy", _method_of_energy(run, done))]),
        *([_METHOD_OF_TUNING] if _is_tuned(run) else []),
        *([_ACCEPTANCE_OF_SERVERS] if servers else _ACCEPTANCE),
        ("Definitions", "All figures with formula and pitfall: docs/metrics.md of specbench."),
    ]


def _suite_text(suite: StoredSuite) -> str:
    name, source, terms = (
        one_line(each or "not known") for each in (suite.name, suite.source, suite.license)
    )
    return f"{name}: {suite.prompts} prompts, {source}, sha256 {one_line(suite.sha256)}, license {terms}."


_METHOD_OF_TUNING = (
    "Tuning",
    "A search by `specbench tune`: each round measures only the candidates still in the race, so configurations"
    " were measured on different prompts. Speedups and verdicts are those of its end, with noise correction"
    " (docs/tuning.md); 'with TTFT' and"
    " tokens/s are without.",
)
_ACCEPTANCE = [
    (
        "Acceptance",
        "'Accepted': accepted over drafted tokens; 'of tested': over those tested, that is not after a rejection; α:"
        " mean overlap of the drafter's and the target's distribution where tested. 'Tokens/step' includes the"
        " correction or bonus token.",
    ),
    (
        "Predicted",
        "What theory expects from the acceptance and the measured times of single forward passes: 'predicted' from"
        " acceptance by position, 'i.i.d.' from α alone, for trees by depth and by rank. A smaller measured speedup"
        " means that something else takes time.",
    ),
]
_ACCEPTANCE_OF_SERVERS = (
    "Acceptance",
    "'Accepted': accepted over drafted tokens, as the server reports them with its answers or counts them meanwhile."
    " 'Tokens/step' follows from it and includes the correction or bonus token.",
)
_SALTS = {
    "shared": "Every prompt begins with a unique line, the same for all servers, so that no prompt cache has it.",
    "each": "Every prompt begins with a unique line, different for each server, so that no prompt cache has it.",
}


def _method_of_servers(run: Run) -> list[tuple[str, str]]:
    if run.options.get("prompt_cache") == "keep":
        caches = "Later turns of a conversation may find earlier ones in the prompt cache, but no other conversation."
    else:
        caches = _SALTS.get(
            str(run.options.get("salt")), "Fields of the requests switch their prompt caches off."
        )
    text = (
        "Times are those of the client on the machine below: from sending a request to reading text. Tokens are those"
        " that the server names or counts, compared with the target's tokenizer where it is available; pieces of a"
        " stream are not tokens."
    )
    return [("Servers", f"{text} {caches}")]


def _method_of_batches(done: pd.DataFrame) -> list[tuple[str, str]]:
    batches = ", ".join(f"{batch:g}" for batch in sorted(done["batch"].dropna().unique()))
    arrivals = sorted({one_line(each) for each in done["arrivals"].dropna()})
    return [
        (
            "Side by side",
            f"Requests at a time: {batches}. Arrivals: {', '.join(arrivals)}. closed:N is a closed loop of N clients,"
            " each of which sends its next request when the last is answered, so that the batch is full until the last"
            " measured request has ended; poisson:RATE is that many per second at random times, the same for all"
            " configurations, with idle time skipped.",
        )
    ]


def _method_of_energy(run: Run, done: pd.DataFrame) -> str:
    if done["energy_j"].isna().all():
        return (
            "No counter could be read: RAPL needs the right to read /sys/class/powercap, NVML an NVIDIA GPU since"
            " Volta."
        )
    return (
        f"J/token: joules of {_shown(run.environment.energy)} from the start to the end of each generation, prefill and"
        " other programs included, over its tokens."
    )


def _method_of_contexts(run: Run, done: pd.DataFrame) -> list[tuple[str, str]]:
    contexts = ", ".join(f"{context:,.0f}" for context in sorted(done["context"].dropna().unique()))
    name = one_line(str(run.options.get("context_text") or "").rpartition(" ")[0])
    return [
        (
            "Context",
            f"Lengths of prompts: {contexts} tokens, exactly. A passage of {name} stands in front of each question;"
            " no part of it is repeated in a prompt. Speedups are over the baseline at the same length.",
        )
    ]


def _costs(run: Run) -> Iterator[tuple[str, float, str, float]]:
    """Yield the costs of forward passes:
    description, seconds, symbol, and ratio to the target's forward with one token.
    """
    costs = run.costs
    if costs is not None and costs.target_s.get(1):
        one = costs.target_s[1]
        for n, s in costs.target_s.items():
            yield f"target, {counted(n, 'token')}", s, f"v({n})", s / one
            if n in costs.context_s:
                s = 1000 * costs.context_s[n]
                yield f"the same, each further 1,000 tokens of context (k({n}))", s, f"k({n})", s / one
        for name, seconds in costs.drafter_s.items():
            yield f"drafter {one_line(name)}, 1 token", seconds, "c", seconds / one
            if name in costs.later_s:
                s = costs.later_s[name]
                yield f"drafter {one_line(name)}, each later pass of a draft", s, "c later", s / one
            for n, s in costs.rows_s.get(name, {}).items():
                yield f"drafter {one_line(name)}, after {n} nodes", s, f"c({n})", s / one
    if run.shared_costs is not None:
        yield from _shared_costs(run.shared_costs)


def _shared_costs(costs: SharedCosts) -> Iterator[tuple[str, float, str, float]]:
    """Yield the costs of shared forward passes, relative to the target's forward with one token of each request."""
    for requests, times in costs.target_s.items():
        if not times.get(1):
            continue
        of_all = counted(requests, "request")
        for n, s in times.items():
            yield f"target, {of_all}, {counted(n, 'token')} each", s, f"v({n}) at {requests}", s / times[1]
        for name, drafts in costs.drafter_s.items():
            if requests in drafts:
                s = drafts[requests]
                what = f"drafter {one_line(name)}, {of_all}, 1 token each"
                yield what, s, f"c at {requests}", s / times[1]


_MACHINE = {
    "cpu": "processor", "cpu_capability": "instruction set", "physical_cores": "cores", "cores": "logical cores",
    "threads": "threads", "huge_pages": "huge pages", "ram_gb": "memory (GB)", "devices": "accelerators",
    "os": "system", "python": "Python",
    "torch": "torch", "transformers": "transformers", "specbench": "specbench", "git_commit": "commit",
}  # fmt: skip


def _facts(run: Run) -> dict[str, list[tuple[str, str]]]:
    machine = {name: getattr(run.environment, name) for name in _MACHINE}
    machine["specbench"] = machine["specbench"] or run.specbench
    target = run.target
    models = {
        "target": target.name, "dtype": target.dtype, "device": target.device, "fingerprint": target.fingerprint
    }  # fmt: skip
    drafters = {config.drafter: config.drafter_fingerprint for config in run.configs}
    kind = "server" if any(config.kind == "server" for config in run.configs) else "drafter"
    times = {"started": run.created, "ended": run.finished, "run id": run.run_id}
    return {
        "Machine": [
            (what, _shown(machine[name])) for name, what in _MACHINE.items() if machine[name] is not None
        ],
        "Models": [(what, _shown(value)) for what, value in models.items()]
        + [
            (kind, one_line(name) + (f", fingerprint {one_line(weights)}" if weights else ""))
            for name, weights in drafters.items()
            if name != "none"
        ],
        "Run": [("command", _command(run)), *((what, _shown(value)) for what, value in times.items())],
    }


def _command(run: Run) -> str:
    """Return the command that measured the run, without its output folder: that may have been renamed since."""
    folders = ("-o", "--out", "--results")
    words = [
        one_line(word)
        for word, before in zip(run.command, ["", *run.command], strict=False)
        if before not in folders and word.partition("=")[0] not in folders
    ]
    return shlex.join(["specbench", *words])


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(one_line, value)) or "none"
    return "–" if value is None else one_line(value)


def _share(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
