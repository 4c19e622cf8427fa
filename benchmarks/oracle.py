"""Compute the best possible γ in hindsight, and how much of it each draft policy reaches.

    python benchmarks/oracle.py results/RUN                  # a sweep with several γ, 8 or more among them, and rules
    python benchmarks/oracle.py results/RUN --gamma-max 16

The oracle knows before each step how many drafts the target would accept, and picks the γ that ends the whole output
soonest, so its speedup is an upper bound for the drafter. It is computed from a greedy sweep: all configurations
draft the same after the same text, so recorded tests say which drafts are right. Untested drafts count as right, and
so do those that one step accepted and another did not (n-gram and lookup depend on where they begin). Times are
medians over the drafter's recorded steps: per drafter pass, per rest of a step by verified tokens, and the drafter's
prefill. "fit" is that sum for the recorded steps over their actual time: near 1, the costs describe the machine.

Trees are left out. Prints a table for each drafter and one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from specbench.base.errors import SpecbenchError, UsageError
from specbench.decoding.theory import PassCosts, never_falling
from specbench.results.lines import STEP_FIGURES
from specbench.results.results import Results, load_results

Row = Mapping[str, Any]
Unit = tuple[str, int]
"""A prompt and its turn."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds per pass of the drafter, and of the rest of a step by the number of tokens verified (item n)."""

    draft_s: float
    rest_s: Sequence[float]

    def of(self, gamma: int, passes: int | None = None) -> float:
        """Return the seconds of a step with that many drafts, and by default as many passes."""
        return (gamma if passes is None else passes) * self.draft_s + self.rest_s[gamma + 1]

    def reading(self, prefill_s: float) -> float:
        """What the drafter's first reading of a prompt, which gives a token too, takes longer than any draft."""
        return max(0.0, prefill_s - self.draft_s)


def steps_of(row: Row) -> Iterable[dict[str, float]]:
    """Yield the recorded steps of a generation."""
    yield from row["steps"][[*STEP_FIGURES]].astype(float).to_dict("records")


def rate(row: Row) -> float:
    """Return decoded tokens per second."""
    return float((row["new_tokens"] - first_tokens(row)) / row["decode_s"])


def first_tokens(row: Row) -> int:
    """Return the number of tokens before the first step."""
    return int(row["new_tokens"]) - int(row["steps"]["emitted"].sum())


def right_drafts(rows: Iterable[Row], output: Sequence[int]) -> list[bool | None]:
    """Return for every token of an output whether the drafter would draft it; ``None`` where no step tells.

    Args:
        rows: Greedy generations of one drafter from one prompt. Where rounding parted their outputs, what they say
            holds up to there.
        output: The tokens.
    """
    known: list[bool | None] = [None] * len(output)
    for row in rows:
        shared = 0
        for token, other in zip(row["token_ids"], output, strict=False):
            if token != other:
                break
            shared += 1
        place = first_tokens(row)
        for step in steps_of(row):
            drafted, tested, accepted = (int(step[name]) for name in ("drafted", "tested", "accepted"))
            end = place + accepted
            known[place : min(end, shared)] = [True] * max(0, min(end, shared) - place)
            # What was rejected is wrong, and so is what a drafter could not draft although more was allowed.
            budget = len(row["token_ids"]) - place - 1
            missing = not math.isnan(row["gamma"]) and accepted == drafted < min(row["gamma"], budget)
            if (tested > accepted or missing) and end < shared:
                known[end] = bool(known[end])
            place += int(step["emitted"])
    return known


def step_costs(rows: Iterable[Row], widest: int) -> StepCosts:
    """Return medians over the steps of plain decoding and of one drafter.

    No pass is taken to be longer than one with more tokens; between the widths seen and beyond them it goes as in
    ``PassCosts.target_pass_s``.
    """
    draft, rest = [], defaultdict(list)
    for row in rows:
        for step in steps_of(row):
            passes = step["passes"] - (step["draft_prefill_s"] > 0)
            if passes > 0:
                draft.append((step["draft_s"] - step["draft_prefill_s"]) / passes)
            parts = ("verify_s", "accept_s", "rollback_s", "other_s")
            rest[_rows(step)].append(sum(step[part] for part in parts))
    medians = PassCosts(never_falling({n: median(seconds) for n, seconds in rest.items()}))
    return StepCosts(median(draft) if draft else 0.0, [medians.target_pass_s(n) for n in range(widest + 1)])


def _rows(step: Mapping[str, float]) -> int:
    """Return the number of rows that a step verified, the context's last included."""
    return int(step["nodes"]) + 1


def best_course(
    right: Sequence[bool | None], first: int, longest: int, room_for_all: bool, costs: StepCosts
) -> list[int]:
    """Return the draft lengths of the steps that end an output soonest.

    Args:
        right: See ``right_drafts``; what is not known counts as right.
        first: How many tokens stand there already.
        longest: The longest draft.
        room_for_all: Whether the last token may be drafted (an end token may; where the length runs out the last one is
            the target's).
        costs: Of the steps.
    """
    end = len(right)
    best = [0.0] * (end + 1)
    choice, reached = [0] * (end + 1), [0] * (end + 1)
    for place in range(end - 1, first - 1, -1):
        best[place] = math.inf
        accepted = 0
        for gamma in range(min(longest, end - place - (not room_for_all)) + 1):
            if gamma == accepted + 1 and right[place + accepted] is not False:
                accepted = gamma
            to = min(end, place + accepted + 1)
            if costs.of(gamma) + best[to] < best[place]:
                best[place], choice[place], reached[place] = costs.of(gamma) + best[to], gamma, to
    course, place = [], first
    while place < end:
        course.append(choice[place])
        place = reached[place]
    return course


def study(results: Results, gamma_max: int | None = None) -> list[dict[str, Any]]:
    """Return the oracle of every drafter of a greedy sweep, and how close its configurations come.

    Args:
        results: A run.
        gamma_max: The largest γ that the oracle may choose; ``None`` for the longest draft recorded.

    Returns:
        A dict per drafter: ``drafter``, ``oracle`` (its ``speedup``, ``tokens_per_step``, ``drafted_per_token``); the
        share ``unknown`` of tokens that no step tested, ``hindsight`` (the speedup with each prompt's best fixed γ, or
        ``None``), and ``rows``, the same figures of each configuration with ``of_oracle``, its speedup over the
        oracle's, ``wasted``, the share of the drafted positions at which nothing was accepted, and ``fit``.

    Raises:
        UsageError: No drafter has a greedy generation next to one of plain decoding.
    """
    plain: dict[Unit, list[Row]] = defaultdict(list)
    by_drafter: dict[str, list[Row]] = defaultdict(list)
    steps = dict(iter(results.steps.groupby("output")))
    for at, row in results.generations.to_dict("index").items():
        if row["status"] != "ok" or row["temperature"] != 0 or at not in steps:
            continue
        row["steps"] = steps[at]
        if row["kind"] == "plain":
            plain[row["prompt"], row["turn"]].append(row)
        elif row["kind"] == "speculative" and (row["steps"]["nodes"] == row["steps"]["drafted"]).all():
            by_drafter[row["drafter"]].append(row)
    found = []
    for drafter, rows in by_drafter.items():
        units: dict[Unit, list[Row]] = defaultdict(list)
        for row in rows:
            if (row["prompt"], row["turn"]) in plain:
                units[row["prompt"], row["turn"]].append(row)
        if units:
            found.append({"drafter": drafter, **_study_drafter(units, plain, gamma_max)})
    if not found:
        raise UsageError(
            "No drafter has a greedy generation next to one of plain decoding.", "Sweep at temperature 0."
        )
    return found


def _study_drafter(
    units: Mapping[Unit, Sequence[Row]], plain: Mapping[Unit, Sequence[Row]], gamma_max: int | None
) -> dict[str, Any]:
    rows = [row for mine in units.values() for row in mine]
    recorded = int(max(row["steps"]["drafted"].max() for row in rows))
    longest = gamma_max or recorded
    base = [row for unit in units for row in plain[unit]]
    costs = step_costs([*rows, *base], max(longest, recorded) + 1)
    bases = {unit: median(map(rate, plain[unit])) for unit in units}
    known = _Known(units, bases)
    oracle, figures = known.bound(longest, costs)
    by_config: dict[str, dict[Unit, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for unit, mine in units.items():
        for row in mine:
            by_config[row["config"]][unit].append(row)
    ratios_of = {
        config: {unit: median(map(rate, each)) / bases[unit] for unit, each in mine.items()}
        for config, mine in by_config.items()
    }
    fixed = {row["config"] for row in rows if row["draft_policy"].partition(":")[0] == "fixed"}
    found = [_figures(by_config[config], ratios_of[config], oracle, costs) for config in by_config]
    return {
        "unknown": known.unknown,
        "oracle": figures,
        "hindsight": _hindsight([ratios_of[config] for config in fixed], units),
        "rows": sorted(found, key=lambda row: -row["speedup"]),
    }


def _hindsight(configs: Sequence[Mapping[Unit, float]], units: Iterable[Unit]) -> float | None:
    """Return the speedup with each prompt's best configuration; ``None`` without any."""
    best = [max((each[unit] for each in configs if unit in each), default=None) for unit in units]
    return _mean(each for each in best if each is not None) if configs and None not in best else None


class _Known:
    """What the generations of a drafter say of its drafts.

    Args:
        units: They, by prompt and turn.
        bases: Tokens per second of plain decoding.
    """

    def __init__(self, units: Mapping[Unit, Sequence[Row]], bases: Mapping[Unit, float]) -> None:
        self._units, self._bases = units, bases
        self._right = {
            unit: {tuple(row["token_ids"]): right_drafts(mine, row["token_ids"]) for row in mine}
            for unit, mine in units.items()
        }
        later = [
            right
            for unit, mine in units.items()
            for output, row in {tuple(row["token_ids"]): row for row in mine}.items()
            for right in self._right[unit][output][first_tokens(row) :]
        ]
        self.unknown = later.count(None) / len(later)

    def bound(self, longest: int, costs: StepCosts) -> tuple[dict[Unit, float], dict[str, float]]:
        """Return each prompt's speedup with the best draft length in every step, and the figures over all."""
        found: dict[Unit, float] = {}
        tokens, courses = 0, []
        for unit, mine in self._units.items():
            ratios = {}
            for output, row in {tuple(row["token_ids"]): row for row in mine}.items():
                first, room_for_all = first_tokens(row), row["finish_reason"] != "length"
                course = best_course(self._right[unit][output], first, longest, room_for_all, costs)
                prefill = min(each["steps"]["draft_prefill_s"].sum() for each in mine) if any(course) else 0.0
                seconds = costs.reading(prefill) + sum(map(costs.of, course))
                ratios[output] = (len(output) - first) / seconds / self._bases[unit]
                courses += course
                tokens += len(output) - first
            found[unit] = _mean(ratios[tuple(row["token_ids"])] for row in mine)
        return found, {
            "speedup": _mean(found.values()),
            "tokens_per_step": tokens / len(courses),
            "drafted_per_token": sum(courses) / tokens,
        }


def _figures(
    units: Mapping[Unit, Sequence[Row]],
    ratios: Mapping[Unit, float],
    oracle: Mapping[Unit, float],
    costs: StepCosts,
) -> dict[str, Any]:
    rows = [row for each in units.values() for row in each]
    steps = [step for row in rows for step in steps_of(row)]
    drafted, nodes, emitted = (sum(step[name] for step in steps) for name in ("drafted", "nodes", "emitted"))
    modeled = sum(
        costs.of(_rows(step) - 1, int(step["passes"])) + costs.reading(step["draft_prefill_s"])
        for step in steps
    )
    return {
        "config": rows[0]["config"],
        "label": rows[0]["label"],
        "speedup": _mean(ratios.values()),
        "of_oracle": _mean(ratios[unit] / oracle[unit] for unit in ratios),
        "tokens_per_step": emitted / len(steps),
        "drafted_per_token": nodes / emitted,
        "wasted": 1 - sum(step["accepted"] for step in steps) / drafted if drafted else 0.0,
        "fit": modeled / sum(row["decode_s"] for row in rows),
        "prompts": len(units),
    }


def _mean(ratios: Iterable[float]) -> float:
    """Geometric mean."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


def text_of(found: Mapping[str, Any]) -> str:
    """Return the table of one drafter."""
    lines = [
        found["drafter"],
        f"  {'':40} speedup  of oracle  tokens/step  drafted/token  wasted   fit",
    ]
    bound = found["oracle"]
    lines.append(
        f"  {'oracle':40} {bound['speedup']:7.2f} {'':9}  {bound['tokens_per_step']:11.2f}"
        f"  {bound['drafted_per_token']:13.2f}"
    )
    if found["hindsight"] is not None:
        of_oracle = found["hindsight"] / bound["speedup"]
        lines.append(
            f"  {'each prompt with its best fixed γ':40} {found['hindsight']:7.2f}  {of_oracle:9.0%}"
        )
    lines += [
        f"  {row['label']:40.40} {row['speedup']:7.2f}  {row['of_oracle']:9.0%}  {row['tokens_per_step']:11.2f}"
        f"  {row['drafted_per_token']:13.2f}  {row['wasted']:6.0%}  {row['fit']:4.2f}"
        for row in found["rows"]
    ]
    lines.append(f"  {found['unknown']:.1%} of the tokens were tested by no step")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="folder of a sweep")
    parser.add_argument(
        "--gamma-max", type=int, metavar="N", help="largest γ of the oracle; default: the longest draft"
    )
    given = parser.parse_args(arguments)
    try:
        found = study(load_results(given.run), given.gamma_max)
    except SpecbenchError as error:
        parser.exit(2, f"{error}\n")
    for each in found:
        print(text_of(each), end="\n\n")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
