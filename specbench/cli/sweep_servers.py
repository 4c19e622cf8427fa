"""`specbench sweep --server`: a sweep of servers instead of models."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.bench.contexts import fitting, text_name
from specbench.bench.engines.servers import ServerEngine
from specbench.bench.grid import Sweep, SweepOptions, server_rows
from specbench.cli.conflicts import given
from specbench.cli.progress import StageProgress
from specbench.cli.sweep_options import context_text, prompts_of_sweep
from specbench.cli.sweep_run import SweepJob, run_folder
from specbench.options import DecodingOptions, TemplateOptions
from specbench.results.store import RunStore
from specbench.specs.models import parse_model
from specbench.specs.servers import parse_servers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import typer

    from specbench.base.load import LoadSnapshot
    from specbench.cli.sweep_options import ComparedOptions, ResultsOptions, ServerOptions
    from specbench.specs.servers import ServerSpec


def sweep_servers(
    ctx: typer.Context,
    compared: ComparedOptions,
    servers: ServerOptions,
    target: str,
    template: TemplateOptions,
    decoding: DecodingOptions,
    results: ResultsOptions,
    start: LoadSnapshot,
) -> None:
    """Measure servers instead of models; for the arguments see ``specbench.cli.sweep``."""
    from specbench.models.load import load_tokenizer

    specs = parse_servers(servers.server)
    known = bool(given(ctx, "target"))
    axes = compared.axes(template, served=True)
    if axes["turns"] is None:
        axes["turns"] = 1
    options = SweepOptions(
        gammas=(),
        policies=(),
        decoding=decoding,
        servers=tuple(spec.name for spec in specs),
        **axes,
    )
    with StageProgress(results.quiet) as progress:
        chosen = prompts_of_sweep(compared, options, progress)
    text = context_text(compared)
    keys = server_keys(specs)
    spoken = parse_model(target)
    with StageProgress(results.quiet) as progress:
        tokenizer = load_tokenizer(spoken, progress=progress) if known else None
    engine = ServerEngine(
        specs,
        keys=keys,
        tokenizer=tokenizer,
        decoding=decoding,
        temperature=max(at.temperature for at in options.conditions),
        template=template,
    )
    try:
        options = replace(
            options,
            servers=tuple(each.described for each in engine.servers),
            salt=engine.salt,
            context_text=None if text is None else text_name(text),
        )
        prompts, notes = fitting(chosen.prompts, options.contexts, engine.count_tokens)
        sources = {
            "target": engine.servers[0].model_name,
            "tokenizer": str(spoken) if known else None,
            **chosen.sources,
        }
        folder = run_folder(results, sources, options)
        configs = tuple(server_rows(options, [(spec.name, None) for spec in specs]))
        sweep = Sweep(options, prompts, configs, text=text, suites=chosen.suites)
        RunStore.check_writable(folder)
        job = SweepJob(sweep, engine, folder, results, minutes=compared.minutes)
        job.run(sources, start, [*_server_notes(engine), *notes])
    finally:
        engine.close()


def server_keys(specs: Sequence[ServerSpec]) -> dict[str, str]:
    """Return the keys in the environment, by server."""
    found = {
        spec.name: os.environ[spec.key_variable].strip() for spec in specs if spec.key_variable in os.environ
    }
    for spec in specs:
        key = found.get(spec.name, "-")
        if not key or not key.isascii() or not key.isprintable():
            raise UsageError(
                f"The environment variable {spec.key_variable} holds no key.",
                "Put the key there, or unset the variable.",
            )
    return found


def _server_notes(engine: ServerEngine) -> list[str]:
    notes = [note for server in engine.servers for note in server.notes]
    if engine.salt != "none":
        whose = ", so outputs cannot be compared" if engine.salt == "each" else ""
        why = "a server has a prompt cache that cannot be switched off"
        notes.append(f"Every prompt gets a unique first line, because {why}{whose}.")
    return notes
