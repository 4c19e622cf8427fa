"""Siblings: alternatives verified next to a draft. The output stays the target's own, and steps emit more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scripted import ScriptedCache, ScriptedScorer, random_table
from tiny import tiny_language_model, tiny_llama

from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import UsageError
from specbench.check.observe import DecodingSetup
from specbench.check.results import CheckResult
from specbench.check.run import Case, DecodingCheck
from specbench.decoding.drafts import Draft, StepOutcome
from specbench.decoding.logits import Logits
from specbench.decoding.loop import decode_steps
from specbench.decoding.protocols import Decoding, Drafter, DraftPolicy, ForwardRequest
from specbench.decoding.records import Step
from specbench.decoding.request import DraftPlan
from specbench.decoding.sampling import Greedy, Multinomial, Randomness, Sampling
from specbench.decoding.stops import StopRules
from specbench.decoding.tree import NO_SIBLINGS, Siblings, choose_siblings, tree_mask, tree_positions
from specbench.decoding.verify import GreedyVerification, Verdict
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter
from specbench.drafters.ngram import NGramDrafter
from specbench.options import CacheKind
from specbench.policies import FixedLength, build_policy
from specbench.policies.auto import AutoLength
from specbench.specs.drafters import NGram

VOCAB = 9
PROMPT = (1, 4, 2)


def logits_of(*chances: float) -> Logits:
    return Logits(torch.tensor([math.log(chance) if chance else -math.inf for chance in chances]))


# --- Choosing them --------------------------------------------------------------------------------


def test_the_likeliest_alternatives_come_first():
    draft = Draft(
        tokens=[0, 1],
        logits=[logits_of(0.6, 0.3, 0.1, 0.0), logits_of(0.25, 0.5, 0.2, 0.05)],
    )
    # Beside the first 0.3 and 0.1; beside the second 0.6 times 0.25, 0.2 and 0.05.
    everything = choose_siblings(draft, 10, 0.0)
    assert everything[:5] == ((0, 1), (1, 0), (1, 2), (0, 2), (1, 3))
    assert choose_siblings(draft, 10, 0.11) == ((0, 1), (1, 0), (1, 2))
    assert choose_siblings(draft, 2, 0.0) == ((0, 1), (1, 0))


def test_what_is_certain_or_unknown_has_no_alternatives():
    draft = Draft(tokens=[2, 0], logits=[Logits.certain(2), logits_of(0.7, 0.2, 0.1, 0.0)])
    assert choose_siblings(draft, 10, 0.01) == ((1, 1), (1, 2))
    assert choose_siblings(Draft(tokens=[2, 0]), 10, 0.0) == ()
    assert choose_siblings(Draft(), 10, 0.0) == ()


def test_a_sibling_stands_where_the_draft_does():
    parents = (-1, 0, 0, -1)
    assert tree_positions(5, parents, torch.device("cpu")).tolist() == [[5, 6, 7, 7, 6]]
    mask = tree_mask(2, parents, 9, torch.device("cpu"))
    assert mask.shape == (1, 1, 5, 9)
    assert mask[0, 0].int().tolist() == [
        [1, 1, 1, 0, 0, 0, 0, 0, 0],  # the context's last
        [1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 1, 0, 0, 0],  # beside the second draft, behind the first
        [1, 1, 1, 0, 0, 0, 1, 0, 0],  # beside the first
    ]


def test_the_rules_take_them_as_an_option():
    for word in ("fixed:gamma=3", "auto", "confidence", "svip", "egag", "entropy-bound", "heuristic"):
        policy = build_policy(f"{word}{',' if ':' in word else ':'}siblings=6")
        assert policy.siblings.max_count == 6
        assert policy.name == build_policy(policy.name).name
        assert policy.name.endswith("siblings=6")
        none = build_policy(f"{word}{',' if ':' in word else ':'}siblings=0")
        assert none.siblings.max_count == 0
        assert none.name == build_policy(none.name).name
    kept = build_policy("auto:siblings=2", keep=True)
    assert kept.siblings.max_count == 2
    assert kept.name == "auto:siblings=2, kept"
    draft = Draft(tokens=[0], logits=[logits_of(0.5, 0.5)])
    assert beside(kept, draft) == [(0, 1)]
    assert build_policy("auto:siblings=0").name == "auto"
    assert build_policy("fixed").siblings.max_count == build_policy("auto").siblings.max_count == 0
    assert build_policy("fixed").siblings.widen(draft) is draft
    with pytest.raises(UsageError, match="maximum number of siblings is -1"):
        build_policy("auto:siblings=-1")


def test_auto_asks_for_those_that_pay():
    steep = build_policy("auto:siblings=8", costs=_costs(slope=0.2))
    level = build_policy("auto:siblings=8", costs=_costs(slope=0.0))
    draft = Draft(tokens=[0], logits=[logits_of(0.7, 0.15, 0.1, 0.05)])
    assert beside(steep, draft) == []
    assert len(beside(level, draft)) == 3


def beside(policy: DraftPlan, draft: Draft) -> list[tuple[int, int]]:
    """The places and tokens of what is verified beside a draft."""
    tree = policy.siblings.widen(draft)
    gamma = len(draft.tokens)
    return [(p + 1, t) for p, t in zip((tree.parents or ())[gamma:], tree.tokens[gamma:], strict=True)]


def test_a_draft_is_widened_by_leaves_and_stays_as_it_is():
    draft = Draft(tokens=[0, 1], logits=[logits_of(0.6, 0.3, 0.1, 0.0), logits_of(0.25, 0.5, 0.2, 0.05)])
    tree = Siblings(3, lambda rows: 0.0 if rows == 3 else 1.0).widen(draft)
    assert (tree.tokens, tree.parents) == ([0, 1, 1, 0, 2], (-1, 0, -1, 0, 0))
    assert (tree.chain, draft.chain) == (2, 2)
    assert (draft.tokens, draft.parents) == ([0, 1], None)
    assert [tree.child(node, 1) for node in (-1, 0, 1, 2)] == [2, 1, None, None]
    assert NO_SIBLINGS.widen(draft) is draft
    assert Siblings(3, lambda _: 1.0).widen(draft) is draft


def _costs(slope: float) -> Any:
    from specbench.policies import parse_costs

    return parse_costs(
        {"drafter_pass_s": 0.1, "target_pass_s": {str(n): 1 + slope * (n - 1) for n in range(1, 20)}}
    )


# --- The loop -------------------------------------------------------------------------------------

TARGET = random_table(0, VOCAB)
BENT = random_table(1, VOCAB)


def drafting(tokens: Sequence[int]) -> torch.Tensor:
    """Near the target: right about half of the time, with the right one among the next otherwise."""
    return TARGET(tokens) + 0.8 * BENT(tokens)


def drafter(kind: str = "model") -> Any:
    model = ModelDrafter(ScriptedScorer(drafting, VOCAB, cache=ScriptedCache()), "model")
    fronts: dict[str, Any] = {"lookup": LookupDrafter(), "ngram": NGramDrafter(NGram(top_k=2))}
    return model if kind == "model" else CascadeDrafter(fronts[kind], model)


def decode(
    policy: DraftPolicy | DraftPlan,
    drafter: Any,
    *,
    new: int = 60,
    ends: Sequence[int] = (),
    **options: Any,
) -> tuple[list[int], list[Step]]:
    given: dict[str, Any] = {"sampling": Greedy(), "random": Randomness(0), **options}
    target: Any = ScriptedScorer(TARGET, VOCAB, cache=ScriptedCache())
    stops = StopRules(ends)
    records = list(
        decode_steps(PROMPT, target, drafter, policy=policy, max_new_tokens=new, stops=stops, **given)
    )
    steps = [record for record in records if isinstance(record, Step)]
    first = getattr(records[0], "token", None)
    return [*([] if first is None else [first]), *(t for step in steps for t in step.tokens)], steps


def plain(new: int = 60, **options: Any) -> list[int]:
    from specbench.drafters.plain import NoDraft

    return decode(FixedLength(1), NoDraft(), new=new, **options)[0]


@pytest.mark.smoke
@pytest.mark.parametrize("first_target", [True, False])
@pytest.mark.parametrize("kind", ["model", "lookup", "ngram"])
@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_greedy_output_is_the_targets_own(gamma, kind, first_target):
    for new in (1, 2, 3, 4, 5, 60):
        policy = build_policy(f"fixed:gamma={gamma},siblings=8")
        found, steps = decode(policy, drafter(kind), new=new, first_target=first_target)
        assert found == plain(new)
    least = 4 if kind == "model" else 1
    assert sum(step.gained for step in steps) >= least, "alternatives were right now and then"
    for step in steps:
        assert step.gained == len(step.tokens) - step.accepted - 1
        if step.gained:
            assert (step.accepted, step.tokens[step.accepted]) in step.siblings
            assert step.closing == "corrected"


@pytest.mark.parametrize("kind", ["model", "lookup"])
def test_both_caches_hold_the_context_behind_a_sibling(kind):
    made = drafter(kind)
    model = made.model if kind == "lookup" else made
    target: Any = ScriptedScorer(TARGET, VOCAB, cache=ScriptedCache())
    policy = build_policy("fixed:gamma=3,siblings=8")
    context, gained = list(PROMPT), 0
    for record in decode_steps(
        PROMPT, target, made, policy=policy, sampling=Greedy(), random=Randomness(0), max_new_tokens=60
    ):
        context += record.tokens if isinstance(record, Step) else [record.token]
        gained += isinstance(record, Step) and record.gained
        for scorer in (target, model.scorer):
            held = [token for token, _ in scorer.cache.entries]
            assert held == context[: len(held)]
        assert len(target.cache.entries) == len(context) - 1
    assert gained


def test_they_save_steps():
    _, without = decode(FixedLength(3), drafter())
    _, with_them = decode(build_policy("fixed:gamma=3,siblings=8"), drafter())
    assert len(with_them) < 0.9 * len(without)
    drafted = [step.drafted for step in with_them]
    assert all(step.verified == 1 + len(step.drafted) + len(step.siblings) for step in with_them)
    assert any(drafted), "the drafter drafts behind a sibling too"


def test_an_end_token_among_them_ends_the_output():
    whole = plain()
    for end in set(whole):
        expected = whole[: whole.index(end) + 1]
        for gamma in (1, 3):
            found, steps = decode(
                build_policy(f"fixed:gamma={gamma},siblings=8"), drafter(), ends=(end,), first_target=False
            )
            assert found == expected
            assert steps[-1].finish_reason == "eos"


def test_penalties_and_verdicts_on_chains_do_without():
    for rule, sampling in (
        ("fixed:gamma=3,siblings=8", Greedy(1.3)),
        ("fixed:gamma=3,siblings=8,verification=rejection", Multinomial(0.9)),
    ):
        _, steps = decode(build_policy(rule), drafter(), sampling=sampling)
        assert not any(step.siblings for step in steps)
        assert any(step.drafted for step in steps)


def test_sampling_gains_by_them_too():
    _, steps = decode(build_policy("fixed:gamma=3,siblings=8"), drafter(), sampling=Multinomial(0.9))
    assert any(step.siblings for step in steps)
    assert any(step.gained for step in steps)


def test_a_target_that_cannot_does_without(monkeypatch):
    monkeypatch.setattr(ScriptedScorer, "takes_trees", False)
    found, steps = decode(build_policy("fixed:gamma=3,siblings=8"), drafter())
    assert found == plain()
    assert not any(step.siblings for step in steps)


def test_the_trace_numbers_fit():
    _, steps = decode(build_policy("fixed:gamma=3,siblings=8"), drafter(), trace=True)
    gaining = next(step for step in steps if step.gained)
    assert gaining.verdicts is not None
    assert [each.verdict for each in gaining.verdicts].count("rejected") == 1
    assert gaining.closing_probability is not None
    assert 0 < gaining.closing_probability <= 1


def checked(siblings: int = 8) -> CheckResult:
    setup = DecodingSetup(
        target=ScriptedScorer(TARGET, VOCAB, cache=ScriptedCache()),  # type: ignore[arg-type]
        drafter=drafter(),
        policy=build_policy(f"fixed:gamma=3,siblings={siblings}"),
        max_new_tokens=40,
    )
    checking = DecodingCheck(setup, [Case("a", PROMPT)])
    checking.check_steps()
    return checking.result()


def test_the_check_follows_them():
    result = checked()
    assert result.violations == []
    assert result.verdict == "identical"
    assert result.bitwise[0] == result.bitwise[1] == 40
    assert result.greedy[0].tokens == 40


def test_the_check_finds_an_entry_that_was_not_moved(monkeypatch):
    monkeypatch.setattr(ScriptedScorer, "arrange", lambda *_: None)
    assert checked().verdict == "wrong"


def test_the_check_finds_an_alternative_that_was_not_chosen(monkeypatch):
    judge = GreedyVerification.judge

    def first_sibling(self: Any, draft: Draft, logits: Any, *rest: Any) -> Verdict:
        verdict = judge(self, draft, logits, *rest)
        at = verdict.path[-1] if verdict.path else -1
        leaves = [node for node in range(draft.chain, len(draft.tokens)) if (draft.parents or ())[node] == at]
        if leaves and verdict.accepted == len(verdict.path):
            verdict.path = [*verdict.path, leaves[0]]
            verdict.tokens[-1:] = [draft.tokens[leaves[0]], int(logits[leaves[0] + 1].argmax())]
        return verdict

    monkeypatch.setattr(GreedyVerification, "judge", first_sibling)
    result = checked(siblings=1)
    assert result.verdict == "wrong"
    assert "choice" in {violation.invariant for _, violation in result.violations}


# --- Real passes ----------------------------------------------------------------------------------

CONTEXT = [5, 9, 14, 3, 8, 21, 2]
FLAT = ((11, 4, 17, 6, 12, 1, 13), (-1, 0, 1, 0, -1, 1, 0))  # a chain of three, and leaves beside it
DEEP = ((11, 4, 17, 6, 12, 1, 13, 9, 2, 8), (-1, 0, 1, 0, -1, 4, 4, 6, 7, 3))  # with branches of their own
CACHES: list[CacheKind] = ["dynamic", "preallocated", "static"]


def branch(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes from the root to this one."""
    return [] if node < 0 else [*branch(parents[node], parents), node]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("tree", [FLAT, DEEP], ids=["flat", "deep"])
def test_a_pass_over_a_tree_is_the_separate_passes(cache, fold, tree):
    from specbench.backends.torch.kernels.attention import fold_attention

    model = tiny_llama()
    if fold:
        fold_attention(model)
    scorer, other = Scorer(model, cache), Scorer(model, "dynamic")
    assert scorer.takes_trees
    tokens, parents = tree
    paths = [branch(node, parents) for node in range(len(tokens))]
    expected = []
    for path in [[], *paths]:
        other.begin()
        expected.append(other.logits(CONTEXT, [tokens[node] for node in path], rows=1)[0])
    for fresh in (1, 3, len(CONTEXT)):
        scorer.begin()
        if fresh < len(CONTEXT):
            scorer.logits(CONTEXT[:-fresh])
        found = scorer.score(ForwardRequest(scorer, CONTEXT, tokens, parents)).logits
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-5)
    # Whatever branch was right, or the beginning of one: the context goes on behind it.
    for path in paths:
        for kept in range(len(path) + 1):
            scorer.rollback(len(CONTEXT) - 1)
            scorer.score(ForwardRequest(scorer, CONTEXT, tokens, parents))
            scorer.rollback(len(CONTEXT) + kept, path)
            assert scorer.cache.length == len(CONTEXT) + kept
            text = [*CONTEXT, *(tokens[node] for node in path[:kept]), 7]
            other.begin()
            torch.testing.assert_close(scorer.logits(text), other.logits(text), rtol=1e-4, atol=1e-5)
            scorer.rollback(len(CONTEXT))


def test_what_a_cache_has_not_read_of_a_path_is_not_kept():
    scorer = Scorer(tiny_llama())
    scorer.logits(CONTEXT, [11, 4], rows=1)  # a drafter that has drafted a third token
    scorer.rollback(len(CONTEXT) + 3, range(3))
    assert scorer.cache.length == len(CONTEXT) + 2
    scorer.rollback(len(CONTEXT) + 2, [0, 5])  # and verified others beside
    assert scorer.cache.length == len(CONTEXT) + 1


# --- Deeper trees ---------------------------------------------------------------------------------


class Planted(Drafter):
    """Drafts the target's own continuation, hidden in a tree of other tokens."""

    def __init__(self) -> None:
        super().__init__("planted")

    def propose(self, context: Sequence[int], room: int, policy: Any, *_: Any) -> Decoding[Draft]:
        yield from ()
        right = list(context)
        for _ in range(policy.begin(room)):
            right.append(int(TARGET(right).argmax()))
        parents, tokens, at = [], [], -1
        for token in right[len(context) :]:
            for other in ((token + 1) % VOCAB, token, (token + 2) % VOCAB):
                parents.append(at)
                tokens.append(other)
            at = len(tokens) - 2
        return Draft(tokens, parents=parents)

    def update(self, outcome: StepOutcome) -> None:
        emitted = list(outcome.context[-outcome.emitted :])
        assert [int(row.argmax()) for row in outcome.deciding()] == emitted


def test_greedy_decoding_walks_a_deeper_tree():
    target: Any = ScriptedScorer(TARGET, VOCAB, cache=ScriptedCache())
    context, steps = list(PROMPT), 0
    for record in decode_steps(
        PROMPT, target, Planted(), policy=FixedLength(3), sampling=Greedy(), random=Randomness(0), max_new_tokens=21
    ):  # fmt: skip
        context += record.tokens if isinstance(record, Step) else [record.token]
        steps += isinstance(record, Step)
        assert [token for token, _ in target.cache.entries] == context[:-1]
    assert context[len(PROMPT) :] == plain(21)
    assert steps == 5, "each keeps three tokens of the tree, and adds one"


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_the_walk_takes_each_row_in_its_own_context(penalty):
    sampling = Greedy(repetition_penalty=penalty)
    tokens, parents = [3, 4, 6, 7, 5, 2], (-1, 0, 0, -1, 2, 4)
    for seed in range(40):
        table = random_table(seed, VOCAB)
        paths = [branch(node, parents) for node in range(-1, len(tokens))]
        rows = torch.stack([table([*PROMPT, *(tokens[n] for n in path)]) for path in paths])
        context, expected, node = list(PROMPT), [], -1
        while True:
            token = sampling.choose(rows[node + 1 : node + 2], context)[0]
            expected.append(token)
            context.append(token)
            node = next((i for i in range(6) if (parents[i], tokens[i]) == (node, token)), -2)
            if node == -2:
                break
        verdict = GreedyVerification().judge(
            Draft(tokens, parents=parents), rows, PROMPT, sampling, Randomness(0)
        )
        assert verdict.tokens == expected
        before = rows[[0, *(node + 1 for node in verdict.path)]]
        outcome = StepOutcome(expected, len(expected), rows, tokens, verdict.path)
        assert torch.equal(outcome.deciding(), before)


def test_caches_that_forget_take_none():
    import transformers as hf

    config = hf.MistralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=8,
    )  # fmt: skip
    sliding = hf.MistralForCausalLM(config).eval()
    assert not Scorer(sliding).takes_trees
    assert not Scorer(sliding, "preallocated").takes_trees
    assert not Scorer(tiny_llama(), "none").takes_trees


def test_models_that_go_by_the_order_of_tokens_are_found_out():
    """ALiBi takes distances from the places of tokens in the pass: the trial shows that siblings come out wrong."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=2, initializer_range=0.5)
    assert not Scorer(hf.BloomForCausalLM(config).eval()).takes_trees


@pytest.mark.parametrize("cache", ["dynamic", "preallocated"])
@pytest.mark.parametrize("spec", ["self:layers=1", "self:int8", "lookup+self:layers=1"])
@pytest.mark.parametrize("rule", ["fixed:gamma=3,siblings=6", "auto:siblings=6", "confidence:siblings=3"])
def test_on_real_caches_the_output_is_the_targets_own(cache, spec, rule):
    from specbench.generate import GenerationRun
    from specbench.models.drafters import load_drafter
    from specbench.models.target import wrap_target

    language_model = tiny_language_model()
    target = wrap_target(language_model.model, language_model.tokenizer, cache=cache)
    drafter = load_drafter(spec, target, cache=cache)

    def output(drafter: Any, policy: DraftPlan | None) -> tuple[list[int], Sequence[Step]]:
        run = GenerationRun(
            CONTEXT, target, drafter, policy=policy, sampling=Sampling(), max_new_tokens=60, ignore_eos=True
        )
        for _ in run:
            pass
        generation = run.result()
        return list(generation.token_ids), generation.steps

    expected, _ = output(None, None)
    found, steps = output(drafter, build_policy(rule))
    assert found == expected
    if rule.startswith("fixed"):
        assert any(step.siblings for step in steps)


def test_auto_learns_costs_by_what_was_verified():
    _, steps = decode(build_policy("auto:siblings=4", costs=_costs(0.0)), drafter())
    assert any(step.siblings for step in steps)
    rule = AutoLength()
    for step in steps:
        rule.begin(10)
        rule.observe(step)
    measured = rule.costs()["target_pass_s"]
    assert {int(n) for n in measured} == {step.verified for step in steps}


def test_the_summary_counts_what_they_gave(capsys, tmp_path):
    import json

    from tiny import save_tiny

    from specbench.cli import run

    folder = str(save_tiny(tmp_path / "tiny"))
    asked = [
        "generate",
        "the thing",
        "--target",
        folder,
        "--drafter",
        "self:layers=1",
        "-n",
        "40",
        "--ignore-eos",
    ]
    asked += ["--dtype", "float32", "--gamma", "3", "--siblings", "8"]
    assert run([*asked, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    gained = figures["gained_by_siblings"]
    assert gained > 0
    assert figures["new_tokens"] == 1 + figures["accepted"] + figures["steps"] + gained
    assert run(asked) == 0
    assert f", {gained} more by siblings" in " ".join(capsys.readouterr().err.split())
    assert run([*asked, "--siblings", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gained_by_siblings"] == 0
