"""Specs of servers to measure, with the environment variables of their API keys, and of engines to start."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from specbench.base.errors import UsageError, unknown
from specbench.specs.notation import Spec, option, read_options, split_spec

KEY_PREFIX = "SPECBENCH_KEY_"
"""Prefix of the environment variables that hold keys, followed by the server's name in capitals."""

_ROLES = ("server", "against")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}", re.ASCII)
_ENDPOINT = re.compile(r"/(chat/completions|completions|models)/*$")
_FORM = "Write NAME=URL or NAME=URL#MODEL, as in plain=http://127.0.0.1:8000/v1."


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A server with the OpenAI protocol.

    Attributes:
        url: The base URL, including ``/v1``; it contains no key.
        model: The server's name of the model; ``None`` for the only model that it lists.
    """

    name: str
    url: str
    model: str | None = None

    @property
    def called(self) -> str:
        """What messages call it: a server without a name of its own by its address."""
        return f"at {urlsplit(self.url).netloc}" if self.name in _ROLES else self.name

    @property
    def key_variable(self) -> str:
        return KEY_PREFIX + re.sub(r"\W", "_", self.name).upper()


def parse_server(text: str, role: Literal["server", "against"] | None = None) -> ServerSpec:
    """Parse ``NAME=URL`` or ``NAME=URL#MODEL``; with a ``role`` the name may be missing.

    Raises:
        UsageError: The text has neither form, or the address has a password or a query, which can contain keys.
    """
    if role is not None and not re.match(r"[\w.-]+=", text):
        text = f"{role}={text}"
    name, equals, address = text.strip().partition("=")
    url, _, model = address.partition("#")
    if not equals or not url:
        raise UsageError("--server has no name or no address.", _FORM)
    if not _NAME.fullmatch(name):
        raise UsageError(
            "The name of a --server has other characters than letters, digits, '_', '.' and '-'.", _FORM
        )
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        known = False
    if not known or not url.isprintable() or " " in url:
        raise UsageError(f"{url!r} is no http:// or https:// address.", _FORM)
    if parts.username is not None or parts.password is not None or parts.query:
        variable = ServerSpec(name, url).key_variable
        raise UsageError(
            f"The address of the server {name} holds a password or a query.",
            f"Leave it out: a key is read from the environment variable {variable}.",
        )
    path = _ENDPOINT.sub("", parts.path).rstrip("/") or "/v1"
    return ServerSpec(name, f"{parts.scheme}://{parts.netloc}{path}", model or None)


def parse_servers(texts: Sequence[str]) -> tuple[ServerSpec, ...]:
    """Parse servers, the first of which is the baseline; raise ``UsageError`` if two have the same name."""
    servers = tuple(map(parse_server, texts))
    variables = Counter(each.key_variable for each in servers)
    alike = [each.name for each in servers if variables[each.key_variable] > 1]
    if alike:
        raise UsageError(f"Servers have the same name: {', '.join(alike)}.", "Give each a name of its own.")
    return servers


ENGINES = ("vllm", "sglang", "llama.cpp")
"""Engines whose servers are started."""


@dataclass(frozen=True)
class EngineSpec(Spec, word="--engine"):
    """An engine whose servers are started, as ``--engine`` names it."""

    name: str
    servers: int | None = option(
        None, "servers=N", "servers that run at a time (as many as fit into memory)", least=1
    )
    start_timeout: float = option(
        600.0, "start-timeout=SECONDS", "how long a start may take", parse=float, expected="number", least=1
    )


def parse_engine(text: str) -> EngineSpec:
    """Parse an engine with its options.

    Raises:
        UsageError: There is no such engine or option, or a value is out of range.
    """
    name, given = split_spec(text)
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    return EngineSpec(name, **read_options(name, given, EngineSpec.options()))
