"""A sweep from Python: which drafter is faster, as a data frame."""

import tempfile
from pathlib import Path

import pandas as pd

from specbench import DecodingOptions, sweep


def main(limit: int = 4) -> pd.DataFrame:
    with tempfile.TemporaryDirectory() as folder:
        results = sweep(
            "smollm2-135m",
            ["lookup", "self:int8"],
            Path(folder) / "run",
            gamma="2",
            draft_policy=["auto"],
            limit=limit,
            repeats=1,
            warmup=0,
            decoding=DecodingOptions(max_new_tokens=24),
        )
    columns = ["tokens_per_second", "tokens_per_step", "acceptance_rate"]
    table = results.table().set_index("label")[columns].sort_values("tokens_per_second")
    print(table.round(2))
    return table


if __name__ == "__main__":
    main()
