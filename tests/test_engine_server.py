"""`benchmarks/openvino_server.py` and `onnxruntime_server.py`, with modules that stand in for the engines."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import engine_server
import openvino_server
import pytest

from specbench.bench.engines.client import ServerClient


class Tokenizer:
    """A token is a letter."""

    def encode(self, prompt: str) -> Any:
        return SimpleNamespace(input_ids=SimpleNamespace(data=[[*map(ord, prompt)]]))

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: list[dict[str, str]], begins: bool) -> str:
        return "|".join(each["content"] for each in messages) + ">" * begins


class Handle:
    """An answer of two tokens a step: the prompt's letters one after the other, again and again."""

    def __init__(self, prompt: str, config: Any) -> None:
        self.left = [ord(prompt[at % len(prompt)]) for at in range(config.max_new_tokens)]
        self.ready: list[list[int]] = []

    def can_read(self) -> bool:
        return bool(self.ready)

    def read(self) -> dict[int, Any]:
        return {0: SimpleNamespace(generated_ids=self.ready.pop(0))}

    def get_status(self) -> str:
        return "running" if self.left else "finished"


class Pipeline:
    def __init__(self, model: str, scheduler: Any, device: str, properties: dict[str, Any]) -> None:
        assert (device, scheduler.enable_prefix_caching) == ("CPU", False)
        self.properties, self.handles, self.shared = properties, [], 0
        made.append(self)

    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer()

    def add_request(self, number: int, prompt: str, config: Any) -> Handle:
        self.handles.append((Handle(prompt, config), config))
        return self.handles[-1][0]

    def step(self) -> None:
        time.sleep(0.001)
        running = [handle for handle, _ in self.handles if handle.left]
        self.shared = max(self.shared, len(running))
        for handle in running:
            handle.ready.append(handle.left[:2])
            del handle.left[:2]


made: list[Pipeline] = []


@pytest.fixture
def started(monkeypatch):
    """Servers that the test runs itself."""
    found: list[ThreadingHTTPServer] = []
    monkeypatch.setattr(
        engine_server, "ThreadingHTTPServer", lambda *where: found.append(quiet := Quiet(*where)) or quiet
    )
    yield found
    for each in found:
        each.shutdown()
        each.server_close()


def address(started: list[ThreadingHTTPServer]) -> str:
    threading.Thread(target=started[-1].really_serve, daemon=True).start()
    return f"http://127.0.0.1:{started[-1].server_port}/v1"


@pytest.fixture
def server(monkeypatch, started):
    module = SimpleNamespace(
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=SimpleNamespace,
        GenerationStatus=SimpleNamespace(RUNNING="running"),
        ContinuousBatchingPipeline=Pipeline,
        draft_model=lambda path, device: (path, device),
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", module)

    def start(*options: str) -> tuple[str, Pipeline]:
        openvino_server.main(["--model", "folder", "--port", "0", *options])
        return address(started), made[-1]

    return start


class Quiet(ThreadingHTTPServer):
    """Serves when the test says so."""

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        pass

    def really_serve(self) -> None:
        super().serve_forever(0.01)


def ask(url: str, *prompts: Any, tokens: int = 7, ignore_eos: bool = True) -> list[Any]:
    async def all_of_them() -> list[Any]:
        client = ServerClient("server", url)
        assert [model.name for model in await client.models()] == ["m"]
        options = {"max_tokens": tokens, "ignore_eos": ignore_eos}
        answers = [client.ask("m", prompt, options) for prompt in prompts]
        found = await asyncio.gather(*answers)
        await client.close()
        return found

    return asyncio.run(all_of_them())


def test_answers_are_streamed_and_counted(server):
    url, pipeline = server()
    text, chat = ask(url, "abc", [{"role": "user", "content": "hi"}])
    assert (text.text, text.used_tokens, text.prompt_tokens, text.finish_reason) == (
        "abcabca",
        7,
        3,
        "length",
    )
    assert (chat.text, chat.prompt_tokens) == ("hi>hi>h", 3)
    assert len(text.pieces) > 1
    assert pipeline.properties == {}


def test_requests_share_steps(server):
    url, pipeline = server()
    answers = ask(url, "abc", "de", "f", tokens=400)
    assert [answer.text[:4] for answer in answers] == ["abca", "dede", "ffff"]
    assert pipeline.shared > 1


@pytest.mark.parametrize(
    ("options", "property_", "asked"),
    [
        (
            ("--draft-model", "small", "--num-assistant-tokens", "4"),
            {"draft_model": ("small", "CPU")},
            (4, None),
        ),
        (("--max-ngram-size", "3", "--num-assistant-tokens", "5"), {"prompt_lookup": True}, (5, 3)),
    ],
)
def test_drafters_reach_the_pipeline_and_each_request(server, options, property_, asked):
    url, pipeline = server(*options)
    ask(url, "abc")
    assert pipeline.properties == property_
    [(_, config)] = pipeline.handles
    assert (config.num_assistant_tokens, getattr(config, "max_ngram_size", None)) == asked
