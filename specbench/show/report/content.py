"""What a report says, before it is escaped for anything.

A report opens with the answer in a sentence, says what is doubtful about it, shows tables and figures, and ends with
how and on what all was measured. Definitions of the figures: docs/metrics.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.base.errors import UsageError
from specbench.base.textsafe import counted, one_line
from specbench.decoding.theory import SharedCosts
from specbench.results import stats
from specbench.results.acceptance import PositionRow, positions
from specbench.results.advice import review
from specbench.results.heads import HeadRow, TrainingRow, head_rows, training_rows
from specbench.results.requests import RequestRow, request_rows
from specbench.results.results import Results
from specbench.results.run import FOREIGN, Run, RunWarning
from specbench.results.summary import Categories, Summary, baseline_name, categorize, summarize
from specbench.show.answer import Answer, find_answers
from specbench.show.plots import FIGURES, Look, draw_figures, figure_bytes, save_figure

if TYPE_CHECKING:
    import pandas as pd

LONG_TABLE = 16
"""Rows up to which a table is shown without being asked for."""

COST_HEADINGS = ["pass", "ms", "relative"]
"""Of ``Report.costs``."""


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
        summary, requests, categories, positions, heads, training: Rows of its tables.
        pictures: Figures.
        missing: Why a figure is not there, by name.
        method: How it was measured, heading and text.
        costs: Heading and lines of the tables of single passes.
        facts: What it was measured on: groups of names and values.
    """

    name: str
    answers: list[Answer]
    warnings: list[RunWarning]
    summary: Summary
    requests: list[RequestRow]
    categories: Categories
    positions: list[PositionRow]
    heads: list[HeadRow]
    training: list[TrainingRow]
    pictures: list[Picture]
    missing: dict[str, str]
    method: list[tuple[str, str]]
    costs: list[list[str]]
    facts: dict[str, list[tuple[str, str]]]


def make_report(results: Results, name: str, plots: Path) -> Report:
    """Everything a report says about one run.

    Args:
        results: The run.
        name: Of the run.
        plots: An existing folder for the figures.

    Raises:
        UsageError: No generation has finished. RunError: A figure cannot be written.
    """
    run = results.run
    if results.done.empty:
        raise UsageError(
            "There is nothing to report: no generation of this run has finished.", "Go on with its sweep."
        )
    summary, categories = summarize(results), categorize(results)
    pictures, missing = _pictures(results, plots)
    return Report(
        name=one_line(name),
        answers=find_answers(results, summary, categories),
        warnings=_warnings(results, summary),
        summary=summary,
        requests=request_rows(results),
        categories=categories,
        positions=positions(results),
        heads=head_rows(results),
        training=training_rows(results),
        pictures=pictures,
        missing=missing,
        method=_method(results),
        costs=_costs(run),
        facts=_facts(run),
    )


_NARROW, _NARROW_DPI = 3.6, 150  # inches and resolution of a figure for narrow screens, which it fills


def _pictures(results: Results, folder: Path) -> tuple[list[Picture], dict[str, str]]:
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


# --- What is doubtful, how and on what it was measured ----------------------------------------------


def _warnings(results: Results, summary: Summary) -> list[RunWarning]:
    """The gravest first."""
    run, measured = results.run, len(results.generations)
    planned = run.repeats * len(run.configs) * sum(prompt.turns for prompt in run.prompts)
    found = []
    if not run.finished and not _is_tuned(run):
        # A search measures no more of its grid than it has to.
        searched = bool(run.options.get("tune") or run.tuning)
        there = (
            counted(measured, "generation is", "generations are")
            if searched
            else f"{measured} of {planned} generations are"
        )
        found.append(
            RunWarning(
                "unfinished",
                "warning",
                f"The {'search' if searched else 'sweep'} has not come to its end: {there} there.",
                "Go on with it: the same command with --resume.",
            )
        )
    differing = [what for change in run.changes for what in change.differing]
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
        for problem in results.problems
    ]
    grave = {"error": 0, "warning": 1, "info": 2}
    return sorted([*found, *review(results, summary)], key=lambda warning: grave[warning.severity])


def _is_tuned(run: Run) -> bool:
    """Whether `specbench tune` has stored what it came to."""
    return run.tuning is not None and run.tuning.answer is not None


def _method(results: Results) -> list[tuple[str, str]]:
    run, done = results.run, results.done
    categories = list(dict.fromkeys(done["category"].dropna().map(one_line)))
    repeats, configs = done["repeat"].nunique(), done["config"].nunique()
    temperatures = sorted(done["temperature"].dropna().unique())
    length = f"up to {run.max_new_tokens} tokens" if run.max_new_tokens else "their natural length"
    if run.ignore_eos:
        length = length.replace("up to ", "") + " (end tokens are ignored)"
    warmups = run.warmup
    foreign = bool(done["kind"].isin(FOREIGN).any())
    side_by_side = bool((done["group"] != "").any())
    together = "groups of prompts" if side_by_side else "prompts"
    servers = bool((done["kind"] == "server").any())
    over = baseline_name(run)
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
        *(_method_of_batches(done) if side_by_side else ()),
        (
            "Interleaving",
            f"In every repeat all configurations{' of a batch' if side_by_side else ''} decode the same"
            f" {'group of prompts' if side_by_side else 'prompt'} back to back, in a fresh random order (seed"
            f" {run.seed}), so that drift of the machine hits all alike."
            f" {'Every other repeat reverses the order of the one before' if servers else 'Models stay loaded'};"
            f" {counted(warmups, 'warm-up generation')} per configuration"
            f" {'does' if warmups == 1 else 'do'} not count.",
        ),
        *(_method_of_servers(run) if servers else ()),
        (
            "Baseline",
            f"{over} is the first server that was named." if servers else _plain_decoding(foreign=foreign),
        ),
        (
            "Speedup",
            f"Throughput of a group of requests over that of {over} with the same prompts, batch and repeat,"
            " averaged within a group, then as a geometric mean over groups. By category: each request's tokens/s from"
            " its arrival to its end."
            if side_by_side
            else f"Decode tokens/s over those of {over} for the same prompt, turn and repeat: the ratio of each"
            " pair, averaged within a prompt, then as a geometric mean over prompts. The time to first token is apart;"
            " 'with TTFT' includes it. 'Pooled' is all tokens over all seconds.",
        ),
        (
            "Intervals",
            f"{stats.CONFIDENCE:.0%}, over {together}: they say what other {together} of this kind would give. Repeats"
            f" sharpen one of them and never count as {together}. Faster or slower: it lies wholly above or below 1.",
        ),
        *(_METHOD_OF_TUNING if _is_tuned(run) else ()),
        *(_ACCEPTANCE_OF_SERVERS if servers else _ACCEPTANCE),
        ("Definitions", "All figures with formula and pitfall: docs/metrics.md of specbench."),
    ]


_METHOD_OF_TUNING = [
    (
        "Tuning",
        "A search by `specbench tune`: in every round only those decode the prompt that are still in question, so rows"
        " rest on different prompts. Its speedups and verdicts are those that it ended with, from times less what held"
        " single generations up (docs/tuning.md); 'with TTFT' and tokens/s are the times as they were.",
    )
]
_ACCEPTANCE = [
    (
        "Acceptance",
        "'Accepted': accepted over drafted tokens; 'of tested': over those that were tested, behind no rejection; α:"
        " mean overlap of the drafter's and the target's distribution where tested. 'Tokens/step' counts the corrected"
        " or bonus token too.",
    ),
    (
        "Predicted",
        "What theory makes of the acceptance and of the measured times of single passes: 'predicted' from acceptance by"
        " position, 'i.i.d.' from α alone, of trees by depth and by rank. Measured less means that something else takes"
        " time.",
    ),
]
_ACCEPTANCE_OF_SERVERS = [
    (
        "Acceptance",
        "'Accepted': accepted over drafted tokens, as the server tells them of its answers or counts them meanwhile."
        " 'Tokens/step' follows from it and counts the corrected or bonus token too.",
    )
]


def _plain_decoding(*, foreign: bool) -> str:
    return (
        "Plain decoding is the same loop, with the same cache and the same weights, and a drafter that proposes"
        " nothing." + (" Rows named transformers are that library's own generate." if foreign else "")
    )


def _method_of_servers(run: Run) -> list[tuple[str, str]]:
    salt = run.options.get("salt")
    first_line = {
        "shared": " Every prompt begins with a line that no cache knows, the same one for all servers.",
        "each": " Every prompt begins with a line that no cache knows, another one for each server.",
    }.get(
        str(salt),
        " Their caches of prompts are switched off, or given nothing to find, by fields of the requests.",
    )
    return [
        (
            "Servers",
            "Times are those of the client, which is the machine named below: from when a request is sent to when text"
            " is read. Tokens are those that the server names or counts, held against the target's tokenizer where it"
            " is at hand; pieces of a stream are no tokens." + first_line,
        )
    ]


def _method_of_batches(done: pd.DataFrame) -> list[tuple[str, str]]:
    batches = ", ".join(f"{batch:g}" for batch in sorted(done["batch"].dropna().unique()))
    arrivals = sorted({one_line(each) for each in done["arrivals"].dropna()})
    return [
        (
            "Side by side",
            f"So many requests at a time: {batches}. Requests came as {', '.join(arrivals)}: closed:N is a closed loop"
            " of N clients, each of which sends its next request when the last has been answered, so that the batch is"
            " full until the last measured request has ended; poisson:RATE are so many per second at random times, the"
            " same for all configurations, with idle time skipped.",
        )
    ]


def _costs(run: Run) -> list[list[str]]:
    """Lines of a table of single passes: what, milliseconds, in target passes with one token."""
    costs = run.costs
    shared = [] if run.shared_costs is None else list(_shared_costs(run.shared_costs))
    if costs is None or 1 not in costs.target_s:
        return shared
    lines = [(f"target, {counted(n, 'token')}", s, f"v({n})") for n, s in costs.target_s.items()]
    for name, seconds in costs.drafter_s.items():
        lines.append((f"drafter {one_line(name)}, 1 token", seconds, "c"))
        rows = costs.rows_s.get(name, {})
        lines += [(f"drafter {one_line(name)}, behind {n} nodes", s, f"c({n})") for n, s in rows.items()]
    return [
        [what, f"{1000 * s:.2f}", f"{sign} = {_share(s / costs.target_s[1])}"] for what, s, sign in lines
    ] + shared


def _shared_costs(costs: SharedCosts) -> Iterator[list[str]]:
    """Of passes that requests share, in target passes with one token of each of them."""
    for requests, times in costs.target_s.items():
        if 1 not in times:
            continue
        of_all = counted(requests, "request")
        for n, s in times.items():
            sign = f"v({n}) at {requests}"
            yield [
                f"target, {of_all}, {counted(n, 'token')} each",
                f"{1000 * s:.2f}",
                f"{sign} = {_share(s / times[1])}",
            ]
        for name, drafts in costs.drafter_s.items():
            if requests in drafts:
                what = f"drafter {one_line(name)}, {of_all}, 1 token each"
                s = drafts[requests]
                yield [what, f"{1000 * s:.2f}", f"c at {requests} = {_share(s / times[1])}"]


_MACHINE = {
    "cpu": "processor", "cpu_capability": "instruction set", "physical_cores": "cores", "cores": "logical cores",
    "threads": "threads", "huge_pages": "huge pages", "ram_gb": "memory (GB)", "devices": "accelerators",
    "os": "system", "python": "Python",
    "torch": "torch", "transformers": "transformers", "specbench": "specbench", "git_commit": "commit",
}  # fmt: skip
_TARGET = {"name": "target", "dtype": "dtype", "device": "device", "fingerprint": "fingerprint"}


def _facts(run: Run) -> dict[str, list[tuple[str, str]]]:
    """Machine, models and command."""
    machine = {name: getattr(run.environment, name) for name in _MACHINE}
    machine["specbench"] = machine["specbench"] or run.specbench
    models = [(what, _shown(getattr(run.target, name))) for name, what in _TARGET.items()]
    drafters = {config.drafter: config.drafter_fingerprint for config in run.configs}
    kind = "server" if any(config.kind == "server" for config in run.configs) else "drafter"
    models += [
        (kind, one_line(name) + (f", fingerprint {one_line(weights)}" if weights else ""))
        for name, weights in drafters.items()
        if name != "none"
    ]
    command = shlex.join(["specbench", *map(one_line, run.command)])
    made = [
        ("command", command),
        ("begun", _shown(run.created)),
        ("ended", _shown(run.finished)),
        ("run id", _shown(run.run_id)),
    ]
    return {
        "Machine": [
            (what, _shown(machine[name])) for name, what in _MACHINE.items() if machine[name] is not None
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


def alternative(picture: Picture, renamed: Mapping[str, str] | None = None) -> str:
    """What stands in for a picture: what it shows, and which table has its figures."""
    table = FIGURES[picture.name].table
    table = (renamed or {}).get(table, table)
    return f"Chart: {picture.about}." + (f" Its figures stand in the table '{table}'." if table else "")


def missing_figures(report: Report) -> list[str]:
    """Which figures could not be drawn and why, a sentence for each reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in report.missing.items():
        reasons.setdefault(reason, []).append(FIGURES[name].about)
    return [f"Not drawn: {', '.join(abouts)} ({reason.rstrip('.')})." for reason, abouts in reasons.items()]
