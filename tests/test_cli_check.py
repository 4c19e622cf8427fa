"""`specbench check` in this process, on tiny models: what it prints, what it refuses, and with which exit code."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Result
from tiny import tiny_llama, tiny_tokenizer

import specbench.check.run
from specbench.decoding import verify
from specbench.generate import encode_prompt
from specbench.kernels import native


class Checked(Result):
    def json(self, code: int = 0) -> dict[str, Any]:
        """With what is said of the configuration, if there is one only."""
        figures = super().json(code)
        found = figures.get("configurations", [])
        return {**figures, **found[0]} if len(found) == 1 else figures


Check = Callable[..., Checked]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    lines = [
        {"id": "one", "category": "a", "turns": ["the thing in the end"]},
        {"id": "two", "category": "b", "turns": ["to and to and to"], "system": "be brief"},
        {"id": "three", "category": "b", "turns": ["and on"]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def check(cli, folder, prompts) -> Check:
    """`check` with the tiny target, the tiny prompts unless outputs are checked, and ten tokens each."""

    def call(*arguments: object, target: Path | None = None, dtype: str = "float32") -> Checked:
        given = [str(argument) for argument in arguments]
        if "--outputs" not in given:
            given = ["--prompts", str(prompts), "-n", "10", *given]
        return Checked(*cli("check", "--target", f"{target or folder}:{dtype}", *given))

    return call


def rows(out: str) -> dict[str, str]:
    """The table's verdicts by what was checked."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    return {cells[0]: cells[3] for cells in lines if len(cells) == 4}


# --- Configurations -------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("drafter", ["lookup", "self:layers=1", "ngram", "none"])
def test_a_sound_configuration_passes(check, drafter):
    result = check("--drafter", drafter)
    assert result.code == 0, result.out + result.err
    assert re.match(
        rf"Lossless in this check: {drafter.replace('none', 'plain')}.* keeps the target's output \(3 prompts",
        result.out,
    )
    assert "Target: tiny (float32), cache dynamic." in result.out
    verdicts = rows(result.out)
    assert verdicts["plain"] == verdicts["transformers"] == "identical"
    assert verdicts["logits"] == verdicts["steps"] == "sound"
    assert "exact" not in verdicts


def test_json_has_everything(check):
    result = check("--json", "-t", 0.9, "--drafter", "self:layers=1")
    figures = result.json()
    assert (figures["check"], figures["verdict"], figures["complete"]) == ("decoding", "identical", True)
    assert (figures["target"], figures["drafter"], figures["dtype"]) == ("tiny", "self:layers=1", "float32")
    assert figures["options"]["temperature"] == 0.9
    assert (figures["greedy"]["prompts"], figures["greedy"]["tokens"]) == (3, 30)
    counted = {"verdict": "identical", "identical": 3, "ties": 0, "wrong": 0, "differences": []}
    assert figures["greedy"]["against_plain"] == figures["greedy"]["against_transformers"] == counted
    assert figures["greedy"]["not_compared"] is None
    assert figures["logits"]["sound"] is True
    assert figures["logits"]["rows"] == 30
    assert figures["exact"]["largest_error"] < 1e-5
    assert figures["invariants"]["violations"] == []


def test_the_answer_is_a_sentence_and_a_table(check, snapshot):
    result = check("-t", 0.9, "--drafter", "self:layers=1")
    snapshot(re.sub(r"[\d.]+(e-\d+)?%|(?<=variation )\S+", "N", result.out))


@pytest.mark.parametrize("more", [(), ("-t", 1)], ids=["greedy", "sampled"])
def test_without_drafts_nothing_is_vouched_for(check, more):
    """One token, which the prefill gives."""
    asked = ("-n", 1, *more)
    result = check(*asked)
    assert result.code == 1
    assert result.out.startswith("Nothing was tested")
    assert "Lossless" not in result.out
    assert check(*asked, "--json").json(code=1)["verdict"] == "nothing tested"


def test_every_drafter_is_checked_with_every_rule(check, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    plain_runs = []
    original = specbench.check.run.plainly
    monkeypatch.setattr(
        specbench.check.run, "plainly", lambda request: plain_runs.append(request) or original(request)
    )
    asked = ("--drafter", "lookup", "--drafter", "self:layers=1", "--drafter", "none", "--gamma", "1..2",
             "--draft-policy", "fixed", "--draft-policy", "svip:threshold=0.4")  # fmt: skip
    result = check(*asked)
    assert result.code == 0, result.out + result.err
    assert len(plain_runs) == 3, "each prompt is decoded plainly once, whatever is held against it"
    assert "svip:threshold=0.4 is left out with lookup" in result.err
    assert "all 6 configurations keep the target's output (3 prompts, 30 tokens)" in result.out
    figures = check(*asked, "--json").json()
    assert [each["verdict"] for each in figures["configurations"]] == ["identical"] * 6
    assert [(each["drafter"], each["draft_policy"]) for each in figures["configurations"]] == [
        ("lookup", "fixed:gamma=1"), ("lookup", "fixed:gamma=2"), ("self:layers=1", "fixed:gamma=1"),
        ("self:layers=1", "fixed:gamma=2"), ("self:layers=1", "svip:threshold=0.4"), ("none", "fixed:gamma=1"),
    ]  # fmt: skip
    assert {each["greedy"]["against_transformers"]["identical"] for each in figures["configurations"]} == {3}
    drafted = [each["greedy"]["drafted"] for each in figures["configurations"]]
    assert drafted[-1] == 0 < drafted[0] < drafted[1], "each with its own γ"


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_rounded_target_is_checked_bit_by_bit(check, dtype):
    if dtype == "int4" and not native.is_available():
        pytest.skip("no native library here")
    result = check("--json", "--drafter", "self:layers=1", "--gamma", 2, dtype=dtype)
    figures = result.json()
    assert figures["options"]["cache"] == "preallocated"
    if f"outputs of this {dtype} target may differ" in result.err:
        pytest.skip(result.err)  # a processor that cannot, and says so
    assert figures["bitwise"]["required"]
    assert figures["bitwise"]["rows"] == figures["bitwise"]["equal"] > 0
    grown = check("--json", "--drafter", "self:layers=1", "--gamma", 2, "--cache", "dynamic", dtype=dtype)
    assert not grown.json()["bitwise"]["required"]
    assert grown.err.count(f"outputs of this {dtype} target may differ") == 1
    check("--draft-policy", "dynamic-tree", dtype=dtype).refused(
        2, f"The dtype {dtype} does not go with trees"
    )


def test_bit_exact_passes_are_compared_bit_by_bit(check):
    result = check("--cache", "bit-exact", "--json", "--quiet", dtype="bfloat16")
    if result.code == 2:
        pytest.skip(result.err)  # a processor that cannot, and says so
    figures = result.json()
    assert figures["options"]["cache"] == "bit-exact"
    assert figures["draft_policy"] == "auto"
    refused = check("--cache", "bit-exact", "--draft-policy", "dynamic-tree")
    refused.refused(2, "The cache bit-exact does not go with trees")
    assert figures["bitwise"] == {"required": True, "rows": 30, "equal": 30}
    assert figures["greedy"]["against_plain"]["identical"] == 3


def test_a_broken_decoder_ends_with_1_and_says_where(check, monkeypatch):
    judge = verify.judge_greedily

    def off_by_one(draft: Any, logits: Any, *arguments: Any) -> Any:
        verdict = judge(draft, logits, *arguments)
        if verdict.accepted < len(draft.tokens):
            verdict.tokens[-1] = int(logits[verdict.accepted].argsort()[-2])
        return verdict

    monkeypatch.setattr(verify, "judge_greedily", off_by_one)
    result = check("--drafter", "self:layers=1")
    assert result.code == 1
    assert rows(result.out)["plain"] == "wrong"
    assert "Violated invariants:" in result.out
    assert re.search(r"choice: one, step \d+: token \d+ of the step is", result.out)
    figures = check("--drafter", "self:layers=1", "--json").json(code=1)
    difference = figures["greedy"]["against_transformers"]["differences"][0]
    assert difference["verdict"] == "wrong"
    assert difference["gap"] > 0
    assert len(difference["texts"]) == 2


def test_an_interrupt_loses_nothing(check, monkeypatch):
    original = specbench.check.run.check_greedy
    calls = []

    def second_breaks(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments[1])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    monkeypatch.setattr(specbench.check.run, "check_greedy", second_breaks)
    result = check()
    assert result.code == 130
    assert "1 prompt, 10 tokens" in result.out
    assert "Interrupted: these are the results so far." in result.out
    calls.clear()
    figures = check("--json").json(code=130)
    assert figures["complete"] is False
    assert figures["greedy"]["prompts"] == 1


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--draft-policy", "egag", "--draft-policy", "egag"], ["egag is given twice"]),
        (["--gamma", "8..1"], ["is not a range of γ", "1..8"]),
        (["--gamma", "2", "--draft-policy", "auto"], ["auto has no option --gamma"]),
        (["--drafter", "lookup", "--drafter", "ngram", "--draft-policy", "svip"], ["reads the drafter's"]),
        (["--draft-policy", "egag"], ["reads the drafter's distribution"]),
        (["--drafter", "self:layers=9"], ["layers"]),
    ],
)
def test_what_cannot_be_is_refused(check, arguments, fragments):
    check(*arguments).refused(2, *fragments)


def test_prompts_that_do_not_fit_are_left_out(check, tmp_path):
    short = tmp_path / "short"
    tokens = len(encode_prompt(tiny_tokenizer(), "to and to and to", system="be brief"))
    tiny_llama(context=tokens).save_pretrained(short)
    tiny_tokenizer().save_pretrained(short)
    result = check(target=short)
    assert result.code == 0, result.out + result.err
    assert "1 prompt is left out: too long for the target's context" in result.err
    assert "2 prompts," in result.out
    tinier = tmp_path / "tinier"
    tiny_llama(context=8).save_pretrained(tinier)
    tiny_tokenizer().save_pretrained(tinier)
    check("--quiet", target=tinier).refused(2, "All prompts are too long")


# --- Outputs of other engines ---------------------------------------------------------------------


@pytest.fixture
def outputs(tmp_path) -> Callable[..., Path]:
    """A file of the given lines; what is no bytes becomes JSON."""

    def write(*lines: object) -> Path:
        path = tmp_path / "outputs.jsonl"
        encoded = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        path.write_bytes(b"\n".join(encoded))
        return path

    return write


@pytest.fixture(scope="module")
def own(folder, tmp_path_factory) -> list[int]:
    """The target's own greedy output behind "the thing"."""
    from specbench import autoregressive_generate, load_target
    from specbench.options import LoadOptions

    target = load_target(str(folder), LoadOptions(dtype="float32"))
    return list(autoregressive_generate("the thing", target, max_new_tokens=12).token_ids)


def test_a_foreign_token_is_named(check, outputs, own):
    changed = [*own[:5], (own[5] + 1) % 250, *own[6:]]
    path = outputs(
        {"id": "right", "prompt": "the thing", "token_ids": own},
        {"id": "changed\x1b[31m", "prompt": "the thing", "token_ids": changed},
    )
    result = check("--outputs", path)
    assert result.code == 1
    assert "\x1b" not in result.out
    assert "2 outputs with 24 tokens: 1 identical, 0 numerical ties, 1 wrong." in result.out
    figures = check("--outputs", path, "--json").json(code=1)
    assert figures["check"] == "outputs"
    assert figures["verdict"] == "wrong"
    right, wrong = figures["outputs"]
    assert (right["verdict"], right["first"]) == ("identical", None)
    assert (wrong["line"], wrong["verdict"]) == (2, "wrong")
    assert wrong["first"]["position"] == 5
    assert wrong["first"]["tokens"] == [changed[5], own[5]]
    assert wrong["first"]["gap"] == pytest.approx(wrong["first"]["logits"][1] - wrong["first"]["logits"][0])
    assert len(wrong["first"]["texts"]) == 2


def test_a_bad_line_is_refused_with_its_number(check, outputs, own):
    good = {"prompt": "the thing", "token_ids": own}
    check("--outputs", outputs(good, b"{")).refused(2, "Line 2 cannot be read: ")
    strange = outputs(good, b"", {"prompt": "the thing", "token_ids": [10_000]})
    check("--outputs", strange, "--quiet").refused(2, "Line 3 contains 10000, but the target has")


def test_an_output_behind_its_end_is_wrong(check, outputs, folder, own):
    end = tiny_tokenizer().eos_token_id
    path = outputs({"prompt": "the thing", "token_ids": [*own[:3], end, own[4]]})
    figures = check("--outputs", path, "--json").json(code=1)
    assert figures["outputs"][0]["after_end"] == 3
    assert "line 1: it continues after the end token at position 4" in check("--outputs", path).out
    ignored = check("--outputs", path, "--json", "--ignore-eos").json(code=1)
    assert ignored["outputs"][0]["after_end"] is None  # the end token itself is not the target's choice


def test_outputs_come_from_standard_input_too(check, own, monkeypatch):
    line = json.dumps({"prompt": "the thing", "token_ids": own}).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line)))
    result = check("--outputs", "-")
    assert result.code == 0, result.err
    assert "1 output with 12 tokens: 1 identical, 0 numerical ties, 0 wrong." in result.out


def test_files_that_are_none_are_refused(check, outputs, tmp_path):
    check("--outputs", tmp_path / "missing.jsonl").refused(2, "cannot be read")
    check("--outputs", tmp_path).refused(2, "cannot be read")
    check("--outputs", outputs(b"", b"  ")).refused(2, "There are no outputs")
    check("--outputs", outputs(b"{"), "--gamma", 2).refused(2, "--gamma does not go with --outputs")
