"""Frames of figures against sums done by hand and made-up runs with known truth; their rendering, letter by letter."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from stored_runs import CATEGORIES, DRAFTERS, PASS_S, row_of, write_run

from specbench.base.record import Estimate
from specbench.decoding.records import PARTS
from specbench.decoding.theory import PassCosts
from specbench.results import stats
from specbench.results.acceptance import along, positions
from specbench.results.frames import paired_generations
from specbench.results.lines import ServerAnswer, StepLists
from specbench.results.results import NO_REPORT, Results, load_results, row_cells, step_frame
from specbench.results.run import Environment, Run, TargetModel
from specbench.results.summary import Summary
from specbench.show import document, tables

STEP = ("draft_s", "draft_prefill_s", "verify_s", "accept_s", "rollback_s", "other_s")


def step_lists(steps: Sequence[tuple[Any, ...]], **lists: Any) -> StepLists:
    """Steps of (drafted, tested, accepted, emitted, expected acceptances, times of STEP), with some lists replaced."""
    *counts, alphas, times = map(list, zip(*steps, strict=True)) if steps else [[], [], [], [], [], []]
    found = dict(zip(("drafted", "tested", "accepted", "emitted"), counts, strict=True))
    found |= {name: [each[i] for each in times] for i, name in enumerate(STEP)}
    none = [0] * len(steps)
    more = {
        "nodes": counts[0],
        "passes": counts[0],
        "forced": none,
        "mask_s": none,
        "closing": [None] * len(steps),
    }
    return StepLists(**{**found, **more, "expected_acceptance": alphas, **lists})


def row(config: str, prompt: str, speed: float = 10.0, **fields: Any) -> dict[str, Any]:
    """A finished generation of 11 tokens; without ``steps`` an empty list of them."""
    values = {
        **row_cells(row_of(config)), "run_id": "r", "config": config, "target": "t", "group": "",
        "throughput": math.nan, "prompt": prompt, "category": prompt.split("-")[0], "turn": 0,
        "repeat": 0, "status": "ok", "error": None, "new_tokens": 11, "first_tokens": 1,
        "token_ids": np.arange(11), "text": None, "ttft_s": 0.5,
        "prefill_s": 0.5, "decode_s": 10 / speed, "total_s": 0.5 + 10 / speed, "peak_memory_bytes": 1e9,
        "log_probability": math.nan, "tokens_per_second": speed, "prompt_tokens": 5, "queued_s": math.nan,
        "warnings": [], **dict.fromkeys(ServerAnswer.__struct_fields__), **NO_REPORT,
        "steps": step_lists(fields.pop("steps", []), **fields.pop("lists", {})),
    }  # fmt: skip
    return {**values, **fields}


def frame_of(*rows: dict[str, Any], order: Sequence[str] = (), costs: Any = None) -> Results:
    """A run with these generations, its configurations in the order of the rows or another one."""
    run = Run(
        run_id="r", options={}, environment=Environment(), target=TargetModel(), prompts=[],
        configs=[row_of(name) for name in order or dict.fromkeys(each["config"] for each in rows)],
        costs=None if costs is None else msgspec.convert(costs, PassCosts, strict=False),
    )  # fmt: skip
    frame = pd.DataFrame(list(rows))
    steps = {at: row["steps"] for at, row in enumerate(rows) if row["status"] == "ok"}
    return Results(run, frame, step_frame(steps, frame))


def one(summary: Summary, config: str) -> dict[str, Any]:
    row = summary.table()[summary.table()["config"] == config].iloc[0]
    return {str(name): value for name, value in row.items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Results:
    """4 drafters × γ 1, 2, 4, 8 × 9 categories."""
    path = tmp_path_factory.mktemp("run")
    return load_results(write_run(path, gammas=(1, 2, 4, 8), transformers_row=True, policies=("egag",)))


class TestPairedRuns:
    def test_pairs_by_prompt_turn_and_repeat(self):
        df = frame_of(
            row("plain", "a-1", 10.0), row("d@2", "a-1", 20.0),
            row("plain", "a-1", 5.0, repeat=1), row("d@2", "a-1", 20.0, repeat=1),
            row("plain", "a-1", 8.0, turn=1), row("d@2", "a-1", 4.0, turn=1),
            row("d@2", "b-1", 30.0),
        )  # fmt: skip
        pairs = paired_generations(df)
        found = pairs[["turn", "repeat", "ratio"]].to_numpy().tolist()
        assert found == [[0, 0, 2.0], [0, 1, 4.0], [1, 0, 0.5]]
        assert set(pairs["config"]) == {"d@2"}  # the baseline is beside, not among them

    def test_whole_times_are_taken_per_token(self):
        """An output twice as long that takes twice as long is no slower."""
        longer = row("d@2", "a-1", new_tokens=22, total_s=3.0)
        pairs = paired_generations(frame_of(row("plain", "a-1"), longer))
        assert pairs["ratio_total"].item() == pytest.approx((1.5 / 11) / (3.0 / 22))

    def test_each_temperature_has_its_own_baseline(self):
        df = frame_of(
            row("plain", "a-1", 10.0), row("d@2", "a-1", 20.0),
            row("plain,t=0.7", "a-1", 5.0), row("d@2,t=0.7", "a-1", 20.0),
        )  # fmt: skip
        pairs = paired_generations(df).set_index("config")
        assert pairs["ratio"].to_dict() == {"d@2": 2.0, "d@2,t=0.7": 4.0}
        assert pairs["identical"].to_dict() == {"d@2": True, "d@2,t=0.7": None}


class TestSummary:
    def test_speedup_with_interval(self):
        df = frame_of(*(
            each for i, ratio in enumerate((1.2, 1.3, 1.25, 1.6))
            for each in (row("plain", f"a-{i}", 10.0 * 2**i), row("d@2", f"a-{i}", ratio * 10.0 * 2**i))
        ))  # fmt: skip
        figures = one(Summary(df), "d@2")
        expected = stats.geometric_mean([1.2, 1.3, 1.25, 1.6], list("abcd"))
        assert (figures["speedup"], figures["speedup_low"], figures["speedup_high"]) == pytest.approx(
            (expected.value, expected.low, expected.high)
        )
        assert (figures["speedup_basis"], figures["verdict"], figures["prompts"]) == ("prompts", "faster", 4)

    def test_counts_of_steps(self):
        times = (0.2, 0.1, 0.6, 0.1, 0.05, 0.05)
        steps = [
            (2, 2, 2, 3, [0.9, 0.7], times),
            (2, 1, 0, 1, [0.2], times),
            (0, 0, 0, 1, [], (0.0, 0.0, 0.4, 0.1, 0.0, 0.0)),
        ]
        figures = one(Summary(frame_of(row("plain", "a-1"), row("d@2", "a-1", steps=steps))), "d@2")
        assert figures["tokens_per_step"] == pytest.approx(5 / 3)
        assert figures["acceptance_rate"] == pytest.approx(2 / 4)
        assert figures["acceptance_tested"] == pytest.approx(2 / 3)
        assert figures["alpha"] == pytest.approx((0.9 + 0.7 + 0.2) / 3)
        assert figures["mean_gamma"] == pytest.approx(4 / 3)
        total = 2 * 1.0 + 0.5
        shares = [figures[f"share_{part}"] for part in PARTS]
        assert shares == pytest.approx([0.4 / total, 1.6 / total, 0.3 / total, 0.1 / total, 0.1 / total])
        assert figures["share_draft_prefill"] == pytest.approx(0.2 / total)

    @pytest.mark.smoke
    def test_known_truth(self, made):
        """α, speeds and speedups are what the run was made with."""
        frame = Summary(made)
        for drafter in DRAFTERS:
            figures = one(frame, f"{drafter.name}@4")
            assert figures["alpha"] == pytest.approx(drafter.alpha, abs=0.09)
            step = (
                figures["mean_gamma"] * drafter.c
                + np.interp(figures["mean_gamma"] + 1, *zip(*PASS_S.items(), strict=True)) / PASS_S[1]
            )
            assert figures["speedup"] == pytest.approx(figures["tokens_per_step"] / step, rel=0.04)
        assert one(frame, "plain")["tokens_per_second"] == pytest.approx(1 / (PASS_S[1] + 0.0019), rel=0.1)
        assert one(frame, "transformers")["speedup"] == pytest.approx(1 / 1.6, rel=0.03)
        assert frame.table()["identical_share"].dropna().eq(1.0).all()

    def test_forced_and_corrected_tokens_and_masks_are_apart(self):
        times = (0.1, 0.0, 1.0, 0.1, 0.0, 0.0)
        counts = [(3, 3, 2, 3, [1.0, 1.0, 0.0]), (2, 2, 2, 3, [1.0, 1.0])]
        lists = {"forced": [2, 1], "mask_s": [0.06, 0.06], "closing": ["corrected", "bonus"]}
        mine = row("d@2", "a-1", steps=[(*count, times) for count in counts], lists=lists)
        summary = Summary(frame_of(row("plain", "a-1"), mine))
        figures = one(summary, "d@2")
        assert figures["forced_share"] == pytest.approx(3 / 6)
        assert figures["corrected_share"] == pytest.approx(1 / 6)
        assert figures["share_masks"] == pytest.approx(0.12 / 2.4)
        sheet = tables.summary_sheet(summary)
        assert {("forced", "50%"), ("masks", "5%")} <= {*zip(sheet.headings, sheet.rows[1], strict=True)}

    def test_nodes_of_a_tree_are_counted(self):
        """Two levels and five nodes: a whole branch kept, a leaf above the deepest level kept, and a rejection."""
        times = (0.1, 0.0, 1.0, 0.0, 0.0, 0.0)
        counts = [(2, 2, 2, 3, [1.0, 1.0]), (2, 1, 1, 2, [1.0]), (2, 1, 0, 1, [0.0])]
        mine = row("d@2", "a-1", steps=[(*count, times) for count in counts], lists={"nodes": [5, 5, 5]})
        figures = one(Summary(frame_of(row("plain", "a-1"), mine)), "d@2")
        assert (figures["mean_gamma"], figures["mean_nodes"], figures["tokens_per_step"]) == (2, 5, 2)

    def test_failures_are_counted_and_count_nowhere_else(self):
        failed = row("d@2", "b-1", status="failed", tokens_per_second=math.nan, decode_s=math.nan)
        df = frame_of(row("plain", "a-1"), row("d@2", "a-1", 20.0), row("plain", "b-1"), failed)
        figures = one(Summary(df), "d@2")
        assert (figures["failures"], figures["generations"], figures["prompts"]) == (1, 1, 1)
        assert figures["speedup"] == 2.0
        alone = frame_of(row("plain", "b-1"), failed)
        assert math.isnan(one(Summary(alone), "d@2")["speedup"])
        assert "1 generation failed" in " ".join(tables.notes(Summary(df)))


class TestOtherFrames:
    def test_categories(self, made):
        frame = made.table("category")
        assert list(dict.fromkeys(frame["category"])) == list(CATEGORIES)
        assert len(frame) == len(CATEGORIES) * (4 * 4 + 2)
        cell = frame[(frame["category"] == "code") & (frame["config"] == "ngram@4")].iloc[0]
        pairs = paired_generations(made)
        mine = pairs[(pairs["category"] == "code") & (pairs["config"] == "ngram@4")]
        expected = stats.geometric_mean(mine["ratio"], mine["prompt"].to_numpy(), mine["repeat"].to_numpy())
        assert (cell["speedup"], cell["prompts"]) == (pytest.approx(expected.value), 2)

    def test_acceptance_by_position(self):
        steps = [
            (2, 2, 1, 2, [0.8, 0.4], (0.1,) * 6),
            (2, 1, 0, 1, [0.3], (0.1,) * 6),
            (1, 1, 1, 2, [0.7], (0.1,) * 6),
            (0, 0, 0, 1, [], (0.1,) * 6),
        ]
        first, second = positions(Summary(frame_of(row("d@2", "a-1", steps=steps))))
        assert (first.drafted, first.tested, first.accepted) == (3, 3, 2)
        assert (first.rate, first.alpha) == pytest.approx((2 / 3, 0.6))
        assert (second.drafted, second.tested, second.accepted) == (2, 1, 0)
        assert (second.rate, second.rate_of_drafted, second.alpha) == pytest.approx((0.0, 0.0, 0.4))

    def test_acceptance_along_answers_and_contexts(self):
        """The first 64 tokens keep every draft, the others none; contexts begin with 5 tokens of prompt."""
        good, bad = (1, 1, 1, 2, [0.5], (0.1,) * 6), (1, 1, 0, 1, [0.5], (0.1,) * 6)
        steps = [good] * 32 + [bad] * 70
        rows = [row("d@1", f"a-{i}", new_tokens=135, steps=steps) for i in range(3)]
        rows.append(row("d@1", "a-9", new_tokens=500, steps=steps))  # not all of its steps are there
        found = along(Summary(frame_of(row("plain", "a-1"), *rows)))
        assert [(part.of, part.first, part.last, part.steps) for part in found] == [
            ("answer", 0, 63, 96), ("answer", 64, 127, 189),
            ("context", 0, 63, 87), ("context", 64, 127, 183), ("context", 128, 255, 36),
        ]  # fmt: skip
        assert [part.rate for part in found] == pytest.approx([1.0, 0.0, 1.0, 9 / 183, 0.0])


def shown(sheet: document.Sheet, width: int = 80) -> str:
    file = io.StringIO()
    document.show(Console(file=file, width=width, color_system=None, legacy_windows=False), sheet)
    return file.getvalue()


class TestRendering:
    @pytest.mark.parametrize("width", [60, 80, 200])
    def test_fits_and_never_loses_the_interval(self, made, width):
        frame = Summary(made)
        text = shown(tables.summary_sheet(frame), width)
        assert max(map(len, text.splitlines())) <= width
        for figures in frame.table().to_dict("records"):
            if figures["kind"] == "speculative":
                assert f" [{figures['speedup_low']:.2f}, {figures['speedup_high']:.2f}]" in text
        assert "1 (baseline)" in text
        assert "verdict" in text
        assert text.count("fastest") == 1

    @pytest.mark.parametrize("speeds", [[20.0], [4.0, 100.0]])
    def test_too_few_runs_have_no_interval_and_say_so(self, speeds):
        """Two prompts that fare differently have one that reaches from 0.00 to 85002."""
        plain = [row("plain", f"a-{i}") for i in range(len(speeds))]
        df = frame_of(*plain, *(row("d@2", f"a-{i}", speed) for i, speed in enumerate(speeds)))
        for sheet in (tables.summary_sheet, tables.category_sheet):
            assert "2.00 [too few to say]" in shown(sheet(Summary(df)))
        assert one(Summary(df), "d@2")["verdict"] == "cannot tell"

    @pytest.mark.parametrize("busy", [4, 5])
    def test_a_machine_busy_most_of_the_time_makes_verdicts_provisional(self, busy):
        rows = [
            row(config, f"{prompt}-1", speed, warnings=["steal" if number % 2 else "machine-busy", "stopped"])
            for number, (prompt, (config, speed)) in enumerate(
                product("abcd", (("plain", 10.0), ("d@2", 20.0)))
            )
        ]
        for each in rows[busy:]:
            each["warnings"] = ["stopped"]
        frame = Summary(frame_of(*rows))
        assert (one(frame, "d@2")["verdict"], one(frame, "d@2")["provisional"]) == ("faster", busy == 5)
        assert not isinstance(one(frame, "plain")["verdict"], str)
        assert not one(frame, "plain")["provisional"]
        assert set(frame_of(*rows).table("category")["verdict"]) == {"cannot tell"}
        said = "Verdicts are provisional: other programs used the processor during 5 of 8 generations."
        assert (said in tables.notes(frame)) == (stats.PROVISIONAL in tables.notes(frame)) == (busy == 5)
        assert ("| fastest? |" in document.to_markdown(tables.summary_sheet(frame))) == (busy == 5)

    @pytest.mark.parametrize(
        ("low", "high", "verdict"),
        [(1.1, 1.5, "faster"), (1.08, 1.5, "cannot tell"), (1.4, None, "cannot tell")],
    )
    def test_a_provisional_verdict_wants_a_wider_interval(self, low, high, verdict):
        """1.3 · (1.08 / 1.3)^1.5 is 0.98."""
        ratio = Estimate(1.3, low if high else None, high, 6, "prompts")
        assert stats.verdict(stats.widened(ratio)) == verdict
        assert stats.verdict(ratio) == ("faster" if high else "cannot tell")
        mirrored = Estimate(1 / 1.3, 1 / high if high else None, 1 / low if high else None, 6, "prompts")
        assert stats.verdict(stats.widened(mirrored)) == verdict.replace("faster", "slower")

    def test_numbers(self):
        values = (0.012345, 0.5, 9.994, 9.999, 99.97, 12.34, 123.4, math.inf, math.nan)
        texts = ["0.01", "0.50", "9.99", "10.0", "100", "12.3", "123", "∞", "–"]
        assert [stats.decimals(value) for value in values] == texts

    @pytest.mark.parametrize(
        ("accepted", "text"), [(999, "99.9%"), (1000, "100%"), (0, "0%"), (3, "0.3%"), (456, "46%")]
    )
    def test_shares(self, accepted, text):
        steps = [(1, 1, int(i < accepted), 1, [0.5], (0.1,) * 6) for i in range(1000)]
        sheets = tables.detail_sheets(Summary(frame_of(row("d@2", "a-1", steps=steps))))
        assert sheets["Acceptance by position"].rows[0][5] == text
