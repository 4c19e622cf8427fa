"""Comparisons of runs and configurations: ratios worked out by hand, what may be compared, exact text, exit codes."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from rich.console import Console
from stored_runs import PLAIN, PROMPTS, change_lines, change_run, times, write_exact

from specbench.base.errors import UsageError
from specbench.cli.compare import compare as command
from specbench.cli.named_runs import named_runs
from specbench.results import stats
from specbench.results.compare import Compared, ComparedRow, Matched, compare_runs, to_json
from specbench.results.gate import WORDS, judge, outcome
from specbench.results.results import Results, load_results
from specbench.show.compare import comparison_parts
from specbench.show.document import show


def runs(
    path: Path, speeds_a: Any, speeds_b: Any, options_b: Any = None, **options_a: Any
) -> tuple[Any, Any]:
    a = write_exact(path / "a", speeds_a, **options_a)
    b = write_exact(path / "b", speeds_b, **(options_b or {}))
    return load_results(a), load_results(b)


def compare_configs(results: Results, a: str, b: str, metric: str | None = None) -> Compared:
    return compare_runs(results, results, a=a, b=b, metric=metric)


def overall(compared: Compared) -> dict[str, ComparedRow]:
    return {row.label: row for row in compared.rows if row.category is None}


def metrics(compared: Compared) -> list[str]:
    return [*dict.fromkeys(row.kind.name for row in compared.rows)]


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
    row = compare_configs(df, "d@1", "d γ=2").rows[0]
    ratios = [2.0 + i / 10 for i in range(6)]
    assert row.ratio.value == pytest.approx(math.exp(sum(map(math.log, ratios)) / 6))
    low, high = stats.mean_interval([math.log(ratio) for ratio in ratios]) or (0.0, 0.0)
    assert (row.ratio.low, row.ratio.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert (row.verdict, row.ratio.prompts, *(config.id for config in row.configs)) == (
        "faster",
        6,
        "d@1",
        "d@2",
    )
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


def test_a_busy_machine_gives_provisional_verdicts(tmp_path):
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
    assert {(row.label, row.verdict, row.provisional) for row in compared.rows} == {
        ("plain", "cannot tell", False),
        ("d γ=1", "slower", True),
    }


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
    row = compare_configs(df, "d@1", "d@2" if math.isnan(b) else "plain", metric).rows[0]
    table = df.table().set_index("config")[metric]
    assert row.a.value == pytest.approx(a) == pytest.approx(table["d@1"])
    assert row.ratio.value == pytest.approx(table["d@1"] / table[row.configs[1].id])


# --- Two runs -------------------------------------------------------------------------------------


def test_runs_of_one_machine_are_compared_in_speed(tmp_path):
    """Whose memory size varies a little, also with new versions."""
    other = {"environment": {"ram_gb": 16.3, "torch": "2.1", "threads": 1}, "max_new_tokens": 99}
    pair = runs(
        tmp_path, {"plain": PLAIN, "d@1": times(1.8)}, {"plain": PLAIN, "d@1": times(2.0, 0.0)}, other
    )
    compared = compare_runs(*pair, ("new", "old"))
    assert "torch: 2.0 / 2.1; threads: 2 / 1" in " ".join(compared.notes)
    rows = overall(compared)
    assert (compared.names, metrics(compared)) == (("new", "old"), ["tokens_per_second"])
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
    assert metrics(compared) == ["speedup"]
    row = overall(compared)["d γ=1"]
    assert (row.ratio.value, row.a.value, row.b.value) == pytest.approx((1.1, 2.2, 2.0))
    assert "machines differ" in " ".join(compared.notes)
    with pytest.raises(UsageError, match="different machines"):
        compare_runs(*pair, metric="tokens_per_second")


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
    assert compare_runs(*pair).rows[0].ratio.value == 1.0
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
    assert {name: row.ratio.value for name, row in overall(compared).items()} == {"plain": pytest.approx(2.0)}
    assert "No common finished generation: d γ=1." in compared.notes


# --- A gate -----------------------------------------------------------------------------------------

EVERY = ["tokens_per_second", "speedup", "ttft_s", "tokens_per_step", "acceptance_rate"]


def judged(
    new: Path, baseline: Path, metrics: Sequence[str] = EVERY, worse_than: float = 0.03, **rows: str
) -> Compared:
    both = Matched(load_results(new), load_results(baseline), words=WORDS, **rows)
    return judge(both, metrics, worse_than, ("new", "baseline"))


def outcomes(gate: Compared) -> dict[tuple[str, str], str]:
    return {(row.label, row.kind.name): row.outcome for row in gate.rows}


def test_a_gate_tells_worse_from_not_worse_and_both_from_not_known(tmp_path):
    baseline = write_exact(tmp_path / "old", {"plain": PLAIN, "d@1": times(2.0), "d@2": times(2.0)})
    new = {"plain": PLAIN, "d@1": times(1.8), "d@2": times(1.94, 0.05)}
    new_run = write_exact(tmp_path / "new", new)
    gate = judged(new_run, baseline)
    assert outcomes(gate) == {
        ("plain", "tokens_per_second"): "not worse",
        ("d γ=1", "tokens_per_second"): "worse",
        ("d γ=2", "tokens_per_second"): "cannot tell",
        ("d γ=1", "speedup"): "worse",
        ("d γ=2", "speedup"): "cannot tell",
        **{(label, "ttft_s"): "not worse" for label in ("plain", "d γ=1", "d γ=2")},
        **{(label, "tokens_per_step"): "not worse" for label in ("plain", "d γ=1", "d γ=2")},
        **{(label, "acceptance_rate"): "not worse" for label in ("d γ=1", "d γ=2")},
    }  # plain decoding accepts nothing
    assert outcome(gate) == "worse"
    assert outcome(judged(new_run, baseline, ["speedup"], 0.2)) == "not worse"
    unclear = judged(new_run, baseline, ["speedup"], a="d@2", b="d@2")
    assert (outcome(unclear), "measure more prompts" in shown(unclear)) == ("cannot tell", True)
    # The bound behind "worse" is corrected for the number of rows and figures, that behind "not worse" is not.
    (alone,) = judged(new_run, baseline, ["speedup"], a="d@1", b="d@1").rows
    among = next(row for row in gate.rows if (row.label, row.kind.name) == ("d γ=1", "speedup"))
    assert among.ratio.low == alone.ratio.low == alone.ratio_at(0.9).low
    assert among.ratio.high == alone.ratio_at(1 - 0.1 / len(gate.rows)).high > alone.ratio.high
    # Of times, more is worse.
    slow = change_lines(copy_of(new_run, tmp_path / "slow"), lambda line: {"ttft_s": 1.1 * line["ttft_s"]})
    assert set(outcomes(judged(slow, baseline, ["ttft_s"])).values()) == {"worse"}
    # Configurations of one run are paired one by one.
    both = Matched(load_results(new_run), load_results(new_run), a="d@1", b="d@2", words=WORDS)
    assert judge(both, ["speedup"], 0.03, ("r", "r")).names == ("d γ=1", "d γ=2")


def copy_of(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return change_lines(change_run(to, run_id=to.name), lambda line: {"run_id": to.name})


@pytest.mark.parametrize(("config", "prompts"), [("d@1", 4), ("d@1,t=1", 6)])
def test_a_gate_compares_acceptance_of_equal_greedy_outputs_also_on_a_busy_machine(tmp_path, config, prompts):
    speeds = {"plain": PLAIN, config: times(2.0)}
    baseline = write_exact(tmp_path / "old", speeds)
    busy = write_exact(tmp_path / "busy", speeds, disturbed=("machine-busy",))

    def spoilt(line: dict[str, Any]) -> dict[str, Any]:
        if line["prompt"] not in ("chat-01", "code-01") or line["config"] != config:
            return {}
        steps = line["steps"]
        accepted = {"accepted": [0] * len(steps["accepted"])}
        return {"token_ids": line["token_ids"][::-1], "steps": steps | accepted}

    change_lines(busy, spoilt)
    gate = judged(busy, baseline, ["acceptance_rate", "tokens_per_second"], a=config, b=config)
    greedy = prompts == 4
    assert [row.outcome for row in gate.rows] == ["not worse" if greedy else "cannot tell", "cannot tell"]
    assert [row.ratio.prompts for row in gate.rows] == [prompts, 6]
    assert ("2 prompts left out at least once" in " ".join(gate.notes)) == greedy
    assert "other programs used the processor" in shown(gate)


@pytest.mark.parametrize(
    ("new", "old", "why"),
    [
        ({"chat-01": [20.0, 20.1]}, {"chat-01": [20.0, 20.1]}, "1 prompt, too few"),
        (times(2.0) | {"chat-01": [None]}, times(2.0), "1 prompt of the baseline failed"),
        (times(2.0), times(2.0) | {"chat-01": [None]}, ""),  # the new one cannot be worse there
        ({prompt: [None] for prompt in PROMPTS}, times(2.0), "6 prompts of the baseline failed"),
        ({"else-01": [20.0]}, times(2.0), "no output of both to compare"),
    ],
)
def test_a_gate_says_nothing_that_was_not_measured(tmp_path, new, old, why):
    paths = (write_exact(tmp_path / name, {"d@1": speeds}) for name, speeds in (("new", new), ("old", old)))
    gate = judged(*paths, ["tokens_per_second", "tokens_per_step"])
    expected = "cannot tell" if why else "not worse"
    assert set(outcomes(gate).values()) == {expected, outcome(gate)}
    assert {row.why for row in gate.rows} == {why}
    assert why in shown(gate)
    rows = json.loads(json.dumps(to_json(gate), allow_nan=False))["rows"]
    assert [(row["verdict"], row["why"]) for row in rows] == 2 * [(expected, why)]


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
    data = to_json(compare_configs(df, "d@1", "plain"))
    text = (Path(__file__).parents[1] / "docs" / "results-format.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(\w+)`", text.partition("compare --json")[2]))
    assert {*data, *data["rows"][0]} <= documented


# --- Command --------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path) -> list[str]:
    a = write_exact(tmp_path / "new", {"plain": PLAIN, "d@1": times(1.8)})
    b = write_exact(tmp_path / "old", {"plain": PLAIN, "d@1": times(2.0)})
    return [str(a), str(b)]


@pytest.mark.smoke
def test_a_gate_decides_the_exit_code(folders, tmp_path, capsys):
    new, old = folders
    with pytest.raises(typer.Exit) as caught:
        command([old, new], metric="speedup, tokens_per_step", worse_than="3%", junit=tmp_path / "gate.xml")
    (suite,) = ElementTree.parse(tmp_path / "gate.xml").getroot()  # noqa: S314, our own
    cases = {(case.get("classname"), case.get("name")): [*case] for case in suite}
    (failure,) = cases.pop(("d γ=1", "speedup"))
    assert re.fullmatch(r"0\.90× \[.*\] the baseline's: worse", failure.get("message", ""))
    assert failure.tag == "failure"
    assert cases == {("plain", "tokens_per_step"): [], ("d γ=1", "tokens_per_step"): []}
    assert caught.value.exit_code == 1
    out = capsys.readouterr().out
    assert out.startswith("Worse by more than 3%? Yes, 1 of 3 rows and figures.\n")
    assert "0.90 [" in out
    wide = write_exact(tmp_path / "wide", {"d@1": times(1.94, 0.05)})
    command([new, old], metric="speedup", worse_than="3%", as_json=True)  # the other way round it is faster
    assert {row["verdict"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"not worse"}
    with pytest.raises(typer.Exit) as caught:
        command([old, str(wide)], worse_than="3%", junit=tmp_path / "wide.xml")
    assert b'<skipped message="' in (tmp_path / "wide.xml").read_bytes()
    assert caught.value.exit_code == 3
    assert capsys.readouterr().out.startswith("Worse by more than 3%? Not known of ")


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
        ({"sides": ["new", "old"], "worse_than": "3"}, "--worse-than is '3'. Give a share such as 5%"),
        ({"sides": ["new", "old"], "worse_than": "70%"}, "--worse-than is 70%. Give 0.5% to 50%"),
        ({"sides": ["new", "old"], "metric": "speedup,alpha"}, "judged, not compared. Add --worse-than"),
        ({"sides": ["new", "old"], "junit": Path("x.xml")}, "--junit writes judgments. Add --worse-than"),
        ({"sides": ["new", "old"], "worse_than": "3%", "junit": Path("no/x.xml")}, "cannot be written"),
    ],
)
def test_bad_command_lines(folders, arguments, message):
    sides = [str(Path(folders[0]).with_name(name)) for name in arguments.pop("sides")]
    with pytest.raises(UsageError, match=message):
        command(sides, **arguments)
