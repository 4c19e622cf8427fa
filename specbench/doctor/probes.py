"""The requests of `specbench doctor`: a few dozen short ones, one at a time, and what came back."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specbench.base.errors import RunError
from specbench.base.record import Json
from specbench.servers.client import ServerError, choice_of, text_of
from specbench.servers.dialects import Dialect, dialect_of

if TYPE_CHECKING:
    from specbench.servers.client import ServerClient, SpeculationCounters, StreamedAnswer

TOKENS = 64
"""Tokens of an answer whose acceptance is counted."""

TEMPERATURE = 0.8
"""At which the prompts are asked once more, because drafts can be accepted at 0 only."""

_SHORT = 16
_LEAST = 24
_LATE_S = 0.3
"""Seconds to wait before reading counters, which servers update after the answer."""

_PROMPTS = (
    "Repeat this list three times: red apples, green pears, yellow lemons, blue plums, black cherries.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Explain in a few sentences why the sky is blue.",
    'Write the capitals of France, Spain, Italy and Poland as JSON: [{"country": "...", "capital": "..."}].',
)
_RULES = (8, 20, 50, 125)
"""Rules in the texts of some 250 to 4,000 tokens with which the prompt cache is tried."""

_PATIENCE_S = 10.0
"""If a text takes longer to read, longer ones are not tried."""
_QUESTIONS = ("When is room 3 open?", "And how many seats has room 7?")


def draft_counts(answers: Sequence[StreamedAnswer]) -> tuple[int, int]:
    """Return how many tokens were drafted and accepted, as far as the answers report it."""
    return sum(answer.drafted or 0 for answer in answers), sum(answer.accepted or 0 for answer in answers)


def _rules(count: int) -> str:
    rooms = ("library", "kitchen", "workshop", "garden")
    return " ".join(
        f"Rule {i}: the {rooms[i % 4]} of room {i} is open from {8 + i % 4} to {16 + i % 5} and has {i} seats."
        for i in range(1, count + 1)
    )


@dataclass
class Observations:
    """What a server did.

    Attributes:
        owner, model: As the server names them.
        answers: Answers to different prompts, greedy.
        counted: Increase of the server's counters over ``answers``; ``None`` without counters.
        before: Counters before the first request.
        uncounted: Whether there is a page of metrics, without such counters.
        idle: Increase of the counters while nothing was asked.
        sampled: Drafted and accepted tokens at ``TEMPERATURE``.
        again: Texts of one prompt, greedy: two streams, and one answer without a stream if there is one.
        turns: The answers to the first two turns of conversations, which begin with longer and longer texts.
        logprobs: The field of that name in an answer that was asked for it; ``None`` if the server refused it.
        failed: Why a probe has no result, by its name.
    """

    owner: str
    model: str
    answers: list[StreamedAnswer] = field(default_factory=list)
    counted: SpeculationCounters | None = None
    before: SpeculationCounters | None = None
    uncounted: bool = False
    idle: SpeculationCounters | None = None
    sampled: tuple[int, int] = (0, 0)
    again: list[str] = field(default_factory=list)
    turns: list[tuple[StreamedAnswer, StreamedAnswer]] = field(default_factory=list)
    logprobs: Json | None = None
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def dialect(self) -> Dialect:
        return dialect_of(self.owner)


class Examination:
    """The probes of one server.

    Args:
        client: The connected client.
        model, owner: As the server lists them.
    """

    def __init__(self, client: ServerClient, model: str, owner: str) -> None:
        self._client = client
        self._chat = True  # else completions
        self.seen = Observations(owner, model)

    async def run(self) -> Observations:
        """Send all requests.

        Raises:
            ServerError: The first request fails.
        """
        seen, client = self.seen, self._client
        await self._first()
        seen.before = await client.counters()
        seen.uncounted = seen.before is None and bool(await client.metrics())
        await self._acceptance()
        await self._attempt("repeat", self._repeat())
        await self._attempt("cache", self._turns())
        if any(answer.drafted for answer in seen.answers) or (seen.counted and seen.counted.drafted):
            await self._attempt("temperature", self._sampled())
        return seen

    # -- probes --------------------------------------------------------------------------------------

    async def _first(self) -> None:
        """Send a short request that is not counted, and find the endpoint."""
        try:
            await self._ask(_PROMPTS[2], _SHORT)
        except ServerError as error:
            if error.status is None or not 400 <= error.status < 500:
                raise
            self._chat = False
            try:
                await self._ask(_PROMPTS[2], _SHORT)
            except ServerError:
                raise error from None

    async def _acceptance(self) -> None:
        """Ask all prompts, and read the counters."""
        seen = self.seen
        for prompt in _PROMPTS:
            if not await self._attempt("answers", self._add_answer(prompt)):
                break
        counters = await self._since_start()
        if counters and (counters.drafted, counters.accepted) != draft_counts(seen.answers):
            await asyncio.sleep(_LATE_S)  # some servers count a moment later
            counters = await self._since_start()
        seen.counted = counters
        if counters is not None:
            await asyncio.sleep(_LATE_S)
            later = await self._since_start()
            seen.idle = None if later is None else later.since(counters)

    async def _sampled(self) -> None:
        """Ask all prompts at a temperature, and count drafts as the answers do, or else the counters."""
        seen, before = self.seen, await self._since_start()
        answers = [await self._ask(prompt, TOKENS, temperature=TEMPERATURE) for prompt in _PROMPTS]
        seen.sampled = draft_counts(answers)
        await asyncio.sleep(_LATE_S)
        now = await self._since_start()
        if now is not None and before is not None and not seen.sampled[0]:
            meanwhile = now.since(before)
            seen.sampled = meanwhile.drafted, meanwhile.accepted

    async def _add_answer(self, prompt: str) -> None:
        self.seen.answers.append(await self._ask(prompt, TOKENS))

    async def _since_start(self) -> SpeculationCounters | None:
        now, before = await self._client.counters(), self.seen.before
        if now is None or before is None:
            return None
        try:
            return now.since(before)
        except RunError as error:
            self.seen.failed["counters"] = error.message
            return None

    async def _repeat(self) -> None:
        """Ask a prompt again, and once more without a stream and with log probabilities."""
        seen = self.seen
        if not seen.answers:
            return
        again = await self._ask(_PROMPTS[0], TOKENS)
        seen.again = [seen.answers[0].text, again.text]
        wanted = {"logprobs": True, "top_logprobs": 5} if self._chat else {"logprobs": 5}
        settings = {**seen.dialect.settings(_LEAST), **wanted}
        try:
            body = await self._client.ask_whole(seen.model, self._prompt(_PROMPTS[0]), settings)
        except ServerError as error:
            if error.status is None or not 400 <= error.status < 500:
                raise
            return
        choice = choice_of(body)
        text, logprobs = text_of(choice), choice.get("logprobs")
        seen.again += [text] if text else []
        seen.logprobs = logprobs if isinstance(logprobs, dict) else None

    async def _turns(self) -> None:
        """Ask two turns of conversations about texts that are new to the server."""
        for count in _RULES:
            asked = (
                f"{secrets.token_hex(4)}. These are the rules of a house. {_rules(count)}\n\n{_QUESTIONS[0]}"
            )
            try:
                first = await self._ask(asked, _SHORT, cached=True)
                history = (asked, first.text or "I do not know.", _QUESTIONS[1])
                self.seen.turns.append((first, await self._ask(history, _SHORT, cached=True)))
            except ServerError as error:
                if self.seen.turns and error.status is not None and 400 <= error.status < 500:
                    return  # longer than its context
                raise
            if first.ended_s > _PATIENCE_S:
                return

    # -- requests ------------------------------------------------------------------------------------

    async def _attempt(self, name: str, probe: Awaitable[object]) -> bool:
        """Run a probe; return whether it has succeeded."""
        try:
            await probe
        except ServerError as error:
            self.seen.failed[name] = error.message
            return False
        return True

    async def _ask(
        self,
        prompt: str | Sequence[str],
        tokens: int,
        *,
        temperature: float = 0.0,
        cached: bool = False,
    ) -> StreamedAnswer:
        settings = self.seen.dialect.settings(tokens, temperature, cached=cached)
        return await self._client.ask(self.seen.model, self._prompt(prompt), settings)

    def _prompt(self, prompt: str | Sequence[str]) -> str | list[dict[str, str]]:
        """Return a prompt, or the turns of a conversation by user and model, as the endpoint takes it."""
        turns = [prompt] if isinstance(prompt, str) else list(prompt)
        if not self._chat:
            return "\n".join(turns)
        return [
            {"role": "assistant" if number % 2 else "user", "content": text}
            for number, text in enumerate(turns)
        ]
