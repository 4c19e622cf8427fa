"""What is doubtful about the figures of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from specbench.base.record import Estimate
from specbench.findings.catalog import Finding
from specbench.options import quantized
from specbench.results.run import OTHER_ANSWERS, PLAIN, Mismatch
from specbench.results.stats import verdict

if TYPE_CHECKING:
    import pandas as pd

    from specbench.base.load import LoadSnapshot
    from specbench.results.summary import Summary

DISTURBANCES = ("machine-busy", "steal", "frequency-drop", "memory-pressure", "stopped")
"""Of a generation, by the ids of their findings."""

FEW_PROMPTS = 8
WIDE = 0.10
BUSY_CORES = 0.3
STOLEN = 0.02
SLOWED = 0.85
LOW_MEMORY = 0.05
RARE = 0.05
"""Share of the generations up to which disturbances change no conclusion."""
CACHED = 0.1
"""Share of a prompt's tokens, those of its template, that a server may find in its cache."""

# -- the machine -----------------------------------------------------------------------------------


def warn_at_start(now: LoadSnapshot) -> Iterator[Finding]:
    """Yield what is doubtful about the machine before anything is loaded."""
    if now.load_average is not None and now.load_average > now.cores:
        yield Finding("machine-busy.before", load=now.load_average, cores=now.cores)
    if now.available_bytes < LOW_MEMORY * now.memory_bytes:
        yield Finding("memory-pressure.before", free=now.available_bytes / 1e9, memory=now.memory_bytes / 1e9)


def disturbances(before: LoadSnapshot, after: LoadSnapshot, fastest_mhz: float | None = None) -> list[str]:
    """Return the ids of the disturbances that happened between two snapshots of the machine.

    Args:
        before, after: The snapshots.
        fastest_mhz: The highest processor frequency seen in this run.
    """
    swapped = (after.swapped_in_bytes or 0) > (before.swapped_in_bytes or 0)
    seen = (
        (after.busy_elsewhere(before) or 0.0) > BUSY_CORES,
        (after.steal_share(before) or 0.0) > STOLEN,
        fastest_mhz and after.frequency_mhz and after.frequency_mhz < SLOWED * fastest_mhz,
        swapped or after.available_bytes < LOW_MEMORY * after.memory_bytes,
        after.stops > before.stops,
    )
    return [name for name, present in zip(DISTURBANCES, seen, strict=True) if present]


def find_disturbances(generations: int, counts: Mapping[str, int]) -> Iterator[Finding]:
    """Yield a finding for each kind of disturbance; ``counts`` says how many of all generations had it."""
    for name in DISTURBANCES:
        if count := counts.get(name):
            when = "meanwhile" if generations == 1 else f"during {count} of {generations} generations"
            found = Finding(name, when=when)
            rarely = count <= RARE * generations
            yield Finding("hardly-disturbed", what=found.text.rstrip(".")) if rarely else found


# -- the figures -----------------------------------------------------------------------------------


def wide_intervals(speedups: Mapping[str, Estimate]) -> Iterator[Finding]:
    """Yield a finding if intervals reach more than 10% above or below their value.

    Args:
        speedups: Speedups with an interval, by the labels of their configurations.
    """
    half_widths = {
        label: ((speedup.high or 0.0) - (speedup.low or 0.0)) / 2 / speedup.value
        for label, speedup in speedups.items()
    }
    widest = max(half_widths, key=lambda label: half_widths[label], default="")
    wide = sum(half > WIDE for half in half_widths.values())
    if wide:
        name = "wide-intervals" if speedups[widest].basis == "prompts" else "wide-intervals.repeats"
        yield Finding(name, wide=wide, intervals=len(speedups), half=half_widths[widest], label=widest)


def tokens_differ(
    differences: Mapping[str, Sequence[Mismatch]],
    prompts: int,
    *,
    rounded: str | None = None,
    over: str = PLAIN,
) -> Iterator[Finding]:
    """Yield a finding for each cause for which greedy outputs differ from the baseline's, the gravest first.

    Args:
        differences: The entries of ``run.json``, by the labels of their configurations.
        prompts: Number of prompts that each configuration decoded.
        rounded: "int8" or "int4" if the target is quantized and its forward passes were not bit-exact.
        over: Name of the baseline: plain decoding or a server.
    """
    names = {
        False: "tokens-differ",
        None: "tokens-differ.unchecked" if over == PLAIN else "tokens-differ.server",
        True: "tokens-differ.tie" if rounded is None else "tokens-differ.rounded",
    }
    for is_tie, name in names.items():
        mine = {label: entries for label, entries in differences.items() if _gravest(entries) is is_tie}
        every = [(label, entry) for label, entries in mine.items() for entry in entries]
        if every:
            label, first = next(pair for pair in every if pair[1].numerical_tie is is_tie)
            yield Finding(
                name,
                what=label if len(mine) == 1 else f"{len(mine)} configurations",
                over=over,
                number=len(every),
                cases=len(mine) * prompts,
                place=first.position,
                prompt=first.prompt,
                label=label,
                gap=first.gap,
                dtype=rounded,
            )


def _gravest(entries: Sequence[Mismatch]) -> bool | None:
    """Return whether all are ties; ``None`` if some were not checked."""
    ties = {entry.numerical_tie for entry in entries}
    return next(tie for tie in (False, None, True) if tie in ties)


def server_findings(summary: Summary) -> Iterator[Finding]:
    """Yield what is doubtful about the answers of servers."""
    results = summary.results
    answers = results.done[results.done["counted_by"].notna()]
    started = results.run.options.get("engine") is not None  # whose counts are of one kind
    for name, rows in answers.groupby("drafter", sort=False):
        wrong = rows["problem"].dropna()
        if len(wrong):
            yield Finding(
                "token-counts", server=name, wrong=len(wrong), answers=len(rows), problem=wrong.iloc[0]
            )
        elif not started and (rows["counted_by"] == "usage").all() and not rows["token_ids"].map(len).any():
            yield Finding("tokens-unchecked", server=name)
        if (rows["pieces"] == 1).all() and (rows["new_tokens"] > 1).any():
            yield Finding("one-piece", server=name)
    for row in summary.rows:
        if row.cached_share.value > CACHED:
            yield Finding("prompt-cache", label=row.config.label, share=row.cached_share.value)
        if verdict(row.warming, "repeats") == "faster":
            yield Finding("warm-pool", label=row.config.label, warming=row.warming.value)


def failures(frame: pd.DataFrame) -> Iterator[Finding]:
    """Yield a finding for each reason why generations failed."""
    failed = frame[frame["status"] == "failed"]
    generations = Counter(frame["config"])
    for reason, rows in failed.groupby("error", sort=False):
        labels = list(dict.fromkeys(rows["label"]))
        where = labels[0] if len(labels) == 1 else f"{len(labels)} configurations"
        lost = any(count == generations[name] for name, count in Counter(rows["config"]).items())
        name = "failed.all" if lost else "failed"
        yield Finding(name, failed=len(rows), where=where, reason=str(reason).rstrip("."))


def review(summary: Summary) -> Iterator[Finding]:
    """Yield everything that is doubtful about one stored run."""
    run, generations, done = summary.run, summary.results.generations, summary.results.done
    if not done.empty:
        prompts, searched = done["prompt"].nunique(), run.tuning is not None
        if prompts < FEW_PROMPTS and not searched:  # `tune` has its own intervals and advice
            yield Finding("few-prompts", prompts=prompts)
        seen = Counter(name for names in generations["warnings"] for name in set(names))
        yield from find_disturbances(len(generations), seen)
        sure = [row for row in summary.rows if row.measured and row.speedup.low is not None]
        if not searched:
            others = ("transformers", *OTHER_ANSWERS)
            yield from wide_intervals(
                {row.config.label: row.speedup for row in sure if row.config.kind not in others}
            )
        for row in sure:
            # A baseline that is too slow makes speedups too high.
            if row.config.kind == "transformers" and verdict(row.speedup, "repeats") == "faster":
                yield Finding("baseline-slow", speedup=row.speedup.value)
        labels = {config.id: config.label for config in run.configs}
        differences: dict[str, list[Mismatch]] = {}
        for entry in run.differences or ():
            differences.setdefault(labels.get(entry.config, entry.config), []).append(entry)
        rounded = quantized(run.target.dtype or "")
        yield from tokens_differ(differences, prompts, rounded=rounded, over=run.baseline)
        if run.baseline != PLAIN:
            yield from server_findings(summary)
    yield from failures(generations)
