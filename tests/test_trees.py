"""Trees: every way to verify keeps the target's distribution, enumerated, and greedy decoding its very tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from scripted import ScriptedCache, ScriptedScorer, enumerate_outcomes, random_table, steps_of, tokens_of
from tiny import tiny_llama

from specbench.backends.torch.scorer import Scorer
from specbench.backends.torch.submodels import first_layers
from specbench.base.errors import UsageError
from specbench.decoding.distributions import Scores, largest
from specbench.decoding.drafts import Draws, GrowingTree, StepOutcome
from specbench.decoding.protocols import DraftPolicy, ForwardRequest, NoDraft, StepPlan, run_to_end
from specbench.decoding.records import Step, depth_of
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.verdicts import METHODS, Method
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter, SelfDrafter
from specbench.drafters.several import SeveralDrafters
from specbench.policies import FixedLength, build_policy
from specbench.policies.trees import DynamicTreePolicy, StaticTreePolicy, best_shape
from specbench.specs.policies import DynamicTree

VOCAB = 3
PROMPT = [1, 2, 0]
TARGET, DRAFT = random_table(3, VOCAB), random_table(9, VOCAB)

TREES: dict[str, Callable[[], DraftPolicy]] = {
    "two beside": lambda: StaticTreePolicy.shaped((-1, -1)),
    "two of two": lambda: StaticTreePolicy.shaped((-1, -1, 0, 0, 1)),
    "a branch in the middle": lambda: StaticTreePolicy.shaped((-1, 0, 0)),
    "dynamic": lambda: DynamicTreePolicy(DynamicTree(2, 8, 4)),
}


# --- Several drafters -----------------------------------------------------------------------------


@pytest.mark.smoke
def test_several_on_caches_of_their_own_decode_greedily():
    model, small = tiny_llama(), tiny_llama(seed=5, layers=1)
    target = Scorer(model)
    expected, _ = greedy(FixedLength(1), target, NoDraft(), Sampling())
    drafters = [
        ModelDrafter(Scorer(small), "small"),
        ModelDrafter(Scorer(model), "alike"),
        SelfDrafter(Scorer(first_layers(model, 1), target.cache), "self"),
        LookupDrafter(),
    ]
    found, steps = greedy(FixedLength(3), target, SeveralDrafters(drafters), Sampling())
    assert found == expected
    assert all(step.accepted == 3 for step in steps[:-1])
    assert any(len(step.drafted) > step.gamma for step in steps)
    with pytest.raises(UsageError, match="chains of one fixed length"):
        greedy(build_policy("auto"), target, SeveralDrafters(drafters), Sampling())
    for method in ("rejection", "traversal"):
        policy = build_policy(f"fixed:gamma=2,verification={method}")
        with pytest.raises(UsageError, match="drafts of several drafters"):
            greedy(policy, target, SeveralDrafters(drafters), Sampling(1.0))


# --- Greedy decoding, with caches of their own ----------------------------------------------------


def greedy(
    policy: DraftPolicy, target: Scorer, drafter: Any, sampling: Sampling
) -> tuple[list[int], list[Step]]:
    records = steps_of([3, 9, 4, 1], target, drafter, policy=policy, sampling=sampling, max_new_tokens=24)
    first, *steps = records
    return tokens_of([first, *steps]), [step for step in steps if isinstance(step, Step)]


@pytest.mark.parametrize(
    ("cache", "penalty"), [("dynamic", 1.0), ("dynamic", 1.4), ("preallocated", 1.4), ("static", 1.0)]
)
def test_greedy_outputs_are_the_targets_own(cache, penalty):
    model, small = tiny_llama(), tiny_llama(seed=5, layers=1)
    target = Scorer(model, cache)
    sampling = Sampling(repetition_penalty=penalty)
    expected, _ = greedy(FixedLength(1), target, NoDraft(), sampling)
    likely = {
        "alike": ModelDrafter(Scorer(model, cache), "alike"),
        "small": ModelDrafter(Scorer(small, cache), "small"),
        "self": SelfDrafter(Scorer(first_layers(model, 1), target.cache), "self"),
    }
    for name, drafter in likely.items():
        for shape, tree in TREES.items():
            found, steps = greedy(tree(), target, drafter, sampling)
            assert found == expected
            assert any(step.parents for step in steps)
            if name == "alike":
                assert max(step.accepted for step in steps) == max(step.gamma for step in steps)
            if name == "alike" and shape not in ("auto", "dynamic"):  # of which other branches may be deeper
                assert all(step.accepted == step.gamma for step in steps[:-1]), "its cache holds the path"


@pytest.mark.parametrize("cache", ["dynamic", "preallocated", "static"])
def test_a_tree_may_be_read_depth_by_depth(cache):
    context, tokens, parents = [3, 9, 4, 1], [5, 6, 7, 8, 2, 3], [-1, -1, 0, 1, 1, 3]
    scorer = Scorer(tiny_llama(), cache)
    whole = scorer.score(ForwardRequest(scorer, context, tokens, parents)).logits
    scorer.begin()
    rows = [scorer.score(ForwardRequest(scorer, context, (), rows=1)).logits]
    for first, end in ((0, 2), (2, 5), (5, 6)):
        rows.append(
            scorer.score(
                ForwardRequest(scorer, context, tokens[:end], parents[:end], rows=end - first)
            ).logits
        )
    torch.testing.assert_close(torch.cat(rows), whole, rtol=1e-4, atol=1e-5)


def test_a_drafter_keeps_what_it_has_read_of_the_path():
    scorer = ScriptedScorer(DRAFT, VOCAB)
    drafter = ModelDrafter(scorer, "model")
    drafter.begin(PROMPT)
    shape = StaticTreePolicy.shaped((-1, -1, 0, 1))
    draft = run_to_end(drafter.propose(PROMPT, StepPlan(3, shape, Sampling(), Randomness(0))))
    kept = [draft.tokens[1], draft.tokens[3], 0]
    # The second branch, whose leaf it has not read.
    drafter.update(StepOutcome([*PROMPT, *kept], 3, torch.empty(0), draft.tokens, (1, 3)))
    assert [token for token, _ in scorer.cache.entries] == [*PROMPT, draft.tokens[1]]


# --- Shapes ---------------------------------------------------------------------------------------


def test_the_best_shape_is_the_best_of_all():
    """Against every tree of four nodes."""
    acceptance = (0.6, 0.3, 0.05)

    def expected(parents: Sequence[int]) -> float:
        ranks: dict[int, int] = {}
        chances: list[float] = []
        for parent in parents:
            rank = ranks[parent] = ranks.get(parent, -1) + 1
            if rank >= len(acceptance):
                return 0.0
            chances.append(acceptance[rank] * (chances[parent] if parent >= 0 else 1.0))
        return sum(chances)

    def depth(parents: Sequence[int]) -> int:
        return depth_of(len(parents), parents)

    shapes = list(itertools.product(*(range(-1, node) for node in range(4))))
    for deepest in (2, 3, 4):
        best = max(expected(shape) for shape in shapes if depth(shape) <= deepest)
        found = best_shape(acceptance, 4, deepest)
        assert expected(found) == pytest.approx(best)
        assert depth(found) <= deepest


def test_what_cannot_be_a_tree_is_refused():
    target = ScriptedScorer(TARGET, VOCAB, cache=ScriptedCache())

    def start(spec: str, drafter: Any = None, sampling: Sampling | None = None, **options: Any) -> None:
        drafter = drafter or ModelDrafter(ScriptedScorer(DRAFT, VOCAB), "model")
        records = steps_of(
            PROMPT, target, drafter, policy=build_policy(spec), sampling=sampling or Sampling(1.0),
            max_new_tokens=4, **options,
        )  # fmt: skip
        next(iter(records))

    for spec, message in (
        ("static-tree:nodes=65", "is 65"),
        ("static-tree:nodes=0", "is 0"),
        ("dynamic-tree:depth=0", "'depth' of dynamic-tree is 0"),
        ("static-tree:ranks=70-40", "no list of percentages"),
        ("static-tree:verification=rejection", "verifies chains only"),
        ("dynamic-tree:verification=traversal", "by their probability"),
        ("fixed:verification=guess", "no verification method"),
    ):
        with pytest.raises(UsageError, match=message):
            start(spec)
    with pytest.raises(UsageError, match="drafts only chains"):
        start("static-tree", LookupDrafter())
    target.takes_trees = False
    with pytest.raises(UsageError, match="cannot verify draft trees"):
        start("static-tree")


def test_the_largest_of_a_row_are_those_of_a_sort():
    generator = torch.Generator().manual_seed(0)
    for length in (1, 5, 64, 700, 5003):
        rows = torch.randn(3, length, generator=generator).mul(3).round()  # with ties
        places = rows.argsort(descending=True, stable=True)
        for count in (1, 4, 9):
            assert largest(rows, count) == places[:, :count].tolist()


# --- How close to the best ------------------------------------------------------------------------


def optimal_acceptance(p: torch.Tensor, draws: Mapping[tuple[int, ...], float]) -> float:
    """The most that any rule can accept at one node (an optimal transport, by its dual; Sun et al. 2023, SpecTr).

    1 + the least of p(H) - Pr(all drafts in H) over all sets H of tokens.
    """
    sets = itertools.chain.from_iterable(itertools.combinations(range(len(p)), n) for n in range(len(p) + 1))
    return 1 + min(
        float(p[list(chosen)].sum()) - sum(w for drafts, w in draws.items() if set(drafts) <= set(chosen))
        for chosen in sets
    )


def acceptance_at_a_node(method: Method, p: torch.Tensor, q: torch.Tensor, count: int) -> tuple[float, float]:
    """The chance that one of so many candidates is kept, over all draws and tosses; and the most that can be."""
    (distribution,) = Scores.of(q[None].clone(), normalized=True)

    def run(dice: Any) -> tuple[int, ...]:
        tree = GrowingTree()
        tree.add(-1, method.drawing(distribution, count, dice), distribution)
        return (len(method.walk(tree, lambda _: p, dice).path),)

    def drawn(dice: Any) -> tuple[int, ...]:
        return tuple(token for each in method.drawing(distribution, count, dice) for token in each.tokens)

    kept = enumerate_outcomes(run)
    return kept.get((1,), 0.0), optimal_acceptance(p, enumerate_outcomes(drawn))


@pytest.mark.parametrize("name", METHODS)
def test_no_way_to_verify_keeps_more_than_can_be(name):
    method, generator = METHODS[name], torch.Generator().manual_seed(7)
    shares = []
    for _ in range(6):
        p, q = (torch.randn(4, generator=generator).mul(1.5).softmax(-1) for _ in range(2))
        kept, most = acceptance_at_a_node(method, p, q, 1 if method.chains_only else 2)
        assert kept <= most + 1e-6
        shares.append(kept / most)
    best = method.chains_only or name == "naive"
    assert min(shares) > (1 - 1e-5 if best else 0.8)


def test_specinfer_keeps_p_where_a_certain_candidate_follows_from_a_draw():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])

    def run(dice: Any) -> tuple[int, ...]:
        drawn = dice.draw(q)
        drafts = GrowingTree()
        drafts.add(-1, [Draws((drawn,), q), Draws(((drawn + 1) % 3,))])
        walked = METHODS["specinfer"].walk(drafts, lambda _: p, dice)
        return (drafts.tokens[walked.path[0]] if walked.path else walked.token,)

    found = enumerate_outcomes(run)
    assert [found[token,] for token in range(3)] == pytest.approx(p.tolist(), abs=1e-6)
