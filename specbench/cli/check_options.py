"""Options of `specbench check` alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specbench.cli.options import drafters_field, prompts_field, recipe_field
from specbench.options import MODELS, OUTPUT, group

CHECKED_PROMPTS, SERVER_ANSWERS = 12, 2000
_CHECKED = "What is checked"
_check, _output = group(_CHECKED), group(OUTPUT)


@dataclass(frozen=True)
class CheckedOptions:
    """Which outputs are checked, and how closely."""

    prompts: tuple[str, ...] = prompts_field(_CHECKED)
    drafter: tuple[str, ...] = drafters_field(MODELS)
    limit: int | None = _check(
        None,
        "--limit N",
        "Number of prompts, taken in turn from the categories, of lines of --outputs, or of a server's answers."
        f" Default: {CHECKED_PROMPTS} prompts, all lines, {SERVER_ANSWERS} answers.",
        min=1,
    )
    outputs: Path | None = _check(
        None,
        "--outputs FILE",
        'Greedy outputs of any engine to check instead: lines of {"prompt": text or ids, "token_ids": [...]}; -'
        " reads standard input.",
    )
    server: str | None = _check(
        None,
        "--server URL",
        "Running server whose sampled output is checked instead (--temperature), by its log probabilities, or by"
        " those of --target if that is given. The key is read from SPECBENCH_KEY_SERVER.",
    )
    against: str | None = _check(
        None,
        "--against URL",
        "Second server, whose output that of --server is compared with; off for the same one without speculation.",
    )
    recipe: str | None = recipe_field()
    json_output: bool = _output(False, "--json", "Print one JSON object.")
    quiet: bool = _output(False, "--quiet -q", "No progress, no notes.")
