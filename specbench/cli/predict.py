"""`specbench predict`: what drafters would gain, from answers that exist already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench.base.errors import UsageError
from specbench.cli import options as opt
from specbench.cli.conflicts import given
from specbench.cli.console import write_json, write_parts
from specbench.cli.progress import StageProgress, starting
from specbench.models.default import DEFAULT_DRAFTER
from specbench.options import MODELS, OUTPUT, SamplingOptions, group

if TYPE_CHECKING:
    from specbench.predict.logs import Log

_answers, _output = group("Answers"), group(OUTPUT)


@dataclass(frozen=True)
class PredictOptions:
    """Which answers are read, and what the target's passes take."""

    answers: Path = _answers(
        ..., "--answers FILE", "A log of JSON lines (docs/predict.md), or the folder of a stored run."
    )
    limit: int = _answers(64, "--limit N", "Number of answers to read.", min=1)
    drafter: tuple[str, ...] = opt.drafters_field(
        MODELS, "Drafter: a small model, lookup, ngram, suffix or a cascade; repeatable. Default: lookup."
    )
    gamma: str = _answers("1..16", "--gamma -g RANGE", "Draft lengths γ.")
    tokenizer: str | None = group(MODELS)(
        None, "--tokenizer MODEL", "Model with the target's tokenizer. Default: the first drafter with one."
    )
    target_pass_ms: float | None = group(MODELS)(
        None,
        "--target-pass-ms X",
        "Time of the target's pass over one token. Default: by the run or the log.",
        min=1e-6,
    )
    json_output: bool = _output(False, "--json", "Print one JSON object.")
    quiet: bool = _output(False, "--quiet -q", "No progress.")


def predict(
    ctx: typer.Context,
    *,
    asked: PredictOptions,
    sampling: Annotated[SamplingOptions, opt.Fields("temperature")],
) -> None:
    """Predict what drafters would gain from answers that the target has given already, without the target.

    One pass of a drafter over prompts and answers gives its acceptance, and tokens per step for every draft length.
    --temperature holds where a line of the log does not say it.
    """
    from specbench.bench.axes import parse_gammas
    from specbench.specs.drafters import parse_drafter

    specs = [parse_drafter(each) for each in dict.fromkeys(asked.drafter or (DEFAULT_DRAFTER,))]
    if not asked.answers.exists():
        raise UsageError(f"There is no file or folder {str(asked.answers)!r}.", "Check the path.")
    tokenizer_name = _tokenizer(asked)
    if tokenizer_name is None and not any(spec.models for spec in specs):
        raise UsageError("Answers are read with the target's tokenizer.", "Name it with --tokenizer.")
    gammas = parse_gammas(asked.gamma)
    settings = {"temperature": sampling.temperature} if given(ctx, "temperature") else {}
    with starting(asked.quiet) as progress:
        from specbench.predict.alone import costs_of, load_alone
        from specbench.predict.forecast import forecast
        from specbench.predict.render import prediction_parts

        drafters, tokenizer = load_alone(specs, tokenizer_name, progress)
        log = _read(asked, tokenizer, settings)
        if not log.answers:
            why = " ".join(log.notes())
            raise UsageError(
                f"No answer in {asked.answers} can be used. {why}".strip(), "See docs/predict.md."
            )
        costs, source, here = costs_of(
            drafters, log.answers, asked.answers, milliseconds=asked.target_pass_ms, progress=progress
        )  # fmt: skip
    forecasts = []
    with StageProgress(asked.quiet) as progress:
        for drafter in drafters.values():
            stage = f"reading answers with {drafter.traits.name}"
            report = partial(progress.update, stage, total=len(log.answers))
            forecasts.append(forecast(drafter, log.answers, gammas, report))
    if asked.json_output:
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
        write_parts(*prediction_parts(forecasts, costs, source, here, log.notes()))


def _tokenizer(asked: PredictOptions) -> str | None:
    """Return the tokenizer that is named, or that of a stored run's target."""
    if asked.tokenizer is not None or not asked.answers.is_dir():
        return asked.tokenizer
    from specbench.results.store import find_runs, read_run
    from specbench.specs.models import parse_model

    target = str(read_run(find_runs(asked.answers)[-1]).options.get("target") or "")
    if target and "/" not in target and parse_model(target).kind == "hub":  # a stored run does not keep paths
        raise UsageError(f"The run does not say where its target {target} is.", "Name it with --tokenizer.")
    return target or None


def _read(asked: PredictOptions, tokenizer: Any, settings: Mapping[str, float]) -> Log:
    from specbench.base.files import reason
    from specbench.predict.logs import read_log

    if asked.answers.is_dir():
        from specbench.predict.stored import stored_answers
        from specbench.results.store import find_runs

        return stored_answers(find_runs(asked.answers)[-1], tokenizer, asked.limit)
    try:
        with asked.answers.open("rb") as lines:
            return read_log(lines, tokenizer, sampling=settings, limit=asked.limit)
    except OSError as error:
        raise UsageError(
            f"The log {asked.answers} cannot be read: {reason(error)}.", "Check the path."
        ) from None
