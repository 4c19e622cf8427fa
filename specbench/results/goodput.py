"""Goodput within limits of latency: a view of the stored times of requests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace

import pandas as pd

from specbench.base.errors import UsageError
from specbench.results import stats
from specbench.results.pairs import with_baseline
from specbench.results.results import Results
from specbench.results.summary import confidence_of, configs_of

_TIMES = {"ttft": "ttft_s", "tpot": "token_s", "e2el": "total_s"}
"""What can be limited: the time to the first token, per later token, and of the whole answer."""

_FORM = "Write limits such as ttft=500ms,tpot=30ms or e2el=4s."


def parse_limits(slo: str) -> dict[str, float]:
    """Return the limits of ``--slo`` in seconds, by the names of times: ``ttft``, ``tpot`` and ``e2el``.

    Raises:
        UsageError: A limit is none, or is given twice.
    """
    limits: dict[str, float] = {}
    for part in slo.split(","):
        found = re.fullmatch(r"\s*(\w+)=(\d{1,9}(?:\.\d{1,9})?)(m?s)\s*", part, re.ASCII)
        if found is None or found[1] not in _TIMES or not float(found[2]):
            raise UsageError(f"{part.strip()!r} is no limit of latency.", _FORM)
        if found[1] in limits:
            raise UsageError(f"The limit of {found[1]} is given twice.", "Give each once.")
        limits[found[1]] = float(found[2]) / (1000 if found[3] == "ms" else 1)
    return limits


def goodput_rows(results: Results, limits: Mapping[str, float]) -> list[SimpleNamespace]:
    """Return a row for each configuration of which requests were sent, in the order of the run; none without limits.

    Returns:
        For each ``config``: how many ``requests`` were sent; the share ``within`` all limits; requests per second, all
        that finished (``rate``) and those within (``goodput``); and ``goodput_ratio`` over the baseline's.
    """
    units = _units(results, limits)
    pairs = with_baseline(units, ["met", "seconds"], ["unit", "repeat"])
    confidence = confidence_of(results.run)
    failed = _failed(results, units)
    found = []
    for config in configs_of(results) if limits else ():
        mine, against = units[units["config"] == config.id], pairs[pairs["config"] == config.id]
        met, seconds, unit = (mine[name].to_numpy() for name in ("met", "seconds", "unit"))
        requests = int(mine["requests"].sum()) + failed.get(config.id, 0)
        found.append(
            SimpleNamespace(
                config=config,
                requests=requests,
                within=float(met.sum() / requests),
                rate=stats.pooled_rate(mine["requests"].to_numpy(), seconds, unit),
                goodput=stats.pooled_rate(met, seconds, unit),
                goodput_ratio=stats.pooled_speedup(
                    against["met"].to_numpy(),
                    against["seconds"].to_numpy(),
                    against["base_met"].to_numpy(),
                    against["base_seconds"].to_numpy(),
                    against["unit"].to_numpy(),
                    confidence,
                ),
            )
        )
    return found


def _failed(results: Results, units: pd.DataFrame) -> dict[str, int]:
    """Return how many requests of each configuration failed; of a failed group, all that it has where it finished."""
    failed = results.generations[results.generations["status"] == "failed"]
    sizes = failed["prompt"].map(units.groupby("unit")["requests"].max()).where(failed["batch"].notna(), 1)
    counts = sizes.fillna(1).groupby(failed["config"]).sum()
    return {str(config): int(count) for config, count in counts.items()}


def _units(results: Results, limits: Mapping[str, float]) -> pd.DataFrame:
    """Return the requests, those within the limits, and the seconds of each group, or of each prompt decoded alone.

    Seconds are those in which the tokens come at the group's throughput, so that rates of closed loops leave out the
    time in which a group ends.
    """
    done = results.done.assign(token_s=1.0 / results.done["tokens_per_second"])
    met = pd.Series(True, index=done.index)
    for name, limit_s in limits.items():
        met &= ~(done[_TIMES[name]].astype(float) > limit_s)  # an answer of one token has no time per token
    done = done.assign(unit=done["group"].where(done["group"] != "", done["prompt"]), met=met.astype(float))
    keys = ["config", "baseline", "unit", "repeat"]
    units = done.groupby(keys, sort=False, as_index=False).agg(
        requests=("met", "size"), met=("met", "sum"), tokens=("new_tokens", "sum"), seconds=("total_s", "sum")
    )
    groups = results.groups.rename(columns={"group": "unit"})[["config", "unit", "repeat", "throughput"]]
    units = units.merge(groups, on=["config", "unit", "repeat"], how="left")
    shared = units["tokens"] / units["throughput"].astype(float)
    return units.assign(seconds=shared.where(units["throughput"].notna(), units["seconds"]))
