"""The check of trees and of all ways to verify: what is sound passes, and planted biases are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import checked
import pytest
import torch
from checked import DRAFT, VOCAB, draft_model, result_of, violated, with_records
from scripted import ScriptedScorer, random_table

from specbench.check.observe import greedily, observe
from specbench.check.run import DecodingCheck
from specbench.decoding import verdicts
from specbench.decoding.drafts import Draft, Draws, GrowingTree, StepOutcome
from specbench.decoding.protocols import Decoding, DraftPolicy
from specbench.decoding.records import Step
from specbench.decoding.request import Request
from specbench.decoding.sampling import Sampling
from specbench.drafters.model import ModelDrafter
from specbench.drafters.several import SeveralDrafters
from specbench.drafters.suffix import SuffixDrafter
from specbench.policies import FixedLength
from specbench.policies.trees import DynamicTreePolicy, StaticTreePolicy
from specbench.specs.policies import DynamicTree, StaticTree, VerificationName

TREES: dict[str, Callable[[], DraftPolicy]] = {
    "static": lambda: StaticTreePolicy.shaped((-1, -1, 0, 0, 1, 2)),
    "dynamic": lambda: DynamicTreePolicy(DynamicTree(2, 4, 3)),
    "flat": lambda: StaticTreePolicy.shaped((-1, -1, -1)),
}


def setup_of(
    tree: str | None, method: VerificationName | None = None, drafter: str = "model", **changes: Any
) -> Request:
    policy = TREES[tree]() if tree else FixedLength(3)
    policy.verification = method
    return checked.setup_of(drafter, **{"policy": policy, "max_new_tokens": 10, **changes})


def enumerated(result: DecodingCheck) -> float:
    """The largest error where every outcome was gone through."""
    return max(p.error for case in result.exact for p in case.positions if p.kind == "enumerated")


# --- Sound configurations -------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["model", "self"])
@pytest.mark.parametrize("tree", TREES)
def test_greedy_trees_pass(tree, drafter):
    for first_target in (True, False):
        result = result_of(setup_of(tree, drafter=drafter, sampling=Sampling(), first_target=first_target))
        assert result.violations == []
        assert result.verdict == "identical"


@pytest.mark.parametrize(
    ("tree", "method"),
    [
        *(("static", name) for name in ("traversal", "recursive", "naive")),
        ("dynamic", "naive"),
        ("flat", "specinfer"),
        *((None, name) for name in ("block", "naive", "recursive", "specinfer", "traversal")),
    ],
)
def test_every_way_to_verify_passes(tree, method):
    for sampling in (Sampling(0.9), Sampling(temperature=0.8, top_k=4, repetition_penalty=1.3)):
        result = result_of(setup_of(tree, method, sampling=sampling))
        assert result.violations == []
        assert result.verdict == "identical"
        assert enumerated(result) < 1e-6
    assert {"first", "enumerated"} <= {place.kind for case in result.exact for place in case.positions}


def test_several_drafters_pass():
    models = [draft_model(random_table(seed, VOCAB), str(seed)) for seed in (2, 4)]
    setup = replace(setup_of(None, policy=FixedLength(2)), drafter=SeveralDrafters(models))
    result = result_of(setup)
    assert result.violations == []
    assert result.verdict == "identical"
    assert enumerated(result) < 1e-6


def test_a_drafter_that_is_watched_learns_from_rejected_drafts():
    class Listening(SuffixDrafter):
        heard: ClassVar[list[Sequence[int]]] = []

        def update(self, outcome: StepOutcome) -> None:
            self.heard.append(tuple(outcome.tokens))
            super().update(outcome)

    seen = observe(greedily(replace(setup_of("static"), drafter=Listening())))
    steps = [each.record for each in seen if isinstance(each.record, Step)]
    assert [(), *(step.drafted for step in steps)] == Listening.heard


# --- Planted biases: what decides -----------------------------------------------------------------


def ended_early(draft: Draft, p: verdicts.TargetRows, random: Any) -> verdicts.Walked:
    """Traversal whose first failure ends a branch: a node whose drafts all failed is not looked at again."""
    path: list[int] = []
    node, chance = -1, 1.0
    while candidates := draft.draws(node):
        token, q = candidates[0].tokens[0], candidates[0].q
        chance = min(1.0, chance * float(verdicts._ratio(p(node), q, token)))
        if not verdicts._passes(torch.tensor(chance), random):
            rest = verdicts.remainder(p(node), q, token)
            return verdicts.Walked(path, random.draw(rest), rest)
        child = draft.child(node, token)
        assert child is not None
        node = child
        path.append(node)
    return verdicts.Walked(path, random.draw(p(node)), p(node))


def once_each(p: torch.Tensor, candidates: Sequence[Draws], random: Any) -> verdicts._Ruling:
    """SpecInfer's rule, which takes equal drafts for one."""
    return verdicts.specinfer(p, list({each.tokens[0]: each for each in candidates}.values()), random)


BIASES: dict[str, tuple[str | None, VerificationName, str, Any]] = {
    "p is not lowered after a rejection": ("static", "recursive", "remainder", lambda p, *_: p),
    "the residual is not renormalized": (
        "static",
        "recursive",
        "remainder",
        lambda p, q, token=-1: verdicts._less(p, q, token),
    ),
    "q keeps a token that was drawn": ("static", "recursive", "_without", lambda q, token: q),
    "q keeps it under traversal": ("static", "traversal", "_without", lambda q, token: q),
    "p and q's distance for the residual": (
        "static",
        "traversal",
        "_less",
        lambda p, q, token: (p - q).abs(),
    ),
    "an early end in traversal": ("static", "traversal", "walk", ended_early),
    "an early end in a block": (None, "block", "walk", ended_early),
    "equal drafts taken for one": ("flat", "specinfer", "walk", verdicts._walked(once_each)),
}


@pytest.mark.parametrize("bias", BIASES)
def test_a_planted_bias_is_found(bias, monkeypatch):
    tree, method, name, broken = BIASES[bias]
    if name == "walk":
        monkeypatch.setitem(verdicts.METHODS, method, replace(verdicts.METHODS[method], walk=broken))
    else:
        monkeypatch.setattr(verdicts, name, broken)
    result = result_of(setup_of(tree, method))
    assert result.verdict == "wrong"
    assert enumerated(result) > 1e-3
    assert result.verdict_against("plain") == "identical", "greedy decoding does not show it"


# --- Planted biases: what drafts ------------------------------------------------------------------


class Tampering(ModelDrafter):
    """Hands on another tree than was drawn."""

    def __init__(self, change: Callable[[Draft], Draft]) -> None:
        super().__init__(ScriptedScorer(DRAFT, VOCAB), "tampering")
        self._change = change

    def propose(self, *arguments: Any) -> Decoding[Draft]:
        draft = yield from super().propose(*arguments)
        return self._change(draft) if draft.tokens else draft


def without_last(draft: Draft) -> Draft:
    """The last node goes if q had little for it."""
    assert draft.candidates is not None
    parent = draft.parents[-1] if draft.parents else -1
    last = draft.candidates[parent][-1]
    if last.q is None or float(last.q[draft.tokens[-1]]) > 0.3:
        return draft
    candidates = {**draft.candidates, parent: [Draws(last.tokens[:-1], last.q)]}
    nodes = len(draft.tokens) - 1
    return replace(
        draft, tokens=draft.tokens[:nodes], parents=(draft.parents or ())[:nodes], candidates=candidates
    )


def other_q(draft: Draft) -> Draft:
    flat = {
        node: [Draws(tokens, q.sqrt() / q.sqrt().sum()) for tokens, q in draws if q is not None]
        for node, draws in (draft.candidates or {}).items()
    }
    return replace(draft, candidates=flat)


@pytest.mark.parametrize("change", [without_last, other_q])
def test_a_tree_that_is_not_what_was_drawn_is_found(change):
    result = result_of(replace(setup_of("static", "recursive"), drafter=Tampering(change)))
    assert "chance" in violated(result)


def test_multiplicity_that_is_lost_in_the_tree_is_found(monkeypatch):
    whole = GrowingTree.add

    def add(self: GrowingTree, parent: int, draws: Sequence[Draws], *rest: Any) -> None:
        whole(self, parent, list({each.tokens[0]: each for each in draws}.values()), *rest)

    monkeypatch.setattr(GrowingTree, "add", add)
    result = result_of(setup_of("flat", "specinfer"))
    assert "chance" in violated(result)
    assert enumerated(result) > 1e-3


def test_a_draw_shared_by_several_parents_is_found(monkeypatch):
    """Every node of a depth gets the tokens that were drawn for the first one."""
    whole = GrowingTree.add

    def add(self: GrowingTree, parent: int, draws: Sequence[Draws], *rest: Any) -> None:
        grandparent = self.parents[parent] if parent >= 0 else -2
        first = next((n for n, each in enumerate(self.parents) if each == grandparent), parent)
        if 0 <= first < parent and first in self.candidates:
            taken = zip(self.candidates[first], draws, strict=False)
            draws = [Draws(other.tokens[: len(each.tokens)], each.q) for other, each in taken]
        whole(self, parent, draws, *rest)

    monkeypatch.setattr(GrowingTree, "add", add)
    assert "chance" in violated(result_of(setup_of("static", "traversal")))


def test_pruning_drawn_nodes_by_their_own_q_is_found():
    class Pruning(StaticTreePolicy):
        def prune(self, draft: Draft) -> Sequence[int] | None:
            leaves = set(range(len(draft.tokens))) - set(draft.parents or ())
            least = min(leaves, key=lambda node: draft.chance(node))
            return [node for node in range(len(draft.tokens)) if node != least]

    policy = Pruning(StaticTree(5, 3, verification="recursive"))
    assert "chance" in violated(result_of(setup_of(None, policy=policy)))


# --- Records ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        (lambda step: {"parents": (-1,) * len(step.drafted)}, "draft"),
        (
            lambda step: {"drafted": (*step.drafted[:-1], step.drafted[-1] ^ 1) if step.drafted else ()},
            "pass",
        ),
        (lambda step: {"tokens": (*step.tokens[:-1], step.tokens[-1] ^ 1)}, "chance"),
    ],
)
def test_a_record_that_does_not_say_what_was_is_found(change, invariant):
    decoder = with_records(lambda step: replace(step, **change(step)))
    assert invariant in violated(result_of(setup_of("static"), decoder))
