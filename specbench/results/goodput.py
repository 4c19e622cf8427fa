"""Goodput within limits of latency, and the cost of tokens: views of the stored times of requests."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from specbench.base.errors import UsageError
from specbench.base.record import NO_FIGURE, Estimate
from specbench.results import stats
from specbench.results.pairs import with_baseline
from specbench.results.results import Results
from specbench.results.summary import confidence_of, configs_of
from specbench.rows import Row

_TIMES = {"ttft": "ttft_s", "tpot": "token_s", "e2el": "total_s"}
"""What can be limited: the time to the first token, per later token, and of the whole answer."""

_FORM = "Write limits such as ttft=500ms,tpot=30ms or e2el=4s."


@dataclass(frozen=True)
class Service:
    """What a service has to keep to, and what it costs.

    Attributes:
        limits: Seconds by names of times, ``ttft``, ``tpot`` and ``e2el``; none for no limits.
        price_per_hour: Of what it runs on; ``None`` if not known.
    """

    limits: Mapping[str, float]
    price_per_hour: float | None = None

    @classmethod
    def of(cls, slo: str | None, price_per_hour: float | None) -> Service | None:
        """Return what ``--slo`` and ``--price-per-hour`` say; ``None`` if they say nothing.

        Raises:
            UsageError: A limit is none, or is given twice; or the price is no number.
        """
        if price_per_hour is not None and not 0 < price_per_hour < math.inf:
            raise UsageError(f"The price per hour is {price_per_hour:g}.", "Give a number above 0.")
        limits: dict[str, float] = {}
        for part in [] if slo is None else slo.split(","):
            found = re.fullmatch(r"\s*(\w+)=(\d{1,9}(?:\.\d{1,9})?)(m?s)\s*", part, re.ASCII)
            if found is None or found[1] not in _TIMES or not float(found[2]):
                raise UsageError(f"{part.strip()!r} is no limit of latency.", _FORM)
            if found[1] in limits:
                raise UsageError(f"The limit of {found[1]} is given twice.", "Give each once.")
            limits[found[1]] = float(found[2]) / (1000 if found[3] == "ms" else 1)
        return cls(limits, price_per_hour) if limits or price_per_hour else None


@dataclass(frozen=True, slots=True)
class ServiceRow:
    """Requests of a configuration: how many finished, the share within all limits, requests per second (all, and those
    within), the cost of a million tokens of answers, and what goodput and cost are over the baseline's.
    """

    config: Row
    requests: int
    within: float
    rate: Estimate
    goodput: Estimate
    goodput_ratio: Estimate
    cost: Estimate
    cost_ratio: Estimate


def service_rows(results: Results, service: Service) -> list[ServiceRow]:
    """Return a row for each configuration with finished requests, in the order of the run."""
    units = _units(results, service.limits)
    pairs = with_baseline(units, ["met", "tokens", "seconds"], ["unit", "repeat"])
    price = math.nan if service.price_per_hour is None else service.price_per_hour / 3600
    confidence = confidence_of(results.run)

    def ratio(rows: pd.DataFrame, *names: str) -> Estimate:
        if rows.empty:
            return NO_FIGURE
        amounts, seconds, others, their_seconds, unit = (rows[name].to_numpy() for name in (*names, "unit"))
        return stats.pooled_speedup(amounts, seconds, others, their_seconds, unit, confidence)

    found = []
    for config in configs_of(results):
        mine, against = units[units["config"] == config.id], pairs[pairs["config"] == config.id]
        if mine.empty:
            continue
        requests, met, tokens, seconds, unit = (
            mine[name].to_numpy() for name in ("requests", "met", "tokens", "seconds", "unit")
        )
        found.append(
            ServiceRow(
                config,
                requests=int(requests.sum()),
                within=float(met.sum() / requests.sum()),
                rate=stats.pooled_rate(requests, seconds, unit),
                goodput=stats.pooled_rate(met, seconds, unit),
                goodput_ratio=ratio(against, "met", "seconds", "base_met", "base_seconds"),
                cost=stats.pooled_rate(price * seconds, tokens / 1e6, unit),
                cost_ratio=ratio(against, "base_tokens", "base_seconds", "tokens", "seconds"),
            )
        )
    return found


def _units(results: Results, limits: Mapping[str, float]) -> pd.DataFrame:
    """Return the requests, those within the limits, tokens and seconds of each group, or of each prompt decoded alone.

    Seconds are those in which the tokens come at the group's throughput, so that rates of closed loops leave out the
    time in which a group ends.
    """
    done = results.done.assign(token_s=1.0 / results.done["tokens_per_second"])
    met = pd.Series(True, index=done.index)
    for name, limit_s in limits.items():
        late = (
            done[_TIMES[name]].astype(float) > limit_s
        )  # never where it is no number: an answer of one token
        met &= ~late
    done = done.assign(unit=done["group"].where(done["group"] != "", done["prompt"]), met=met.astype(float))
    keys = ["config", "baseline", "unit", "repeat"]
    units = done.groupby(keys, sort=False, as_index=False).agg(
        requests=("met", "size"), met=("met", "sum"), tokens=("new_tokens", "sum"), seconds=("total_s", "sum")
    )
    groups = results.groups.rename(columns={"group": "unit"})[["config", "unit", "repeat", "throughput"]]
    units = units.merge(groups, on=["config", "unit", "repeat"], how="left")
    shared = units["tokens"] / units["throughput"].astype(float)
    return units.assign(seconds=shared.where(units["throughput"].notna(), units["seconds"]))
