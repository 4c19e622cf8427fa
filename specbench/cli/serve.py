"""`specbench serve`: speculative decoding by the OpenAI protocol."""

from __future__ import annotations

import ipaddress
import math
import socket
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.base.errors import UsageError
from specbench.base.textsafe import counted
from specbench.cli import options as opt
from specbench.cli.policy import parse_recipe
from specbench.cli.progress import starting
from specbench.options import (
    CacheOptions,
    DecodingOptions,
    SamplingOptions,
    panel,
)

if TYPE_CHECKING:
    from specbench.models.target import Target

_MOST_TOKENS, _QUEUE = 1024, 64
"""Default length of an output, and how many requests may wait."""

_server = panel("Server")


def serve(
    ctx: typer.Context,
    *,
    host: Annotated[
        str,
        _server(
            "--host ADDRESS", "Address to listen on; 0.0.0.0 accepts everybody who reaches this machine."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, _server("--port N", "Port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = 8000,
    batch: Annotated[int, _server("--batch N", "Requests decoded at a time.", min=1)] = 8,
    kv_memory: Annotated[
        int, _server("--kv-memory MB", "Most memory for the target's KV cache.", min=1)
    ] = 1024,
    drafting: opt.DraftingOptions,
    decoding: Annotated[DecodingOptions, opt.Fields("max_new_tokens", max_new_tokens=_MOST_TOKENS)],
    caching: CacheOptions,
    sampling: Annotated[SamplingOptions, opt.Fields("temperature")],
    quiet: Annotated[bool, opt.output("--quiet -q", "No progress, no notes.")] = False,
) -> None:
    """Serve a model by the OpenAI protocol, by default to this machine only.

    Decoding and sampling options are the defaults of requests.
    """
    from specbench.base.progress import quiet_transformers
    from specbench.cli.summary import show_notes

    _require_extra()
    with ExitStack() as stack:
        _listening(host, port).close()  # a port that is taken is not found out after the loading
        with starting(quiet) as progress:
            recipe = parse_recipe(ctx, drafting, decoding, caching, sampling)
            recipe.check("batch")
            from specbench.cli.setting import facts
            from specbench.loaded import load_recipe
            from specbench.serve.engine import Engine
            from specbench.serve.server import Server

            stack.enter_context(quiet_transformers())
            setting = load_recipe(recipe, progress)
            engine = Engine(
                setting.target,
                setting.drafter,
                max_batch=batch,
                max_waiting=_QUEUE,
                pool_tokens=None if batch == 1 else _pool_tokens(setting.target, batch, kv_memory),
            )
        listening = stack.enter_context(_listening(host, port))
        address, port = listening.getsockname()[:2]
        url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        if not any((drafting.recipe, drafting.draft_policy, drafting.gamma)):
            recipe = replace(recipe, policy=None)  # each request has that of its own temperature
        if not quiet:
            notes = [*setting.target.language_model.notes, *facts(setting)]
            if batch > 1 and engine.factory.why_not_batched is not None:
                notes.append(f"Requests do not share forward passes: {engine.factory.why_not_batched}")
            if not ipaddress.ip_address(address).is_loopback:
                notes.append(
                    "The server is open to everybody who reaches this machine: no keys, no encryption."
                )
            notes.append(f"{setting.models}, is served on {url}/v1 (Ctrl-C ends it).")
            show_notes(notes, spaced=False)
        Server(engine, recipe, listening).run()


def _require_extra() -> None:
    """Refuse to begin without the packages that only this command needs."""
    from importlib.util import find_spec

    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"`specbench serve` needs {', '.join(missing)}.",
            "Install the extra: pip install 'specbench-llm[serve]'.",
        )


def _listening(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        UsageError: The address is not available.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise UsageError(
            f"Nothing can listen on port {port} of {host!r}: {reason}.", "Give another --port or --host."
        ) from error


def _pool_tokens(target: Target, batch: int, megabytes: int) -> int:
    """Return the capacity of the KV cache, in tokens.

    Raises:
        UsageError: It is too small for a request.
    """
    from specbench.backends.torch.pools import cache_size
    from specbench.generate_many import TREE_POSITIONS

    size = cache_size(target.language_model.model)
    tokens, least = size.tokens(megabytes * 2**20, batch), 2 * TREE_POSITIONS
    if tokens < least:
        raise UsageError(
            f"--kv-memory {megabytes} holds {counted(max(0, tokens), 'token')}: too few for a request.",
            f"Give at least {math.ceil((least * size.token + batch * size.request) / 2**20)}.",
        )
    limit = target.scorer.context_limit
    return tokens if limit is None else min(tokens, batch * (limit + TREE_POSITIONS))
