"""Send a crowd of good and bad clients to `specbench serve`: does anything hang, leak, or get another one's answer?

    python benchmarks/crowd.py                                                  # 1,000 requests, the built-in model
    python benchmarks/crowd.py --requests 5000 --target FOLDER --drafter self:layers=1 --at-once 64

The server runs in a thread of this process, so that everything can be counted. Clients request whole answers and
streams, leave at any time, vanish before the answer or within their own body, send invalid HTTP or JSON, wrong or
oversized requests, and read slowly; a few read nothing until all others are done. Greedy answers must equal the
decoder's, wrong requests must get their status, and nobody may wait for a minute. After every round nothing may be
left: no request, pool block, task, connection or generation. It may listen on this machine only. At the end the
server's threads and sockets must be gone, no error logged, and Python must hold as many objects as after the second
round, within 1%. Process memory is reported but not judged: oneDNN keeps compiled shapes, and the allocator the space
of large bodies. Prints one line of JSON at the end; exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import ipaddress
import json
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

import httpx2
import parts  # noqa: F401 - before torch
import psutil

from specbench.bench.prompts import load_prompts
from specbench.generate import GenerationRun, encode_messages, encode_prompt
from specbench.models.drafters import load_drafter
from specbench.models.target import load_target
from specbench.options import DecodingOptions, LoadOptions
from specbench.serve.app import RequestDefaults
from specbench.serve.engine import Engine, Job
from specbench.serve.server import Server

PATIENCE_S = 60.0
GROWTH = 1.01
WARM_UP = 2
"""Rounds in which the process may still grow."""

PROMPTS = 6
LENGTHS = (3, 12, 24)
LONG = 200
"""Tokens of answers that are left, or read late."""

JSON = "application/json"
WRONG: tuple[tuple[str, str, bytes, int], ...] = (
    ("/v1/completions", JSON, b"{", 400),
    ("/v1/completions", JSON, b"", 400),
    ("/v1/completions", JSON, b"[" * 50_000, 400),
    ("/v1/completions", JSON, b"\xff\xfe\x00", 400),
    ("/v1/completions", JSON, b'{"prompt": "x", "max_tokens": 0}', 400),
    ("/v1/completions", JSON, b'{"prompt": "x", "n": 2}', 400),
    ("/v1/completions", JSON, b'{"prompt": "x", "nonsense": 1}', 400),
    ("/v1/completions", JSON, b'{"prompt": "x", "model": "another"}', 404),
    ("/v1/completions", JSON, b'{"prompt": [' + b'"a", ' * 50_000 + b"7]}", 400),
    ("/v1/completions", JSON, b'{"prompt": "' + b"word " * 50_000 + b'"}', 400),
    ("/v1/completions", "text/plain", b'{"prompt": "x"}', 415),
    ("/v1/chat/completions", JSON, b'{"messages": [' + b"7, " * 50_000 + b"7]}", 400),
    ("/v1/chat/completions", JSON, b'{"messages": [{"role": "critic", "content": "x"}]}', 400),
    ("/v1/embeddings", JSON, b"{}", 404),
)
"""Path, kind and body of requests, and the status that they must get."""


class WrongError(Exception):
    """An unexpected outcome."""


class Errors(logging.Handler):
    """Collects the server's error log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(self.format(record))


class Serving:
    """The server in a thread of this process.

    Args:
        given: The options.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.target = load_target(given.target, LoadOptions(dtype="float32"))
        drafter = load_drafter(given.drafter, self.target)
        self.engine = Engine(
            self.target, drafter, max_batch=given.batch, max_waiting=64, pool_tokens=given.pool_tokens
        )
        self._before = _files(), threading.active_count() - 1  # less that of the engine
        listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = listening.getsockname()[1]
        defaults = RequestDefaults(decoding=DecodingOptions(max_new_tokens=LONG, ignore_eos=True))
        self._server = Server(self.engine, defaults, listening, grace_s=0.0)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()

    def left(self) -> list[str]:
        """Return the remaining parts of requests, as text."""
        use, state = self.engine.factory.use, self._server.server_state
        gc.collect()
        kinds = Counter(
            type(each).__name__ for each in gc.get_objects() if type(each) in (GenerationRun, Job)
        )
        found = {
            "requests": self.engine.running + self.engine.waiting,
            "blocks": 0 if use is None else use.used,
            "tasks": len(state.tasks),
            "connections": len(state.connections),
            "sockets that others reach": _reached_by_others(),
            **kinds,
        }
        return [f"{count} {name}" for name, count in found.items() if count]

    def end(self) -> str | None:
        """End the server as a signal would; return what remains, as text."""
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        until = time.monotonic() + PATIENCE_S
        while any(map(int.__gt__, now := (_files(), threading.active_count()), self._before)):
            if time.monotonic() > until:
                return f"{now} files and threads after the server's end, {self._before} before it"
            time.sleep(0.05)  # idle threads of a pool end a little later
        return None


class Crowd:
    """Clients and their outcomes.

    Args:
        serving: Whom they ask.
        given: The options.

    Attributes:
        ends: How requests have ended, by what they were.
        wrong: What should not have happened, in sentences.
        memory: Of the process after every round, in bytes.
        objects: Number that Python holds after every round.
    """

    def __init__(self, serving: Serving, given: argparse.Namespace) -> None:
        self._serving, self._given = serving, given
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.memory: list[int] = []
        self.objects: list[int] = []
        tokenizer = serving.target.tokenizer
        assert tokenizer is not None
        texts = [each.turns[0] for each in load_prompts(["all"])]
        self._texts = sorted(texts, key=lambda text: len(encode_prompt(tokenizer, text)))[:PROMPTS]
        self._expected: dict[tuple[str, bool], tuple[str, int]] = {}
        for place, text in enumerate(self._texts):
            messages = [{"role": "user", "content": text}]
            for chat in (True, False):
                prompt = (
                    encode_messages(tokenizer, messages)
                    if chat
                    else encode_prompt(tokenizer, text, chat=False)
                )
                self._expected[text, chat] = self._alone(prompt, LENGTHS[place % len(LENGTHS)])
        self._clients: tuple[tuple[Callable[[Random], Awaitable[str]], int], ...] = (
            (self._whole, 4), (self._stream, 4), (self._leave, 3), (self._vanish, 3), (self._send_half, 2),
            (self._send_rubbish, 1), (self._send_wrong, 3), (self._send_much, 1), (self._read_slowly, 2),
        )  # fmt: skip

    def _alone(self, prompt: Sequence[int], tokens: int) -> tuple[str, int]:
        run = GenerationRun(prompt, self._serving.target, max_new_tokens=tokens, ignore_eos=True)
        for _ in run:
            pass
        result = run.result()
        return result.text or "", len(result.token_ids)

    async def round(self, number: int, requests: int) -> None:
        """Send a number of requests, and check what remains."""
        choice = Random(f"{self._given.seed}/{number}")
        kinds = [kind for kind, weight in self._clients for _ in range(weight)]
        slots = asyncio.Semaphore(self._given.at_once)
        others_are_done = asyncio.Event()
        url = f"http://127.0.0.1:{self._serving.port}"
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=8)

        async def one(client: Callable[[Random], Awaitable[str]], own: Random) -> None:
            async with slots:
                await self._counted(client(own))

        async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as self._http:
            late = [
                asyncio.create_task(self._counted(self._read_late(others_are_done)))
                for _ in range(self._given.late)
            ]
            await asyncio.gather(
                *(one(choice.choice(kinds), Random(choice.random())) for _ in range(requests - len(late)))
            )
            others_are_done.set()
            await asyncio.gather(*late)
        await self._nothing_is_left()
        self.memory.append(psutil.Process().memory_info().rss)
        self.objects.append(len(gc.get_objects()))

    async def _counted(self, client: Awaitable[str]) -> None:
        try:
            async with asyncio.timeout(2 * PATIENCE_S):
                self.ends[await client] += 1
        except Exception as error:
            self.ends["wrong"] += 1
            self.wrong.append(f"{type(error).__name__}: {error}")

    async def _nothing_is_left(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while left := self._serving.left():
            if time.monotonic() > until:
                self.wrong.append(f"after a round there are still {', '.join(left)}")
                return
            await asyncio.sleep(0.05)

    # -- clients that want an answer -----------------------------------------------------------------

    def _requested(self, choice: Random) -> tuple[str, dict[str, Any], tuple[str, int]]:
        """Return path, body, and the expected text and tokens."""
        place, chat = choice.randrange(len(self._texts)), choice.random() < 0.5
        text = self._texts[place]
        body: dict[str, Any] = {"max_tokens": LENGTHS[place % len(LENGTHS)], "temperature": 0}
        if chat:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
        else:
            path, body["prompt"] = "/v1/completions", text
        return path, body, self._expected[text, chat]

    async def _whole(self, choice: Random) -> str:
        path, body, expected = self._requested(choice)
        answer = await self._http.post(path, json=body)
        if answer.status_code == 429:
            return "sent away"
        _require(answer.status_code == 200, f"a whole answer has status {answer.status_code}")
        found = answer.json()
        said = found["choices"][0]
        text = said["message"]["content"] if "message" in said else said["text"]
        _require((text, found["usage"]["completion_tokens"]) == expected, f"an answer is {text!r}")
        return "whole"

    async def _stream(self, choice: Random) -> str:
        path, body, expected = self._requested(choice)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", path, json=body) as answer:
            if answer.status_code == 429:
                return "sent away"
            _require(answer.status_code == 200, f"a stream has status {answer.status_code}")
            events = [line[6:] async for line in answer.aiter_lines() if line]
        _require(events.pop() == "[DONE]", "a stream has no end")
        usage = json.loads(events.pop())["usage"]
        _require(
            (_joined(events), usage["completion_tokens"]) == expected, f"a stream is {_joined(events)!r}"
        )
        return "stream"

    async def _read_slowly(self, choice: Random) -> str:
        path, body, expected = self._requested(choice)
        reader, writer = await self._connected(receive=2048)
        try:
            writer.write(_request(path, {**body, "stream": True}))
            found = await _to_the_end(reader, choice.randint(1, 64))
        finally:
            writer.transport.abort()
        if found.startswith(b"HTTP/1.1 429"):
            return "sent away"
        lines = found.split(b"\n")
        events = [line[6:].decode() for line in lines if line.startswith(b"data: {")]
        _require(_joined(events) == expected[0], f"a slow reader's stream is {_joined(events)!r}")
        return "slow"

    async def _read_late(self, others_are_done: asyncio.Event) -> str:
        reader, writer = await self._connected(receive=2048)
        try:
            asked = {"prompt": self._texts[0], "max_tokens": LONG, "temperature": 2.0, "stream": True}
            writer.write(_request("/v1/completions", asked))
            await others_are_done.wait()
            found = await _to_the_end(reader)
        finally:
            writer.transport.abort()
        _require(
            found.startswith(b"HTTP/1.1 200") and b"[DONE]" in found, "a stream that was read late has no end"
        )
        return "late"

    # -- clients that go -----------------------------------------------------------------------------

    async def _leave(self, choice: Random) -> str:
        body = {"prompt": self._texts[0], "max_tokens": LONG, "temperature": 2.0, "stream": True}
        events = choice.randint(0, 9)
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code == 429:
                return "sent away"
            async for _ in answer.aiter_lines():
                events -= 1
                if events < 0:
                    break
        return "left"

    async def _vanish(self, choice: Random) -> str:
        _, writer = await self._connected()
        body = {
            "prompt": self._texts[0],
            "max_tokens": LONG,
            "temperature": 2.0,
            "stream": choice.random() < 0.5,
        }
        writer.write(_request("/v1/completions", body))
        await writer.drain()
        if choice.random() < 0.5:
            await asyncio.sleep(choice.random() / 50)
        self._hang_up(writer, choice)
        return "vanished"

    async def _send_half(self, choice: Random) -> str:
        _, writer = await self._connected()
        whole = _request("/v1/completions", {"prompt": self._texts[0]})
        writer.write(whole[: choice.randint(1, len(whole) - 1)])
        await writer.drain()
        self._hang_up(writer, choice)
        return "half"

    # -- clients that are wrong ----------------------------------------------------------------------

    async def _send_rubbish(self, choice: Random) -> str:
        reader, writer = await self._connected()
        try:
            writer.write(b"\x16\x03\x01" + choice.randbytes(40) + b"\r\n\r\n")
            status = await reader.readuntil(b"\r\n")
        finally:
            writer.transport.abort()
        _require(status.startswith(b"HTTP/1.1 400"), f"rubbish gets {status!r}")
        return "rubbish"

    async def _send_wrong(self, choice: Random) -> str:
        path, kind, body, status = choice.choice(WRONG)
        answer = await self._http.post(path, content=body, headers={"content-type": kind})
        if answer.status_code == 429:
            return "sent away"
        _require(answer.status_code == status, f"{body[:60]!r} gets {answer.status_code} and not {status}")
        message = answer.json()["error"]["message"]
        _require(message.isprintable() and len(message) < 400, f"{body[:60]!r} got {message!r}")
        return "wrong request"

    async def _send_much(self, choice: Random) -> str:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\n"
        reader, writer = await self._connected()
        try:
            if choice.random() < 0.5:
                writer.write(f"{head}Content-Length: {10**9}\r\n\r\n".encode())
            else:
                part = b"%x\r\n%s\r\n" % (2**20, b" " * 2**20)
                writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + 5 * part)
            status = await reader.readuntil(b"\r\n")
        finally:
            writer.transport.abort()
        _require(status.startswith((b"HTTP/1.1 413", b"HTTP/1.1 429")), f"a large body gets {status!r}")
        return "large"

    # -- connections ---------------------------------------------------------------------------------

    async def _connected(
        self, receive: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection with a receive buffer of at most ``receive`` bytes."""
        connection = socket.socket()
        connection.setblocking(False)
        if receive is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._serving.port))
        return await asyncio.open_connection(sock=connection, limit=receive or 2**16)

    def _hang_up(self, writer: asyncio.StreamWriter, choice: Random) -> None:
        """Close or reset the connection."""
        if choice.random() < 0.5:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    def grown(self) -> float | None:
        """Return the objects after the last round over those after warm-up; ``None`` before that."""
        settled = self.objects[WARM_UP - 1 :]
        return settled[-1] / settled[0] if len(settled) > 1 else None


def _require(true: bool, otherwise: str) -> None:
    if not true:
        raise WrongError(otherwise)


def _request(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def _to_the_end(reader: asyncio.StreamReader, most: int = 2048) -> bytes:
    """Read a whole stream, or an error, in chunks of that many bytes."""
    found = bytearray()
    while not found.endswith(b"0\r\n\r\n") and (part := await reader.read(most)):
        found += part
        if found.startswith(b"HTTP/1.1 4") and len(found) >= len("HTTP/1.1 4xx"):
            break
    return bytes(found)


def _joined(events: Sequence[str]) -> str:
    """Return the text of events."""
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def _reached_by_others() -> int:
    """Return the sockets of this process that listen beyond this machine."""
    listening = (
        each.laddr.ip
        for each in psutil.Process().net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    )
    return sum(not ipaddress.ip_address(address).is_loopback for address in listening)


def _files() -> int:
    return psutil.Process().num_fds() if os.name == "posix" else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument(
        "--late", type=int, default=4, help="clients of a round that read when all others are done"
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pool-tokens", type=int, default=4096, help="capacity of the pool")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    errors = Errors()
    logging.getLogger().addHandler(errors)
    serving = Serving(given)
    crowd = Crowd(serving, given)
    begun = time.monotonic()

    async def rounds() -> None:
        for number in range(given.rounds):
            await crowd.round(number, given.requests // given.rounds)
            print(
                f"round {number + 1}: {dict(crowd.ends)}, {crowd.memory[-1] / 2**20:.0f} MB, {len(crowd.wrong)} wrong",
                flush=True,
            )

    try:
        asyncio.run(rounds())
    finally:
        left = serving.end()
        logging.getLogger().removeHandler(errors)
    seconds = time.monotonic() - begun
    grown = crowd.grown()
    if grown is not None and grown > GROWTH:
        crowd.wrong.append(f"Python has {grown:.3f} times the objects")
    crowd.wrong += [left] if left else []
    crowd.wrong += [f"the server has logged: {said}" for said in errors.said]
    for sentence in crowd.wrong:
        print(f"WRONG {sentence}")
    found: dict[str, Any] = {
        "benchmark": "crowd",
        "target": given.target,
        "requests": crowd.ends.total(),
        "seconds": round(seconds, 1),
        "ends": dict(crowd.ends),
        "engine": dict(serving.engine.counts.ended),
        "grown": grown,
        "rss_mb": [round(memory / 2**20) for memory in crowd.memory],
        "wrong": len(crowd.wrong),
    }
    print(json.dumps(found))
    return int(bool(crowd.wrong))


if __name__ == "__main__":
    sys.exit(main())
