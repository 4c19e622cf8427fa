"""The command line in this process, on tiny models: what it prints, what it refuses, and with which exit code."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import Cli, Result
from tiny import save_tiny

import specbench.decoding.loop
import specbench.decoding.request
import specbench.generate
import specbench.models.checkpoints
import specbench.models.drafters
import specbench.models.prepare
import specbench.models.target
from specbench.base.errors import RunError
from specbench.base.machine import processor_name
from specbench.base.textsafe import terminal_safe
from specbench.cli import run
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify import Verification, verification_of
from specbench.specs.drafters import DRAFTERS
from specbench.specs.policies import VerificationName


@pytest.fixture
def tiny(cli, folder) -> Cli:
    """`generate` with the tiny target."""

    def call(*arguments: object) -> Result:
        return cli("generate", "--target", folder, "--dtype", "float32", *arguments)

    return call


def interrupt_after(records: int, error: BaseException) -> Callable[..., Iterator[Any]]:
    """A decoding loop that breaks off."""
    whole = specbench.decoding.loop.decode_steps

    def broken(*arguments: Any, **options: Any) -> Iterator[Any]:
        for number, record in enumerate(whole(*arguments, **options)):
            if number == records:
                raise error
            yield record

    return broken


# --- What it prints -------------------------------------------------------------------------------


@pytest.mark.smoke
def test_text_goes_to_stdout_and_the_summary_to_stderr(tiny):
    words = ("the thing", "-n", 20, "--drafter", "self:layers=1", "--gamma", 5)
    result, figures = tiny(*words), tiny(*words, "--json").json()
    assert result.code == 0
    assert result.out == figures["text"] + ("" if figures["text"].endswith("\n") else "\n")
    assert tiny(*words, "--json").err == ""
    first, *others = result.err.splitlines()
    assert re.match(r"[0-9.]+ tokens/s, .* plain decoding", first)
    assert len(others) <= 4
    assert f"{figures['accepted']} of {figures['drafted']} draft tokens accepted" in tiny(*words, "-v").err


@pytest.mark.smoke
def test_json_is_one_object_with_every_figure(tiny):
    figures = tiny("the thing", "-n", 24, "--drafter", "self:layers=1", "--json", "--seed", 3, "-t", 1).json()
    expected: dict[type, str] = {
        str: "text finish_reason target drafter dtype",
        int: "prompt_tokens new_tokens steps drafted accepted nodes seed",
        float: "acceptance_rate tokens_per_step tokens_per_second",
        list: "token_ids accepted_lengths gammas",
        dict: "time",
    }
    for kind, names in expected.items():
        assert {name: type(figures[name]) for name in names.split()} == dict.fromkeys(names.split(), kind)
    times = figures["time"]
    parts = [times[f"{part}_s"] for part in ("draft", "verify", "accept", "rollback", "other")]
    assert times["decode_s"] == pytest.approx(sum(parts), rel=1e-9)
    assert times["ttft_s"] > 0
    assert figures["new_tokens"] == len(figures["token_ids"])
    assert figures["steps"] == len(figures["gammas"]) == len(figures["accepted_lengths"])
    assert figures["drafted"] == sum(figures["gammas"])
    assert figures["accepted"] == sum(figures["accepted_lengths"])
    assert figures["tokens_per_second"] == pytest.approx((figures["new_tokens"] - 1) / times["decode_s"])
    assert figures["seed"] == 3
    assert figures["options"]["temperature"] == 1
    assert figures["target"] == "tiny"
    assert "plain" not in figures


@pytest.mark.parametrize("drafter", ["self:layers=1", "none"])
def test_compare_adds_the_plain_run(tiny, drafter):
    figures = tiny("the thing and the thing", "-n", 10, "--drafter", drafter, "--compare", "--json").json()
    plain = figures["plain"]
    assert plain["drafter"] == "none"
    assert plain["drafted"] == 0
    assert plain["token_ids"] == figures["token_ids"]
    assert figures["identical"] is True
    assert figures["transformers_tokens_per_second"] > 0
    assert {*plain} <= {*figures}
    pairs = figures["repeats"]
    assert len(pairs) >= 3
    assert [pair["first"] for pair in pairs[:3]] == ["speculative", "plain", "speculative"]
    assert pairs[0]["plain"]["tokens_per_second"] == plain["tokens_per_second"]
    ratios = [pair["speculative"]["tokens_per_second"] / pair["plain"]["tokens_per_second"] for pair in pairs]
    assert ratios == pytest.approx([pair["speedup"] for pair in pairs])
    assert figures["speedup"] == pytest.approx(statistics.geometric_mean(ratios))
    low, high = figures["speedup_interval"] or (0.0, math.inf)
    assert low <= figures["speedup"] <= high


@pytest.mark.parametrize("drafter", ["ngram:keep", "ngram:keep,order=3+self:layers=1"])
def test_compare_refuses_a_drafter_that_has_learnt_the_answer(tiny, drafter):
    tiny("the thing", "--drafter", drafter, "--compare").refused(
        2, "carries counts from one generation", "Leave keep out"
    )
    assert tiny("the thing", "-n", 4, "--drafter", drafter).code == 0


def test_a_difference_is_shown_with_the_gap_of_the_logits(tiny, monkeypatch):
    whole = specbench.decoding.loop.decode_steps

    def other_tokens(*arguments: Any, **options: Any) -> Iterator[Any]:
        """A loop that is wrong in its fourth token, in plain decoding only."""
        for record in whole(*arguments, **options):
            third = getattr(record, "index", None) == 2 and arguments[0].drafter.traits.name == "none"
            yield replace(record, tokens=((record.tokens[0] + 1) % 256,)) if third else record

    monkeypatch.setattr(specbench.generate, "decode_steps", other_tokens)
    arguments = ("the thing", "-n", 8, "--compare", "--drafter", "self:layers=1")
    figures = tiny(*arguments, "--json").json()
    difference = figures["difference"]
    assert figures["identical"] is False
    assert difference["position"] == 3
    assert difference["tokens"] == [figures["token_ids"][3], figures["plain"]["token_ids"][3]]
    assert len(difference["texts"]) == 2
    assert difference["gap"] == pytest.approx(difference["logits"][0] - difference["logits"][1])
    assert re.search(
        "^tokens +differ from plain decoding's at 3, .* NO numerical tie", tiny(*arguments).err, re.MULTILINE
    )
    # The unit is that of the coarsest rounding, as `check` has it, and not of the logits' own dtype.
    difference = tiny(*arguments, "--json", "--dtype", "int8").json()["difference"]
    assert difference["rounding"] == "int8"
    size = difference["gap"] / difference["gap_units"] * 128  # of the best logit, cut to a power of 2
    assert size - 0.01 <= min(difference["logits"]) + difference["gap"] <= 2 * size


SGR = re.compile("\x1b\\[[0-9;]*m")


@pytest.mark.parametrize("shown", [(), ("--debug",), ("--stop", "zebra", "--quiet")])
def test_accepted_drafts_are_colored_and_the_text_stays(tiny, monkeypatch, shown):
    arguments = ("the thing", "-n", 20, "--drafter", "self:layers=1", "--gamma", 4, *shown)
    plain = terminal_safe(tiny(*arguments).out)
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = tiny(*arguments, "--show-accepted")
    assert result.code == 0, result.err
    assert SGR.sub("", result.out) == plain
    assert "\x1b[4;32m" in result.out
    assert "\x1b[1;33m" in result.out
    assert ("colors " in SGR.sub("", result.err)) is ("--quiet" not in shown)
    monkeypatch.setenv("NO_COLOR", "1")
    bare = tiny(*arguments, "--show-accepted").out
    assert "\x1b[4m" in bare
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", bare)
    assert SGR.sub("", bare) == plain


def test_the_same_seed_gives_the_same_tokens_however_they_are_shown(tiny, tmp_path):
    arguments = ("the thing", "-n", 16, "-t", 1, "--seed", 7, "--drafter", "self:layers=1")
    first, again = (tiny(*arguments, "--json").json() for _ in range(2))
    assert first["token_ids"] == again["token_ids"]
    other = tiny("the thing", "-n", 16, "-t", 1, "--seed", 8, "--drafter", "self:layers=1", "--json").json()
    assert first["token_ids"] != other["token_ids"]
    text = first["text"] + ("" if first["text"].endswith("\n") else "\n")
    for shown in ([], ["--debug"], ["--trace-file", tmp_path / "trace"]):
        assert tiny(*arguments, *shown).out == text
        assert tiny(*arguments, *shown, "--json").json()["token_ids"] == first["token_ids"]


def test_the_prompt_comes_from_the_argument_or_stdin(tiny, monkeypatch):
    expected = tiny("the thing\n and", "-n", 8, "--json").json()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the thing\n and\n")))
    assert tiny("-", "-n", 8, "--json").json()["token_ids"] == expected["token_ids"]


def test_chat_is_the_default_where_there_is_a_template(tiny):
    default, chat, raw, system = (
        tiny("the", "-n", 2, "--json", *more).json()["prompt_tokens"]
        for more in ((), ("--chat",), ("--raw",), ("--system", "and"))
    )
    assert raw < default == chat < system


@pytest.mark.parametrize(
    ("drafter", "options", "rule"),
    [
        ("self:layers=1", ["--gamma", 3], "rejection"),
        ("self:layers=1", ["--draft-policy", "fixed:verification=block", "--gamma", 3], "block"),
        ("lookup|suffix", ["--gamma", 3], "specinfer"),
        ("self:layers=1", ["--draft-policy", "static-tree:nodes=6"], "traversal"),
        ("suffix", ["--draft-policy", "static-tree:nodes=6"], "naive"),
    ],
)
def test_the_trace_tells_the_rule_that_verifies(tiny, monkeypatch, drafter, options, rule):
    used: list[str] = []

    def noting(sampling: Sampling, name: VerificationName, **more: Any) -> Verification:
        used.append(name)
        return verification_of(sampling, name, **more)

    monkeypatch.setattr(specbench.decoding.request, "verification_of", noting)
    asked = ("the thing", "-n", 8, "--drafter", drafter, *options, "--debug")
    header = " ".join(tiny(*asked, "-t", 1).err.partition(" legend ")[0].split())
    assert used[0] == rule
    assert ("r < p/q" if rule == "rejection" else f"by {rule},") in header


@pytest.mark.parametrize(
    "refused",
    [
        ("--repetition-penalty", "nan"),
        ("--drafter", "self:layers=99"),
        ("--drafter", "/no/such/drafter"),
        (),  # the first pass fails
    ],
)
def test_a_refused_command_leaves_trace_files_as_they_were(tiny, monkeypatch, tmp_path, refused):
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    assert tiny("the thing", "-n", 12, "--trace-file", old).code == 0
    before = old.read_bytes()
    if not refused:
        monkeypatch.setattr(specbench.generate, "decode_steps", interrupt_after(0, RunError("no")))
    for file in (old, new):
        assert tiny("Hello", "-n", 4, "--trace-file", file, *refused).code in (1, 2)
    assert old.read_bytes() == before
    assert not new.exists()


def test_a_trace_takes_the_place_of_a_longer_one_even_when_interrupted(tiny, monkeypatch, tmp_path):
    file = tmp_path / "trace.jsonl"
    assert tiny("the thing", "-n", 12, "--trace-file", file).code == 0
    monkeypatch.setattr(specbench.generate, "decode_steps", interrupt_after(2, KeyboardInterrupt()))
    assert tiny("Hello", "-n", 12, "--trace-file", file).code == 130
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert [event["event"] for event in events] == ["header", "prefill", "step", "end"]
    assert events[0]["prompt_tail"] == "Hello"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_under_the_trace_costs_no_text(tiny):
    whole = tiny("the thing", "-n", 12)
    result = tiny("the thing", "-n", 12, "--trace-file", "/dev/full", "--quiet")
    assert result.out == whole.out
    assert result.code == 1
    assert result.err == (
        "specbench: The trace file '/dev/full' is not complete: No space left on device. The output above is"
        " complete.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (("--top-p", 0.5, "--min-p", 0.1), "--top-p, --min-p have no effect at temperature 0"),
        (("--drafter", "none", "--gamma", 3), "--gamma has no effect with the drafter none"),
    ],
)
def test_what_has_no_effect_is_said(tiny, arguments, note):
    result = tiny("the", "-n", 2, *arguments)
    assert result.code == 0
    assert f"note    {note}" in result.err


def test_without_a_command_there_are_three_and_an_error(cli):
    result = cli()
    assert (result.code, result.out) == (2, "")
    assert "Three commands to begin with" in result.err
    for line in re.findall("  specbench (.*)", result.err):
        assert cli(*shlex.split(line)[:1], "--help").code == 0


def test_version_for_a_bug_report(cli):
    lines = cli("--version", "--verbose").out.splitlines()
    values = dict(re.split(r": +", line, maxsplit=1) for line in lines[1:])
    assert lines[0] == cli("--version").out.strip()
    assert values["torch"] == str(torch.__version__)
    assert values["cpu"] == processor_name()
    assert values["native passes"].startswith("yes, bfloat16 in 1") or values["native passes"].startswith(
        "no, "
    )
    assert values["dtype auto"].startswith(("bfloat16", "float32"))
    assert cli("--verbose", "drafters").code == 2


def test_drafters_lists_every_word_and_option(cli):
    lines = cli("drafters").out.splitlines()
    for kind in DRAFTERS:
        start = lines.index(kind.word)
        block = lines[start : lines.index("", start)]
        for option in kind.options():
            assert any(line.startswith(f"  {option.syntax} ") for line in block), option


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("--dtype", "int9"), "'--dtype': 'int9' is not one of 'auto', 'float32'"),
        (("--device", "tpu"), "Unknown device 'tpu'"),
        (("--device", "cuda:999"), "The device cuda:999 is"),
        (("--gamma", 10**8), "Give 1 to 256"),
        (("--max-new-tokens", 0), "'--max-new-tokens'"),
        (("--temperature", "nan"), "'--temperature'"),
        (("--top-p", 0), "top-p is 0.0."),
        (("--repetition-penalty", 0), "The repetition penalty is 0.0."),
        (("--seed", 2**64), "'--seed'"),
        (("--stop", ""), "A stop string is empty."),
        (("--bogus",), "--bogus"),
        (
            ("more",),
            "unexpected extra argument(s) (more). Put a prompt of several words in quotes. See `specbench",
        ),
        (("--drafter", "/no/such/drafter"), "There is no such file or folder: '/no/such/drafter'."),
        (("--drafter", "not a model"), "'not a model' is not a model name."),
        (("--target", "/no/such/model"), "There is no such file or folder: '/no/such/model'."),
        (
            ("--trace-file", "/no/such/folder/trace"),
            "The trace file '/no/such/folder/trace' cannot be written.",
        ),
    ],
)
def test_impossible_options_are_refused_before_anything_is_loaded(
    cli, folder, monkeypatch, arguments, fragment
):
    def load_model(*_: object, **__: object) -> None:
        pytest.fail("weights were loaded")

    if "--target" not in arguments:
        for module in (specbench.models.drafters, specbench.models.prepare, specbench.models.target):
            monkeypatch.setattr(module, "load_model", load_model)
        arguments += ("--target", folder)
    result = cli("generate", "hi", *arguments)
    result.refused(2, fragment)
    assert "Value error" not in result.err
    assert "Input should" not in result.err


def test_what_advises_about_chat_templates_works(cli, tiny, tmp_path):
    """Whoever does what a message says is not sent back by the next one."""
    base = save_tiny(tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    generate = ("generate", "hi", "-n", 3, "--target", base)
    cli(*generate, "--chat").refused(2, "no chat template", "Leave --chat")
    for raw in ((), ("--raw",)):
        cli(*generate, "--system", "x", *raw).refused(2, "no chat template", "--system out")
    done = cli(*generate)
    assert done.code == 0
    assert "note    The model has no chat template: the prompt is continued as raw text.\n" in done.err
    assert "chat template" not in cli(*generate, "--raw").err
    tiny("hi", "--raw", "--system", "x").refused(2, "--raw leaves out", "Leave out --system or --raw")
    for left in (("--raw",), ("--system", "x")):
        done = tiny("hi", "-n", 3, *left)
        assert done.code == 0
        assert "chat template" not in done.err


def test_folders_and_files_that_are_no_model(cli, tmp_path):
    cli("generate", "hi", "--target", tmp_path).refused(2, "is no model: it has no config.json.")
    file = tmp_path / "notes.txt"
    file.write_text("nothing")
    cli("generate", "hi", "--target", file).refused(2, "is neither a model folder nor a .gguf file.")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nonsense", "See `specbench --help`."),
        ("--bogus", "See `specbench --help`."),
        ("generate hi --gamma", "Option '--gamma' requires an argument."),
        ("generat hi", "No such command 'generat'. Did you mean 'generate'? See `specbench --help`.\n"),
        ("generate --prompts chta", "Did you mean 'chat'?"),
        ("generate --draft-policy confidnce x", "Did you mean 'confidence'?"),
        ("sweep --engine vlm", "Did you mean 'vllm'?"),
        ("generate --gama 3 x", "No such option: --gama"),
        ("generate --target tiny hi --drafter looukp", "There is no drafter 'looukp'. Give 'lookup', or"),
        ("generate --target tiny hi --drafter ngrm:order=3", "Give 'ngram:order=3', or"),
        ("generate --target tiny hi --drafter lookup+slef:int8", "Give 'self:int8', or"),
        ("generate --target tinny hi", "There is no model 'tinny'. Give 'tiny', or"),
        ("generate --target tiny --drafter tinny hi", "There is no model 'tinny'. Give 'tiny', or"),
        ("generate --target smolm2-135m hi", "Give 'smollm2-135m', or"),
    ],
)
def test_a_mistyped_word_is_suggested_without_asking_the_hub(cli, folder, monkeypatch, given, said):
    monkeypatch.chdir(folder.parent)
    cli(*given.split()).refused(2, said)


# --- What goes wrong in the middle ----------------------------------------------------------------


@pytest.mark.parametrize("shown", ["-v", "--debug"])
def test_ctrl_c_while_decoding_keeps_the_text(tiny, monkeypatch, shown):
    whole = tiny("the thing", "-n", 40, shown).out
    monkeypatch.setattr(specbench.generate, "decode_steps", interrupt_after(9, KeyboardInterrupt()))
    result = tiny("the thing", "-n", 40, shown)
    assert result.code == 130
    assert result.err.endswith("\nspecbench: interrupted.\n")
    assert re.search(r"output  .*, interrupted\n", result.err)
    assert len(result.out) > 4
    assert whole.startswith(result.out.rstrip("\n\ufffd"))


def test_ctrl_c_while_decoding_leaves_a_partial_object(tiny, monkeypatch, tmp_path):
    whole = tiny("the thing", "-n", 40, "--json").json()
    monkeypatch.setattr(specbench.generate, "decode_steps", interrupt_after(6, KeyboardInterrupt()))
    trace = tmp_path / "trace"
    result = tiny("the thing", "-n", 40, "--json", "--compare", "--trace-file", trace, "--raw")
    # The warm-up of --compare is interrupted first: nothing has been decoded by then.
    result.refused(130, "interrupted")
    result = tiny("the thing", "-n", 40, "--json", "--trace-file", trace)
    figures = json.loads(result.out)
    assert result.code == 130
    assert figures["finish_reason"] is None
    assert figures["steps"] == 5
    assert 0 < figures["new_tokens"] < 40
    assert figures["token_ids"] == whole["token_ids"][: figures["new_tokens"]]
    assert json.loads(trace.read_text().splitlines()[-1])["finish_reason"] is None


@pytest.mark.smoke
def test_an_unforeseen_error_is_one_sentence_and_traceback_shows_more(cli, tiny, folder, monkeypatch):
    monkeypatch.setattr(specbench.generate, "decode_steps", interrupt_after(0, ZeroDivisionError("oh\nno")))
    result = tiny("hi")
    assert result.code == 1
    assert result.err.startswith("specbench: ZeroDivisionError: oh no (")
    assert len(result.err.splitlines()) == 1
    err = cli("--traceback", "generate", "--target", folder, "hi").err
    cli("generate", "hi", "--traceback").refused(2, "specbench --traceback")
    assert err.startswith("Traceback (most recent call last):")
    assert err.endswith(result.err)


@pytest.mark.parametrize(
    ("own", "variable", "expected"),
    [
        ({}, "GOMP_SPINCOUNT", "30000"),
        ({"OMP_WAIT_POLICY": "active"}, "GOMP_SPINCOUNT", None),
        ({}, "LRU_CACHE_CAPACITY", "128"),
        ({"LRU_CACHE_CAPACITY": "1024"}, "LRU_CACHE_CAPACITY", "1024"),
    ],
)
def test_libraries_are_configured_unless_the_user_has(monkeypatch, own, variable, expected):
    for name in (
        "GOMP_SPINCOUNT",
        "OMP_WAIT_POLICY",
        "LRU_CACHE_CAPACITY",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert run(["--version"]) == 0
    assert os.environ.get(variable) == expected


@pytest.mark.skipif(sys.platform == "win32", reason="a folder that is in use cannot be removed there")
@pytest.mark.parametrize("command", ["generate", "report"])
def test_a_working_folder_that_is_gone_is_said(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run([command]) == 1
    expected = (
        "specbench: The working folder cannot be read: it may have been removed. Change to another folder."
    )
    assert " ".join(capsys.readouterr().err.split()) == expected
