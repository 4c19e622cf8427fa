"""The engine of servers: a sweep measures how their answers arrive.

Nothing is known about a server except what it sends. All servers get the same prompts, one request at a time or as many
as there are clients. Prompt caches are avoided, by a field of the request or by a first line of the prompt that is
always new.
"""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, cycle, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import httpx2

from specbench.base.errors import RunError, SpecbenchError, UsageError
from specbench.base.record import Json, to_dict
from specbench.base.textsafe import encodable, one_line
from specbench.bench.engines.engine import BenchEngine
from specbench.bench.grid import Salt
from specbench.bench.serving import BenchRequest, Workload
from specbench.decoding.thinking import thinking_tokens, unopened_tokens
from specbench.options import NO_OPTIONS, DecodingOptions, TemplateOptions
from specbench.results.lines import Generation, Group, RequestLine, ServerAnswer, Speculation, StepLists
from specbench.results.run import TargetModel
from specbench.rows import Row
from specbench.servers.client import (
    ServerClient,
    ServerError,
    SpeculationCounters,
    StreamedAnswer,
    count_tokens,
)
from specbench.servers.dialects import Dialect, dialect_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specbench.bench.prompts import Prompt
    from specbench.specs.servers import ServerSpec

Messages: TypeAlias = tuple[Mapping[str, str], ...]


class ServerPrompt(NamedTuple):
    """The messages of a conversation, with the fields of a request that tell a template."""

    messages: Messages
    template: Json


_PROBE = "Count from one to ten."
_PROBE_TOKENS = 16

_RETRIES = 2
"""How often a request is sent again that got no answer at all."""

_PAUSE_S = 1.0
"""Pause before the first retry, doubled before each other one."""

_MAX_LISTED = 5


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """A connected server, with the model's name and owner as the server gives them, and notes for the user."""

    spec: ServerSpec
    model: str
    owner: str
    has_counters: bool
    notes: tuple[str, ...] = ()

    @property
    def described(self) -> str:
        """Return the names of the server and its model, without any path."""
        return f"{self.spec.name}: {self.model_name}"

    @property
    def model_name(self) -> str:
        """The name of its model; for a path, the last part."""
        path = re.fullmatch(r"(?:[~./\\]|[A-Za-z]:[/\\]).*[/\\]([^/\\]+)[/\\]*", self.model)
        return one_line(path[1] if path else self.model)

    @property
    def dialect(self) -> Dialect:
        return dialect_of(self.owner)

    def speculation(self, answer: StreamedAnswer, meanwhile: SpeculationCounters | None) -> Speculation:
        """Return draft counts of an answer: those it reports, or else the increase of the server's counters
        ``meanwhile``.

        Counts by position are left out if they do not agree with the answer, since the server then had other clients
        too.
        """
        drafted, accepted = answer.drafted, answer.accepted
        if drafted is None and self.dialect.reports_drafts:
            drafted, accepted = 0, 0
        if meanwhile is not None and (drafted is None or accepted is None):
            drafted, accepted = meanwhile.drafted, meanwhile.accepted
        for counts in (answer.speculation, meanwhile):
            if counts is None or not counts.accepted_at:
                continue
            if (counts.drafted, sum(counts.accepted_at)) == (drafted, accepted):
                return Speculation(**asdict(counts))
        return Speculation(drafted=drafted, accepted=accepted)


class ServerEngine(BenchEngine):
    """The engine of servers. It connects to them when it is created, and must be closed.

    Args:
        specs: The servers; the first one is the baseline.
        keys: API keys by server.
        tokenizer: The target's tokenizer; ``None`` relies on the servers' token counts.
        transport: See ``ServerClient``.
        decoding, temperature, template: Options that the first request to each server tests.
        clock, pause: Functions that return the time, and that wait, in seconds.

    Attributes:
        servers: The connected servers, in the order of ``specs``.
        salt: How their prompt caches are avoided.

    Raises:
        RunError: A server cannot be reached, or does not speak the OpenAI protocol.
        UsageError: A server refuses the key or the model, or lists several models of which none was chosen; or the
            number of tokens of its answers cannot be counted.
    """

    def __init__(
        self,
        specs: Sequence[ServerSpec],
        *,
        keys: Mapping[str, str],
        tokenizer: PreTrainedTokenizerBase | None = None,
        decoding: DecodingOptions | None = None,
        temperature: float = 0.0,
        template: TemplateOptions = NO_OPTIONS,
        transport: httpx2.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.decoding, self.temperature = decoding or DecodingOptions(), temperature
        self._clock, self._pause = clock, pause
        self._keys = dict(keys)
        self._loop = asyncio.Runner()
        self._clients = {
            spec.name: ServerClient(
                spec.name, spec.url, key=keys.get(spec.name), transport=transport, clock=clock
            )
            for spec in specs
        }
        try:
            self.servers = tuple(self._loop.run(self._connect(spec)) for spec in specs)
        except BaseException:
            self.close()
            raise
        self._by_name = {server.spec.name: server for server in self.servers}
        self.salt = _salt_for(self.servers)

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            self._loop.run(client.close())
        self._clients = {}
        self._loop.close()

    @property
    def notes(self) -> list[str]:
        """What the user should know about the servers."""
        notes = [note for server in self.servers for note in server.notes]
        if self.salt != "none":
            whose = ", so outputs cannot be compared" if self.salt == "each" else ""
            notes.append(
                "Every prompt gets a unique first line, because a server has a prompt cache that cannot be switched"
                f" off{whose}."
            )
        return notes

    def describe_target(self, decoding: DecodingOptions) -> TargetModel:
        return TargetModel(name=self.servers[0].model_name)

    # -- connecting ----------------------------------------------------------------------------------

    async def _connect(self, spec: ServerSpec) -> MeasuredServer:
        """Request a server's list of models, and a first answer."""
        client, listed = self._clients[spec.name], dict[str, str]()
        try:
            listed = await client.models()
            model = spec.model or only_model(spec, listed)
            owner = listed.get(model, next(iter(listed.values()), ""))
            has_counters = await client.counters() is not None
            server = MeasuredServer(spec, model, owner, has_counters)
            prompt = ServerPrompt(_messages(None, _PROBE), self._template.for_server())
            decoding = self.decoding.with_changes(max_new_tokens=_PROBE_TOKENS)
            settings = self._settings(server, self.temperature, decoding, 0)
            answer, _ = await self._ask(server, prompt, settings)
        except ServerError as error:
            raise explain(error, spec, listed, has_key=spec.name in self._keys) from error
        return MeasuredServer(spec, model, owner, has_counters, tuple(self._notes(spec, answer)))

    def _notes(self, spec: ServerSpec, answer: StreamedAnswer) -> list[str]:
        count = count_tokens(answer, self._tokenizer)
        if count.tokens is None:
            raise UsageError(
                f"The server {spec.name} does not report how many tokens its answers have.",
                "Add --target MODEL, whose tokenizer counts them.",
            )
        notes = []
        if count.problem is not None:
            notes.append(f"{spec.name}: {count.problem}")
        elif self._tokenizer is None:
            notes.append(f"{spec.name}: token counts are the server's own; --target MODEL checks them.")
        if len(answer.pieces) == 1 and count.tokens > 2:
            notes.append(f"{spec.name}: an answer comes in one chunk, so only its total time is known.")
        return notes

    # -- the interface of engines --------------------------------------------------------------------

    def encode(self, prompt: Prompt, answers: Sequence[str]) -> ServerPrompt:
        turns = [text for pair in zip(prompt.turns, [*answers, ""], strict=False) for text in pair][:-1]
        return ServerPrompt(_messages(prompt.system, *turns), prompt.template.for_server())

    def count_tokens(self, prompt: Prompt) -> int:
        if self._tokenizer is None:
            raise UsageError(
                "--context needs the tokenizer of the servers' model.",
                "Add --target MODEL, which names it.",
            )
        from specbench.generate import encode_messages

        messages = [dict(message) for message in self.encode(prompt, []).messages]
        return len(encode_messages(self._tokenizer, messages, template=prompt.template))

    def generate(
        self, config: Row, prompt: ServerPrompt, decoding: DecodingOptions, *, seed: int
    ) -> Generation:
        return self._loop.run(self._generate(config, BenchRequest(prompt, seed), decoding))

    def generate_group(self, config: Row, workload: Workload, decoding: DecodingOptions) -> Group:
        return self._loop.run(self._generate_group(config, workload, decoding))

    # -- requests ------------------------------------------------------------------------------------

    async def _generate(self, config: Row, request: BenchRequest, decoding: DecodingOptions) -> Generation:
        server = self._by_name[config.drafter]
        before = await self._counters(server)
        answer, attempts = await self._answer(config, request, decoding)
        meanwhile = await self._since(server, before)
        return Generation.of(**self._measured(answer, attempts, server.speculation(answer, meanwhile)))

    async def _generate_group(self, config: Row, workload: Workload, decoding: DecodingOptions) -> Group:
        """Send a workload until all measured requests have been answered, and cancel the others."""
        server = self._by_name[config.drafter]
        before = await self._counters(server)
        answers: dict[int, tuple[StreamedAnswer, int, float]] = {}  # with attempts and time of arrival
        own, sent, began = len(workload.requests), 0, self._clock()

        def is_done() -> bool:
            return all(number in answers for number in range(own))

        async def send(number: int) -> None:
            arrived_s = self._clock() - began
            answer, attempts = await self._answer(config, workload.request(number), decoding)
            answers[number] = answer, attempts, arrived_s

        async def client() -> None:
            nonlocal sent
            while not is_done():
                number = sent
                sent += 1
                await send(number)

        async def send_at(number: int, time_s: float) -> None:
            await self._pause(max(0.0, began + time_s - self._clock()))
            await send(number)

        if workload.clients is None:
            coroutines = [send_at(number, time_s) for number, time_s in enumerate(workload.times)]
        else:
            coroutines = [client() for _ in range(workload.clients)]
        tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
        try:
            for ended in asyncio.as_completed(tasks):
                await ended
                if is_done():
                    break
            seconds = self._clock() - began
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        lines = {}
        for number, (answer, attempts, arrived_s) in answers.items():
            asked = workload.request(number)
            of_request: Json = {"prompt": asked.name, "category": asked.category, "arrived_s": arrived_s}
            measured = self._measured(answer, attempts, server.speculation(answer, None))
            lines[number] = RequestLine.of(**measured, **of_request, queued_s=0.0)
        meanwhile = await self._since(server, before)
        return Group(
            requests=[lines[number] for number in range(own)],
            clients=workload.clients,
            seconds=round(seconds, 9),
            tokens=sum(line.new_tokens for line in lines.values()),
            speculation=None if meanwhile is None else Speculation(**asdict(meanwhile)),
        )

    async def _answer(
        self, config: Row, request: BenchRequest, decoding: DecodingOptions
    ) -> tuple[StreamedAnswer, int]:
        server = self._by_name[config.drafter]
        settings = self._settings(server, config.condition.temperature, decoding, request.seed)
        return await self._ask(server, self._salted(config, request), settings)

    async def _ask(
        self, server: MeasuredServer, prompt: ServerPrompt, settings: Mapping[str, Any]
    ) -> tuple[StreamedAnswer, int]:
        """Return an answer and the number of attempts; a request is not repeated if its answer had begun."""
        client, attempt, settings = self._clients[server.spec.name], 1, {**settings, **prompt.template}
        while True:
            try:
                return await client.ask(server.model, prompt.messages, settings), attempt
            except ServerError as error:
                if not error.retry or attempt > _RETRIES:
                    raise
            await self._pause(_PAUSE_S * 2 ** (attempt - 1))
            attempt += 1

    def _settings(
        self, server: MeasuredServer, temperature: float, decoding: DecodingOptions, seed: int
    ) -> Json:
        settings = server.dialect.settings(decoding.max_new_tokens, temperature, seed)
        return settings | ({"ignore_eos": True} if decoding.ignore_eos else {})

    def _salted(self, config: Row, request: BenchRequest) -> ServerPrompt:
        """Return the prompt; with a first line that is new to the server, if that avoids its prompt cache."""
        prompt: ServerPrompt = request.prompt
        if self.salt == "none":
            return prompt
        whose = config.drafter if self.salt == "each" else ""
        line = f"[{zlib.crc32(f'{request.seed}/{whose}'.encode()):08x}]\n"
        first, *rest = prompt.messages
        return prompt._replace(messages=({**first, "content": line + first["content"]}, *rest))

    async def _counters(self, server: MeasuredServer) -> SpeculationCounters | None:
        return await self._clients[server.spec.name].counters() if server.has_counters else None

    async def _since(
        self, server: MeasuredServer, before: SpeculationCounters | None
    ) -> SpeculationCounters | None:
        """Return draft counts since ``before``; ``None`` if not reported."""
        now = await self._counters(server)
        if now is None or before is None:
            return None
        try:
            return now.since(before)
        except RunError as error:
            raise RunError(f"{server.spec.name}: {error.message}") from error

    def _measured(self, answer: StreamedAnswer, attempts: int, speculation: Speculation) -> Json:
        """Return the arguments of ``MeasuredOutput.of``."""
        count = count_tokens(answer, self._tokenizer)
        if count.tokens is None:
            raise RunError(count.problem or "The number of tokens is unknown.")
        first, ids = answer.first, answer.ids
        ttft_s = answer.ended_s if first is None else first.at_s
        if first is None or len(answer.pieces) == 1:
            first_tokens = count.tokens
        else:
            known = len(first.ids if first.ids is not None else self._tokenize(first.text) or ())
            first_tokens = min(max(1, known), count.tokens)
        thought, thought_s = self._thinking(answer, count.tokens)
        return {
            "tokens": ids if ids is not None else self._tokenize(answer.text) or (),
            "new_tokens": count.tokens,
            "prompt_tokens": answer.prompt_tokens or 0,
            "finish_reason": answer.finish_reason,
            "ttft_s": ttft_s,
            "decode_s": max(0.0, answer.ended_s - ttft_s),
            "steps": StepLists.reported(answer.steps, count.tokens),
            "first_tokens": first_tokens,
            "thinking_tokens": thought,
            "thinking_s": None if thought_s is None else max(0.0, thought_s - ttft_s),
            "server": ServerAnswer(
                **to_dict(speculation),
                text=answer.text,
                counted_by=count.source,
                problem=count.problem,
                pieces=len(answer.pieces),
                bursts=answer.bursts,
                cached_tokens=answer.cached_tokens,
                attempts=attempts,
            ),
        }

    def _thinking(self, answer: StreamedAnswer, tokens: int) -> tuple[int | None, float | None]:
        """Return how many tokens of an answer are thinking, and when it ended; ``None`` if not known.

        The closing mark comes between the last piece of reasoning and the next one, and so does the end.
        """
        if answer.reasoned:
            last_s = max(piece.at_s for piece in answer.pieces if piece.reasoning)
            next_s = min((piece.at_s for piece in answer.pieces if piece.at_s > last_s), default=last_s)
            reply = self._tokenize(answer.reply)
            return (None, None) if reply is None else (max(0, tokens - len(reply)), (last_s + next_s) / 2)
        ids = answer.ids or self._tokenize(answer.text)
        if ids is None or self._tokenizer is None:
            return None, None
        count = thinking_tokens(self._tokenizer, (), ids) or unopened_tokens(self._tokenizer, ids)
        length = len(
            str(self._tokenizer.decode(list(ids[:count]), skip_special_tokens=answer.ids is not None))
        )
        ends = accumulate(len(piece.text) for piece in answer.pieces)
        times = [piece.at_s for piece, end in zip(answer.pieces, ends, strict=True) if end >= length]
        return count, (times[0] if times else answer.ended_s) if count else None

    def _tokenize(self, text: str) -> tuple[int, ...] | None:
        """Return the token ids of a text; ``None`` without a tokenizer."""
        if self._tokenizer is None:
            return None
        return tuple(self._tokenizer(encodable(text), add_special_tokens=False)["input_ids"])


def explain(error: ServerError, spec: ServerSpec, listed: Iterable[str], *, has_key: bool) -> SpecbenchError:
    """Return an error of the first connection, with a hint what to change."""
    status, variable = error.status, spec.key_variable
    if status in (401, 403):
        if has_key:
            what = f"The server {spec.called} refuses the key in {variable} (status {status})."
            return UsageError(what, "Put a valid key there.")
        what = f"The server {spec.called} needs a key (status {status})."
        return UsageError(what, f"Put it into the environment variable {variable}.")
    if status is not None and 300 <= status < 400:
        return UsageError(error.message, f"Name that address in place of {spec.url}.")
    if status == 404 and (names := _names(listed)):
        return UsageError(error.message, f"Its models are {names}; name one after a #, or check {spec.url}.")
    if status is not None and 400 <= status < 500:
        return UsageError(error.message, f"Check its address {spec.url}, its model and the options.")
    return RunError(error.message, f"Check that it runs at {spec.url}.")


def _messages(system: str | None, *turns: str) -> Messages:
    """Return the messages of a conversation whose turns are the user's and the model's alternately."""
    first = () if system is None else ({"role": "system", "content": system},)
    roles = cycle(("user", "assistant"))
    return (*first, *({"role": role, "content": text} for role, text in zip(roles, turns, strict=False)))


def only_model(spec: ServerSpec, listed: Collection[str]) -> str:
    """Return the only model of a server.

    Raises:
        UsageError: The server has several models, or none.
    """
    if len(listed) == 1:
        return next(iter(listed))
    names = _names(listed)
    raise UsageError(
        f"The server {spec.called} lists {len(listed)} models{': ' if names else ''}{names}.",
        "Name one after a # of its address.",
    )


def _names(listed: Iterable[str]) -> str:
    return ", ".join(map(one_line, islice(listed, _MAX_LISTED)))


def _salt_for(servers: Sequence[MeasuredServer]) -> Salt:
    """Return how to avoid the prompt caches that no field switches off; if possible, with the same prompts for all."""
    caching = [server for server in servers if not server.dialect.known]
    if not caching:
        return "none"
    places = Counter((server.spec.url, server.model) for server in caching)
    return "each" if max(places.values()) > 1 else "shared"
