"""Every kind of cache against full recomputation, on tiny random models of the families people use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from test_zoo import VOCABULARY as VOCAB
from test_zoo import WINDOW, ZOO, zoo_model
from tiny import tiny_llama

from specbench.backends.torch.cache_layers import PreallocatedSlidingLayer
from specbench.backends.torch.caches import make_cache
from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import RunError, UsageError
from specbench.decoding.drafts import Draft
from specbench.decoding.protocols import Decoding, Drafter, DrafterTraits, StepPlan
from specbench.decoding.records import Step
from specbench.decoding.sampling import Sampling
from specbench.drafters.chain import warn_of_no_numbers
from specbench.generate import GenerationRun, speculative_generate
from specbench.generate_many import GenerationRuns
from specbench.models.drafters import join_cascade, load_drafter, wrap_drafter
from specbench.models.load import wrap_model
from specbench.models.target import Target, wrap_target
from specbench.options import CacheKind
from specbench.policies import build_policy
from specbench.specs.drafters import parse_drafter
from specbench.specs.policies import LONGEST_DRAFT

KINDS: tuple[CacheKind, ...] = ("dynamic", "preallocated")
FAMILIES = ("llama", "qwen2", "phi3", "gpt2", "gpt-neox", "falcon", "mistral", "gemma2", "gemma3", "lfm2")
CASES = [
    (family, kind) for family in FAMILIES for kind in KINDS if (family, kind) != ("lfm2", "preallocated")
]


@cache
def tiny(family: str) -> Any:
    """A random model; the same object every time, so nothing may change it."""
    return zoo_model(family)


def whole(model: Any, context: Sequence[int], drafted: Sequence[int] = ()) -> torch.Tensor:
    """The logits by one pass over everything, without a cache: row i stands behind ``drafted[:i]``."""
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([[*context, *drafted]]), use_cache=False)
    logits: torch.Tensor = output.logits[0, -(len(drafted) + 1) :]
    return logits


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert found.argmax(dim=-1).tolist() == expected.argmax(dim=-1).tolist()


class Walk:
    """A context that grows as in decoding: random drafts, a random number of them kept, one token more."""

    def __init__(self, scorer: Scorer, prompt: int, seed: int = 0) -> None:
        self.scorer = scorer
        self.random = Random(seed)
        self.context = self.tokens(prompt)

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(count)]

    def step(self, drafts: int, *, check: bool = True) -> None:
        drafted = self.tokens(drafts)
        found = self.scorer.logits(self.context, drafted)
        assert found.shape == (drafts + 1, VOCAB)
        if check:
            assert_close(found, whole(self.scorer.model, self.context, drafted))
        self.rollback(drafted)

    def rollback(self, drafted: Sequence[int]) -> None:
        accepted = self.random.randint(0, len(drafted))
        self.context += [*drafted[:accepted], *self.tokens(1)]
        fed = self.scorer.cache.length
        self.scorer.rollback(len(self.context) - 1)
        assert self.scorer.cache.length == min(fed, len(self.context) - 1)


def cache_layers(scorer: Scorer) -> Sequence[Any]:
    layers: Sequence[Any] = scorer.cache.model_kwargs()["past_key_values"].layers
    return layers


# -- decoding as it goes --------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_cache_serves_one_context_after_the_other(family, kind):
    """Also where the prompt and the first drafts reach an empty cache together, without a first-target pass."""
    scorer = Scorer(tiny(family), kind)
    for seed, empty in enumerate((scorer.begin, lambda: scorer.rollback(0), scorer.cache.reset)):
        for prompt, course in ((15, (0, 3, 1, 9, 0, 0, 12, 5)), (1, (12, 3, 0, 7)), (30, (12, 3, 0, 7))):
            empty()
            assert scorer.cache.length == 0
            walk = Walk(scorer, prompt, seed)
            for drafts in course:
                walk.step(drafts)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_the_cache_lacks_is_fed(kind, monkeypatch):
    scorer = Scorer(tiny("llama"), kind)
    fed: list[int] = []
    forward = scorer.model.forward
    monkeypatch.setattr(
        scorer.model, "forward", lambda *a, **k: fed.append(k["input_ids"].shape[1]) or forward(*a, **k)
    )
    scorer.logits([1, 2, 3, 4])
    scorer.rollback(4)
    scorer.logits([1, 2, 3, 4, 5], [6, 7, 8])
    scorer.rollback(6)  # one draft kept
    scorer.logits([1, 2, 3, 4, 5, 6, 9], [1])
    scorer.logits([1, 2, 3, 4, 5, 6, 9], [1, 2], rows=1)
    assert fed == [4, 4, 2, 1]


# -- sliding windows ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_sliding_layer_says_when_it_has_forgotten(kind):
    scorer = Scorer(tiny("gemma2"), kind)
    walk = Walk(scorer, 600)
    while not dropped(scorer):
        walk.step(90, check=False)
    with pytest.raises(ValueError, match="given up"):
        scorer.rollback(20)


@pytest.mark.parametrize("start", range(240, 900, 220))
def test_a_preallocated_window_takes_the_longest_draft_back(start):
    layer = PreallocatedSlidingLayer(WINDOW)
    entries = torch.arange(start + LONGEST_DRAFT, dtype=torch.float32).view(1, 1, -1, 1)
    layer.update(entries[:, :, :start], entries[:, :, :start])
    for i in range(start, start + LONGEST_DRAFT):  # as a drafter does, pass by pass
        layer.update(entries[:, :, i : i + 1], entries[:, :, i : i + 1])
    layer.rollback(start)
    seen, _ = layer.update(entries[:, :, start : start + 1], entries[:, :, start : start + 1])
    assert seen.flatten().tolist() == list(range(start + 1 - WINDOW, start + 1))


def dropped(scorer: Scorer) -> int:
    """Positions that every sliding layer of a cache has given up."""
    (count,) = {layer.dropped for layer in cache_layers(scorer) if layer.is_sliding}
    return int(count)


@pytest.mark.parametrize(("family", "prompt"), [("gemma3", 1), ("mistral", 75)])
def test_many_drops(family, prompt, monkeypatch):
    """The same with small buffers, so that it happens often and close to other events."""
    for name, value in (("INITIAL_CAPACITY", 16), ("SLIDING_SLACK", 20), ("_MIN_GROWTH", 16)):
        monkeypatch.setattr(f"specbench.backends.torch.cache_layers.{name}", value)
    scorer = Scorer(tiny(family), "preallocated")
    walk = Walk(scorer, prompt)
    drops = set()
    for _ in range(100):
        walk.step(walk.random.choice([0, 1, 4, 12, 20]))
        drops.add(dropped(scorer))
    assert len(drops) > 3
    full = [layer.keys.shape[-2] for layer in cache_layers(scorer) if not layer.is_sliding]
    sliding = [layer.keys.shape[-2] for layer in cache_layers(scorer) if layer.is_sliding]
    assert max(sliding) <= 128
    assert all(length >= len(walk.context) - 1 for length in full)
    scorer.begin()
    another = Walk(scorer, 3, seed=1)
    for drafts in (0, 4, 20):
        another.step(drafts)


# -- drafting on the target's own cache -----------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "drafter"), [("dynamic", "none"), ("preallocated", "self:layers=1"), ("static", "self:layers=1")]
)
def test_a_prompt_without_numbers_spoils_none_behind_it(kind, drafter):
    spoilt, sound = [5, 6, *[7] * 40], [1, 2, 3, 4]

    def target() -> Target:
        made: Any = tiny_llama()
        made.get_input_embeddings().weight.data[7] = math.nan
        return wrap_target(made, name="tiny", cache=kind)

    def answer(of: Target, prompt: list[int]) -> tuple[int, ...]:
        loaded_drafter = load_drafter(drafter, of)
        return speculative_generate(prompt, of, loaded_drafter, gamma=3, max_new_tokens=12).token_ids

    used, fresh = target(), target()
    with pytest.raises(RunError, match="not numbers"):
        answer(used, spoilt)
    assert answer(used, sound) == answer(fresh, sound)
    for scorer in (used.scorer, fresh.scorer):
        scorer.begin()
    assert torch.equal(used.scorer.logits(sound), fresh.scorer.logits(sound))


WAYS: dict[str, dict[str, Any]] = {
    "chain": {},
    "cascade": {"front": "lookup"},
    "tree": {"policy": "dynamic-tree"},
    "entropy": {"policy": "entropy-bound"},
    "sampled tree": {"sampling": Sampling(0.5), "policy": "dynamic-tree"},
    "batch": {"requests": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_drafter_without_numbers_drafts_nothing_there_and_says_so_once(way, caplog):
    usual = {"front": "", "policy": "fixed:gamma=4", "sampling": Sampling(), "requests": 1}
    front, rule, sampling, requests = (usual | WAYS[way]).values()
    warn_of_no_numbers.cache_clear()
    target = wrap_target(tiny_llama(), name="tiny")
    prompt, settings = [5, 6, 7], {"max_new_tokens": 30, "ignore_eos": True}
    expected = speculative_generate(prompt, target, None, **settings).token_ids
    spoilt = tiny_llama()
    weights: Any = spoilt.get_input_embeddings().weight
    weights.data[expected[6]] = math.nan
    drafter: Any = wrap_drafter(wrap_model(spoilt, None, "spoilt"), target)
    if front:
        spec: Any = parse_drafter(f"{front}+smollm2-135m")
        drafter = join_cascade(spec, drafter)
    runs = [
        GenerationRun(prompt, target, drafter, policy=build_policy(rule), sampling=sampling, **settings)
        for _ in range(requests)
    ]
    for result in GenerationRuns(runs, max_batch=requests).results():
        assert not isinstance(result, Exception), result
        assert len(result.token_ids) == 30
        if sampling.greedy:
            assert result.token_ids == expected
            assert any(isinstance(step, Step) and step.drafted for step in result.steps)
    said = [record.getMessage() for record in caplog.records if record.name == "specbench"]
    assert len(said) == (way != "sampled tree" or "spoilt" in " ".join(said))
    assert all("spoilt" in each for each in said)


class Stubborn(Drafter):
    """Drafts one token again and again."""

    def __init__(self, token: int) -> None:
        super().__init__(DrafterTraits("stubborn"))
        self.token = token

    def propose(self, context: Any, plan: StepPlan) -> Decoding[Draft]:
        yield from ()
        return Draft([self.token] * plan.policy.begin_step(plan.budget))


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, top_k=1)], ids=["greedy", "sampled"]
)
def test_a_target_without_numbers_after_a_wrong_token_of_the_draft(sampling):
    """Rows that are not reached decide nothing."""
    target = wrap_target(tiny_llama(), name="tiny", pack=False)
    prompt, settings = [5, 6, 7], {"max_new_tokens": 20, "ignore_eos": True}
    expected = speculative_generate(prompt, target, None, **settings).token_ids
    other = next(token for token in range(60) if token not in expected)

    def spoil(_: Any, __: Any, given: dict[str, Any], out: Any) -> None:
        read = given["input_ids"][0, -out.logits.shape[1] :]
        out.logits[0, read == other] = math.nan

    target.scorer.model.register_forward_hook(spoil, with_kwargs=True)
    found = speculative_generate(prompt, target, Stubborn(other), gamma=2, sampling=sampling, **settings)
    assert found.token_ids == expected
    with pytest.raises(RunError, match="not numbers"):
        speculative_generate([*prompt, other], target, Stubborn(3), sampling=sampling, **settings)


# -- what cannot be held --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "family", "words"),
    [
        ("preallocated", "lfm2", ("LinearAttentionLayer", "--cache dynamic")),
        ("paged", "llama", ("'paged'", "dynamic, preallocated, static, none")),
    ],
)
def test_kinds_that_cannot_be(kind, family, words):
    with pytest.raises(UsageError) as caught:
        make_cache(kind, ZOO[family][1]())
    assert all(each in str(caught.value) for each in words)


# -- widths and rows ------------------------------------------------------------------------------


def test_narrower_logits_are_padded_with_impossible_tokens_and_wider_ones_cut():
    expected = whole(tiny("llama"), [1, 2], [3])
    padded, cut = (
        Scorer(tiny("llama"), "none", vocab_size=VOCAB + more).logits([1, 2], [3]) for more in (3, -3)
    )
    assert_close(padded[:, :VOCAB], expected)
    assert padded[:, VOCAB:].tolist() == [[-torch.inf] * 3] * 2
    assert_close(cut, expected[:, :-3])


@pytest.mark.parametrize("kind", ["dynamic", "none"])
def test_the_head_is_asked_for_the_wanted_rows_alone(kind, monkeypatch):
    scorer = Scorer(tiny("llama"), kind)
    rows: list[int] = []
    head = scorer.model.get_output_embeddings()
    monkeypatch.setattr(
        head, "forward", lambda x: rows.append(x.shape[1]) or torch.zeros(1, x.shape[1], VOCAB)
    )
    scorer.logits([1, 2, 3, 4, 5])
    scorer.logits([1, 2, 3, 4, 5, 6], [7, 8])
    scorer.logits([1, 2, 3, 4, 5, 6], [7, 8, 9], rows=1)
    assert rows == [1, 3, 1]
