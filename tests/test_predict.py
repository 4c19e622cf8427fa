"""Prediction from answers, against the distribution of decoding, enumerated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from scripted import ScriptedScorer, enumerate_outcomes, random_table, steps_of

from specbench.base.errors import UsageError
from specbench.decoding.protocols import Drafter
from specbench.decoding.records import Step
from specbench.decoding.sampling import Sampling
from specbench.decoding.stops import StopRules
from specbench.decoding.theory import PassCosts
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter, ParallelDrafter
from specbench.drafters.ngram import NGramDrafter
from specbench.drafters.suffix import SuffixDrafter
from specbench.policies import FixedLength, build_policy
from specbench.predict import chances, forecast
from specbench.predict.chances import chances_of, read_answer
from specbench.predict.law import Answer, Chances, expected_steps
from specbench.specs.drafters import Lookup

END = 0
"""The token that ends an output."""
LONGEST = 6
Distribution = Callable[[tuple[int, ...]], np.ndarray]


def counts(steps: int, drafted: int, tested: Sequence[int], accepted: Sequence[int]) -> np.ndarray:
    return np.array([steps, drafted, *tested, *accepted], dtype=float)


def by_law(chances: np.ndarray, limit: int, gammas: Sequence[int]) -> list[np.ndarray]:
    """What the law says of an answer, by draft length."""
    room = Answer([], range(len(chances)), Sampling(), limit=limit).room()
    accept = np.lib.stride_tricks.sliding_window_view(np.append(chances, np.zeros(LONGEST)), LONGEST)
    drafts, passes = np.full(len(chances), LONGEST), np.ones((len(chances), LONGEST))
    found = expected_steps(Chances(accept[: len(chances)], drafts, passes), room, gammas)
    return [counts(each.steps, each.drafted, each.tested, each.accepted) for each in found]


def predicted(p: Distribution, q: Distribution, limit: int, gamma: int) -> np.ndarray:
    """Expected counts of decoding by the law of the steps, averaged over all answers."""

    def answers(context: tuple[int, ...], weight: float) -> np.ndarray:
        if len(context) == limit or END in context:
            chances = np.array(
                [min(1.0, q(context[:i])[x] / p(context[:i])[x]) for i, x in enumerate(context)]
            )
            return weight * by_law(chances, limit, [gamma])[0]
        return sum(answers((*context, x), weight * chance) for x, chance in enumerate(p(context)) if chance)

    return answers((), 1.0)


def of_records(records: Sequence[object]) -> np.ndarray:
    steps = [each for each in records if isinstance(each, Step)]
    return counts(
        len(steps),
        sum(step.gamma for step in steps),
        [sum(step.tested > place for step in steps) for place in range(LONGEST)],
        [sum(step.accepted > place for step in steps) for place in range(LONGEST)],
    )


@pytest.mark.parametrize(
    "sampling", [Sampling(0.8), Sampling(temperature=1.2, top_k=2), Sampling(1.0, top_p=0.8)]
)
@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_it_is_the_law_of_the_real_loop(sampling, gamma):
    vocab, limit, prompt = 2, 5, [1, 1, 0]
    target, draft = random_table(3, vocab), random_table(4, vocab)

    def run(random: object) -> tuple[float, ...]:
        records = steps_of(
            prompt, ScriptedScorer(target, vocab), ModelDrafter(ScriptedScorer(draft, vocab), "model"),
            policy=FixedLength(gamma), sampling=sampling, random=random, max_new_tokens=limit,
            stops=StopRules((END,)),
        )  # fmt: skip
        return tuple(of_records(list(records)))

    def distribution(logits: Callable[[Sequence[int]], torch.Tensor]) -> Distribution:
        def of(context: tuple[int, ...]) -> np.ndarray:
            rows = logits([*prompt, *context])[None]
            return sampling.probabilities(rows, context)[0].double().numpy()

        return of

    found = sum(weight * np.array(outcome) for outcome, weight in enumerate_outcomes(run).items())
    expected = predicted(distribution(target), distribution(draft), limit, gamma)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("gamma", range(1, LONGEST + 1))
def test_greedy_steps_are_those_of_the_real_loop(gamma):
    vocab, limit = 4, 40
    for seed in range(6):
        target, draft = random_table(seed, vocab), random_table(seed + 100, vocab)

        def mixed(tokens: Sequence[int], own=draft, other=target) -> torch.Tensor:
            return (own if sum(tokens[-3:]) % 3 == 0 else other)(tokens)

        records = list(
            steps_of(
                [1, 2, 3], ScriptedScorer(target, vocab), ModelDrafter(ScriptedScorer(mixed, vocab), "model"),
                policy=FixedLength(gamma), max_new_tokens=limit, stops=StopRules((END,) if seed % 2 else ()),
            )
        )  # fmt: skip
        answer = [records[0].token, *(token for step in records[1:] for token in step.tokens)]
        contexts = [[1, 2, 3, *answer[:i]] for i in range(len(answer))]
        chances = np.array([float(mixed(c).argmax() == x) for c, x in zip(contexts, answer, strict=True)])
        law = by_law(chances, limit, range(1, LONGEST + 1))
        assert law[gamma - 1].tolist() == of_records(records).tolist()


# -- drafters along answers ------------------------------------------------------------------------

VOCABULARY = 5
OTHER = random_table(12, VOCABULARY)
PROMPT = [1, 2, 3, 1, 2]
TARGET = random_table(11, VOCABULARY)


def often_right(tokens: Sequence[int]) -> torch.Tensor:
    """The target's logits at most places."""
    return (TARGET if sum(tokens[-4:]) % 5 else OTHER)(tokens)


def small_model(limit: int | None = None) -> ModelDrafter:
    return ModelDrafter(ScriptedScorer(often_right, VOCABULARY, context_limit=limit), "model")


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": small_model,
    "model with a short context": lambda: small_model(limit=20),
    "lookup": LookupDrafter,
    "ngram": NGramDrafter,
    "suffix": SuffixDrafter,
    "lookup and a model": lambda: CascadeDrafter(
        LookupDrafter(Lookup(n=None, min=2, before_model=True)), small_model()
    ),
}


def decoded(
    drafter: Drafter, policy: str, sampling: Sampling, ends: tuple[int, ...], limit: int
) -> list[object]:
    return list(
        steps_of(
            PROMPT, ScriptedScorer(TARGET, VOCABULARY), drafter, policy=build_policy(policy), sampling=sampling,
            max_new_tokens=limit, stops=StopRules(ends),
        )
    )  # fmt: skip


def answer_of(records: Sequence[object], sampling: Sampling, limit: int) -> Answer:
    first, *steps = records
    tokens = [first.token, *(token for step in steps for token in step.tokens)]  # type: ignore[attr-defined]
    return Answer(PROMPT, tokens, sampling, None, limit, "a")


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(repetition_penalty=1.3)], ids=["greedy", "penalty"]
)
@pytest.mark.parametrize("ends", [(), (0,)], ids=["to the limit", "to an end token"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_is_predicted_to_take_the_steps_that_it_takes(name, ends, sampling, monkeypatch):
    monkeypatch.setattr(chances, "_ROWS", 7)
    limit = 36
    plain = answer_of(decoded(small_model(), "fixed:gamma=1", sampling, ends, limit), sampling, limit)
    found = forecast.forecast(DRAFTERS[name](), [plain], range(1, LONGEST + 1))
    for row, gamma in zip(found.rows, range(1, LONGEST + 1), strict=True):
        records = decoded(DRAFTERS[name](), f"fixed:gamma={gamma}", sampling, ends, limit)
        expected = of_records(records)
        (each,) = row.counts
        drafted = expected[1] if "pass of" in name else each.drafted  # behind a wrong token it is estimated
        assert each.drafted == pytest.approx(expected[1], rel=0.1)
        assert counts(each.steps, drafted, each.tested, each.accepted).tolist() == expected.tolist(), gamma
        passes = sum(step.passes or 0 for step in records[1:])
        _, per_step = row.per_step()
        assert 0.5 * passes <= per_step * each.steps <= drafted, "what guesses save is learned sooner here"


def test_sampled_answers_give_chances():
    sampling = Sampling(temperature=0.7, top_k=3)
    tokens = [1, 3, 2, 4, 1, 0]
    contexts = [[*PROMPT, *tokens[:i]] for i in range(len(tokens))]
    p = np.array([0.3, 0.2, 0.9, 0.5, 0.4, 0.6])
    q = [sampling.probabilities(often_right(each)[None], each)[0] for each in contexts]
    expected = [min(1.0, float(row[x]) / share) for row, x, share in zip(q, tokens, p, strict=True)]
    answer, drafter = Answer(PROMPT, tokens, sampling, p), small_model()
    found = chances_of(drafter, answer, 1, read_answer(drafter, answer))
    assert found.accept[1:, 0] == pytest.approx(expected[1:])
    found = forecast.forecast(small_model(), [Answer(PROMPT, tokens, sampling)], [1])
    assert (found.unsampled, found.answers) == (1, [])
    copied = forecast.forecast(LookupDrafter(), [Answer(PROMPT, tokens, sampling)], [1])
    assert (copied.unsampled, len(copied.answers)) == (0, 1)


def test_what_reads_the_targets_states_is_refused():
    drafter = ParallelDrafter(ScriptedScorer(TARGET, VOCABULARY), "pard", [0])
    with pytest.raises(UsageError, match="cannot be predicted from answers here"):
        forecast.forecast(drafter, [Answer(PROMPT, [1, 2, 3], Sampling())], [1])


def test_what_a_drafter_needs_to_pay():
    tokens = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3]
    found = forecast.forecast(LookupDrafter(), [Answer([1, 2, 3], tokens, Sampling(), None, 12, "a")], [1, 3])
    one, three = found.rows
    assert found.tokens_per_step(three).value == pytest.approx(11 / 3)
    costs = PassCosts({1: 0.1, 4: 0.13}, {"lookup": 0.02})
    assert found.speedup(three, costs).value == pytest.approx(11 / (3 * (1 + 0.3 * (8 / 3) / 3) + 3 * 0.2))
    assert found.best(costs) is three
    needed = found.pays_from(three, costs)
    assert found.speedup(
        three, PassCosts({1: needed, 4: 1.3 * needed}, {"lookup": 0.02})
    ).value == pytest.approx(1.0)
    unknown = PassCosts({}, {"lookup": 0.02})
    assert np.isnan(found.speedup(one, unknown).value)
    assert found.pays_from(one, unknown) == pytest.approx(
        0.02 / (found.tokens_per_step(one).value - 1.02), rel=0.01
    )
    figures = found.to_dict(costs)
    assert figures["best"] == 3
    assert figures["rows"][1]["acceptance_by_position"][0] == 1.0
