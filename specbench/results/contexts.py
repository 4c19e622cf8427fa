"""Speedups by length of context, from runs with ``--context``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from specbench.base.record import Estimate
from specbench.base.textsafe import one_line
from specbench.results.requests import Curve, curves_of, size_of
from specbench.results.results import Results
from specbench.results.run import RunWarning
from specbench.results.summary import Summary, SummaryRow


def context_curves(summary: Summary) -> list[Curve]:
    """Return the curves by length of context, see ``curves_of``."""
    return curves_of(row for row in summary.rows if row.config.context is not None)


_BLIND = 1 / 3
"""A drafter is blind where surely fewer than this share of its drafts at the shortest context is accepted."""


_ADVICE = "Use it for shorter contexts."


def blind_drafters(results: Results, summary: Summary) -> Iterator[RunWarning]:
    """Yield a warning for each drafter whose drafts stop, or stop being accepted, from some length of context on.

    A run without lengths of context shows it only if the policy auto noticed it.
    """
    named: set[tuple[str, float]] = set()
    curves = sorted(context_curves(summary), key=lambda curve: curve.rows[0].config.gamma is None)
    for curve in curves:  # fixed lengths first: a policy may have stopped for other reasons
        config, first = curve.rows[0].config, curve.rows[0]
        key = (config.drafter, config.temperature)
        row = next((row for row in curve.rows[1:] if _is_blind(row, first)), None)
        if row is None or key in named or config.kind == "server":
            continue
        named.add(key)
        at, name = f"{size_of(row):,} tokens of context", one_line(config.drafter)
        if not row.mean_gamma > 0:
            message = f"{name} drafts nothing at {at}: that is beyond the context that it can read."
        else:
            message = (
                f"{name} is blind at {at}: {row.acceptance_tested.value:.0%} of its tested drafts are accepted there,"
                f" {first.acceptance_tested.value:.0%} at {size_of(first):,}."
            )
        yield RunWarning("blind-drafter", "warning", message, _ADVICE, {"context": size_of(row)})
    for (drafter, temperature), context in _noticed(results).items():
        if (drafter, temperature) not in named:
            message = (
                f"{one_line(drafter)} was rejected so often from {context:,} tokens of context on that auto stopped"
                " asking it there."
            )
            yield RunWarning("blind-drafter", "warning", message, _ADVICE, {"context": context})


def _noticed(results: Results) -> dict[tuple[str, float], int]:
    """Return the shortest context from which on the policy auto found a drafter blind, by drafter and temperature.

    Left out where at least half of a configuration's generations that went as far drafted on: then single prompts were
    hard, not the context long.
    """
    ends: dict[tuple[str, float, str], list[tuple[int, int | None]]] = {}
    done = results.done
    columns = ("drafter", "temperature", "config", "prompt_tokens", "steps_policy", "steps_emitted")
    for drafter, temperature, config, prompt, notes, emitted in done[[*columns]].itertuples(
        index=False, name=None
    ):
        context = None
        if "blind" in notes:
            context = int(prompt) + int(emitted[: np.argmax(notes["blind"] == 1.0)].sum())
        key = str(drafter), float(temperature), str(config)
        ends.setdefault(key, []).append((int(prompt + emitted.sum()), context))
    found: dict[tuple[str, float], int] = {}
    for (drafter, temperature, _), each in ends.items():
        for context in sorted(context for _, context in each if context is not None):
            reached = [at is not None for end, at in each if end >= context]
            if 2 * sum(reached) > len(reached):
                found[drafter, temperature] = min(context, found.get((drafter, temperature), context))
                break
    return found


def _is_blind(row: SummaryRow, first: SummaryRow) -> bool:
    """Return whether a row accepts surely much less than the first of its curve, or drafts nothing at all."""
    if not first.mean_gamma > 0:
        return False
    if not row.mean_gamma > 0:
        return row.config.gamma is not None
    before, after = first.acceptance_tested, row.acceptance_tested
    return _end(after, "high") < _BLIND * _end(before, "low")


def _end(estimate: Estimate, name: str) -> float:
    end: float | None = getattr(estimate, name)
    return estimate.value if end is None else end
