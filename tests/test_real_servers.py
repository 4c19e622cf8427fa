"""llama.cpp's own server, where the wheel `xllamacpp` is installed: our client's counts are its own."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from test_builtin import write_as_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from specbench.bench.engines.client import ServerClient, SpeculationCounters, StreamedAnswer, count_tokens
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


def ask(
    address: str, model: str, prompts: Sequence[str], settings: Mapping[str, Any]
) -> list[StreamedAnswer]:
    """Ask a server with our client, one prompt after the other."""

    async def all_of_them() -> list[StreamedAnswer]:
        client = ServerClient("server", f"{address}/v1")
        try:
            return [await client.ask(model, prompt, settings) for prompt in prompts]
        finally:
            await client.close()

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
        for prompt, answer in zip(PROMPTS, asked, strict=True):
            count = count_tokens(answer, tokenizer)
            assert (count.tokens, count.problem) == (NEW, None)
            assert answer.used_tokens == NEW
            assert answer.prompt_tokens == len(tokenizer(prompt)["input_ids"])
            assert answer.cached_tokens == 0
        drafted, accepted = (
            sum(getattr(each, kind) or 0 for each in asked) for kind in ("drafted", "accepted")
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
