"""A sweep from Python: models are loaded, everything is measured into a folder, and its data frames are returned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.bench.axes import parse_policies
from specbench.bench.grid import Sweep, SweepOptions
from specbench.bench.manifest import describe_models, describe_run, open_run
from specbench.bench.prompts import load_prompts
from specbench.models.default import default_drafter
from specbench.options import DecodingOptions, ModelOptions
from specbench.recipe import Recipe
from specbench.results.store import RunStore
from specbench.rows import conditions_of
from specbench.specs.drafters import parse_drafter

if TYPE_CHECKING:
    from specbench.results.results import Results


def sweep(
    target: str,
    drafters: Sequence[str] | None,
    out: str | Path,
    *,
    gammas: Sequence[int] = (),
    policies: Sequence[str] = ("auto",),
    temperatures: Sequence[float] = (0.0,),
    prompts: Sequence[str] = ("all",),
    limit: int | None = 12,
    repeats: int = 2,
    warmup: int = 1,
    seed: int = 0,
    batches: Sequence[int] = (),
    decoding: DecodingOptions | None = None,
    models: ModelOptions | None = None,
    resume: bool = False,
) -> Results:
    """Measure drafters and draft policies against plain decoding, as ``specbench sweep`` does.

    Args:
        target: As ``--target`` takes it.
        drafters: As ``--drafter`` takes them; ``None`` for the target's default drafter.
        out: The folder of the run.
        gammas: Draft lengths that are measured with the policy ``fixed``.
        policies: Draft policies, as ``--draft-policy`` takes them.
        temperatures: 0 is greedy.
        prompts: Built-in sets, "all", or JSON Lines files.
        limit: Number of prompts, taken in turn from the categories; ``None`` for all.
        repeats: How often each prompt is decoded with each configuration.
        warmup: Short generations of each configuration that are not counted.
        seed: Seed of the random order and of sampling.
        batches: Batch sizes; empty for one prompt after the other.
        decoding: Limits of outputs; 48 new tokens by default.
        models: How weights are loaded.
        resume: Continue the run in the folder.

    Returns:
        Data frames of the run.

    Raises:
        UsageError: An argument is wrong, or the folder has results already.
        RunError: The target cannot be loaded, or results cannot be written.

    Examples:
        >>> measured = sweep(
        ...     "smollm2-135m", ["lookup"], folder / "sweep", limit=2, repeats=1, warmup=0,
        ...     decoding=DecodingOptions(max_new_tokens=4),
        ... )
        >>> sorted(measured.generations["label"].unique())
        ['lookup auto', 'plain']
    """
    from specbench.bench.engines.own import load_engine
    from specbench.bench.runner import run_sweep
    from specbench.results.results import load_results

    for what, names in {"target": [target], "drafters": drafters or (), "policies": policies}.items():
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise UsageError(
                f"A sweep takes names, and {what} holds something else.",
                "Measure an object of your own with speculative_generate.",
            )
    folder = Path(out)
    if RunStore.exists(folder) and not resume:
        raise UsageError(
            f"The folder {str(folder)!r} holds results already.", "Give resume=True, or another folder."
        )
    base = Recipe.of_target(target, models or ModelOptions(), decoding or DecodingOptions(max_new_tokens=48))
    named = [default_drafter(base)] if drafters is None else map(parse_drafter, dict.fromkeys(drafters))
    specs = [spec for spec in named if not spec.is_plain]
    options = SweepOptions(
        conditions_of(temperature=temperatures, batch=batches),
        gammas=tuple(gammas),
        policies=parse_policies([*policies, *(["fixed"] if gammas else [])]),
        decoding=base.decoding,
        repeats=repeats,
        warmup=warmup,
        seed=seed,
        turns=1 if batches else None,
    )
    chosen = tuple(load_prompts(prompts, limit))
    RunStore.check_writable(folder)
    engine = load_engine(base, specs, options)

    configs = engine.configs(options, base)
    grid = Sweep(options, chosen, tuple(configs))
    asked = {"prompts": [Path(name).name for name in prompts], "limit": limit}
    sources = {**describe_models(base, specs), **asked}
    run = describe_run(grid, engine.describe_target(options.decoding), sources, heads=engine.heads)
    with open_run(folder, run, "Give another folder.", may_grow=True) as store:
        run_sweep(grid, store, engine)
    return load_results(folder)
