"""Options of `specbench tune` alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specbench.cli.options import drafters_field, prompts_field
from specbench.options import DECODING, MODELS, OUTPUT, group

_decoding, _option, _output = group(DECODING), group("Options"), group(OUTPUT)

MINUTES = 1.0
"""Time limit of a search."""


@dataclass(frozen=True)
class SearchOptions:
    """What is tried, on which prompts and for how long, and where the answer and the measurements go."""

    drafter: tuple[str, ...] = drafters_field(
        MODELS,
        "Drafter to try as well: a model, a trained head, or a word of `specbench drafters`; repeatable. To measure"
        " given drafters alone: `specbench sweep --until sure`.",
    )
    prompts: tuple[str, ...] = prompts_field()
    temperature: float = _decoding(0.0, "--temperature -t X", "Temperature; 0 for greedy decoding.", min=0.0)
    minutes: float | None = _option(
        None,
        "--minutes X",
        f"Time limit for everything; the search can end sooner. Default: {MINUTES:g}, or more for a slow target.",
    )
    out: Path | None = _output(
        None, "--out -o FOLDER", "Folder of the run. Default: results/DATE-TARGET-tune."
    )
    resume: bool = _output(
        False,
        "--resume",
        "Continue the run in --out, or the newest unfinished one of `specbench tune` in results/.",
    )
    json_output: bool = _output(False, "--json", "Print one JSON object.")
    verbose: bool = _output(False, "--verbose -v", "Print all numbers and notes.")
    quiet: bool = _output(False, "--quiet -q", "No progress.")
