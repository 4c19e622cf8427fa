"""What test_faults.py runs in processes of their own, to be killed, starved and interrupted."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from forked import limit


def prepare(gguf: Path, place: Path, begin: Any, stop_at: str | None) -> None:
    """Prepare a GGUF file once ``begin`` is set, noting every stage in a file; forever in ``stop_at``, if given."""
    from specbench.models.builtin import prepare_gguf

    class Stages:
        def update(self, stage: str, done: int, total: int | None) -> None:
            with (place / "stages").open("a", encoding="utf-8") as file:
                file.write(f"{stage}\n")
            while stop_at is not None and stage.startswith(stop_at) and done:
                time.sleep(0.01)

    (place / "ready").touch()
    begin.wait()
    (place / "folder").write_text(str(prepare_gguf(gguf, progress=Stages())), encoding="utf-8")


def starved(model: Path, prompts: Path, folder: Path, place: Path, spare: int) -> None:
    """A sweep with room for so many bytes more than what a shorter one before it took."""
    import pandas  # noqa: F401 - with the limit there would be no room for its libraries
    import scipy.stats  # noqa: F401

    from specbench.bench.engines.own import load_engine
    from specbench.bench.grid import Sweep, SweepOptions, build_configs
    from specbench.bench.manifest import describe_run
    from specbench.bench.prompts import load_prompts
    from specbench.bench.runner import run_sweep
    from specbench.options import DecodingOptions, ModelOptions
    from specbench.recipe import Recipe
    from specbench.results.store import RunStore
    from specbench.specs.drafters import Lookup
    from specbench.specs.models import parse_model

    base = Recipe(parse_model(str(model)), models=ModelOptions("float32", "cpu"))
    engine = load_engine(base, (Lookup(),))

    def swept(gammas: tuple[int, ...], into: Path) -> list[int]:
        options = SweepOptions(
            gammas=gammas,
            repeats=1,
            warmup=0,
            decoding=DecodingOptions(max_new_tokens=205, ignore_eos=True),
            transformers=False,
        )
        sweep = Sweep(options, tuple(load_prompts([prompts])), tuple(build_configs(options, engine.specs)))
        described = describe_run(
            sweep, target=engine.describe_target(options.decoding), environment={}, sources={"target": "big"}
        )
        with RunStore.create(into, described) as store:
            result = run_sweep(sweep, store, engine)
        return [result.measured, result.failed]

    swept((2,), place / "first")  # threads, libraries and prepared weights, which differ between processors
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit({"RLIMIT_AS": pages * os.sysconf("SC_PAGE_SIZE") + spare})
    (place / "result").write_text(json.dumps(swept((2, 200), folder)), encoding="utf-8")
