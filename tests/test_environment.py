from __future__ import annotations

import getpass
import mmap
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

import specbench.bench.environment as environment
from specbench.base.load import LoadSnapshot, load_snapshot
from specbench.base.record import Estimate, to_json
from specbench.bench.environment import describe_environment, reset_peak_memory
from specbench.decoding.clocks import peak_memory
from specbench.findings.review import (
    disturbances,
    find_disturbances,
    tokens_differ,
    warn_at_start,
    wide_intervals,
)
from specbench.results.run import Mismatch


def quiet(**changed: object) -> LoadSnapshot:
    base = LoadSnapshot(4, 0.5, 100.0, 5.0, 1000.0, 20.0, 3000.0, 16_000_000_000, 8_000_000_000, 0)
    return replace(base, **changed)  # type: ignore[arg-type]


# -- what machine it is ----------------------------------------------------------------------------


def test_the_environment_names_nobody_and_no_place():
    text = to_json(describe_environment()).decode()
    assert platform.node() not in text
    assert str(Path.home()) not in text
    assert os.sep not in text.replace("GNU/Linux", "")
    if len(getpass.getuser()) > 4:
        assert getpass.getuser() not in text


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_checkout_it_runs_from(tmp_path):
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x", *words], check=True)

    package = tmp_path / "package"
    package.mkdir()
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "x")
    (package / "_version.py").write_text("1")
    assert environment._git_commit(package) is None  # it lies in somebody else's checkout
    git("add", ".")
    git("commit", "-q", "-m", "x")
    commit = environment._git_commit(package)
    assert commit is not None
    assert len(commit) == 40
    (package / "_version.py").write_text("2")
    assert environment._git_commit(package) == f"{commit}+"


# -- how busy it is --------------------------------------------------------------------------------


def test_two_looks_tell_what_happened_between():
    before = load_snapshot()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    after = load_snapshot()
    assert after.own_s - before.own_s >= 0.25  # the clock of a process may tick in hundredths
    assert after.total_s > before.total_s
    assert after.busy_s >= before.busy_s
    assert 0 < after.available_bytes <= after.memory_bytes
    share, busy = after.steal_share(before), after.busy_elsewhere(before)
    assert share is None or 0 <= share <= 1
    assert busy is not None
    assert 0 <= busy <= after.cores


def test_shares_are_worked_out_from_differences():
    before = quiet()
    after = quiet(busy_s=130.0, steal_s=8.0, total_s=1100.0, own_s=40.0)
    assert after.steal_share(before) == 3.0 / 100.0
    assert after.busy_elsewhere(before) == (30.0 - 20.0) / (100.0 / 4)
    assert before.busy_elsewhere(before) is None
    assert before.steal_share(before) is None
    assert after.steal_share(quiet(steal_s=None)) is None
    assert quiet(busy_s=110.0, own_s=40.0, total_s=1100.0).busy_elsewhere(before) == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is that of the whole process")
def test_peak_memory_begins_anew():
    with mmap.mmap(-1, 200_000_000) as pages:  # a bytearray may get pages that malloc held already
        for start in range(0, len(pages), mmap.PAGESIZE):
            pages[start] = 1
        high = peak_memory("cpu")
    reset_peak_memory("cpu")
    if peak_memory("cpu") == high:
        pytest.skip("this kernel does not reset it")
    assert peak_memory("cpu") < high - 150_000_000


# -- what is doubtful ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (quiet(total_s=1100.0, busy_s=160.0), "machine-busy"),
        (quiet(total_s=1100.0, steal_s=7.5), "steal"),
        (quiet(frequency_mhz=2400.0), "frequency-drop"),
        (quiet(available_bytes=100_000_000), "memory-pressure"),
        (quiet(swapped_in_bytes=4096), "memory-pressure"),
        (quiet(stops=1), "stopped"),
    ],
)
def test_each_disturbance_has_its_warning_and_advice(after, expected):
    assert disturbances(quiet(), quiet(total_s=1100.0, busy_s=120.0, own_s=39.0), 3000.0) == []
    assert disturbances(quiet(), after, 3000.0) == [expected]
    (finding,) = find_disturbances(9, {expected: 1})
    assert (finding.id, finding.severity) == (expected, "warning")
    assert finding.text.endswith(" during 1 of 9 generations.")
    (rare,) = find_disturbances(99, {expected: 1, "<b>": 9})
    assert (rare.id, rare.severity) == ("hardly-disturbed", "note")
    assert (
        rare.text == finding.text.replace("9 gen", "99 gen").rstrip(".") + ": too few to change a conclusion."
    )


def test_a_machine_that_is_busy_before_the_sweep():
    assert not [*warn_at_start(quiet())]
    found = warn_at_start(quiet(load_average=4.5))
    assert [finding.text for finding in found] == [
        "The machine is busy: a load of 4.5 on 4 cores before it began."
    ]
    short = warn_at_start(quiet(available_bytes=1))
    assert [finding.id for finding in short] == ["memory-pressure.before"]


def test_wide_intervals():
    narrow, wide = Estimate(2.0, 1.81, 2.19, 9), Estimate(1.0, 0.5, 1.9, 9)
    assert not [*wide_intervals({"a": narrow})]
    (found,) = wide_intervals({"a": narrow, "c": wide})
    assert found.text == "Intervals wider than ±10%: 1 of 2; the widest is ±70% (c)."


TIE = Mismatch(
    config="c", prompt="p", turn=0, repeat=0, position=3, gap=0.01, gap_units=1.0, numerical_tie=True
)


def test_a_real_difference_outweighs_ties():
    real = structs.replace(TIE, prompt="q", position=7, gap=2.5, numerical_tie=False)
    assert not [*tokens_differ({}, 5)]
    (found,) = tokens_differ({"C": [TIE, real]}, 5)
    assert found.severity == "problem"
    assert found.text == (
        "C: tokens differ from plain decoding in 2 of 5 cases, first at token 7 of q (C); the logits of the two tokens"
        " are 2.5 apart there, more than rounding explains."
    )


def test_ties_of_all_configurations_are_told_at_once():
    found = [
        *tokens_differ({"C": [TIE, TIE], "D": [structs.replace(TIE, numerical_tie=None)], "E": [TIE]}, 5)
    ]
    assert [finding.severity for finding in found] == ["warning", "note"]
    assert found[1].text == (
        "2 configurations: tokens differ from plain decoding in 3 of 10 cases, first at token 3 of p (C); wherever they"
        " part, the logits of the two tokens tie within rounding."
    )
    (alone,) = tokens_differ({"C": [TIE]}, 5)
    assert "float32" in alone.remedy
    assert "leave out --cache" in next(tokens_differ({"C": [TIE]}, 5, rounded="int8")).remedy
    assert alone.text.startswith("C: tokens differ from plain decoding in 1 of 5 cases")
