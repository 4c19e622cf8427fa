"""Every figure against an example worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specbench.decoding.metrics import (
    mean_expected_acceptance,
    summary,
    time_split,
    tokens_per_second,
)
from specbench.decoding.records import Generation, Prefill, Step, StepTimes

pytestmark = pytest.mark.smoke

TIMES = StepTimes(
    draft_s=1.0, verify_s=2.0, accept_s=0.25, rollback_s=0.5, other_s=0.125, draft_prefill_s=0.75
)
"""3.875 seconds in all."""


def step(
    gamma: int, accepted: int, *, stopped: bool = False, times: StepTimes = TIMES, **changes: Any
) -> Step:
    """A step that kept ``accepted`` of ``gamma`` drafts; ``stopped`` if the last kept one ended the output."""
    rejected = accepted < gamma and not stopped
    fields: dict[str, Any] = {
        "index": 0, "position": 10, "drafted": tuple(range(gamma)), "accepted": accepted,
        "tested": accepted + rejected, "tokens": tuple(range(accepted + (not stopped))),
        "closing": None if stopped else "corrected" if rejected else "bonus" if gamma else "target",
        "expected_acceptance": (0.5,) * (accepted + rejected), "times": times,
        "finish_reason": "eos" if stopped else None,
    }  # fmt: skip
    return Step(**fields | changes)


# All four drafts kept, two of four kept, one of three kept and a stop right there, nothing drafted.
STEPS = (step(4, 4), step(4, 2), step(0, 0), step(3, 1, stopped=True))


# -- tokens and acceptance ------------------------------------------------------------------------


def test_alpha_is_the_mean_over_tested_positions_of_all_steps():
    steps = [
        step(2, 2, expected_acceptance=(0.9, 0.6)),
        step(2, 0, expected_acceptance=(0.3,)),
        step(0, 0, expected_acceptance=()),
    ]
    assert mean_expected_acceptance(steps) == pytest.approx((0.9 + 0.6 + 0.3) / 3)
    assert mean_expected_acceptance([step(0, 0)]) is None
    assert mean_expected_acceptance([]) is None


# -- time -----------------------------------------------------------------------------------------


def test_time_split_without_a_first_target_pass():
    """The first step is the first emission: its time is the time to the first token."""
    steps = [step(4, 4), step(4, 2, times=StepTimes(draft_s=0.5, verify_s=0.25))]
    ttft_s, times = time_split(Prefill(10, token=None, time_s=0.0), steps)
    assert ttft_s == 3.875
    assert (times.total_s, times.draft_s, times.verify_s, times.draft_prefill_s) == (0.75, 0.5, 0.25, 0.0)


@pytest.mark.parametrize(
    ("prefill", "steps", "speed"),
    [
        (Prefill(10, 3, 100.0), [step(4, 4), step(4, 2)], 8 / 7.75),
        (Prefill(10, None, 0.0), [step(4, 4), step(4, 2)], 3 / 3.875),
        (Prefill(10, 3, 1.0), [], None),
        (Prefill(10, None, 0.0), [step(4, 4)], None),
        (Prefill(10, None, 0.0), [], None),
        (Prefill(10, 3, 0.0), [step(4, 4, times=StepTimes())], None),
    ],
)
def test_tokens_per_second_leaves_the_first_emission_out(prefill, steps, speed):
    assert tokens_per_second(prefill, steps) == speed


# -- all of it ------------------------------------------------------------------------------------


def generation(prefill: Prefill, steps: tuple[Step, ...], **changes: Any) -> Generation:
    first = () if prefill.token is None else (prefill.token,)
    fields: dict[str, Any] = {
        "prompt_tokens": prefill.prompt_tokens,
        "token_ids": (*first, *(token for step in steps for token in step.tokens)),
        "text": "Hello", "finish_reason": "eos", "prefill": prefill, "steps": steps, "target": "big",
        "drafter": "small", "dtype": "float32", "seed": 3,
    }  # fmt: skip
    return Generation(**fields | changes)


def test_summary():
    figures = summary(generation(Prefill(10, token=7, time_s=2.0), STEPS))
    assert figures["text"] == "Hello"
    assert figures["token_ids"] == [7, 0, 1, 2, 3, 4, 0, 1, 2, 0, 0]
    assert (figures["prompt_tokens"], figures["new_tokens"], figures["finish_reason"]) == (10, 11, "eos")
    assert (figures["steps"], figures["drafted"], figures["accepted"]) == (4, 11, 7)
    assert figures["acceptance_rate"] == 7 / 11
    assert figures["tokens_per_step"] == 2.5  # the first-target token belongs to no step
    assert figures["alpha"] == 0.5
    assert figures["accepted_lengths"] == [4, 2, 0, 1]
    assert figures["gammas"] == [4, 4, 0, 3]
    assert figures["acceptance_by_position"] == [1, 1, 0.5, 1]
    assert figures["time"] == {
        "ttft_s": 2.0, "decode_s": 15.5, "draft_s": 4.0, "verify_s": 8.0, "accept_s": 1.0, "rollback_s": 2.0,
        "other_s": 0.5, "draft_prefill_s": 3.0, "mask_s": 0.0,
    }  # fmt: skip
    assert figures["tokens_per_second"] == 10 / 15.5
    known = [figures[name] for name in ("target", "drafter", "dtype", "seed")]
    assert known == ["big", "small", "float32", 3]
    assert json.loads(json.dumps(figures)) == figures


def test_summary_of_an_output_without_steps():
    figures = summary(generation(Prefill(10, token=7, time_s=2.0, finish_reason="length"), ()))
    assert figures["new_tokens"] == 1
    for name in ("acceptance_rate", "tokens_per_step", "alpha", "tokens_per_second"):
        assert figures[name] is None
    assert figures["acceptance_by_position"] == figures["gammas"] == figures["accepted_lengths"] == []
    assert figures["time"]["ttft_s"] == 2


def test_summary_of_nothing():
    """The prompt filled the context."""
    figures = summary(generation(Prefill(10, None, 0.0, "context-limit"), (), text=None))
    assert (figures["new_tokens"], figures["token_ids"], figures["text"]) == (0, [], None)
    assert json.loads(json.dumps(figures)) == figures
