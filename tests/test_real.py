"""The built-in model's real weights: greedy output in float32 is `transformers`' own, for every drafter and cache.

benchmarks/architectures.py and benchmarks/fuzz.py go further.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from specbench.decoding.records import Generation
from specbench.generate import GenerationRun, encode_prompt
from specbench.generate_many import GenerationRuns
from specbench.models.drafters import load_drafter
from specbench.models.load import load_model
from specbench.models.target import Target, load_target
from specbench.options import LoadOptions
from specbench.policies import build_policy

pytestmark = pytest.mark.real

MODEL, NEW, MANY = "smollm2-135m", 24, 40
PROMPTS = (
    "Rename `x` to `total`:\n\ndef add(xs):\n    x = 0\n    for each in xs:\n        x = x + each\n    return x\n",
    "Tell me a story about a lighthouse.",
    "List three colors as a JSON array.",
)
CACHES = ("dynamic", "preallocated")
FLOAT32 = LoadOptions(dtype="float32", device="cpu")


@cache
def expected(new: int) -> dict[tuple[int, ...], list[int]]:
    """What `generate` answers to a few prompts, with the same end tokens and no sampling defaults."""
    reference = load_model(MODEL, FLOAT32)
    answers = {}
    for prompt in PROMPTS:
        ids = encode_prompt(reference.tokenizer, prompt)
        batch = torch.tensor([ids])
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=new,
            eos_token_id=list(reference.end_ids),
            pad_token_id=reference.end_ids[0],
        )
        with torch.inference_mode():
            output = reference.model.generate(
                batch, attention_mask=torch.ones_like(batch), generation_config=config
            )
        answers[tuple(ids)] = output[0, len(ids) :].tolist()
    return answers


@pytest.fixture(scope="module", params=CACHES)
def target(request) -> Target:
    return load_target(MODEL, FLOAT32, cache=request.param)


DRAFTS = [
    ("none", "fixed"),
    ("lookup", "fixed"),
    ("ngram:top-k=2", "fixed:gamma=3"),
    ("self:int8", "fixed:gamma=4"),
    ("self:layers=10", "fixed:gamma=2"),
    (MODEL, "fixed:gamma=2"),
    ("suffix", "static-tree:nodes=8"),
    ("self:int8", "dynamic-tree:nodes=8,top-k=3"),
    ("self:layers=10", "static-tree"),
    ("lookup|self:layers=10", "fixed:gamma=2"),
]


def cells() -> Iterator[Any]:
    """Every drafter with one of the caches and two of the prompts in turn; with all, and longer, where it is slow."""
    for place, kind in enumerate(CACHES):
        for number, (spec, rule) in enumerate(DRAFTS):
            quick = number % len(CACHES) == place
            new, left_out, marks = (NEW, number % 3, ()) if quick else (MANY, None, pytest.mark.slow)
            yield pytest.param(kind, spec, rule, new, left_out, id=f"{kind}-{spec}-{rule}", marks=marks)


@pytest.mark.parametrize(("target", "spec", "rule", "new", "left_out"), list(cells()), indirect=["target"])
def test_greedy_tokens_are_those_of_transformers(target, spec, rule, new, left_out):
    drafter = load_drafter(spec, target)
    for number, (ids, tokens) in enumerate(expected(new).items()):
        if number == left_out:
            continue
        run = GenerationRun(ids, target, drafter, policy=build_policy(rule), max_new_tokens=new)
        for _ in run:
            pass
        result = run.result()
        assert list(result.token_ids) == tokens
        if spec in ("self:int8", MODEL):
            assert sum(step.accepted for step in result.steps) > 0


@pytest.mark.parametrize("batch", [3, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", ["dynamic"], indirect=True)
def test_tokens_in_a_batch_are_those_of_transformers(target, batch):
    """Three requests that step beside each other, each with a drafter and a rule of its own."""
    settings = [("none", "fixed"), ("lookup", "auto"), ("self:layers=10", "static-tree")]
    runs = [
        GenerationRun(ids, target, load_drafter(spec, target), policy=build_policy(rule), max_new_tokens=NEW)
        for ids, (spec, rule) in zip(expected(NEW), settings, strict=True)
    ]
    many = GenerationRuns(runs, max_batch=batch)
    assert many.factory is not None
    assert many.factory.why_not_batched is None
    for found, tokens in zip(many.results(), expected(NEW).values(), strict=True):
        assert isinstance(found, Generation)
        assert list(found.token_ids) == tokens
