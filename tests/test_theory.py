"""What theory predicts, against published values, enumeration and simulations with known truth."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest

from specbench.base.record import to_json
from specbench.decoding.theory import (
    SLOPE,
    PassCosts,
    expected_tokens_by_position,
    never_falling,
)

COSTS = PassCosts({1: 0.1, 5: 0.11, 9: 0.15}, {"small": 0.02}, 256)


# -- tokens of a step -----------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "accepted"), [(0.5, 0.94), (0.7, 1.77), (0.9, 3.10)])
def test_expected_tokens_of_the_literature(alpha, accepted):
    """Accepted tokens per step for four drafts: one less than the tokens emitted."""
    assert round(expected_tokens_by_position([alpha] * 4)[-1] - 1, 2) == accepted


def test_by_position_equals_enumeration():
    rates = [0.9, 0.5, 0.7]
    expected = 0.0
    for passes in itertools.product((True, False), repeat=3):
        chance = math.prod(r if p else 1 - r for r, p in zip(rates, passes, strict=True))
        accepted = next((i for i, p in enumerate(passes) if not p), 3)
        expected += chance * (accepted + 1)
    assert expected_tokens_by_position(rates) == pytest.approx([1.0, 1.9, 2.35, expected])


def test_a_position_that_was_never_tested_adds_nothing():
    assert expected_tokens_by_position([0.0, math.nan]) == [1.0, 1.0, 1.0]
    assert expected_tokens_by_position([0.5, math.nan, 1.0]) == [1.0, 1.5, 1.5, 1.5]


# -- times of passes ------------------------------------------------------------------------------


def test_cost_is_interpolated_and_goes_on():
    times = [10 * COSTS.target_pass_s(n) for n in (1, 3, 5, 7, 9, 13)]
    assert times == pytest.approx([1.0, 1.05, 1.1, 1.3, 1.5, 1.9])
    assert PassCosts({3: 1.0, 5: 2.0}).target_pass_s(1) == 1.0, "level below the narrowest"


def test_behind_the_only_measured_width_a_gentle_slope_is_assumed():
    costs = PassCosts({1: 0.2})
    assert [costs.target_pass_s(n) / 0.2 for n in (1, 4)] == pytest.approx([1.0, 1.0 + 3 * SLOPE])


def test_no_pass_takes_longer_than_a_wider_one():
    assert list(never_falling({9: 3.0, 1: 5.0, 5: 2.0}).items()) == [(1, 2.0), (5, 2.0), (9, 3.0)]
    assert never_falling({}) == {}


def test_passes_after_the_first_one_of_a_draft_have_a_time_of_their_own():
    costs = PassCosts({1: 0.1}, {"a": 0.02, "b": 0.03}, later_s={"a": 0.01})
    assert costs.step_s("a", 4, 3) == pytest.approx(0.1 * (1 + 4 * SLOPE) + 0.02 + 2 * 0.01)
    assert costs.step_s("b", 0, 0) == pytest.approx(0.13), "without passes it is asked once"
    assert math.isnan(PassCosts({}).step_s("a", 1, 1))
    assert msgspec.json.decode(to_json(costs), type=PassCosts) == costs
