"""`specbench check --outputs`: outputs of other engines."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.base.files import reason
from specbench.base.textsafe import visible
from specbench.check.outputs import ExternalOutput, OutputsResult, check_output, read_outputs, refuse_misfit
from specbench.check.render import outputs_parts
from specbench.cli.check_run import CheckRequest, pieces_of, rounding_of
from specbench.cli.progress import StageProgress
from specbench.loaded import notes_on_weights, transforms_of
from specbench.models.devices import check_options
from specbench.models.target import load_target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specbench.base.progress import Progress
    from specbench.models.target import Target


def prepare_outputs(
    request: CheckRequest, file: Path, limit: int | None, progress: Progress
) -> Callable[[], int]:
    """Read greedy outputs that were made elsewhere, and load the target.

    Returns:
        What checks them, prints what was found, and returns the exit code.
    """
    lines, models = _read_lines(file, limit), request.recipe.models
    check_options(models.target)
    target = load_target(
        request.recipe.target,
        models.target,
        cache=request.recipe.caching.cache,
        progress=progress,
        allow_pickle=models.allow_pickle,
    )
    request.note_models(target)
    for note in notes_on_weights(request.recipe, target):
        request.note(note)
    return partial(_check, request, target, _fitting(request, target, lines))


def _check(
    request: CheckRequest, target: Target, given: Mapping[int, tuple[ExternalOutput, Sequence[int]]]
) -> int:
    """Check, and print what was found; return the exit code."""
    result = OutputsResult()
    recipe, rounding = request.recipe, rounding_of(target)
    sampling, end_ids = transforms_of(recipe, target.language_model), recipe.decoding.end_ids(target.end_ids)
    try:
        with StageProgress(request.quiet) as progress:
            for number, (line, (each, prompt)) in enumerate(given.items()):
                progress.update("scoring outputs", number, len(given))
                result.outputs.append(check_output(target.scorer, line, each, prompt, sampling, end_ids))
        result.complete = True
    finally:  # an interrupt loses nothing of what is checked
        header = {"check": "outputs", "target": target.name, "dtype": target.dtype, "rounding": rounding}
        piece = pieces_of(target.language_model)
        request.show({**header, **result.to_dict(piece)}, outputs_parts(result, dtype=rounding, piece=piece))
    return int(result.verdict == "wrong")


def _read_lines(file: Path, limit: int | None) -> dict[int, ExternalOutput]:
    """Return all lines, read before any model is loaded."""
    name = "standard input" if str(file) == "-" else visible(str(file))
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"The outputs in {name} cannot be read: {reason(error)}.", "Check the path."
        ) from None
    lines = read_outputs(data.split(b"\n"), limit)
    if not lines:
        raise UsageError(f"There are no outputs in {name}.", "Give each a line of its own.")
    return lines


def _fitting(
    request: CheckRequest, target: Target, lines: Mapping[int, ExternalOutput]
) -> dict[int, tuple[ExternalOutput, Sequence[int]]]:
    """Return the outputs with their prompts' token ids; raise ``UsageError`` for one that a target cannot score."""
    fitting: dict[int, tuple[ExternalOutput, Sequence[int]]] = {}
    vocab = min(target.vocab_size, target.scorer.embeddings)
    for line, each in lines.items():
        prompt: Sequence[int] | str = each.prompt
        if isinstance(prompt, str):
            prompt = request.encode(target.language_model, prompt)
        refuse_misfit(line, prompt, each.token_ids, vocab, target.scorer.context_limit)
        fitting[line] = each, prompt
    return fitting
