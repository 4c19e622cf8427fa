"""Hold a sweep over lengths of context against its predictions, and `auto` against fixed draft lengths.

    specbench sweep --context 256,1024,4096,8000 --drafter SMALL --drafter SMALL:window=1024 --gamma 1..6 \\
      --draft-policy fixed --draft-policy auto --out results/contexts
    python benchmarks/contexts.py results/contexts

For each length and drafter: the predicted over the measured speedup of every fixed γ (geometric mean and range); `auto`
over the best fixed γ of that length, and over the one γ that is best at all lengths together, prompt by prompt with 95%
intervals; the share of a step's time in which the drafter reads the context; and the speedup with and without the time
to first token. A drafter with a window stands beside the same drafter without. Prints one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from specbench.base.errors import SpecbenchError, UsageError
from specbench.base.record import Estimate
from specbench.results import stats
from specbench.results.compare import side_by_side
from specbench.results.contexts import context_of
from specbench.results.results import Results, load_results
from specbench.results.summary import Summary, SummaryRow, summarize


def ratio(results: Results, one: SummaryRow, other: SummaryRow) -> Estimate:
    """Return the speed of one configuration over another's, prompt by prompt."""
    pairs = side_by_side(results, one.config.id, other.config.id)
    return stats.geometric_mean(
        (pairs["a"] / pairs["b"]).to_numpy(), pairs["prompt"].to_numpy(), pairs["repeat"].to_numpy()
    )


def mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else math.nan


def of_drafter(results: Results, rows: Sequence[SummaryRow]) -> dict[int, dict[str, Any]]:
    """Return the figures of one drafter by length of context."""
    fixed = [row for row in rows if row.config.gamma is not None]
    gammas = sorted({row.config.gamma for row in fixed if row.config.gamma is not None})
    overall = {
        gamma: mean([row.speedup.value for row in fixed if row.config.gamma == gamma]) for gamma in gammas
    }
    found: dict[int, dict[str, Any]] = {}
    for context in sorted({context_of(row) for row in rows}):
        here = [row for row in fixed if context_of(row) == context]
        errors = [row.predicted_speedup.value / row.speedup.value for row in here]
        errors = [error for error in errors if error > 0]
        mine: dict[str, Any] = {}
        if errors:  # there are none if other programs used the machine
            mine = {"predicted over measured": mean(errors), "range": [min(errors), max(errors)]}
        if here:
            best = max(here, key=lambda row: row.speedup.value)
            mine |= {
                "best γ": best.config.gamma,
                "speedup": best.speedup.value,
                "with TTFT": best.speedup_total.value,
            }
            mine["reads the context"] = best.share_draft_prefill
        autos = [row for row in rows if row.config.draft_policy == "auto" and context_of(row) == context]
        for auto in autos if here else []:
            one = max(here, key=lambda row: overall[row.config.gamma or 0])
            for name, other in (("auto over best γ", best), ("auto over one γ", one)):
                value = ratio(results, auto, other)
                mine[name] = [value.value, value.low, value.high]
        found[context] = mine
    return found


def figures(results: Results, summary: Summary) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the figures by drafter.

    Raises:
        UsageError: The run has no lengths of context.
    """
    rows = [row for row in summary.rows if row.measured and row.config.context is not None]
    if not rows:
        raise UsageError("The run has no lengths of context.", "Measure one with --context.")
    drafters = dict.fromkeys(row.config.drafter for row in rows)
    return {
        name: of_drafter(results, [row for row in rows if row.config.drafter == name]) for name in drafters
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run")
    args = parser.parse_args(arguments)
    try:
        results = load_results(args.run)
        found = figures(results, summarize(results))
    except SpecbenchError as error:
        print(error, file=sys.stderr)
        return 2
    for drafter, by_context in found.items():
        print(drafter)
        for context, mine in by_context.items():
            parts = [f"{name} {_shown(value)}" for name, value in mine.items()]
            print(f"  {context:>7,}: {', '.join(parts)}")
    costs = results.run.costs
    error = None if costs is None else costs.error
    if error is not None:
        print(f"times of passes fit f(n) + k(n) · context within {error:.1%}")
    print(json.dumps({"fit": error, "drafters": found}, ensure_ascii=False))
    return 0


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join('–' if each is None else f'{each:.3f}' for each in value)}]"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
