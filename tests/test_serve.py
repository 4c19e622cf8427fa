"""`specbench serve` on a socket, with a tiny model: answers, requests that nobody waits for, and the server's end."""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from itertools import count, islice
from typing import Any

import httpx2
import openai
import psutil
import pytest
from cli_runs import Result
from tiny import tiny_llama, tiny_tokenizer

from specbench import GenerationRun, load_drafter, loaded, speculative_generate, wrap_target
from specbench.backends.torch.pools import CacheSize
from specbench.bench.engines.client import speculation_counters
from specbench.cli import signals
from specbench.decoding.records import Generation
from specbench.decoding.sampling import Sampling
from specbench.decoding.schedule import Scheduler
from specbench.generate import encode_messages
from specbench.models.target import Target
from specbench.options import DecodingOptions, SamplingOptions
from specbench.policies import build_policy
from specbench.recipe import Recipe
from specbench.serve import app, server
from specbench.serve.engine import BusyError, Engine, StoppedError
from specbench.serve.server import Server
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import ModelSpec
from specbench.specs.policies import parse_policy

pytestmark = pytest.mark.timeout(180)  # whatever a socket or a signal is waited for

NEW = 24
DRAFTER = "self:layers=1"
PATIENCE_S = 60.0
POLICY = build_policy("fixed:gamma=3")
RECIPE = Recipe(
    ModelSpec("folder", "tiny"), parse_drafter(DRAFTER), parse_policy("fixed:gamma=3"),
    decoding=DecodingOptions(max_new_tokens=NEW),
)  # fmt: skip
ENDLESS = {"prompt": "the thing", "max_tokens": 100_000, "ignore_eos": True, "temperature": 2.0}


@cache
def target() -> Target:
    """It can go on for long."""
    return wrap_target(tiny_llama(context=200_000), tiny_tokenizer())


def engine_of(**settings: Any) -> Engine:
    limits = {"max_batch": 3, "max_waiting": 12, "pool_tokens": 65_536} | settings
    return Engine(target(), load_drafter(DRAFTER, target()), **limits)


def wait_until(condition: Callable[[], Any]) -> Any:
    """What the condition returns as soon as that is true."""
    until = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < until
    return found


class Running:
    """A server in a thread of this process, closed at the end of a ``with``."""

    def __init__(
        self, engine: Engine, recipe: Recipe = RECIPE, grace_s: float = 0.0, seed: int | None = None
    ) -> None:
        self.engine = engine
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.server = Server(engine, recipe, listening, grace_s, seed)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.http = httpx2.Client(base_url=self.url, timeout=PATIENCE_S)

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.http.post(path, json=body)

    def text(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def sent(self, body: bytes, length: int | None = None) -> socket.socket:
        """A connection on which a request was sent whose body has so many bytes; ``None``: all of them."""
        connection = socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])), PATIENCE_S)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        length = len(body) if length is None else length
        connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)
        return connection

    def metrics(self) -> dict[str, float]:
        lines = self.http.get("/metrics").text.splitlines()
        found = [
            re.fullmatch(r'specbench:(\w+(?:\{\w+="[\w-]+"\})?) ([\d.]+)', line)
            for line in lines
            if line[0] != "#"
        ]
        return {each[1]: float(each[2]) for each in found if each is not None}

    def metrics_text(self) -> str:
        return str(self.http.get("/metrics").text)

    def becomes_idle(self) -> dict[str, float]:
        """The metrics as soon as nothing is under way."""
        wait_until(lambda: not sum(self.metrics()[f"requests_{which}"] for which in ("running", "waiting")))
        return self.metrics()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def serving() -> Iterator[Running]:
    with Running(engine_of()) as running:
        yield running


@pytest.fixture(scope="module")
def client(serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def alone(prompt: str | list[int], **settings: Any) -> Generation:
    settings = {"max_new_tokens": NEW, "policy": POLICY} | settings
    return speculative_generate(prompt, target(), load_drafter(DRAFTER, target()), chat=False, **settings)


def used(generation: Generation) -> dict[str, Any]:
    drafted, accepted = (
        sum(getattr(step, name) for step in generation.steps) for name in ("gamma", "accepted")
    )
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": len(generation.token_ids),
        "total_tokens": generation.prompt_tokens + len(generation.token_ids),
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def events(text: str) -> list[Any]:
    """The bodies of server-sent events."""
    parts = text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [part if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


# -- answers -----------------------------------------------------------------------------------------


def test_a_text_is_what_the_decoder_alone_makes_of_it(serving):
    expected = alone("the thing and the thing")
    assert sum(step.accepted for step in expected.steps) > 0
    answer = serving.text(prompt="the thing and the thing", model=target().name)
    assert answer["choices"][0]["text"] == expected.text
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == used(expected)
    assert answer["model"] == target().name
    tokens = tiny_tokenizer()("the thing and the thing")["input_ids"]
    assert serving.text(prompt=tokens)["choices"] == answer["choices"]


def test_the_official_client_chats_at_once_and_in_a_stream(client):
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "of the king"}]
    expected = alone(encode_messages(tiny_tokenizer(), messages))
    whole = client.chat.completions.create(model=target().name, messages=messages)
    assert whole.choices[0].message.content == expected.text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(expected.token_ids)
    asked: Any = {"model": target().name, "messages": messages, "stream": True}
    chunks = [*client.chat.completions.create(**asked, stream_options={"include_usage": True})]
    said = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(said) == expected.text
    assert 1 < len(said) < len(expected.token_ids) + 3, "a chunk is a step, and not a token"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]] == [None, "length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.model_dump(exclude_none=True) == used(expected)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    again: Any = [*messages, whole.choices[0].message, {"role": "user", "content": "and?"}]
    assert client.chat.completions.create(model=target().name, messages=again, max_tokens=3).usage is not None


@pytest.mark.smoke
def test_the_official_client_completes_and_lists(client):
    expected = alone("the king", max_new_tokens=9)
    whole = client.completions.create(model=target().name, prompt="the king", max_tokens=9)
    assert whole.choices[0].text == expected.text
    streamed = client.completions.create(model=target().name, prompt="the king", max_tokens=9, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected.text
    assert [model.id for model in client.models.list()] == [target().name]
    assert client.models.retrieve(target().name).id == target().name
    with pytest.raises(openai.NotFoundError, match="no model 'another'"):
        client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.BadRequestError, match="n can only be 1"):
        client.completions.create(model=target().name, prompt="x", n=2)


def test_a_seed_repeats_an_answer_and_without_one_they_differ(serving):
    asked = {"prompt": "the thing", "temperature": 2.0, "top_k": 50}
    expected = alone("the thing", sampling=Sampling(temperature=2.0, top_k=50), seed=5)
    for _ in range(2):
        assert serving.text(**asked, seed=5)["choices"][0]["text"] == expected.text
    texts = {serving.text(**asked)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) > 1


def test_stops_and_ends(serving):
    whole = alone("the thing").text
    assert whole is not None
    stop = whole[4:6]
    answer = serving.text(prompt="the thing", stop=[stop])
    assert answer["choices"][0]["text"] == whole[: whole.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    *bodies, done = events(serving.post("/v1/completions", prompt="the thing", stop=stop, stream=True).text)
    assert done == "data: [DONE]"
    assert "".join(body["choices"][0]["text"] for body in bodies) == whole[: whole.index(stop)]
    assert serving.text(prompt="the thing", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_many_at_once_each_get_their_own(serving):
    prompts = [f"the thing {number} and the thing" for number in range(12)]
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda prompt: serving.text(prompt=prompt), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = alone(prompt)
        assert (answer["choices"][0]["text"], answer["usage"]) == (expected.text, used(expected))


def test_the_servers_own_setting_holds_where_a_request_says_nothing():
    recipe = replace(
        RECIPE,
        policy=None,
        sampling=SamplingOptions(temperature=2.0),
        decoding=DecodingOptions(max_new_tokens=5, stop=("zzz",)),
    )
    with Running(engine_of(max_batch=1, pool_tokens=None), recipe, seed=7) as running:
        first, second = (running.text(prompt="the thing") for _ in range(2))
        assert first["usage"]["completion_tokens"] == 5
        assert first["choices"] == second["choices"]
        greedy = running.text(prompt="the thing", temperature=0, max_tokens=8)
        assert greedy["choices"][0]["text"] == alone("the thing", max_new_tokens=8).text
        assert running.engine.max_tokens == 200_000


# -- requests that go wrong --------------------------------------------------------------------------

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("path", "content", "headers", "status", "said"),
    [
        ("/v1/completions", b"{", JSON, 400, "not JSON"),
        ("/v1/completions", b'{"prompt": ""}', JSON, 400, "prompt"),
        ("/v1/completions", b'{"prompt": [99999]}', JSON, 400, "99999"),
        ("/v1/completions", b'{"prompt": "x", "temperature": 1e-40}', JSON, 400, "temperature"),
        ("/v1/completions", b'{"prompt": "x", "model": "y\\u001b"}', JSON, 404, "model"),
        ("/v1/completions", b'{"prompt": "x", "stop": "%s<|endoftext|>"}' % (b"y" * 9999), JSON, 400, "stop"),
        ("/v1/completions", b'{"prompt": "x"}', {"content-type": "text/plain"}, 415, "Content-Type"),
        ("/v1/completions", b" " * (4 * 2**20 + 1), JSON, 413, "4194304 bytes"),
        ("/v1/completions", b'{"prompt": "%s"}' % (b"word " * 30_000), JSON, 400, "are limited to"),
        ("/v1/completions", None, {}, 405, "Method Not Allowed"),
        ("/v1/embeddings", b"{}", JSON, 404, "Not Found"),
        ("/v1/models/another", None, {}, 404, "There is no model"),
    ],
    ids=map(str, count()),
)
def test_what_is_wrong_is_an_error_of_the_protocol(serving, path, content, headers, status, said):
    answer = serving.http.request(
        "GET" if content is None else "POST", path, content=content, headers=headers
    )
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert said in error["message"]
    assert error["message"].isprintable()
    assert len(error["message"]) < 400
    assert error["type"] == "invalid_request_error"


def test_only_names_of_this_machine_are_answered_to(serving):
    for host, status in (("evil.example", 400), ("localhost:80", 200), ("127.0.0.1", 200)):
        assert serving.http.get("/health", headers={"host": host}).status_code == status


def test_without_a_chat_template_there_is_no_chat():
    plain = wrap_target(tiny_llama(), tiny_tokenizer(chat_template=None))
    engine = Engine(plain, load_drafter("none", plain), max_batch=1, max_waiting=1, pool_tokens=None)
    with Running(engine) as running:
        answer = running.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
        assert answer.status_code == 400
        assert "Use /v1/completions" in answer.json()["error"]["message"]


# -- requests that nobody waits for ------------------------------------------------------------------


def test_a_client_that_leaves_a_stream_takes_its_request_along(serving):
    before = serving.becomes_idle().get('requests_ended_total{reason="cancelled"}', 0)
    with serving.http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as answer:
        lines = answer.iter_lines()  # held on to: whoever drops it closes the connection
        for line in islice(lines, 6):
            assert not line or json.loads(line.removeprefix("data: "))["choices"]
        assert serving.metrics()["requests_running"] == 1
        assert serving.metrics()["kv_blocks_used"] > 0
    after = serving.becomes_idle()
    assert after['requests_ended_total{reason="cancelled"}'] == before + 1
    assert after["kv_blocks_used"] == 0


def test_a_client_that_hangs_up_takes_its_request_along(serving):
    serving.becomes_idle()
    with serving.sent(json.dumps(ENDLESS).encode()):
        wait_until(lambda: serving.metrics()["requests_running"])
    assert serving.becomes_idle()["kv_blocks_used"] == 0


def status_of(connection: socket.socket) -> bytes:
    """The first line of an answer."""
    with connection.makefile("rb") as answer:
        return answer.readline()


def test_what_clients_send_wrong_is_not_logged(serving, caplog):
    """They are answered; the terminal of the server is not theirs to write on."""
    upgrade = (
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    )
    for request, status in ((b"GARBAGE\r\n\r\n", b"400"), (upgrade, b"200")):
        with socket.create_connection(
            ("127.0.0.1", int(serving.url.rpartition(":")[2])), PATIENCE_S
        ) as connection:
            connection.sendall(request)
            assert status in status_of(connection)
    assert not caplog.records
    logging.getLogger("uvicorn.error").warning("something else")
    assert len(caplog.records) == 1


def test_clients_that_send_slowly_cannot_fill_the_memory(monkeypatch):
    monkeypatch.setattr(app, "_MAX_OPEN", 1)
    with Running(engine_of(max_batch=1, max_waiting=0, pool_tokens=None)) as running:

        def becomes(status: int) -> httpx2.Response:
            until = time.monotonic() + PATIENCE_S
            while (answer := running.post("/v1/completions", prompt="x", max_tokens=1)).status_code != status:
                assert time.monotonic() < until, answer.text
            return answer

        with ExitStack() as halves:
            for _ in range(2):
                halves.enter_context(running.sent(b"{", length=100))
            assert becomes(429).headers["retry-after"] == "1"
            assert running.http.get("/health").status_code == 200
        becomes(200)


def test_a_body_has_to_come_in_time(serving, monkeypatch):
    monkeypatch.setattr(app, "_BODY_TIMEOUT_S", 0.01)
    with serving.sent(b"{", length=100) as connection:
        assert status_of(connection).startswith(b"HTTP/1.1 408")


def test_a_body_that_would_be_too_large_is_not_waited_for(serving):
    with serving.sent(b"", length=10**9) as connection:
        assert status_of(connection).startswith(b"HTTP/1.1 413")


def test_who_does_not_read_keeps_neither_others_nor_the_end_waiting(monkeypatch, caplog):
    monkeypatch.setattr(server, "_LATE_S", 0.05)
    running = Running(engine_of())
    asked = {**ENDLESS, "max_tokens": 3000, "stream": True}
    with running.sent(json.dumps(asked).encode()) as connection:
        assert status_of(connection) == b"HTTP/1.1 200 OK\r\n"
        assert running.text(prompt="the thing")["usage"]["completion_tokens"] == NEW
        with caplog.at_level(logging.ERROR):
            running.close()
    assert not caplog.records


def test_a_second_signal_waits_for_nobody(caplog):
    running = Running(engine_of(), grace_s=10 * PATIENCE_S)
    with running.http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        running.server.force_exit = True
        with caplog.at_level(logging.ERROR), suppress(httpx2.TransportError):
            running.server.should_exit = True
            for _ in lines:
                pass
        running.close()
    assert not caplog.records


def test_decoding_that_fails_in_the_middle_is_told_and_the_server_goes_on(serving, monkeypatch):
    whole, made = Scheduler.step, []

    def broken(scheduler: Scheduler) -> Any:
        made.append(1)
        if len(made) == 4:
            raise RuntimeError("no such thing")
        return whole(scheduler)

    monkeypatch.setattr(Scheduler, "step", broken)
    answer = serving.http.post("/v1/completions", json={**ENDLESS, "stream": True})
    last = events(answer.text)[-1]
    assert last["error"]["type"] == "server_error"
    assert serving.text(prompt="the thing")["choices"][0]["text"] == alone("the thing").text
    assert serving.becomes_idle()["kv_blocks_used"] == 0


def test_what_has_been_done_is_counted():
    with Running(engine_of()) as running:
        expected = alone("the thing and the thing")
        running.text(prompt="the thing and the thing")
        found = running.becomes_idle()
        accepted = [step.accepted for step in expected.steps]
        assert found["prompt_tokens_total"] == expected.prompt_tokens
        assert found["generation_tokens_total"] == NEW
        assert found["steps_total"] == len(accepted)
        assert found["spec_decode_num_drafts_total"] == sum(bool(step.drafted) for step in expected.steps)
        assert found["spec_decode_num_draft_tokens_total"] == sum(step.gamma for step in expected.steps)
        assert found["spec_decode_num_accepted_tokens_total"] == sum(accepted)
        for place in range(max(step.gamma for step in expected.steps)):
            name = f'spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}}'
            assert found[name] == sum(kept > place for kept in accepted)
        assert found['requests_ended_total{reason="length"}'] == 1
        text = running.metrics_text()
        assert text.count("# TYPE ") == text.count("# HELP ") > 8
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("vllm:"))
    labels = f'engine="0",model_name="{target().name}"'
    for name in ("generation_tokens_total", "spec_decode_num_drafts_total"):
        assert float(samples[f"vllm:{name}{{{labels}}}"]) == found[name]
    assert samples[f'vllm:request_success_total{{{labels},finished_reason="length"}}'] == "1"
    assert 0 <= float(samples[f"vllm:kv_cache_usage_perc{{{labels}}}"]) <= 1


# -- the engine by itself ----------------------------------------------------------------------------


def endless() -> GenerationRun:
    return GenerationRun([1, 2, 3], target(), load_drafter(DRAFTER, target()), policy=POLICY, max_new_tokens=100_000,
                         ignore_eos=True, sampling=Sampling(temperature=2.0))  # fmt: skip


def test_only_so_many_wait():
    engine = engine_of(max_batch=1, max_waiting=1, pool_tokens=None)
    came: queue.Queue[Any] = queue.Queue()
    first = engine.submit(endless(), came.put)
    second = engine.submit(endless(), came.put)
    with pytest.raises(BusyError):
        engine.submit(endless(), came.put)
    came.get(timeout=PATIENCE_S)
    engine.cancel(second)
    engine.cancel(first)
    engine.cancel(first)
    engine.stop(PATIENCE_S)
    engine.join()
    assert engine.ended == {"cancelled": 2}
    with pytest.raises(StoppedError):
        engine.submit(endless(), came.put)


def test_a_consumer_that_fails_loses_its_own_answer_alone():
    engine = engine_of()
    came: queue.Queue[Any] = queue.Queue()
    seen: list[Any] = []

    def failing(event: Any) -> None:
        seen.append(event)
        if len(seen) == 2:
            raise RuntimeError("the connection is gone")

    engine.submit(endless(), failing)
    engine.submit(
        GenerationRun([5, 6], engine.target, engine.drafter, policy=POLICY, max_new_tokens=12), came.put
    )
    while (event := came.get(timeout=PATIENCE_S)).finish_reason is None:
        pass
    assert event.finish_reason == "length"
    engine.stop(PATIENCE_S)
    engine.join()
    assert len(seen) == 2
    assert engine.ended == {"failed": 1, "length": 1}
    assert engine.factory.use is not None
    assert engine.factory.use.used == 0


def test_nobody_waits_for_an_engine_that_has_broken_down(monkeypatch):
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    engine = engine_of()
    monkeypatch.setattr(engine.counts, "add", lambda record: 1 / 0)
    came: queue.Queue[Any] = queue.Queue()
    engine.submit(endless(), came.put)
    assert isinstance(came.get(timeout=PATIENCE_S), StoppedError)
    engine.join()
    assert len(told) == 1
    with pytest.raises(StoppedError):
        engine.submit(endless(), came.put)


def test_a_server_that_ends_lets_answers_end_or_says_why_not():
    for grace_s, how in ((PATIENCE_S, "length"), (0.0, "error")):
        running = Running(engine_of(), grace_s=grace_s)
        asked = {**ENDLESS, "max_tokens": 200} if how == "length" else ENDLESS
        with running.http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.server.should_exit = True
            bodies = [line.removeprefix("data: ") for line in lines if line]
        if how == "length":
            assert bodies[-1] == "[DONE]"
            assert json.loads(bodies[-2])["choices"][0]["finish_reason"] == "length"
        else:
            assert "stopped before the answer ended" in json.loads(bodies[-1])["error"]["message"]
        running.close()
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(running.url)


# -- the command -------------------------------------------------------------------------------------

Cli = Callable[..., Result]


@pytest.fixture
def serve(cli, folder) -> Cli:
    def call(*arguments: object) -> Result:
        return cli("serve", "--target", folder, "--quiet", *arguments)

    return call


def test_what_cannot_be_served_is_refused(serve, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        serve("--port", port).refused(
            2, f"Nothing can listen on port {port} of '127.0.0.1'", "Give another --port"
        )
    serve("--host", "no.such.host.invalid").refused(2, "Give another --port or --host")
    serve("--cache", "static").refused(2, "serve one prompt at a time")
    serve("--drafter", "ngram:keep").refused(2, "Leave keep out")
    serve("--batch", 0).refused(2, "--batch")
    serve("--grace", "nan").refused(2, "--grace")
    with monkeypatch.context() as patched:
        patched.setattr("specbench.backends.torch.pools.cache_size", lambda *_: CacheSize(2**18, 0))
        serve("--kv-memory", 3, "--port", 0).refused(2, "holds 12 tokens: too few", "Give at least 64.")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    serve().refused(2, "specbench-llm[serve]")


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_the_port_answers_while_the_model_is_loaded_and_a_signal_ends_it(cli, folder, monkeypatch):
    monkeypatch.setattr(signals, "_received", [])
    refused, load_recipe = threading.Event(), loaded.load_recipe

    def load(*given: Any) -> loaded.LoadedRecipe:
        assert refused.wait(PATIENCE_S)
        return load_recipe(*given)

    monkeypatch.setattr(loaded, "load_recipe", load)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    seen: list[Any] = []

    def ask() -> None:
        url = f"http://127.0.0.1:{port}"

        def answered(status: int) -> Any:
            with suppress(httpx2.TransportError):
                answer = httpx2.post(f"{url}/v1/completions", json={"prompt": "the"})
                return answer if answer.status_code == status else None

        try:
            early = [wait_until(lambda: answered(503)), httpx2.get(f"{url}/health")]
            seen.append([(each.status_code, each.headers["retry-after"]) for each in early])
            assert "is being loaded" in early[0].json()["error"]["message"]
            refused.set()
            seen.append(wait_until(lambda: answered(200)).json()["usage"]["completion_tokens"])
            sockets = psutil.Process().net_connections("inet")
            listening = [each.laddr for each in sockets if each.status == psutil.CONN_LISTEN]
            seen.extend(each.ip for each in listening if each.port == port)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    signals.end_cleanly_on_sigterm()
    asking = threading.Thread(target=ask)
    asking.start()
    words = ("--port", port, "--dtype", "float32", "--grace", 0, "-n", 6)
    done = cli("serve", "--target", folder, *words)
    asking.join()
    signal.signal(signal.SIGTERM, before)
    assert (done.code, done.out) == (128 + signal.SIGTERM, "")
    assert (seen[0], seen[1] <= 6, seen[2:]) == ([(503, "1")] * 2, True, ["127.0.0.1"])
    assert f"http://127.0.0.1:{port} is open" in done.err
    assert "tiny (float32, cpu), drafter lookup" in done.err
    assert done.err.endswith("specbench: interrupted.\n")


# -- speculation of a request ------------------------------------------------------------------------


def drafts(answer: dict[str, Any]) -> dict[str, Any]:
    return dict(answer["metrics"]["speculative_decoding"])


def test_a_request_decides_how_it_is_drafted_for():
    asked = {"prompt": "the king and the queen", "temperature": 0, "ignore_eos": True}
    with Running(engine_of()) as running:
        usual = running.text(**asked)
        off = running.text(**asked, speculation="off")
        short = running.text(**asked, speculation={"gamma": 1})
        egag = running.text(**asked, speculation={"policy": "heuristic:max=6"})
        refused = [
            running.post("/v1/completions", **asked, speculation=wrong)
            for wrong in (
                "on",
                {"gamma": 0},
                {"policy": "nothing"},
                {"policy": "auto", "gamma": 2},
                {"length": 2},
            )
        ]
        metrics = running.metrics_text()
    assert "gamma" in refused[1].json()["error"]["message"], "and not the other alternative"
    assert {each["choices"][0]["text"] for each in (usual, off, short, egag)} == {usual["choices"][0]["text"]}
    assert drafts(off) == {
        "num_draft_tokens": 0, "num_accepted_draft_tokens": 0, "acceptance_histogram": []
    }  # fmt: skip
    assert len(drafts(short)["acceptance_histogram"]) <= 2
    for answer in (usual, short, egag):
        told, histogram = drafts(answer), drafts(answer)["acceptance_histogram"]
        assert told["num_accepted_draft_tokens"] == sum(n * count for n, count in enumerate(histogram))
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == told["num_accepted_draft_tokens"]
        assert sum(details.values()) == told["num_draft_tokens"] > 0
    assert drafts(short)["num_draft_tokens"] == sum(drafts(short)["acceptance_histogram"])
    assert [each.status_code for each in refused] == [400] * 5
    assert "nothing" in refused[2].text
    counted = speculation_counters(metrics)
    assert counted is not None
    told = [drafts(each) for each in (usual, short, egag)]
    assert counted.drafted == sum(each["num_draft_tokens"] for each in told)
    assert (
        counted.accepted
        == sum(each["num_accepted_draft_tokens"] for each in told)
        == sum(counted.accepted_at)
    )


def test_the_doctor_finds_no_problem(cli):
    with Running(engine_of()) as running:
        done = cli("doctor", running.url, "--expect", "on", "--json")
    found = {each["check"]: each["status"] for each in json.loads(done.out)["findings"]}
    assert {name for name, status in found.items() if status == "problem"} <= {"speed"} < {*found}, done.out
    assert {"counters", "tokens", "repeat", "outputs"} <= {
        name for name, status in found.items() if status == "ok"
    }
