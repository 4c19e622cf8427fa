"""A generation after another one takes up what target and drafter hold of its prompt, and gives what it gives alone."""

from __future__ import annotations

import random as standard_random
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

import pytest
from head_files import eagle_tensors, speculators_settings, write_head
from test_heads import drafter_of, tiny_target
from test_zoo import zoo_model
from tiny import tiny_language_model, tiny_llama, tiny_tokenizer

from specbench import GenerationRun, load_drafter, wrap_drafter, wrap_target
from specbench.backends.torch.scorer import Scorer
from specbench.decoding.protocols import Drafter, ForwardOutput, ForwardRequest
from specbench.models.drafters import join_cascade
from specbench.models.load import wrap_model
from specbench.models.target import Target, prepare_target
from specbench.options import CacheKind
from specbench.policies import build_policy
from specbench.specs.drafters import Cascade, Lookup, SmallModel

DRAFTERS = (
    "none", "lookup", "suffix", "model", "self:int8", "self:layers=1", "lookup+model", "lookup|self:layers=1",
)  # fmt: skip
CACHES: tuple[CacheKind, ...] = ("dynamic", "preallocated", "static")
NEW = 10


@cache
def target(kind: CacheKind = "dynamic") -> Target:
    return prepare_target(tiny_language_model(), kind)


def drafter(name: str, own: Target) -> Drafter:
    if "model" not in name:
        return load_drafter(name, own)
    model = wrap_drafter(tiny_language_model(1), own)
    return join_cascade(Cascade(Lookup(), SmallModel("tiny-1")), model) if "+" in name else model


def tokens(seed: int, count: int) -> list[int]:
    choice = standard_random.Random(seed)
    part = [choice.randrange(250) for _ in range(count // 2)]
    return [*part, *part]


def run(prompt: list[int], own: Target, loaded_drafter: Drafter, **settings: Any) -> GenerationRun:
    policy = build_policy("fixed:gamma=3")
    return GenerationRun(prompt, own, loaded_drafter, policy=policy, max_new_tokens=NEW, **settings)


def output(decoded: GenerationRun) -> list[int]:
    for _ in decoded:
        pass
    return list(decoded.result().token_ids)


def continued(first: GenerationRun, count: int, own: Target, loaded_drafter: Drafter) -> int:
    """Decode a prompt after ``first``, as after a fresh start; return the number of cached tokens."""
    prompt = [*tokens(1, count), *first.result().token_ids, *tokens(2, 8)]
    second = run(prompt, own, loaded_drafter, after=first)
    assert output(second) == output(run(prompt, own, loaded_drafter))
    return second.cached_tokens


@pytest.fixture
def fed(monkeypatch) -> list[int]:
    """How many tokens each pass has fed, by whichever scorer."""
    found: list[int] = []
    whole = Scorer.score

    def score(self: Scorer, asked: ForwardRequest) -> ForwardOutput:
        found.append(len(asked.context) + len(asked.tokens) - self.cached_len)
        return whole(self, asked)

    monkeypatch.setattr(Scorer, "score", score)
    return found


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_output_is_that_of_a_fresh_start(name, fed):
    """A second turn, one that goes back into the first, and one with nothing in common."""
    own = target()
    loaded_drafter = drafter(name, own)
    first = run(tokens(1, 60), own, loaded_drafter)
    begun = output(first)
    second_prompt = [*tokens(1, 60), *begun, *tokens(2, 8)]
    edited = [*second_prompt[:40], *tokens(3, 20)]
    other = [7, *tokens(4, 20)]
    last, kept = first, []
    outputs = []
    for prompt in (second_prompt, edited, other):
        fed.clear()
        last = run(prompt, own, loaded_drafter, after=last)
        outputs.append(output(last))
        kept.append(last.cached_tokens)
        assert fed[0] == len(prompt) - last.cached_tokens
        assert max(fed) <= len(prompt) - last.cached_tokens + NEW, "somebody has read the whole prompt again"
    assert kept == [60 + NEW - 1, 40, 0]
    assert outputs == [output(run(prompt, own, loaded_drafter)) for prompt in (second_prompt, edited, other)]


@pytest.mark.parametrize(
    ("kind", "word"), [(kind, "lookup+self:layers=1") for kind in CACHES] + [("dynamic", "model")]
)
@pytest.mark.parametrize("steps", [3, 99])
def test_in_every_cache_that_keeps_its_positions_also_after_a_part_of_an_output(kind, word, steps):
    own = target(kind)
    loaded_drafter = drafter(word, own)
    first = run(tokens(1, 300), own, loaded_drafter)
    for _ in islice(first, steps):
        pass
    begun = len(first.result().token_ids)
    assert continued(first, 300, own, loaded_drafter) == 300 + begun - 1


def test_a_pass_that_was_broken_off_leaves_nothing_to_take_up(monkeypatch):
    own = target()
    loaded_drafter = drafter("self:layers=1", own)
    first = run(tokens(1, 40), own, loaded_drafter)
    records: Iterator[Any] = iter(first)
    next(records)
    whole = Scorer.score
    passes: list[ForwardRequest] = []

    def broken(self: Scorer, asked: ForwardRequest) -> ForwardOutput:
        passes.append(asked)
        rows = whole(self, asked)
        if len(passes) == 2:  # in the middle of a draft
            raise KeyboardInterrupt
        return rows

    monkeypatch.setattr(Scorer, "score", broken)
    with pytest.raises(KeyboardInterrupt):
        list(records)
    monkeypatch.setattr(Scorer, "score", whole)
    assert list(first) == []
    second = run(tokens(1, 40), own, loaded_drafter, after=first)
    assert output(second) == output(run(tokens(1, 40), own, loaded_drafter))
    assert second.cached_tokens == 0


def test_another_generation_in_between_or_another_drafter_begins_anew():
    own = target()
    loaded_drafter = load_drafter("lookup", own)
    first = run(tokens(1, 40), own, loaded_drafter)
    expected = output(first)
    output(run(tokens(5, 40), own, loaded_drafter))
    late = run(tokens(1, 40), own, loaded_drafter, after=first)
    assert output(late) == expected
    other = run(tokens(1, 40), own, load_drafter("lookup", own), after=late)
    assert output(other) == expected
    assert (late.cached_tokens, other.cached_tokens) == (0, 0)
    never_begun = run(tokens(1, 40), own, loaded_drafter, after=run(tokens(1, 40), own, loaded_drafter))
    assert output(never_begun) == expected
    assert never_begun.cached_tokens == 0


def test_windows_that_forget_heads_and_no_cache_at_all_read_it_again(tmp_path):
    sliding = wrap_target(zoo_model("mistral", vocab_size=len(tiny_tokenizer())), tiny_tokenizer())
    uncached = prepare_target(wrap_model(tiny_llama(), tiny_tokenizer(), name="tiny"), "none")
    headed = tiny_target()
    head = drafter_of(write_head(tmp_path / "head", speculators_settings(), eagle_tensors()), headed)
    for own, loaded_drafter in (
        (sliding, load_drafter("lookup", sliding)),
        (uncached, load_drafter("lookup", uncached)),
        (headed, head),
    ):
        first = run(tokens(1, 60), own, loaded_drafter)
        output(first)
        assert continued(first, 60, own, loaded_drafter) == 0
