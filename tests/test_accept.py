"""The verdict on a draft, against hand-made distributions."""

from __future__ import annotations

import math

import pytest
import torch
from scripted import judge

from specbench.base.errors import RunError
from specbench.decoding.drafts import Draft
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.verify import acceptance_probabilities, residual

pytestmark = pytest.mark.smoke


def q_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)


def test_acceptance_is_the_capped_ratio():
    p = q_of([0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [1.0, 0.0, 0.0])
    draft = Draft([1, 0], q_of([0.2, 0.6, 0.2], [0.1, 0.8, 0.1]))
    assert acceptance_probabilities(draft, p).tolist() == pytest.approx([0.5, 1.0])


def test_a_certain_drafter_is_accepted_with_p():
    p = q_of([0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [1.0, 0.0, 0.0])
    assert acceptance_probabilities(Draft([1, 2]), p).tolist() == pytest.approx([0.3, 0.3])


def test_an_underflowed_q_gives_no_nan():
    p = q_of([0.0, 1.0], [1.0, 0.0])
    draft = Draft([0], q_of([0.0, 1.0]))
    assert acceptance_probabilities(draft, p).tolist() == [0.0]
    draft = Draft([1], q_of([1.0, 0.0]))
    assert acceptance_probabilities(draft, p).tolist() == [1.0]


def test_the_residual_is_what_the_drafter_lacks():
    p = q_of([0.5, 0.3, 0.2])
    rest = residual(Draft([1], q_of([0.2, 0.6, 0.2])), p, 0)
    assert rest.tolist() == pytest.approx([0.3, 0.0, 0.0])
    rest = residual(Draft([1]), p, 0)
    assert rest.tolist() == pytest.approx([0.5, 0.0, 0.2])
    assert p.tolist() == [pytest.approx([0.5, 0.3, 0.2])], "p was written to"


def test_an_empty_residual_falls_back_on_p():
    p = q_of([0.25, 0.75])
    assert residual(Draft([0], q_of([0.25, 0.75])), p, 0).tolist() == [0.25, 0.75]
    certain = q_of([1.0, 0.0])
    assert residual(Draft([0]), certain, 0).tolist() == [1.0, 0.0]


def test_greedy_takes_the_repetition_penalty_of_each_position():
    # Token 0 leads until it has occurred; a penalty of 10 then hands the lead to token 1, then to token 2.
    logits = torch.tensor([[3.0, 2.0, 1.0]] * 3)
    verdict = judge(Draft([0, 1]), logits, [3], Sampling(repetition_penalty=10.0), Randomness(0))
    assert verdict.tokens == [0, 1, 2]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)])
@pytest.mark.parametrize("draft", [Draft(), Draft([1])], ids=["plain", "drafted"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logits_that_are_no_numbers_are_an_error(sampling, draft, value):
    logits = torch.full((len(draft.tokens) + 1, 3), value)
    with pytest.raises(RunError, match="not numbers"):
        judge(draft, logits, [0], sampling, Randomness(0))
