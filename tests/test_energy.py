"""Energy: counters that are read, and what runs, tables and reports say of it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from scripted_engine import make_sweep, measure

from specbench.bench.energy import EnergyMeter, nvml_counters, rapl_counters
from specbench.results.results import load_results
from specbench.results.summary import summarize
from specbench.show.report.content import make_report
from specbench.show.tables import summary_sheet


class Scripted:
    """A counter that grows by 3 joules every time it is read, up to its failure."""

    name = "scripted counter"

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at, self.read = fails_at, 0

    def joules(self) -> float:
        self.read += 1
        if self.read == self.fails_at:
            raise OSError("gone")
        return 3.0 * self.read


def domain(folder: Path, name: str, called: str, energy: int, most: int = 1_000_000) -> Path:
    made = folder / name
    made.mkdir()
    for file, value in (("name", called), ("energy_uj", energy), ("max_energy_range_uj", most)):
        (made / file).write_text(f"{value}\n")
    return made


@pytest.mark.smoke
def test_packages_are_read_and_counters_begin_again(tmp_path):
    package = domain(tmp_path, "intel-rapl:0", "package-0", 900_000)
    domain(tmp_path, "intel-rapl:0:0", "core", 5)
    domain(tmp_path, "intel-rapl:1", "psys", 5)
    (domain(tmp_path, "intel-rapl:2", "package-1", 5) / "energy_uj").unlink()
    (counter,) = rapl_counters(tmp_path)
    assert counter.name == "RAPL package-0"
    assert counter.joules() == 0.0
    (package / "energy_uj").write_text("950000\n")
    assert counter.joules() == pytest.approx(0.05)
    (package / "energy_uj").write_text("100000\n")
    assert counter.joules() == pytest.approx(0.2), "950,000 to 1,000,000, then 100,000"
    assert rapl_counters(tmp_path / "none") == []


class Library:
    """NVML with two GPUs, the second too old to count."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return self.code

    def nvmlDeviceGetCount_v2(self, count: object) -> int:  # noqa: N802
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: object) -> int:  # noqa: N802
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = index.value + 1
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: ctypes.c_void_p, millijoules: object) -> int:  # noqa: N802
        ctypes.cast(millijoules, ctypes.POINTER(ctypes.c_ulonglong))[0] = 4500
        return 0 if handle.value == 1 else 3


def test_gpus_are_read_if_they_count():
    (counter,) = nvml_counters(lambda _: Library())
    assert (counter.name, counter.joules()) == ("NVML GPU 0", 4.5)
    assert nvml_counters(lambda _: Library(code=9)) == []

    def missing(name: str) -> None:
        raise OSError(name)

    assert nvml_counters(missing) == []


def test_a_sweep_keeps_the_energy_of_each_generation(tmp_path):
    measure(tmp_path, make_sweep(max_new_tokens=5), energy=EnergyMeter([Scripted(), Scripted()]))
    results = load_results(tmp_path)
    assert (results.done["energy_j"] == 6.0).all()
    summary = summarize(results)
    assert [row.joules_per_token.value for row in summary.rows] == pytest.approx([6 / 5] * 3)
    assert summary.frame["joules_per_token"].tolist() == pytest.approx([1.2] * 3)
    sheet = summary_sheet(summary)
    assert [row[sheet.headings.index("J/token")] for row in sheet.rows] == ["1.20"] * 3
    method = dict(make_report(results, tmp_path.name, tmp_path).method)
    assert method["Energy"].startswith("J/token: joules of")


def test_requests_of_a_batch_share_their_groups_energy(tmp_path):
    sweep = make_sweep(batches=(3,), turns=1, max_new_tokens=5, repeats=1)
    measure(tmp_path, sweep, energy=EnergyMeter([Scripted()]))
    results = load_results(tmp_path)
    assert results.done["energy_j"].tolist() == pytest.approx([3.0 * 5 / 1000] * len(results.done))


def test_without_a_counter_it_is_said(tmp_path):
    measure(tmp_path / "a", make_sweep(), energy=EnergyMeter([]))
    results = load_results(tmp_path / "a")
    assert results.done["energy_j"].isna().all()
    assert "J/token" not in summary_sheet(summarize(results)).headings
    method = dict(make_report(results, "a", tmp_path).method)
    assert method["Energy"].startswith("No counter could be read")
    measure(tmp_path / "b", make_sweep(), energy=EnergyMeter([Scripted(fails_at=7)]))
    known = load_results(tmp_path / "b").generations["energy_j"]
    assert 0 < known.isna().sum() < len(known), "a counter that fails leaves out one generation"
    assert EnergyMeter([]).name is None


def test_servers_are_not_counted(tmp_path):
    measure(tmp_path, make_sweep(servers=("a",), turns=1), energy=EnergyMeter([Scripted()]))
    assert load_results(tmp_path).done["energy_j"].isna().all()
