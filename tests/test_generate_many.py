"""Many generations at once, on tiny models: outputs, records and failures as alone, in every kind of pool."""

from __future__ import annotations

import gc
import random as standard_random
from functools import cache
from typing import Any

import pytest
from accelerate import dispatch_model
from tiny import tiny_language_model, tiny_llama, tiny_tokenizer

from specbench import (
    GenerationRun,
    UsageError,
    load_drafter,
    speculative_generate,
    speculative_generate_many,
    wrap_drafter,
    wrap_target,
)
from specbench.decoding.protocols import Drafter
from specbench.decoding.records import Generation, Prefill, SharedPass
from specbench.generate_many import GenerationRuns
from specbench.models.drafters import join_cascade
from specbench.models.target import Target, prepare_target
from specbench.options import quantized
from specbench.policies import build_policy
from specbench.policies.batch_costs import BatchCosts
from specbench.specs.drafters import Cascade, Lookup, SmallModel

KINDS = ("none", "lookup", "ngram", "suffix", "model", "self:int8", "self:layers=1", "lookup+model",
         "lookup+self:int8", "lookup|self:layers=1")  # fmt: skip
NEW = 12


@cache
def target() -> Target:
    return wrap_target(tiny_llama(), tiny_tokenizer())


@cache
def drafter(kind: str) -> Drafter | None:
    if kind == "none":
        return None
    if "model" not in kind:
        return load_drafter(kind, target())
    model = wrap_drafter(tiny_language_model(1), target())
    return join_cascade(Cascade(Lookup(), SmallModel("tiny-1")), model) if "+" in kind else model


@cache
def prompts() -> list[list[int]]:
    """Most of them with something to copy; some begin alike."""
    choice = standard_random.Random(3)
    beginning = [choice.randrange(250) for _ in range(40)]
    made = []
    for number in range(2 * len(KINDS)):
        part = [choice.randrange(250) for _ in range(choice.randint(1, 12))]
        made.append((beginning[: 20 * (number % 3)] if number % 4 else []) + part * choice.randint(1, 4))
    return made


def run(number: int, **settings: Any) -> GenerationRun:
    """A prompt with the kind of drafter whose turn it is."""
    kind = KINDS[number % len(KINDS)]
    policy = build_policy("fixed:gamma=3")
    return GenerationRun(
        prompts()[number], target(), drafter(kind), policy=policy, max_new_tokens=NEW, **settings
    )


@cache
def alone(number: int, **settings: Any) -> Generation:
    generation = run(number, **settings)
    assert all(True for _ in generation)
    return generation.result()


def told(generation: Generation | Exception) -> Any:
    assert isinstance(generation, Generation), generation
    steps = [(step.drafted, step.tokens) for step in generation.steps]
    return generation.token_ids, generation.text, generation.finish_reason, generation.policy, steps


@pytest.mark.parametrize(
    ("batch", "most", "tokens", "page"),
    [(1, 512, None, 16), (3, 16, None, None), (8, 512, 150, None), (16, 64, None, 16)],
)
def test_outputs_are_those_alone(batch, most, tokens, page):
    many = GenerationRuns(
        [run(number) for number in range(len(prompts()))],
        max_batch=batch,
        max_tokens_per_pass=most,
        pool_tokens=tokens,
        page=page,
    )
    found = many.results()
    assert [told(each) for each in found] == [told(alone(number)) for number in range(len(found))]
    assert many.factory is not None
    assert (many.factory.use is None) == (batch == 1)
    assert many.factory.use is None or many.factory.use.used == 0


@pytest.mark.parametrize("kind", ["preallocated", "none", "int8", "int4"])
def test_other_caches_are_one_for_each_request(kind):
    language_model = tiny_language_model()
    language_model.quantize = quantized(kind)
    other = prepare_target(language_model, "preallocated" if quantized(kind) else kind)
    own = load_drafter("lookup+self:layers=1", other)
    many = speculative_generate_many(prompts()[:5], other, own, gamma=3, max_new_tokens=NEW, max_batch=4)
    assert many.factory is not None
    assert many.factory.why_not_batched
    assert many.factory.use is None
    for found, prompt in zip(many.results(), prompts(), strict=False):
        assert told(found) == told(speculative_generate(prompt, other, own, gamma=3, max_new_tokens=NEW))


def test_one_wrong_prompt_ends_alone():
    many = speculative_generate_many(
        ["", [1, 2, 3], [10**6], [1] * 600, [4, 5]], target(), None, max_new_tokens=3, max_batch=2
    )
    found = many.results()
    assert [str(each) for each in found if not isinstance(each, Generation)] == [
        "The prompt is empty. Give some text.",
        f"The prompt holds the token 1000000, but the target's tokens are 0 to {target().vocab_size - 1}."
        " Encode it with the target's own tokenizer.",
        "The prompt has 600 tokens, but the target's context holds only 512. Shorten the prompt.",
    ]
    for number, prompt in ((1, [1, 2, 3]), (4, [4, 5])):
        assert told(found[number]) == told(speculative_generate(prompt, target(), None, max_new_tokens=3))


def test_settings_that_are_wrong_for_all_are_refused_at_once():
    for settings, reason in (
        ({"stop": [""]}, "stop string"),
        ({"gamma": 0}, "gamma"),
        ({"max_batch": 0}, "batch"),
    ):
        with pytest.raises(UsageError, match=reason):
            speculative_generate_many([[1]], target(), None, **settings)
    other = wrap_target(tiny_llama(), tiny_tokenizer())
    with pytest.raises(UsageError, match="several targets"):
        GenerationRuns([GenerationRun([1], target()), GenerationRun([1], other)])


def test_records_come_as_they_are_made_and_what_is_there_can_be_asked_for():
    settings = {"gamma": 2, "max_new_tokens": NEW, "max_batch": 2}
    many = speculative_generate_many(prompts()[:3], target(), drafter("lookup"), **settings)
    order, queued = [], []
    for index, record in many:
        order.append(index)
        if isinstance(record, Prefill):
            queued.append(record.queued_s)
        if index == 0 and len(order) > 4:
            many.cancel(0)
    assert order.index(2) > order.index(1) == 1
    assert queued == sorted(queued)
    first, second, third = many.results()
    assert isinstance(first, Generation)
    assert first.finish_reason is None
    assert 0 < len(first.token_ids) < NEW
    assert [len(told(each)[0]) for each in (second, third)] == [NEW, NEW]


@pytest.mark.parametrize("kind", ["lookup", "lookup+model"])
def test_rules_that_read_costs_change_no_greedy_token(kind):
    many = speculative_generate_many(
        prompts()[:10], target(), drafter(kind), policy=build_policy("auto"), max_new_tokens=NEW, max_batch=5
    )
    plain = [speculative_generate(prompt, target(), None, max_new_tokens=NEW) for prompt in prompts()[:10]]
    results = many.results()
    for found, expected in zip(results, plain, strict=True):
        assert told(found)[:3] == told(expected)[:3]
    assert many.batch_costs.rounds > 0
    assert any(step.gamma for each in results if isinstance(each, Generation) for step in each.steps)


def test_requests_arrive_one_after_the_other_and_every_pass_is_told(monkeypatch):
    passes: list[SharedPass] = []
    ended: list[float] = []

    def observe(_: BatchCosts, made: SharedPass) -> None:
        passes.append(made)
        ended.append(many.now())

    monkeypatch.setattr(BatchCosts, "observe", observe)
    runs = [run(number) for number in range(4)]
    many = GenerationRuns(runs[:3], max_batch=2, later=runs[3:])
    began = many.now()
    assert many.add(runs[3], many.now() + 0.05) == 3
    found = many.results()
    assert [told(each) for each in found] == [told(alone(number)) for number in range(4)]
    assert {number for each in passes for number in each.requests} == set(range(4))
    assert max(len(each.requests) for each in passes) == 2
    late = next(number for number, each in enumerate(passes) if 3 in each.requests)
    assert ended[late] - passes[late].seconds - began >= 0.05
    assert all(each.seconds > 0 for each in passes)


def test_a_target_that_a_device_map_has_spread_serves_batches():
    """Every module on a device of the map, which all are the processor: accelerate's hooks are on all of them."""
    inner = ("embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb")
    places = dict.fromkeys([*(f"model.{name}" for name in inner), "lm_head"], "cpu")
    spread = wrap_target(dispatch_model(tiny_llama(), places, force_hooks=True), tiny_tokenizer())
    assert hasattr(spread.language_model.model.model.layers[1], "_hf_hook")
    own = load_drafter("lookup", spread)
    many = speculative_generate_many(prompts()[:6], spread, own, gamma=3, max_new_tokens=NEW, max_batch=3)
    assert many.factory is not None
    assert many.factory.why_not_batched is None
    for found, prompt in zip(many.results(), prompts(), strict=False):
        assert told(found) == told(
            speculative_generate(prompt, target(), drafter("lookup"), gamma=3, max_new_tokens=NEW)
        )


@pytest.mark.parametrize("page", [16, None])
def test_nothing_is_left_to_the_collector(page):
    """Requests and what they hold go with their last reference, those that are cancelled too."""

    def decode_some() -> None:
        many = GenerationRuns([run(number) for number in range(len(KINDS))], max_batch=3, page=page)
        for count, _ in enumerate(many):
            if count == 20:
                many.cancel(5)

    decode_some()
    gc.collect()
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        decode_some()
        gc.collect()
        left = [type(each).__name__ for each in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert left == []
