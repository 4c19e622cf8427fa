"""Sweeps that stop when their answer is sure or narrow: when they look, what they store, and that intervals hold."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import interval_coverage
import numpy as np
import pytest
from cli_runs import refusal
from scripted import Ticking
from scripted_engine import ScriptedEngine, make_sweep, new_store, quiet, taking
from stored_runs import read_lines, run_json

from specbench.base.errors import UsageError
from specbench.bench.prompts import Prompt, shuffled
from specbench.bench.session import Session
from specbench.bench.stopping import looks
from specbench.results.results import load_results
from specbench.results.stats import AT_EVERY_LOOK, CONFIDENCE, geometric_mean
from specbench.results.store import RunStore
from specbench.results.summary import Summary
from specbench.rows import Row
from specbench.specs.sweeps import Until, parse_until

PROMPTS = [Prompt(f"p{i}", f"kind {i % 3}", (f"text {i}",)) for i in range(20)]


class Scattered(ScriptedEngine):
    """Multiplies the decode time of speculation by a factor that scatters over prompts."""

    def __init__(self, factor: float, scatter: float) -> None:
        super().__init__()
        self.factor, self.scatter = factor, scatter

    def generate(self, config: Row, prompt: Any, decoding: Any, *, seed: int) -> Any:
        outcome = super().generate(config, prompt, decoding, seed=seed)
        if config.kind == "plain":
            return outcome
        plain = super().generate(make_sweep().configs[0], prompt, decoding, seed=seed)
        noise = zlib.crc32(str(prompt).encode()) / 2**32 - 0.5
        seconds = plain.decode_s * self.factor * float(np.exp(self.scatter * noise))
        return taking(outcome, seconds)


def measure(path: Path, until: str, factor: float, scatter: float, **options: Any) -> Session:
    minutes = options.pop("minutes", None)
    sweep = make_sweep(PROMPTS, gammas=(2,), repeats=1, warmup=0, until=until, minutes=minutes)
    store = RunStore.open(path) if RunStore.exists(path) else new_store(path, sweep)
    with store:
        return Session(sweep, store, Scattered(factor, scatter), snapshot=quiet, **options).run_all()


@pytest.mark.smoke
@pytest.mark.parametrize(("text", "share"), [("sure", None), ("5%", 0.05), ("0.5%", 0.005), ("50 %", 0.5)])
def test_when_to_stop(text, share):
    assert parse_until(text) == Until(share)
    assert parse_until(str(parse_until(text))) == Until(share)


@pytest.mark.parametrize("text", ["", "5", "0.4%", "51%", "-5%", "Sure", "5%%", "٥%"])
def test_when_to_stop_that_is_none(text):
    assert refusal(parse_until, text, kind=UsageError)


def test_looks_are_fixed_beforehand():
    assert sorted(looks(120, 2)) == [6, 8, 12, 16, 24, 32, 48, 64, 96, 120, 240]
    assert sorted(looks(7, 1)) == [6, 7]
    assert sorted(looks(4, 1)) == [4]


def test_a_large_effect_is_sure_at_the_first_look(tmp_path):
    assert measure(tmp_path, "sure", 0.5, 0.3).measured == 12
    stopping = run_json(tmp_path)["stopping"]
    assert (stopping["until"], stopping["ended"], stopping["confidence"]) == (
        "sure",
        "decided",
        AT_EVERY_LOOK,
    )
    assert run_json(tmp_path)["finished"] is not None


def test_without_an_effect_every_prompt_is_decoded(tmp_path):
    assert measure(tmp_path, "sure", 1.0, 0.3).measured == 40
    assert run_json(tmp_path)["stopping"]["ended"] == "blocks"


def test_a_width_is_reached_later_where_prompts_differ_more(tmp_path):
    counts = [measure(tmp_path / str(x), "10%", 0.5, x).measured for x in (0.1, 0.3, 2.0)]
    assert counts[0] == 12 < counts[1] < counts[2] == 40
    speedup = Summary(load_results(tmp_path / "0.3")).rows[1].speedup
    assert speedup.low is not None
    assert speedup.high is not None
    assert (speedup.high - speedup.low) / 2 <= 0.1 * speedup.value


def test_time_ends_between_prompts_and_resuming_goes_on(tmp_path):
    assert measure(tmp_path, "1%", 0.5, 2.0, clock=Ticking(), minutes=0.25).measured % 2 == 0
    assert run_json(tmp_path)["stopping"]["ended"] == "time"
    before = len(read_lines(tmp_path))
    assert 0 < before < 40
    assert measure(tmp_path, "1%", 0.5, 2.0).found == before
    assert run_json(tmp_path)["stopping"]["ended"] == "blocks"


def test_an_answered_sweep_is_not_continued(tmp_path):
    measure(tmp_path, "sure", 0.5, 0.3)
    before = read_lines(tmp_path)
    again = measure(tmp_path, "sure", 0.5, 0.3)
    assert (again.measured, again.found) == (0, 12)
    assert read_lines(tmp_path) == before
    assert run_json(tmp_path)["stopping"]["ended"] == "decided"


def test_intervals_of_speedups_are_those_of_every_look_and_a_note_says_so(tmp_path):
    measure(tmp_path, "sure", 0.5, 0.3)
    results = load_results(tmp_path)
    summary = Summary(results)
    speedup, done = summary.rows[1].speedup, results.done
    plain, ours = (
        done[done["config"] == row.config.id].set_index("prompt")["tokens_per_second"] for row in summary.rows
    )
    ratios = ours / plain
    wide, usual = (
        geometric_mean(ratios, ratios.index, confidence=level) for level in (AT_EVERY_LOOK, CONFIDENCE)
    )
    assert (speedup.low, speedup.high) == pytest.approx((wide.low, wide.high))
    assert speedup.low < usual.low
    assert summary.stopping.startswith("Measuring stopped after 6 of 20 prompts")


def test_not_with_batches():
    assert "--batch" in refusal(make_sweep, until="sure", batch=(2,), turns=1, kind=UsageError)


def test_the_order_of_prompts_depends_on_the_seed_alone():
    assert shuffled(PROMPTS, 1) == shuffled(PROMPTS[::-1], 1) != shuffled(PROMPTS, 2)


@pytest.mark.parametrize("family", ["normal (A/A)", "heavy: Student t, 3 d.f.", "drift"])
def test_intervals_of_all_looks_hold_together(family):
    """benchmarks/interval_coverage.py does it with more families and trials."""
    rng = np.random.default_rng(0)
    draw = {**interval_coverage.CLAIMED, "drift": interval_coverage.drifting}[family]
    row = interval_coverage.judge_looks(draw(rng, (600, 32)), rng)
    assert row["together"] >= 0.93
    assert row["single"] < 0.9  # what looking again and again does to ordinary intervals


def test_where_rows_do_not_take_turns_none_is_left_out(tmp_path):
    """Of servers that do not fit together, each decodes all prompts before the next one begins."""
    sweep = replace(make_sweep(PROMPTS[:8], gammas=(2, 3), repeats=2, warmup=0, until="sure"), together=1)
    with new_store(tmp_path, sweep) as store:
        Session(sweep, store, Scattered(0.5, 0.3), snapshot=quiet).run_all()
    assert load_results(tmp_path).done.groupby("config").size().to_dict() == {"d@2": 8, "d@3": 8, "plain": 8}
