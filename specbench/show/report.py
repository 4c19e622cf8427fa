"""The report of a run: one HTML file, which loads no other, and a Markdown file with image files next to it.

A report begins with the answer in a sentence, a chart and a table, then shows warnings, more figures and tables, and
ends with the method of measurement and the machine. Definitions of the metrics: docs/metrics.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from specbench.base.errors import UsageError
from specbench.base.files import file_errors, refuse_link, write_text
from specbench.base.textsafe import counted, one_line
from specbench.findings.catalog import Finding, Severity
from specbench.findings.review import review
from specbench.results import stats
from specbench.results.published import write_lengths
from specbench.results.results import Results, load_results
from specbench.results.run import FOREIGN, Run
from specbench.results.summary import Summary
from specbench.show import tables
from specbench.show.answer import Answer, answer_parts, find_answers
from specbench.show.document import Facts, Heading, Image, Items, Part, Sheet, to_markdown
from specbench.show.figures import FIGURES
from specbench.show.html import to_html
from specbench.show.plots import draw_figures, figure_bytes, save_figure

_PIXELS_PER_INCH = 124
"""The scale at which the letters in figures are as tall as those in tables."""


@dataclass(frozen=True)
class Report:
    """A report.

    Attributes:
        name: Name of the run.
        answers: The answers, one per temperature.
        findings: What is doubtful, the gravest first.
        parts: The report as a document.
    """

    name: str
    answers: list[Answer]
    findings: list[Finding]
    parts: list[Part]


def write_report(
    folder: Path,
    out: Path | None = None,
    limits: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Report, list[Path]]:
    """Write ``report.html``, ``report.md``, its figures in ``plots/``, and accepted lengths in ``lengths/``.

    Args:
        folder: The run's folder.
        out: The folder to write to; ``None`` for the run's folder.
        limits: See ``make_report``.

    Returns:
        The report, and the paths of ``report.html``, ``report.md`` and the files of lengths.

    Raises:
        UsageError: There is no run, no generation of it has finished, or a file to write is a symbolic link.
        RunError: The report cannot be written.
    """
    results = load_results(folder)
    out = folder if out is None else out
    with file_errors(f"The report cannot be written to {str(out)!r}", "Give another --out."):
        refuse_link(out / "plots")
        (out / "plots").mkdir(parents=True, exist_ok=True)
        report = make_report(results, folder.resolve().name, out / "plots", limits)
        texts = {"report.html": to_html(report.name, report.parts), "report.md": to_markdown(*report.parts)}
        for name, text in texts.items():
            write_text(out / name, text)
        refuse_link(out / "lengths")
        lengths = write_lengths(Summary(results), out / "lengths")
    return report, [*(out / name for name in texts), *lengths]


def make_report(
    results: Results,
    name: str,
    plots: Path,
    limits: Mapping[str, float] = MappingProxyType({}),
) -> Report:
    """Return a report about one run.

    Args:
        results: The run.
        name: Name of the run.
        plots: An existing folder for the figures of the Markdown file.
        limits: Limits of latency in seconds, by name, for goodput.

    Raises:
        UsageError: No generation has finished. RunError: A figure cannot be written.
    """
    if results.done.empty:
        raise UsageError(
            "There is nothing to report: no generation of this run has finished.", "Continue its sweep."
        )
    if limits and results.groups.empty:
        raise UsageError(
            "No requests were decoded side by side, so there is no goodput.", "Measure them with --batch."
        )
    name, summary = one_line(name), Summary(results, limits)
    answers, findings = find_answers(summary), _findings(summary)
    figures, missing = _figures(summary, plots)
    parts: list[Part] = [Heading(name, 1)]
    for answer in answers:
        parts += [*answer_parts(answer), Items(answer.details)]
    parts += [*figures[:1], Heading("Speed"), tables.summary_sheet(summary)]
    if findings:
        parts += [Heading("Warnings"), Items([finding.line for finding in findings])]
    parts += [Heading("Figures"), *figures[1:], Items([missing] if missing else [])]
    for title, sheet in (tables.service_sheets(summary) | tables.detail_sheets(summary)).items():
        parts += [Heading(title), sheet]
    parts += [Heading("How it was measured"), _facts_part(_method(results))]
    if costs := list(_costs(results.run)):
        cells = [[what, f"{1000 * s:.2f}", f"{sign} = {_share(times)}"] for what, s, sign, times in costs]
        values = [[what, 1000 * s, times] for what, s, _, times in costs]
        parts += [Heading("Single passes", 3), Sheet(["pass", "ms", "relative"], cells, values)]
    parts += [Heading("Measured on")]
    for group, facts in _facts(results.run).items():
        parts += [Heading(group, 3), _facts_part(facts)]
    return Report(name, answers, findings, parts)


def _facts_part(pairs: Sequence[tuple[str, str]]) -> Facts:
    return Facts([(name, [(text, "")]) for name, text in pairs])


def _figures(summary: Summary, folder: Path) -> tuple[list[Image], str]:
    """Return the figures of a run, and a sentence on those that are missing."""
    try:
        figures, skipped = draw_figures(summary)
    except UsageError as error:
        return [], error.message
    images = []
    for name, figure in figures.items():
        save_figure(figure, folder / f"{name}.png")
        about, table = FIGURES[name]
        width = round(_PIXELS_PER_INCH * figure.get_figwidth())
        images.append(
            Image(
                f"Chart: {about}. Its figures are in the table '{table}'.",
                f"plots/{name}.png",
                figure_bytes(figure, "svg", letters=True),
                width,
            )
        )
    reasons: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        reasons.setdefault(reason.rstrip("."), []).append(name)
    missing = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items())
    return images, f"Not drawn: {missing}." if missing else ""


# --- What is doubtful, how and on what it was measured ----------------------------------------------


def _findings(summary: Summary) -> list[Finding]:
    """Return what is doubtful about a run, the gravest first."""
    run, results, measured = summary.run, summary.results, len(summary.results.generations)
    found = [Finding("lines", problem=problem) for problem in results.problems]
    if not run.finished and not _is_tuned(run):
        planned = run.repeats * len(run.configs) * sum(prompt.turns for prompt in run.prompts)
        searched = bool(run.options.get("tune") or run.tuning)  # which measures only part of its grid
        name = "unfinished.search" if searched else "unfinished.sweep"
        found.insert(0, Finding(name, measured=measured, planned=planned))
    gravity = get_args(Severity).index
    return sorted([*found, *review(summary)], key=lambda finding: gravity(finding.severity))


def _is_tuned(run: Run) -> bool:
    return run.tuning is not None and run.tuning.answer is not None


def _method(results: Results) -> list[tuple[str, str]]:
    """Return how a run was measured, as titles and texts; a title without a text is left out."""
    run, done = results.run, results.done
    over = run.baseline
    prompts, configs, repeats = (done[name].nunique() for name in ("prompt", "config", "repeat"))
    categories = list(dict.fromkeys(done["category"].dropna().map(one_line)))
    temperatures = ", ".join(f"{each:g}" for each in sorted(done["temperature"].dropna().unique()))
    batches, contexts = (
        ", ".join(f"{each:,.0f}" for each in sorted(done[name].dropna().unique()))
        for name in ("batch", "context")
    )
    arrivals = ", ".join(sorted({one_line(each) for each in done["arrivals"].dropna()}))
    length = f"up to {run.max_new_tokens} tokens" if run.max_new_tokens else "their natural length"
    if run.ignore_eos:
        length = length.replace("up to ", "") + " (end tokens are ignored)"
    grouped, servers = bool((done["group"] != "").any()), bool((done["kind"] == "server").any())
    unit = "group of prompts" if grouped else "prompt"
    units = unit.replace("group", "groups") if grouped else "prompts"
    plain = "Plain decoding is the same loop, with the same cache and weights, and a drafter that proposes nothing."
    if done["kind"].isin(FOREIGN).any():
        plain += " Rows named transformers are that library's own generate."
    said = {
        "Measured": f"{counted(prompts, 'prompt')} of {counted(len(categories), 'category', 'categories')}"
        f" ({', '.join(categories)}), {counted(configs, 'configuration')}, {counted(repeats, 'repeat')}; answers of"
        f" {length}; {'greedy' if temperatures == '0' else f'temperature {temperatures}'}.",
        "Side by side": f"Requests at a time: {batches}. Arrivals: {arrivals}. closed:N is a closed loop of N clients,"
        " each of which sends its next request when the last is answered, until the last measured one has ended;"
        " poisson:RATE is that many per second at random times, the same for all, with idle time skipped."
        if grouped
        else "",
        "Context": f"Lengths of prompts: {contexts} tokens, exactly. A passage of"
        f" {one_line(str(run.options.get('context_text') or '').rpartition(' ')[0])} stands in front of each question,"
        " no part of it twice. Speedups are over the baseline at the same length."
        if contexts
        else "",
        "Interleaving": f"In every repeat all configurations{' of a batch' if grouped else ''} decode the same {unit}"
        f" back to back, in a new random order (seed {run.seed}), so that drift of the machine affects all equally."
        f" Warm-up generations per configuration, which do not count: {run.warmup}.",
        "Servers": f"Times are those of this machine's client, from sending a request to reading text; tokens are those"
        f" that the server names or counts. {_caches_of_servers(run)}"
        if servers
        else "",
        "Baseline": f"{over} is the first server that was named." if servers else plain,
        "Speedup": f"Throughput of a group of requests over that of {over} with the same prompts, batch and repeat,"
        " as a geometric mean over groups. By category: each request's tokens/s from its arrival to its end."
        if grouped
        else f"Decode tokens/s over those of {over} for the same prompt, turn and repeat, as a geometric mean over"
        " prompts. 'With TTFT' includes the time to first token; 'pooled' is all tokens over all seconds.",
        "Intervals": f"{stats.CONFIDENCE:.0%}, over {units}: what other {units} of this kind would give. Repeats never"
        f" count as {units}. Faster or slower: the interval lies wholly above or below 1.",
        "Tuning": _METHOD_OF_TUNING if _is_tuned(run) else "",
        "Definitions": "All figures with formula and pitfall: docs/metrics.md of specbench.",
    }
    return [(title, text) for title, text in said.items() if text]


def _caches_of_servers(run: Run) -> str:
    salted = {"shared": "the same for all servers", "each": "different for each server"}
    if same := salted.get(str(run.options.get("salt"))):
        return f"Every prompt begins with a unique line, {same}, so that no prompt cache has it."
    return "Fields of the requests switch their prompt caches off."


_METHOD_OF_TUNING = (
    "Each round of `specbench tune` measures only the candidates still in the race, so on different prompts. Speedups"
    " and verdicts are with noise correction (docs/tuning.md); 'with TTFT' and tokens/s are without."
)


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
    drafters = {config.drafter: config.fingerprint for config in run.configs}
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
