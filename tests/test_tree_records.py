"""Records of steps with trees: what a trace says of every node, and the figures that are made of them."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import ScriptedCache, ScriptedScorer, random_table, steps_of

from specbench.decoding.protocols import DraftPolicy
from specbench.decoding.records import Step
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.stops import StopRules
from specbench.drafters.model import ModelDrafter
from specbench.policies.trees import StaticTreePolicy
from specbench.specs.policies import VerificationName

VOCAB = 6
PROMPT = [1, 5, 2]
TARGET, DRAFT = random_table(1, VOCAB), random_table(2, VOCAB)


def tree_steps(
    tree: DraftPolicy, sampling: Sampling, method: VerificationName | None, **options: Any
) -> list[Step]:
    tree.verification = method
    records = steps_of(
        PROMPT,
        ScriptedScorer(TARGET, VOCAB, cache=ScriptedCache()),
        ModelDrafter(ScriptedScorer(DRAFT, VOCAB), "model"),
        policy=tree,
        sampling=sampling,
        random=Randomness(3),
        max_new_tokens=30,
        trace=True,
        **options,
    )
    return [record for record in records if isinstance(record, Step)]


@pytest.mark.parametrize(
    ("sampling", "method"),
    [
        (Sampling(), None),
        *((Sampling(0.9), name) for name in ("traversal", "recursive", "naive", "specinfer")),
    ],
)
def test_a_trace_has_p_and_q_of_the_nodes_own_branch(sampling, method):
    emitted: list[int] = []
    seen = {"accepted": 0, "rejected": 0, "untested": 0}
    shape = StaticTreePolicy.shaped((-1, -1, 0, 0, 1, 2))
    for step in tree_steps(shape, sampling, method, first_target=False):
        assert step.verdicts is not None
        parents = step.parents or ()
        for node, verdict in enumerate(step.verdicts):
            behind, parent = [], parents[node]
            while parent >= 0:
                behind.insert(0, step.drafted[parent])
                parent = parents[parent]
            context = [*PROMPT, *emitted, *behind]
            temperature = sampling.temperature or 1.0
            p = (TARGET(context) / temperature).softmax(dim=-1)[verdict.token]
            q = (DRAFT(context) / temperature).softmax(dim=-1)[verdict.token]
            assert verdict.q == pytest.approx(float(q), abs=1e-6)
            assert (verdict.p is None) == (verdict.verdict == "untested")
            assert verdict.p is None or verdict.p == pytest.approx(float(p), abs=1e-6)
            assert (verdict.verdict == "accepted") == (node in step.path[: step.accepted])
            seen[verdict.verdict] += 1
        emitted += step.tokens
    assert min(seen.values()) > 0


def test_behind_a_stop_nothing_counts():
    """Wherever the output ends within a path: the figures are those of what was emitted."""
    for end in range(VOCAB):
        for method in ("traversal", "naive"):
            shape = StaticTreePolicy.shaped((-1, -1, 0, 0, 1, 2))
            stops = StopRules((end,))
            steps = tree_steps(shape, Sampling(0.9), method, stops=stops, first_target=False)
            last = steps[-1]
            assert last.verdicts is not None
            accepted = [node for node, each in enumerate(last.verdicts) if each.verdict == "accepted"]
            assert len(last.expected_acceptance) == last.tested
            if last.closing is None:
                assert sorted(last.path[: last.accepted]) == accepted
                assert last.tested == last.accepted == len(last.tokens)
