"""No end token before so many new tokens, against ``generate(min_new_tokens=...)``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checked import request_of
from tiny import tiny_llama, tiny_tokenizer
from transformers import GenerationConfig

from specbench.base.errors import UsageError
from specbench.check.sampled import check_exact
from specbench.decoding.sampling import Sampling
from specbench.generate import speculative_generate
from specbench.generate_many import speculative_generate_many
from specbench.models.drafters import load_drafter
from specbench.models.target import Target, wrap_target
from specbench.options import DecodingOptions
from specbench.policies import FixedLength, build_policy

PROMPT, NEW, LEAST = [5, 6, 7, 5, 6, 7, 5, 6], 24, 12


def model_with(**settings: Any) -> Any:
    model = tiny_llama()
    model.generation_config = GenerationConfig(**settings)
    return model


def target_with(**settings: Any) -> Target:
    return wrap_target(model_with(**settings), pack=False)


def answer(model: Any, **settings: Any) -> list[int]:
    """What `generate` says."""
    ids = torch.tensor([PROMPT])
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "pad_token_id": 0, **settings}
    with torch.inference_mode():
        return list(model.generate(ids, **asked)[0, len(PROMPT) :].tolist())


USUAL = answer(tiny_llama())


@pytest.mark.parametrize(
    "own", [{}, {"min_new_tokens": 2}, {"min_length": len(PROMPT) + 3}, {"no_repeat_ngram_size": 2}]
)
def test_greedy_outputs_are_those_of_generate(own):
    settings = {"eos_token_id": [USUAL[4], 3], **own}
    expected = answer(model_with(**settings), min_new_tokens=LEAST)
    assert len(expected) >= LEAST
    assert expected != answer(model_with(**settings)), "it changes nothing: the test shows nothing"
    target = target_with(**settings)
    for drafter in ("none", "lookup", "self:int8"):
        for policy in (FixedLength(4), build_policy("heuristic")):
            result = speculative_generate(
                PROMPT, target, drafter, policy=policy, max_new_tokens=NEW, min_new_tokens=LEAST
            )
            assert list(result.token_ids) == expected
    runs = speculative_generate_many(
        [PROMPT] * 3, target, "lookup", max_batch=2, max_new_tokens=NEW, min_new_tokens=LEAST
    )
    assert [list(each.token_ids) for each in runs.results() if not isinstance(each, Exception)] == [
        expected
    ] * 3


def test_ignored_end_tokens_stay_possible():
    target = target_with(eos_token_id=USUAL[4])
    result = speculative_generate(
        PROMPT, target, "lookup", max_new_tokens=NEW, min_new_tokens=LEAST, ignore_eos=True
    )
    assert list(result.token_ids) == USUAL
    with pytest.raises(UsageError, match="min_new_tokens is -1"):
        DecodingOptions(min_new_tokens=-1)


@pytest.mark.parametrize("drafter", ["lookup", "self:int8"])
def test_sampled_outputs_are_exact(drafter):
    target = target_with(eos_token_id=list(range(0, 40, 2)))
    defaults = target.language_model.defaults.with_options(DecodingOptions(min_new_tokens=LEAST))
    sampling = Sampling(temperature=1.0).with_defaults(defaults, target.vocab_size)
    drafting = load_drafter(drafter, target)
    request = request_of(target.scorer, drafting, None, sampling, NEW, prompt=PROMPT, end_ids=target.end_ids)
    case = check_exact(request, "a")
    assert case.sound, case.positions
    assert not case.violations
    assert len(case.positions) > 3
    for seed in range(6):
        result = speculative_generate(
            PROMPT, target, drafter, sampling=Sampling(temperature=1.0), seed=seed, min_new_tokens=LEAST
        )
        early, ends = result.token_ids[:LEAST], set(target.end_ids)
        assert ends.isdisjoint(early)


def test_a_tokenizers_end_token_is_held_back_too():
    target = wrap_target(model_with(), tiny_tokenizer(), pack=False)
    result = speculative_generate("the thing", target, None, max_new_tokens=NEW, min_new_tokens=NEW)
    assert len(result.token_ids) == NEW
    assert set(target.end_ids).isdisjoint(result.token_ids)
