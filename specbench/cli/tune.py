"""`specbench tune`: find the fastest configuration for a target on this machine."""

from __future__ import annotations

from typing import Annotated

from specbench.base.errors import UsageError
from specbench.cli import options as opt
from specbench.cli.sweep_options import SearchOptions, TuneResultsOptions
from specbench.options import DecodingOptions, ModelOptions


def tune(
    *,
    target: opt.TargetOption = opt.DEFAULT_TARGET,
    search: SearchOptions,
    models: ModelOptions,
    decoding: Annotated[DecodingOptions, opt.Fields(without=opt.NOT_SWEPT, max_new_tokens=48)],
    results: TuneResultsOptions,
    json_output: opt.JsonOption = False,
    verbose: opt.VerboseOption = False,
    quiet: Annotated[bool, opt.output("--quiet -q", None, "No progress.")] = False,
) -> None:
    """Find the fastest drafter, draft policy and KV cache for a target on this machine, and write specbench.toml.

    Drafters without a model, forms of the target itself, the named models and cascades of them are tried on a few
    tokens. The promising ones are raced, prompt by prompt and in turn, until they can be told apart or the time is up.
    Other commands read the specbench.toml; it is provisional if the time was too short to be sure. Exit code 1: no
    configuration was found.
    """
    from specbench.cli.tune_run import run_tune

    if not search.minutes > 0:
        raise UsageError(f"--minutes is {search.minutes:g}.", "Give more than 0.")
    run_tune(target, search, models, decoding, results, json_output=json_output, verbose=verbose, quiet=quiet)
