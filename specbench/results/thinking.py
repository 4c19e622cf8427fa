"""Thinking and answers apart: what each configuration gains inside the thinking, and after it.

A step belongs to the thinking if its first token does. Of a server that reports no steps, the parts are the tokens
before and after the last piece of thinking arrived, and its drafts are not known by part.
"""

from __future__ import annotations

from types import SimpleNamespace

from msgspec import structs

from specbench.results.results import Results
from specbench.results.summary import Summary


def part_rows(results: Results) -> list[SimpleNamespace]:
    """Return both parts of each configuration that thought, in the order of the run.

    Returns:
        For each: its ``figures``, those of its outputs cut down to the part; ``config`` and ``part``, ``thinking`` or
        ``answer``, after the first emission; ``tokens`` of all outputs; ``share`` and ``time_share``, of the tokens and
        of the seconds of both parts. NaN stands for what is not known.
    """
    both = {part: Summary(_only(results, part)) for part in ("thinking", "answer")}
    sums = {
        part: summary.results.generations.groupby("config")[["new_tokens", "decode_s"]].sum().astype(float)
        for part, summary in both.items()
    }
    whole = sums["thinking"] + sums["answer"]
    shares = {part: mine / whole.where(whole > 0) for part, mine in sums.items()}
    return [
        SimpleNamespace(
            figures=figures,
            config=figures.config,
            part=part,
            tokens=int(sums[part]["new_tokens"][figures.config.id]),
            share=float(shares[part]["new_tokens"][figures.config.id]),
            time_share=float(shares[part]["decode_s"][figures.config.id]),
        )
        for pair in zip(*(summary.rows for summary in both.values()), strict=True)
        for part, figures in zip(both, pair, strict=True)
    ]


def _only(results: Results, part: str) -> Results:
    """Return the outputs with thinking as if they had one part of them only."""
    rows, steps = results.done[results.done["thinking_tokens"] > 0], results.placed_steps
    steps = steps[steps["output"].isin(rows.index)]
    output, emitted = steps["output"], steps["emitted"]
    inside = steps["place"] < output.map(rows["thinking_tokens"])
    after_first = (rows["new_tokens"] - rows["first_tokens"]).clip(lower=0)  # of servers without steps
    whole = emitted.groupby(output).sum().reindex(rows.index).fillna(after_first)
    thought = (rows["thinking_tokens"] - rows["first_tokens"]).clip(0, after_first)
    thought = emitted.where(inside, 0).groupby(output).sum().reindex(rows.index).fillna(thought)
    if part == "thinking":
        tokens, seconds, steps = thought, rows["thinking_s"], steps[inside]
    else:
        tokens, seconds, steps = whole - thought, rows["decode_s"] - rows["thinking_s"], steps[~inside]
    rows = rows.assign(
        group="", counted_by=None, new_tokens=tokens, decode_s=seconds, total_s=seconds,
        tokens_per_second=tokens / seconds.where(seconds > 0),
    )  # fmt: skip
    run = structs.replace(results.run, tuning=None)  # which measured whole outputs
    return Results(run, rows, steps, results.groups[:0])
