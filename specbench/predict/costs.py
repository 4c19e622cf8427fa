"""What forward passes take: of drafters measured here, of the target measured, given, logged or stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from specbench.base.errors import UsageError
from specbench.base.progress import announce
from specbench.bench.passes import cost_widths, pass_costs, time_passes
from specbench.decoding.clocks import clock_for
from specbench.decoding.theory import PassCosts
from specbench.drafters.parts import models_of
from specbench.models.checkpoints import check_memory, read_config
from specbench.models.load import resolve_dtype, wrap_model
from specbench.models.target import prepare_target
from specbench.options import LoadOptions
from specbench.predict.chances import model_of
from specbench.results.lines import TargetTimes
from specbench.results.store import read_run

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.decoding.protocols import Drafter, Scorer
    from specbench.predict.answers import Answer

_ROUNDS = 8


class _NoTarget:
    """Takes a target's place where drafters alone are timed."""

    context_limit = None
    device = "cpu"

    def begin(self) -> None:
        pass

    def score(self, request: Any) -> None:
        pass

    def rollback(self, length: int) -> None:
        pass


def costs_of(
    drafters: Mapping[str, Drafter],
    answers: Sequence[Answer],
    gammas: Sequence[int],
    *,
    milliseconds: float | None = None,
    folder: Path | None = None,
    log: Path | None = None,
    progress: Progress | None = None,
) -> tuple[PassCosts, str]:
    """Time drafters, and find what the target's passes take.

    Args:
        drafters: By name.
        answers: At least one; their times are taken where nothing else is known.
        gammas: Draft lengths.
        milliseconds: A pass of the target over one token, if it is given.
        folder: A stored run that timed the target, or a folder with its config.json.
        log: Where the answers are from; a stored run has times.

    Returns:
        The costs, and where those of the target are from, as the end of a sentence; empty if they are not known.

    Raises:
        UsageError, RunError: The folder is neither a run with times nor a model, or its model does not fit.
    """
    run = next((each for each in (folder, log) if each is not None and (each / "run.json").is_file()), None)
    target = None
    if folder is not None and run != folder:
        announce(progress, "building a target of random weights")
        target = random_target(folder, progress)
    announce(progress, "timing passes")
    costs = _measured(drafters, answers[0].prompt, gammas, target)
    if target is not None:
        return costs, "measured here with random weights"
    stored = None if run is None else read_run(run).costs
    logged = [each.pass_s for each in answers if each.pass_s is not None]
    if milliseconds is not None:
        seconds, source = {1: milliseconds / 1000}, "as given"
    elif run is not None and stored is not None and stored.target_s:
        seconds, source = dict(stored.target_s), f"measured in {run.name}"
    elif folder is not None:
        raise UsageError(f"The run {folder.name} did not time the target's passes.", "Give --target-pass-ms.")
    elif logged:
        seconds, source = {1: median(logged)}, "by the log"
    else:
        seconds, source = {}, ""
    return msgspec.structs.replace(costs, target_s=seconds), source


def _measured(
    drafters: Mapping[str, Drafter], text: Sequence[int], gammas: Sequence[int], target: Scorer | None
) -> PassCosts:
    """Time the passes of drafters, of a cascade those of its model, and those of a target if there is one, in turn."""
    parts = {name: model_of(each) for name, each in drafters.items()}
    models = [model for each in parts.values() for model in models_of(each)]
    scorer: Any = target or _NoTarget()
    widths = [1] if target is None else cost_widths(gammas)
    clock = clock_for(str(models[0].scorer.device if models else "cpu"))
    lines = time_passes(scorer, parts, text, widths, clock, _ROUNDS, Random(0))
    return pass_costs([line for line in lines if target is not None or not isinstance(line, TargetTimes)])


def random_target(folder: Path, progress: Progress | None = None) -> Scorer:
    """Build a model of a folder's config.json with random weights; its passes take as long as those of real ones.

    Raises:
        UsageError: The folder is no model, or one that cannot be decoded speculatively.
        RunError: It does not fit into memory.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = read_config(folder, folder.name)
    dtype = resolve_dtype(LoadOptions(), config, Counter())
    with torch.device("meta"):
        numbers = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    check_memory(2 * numbers * dtype.itemsize, name=f"random weights for {folder.name}")
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.02, 0.02)
    target = prepare_target(wrap_model(model, None, folder.name), "dynamic", progress=progress)
    scorer: Any = target.scorer
    return scorer  # type: ignore[no-any-return]
