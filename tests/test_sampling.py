"""The sampling transforms against those of transformers, and the draws against their distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specbench.base.errors import RunError, UsageError
from specbench.decoding.sampling import Randomness, Sampling


def reference(
    logits: torch.Tensor, context: Sequence[int], drafted: Sequence[int], sampling: Sampling
) -> torch.Tensor:
    """The same distributions by the processors of transformers, one row after the other."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    tokens = [*context, *drafted]
    rows = []
    for i, row in enumerate(logits.float()):
        seen = tokens[: len(tokens) - (len(logits) - 1 - i)]
        scores = processors(torch.tensor([seen], dtype=torch.long), row[None].clone())
        rows.append(scores.softmax(dim=-1))
    return torch.cat(rows)


def assert_agrees(
    logits: torch.Tensor,
    sampling: Sampling,
    context: Sequence[int] = (0,),
    drafted: Sequence[int] | None = None,
) -> torch.Tensor:
    drafted = [0] * (len(logits) - 1) if drafted is None else drafted
    before = logits.clone()
    probabilities = sampling.probabilities(logits, context, drafted)
    expected = reference(logits, context, drafted, sampling)
    assert probabilities.dtype == torch.float32
    assert torch.equal(probabilities > 0, expected > 0), "another support"
    torch.testing.assert_close(probabilities, expected, rtol=1e-6, atol=1e-9)
    assert torch.equal(logits, before), "the input was written to"
    return probabilities


def random_logits(rows: int, vocab: int, scale: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=2.5),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=0.8, top_k=7),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=0.7, top_p=0.3),
    Sampling(temperature=1.0, top_p=1e-9),
    Sampling(temperature=1.0, top_p=0.9999999),
    Sampling(temperature=1.3, min_p=0.1),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=1.0, repetition_penalty=1.3),
    Sampling(temperature=0.6, repetition_penalty=0.7),
    Sampling(temperature=0.6, top_k=20, top_p=0.95),
    Sampling(temperature=0.9, top_k=300, top_p=0.99, min_p=0.02, repetition_penalty=1.2),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=repr)
@pytest.mark.parametrize("vocab", [1, 2, 5, 256, 257, 3000])
def test_agrees_with_transformers(sampling, vocab):
    for scale in (0.05, 2.0, 30.0):
        context = [token % vocab for token in (3, 1, 4, 1, 5, 9, 2, 6)]
        drafted = [token % vocab for token in (5, 3, 5)]
        assert_agrees(random_logits(4, vocab, scale), sampling, context, drafted)


@pytest.mark.parametrize("sampling", SETTINGS, ids=repr)
def test_agrees_with_transformers_on_ties(sampling):
    for vocab in (5, 700):
        assert_agrees(torch.zeros(2, vocab), sampling)
        assert_agrees((random_logits(3, vocab, 4.0) / 2).round() * 2, sampling, drafted=[1, 2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_treated_in_float32(dtype):
    logits = random_logits(3, 500, 3.0).to(dtype)
    for sampling in SETTINGS:
        assert_agrees(logits, sampling, [1, 2, 3], [4, 5])


@pytest.mark.parametrize("sampling", SETTINGS, ids=repr)
def test_impossible_tokens_stay_impossible(sampling):
    logits = random_logits(3, 600, 3.0)
    logits[:, 300:] = -math.inf
    logits[1, 1:] = -math.inf
    probabilities = assert_agrees(logits, sampling, [0, 1, 2, 599], [5, 7])
    assert probabilities[:, 300:].count_nonzero() == 0
    assert probabilities[1, 0] == 1


# -- the nucleus ----------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    weights=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    at=st.integers(0, 11),
    nudge=st.sampled_from([-1e-3, -1e-5, -1e-6, -6e-8, 0.0, 6e-8, 1e-6, 1e-5, 1e-3]),
)
def test_nuclei_whose_edge_falls_on_a_sum(weights, at, nudge):
    """The mass reaches top_p all but exactly, at tokens of equal or of different probability."""
    ordered = sorted(weights, reverse=True)
    top_p = sum(ordered[: at + 1]) / sum(ordered) + nudge
    if 0 < top_p < 1:
        assert_agrees(torch.tensor([weights]).float().log(), Sampling(temperature=1.0, top_p=top_p))


@settings(max_examples=150, deadline=None)
@given(
    vocab=st.sampled_from([3, 255, 256, 257, 258, 900]),
    scale=st.sampled_from([0.0, 0.02, 0.5, 2.0, 8.0]),
    step=st.sampled_from([0.0, 0.25, 2.0]),
    top_p=st.floats(1e-6, 1.0, exclude_max=True),
    seed=st.integers(0, 2**31),
)
def test_nuclei_of_any_width(vocab, scale, step, top_p, seed):
    """Flat distributions need more tokens than are looked at first, and steps make ties at the edge."""
    logits = random_logits(2, vocab, scale, seed)
    if step:
        logits = (logits / step).round() * step
    assert_agrees(logits, Sampling(temperature=1.0, top_p=top_p))


# -- what holds for all settings ------------------------------------------------------------------


logit_rows = st.integers(0, 2**31).flatmap(
    lambda seed: st.builds(
        random_logits,
        rows=st.integers(1, 4),
        vocab=st.integers(1, 50),
        scale=st.sampled_from([0.0, 1.0, 20.0, 1e4]),
        seed=st.just(seed),
    )
)


@settings(max_examples=100, deadline=None)
@given(logits=logit_rows, penalty=st.floats(0.3, 3.0))
def test_greedy_is_the_argmax_of_the_scores(logits, penalty):
    context, drafted = [0], [logits.shape[1] - 1] * (len(logits) - 1)
    greedy = Sampling(repetition_penalty=penalty)
    best = greedy.scores(logits, context, drafted).argmax(dim=-1)
    assert greedy.greedy
    assert greedy.choose(logits, context, drafted) == best.tolist()
    one_hot = torch.nn.functional.one_hot(best, logits.shape[1]).float()
    assert torch.equal(greedy.probabilities(logits, context, drafted), one_hot)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_vocabulary_has_one_greedy_choice_per_row(dtype):
    logits = random_logits(3, 70_001, 1.0).to(dtype)
    logits[0, 70_000], logits[1, [5, 69_999]] = 50.0, 50.0
    logits[2, :-1], logits[2, -1] = -math.inf, -100.0
    assert Sampling().choose(logits, [1]) == [70_000, 5, 70_000]
    assert [Sampling().choose(row[None], [1]) for row in logits] == [[70_000], [5], [70_000]]
    assert torch.equal(Sampling().scores(logits[:1], [1]), logits[:1].float())
    for row, place, value in ((1, 69_999, math.nan), (2, -1, -math.inf)):
        logits[row, place] = value
        for some in (logits, logits[row : row + 1]):
            with pytest.raises(RunError, match="not numbers"):
                Sampling().choose(some, [1])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-0.1, math.nan, 1e-39, math.inf)),
        ("top_k", (-1, math.nan)),
        ("top_p", (0.0, 1.1, math.nan)),
        ("min_p", (-0.1, 1.1, math.nan)),
        ("repetition_penalty", (0.0, -1.0, math.nan, math.inf)),
    ],
)
def test_values_out_of_range_are_refused(name, values):
    for value in values:
        with pytest.raises(UsageError) as caught:
            Sampling(**{name: value})
        assert caught.value.hint


# -- draws ----------------------------------------------------------------------------------------


def draw_at(u: float, probabilities: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """The token that the uniform number ``u`` draws."""
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: torch.tensor([u], dtype=torch.float64))
    return Randomness(0).draw(probabilities)


@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257, 511, 5000, 131_072])
def test_draws_are_where_the_cumulative_sum_passes(vocab, monkeypatch):
    probabilities = random_logits(1, vocab, 4.0, seed=vocab)[0].softmax(dim=-1)
    probabilities[vocab // 2 : vocab // 2 + vocab // 3] = 0.0
    cumulative = probabilities.double().cumsum(dim=-1)
    for u in torch.rand(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist():
        token = draw_at(u, probabilities, monkeypatch)
        assert cumulative[token] > u * cumulative[-1] * (1 - 1e-12)
        assert token == 0 or cumulative[token - 1] <= u * cumulative[-1] * (1 + 1e-12)
        assert probabilities[token] > 0


@pytest.mark.parametrize(("vocab", "ahead"), [(260, 1), (5000, 0), (5000, 256), (5000, 4700)])
def test_a_draw_at_an_end_takes_a_possible_token(vocab, ahead, monkeypatch):
    """Sums of blocks round, so what is left within a block can be more than the block holds."""
    probabilities = torch.zeros(vocab)
    probabilities[ahead : ahead + 250] = 0.1
    assert draw_at(0.0, probabilities, monkeypatch) == ahead
    for u in (1.0, math.nextafter(1.0, 0.0)):
        assert draw_at(u, probabilities, monkeypatch) == ahead + 249


def test_the_tail_of_a_large_vocabulary_is_not_lost(monkeypatch):
    """100,000 tokens, each too improbable to change a float32 sum that begins with 1."""
    probabilities = torch.full((100_001,), 2e-8)
    probabilities[0] = 1.0
    for u in (0.9981, 0.9985, 0.999, 0.9993, 0.9999):
        assert abs(draw_at(u, probabilities, monkeypatch) - (1.002 * u - 1) / 2e-8) < 2


def test_draws_leave_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    random = Randomness(1)
    random.draw(torch.ones(4))
    random.test(torch.ones(4))
    assert torch.equal(torch.rand(3), expected)


# -- tests of drafts ------------------------------------------------------------------------------


def test_drafts_pass_as_often_as_they_should():
    random = Randomness(1)
    acceptance = torch.tensor([0.8, 0.5, 0.9])
    counts = [0, 0, 0, 0]
    for _ in range(10_000):
        counts[random.test(acceptance)[0]] += 1
    expected = [0.2, 0.8 * 0.5, 0.8 * 0.5 * 0.1, 0.8 * 0.5 * 0.9]
    assert chisquare(counts, [10_000 * share for share in expected]).pvalue > 1e-4
