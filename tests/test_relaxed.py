"""Relaxed rules: what they take, the distribution that they should give, and that results say NOT LOSSLESS."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import pytest
import relaxed as frontier
import torch
from cli_runs import Result
from scripted import ScriptedScorer, enumerate_outcomes, random_table
from stored_runs import run_json
from tiny import save_tiny, tiny_language_model

from specbench import speculative_generate, speculative_generate_many
from specbench.base.errors import UsageError
from specbench.decoding.drafts import Draft, Draws, GrowingTree
from specbench.decoding.loop import decode_steps
from specbench.decoding.records import Prefill
from specbench.decoding.request import DraftPlan
from specbench.decoding.sampling import Greedy, Multinomial, Randomness, Sampling, TopK
from specbench.decoding.verdicts import best_taken
from specbench.decoding.verify import verification_of
from specbench.drafters.model import ModelDrafter
from specbench.models.target import prepare_target
from specbench.policies import FixedLength, build_policy
from specbench.results.advice import review
from specbench.results.results import load_results
from specbench.show.report.content import SUMMARY, make_report
from specbench.specs.verification import Relaxed

VOCAB, PROMPT = 4, [1, 2, 0]
TARGET, DRAFT = random_table(1, VOCAB), random_table(2, VOCAB)
RULES = ["top-k:1", "top-k:2", "margin:0.2", "typical:0.3", "top-k:3+margin:0.4"]
SAMPLINGS = {"greedy": Greedy(), "sampled": Multinomial(0.9), "truncated": TopK(2)}


def taken(rule: str, p: list[float]) -> list[int]:
    """Return the tokens that a rule takes, one after the other."""
    row = torch.tensor(p)
    return [token for token in range(len(p)) if best_taken(Relaxed.parse(rule), row, [token]) is not None]


# --- The rules ------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("rule", "p", "tokens"),
    [
        ("top-k:1", [0.1, 0.6, 0.3, 0.0], [1]),
        ("top-k:2", [0.1, 0.6, 0.3, 0.0], [1, 2]),
        ("top-k:2", [0.2, 0.6, 0.2, 0.0], [0, 1, 2]),  # a tie with the k-th
        ("top-k:9", [0.1, 0.6, 0.3, 0.0], [0, 1, 2]),  # never an impossible one
        ("margin:0", [0.1, 0.6, 0.3, 0.0], [1]),
        ("margin:0.31", [0.1, 0.6, 0.3, 0.0], [1, 2]),
        ("margin:1", [0.1, 0.6, 0.3, 0.0], [0, 1, 2]),
        ("top-k:2+margin:1", [0.1, 0.6, 0.3, 0.0], [1, 2]),
        ("top-k:3+margin:0.31", [0.1, 0.6, 0.3, 0.0], [1, 2]),
        # √0.09 · exp(-H) is 0.122 here, more than 0.09; with four equal ones 0.075, which is less
        ("typical:0.09", [0.1, 0.6, 0.3, 0.0], [0, 1, 2]),
        ("typical:0.09", [0.08, 0.6, 0.32, 0.0], [1, 2]),
        ("typical:0.09", [0.25, 0.25, 0.25, 0.25], [0, 1, 2, 3]),
        ("typical:0.09", [0.08] + 23 * [0.04], list(range(24))),
        ("typical:0.09", [0.5, 0.491, 0.009, 0.0], [0, 1]),
    ],
)
def test_what_a_rule_takes(rule, p, tokens):
    assert taken(rule, p) == tokens
    assert best_taken(Relaxed.parse(rule), torch.tensor(p), []) is None
    assert best_taken(Relaxed.parse(rule), torch.tensor(p), range(len(p))) == max(
        range(len(p)), key=p.__getitem__
    )


def test_rules_are_read_and_written():
    wrong_ones = (
        "",
        "top-k",
        "top-k:0",
        "top-k:x",
        "margin:-1",
        "margin:nan",
        "typical:2",
        "best:3",
        "top-k:2+top-k:3",
    )
    assert str(Relaxed.parse(" margin:0.6 + top-k:10")) == "top-k:10+margin:0.6"
    assert build_policy("fixed:gamma=3,relaxed=typical:0.09").name == "fixed:gamma=3,relaxed=typical:0.09"
    for wrong in wrong_ones:
        with pytest.raises(UsageError, match="There is no relaxed rule"):
            Relaxed.parse(wrong)
    with pytest.raises(UsageError, match="in place of a verification method"):
        build_policy("fixed:relaxed=top-k:2,verification=block")


# --- The distribution -----------------------------------------------------------------------------


def takes(rule: str, p: list[float], token: int) -> bool:
    """Whether a rule takes a token, by its definition."""
    for part in rule.split("+"):
        word, _, text = part.partition(":")
        value = float(text)
        entropy = -sum(each * math.log(each) for each in p if each > 0)
        least = {"margin": max(p) - value, "typical": min(value, math.sqrt(value) * math.exp(-entropy))}
        fits = sum(each > p[token] for each in p) < value if word == "top-k" else p[token] >= least[word]
        if not fits:
            return False
    return p[token] > 0


@cache
def defined_distribution(
    rule: str, name: str, gamma: int, new: int, before: tuple[int, ...] = (), left: int = -1
) -> Any:
    """Return the distribution of outputs by the definition, position by position.

    A drafted token is drawn from q. If the rule takes it, it is the output; otherwise the output is drawn from p, and
    the draft goes on only if that is the drafted token.

    Args:
        before: The output so far.
        left: Tokens of the draft from here on; -1 where a step begins.
    """
    if len(before) == new:
        return {before: 1.0}
    sampling, context = SAMPLINGS[name], [*PROMPT, *before]

    def row(logits: torch.Tensor, sampling: Sampling) -> list[float]:
        return [float(each) for each in sampling.probabilities(logits.unsqueeze(0), context)[0].double()]

    p, q = row(TARGET(context), sampling), row(DRAFT(context), sampling)
    judged = row(TARGET(context), Multinomial()) if sampling.greedy else p
    if left < 0:
        left = min(gamma, new - len(before) - 1) if before else 0  # the target's first token has no draft
    found: dict[tuple[int, ...], float] = {}

    def follow(token: int, weight: float, left: int) -> None:
        for output, chance in defined_distribution(rule, name, gamma, new, (*before, token), left).items():
            found[output] = found.get(output, 0.0) + weight * chance

    for token in range(VOCAB):
        if left == 0:
            follow(token, p[token], -1)
            continue
        accepted = takes(rule, judged, token)
        for other in range(VOCAB):
            if not accepted:
                follow(other, q[token] * p[other], left - 1 if other == token else -1)
        if accepted:
            follow(token, q[token], left - 1)
    return {output: chance for output, chance in found.items() if chance > 0}


def decoded_distribution(
    rule: str | None, sampling: Sampling, gamma: int, new: int
) -> dict[tuple[int, ...], float]:
    def run(random: object) -> tuple[int, ...]:
        drafter = ModelDrafter(ScriptedScorer(DRAFT, VOCAB), "model")
        policy = DraftPlan(FixedLength(gamma), relaxed=None if rule is None else Relaxed.parse(rule))
        tokens: list[int] = []
        for record in decode_steps(
            PROMPT, ScriptedScorer(TARGET, VOCAB), drafter, policy=policy, sampling=sampling, random=random,
            max_new_tokens=new, trace=True,
        ):  # fmt: skip
            tokens += [record.token] if isinstance(record, Prefill) else record.tokens
        return tuple(tokens)

    return enumerate_outcomes(run)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("rule", RULES)
def test_the_output_distribution_is_the_defined_one(rule, name):
    for gamma, new in ((3, 6), (1, 6)) if name == "greedy" else ((2, 3), (1, 4)):
        found = decoded_distribution(rule, SAMPLINGS[name], gamma, new)
        expected = defined_distribution(rule, name, gamma, new)
        assert sum(expected.values()) == pytest.approx(1)
        for output in {*found, *expected}:
            assert found.get(output, 0) == pytest.approx(expected.get(output, 0), abs=1e-6)


def test_only_the_best_token_is_greedy_decoding():
    assert decoded_distribution("top-k:1", Greedy(), 3, 12) == decoded_distribution(None, Greedy(), 3, 12)
    assert decoded_distribution("top-k:3", Greedy(), 3, 12) != decoded_distribution(None, Greedy(), 3, 12)


@pytest.mark.parametrize("sampling", [Greedy(), Multinomial()], ids=["greedy", "sampled"])
def test_of_a_trees_branches_the_likeliest_taken_one_is_followed(sampling):
    tree = GrowingTree()
    tree.add(-1, [Draws((1, 2))])
    tree.add(1, [Draws((0, 3))])
    logits = torch.tensor(
        [[0.7, 0.1, 0.2, 0.0], [1.0, 0, 0, 0], [0.3, 0.0, 0.0, 0.7], [1.0, 0, 0, 0], [0.0, 1.0, 0, 0]]
    ).log()
    verification = verification_of(sampling, relaxed=Relaxed(top_k=3))
    verdict = verification.judge(tree, logits, [0], sampling, Randomness(0))
    assert (verdict.path, verdict.tokens) == ([1, 3], [2, 3, 1])


def test_masks_and_penalties_come_before_the_rule():
    """The penalty makes the drafted token, which the context holds, too unlikely."""
    logits, draft = torch.tensor([[1.0, 2.0, 1.5], [0.0, 1.0, 0.0]]), Draft([2])
    for penalty, path in ((1.0, [0]), (9.0, [])):
        sampling = Greedy(penalty)
        verdict = verification_of(sampling, relaxed=Relaxed(top_k=2)).judge(
            draft, logits, [2], sampling, Randomness(0)
        )
        assert [*verdict.path] == path


# --- Everything that decodes ----------------------------------------------------------------------


def test_a_batch_decodes_as_one_request_does():
    target = prepare_target(tiny_language_model(), "dynamic")
    prompts = [[5, 6, 7, 5, 6], [9, 8, 9, 8], [3, 3, 4]]
    options: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True}
    for spec in (
        "fixed:gamma=3,relaxed=top-k:20",
        "dynamic-tree:relaxed=top-k:20",
        "auto:relaxed=top-k:20",
    ):
        alone = [
            speculative_generate(each, target, "self:layers=1", policy=build_policy(spec), **options)
            for each in prompts
        ]
        together = speculative_generate_many(
            prompts, target, "self:layers=1", policy=build_policy(spec), **options
        ).results()
        if spec.startswith("fixed"):
            assert [each.token_ids for each in together] == [each.token_ids for each in alone]
        assert not any(each.lossless for each in (*alone, *together))
        assert all(len(each.token_ids) == 16 for each in (*alone, *together))
    plain = speculative_generate(
        prompts[0], target, None, policy=build_policy("fixed:relaxed=top-k:20"), **options
    )
    exact = speculative_generate(prompts[0], target, "self:layers=1", **options)
    assert plain.lossless
    assert exact.lossless
    assert exact.token_ids == plain.token_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


ASKED = ("the thing", "-n", 12, "--drafter", "self:layers=1", "--gamma", 3, "--relaxed", "top-k:40")


@pytest.mark.parametrize("more", [(), ("-t", 1)], ids=["greedy", "sampled"])
def test_generate_says_so(cli, folder, tmp_path, more):
    def tiny(*arguments: object) -> Result:
        return cli("generate", "--target", folder, "--dtype", "float32", *ASKED, *more, *arguments)

    note = "NOT LOSSLESS: draft tokens were accepted by the relaxed rule top-k:40"
    assert note in " ".join(tiny("--compare").err.split())
    figures = tiny("--json").json()
    assert (figures["lossless"], figures["options"]["relaxed"]) == (False, "top-k:40")
    assert figures["accepted"] > 0
    trace = tmp_path / "trace.jsonl"
    shown = " ".join(tiny("--debug", "--trace-file", trace).err.split())
    assert "a draft is accepted by top-k:40, or if it is" in shown
    assert "not lossless: the rule is relaxed" in shown
    assert '"lossless": false' in trace.read_text().replace('":', '": ').replace(":  ", ": ").splitlines()[0]


def test_a_sweep_says_so_everywhere(cli, models, tmp_path, monkeypatch):
    def without_figures(*_: object) -> None:
        raise UsageError("They take seconds.", "Leave them out.")

    monkeypatch.setattr("specbench.show.report.content.draw_figures", without_figures)
    out = tmp_path / "run"
    said = cli(
        "sweep", "--target", models / "target", "--dtype", "float32", "--drafter", "self:layers=1", "--gamma", 3,
        "--draft-policy", "fixed", "--draft-policy", "fixed:relaxed=top-k:40", "--prompts", "code", "--limit", 2,
        "-n", 24, "--ignore-eos", "--repeats", 1, "--warmup", 0, "--out", out,
    )  # fmt: skip
    label = "self:layers=1 γ=3,relaxed=top-k:40 (NOT lossless)"
    results = load_results(out)
    stored = {each["label"]: each["lossless"] for each in run_json(out)["configs"]}
    assert stored == {"plain": True, "self:layers=1 γ=3": True, label: False}
    assert [each.id for each in review(results)].count("not-lossless") == 1
    assert {each.config for each in results.run.differences or ()} <= {"self:layers=1@3"}
    assert f"warning: {label} accepted draft tokens by a relaxed rule" in " ".join(said.err.split())
    assert {"(NOT", "lossless)"} <= set(said.out.split())  # the table breaks the label
    assert "a relaxed rule is NOT lossless" in (out / "summary.md").read_text(encoding="utf-8")
    report = make_report(results, "run", tmp_path)
    assert any(label in row for row in report.tables[SUMMARY].rows)
    assert "not-lossless" in {each.id for each in report.warnings}
    cli("export", out, "--to", "vllm", "--setting", label).refused(2, "NOT LOSSLESS", "not exported")


def test_the_frontier_is_measured_and_goes_on(folder, tmp_path, capsys):
    asked = [
        "--target",
        str(folder),
        "--drafter",
        "self:layers=1",
        "--tokens",
        "12",
        "--out",
        str(tmp_path / "rows"),
    ]
    asked += ["--rule", "top-k:1", "--rule", "top-k:500"]
    for prompts in (1, 2):
        assert frontier.main([*asked, "--prompts", str(prompts)]) == 0
        said = capsys.readouterr()
        assert said.err.count("\n") == 1  # the prompts before are taken from the file
    figures = json.loads(said.out.splitlines()[-1])
    assert figures["prompts"] == 2
    assert figures["top-k:500"]["tokens_per_step"] > figures["lossless"]["tokens_per_step"]
    assert figures["top-k:500"]["other_tokens"] > 0.2
    assert figures["top-k:500"]["log_probability"] < -0.1
    for same in ("lossless", "top-k:1"):
        assert figures[same]["other_outputs"] == 0 == figures[same]["log_probability"]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("check", "there is nothing to check"),
        ("serve", "a server answers as its target does"),
    ],
)
def test_what_promises_the_targets_outputs_refuses_them(cli, folder, command, reason):
    asked = ("--target", folder, "--drafter", "self:layers=1")
    cli(command, *asked, "--relaxed", "top-k:2").refused(2, "NOT LOSSLESS", reason)
    cli(command, *asked, "--draft-policy", "fixed:relaxed=margin:0.1").refused(2, "NOT LOSSLESS", reason)


@pytest.mark.parametrize(
    ("more", "fragment"),
    [
        (("--relaxed", "most"), "There is no relaxed rule 'most'"),
        (("--relaxed", "top-k:2", "--verification", "block"), "in place of a verification method"),
        (("--relaxed", "top-k:2", "--bit-exact"), "--bit-exact does not go with --relaxed"),
        (("-q", "--relaxed", "top-k:2", "--no-residual-adjustment"), "no residual adjustment to leave out"),
    ],
)
def test_what_makes_no_sense_is_refused(cli, folder, more, fragment):
    cli("generate", "--target", folder, "x", "--drafter", "self:layers=1", *more).refused(2, fragment)
