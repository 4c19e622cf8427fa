"""Every figure of a run, defined once.

A figure is a method of ``Figures`` under ``@metric``, and ``METRICS`` has them by name. Tables, charts, reports,
comparisons, CSV, JSON and docs/metrics.md, which has their pitfalls, take value, heading, form and sentence from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

import pandas as pd
from msgspec import structs

from specbench.base.record import BASELINE, NO_FIGURE, Estimate, ratio
from specbench.decoding.records import PARTS
from specbench.results import stats
from specbench.results.frames import Frames

if TYPE_CHECKING:
    from specbench.rows import Row

PERCENTILES = ("p50", "p95", "p99")
"""Of latencies."""

Form = Literal["number", "ratio", "share", "count", "ms", "bytes"]


@dataclass(eq=False)
class Metric:
    """A figure: the attribute of ``Figures`` that its formula gives.

    Attributes:
        heading: Its name in tables.
        form: How it is shown.
        rank: Terminals that are too narrow leave out the highest rank first; 0 is always shown.
        interval: Whether it has an interval, over prompts; in batches over groups of prompts.
        mean_of: Of a mean over prompts: the frame of a run that has its values, and the column.
        sums: Of a rate: the columns of steps, the sum of one of which is divided by the sum of the other.
        name: Its name in Python, CSV and JSON.
        about: What it is, in a sentence.
    """

    formula: Callable[[Figures], Estimate | float]
    heading: str
    form: Form
    rank: int
    interval: bool = False
    mean_of: tuple[str, str] | None = None
    sums: tuple[str, str] | None = None
    name: str = ""
    about: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or self.formula.__name__
        self.about = self.about or " ".join((self.formula.__doc__ or "").split())
        self.interval = self.interval or self.is_compared
        METRICS[self.name] = self

    @property
    def is_compared(self) -> bool:
        """Whether two runs can be compared in it."""
        return self.mean_of is not None or self.sums is not None

    @property
    def is_speedup(self) -> bool:
        """Whether it is over the baseline of its own run."""
        return self.mean_of is not None and self.mean_of[0] == "pairs"

    @property
    def is_timed(self) -> bool:
        """Whether it depends on the machine."""
        return self.mean_of is not None and not self.is_speedup

    @overload
    def __get__(self, row: None, owner: type) -> Metric: ...

    @overload
    def __get__(self, row: Figures, owner: type) -> Estimate: ...

    def __get__(self, row: Figures | None, owner: type) -> Metric | Estimate:
        if row is None:
            return self
        if self.name not in row.known:
            value = self.formula(row)
            estimate = value if isinstance(value, Estimate) else Estimate(float(value), None, None, 0)
            row.known[self.name] = estimate
        return row.known[self.name]


METRICS: dict[str, Metric] = {}
"""Every figure by name, in the order of CSV files."""


def metric(
    heading: str, form: Form = "number", rank: int = 0, **more: Any
) -> Callable[[Callable[[Figures], Estimate | float]], Metric]:
    """Register the decorated formula in ``METRICS``, with arguments of ``Metric``; its docstring is the sentence."""
    return lambda formula: Metric(formula, heading, form, rank, **more)


class Figures:
    """The figures of a row of a run over all of its outputs, or over some.

    Each is an ``Estimate``, computed when it is asked for, and NaN if it does not exist; ``row["speedup"]`` is
    ``row.speedup``.

    Args:
        summary: The figures of the run.
        config: The row.
        category: Of the outputs; empty for all.
    """

    def __init__(self, summary: Frames, config: Row, category: str = "") -> None:
        self.summary, self.config, self.category = summary, config, category
        self.known: dict[str, Estimate] = {}

    def __getitem__(self, name: str) -> Estimate:
        return METRICS[name].__get__(self, Figures)

    # -- what they are computed from ---------------------------------------------------------------

    def _mine(self, name: str) -> pd.DataFrame:
        frame = self.summary.part(name, self.config.id)
        return frame[frame["category"] == self.category] if self.category else frame

    @cached_property
    def outputs(self) -> pd.DataFrame:
        """Its outputs, failed ones too."""
        return self._mine("generations")

    @cached_property
    def done(self) -> pd.DataFrame:
        """Its outputs that finished."""
        return self.outputs[self.outputs["status"] == "ok"]

    @cached_property
    def steps(self) -> pd.DataFrame:
        """Their steps."""
        steps = self.summary.part("steps", self.config.id)
        return steps[steps["output"].isin(self.outputs.index)] if self.category else steps

    @cached_property
    def answers(self) -> pd.DataFrame:
        """Those of a server, which reports about them."""
        return self.done[self.done["counted_by"].notna()]

    @cached_property
    def groups(self) -> pd.DataFrame:
        """The groups in which all requests were decoded side by side; empty for a part of them."""
        groups = self.summary.part("groups", self.config.id)
        return groups[:0] if self.category else groups

    @cached_property
    def pairs(self) -> pd.DataFrame | None:
        """Its outputs, each with its baseline's; ``None`` without any."""
        pairs = self._mine("pairs")
        return None if pairs.empty else pairs

    @cached_property
    def compared(self) -> pd.DataFrame | None:
        """What speedups are over: pairs of groups if requests were decoded side by side, else of outputs."""
        groups = self.summary.part("group_pairs", self.config.id)
        return self.pairs if self.category or groups.empty else groups

    @property
    def is_baseline(self) -> bool:
        return self.config.id == self.config.baseline

    @property
    def is_server(self) -> bool:
        return self.config.kind == "server"

    @property
    def reports_steps(self) -> bool:
        """Whether its steps with a draft are known: of a server, from all of its answers with drafts."""
        drafting = self.answers.index[self.answers["drafted"] > 0]
        known = self.steps["output"]
        return not self.is_server or (not known.empty and bool(drafting.isin(known).all()))

    @property
    def measured(self) -> bool:
        """Whether a speedup over another row was measured."""
        return not self.is_baseline and not math.isnan(self.speedup.value)

    # -- counts and words --------------------------------------------------------------------------

    @property
    def generations(self) -> int:
        return len(self.done)

    @metric("prompts", "count", 3)
    def prompts(self) -> float:
        """Prompts with a finished output."""
        return self.done["prompt"].nunique()

    @metric("failed", "count", 7)
    def failures(self) -> float:
        """Outputs that ended in an error; they are left out everywhere else."""
        return len(self.outputs) - len(self.done)

    @property
    def verdict(self) -> stats.Verdict | None:
        """Whether its speedup surely is above or below 1; ``None`` for a baseline."""
        if self.pairs is None:
            return None
        tuned = None if self.category else self.summary.tuned.get(self.config.id)
        return stats.verdict(self.speedup) if tuned is None else tuned.verdict

    @property
    def provisional(self) -> bool:
        """Whether the verdict rests on intervals that are wider, because others used the machine most of the time."""
        return bool(self.summary.disturbance) and self.verdict not in (None, "cannot tell")

    @property
    def verdict_text(self) -> str:
        return stats.verdict_text(self.verdict, self.provisional)

    @property
    def difference(self) -> str | None:
        """Why outputs differ (``ties``, ``beyond rounding``, ``not checked``); ``None`` if they do not."""
        if self.pairs is None or self.pairs["identical"].dropna().all():
            return None
        found = self.summary.run.differences or ()
        ties = {each.numerical_tie for each in found if each.config == self.config.id}
        return "beyond rounding" if False in ties else "ties" if ties == {True} else "not checked"

    @property
    def step_source(self) -> str | None:
        """Where a server's tokens per step come from: the ``server``, or ``bursts``, an estimate."""
        sources = set(self.answers["step_source"][self.answers["reported_steps"] > 0])
        return next((source for source in ("bursts", "server") if source in sources), None)

    # -- speed -------------------------------------------------------------------------------------

    @metric("tokens/s", rank=1, mean_of=("speeds", "speed"))
    def tokens_per_second(self) -> Estimate:
        """Tokens after the first emission per second, geometric mean over prompts; in batches the throughput."""
        if len(self.groups):
            groups = self.groups.rename(columns={"group": "prompt"})
            return _geometric_mean(groups, groups["throughput"])
        return _geometric_mean(self.done, self.done["tokens_per_second"])

    @metric("speedup", "ratio", mean_of=("pairs", "ratio"))
    def speedup(self) -> Estimate:
        """Speed over the baseline's, geometric mean over prompts of paired ratios; 1 for a baseline."""
        tuned = self.summary.tuned.get(self.config.id)
        if tuned is not None:
            return tuned.categories.get(self.category, NO_FIGURE) if self.category else tuned.speedup
        return self._mean_ratio(self.compared, "ratio", of_baseline=BASELINE)

    @metric("with TTFT", "ratio", 14, mean_of=("pairs", "ratio_total"))
    def speedup_total(self) -> Estimate:
        """Speedup including the time to the first token; none in batches, whose speedup includes it."""
        if len(self.groups) or self.config.condition.batch is not None:
            return NO_FIGURE
        return self._mean_ratio(self.pairs, "ratio_total", of_baseline=BASELINE)

    @metric("pooled", "ratio", 15, interval=True)
    def pooled_speedup(self) -> Estimate:
        """Speedup from all tokens over all seconds; long outputs weigh more."""
        if self.summary.tuned:  # it is over the same generations without noise correction
            return NO_FIGURE
        if self._has_no_speedup or self.compared is None:
            return BASELINE if self._has_no_speedup else NO_FIGURE
        return self._shown(self._pooled_ratio(self.compared, "tokens", "seconds", "prompt"))

    @property
    def _has_no_speedup(self) -> bool:
        return (self.config.kind == "plain" or self.is_baseline) and not self.outputs.empty

    def _mean_ratio(
        self, pairs: pd.DataFrame | None, name: str, *, of_baseline: Estimate = NO_FIGURE
    ) -> Estimate:
        if self._has_no_speedup or pairs is None:
            return of_baseline if self._has_no_speedup else NO_FIGURE
        return self._shown(_geometric_mean(pairs, pairs[name], self.summary.confidence))

    def _pooled_ratio(self, pairs: pd.DataFrame, part: str, whole: str, unit: str) -> Estimate:
        names = (part, whole, f"base_{part}", f"base_{whole}", unit)
        ours, per, theirs, their_per, units = (pairs[name].to_numpy() for name in names)
        return stats.pooled_speedup(ours, per, theirs, their_per, units, self.summary.confidence)

    def _shown(self, found: Estimate) -> Estimate:
        """Return a ratio over the baseline's with a wider interval if others used the machine most of the time."""
        return stats.widened(found) if self.summary.disturbance else found

    @metric("again", "ratio", 6, interval=True)
    def warming(self) -> Estimate:
        """Speed of a server in later repeats over that in the first."""
        if not self.is_server:
            return NO_FIGURE
        alone = self.done[self.done["group"] == ""]
        first = alone.loc[alone["repeat"] == 0, ["prompt", "tokens_per_second"]]
        again = alone[alone["repeat"] > 0].merge(first, on="prompt", suffixes=("", "_first"))
        return _geometric_mean(again, again["tokens_per_second"] / again["tokens_per_second_first"])

    # -- acceptance --------------------------------------------------------------------------------

    def counts(self, name: str) -> tuple[pd.DataFrame, str, str]:
        """Return the steps, or the answers of a server, with the columns whose sums make a rate."""
        sums = METRICS[name].sums
        assert sums is not None, name
        by_step = self.answers.empty or name == "acceptance_tested"
        if not self.is_server or (by_step and name != "alpha" and self.reports_steps):
            return self.steps.assign(steps=1.0), *sums
        if name == "tokens_per_step":
            return self.answers[self.answers["reported_steps"] > 0], "emitted_in_steps", "reported_steps"
        has_counts = (self.answers["drafted"] > 0) & (name == "acceptance_rate")
        return self.answers[has_counts], "accepted", "drafted"

    def values(self, name: str) -> pd.DataFrame:
        """Return what a comparable figure is computed from.

        Returns:
            ``prompt, turn, repeat, category, value``. Of a rate they are sums of each prompt (``turn`` and ``repeat``
            are 0), and ``of`` is what the sum ``value`` is divided by.
        """
        kind, keys = METRICS[name], ["prompt", "turn", "repeat", "category"]
        if kind.mean_of is not None:
            rows, column = self._mine(kind.mean_of[0]), kind.mean_of[1]
            return rows[keys].assign(value=rows[column])[rows[column] > 0]
        rows, part, whole = self.counts(name)
        outputs = self.done.loc[rows.get("output", rows.index)]
        sums = pd.DataFrame({"value": rows[part].to_numpy(), "of": rows[whole].to_numpy()}, dtype=float)
        sums = sums.groupby(outputs["prompt"].to_numpy()).sum()
        categories = outputs.drop_duplicates("prompt").set_index("prompt")["category"]
        return sums.assign(category=categories, turn=0, repeat=0).rename_axis("prompt").reset_index()

    def _rate(self, name: str, **ends: float) -> Estimate:
        rows, part, whole = self.counts(name)
        if not self.is_server and not rows["drafted"].any():
            return NO_FIGURE
        return _pooled(rows, part, whole, "prompt", **ends)

    @metric("tokens/step", rank=4, sums=("emitted", "steps"))
    def tokens_per_step(self) -> Estimate | float:
        """Emitted tokens over steps, without the prefill's token."""
        if not self.is_server and not self.steps["drafted"].any():
            return ratio(self.steps["emitted"].sum(), len(self.steps))
        return self._rate("tokens_per_step", least=1.0)

    @metric("accepted", "share", 5, sums=("accepted", "drafted"))
    def acceptance_rate(self) -> Estimate:
        """Accepted over drafted tokens."""
        if self.is_server and not (self.answers["drafted"] > 0).any():  # it counts for all requests together
            return _pooled(self.groups[self.groups["drafted"] > 0], "accepted", "drafted", "group", most=1.0)
        return self._rate("acceptance_rate", most=1.0)

    @metric("of tested", "share", 16, sums=("accepted", "tested"))
    def acceptance_tested(self) -> Estimate:
        """Accepted over tested tokens."""
        return self._rate("acceptance_tested", most=1.0)

    @metric("kept/draft", rank=18, interval=True)
    def accepted_per_draft(self) -> Estimate:
        """Accepted tokens per draft: the accepted length without the bonus token, as TensorRT-LLM counts it."""
        if not self.is_server:
            drafts, unit = self.steps[self.steps["drafted"] > 0].assign(drafts=1.0), "prompt"
        else:
            drafts, groups = (rows[rows["drafts"] > 0] for rows in (self.answers, self.groups))
            drafts, unit = (groups, "group") if drafts.empty else (drafts, "prompt")
        return _pooled(drafts, "accepted", "drafts", unit)

    @metric("tokens/draft", rank=18, interval=True)
    def tokens_per_draft(self) -> Estimate:
        """The same with the bonus token, as vLLM, SGLang and SPEED-Bench count it; no step without a draft counts."""
        kept = self.accepted_per_draft
        low, high = (None if end is None else end + 1.0 for end in (kept.low, kept.high))
        return structs.replace(kept, value=kept.value + 1.0, low=low, high=high)

    @metric("α", rank=6, sums=("alpha_sum", "tested"))
    def alpha(self) -> Estimate:
        """Mean expected acceptance of tested tokens."""
        return self._rate("alpha", most=1.0)

    @metric("mean γ", rank=12)
    def mean_gamma(self) -> float:
        """Tokens drafted per step."""
        if self.is_server:  # its steps without a draft may be missing
            counted = self.answers[(self.answers["drafted"] > 0) & (self.answers["reported_steps"] > 0)]
            return ratio(counted["drafted"].sum(), counted["reported_steps"].sum())
        return float(self.steps["drafted"].mean()) if self.steps["drafted"].any() else math.nan

    @metric("nodes", rank=12)
    def mean_nodes(self) -> float:
        """Nodes drafted per step."""
        own = self.steps[:0] if self.is_server else self.steps
        return float(own["nodes"].mean()) if own["drafted"].any() else math.nan

    # -- time --------------------------------------------------------------------------------------

    @metric("TTFT ms", "ms", 9, mean_of=("done", "ttft_s"))
    def ttft_s(self) -> Estimate:
        """Time to the first token, geometric mean over prompts."""
        return _geometric_mean(self.done, self.done["ttft_s"])

    def _share(self, name: str) -> float:
        return ratio(self.steps[name].sum(), self.steps["total_s"].sum())

    @metric("reading", "share", 17)
    def share_draft_prefill(self) -> float:
        """Share of the time of the steps in which the drafter read the prompt; part of drafting."""
        return self._share("draft_prefill_s")

    @property
    def _masked(self) -> bool:
        return bool(self.steps["mask_s"].any())

    @metric("masks", "share", 10)
    def share_masks(self) -> float:
        """Share of the time of the steps for masks of the output's format; in plain decoding, what the format costs."""
        return self._share("mask_s") if self._masked else math.nan

    @metric("forced", "share", 5)
    def forced_share(self) -> float:
        """Share of the tokens of steps that the format forced, which are accepted drafts."""
        return ratio(self.steps["forced"].sum(), self.steps["emitted"].sum() if self._masked else 0)

    @metric("corrected", "share", 12)
    def corrected_share(self) -> float:
        """Share of the tokens of steps that are correction tokens, with a format."""
        corrected = (self.steps["closing"] == "corrected").sum()
        return ratio(corrected, self.steps["emitted"].sum() if self._masked else 0)

    # -- others ------------------------------------------------------------------------------------

    @metric("memory", "bytes", 13)
    def peak_memory_bytes(self) -> float:
        """The largest peak memory of its generations."""
        return float(self.done["peak_memory_bytes"].max())

    @metric("log p/token", rank=11)
    def log_probability(self) -> float:
        """Log-probability per token of an output, mean over prompts, where a beam search is compared."""
        found = self.done["log_probability"] / self.done["new_tokens"]
        return float(found.groupby(self.done["prompt"]).mean().mean())

    @metric("identical", "share", 13)
    def identical_share(self) -> float:
        """Share of greedy outputs that equal the baseline's."""
        if self.pairs is None or self.pairs["identical"].isna().all():
            return math.nan
        return float(self.pairs["identical"].dropna().astype(bool).mean())

    @metric("cached", "share", 12)
    def cached_share(self) -> float:
        """Share of the prompts' tokens that a server took from its cache, if it reports that."""
        known = self.answers[self.answers["cached_tokens"].notna()]
        return ratio(known["cached_tokens"].sum(), known["prompt_tokens"].sum())

    # -- batches -----------------------------------------------------------------------------------

    @cached_property
    def requests(self) -> pd.DataFrame:
        """Its finished outputs that were decoded side by side with others, with ``token_s``, the time of a token."""
        done = self.done[self.done["group"] != ""]
        speed = done["tokens_per_second"].astype(float)
        return done.assign(token_s=1.0 / speed.where(speed > 0))

    @metric("requests", "count", 9)
    def finished_requests(self) -> float:
        """Requests that finished."""
        return len(self.requests)

    @metric("pool", "bytes", 10)
    def pool_peak_bytes(self) -> float:
        """The most memory of the target's KV cache in use at a time."""
        return float(self.groups["pool_peak_bytes"].max())

    # -- goodput -----------------------------------------------------------------------------------

    @metric("goodput", "ratio", 4, interval=True)
    def goodput(self) -> Estimate:
        """Requests per second within all limits of latency."""
        if not self.summary.limits or self.category:
            return NO_FIGURE
        return _pooled(self.summary.part("within", self.config.id), "met", "seconds", "group")


def _share_of(part: str) -> Metric:
    about = f"Share of the time of the steps for {part}."
    return Metric(
        lambda row: ratio(row.steps[f"{part}_s"].sum(), row.steps["total_s"].sum()), part, "share", 10,
        name=f"share_{part}", about=about,
    )  # fmt: skip


def _percentile_of(name: str, column: str, heading: str, form: Form, rank: int, percent: str) -> Metric:
    return Metric(
        lambda row: float(row.requests[column].astype(float).quantile(int(percent[1:]) / 100)),
        f"{heading} {percent}", form, rank, name=f"{name}_{percent}",
        about=f"The {percent[1:]}th percentile over all requests of `{column}`.",
    )  # fmt: skip


for _part in PARTS:
    _share_of(_part)
for _number, _percent in enumerate(PERCENTILES):
    _percentile_of("request_token_s", "token_s", "ms/token", "ms", 1 + 5 * _number, _percent)
    _percentile_of("request_ttft_s", "ttft_s", "TTFT ms", "ms", 2 + 5 * _number, _percent)
    _percentile_of("latency_s", "total_s", "total s", "number", 3 + 5 * _number, _percent)
    _percentile_of("queued_s", "queued_s", "queued s", "number", 4 + 5 * _number, _percent)


def _pooled(rows: pd.DataFrame, part: str, whole: str, unit: str, **ends: float) -> Estimate:
    """Return the sum of one column over the sum of another, see ``stats.pooled_rate``; NaN without rows."""
    if rows.empty:
        return NO_FIGURE
    sums = rows[part].to_numpy(dtype=float), rows[whole].to_numpy(dtype=float)
    return stats.pooled_rate(*sums, rows[unit].to_numpy(), **ends)


def _geometric_mean(
    rows: pd.DataFrame, values: pd.Series[float], confidence: float = stats.CONFIDENCE
) -> Estimate:
    prompts, repeats = rows["prompt"].to_numpy(), rows["repeat"].to_numpy()
    return stats.geometric_mean(values.to_numpy(), prompts, repeats, confidence)
