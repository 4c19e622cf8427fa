"""Warnings about a run as data: what is doubtful about its figures, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from specbench.base.record import Estimate, to_dict
from specbench.base.textsafe import counted
from specbench.options import quantized
from specbench.results.run import OTHER_ANSWERS, PLAIN, Mismatch, RunWarning

if TYPE_CHECKING:
    import pandas as pd

    from specbench.results.load import LoadSnapshot
    from specbench.results.results import Results
    from specbench.results.summary import Summary

FEW_PROMPTS = 8
WIDE = 0.10
BUSY_CORES = 0.3
STOLEN = 0.02
SLOWED = 0.85
LOW_MEMORY = 0.05


# -- the machine -----------------------------------------------------------------------------------

_QUIET = "Close other programs and measure again."


def at_start(now: LoadSnapshot) -> list[RunWarning]:
    """What the machine looks like before anything is loaded."""
    found = []
    if now.load_average is not None and now.load_average > now.cores:
        found.append(
            RunWarning(
                "machine-busy",
                "warning",
                f"The machine is busy: a load of {now.load_average:.1f} on {now.cores} cores before the sweep began.",
                "Close other programs or wait until they are done.",
                {"load_average": now.load_average, "cores": now.cores},
            )
        )
    if now.available_bytes < LOW_MEMORY * now.memory_bytes:
        found.append(_memory_pressure(now))
    return found


def during(before: LoadSnapshot, after: LoadSnapshot, fastest_mhz: float | None = None) -> list[RunWarning]:
    """What disturbed the time between two looks at the machine.

    Args:
        before, after: The two looks.
        fastest_mhz: The highest processor frequency seen in this run.
    """
    found = []
    busy = after.busy_elsewhere(before)
    if busy is not None and busy > BUSY_CORES:
        found.append(
            RunWarning(
                "machine-busy",
                "warning",
                f"Other programs kept {busy:.1f} of {after.cores} cores busy.",
                _QUIET,
                {"busy_cores": round(busy, 2), "cores": after.cores},
            )
        )
    stolen = after.steal_share(before)
    if stolen is not None and stolen > STOLEN:
        found.append(
            RunWarning(
                "steal",
                "warning",
                f"The host of this virtual machine gave {stolen:.0%} of its processor time to others.",
                "Measure at another time, or on a machine of your own.",
                {"steal_share": round(stolen, 4)},
            )
        )
    if fastest_mhz and after.frequency_mhz and after.frequency_mhz < SLOWED * fastest_mhz:
        found.append(
            RunWarning(
                "frequency-drop",
                "warning",
                f"The processor ran at {after.frequency_mhz:.0f} MHz, and at {fastest_mhz:.0f} before.",
                "Let it cool down, plug it in, and fix its frequency if you can.",
                {"mhz": after.frequency_mhz, "fastest_mhz": fastest_mhz},
            )
        )
    if before.throttled is not None and after.throttled is not None and after.throttled > before.throttled:
        found.append(
            RunWarning(
                "thermal",
                "warning",
                "The processor slowed itself down because of heat.",
                "Let it cool down and measure again.",
                {"events": after.throttled - before.throttled},
            )
        )
    swapped = (after.swapped_in_bytes or 0) - (before.swapped_in_bytes or 0)
    if swapped > 0 or after.available_bytes < LOW_MEMORY * after.memory_bytes:
        found.append(_memory_pressure(after, swapped))
    if after.stops > before.stops:
        what, advice = _DISTURBED["stopped"]
        found.append(
            RunWarning("stopped", "warning", f"{what}.", advice, {"stops": after.stops - before.stops})
        )
    return found


def _memory_pressure(now: LoadSnapshot, swapped: int = 0) -> RunWarning:
    swap = f", and {swapped / 1e6:.0f} MB came back from swap" if swapped > 0 else ""
    return RunWarning(
        "memory-pressure",
        "warning",
        f"Memory is short: {now.available_bytes / 1e9:.1f} of {now.memory_bytes / 1e9:.1f} GB are free{swap}.",
        "Use a smaller model or a narrower dtype, or close other programs.",
        {
            "available_bytes": now.available_bytes,
            "memory_bytes": now.memory_bytes,
            "swapped_in_bytes": swapped,
        },
    )


_DISTURBED = {
    "machine-busy": ("Other programs used the processor", _QUIET),
    "steal": (
        "The host of this virtual machine gave processor time to others",
        "Measure at another time, or on a machine of your own.",
    ),
    "frequency-drop": (
        "The processor ran slower than before",
        "Let it cool down, plug it in, and fix its frequency if you can.",
    ),
    "thermal": ("The processor slowed itself down because of heat", "Let it cool down and measure again."),
    "memory-pressure": (
        "Memory was short",
        "Use a smaller model or a narrower dtype, or close other programs.",
    ),
    "stopped": (
        "The process was stopped and continued (SIGSTOP, Ctrl-Z)",
        "Do not stop it while it measures: the pause is in these times.",
    ),
}


def disturbed(rows: int, counts: Mapping[str, int]) -> list[RunWarning]:
    """What disturbed a whole run: for each id of ``during``, in how many of ``rows`` generations."""
    return [
        RunWarning(
            name,
            "warning" if counts[name] > 0.05 * rows else "info",
            f"{what} during {counts[name]} of {rows} generations.",
            advice,
            {"generations": counts[name], "of": rows},
        )
        for name, (what, advice) in _DISTURBED.items()
        if counts.get(name)
    ]


# -- the figures -----------------------------------------------------------------------------------


def few_prompts(prompts: int) -> RunWarning | None:
    """Too few prompts to speak about others than these."""
    if prompts >= FEW_PROMPTS:
        return None
    return RunWarning(
        "few-prompts",
        "warning",
        f"{counted(prompts, 'prompt says', 'prompts say')} little about others.",
        f"Measure at least {FEW_PROMPTS} prompts, of several categories: raise --limit or name more --prompts.",
        {"prompts": prompts},
    )


def wide_intervals(speedups: Mapping[str, Estimate]) -> RunWarning | None:
    """Intervals of speedups that reach further than 10% to a side.

    Args:
        speedups: By the configurations' labels, those with an interval.
    """
    wide: dict[str, float] = {}
    for label, speedup in speedups.items():
        assert speedup.low is not None
        assert speedup.high is not None
        half = (speedup.high - speedup.low) / 2 / speedup.value
        if half > WIDE:
            wide[label] = round(half, 3)
    if not wide:
        return None
    widest = max(wide, key=lambda label: wide[label])
    several = f"{len(wide)} of {len(speedups)} intervals are wider than ±{WIDE:.0%}"
    return RunWarning(
        "wide-intervals",
        "warning",
        f"{several}; the widest is ±{wide[widest]:.0%} ({widest}).",
        "More --repeats help where runs of one prompt scatter, more prompts where prompts differ: raise them with"
        " --resume --accept-changes.",
        {"half_widths": wide},
    )


def baseline_too_slow(speedup: Estimate) -> RunWarning | None:
    """``transformers``' own ``generate`` is faster than the plain decoding that speedups are ratios to.

    Args:
        speedup: Of ``generate`` over plain decoding.
    """
    if speedup.low is None or speedup.low <= 1:
        return None
    return RunWarning(
        "baseline-slow",
        "error",
        f"transformers' generate is {speedup.value:.2f}× as fast as plain decoding here, so the speedups flatter.",
        "Try another --cache or --dtype, and divide the speedups by this figure.",
        {"ratio": speedup.value, "low": speedup.low, "high": speedup.high},
    )


def tokens_differ(
    differences: Mapping[str, Sequence[Mismatch]],
    prompts: int,
    *,
    rounded: str | None = None,
    over: str = PLAIN,
) -> list[RunWarning]:
    """Greedy outputs that are not those of the baseline: a warning for each configuration, one for all mere ties.

    Args:
        differences: The entries of ``run.json``, by the configurations' labels.
        prompts: How many each configuration decoded.
        rounded: "int8" or "int4" if the target is such a one, whose passes were not the same to the bit then.
        over: The baseline, in words; a server if it is not plain decoding.
    """
    found, ties, servers = [], {}, over != PLAIN
    for label, entries in differences.items():
        real = [each for each in entries if each.numerical_tie is False]
        unknown = [each for each in entries if each.numerical_tie is None]
        data = {"differences": [*map(to_dict, entries)]}
        what = f"{label}: tokens differ from {over} in {len(entries)} of {prompts} prompts, first at token"
        if real:
            first = real[0]
            message = (
                f"{what} {first.position} of {first.prompt}; the two tokens' logits are {first.gap or 0.0:.3g} apart"
                " there, more than rounding explains."
            )
            advice = (
                "One of the two is not what the target says: compare their weights, quantization and sampling."
                if servers
                else "Please report it: the output should be the same."
            )
            found.append(RunWarning("tokens-differ", "error", message, advice, data))
        elif unknown:
            message = f"{what} {unknown[0].position} of {unknown[0].prompt}."
            advice = (
                "Add --resume --check-outputs with --target to learn whether rounding explains it."
                if servers
                else "Finish the sweep with --resume to learn whether rounding explains it, or use --dtype float32."
            )
            found.append(RunWarning("tokens-differ", "warning", message, advice, data))
        elif entries:
            ties[label] = entries
    if ties:
        label, first = next((label, entries[0]) for label, entries in ties.items())
        several = label if len(ties) == 1 else f"{len(ties)} configurations"
        every = [each for entries in ties.values() for each in entries]
        message = (
            f"{several}: tokens differ from {over} in {len(every)} of {len(ties) * prompts} cases, each where"
            f" the two tokens' logits tie within rounding (first at token {first.position} of {first.prompt},"
            f" {label})."
        )
        advice = (
            "Nothing to do." if servers else "Nothing to do; with --dtype float32 the outputs are the same."
        )
        if rounded is not None:
            advice = (
                f"An {rounded} target makes much of rounding: leave --cache out, whose default gives passes of all"
                " widths the same bits on most processors, or take another --dtype."
            )
        found.append(
            RunWarning("tokens-differ", "info", message, advice, {"differences": [*map(to_dict, every)]})
        )
    return found


CACHED = 0.1
"""Share of a prompt's tokens that a server may find in its cache: those of its template."""


def server_warnings(results: Results, summary: Summary) -> Iterator[RunWarning]:
    """What is doubtful about the answers of servers."""
    done = results.done[["drafter", "new_tokens", "token_ids"]]
    answers = results.answers.join(done, how="inner")
    for name, rows in answers.groupby("drafter", sort=False):
        wrong = rows[rows["problem"].notna()]
        if len(wrong):
            yield RunWarning(
                "token-counts",
                "warning",
                f"{name}: tokens are not clear in {len(wrong)} of {len(rows)} answers; in the first:"
                f" {wrong['problem'].iloc[0]}",
                "Its own count was left aside where the tokenizer's was at hand; compare totals with care.",
                {"answers": len(wrong), "of": len(rows)},
            )
        elif (rows["counted_by"] == "usage").all() and not rows["token_ids"].map(len).any():
            yield RunWarning(
                "tokens-unchecked",
                "info",
                f"{name}: tokens were counted by the server alone.",
                "Add --target MODEL, whose tokenizer checks them.",
            )
        if (rows["pieces"] == 1).all() and (rows["new_tokens"] > 1).any():
            yield RunWarning(
                "one-piece",
                "warning",
                f"{name}: answers come in one piece, so nothing is known of the time to the first token and per token.",
                "Have it stream its answers; what stands 'with TTFT' holds nevertheless.",
            )
    for row in summary.rows:
        if row.config.kind != "server":
            continue
        if row.cached_share > CACHED:
            yield RunWarning(
                "prompt-cache",
                "warning",
                f"{row.config.label}: {row.cached_share:.0%} of the prompts' tokens came from a cache that could not be"
                " switched off, so its time to the first token flatters.",
                "Start it without a cache of prompts.",
                {"share": row.cached_share},
            )
        warming = row.warming
        if warming.low is not None and warming.low > 1:
            yield RunWarning(
                "warm-pool",
                "warning",
                f"{row.config.label}: {warming.value:.2f} × as fast with prompts that it has answered before: it drafts"
                " from what it remembers.",
                "Go by the speedup of the first time, which stands apart, or restart it between repeats.",
                {"ratio": warming.value, "low": warming.low, "high": warming.high},
            )


def failures(frame: pd.DataFrame) -> Iterator[RunWarning]:
    """What failed, a warning for each reason."""
    failed = frame[frame["status"] == "failed"]
    generations = Counter(frame["config"])
    for reason, rows in failed.groupby("error", sort=False):
        labels = list(dict.fromkeys(rows["label"]))
        where = labels[0] if len(labels) == 1 else f"{len(labels)} configurations"
        lost = [name for name, count in Counter(rows["config"]).items() if count == generations[name]]
        yield RunWarning(
            "failed",
            "error" if lost else "warning",
            f"{counted(len(rows), 'generation')} of {where} failed: {str(reason).rstrip('.')}.",
            "Remove the cause and add --resume --retry-failed.",
            {"configs": list(dict.fromkeys(rows["config"])), "failed": len(rows), "nothing_left": lost},
        )


def review(results: Results, summary: Summary | None = None) -> list[RunWarning]:
    """Everything that is doubtful about one stored run.

    Args:
        results: The run.
        summary: Its summary, where that is there already.
    """
    run, generations, done = results.run, results.generations, results.done
    if done.empty:
        return list(failures(generations))
    if summary is None:
        from specbench.results.summary import summarize

        summary = summarize(results)
    disturbances = Counter(name for names in generations["warnings"] for name in set(names))
    found: list[RunWarning | None] = [*disturbed(len(generations), disturbances)]
    sure = [row for row in summary.rows if row.measured and row.speedup.low is not None]
    others = ("transformers", *OTHER_ANSWERS)
    prompts = done["prompt"].nunique()
    if run.tuning is None:  # which says by itself how sure it is, and what to do
        found.insert(0, few_prompts(prompts))
        own = {row.config.label: row.speedup for row in sure if row.config.kind not in others}
        found.append(wide_intervals(own))
    found += [baseline_too_slow(row.speedup) for row in sure if row.config.kind == "transformers"]
    labels = {config.id: config.label for config in run.configs}
    differences: dict[str, list[Mismatch]] = {}
    for entry in run.differences or ():
        differences.setdefault(labels.get(entry.config, entry.config), []).append(entry)
    rounded = quantized(run.target.dtype or "")
    found += tokens_differ(differences, prompts, rounded=rounded, over=summary.over)
    if summary.over != PLAIN:
        found += server_warnings(results, summary)
    return [warning for warning in found if warning is not None] + list(failures(generations))
