"""Check the sampled output of a running server: ask it the same prompts many times, and test what it draws.

Requests come in rounds: each prompt once to each server, all at the same time, with new seeds. So whatever changes
meanwhile changes for all. After an eighth, a quarter, a half and all of the rounds the answers are tested.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, product
from typing import Any, Literal

import numpy as np

from specbench.base.errors import UsageError
from specbench.base.record import Json
from specbench.bench.engines.servers import explain, only_model
from specbench.check.bias import LOOKS, Comparison, Positions, compare_samples, compare_with_target, level_at
from specbench.check.deviation import clean_rows
from specbench.decoding.sampling import Sampling
from specbench.models.target import Target
from specbench.servers.client import ServerClient, ServerError, choice_of, facts_of, ids_of, text_of
from specbench.servers.dialects import dialect_of
from specbench.specs.servers import ServerSpec

PROMPTS, TOKENS = 4, 16
"""Usual numbers of prompts, and of tokens of an answer."""

_RETRIES, _PAUSE_S = 3, 1.0
_LIKELIEST = 20
"""Tokens of each position whose probabilities are told apart: as many log probabilities as servers give."""

_LEAST_DRAFTED = 100
_LARGEST = 0.5
"""Smallest deviation that a sample can show above which it says nothing."""

_OTHERWISE = "Name a second server with --against, or the model that it serves with --target."

_WORD = re.compile(r"\s*(?:[\u2e80-\uffff]|\w+|\W)")
"""A word with the space before it; an ideograph is one."""

Messages = Sequence[Mapping[str, str]]
Verdict = Literal["no deviation", "biased", "too few positions"]

Scored = tuple[np.ndarray, np.ndarray]
"""The probabilities of the likeliest tokens and of the others together, [positions, tokens + 1], and which of them the
answer's tokens are, [positions].
"""

Score = Callable[[int, Sequence[int], bool], Scored]
"""Scores an answer with the target: the number of its prompt, its token ids, and whether it ended by itself."""


@dataclass(frozen=True)
class _Answer:
    """An answer: its tokens or words, their probabilities if known, and its draft tokens if the server reports them."""

    units: tuple[Hashable, ...]
    scored: Scored | None
    drafted: int | None


@dataclass
class ServerCheck:
    """Asks a server, and perhaps another one, and tests the answers: iterate over ``run``. What was found so far can be
    read at any time.

    Attributes:
        specs: The server, and the one that it is compared with; the same twice compares it with itself without
            speculation.
        prompts: Conversations to answer.
        tokens: Most tokens of an answer.
        rounds: How often each prompt is asked.
        score: Scores answers with the target. Without it, and without another server, the server's own log
            probabilities are taken.
        lengths: Tokens of the prompts, for a target; a server that reads another number applies another template.
        answers: Answers by server, prompt and round.
        result: What the last look said of tokens after the first; ``None`` before it.
        first: What it said of first tokens, which are never drafted.
        biased: Whether a look found a bias, which ends the check.
    """

    specs: Sequence[ServerSpec]
    keys: Mapping[str, str]
    prompts: Sequence[Messages]
    temperature: float
    tokens: int
    rounds: int
    score: Score | None = None
    lengths: Sequence[int] = ()
    answers: list[list[list[_Answer]]] = field(default_factory=list)
    result: Comparison | None = None
    first: Comparison | None = None
    biased: bool = False
    _looked: int = 0

    @property
    def requests(self) -> int:
        """How many requests the whole check sends, besides one to connect with each server."""
        return len(self.specs) * len(self.prompts) * self.rounds

    @property
    def done(self) -> int:
        """Rounds that are complete."""
        return len(self.answers[-1][-1]) if self.answers else 0

    def run(self) -> Iterator[int]:
        """Ask and test, and yield before each round how many are done.

        Raises:
            RunError: A server cannot be reached, or fails.
            UsageError: It refuses the key or the model, or does not tell what the check needs.
        """
        with asyncio.Runner() as runner:
            clients = [
                ServerClient(spec.called, spec.url, key=self.keys.get(spec.name)) for spec in self.specs
            ]
            try:
                fields = [runner.run(self._connect(number, client)) for number, client in enumerate(clients)]
                looks = {math.ceil(self.rounds * fraction) for fraction in LOOKS}
                while self.done < self.rounds and not self.biased:
                    yield self.done
                    self._keep(runner.run(self._round(clients, fields)))
                    if self.done in looks:
                        self.look()
            finally:
                for client in clients:
                    runner.run(client.close())

    def look(self) -> None:
        """Test the answers of all complete rounds, unless that has been done."""
        if self.done == self._looked:
            return
        level = level_at(self.done / self.rounds, self._looked / self.rounds)
        self._looked = self.done
        if len(self.specs) > 1:
            units = [[[answer.units for answer in group] for group in server] for server in self.answers]
            firsts = [[[answer[:1] for answer in group] for group in server] for server in units]
            self.result = compare_samples(units[0], units[1], level)
            self.first = compare_samples(firsts[0], firsts[1])
        else:
            self.result = compare_with_target(self._positions(first=False), level)
            self.first = compare_with_target(self._positions(first=True))
        self.biased = self.result.p <= level

    # -- asking --------------------------------------------------------------------------------------

    async def _connect(self, number: int, client: ServerClient) -> Json:
        """Return the fields of a server's requests, after a first one."""
        spec, listed = self.specs[number], dict[str, str]()
        try:
            listed = await client.models()
            model = spec.model or only_model(spec, listed)
            dialect = dialect_of(listed.get(model, ""))
            fields = {"model": model, **dialect.settings(self.tokens, self.temperature, cached=True)}
            if number and self.specs[0] == spec:
                if not dialect.plain:
                    raise UsageError(
                        "No field of a request switches the speculation of this server off.",
                        "Start another server without speculation, and name it with --against.",
                    )
                fields |= dialect.plain
            if self.against == "log probabilities":
                fields |= {"logprobs": True, "top_logprobs": _LIKELIEST}
            answer = await self._ask(client, fields, 0, 0)
            if self.against == "target" and not ids_of(choice_of(answer)):
                fields |= {"logprobs": True}  # llama.cpp names tokens beside their log probabilities alone
                answer = await self._ask(client, fields, 0, 0)
            self._read(0, answer)
        except ServerError as error:
            raise explain(error, spec, listed, has_key=spec.name in self.keys) from error
        return fields

    async def _round(self, clients: Sequence[ServerClient], fields: Sequence[Json]) -> list[Any]:
        """Return what all servers answer to all prompts, by server and prompt."""
        seeds, prompts = count(1 + self.done * len(clients) * len(self.prompts)), range(len(self.prompts))
        pairs = product(zip(clients, fields, strict=True), prompts)
        return await asyncio.gather(*(self._ask(*server, prompt, next(seeds)) for server, prompt in pairs))

    async def _ask(self, client: ServerClient, fields: Json, prompt: int, seed: int) -> Json:
        """Return the body of an answer. A request that got none is sent again."""
        settings = {**fields, "seed": seed}
        model, attempt = settings.pop("model"), 0
        while True:
            try:
                return await client.ask_whole(model, self.prompts[prompt], settings)
            except ServerError as error:
                if not error.retry or attempt == _RETRIES:
                    raise
            await asyncio.sleep(_PAUSE_S * 2**attempt)
            attempt += 1

    # -- reading answers -----------------------------------------------------------------------------

    def _keep(self, received: Sequence[Json]) -> None:
        """Add the answers of a round."""
        prompts = len(self.prompts)
        read = [self._read(number % prompts, answer) for number, answer in enumerate(received)]
        self.answers = self.answers or [[[] for _ in self.prompts] for _ in self.specs]
        for number, answer in enumerate(read):
            self.answers[number // prompts][number % prompts].append(answer)

    def _read(self, prompt: int, body: Json) -> _Answer:
        choice = choice_of(body)
        facts, ended = facts_of(body, choice), choice.get("finish_reason") != "length"
        drafted, read = facts.get("drafted"), facts.get("prompt_tokens")
        if self.against == "server":
            words = _WORD.findall(text_of(choice))
            return _Answer((*words, "") if ended else tuple(words), None, drafted)
        if self.score is None:
            entries = _entries(choice)
            return _Answer(tuple(map(_name, entries)), _own_probabilities(entries), drafted)
        ids = ids_of(choice) or tuple(entry["id"] for entry in _entries(choice) if "id" in entry)
        if not ids and not ended:
            what = "The server does not name the tokens of its answers, so --target cannot score them."
            raise UsageError(what, "Compare it with a second server (--against).")
        if read is not None and self.lengths and read != self.lengths[prompt]:
            raise UsageError(
                f"The server reads a prompt of {self.lengths[prompt]} tokens as {read}.",
                "Name the model that it serves with --target, and start it with the same chat template.",
            )
        return _Answer(ids, self.score(prompt, ids, ended), drafted)

    def _positions(self, *, first: bool) -> Positions:
        """Return the first tokens of all answers, or all others, with their probabilities."""
        probabilities, tokens, answers, contexts = [], [], [], []
        for prompt, group in enumerate(self.answers[0]):
            for number, answer in enumerate(group):
                assert answer.scored is not None
                places = range(len(answer.scored[1]))
                for place in places[:1] if first else places[1:]:
                    contexts.append(hash((prompt, *answer.units[:place])))
                    probabilities.append(answer.scored[0][place])
                    tokens.append(answer.scored[1][place])
                    answers.append(prompt * self.rounds + number)
        return Positions(np.array(probabilities), np.array(tokens), np.array(answers), np.array(contexts))

    # -- the verdict ---------------------------------------------------------------------------------

    @property
    def _tested(self) -> list[_Answer]:
        return [answer for group in self.answers[0] for answer in group] if self.answers else []

    @property
    def positions(self) -> int:
        """Tokens, or words, behind the first one of an answer of the tested server."""
        return sum(max(0, len(answer.units) - 1) for answer in self._tested)

    @property
    def drafted(self) -> int | None:
        """Draft tokens that the tested server reports; ``None`` if it does not."""
        counts = [answer.drafted for answer in self._tested]
        return None if None in counts else sum(filter(None, counts))

    @property
    def verdict(self) -> Verdict:
        """What is known so far; what could hide a large deviation, or has hardly any drafts, vouches for nothing."""
        if self.biased:
            return "biased"
        detectable = None if self.result is None else self.result.detectable
        few = self.hardly_drafted or detectable is None or detectable > _LARGEST
        return "too few positions" if few else "no deviation"

    @property
    def hardly_drafted(self) -> bool:
        """Whether the tested server reports next to no drafts."""
        return self.drafted is not None and self.drafted < _LEAST_DRAFTED

    @property
    def complete(self) -> bool:
        """Whether nothing is left to ask."""
        return self.biased or self.done == self.rounds

    @property
    def against(self) -> Literal["server", "target", "log probabilities"]:
        """What the answers are compared with."""
        if len(self.specs) > 1:
            return "server"
        return "log probabilities" if self.score is None else "target"

    def to_dict(self) -> Json:
        """Return the JSON object."""
        return {
            "check": "server",
            "verdict": self.verdict,
            "against": self.against,
            "p": None if self.result is None else self.result.p,
            "detectable": None if self.result is None else self.result.detectable,
            "first_token_p": None if self.first is None else self.first.p,
            "prompts": len(self.prompts),
            "answers": self.done * len(self.prompts),
            "positions": self.positions,
            "drafted": self.drafted,
            "complete": self.complete,
        }


def target_score(target: Target, sampling: Sampling, prompts: Sequence[Sequence[int]]) -> Score:
    """Return what scores answers to prompts, given as token ids, with a target."""
    ends, number = target.end_ids, min(_LIKELIEST, target.vocab_size)

    def score(which: int, ids: Sequence[int], ended: bool) -> Scored:
        prompt = prompts[which]
        if ended and not set(ids[-1:]) & set(ends):
            ids = (*ids, *ends[:1])  # servers may leave it out
        at = sampling.at(len(prompt), ends)
        rows, chosen = [], []
        for place, logits in enumerate(clean_rows(target.scorer, prompt, ids)):
            best = at.probabilities(logits.unsqueeze(0), [*prompt, *ids[:place]])[0].topk(number)
            values, likeliest = best.values.double().tolist(), best.indices.tolist()
            rows.append([*values, max(0.0, 1.0 - sum(values))])
            chosen.append(likeliest.index(ids[place]) if ids[place] in likeliest else number)
        return np.array(rows), np.array(chosen)

    return score


def _entries(choice: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what an answer says of each token.

    Raises:
        UsageError: It says nothing.
    """
    logprobs = choice.get("logprobs")
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(entries, list) or (not entries and choice.get("finish_reason") == "length"):
        raise UsageError("The server gives no log probabilities.", _OTHERWISE)
    return [entry for entry in entries if isinstance(entry, dict)]


def _own_probabilities(entries: Sequence[Mapping[str, Any]]) -> Scored:
    """Return the probabilities of tokens as the server itself reports them.

    The last one listed is left out: vLLM lists the drawn token in its place if that is less likely, so what is listed
    would depend on what was drawn.

    Raises:
        UsageError: It does not, or for some tokens alone.
    """
    rows, chosen = list[list[float]](), list[int]()
    for entry in entries:
        try:
            best = {_name(other): math.exp(min(0.0, other["logprob"])) for other in entry["top_logprobs"]}
        except (AttributeError, KeyError, TypeError) as error:
            raise UsageError("The server's log probabilities have another form.", _OTHERWISE) from error
        if not best:  # llama.cpp: what is left then is not distributed as the target's tokens
            raise UsageError("The server gives no log probabilities of accepted draft tokens.", _OTHERWISE)
        ranked = sorted(best, key=lambda token: -best[token])[: min(len(best), _LIKELIEST) - 1]
        values = [best[token] for token in ranked] + [0.0] * (_LIKELIEST - len(ranked))
        name = _name(entry)
        rows.append([*values, max(0.0, 1.0 - sum(values))])
        chosen.append(ranked.index(name) if name in ranked else _LIKELIEST)
    return np.array(rows), np.array(chosen)


def _name(entry: Mapping[str, Any]) -> str:
    """Return what tells a token from others: its text and, since parts of characters look alike, its bytes."""
    return f"{entry.get('token')} {entry.get('bytes')}"
