"""The built-in model's real weights: greedy output in float32 is `transformers`' own, for every drafter and cache.

benchmarks/architectures.py and benchmarks/fuzz.py go further.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
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

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("small_pages")]

MODEL, NEW, MANY = "smollm2-135m", 16, 40
PROMPTS = (
    "Rename `x` to `total`:\n\ndef add(xs):\n    x = 0\n    for each in xs:\n        x = x + each\n    return x\n",
    "Tell me a story about a lighthouse.",
    "List three colors as a JSON array.",
)
CACHES = ("dynamic", "preallocated")
FLOAT32 = LoadOptions(dtype="float32", device="cpu")


reference = cache(partial(load_model, MODEL, FLOAT32))


@cache
def expected(prompt: str, new: int) -> tuple[list[int], list[int]]:
    """A prompt's tokens, and what `generate` answers with the same end tokens and no sampling defaults."""
    loaded = reference()
    ids = encode_prompt(loaded.tokenizer, prompt)
    batch = torch.tensor([ids])
    config = GenerationConfig(
        do_sample=False, max_new_tokens=new, eos_token_id=list(loaded.end_ids), pad_token_id=loaded.end_ids[0]
    )
    with torch.inference_mode():
        output = loaded.model.generate(batch, attention_mask=torch.ones_like(batch), generation_config=config)
    return ids, output[0, len(ids) :].tolist()


@pytest.fixture(scope="module", params=CACHES)
def target(request, small_pages) -> Target:
    return load_target(MODEL, FLOAT32, cache=request.param)


DRAFTS = [
    ("lookup", "fixed"),
    ("none", "fixed"),
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
    """Every drafter with one of the caches and one of the prompts in turn; with all, and longer, where it is slow."""
    for place, kind in enumerate(CACHES):
        for number, (spec, rule) in enumerate(DRAFTS):
            quick = number % len(CACHES) == place
            new, marks = (NEW, ()) if quick else (MANY, pytest.mark.slow)
            prompts = PROMPTS[number % 3 :][:1] if quick else PROMPTS
            yield pytest.param(kind, spec, rule, new, prompts, id=f"{kind}-{spec}-{rule}", marks=marks)


@pytest.mark.parametrize(("target", "spec", "rule", "new", "prompts"), list(cells()), indirect=["target"])
def test_greedy_tokens_are_those_of_transformers(target, spec, rule, new, prompts):
    drafter = load_drafter(spec, target)
    for prompt in prompts:
        ids, tokens = expected(prompt, new)
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
    answers = [expected(prompt, NEW) for prompt in PROMPTS]
    runs = [
        GenerationRun(ids, target, load_drafter(spec, target), policy=build_policy(rule), max_new_tokens=NEW)
        for (ids, _), (spec, rule) in zip(answers, settings, strict=True)
    ]
    many = GenerationRuns(runs, max_batch=batch)
    assert many.factory is not None
    assert many.factory.why_not_batched is None
    for found, (_, tokens) in zip(many.results(), answers, strict=True):
        assert isinstance(found, Generation)
        assert list(found.token_ids) == tokens
