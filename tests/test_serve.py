"""`specbench serve` on a socket, with a tiny model: answers, requests that nobody waits for, and the server's end."""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import count, islice
from typing import Any

import httpx2
import openai
import psutil
import pytest
from tiny import tiny_llama, tiny_tokenizer

from specbench import GenerationRun, load_drafter, speculative_generate, wrap_target
from specbench.backends.torch.pools import CacheSize
from specbench.cli import signals
from specbench.decoding.records import Generation
from specbench.decoding.sampling import Sampling
from specbench.decoding.schedule import Scheduler
from specbench.generate import encode_messages
from specbench.models.target import Target
from specbench.options import DecodingOptions, SamplingOptions
from specbench.policies import build_policy
from specbench.recipe import Recipe
from specbench.serve import server
from specbench.serve.engine import BusyError, Engine, StoppedError
from specbench.serve.server import Server
from specbench.servers.client import speculation_counters
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

    def __init__(self, engine: Engine, recipe: Recipe = RECIPE) -> None:
        self.engine = engine
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.server = Server(engine, recipe, listening)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.http = httpx2.Client(base_url=self.url, timeout=PATIENCE_S)

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.http.post(path, json=body)

    def text(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def sent(self, body: bytes) -> socket.socket:
        """A connection on which a request was sent."""
        connection = socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])), PATIENCE_S)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return connection

    def metrics(self) -> dict[str, float]:
        lines = self.http.get("/metrics").text.splitlines()
        samples = [line.removeprefix("specbench:").rsplit(" ", 1) for line in lines if line[0] != "#"]
        return {name: float(value) for name, value in samples}

    def becomes_idle(self) -> dict[str, float]:
        """The metrics as soon as nothing is under way."""
        wait_until(lambda: not sum(self.metrics()[f"num_requests_{how}"] for how in ("running", "waiting")))
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
    named = serving.text(prompt="the thing and the thing", return_token_ids=True)
    assert named["choices"][0]["token_ids"] == list(expected.token_ids)
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
    named = client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
    ids = [
        token
        for chunk in named
        for choice in chunk.choices
        for token in (choice.model_extra or {})["token_ids"]
    ]
    assert ids == list(expected.token_ids)
    again: Any = [*messages, whole.choices[0].message, {"role": "user", "content": "and?"}]
    assert client.chat.completions.create(model=target().name, messages=again, max_tokens=3).usage is not None
    asked |= {"tools": [{"type": "function", "function": {"name": "now"}}]}
    with pytest.raises(openai.BadRequestError, match="Tool calls are not supported"):
        client.chat.completions.create(**asked)


@pytest.mark.smoke
def test_the_official_client_completes_and_lists(client):
    expected = alone("the king", max_new_tokens=9)
    whole = client.completions.create(model=target().name, prompt="the king", max_tokens=9)
    assert whole.choices[0].text == expected.text
    streamed = client.completions.create(model=target().name, prompt="the king", max_tokens=9, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected.text
    assert [model.id for model in client.models.list()] == [target().name]
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
    with Running(engine_of(max_batch=1, pool_tokens=None), recipe) as running:
        first, second = (running.text(prompt="the thing", seed=7) for _ in range(2))
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
        ("/v1/completions", b"{", JSON, 400, "not a JSON object"),
        ("/v1/completions", b'{"prompt": ""}', JSON, 400, "prompt"),
        ("/v1/completions", b'{"prompt": [99999]}', JSON, 400, "99999"),
        ("/v1/completions", b'{"prompt": "x", "temperature": 1e-40}', JSON, 400, "temperature"),
        ("/v1/completions", b'{"prompt": "x", "model": "y\\u001b"}', JSON, 404, "model"),
        ("/v1/completions", b'{"prompt": "x"}', {"content-type": "text/plain"}, 415, "Content-Type"),
        ("/v1/completions", b" " * (4 * 2**20 + 1), JSON, 413, "4194304 bytes"),
        ("/v1/completions", b'{"prompt": "%s"}' % (b"word " * 30_000), JSON, 400, "are limited to"),
        ("/v1/completions", None, {}, 405, "Method Not Allowed"),
        ("/v1/embeddings", b"{}", JSON, 404, "Not Found"),
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
        assert serving.metrics()["num_requests_running"] == 1
        assert serving.metrics()["kv_cache_usage_perc"] > 0
    after = serving.becomes_idle()
    assert after['requests_ended_total{reason="cancelled"}'] == before + 1
    assert after["kv_cache_usage_perc"] == 0


def test_a_client_that_hangs_up_takes_its_request_along(serving):
    serving.becomes_idle()
    with serving.sent(json.dumps(ENDLESS).encode()):
        wait_until(lambda: serving.metrics()["num_requests_running"])
    assert serving.becomes_idle()["kv_cache_usage_perc"] == 0


def test_clients_that_send_slowly_cannot_fill_the_memory(monkeypatch):
    monkeypatch.setattr(server, "_MORE_CONNECTIONS", 2)
    with Running(engine_of(max_batch=1, max_waiting=0, pool_tokens=None)) as running:
        port = int(running.url.rpartition(":")[2])

        def becomes(status: int) -> None:
            def answered() -> bool:
                with suppress(httpx2.TransportError):
                    return httpx2.get(f"{running.url}/health").status_code == status
                return False

            wait_until(answered)

        with ExitStack() as slow:
            for _ in range(3):
                slow.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
            becomes(503)
        becomes(200)


def test_who_does_not_read_keeps_neither_others_nor_the_end_waiting(monkeypatch, caplog):
    monkeypatch.setattr(server, "_GRACE_S", 0.05)
    running = Running(engine_of())
    asked = {**ENDLESS, "max_tokens": 3000, "stream": True}
    with running.sent(json.dumps(asked).encode()) as connection:
        with connection.makefile("rb") as answer:
            assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
        assert running.text(prompt="the thing")["usage"]["completion_tokens"] == NEW
        with caplog.at_level(logging.ERROR):
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
    assert serving.becomes_idle()["kv_cache_usage_perc"] == 0


def test_what_has_been_done_is_counted():
    with Running(engine_of()) as running:
        expected = alone("the thing and the thing")
        running.text(prompt="the thing and the thing")
        found = running.becomes_idle()
        accepted = [step.accepted for step in expected.steps]
        drafts = sum(bool(step.drafted) for step in expected.steps)
        assert found["prompt_tokens_total"] == expected.prompt_tokens
        assert found["generation_tokens_total"] == NEW
        assert found["steps_total"] == len(accepted)
        assert found["spec_decode_num_drafts_total"] == drafts
        assert found["spec_decode_num_draft_tokens_total"] == sum(step.gamma for step in expected.steps)
        assert found["spec_decode_num_accepted_tokens_total"] == sum(accepted)
        for place in range(max(step.gamma for step in expected.steps)):
            name = f'spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}}'
            assert found[name] == sum(kept > place for kept in accepted)
        assert found['requests_ended_total{reason="length"}'] == 1
        text = str(running.http.get("/metrics").text)
    assert text.count("# TYPE ") == text.count("# HELP ") > 8
    counted = speculation_counters(text)
    assert counted is not None
    assert (counted.drafts, counted.accepted) == (drafts, sum(accepted))


# -- the engine by itself ----------------------------------------------------------------------------


def endless() -> GenerationRun:
    return GenerationRun([1, 2, 3], target(), load_drafter(DRAFTER, target()), policy=POLICY, max_new_tokens=100_000,
                         ignore_eos=True, sampling=Sampling(temperature=2.0))  # fmt: skip


def test_only_so_many_wait():
    engine = engine_of(max_batch=1, max_waiting=1, pool_tokens=None)
    came: queue.Queue[Any] = queue.Queue()
    first, second = endless(), endless()
    engine.submit(first, came.put)
    engine.submit(second, came.put)
    with pytest.raises(BusyError):
        engine.submit(endless(), came.put)
    came.get(timeout=PATIENCE_S)
    for run in (second, first, first):
        engine.cancel(run)
    wait_until(lambda: engine.ended == {"cancelled": 2})
    engine.stop()
    engine.join()
    with pytest.raises(StoppedError):
        engine.submit(endless(), came.put)


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


def test_a_server_that_ends_says_so_in_the_answers_that_it_cuts():
    running = Running(engine_of())
    with running.http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        running.server.should_exit = True
        bodies = [line.removeprefix("data: ") for line in lines if line]
    assert "stopped before the answer ended" in json.loads(bodies[-1])["error"]["message"]
    running.close()
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(running.url)


# -- the command -------------------------------------------------------------------------------------


def test_what_cannot_be_served_is_refused(cli, folder, monkeypatch):
    serve = partial(cli, "serve", "--target", folder, "--quiet")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        serve("--port", port).refused(
            2, f"Nothing can listen on port {port} of '127.0.0.1'", "Give another --port"
        )
    serve("--host", "no.such.host.invalid").refused(2, "Give another --port or --host")
    serve("--cache", "static").refused(2, "serve one prompt at a time")
    serve("--drafter", "ngram:keep").refused(2, "Leave keep out")
    serve("--batch", 0).refused(2, "--batch")
    with monkeypatch.context() as patched:
        patched.setattr("specbench.backends.torch.pools.cache_size", lambda *_: CacheSize(2**18, 0))
        serve("--kv-memory", 3, "--port", 0).refused(2, "holds 12 tokens: too few", "Give at least 64.")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    serve().refused(2, "specbench-llm[serve]")


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_loaded_model_is_served_until_a_signal(cli, folder, monkeypatch):
    monkeypatch.setattr(signals, "_received", [])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    seen: list[Any] = []

    def ask() -> None:
        def answer() -> Any:
            with suppress(httpx2.TransportError):
                return httpx2.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "the"})

        try:
            seen.append(wait_until(answer).json()["usage"]["completion_tokens"])
            sockets = psutil.Process().net_connections("inet")
            listening = [each.laddr for each in sockets if each.status == psutil.CONN_LISTEN]
            seen.extend(each.ip for each in listening if each.port == port)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    signals.end_cleanly_on_sigterm()
    asking = threading.Thread(target=ask)
    asking.start()
    done = cli("serve", "--target", f"{folder}:float32", "--port", port, "-n", 6)
    asking.join()
    signal.signal(signal.SIGTERM, before)
    assert (done.code, done.out) == (128 + signal.SIGTERM, "")
    assert (seen[0] <= 6, seen[1:]) == (True, ["127.0.0.1"])
    assert "tiny (float32, cpu), drafter lookup" in done.err
    assert f"is served on http://127.0.0.1:{port}/v1" in " ".join(done.err.split())
    assert done.err.endswith("specbench: interrupted.\n")


# -- speculation of a request ------------------------------------------------------------------------


def test_a_request_can_switch_speculation_off(serving):
    asked = {"prompt": "the king and the queen", "temperature": 0, "ignore_eos": True}
    drafting, plain = (serving.text(**asked, **more) for more in ({}, {"speculation": "off"}))
    assert drafting["choices"] == plain["choices"]
    told = [answer["metrics"]["speculative_decoding"] for answer in (drafting, plain)]
    assert told[1] == {"num_draft_tokens": 0, "num_accepted_draft_tokens": 0, "acceptance_histogram": []}
    histogram = told[0]["acceptance_histogram"]
    assert told[0]["num_accepted_draft_tokens"] == sum(n * count for n, count in enumerate(histogram))
    details = drafting["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == told[0]["num_accepted_draft_tokens"]
    assert sum(details.values()) == told[0]["num_draft_tokens"] > 0


def test_the_doctor_finds_no_problem(cli):
    with Running(engine_of()) as running:
        done = cli("doctor", running.url, "--expect", "on", "--json")
    found = {each["id"].partition(".")[0]: each["severity"] for each in json.loads(done.out)["findings"]}
    assert "problem" not in found.values(), done.out
    assert {"counters", "tokens", "repeat"} <= {name for name, severity in found.items() if severity == "ok"}
