"""Trees: every way to verify keeps the target's distribution, enumerated, and greedy decoding its very tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted import ScriptedCache, ScriptedScorer, enumerate_outcomes, random_table

from specbench.decoding.loop import decode_steps
from specbench.decoding.protocols import TreePolicy
from specbench.decoding.records import Step
from specbench.decoding.request import DraftPolicy
from specbench.decoding.sampling import Multinomial, Nucleus, Sampling, TopK
from specbench.decoding.tree import Siblings
from specbench.decoding.verdicts import METHODS
from specbench.drafters.model import ModelDrafter, SelfDrafter
from specbench.lengths import FixedLength
from specbench.lengths.auto_tree import AutoTree
from specbench.lengths.costs import parse_costs
from specbench.lengths.trees import DynamicTree, IndependentChains, StaticTree
from specbench.specs.verification import VerificationName

VOCAB, NEW = 3, 3
PROMPT = [1, 2, 0]
TARGET, DRAFT = random_table(3, VOCAB), random_table(4, VOCAB)
COSTS = {"drafter_pass_s": 0.1, "target_pass_s": {"1": 1.0, "9": 1.1}}

TREES: dict[str, Callable[[], TreePolicy]] = {
    "two beside": lambda: StaticTree.shaped((-1, -1)),
    "two of two": lambda: StaticTree.shaped((-1, -1, 0, 0, 1)),
    "a branch in the middle": lambda: StaticTree.shaped((-1, 0, 0)),
    "chains": lambda: IndependentChains(2, 2),
    "auto": lambda: AutoTree(4, parse_costs(COSTS)),
    "dynamic": lambda: DynamicTree(2, 3, 2),
}
SAMPLINGS: dict[str, Sampling] = {
    "multinomial": Multinomial(),
    "temperature": Multinomial(0.6),
    "top-k": TopK(2, temperature=1.3),
    "nucleus": Nucleus(0.8),
    "repetition penalty": Multinomial(0.9, repetition_penalty=1.7),
}
DRAFTERS = {
    "model": lambda target: ModelDrafter(ScriptedScorer(DRAFT, VOCAB), "model"),
    "self": lambda target: SelfDrafter(
        ScriptedScorer(DRAFT, VOCAB, cache=target.cache, own_entries_only=False), "self"
    ),
}


def loop_distribution(
    tree: Callable[[], TreePolicy] | None,
    method: VerificationName,
    sampling: Sampling,
    drafter: str = "model",
    tokens: tuple[int, ...] = (),
) -> dict[tuple[int, ...], float]:
    """The distribution of what the loop emits behind ``tokens``: of one step, and of all that may come behind it."""
    if len(tokens) >= NEW:
        return {(): 1.0}

    def step(random: Any) -> tuple[int, ...]:
        target = ScriptedScorer(TARGET, VOCAB, cache=ScriptedCache())
        records = decode_steps(
            [*PROMPT, *tokens],
            target,
            DRAFTERS[drafter](target),
            policy=tree_policy(tree, method),
            sampling=sampling,
            random=random,
            max_new_tokens=NEW - len(tokens),
            first_target=False,
        )
        return next(record.tokens for record in records if isinstance(record, Step))

    found: dict[tuple[int, ...], float] = {}
    for emitted, weight in enumerate_outcomes(step).items():
        rest = loop_distribution(tree, method, sampling, drafter, (*tokens, *emitted))
        for behind, chance in rest.items():
            key = (*emitted, *behind)
            found[key] = found.get(key, 0.0) + weight * chance
    return found


def tree_policy(tree: Callable[[], TreePolicy] | None, method: VerificationName) -> DraftPolicy:
    """Two drafts in a step, or a tree; with ``residual`` two drafts have siblings."""
    beside = Siblings(3 if method == "residual" and tree is None else 0, lambda _: 0.0)
    return DraftPolicy(FixedLength(2), beside, tree=tree() if tree else None, verification=method)


def target_distribution(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """By the chain rule, token by token: written without anything of the loop."""
    growing: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NEW):
        grown: dict[tuple[int, ...], float] = {}
        for tokens, weight in growing.items():
            context = [*PROMPT, *tokens]
            p = sampling.probabilities(TARGET(context).unsqueeze(0), context)[0].double()
            for token in range(VOCAB):
                grown[*tokens, token] = weight * float(p[token] / p.sum())
        growing = grown
    return {tokens: weight for tokens, weight in growing.items() if weight > 0}


def largest_gap(a: dict[tuple[int, ...], float], b: dict[tuple[int, ...], float]) -> float:
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


def cells() -> Iterator[Any]:
    """Which trees go with which way to verify."""
    for method, how in METHODS.items():
        for tree in (None, *TREES):
            if tree is not None and how.chains_only:
                continue
            if tree == "dynamic" and method != "naive":
                continue
            if tree == "chains" and method not in ("specinfer", "naive"):
                continue
            yield pytest.param(method, tree, id=f"{method}-{tree}")


@pytest.mark.parametrize(("method", "tree"), list(cells()))
def test_the_output_distribution_is_the_targets(method: VerificationName, tree: str | None) -> None:
    for sampling in (SAMPLINGS["multinomial"], SAMPLINGS["repetition penalty"]):
        found = loop_distribution(TREES[tree] if tree else None, method, sampling)
        assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
        assert largest_gap(found, target_distribution(sampling)) < 1e-6
