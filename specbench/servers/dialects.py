"""What kinds of servers understand and report in addition to the OpenAI protocol."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specbench.base.record import Json


@dataclass(frozen=True, slots=True)
class Dialect:
    """The fields that a kind of server understands in addition to the protocol.

    Attributes:
        always: Fields of every request.
        cold: Fields that switch the prompt cache off.
        salt: Name of a field; with a new value in it, the server's prompt cache finds nothing.
        plain: Fields that switch speculation off for a request; empty if none do.
        known: Whether the kind is known: the fields can be relied on, and prompt caches are avoided by them.
        reports_drafts: Whether every answer reports draft counts, with 0 for missing ones.
        counts_if_on: Whether `/metrics` has draft counters only if speculation is configured.
    """

    always: Mapping[str, Any] = field(default_factory=dict)
    cold: Mapping[str, Any] = field(default_factory=dict)
    salt: str | None = None
    plain: Mapping[str, Any] = field(default_factory=dict)
    known: bool = True
    reports_drafts: bool = False
    counts_if_on: bool = False

    def settings(self, tokens: int, temperature: float = 0.0, seed: int = 0, *, cached: bool = False) -> Json:
        """Return the fields of a request for an answer.

        Args:
            tokens: The longest answer.
            temperature, seed: Above 0 the whole distribution is sampled: a server's own top-k and min-p are switched
                off.
            cached: Whether the server may take the prompt from its cache.
        """
        made: Json = {"max_tokens": tokens, "temperature": temperature, **self.always}
        if temperature:
            made |= {"seed": seed, "top_p": 1.0, **({"top_k": -1, "min_p": 0.0} if self.known else {})}
        if not cached:
            made |= {**self.cold, **({self.salt: secrets.token_hex(16)} if self.salt else {})}
        return made


_DIALECTS = {
    "specbench": Dialect(
        always={"return_token_ids": True},
        plain={"speculation": "off"},
        reports_drafts=True,
    ),
    "llamacpp": Dialect(cold={"cache_prompt": False}),
    "vllm": Dialect(always={"return_token_ids": True}, salt="cache_salt", counts_if_on=True),
    "sglang": Dialect(always={"return_token_ids": True}, salt="cache_salt"),
}
"""By the owner that a server lists for its models. specbench itself caches no prompts."""

_UNKNOWN = Dialect(known=False)


def dialect_of(owner: str) -> Dialect:
    """Return the dialect of the servers whose models have this owner."""
    return _DIALECTS.get(owner, _UNKNOWN)
