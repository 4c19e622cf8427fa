"""Outputs in batches of every size are the target's alone, for every kind of drafter and pool."""

from __future__ import annotations

import random as standard_random
from pathlib import Path
from typing import Any

import pytest
import torch
from head_files import few_head, few_tokens
from tiny import tiny_llama

from specbench import load_drafter, wrap_target
from specbench.backends.torch.scorer import Scorer
from specbench.decoding.protocols import Drafter, DraftPolicy
from specbench.decoding.records import Generation
from specbench.decoding.sampling import Sampling
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter
from specbench.drafters.several import SeveralDrafters
from specbench.generate import GenerationRun, speculative_generate
from specbench.generate_many import GenerationRuns
from specbench.models.target import Target
from specbench.policies import FixedLength, build_policy
from specbench.policies.trees import StaticTreePolicy

HEADS = (
    "pard", "eagle", "eagle-1", "peagle", "dflash", "dflash2", "dspark", "medusa", "mtp",
)  # fmt: skip
OTHERS = ("lookup", "ngram:top-k=2", "suffix", "self:int8", "self:layers=1",
          "lookup+self:int8", "lookup|self:layers=1")  # fmt: skip
RULES = ("auto", "static-tree:nodes=5", "dynamic-tree:nodes=5", "fixed:gamma=3")
TREE = StaticTreePolicy.shaped((-1, -1, 0, 0, 1))
PROMPTS = 48
NEW = 16

Cell = tuple[str, Drafter | None, DraftPolicy]


def prompts() -> list[list[int]]:
    """Most of them with something to copy; some begin alike."""
    choice = standard_random.Random(4)
    beginning = [choice.randrange(9) for _ in range(40)]
    made = []
    for number in range(PROMPTS):
        part = [choice.randrange(9) for _ in range(choice.randint(1, 12))]
        made.append((beginning[: 20 * (number % 3)] if number % 4 else []) + part * choice.randint(1, 4))
    return made


def cells(folder: Path, target: Target) -> list[Cell]:
    """Drafters of every kind, with fixed and measured lengths, as chains and as trees."""
    chain, tree = FixedLength(3), TREE
    found: list[Cell] = [("none", None, chain)]
    model = ModelDrafter(Scorer(tiny_llama(vocab_size=9, layers=1, seed=2)), "model")
    for name, drafter in [("model", model), *((spec, load_drafter(spec, target)) for spec in OTHERS)]:
        found.append((name, drafter, chain))
        found += [] if "|" in name else [(f"{name} {RULES[0]}", drafter, build_policy(RULES[0]))]
    found += [(f"model {rule}", model, build_policy(rule)) for rule in RULES[1:]]
    for kind in HEADS:
        head = few_head(folder / kind, kind, target)
        found += [(kind, head, chain), (f"{kind} auto", head, build_policy("auto"))]
        found += [(f"{kind} tree", head, tree)] if head.traits.trees else []
        found.append((f"lookup+{kind}", CascadeDrafter(LookupDrafter(), head), chain))
    found.append(("lookup|eagle", SeveralDrafters([LookupDrafter(), found[-4][1]]), chain))  # type: ignore[list-item]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", [128, 16])
def test_outputs_of_every_drafter_in_every_batch_are_the_targets(tmp_path, page):
    """In each batch every request has another drafter, and over the batches each prompt has them in turn."""
    with torch.random.fork_rng(devices=[]):
        target = wrap_target(few_tokens(), pack=False)
        every = cells(tmp_path, target)
    asked, accepted = prompts(), 0
    expected: list[list[int]] = []
    for prompt in asked:
        plain = GenerationRun(prompt, target, max_new_tokens=NEW)
        assert all(True for _ in plain)
        expected.append(plain.result().token_ids)
    for batch in range(1, 17):
        runs: list[Any] = []
        for number, prompt in enumerate(asked):
            _, drafter, policy = every[(number + 3 * batch) % len(every)]
            runs.append(GenerationRun(prompt, target, drafter, policy=policy, max_new_tokens=NEW))
        room = (
            None if batch % 2 else (64 if page == 16 else 128) * batch
        )  # pages too few for all now and then
        many = GenerationRuns(
            runs, max_batch=batch, max_tokens_per_pass=8 + 5 * batch, pool_tokens=room, page=page
        )
        for number, made in enumerate(many.results()):
            name = every[(number + 3 * batch) % len(every)][0]
            assert isinstance(made, Generation), (name, made)
            assert made.token_ids == expected[number], (batch, name)
            accepted += sum(step.accepted for step in made.steps)
        assert many.factory is not None
        assert many.factory.use is None or many.factory.use.used == 0
    assert accepted > 1000


@pytest.mark.parametrize(("dtype", "cache"), [(torch.float32, "dynamic"), (torch.bfloat16, "preallocated")])
def test_a_seed_gives_the_tokens_that_it_gives_alone(dtype, cache):
    """In bfloat16 with --cache bit-exact, since rows that share a pass are rounded otherwise."""
    target = wrap_target(tiny_llama(vocab_size=9, dtype=dtype), cache=cache)
    drafter, asked = load_drafter("lookup", target), prompts()[:16]
    settings = {"policy": FixedLength(3), "sampling": Sampling(1.0), "max_new_tokens": NEW}
    runs = [GenerationRun(each, target, drafter, seed=i, **settings) for i, each in enumerate(asked)]
    together = GenerationRuns(runs, max_batch=8).results()
    for number, prompt in enumerate(asked):
        alone = speculative_generate(prompt, target, drafter, seed=number, **settings)
        made = together[number]
        assert isinstance(made, Generation)
        assert made.token_ids == alone.token_ids
