"""Rows of stored runs: `generate --recipe`, `check --recipe` and `export` decode exactly as what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from head_files import eagle_settings, eagle_tensors, write_head
from stored_runs import read_lines
from tiny import SPECIAL_TOKENS, save_tiny, tiny_llama, tiny_tokenizer

from specbench.base.errors import UsageError
from specbench.decoding.records import Step
from specbench.generate import encode_prompt
from specbench.loaded import load_recipe
from specbench.recipe import Recipe
from specbench.results.store import read_recipe, read_run
from specbench.specs.drafters import SmallModel, parse_drafter
from specbench.specs.models import ModelSpec

PROMPT = "Count the apples in the basket: one, two, one, two"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder of models: a target, two small ones, one with another tokenizer, and a trained head."""
    path = tmp_path_factory.mktemp("models")
    save_tiny(path / "target", layers=3)
    save_tiny(path / "small", seed=0, layers=1)
    save_tiny(path / "other", seed=2, layers=1)
    foreign = tiny_tokenizer(special_tokens=(*SPECIAL_TOKENS, "<|more|>"))
    tiny_llama(3, 1, len(foreign)).save_pretrained(path / "foreign")
    foreign.save_pretrained(path / "foreign")
    write_head(path / "head", eagle_settings((0, 1, 2)), eagle_tensors())
    (path / "prompts.jsonl").write_text(json.dumps({"id": "one", "category": "talk", "turns": [PROMPT]}))
    return path


CASES = {
    "chain": ("./small", "--gamma", "3"),
    "tree": ("./small", "--draft-policy", "dynamic-tree:nodes=6,depth=3"),
    "cascade": ("lookup:n=4+./small", "--gamma", "4"),
    "head": ("./head", "--gamma", "3"),
    "int4": ("./small:dtype=int4", "--gamma", "3"),
    "int4 target": ("self:layers=1", "--gamma", "2", "--dtype", "int4"),
    "translated": ("./foreign", "--gamma", "3"),
    "several drafters": ("./small|./other", "--gamma", "2"),
    "sampled": ("lookup+self:int8", "--gamma", "3", "--temperature", "0.7"),
}
TOKENS = 12
EXPORTED = {"chain": "vllm", "head": "vllm", "int4": "sglang", "translated": "transformers"}


@pytest.mark.parametrize("case", CASES)
def test_a_row_is_decoded_again_as_it_was_measured(case, cli, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    drafter, *options = CASES[case]
    options += [] if "--draft-policy" in options else ["--draft-policy", "fixed"]
    options += [] if "--dtype" in options else ["--dtype", "float32"]
    run = tmp_path / "run"
    made = cli(
        "sweep", "--target", "./target", "--drafter", drafter, "--prompts", "./prompts.jsonl", "--out", run,
        "-n", TOKENS, "--repeats", 1, *options,
    )  # fmt: skip
    assert made.code == 0, made.err
    labels = {row.id: row.label for row in read_run(run).configs}
    for line in read_lines(run):
        row = f"{run}:{labels[line['config']]}"
        found = cli("generate", "--recipe", row, PROMPT, "--json", "--seed", line["seed"]).json()
        assert found["token_ids"] == line["token_ids"]
        measured = line["steps"]
        assert (found["gammas"], found["accepted_lengths"]) == (measured["drafted"], measured["accepted"])
        assert found["options"]["max_new_tokens"] == TOKENS
    # The last row is the one that drafts.
    checked = cli("check", "--recipe", row, "--prompts", "./prompts.jsonl", "--json", "--limit", 1).json()
    (configuration,) = checked["configurations"]
    assert (configuration["drafter"], checked["options"]["max_new_tokens"]) == (found["drafter"], TOKENS)
    assert configuration["draft_policy"] == found["options"]["draft_policy"]
    if case in EXPORTED:
        exported = cli("export", row, "--to", EXPORTED[case]).out
        assert f"Measured: {labels[line['config']]}: " in " ".join(exported.replace("#", "").split())


def test_python_reads_and_loads_a_row(cli, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    run = tmp_path / "run"
    asked = ("--target", "./target", "--gamma", 2, "--draft-policy", "fixed", "-n", 6, "--dtype", "float32")
    cli("sweep", *asked, "--prompts", "./prompts.jsonl", "--out", run, "--repeats", 1)
    line = read_lines(run)[-1]
    loaded = load_recipe(read_recipe(run, line["config"]).found_in(Path()))
    assert loaded.target.tokenizer is not None
    generated = loaded.start(encode_prompt(loaded.target.tokenizer, PROMPT))
    assert [record for record in generated if isinstance(record, Step)]
    assert list(generated.result().token_ids) == line["token_ids"]

    row = f"{run}:plain"
    cli("generate", "--recipe", row, "--drafter", "lookup", PROMPT).refused(2, "--drafter", "--recipe")
    cli("generate", "--recipe", f"{run}:nothing", PROMPT).refused(2, "no configuration 'nothing'")
    cli("generate", "--recipe", run, PROMPT).refused(2, "names no row")
    assert cli("generate", "--recipe", row, PROMPT, "--json", "-n", 3).json()["new_tokens"] == 3
    monkeypatch.chdir(tmp_path)
    cli("generate", "--recipe", row, PROMPT).refused(2, "target without its path", "folder that holds it")


def test_other_weights_are_named(cli, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    run = tmp_path / "run"
    asked = ("--target", "./target", "--drafter", "./small", "--gamma", 2, "--draft-policy", "fixed", "-n", 4)
    cli("sweep", *asked, "--prompts", "./prompts.jsonl", "--out", run, "--repeats", 1)
    row = f"{run}:{read_lines(run)[-1]['config']}"
    said = "small (int8) has other weights than in the run"
    assert said not in cli("generate", "--recipe", row, PROMPT).err
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "target").symlink_to(folder / "target")
    (elsewhere / "small").symlink_to(folder / "other")
    monkeypatch.chdir(elsewhere)
    assert cli("generate", "--recipe", row, PROMPT).err.count(said) == 1
    check = ("check", "--recipe", row, "--prompts", "prompts.jsonl", "--limit", 1, "--quiet")
    (elsewhere / "prompts.jsonl").symlink_to(folder / "prompts.jsonl")
    assert said in " ".join(cli(*check).out.split())
    assert said in cli(*check, "--json").json()["notes"][0]


def test_target_and_drafter_of_one_name_are_asked_for(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder / "m").mkdir(parents=True)
    drafter = SmallModel(ModelSpec("folder", str(tmp_path / "b" / "m")))
    stored = Recipe(ModelSpec("folder", str(tmp_path / "a" / "m")), drafter).to_json()
    again = Recipe.from_json(stored)
    with pytest.raises(UsageError, match=r"names target and drafter m without their paths.*Give --target"):
        again.found_in(tmp_path / "b")
    found = replace(again, target=ModelSpec("folder", "../a/m")).found_in(tmp_path / "b")
    assert (found.target.source, found.drafter) == ("../a/m", drafter)


def test_a_row_with_a_program_runs_none(tmp_path):
    recipe = Recipe(ModelSpec("builtin", "smollm2-135m"), parse_drafter("examples/recycle.py:Recycle"))
    with pytest.raises(UsageError, match="drafts with the program"):
        Recipe.from_json(recipe.to_json()).found_in(tmp_path)
