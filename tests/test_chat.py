"""Conversations: answers are those of a fresh start though what was read is kept, and Ctrl-C stops one of them."""

from __future__ import annotations

import codecs
import io
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator

import pytest
from cli_runs import Cli, Result
from forked import Descriptor, Forked, specbench
from tiny import tiny_llama, tiny_tokenizer

from specbench import UsageError, load_drafter, speculative_generate, wrap_target
from specbench.conversation import Conversation
from specbench.generate import encode_messages

pytestmark = pytest.mark.timeout(180)  # whatever a terminal is waited for

NEW = 12
PATIENCE_S = 60.0


@pytest.fixture
def chat(cli, folder, monkeypatch) -> Cli:
    """`specbench chat` with lines that come from no terminal."""

    def call(typed: bytes, *arguments: object) -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
        return cli("chat", "--target", f"{folder}:float32", "-n", NEW, *arguments)

    return call


@pytest.mark.parametrize("drafter", ["none", "lookup+self:layers=1"])
def test_answers_are_those_of_a_fresh_start_with_the_whole_conversation(drafter):
    target = wrap_target(tiny_llama(), tiny_tokenizer())
    conversation = Conversation(target, load_drafter(drafter, target), system="Be brief.", max_new_tokens=NEW)
    found, prompts, kept = [], [], []
    for text in ("the thing", "and the thing", "again"):
        answer = conversation.ask(text)
        for _ in answer:
            pass
        found.append(answer.result())
        prompts.append(list(answer.prompt))
        kept.append(answer.cached_tokens)
        conversation.add(text, answer.result().text or "")
    fresh = [speculative_generate(prompt, target, None, max_new_tokens=NEW) for prompt in prompts]
    assert [each.token_ids for each in found] == [each.token_ids for each in fresh]
    assert kept[0] == 0
    assert kept[1] >= len(prompts[0])
    assert kept[2] >= len(prompts[1])
    asked = [*conversation.messages[:5], {"role": "user", "content": "again"}]
    assert asked[0] == {"role": "system", "content": "Be brief."}
    assert prompts[2] == encode_messages(tiny_tokenizer(), asked)


def test_what_cannot_be_a_conversation_is_refused():
    with pytest.raises(UsageError, match="chat template"):
        Conversation(wrap_target(tiny_llama(), tiny_tokenizer(chat_template=None)))
    with pytest.raises(UsageError, match="chat template"):
        Conversation(wrap_target(tiny_llama()))
    conversation = Conversation(wrap_target(tiny_llama(context=32), tiny_tokenizer()))
    with pytest.raises(UsageError, match="context of 32 leaves no room"):
        conversation.ask("a long word " * 8)
    assert conversation.ask("hi").prompt_tokens < 32


def test_lines_are_messages(chat, cli, folder):
    told = chat(b"the thing\n\n\xff of the\n/exit\nthe thing\n", "--system", "Be brief.")
    assert told.code == 0, told.err
    words = ["--system", "Be brief.", "--target", f"{folder}:float32", "-n", NEW, "--quiet"]
    first = cli("generate", "the thing", *words).out
    assert told.out.startswith(first)
    assert len(told.out) > len(first)
    assert len(re.findall(r"^speed +\d+ tokens?: ", told.err, flags=re.MULTILINE)) == 2
    assert len(re.findall(r"\d+ of \d+ prompt tokens in the KV cache", told.err)) == 1


def test_what_is_wrong_ends_it_where_nobody_can_be_asked(chat):
    chat(b"word " * 600 + b"\nthe thing\n", "--quiet").refused(2, "leaves no room for an answer")


def _at_a_terminal(handed: Descriptor, *words: str) -> None:
    """`specbench` with a terminal for its input too."""
    os.dup2(handed, 0)  # type: ignore[arg-type]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    specbench(*words)


class Terminal:
    """`specbench chat` at a terminal of its own."""

    def __init__(self, *words: str) -> None:
        import pty

        self._outer, inner = pty.openpty()
        self.process = Forked(
            _at_a_terminal, Descriptor(inner), "chat", *words, stdout=inner, stderr=inner,
            environment={"TERM": "dumb"},
        )  # fmt: skip
        os.close(inner)
        self._seen, self._decoder = "", codecs.getincrementaldecoder("utf-8")("replace")

    def type(self, line: str, end: str = "\n") -> None:
        os.write(self._outer, f"{line}{end}".encode())

    def until(self, pattern: str) -> str:
        """What has come up to the first place where the pattern fits, once it does."""
        until = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self._seen)) is None:
            left = until - time.monotonic()
            assert left > 0, f"{pattern!r} does not come: {self._seen[-2000:]}"
            if select.select([self._outer], [], [], left)[0]:
                self._seen += self._decoder.decode(os.read(self._outer, 65536)).replace("\r\n", "\n")
        seen, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return seen

    def close(self) -> None:
        if self.process.is_alive():
            self.process.kill(signal.SIGKILL)
        os.close(self._outer)


@pytest.fixture
def terminal(tmp_path) -> Iterator[Terminal]:
    """With a model that never comes to an end."""
    model, tokenizer = tiny_llama(context=200_000), tiny_tokenizer()
    model.generation_config.suppress_tokens = [tokenizer.eos_token_id]
    model.save_pretrained(tmp_path / "endless")
    tokenizer.save_pretrained(tmp_path / "endless")
    words = ["--target", f"{tmp_path / 'endless'}:float32", "-n", "100000"]
    terminal = Terminal(*words)
    yield terminal
    terminal.close()


@pytest.mark.skipif(os.name == "nt", reason="signals and terminals of POSIX")
def test_ctrl_c_stops_an_answer_and_not_the_program(terminal):
    terminal.until(r"(?s)endless \(float32, cpu\), drafter lookup.*> ")
    terminal.type("the thing")
    terminal.until(r"(?s)the thing\n.{80}")
    terminal.process.signal(signal.SIGINT)
    answer = terminal.until("stopped")
    assert re.search(r"\\x[01]", answer), "a model of random bytes has written control characters"
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", answer), "and none of them came as itself"
    terminal.until(r"\n> ")
    terminal.type("and of the")
    terminal.until(r"(?s)and of the\n.{40}")
    terminal.process.signal(signal.SIGINT)
    terminal.until("stopped")
    terminal.until(r"\n> ")
    terminal.type("\x04", end="")
    assert terminal.process.wait() == 0
