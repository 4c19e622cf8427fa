"""`sweep --server --prompt-cache keep`: what is asked turn by turn, what is shown, and which servers are named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from cli_runs import Cli, Result, write_prompts
from scripted_server import Manner, ScriptedServer

from specbench.results.results import load_results
from specbench.results.turns import is_broken, more_often, turn_rows

pytestmark = pytest.mark.timeout(120)  # whatever a socket is waited for

NEW, TURNS, BLOCK = 12, 3, 4


def texts_of(body: Mapping[str, Any]) -> list[str]:
    return [each["content"] for each in body["messages"]]


class Caching:
    """The usage of a server that counts words as tokens, and finds whole blocks of what it has read before.

    Args:
        loses: Returns whether the cache is lost before an answer to a body.
        block: Words in a block.
    """

    def __init__(
        self, loses: Callable[[Mapping[str, Any]], bool] = lambda body: False, block: int = BLOCK
    ) -> None:
        self.seen: list[list[str]] = []
        self.loses, self.block = loses, block

    def __call__(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        words = " ".join(texts_of(body)).split()
        known = max((common(words, each) for each in self.seen), default=0) // self.block * self.block
        self.seen.append(words)
        return {
            "usage": {
                "prompt_tokens": len(words),
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": 0 if self.loses(body) else known},
            },
            "timings": {
                "draft_n": 10,
                "draft_n_accepted": 10 - 2 * turn_of(body),
                "cache_n": 0 if self.loses(body) else known,
            },
        }


def common(a: list[str], b: list[str]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def turn_of(body: Mapping[str, Any]) -> int:
    return sum(each["role"] == "assistant" for each in body["messages"])


def server(
    owner: str = "llamacpp", loses: Callable[[Mapping[str, Any]], bool] = lambda body: False, **more: Any
) -> ScriptedServer:
    return ScriptedServer(Manner(owner=owner, facts=Caching(loses), **more))


@pytest.fixture
def sweep(cli: Cli, tmp_path, monkeypatch) -> Callable[..., Result]:
    """The command with conversations of three turns, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    turns = [" ".join(f"word{turn}{number}" for number in range(20)) for turn in range(TURNS)]
    write_prompts(
        tmp_path / "mine.jsonl", {f"a-{i}": [f"Question {i}? {text}" for text in turns] for i in range(8)}
    )

    def call(*arguments: object, **servers: ScriptedServer) -> Result:
        words = f"--prompts ./mine.jsonl -n {NEW} --repeats 2 --warmup 0 --prompt-cache keep".split()
        for name, each in servers.items():
            words += ["--server", f"{name}={each.url}"]
        return cli("sweep", *words, "--out", "run", *arguments)

    return call


def named(done: Result) -> set[str]:
    """What is said of servers, by the beginnings of the sentences."""
    said = " ".join(done.err.split())
    return {what for what in ("loses its prompt cache", "decay", "does not say how many") if what in said}


def test_conversations_continue_with_the_servers_own_answers(sweep):
    with server() as plain, server() as drafting:
        done = sweep("--repeats", 1, plain=plain, drafting=drafting)
        assert done.code == 0, done.err
        for each in (plain, drafting):
            asked = [body for body in each.asked if "messages" in body and "Question" in texts_of(body)[0]]
            assert len(asked) == 8 * TURNS
            for first, second in pairwise(asked):
                if turn_of(second):
                    assert second["messages"][: len(first["messages"])] == first["messages"]
                    assert second["messages"][-2]["role"] == "assistant"
                assert second["cache_prompt"] is True
    assert named(done) == set()


def test_a_conversation_has_one_first_line_and_each_repeat_a_new_one(sweep):
    with server() as plain, server() as drafting:
        assert sweep(plain=plain, drafting=drafting).code == 0
        lines = [
            {texts_of(body)[0].split("\n")[0] for body in each.asked if "Question 3?" in texts_of(body)[0]}
            for each in (plain, drafting)
        ]
    assert lines[0] == lines[1]  # so outputs can be compared
    assert len(lines[0]) == 2
    with server("vllm", named=True) as plain, server("vllm", named=True) as drafting:
        assert sweep("--out", "run2", plain=plain, drafting=drafting).code == 0
        salts = [
            {body["cache_salt"] for body in each.asked if texts_of(body)[0].startswith("Question 3?")}
            for each in (plain, drafting)
        ]
    assert len(salts[0]) == 2
    assert not salts[0] & salts[1]


def test_cached_tokens_are_right_to_a_block_in_every_turn(sweep, tmp_path):
    with server() as plain, server() as drafting:
        assert sweep(plain=plain, drafting=drafting).code == 0
    results = load_results(tmp_path / "run")
    rows = results.done.join(results.answers[["cached_tokens"]]).set_index(
        ["config", "prompt", "repeat", "turn"]
    )
    for key, row in rows.iterrows():
        config, prompt, repeat, turn = key  # type: ignore[misc]
        if turn:
            before = rows.loc[config, prompt, repeat, turn - 1]
            known = before["prompt_tokens"] + before["new_tokens"]
            assert 0 <= known - row["cached_tokens"] < BLOCK + NEW  # its words are fewer than its tokens
    shown = turn_rows(results)
    assert [(row.config.label, row.turn) for row in shown] == [
        (name, n) for name in ("plain", "drafting") for n in (1, 2, 3)
    ]
    assert [round(row.acceptance_rate, 2) for row in shown[:3]] == [1.0, 0.8, 0.6]
    assert all(row.reused > 0.5 for row in shown if row.turn > 1)


def test_a_server_that_loses_its_cache_is_named(sweep, tmp_path):
    with server() as plain, server(loses=lambda body: True) as drafting:
        done = sweep(plain=plain, drafting=drafting)
    assert named(done) == {"loses its prompt cache"}
    assert "drafting loses its prompt cache: in 32 of 32 later turns" in " ".join(done.err.split())
    assert "Conversations by turn" in (tmp_path / "run" / "summary.md").read_text() or "reused" in done.out


def test_answers_that_decay_are_named(sweep):
    with server() as plain, server(per_piece=1, garbled=lambda body: turn_of(body) > 0) as drafting:
        done = sweep("-n", 100, plain=plain, drafting=drafting)
    assert named(done) == {"decay"}
    assert "The answers of drafting decay: 32 of 32 in later turns" in " ".join(done.err.split())


def test_servers_that_are_alike_are_not_named():
    """400 comparisons of a server with itself, in which an answer of five is bad, over 12 conversations."""
    chance = np.random.default_rng(0)
    prompts = np.repeat(np.arange(12), 6)

    def answers(share: float) -> pd.DataFrame:
        return pd.DataFrame({"prompt": prompts, "bad": chance.random(len(prompts)) < share})

    found = sum(more_often(answers(0.2), answers(0.2), "bad") for _ in range(400))
    assert found <= 400 / 20
    assert sum(more_often(answers(0.7), answers(0.2), "bad") for _ in range(100)) >= 95


@pytest.mark.parametrize(
    ("text", "expects", "broken"),
    [
        ("", None, True),
        (" \n", None, True),
        ("Fine.", None, False),
        ("\ufffd\ufffd a", None, True),
        (" ".join(["the same words again"] * 12), None, True),
        (" ".join(f"word{number}" for number in range(60)), None, False),
        ('{"a": [1]}', "json", False),
        ('```json\n{"a": 1}\n```', "json", False),
        ('{"a": [1}', "json", True),
        ("[" * 100_000, "json", True),
        ('{"name": "find", "arguments": {"x": 1}}', "tool call", False),
        ('{"name": "find"}', "tool call", True),
        ("[1]", "tool call", True),
    ],
)
def test_broken_answers(text, expects, broken):
    assert is_broken(text, expects) is broken
