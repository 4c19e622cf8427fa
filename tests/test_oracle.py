"""benchmarks/oracle.py on recorded steps whose times and drafts are known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import oracle
import pytest
from stored_runs import change_lines, finished, steps_of, write_exact

from specbench.results.results import load_results

DRAFT_S, FIRST = 0.25, 1
WISE = "d@heuristic"
REST_S = {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.5, 5: 1.5, 6: 1.75, 7: 2.0, 8: 2.0, 9: 2.5}
COSTS = oracle.StepCosts(DRAFT_S, [0.0, *REST_S.values()])


def course_of(right: Sequence[bool], gammas: Any, room_for_all: bool = False) -> list[tuple[int, int, int]]:
    """γ, accepted and emitted of every step when ``gammas`` are asked for one after the other."""
    steps, place = [], FIRST
    while place < len(right):
        gamma = min(next(gammas), len(right) - place - (not room_for_all))
        accepted = len(list(itertools.takewhile(bool, right[place : place + gamma])))
        emitted = min(accepted + 1, len(right) - place)
        steps.append((gamma, accepted, emitted))
        place += emitted
    return steps


def seconds_of(steps: Sequence[tuple[int, int, int]]) -> float:
    return sum(COSTS.of(gamma) for gamma, _, _ in steps)


def measured(
    steps: Sequence[tuple[int, int, int]], tokens: Sequence[int], prefill_s: float = 0.0
) -> dict[str, Any]:
    """The measured fields of a generation; the drafter's first pass takes ``prefill_s`` in place of ``DRAFT_S``."""
    count = len(steps)
    prefill = [prefill_s] + [0.0] * (count - 1)
    draft = [g * DRAFT_S + p - (DRAFT_S if p else 0.0) for (g, _, _), p in zip(steps, prefill, strict=True)]
    rest = [REST_S[g + 1] for g, _, _ in steps]
    drafted, accepted, emitted = zip(*steps, strict=True) if steps else ((), (), ())
    lists = steps_of(
        drafted, accepted, emitted, draft, rest, draft_prefill_s=prefill, closing=["bonus"] * count,
        expected_acceptance=[[0.5] * min(g, a + 1) for g, a, _ in steps],
    )  # fmt: skip
    return finished(sum(draft) + sum(rest), tokens, lists)


def random_right(seed: int, length: int = 14, share: float = 0.7) -> list[bool]:
    chance = random.Random(seed)
    return [chance.random() < share for _ in range(length)]


# -- the course --------------------------------------------------------------------------------------


@pytest.mark.parametrize("room_for_all", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_no_course_is_faster(seed, room_for_all):
    right = random_right(seed, 8)
    best = oracle.best_course(right, FIRST, 4, room_for_all, COSTS)
    reached = course_of(right, iter(best), room_for_all)
    assert sum(emitted for _, _, emitted in reached) == len(right) - FIRST
    assert [gamma for gamma, _, _ in reached] == best
    everything = min(
        seconds_of(course_of(right, iter(gammas), room_for_all))
        for gammas in itertools.product(range(5), repeat=7)
    )
    assert seconds_of(reached) == pytest.approx(everything)


# -- a whole run -------------------------------------------------------------------------------------


def write_run(path: Path, prefill_s: float = 0.0) -> Path:
    """A run over two prompts with every γ, and a rule that knows everything."""
    both = {"a-1": random_right(1, 40), "b-1": random_right(5, 40, 0.9)}
    gammas = {"plain": 0, WISE: 0, **{f"d@{gamma}": gamma for gamma in range(1, 9)}}
    write_exact(path, {config: {prompt: [1.0] for prompt in both} for config in gammas})

    def steps_in(line: dict[str, Any]) -> dict[str, Any]:
        config, right = line["config"], both[line["prompt"]]
        asked = itertools.repeat(gammas[config])
        if config == WISE:
            asked = iter(oracle.best_course(right, FIRST, 8, False, COSTS))
        steps = course_of(right, asked)
        return measured(steps, range(40), 0.0 if config == "plain" else prefill_s)

    return change_lines(path, steps_in)


@pytest.mark.parametrize("prefill_s", [0.0, 3.0])
def test_the_bound_is_what_one_reaches_who_knows(tmp_path, prefill_s):
    (found,) = oracle.study(load_results(write_run(tmp_path / "run", prefill_s)))
    rows = {row["config"]: row for row in found["rows"]}
    assert set(rows) == {WISE, *(f"d@{gamma}" for gamma in range(1, 9))}
    assert rows[WISE]["of_oracle"] == pytest.approx(1.0, abs=0.002)
    assert all(row["fit"] == pytest.approx(1.0, abs=0.01) for row in found["rows"])
    assert rows[WISE]["wasted"] == 0
    assert rows["d@8"]["wasted"] > rows["d@2"]["wasted"] > 0.1
    best = max(row["speedup"] for name, row in rows.items() if name != WISE)
    assert best <= found["hindsight"] < found["oracle"]["speedup"]
    assert found["rows"][0]["config"] == WISE
    assert found["unknown"] < 0.1
    assert found["oracle"]["speedup"] == pytest.approx(rows[WISE]["speedup"], rel=0.002)
    assert found["oracle"]["tokens_per_step"] == pytest.approx(rows[WISE]["tokens_per_step"], rel=0.03)
