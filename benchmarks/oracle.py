"""How much is there to gain by choosing γ well, and how much of it does each draft-length rule get?

    python benchmarks/oracle.py results/RUN                  # a sweep with several γ, 8 or more among them, and rules
    python benchmarks/oracle.py results/RUN --gamma-max 16

The oracle knows before each step how many drafts the target would accept, and picks the γ that ends the whole output
soonest. Nothing can decide better with the same drafter, so its speedup is a bound. It is computed from the records of
a greedy sweep, drafter by drafter: where the recorded steps tested a draft it is known whether it is right, for in
greedy decoding all configurations draft the same behind the same text. What no step
tested is taken to be right, and so is what one step accepted and another did not (n-gram and lookup draft by where they
begin), so that the bound stays one. Its time is the sum of the medians, over the recorded steps of that drafter, of the
time per drafted token and of the rest of a step by the number of tokens verified, and the drafter's own reading of the
prompt. "fit" is that sum for the steps as recorded, over the time they took: near 1 the costs describe the machine.

Prints a table for each drafter and ends with one line of JSON.
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

from specbench.decoding.theory import PassCosts, never_falling
from specbench.errors import SpecbenchError, UsageError
from specbench.results.store import load_results

Row = Mapping[str, Any]
Unit = tuple[str, int]
"""A prompt and its turn."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds per drafted token, and of the rest of a step by the number of tokens verified (item n)."""

    draft_s: float
    rest_s: Sequence[float]

    def of(self, gamma: int) -> float:
        """Seconds of a step with γ drafts."""
        return gamma * self.draft_s + self.rest_s[gamma + 1]

    def reading(self, prefill_s: float) -> float:
        """What the drafter's first reading of a prompt, which gives a token too, takes longer than any draft."""
        return max(0.0, prefill_s - self.draft_s)


def steps_of(row: Row) -> Iterable[dict[str, float]]:
    """The recorded steps of a generation, one by one."""
    names = [name for name in row if name.startswith("steps_") and name.endswith("_s")]
    counts = [f"steps_{name}" for name in ("drafted", "tested", "accepted", "emitted")]
    columns = [row[name] for name in (*names, *counts)]
    for values in zip(*columns, strict=True):
        yield dict(
            zip((name.removeprefix("steps_") for name in (*names, *counts)), map(float, values), strict=True)
        )


def rate(row: Row) -> float:
    """Decode tokens per second."""
    return float((row["new_tokens"] - first_tokens(row)) / row["decode_s"])


def first_tokens(row: Row) -> int:
    """How many tokens stood there before the first step."""
    return int(row["new_tokens"]) - int(sum(row["steps_emitted"]))


def tested_positions(rows: Iterable[Row], output: Sequence[int]) -> list[bool | None]:
    """For every token of an output, whether a draft of it is right; ``None`` where no step tells.

    Args:
        rows: Greedy generations of one drafter from one prompt. Where rounding parted their outputs, what they say
            holds up to there.
        output: The tokens.
    """
    right: list[bool | None] = [None] * len(output)
    for row in rows:
        shared = 0
        for token, other in zip(row["token_ids"], output, strict=False):
            if token != other:
                break
            shared += 1
        place = first_tokens(row)
        for step in steps_of(row):
            drafted, tested, accepted = (int(step[name]) for name in ("drafted", "tested", "accepted"))
            for i in range(place, min(place + accepted, shared)):
                right[i] = True
            # What was rejected is wrong, and so is what a drafter asked for more did not come up with.
            room = len(row["token_ids"]) - place - 1
            missing = not math.isnan(row["gamma"]) and accepted == drafted < min(row["gamma"], room)
            end = place + accepted
            if (tested > accepted or missing) and end < shared:
                right[end] = right[end] or False
            place += int(step["emitted"])
    return right


def step_costs(rows: Iterable[Row], widest: int) -> StepCosts:
    """Medians over the steps of plain decoding and of one drafter.

    No pass is taken to be longer than one with more tokens; between the widths seen and beyond them it goes as in
    ``PassCosts.target_pass_s``.
    """
    draft, rest = [], defaultdict(list)
    for row in rows:
        for step in steps_of(row):
            passes = step["drafted"] - (step["draft_prefill_s"] > 0)
            if passes > 0:
                draft.append((step["draft_s"] - step["draft_prefill_s"]) / passes)
            parts = ("verify_s", "accept_s", "rollback_s", "other_s")
            rest[int(step["drafted"]) + 1].append(sum(step[part] for part in parts))
    medians = PassCosts(never_falling({n: median(seconds) for n, seconds in rest.items()}))
    return StepCosts(median(draft) if draft else 0.0, [medians.target_pass_s(n) for n in range(widest + 1)])


def best_course(
    right: Sequence[bool | None], first: int, longest: int, room_for_all: bool, costs: StepCosts
) -> list[int]:
    """The γ of every step of the fastest way to the end of an output.

    Args:
        right: See ``tested_positions``; ``None`` counts as right.
        first: How many tokens stand there already.
        longest: The largest γ.
        room_for_all: Whether the last token may be drafted (an end token may; where the length runs out the last one is
            the target's).
        costs: Of the steps.
    """
    end = len(right)
    run = [0] * (end + 1)  # right drafts from here on
    for place in range(end - 1, -1, -1):
        run[place] = 0 if right[place] is False else run[place + 1] + 1
    best = [0.0] * (end + 1)
    choice = [0] * (end + 1)
    for place in range(end - 1, first - 1, -1):
        room = end - place - (not room_for_all)
        best[place] = math.inf
        for gamma in range(min(longest, room) + 1):
            reached = min(end, place + min(gamma, run[place]) + 1)
            seconds = costs.of(gamma) + best[reached]
            if seconds < best[place]:
                best[place], choice[place] = seconds, gamma
    course, place = [], first
    while place < end:
        course.append(choice[place])
        place = min(end, place + min(choice[place], run[place]) + 1)
    return course


def study(frame: Any, gamma_max: int | None = None) -> list[dict[str, Any]]:
    """The oracle of every drafter of a greedy sweep, and how close its configurations come.

    Args:
        frame: From ``specbench.results.store.load_results``, of one run.
        gamma_max: The largest γ that the oracle may choose; ``None`` for the longest draft recorded.

    Returns:
        A dict per drafter: ``drafter``, ``oracle`` (its ``speedup``, ``tokens_per_step``, ``drafted_per_token``), the
        share ``unknown`` of tokens that no step tested, ``hindsight`` (the speedup with each prompt's best fixed γ, or
        ``None``), and ``rows``, the same figures of each configuration with ``of_oracle``, its speedup over the
        oracle's, ``wasted``, the share of drafts that were not accepted, and ``fit``.

    Raises:
        UsageError: No drafter has a greedy generation beside one of plain decoding.
    """
    plain: dict[Unit, list[Row]] = defaultdict(list)
    by_drafter: dict[str, list[Row]] = defaultdict(list)
    for row in frame.to_dict("records"):
        if row["status"] != "ok" or row["temperature"] != 0 or not len(row["steps_emitted"]):
            continue
        if row["kind"] == "plain":
            plain[row["prompt"], row["turn"]].append(row)
        elif row["kind"] == "speculative":
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
            "No drafter has a greedy generation beside one of plain decoding.", "Sweep at temperature 0."
        )
    return found


def _study_drafter(
    units: Mapping[Unit, Sequence[Row]], plain: Mapping[Unit, Sequence[Row]], gamma_max: int | None
) -> dict[str, Any]:
    rows = [row for mine in units.values() for row in mine]
    recorded = int(max(max(row["steps_drafted"]) for row in rows))
    longest = gamma_max or recorded
    costs = step_costs([*rows, *(row for unit in units for row in plain[unit])], max(longest, recorded) + 1)
    bases = {unit: median(map(rate, plain[unit])) for unit in units}
    oracle: dict[Unit, float] = {}
    tokens, unknown, courses = 0, 0, []
    for unit, mine in units.items():
        outputs = {tuple(row["token_ids"]): row for row in mine}
        ratios = {}
        for output, row in outputs.items():
            right, first = tested_positions(mine, output), first_tokens(row)
            course = best_course(right, first, longest, row["finish_reason"] != "length", costs)
            prefill = min(sum(each["steps_draft_prefill_s"]) for each in mine) if any(course) else 0.0
            seconds = costs.reading(prefill) + sum(map(costs.of, course))
            ratios[output] = (len(output) - first) / seconds / bases[unit]
            courses += course
            tokens += len(output) - first
            unknown += sum(each is None for each in right[first:])
        oracle[unit] = _mean(ratios[tuple(row["token_ids"])] for row in mine)
    by_config: dict[str, dict[Unit, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for unit, mine in units.items():
        for row in mine:
            by_config[row["config"]][unit].append(row)
    ratios_of = {
        config: {unit: median(map(rate, each)) / bases[unit] for unit, each in mine.items()}
        for config, mine in by_config.items()
    }
    fixed = [
        ratios_of[row["config"]]
        for row in {row["config"]: row for row in rows}.values()
        if row["policy"] == "fixed"
    ]
    best = [max(each[unit] for each in fixed if unit in each) for unit in units] if fixed else []
    figures = [_figures(by_config[config], ratios_of[config], oracle, costs) for config in by_config]
    return {
        "unknown": unknown / tokens,
        "oracle": {
            "speedup": _mean(oracle.values()),
            "tokens_per_step": tokens / len(courses),
            "drafted_per_token": sum(courses) / tokens,
        },
        "hindsight": _mean(best) if best else None,
        "rows": sorted(figures, key=lambda row: -row["speedup"]),
    }


def _figures(
    units: Mapping[Unit, Sequence[Row]],
    ratios: Mapping[Unit, float],
    oracle: Mapping[Unit, float],
    costs: StepCosts,
) -> dict[str, Any]:
    rows = [row for each in units.values() for row in each]
    steps = [step for row in rows for step in steps_of(row)]
    drafted, emitted = (sum(step[name] for step in steps) for name in ("drafted", "emitted"))
    modelled = sum(costs.of(int(step["drafted"])) + costs.reading(step["draft_prefill_s"]) for step in steps)
    return {
        "config": rows[0]["config"],
        "label": rows[0]["label"],
        "speedup": _mean(ratios.values()),
        "of_oracle": _mean(ratios[unit] / oracle[unit] for unit in ratios),
        "tokens_per_step": emitted / len(steps),
        "drafted_per_token": drafted / emitted,
        "wasted": 1 - sum(step["accepted"] for step in steps) / drafted if drafted else 0.0,
        "fit": modelled / sum(row["decode_s"] for row in rows),
        "prompts": len(units),
    }


def _mean(ratios: Iterable[float]) -> float:
    """Geometric mean."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


def text_of(found: Mapping[str, Any]) -> str:
    """The table of one drafter."""
    oracle = found["oracle"]
    lines = [
        found["drafter"],
        f"  {'':40} speedup  of oracle  tokens/step  drafted/token  wasted   fit",
        f"  {'oracle':40} {oracle['speedup']:7.2f} {'':9}  {oracle['tokens_per_step']:11.2f}"
        f"  {oracle['drafted_per_token']:13.2f}",
    ]
    if found["hindsight"] is not None:
        of_oracle = found["hindsight"] / oracle["speedup"]
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
