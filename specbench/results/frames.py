"""What a run shows, as data frames of figures.

Every function takes the rows of one run as ``load_results`` gives them. Definitions of the figures
and their pitfalls: docs/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from specbench.decoding.metrics import count_ranks, kept_by_rank
from specbench.decoding.records import PARTS
from specbench.decoding.theory import (
    PassCosts,
    SharedCosts,
    expected_tokens,
    expected_tokens_by_position,
    expected_tokens_of_tree,
    predicted_speedup,
    predicted_throughput_ratio,
    prompt_readings,
    read_by_depth,
)
from specbench.errors import UsageError
from specbench.results import stats
from specbench.results.rows import OTHER_ANSWERS, PLAIN, RIVALS, STEP_FIELDS
from specbench.textsafe import one_line

_WITH_INTERVAL = (
    "tokens_per_second", "speedup", "speedup_total", "pooled_speedup", "tokens_per_step", "acceptance_rate",
    "acceptance_tested", "alpha", "predicted_speedup", "predicted_speedup_iid", "speedup_first", "warming",
)  # fmt: skip
_FIGURES = [
    "prompts", "generations", "failures", "speedup_basis", "verdict",
    *(f"{name}{end}" for name in _WITH_INTERVAL for end in ("", "_low", "_high")),
    "mean_gamma", "mean_nodes", "c", "ttft_s", "ms_per_token", *(f"share_{part}" for part in PARTS),
    "share_draft_prefill", "peak_memory_bytes", "log_probability", "identical_share", "difference", "step_source",
    "cached_share",
]  # fmt: skip
_POOLED = ("pooled_speedup", "pooled_speedup_low", "pooled_speedup_high")
_PREDICTED = tuple(
    f"{name}{end}" for name in ("predicted_speedup", "predicted_speedup_iid") for end in ("", "_low", "_high")
)
_KEY = ["group", "prompt", "turn", "repeat"]
_CONFIG_FIELDS = (
    "label", "kind", "drafter", "gamma", "policy", "temperature", "baseline", "batch", "arrivals",
)  # fmt: skip
PERCENTILES = (50, 95, 99)
"""Of latencies."""

LATENCIES = ("ttft_s", "token_s", "latency_s", "queued_s")
_NAN = float("nan")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


# --- Figures --------------------------------------------------------------------------------------


def run_of(df: pd.DataFrame) -> dict[str, Any]:
    """The ``run.json`` that the rows belong to.

    Raises:
        UsageError: The rows come from several runs, whose speeds have nothing in common.
    """
    if "run_id" in df and df["run_id"].nunique() > 1:
        targets = sorted({one_line(str(name)) for name in df["target"].unique()})
        what = f"with {len(targets)} targets ({', '.join(targets)})" if len(targets) > 1 else "of one target"
        raise UsageError(
            f"These results mix {df['run_id'].nunique()} runs {what}.",
            "Show each run apart, or use `specbench compare`.",
        )
    return dict(df.attrs.get("run", {}))


def baseline_name(df: pd.DataFrame) -> str:
    """What speedups are over, in words: plain decoding, or the first of several servers."""
    configs = run_of(df).get("configs") or ()
    return next((one_line(each["drafter"]) for each in configs if each.get("kind") == "server"), PLAIN)


def stored_answer(df: pd.DataFrame) -> Mapping[str, Any] | None:
    """What `specbench tune` came to, which its run says instead of what its rows would give (docs/tuning.md).

    ``None`` for other runs, for one that was broken off, and for those of versions that stored none.
    """
    answer: Mapping[str, Any] | None = (run_of(df).get("tuning") or {}).get("answer")
    return answer


def stored_estimate(told: Mapping[str, Any]) -> stats.Estimate:
    """A figure of a stored answer."""
    low, high, prompts = told["low"], told["high"], told["prompts"]
    if low is None or high is None:
        return stats.Estimate(told["value"], None, None, prompts, None)
    return stats.Estimate(told["value"], low, high, prompts, "prompts" if prompts > 1 else "repeats")


def _as_told(told: Mapping[str, Any], category: str | None = None) -> dict[str, Any]:
    """Figures of ``_ratios`` as a stored answer has them of a configuration, over all prompts or a category's."""
    estimates = {None: told["speedup"], **told["categories"]}
    if category not in estimates:
        return {"verdict": "cannot tell", **_named("speedup", stats.Estimate(_NAN, None, None, 0, None))}
    estimate = stored_estimate(estimates[category])
    verdict = told["verdict"] if category is None else stats.verdict(estimate)
    return {"speedup_basis": estimate.basis, "verdict": verdict, **_named("speedup", estimate)}


def disturbance(df: pd.DataFrame) -> str:
    """Why verdicts on the rows are provisional: others used the machine most of the time. Empty where they did not."""
    busy = sum(not _OTHERS.isdisjoint(names) for names in df["warnings"])
    if busy <= _MOST_DISTURBED * len(df):
        return ""
    return f"Verdicts are provisional: others used the processor during {busy} of {len(df)} generations."


_OTHERS = frozenset({"machine-busy", "steal"})
_MOST_DISTURBED = 0.5
"""Share of the generations from which on pairing within a round no longer makes up for it."""


def paired_runs(df: pd.DataFrame) -> pd.DataFrame:
    """Each finished generation beside the one of its baseline with the same prompt, turn and repeat.

    Returns:
        One row per pair with ``config, category, group, prompt, turn, repeat``; ``ratio`` (of decode speeds) and
        ``ratio_total`` (of whole times per token), above 1 where the configuration is faster; ``tokens`` and
        ``seconds`` behind the first emission and those of the baseline as ``base_tokens`` and ``base_seconds``;
        ``identical``, whether the tokens are the same, of servers the texts (``None`` where sampling, beam search or
        prompts that differ make the question pointless).
        Of requests side by side, all of these are about the whole time from their arrival to their end, which is what
        their share of the machine shows in. Baselines themselves are left out.
    """
    asked_alike = (run_of(df).get("options") or {}).get("salt") != "each"
    columns = [
        *_KEY, "config", "kind", "category", "baseline", "temperature", "tokens_per_second", "decode_s", "total_s",
        "new_tokens", "token_ids", "text",
    ]  # fmt: skip
    rows = _bare(df.loc[df["status"] == "ok", columns])
    alone = rows["group"] == ""
    rows["tokens"] = (rows["tokens_per_second"] * rows["decode_s"]).where(alone, rows["new_tokens"])
    rows["seconds"] = rows["decode_s"].where(alone, rows["total_s"])
    whole = rows["new_tokens"] / rows["total_s"].where(rows["total_s"] > 0)
    rows["tokens_per_second"] = rows["tokens_per_second"].where(alone, whole)
    rows["total"] = rows["total_s"] / rows["new_tokens"].where(rows["new_tokens"] > 0)
    figures = ["tokens_per_second", "tokens", "seconds", "total", "token_ids", "text"]
    base = rows[["config", *_KEY, *figures]].rename(
        columns={"config": "baseline", **{name: f"base_{name}" for name in figures}}
    )
    pairs = rows[rows["config"] != rows["baseline"]].merge(base, on=["baseline", *_KEY], how="inner")
    pairs["ratio"] = pairs["tokens_per_second"] / pairs["base_tokens_per_second"]
    pairs["ratio_total"] = pairs["base_total"] / pairs["total"]
    meant = (pairs["temperature"] == 0) & ~pairs["kind"].isin(OTHER_ANSWERS) & asked_alike
    outputs = (zip(pairs[f"{side}token_ids"], pairs[f"{side}text"], strict=True) for side in ("", "base_"))
    same = (
        None if not one else our_text == their_text and bool(np.array_equal(ours, theirs))
        for (ours, our_text), (theirs, their_text), one in zip(*outputs, meant, strict=True)
    )
    pairs["identical"] = pd.Series(list(same), dtype=object, index=pairs.index)
    kept = [
        "config",
        "category",
        *_KEY,
        "ratio",
        "ratio_total",
        "tokens",
        "seconds",
        "base_tokens",
        "base_seconds",
    ]
    return pairs[[*kept, "identical"]]


def _paired_groups(df: pd.DataFrame) -> pd.DataFrame:
    """Each group beside that of its baseline with the same prompts and repeat, in columns of ``paired_runs``.

    ``ratio`` is that of throughputs. A group stands where a prompt does: it is what other groups may differ from.
    """
    done = df.loc[
        (df["status"] == "ok") & (df["group"] != ""),
        ["config", "baseline", "group", "repeat", "new_tokens", "throughput"],
    ]
    keys = ["config", "baseline", "group", "repeat"]
    groups = _bare(done).groupby(keys, sort=False).agg({"new_tokens": "sum", "throughput": "first"})
    groups = groups.reset_index().rename(columns={"new_tokens": "tokens"})
    groups["seconds"] = groups["tokens"] / groups["throughput"]
    figures = ["tokens", "seconds", "throughput"]
    base = groups[["config", "group", "repeat", *figures]].rename(
        columns={"config": "baseline", **{name: f"base_{name}" for name in figures}}
    )
    pairs = groups[groups["config"] != groups["baseline"]].merge(base, on=["baseline", "group", "repeat"])
    pairs["ratio"] = pairs["throughput"] / pairs["base_throughput"]
    return pairs.rename(columns={"group": "prompt"})


def summary_frame(df: pd.DataFrame, steps: Steps | None = None) -> pd.DataFrame:
    """One row per configuration, in the order of the run.

    Args:
        df: The rows of a run.
        steps: Its ``step_arrays``, where they are there already.

    Returns:
        Columns ``config``, its fields (``label, kind, drafter, gamma, policy, temperature, baseline, batch,
        arrivals``), and

        - ``prompts, generations, failures``: how many prompts, finished and failed generations;
        - ``tokens_per_second``: decode speed, geometric mean over prompts; ``ttft_s`` likewise;
        - ``speedup``: over the baseline, geometric mean over prompts of paired ratios, 1 for a baseline;
          ``speedup_total``: the same with the time to first token; ``pooled_speedup``: all tokens over all seconds;
        - ``speedup_basis``: what its interval is over (``prompts``; ``repeats``, with one prompt; ``None``);
          ``verdict``: what that interval allows to say; ``provisional``: whether it was widened for that, because
          others used the machine most of the time;
        - ``tokens_per_step, acceptance_rate`` (accepted / drafted), ``acceptance_tested`` (accepted / tested),
          ``alpha, mean_gamma, mean_nodes``: over all steps;
        - ``predicted_speedup``: from acceptance by position and the measured costs of passes, and
          ``predicted_speedup_iid``: from α instead, geometric means over prompts, none if others used the machine most
          of the time; ``c``: cost of a drafter pass;
        - ``ms_per_token``: time of the steps per emitted token, and ``share_draft, share_verify, share_accept,
          share_rollback, share_other``: the parts of it, with ``share_draft_prefill`` within that of drafting;
        - ``speedup_first``, of servers: the speedup over the first repeat alone; ``warming``: how many times as fast
          the later repeats are, where a server has seen the prompts before;
        - ``step_source``, of servers: what ``tokens_per_step`` comes from, the ``server`` or ``bursts``, an estimate;
          ``cached_share``: of the prompts' tokens those that it did not read, where it says so;
        - ``peak_memory_bytes``: the largest; ``log_probability``: of an answer's token, mean over prompts, where it was
          asked for; ``identical_share``: greedy outputs with the baseline's very tokens;
          ``difference``: what the others come from (``ties``, ``beyond rounding``, ``not checked``), ``None`` if none.

        Of requests side by side ``tokens_per_second`` is the throughput of a group of them, and ``speedup`` the ratio
        of throughputs, both geometric means over groups.

        Columns ``<figure>_low`` and ``<figure>_high`` hold 95% intervals over prompts, or groups of them. NaN: no such
        figure.
    """
    run = run_of(df)
    configs = _configs(df)
    pairs = dict(list(paired_runs(df).groupby("config", sort=False)))
    groups = dict(list(_paired_groups(df).groupby("config", sort=False)))
    told = (stored_answer(df) or {}).get("measured", {})
    steps = steps or step_arrays(df)
    rows = df.reset_index(drop=True)
    rows.attrs = {}
    places = rows.groupby("config", sort=False).indices
    of_config = _by_config(df, steps)
    out = []
    for config, fields in configs.items():
        mine = rows.iloc[places[config]] if config in places else rows.iloc[:0]
        its_steps = of_config.get(config, steps.take(np.empty(0, dtype=np.intp)))
        out.append(
            {
                "config": config,
                **fields,
                **_generation_figures(mine),
                **_speedups(config, fields, mine, pairs.get(config), groups.get(config), run),
                **(_as_told(told[config]) if config in told else {}),
                **(
                    dict.fromkeys(_POOLED, _NAN) if told else {}
                ),  # the same rows, with what is taken off left in
                **(_server_figures(mine) if fields["kind"] == "server" else _step_figures(its_steps)),
                **(
                    _predictions(its_steps, fields, run.get("costs"), rows)
                    if math.isnan(fields["batch"])
                    else _batch_predictions(its_steps, fields, run.get("shared_costs"), rows)
                ),
                **_times(its_steps),
            }
        )
    frame = pd.DataFrame(out, columns=["config", *_CONFIG_FIELDS, *_FIGURES])
    return _judged(frame, "summary", df)


def category_frame(df: pd.DataFrame) -> pd.DataFrame:
    """Speedup of every configuration in every category.

    Returns:
        One row per category and configuration with ``category, config, label, prompts, speedup, speedup_low,
        speedup_high, speedup_basis, verdict, provisional, pooled_speedup`` and its interval. Baselines are left out.
    """
    configs = _configs(df)
    pairs = paired_runs(df)
    groups = dict(list(pairs.groupby(["category", "config"], sort=False)))
    categories = list(dict.fromkeys(df["category"].dropna()))
    told = (stored_answer(df) or {}).get("measured", {})
    out = [
        {
            "category": category,
            "config": config,
            "label": fields["label"],
            **_ratios(groups[(category, config)], "speedup"),
            **(_as_told(told[config], category) if config in told else {}),
            **(dict.fromkeys(_POOLED, _NAN) if told else {}),
        }
        for category in categories
        for config, fields in configs.items()
        if (category, config) in groups
    ]
    names = ["category", "config", "label", *(_ratios(pairs.iloc[:0], "speedup"))]
    return _judged(pd.DataFrame(out, columns=names), "category", df)


def _judged(frame: pd.DataFrame, kind: str, df: pd.DataFrame) -> pd.DataFrame:
    """A frame with what its text needs to know; verdicts on disturbed rows are provisional, predictions left out."""
    dtype = df.attrs.get("run", {}).get("target", {}).get("dtype")
    why = disturbance(df)
    disturbed = "" if stored_answer(df) else why
    frame.attrs = {"kind": kind, "disturbance": disturbed, "dtype": dtype, "over": baseline_name(df)}
    tuning = run_of(df).get("tuning") or {}
    if tuning.get("ranking"):
        frame.attrs["fastest"] = tuning["ranking"][:1] if tuning.get("verdict") == "faster" else []
    if disturbed:
        frame["verdict"] = [
            stats.verdict(estimate_of(row), disturbed=True) if isinstance(row["verdict"], str) else None
            for row in records(frame)
        ]
    frame["provisional"] = frame["verdict"].isin(("faster", "slower")) & bool(disturbed)
    if why and kind == "summary" and frame[list(_PREDICTED)].notna().any(axis=None):
        frame[list(_PREDICTED)] = _NAN
        frame.attrs["withheld"] = (
            "Predicted speedups are left out:"
            f"{why.partition(':')[2]} Passes timed meanwhile say little of what generations took."
        )
    return frame


def position_frame(df: pd.DataFrame, steps: Steps | None = None) -> pd.DataFrame:
    """Acceptance by draft position; for the arguments see ``summary_frame``.

    Returns:
        One row per configuration and position with ``config, label, position`` (from 1), the numbers of steps that
        ``drafted``, ``tested`` and ``accepted`` it, ``rate`` (accepted / tested), ``rate_of_drafted`` (accepted /
        drafted) and ``alpha`` (mean of ``sum_x min(p, q)`` where tested). A server tells what was ``accepted`` there,
        and how many steps drafted at all: where its drafts are of several lengths, ``drafted`` and ``tested`` behind
        the first position are the most that can be, and the rates are ``least``, the least that can be.
    """
    run_of(df)
    groups = _by_config(df, steps or step_arrays(df))
    out = []
    for config, fields in _configs(df).items():
        if fields["kind"] == "server":
            out += _positions_of_server(config, fields["label"], df[df["config"] == config])
            continue
        mine = groups.get(config)
        longest = 0 if mine is None else int(mine["drafted"].max(initial=0))
        if mine is None or not longest:
            continue
        counts = {name: _at_least(mine[name], longest) for name in ("drafted", "tested", "accepted")}
        alpha = mine.alpha_by_position(longest)
        out += [
            {
                "config": config,
                "label": fields["label"],
                "position": i + 1,
                **{name: int(count[i]) for name, count in counts.items()},
                "rate": _ratio(counts["accepted"][i], counts["tested"][i]),
                "rate_of_drafted": _ratio(counts["accepted"][i], counts["drafted"][i]),
                "alpha": alpha[i],
                "least": False,
            }
            for i in range(longest)
        ]
    names = [
        "config",
        "label",
        "position",
        "drafted",
        "tested",
        "accepted",
        "rate",
        "rate_of_drafted",
        "alpha",
        "least",
    ]
    frame = pd.DataFrame(out, columns=names)
    frame.attrs = {"kind": "position"}
    return frame


def _positions_of_server(config: str, label: str, rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of ``position_frame`` from what a server told of its answers, or of groups of them."""
    done = rows[rows["status"] == "ok"]
    told, prefix = done[done["kept_at"].notna()], ""
    if told.empty:
        told, prefix = done[done["group_kept_at"].notna()].drop_duplicates(["group", "repeat"]), "group_"
    kept = [int(sum(places)) for places in zip_longest(*told[f"{prefix}kept_at"], fillvalue=0)]
    drafts, drafted = (int(told[f"{prefix}{name}"].sum()) for name in ("drafts", "drafted"))
    if not drafts:
        return []
    return [
        {
            "config": config,
            "label": label,
            "position": place + 1,
            "drafted": drafts,
            "tested": tested,
            "accepted": accepted,
            "rate": _ratio(accepted, tested),
            "rate_of_drafted": _ratio(accepted, drafts),
            "alpha": _NAN,
            "least": place > 0 and drafted < drafts * len(kept),
        }
        for place, (accepted, tested) in enumerate(zip(kept, [drafts, *kept], strict=False))
    ]


def rank_frame(df: pd.DataFrame) -> pd.DataFrame:
    """Acceptance in trees by rank and depth.

    Returns:
        One row per configuration, depth and rank with ``config, label, depth`` (from 1), ``rank`` (from 0: how many
        candidates of the same node come before it), the numbers of nodes there at whose place something was ``tested``
        and that were ``accepted``, and ``rate`` (accepted / tested). None for configurations without trees.
    """
    run_of(df)
    done = _bare(df.loc[df["status"] == "ok", ["config", "steps_widths", "steps_ranks"]])
    counts = {str(config): _count_ranks(mine) for config, mine in done.groupby("config", sort=False)}
    out = [
        {
            "config": config,
            "label": fields["label"],
            "depth": depth,
            "rank": rank,
            "tested": tested,
            "accepted": accepted,
            "rate": _ratio(accepted, tested),
        }
        for config, fields in _configs(df).items()
        for (depth, rank), (tested, accepted) in sorted(counts.get(config, {}).items())
    ]
    frame = pd.DataFrame(out, columns=["config", "label", "depth", "rank", "tested", "accepted", "rate"])
    frame.attrs = {"kind": "rank"}
    return frame


def request_frame(df: pd.DataFrame) -> pd.DataFrame:
    """What requests side by side saw; none for configurations that decode one prompt after the other.

    Returns:
        One row per configuration, in the order of the run, with ``config, label, kind, drafter, gamma, policy,
        temperature, baseline, batch, arrivals``; ``requests``, how many there were; ``throughput``, tokens/s of all
        together, geometric mean over groups, with its interval; and

        - ``<figure>_p50, _p95, _p99`` of the requests' ``ttft_s`` (from arrival to the first emission), ``token_s``
          (per token behind that), ``latency_s`` (from arrival to the end) and ``queued_s`` (the wait for a turn):
          percentiles of all requests, interpolated between neighbours in rank;
        - ``acceptance_rate``: accepted / drafted tokens of all;
        - ``pool_blocks``, ``pool_peak_blocks``, ``pool_peak_bytes``: of the target's pool, the most there were.
    """
    run_of(df)
    done = _bare(df[(df["status"] == "ok") & (df["group"] != "")])
    behind = done["tokens_per_second"]
    done["token_s"] = 1.0 / behind.where(behind > 0)
    done["latency_s"] = done["total_s"]
    places = done.reset_index(drop=True).groupby("config", sort=False).indices
    out = []
    for config, fields in _configs(df).items():
        if config not in places:
            continue
        mine = done.iloc[places[config]]
        figures = _generation_figures(mine)
        drafted = sum(int(steps.sum()) for steps in mine["steps_drafted"])
        accepted = sum(int(steps.sum()) for steps in mine["steps_accepted"])
        out.append(
            {
                "config": config,
                **fields,
                "requests": len(mine),
                **{f"throughput{end}": figures[f"tokens_per_second{end}"] for end in ("", "_low", "_high")},
                **{
                    f"{name}_p{percent}": value
                    for name in LATENCIES
                    for percent, value in zip(PERCENTILES, _percentiles(mine[name]), strict=True)
                },
                "acceptance_rate": _server_figures(mine)["acceptance_rate"]
                if fields["kind"] == "server"
                else _ratio(accepted, drafted),
                **{
                    name: float(mine[name].max())
                    for name in ("pool_blocks", "pool_peak_blocks", "pool_peak_bytes")
                },
            }
        )
    names = [
        "config", *_CONFIG_FIELDS, "requests", *(f"throughput{end}" for end in ("", "_low", "_high")),
        *(f"{name}_p{percent}" for name in LATENCIES for percent in PERCENTILES),
        "acceptance_rate", "pool_blocks", "pool_peak_blocks", "pool_peak_bytes",
    ]  # fmt: skip
    frame = pd.DataFrame(out, columns=names)
    frame.attrs = {"kind": "requests"}
    return frame


def _percentiles(values: pd.Series[float]) -> list[float]:
    known = values.dropna().to_numpy(dtype=np.float64)
    return [float(np.percentile(known, percent)) if len(known) else _NAN for percent in PERCENTILES]


def accepted_frame(df: pd.DataFrame, steps: Steps | None = None) -> pd.DataFrame:
    """How many drafts steps accepted; for the arguments see ``summary_frame``.

    Returns:
        One row per configuration and number of accepted drafts with ``config, label, accepted, steps, share`` and
        ``share_iid``, what tests that pass independently with chance α would give; all of the steps that drafted
        something. ``undrafted`` is the share of all steps that did not.
    """
    run_of(df)
    groups = _by_config(df, steps or step_arrays(df))
    out = []
    for config, fields in _configs(df).items():
        mine = groups.get(config)
        if mine is None or not mine["drafted"].any():
            continue
        drafting = mine["drafted"] > 0
        gammas = mine["drafted"][drafting]
        longest = int(gammas.max())
        counts = np.bincount(mine["accepted"][drafting], minlength=longest + 1)
        alpha = _ratio(mine.alpha_sum.sum(), mine["tested"].sum())
        k = np.arange(longest + 1)
        # At least k pass if k were drafted; steps differ in their draft length.
        reach = np.array([(gammas >= n).mean() for n in k]) * alpha**k
        out += [
            {
                "config": config,
                "label": fields["label"],
                "accepted": int(n),
                "steps": int(counts[n]),
                "share": counts[n] / counts.sum(),
                "share_iid": reach[n] - (reach[n + 1] if n < longest else 0.0),
                "undrafted": 1.0 - drafting.mean(),
            }
            for n in k
        ]
    names = ["config", "label", "accepted", "steps", "share", "share_iid", "undrafted"]
    frame = pd.DataFrame(out, columns=names)
    frame.attrs = {"kind": "accepted"}
    return frame


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of many generations, one array per figure, each of shape [steps].

    Attributes:
        row: Place of the generation in the data frame.
        prompt: A number per prompt.
        numbers: Tokens, passes and seconds, by the names of ``specbench.results.rows.STEP_FIELDS``; ``steps[name]`` is
            short for them.
        alpha_sum: Sum of the step's expected acceptances.
        alpha_at: Where they begin in ``alphas``; there are as many as were tested.
        alphas: The expected acceptances of all steps, shape [tested positions].
        tree: Place in ``trees``; -1 for a chain.
        trees: The trees there are, by node the one it stands behind, -1 for the context. Like ``alphas`` of all steps.
    """

    row: NDArray[np.intp]
    prompt: NDArray[np.intp]
    numbers: dict[str, NDArray[Any]]
    alpha_sum: Floats
    alpha_at: Ints
    alphas: Floats
    tree: NDArray[np.intp]
    trees: Sequence[tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.numbers[name]

    def take(self, which: NDArray[Any] | slice) -> Steps:
        """Some of the steps, by place, by a mask or by a slice."""
        return Steps(
            self.row[which],
            self.prompt[which],
            {name: values[which] for name, values in self.numbers.items()},
            self.alpha_sum[which],
            self.alpha_at[which],
            self.alphas,
            self.tree[which],
            self.trees,
        )

    def split(self, codes: NDArray[np.intp]) -> dict[int, Steps]:
        """The steps of each code, in their order, without a copy per code."""
        order = np.argsort(codes, kind="stable")
        ordered = self.take(order)
        found, starts = np.unique(codes[order], return_index=True)
        edges = np.append(starts, len(order))
        slices = zip(found, edges[:-1], edges[1:], strict=True)
        return {int(code): ordered.take(slice(begin, end)) for code, begin, end in slices}

    def total_s(self) -> Floats:
        """Seconds of each step."""
        return np.asarray(sum(self[f"{part}_s"] for part in PARTS))

    def rates(self, longest: int) -> Floats:
        """Accepted over tested at positions 1 to ``longest``; NaN where none was tested.

        The end of a branch that is not a tree's longest counts like a rejection behind it: a step keeps no more.
        """
        ended = np.minimum(self["accepted"] + 1, self["drafted"])
        tested = np.where(self["nodes"] > self["drafted"], ended, self["tested"])
        return _shares(_at_least(self["accepted"], longest), _at_least(tested, longest))

    def alpha_by_position(self, longest: int) -> Floats:
        """Mean expected acceptance at positions 1 to ``longest``; NaN where none was tested."""
        at = [self.alpha_at[self["tested"] > i] + i for i in range(longest)]
        return np.array([self.alphas[places].mean() if len(places) else _NAN for places in at])


def step_arrays(df: pd.DataFrame) -> Steps:
    """The steps of all finished generations.

    Raises:
        UsageError: The expected acceptances of a generation do not fit its steps.
    """
    rows = np.flatnonzero((df["status"] == "ok").to_numpy())
    lists = {field: df[f"steps_{field.name}"].to_numpy()[rows] for field in STEP_FIELDS}
    joined = {
        field.name: _joined(each, np.int64 if field.kind is int else np.float64)
        for field, each in lists.items()
    }
    lengths = np.array([len(each) for each in df["steps_drafted"].to_numpy()[rows]], dtype=np.intp)
    row = np.repeat(rows, lengths)
    by_step = chain.from_iterable(df["steps_expected_acceptance"].to_numpy()[rows])
    alphas = np.fromiter(chain.from_iterable(by_step), dtype=np.float64)
    ends = np.cumsum(joined["tested"])
    if any(len(each) != len(row) for each in joined.values()) or len(alphas) != (
        ends[-1] if len(ends) else 0
    ):
        raise UsageError(
            "The results are damaged: the lists of a generation's steps differ in length.", "Measure anew."
        )
    sums = np.concatenate(([0.0], np.cumsum(alphas)))
    begins = ends - joined["tested"]
    trees: dict[tuple[int, ...], int] = {}
    tree = np.full(len(row), -1, dtype=np.intp)
    for first, shapes in zip(np.cumsum(lengths) - lengths, df["steps_parents"].to_numpy()[rows], strict=True):
        for place, shape in enumerate(shapes, start=first):
            if shape:
                tree[place] = trees.setdefault(tuple(parent - 1 for parent in shape), len(trees))
    return Steps(
        row=row,
        prompt=pd.factorize(df["prompt"])[0][row],
        numbers=joined,
        alpha_sum=sums[ends] - sums[begins],
        alpha_at=begins,
        alphas=alphas,
        tree=tree,
        trees=tuple(trees),
    )


def _joined(lists: NDArray[Any], kind: type) -> NDArray[Any]:
    return (
        np.concatenate([np.asarray(each, dtype=kind) for each in lists])
        if len(lists)
        else np.empty(0, dtype=kind)
    )


def _by_config(df: pd.DataFrame, steps: Steps) -> dict[str, Steps]:
    """The steps of each configuration that has any, in their order."""
    codes, names = pd.factorize(df["config"])
    return {str(names[i]): mine for i, mine in steps.split(codes[steps.row]).items()}


def _at_least(lengths: Ints, longest: int) -> Ints:
    """How many of the lengths reach 1, 2, ..., ``longest``."""
    counts = np.bincount(lengths, minlength=longest + 1)
    return np.asarray(counts[::-1].cumsum()[::-1][1 : longest + 1])


def _shares(part: NDArray[Any], whole: NDArray[Any]) -> Floats:
    return np.asarray(np.divide(part, whole, out=np.full(len(part), _NAN), where=whole > 0))


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator else _NAN


def _configs(df: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """The fields of every configuration that has rows, in the order of the run."""
    first = df.drop_duplicates("config").set_index("config")[list(_CONFIG_FIELDS)]
    found: dict[str, dict[str, Any]] = {str(config): dict(row) for config, row in first.iterrows()}
    order = [config["id"] for config in df.attrs.get("run", {}).get("configs", ())]
    known = {config: found[config] for config in order if config in found}
    return {**known, **found}


def _bare(df: pd.DataFrame) -> pd.DataFrame:
    """A copy without attributes: pandas copies them, deeply, with every operation."""
    df = df.copy()
    df.attrs = {}
    return df


def _named(name: str, estimate: stats.Estimate) -> dict[str, float]:
    return {
        name: estimate.value,
        f"{name}_low": _NAN if estimate.low is None else estimate.low,
        f"{name}_high": _NAN if estimate.high is None else estimate.high,
    }


def _ratios(pairs: pd.DataFrame, name: str) -> dict[str, Any]:
    """Speedup of some pairs, with what its interval is over and what it allows to say, and the pooled one."""
    prompts, repeats = pairs["prompt"].to_numpy(), pairs["repeat"].to_numpy()
    speedup = stats.geometric_mean(pairs["ratio"].to_numpy(), prompts, repeats)
    pooled = stats.pooled_speedup(
        pairs["tokens"].to_numpy(),
        pairs["seconds"].to_numpy(),
        pairs["base_tokens"].to_numpy(),
        pairs["base_seconds"].to_numpy(),
        prompts,
    )
    return {
        "prompts": speedup.prompts,
        **_named(name, speedup),
        f"{name}_basis": speedup.basis,
        "verdict": stats.verdict(speedup),
        **_named(f"pooled_{name}", pooled),
    }


def _generation_figures(rows: pd.DataFrame) -> dict[str, Any]:
    done = rows[rows["status"] == "ok"]
    prompts, repeats = done["prompt"].to_numpy(), done["repeat"].to_numpy()
    speeds, units = done, "prompt"
    if (done["group"] != "").any():
        speeds, units = done.drop_duplicates(["group", "repeat"]), "group"
    speed = stats.geometric_mean(
        speeds["tokens_per_second" if units == "prompt" else "throughput"].to_numpy(),
        speeds[units].to_numpy(),
        speeds["repeat"].to_numpy(),
    )
    return {
        "prompts": done["prompt"].nunique(),
        "generations": len(done),
        "failures": int((rows["status"] == "failed").sum()),
        **_named("tokens_per_second", speed),
        "ttft_s": stats.geometric_mean(done["ttft_s"].to_numpy(), prompts, repeats).value,
        "peak_memory_bytes": float(done["peak_memory_bytes"].max()) if len(done) else _NAN,
        "log_probability": float(
            (done["log_probability"] / done["new_tokens"]).groupby(done["prompt"]).mean().mean()
        ),
    }


def _speedups(
    config: str,
    fields: Mapping[str, Any],
    rows: pd.DataFrame,
    pairs: pd.DataFrame | None,
    groups: pd.DataFrame | None,
    run: Mapping[str, Any],
) -> dict[str, Any]:
    if (fields["kind"] == "plain" or fields["baseline"] == config) and len(rows):
        whole = 1.0 if math.isnan(fields["batch"]) else _NAN
        return {"speedup": 1.0, "speedup_total": whole, "pooled_speedup": 1.0}
    if pairs is None:
        return {"speedup": _NAN, "speedup_total": _NAN, "pooled_speedup": _NAN}
    compared = pairs if groups is None else groups
    ratios = _ratios(compared, "speedup")
    del ratios["prompts"]  # those of the configuration stand there, paired or not
    # With a batch, the speedup itself is about whole times.
    totals = pairs["ratio_total"].to_numpy() * (1.0 if groups is None else _NAN)
    total = stats.geometric_mean(totals, pairs["prompt"].to_numpy(), pairs["repeat"].to_numpy())
    identical = pairs["identical"].dropna()
    if fields["kind"] == "server":
        first = compared[compared["repeat"] == 0]
        ratios |= _named("speedup_first", _mean_of(first, first["ratio"]))
    return {
        **ratios,
        **_named("speedup_total", total),
        "identical_share": float(identical.astype(bool).mean()) if len(identical) else _NAN,
        "difference": None if identical.all() else _cause(run.get("differences"), config),
    }


def _cause(differences: Sequence[Mapping[str, Any]] | None, config: str) -> str:
    """What outputs that differ come from, by what the end of the sweep found at the first differing tokens."""
    ties = {each.get("numerical_tie") for each in differences or () if each["config"] == config}
    return "beyond rounding" if False in ties else "ties" if ties == {True} else "not checked"


def _step_figures(steps: Steps) -> dict[str, float]:
    if not steps["drafted"].any():
        each = {"tokens_per_step": _ratio(steps["emitted"].sum(), len(steps))}
        drafting = ("acceptance_rate", "acceptance_tested", "alpha", "mean_gamma", "mean_nodes")
        return {**each, **dict.fromkeys(drafting, _NAN)}
    return {
        **_named("tokens_per_step", stats.pooled_rate(steps["emitted"], np.ones(len(steps)), steps.prompt)),
        **_named("acceptance_rate", stats.pooled_rate(steps["accepted"], steps["drafted"], steps.prompt)),
        **_named("acceptance_tested", stats.pooled_rate(steps["accepted"], steps["tested"], steps.prompt)),
        **_named("alpha", stats.pooled_rate(steps.alpha_sum, steps["tested"], steps.prompt)),
        "mean_gamma": float(steps["drafted"].mean()),
        "mean_nodes": float(steps["nodes"].mean()),
    }


def _server_figures(rows: pd.DataFrame) -> dict[str, Any]:
    """What the answers of a server tell of its speculation, of its cache and of what it remembers."""
    done = rows[rows["status"] == "ok"]
    stepped, drafting = done[done["told_steps"] > 0], done[done["drafted"] > 0]
    groups = done[done["group_drafted"] > 0].drop_duplicates(["group", "repeat"])
    rate = _pooled(drafting, "accepted", "drafted", "prompt")
    if drafting.empty:
        rate = _pooled(groups, "group_accepted", "group_drafted", "group")
    sources = set(stepped["step_source"])
    cached = done[done["cached_tokens"].notna()]
    return {
        **_named("tokens_per_step", _pooled(stepped, "emitted_in_steps", "told_steps", "prompt")),
        **_named("acceptance_rate", rate),
        **_named("warming", _warming(done)),
        "step_source": next((source for source in ("bursts", "server") if source in sources), None),
        "cached_share": _ratio(cached["cached_tokens"].sum(), cached["prompt_tokens"].sum()),
    }


def _pooled(rows: pd.DataFrame, numerator: str, denominator: str, unit: str) -> stats.Estimate:
    """Sum of a column over that of another; NaN without rows."""
    if rows.empty:
        return stats.Estimate(_NAN, None, None, 0, None)
    return stats.pooled_rate(rows[numerator].to_numpy(), rows[denominator].to_numpy(), rows[unit].to_numpy())


def _warming(done: pd.DataFrame) -> stats.Estimate:
    """How many times as fast a prompt is answered when it comes again."""
    alone = _bare(done[done["group"] == ""])
    first = alone.loc[alone["repeat"] == 0, ["prompt", "tokens_per_second"]]
    again = alone[alone["repeat"] > 0].merge(first, on="prompt", suffixes=("", "_first"))
    return _mean_of(again, again["tokens_per_second"] / again["tokens_per_second_first"])


def _mean_of(rows: pd.DataFrame, values: pd.Series[float]) -> stats.Estimate:
    """Geometric mean over prompts."""
    return stats.geometric_mean(values.to_numpy(), rows["prompt"].to_numpy(), rows["repeat"].to_numpy())


def _times(steps: Steps) -> dict[str, float]:
    total = steps.total_s().sum()
    return {
        "ms_per_token": 1000.0 * _ratio(total, steps["emitted"].sum()),
        **{f"share_{part}": _ratio(steps[f"{part}_s"].sum(), total) for part in PARTS},
        "share_draft_prefill": _ratio(steps["draft_prefill_s"].sum(), total),
    }


def _predictions(
    steps: Steps, fields: Mapping[str, Any], costs: Mapping[str, Any] | None, df: pd.DataFrame
) -> dict[str, float]:
    """What theory makes of each prompt's acceptance and the run's costs, as a geometric mean over prompts.

    Args:
        steps, fields: Of a configuration.
        costs: Of the run.
        df: The rows of the run.
    """
    timed, drafter = PassCosts.from_json(costs or {}), fields["drafter"]
    if 1 not in timed.target_s or not steps["drafted"].any():
        return {}
    if drafter in timed.drafter_s:
        c = timed.c(drafter)
    elif steps["passes"].any():  # it was not timed apart: what a drafted token took here
        c = (steps["draft_s"] - steps["draft_prefill_s"]).sum() / steps["passes"].sum() / timed.target_s[1]
    else:
        return {}
    widest = int((steps["nodes"] + steps["siblings"]).max()) + 1
    v = np.array([timed.v(n) for n in range(widest + 1)])
    wider = np.zeros(len(steps.trees) + 1)  # its last item is that of chains
    if drafter in timed.rows_s:
        for tree in np.unique(steps.tree[steps.tree >= 0]):
            wider[tree] = sum(timed.c(drafter, nodes) - c for nodes in read_by_depth(steps.trees[tree]))
    by_position, iid, prompts = [], [], []
    for prompt, mine in steps.split(steps.prompt).items():
        longest = int(mine["drafted"].max())
        alpha = _ratio(mine.alpha_sum.sum(), mine["tested"].sum())
        by_length = expected_tokens_by_position(mine.rates(longest))
        by_length_iid = [1.0, *(expected_tokens(alpha, gamma) for gamma in range(1, longest + 1))]
        tokens_iid = np.array(by_length_iid)[mine["drafted"]]
        if grown := np.unique(mine.tree[mine.tree >= 0]).tolist():
            rates = kept_by_rank(_count_ranks(df.iloc[np.unique(mine.row)]))
            for tree in grown:
                tokens_iid[mine.tree == tree] = expected_tokens_of_tree(steps.trees[tree], rates)
        # Of siblings no acceptance tells.
        gained = np.maximum(mine["emitted"] - mine["accepted"] - 1, 0).sum()
        cost = (
            mine["passes"].sum(),
            c,
            v[mine["nodes"] + mine["siblings"] + 1].sum() + wider[mine.tree].sum(),
        )
        by_position.append(predicted_speedup(np.array(by_length)[mine["drafted"]].sum() + gained, *cost))
        iid.append(predicted_speedup(tokens_iid.sum() + gained, *cost))
        prompts.append(prompt)
    return {
        "c": c,
        **_named("predicted_speedup", stats.geometric_mean(by_position, prompts)),
        **_named("predicted_speedup_iid", stats.geometric_mean(iid, prompts)),
    }


def _batch_predictions(
    steps: Steps, fields: Mapping[str, Any], costs: Mapping[str, Any] | None, df: pd.DataFrame
) -> dict[str, float]:
    """What theory makes of each group's steps and of the times of shared passes, as a geometric mean over groups.

    Of a closed loop of as many clients as the batch; prompts take as long to read as in plain decoding. For
    the arguments see ``_predictions``.
    """
    timed, batch = SharedCosts.from_json(costs or {}), int(fields["batch"])
    drafter = timed.drafter_s.get(fields["drafter"], {})
    if 1 not in timed.target_s.get(batch, {}) or batch not in drafter or not steps["drafted"].any():
        return {}
    if fields["arrivals"] != f"closed:{batch}":
        return {}
    plain = df[(df["config"] == fields["baseline"]) & (df["status"] == "ok")]
    read = plain.groupby(["group", "repeat"])["ttft_s"].max()  # in a batch, everybody waits for all prompts
    first = read.groupby("group").mean().to_dict()
    repeats = df["repeat"].to_numpy(dtype=np.intp)
    groups, names = pd.factorize(df["group"])
    ratios: list[float] = []
    iid: list[float] = []
    units = []
    for code, mine in steps.split(groups[steps.row]).items():
        name = str(names[code])
        if name not in first:
            continue
        requests = len(np.unique(mine.row))
        verified = float((mine["nodes"] + mine["siblings"]).mean()) + 1.0
        alpha = _ratio(mine.alpha_sum.sum(), mine["tested"].sum())
        gained = np.maximum(mine["emitted"] - mine["accepted"] - 1, 0).mean()
        readings, more_s = _prompts_read(mine, repeats, batch)
        by_alpha = np.mean([expected_tokens(alpha, gamma) for gamma in mine["drafted"]]) + gained
        for found, tokens in ((ratios, mine["emitted"].mean()), (iid, by_alpha)):
            found.append(
                predicted_throughput_ratio(
                    tokens=float(tokens),
                    plain_s=timed.target_pass_s(batch, 1),
                    step_s=timed.draft_s(fields["drafter"], batch, mine["passes"].tolist())
                    + timed.target_pass_s(batch, verified),
                    first_s=float(first[name]),
                    behind=float(mine["emitted"].sum()) / requests,
                    more_s=more_s,
                    readings=readings,
                )
            )
        units.append(name)
    return {
        **_named("predicted_speedup", stats.geometric_mean(ratios, units)),
        **_named("predicted_speedup_iid", stats.geometric_mean(iid, units)),
    }


def _prompts_read(steps: Steps, repeats: NDArray[np.intp], batch: int) -> tuple[tuple[float, float], float]:
    """Of the steps of one group: ``prompt_readings`` plainly and with its drafts, and seconds of the drafter's first.

    Args:
        steps: Of all repeats.
        repeats: By row of the data frame.
        batch: Requests at a time.
    """
    found = []
    for each in steps.split(repeats[steps.row]).values():
        _, places, counts = np.unique(each.row, return_inverse=True, return_counts=True)
        tokens, draft_s = (np.bincount(places, each[name]) for name in ("emitted", "draft_prefill_s"))
        plain, drafted = (prompt_readings(of.tolist(), batch) for of in (tokens, counts))
        found.append((plain, drafted, draft_s.max()))
    plain, drafted, more_s = np.mean(found, axis=0).tolist()
    return (plain, drafted), more_s


def _count_ranks(rows: pd.DataFrame) -> dict[tuple[int, int], list[int]]:
    """``count_ranks`` of all steps of some generations."""
    widths, ranks = (chain.from_iterable(rows[f"steps_{name}"]) for name in ("widths", "ranks"))
    return count_ranks(zip(widths, ranks, strict=True))


def winners(frame: pd.DataFrame) -> set[str]:
    """Of a summary: over each baseline the configuration with the largest speedup of those that are surely faster.

    Of `specbench tune` it is the leader, if that is surely faster.
    """
    if "fastest" in frame.attrs:
        return set(frame.attrs["fastest"])
    faster = frame[frame["kind"].isin(RIVALS) & (frame["verdict"] == "faster")]
    return set(faster.loc[faster.groupby("baseline")["speedup"].idxmax(), "config"])


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as dicts."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def estimate_of(row: Mapping[str, Any], name: str = "speedup") -> stats.Estimate:
    """A figure of a row of a frame with its interval."""
    value, low, high = (float(row[f"{name}{end}"]) for end in ("", "_low", "_high"))
    if math.isnan(low) or math.isnan(high):
        return stats.Estimate(value, None, None, int(row["prompts"]), None)
    basis: Literal["prompts", "repeats"] = "repeats" if row.get("speedup_basis") == "repeats" else "prompts"
    return stats.Estimate(value, low, high, int(row["prompts"]), basis)
