"""benchmarks/oracle.py on recorded steps whose times and drafts are known."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from stored_runs import change_lines, finished, steps_of, write_exact

from specbench.results.lines import StepLists
from specbench.results.results import load_results, step_columns

DRAFT_S, FIRST = 0.25, 1
WISE = "d@99"
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


def row_of(
    steps: Sequence[tuple[int, int, int]], tokens: Sequence[int], gamma: float = math.nan
) -> dict[str, Any]:
    """The same as ``load_results`` gives it."""
    line = measured(steps, tokens)
    return {**line, **columns_of(line), "gamma": gamma}


def columns_of(line: dict[str, Any]) -> dict[str, Any]:
    """The steps of a line as ``load_results`` gives them."""
    return step_columns(StepLists(**line.pop("steps")))


def ranks_of(right: Sequence[bool | None]) -> list[int | None]:
    """Of drafts one at a time: the first candidate is right, or wrong."""
    return [None if each is None else 0 if each else -1 for each in right]


def random_right(seed: int, length: int = 14, share: float = 0.7) -> list[bool]:
    chance = random.Random(seed)
    return [chance.random() < share for _ in range(length)]


# -- the course --------------------------------------------------------------------------------------


@pytest.mark.parametrize("room_for_all", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_no_course_is_faster(seed, room_for_all):
    right = random_right(seed, 8)
    best = oracle.best_course(ranks_of(right), FIRST, oracle.chains(4), room_for_all, COSTS)
    reached = course_of(right, iter(best), room_for_all)
    assert sum(emitted for _, _, emitted in reached) == len(right) - FIRST
    assert [gamma for gamma, _, _ in reached] == best
    everything = min(
        seconds_of(course_of(right, iter(gammas), room_for_all))
        for gammas in itertools.product(range(5), repeat=7)
    )
    assert seconds_of(reached) == pytest.approx(everything)


# -- what the steps say ------------------------------------------------------------------------------


def test_steps_tell_what_was_tested():
    right = [True, True, False, True, True, True, False, True]
    tokens = list(range(len(right)))
    row = row_of(course_of(right, itertools.repeat(2)), tokens, 2)
    # Two drafts from token 1: one accepted, one not. Two from token 3, both accepted: token 5 was drawn untested.
    assert oracle.right_ranks([row], tokens) == [None, 0, -1, 0, 0, None, -1, None]
    longer = row_of(course_of(right, itertools.repeat(4)), tokens, 4)
    assert oracle.right_ranks([row, longer], tokens) == [None, 0, -1, 0, 0, 0, -1, None]


def test_a_drafter_that_finds_nothing_has_no_draft_there():
    tokens = [0, 1, 2, 3]
    nothing = [(0, 0, 1)] * 3
    assert oracle.right_ranks([row_of(nothing, tokens, 4)], tokens) == [
        None,
        -1,
        -1,
        None,
    ]  # no room at last
    assert oracle.right_ranks([row_of(nothing, tokens)], tokens) == [None] * 4, "a rule may have wanted none"
    found = row_of([(2, 2, 3)], tokens, 4)
    for rows in ([row_of(nothing, tokens, 4), found], [found, row_of(nothing, tokens, 4)]):
        assert oracle.right_ranks(rows, tokens) == [None, 0, 0, None], "elsewhere it found something"


# -- costs -------------------------------------------------------------------------------------------


def test_costs_are_medians_on_a_line_that_never_falls():
    tokens = list(range(60))
    rows = [row_of([(0, 0, 1)] * 3, tokens), row_of([(2, 1, 2)] * 3, tokens), row_of([(6, 1, 2)] * 3, tokens)]
    rows[1]["steps_verify_s"] = np.array([1.25, 9.0, 1.25])  # once disturbed
    rows[0]["steps_verify_s"] = np.array([1.5, 1.5, 1.5])  # one token cannot take longer than three
    costs = oracle.step_costs(rows, 9)
    assert costs.draft_s == DRAFT_S
    assert costs.rest_s[1:4] == [1.25, 1.25, 1.25]
    assert costs.rest_s[5] == pytest.approx((1.25 + 2.0) / 2)
    assert costs.rest_s[7:] == pytest.approx([2.0, 2.0 + 0.75 / 4, 2.0 + 2 * 0.75 / 4])


# -- a whole run -------------------------------------------------------------------------------------


def write_run(path: Path, prefill_s: float = 0.0) -> Path:
    """A run over two prompts with every γ, and a rule that knows everything."""
    both = {"a-1": random_right(1, 40), "b-1": random_right(5, 40, 0.9)}
    gammas = {"plain": 0, WISE: 0, **{f"d@{gamma}": gamma for gamma in range(1, 9)}}
    wise = {"gamma": None, "draft_policy": "wise", "label": "d wise"}
    write_exact(path, {config: {prompt: [1.0] for prompt in both} for config in gammas}, configs={WISE: wise})

    def steps_in(line: dict[str, Any]) -> dict[str, Any]:
        config, right = line["config"], both[line["prompt"]]
        asked = itertools.repeat(gammas[config])
        if config == WISE:
            asked = iter(oracle.best_course(ranks_of(right), FIRST, oracle.chains(8), False, COSTS))
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


# -- trees -------------------------------------------------------------------------------------------

SHAPES = [(), (-1,), (-1, 0), (-1, -1), (-1, -1, 0, 0, 1), (-1, -1, 0, 1, 2)]
NOWHERE = 9
"""The rank of a token that no drafter comes up with."""


def random_ranks(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return chance.choices((0, 1, 2, NOWHERE), (6, 2, 1, 1), k=length)


def grown(ranks: Sequence[int], shapes: Any) -> list[dict[str, Any]]:
    """The steps in which one of these trees is drafted after the other, as deep as there is room."""
    steps, place = [], FIRST
    while place < len(ranks):
        depths: list[int] = []
        for parent in (asked := next(shapes)):
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        left = [node for node, depth in enumerate(depths) if depth <= len(ranks) - place - 1]
        shape = [asked[node] for node in left]  # the deepest come last
        node, widths, kept = -1, [], []
        while behind := [child for child, parent in enumerate(shape) if parent == node]:
            widths.append(len(behind))
            rank = ranks[place + len(kept)]
            if rank >= len(behind):
                break
            kept.append(rank)
            node = behind[rank]
        depth = max((depths[node] for node in left), default=0)
        steps.append({
            "drafted": depth, "tested": len(widths), "accepted": len(kept), "emitted": len(kept) + 1,
            "nodes": len(shape), "passes": depth, "widths": widths, "ranks": kept,
            "parents": [parent + 1 for parent in shape],
            "draft_s": depth * DRAFT_S, "verify_s": REST_S[len(shape) + 1],
        })  # fmt: skip
        place += len(kept) + 1
    return steps


def tree_line(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The measured fields of a generation."""
    tokens = FIRST + sum(step["emitted"] for step in steps)
    line = measured([(0, 0, 1)] * len(steps), range(tokens))
    line["steps"] |= {name: [step[name] for step in steps] for name in steps[0]}
    line["steps"]["expected_acceptance"] = [[0.5] * step["tested"] for step in steps]
    line["decode_s"] = sum(step["draft_s"] + step["verify_s"] for step in steps)
    return line


def test_the_oracles_of_a_run_with_trees(tmp_path, capsys):
    truth = {"a-1": random_ranks(1, 60), "b-1": random_ranks(2, 60)}
    rules = {"d@4": None, "d static": (-1, -1, 0, 0, 1), "d small": (-1, -1)}
    trees = {
        name: {
            "gamma": None,
            "draft_policy": f"static-tree:nodes={len(shape)}",
            "drafter": "d",
            "kind": "speculative",
        }
        for name, shape in rules.items()
        if shape
    }
    path = tmp_path / "run"
    write_exact(
        path, {config: {prompt: [1.0] for prompt in truth} for config in ("plain", *rules)}, configs=trees
    )

    def steps_in(line: dict[str, Any]) -> dict[str, Any]:
        ranks, shape = truth[line["prompt"]], rules.get(line["config"])
        if shape:
            return tree_line(grown(ranks, itertools.repeat(shape)))
        asked = itertools.repeat(0 if line["config"] == "plain" else 4)
        return measured(course_of([rank == 0 for rank in ranks], asked), range(60))

    change_lines(path, steps_in)
    assert oracle.main([str(path)]) == 0
    out = capsys.readouterr().out
    (found,) = json.loads(out.splitlines()[-1])
    bounds = [found[name]["speedup"] for name in ("oracle", "tree_oracle", "branch_oracle")]
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[1] < bounds[2]
    assert all(row["of_oracle"] < 1 and row["fit"] == pytest.approx(1.0, abs=0.02) for row in found["rows"])
    by_config = {row["config"]: row for row in found["rows"]}
    # One prompt each may be best with another tree.
    assert found["tree_hindsight"] >= max(by_config[name]["speedup"] for name in trees)
    assert found["hindsight"] == pytest.approx(by_config["d@4"]["speedup"])
    for what in (
        "best size of tree",
        "the right branch alone",
        "each prompt with its best tree of a size",
    ):
        assert what in out
