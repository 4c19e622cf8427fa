"""Result files of other benchmarks of servers: aiperf, guidellm and `vllm bench serve`.

They hold figures over all requests of a load, not generations: no prompt of one file can be paired with one of another,
and no interval over prompts follows from them. What all three tell is read under one name for each quantity.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench.base.errors import UsageError
from specbench.base.record import Json, not_json, ratio
from specbench.base.textsafe import one_line
from specbench.results.stats import decimals
from specbench.results.store import GENERATIONS, PACKED, RUN

if TYPE_CHECKING:
    import pandas as pd

    from specbench.results.results import Results

_AIPERF_FILE = "profile_export_aiperf.json"
_STATISTICS = ("mean", "median", "p99")

VLLM = "vllm bench serve"
NOTES = (
    "Per token: from the first token to the end of an answer, divided by its tokens but one.",
    "Figures of other tools are of all requests together. They do not say how prompts vary, so they have no intervals,"
    " and no difference is called faster or slower.",
    "Nor do they say that the same prompts were answered in turns: what differs between the prompts, and what changed"
    " on the machine meanwhile, is in every difference.",
)
DRAFTS = ("tokens per step", "accepted (%)")
TTFT, PER_TOKEN, LATENCY = "TTFT (ms)", "per token (ms)", "latency (ms)"
FIGURES = (
    "requests",
    "failed requests",
    "requests/s",
    "output tokens/s",
    *(f"{what}, {statistic}" for what in (TTFT, PER_TOKEN, LATENCY) for statistic in _STATISTICS),
    "prompt tokens, mean",
    "output tokens, mean",
    *DRAFTS,
)
"""Names of the figures, in the order of tables.

Tokens per step include the correction or bonus token. Accepted: accepted over drafted tokens.
"""


@dataclass(frozen=True)
class LoadFigures:
    """Figures of a server, or of a configuration, under one load.

    Attributes:
        tool: Who measured, with the version if it is known.
        label: Name of the load among those of the file, or of the configuration.
        model: The model as the tool names it.
        figures: By the names in ``FIGURES``, as far as the file has them.
    """

    tool: str
    label: str
    model: str
    figures: Mapping[str, float] = field(default_factory=dict)


def other_file(path: Path) -> Path | None:
    """Return the file of another tool that a path means; ``None`` if it is for a run of specbench."""
    if path.is_dir() and (path / _AIPERF_FILE).is_file():
        return path / _AIPERF_FILE
    return path if path.is_file() and path.name not in (RUN, GENERATIONS, PACKED) else None


def read_other(path: Path) -> list[LoadFigures]:
    """Read a file of another tool.

    Raises:
        UsageError: It cannot be read, is of none of these tools, or a figure in it is no number.
    """
    documents = _documents(path)
    for is_ours, read in _READERS:
        if all(is_ours(each) for each in documents):
            found = [figures for each in documents for figures in read(each)]
            if any(math.isinf(value) or value < 0 for each in found for value in each.figures.values()):
                break
            if any(each.figures.get("requests", 0.0) > 0 for each in found):
                return found
            raise UsageError(f"No request in {str(path)!r} was answered.", "Name another file.")
    else:
        raise UsageError(
            f"{str(path)!r} is no file of aiperf, guidellm or `vllm bench serve`.",
            f"Name {_AIPERF_FILE}, guidellm's benchmarks.json, or the file of --save-result.",
        )
    raise UsageError(f"A figure in {str(path)!r} is negative or infinite.", "Measure again.")


def _documents(path: Path) -> list[Json]:
    """Return the JSON objects of a file: one, or one for each line (`vllm bench serve --append-result`)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        try:
            found = [json.loads(text, parse_constant=not_json)]
        except ValueError:
            found = [json.loads(line, parse_constant=not_json) for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}.", "Name another file.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{str(path)!r} is not JSON.", "Name a file that a benchmark has written."
        ) from error
    return found if found and all(isinstance(each, dict) for each in found) else [{}]


def figure_text(name: str, value: float) -> str:
    """Return a figure as text; a dash for NaN."""
    return f"{value:g}" if name.endswith("requests") and not math.isnan(value) else decimals(value)


# -- the tools -----------------------------------------------------------------------------------------


def _object(place: Any, *names: str) -> Json:
    """Return an object inside of objects; an empty one if it is missing."""
    for name in names:
        place = place.get(name) if isinstance(place, dict) else None
    return place if isinstance(place, dict) else {}


def _number(place: Any, *names: str) -> float:
    """Return a number inside of objects; NaN if there is none, infinity if it is too large."""
    place = _object(place, *names[:-1]).get(names[-1])
    if isinstance(place, bool) or not isinstance(place, int | float):
        return math.nan
    try:
        return float(place)
    except OverflowError:
        return math.inf if place > 0 else -math.inf


def _text(place: Any, *names: str) -> str:
    place = _object(place, *names[:-1]).get(names[-1])
    return one_line(place) if isinstance(place, str) else ""


def _figures(values: Mapping[str, float]) -> dict[str, float]:
    """Return the known figures in the order of tables."""
    return {name: values[name] for name in FIGURES if not math.isnan(values.get(name, math.nan))}


def _spread(what: str, place: Any, names: Sequence[str], factor: float = 1.0) -> dict[str, float]:
    """Return mean, median and p99 of a quantity from an object that has them under other names."""
    return {
        f"{what}, {statistic}": factor * _number(place, *name.split("."))
        for statistic, name in zip(_STATISTICS, names, strict=True)
    }


def _aiperf(report: Json) -> Iterator[LoadFigures]:
    names = ("avg", "p50", "p99")
    accepted, rejected = (
        _number(report, f"total_usage_{kind}_prediction_tokens", "avg") for kind in ("accepted", "rejected")
    )
    found = {
        "requests": _number(report, "request_count", "avg"),
        "failed requests": _number(report, "error_request_count", "avg"),
        "requests/s": _number(report, "request_throughput", "avg"),
        "output tokens/s": _number(report, "output_token_throughput", "avg"),
        **_spread(TTFT, report.get("time_to_first_token"), names),
        **_spread(PER_TOKEN, report.get("inter_token_latency"), names),
        **_spread(LATENCY, report.get("request_latency"), names),
        "prompt tokens, mean": _number(report, "input_sequence_length", "avg"),
        "output tokens, mean": _number(report, "output_sequence_length", "avg"),
        "accepted (%)": 100.0 * ratio(accepted, accepted + rejected),
    }
    models = _object(report, "input_config", "models").get("items")
    first = models[0] if isinstance(models, list) and models else None
    version = _text(report, "aiperf_version")
    yield LoadFigures(f"aiperf {version}".strip(), "all requests", _text(first, "name"), _figures(found))


def _guidellm(report: Json) -> Iterator[LoadFigures]:
    names = ("successful.mean", "successful.median", "successful.percentiles.p99")
    version = _text(report, "metadata", "guidellm_version")
    for number, each in enumerate(report["benchmarks"]):
        metrics, strategy = _object(each, "metrics"), _object(each, "config", "strategy")
        found = {
            "requests": _number(metrics, "request_totals", "successful"),
            "failed requests": _number(metrics, "request_totals", "errored"),
            "requests/s": _number(metrics, "requests_per_second", "successful", "mean"),
            "output tokens/s": _number(metrics, "output_tokens_per_second", "successful", "mean"),
            **_spread(TTFT, metrics.get("time_to_first_token_ms"), names),
            **_spread(PER_TOKEN, metrics.get("inter_token_latency_ms"), names),
            **_spread(LATENCY, metrics.get("request_latency"), names, 1000.0),
            "prompt tokens, mean": _number(metrics, "prompt_token_count", "successful", "mean"),
            "output tokens, mean": _number(metrics, "output_token_count", "successful", "mean"),
        }
        load = [_text(strategy, "type_") or f"load {number + 1}"]
        load += [f"{value:g}" for name in ("streams", "rate") if (value := _number(strategy, name)) > 0]
        model = _text(each, "config", "backend", "model")
        yield LoadFigures(f"guidellm {version}".strip(), " ".join(load), model, _figures(found))


def _vllm(report: Json) -> Iterator[LoadFigures]:
    planned, done = _number(report, "num_prompts"), _number(report, "completed")
    failed = _number(report, "failed")
    found = {
        "requests": done,
        "failed requests": planned - done if math.isnan(failed) else failed,
        "requests/s": _number(report, "request_throughput"),
        "output tokens/s": _number(report, "output_throughput"),
        **{
            f"{what}, {statistic}": _number(report, f"{statistic}_{name}_ms")
            for what, name in ((TTFT, "ttft"), (PER_TOKEN, "tpot"), (LATENCY, "e2el"))
            for statistic in _STATISTICS
        },
        "prompt tokens, mean": ratio(_number(report, "total_input_tokens"), done),
        "output tokens, mean": ratio(_number(report, "total_output_tokens"), done),
        "tokens per step": _number(report, "spec_decode_acceptance_length"),
        "accepted (%)": _number(report, "spec_decode_acceptance_rate"),
    }
    clients, rate = _number(report, "max_concurrency"), _number(report, "request_rate")
    load = [f"{clients:g} clients"] if clients > 0 else []
    load += [f"{rate:g} requests/s"] if math.isfinite(rate) else []
    label = _text(report, "label") or ", ".join(load) or "all requests"
    yield LoadFigures(VLLM, label, _text(report, "model_id"), _figures(found))


_READERS: tuple[tuple[Callable[[Json], bool], Callable[[Json], Iterator[LoadFigures]]], ...] = (
    (lambda report: "aiperf_version" in report, _aiperf),
    (lambda report: "metadata" in report and isinstance(report.get("benchmarks"), list), _guidellm),
    (lambda report: "request_throughput" in report and "total_token_throughput" in report, _vllm),
)


# -- runs of specbench -----------------------------------------------------------------------------------


def own_figures(results: Results) -> list[LoadFigures]:
    """Return the same figures for each configuration of a run."""
    from specbench.results.summary import summarize

    found = []
    for row in summarize(results).rows:
        rows = results.generations[results.generations["config"] == row.config.id]
        done = rows[rows["status"] == "ok"]
        if done.empty:
            continue
        seconds = float(done["total_s"].sum())
        if row.config.batch is not None:
            groups = results.groups[results.groups["config"] == row.config.id]
            seconds = float((groups["new_tokens"] / groups["throughput"]).sum())
        longer = done[done["new_tokens"] > 1]
        values = {
            "requests": float(len(done)),
            "failed requests": float(len(rows) - len(done)),
            "requests/s": ratio(len(done), seconds),
            "output tokens/s": ratio(float(done["new_tokens"].sum()), seconds),
            **_of_values(TTFT, 1000.0 * done["ttft_s"]),
            **_of_values(
                PER_TOKEN, 1000.0 * (longer["total_s"] - longer["ttft_s"]) / (longer["new_tokens"] - 1)
            ),
            **_of_values(LATENCY, 1000.0 * done["total_s"]),
            "prompt tokens, mean": float(done["prompt_tokens"].mean()),
            "output tokens, mean": float(done["new_tokens"].mean()),
            "tokens per step": row.tokens_per_step.value,
            "accepted (%)": 100.0 * row.acceptance_rate.value,
        }
        label = one_line(row.config.label)
        found.append(LoadFigures("specbench", label, one_line(results.run.target.name), _figures(values)))
    return found


def _of_values(what: str, values: pd.Series[float]) -> dict[str, float]:
    known = values.dropna().to_numpy(dtype=np.float64)
    if not len(known):
        return {}
    statistics = (float(known.mean()), float(np.median(known)), float(np.percentile(known, 99)))
    return {f"{what}, {name}": value for name, value in zip(_STATISTICS, statistics, strict=True)}
