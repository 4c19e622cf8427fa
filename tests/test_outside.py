"""Drafters from files and installed packages: in every command, and what is said where one breaks a promise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_runs import Cli, Result, refusal, write_prompts
from scripted import Replay, ScriptedScorer, enumerate_outcomes, random_table, sequences, steps_of, tokens_of
from tiny import tiny_llama, tiny_tokenizer

from specbench import UsageError, load_drafter, read_recipe, sweep, wrap_target
from specbench.decoding.sampling import Sampling
from specbench.options import DecodingOptions
from specbench.policies import build_policy
from specbench.recipe import Recipe, drafter_argument
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import ModelSpec
from specbench.specs.own_code import names_in

MINE = '''
import numpy as np
import torch
from specbench import FreeDrafter, Guess
from specbench.drafters.free import CandidateDrafter

class Last(FreeDrafter):
    """The last token again."""
    def take_in(self, context, first): pass
    def guess(self, context, drafted, sampling):
        return Guess(np.int64([*context[-1:], *drafted][-1]), np.float32(0.5))

class Drawn(Last):
    def guess(self, context, drafted, sampling):
        return Guess(0, 0.5, torch.full((self.target.vocab_size,), 1.0 / self.target.vocab_size))
'''
WRONG = {
    "guess: return Guess(99999, 0.5)": "drafts the token 99999, and the target's are 0 to ",
    "guess: return Guess(-1, 0.5)": "drafts the token -1",
    "guess: return Guess(0, 0.5, torch.ones(self.target.vocab_size))": "not to 1",
    "guess: return Guess(0, 0.5, torch.tensor([1.0]))": "q is no float tensor with the shape [",
    "guess: raise SystemExit(0)": "SystemExit: 0",
    "guess: raise AssertionError": "): AssertionError.",
    "guess: context[-1] = 0": "'tuple' object does not support item assignment",
    "take_in: context.append(0)": "'tuple' object has no attribute 'append'",
    "guess: return 7": "guess returns 7, which is neither a Guess nor None",
    "guess: return Guess('x', 0.5)": "drafts the token 'x'",
    "guess: return Guess(0, 0.5, [1.0])": "q is no float tensor with the shape [",
    "begin: pass": "does not call super().begin(prompt)",
    "take_in: return 1 / 0": "ZeroDivisionError: division by zero",
    "update: return outcome.nothing": "AttributeError: 'StepOutcome' object has no attribute 'nothing'",
    "candidates: return [1]": "candidates returns [1], which is no dict",
    "candidates: return {1: 'high'}": "the chance is 'high' and not 0 to 1",
    "__init__: raise OSError('no file')": "OSError: no file",
}  # fmt: skip
"""Bodies of methods, and a part of what is said of them."""
TAKEN = {
    "guess": "context, drafted, sampling", "begin": "prompt", "take_in": "context, first",
    "update": "outcome", "candidates": "context, drafted", "__init__": "name, target",
}  # fmt: skip


LACKING = """
from specbench import FreeDrafter
from specbench.drafters.free import CandidateDrafter
class A(FreeDrafter):
    def guess(self, context, drafted, sampling): pass
class B(FreeDrafter):
    def take_in(self, context, first): pass
class C(CandidateDrafter):
    def take_in(self, context, first): pass
class D(A):
    def take_in(self, context, first): pass
    def propose(self, context, plan): pass
"""
REUSED = """
        self.q = getattr(self, "q", torch.empty(3)).copy_(torch.rand(3, generator=torch.Generator().manual_seed(
            len(context) + len(drafted))).softmax(0))
        return Guess(0, 0.5, self.q)
    def update(self, outcome):
        if hasattr(self, "q"): self.q.fill_(0.3)
        outcome.logits.zero_()
"""
"""A guess whose memory is written over, by a drafter that also writes into what it is given."""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE, encoding="utf-8")
    write_prompts(tmp_path / "p.jsonl", {"chat-a": ["the thing"], "talk-b": ["One", "Two"]})
    return tmp_path


@pytest.fixture
def run(cli, models, folder) -> Cli:
    def call(command: str, *words: object) -> Result:
        return cli(command, *words, "--target", f"{models / 'target'}:float32", "-n", 8)

    return call


DOUBLING = Path(__file__).parents[1] / "examples" / "custom_policy.py"


def test_a_policy_and_classes_of_ones_own_are_measured(run, models, tmp_path):
    asked = ("--draft-policy", f"{DOUBLING}:Doubling")
    found = run("generate", "the thing", "--drafter", "./mine.py:Last", *asked, "--json").json()
    assert found["options"]["draft_policy"] == "doubling:max=16"
    drafter, policy = names_in("mine.py")["Last"], names_in(str(DOUBLING))["Doubling"]
    results = sweep(
        f"{models / 'target'}:float32", [drafter, "lookup"], tmp_path / "run", draft_policy=[policy],
        prompts=["./p.jsonl"], repeats=1, warmup=0, decoding=DecodingOptions(max_new_tokens=8),
    )  # fmt: skip
    table = results.table().set_index("config")
    assert [row.rpartition("@")[0].rpartition("_")[2] for row in table.index] == [
        "",
        "mine.py:Last",
        "lookup",
    ]
    assert (results.generations["status"] == "ok").all()
    assert (table["identical_share"].dropna() == 1).all()
    with pytest.raises(UsageError, match="There is no file"):  # of a stored name no file runs
        build_policy(read_recipe(tmp_path / "run", results.run.configs[1].id).policy)


@pytest.mark.smoke
def test_generate_tells_the_drafter_by_its_file_and_class(run):
    plain = run("generate", "the thing", "--drafter", "none", "--json").json()
    for drafter in ("./mine.py:Last", "mine.py:Drawn", "./mine.py:Last+self:int8", "lookup|./mine.py:Last"):
        found = run("generate", "the thing", "--drafter", drafter, "--gamma", 2, "--json").json()
        assert found["token_ids"] == plain["token_ids"]
        assert found["drafter"] == drafter.replace("./", "")


def test_every_other_command_takes_it(run, cli, folder, monkeypatch):
    mine, few = ("--drafter", "./mine.py:Last"), ("--prompts", "./p.jsonl")
    grid = ("--gamma", 2, "--repeats", 1, "--draft-policy", "fixed", "--out", "run")
    assert run("check", *mine, *few).code == 0
    done = run("sweep", *mine, *few, *grid)
    assert done.code == 0, done.err
    stored = "".join(path.read_text(encoding="utf-8") for path in Path("run").glob("*.json*"))
    assert "mine.py:Last" in stored
    assert str(folder) not in stored
    assert run("sweep", *mine, *few, *grid, "--resume").code == 0
    assert cli("plot", "run", "--out", "figures").code == 0


@pytest.mark.parametrize("wrong", WRONG)
def test_a_broken_promise_is_told_with_file_and_line(wrong, run):
    method, _, body = wrong.partition(": ")
    base = "CandidateDrafter" if method == "candidates" else "Last"
    lines = ["    def take_in(self, context, first): pass"] if method == "candidates" else []
    lines += [f"    def {method}(self, {TAKEN[method]}):", f"        {body}"]
    Path("mine.py").write_text("\n".join([MINE, f"class Wrong({base}):", *lines, ""]), encoding="utf-8")
    first = MINE.count("\n") + 1 + len(lines)
    asked = ("--drafter", "./mine.py:Wrong", "--gamma", 4, "--quiet", "--json")
    said = run("generate", "the thing and the thing", *asked)
    said.refused(1, WRONG[wrong], "mine.py:Wrong")
    assert any(f"(mine.py, line {line})" in said.err for line in (first, first + 1)), said.err


def test_no_drafter_changes_the_distribution(folder):
    text = f"{MINE}\nclass Silent(Last):\n    def guess(self, {TAKEN['guess']}):{REUSED}"
    Path("mine.py").write_text(text, encoding="utf-8")
    policy = build_policy("fixed:gamma=2")
    table, of = random_table(3, 3), SimpleNamespace(vocab_size=3, scorer=SimpleNamespace(device="cpu"))

    def run(random: Replay) -> tuple[int, ...]:
        drafter = load_drafter("./mine.py:Silent", of)  # type: ignore[arg-type]
        records = steps_of(
            [0, 1], ScriptedScorer(table, 3), drafter,
            policy=policy, sampling=Sampling(1.0), random=random, max_new_tokens=4,  # type: ignore[arg-type]
        )  # fmt: skip
        return tuple(tokens_of(records))

    found = enumerate_outcomes(run, 4)
    for tokens in sequences(3, 4):
        rows = [table([0, 1, *tokens[:i]]).softmax(0) for i in range(4)]
        right = math.prod(float(row[token]) for row, token in zip(rows, tokens, strict=True))
        assert found.get(tokens, 0.0) == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "drafter", "code", "said"),
    [
        ("class A(:\n", "./mine.py:A", 1, "mine.py cannot be imported (mine.py, line 1): SyntaxError"),
        ("import specbench\n\nspecbench.nothing\n", "./mine.py:A", 1, "(mine.py, line 3): AttributeError"),
        (MINE, "./mine.py:Absent", 2, "The drafter mine.py:Absent is missing. Name a class there"),
        ("A = 3\n", "./mine.py:A", 2, "The drafter mine.py:A is 3."),
        ("raise SystemExit(0)\n", "./mine.py:A", 1, "imported (mine.py, line 1): SystemExit: 0."),
        (LACKING, "./mine.py:A", 2, "The drafter mine.py:A lacks the method take_in. Define it"),
        (LACKING, "./mine.py:B", 2, "The drafter mine.py:B lacks the method guess."),
        (LACKING, "./mine.py:C", 2, "The drafter mine.py:C lacks the method candidates."),
        (LACKING, "./mine.py:D", 2, "The drafter mine.py:D has a propose of its own"),
        (MINE, "./other.py:Last", 2, "There is no file './other.py'"),
        (MINE, "./mine.py", 2, "As a drafter, name a class in it: ./mine.py:MyDrafter"),
        (MINE, "self:int8+./mine.py:Last", 2, "self"),
        (MINE, "lookup+./mine.py:Last", 2, "is no model"),
    ],
)
def test_what_is_no_drafter_is_refused_before_the_target_is_loaded(run, text, drafter, code, said):
    Path("mine.py").write_text(text, encoding="utf-8")
    run("generate", "the thing", "--drafter", drafter, "--quiet").refused(code, said)


def test_trees_are_refused_before_the_target_is_loaded_where_the_class_drafts_chains(run):
    tree, chain = ("--draft-policy", "dynamic-tree"), ("--drafter", "./mine.py:Last")
    for command in (("generate", "the thing"), ("sweep", "--prompts", "./p.jsonl"), ("check", "--quiet")):
        run(*command, *chain, *tree).refused(
            2, "The drafter mine.py:Last drafts only chains, but dynamic-tree needs"
        )
    few = ("--drafter", "suffix", "--prompts", "./p.jsonl", "--limit", 1)
    done = run("check", *chain, *tree, "--draft-policy", "fixed", *few)
    assert "dynamic-tree is left out with mine.py:Last: it drafts trees, and only chains can be" in done.err


def test_a_changed_file_runs_again(folder):
    target = wrap_target(tiny_llama(), tiny_tokenizer())
    before = load_drafter("./mine.py:Last", target)
    Path("mine.py").write_text(MINE + "\nLast.forces = True\n", encoding="utf-8")
    after = load_drafter("./mine.py:Last", target)
    assert (before.forces, after.forces) == (False, True)  # type: ignore[attr-defined]


def test_no_stored_name_makes_a_file_run(folder):
    recipe = Recipe(ModelSpec("builtin", "smollm2-135m"), parse_drafter("grammar+./mine.py:Last"))
    stored = json.loads(json.dumps(recipe.to_json()))
    assert stored["drafter"] == "grammar+mine.py:Last"
    assert drafter_argument(recipe.drafter) == "grammar+./mine.py:Last"
    again = Recipe.from_json(stored).drafter
    assert drafter_argument(again) == "grammar+/path/to/mine.py:Last"
    target = wrap_target(tiny_llama(), tiny_tokenizer())
    assert "There is no file '/path/to/mine.py'" in refusal(load_drafter, again, target, kind=UsageError)
