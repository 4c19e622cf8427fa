"""Sweeps over batches: groups, arrivals, what is stored and shown of them, and the command on tiny models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from cli_runs import Cli, Result, write_prompts
from scripted import Ticking
from scripted_engine import ScriptedEngine, make_sweep, measure, new_store, prompts
from stored_runs import read_lines, run_json
from tiny import tiny_llama, tiny_tokenizer

from specbench import GenerationRun, speculative_generate, wrap_target
from specbench.base.errors import UsageError
from specbench.bench.grid import Sweep, make_groups
from specbench.bench.prompts import Prompt
from specbench.bench.serving import BenchRequest, BenchResult, Workload, run_workload
from specbench.bench.session import Session
from specbench.decoding.clocks import ShiftedClock
from specbench.generate_many import GenerationRuns
from specbench.results import stats
from specbench.results.compare import compare_runs
from specbench.results.results import load_results
from specbench.results.summary import Summary
from specbench.rows import Row
from specbench.show.answer import find_answers
from specbench.specs.sweeps import Closed, Poisson, parse_arrivals

# -- what is asked for -----------------------------------------------------------------------------


def test_ways_for_requests_to_come():
    assert parse_arrivals("closed:8") == Closed(8)
    assert parse_arrivals(" poisson:0.5") == Poisson(0.5)
    assert [str(parse_arrivals(text)) for text in ("closed:8", "poisson:.25")] == ["closed:8", "poisson:0.25"]


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        *((each, "workload") for each in ("closed", "closed:-1", "closed:1.5", "poisson:nan", "uniform:3")),
        ("closed:0", "clients"),
        ("closed:100000", "clients"),
        ("poisson:0", "per second"),
        ("poisson:99999", "per second"),
    ],
)
def test_bad_ways_for_requests_to_come(text, fragment):
    with pytest.raises(UsageError, match=fragment):
        parse_arrivals(text)


# -- the plan --------------------------------------------------------------------------------------


def batched(count: int = 4, **options: Any) -> Sweep:
    defaults: dict[str, Any] = {"batch": (1, 2), "turns": 1, "gammas": (2,)}
    return make_sweep(prompts(count), **{**defaults, **options})


def test_every_batch_has_its_own_baseline():
    configs = batched(temperature=(0.0, 0.5), arrivals=(Closed(2), Poisson(3))).configs
    assert len(configs) == 2 * 2 * 2 * 2
    ids = {config.id for config in configs}
    assert len(ids) == len(configs)
    assert "plain,b=1,closed:2" in ids
    assert "d@2,t=0.5,b=2,poisson:3" in ids
    assert "d@2,b=2" in {config.id for config in batched().configs}
    for config in configs:
        (baseline,) = (each for each in configs if each.id == config.baseline)
        assert baseline.kind == "plain"
        assert baseline.condition == config.condition


def test_groups_take_categories_in_turn_and_hold_every_prompt_once():
    mixed = [Prompt(f"{name}-{i}", name, ("Hello",)) for name in ("a", "b", "c") for i in range(3)]
    groups = make_groups(mixed, Closed(4))
    assert [len(group.prompts) for group in groups] == [4, 4, 1]
    assert groups[0].prompts == ("a-0", "b-0", "c-0", "a-1")
    assert Counter(name for group in groups for name in group.prompts) == Counter(p.id for p in mixed)
    assert groups[0].background[:5] == (*groups[1].prompts, *groups[2].prompts)
    assert all(sorted(group.background) == sorted(p.id for p in mixed) for group in groups)
    assert [group.prompts for group in make_groups(mixed, Poisson(1.0))] == [
        tuple(p.id for p in (mixed[i] for i in (0, 3, 6, 1, 4, 7, 2, 5, 8)))
    ]
    # A group that holds other prompts is another one.
    more = make_groups([*mixed, Prompt("d-0", "d", ("Hello",))], Closed(4))
    assert {group.id for group in groups}.isdisjoint(group.id for group in more)


# -- requests as they come -------------------------------------------------------------------------


class Passes(GenerationRuns):
    """Runs over a tiny model, each of whose passes takes a second."""

    def __init__(
        self, later: Sequence[GenerationRun], clock: ShiftedClock, hand: Ticking, batch: int
    ) -> None:
        super().__init__((), later=later, max_batch=batch, clock=clock)
        self.hand = hand
        self.under_way: list[int] = []

    def step(self) -> Any:
        self.under_way.append(len(self))
        self.hand.time += 1.0
        return super().step()


@pytest.fixture(scope="module")
def target() -> Any:
    return wrap_target(tiny_llama(), tiny_tokenizer())


def served(
    target: Any, load: Workload, batch: int, new: int = 4
) -> tuple[Sequence[BenchResult], float, int, Passes]:
    hand = Ticking(0.0)
    clock = ShiftedClock(hand)

    def start(asked: BenchRequest) -> GenerationRun:
        return GenerationRun(asked.prompt, target, max_new_tokens=new, ignore_eos=True, seed=asked.seed)

    runs = Passes([start(asked) for asked in (*load.requests, *load.background)], clock, hand, batch)
    return *run_workload(load, runs, start, clock), runs


ASKED = [BenchRequest([i + 1, 2, 3], seed=i) for i in range(5)]


def test_a_closed_loop_is_full_until_the_last_measured_request_has_ended(target):
    found, seconds, tokens, runs = served(target, Workload(ASKED[:3], 2, ASKED[3:]), batch=2)
    # A pass reads the prompts of two, three more give them a token each; then the third comes with one beside it.
    assert [each.arrived_s for each in found] == [0.0, 0.0, 4.0]
    assert [each.emissions[0][0] for each in found] == [1.0, 1.0, 5.0]
    assert [each.emissions[-1][0] for each in found] == [4.0, 4.0, 8.0]
    assert [sum(count for _, count in each.emissions) for each in found] == [4, 4, 4]
    assert (seconds, tokens) == (8.0, 16)
    assert runs.under_way == [2] * 8
    assert len(runs) == 0
    for asked, each in zip(ASKED, found, strict=False):
        alone = speculative_generate(asked.prompt, target, None, max_new_tokens=4, ignore_eos=True)
        assert each.run.result().token_ids == alone.token_ids


def test_more_clients_than_places_wait(target):
    found, *_ = served(target, Workload(ASKED[:3], 3, ASKED[3:]), batch=2)
    assert [each.arrived_s for each in found] == [0.0, 0.0, 0.0]
    assert [each.run.result().prefill.queued_s for each in found] == [
        1.0,
        1.0,
        5.0,
    ]  # told behind the pass that it joins
    assert found[2].emissions[0][0] == 5.0


def test_requests_that_come_by_the_clock(target):
    found, seconds, tokens, runs = served(
        target, Workload(ASKED[:4], None, (), [10.0, 10.5, 30.0, 31.5]), batch=1
    )
    assert [each.arrived_s for each in found] == [10.0, 10.5, 30.0, 31.5]
    # Nobody waits for the first to come; the second waits for the first to end.
    assert [each.emissions[0][0] for each in found] == [11.0, 15.0, 31.0, 35.0]
    assert [each.emissions[-1][0] for each in found] == [14.0, 18.0, 34.0, 38.0]
    assert seconds == 38.0
    assert tokens == 16
    assert len(runs.under_way) == 16  # no pass without anybody


def test_times_are_those_of_the_seed_and_of_the_rate():
    times = Poisson(4.0).times(4000, Random(1))
    assert times == Poisson(4.0).times(4000, Random(1)) != Poisson(4.0).times(4000, Random(2))
    gaps = np.diff([0.0, *times])
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(0.25, rel=0.06)  # ± 1.6% is one standard deviation
    assert gaps.std() == pytest.approx(0.25, rel=0.1)


# -- carrying it out -------------------------------------------------------------------------------


def falling(config: Row, prompt: Sequence[int]) -> float:
    """Everything takes longer with more requests, speculation all the more; prompts differ a little."""
    batch = config.condition.batch or 1
    own = 1.0 + 0.002 * (prompt[0] % 10) * (config.kind == "speculative")
    return (1.0 + (2.0 if config.kind == "speculative" else 0.2) * (batch - 1)) * own


def write_batches(folder: Path, **options: Any) -> Path:
    usual = {"count": 16, "batch": (1, 2, 4, 8), "gammas": (1, 3), "max_new_tokens": 9, "warmup": 0}
    sweep = batched(**{**usual, **options})
    measure(folder, sweep, ScriptedEngine(slower=falling))
    return folder


@pytest.fixture(scope="module")
def falls(tmp_path_factory) -> Path:
    return write_batches(tmp_path_factory.mktemp("runs") / "falls")


def test_a_group_is_a_line_with_its_requests(falls):
    lines = [line for line in read_lines(falls) if line["config"] == "d@3,b=4"]
    assert len(lines) == 2 * 4
    assert all([*(each["prompt"] for each in line["requests"])] for line in lines)
    assert {len(line["requests"]) for line in lines} == {4}
    assert all(line["category"] is None and line["clients"] == 4 for line in lines)
    frame = load_results(falls)
    assert frame.problems == []
    counts = frame.generations.groupby(["config", "repeat"])["prompt"].nunique()
    assert (counts == 16).all()
    row = frame.generations[frame.generations["config"] == "d@3,b=4"].iloc[0]
    assert (row["batch"], row["arrivals"], row["queued_s"]) == (4, "closed:4", 0.025)
    keys = ["config", "group", "repeat"]
    place = tuple(row[keys])
    group = frame.groups.set_index(keys).loc[place]
    assert group["pool_peak_bytes"] == pytest.approx(400)
    mine = frame.generations.set_index(keys).loc[[place]]
    assert group["throughput"] == pytest.approx(4 * 36 / mine["total_s"].sum())


def test_both_sides_get_the_same_requests_at_the_same_times(tmp_path):
    sweep = batched(6, arrivals=(Poisson(2),), batch=(2,), repeats=2, warmup=0)
    engine = ScriptedEngine()
    measure(tmp_path, sweep, engine)
    assert len(engine.workloads) == 4
    for (_, first), (_, second) in (engine.workloads[:2], engine.workloads[2:]):
        assert first == second
        assert first.clients is None
        assert len(first.times) == 6
    assert engine.workloads[0][1].times != engine.workloads[2][1].times
    for line in read_lines(tmp_path):
        last = max(each["arrived_s"] + each["total_s"] for each in line["requests"])
        assert line["seconds"] == pytest.approx(last)
    row = load_results(tmp_path).groups.iloc[0]
    line = read_lines(tmp_path)[0]
    assert row["throughput"] == pytest.approx(6 * 5 / line["seconds"])


def test_going_on_in_the_middle_of_a_batch(tmp_path):
    class Stopped(ScriptedEngine):
        def generate_group(self, *args: Any, **named: Any) -> Any:
            if len(self.workloads) == 17:
                raise KeyboardInterrupt
            return super().generate_group(*args, **named)

    sweep = batched(5, repeats=2)
    with new_store(tmp_path, sweep) as store, pytest.raises(KeyboardInterrupt):
        Session(sweep, store, Stopped()).run_all()
    begun = (tmp_path / "generations.jsonl").read_text()
    assert len(begun.splitlines()) == 17
    with (tmp_path / "generations.jsonl").open("a") as file:  # and a line that was cut short
        file.write(begun.splitlines()[-1][:400])
    result = measure(tmp_path, sweep)
    assert result.found == 17 - 4
    assert result.measured == 2 * 8 * 2 - result.found
    lines = read_lines(tmp_path)
    assert (tmp_path / "generations.jsonl").read_text().startswith(begun)
    names = ("config", "prompt", "repeat", "warmup")
    assert len({tuple(line[name] for name in names) for line in lines}) == len(lines)
    assert set(load_results(tmp_path).generations["config"].value_counts()) == {10}


def test_a_group_with_a_request_that_fails_has_failed(tmp_path):
    sweep = batched(4, batch=(2,), repeats=1, warmup=0)
    errors = iter([None, RuntimeError("no room")])

    def fails(config: Row, prompt: Sequence[int]) -> Exception | None:
        return next(errors, None) if config.kind == "speculative" else None

    assert measure(tmp_path, sweep, ScriptedEngine(fails=fails)).failed == 1
    summary = load_results(tmp_path).table()
    assert list(summary["failures"]) == [0, 1]
    assert list(summary["generations"]) == [4, 2]
    assert measure(tmp_path, sweep).measured == 1
    assert list(load_results(tmp_path).table()["generations"]) == [4, 4]


def test_outputs_that_differ_are_found_within_groups(tmp_path):
    sweep = batched(4, batch=(2,), repeats=1, warmup=0)
    engine = ScriptedEngine(spoils=lambda config: config.kind == "speculative", tie=True)
    measure(tmp_path, sweep, engine)
    differences = run_json(tmp_path)["differences"]
    assert [each["prompt"] for each in differences] == ["one-0", "one-1", "one-2", "one-3"]
    summary = load_results(tmp_path).table()
    assert summary["identical_share"].iloc[1] == 0


# -- what is shown ---------------------------------------------------------------------------------


def test_speedups_are_ratios_of_throughputs_over_groups(falls):
    frame = load_results(falls)
    summary = Summary(frame)
    row = summary.table()[summary.table()["config"] == "d@3,b=4"].iloc[0]
    groups = frame.groups
    fast, plain = (
        groups[groups["config"] == config].sort_values(["group", "repeat"])
        for config in ("d@3,b=4", "plain,b=4")
    )
    ratios = fast["throughput"].to_numpy() / plain["throughput"].to_numpy()
    expected = stats.geometric_mean(ratios, fast["group"].to_numpy(), fast["repeat"].to_numpy())
    assert expected.prompts == 4
    assert (row["speedup"], row["speedup_low"], row["speedup_high"]) == pytest.approx(
        (expected.value, expected.low, expected.high)
    )
    assert row["prompts"] == 16
    assert math.isnan(row["speedup_total"])
    pooled = (1 / plain["throughput"]).sum() / (1 / fast["throughput"]).sum()
    assert row["pooled_speedup"] == pytest.approx(pooled)
    assert summary.winners == {"d@3,b=1", "d@3,b=2"}
    compared = compare_runs(frame, frame, a="d@3,b=1", b="plain,b=1").rows[0]
    assert compared.verdict == "faster"


def test_percentiles_are_those_of_all_requests(tmp_path):
    folder = write_batches(tmp_path / "run", batch=(4,), repeats=3)
    frame = load_results(folder)
    requests = Summary(frame).rows
    assert [row.finished_requests.value for row in requests] == [48, 48, 48]
    for row in requests:
        mine = frame.generations[frame.generations["config"] == row.config.id]
        for name, values in {
            "request_ttft_s": mine["ttft_s"],
            "latency_s": mine["total_s"],
            "queued_s": mine["queued_s"],
            "request_token_s": mine["decode_s"] / (mine["new_tokens"] - 1),
        }.items():
            for percent in (50, 95, 99):
                assert row[f"{name}_p{percent}"].value == pytest.approx(np.percentile(values, percent))
    alone = load_results(write_batches(tmp_path / "none", batch=(), turns=None))
    assert not any(row.finished_requests.value for row in Summary(alone).rows)


def test_the_answer_of_batches(falls):
    frame = load_results(falls)
    summary = Summary(frame)
    lines = summary.curves("batch")
    assert [each[0].config.gamma for each in lines] == [3, 1]
    assert [row.config.condition.batch for row in lines[0]] == [1, 2, 4, 8]
    (answer,) = find_answers(summary)
    assert answer.headline.startswith("Yes, d γ=3: pays up to batch 2, ")
    assert answer.verdict == "faster"
    assert answer.command.endswith("--batch 2")


# -- on tiny models --------------------------------------------------------------------------------


@pytest.fixture
def sweep(cli, models, tmp_path, monkeypatch) -> Cli:
    """The command over batches 1 and 2 with four short prompts, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    prompts = {f"{('code', 'chat')[i % 2]}-{i}": [f"Say {i} " * (i + 1), "More"] for i in range(4)}
    write_prompts(tmp_path / "mine.jsonl", prompts)

    def call(*arguments: object) -> Result:
        few = ("--target", models / "target", "--dtype", "float32", "--prompts", "./mine.jsonl", "-n", 6)
        grid = ("--draft-policy", "fixed", "--gamma", 2, "--repeats", 1, "--drafter", "lookup")
        return cli("sweep", *few, *grid, "--out", "run", *arguments)

    return call


def test_a_sweep_over_batches_from_beginning_to_end(sweep, tmp_path):
    arguments = ("--batch", "1,2", "--arrivals", "closed:2", "--arrivals", "poisson:50", "--ignore-eos")
    code, out, err = sweep(*arguments)
    assert code == 0, err
    frame = load_results("run")
    ways = ("b=1,closed:2", "b=1,poisson:50", "b=2", "b=2,poisson:50")
    assert Counter(frame.generations["config"]) == {
        f"{name},{way}": 4 for name in ("plain", "lookup@2") for way in ways
    }
    assert (frame.generations["status"] == "ok").all()
    assert (frame.generations["turn"] == 0).all()
    assert (frame.generations["total_s"] >= frame.generations["queued_s"]).all()
    waiting = frame.generations[frame.generations["config"] == "plain,b=1,closed:2"]
    assert (waiting["queued_s"] > 0).any()
    summary = frame.table()
    assert (summary["identical_share"].dropna() == 1).all()
    assert "speedup" in out
    assert "TTFT" in (tmp_path / "run" / "summary.md").read_text(encoding="utf-8")
    assert "12 of 12 batches are there" in " ".join(sweep(*arguments, "--resume").err.split())


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("--batch", "8"), "There are only 4 prompts for 8 requests at a time"),
        (("--batch", "0"), "not a range of batch sizes"),
        (("--batch", "2", "--turns", "2"), "first turn"),
        (("--batch", "2", "--arrivals", "poisson:2", "--arrivals", "poisson:2.0"), "given twice"),
        (("--batch", "2", "--baseline", "transformers"), "one prompt after the other"),
        (("--batch", "2", "--cache", "static"), "one prompt at a time"),
        (("--arrivals", "closed:2"), "Add --batch"),
        (("--batch", "2", "--arrivals", "closed"), "poisson:RATE"),
    ],
)
def test_what_cannot_be_measured_side_by_side(sweep, arguments, fragment):
    code, out, err = sweep(*arguments)
    assert (code, out) == (2, "")
    assert fragment in " ".join(err.split())
