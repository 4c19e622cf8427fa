"""`specbench predict`: what drafters would gain, from answers that exist already."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.base.errors import UsageError
from specbench.cli import options as opt
from specbench.cli.conflicts import given
from specbench.cli.console import write_json, write_parts
from specbench.cli.progress import StageProgress, starting
from specbench.models.default import DEFAULT_DRAFTER
from specbench.options import MODELS, SamplingOptions, panel

if TYPE_CHECKING:
    pass

_answers, _models = panel("Answers"), panel(MODELS)


def predict(
    ctx: typer.Context,
    *,
    answers: Annotated[
        Path,
        _answers("--answers FILE", "A log of JSON lines (docs/predict.md)."),
    ],
    limit: Annotated[int, _answers("--limit N", "Number of answers to read.", min=1)] = 64,
    drafter: Annotated[
        list[str] | None,
        _models(
            "--drafter DRAFTER",
            "Drafter: a small model, lookup, ngram, suffix or a cascade; repeatable. Default: lookup.",
        ),
    ] = None,
    gamma: Annotated[str, _answers("--gamma -g RANGE", "Draft lengths γ.")] = "1..16",
    tokenizer: Annotated[
        str | None,
        _models(
            "--tokenizer MODEL", "Model with the target's tokenizer. Default: the first drafter with one."
        ),
    ] = None,
    target_pass_ms: Annotated[
        float | None,
        _models(
            "--target-pass-ms X",
            "Time of the target's pass over one token. Default: by the log.",
            min=1e-6,
        ),
    ] = None,
    json_output: opt.JsonOption = False,
    quiet: Annotated[bool, opt.output("--quiet -q", "No progress.")] = False,
    sampling: Annotated[SamplingOptions, opt.Fields("temperature")],
) -> None:
    """Predict what drafters would gain from answers that the target has given already, without the target.

    One pass of a drafter over prompts and answers gives its acceptance, and tokens per step for every draft length.
    --temperature holds where a line of the log does not say it.
    """
    from specbench.base.files import file_errors
    from specbench.bench.axes import parse_gammas
    from specbench.specs.drafters import parse_drafter

    specs = [parse_drafter(each) for each in dict.fromkeys(drafter or (DEFAULT_DRAFTER,))]
    if not answers.is_file():
        raise UsageError(f"There is no file {str(answers)!r}.", "Check the path.")
    if tokenizer is None and not any(spec.models for spec in specs):
        raise UsageError("Answers are read with the target's tokenizer.", "Name it with --tokenizer.")
    gammas = parse_gammas(gamma)
    settings = {"temperature": sampling.temperature} if given(ctx, "temperature") else {}
    with starting(quiet) as progress:
        from specbench.predict.alone import costs_of, load_alone
        from specbench.predict.forecast import forecast
        from specbench.predict.logs import read_log
        from specbench.predict.render import prediction_parts

        drafters, found = load_alone(specs, tokenizer, progress)
        assert found is not None
        with (
            file_errors(f"The log {answers} cannot be read", "Check the path.", kind=UsageError),
            answers.open("rb") as lines,
        ):
            log = read_log(lines, found, sampling=settings, limit=limit)
        if not log.answers:
            why = " ".join(log.notes())
            raise UsageError(f"No answer in {answers} can be used. {why}".strip(), "See docs/predict.md.")
        costs, source = costs_of(drafters, log.answers, milliseconds=target_pass_ms, progress=progress)
    with StageProgress(quiet) as progress:
        forecasts = [forecast(each, log.answers, gammas, progress.update) for each in drafters.values()]
    if json_output:
        from specbench.base.record import to_dict

        write_json(
            {
                "answers": len(log.answers),
                "left_out": log.left_out,
                "notes": log.notes(),
                "costs": to_dict(costs),
                "target_pass_from": source or None,
                "drafters": [each.to_dict(costs) for each in forecasts],
            }
        )
    else:
        write_parts(*prediction_parts(forecasts, costs, source, log.notes()))
