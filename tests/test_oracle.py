"""benchmarks/oracle.py on recorded steps whose times and drafts are known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import oracle
import pytest

DRAFT_S, FIRST = 0.25, 1
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
