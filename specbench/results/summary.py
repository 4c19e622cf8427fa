"""The figures of every configuration of a run, over all prompts and by category."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from statistics import fmean
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import pandas as pd

from specbench.base.errors import UsageError
from specbench.results.frames import LIMITED, Frames
from specbench.results.metrics import METRICS, Figures
from specbench.results.results import Results, row_cells
from specbench.results.run import RIVALS

_FORM = "Write limits such as ttft=500ms,tpot=30ms or e2el=4s."

Curve: TypeAlias = list[Figures]
"""A drafter with a draft policy, or a server, by rising batch size or length of context: rows with speedups."""


class Summary(Frames):
    """The figures of a run; for other attributes see ``Frames``.

    Attributes:
        rows: Those of each configuration that has outputs, in the order of the run.

    Args:
        results: The run.
        limits: Limits of latency for goodput in seconds, by ``ttft``, ``tpot`` and ``e2el``.
    """

    def __init__(self, results: Results, limits: Mapping[str, float] = MappingProxyType({})) -> None:
        super().__init__(results, limits)
        present = set(results.generations["config"])
        self.rows = [Figures(self, config) for config in self.run.configs if config.id in present]

    # -- rows --------------------------------------------------------------------------------------

    def row(self, config: str) -> Figures:
        """Return the figures of a configuration, by id."""
        return next(row for row in self.rows if row.config.id == config)

    @cached_property
    def categories(self) -> list[Figures]:
        """The figures of each category and configuration that has speedups; categories of one task are together."""
        names = self.results.generations["category"].dropna().unique()
        found = (Figures(self, row.config, name) for name in names for row in self.rows)
        return [each for each in found if each.pairs is not None]

    @property
    def side_by_side(self) -> bool:
        return any(row.config.condition.batch is not None for row in self.rows)

    @cached_property
    def winners(self) -> set[str]:
        """Ids of the configurations with the highest speedup over each baseline, if their verdict is "faster".

        For a run of `specbench tune`, it is the configuration that it found fastest.
        """
        tuning = self.run.tuning
        if tuning is not None and tuning.ranking:
            return {*tuning.ranking[:1]} if tuning.verdict == "faster" else set()
        return {
            row.config.id for row in best_by_baseline(row for row in self.rows if row.verdict == "faster")
        }

    def table(self, by: Literal["category"] | None = None) -> pd.DataFrame:
        """Return the figures as a data frame, a row for each configuration, or for each of a category.

        A figure with an interval has columns ``<name>``, ``<name>_low`` and ``<name>_high``.
        """
        return pd.DataFrame([_cells(row) for row in (self.rows if by is None else self.categories)])

    # -- curves ------------------------------------------------------------------------------------

    def curves(self, over: Literal["batch", "context"]) -> list[Curve]:
        """Return the curves over batch sizes, with as many clients, or lengths of context, at all temperatures.

        There is one for each drafter with a draft policy, or server; the best come first.
        """
        found: dict[tuple[str, str, int | None, float], Curve] = {}
        for row in self.rows:
            config, at = row.config, row.config.condition
            is_on = at.is_closed if over == "batch" else at.context is not None
            if is_on and config.kind in RIVALS and not row.is_baseline and row.speedup.value > 0:
                key = (config.drafter, config.draft_policy, config.gamma, at.temperature)
                found.setdefault(key, []).append(row)
        curves = [sorted(each, key=size_of) for each in found.values()]
        return sorted(curves, key=lambda curve: -fmean(math.log(row.speedup.value) for row in curve))

    # -- sentences ---------------------------------------------------------------------------------

    @property
    def stopping(self) -> str:
        """Why measuring stopped with ``--until``, and what that means for intervals; empty without it."""
        stopping, planned = self.run.stopping, len(self.run.prompts)
        if stopping is None:
            return ""
        until, goal = stopping.until, "the verdict on the fastest was sure"
        if until != "sure":
            goal = f"the interval of the fastest reached {until} to each side"
        why = {
            "decided": f"after {self.results.generations['prompt'].nunique()} of {planned} prompts, when {goal}",
            "time": f"after {stopping.minutes or 0:g} minutes, before {goal}",
            "blocks": f"after all {planned} prompts, before {goal}",
            None: f"before {goal}",
        }[stopping.ended]
        return f"Measuring stopped {why}. The intervals of speedups are wide enough to hold at every look together."


def _cells(row: Figures) -> dict[str, Any]:
    cells: dict[str, Any] = {"config": row.config.id, **row_cells(row.config), "category": row.category}
    cells["generations"] = row.generations
    for name in ("verdict", "provisional", "difference", "step_source"):
        cells[name] = getattr(row, name)
    for name, kind in METRICS.items():
        found = row[name]
        is_count = kind.form == "count" and not math.isnan(found.value)
        cells[name] = int(found.value) if is_count else found.value
        if kind.interval:
            cells[f"{name}_low"] = math.nan if found.low is None else found.low
            cells[f"{name}_high"] = math.nan if found.high is None else found.high
    return {**cells, "speedup_basis": row.speedup.basis}


def best_by_baseline(rows: Iterable[Figures]) -> list[Figures]:
    """Return the rival with the highest speedup over each baseline, of rows that have speedups."""
    best: dict[str, Figures] = {}
    for row in sorted(rows, key=lambda row: -row.speedup.value):
        if row.config.kind in RIVALS:
            best.setdefault(row.config.baseline, row)
    return list(best.values())


def size_of(row: Figures) -> int:
    """Return the length of context or the batch size of a configuration."""
    return row.config.condition.context or row.config.condition.batch or 1


def parse_limits(slo: str) -> dict[str, float]:
    """Return the limits of ``--slo`` in seconds, by the names of times: ``ttft``, ``tpot`` and ``e2el``.

    Raises:
        UsageError: A limit is none, or is given twice.
    """
    limits: dict[str, float] = {}
    for part in slo.split(","):
        found = re.fullmatch(r"\s*(\w+)=(\d{1,9}(?:\.\d{1,9})?)(m?s)\s*", part, re.ASCII)
        if found is None or found[1] not in LIMITED or not float(found[2]):
            raise UsageError(f"{part.strip()!r} is no limit of latency.", _FORM)
        if found[1] in limits:
            raise UsageError(f"The limit of {found[1]} is given twice.", "Give each once.")
        limits[found[1]] = float(found[2]) / (1000 if found[3] == "ms" else 1)
    return limits
