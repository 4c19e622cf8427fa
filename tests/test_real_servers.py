"""llama.cpp's own server, where the wheel `xllamacpp` is installed: our client's counts and times are its own."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import torch
from test_builtin import write_as_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from specbench.bench.engines.client import ServerClient, SpeculationCounters, StreamedAnswer, count_tokens
from specbench.cli import run
from specbench.models.builtin import prepare_builtin

pytestmark = [pytest.mark.slow, pytest.mark.real]
PATIENCE_S = 180.0
NEW = 48
PROMPTS = (
    "The three primary colors are",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a king who",
    "Water boils at a lower temperature on a mountain because",
)

LLAMA_CPP_SERVER = """
import sys
import xllamacpp

model, port, draft = sys.argv[1:]
settings = xllamacpp.CommonParams()
settings.model.path, settings.port = model, int(port)
settings.n_ctx, settings.endpoint_metrics = 1024, True
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
if draft:
    settings.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    settings.speculative.draft.mparams.path = draft
server = xllamacpp.Server(settings)
sys.stdin.read()
"""


@contextmanager
def running(command: Sequence[str], port: int, log: Path) -> Iterator[str]:
    """A server in a process of its own; its address, once it answers."""
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as said:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=said)
    try:
        until = time.monotonic() + PATIENCE_S
        while not _answers(address):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.communicate()


def _answers(address: str) -> bool:
    try:
        return httpx2.get(f"{address}/health", timeout=PATIENCE_S).status_code == 200
    except httpx2.TransportError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class _Copied(httpx2.AsyncByteStream):
    """A stream that is kept as it goes by."""

    def __init__(self, stream: Any, kept: bytearray) -> None:
        self._stream, self._kept = stream, kept

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._kept.extend(part)
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


class Recorder(httpx2.AsyncBaseTransport):
    """Sends requests, and keeps the bodies of their answers."""

    def __init__(self) -> None:
        self._network = httpx2.AsyncHTTPTransport()
        self.bodies: list[bytearray] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._network.handle_async_request(request)
        self.bodies.append(bytearray())
        response.stream = _Copied(response.stream, self.bodies[-1])
        return response

    async def aclose(self) -> None:
        await self._network.aclose()

    def events(self, number: int) -> list[dict[str, Any]]:
        """Those of an answer."""
        lines = self.bodies[number].decode().splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


class Recorded(NamedTuple):
    """An answer as our client has it, and the events it was made of."""

    answer: StreamedAnswer
    events: list[dict[str, Any]]


def ask(address: str, model: str, prompts: Sequence[str], settings: Mapping[str, Any]) -> list[Recorded]:
    """Ask a server with our client, one prompt after the other."""

    async def all_of_them() -> list[Recorded]:
        recorder = Recorder()
        client = ServerClient("server", f"{address}/v1", transport=recorder)
        try:
            answers = [await client.ask(model, prompt, settings) for prompt in prompts]
        finally:
            await client.close()
        return [Recorded(answer, recorder.events(number)) for number, answer in enumerate(answers)]

    return asyncio.run(all_of_them())


def counters(address: str) -> SpeculationCounters | None:
    async def read() -> SpeculationCounters | None:
        client = ServerClient("server", f"{address}/v1")
        try:
            return await client.counters()
        finally:
            await client.close()

    return asyncio.run(read())


# -- llama.cpp ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder() -> Path:
    """The built-in model."""
    return prepare_builtin("smollm2-135m")


@pytest.fixture(scope="module")
def tokenizer(folder) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory, folder, tokenizer) -> Iterator[dict[str, str]]:
    """Addresses of two servers: the built-in model plain, and with its first layers as a draft model."""
    pytest.importorskip("xllamacpp", reason="llama.cpp (pip install xllamacpp) is not installed")
    work = tmp_path_factory.mktemp("llama_cpp")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target = write_as_gguf(work / "target.gguf", model, tokenizer, kind="Q8_0")
    model.model.layers = model.model.layers[:-4]
    model.config.num_hidden_layers -= 4
    draft = write_as_gguf(work / "draft.gguf", model, tokenizer, kind="Q8_0")

    def serving(name: str, *words: str) -> Any:
        port = free_port()
        command = [sys.executable, "-c", LLAMA_CPP_SERVER, str(target), str(port), *words]
        return running(command, port, work / f"{name}.log")

    with serving("plain", "") as plain, serving("drafted", str(draft)) as drafted:
        yield {"plain": plain, "drafted": drafted}


GREEDY = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True, "cache_prompt": False}


def test_llama_cpp_counts_what_our_client_counts(llama_cpp, tokenizer):
    for name, address in llama_cpp.items():
        before = counters(address)
        asked = ask(address, "target", PROMPTS, GREEDY)
        for prompt, (answer, events) in zip(PROMPTS, asked, strict=True):
            timings = _timings(events)
            count = count_tokens(answer, tokenizer)
            assert (count.tokens, count.problem) == (NEW, None)
            assert answer.used_tokens == timings["predicted_n"] == NEW
            assert answer.prompt_tokens == timings["prompt_n"] == len(tokenizer(prompt)["input_ids"])
            assert answer.cached_tokens == 0
        drafted, accepted = (
            sum(getattr(each.answer, kind) or 0 for each in asked) for kind in ("drafted", "accepted")
        )
        if name == "plain":
            assert drafted == 0
        else:
            after = counters(address)
            assert before is not None
            assert after is not None
            since = after.since(before)
            assert (since.drafted, since.accepted) == (drafted, accepted)
            assert 0 < accepted < drafted


def test_llama_cpp_takes_the_time_that_our_client_measures(llama_cpp):
    ours, theirs = {}, {}
    for name, address in llama_cpp.items():
        asked = ask(address, "target", PROMPTS, GREEDY)
        steps = sum(len(each.answer.text) > 0 for each in asked) * (NEW - 1)
        seconds = sum(each.answer.pieces[-1].at_s - each.answer.pieces[0].at_s for each in asked)
        told_ms = sum(_timings(each.events)["predicted_ms"] for each in asked)
        ours[name], theirs[name] = steps / seconds, steps / (told_ms / 1000)
        assert ours[name] == pytest.approx(theirs[name], rel=0.01)
    assert ours["drafted"] / ours["plain"] == pytest.approx(theirs["drafted"] / theirs["plain"], rel=0.01)


def _timings(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What llama.cpp says of an answer behind its end."""
    return next(event["timings"] for event in reversed(events) if "timings" in event)


def test_a_sweep_over_llama_cpp_has_its_own_counts(llama_cpp, folder, tmp_path, capsys):
    before = {name: counters(address) for name, address in llama_cpp.items()}
    words = ["--prompts", "chat", "--limit", "2", "--repeats", "2", "--warmup", "0", "--ignore-eos", "-n"]
    words = ["sweep", "--target", str(folder), *words, str(NEW), "--out", str(tmp_path / "run")]
    for name, address in llama_cpp.items():
        words += ["--server", f"{name}={address}/v1"]
    assert run(words) == 0, capsys.readouterr().err
    lines = (tmp_path / "run" / "generations.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["status"] for row in rows] == ["ok"] * 8
    for row in rows:
        server = row["server"]
        assert (row["new_tokens"], server["counted_by"], server["problem"]) == (NEW, "usage", None)
        assert server["cached_tokens"] == 0
    drafted = [row["server"] for row in rows if row["config"] == "drafted"]
    for told in drafted:
        assert told["drafts"] <= told["drafted"] <= told["drafts"] * len(told["kept_at"])
        assert sum(told["kept_at"]) == told["accepted"]
        assert told["kept_at"] == sorted(told["kept_at"], reverse=True)
    after = counters(llama_cpp["drafted"])
    assert before["drafted"] is not None
    assert after is not None
    since = after.since(before["drafted"])
    assert sum(each["drafted"] for each in drafted) <= since.drafted  # it was asked to introduce itself, too
    rate = sum(each["accepted"] for each in drafted) / sum(each["drafted"] for each in drafted)
    assert rate == pytest.approx(since.accepted / since.drafted, rel=0.1)
    shown = capsys.readouterr().out
    assert "drafted" in shown
