"""Statistics against closed forms, exact enumeration, independent implementations and simulations with known truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize
from scipy import stats as distributions

from specbench.base.record import Estimate
from specbench.results import stats
from specbench.results.stats import (
    compare,
    geometric_mean,
    mean_interval,
    mean_intervals,
    nested_means,
    pooled_rate,
    pooled_speedup,
    verdict,
)

SKEWED = np.array([0.1, 0.15, 0.2, 0.22, 0.3, 0.9, 1.7])


def student(values: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    low, high = distributions.t.interval(
        confidence, len(values) - 1, values.mean(), distributions.sem(values)
    )
    return float(low), float(high)


def hall_by_search(values: np.ndarray) -> tuple[float, float]:
    """The means at which Hall's transformed statistic reaches its quantiles, found by root search."""
    n, spread = len(values), values.std(ddof=1)
    quantile = distributions.t.ppf(0.975, n - 1)
    unbiased = n * ((values - values.mean()) ** 3).sum() / ((n - 1) * (n - 2)) / spread**3
    steepest = 0.95 * np.sqrt(n) / quantile
    skewness = np.clip(unbiased, -steepest, steepest)

    def transformed(mu: float) -> float:
        w = (values.mean() - mu) / spread
        return float(np.sqrt(n) * (w + skewness * w**2 / 3 + skewness**2 * w**3 / 27 + skewness / (6 * n)))

    wide = 50 * spread
    ends = [
        optimize.brentq(lambda mu, q=q: transformed(mu) - q, values.mean() - wide, values.mean() + wide)
        for q in (quantile, -quantile)
    ]
    return ends[0], ends[1]


class TestNestedMeans:
    def test_turns_then_repeats_then_prompts(self):
        # a: repeat 0 has two turns (1, 3), repeat 1 one (8): (2 + 8) / 2, not (1 + 3 + 8) / 3.
        names, means = nested_means([1.0, 3.0, 8.0, 5.0], ["a", "a", "a", "b"], [0, 0, 1, 0])
        assert names.tolist() == ["a", "b"]
        assert means.tolist() == [5.0, 5.0]

    @given(st.permutations(range(8)))
    def test_the_order_of_the_runs_is_irrelevant(self, order):
        values, prompts = np.arange(8.0) ** 2, np.repeat(["x", "y"], 4)
        repeats = np.tile([0, 0, 1, 2], 2)
        expected = nested_means(values, prompts, repeats)[1]
        assert nested_means(values[order], prompts[order], repeats[order])[1] == pytest.approx(expected)


class TestMeanInterval:
    def test_symmetric_values_give_students_interval(self):
        values = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
        assert mean_interval(values) == pytest.approx(student(values))
        assert mean_interval(values, 0.8) == pytest.approx(student(values, 0.8))

    @pytest.mark.parametrize("values", [SKEWED, -SKEWED, SKEWED * 1e-4 + 3.0])
    def test_each_end_is_the_outer_of_students_and_halls(self, values):
        t, hall = student(values), hall_by_search(values)
        expected = min(t[0], hall[0]), max(t[1], hall[1])
        assert mean_interval(values) == pytest.approx(expected, rel=1e-6)
        assert expected[0] in (t[0], hall[0])
        assert t != pytest.approx(hall)  # or this test would compare one with itself

    @pytest.mark.parametrize("n", [2, 3, 4, 11, 100, 5000])
    @pytest.mark.parametrize("error", [0.3, 0.025, 0.0075, 1e-4, 1e-6])
    def test_its_quantiles_are_those_of_scipy(self, n, error):
        values = np.arange(float(n))
        half = distributions.t.ppf(1 - error, n - 1) * distributions.sem(values)
        assert stats.upper_bound(values, error) == pytest.approx(values.mean() + half, rel=1e-6)
        assert stats.upper_bound(values[:1], error) == math.inf

    def test_a_bound_over_groups_in_turn_goes_by_what_is_left_within_them(self):
        values, groups = [1.0, 5.0, 1.4, 5.2, 1.2, 5.4], [*"ababab"]
        scatter = math.sqrt((2 * 0.2**2 + 2 * 0.2**2) / 4)
        half = distributions.t.ppf(0.99, 4) * scatter / math.sqrt(6)
        assert stats.upper_bound(values, 0.01, groups) == pytest.approx(3.2 + half)
        one = stats.upper_bound(values, 0.01)
        assert stats.upper_bound(values, 0.01, ["a"] * 6) == one
        assert stats.upper_bound(values, 0.01, [*"abcdef"]) == one  # too few in each to tell
        wider = distributions.t.ppf(0.99, 4) * math.hypot(scatter / math.sqrt(6), 0.3)
        assert stats.upper_bound(values, 0.01, groups, doubt=0.3) == pytest.approx(3.2 + wider)

    def test_an_outlier_does_not_make_it_many_times_as_wide(self):
        """Beyond the steepest skewness Hall's inverse alone would be ten times as wide as Student's."""
        values = np.array([0.0, 0.01, 0.02, 0.03, 0.04, 1.0])
        low, high = student(values)
        interval = mean_interval(values)
        assert interval is not None
        assert high - low < interval[1] - interval[0] < 2 * (high - low)

    def test_samples_at_once_are_samples_one_by_one(self):
        samples = np.random.default_rng(2).gamma(1.0, 1.0, (5, 7))
        low, high = mean_intervals(samples)
        assert list(zip(low, high, strict=True)) == [mean_interval(each) for each in samples]

    @pytest.mark.parametrize("prompts", [6, 12, 50])
    @pytest.mark.parametrize(
        "draw",
        [
            lambda rng, shape: rng.standard_normal(shape),
            lambda rng, shape: rng.standard_t(3, shape),
            lambda rng, shape: rng.exponential(1.0, shape) - 1.0,
            lambda rng, shape: 1.0 - rng.exponential(1.0, shape),
        ],
        ids=["normal", "heavy", "skewed", "skewed the other way"],
    )
    def test_coverage(self, draw, prompts):
        """benchmarks/interval_coverage.py does it with more families."""
        low, high = mean_intervals(draw(np.random.default_rng(7), (20_000, prompts)))
        assert np.mean((low <= 0.0) & (high >= 0.0)) >= 0.93


class TestGeometricMean:
    def test_closed_form(self):
        estimate = geometric_mean([3.8, 4.0, 4.0 / 0.95], ["a", "b", "c"], [0, 0, 0])
        low, high = student(np.log([3.8, 4.0, 4.0 / 0.95]))
        assert estimate.value == pytest.approx(4.0)
        assert (estimate.low, estimate.high) == pytest.approx((math.exp(low), math.exp(high)))
        assert (estimate.prompts, estimate.basis) == (3, "prompts")

    def test_repeats_do_not_count_as_prompts(self):
        once = geometric_mean([1.0, 2.0, 3.0], ["a", "b", "c"], [0, 0, 0])
        thrice = geometric_mean([1.0, 2.0, 3.0] * 3, ["a", "b", "c"] * 3, np.repeat([0, 1, 2], 3))
        assert thrice.value == pytest.approx(once.value)
        assert (thrice.low, thrice.high, thrice.prompts) == pytest.approx((once.low, once.high, 3))

    def test_one_prompt_gets_an_interval_over_its_repeats_that_says_so(self):
        estimate = geometric_mean([2 / 1.05, 2.0, 2 * 1.05], ["a"] * 3, [0, 1, 2])
        low, high = student(np.log([2 / 1.05, 2.0, 2 * 1.05]))
        assert (estimate.prompts, estimate.basis) == (1, "repeats")
        assert estimate.low == pytest.approx(math.exp(low))
        assert estimate.high == pytest.approx(math.exp(high))

    @pytest.mark.parametrize("values", [[], [math.nan], [0.0]])
    def test_no_data(self, values):
        estimate = geometric_mean(values, ["a"] * len(values), [0] * len(values))
        assert math.isnan(estimate.value)
        assert (estimate.low, estimate.prompts, estimate.basis) == (None, 0, None)

    @pytest.mark.parametrize("prompts", [2, 3])
    def test_the_number_of_prompts_alone_decides_whether_there_is_an_interval(self, prompts):
        for apart in (1.19, 100.0):
            estimate = geometric_mean([2.0, 2.0 * apart, 2.0][:prompts], ["a", "b", "c"][:prompts])
            assert (estimate.low is not None, estimate.basis == "prompts") == (prompts == 3,) * 2


class TestPooled:
    def test_rates_of_equal_weight_have_students_interval(self):
        """With equal denominators the pseudo-values are the prompts' own rates."""
        accepted = np.array([3.0, 4.0, 5.0, 6.0, 7.0])
        estimate = pooled_rate(accepted, np.full(5, 10.0), list("abcde"))
        assert estimate.value == pytest.approx(0.5)
        assert (estimate.low, estimate.high) == pytest.approx(student(accepted / 10))

    @pytest.mark.parametrize("n", [2, 3, 4])
    def test_a_few_equal_values_have_no_interval(self, n):
        """An interval without width would say that no other prompt has another value."""
        found = [pooled_rate([55.0] * n, [9.0] * n, range(n)), geometric_mean([6.0] * n, range(n))]
        assert [each.low is None for each in found] == [n < 4] * 2

    def test_intervals_end_where_rates_do(self):
        share = pooled_rate([1, 9, 10], [10, 10, 10], ["a", "b", "c"], most=1.0)
        assert (share.low, share.high) == (0.0, 1.0)
        assert pooled_rate([10, 90, 11], [10, 10, 10], ["a", "b", "c"], least=1.0).low == 1.0

    def test_one_prompt_and_none(self):
        assert pooled_rate([1, 2], [4, 4], ["a", "a"]) == Estimate(0.375, None, None, 1, None)
        assert math.isnan(pooled_rate([], [], []).value)
        assert math.isnan(pooled_rate([0.0], [0.0], ["a"]).value)

    def test_pooled_and_mean_can_point_in_opposite_directions(self):
        """Nine short prompts win by 20%, a long one loses by 40%: the mean says faster, the batch takes longer."""
        tokens = np.array([10.0] * 9 + [1000.0])
        base_s = tokens / 10
        ours_s = base_s / np.array([1.2] * 9 + [0.6])
        pooled = pooled_speedup(tokens, ours_s, tokens, base_s, np.arange(10))
        assert pooled.value == pytest.approx(base_s.sum() / ours_s.sum())
        assert pooled.value < 0.7
        assert geometric_mean(base_s / ours_s, np.arange(10)).value > 1.1


class TestCompare:
    def test_paired_by_prompt(self):
        """Prompts differ a thousandfold, A is always 10% faster: pairing sees it."""
        b = np.array([1.0, 10.0, 100.0, 1000.0])
        result = compare((1.1 * b, list("abcd"), [0] * 4), (b, list("abcd"), [0] * 4))
        assert result.value == pytest.approx(1.1)
        assert verdict(result) == "faster"

    @pytest.mark.parametrize(
        ("low", "high", "expected"),
        [(1.01, 1.2, "faster"), (0.8, 0.99, "slower"), (0.9, 1.1, "cannot tell"), (1.0, 1.1, "cannot tell")],
    )
    def test_verdict(self, low, high, expected):
        assert verdict(Estimate(1.0, low, high, 5, "prompts")) == expected
        repeats = Estimate(1.0, low, high, 1, "repeats")
        assert (verdict(repeats), verdict(repeats, "repeats")) == ("cannot tell", expected)
