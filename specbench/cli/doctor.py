"""`specbench doctor`: what one running server does with its drafts, and what is wrong with its answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specbench.cli.console import write_json, write_parts
from specbench.cli.options import JsonOption
from specbench.options import panel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.doctor.probes import Observations
    from specbench.findings.catalog import Finding
    from specbench.show.document import Part
    from specbench.specs.servers import ServerSpec

_option = panel("Options")
_LABELS = {"problem": "PROBLEM", "note": "note", "ok": "ok"}
_STYLES = {"problem": "bold red", "note": "dim", "ok": "green"}
_WIDTH = 11
_TIMEOUT_S = 60.0
"""Longest wait for a connection, and for a chunk of an answer."""


def doctor(
    server: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="Address of the server, or NAME=URL; with #MODEL if it lists several. The key of NAME is read from"
            " SPECBENCH_KEY_NAME, without a name from SPECBENCH_KEY_SERVER.",
        ),
    ],
    target: Annotated[
        str | None,
        _option(
            "--target MODEL", "Model whose tokenizer checks the server's token counts. It is not loaded."
        ),
    ] = None,
    expect: Annotated[
        Literal["on", "off"] | None,
        _option("--expect on|off", "Report a problem if speculation is not on, or not off."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Examine a running server: does it speculate, and do its counts and answers hold?

    Exits with code 1 if there is a problem.
    """
    from specbench.doctor.checks import Examined, diagnose
    from specbench.specs.servers import parse_server

    spec = parse_server(server, "server")
    seen = asyncio.run(_examine(spec))
    tokenizer = None
    if target is not None:
        from specbench.models.load import load_tokenizer
        from specbench.specs.models import parse_model

        tokenizer = load_tokenizer(parse_model(target))
    findings = diagnose(Examined(seen, tokenizer, expect))
    if json_output:
        write_json(
            {
                "model": seen.model,
                "owner": seen.owner,
                "answers": len(seen.answers),
                "findings": [finding.to_json() for finding in findings],
            }
        )
    else:
        write_parts(*_parts(seen, findings))
    if any(finding.severity == "problem" for finding in findings):
        raise typer.Exit(1)


async def _examine(spec: ServerSpec) -> Observations:
    from specbench.bench.engines.servers import explain, only_model
    from specbench.doctor.probes import Examination
    from specbench.experiment import server_keys
    from specbench.servers.client import ServerClient, ServerError

    key, listed = server_keys([spec]).get(spec.name), dict[str, str]()
    client = ServerClient(spec.called, spec.url, key=key, timeout_s=_TIMEOUT_S)
    try:
        listed = await client.models()
        model = spec.model or only_model(spec, listed)
        return await Examination(client, model, listed.get(model, "")).run()
    except ServerError as error:
        raise explain(error, spec, listed, has_key=key is not None) from error
    finally:
        await client.close()


def _parts(seen: Observations, findings: Sequence[Finding]) -> list[Part]:
    from specbench.doctor.checks import verdict_of
    from specbench.show.document import Facts, Heading, Items, Paragraph

    engine = f", {seen.owner}" if seen.owner else ""
    pairs = [
        (finding.topic, [(f"{_LABELS[finding.severity]:<8}", _STYLES[finding.severity]), (finding.text, "")])
        for finding in findings
    ]
    remedies = [
        f"{finding.topic}: {finding.remedy}"
        for finding in findings
        if finding.remedy and finding.severity != "ok"
    ]
    return [
        Heading(f"{seen.model}{engine}"),
        Facts(pairs, width=max(_WIDTH, *(len(name) + 3 for name, _ in pairs))),
        Items(remedies, "What to do:"),
        Paragraph(verdict_of(findings), "bold"),
    ]
