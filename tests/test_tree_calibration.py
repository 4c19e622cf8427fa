"""specbench calibrate --tree: what is counted, which tree is chosen, and where it is taken up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from msgspec import structs
from scripted import Ticking
from scripted_engine import describe, make_sweep
from tiny import save_tiny, tiny_language_model, tiny_llama, tiny_tokenizer

from specbench.base.errors import UsageError
from specbench.bench.manifest import changes
from specbench.decoding.records import Step
from specbench.decoding.request import DraftPlan
from specbench.decoding.sampling import Greedy, Multinomial, Sampling
from specbench.decoding.theory import PassCosts, predicted_speedup
from specbench.drafters.model import ModelDrafter
from specbench.generate import GenerationRun
from specbench.models.cache import cache_folder
from specbench.models.calibrations import TREES, TreeChoice, TreeKey, calibrated_tree, tree_key
from specbench.models.drafters import wrap_drafter
from specbench.models.target import Target, wrap_target
from specbench.policies.trees import StaticTree
from specbench.specs.policies import parse_policy
from specbench.tune.ranks import _comb, _percentages, best_tree, calibrate_tree

PROMPTS = [[3, 4, 5], [60, 7, 9, 11], [101, 5]]
KEY = TreeKey("f" * 16, "float32", "cpu", "small (int8)", "e" * 16, 0.7, "traversal")
CHOICE = TreeChoice("a model", "small (int8)", 0.7, "traversal", (60, 20, 5), 400, 9, 4, 1.25)


pytestmark = pytest.mark.usefixtures("own_cache")


def pair(seed: int = 1) -> tuple[Target, ModelDrafter]:
    target = wrap_target(tiny_llama(0), tiny_tokenizer(), name="tiny")
    return target, wrap_drafter(tiny_language_model(seed), target)


# -- what is counted -------------------------------------------------------------------------------


def test_the_probe_has_candidates_behind_the_first_of_every_level():
    parents = _comb().parents
    assert len(parents) == 24
    assert [parents.count(node) for node in (-1, 0, 6, 12)] == [6] * 4


@pytest.mark.parametrize(("sampling", "method"), [(Greedy(), ""), (Multinomial(0.9), "recursive")])
def test_counts_are_those_of_the_decoder(sampling, method):
    target, drafter = pair()
    key = replace(KEY, verification=method)
    found = calibrate_tree(target, drafter, PROMPTS, key, sampling=sampling, tokens=12, clock=Ticking())
    steps: list[Step] = []
    for seed, prompt in enumerate(PROMPTS):
        policy = DraftPlan(_comb(), verification=method or None)
        decoding = GenerationRun(
            prompt, target, drafter, policy=policy, sampling=sampling, max_new_tokens=12, seed=seed
        )
        steps += [record for record in decoding if isinstance(record, Step)]
    assert found.complete
    assert found.choice.tested == sum(each.tested for each in steps) > 0
    assert sum(kept for _, kept in found.counts.values()) == sum(each.accepted for each in steps)
    assert found.counts[1, 0] == [
        sum(each.tested > 0 for each in steps),
        sum(each.ranks[:1] == (0,) for each in steps),
    ]
    for rank, share in enumerate(found.shares):
        kept = sum(each.ranks.count(rank) for each in steps)
        assert share == pytest.approx(kept / found.choice.tested)
    choice = found.choice
    assert (choice.target, choice.drafter, choice.verification) == ("tiny", drafter.name, method)
    assert (choice.nodes, choice.depth, choice.speedup) == (
        found.tree.nodes, found.tree.depth, found.tree.speedup
    )  # fmt: skip


def test_a_twin_s_first_candidate_is_always_kept():
    target, drafter = pair(seed=0)
    found = calibrate_tree(target, drafter, PROMPTS, KEY, sampling=Greedy(), tokens=12, clock=Ticking())
    assert found.choice.ranks == (100,)
    assert found.tree == found.chain, "nothing stands beside what is always right"


def test_the_time_ends_it_with_what_was_counted():
    target, drafter = pair()
    found = calibrate_tree(
        target, drafter, PROMPTS, KEY, sampling=Greedy(), tokens=12, seconds=1.5, clock=Ticking()
    )
    assert not found.complete
    assert found.counts[1, 0][0] == 1
    with pytest.raises(UsageError, match="Nothing was drafted"):
        calibrate_tree(target, drafter, [], KEY, sampling=Greedy(), clock=Ticking())


# -- which tree is chosen ----------------------------------------------------------------------------


def test_percentages_are_never_more_than_a_hundred():
    assert _percentages([0.684, 0.126, 0.049, 0.001, 0.0]) == (68, 13, 5)
    assert _percentages([0.955, 0.025, 0.015, 0.005]) == (96, 2, 2)
    assert _percentages([0.0]) == (0,)
    assert sum(_percentages([0.976, 0.008, 0.008, 0.008])) == 100


def test_no_tree_is_predicted_to_be_faster():
    ranks = (50, 25, 15)
    costs = PassCosts(
        {1: 1.0, 17: 1.2, 33: 2.0}, {"drafter": 0.2}, rows_s={"drafter": {1: 0.2, 2: 0.3, 8: 0.6}}
    )
    found = best_tree(ranks, costs)
    everything = {}
    for nodes in range(1, 26):
        for depth in range(1, 6):
            parents = StaticTree(nodes, depth, ranks).parents
            depths: list[int] = []
            for parent in parents:
                depths.append(1 + (depths[parent] if parent >= 0 else 0))
            behind = {node for node in parents if node >= 0}
            rows = [sum(depths[node] == level for node in behind) for level in range(1, max(depths))]
            passes = sum(costs.c("drafter", n) for n in [0, *rows])
            chances: list[float] = []
            for node, parent in enumerate(parents):
                rank = parents[:node].count(parent)
                chances.append(ranks[rank] / 100 * (chances[parent] if parent >= 0 else 1.0))
            speed = (1 + sum(chances)) / (passes + costs.v(len(parents) + 1))
            everything[nodes, depth] = speed
    assert found.speedup == pytest.approx(max(everything.values()))
    assert everything[found.nodes, found.depth] == pytest.approx(found.speedup)
    assert found.nodes > found.depth > 1, "a tree pays here, and a chain of one token does not"
    chain = best_tree(ranks[:1], costs)
    assert chain.nodes == chain.depth
    assert chain.speedup < found.speedup
    assert chain.speedup == pytest.approx(
        predicted_speedup(
            sum(0.5**k for k in range(chain.nodes + 1)), chain.nodes, 0.2, costs.v(chain.nodes + 1)
        )
    )


def test_where_a_pass_is_dear_one_token_is_drafted():
    costs = PassCosts({1: 1.0, 2: 2.0}, {"drafter": 9.0})
    assert best_tree((50, 10), costs).nodes == 1


# -- the choice is kept ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "a" * 16}, {"dtype": "int8"}, {"device": "cuda"}, {"drafter": "self:int8"}, {"weights": ""},
        {"temperature": 1.0}, {"verification": "naive"},
    ],
)  # fmt: skip
def test_a_tree_holds_for_all_of_what_it_was_measured_with(other):
    TREES.write(KEY.name, CHOICE)
    assert TREES.read(KEY.name) == CHOICE
    assert TREES.read(replace(KEY, **other).name) is None


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2}, {"ranks": "60-20"}, {"ranks": []}, {"ranks": [60.0]}, {"ranks": [60, 50]}, {"nodes": 0},
        {"nodes": 65}, {"depth": 0}, {"speedup": "fast"}, {"target": None},
    ],
)  # fmt: skip
def test_a_damaged_tree_is_refused(change):
    TREES.write(KEY.name, CHOICE)
    (file,) = (cache_folder() / "trees").iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UsageError, match=r"The stored tree is damaged, or of another version"):
        TREES.read(KEY.name)


# -- where it is taken up ----------------------------------------------------------------------------


def test_a_rule_takes_what_it_leaves_open():
    target, drafter = pair()
    sampling = Multinomial(0.7)

    def fitted(rule: str, at: Sampling = sampling) -> tuple[str, str | None]:
        found, note = calibrated_tree(parse_policy(rule), target, drafter, "e", at)
        return str(found), note

    assert fitted("static-tree") == ("static-tree", None), "nothing is stored at all"
    key = tree_key(target, drafter, "e", sampling, parse_policy("static-tree"))
    assert (key.verification, key.drafter) == ("traversal", drafter.name)
    TREES.write(key.name, replace(CHOICE, drafter=drafter.name))
    rule, note = fitted("static-tree")
    assert rule == "static-tree:nodes=9,depth=4,ranks=60-20-5"
    assert (
        note == f"The tree is the one calibrated for {drafter.name} at temperature 0.7 by traversal: {rule}."
    )
    assert fitted("static-tree:verification=traversal")[0] == f"{rule},verification=traversal"
    assert fitted("static-tree:nodes=5")[0] == "static-tree:nodes=5,ranks=60-20-5", (
        "its depth is of another tree"
    )
    for said in ("static-tree:ranks=50-10", "dynamic-tree", "auto-tree", "fixed"):
        assert fitted(said) == (said, None)
    for other, at in (("static-tree:verification=naive", sampling), ("static-tree", Greedy())):
        rule, note = fitted(other, at)
        assert rule == other
        assert note is not None
        assert note.startswith(
            f"A tree is calibrated for {drafter.name} at temperature 0.7 by traversal, and none for {drafter.name} at"
        )
        assert "specbench calibrate --tree" in note
    stranger = wrap_target(tiny_llama(3), tiny_tokenizer())
    note = calibrated_tree(parse_policy("static-tree"), stranger, drafter, "e", sampling)[1]
    assert f"{drafter.name} at temperature 0.7 by traversal with a model, and none for" in str(note)
    for file in (cache_folder() / "trees").iterdir():
        file.write_text("{")
    assert fitted("static-tree", Greedy()) == ("static-tree", None), (
        "what is damaged and another one's is no matter"
    )
    with pytest.raises(UsageError, match="damaged"):
        fitted("static-tree")


def test_a_sweep_does_not_go_on_with_another_tree():
    """Its configurations are named after the tree; the options are the same."""
    old, new = (
        describe(make_sweep(policies=("static-tree",))),
        describe(make_sweep(policies=("static-tree",))),
    )
    assert changes(old, new) == []
    configs = [structs.replace(each, id=f"{each.id}:ranks=60") for each in new.configs]
    new = structs.replace(new, configs=configs)
    (found,) = changes(old, new)
    assert found.startswith("configurations: ")


# -- the command line --------------------------------------------------------------------------------


def test_from_the_command_line(tmp_path, cli):
    folders = [save_tiny(tmp_path / name, seed) for seed, name in enumerate(("target", "small"))]
    models = ["--target", folders[0], "--drafter", folders[1], "--dtype", "float32"]
    asked = ["calibrate", *models, "--tree", "--limit", 2, "--tokens", 6, "--quiet"]
    found = cli(*asked, "--json").json()
    choice, counts = found["choice"], found["counts"]
    assert choice["drafter"] == "small (int8)"
    assert found["complete"]
    assert sum(each["tested"] for each in counts if each["rank"] == 0) == choice["tested"] > 0
    tree = choice["tree"]
    assert "ranks=" in tree
    generate = ["generate", *models, "-n", 8, "the thing", "--json", "--tree"]
    said = cli(*generate, "static")
    assert said.json()["options"]["draft_policy"] == tree
    note = f"The tree is the one calibrated for small (int8) at temperature 0: {tree}."
    assert note in " ".join(said.err.split())
    given = cli(*generate, "static:ranks=50-20").json()
    assert given["options"]["draft_policy"] == "static-tree:ranks=50-20"
    assert "calibrated" not in cli(*generate, "static", "--drafter", "none").err
    sweep = ["sweep", *models, "--tree", "static", "--temperature", 0, "--temperature", 1, "--limit", 1]
    said = cli(*sweep, "-n", 4, "-r", 1, "--out", tmp_path / "run", "--quiet")
    assert said.code == 0
    configs = [each["id"] for each in json.loads((tmp_path / "run" / "run.json").read_text())["configs"]]
    assert configs == ["plain", f"small (int8)@{tree}", "plain,t=1", "small (int8)@static-tree,t=1"]
    assert "and none for small (int8) at temperature 1 by traversal" in " ".join(said.err.split())
    out = cli(*asked, "--temperature", 1, "--verification", "naive").out
    assert "and small (int8) at temperature 1 by naive: --tree static" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "self:int8"], "--drafter is given without --tree"),
        (["--temperature", "1"], "--temperature is given without --tree"),
        (["--tree", "--vocab", "3"], "--tree does not go with --vocab"),
        (["--tree", "--drafter", "lookup"], "The drafter lookup drafts only chains"),
        (["--tree", "--drafter", "suffix+self:int8"], "The drafter suffix+self:int8 drafts only chains"),
        (["--tree", "--minutes", "0"], "--minutes is 0"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(arguments, message, cli):
    said = cli("calibrate", *arguments)
    assert said.code == 2
    assert message in " ".join(said.err.split())


def test_a_way_to_verify_that_takes_no_trees(tmp_path, cli):
    folder = save_tiny(tmp_path / "target", 0)
    asked = ["calibrate", "--tree", "--target", folder, "--drafter", "self:int8", "--temperature", 1]
    said = cli(*asked, "--limit", 2, "--tokens", 3, "--verification", "block")
    assert said.code == 2
    assert "block verifies chains only, and the draft is a tree" in " ".join(said.err.split())
