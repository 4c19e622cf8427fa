"""benchmarks/oracle.py where times and drafts are known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

import oracle
import pytest

FIRST, LONGEST, LENGTH = 1, 4, 8
COSTS = oracle.StepCosts(0.25, [0.0, 1.0, 1.0, 1.0, 1.5, 1.5, 1.75, 2.0, 2.0, 2.5])


def course_of(right: Sequence[bool], gammas: Iterable[int], room_for_all: bool) -> tuple[list[int], float]:
    """Return the draft lengths taken, where ``gammas`` are asked for one after the other, and the seconds of all."""
    taken, place = list[int](), FIRST
    for gamma in gammas:
        if place >= len(right):
            break
        taken.append(min(gamma, len(right) - place - (not room_for_all)))
        accepted = len(list(itertools.takewhile(bool, right[place : place + taken[-1]])))
        place = min(len(right), place + accepted + 1)
    assert place == len(right)
    return taken, sum(map(COSTS.of, taken))


@pytest.mark.parametrize("room_for_all", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_no_course_is_faster(seed, room_for_all):
    chance = random.Random(seed)
    right = [chance.random() < 0.7 for _ in range(LENGTH)]
    best = oracle.best_course(right, FIRST, LONGEST, room_for_all, COSTS)
    taken, seconds = course_of(right, best, room_for_all)
    assert taken == best
    others = itertools.product(range(LONGEST + 1), repeat=LENGTH - FIRST)
    assert seconds == pytest.approx(min(course_of(right, other, room_for_all)[1] for other in others))
