"""`specbench tune --break-even`: on servers whose steps are known, and on specbench's own decoder."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cli_runs import Cli, write_prompts
from regret import FakeClock
from test_started import TARGET, TimedEngine

from specbench.base.errors import RunError
from specbench.bench.grid import SweepOptions
from specbench.bench.prompts import load_prompts
from specbench.cli.started import engine_configs, started_engine
from specbench.export.start import EngineDrafter, EngineSetting, settings_of
from specbench.options import DecodingOptions
from specbench.results.lines import Generation
from specbench.rows import conditions_of
from specbench.show.document import to_text
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import ModelSpec
from specbench.specs.policies import Fixed
from specbench.tune.break_even import BreakEven, break_even_parts, measure, pretending

DECODING = DecodingOptions(max_new_tokens=96)


def pretended(name: str) -> tuple[list[EngineSetting], dict[str, Any]]:
    small = EngineDrafter(parse_drafter("org/small"), ModelSpec("folder", "/models/small"))
    engine = started_engine(name)
    return pretending(engine, settings_of(engine, TARGET, [small], gammas=(2, 4), policies=[Fixed()]))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vllm", ['"rejection_sample_method": "synthetic"', '"synthetic_acceptance_length": 2.5']),
        ("llama.cpp", ["--spec-synth-len 2.5"]),
        (
            "sglang",
            ["env SGLANG_SIMULATE_ACC_LEN=2.5 SGLANG_SIMULATE_ACC_METHOD=match-expected python -m sglang"],
        ),
    ],
)
def test_engines_are_told_what_to_pretend(name, words):
    settings, drafts = pretended(name)
    engine = started_engine(name)
    lines = {each.name: " ".join(engine.command_line(TARGET, each.options, 8000)) for each in settings}
    assert [*lines] == ["plain", *drafts]
    assert {each[1:] for each in drafts.values()} == {(2, 1.5), (2, 2.5), (4, 2.0), (4, 4.0)}
    assert all(word in lines["org/small@2,length=2.5"] for word in words)
    assert not any(word in lines["plain"] for word in words)


class PretendingEngine(TimedEngine):
    """Accepts each draft token as often as the length says, nearly; a step takes 0.1 s, and 0.01 s a draft token."""

    broken = ""

    def generate(self, config: Any, *words: Any, **named: Any) -> Generation:
        if self.broken and self.broken in config.drafter:
            raise RunError("It crashed.")
        _, _, length = config.drafter.partition("length=")
        self.rate = {"org/small": (float(length or 1) - 1) / 4}
        return super().generate(config, *words, **named)


def found(*batches: int, broken: str = "", limit: int | None = None, seconds: float = 1e9) -> tuple[Any, Any]:
    settings, drafts = pretended("vllm")
    clock = FakeClock()
    engine = PretendingEngine(
        clock, {each.name: each for each in settings}, rate={}, batch_cost=0.5, limit=limit
    )
    engine.broken = broken
    options = SweepOptions(
        (*conditions_of(), *conditions_of(batch=batches or [4])), turns=1, decoding=DECODING
    )
    rows = engine_configs(options, settings)
    return measure(
        engine, rows, {row.id: drafts[row.drafter] for row in rows if row.drafter in drafts},
        load_prompts(("all",), 24), DECODING, in_turn=limit is None,
        in_time=lambda: clock.now() < seconds, report=lambda *_: None,
    ), engine  # fmt: skip


@pytest.mark.parametrize("limit", [None, 1])
def test_drafts_pay_from_the_time_of_their_step_on(limit):
    (rows, failed), engine = found(limit=limit)
    assert not failed
    assert [(each.batch, each.gamma) for each in rows] == [(1, 2), (4, 2), (1, 4), (4, 4)]
    for each in rows:
        wanted = 1.0 + 0.1 * each.gamma * (1 + 0.5 * (each.batch - 1))
        assert each.tokens.value == pytest.approx(wanted, rel=0.02)
        assert each.tokens.low < wanted * 1.01
        assert each.most == pytest.approx((each.gamma + 1) / wanted, rel=0.02)
        assert each.bend == pytest.approx(1.0, abs=0.02)
        assert len(each.steps) == 2
    assert len(engine.began) == 5  # each server is started once
    text = to_text(*break_even_parts(rows, ["A note."]), width=120)
    assert "1.20 [1.19, 1.21]" in text or "1.20 [1.1" in text
    assert "A note." in text
    assert "times as long" not in text


def test_what_fails_or_comes_too_late_is_left_out():
    (rows, failed), _ = found(broken="@2,length=2.5")
    assert {*failed.values()} == {"It crashed."}
    assert [len(each.steps) for each in rows] == [1, 1, 2, 2]
    with pytest.raises(RunError, match="Plain decoding failed: It crashed"):
        found(broken="plain")
    (rows, failed), _ = found(seconds=0.0)
    assert (rows, failed) == ([], {})


def test_a_step_that_depends_on_what_is_accepted_is_told():
    (rows, _), _ = found()
    one = rows[2]
    bent = BreakEven("d", 4, 1, one.tokens, {2.0: rows[0].tokens, 4.0: one.tokens})
    text = to_text(*break_even_parts([bent], []), width=120)
    assert "A step of d at γ = 4 takes 1.17 times as long" in text


def test_own_decoder(cli: Cli, models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target, small = models / "target", models / "small"
    write_prompts(tmp_path / "mine.jsonl", {f"talk-{n}": [f"Hello {n}"] for n in range(4)})
    words = ["tune", "--break-even", "--target", target, "--dtype", "float32", "-n", 8, "-p", "./mine.jsonl"]
    made = cli(*words, "--drafter", small, "--batch", "1,2", "--json")
    assert made.code == 0, made.err
    rows = json.loads(made.out)["rows"]
    assert [(row["batch"], row["gamma"]) for row in rows] == [(b, g) for g in (2, 4, 8) for b in (1, 2)]
    for row in rows:
        (tokens,) = map(float, row["steps"])
        assert 1.0 <= tokens <= row["gamma"] + 1
        assert row["speedup_if_perfect"] == pytest.approx((row["gamma"] + 1) / row["tokens"]["value"])
    shown = cli(*words, "--drafter", small)
    assert "from tokens/step" in shown.out
    assert not (tmp_path / "results").exists()
    cli(*words).refused(2, "--break-even needs a drafter")
    cli(*words, "--drafter", small, "--resume").refused(2, "it stores nothing")
    cli(*words, "--drafter", "lookup").refused(2, "lookup costs almost nothing")
