"""The verdict on a draft, against hand-made distributions."""

from __future__ import annotations

import math

import pytest
import torch
from scripted import judge

from specbench.base.errors import RunError
from specbench.decoding.drafts import Draft
from specbench.decoding.explain import closing_of
from specbench.decoding.sampling import Greedy, Multinomial, Randomness
from specbench.decoding.verify import acceptance_probabilities, expected_acceptance, residual

pytestmark = pytest.mark.smoke


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


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


def test_greedy_compares_with_the_argmax_and_draws_nothing():
    class NoRandomness:
        def draw(self, probabilities: torch.Tensor) -> int:
            raise AssertionError("drew a token")

        def test(self, acceptance: torch.Tensor) -> tuple[int, list[float]]:
            raise AssertionError("tested a draft")

    logits = logits_of([0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.3, 0.3, 0.4])
    accepted = judge(Draft([0, 1]), logits, [0], Greedy(), NoRandomness())
    assert (accepted.accepted, accepted.tokens, closing_of(2, 2)) == (2, [0, 1, 2], "bonus")
    rejected = judge(Draft([0, 0]), logits, [0], Greedy(), NoRandomness())
    assert (rejected.accepted, rejected.tokens, closing_of(1, 2)) == (1, [0, 1], "corrected")
    plain = judge(Draft(), logits[:1], [0], Greedy(), NoRandomness())
    assert (plain.accepted, plain.tokens, closing_of(0, 0)) == (0, [0], "target")


def test_greedy_takes_the_repetition_penalty_of_each_position():
    # Token 0 leads until it has occurred; a penalty of 10 then hands the lead to token 1, then to token 2.
    logits = torch.tensor([[3.0, 2.0, 1.0]] * 3)
    verdict = judge(Draft([0, 1]), logits, [3], Greedy(repetition_penalty=10.0), Randomness(0))
    assert verdict.tokens == [0, 1, 2]


@pytest.mark.parametrize("sampling", [Greedy(), Multinomial()])
def test_expected_acceptance_follows_the_distributions_that_decide(sampling):
    logits = logits_of([0.5, 0.3, 0.2], [0.1, 0.6, 0.3])
    draft = Draft([0], q_of([0.2, 0.6, 0.2]))
    verdict = judge(draft, logits, [0], sampling, Randomness(0))
    (value,) = expected_acceptance(draft, verdict, 1)
    assert value == pytest.approx(1.0 if sampling.greedy else 0.2 + 0.3 + 0.2)


def test_expected_acceptance_of_a_certain_draft_is_p():
    logits = logits_of([0.5, 0.3, 0.2], [0.1, 0.6, 0.3])
    verdict = judge(Draft([1]), logits, [0], Multinomial(), Randomness(0))
    assert expected_acceptance(Draft([1]), verdict, 1) == pytest.approx((0.3,))
    assert expected_acceptance(Draft([1]), verdict, 0) == ()


@pytest.mark.parametrize("runs", [5_000, pytest.param(40_000, marks=pytest.mark.slow)])
def test_one_step_emits_p_by_brute_force(runs):
    """The first emitted token over seeded steps: a drafter far from the target; of 40,000 a bias of 1% would show."""
    p, q = [0.5, 0.2, 0.2, 0.1], [0.1, 0.1, 0.2, 0.6]
    logits = logits_of(p, p)
    random, counts = Randomness(7), [0] * 4
    for _ in range(runs):
        token = random.draw(q_of(q)[0])
        counts[judge(Draft([token], q_of(q)), logits, [0], Multinomial(), random).tokens[0]] += 1
    statistic = sum(
        (count - runs * share) ** 2 / (runs * share) for count, share in zip(counts, p, strict=True)
    )
    assert statistic < 16.27  # χ² with 3 degrees of freedom, one in a thousand; the seed is fixed
    wrong = [0] * 4
    for _ in range(runs):
        token = random.draw(q_of(q)[0])
        verdict = judge(
            Draft([token], q_of(q)), logits, [0], Multinomial(), random, residual_adjustment=False
        )
        wrong[verdict.tokens[0]] += 1
    assert sum((c - runs * s) ** 2 / (runs * s) for c, s in zip(wrong, p, strict=True)) > 100


def test_logits_of_minus_infinity_are_never_emitted():
    logits = torch.tensor([[-math.inf, 0.0, 0.0], [-math.inf, 0.0, 0.0]])
    random = Randomness(0)
    for _ in range(200):
        verdict = judge(Draft([0]), logits, [1], Multinomial(), random)
        assert verdict.accepted == 0
        assert 0 not in verdict.tokens


@pytest.mark.parametrize("sampling", [Greedy(), Multinomial()])
@pytest.mark.parametrize("draft", [Draft(), Draft([1])], ids=["plain", "drafted"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logits_that_are_no_numbers_are_an_error(sampling, draft, value):
    logits = torch.full((len(draft.tokens) + 1, 3), value)
    with pytest.raises(RunError, match="not numbers"):
        judge(draft, logits, [0], sampling, Randomness(0))
