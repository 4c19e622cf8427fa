"""Servers in place of models: what a sweep measures of them, by how their answers come.

Nothing of a server is known but what it sends. It gets the same prompts as the others, one request at a time or as many
as there are clients, and its cache of prompts is switched off or gets nothing to find: by a field of its protocol, or
by a first line of the prompt that is another one every time.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import httpx2

from specbench.base.errors import RunError, SpecbenchError, UsageError
from specbench.base.record import Json, to_dict
from specbench.base.textsafe import one_line
from specbench.bench.engines.engine import GroupOutcome, Outcome, RequestOutcome
from specbench.bench.engines.server import (
    ListedModel,
    ServerClient,
    ServerError,
    SpeculationCounters,
    StreamedAnswer,
    count_tokens,
)
from specbench.bench.grid import Salt, SweepConfig
from specbench.bench.serving import BenchRequest, Workload
from specbench.models.training_metadata import TrainingMetadata
from specbench.options import DecodingOptions
from specbench.results.lines import ServerAnswer, Speculation
from specbench.results.run import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specbench.backends.torch.parity import Difference
    from specbench.bench.engines.own import ModelEngine
    from specbench.bench.passes import PassTimes, SharedTimes
    from specbench.bench.prompts import Prompt
    from specbench.specs.servers import ServerSpec

Api = Literal["chat", "completions"]

ServerPrompt: TypeAlias = str | tuple[Mapping[str, str], ...]
"""A text to be continued, or the messages of a conversation."""

_PROBE = "Count from one to ten."
_PROBE_TOKENS = 16

_RETRIES = 2
"""How often a request is sent again that got no answer at all."""

_PAUSE_S = 1.0
"""Before the first of these; before the next one twice as long."""

_MANY_LISTED = 5


@dataclass(frozen=True, slots=True)
class _Dialect:
    """What a kind of server understands beside the protocol.

    Attributes:
        always: Fields of every request.
        salt: The field whose value keeps its cache of prompts from finding anything.
        sampled: Fields that leave the model's distribution as it is where the server's defaults would cut it.
        caches: Whether its cache of prompts would find something nevertheless.
        tells: Whether it says of every answer what it drafted, and nothing if that is nothing.
    """

    always: Mapping[str, Any] = field(default_factory=dict)
    salt: str | None = None
    sampled: Mapping[str, Any] = field(default_factory=dict)
    caches: bool = False
    tells: bool = False


_WHOLE_DISTRIBUTION = {"top_k": -1, "min_p": 0.0}
_DIALECTS = {
    "specbench": _Dialect(sampled=_WHOLE_DISTRIBUTION, tells=True),  # it keeps nothing of a prompt
    "llamacpp": _Dialect(always={"cache_prompt": False}, sampled=_WHOLE_DISTRIBUTION),
    "vllm": _Dialect(always={"return_token_ids": True}, salt="cache_salt", sampled=_WHOLE_DISTRIBUTION),
    "sglang": _Dialect(always={"return_token_ids": True}, salt="cache_salt", sampled=_WHOLE_DISTRIBUTION),
}
"""By whom a server lists as the owner of its models."""

_UNKNOWN = _Dialect(caches=True)


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """A server that was reached.

    Attributes:
        spec: Its name and address.
        model: The model that is asked for, by the server's name for it.
        owner: Whose models it says it serves.
        has_counters: Whether it tells what it has drafted since its start.
        notes: What the user should know of it, sentences.
    """

    spec: ServerSpec
    model: str
    owner: str
    has_counters: bool
    notes: tuple[str, ...] = ()

    @property
    def described(self) -> str:
        """Its name and that of its model, without any path."""
        return f"{self.spec.name}: {self.model_name}"

    @property
    def model_name(self) -> str:
        """That of its model; of a path the last part."""
        path = re.fullmatch(r"(?:[~./\\]|[A-Za-z]:[/\\]).*[/\\]([^/\\]+)[/\\]*", self.model)
        return one_line(path[1] if path else self.model)

    @property
    def dialect(self) -> _Dialect:
        return _DIALECTS.get(self.owner, _UNKNOWN)

    def drafted(self, answer: StreamedAnswer) -> tuple[int | None, int | None]:
        """Tokens drafted for an answer and kept; ``None`` if it does not say."""
        if answer.drafted is None and self.dialect.tells:
            return 0, 0
        return answer.drafted, answer.accepted

    def speculation(self, answer: StreamedAnswer, meanwhile: SpeculationCounters | None) -> Speculation:
        """What was drafted for an answer: what it says itself, and where it does not, what was counted meanwhile.

        Places are left out where they are not those of the answer: somebody else has been asking.

        Args:
            answer: Of this server.
            meanwhile: What the server counted from before it was asked until the answer was there, if it does.
        """
        drafted, accepted = self.drafted(answer)
        if meanwhile is not None and (drafted is None or accepted is None):
            drafted, accepted = meanwhile.drafted, meanwhile.accepted
        for each in (answer.speculation, meanwhile):
            if each is not None and each.kept_at and (each.drafted, sum(each.kept_at)) == (drafted, accepted):
                return Speculation(
                    drafted=drafted, accepted=accepted, drafts=each.drafts, kept_at=list(each.kept_at)
                )
        return Speculation(drafted=drafted, accepted=accepted)


class ServerEngine:
    """The engine over servers. It reaches them when it is made, and has to be closed.

    Args:
        specs: The servers; the first one is the baseline.
        keys: By the names of the servers, of those that want one.
        api: Which interface is asked.
        tokenizer: The target's; ``None`` if it is not at hand, and counts are the servers' own.
        local: Loads the target here, to judge outputs that part; ``None`` if that is not wanted.
        timeout_s: For connecting, and for every piece of an answer.
        decoding, temperature: As they will be asked at the most, which a first request tries out.
        transport: Sends requests; ``None`` for the network.
        clock: Tells the time in seconds.
        pause: Waits so many seconds.

    Attributes:
        servers: Those reached, in the order of ``specs``.
        salt: How their caches of prompts are defeated.
        unjudged: Why outputs that part were not judged although that was wanted; empty if they were.

    Raises:
        RunError: A server cannot be reached, or does not speak the OpenAI protocol.
        UsageError: It refuses the key or the model, no model is named and it lists several, or nothing tells how many
            tokens its answers have.
    """

    def __init__(
        self,
        specs: Sequence[ServerSpec],
        *,
        keys: Mapping[str, str],
        api: Api = "chat",
        tokenizer: PreTrainedTokenizerBase | None = None,
        local: Callable[[], ModelEngine] | None = None,
        timeout_s: float = 300.0,
        decoding: DecodingOptions | None = None,
        temperature: float = 0.0,
        transport: httpx2.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._api, self._tokenizer, self._local = api, tokenizer, local
        self._clock, self._pause = clock, pause
        self._keys = dict(keys)
        self._judge: ModelEngine | None = None
        self.unjudged = ""
        self._loop = asyncio.Runner()
        self._clients = {
            spec.name: ServerClient(
                spec.name,
                spec.url,
                key=keys.get(spec.name),
                timeout_s=timeout_s,
                transport=transport,
                clock=clock,
            )
            for spec in specs
        }
        try:
            self.servers = tuple(
                self._loop.run(self._reached(spec, temperature, decoding or DecodingOptions()))
                for spec in specs
            )
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
    def heads(self) -> Mapping[str, TrainingMetadata]:
        """Nobody tells how a server's drafters came about."""
        return {}

    def describe_target(self, decoding: DecodingOptions) -> TargetModel:
        """The field ``target`` of ``run.json``: what is known of the model of the first server."""
        return TargetModel(name=self.servers[0].model_name)

    # -- reaching servers ----------------------------------------------------------------------------

    async def _reached(
        self, spec: ServerSpec, temperature: float, decoding: DecodingOptions
    ) -> MeasuredServer:
        """What a server says of itself, and how it answers a first request."""
        client, listed = self._clients[spec.name], list[ListedModel]()
        try:
            listed = await client.models()
            model = spec.model or _only(spec, listed)
            owner = next(
                (each.owner for each in listed if each.name == model), listed[0].owner if listed else ""
            )
            has_counters = await client.counters() is not None
            server = MeasuredServer(spec, model, owner, has_counters)
            prompt: ServerPrompt = _PROBE if self._api == "completions" else _messages(None, _PROBE)
            settings = self._settings(
                server, temperature, decoding.with_changes(max_new_tokens=_PROBE_TOKENS), 0
            )
            answer, _ = await self._ask(server, prompt, settings)
        except ServerError as error:
            raise self._explained(error, spec, listed) from error
        return MeasuredServer(spec, model, owner, has_counters, tuple(self._notes(spec, answer)))

    def _notes(self, spec: ServerSpec, answer: StreamedAnswer) -> list[str]:
        count = count_tokens(answer, self._tokenizer)
        if count.tokens is None:
            raise UsageError(
                f"The server {spec.name} does not say how many tokens its answers have.",
                "Add --target MODEL, whose tokenizer counts them.",
            )
        found = []
        if count.problem is not None:
            found.append(f"{spec.name}: {count.problem}")
        elif self._tokenizer is None:
            found.append(
                f"{spec.name}: tokens are counted by the server and not checked; --target MODEL checks them."
            )
        if len(answer.pieces) == 1 and count.tokens > 2:
            found.append(f"{spec.name}: an answer comes in one piece, so only its whole time is known.")
        return found

    def _explained(
        self, error: ServerError, spec: ServerSpec, listed: Sequence[ListedModel]
    ) -> SpecbenchError:
        """An error of a server that is reached for the first time, with what to change."""
        variable = spec.key_variable
        if error.status in (401, 403):
            if spec.name in self._keys:
                what = f"The server {spec.name} refuses the key in {variable} (status {error.status})."
                return UsageError(what, "Put another one there.")
            what = f"The server {spec.name} wants a key (status {error.status})."
            return UsageError(what, f"Put it into the environment variable {variable}.")
        if error.status is not None and 300 <= error.status < 400:
            return UsageError(error.message, f"Name that one in place of {spec.url}.")
        if error.status == 404 and listed:
            names = ", ".join(one_line(each.name) for each in listed[:_MANY_LISTED])
            return UsageError(
                error.message, f"Its models are {names}; name one behind a #, or check {spec.url}."
            )
        if error.status is not None and 400 <= error.status < 500:
            return UsageError(error.message, f"Check its address {spec.url}, its model and the options.")
        return RunError(error.message, f"Check that it runs at {spec.url}.")

    # -- what a sweep asks for -----------------------------------------------------------------------

    def encode(self, prompt: Prompt, answers: Sequence[Sequence[int]]) -> ServerPrompt:
        assert not answers, "servers answer the first turns"
        if self._api == "chat":
            return _messages(prompt.system, prompt.turns[0])
        return "\n\n".join(part for part in (prompt.system, prompt.turns[0]) if part)

    def generate(
        self, config: SweepConfig, prompt: ServerPrompt, decoding: DecodingOptions, *, seed: int
    ) -> Outcome:
        return self._loop.run(self._alone(config, BenchRequest(prompt, seed), decoding))

    def generate_group(
        self, config: SweepConfig, load: Workload[ServerPrompt], decoding: DecodingOptions
    ) -> GroupOutcome:
        return self._loop.run(self._side_by_side(config, load, decoding))

    def measure_costs(
        self, prompt: ServerPrompt, widths: Sequence[int], abreast: Sequence[int] = ()
    ) -> PassTimes:
        raise RunError("The passes of a server cannot be timed.")

    def measure_shared_costs(
        self,
        prompt: ServerPrompt,
        requests: int,
        widths: Sequence[int],
        only: Collection[str] | None = None,
    ) -> SharedTimes:
        raise RunError("The passes of a server cannot be timed.")

    def difference(
        self, prompt: ServerPrompt, tokens: Sequence[int], plain: Sequence[int], decoding: DecodingOptions
    ) -> Difference | None:
        """What the local copy of the target says, which is loaded for the first difference."""
        from specbench.generate import encode_messages, encode_prompt

        if self._local is None or self._tokenizer is None or self.unjudged:
            return None
        if self.salt != "none":
            self.unjudged = "Prompts began with lines of their own."
            return None
        try:
            self._judge = self._judge or self._local()
        except SpecbenchError as error:
            self.unjudged = str(error)
            return None
        ids = (
            encode_prompt(self._tokenizer, prompt, chat=False)
            if isinstance(prompt, str)
            else encode_messages(self._tokenizer, [dict(each) for each in prompt])
        )
        return self._judge.difference(ids, tokens, plain, decoding)

    # -- asking --------------------------------------------------------------------------------------

    async def _alone(
        self, config: SweepConfig, asked: BenchRequest[ServerPrompt], decoding: DecodingOptions
    ) -> Outcome:
        server = self._by_name[config.drafter]
        before = await self._counters(server)
        answer, attempts = await self._answer(config, asked, decoding)
        meanwhile = await self._since(server, before)
        return self._outcome(answer, attempts, server.speculation(answer, meanwhile))

    async def _side_by_side(
        self, config: SweepConfig, load: Workload[ServerPrompt], decoding: DecodingOptions
    ) -> GroupOutcome:
        server = self._by_name[config.drafter]
        before = await self._counters(server)

        async def answer(asked: BenchRequest[ServerPrompt]) -> tuple[StreamedAnswer, int]:
            return await self._answer(config, asked, decoding)

        crowd = _Crowd(load, answer, self._clock, self._pause)
        seconds = await crowd.served()
        outcomes = {
            number: self._outcome(each.answer, each.attempts, server.speculation(each.answer, None))
            for number, each in crowd.answered.items()
        }
        measured = [outcomes[number] for number in range(len(load.requests))]
        meanwhile = await self._since(server, before)
        return GroupOutcome(
            requests=tuple(
                RequestOutcome(outcome, crowd.answered[number].arrived_s, 0.0)
                for number, outcome in enumerate(measured)
            ),
            seconds=seconds,
            tokens=sum(outcome.tokens for outcome in outcomes.values()),
            speculation=None
            if meanwhile is None
            else Speculation(
                drafted=meanwhile.drafted,
                accepted=meanwhile.accepted,
                drafts=meanwhile.drafts,
                kept_at=list(meanwhile.kept_at),
            ),
        )

    async def _answer(
        self, config: SweepConfig, asked: BenchRequest[ServerPrompt], decoding: DecodingOptions
    ) -> tuple[StreamedAnswer, int]:
        server = self._by_name[config.drafter]
        settings = self._settings(server, config.temperature, decoding, asked.seed)
        return await self._ask(server, self._salted(config, asked), settings)

    async def _ask(
        self, server: MeasuredServer, prompt: ServerPrompt, settings: Mapping[str, Any]
    ) -> tuple[StreamedAnswer, int]:
        """An answer, and how often the server was asked for it; what broke off in its middle is not asked again."""
        client, attempt = self._clients[server.spec.name], 1
        while True:
            try:
                return await client.ask(server.model, prompt, settings), attempt
            except ServerError as error:
                if not error.later or attempt > _RETRIES:
                    raise
            await self._pause(_PAUSE_S * 2 ** (attempt - 1))
            attempt += 1

    def _settings(
        self, server: MeasuredServer, temperature: float, decoding: DecodingOptions, seed: int
    ) -> Json:
        dialect = server.dialect
        return {
            "max_tokens": decoding.max_new_tokens,
            "temperature": temperature,
            **({"seed": seed, "top_p": 1.0, **dialect.sampled} if temperature else {}),
            **({"ignore_eos": True} if decoding.ignore_eos else {}),
            **dialect.always,
            **({dialect.salt: secrets.token_hex(16)} if dialect.salt else {}),
        }

    def _salted(self, config: SweepConfig, asked: BenchRequest[ServerPrompt]) -> ServerPrompt:
        """The prompt, behind a line that is new to the server where its cache has to be defeated so."""
        if self.salt == "none":
            return asked.prompt
        whose = config.drafter if self.salt == "each" else ""
        line = f"[{zlib.crc32(f'{asked.seed}/{whose}'.encode()):08x}]\n"
        if isinstance(asked.prompt, str):
            return line + asked.prompt
        first, *rest = asked.prompt
        return ({**first, "content": line + first["content"]}, *rest)

    async def _counters(self, server: MeasuredServer) -> SpeculationCounters | None:
        return await self._clients[server.spec.name].counters() if server.has_counters else None

    async def _since(
        self, server: MeasuredServer, before: SpeculationCounters | None
    ) -> SpeculationCounters | None:
        """What was drafted since then; ``None`` if the server does not say."""
        now = await self._counters(server)
        if now is None or before is None:
            return None
        try:
            return now.since(before)
        except RunError as error:
            raise RunError(f"{server.spec.name}: {error.message}") from error

    def _outcome(self, answer: StreamedAnswer, attempts: int, speculation: Speculation) -> Outcome:
        count = count_tokens(answer, self._tokenizer)
        if count.tokens is None:
            raise RunError(count.problem or "Nothing tells how many tokens the answer has.")
        ids = answer.ids
        if ids is None and self._tokenizer is not None:
            ids = tuple(self._tokenizer(answer.text, add_special_tokens=False)["input_ids"])
        first = answer.first
        ttft_s = answer.ended_s if first is None else first.at_s
        return Outcome(
            prompt_tokens=answer.prompt_tokens or 0,
            token_ids=ids or (),
            finish_reason=answer.finish_reason,
            prefill_s=ttft_s,
            ttft_s=ttft_s,
            decode_s=max(0.0, answer.ended_s - ttft_s),
            first_tokens=self._first_tokens(answer, count.tokens),
            reported_tokens=count.tokens,
            server=ServerAnswer(
                **to_dict(speculation),
                text=answer.text,
                counted_by=count.source,
                problem=count.problem,
                pieces=len(answer.pieces),
                bursts=answer.bursts,
                cached_tokens=answer.cached_tokens,
                attempts=attempts,
            ),
        )

    def _first_tokens(self, answer: StreamedAnswer, tokens: int) -> int:
        """Tokens of the first piece; 1 where nothing tells."""
        first = answer.first
        if first is None or len(answer.pieces) == 1:
            return tokens
        if first.ids is not None:
            known = len(first.ids)
        elif self._tokenizer is not None:
            known = len(self._tokenizer(first.text, add_special_tokens=False)["input_ids"])
        else:
            known = 1
        return min(max(1, known), tokens)


@dataclass(frozen=True, slots=True)
class _Served:
    """An answer among others, when it was asked for, and how often."""

    answer: StreamedAnswer
    attempts: int
    arrived_s: float


@dataclass
class _Crowd:
    """Requests that are sent to one server side by side.

    Attributes:
        load: Requests, and when they are sent.
        ask: Answers one, and says how often it had to ask.
        clock: Tells the time in seconds.
        pause: Waits so many seconds.
        answered: Whole answers, by the number of the request.
    """

    load: Workload[ServerPrompt]
    ask: Callable[[BenchRequest[ServerPrompt]], Awaitable[tuple[StreamedAnswer, int]]]
    clock: Callable[[], float]
    pause: Callable[[float], Awaitable[object]]
    answered: dict[int, _Served] = field(default_factory=dict)
    sent: int = 0

    async def served(self) -> float:
        """Send them until all that are measured have been answered; how long that took.

        Raises:
            RunError: One of them fails.
        """
        began = self.clock()
        senders = (
            [self._at(number, time_s, began) for number, time_s in enumerate(self.load.times)]
            if self.load.clients is None
            else [self._client(began) for _ in range(self.load.clients)]
        )
        tasks = [asyncio.ensure_future(sender) for sender in senders]
        waiting = set(tasks)
        try:
            while self._left:
                ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
            return self.clock() - began
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _left(self) -> bool:
        return any(number not in self.answered for number in range(len(self.load.requests)))

    async def _client(self, began: float) -> None:
        """One request after the other, for as long as a measured one has not been answered."""
        while self._left:
            number = self.sent
            self.sent += 1
            await self._one(number, began)

    async def _at(self, number: int, time_s: float, began: float) -> None:
        await self.pause(max(0.0, began + time_s - self.clock()))
        await self._one(number, began)

    async def _one(self, number: int, began: float) -> None:
        arrived_s = self.clock() - began
        answer, attempts = await self.ask(self.load.asked(number))
        self.answered[number] = _Served(answer, attempts, arrived_s)


def _messages(system: str | None, text: str) -> tuple[Mapping[str, str], ...]:
    user = {"role": "user", "content": text}
    return (user,) if system is None else ({"role": "system", "content": system}, user)


def _only(spec: ServerSpec, listed: Sequence[ListedModel]) -> str:
    """The one model of a server.

    Raises:
        UsageError: There are several, or none.
    """
    if len(listed) == 1:
        return listed[0].name
    names = ", ".join(one_line(each.name) for each in listed[:_MANY_LISTED])
    raise UsageError(
        f"The server {spec.name} lists {len(listed)} models{': ' if names else ''}{names}.",
        "Name one behind a # of its --server.",
    )


def _salt_for(servers: Sequence[MeasuredServer]) -> Salt:
    """What defeats the caches of all servers, with the same prompts for all wherever that can be."""
    caching = [server for server in servers if server.dialect.caches]
    if not caching:
        return "none"
    places = Counter((server.spec.url, server.model) for server in caching)
    return "each" if max(places.values()) > 1 else "shared"
