"""Warnings about a run as data: what is doubtful about its figures, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specbench.base.record import Estimate
from specbench.base.textsafe import counted
from specbench.options import quantized
from specbench.results.run import OTHER_ANSWERS, PLAIN, Mismatch, RunWarning
from specbench.results.stats import verdict

if TYPE_CHECKING:
    import pandas as pd

    from specbench.base.load import LoadSnapshot
    from specbench.results.summary import Summary

FEW_PROMPTS = 8
WIDE = 0.10
BUSY_CORES = 0.3
STOLEN = 0.02
SLOWED = 0.85
LOW_MEMORY = 0.05
CACHED = 0.1
"""Share of a prompt's tokens, those of its template, that a server may find in its cache."""

# -- the machine -----------------------------------------------------------------------------------

_MORE_MEMORY = "Use a smaller model or a narrower dtype, or close other programs."
_DISTURBED = {
    "machine-busy": ("Other programs used the processor", "Close other programs and measure again."),
    "steal": (
        "The host of this virtual machine gave processor time to others",
        "Measure at another time, or on a machine of your own.",
    ),
    "frequency-drop": (
        "The processor ran slower than before",
        "Let it cool down, plug it in, and fix its frequency if you can.",
    ),
    "memory-pressure": ("Memory was short", _MORE_MEMORY),
    "stopped": (
        "The process was stopped and continued (SIGSTOP, Ctrl-Z)",
        "Do not stop it while it measures: the pause is included in these times.",
    ),
}


def warn_at_start(now: LoadSnapshot) -> list[RunWarning]:
    """Return warnings about the machine before anything is loaded."""
    found = []
    if now.load_average is not None and now.load_average > now.cores:
        message = (
            f"The machine is busy: a load of {now.load_average:.1f} on {now.cores} cores before it began."
        )
        found.append(RunWarning("machine-busy", "warning", message, "Close other programs or wait for them."))
    if now.available_bytes < LOW_MEMORY * now.memory_bytes:
        free = f"{now.available_bytes / 1e9:.1f} of {now.memory_bytes / 1e9:.1f} GB are free"
        found.append(RunWarning("memory-pressure", "warning", f"Memory is short: {free}.", _MORE_MEMORY))
    return found


def disturbances(before: LoadSnapshot, after: LoadSnapshot, fastest_mhz: float | None = None) -> list[str]:
    """Return the ids of the disturbances that happened between two snapshots of the machine.

    Args:
        before, after: The snapshots.
        fastest_mhz: The highest processor frequency seen in this run.
    """
    swapped = (after.swapped_in_bytes or 0) > (before.swapped_in_bytes or 0)
    seen = {
        "machine-busy": (after.busy_elsewhere(before) or 0.0) > BUSY_CORES,
        "steal": (after.steal_share(before) or 0.0) > STOLEN,
        "frequency-drop": fastest_mhz and after.frequency_mhz and after.frequency_mhz < SLOWED * fastest_mhz,
        "memory-pressure": swapped or after.available_bytes < LOW_MEMORY * after.memory_bytes,
        "stopped": after.stops > before.stops,
    }
    return [name for name, present in seen.items() if present]


def warn_of_disturbances(generations: int, counts: Mapping[str, int]) -> list[RunWarning]:
    """Return a warning for each kind of disturbance; ``counts`` says how many of all generations had it."""
    return [
        RunWarning(
            name,
            "warning" if counts[name] > 0.05 * generations else "info",
            f"{what} {'meanwhile' if generations == 1 else f'during {counts[name]} of {generations} generations'}.",
            advice,
        )
        for name, (what, advice) in _DISTURBED.items()
        if counts.get(name)
    ]


# -- the figures -----------------------------------------------------------------------------------


def few_prompts(prompts: int) -> Iterator[RunWarning]:
    """Yield a warning if a run has too few prompts to say anything about other prompts."""
    if prompts < FEW_PROMPTS:
        yield RunWarning(
            "few-prompts",
            "warning",
            f"{counted(prompts, 'prompt says', 'prompts say')} little about others.",
            f"Measure at least {FEW_PROMPTS} prompts, of several categories: raise --limit or name more --prompts.",
        )


def wide_intervals(speedups: Mapping[str, Estimate]) -> Iterator[RunWarning]:
    """Yield a warning if intervals reach more than 10% above or below their value.

    Args:
        speedups: Speedups with an interval, by the labels of their configurations.
    """
    half_widths = {
        label: ((each.high or 0.0) - (each.low or 0.0)) / 2 / each.value for label, each in speedups.items()
    }
    wide = {label: round(half, 3) for label, half in half_widths.items() if half > WIDE}
    if wide:
        widest = max(wide, key=lambda label: wide[label])
        by_prompts = speedups[widest].basis == "prompts"
        yield RunWarning(
            "wide-intervals",
            "warning",
            f"{len(wide)} of {len(speedups)} intervals are wider than ±{WIDE:.0%}; the widest is"
            f" ±{wide[widest]:.0%} ({widest}).",
            f"{'Measure more prompts' if by_prompts else 'Raise --repeats'}; add --resume, and --out with the run.",
        )


def baseline_too_slow(speedup: Estimate) -> Iterator[RunWarning]:
    """Yield a warning if ``transformers``' own ``generate`` is faster than the plain decoding of this run.

    Args:
        speedup: Speedup of ``generate`` over plain decoding.
    """
    if verdict(speedup, "repeats") == "faster":
        yield RunWarning(
            "baseline-slow",
            "error",
            f"transformers' generate is {speedup.value:.2f}× as fast as plain decoding here, so speedups over plain"
            " decoding are too high.",
            "Try another --cache or --dtype, and divide the speedups by this figure.",
        )


def tokens_differ(
    differences: Mapping[str, Sequence[Mismatch]],
    prompts: int,
    *,
    rounded: str | None = None,
    over: str = PLAIN,
) -> list[RunWarning]:
    """Return a warning for each cause for which greedy outputs differ from the baseline's, the gravest first.

    Args:
        differences: The entries of ``run.json``, by the labels of their configurations.
        prompts: Number of prompts that each configuration decoded.
        rounded: "int8" or "int4" if the target is quantized and its forward passes were not bit-exact.
        over: Name of the baseline: plain decoding or a server.
    """
    found = []
    for is_tie in (False, None, True):
        mine = {label: entries for label, entries in differences.items() if _gravest(entries) is is_tie}
        if not mine:
            continue
        every = [(label, entry) for label, entries in mine.items() for entry in entries]
        label, first = next(each for each in every if each[1].numerical_tie is is_tie)
        where = f"first at token {first.position} of {first.prompt} ({label})"
        if is_tie is False:
            gap = f"{first.gap or 0.0:.3g}"
            where += f"; the logits of the two tokens are {gap} apart there, more than rounding explains"
            advice = "Please report it: the output should be the same."
        elif is_tie:
            where += "; wherever they part, the logits of the two tokens tie within rounding"
            advice = "Nothing to do; with --dtype float32 the outputs are the same."
            if rounded is not None:
                advice = (
                    f"An {rounded} target amplifies rounding: leave out --cache, whose default gives bit-exact passes"
                    " on most processors, or use another --dtype."
                )
        elif over == PLAIN:
            advice = "Finish the sweep with --resume to learn whether rounding explains it, or use --dtype float32."
        else:
            advice = "`specbench check --outputs` says whether rounding explains it."
        what = label if len(mine) == 1 else f"{len(mine)} configurations"
        message = (
            f"{what}: tokens differ from {over} in {len(every)} of {len(mine) * prompts} cases, {where}."
        )
        severity: Any = {False: "error", None: "warning", True: "info"}[is_tie]
        found.append(RunWarning("tokens-differ", severity, message, advice))
    return found


def _gravest(entries: Sequence[Mismatch]) -> bool | None:
    """Return whether all are ties; ``None`` if some were not checked."""
    ties = {each.numerical_tie for each in entries}
    return next(each for each in (False, None, True) if each in ties)


def server_warnings(summary: Summary) -> Iterator[RunWarning]:
    """Yield what is doubtful about the answers of servers."""
    results = summary.results
    answers = results.done[results.done["counted_by"].notna()]
    started = results.run.options.get("engine") is not None  # whose counts are of one kind
    for name, rows in answers.groupby("drafter", sort=False):
        wrong = rows[rows["problem"].notna()]
        if len(wrong):
            yield RunWarning(
                "token-counts",
                "warning",
                f"{name}: token counts are unclear in {len(wrong)} of {len(rows)} answers; in the first:"
                f" {wrong['problem'].iloc[0]}",
                "The tokenizer's count was used where there is one; compare totals with care.",
            )
        elif not started and (rows["counted_by"] == "usage").all() and not rows["token_ids"].map(len).any():
            yield RunWarning(
                "tokens-unchecked",
                "info",
                f"{name}: only the server counted the tokens.",
                "Add --target MODEL to check them with its tokenizer.",
            )
        if (rows["pieces"] == 1).all() and (rows["new_tokens"] > 1).any():
            yield RunWarning(
                "one-piece",
                "warning",
                f"{name}: each answer comes in one piece, so times to the first token and per token are unknown.",
                "Make it stream its answers; results that include TTFT are right either way.",
            )
    for row in summary.rows:
        if row.cached_share.value > CACHED:
            yield RunWarning(
                "prompt-cache",
                "warning",
                f"{row.config.label}: {row.cached_share.value:.0%} of the prompts' tokens came from a cache that could"
                " not be switched off, so its time to the first token is too short.",
                "Start it without a prompt cache.",
            )
        warming = row.warming
        if verdict(warming, "repeats") == "faster":
            yield RunWarning(
                "warm-pool",
                "warning",
                f"{row.config.label}: {warming.value:.2f}× as fast with prompts that it has answered before: it drafts"
                " from what it remembers.",
                "Use the speedup of the first repeat, or restart the server between repeats.",
            )


def failures(frame: pd.DataFrame) -> Iterator[RunWarning]:
    """Yield a warning for each reason why generations failed."""
    failed = frame[frame["status"] == "failed"]
    generations = Counter(frame["config"])
    for reason, rows in failed.groupby("error", sort=False):
        labels = list(dict.fromkeys(rows["label"]))
        where = labels[0] if len(labels) == 1 else f"{len(labels)} configurations"
        lost = any(count == generations[name] for name, count in Counter(rows["config"]).items())
        yield RunWarning(
            "failed",
            "error" if lost else "warning",
            f"{counted(len(rows), 'generation')} of {where} failed: {str(reason).rstrip('.')}.",
            "Remove the cause and add --resume.",
        )


def review(summary: Summary) -> list[RunWarning]:
    """Return everything that is doubtful about one stored run."""
    run, generations, done = summary.run, summary.results.generations, summary.results.done
    if done.empty:
        return list(failures(generations))
    seen = Counter(name for names in generations["warnings"] for name in set(names))
    sure = [row for row in summary.rows if row.measured and row.speedup.low is not None]
    prompts, found = done["prompt"].nunique(), list[RunWarning]()
    if run.tuning is None:  # `tune` has its own intervals and advice
        found += few_prompts(prompts)
    found += warn_of_disturbances(len(generations), seen)
    if run.tuning is None:
        others = ("transformers", *OTHER_ANSWERS)
        own = {row.config.label: row.speedup for row in sure if row.config.kind not in others}
        found += wide_intervals(own)
    for row in sure:
        if row.config.kind == "transformers":
            found += baseline_too_slow(row.speedup)
    labels = {config.id: config.label for config in run.configs}
    differences: dict[str, list[Mismatch]] = {}
    for entry in run.differences or ():
        differences.setdefault(labels.get(entry.config, entry.config), []).append(entry)
    found += tokens_differ(
        differences, prompts, rounded=quantized(run.target.dtype or ""), over=summary.run.baseline
    )
    if summary.run.baseline != PLAIN:
        found += server_warnings(summary)
    return [*found, *failures(generations)]
