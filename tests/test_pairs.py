"""One prompt in turns: the order, how many, what is kept, and what is doubtful about a speedup."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from scripted import Ticking

from specbench.base.load import load_snapshot
from specbench.bench.pairs import MAX_PAIRS, MIN_PAIRS, Pairs, explain, predict
from specbench.decoding.records import Generation, Prefill, Step, StepTimes
from specbench.decoding.theory import SLOPE

DRAFTS = 4


def generation(seconds: float, *, plain: bool = False, steps: int = 20, disturbed: float = 0.0) -> Generation:
    """Steps of so many seconds each, the last one disturbed; with a drafter each emits three tokens of four drafts."""
    drafted = () if plain else (1,) * DRAFTS
    emitted = (1,) if plain else (1, 1, 1)
    made = [
        Step(
            index=i,
            position=10 + i,
            drafted=drafted,
            accepted=len(emitted) - 1,
            tested=len(emitted) - 1,
            tokens=emitted,
            closing="target" if plain else "corrected",
            expected_acceptance=(),
            times=StepTimes(
                draft_s=0.0 if plain else 0.2 * seconds, verify_s=seconds if plain else 0.8 * seconds
            ),
        )
        for i in range(steps)
    ]
    if disturbed:
        made[-1] = replace(made[-1], times=StepTimes(verify_s=seconds + disturbed))
    tokens = (1, *(token for step in made for token in step.tokens))
    return Generation(
        prompt_tokens=10,
        token_ids=tokens,
        text=None,
        finish_reason="length",
        prefill=Prefill(10, 1, 0.5),
        steps=tuple(made),
        target="t",
        drafter="none" if plain else "d",
        dtype="float32",
        seed=0,
    )


def pairs_of(clock_s: float = 0.0) -> tuple[Pairs, list[bool]]:
    order: list[bool] = []

    def decode(plain: bool) -> Generation:
        order.append(plain)
        return generation(1.0 if plain else 1.5, plain=plain)

    pairs = Pairs(decode, clock=Ticking(clock_s))
    pairs.measure()
    return pairs, order


def test_pairs_come_in_a_balanced_order():
    _, order = pairs_of()
    assert order[:8] == [False, True, True, False, False, True, True, False]


@pytest.mark.parametrize(("seconds", "count"), [(0.0, MAX_PAIRS), (1.3, 6), (1000.0, MIN_PAIRS)])
def test_there_are_more_pairs_where_they_are_short(seconds, count):
    pairs, _ = pairs_of(seconds)
    assert len(pairs.plain) == len(pairs.speculative) == count


def test_figures_keep_raw_times_and_give_an_interval_over_the_pairs():
    times = itertools.cycle([1.5, 1.0, 1.0, 1.2])  # ABBA: 3/1.5 and 3/1.2 tokens per second against 1

    def decode(plain: bool) -> Generation:
        return generation(next(times), plain=plain)

    pairs = Pairs(decode, clock=Ticking(1.7))  # four
    pairs.measure()
    figures = pairs.figures()
    assert [pair["speedup"] for pair in figures["repeats"]] == pytest.approx([2.0, 2.5, 2.0, 2.5])
    assert figures["repeats"][1]["speculative"] == {
        "new_tokens": 61,
        "ttft_s": 0.5,
        "decode_s": pytest.approx(24.0),
        "tokens_per_second": pytest.approx(2.5),
    }
    assert figures["speedup"] == pytest.approx(5.0**0.5)
    low, high = figures["speedup_interval"]
    assert 1.5 < low < 2.0 < 2.5 < high < 3.0
    assert figures["verdict"] == "faster", "of this prompt alone"


def test_what_is_whole_is_kept_when_a_repeat_breaks_off():
    left = iter([False, True, True])

    def decode(plain: bool) -> Generation:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return generation(1.0, plain=plain)

    pairs = Pairs(decode)
    with pytest.raises(KeyboardInterrupt):
        pairs.measure()
    assert (len(pairs.speculative), len(pairs.plain)) == (1, 2)
    assert len(pairs.figures()["repeats"]) == 1


def test_a_busy_machine_predicts_nothing():
    """Where nothing would be predicted, there is nothing to say either."""
    quiet = load_snapshot()
    for busy, drafter in itertools.product((False, True), ("d", "none")):
        made = replace(generation(1.0), drafter=drafter)
        every = (
            replace(quiet, cores=2, busy_s=2.0 * busy * i, total_s=2.0 * i, own_s=0.0, steal_s=None)
            for i in itertools.count()
        )
        pairs = Pairs(lambda plain, made=made: made, snapshot=lambda every=every: next(every))
        pairs.measure_one(plain=False)
        figures = pairs.figures()
        assert (figures["explained"] is None) == (busy or drafter == "none")
        assert [each["id"] for each in figures["warnings"]] == ["machine-busy"] * (busy and drafter != "none")


# -- what explains a speedup -------------------------------------------------------------------------


def test_a_speedup_is_explained_by_tokens_per_step_and_usual_times():
    found = explain([generation(1.5), generation(1.5, disturbed=99.0)], [generation(1.0, plain=True)])
    assert found is not None
    assert found["tokens"] == 3.0
    assert found["step"] == pytest.approx(1.5, rel=0.02)  # the disturbed step counts as the others do
    assert found["usual"] == pytest.approx(2.0, rel=0.02)
    assert found["drafting"] == pytest.approx(0.3, rel=0.02)
    assert explain([], [generation(1.0, plain=True)]) is None
    assert explain([generation(1.0)], []) is None


def test_a_generation_predicts_its_speedup_from_its_own_steps():
    """A step takes 1.5 s, 0.3 of them for drafting, brings three tokens and verifies five."""
    found = predict(generation(1.5))
    assert found is not None
    assert found["plain_steps"] == 0
    assert found["plain_s"] == pytest.approx(1.2 / (1 + SLOPE * DRAFTS))
    assert found["usual"] == pytest.approx(3.0 * found["plain_s"] / 1.5)
    mixed = replace(
        generation(1.5), steps=(*generation(1.0, plain=True).steps, *generation(1.5, disturbed=99.0).steps)
    )
    found = predict(mixed)
    assert found is not None
    assert found["plain_steps"] == 20
    assert found["plain_s"] == pytest.approx(1.0, rel=0.03)
    assert found["tokens"] == 2.0
    assert found["usual"] == pytest.approx(2.0 / 1.25, rel=0.03)  # the disturbed step counts as the others do
