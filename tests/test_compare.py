"""Comparisons of runs and configurations: ratios worked out by hand, what may be compared, exact text, exit codes."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from stored_runs import PLAIN, PROMPTS, times, write_exact

from specbench.base.errors import RunError, UsageError
from specbench.cli.compare import compare as command
from specbench.cli.named_runs import named_runs
from specbench.results import stats
from specbench.results.compare import Compared, ComparedRow, compare_configs, compare_runs, to_json
from specbench.results.results import load_results
from specbench.show.compare import comparison_parts
from specbench.show.document import show


def runs(
    path: Path, speeds_a: Any, speeds_b: Any, options_b: Any = None, **options_a: Any
) -> tuple[Any, Any]:
    a = write_exact(path / "a", speeds_a, **options_a)
    b = write_exact(path / "b", speeds_b, **(options_b or {}))
    return load_results(a), load_results(b)


def overall(compared: Compared) -> dict[str, ComparedRow]:
    return {row.label: row for row in compared.overall}


def shown(compared: Compared) -> str:
    file = io.StringIO()
    show(Console(file=file, width=80), *comparison_parts(compared))
    return file.getvalue()


# --- Two configurations of one run ----------------------------------------------------------------


def test_configurations_are_paired_generation_by_generation(tmp_path):
    # The machine slows down by half in the second repeat, for both: no trace of it in the ratio.
    fast = {prompt: [20.0 + i, (20.0 + i) / 2] for i, prompt in enumerate(PROMPTS)}
    slow = {prompt: [10.0, 5.0] for prompt in PROMPTS}
    df = load_results(write_exact(tmp_path / "r", {"plain": PLAIN, "d@1": fast, "d@2": slow}))
    row = compare_configs(df, "d@1", "d γ=2").overall[0]
    ratios = [2.0 + i / 10 for i in range(6)]
    assert row.ratio.value == pytest.approx(math.exp(sum(map(math.log, ratios)) / 6))
    low, high = stats.mean_interval([math.log(ratio) for ratio in ratios]) or (0.0, 0.0)
    assert (row.ratio.low, row.ratio.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert (row.verdict, row.ratio.prompts, row.config_a, row.config_b) == ("faster", 6, "d@1", "d@2")
    assert row.b.value == pytest.approx(math.sqrt(50))


def test_each_category_has_its_row(tmp_path):
    times = {prompt: (2 if "code" in prompt else 0.5) * 1.001**i for i, prompt in enumerate(PROMPTS)}
    mine = {prompt: [value * times[prompt] for value in PLAIN[prompt]] for prompt in PROMPTS}
    df = load_results(write_exact(tmp_path / "r", {"plain": PLAIN, "d@1": mine}))
    compared = compare_configs(df, "d@1", "plain")
    assert [line.split()[0] for line in shown(compared).splitlines()[6:9]] == ["all", "chat", "code"]
    rows = {row.category: row for row in compared.rows}
    assert {name: row.ratio.value for name, row in rows.items()} == pytest.approx(
        {None: 1.0, "chat": 0.5, "code": 2.0}, rel=0.01
    )
    assert [rows[name].verdict for name in (None, "chat", "code")] == ["cannot tell", "slower", "faster"]


def test_one_prompt_gives_no_verdict(tmp_path):
    speeds = {"plain": {"chat-01": [10.0, 10.1]}, "d@1": {"chat-01": [20.0, 20.1]}}
    compared = compare_configs(load_results(write_exact(tmp_path / "r", speeds)), "d@1", "plain")
    (row,) = compared.rows
    assert (row.ratio.basis, row.verdict) == ("repeats", "cannot tell")
    assert stats.ratio_text(row.ratio).endswith("]*")


def test_a_busy_machine_gives_provisional_verdicts(tmp_path, capsys):
    speeds = {"plain": PLAIN, "d@1": times(0.5)}
    busy = write_exact(tmp_path / "busy", speeds, disturbed=("machine-busy",))
    quiet = write_exact(tmp_path / "quiet", {"plain": PLAIN, "d@1": times(2.0)}, disturbed=("stopped",))
    df, other = load_results(busy), load_results(quiet)
    compared = compare_configs(df, "d@1", "plain")
    assert {(row.verdict, row.provisional) for row in compared.rows} == {("slower", True)}
    assert "slower?" in shown(compared)
    assert "provisional" in shown(compared)
    assert {row["provisional"] for row in to_json(compared)["rows"]} == {True}
    compared = compare_runs(df, other)
    assert {(row.label, row.verdict, row.provisional) for row in compared.overall} == {
        ("plain", "cannot tell", False),
        ("d γ=1", "slower", True),
    }
    command([f"{busy}:d@1", f"{busy}:plain"], fail_below=0.95)
    assert "--fail-below does not judge" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("d@1", "d γ=1", "compared with itself"),
        (
            "d@1",
            "d@7",
            "no configuration 'd@7' in this run. Choose plain, d γ=1, d γ=2",
        ),
        ("d@1", "d@2", "no finished generation in common"),
    ],
)
def test_configurations_that_cannot_be_compared(tmp_path, a, b, message):
    speeds = {"plain": PLAIN, "d@1": times(2), "d@2": {prompt: [None, None] for prompt in PROMPTS}}
    df = load_results(write_exact(tmp_path / "r", speeds))
    with pytest.raises(UsageError, match=message):
        compare_configs(df, a, b)


@pytest.mark.parametrize(
    ("metric", "a", "b"),
    [
        ("tokens_per_step", 2.0, 1.0), ("acceptance_rate", 0.5, math.nan), ("alpha", 0.5, math.nan),
        ("ttft_s", 0.5, 0.5), ("speedup", 2.0, math.nan),
    ],
)  # fmt: skip
def test_any_rate_can_be_compared_and_is_that_of_the_table(tmp_path, metric, a, b):
    df = load_results(write_exact(tmp_path / "r", {"plain": PLAIN, "d@1": times(2.0), "d@2": times(1.0)}))
    row = compare_configs(df, "d@1", "d@2" if math.isnan(b) else "plain", metric).overall[0]
    table = df.table().set_index("config")[metric]
    assert row.a.value == pytest.approx(a) == pytest.approx(table["d@1"])
    assert row.ratio.value == pytest.approx(table["d@1"] / table[row.config_b])


# --- Two runs -------------------------------------------------------------------------------------


def test_runs_of_one_machine_are_compared_in_speed(tmp_path):
    pair = runs(tmp_path, {"plain": PLAIN, "d@1": times(1.8)}, {"plain": PLAIN, "d@1": times(2.0, 0.0)})
    compared = compare_runs(*pair, ("new", "old"))
    rows = overall(compared)
    assert (compared.a, compared.b, compared.metric) == ("new", "old", "tokens_per_second")
    assert rows["d γ=1"].ratio.value == pytest.approx(0.9)
    assert rows["d γ=1"].a.value == pytest.approx(18.0)
    assert rows["d γ=1"].verdict == "slower"
    assert rows["plain"].ratio.value == pytest.approx(1.0)
    assert rows["plain"].verdict == "cannot tell"
    assert any("not made at the same time" in note for note in compared.notes)


@pytest.mark.parametrize(
    "other",
    [{"cpu": "Other CPU"}, {"cores": 4}, {"ram_gb": 32.0}, {"devices": ["Example GPU"]}],
    ids=lambda each: next(iter(each)),
)
def test_runs_of_two_machines_are_compared_in_ratios_to_their_baselines(tmp_path, other):
    half = {prompt: [5.0, 5.0] for prompt in PROMPTS}
    pair = runs(
        tmp_path,
        {"plain": PLAIN, "d@1": times(2.2)},
        {"plain": half, "d@1": times(1.0, 0.0)},  # twice its plain decoding
        {"environment": other},
    )
    compared = compare_runs(*pair)
    assert compared.metric == "speedup"
    (row,) = compared.overall
    assert row.label == "d γ=1"
    assert (row.ratio.value, row.a.value, row.b.value) == pytest.approx((1.1, 2.2, 2.0))
    assert "machines differ" in " ".join(compared.notes)
    with pytest.raises(UsageError, match="different machines"):
        compare_runs(*pair, metric="tokens_per_second")


def test_small_differences_of_memory_and_new_versions_are_the_same_machine(tmp_path):
    pair = runs(
        tmp_path,
        {"plain": PLAIN},
        {"plain": PLAIN},
        {"environment": {"ram_gb": 16.3, "torch": "2.1", "threads": 1}, "max_new_tokens": 99},
    )
    compared = compare_runs(*pair)
    assert compared.metric == "tokens_per_second"
    assert "torch: 2.0 / 2.1; threads: 2 / 1" in " ".join(compared.notes)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"name": "other", "fingerprint": "f1"}, "target, float32 / other, float32"),
        ({"fingerprint": "f1"}, "both are called target, float32, but their weights differ"),
        ({"dtype": "bfloat16"}, "target, float32 / target, bfloat16"),
    ],
)
def test_other_targets_are_refused(tmp_path, target, said):
    pair = runs(tmp_path, {"plain": PLAIN}, {"plain": PLAIN}, {"target": target})
    with pytest.raises(UsageError, match="The targets differ") as caught:
        compare_runs(*pair)
    assert said in str(caught.value)


def test_one_model_under_two_names_is_one_target(tmp_path):
    pair = runs(tmp_path, {"plain": PLAIN}, {"plain": PLAIN}, {"target": {"name": "org/target"}})
    assert compare_runs(*pair).overall[0].ratio.value == 1.0
    with pytest.raises(UsageError, match="same run"):
        compare_runs(pair[0], pair[0])


def test_only_prompts_that_both_have_count(tmp_path):
    mine = {"chat-01": [20.0], "chat-02": [20.0], "chat-03": [80.0], "code-01": [80.0]}
    theirs = {"chat-01": [10.0], "chat-02": [10.0], "chat-03": [10.0], "code-02": [1.0]}
    texts = {"chat-01": "t1", "chat-02": "t2", "chat-03": "t3"}
    pair = runs(
        tmp_path, {"plain": mine}, {"plain": theirs}, {"texts": {**texts, "chat-03": "changed"}}, texts=texts
    )
    compared = compare_runs(*pair)
    (row,) = compared.rows
    assert (row.ratio.value, row.ratio.prompts) == (pytest.approx(2.0), 2)
    assert [note[:18] for note in compared.notes if "left out" in note] == [
        "1 prompt left out:",
        "2 prompts left out",
    ]


@pytest.mark.parametrize(
    ("speeds", "message"),
    [
        ({"plain": {"other-01": [10.0]}}, "no prompt in common"),
        ({"d@2": PLAIN}, "no configuration in common"),
        ({"plain": {prompt: [None] for prompt in PROMPTS}}, "no finished generation in common"),
    ],
)
def test_runs_without_anything_in_common(tmp_path, speeds, message):
    pair = runs(tmp_path, {"plain": PLAIN}, speeds)
    with pytest.raises(UsageError, match=message):
        compare_runs(*pair)


def test_configurations_are_matched_by_id_or_as_told(tmp_path):
    pair = runs(
        tmp_path,
        {"plain": PLAIN, "d@1": times(2), "d@2": times(3), "d@3": times(4)},
        {"plain": PLAIN, "d@2": times(1), "d@4": times(1)},
    )
    compared = compare_runs(*pair, ("new", "old"))
    assert list(overall(compared)) == ["plain", "d γ=2"]
    assert overall(compared)["d γ=2"].ratio.value == pytest.approx(3.0)
    assert "Only in A (new): d γ=1, d γ=3." in compared.notes
    assert "Only in B (old): d γ=4." in compared.notes
    told = compare_runs(*pair, a="d@3", b="d@4")
    assert {label: row.ratio.value for label, row in overall(told).items()} == {
        "d γ=3 / d γ=4": pytest.approx(4.0)
    }
    assert not any(note.startswith("Only in") for note in told.notes)
    assert list(overall(compare_runs(*pair, b="plain"))) == ["plain"]
    with pytest.raises(UsageError, match="no configuration 'd@1' in run B"):
        compare_runs(*pair, a="d@1")


def test_failed_generations_count_nowhere(tmp_path):
    broken: dict[str, list[float | None]] = {prompt: [None, 20.0] for prompt in PROMPTS}
    failed = {"plain": broken, "d@1": {prompt: [None] for prompt in PROMPTS}}
    compared = compare_runs(*runs(tmp_path, failed, {"plain": PLAIN, "d@1": times(2)}))
    assert [(row.label, row.ratio.value) for row in compared.overall] == [("plain", pytest.approx(2.0))]
    assert "No common finished generation: d γ=1." in compared.notes


# --- Failing below a ratio --------------------------------------------------------------------------


def row_with(
    low: float | None, high: float | None, basis: Any = "prompts", category: str | None = None
) -> ComparedRow:
    ratio = stats.Estimate(0.9, low, high, 5, basis)
    speed = stats.Estimate(1.0, None, None, 5, None)
    return ComparedRow("c", "c", "c", category, speed, speed, ratio, stats.verdict(ratio))


@pytest.mark.parametrize(
    ("row", "fails"),
    [
        (row_with(0.88, 0.94), True),
        (row_with(0.88, 0.95), False),
        (row_with(0.88, 0.96), False),
        (row_with(0.88, 0.94, "repeats"), False),
        (row_with(None, None, None), False),
        (row_with(0.88, 0.94, category="chat"), False),
    ],
)
def test_only_an_interval_over_prompts_wholly_below_fails(row, fails):
    assert bool(Compared("a", "b", "speed", [row], []).below(0.95)) is fails


# --- Text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        ((0.998, 0.996, 0.9991), "0.998× [0.996, 0.999]"),
        ((1.0021, 1.00004, 1.0043), "1.00210× [1.00004, 1.00430]"),
        ((12.34, 9.876, 98.7), "12.3× [9.88, 98.7]"),
        ((12.34, 9.876, 98.77), "12.3× [too few to say]"),
        ((1.5, None, None), "1.50× [too few to say]"),
        ((math.nan, None, None), "–"),
    ],
)
def test_ratios_stand_with_their_intervals(ratio, text):
    basis: Any = None if ratio[1] is None else "prompts"
    assert stats.ratio_text(stats.Estimate(*ratio, 5, basis)) == text


def test_every_field_of_the_json_is_documented(tmp_path):
    df = load_results(write_exact(tmp_path / "run", {"plain": PLAIN, "d@1": times(1.2)}))
    data = to_json(compare_configs(df, "d@1", "plain"), 0.9)
    text = (Path(__file__).parents[1] / "docs" / "results-format.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(\w+)`", text.partition("compare --json")[2]))
    assert {*data, *data["rows"][0]} <= documented


# --- Command --------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path) -> list[str]:
    a = write_exact(tmp_path / "new", {"plain": PLAIN, "d@1": times(1.8)})
    b = write_exact(tmp_path / "old", {"plain": PLAIN, "d@1": times(2.0)})
    return [str(a), str(b)]


def test_fail_below_decides_the_exit_code(folders, capsys):
    command(folders, fail_below=0.85)
    with pytest.raises(
        RunError, match=r"^Ratios with the whole interval below 0.95: d γ=1: 0.90× \["
    ) as caught:
        command(folders, fail_below=0.95, as_json=True)
    assert caught.value.exit_code == 1
    assert '"below": ["d' in capsys.readouterr().out


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("sides", "said"),
    [(("new:d@1", "new:plain"), "A  d γ=1\nB  plain"), (("new:d@1", "old"), "A  new\nB  old")],
)
def test_the_output_is_as_asked_for(folders, capsys, sides, said):
    command([str(Path(folders[0]).with_name(name)) for name in sides])
    assert said in capsys.readouterr().out


def test_of_several_runs_in_a_folder_the_newest_in_which_something_was_measured(tmp_path, capsys):
    runs = {
        "failed": ("04", {"plain": [10.0, 10.0], "d@1": [None, None]}),
        "other": ("03", {"plain": [10.0, 10.0], "e@1": [20.0, 21.0], "d@1": [None]}),
        "old": ("02", {"plain": [10.0, 10.0], "d@1": [20.0, 21.0]}),
    }
    for name, (day, speeds) in runs.items():
        prompts = {config: {"chat-01": values} for config, values in speeds.items()}
        write_exact(tmp_path / name, prompts, created=f"2025-01-{day}T00:00:00Z")

    for having, name in (((), "other"), (("d@1",), "old"), (("d γ=1", "plain"), "old"), (("x@1",), "other")):
        (run,) = named_runs([tmp_path], having)
        assert run.name == name
        assert f"taken is {run}." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sides": ["new:d@1"]}, "1 side given"),
        (
            {"sides": ["new", "old"], "metric": "speed"},
            "no figure 'speed' to compare. Did you mean 'speedup'",
        ),
        ({"sides": ["new", "old", "old"]}, "3 sides given"),
        ({"sides": ["new", "nowhere"]}, "it does not exist"),
        ({"sides": ["new", "old"], "fail_below": 0.0}, "--fail-below is 0"),
        ({"sides": ["new", "old"], "fail_below": math.nan}, "--fail-below is nan"),
    ],
)
def test_bad_command_lines(folders, arguments, message):
    sides = [str(Path(folders[0]).with_name(name)) for name in arguments.pop("sides")]
    with pytest.raises(UsageError, match=message):
        command(sides, **arguments)
