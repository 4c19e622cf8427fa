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
        sampled: Fields that switch off the server's default truncation of the distribution (such as top-k).
        plain: Fields that switch speculation off for a request; empty if none do.
        caches: Whether its prompt cache finds something nevertheless.
        reports_drafts: Whether every answer reports draft counts, with 0 for missing ones.
        counts_if_on: Whether `/metrics` has draft counters only if speculation is configured.
        about: Path of a page with the server's configuration; empty if there is none.
    """

    always: Mapping[str, Any] = field(default_factory=dict)
    cold: Mapping[str, Any] = field(default_factory=dict)
    salt: str | None = None
    sampled: Mapping[str, Any] = field(default_factory=dict)
    plain: Mapping[str, Any] = field(default_factory=dict)
    caches: bool = False
    reports_drafts: bool = False
    counts_if_on: bool = False
    about: str = ""

    def without_cache(self) -> Json:
        """Return the fields with which a request finds nothing in the prompt cache."""
        return {**self.cold, **({self.salt: secrets.token_hex(16)} if self.salt else {})}


_WHOLE_DISTRIBUTION = {"top_k": -1, "min_p": 0.0}
_DIALECTS = {
    "specbench": Dialect(  # it caches no prompts
        sampled=_WHOLE_DISTRIBUTION, plain={"speculation": "off"}, reports_drafts=True, about="/v1/models"
    ),
    "llamacpp": Dialect(cold={"cache_prompt": False}, sampled=_WHOLE_DISTRIBUTION, about="/props"),
    "vllm": Dialect(
        always={"return_token_ids": True}, salt="cache_salt", sampled=_WHOLE_DISTRIBUTION, counts_if_on=True
    ),
    "sglang": Dialect(
        always={"return_token_ids": True},
        salt="cache_salt",
        sampled=_WHOLE_DISTRIBUTION,
        about="/server_info",
    ),
}
"""By the owner that a server lists for its models."""

_UNKNOWN = Dialect(caches=True)


def dialect_of(owner: str) -> Dialect:
    """Return the dialect of the servers whose models have this owner."""
    return _DIALECTS.get(owner, _UNKNOWN)
