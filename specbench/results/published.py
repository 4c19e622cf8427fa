"""Accepted lengths as YAML files in the form of InferenceX's `golden_al_distribution`, and runs beside them.

A file has one model, with a length for each draft length by thinking mode; its header says how it was measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import yaml  # type: ignore[import-untyped]
from msgspec import structs

from specbench.base.errors import UsageError
from specbench.base.files import file_errors, write_text
from specbench.base.record import Estimate
from specbench.base.textsafe import one_line
from specbench.results.metrics import Figures
from specbench.results.summary import Summary

THINKING = {"thinking_on": True, "thinking_off": False}


@dataclass(frozen=True)
class Published:
    """Accepted lengths of a model, with the bonus token.

    Attributes:
        lengths: By whether it thinks and γ.
        header: The comments above them.
    """

    model: str
    lengths: Mapping[tuple[bool, int], float]
    header: tuple[str, ...]


def read_published(path: Path) -> Published:
    """Read a file.

    Raises:
        UsageError: It cannot be read, or has another form.
    """
    with file_errors(f"{path} cannot be read", "Check the path.", kind=UsageError):
        text = path.read_text(encoding="utf-8")
    header = tuple(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    try:
        ((model, modes),) = [pair for pair in yaml.safe_load(text).items() if pair[0] != "_metadata"]
        lengths = {
            (THINKING[mode], int(gamma)): float(value)
            for mode, curve in modes.items()
            for gamma, value in curve.items()
        }
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError):
        lengths = {}
    if not lengths or not all(1.0 <= value <= gamma + 1 for (_, gamma), value in lengths.items()):
        raise UsageError(
            f"{path} holds no accepted lengths.",
            "It has one model, thinking_on or thinking_off below it, and lines such as 3: 2.83, from 1 to γ + 1.",
        )
    return Published(str(model), lengths, header)


def beside_published(summary: Summary, published: Published) -> list[SimpleNamespace]:
    """Return the rows of a run with a published length: of both modes if the run does not say whether it thinks.

    Returns:
        For each: ``config``, ``gamma`` and ``tokens_per_draft``; ``published``, a length, and ``thinking``, its mode;
        ``verdict``, what the interval says of it.
    """
    return [
        SimpleNamespace(
            config=row.config,
            gamma=gamma,
            thinking="on" if thinking else "off",
            tokens_per_draft=row.tokens_per_draft,
            published=length,
            verdict=_verdict(row.tokens_per_draft, length),
        )
        for row in summary.rows
        for (thinking, gamma), length in published.lengths.items()
        if gamma == _gamma_of(row) and row.config.condition.thinking in (None, thinking)
    ]


def write_lengths(summary: Summary, folder: Path) -> list[Path]:
    """Write a file for each drafter, policy and condition with accepted lengths by draft length; return their paths.

    A run whose template is told nothing of thinking counts as not thinking, and the header says so.
    """
    run, curves = summary.run, dict[tuple[str, str], dict[str, dict[int, float]]]()
    for row in summary.rows:
        at, gamma = row.config.condition, _gamma_of(row)
        if gamma is not None and not math.isnan(row.tokens_per_draft.value):
            policy = row.config.draft_policy.removeprefix("fixed").removeprefix("none")
            drafter = row.config.drafter.removesuffix(f"@{gamma}") + policy
            key = drafter, structs.replace(at, thinking=None).ending
            mode = curves.setdefault(key, {}).setdefault(f"thinking_{'on' if at.thinking else 'off'}", {})
            mode.setdefault(gamma, round(row.tokens_per_draft.value, 4))
    told = any(config.condition.thinking is not None for config in run.configs)
    paths = list[Path]()
    for (drafter, ending), modes in curves.items():
        header = (
            f"# specbench {one_line(run.specbench)} | prompts: {len(run.prompts)} | conditions: {ending[1:] or 't=0'}"
            f" | output_len: {run.max_new_tokens} | thinking: {'as named' if told else 'not told'}\n"
        )
        body = {"_metadata": {"draft-model": drafter}, one_line(run.target.name): modes}
        name = re.sub(r"[^\w.=]+", "-", drafter + ending).strip("-")[:100]
        again = sum(path.name.startswith(f"{name}.") for path in paths)  # A+B and A|B, say
        paths.append(folder / f"{name}{f'.{again + 1}' if again else ''}.yaml")
        folder.mkdir(exist_ok=True)
        write_text(paths[-1], header + yaml.safe_dump(body, sort_keys=False))
    return paths


def _gamma_of(row: Figures) -> int | None:
    """Return the draft length of a row: its own, or of a server the longest draft that it reports."""
    if math.isnan(row.tokens_per_draft.value) or row.config.gamma is not None:
        return row.config.gamma
    return max(
        (len(places) for of in (row.answers, row.groups) for places in of["accepted_at"].dropna()),
        default=None,
    )


def _verdict(measured: Estimate, published: float) -> str:
    inside = measured.overlaps(published)
    if inside is None:
        return "cannot tell"
    return "no different" if inside else "higher" if measured.value > published else "lower"
