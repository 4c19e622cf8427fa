"""Comparison with files of other benchmarks (``others``): figure by figure, without intervals and verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench.base.errors import UsageError
from specbench.base.record import Json, ratio
from specbench.results.others import (
    DRAFTS,
    FIGURES,
    NOTES,
    VLLM,
    LoadFigures,
    other_file,
    own_figures,
    read_other,
)
from specbench.results.results import load_results

COMPARISON_VERSION = 1
"""Version of ``to_json``. 1: first release."""

_ALIKE = 0.05
"""Relative difference of mean lengths that is none."""

_MOST = 4
"""Pairs that are compared without being named."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two loads that are compared."""

    a: LoadFigures
    b: LoadFigures

    @property
    def ratios(self) -> dict[str, float]:
        """A over B of the figures that both have; NaN if B's is 0."""
        common = (name for name in FIGURES if name in self.a.figures and name in self.b.figures)
        return {name: ratio(self.a.figures[name], self.b.figures[name]) for name in common}


@dataclass(frozen=True, slots=True)
class ComparedLoads:
    """A comparison.

    Attributes:
        a, b: Names of the two sides.
        pairs: What is compared.
        notes: Sentences that explain the figures.
    """

    a: str
    b: str
    pairs: list[Pair]
    notes: list[str]


def read_side(path: Path, run: Path | None) -> list[LoadFigures]:
    """Return the figures of a file of another tool, or of a run of specbench in the folder ``run``.

    Raises:
        UsageError: It cannot be read, or nothing was measured.
    """
    if run is None:
        return read_other(other_file(path) or path)
    found = own_figures(load_results(run))
    if not found:
        raise UsageError(f"No generation of {str(path)!r} has finished.", "Continue its sweep.")
    return found


def compare_loads(
    sides: tuple[Sequence[LoadFigures], Sequence[LoadFigures]],
    names: tuple[str, str],
    *,
    a: str | None = None,
    b: str | None = None,
) -> ComparedLoads:
    """Compare the loads of two sides: those with the same label, or the only one of a side with all of the other's.

    Args:
        sides: The figures of A and B.
        names: Names of the sides.
        a, b: Take only the load, or configuration, with this label.

    Raises:
        UsageError: There is no such label, or it is not clear what to compare with what.
    """
    first, second = (
        [_labeled(side, label, name)] if label is not None else list(side)
        for side, label, name in zip(sides, (a, b), names, strict=True)
    )
    pairs = [Pair(mine, other) for mine in first for other in second]
    if len(first) > 1 and len(second) > 1:
        pairs = [pair for pair in pairs if pair.a.label == pair.b.label]
    if not 0 < len(pairs) <= _MOST:
        raise UsageError(
            f"A has {_listed(first)}, B has {_listed(second)}: it is not clear what to compare.",
            "Name one of each with --a and --b.",
        )
    return ComparedLoads(*names, pairs, [*NOTES, *_notes(pairs)])


def _labeled(side: Sequence[LoadFigures], label: str, name: str) -> LoadFigures:
    for each in side:
        if each.label == label:
            return each
    raise UsageError(f"There is no {label!r} in {name}.", f"It has {_listed(side)}.")


def _listed(side: Sequence[LoadFigures]) -> str:
    return ", ".join(repr(each.label) for each in side)


def _notes(pairs: Sequence[Pair]) -> list[str]:
    notes = []
    for what, values in (
        ("model", {(pair.a.model, pair.b.model) for pair in pairs}),
        ("tool", {(pair.a.tool, pair.b.tool) for pair in pairs}),
    ):
        differing = sorted(f"{a} / {b}" for a, b in values if a != b and a and b)
        if differing:
            notes.append(f"Different {what}, A / B: {'; '.join(differing)}.")
    reported = [{name in each.figures for name in DRAFTS} for pair in pairs for each in (pair.a, pair.b)]
    if any(True in each for each in reported) and {False} in reported:
        notes.append("Only one side reports drafts.")
    tools = {each.tool for pair in pairs if DRAFTS[0] in pair.ratios for each in (pair.a, pair.b)}
    if len(tools) > 1 and VLLM in tools:
        notes.append(f"{VLLM} counts tokens per step over the steps that drafted, specbench over all.")
    lengths = [name for name in FIGURES if name.endswith("tokens, mean")]
    differing = [
        name.removesuffix(", mean")
        for name in lengths
        if any(not math.isclose(pair.ratios.get(name, 1.0), 1.0, rel_tol=_ALIKE) for pair in pairs)
    ]
    if differing:
        notes.append(f"Speeds depend on the number of {' and '.join(differing)}, and these differ.")
    return notes


def to_json(compared: ComparedLoads) -> Json:
    """Return a comparison as JSON data."""
    return {
        "schema": COMPARISON_VERSION,
        "kind": "specbench-comparison-of-loads",
        "a": compared.a,
        "b": compared.b,
        "pairs": [
            {
                **{
                    side: {
                        "tool": each.tool,
                        "label": each.label,
                        "model": each.model,
                        "figures": dict(each.figures),
                    }
                    for side, each in (("a", pair.a), ("b", pair.b))
                },
                "ratios": {name: value for name, value in pair.ratios.items() if math.isfinite(value)},
            }
            for pair in compared.pairs
        ],
        "notes": compared.notes,
    }
