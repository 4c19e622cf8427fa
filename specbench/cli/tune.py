"""`specbench tune`: find the fastest configuration for a target on this machine."""

from __future__ import annotations

from typing import Annotated

from specbench.base.errors import UsageError
from specbench.cli import options as opt
from specbench.cli.tune_options import MINUTES, SearchOptions
from specbench.options import DecodingOptions, ModelOptions, TemplateOptions


def tune(
    *,
    target: opt.TargetOption = opt.DEFAULT_TARGET,
    template: Annotated[TemplateOptions, opt.Fields("thinking")],
    models: ModelOptions,
    decoding: Annotated[DecodingOptions, opt.Fields("max_new_tokens", "format", max_new_tokens=48)],
    search: SearchOptions,
) -> None:
    """Find the fastest drafter and draft policy for a target on this machine.

    Drafters without a model, forms of the target itself, the named models and cascades of them are predicted from a few
    plain outputs. The promising ones are raced, prompt by prompt and in turn, until they can be told apart or the time
    is up. The answer ends with the commands that decode and serve like the fastest; it is provisional if the time was
    too short to be sure. Exit code 1: no configuration was found.
    """
    if search.minutes is not None and not search.minutes > 0:
        raise UsageError(f"--minutes is {search.minutes:g}.", "Give more than 0.")
    from specbench.cli.tune_run import run_tune

    run_tune(target, search, template, models, decoding, search.minutes or MINUTES)
