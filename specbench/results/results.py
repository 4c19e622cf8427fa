"""A stored run in memory: its description, and tables of outputs, steps and groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import chain
from pathlib import Path
from sys import intern
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import numpy as np
import pandas as pd

from specbench.base.errors import UsageError
from specbench.base.record import Json, ratio
from specbench.decoding.records import PARTS
from specbench.results.lines import (
    STEP_FIGURES,
    Generation,
    Group,
    Line,
    MeasuredOutput,
    RequestLine,
    ServerAnswer,
    Speculation,
    StepLists,
)
from specbench.results.run import BUSY_WARNINGS, Run
from specbench.results.store import GENERATIONS, distinct, find_runs, read_lines, read_run
from specbench.rows import Condition, Row
from specbench.specs.sweeps import Arrivals

_MOST_DISTURBED = 0.5
"""Share of disturbed generations above which pairing within a round no longer makes up for it."""

# -- columns ---------------------------------------------------------------------------------------


def _columns(record: type[msgspec.Struct], *without: str) -> dict[str, bool]:
    """Return the fields of a record, and whether each is a number; missing numbers become NaN."""
    fields = msgspec.structs.fields(record)
    return {each.name: _is_number(each.type) for each in fields if each.name not in without}


def _is_number(kind: Any) -> bool:
    if get_origin(kind) is Annotated:
        return _is_number(get_args(kind)[0])
    if isinstance(kind, UnionType) or get_origin(kind) not in (None, list, dict):
        return any(map(_is_number, get_args(kind)))
    return kind in (int, float)


_LINE = _columns(Line, "schema", "warmup", "warnings")
_ROW = {
    **dict.fromkeys(("label", "kind", "drafter", "draft_policy", "cache", "baseline"), False), "gamma": True,
}  # fmt: skip
_CONDITION = _columns(Condition)
_OUTPUT = {
    **_columns(Generation, "token_ids", "steps", "server"),
    **_columns(RequestLine, *MeasuredOutput.__struct_fields__, "prompt", "category"),
}
_ANSWER = _columns(ServerAnswer)
_SPECULATION = _columns(Speculation)
_LISTS = ("expected_acceptance", "closing", "experts", "experts_one")
_GENERATION_COLUMNS = (
    *_LINE, "warnings", "group", "target", *_ROW, *_CONDITION, *_OUTPUT, "token_ids", "tokens_per_second",
    *_ANSWER, "step_source", "emitted_in_steps", "reported_steps",
)  # fmt: skip
_GROUP_COLUMNS = (
    "config", "baseline", "group", "repeat", "new_tokens", "throughput", "pool_peak_bytes",
    *_SPECULATION,
)  # fmt: skip


@dataclass(frozen=True)
class Results:
    """A stored run.

    Attributes:
        run: Its ``run.json``.
        generations: A row per output (prompt turn, configuration and repeat) without warm-ups: the fields of
            ``generations.jsonl`` and of the row's configuration; ``target`` (its name), ``group`` (name of the
            group if it was decoded in a batch, else empty); ``tokens_per_second`` after the first emission, NaN where
            undefined; and of a server what it reported, with ``step_source, emitted_in_steps, reported_steps``, from
            which the tokens per step follow. Failed generations have ``status`` "failed", and NaN for figures.
        steps: A row per step of the generations that finished, see ``step_frame``.
        groups: A row per group of requests decoded in a batch: ``config, baseline, group, repeat, new_tokens,
            throughput, pool_peak_bytes``, and, for a server that counts drafts over all
                requests, ``drafted, accepted, drafts, accepted_at``.
        problems: A sentence for each line that could not be used.

    Examples:
        >>> bool((results.generations["status"] == "ok").all()), results.problems
        (True, [])
    """

    run: Run
    generations: pd.DataFrame
    steps: pd.DataFrame
    groups: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=list(_GROUP_COLUMNS)))
    problems: list[str] = field(default_factory=list)

    @cached_property
    def done(self) -> pd.DataFrame:
        """The rows of generations that finished."""
        return self.generations[self.generations["status"] == "ok"]

    @cached_property
    def placed_steps(self) -> pd.DataFrame:
        """The steps, with ``place``, how many tokens of their output come before. Those of servers that leave out steps
        without a draft have no known place, and are missing.
        """
        steps, outputs = self.steps, self.generations
        emitted = steps.groupby("output")["emitted"]
        first = steps["output"].map(outputs["first_tokens"])
        whole = emitted.transform("sum") == steps["output"].map(outputs["new_tokens"]) - first
        return steps.assign(place=emitted.cumsum() - steps["emitted"] + first)[whole]

    @cached_property
    def disturbance(self) -> str:
        """Why verdicts are provisional, if other programs used the machine most of the time; otherwise empty."""
        warnings = self.generations["warnings"]
        busy = sum(not BUSY_WARNINGS.isdisjoint(names) for names in warnings)
        if busy <= _MOST_DISTURBED * len(warnings):
            return ""
        return (
            f"Verdicts are provisional: other programs used the processor during {busy} of {len(warnings)}"
            " generations."
        )

    def table(self, by: Literal["category"] | None = None) -> pd.DataFrame:
        """Return the figures of a report: a row for each configuration, or for each with a category.

        Its columns are ``config``, the fields of the configuration, and the names in [the metrics](metrics.md), with
        ``_low`` and ``_high`` for the ends of intervals.

        Examples:
            >>> results.table()["speedup"].notna().any()
            True
        """
        summary = import_module("specbench.results.summary")  # which is computed from this
        table: pd.DataFrame = summary.Summary(self).table(by)
        return table


def load_results(path: str | Path) -> Results:
    """Read one run.

    Args:
        path: The run's folder, a file in it, or a folder that contains only this run. A line cut short by a crash
            becomes a problem, not an error. If two lines have the same key, the first one counts, or the second one if
            only that one succeeded.

    Raises:
        UsageError: There are no results, or several runs, or another version wrote them.

    Examples:
        >>> results = load_results(run_folder)
        >>> medians = results.generations.groupby("config")["tokens_per_second"].median()
    >>> bool((medians > 0).all())
    True
    """
    folders = find_runs(path)
    if len(folders) > 1:
        raise UsageError(
            f"There are {len(folders)} runs in {str(path)!r}.", "Name one of them, or read each by itself."
        )
    return _read(folders[0])


# -- filling them ---------------------------------------------------------------------------------


def row_cells(row: Row) -> Json:
    """Return what the tables say of a row of the run, by column."""
    return {**_cells(row, _ROW), **_cells(row.condition, _CONDITION)}


def _cells(record: object, columns: Mapping[str, bool]) -> Json:
    cells = {}
    for name, is_number in columns.items():
        value = getattr(record, name, None)
        if value is None and is_number:
            value = math.nan
        value = str(value) if isinstance(value, Arrivals) else value
        cells[name] = intern(value) if isinstance(value, str) and name != "text" else value
    return cells


def _read(folder: Path) -> Results:
    """Return a run, with the tables of its lines without warm-ups."""
    run, problems = read_run(folder), list[str]()
    configs = {config.id: config for config in run.configs}
    generations, groups = list[Json](), list[Json]()
    steps: dict[int, StepLists] = {}
    foreign = unknown = 0
    for each in distinct(read_lines(folder, problems), problems):
        line, result, config = each.line, each.result, configs.get(each.line.config)
        if line.warmup or line.run_id != run.run_id or config is None:
            foreign += not line.warmup and line.run_id != run.run_id
            unknown += not line.warmup and line.run_id == run.run_id
            continue
        common = {
            **_cells(line, _LINE), **row_cells(config), "warnings": line.warnings, "target": run.target.name,
            "group": "",
        }  # fmt: skip
        if isinstance(result, Group):
            groups.append(_group_cells(line, config, result))
            common["group"] = line.prompt
        elif result is None:
            generations.append(common | _output_cells(None))
        for prompt, output in each.outputs():
            steps[len(generations)] = output.steps
            cells = common | _output_cells(output)
            cells["prompt"] = intern(prompt)
            if isinstance(output, RequestLine) and isinstance(result, Group):
                peak = result.peak_memory_bytes
                cells["category"] = output.category
                cells["peak_memory_bytes"] = math.nan if peak is None else peak
            generations.append(cells)
    for lines, what in (
        (foreign, "belong to another run"),
        (unknown, "name a configuration that run.json lacks"),
    ):
        if lines:
            problems.append(f"{lines} lines of {folder.name}/{GENERATIONS} {what} and are not used.")
    outputs = pd.DataFrame(generations, columns=[*_GENERATION_COLUMNS])
    return Results(
        run,
        outputs,
        step_frame(steps, outputs),
        pd.DataFrame(groups, columns=[*_GROUP_COLUMNS]),
        problems,
    )


def _output_cells(output: Generation | RequestLine | None) -> Json:
    server = None if output is None else output.server
    return {
        **_cells(output, _OUTPUT),
        "token_ids": np.array([] if output is None else output.token_ids, np.int32),
        "tokens_per_second": math.nan if output is None else output.speed,
        **_cells(server, _ANSWER),
        **(NO_REPORT if output is None or server is None else _reported_steps(output, server)),
    }


NO_REPORT: Json = {"step_source": None, "emitted_in_steps": math.nan, "reported_steps": math.nan}


def _reported_steps(output: Generation | RequestLine, server: ServerAnswer) -> Json:
    """Return the number of steps that follows from the counts of a server, and of tokens in them (docs/metrics.md).

    After the first token, every step emits its accepted tokens and one more, so the numbers of emitted and of accepted
    tokens give the number of steps. If a server does not report acceptance, each burst of its answer counts as a step.
    """
    if server.accepted is not None:
        emitted, source, known = output.new_tokens - 1, "server", output.steps.emitted
        # A step's own count leaves out accepted tokens behind the end.
        steps = emitted - (sum(known) - len(known) if known else server.accepted)
    else:
        emitted, source = output.new_tokens - output.first_tokens, "bursts"
        steps = server.bursts - 1
    if emitted <= 0 or steps <= 0:
        return NO_REPORT
    return {"step_source": source, "emitted_in_steps": emitted, "reported_steps": steps}


def step_frame(steps: Mapping[int, StepLists], generations: pd.DataFrame) -> pd.DataFrame:
    """Return the steps of outputs, a row per step.

    Its columns are the fields of ``StepLists``, with ``policy`` as a dict; ``output`` and ``config``, the index of the
    output and its row; ``prompt``, a number per prompt; ``alpha_sum``, the sum of the step's expected acceptances; and
    ``total_s``. A field that an output has no values of is ``None``.

    Args:
        steps: Those of the outputs that finished, by index.
        generations: All outputs.
    """
    lists, outputs = [*steps.values()], np.fromiter(steps, np.int64)
    counts = [len(each.drafted) for each in lists]
    columns: dict[str, Any] = {
        name: np.fromiter(
            chain.from_iterable(
                getattr(each, name) or [0 if kind is int else math.nan] * len(each.drafted) for each in lists
            ),
            np.int64 if kind is int else float,
        )
        for name, kind in STEP_FIGURES.items()
    }
    for name in _LISTS:
        values = (getattr(each, name) or [None] * len(each.drafted) for each in lists)
        columns[name] = pd.Series([*chain.from_iterable(values)], dtype=object)
    columns["policy"] = pd.Series([*chain.from_iterable(map(_notes, lists))], dtype=object)
    by_step = chain.from_iterable(
        each.expected_acceptance or [[math.nan]] * len(each.drafted) for each in lists
    )
    columns["alpha_sum"] = np.fromiter(map(sum, by_step), float)
    columns["total_s"] = np.asarray(sum(columns[f"{part}_s"] for part in PARTS))
    columns["output"] = np.repeat(outputs, counts)
    columns["config"] = np.repeat(generations["config"].to_numpy()[outputs], counts)
    columns["prompt"] = np.repeat(pd.factorize(generations["prompt"])[0][outputs], counts)
    return pd.DataFrame(columns)


def _notes(steps: StepLists) -> list[dict[str, float | None] | None]:
    """Return what the draft policy noted in each step."""
    if not steps.policy:
        return [None] * len(steps.drafted)
    return [
        dict(zip(steps.policy, values, strict=True)) for values in zip(*steps.policy.values(), strict=True)
    ]


def _group_cells(line: Line, config: Row, group: Group) -> Json:
    pool = group.pool
    return {
        "config": line.config, "baseline": config.baseline, "group": line.prompt, "repeat": line.repeat,
        "new_tokens": sum(each.new_tokens for each in group.requests),
        "throughput": group.speed,
        "pool_peak_bytes": math.nan if pool is None else pool.bytes * ratio(pool.peak, pool.blocks),
        **_cells(group.speculation, _SPECULATION),
    }  # fmt: skip
