"""Sampled runs of real (tiny) transformers with real caches, against the target's exact probabilities.

The exact enumeration of test_exact.py shows that the rules are right; this shows that they are wired to real models.
The full-size version, which finds a bias of 1%, is benchmarks/sampled.py.
"""

from __future__ import annotations

import pytest
import sampled


@pytest.mark.parametrize(
    ("drafter", "cache"),
    [
        ("model", "dynamic"),
        ("self:int8", "preallocated"),
        pytest.param("model", "none", marks=pytest.mark.slow),
        pytest.param("self:layers=1", "dynamic", marks=pytest.mark.slow),
        pytest.param("ngram:sample", "dynamic", marks=pytest.mark.slow),
        pytest.param("lookup", "preallocated", marks=pytest.mark.slow),
    ],
)
def test_sampled_outputs_follow_the_target(drafter, cache):
    outcome = sampled.sample(drafter, cache, 1200, 1e-4)
    assert outcome.sound, outcome


def test_the_test_finds_a_wrong_residual():
    outcome = sampled.sample("model", "dynamic", 1200, 1e-4, residual_adjustment=False)
    assert not outcome.sound


def test_the_number_of_runs_has_the_power_it_claims():
    assert sampled.runs_needed(0.02, 0.001) == pytest.approx(sampled.runs_needed(0.01, 0.001) / 4, rel=0.01)
    assert sampled.p_value([500, 500], [0.5, 0.5]) == pytest.approx(1.0)
    assert sampled.p_value([600, 400], [0.5, 0.5]) < 1e-8
    assert sampled.p_value([999, 1], [1.0, 0.0]) == 0.0
