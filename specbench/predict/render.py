"""A prediction as parts of a document: a table for each drafter, and what it needs to pay."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from specbench.base.textsafe import counted
from specbench.decoding.theory import SLOPE
from specbench.results import stats
from specbench.show.document import Heading, Items, Paragraph, Part, Sheet

if TYPE_CHECKING:
    from specbench.decoding.theory import PassCosts
    from specbench.predict.forecast import Forecast

_PLACES = 4
"""Places of a draft whose acceptance is shown."""


def prediction_parts(
    forecasts: Sequence[Forecast],
    costs: PassCosts,
    source: str,
    notes: Sequence[str],
) -> Iterator[Part]:
    """Yield a prediction.

    Args:
        forecasts: One for each drafter.
        costs: Times of passes.
        source: Where the target's times are from, as the end of a sentence; empty without any.
        notes: Sentences on what was left out.
    """
    for forecast in forecasts:
        yield Heading(forecast.drafter)
        if not forecast.answers:
            yield Paragraph("No answer can be used with it.")
            continue
        yield _sheet(forecast, costs)
        yield Paragraph(answer_text(forecast, costs), "bold")
    yield Items([*notes, *_facts(forecasts, costs, source)])


def _facts(forecasts: Sequence[Forecast], costs: PassCosts, source: str) -> Iterator[str]:
    """Yield what the figures rest on."""
    for forecast in forecasts:
        if forecast.unsampled:
            what = counted(forecast.unsampled, "sampled answer")
            yield f"{what} not used for {forecast.drafter}: it needs their logprobs."
        if seconds := costs.drafter_s.get(forecast.drafter):
            yield f"A pass of {forecast.drafter} takes {stats.decimals(1000 * seconds)} ms, measured here."
    if not costs.target_s:
        yield "Speedups need the target's time: --target-pass-ms."
    else:
        grows = f"; each further token is taken to add {SLOPE:.0%}" if len(costs.target_s) == 1 else ""
        yield f"A pass of the target takes {stats.decimals(1000 * costs.target_s[1])} ms, {source}{grows}."
    yield "Brackets: 95% intervals over prompts. Verification: rejection."


def answer_text(forecast: Forecast, costs: PassCosts) -> str:
    """Return in a sentence what a drafter gives at its best, and what that needs."""
    row = forecast.best(costs)
    needs = forecast.pays_from(row, costs)
    tokens = stats.ratio_text(forecast.tokens_per_step(row), "")
    if math.isinf(needs):
        return f"{row.name}: {tokens} tokens per step. It does not pay at any speed of the target."
    pays = f"pays from a target pass of {stats.decimals(1000 * needs)} ms on"
    if not costs.target_s:
        return f"{row.name}: {tokens} tokens per step; {pays}."
    speedup = stats.ratio_text(forecast.speedup(row, costs))
    return f"{row.name}: {speedup} over plain decoding, {tokens} tokens per step; {pays}."


def _sheet(forecast: Forecast, costs: PassCosts) -> Sheet:
    rows = []
    for row in forecast.rows:
        drafted, _ = row.per_step()
        places = " ".join(f"{rate:.0%}" for rate in row.by_place[:_PLACES] if not math.isnan(rate))
        speedup = [stats.ratio_text(forecast.speedup(row, costs))] if costs.target_s else []
        tokens = stats.ratio_text(forecast.tokens_per_step(row), "")
        rows.append([row.name, tokens, *speedup, places, stats.decimals(drafted)])
    headings = [
        "draft length",
        "tokens/step",
        *(["speedup"] if costs.target_s else []),
        "accepted at 1, 2, ...",
        "drafted",
    ]
    return Sheet(
        headings,
        rows,
        ranks=[0] * (len(headings) - 2) + [1, 2],
        marked=frozenset({forecast.rows.index(forecast.best(costs))}),
        left=frozenset({len(headings) - 2}),
        elsewhere="with --json, or on a wider terminal",
    )
