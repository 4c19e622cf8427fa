"""`specbench generate --prompts`: a line or a text for each prompt in their order, whatever becomes of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Cli, Result
from tiny import save_tiny

from specbench.decoding.schedule import Scheduler

TEXTS = {"a": "the thing and the thing", "b": "Hello there", "long": "word " * 600, "c": "of the king"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("models") / "tiny")
    lines = [
        {"id": name, "category": "x", "turns": [text, "and more"][: 2 if name == "a" else 1]}
        | ({"system": "Be brief."} if name == "b" else {})
        for name, text in TEXTS.items()
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def many(cli, folder) -> Cli:
    """`generate` with the tiny target and its prompts."""

    def call(*arguments: object) -> Result:
        return cli("generate", "--target", folder, "--dtype", "float32", "-n", 8, *arguments)

    return call


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.out.splitlines()]


def test_too_long_a_prompt_is_refused_before_weights_are_read(many, monkeypatch):
    monkeypatch.setattr("specbench.models.load._read_weights", lambda *_, **__: pytest.fail("read"))
    many(TEXTS["long"]).refused(2, "too many for the target's context of 512")


@pytest.mark.parametrize("batch", [1, 8])
def test_every_prompt_has_a_line_and_its_own_output(many, folder, batch):
    result = many(
        "--prompts", folder / "prompts.jsonl", "--batch", batch, "--json", "--drafter", "self:layers=1"
    )
    assert result.code == 1
    found = lines(result)
    assert [line["id"] for line in found] == list(TEXTS)
    assert "error" in found[2]
    assert "too many for the target's context of 512" in found[2]["error"]
    for line in found[:2] + found[3:]:
        system = ["--system", "Be brief."] if line["id"] == "b" else []
        alone = many(TEXTS[line["id"]], "--json", "--drafter", "self:layers=1", *system).json()
        assert line["token_ids"] == alone["token_ids"]
        assert alone.keys() - line.keys() <= {
            "peak_memory_bytes",
            "draftable_share",
            "explained",
            "warnings",
            "too_slow",
        }
        assert line["options"] == alone["options"]
    assert "1 prompt of several turns" in result.err
    assert result.err.splitlines()[-1].startswith("specbench: 1 of 4 prompts failed")


def test_texts_stand_under_their_names(many, folder):
    summed = many("--prompts", folder / "prompts.jsonl", "--batch", 2)
    assert "3 of 4 prompts done, 1 failed" in summed.err
    assert "KV cache of at most" in summed.err
    result = many("--prompts", folder / "prompts.jsonl", "--quiet")
    assert summed.out == result.out
    alone = many(TEXTS["c"], "--quiet").out
    assert result.out.split("\n\n")[3] == f"== c (x)\n{alone.rstrip()}"
    assert "== long (x)\nFAILED: The prompt has" in result.out
    assert result.err.count("\n") == 1


def test_ctrl_c_prints_what_has_come_to_its_end(many, folder, monkeypatch):
    whole, ended = Scheduler.step, []

    def interrupted(scheduler: Scheduler) -> list[Any]:
        if len(ended) == 2:
            raise KeyboardInterrupt
        events = [event for event in whole(scheduler) if event[0] != 0]  # the first one never ends
        ended.extend(event for _, event in events if getattr(event, "finish_reason", "failed") is not None)
        return events

    monkeypatch.setattr(Scheduler, "step", interrupted)
    result = many("--prompts", folder / "prompts.jsonl", "--json", "--batch", 2)
    assert result.code == 130
    assert [line["id"] for line in lines(result)] == ["b", "long"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompts", "P", "--cache", "static"), "serve one prompt at a time"),
        (("--prompts", "P", "--drafter", "ngram:keep"), "Leave keep out"),
        (("--prompts", "nothing.jsonl"), "no prompt set or file"),
    ],
)
def test_what_goes_with_one_prompt_only_is_refused(many, folder, arguments, said):
    words = [str(folder / "prompts.jsonl") if word == "P" else word for word in arguments]
    many(*words).refused(2, said)
