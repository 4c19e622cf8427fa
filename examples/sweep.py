"""A sweep from Python: which drafter is faster, as a data frame, with a tracker of your own on the way."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from specbench import DecodingOptions, sweep
from specbench.bench.tracking import tracked


class Last:
    """A tracker that keeps the last value of each name; ``open_tracker`` begins one of trackio, wandb or MLflow."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.values.update(values)

    def end(self) -> None:
        pass


def main(limit: int = 4) -> tuple[pd.DataFrame, dict[str, float]]:
    tracker = Last()
    with tempfile.TemporaryDirectory() as folder:
        results = sweep(
            "smollm2-135m",
            ["lookup", "self:int8"],
            Path(folder) / "run",
            gammas=(2,),
            policies=("auto",),
            limit=limit,
            repeats=1,
            warmup=0,
            decoding=DecodingOptions(max_new_tokens=24),
            on_event=tracked(tracker),
        )
    columns = ["tokens_per_second", "tokens_per_step", "acceptance_rate"]
    table = results.generations.groupby("label")[columns].mean().sort_values("tokens_per_second")
    print(table.round(2))
    speedups = {name: value for name, value in tracker.values.items() if name.endswith("/speedup")}
    print({name: round(value, 2) for name, value in speedups.items()})
    return table, speedups


if __name__ == "__main__":
    main()
