"""`benchmarks/openvino_server.py` and `onnxruntime_server.py`, with modules that stand in for the engines."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import engine_server
import onnxruntime_server
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


FLAGS = SimpleNamespace(TOKEN=1, TURN_FINISHED=2, FAILED=4)


class Request:
    """An answer of the prompt's letters, again and again; ends at `!` if it may."""

    def begin_turn(self, ids: list[int], turn: Any) -> None:
        letters = [chr(ids[at % len(ids)]) for at in range(turn.most)]
        end = letters.index("!") if "!" in letters and not turn.least else turn.most
        self.left = [ord(each) for each in letters[:end]]

    def close(self) -> None:
        self.left = None


class Batches:
    """The engine: one token of each request in a run."""

    def __init__(self, model: str) -> None:
        self.requests: list[Request] = []
        self.most = 0
        batches.append(self)

    def create_event_buffer(self, size: int) -> None:
        pass

    def create_request(self) -> Request:
        self.requests.append(Request())
        return self.requests[-1]

    def run(self, buffer: None) -> list[Any]:
        time.sleep(0.001)
        running = [request for request in self.requests if request.left]
        self.most = max(self.most, len(running))
        found = []
        for request in running:
            token, flags = request.left.pop(0), FLAGS.TOKEN | (0 if request.left else FLAGS.TURN_FINISHED)
            found.append(SimpleNamespace(request=request, token=token, flags=SimpleNamespace(value=flags)))
        return found


class Turn:
    def __init__(self, request: Request) -> None:
        self.least = self.most = 0

    def set_do_sample(self, on: bool) -> None:
        assert not on

    def set_max_generated_tokens(self, count: int) -> None:
        self.most = count

    def set_min_generated_tokens(self, count: int) -> None:
        self.least = count


class Generator:
    """Two tokens a step."""

    def __init__(self, model: str, options: Any) -> None:
        self.options, self.ids = options, []
        generators.append(self)

    def append_tokens(self, ids: list[int]) -> None:
        self.prompt, self.ids = ids, [*ids]

    def is_done(self) -> bool:
        return len(self.ids) >= self.options.max_length

    def generate_next_token(self) -> None:
        for _ in range(min(2, self.options.max_length - len(self.ids))):
            self.ids.append(self.prompt[len(self.ids) % len(self.prompt)])

    def get_sequence(self, number: int) -> list[int]:
        return self.ids


class Options(SimpleNamespace):
    def set_search_options(self, **given: Any) -> None:
        self.__dict__.update(given)

    set_speculative_options = set_search_options


batches: list[Batches] = []
generators: list[Generator] = []


@pytest.fixture
def onnxruntime(monkeypatch, started):
    letters = SimpleNamespace(
        encode=lambda text: [*map(ord, text)],
        decode=lambda ids: "".join(map(chr, ids)),
        apply_chat_template=lambda text, add_generation_prompt: json.loads(text)[0]["content"] + ">",
    )
    module = SimpleNamespace(
        Model=lambda path: path, Tokenizer=lambda model: letters, Engine=Batches, TurnOptions=Turn,
        EngineEventFlags=SimpleNamespace(**{key: SimpleNamespace(value=value) for key, value in vars(FLAGS).items()}),
        GeneratorParams=lambda model: Options(), Generator=Generator,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", module)

    def start(*options: str) -> str:
        onnxruntime_server.main(["--model", "folder", "--port", "0", *options])
        return address(started)

    return start


def test_onnxruntime_answers_in_batches(onnxruntime):
    url = onnxruntime()
    prompts = ["abc", "de!", [{"role": "user", "content": "hi"}]]
    answers = ask(url, *prompts, tokens=300)
    assert [answer.text[:4] for answer in answers] == ["abca", "de!d", "hi>h"]
    assert [answer.used_tokens for answer in answers] == [300, 300, 300]
    assert batches[-1].most > 1
    (ended,) = ask(url, "de!", tokens=300, ignore_eos=False)
    assert (ended.text, ended.finish_reason) == ("de", "stop")


def test_onnxruntime_with_n_grams_answers_one_by_one(onnxruntime):
    (answer,) = ask(onnxruntime("--ngram-size", "3", "--max-draft-tokens", "5"), "abc")
    assert (answer.text, answer.used_tokens, answer.finish_reason) == ("abcabca", 7, "length")
    options = generators[-1].options
    assert (options.ngram_size, options.max_draft_tokens, options.min_length) == (3, 5, 10)
