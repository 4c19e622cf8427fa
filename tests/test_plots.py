"""Figures: that they show the figures of the tables, legibly, and refuse what cannot be shown."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from stored_runs import (
    DRAFTERS,
    Drafter,
    change_run,
    write_lines,
    write_run,
)

from specbench.cli import run as command
from specbench.results.results import Results, load_results
from specbench.show import plots
from specbench.show.plots import canvas

NOT_CHAINS = {"batches", "contexts"}
CHAINS = [name for name in plots.FIGURES if name not in NOT_CHAINS]
LONG = Drafter("an-organization/with-a-rather-long-model-name-$1B$_{x}-[red]-Int4", 0.7, 0.3)


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("results") / "big"
    return write_run(path, gammas=(1, 2, 4, 8), policies=("egag",), transformers_row=True, tokens=48)


@pytest.fixture(scope="module")
def df(big) -> Results:
    return load_results(big)


@pytest.fixture(scope="module")
def draw(request) -> Callable[[str], dict[str, Figure]]:
    """All figures of a fixture's run, drawn once; nobody changes them."""
    return cache(lambda run: plots.draw_figures(request.getfixturevalue(run))[0])


@pytest.fixture(scope="module")
def drawn(draw) -> dict[str, Figure]:
    return draw("df")


@pytest.fixture(scope="module")
def summary(df) -> pd.DataFrame:
    return df.table().set_index("config")


RULES = ("auto", "egag", "confidence", "entropy-bound", "svip", "heuristic")
SMALL: dict[str, Any] = {"drafters": DRAFTERS[:1], "gammas": (2,), "categories": ("chat",), "tokens": 16}


@pytest.fixture(scope="module")
def rules(tmp_path_factory) -> pd.DataFrame:
    """One drafter with many rules, one run of one prompt in a category."""
    path = tmp_path_factory.mktemp("results") / "rules"
    options: dict[str, Any] = {"gammas": (2, 4), "policies": RULES, "repeats": 1, "prompts_per_category": 1}
    return load_results(write_run(path, drafters=DRAFTERS[:1], tokens=48, **options))


@pytest.fixture
def tiny(tmp_path) -> Path:
    path = tmp_path / "tiny"
    return write_run(
        path, drafters=(LONG,), gammas=(2, 4), categories=("chat",), prompts_per_category=3, tokens=32
    )


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text) if text.get_text())


class TestContent:
    def test_lines_are_the_summary(self, drawn, summary):
        axes = drawn["speedup"].axes[0]
        found = [tuple(np.round(line.get_ydata(), 9)) for line in axes.lines if len(line.get_xdata()) == 4]
        for drafter in DRAFTERS:
            expected = summary.loc[[f"{drafter.name}@{gamma}" for gamma in (1, 2, 4, 8)], "speedup"]
            assert tuple(np.round(expected.to_numpy(), 9)) in found
        segments = [
            (round(path.vertices[0][1], 9), round(path.vertices[1][1], 9))
            for collection in axes.collections
            for path in collection.get_paths()
        ]
        row = summary.loc["lookup@4"]
        assert (round(row["speedup_low"], 9), round(row["speedup_high"], 9)) in segments

    def test_a_series_has_one_mark_in_all_figures(self, drawn):
        """Its color and marker, hollow for an adaptive policy."""
        marks: dict[str, set[tuple[Any, ...]]] = {}
        for figure in drawn.values():
            for axes in figure.axes:
                for line in axes.lines:
                    name = str(line.get_label()).partition(", γ=")[0]
                    if line.get_marker() in canvas.MARKERS and not name.startswith("_"):
                        face = line.get_markerfacecolor() == "white"
                        marks.setdefault(name, set()).add((line.get_color(), line.get_marker(), face))
        assert len(marks) == 5
        assert all(len(each) == 1 for each in marks.values())
        assert len({mark for each in marks.values() for mark in each}) == 5
        assert [name for name, ((*_, hollow),) in marks.items() if hollow] == [
            name for name in marks if "egag" in name
        ]

    def test_bars_add_up_to_the_time_per_token(self, drawn, summary):
        (axes,) = drawn["time"].axes
        ends: dict[float, float] = {}
        for bar in axes.patches:
            ends[bar.get_y()] = max(ends.get(bar.get_y(), 0.0), bar.get_x() + bar.get_width())
        named = [label.get_text() for label in axes.get_yticklabels()]
        assert named[5:9] == [f"self:int8 γ={gamma}" for gamma in (1, 2, 4, 8)], "after a policy"
        speeds = summary.loc[[f"self:int8@{gamma}" for gamma in (1, 2, 4, 8)], "tokens_per_second"]
        assert [ends[y] for y in sorted(ends)][5:9] == pytest.approx((1000 / speeds).tolist(), rel=0.02)
        (plain,) = (line.get_xdata()[0] for line in axes.lines)
        assert plain == pytest.approx(1000 / summary.loc["plain", "tokens_per_second"])


class TestLooks:
    @pytest.mark.parametrize("run", ["df", "rules"])
    def test_nothing_overlaps_or_is_cut_off(self, draw, run):
        drawn = draw(run)
        assert {*drawn} == {*CHAINS}
        for name, figure in drawn.items():
            renderer = FigureCanvasAgg(figure).get_renderer()
            figure.draw_without_rendering()  # which puts the numbers beside the axes
            hidden = hidden_ticks(figure)
            shown = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
            visible = (text for text in shown if text not in hidden)
            boxes = [(text.get_text(), Text.get_window_extent(text, renderer)) for text in visible]
            width, height = figure.get_size_inches() * figure.dpi
            for text, box in boxes:
                inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
                assert inside or not box.width, f"{name}: {text!r}"
            for (one, first), (other, second) in itertools.combinations(boxes, 2):
                wide = min(first.x1, second.x1) - max(first.x0, second.x0)
                high = min(first.y1, second.y1) - max(first.y0, second.y0)
                assert wide < 1 or high < 1, f"{name}: {one!r} and {other!r}"

    def test_names_are_not_mathematics(self, tiny):
        figure = plots.draw_figures(load_results(tiny), ["time"])[0]["time"]
        assert "$" in figure.get_suptitle()
        assert not any(text.get_parse_math() for text in figure.findobj(Text) if "$" in text.get_text())


def hidden_ticks(figure: Figure) -> list[Text]:
    """Labels of ticks outside the limits, which are not drawn."""
    found = []
    for axes in figure.axes:
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not min(limits) <= tick.get_loc() <= max(limits):
                    found += [tick.label1, tick.label2]
    return found


class TestSmallAndOdd:
    @pytest.mark.parametrize("kind", ["one run", "many drafters"])
    def test_draws(self, tmp_path, kind):
        many = tuple(Drafter(f"drafter-{i}", 0.1 * i, 0.1) for i in range(1, 10))
        options: dict[str, Any] = {
            "one run": {"drafters": (LONG,), "gammas": (4,), "prompts_per_category": 1, "repeats": 1},
            "many drafters": {"drafters": many, "gammas": (16,), "costs": False},
        }[kind]
        options = {"categories": ("chat",), "gammas": (2, 4), "tokens": 32} | options
        drawn, skipped = plots.draw_figures(load_results(write_run(tmp_path / "r", **options)))
        assert {*drawn, *skipped} == set(plots.FIGURES)
        for figure in drawn.values():
            assert plots.figure_bytes(figure, "png", dpi=30)
        if kind == "one run":
            assert "no intervals" in texts(drawn["speedup"])

    @pytest.mark.parametrize("kind", plots.FORMATS)
    def test_formats_and_repeatable_bytes(self, tmp_path, drawn, kind):
        figure = drawn["positions"]
        first, second = tmp_path / f"1.{kind}", tmp_path / f"2.{kind}"
        plots.save_figure(figure, first)
        plots.save_figure(figure, second)
        assert first.read_bytes() == second.read_bytes()
        starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
        assert first.read_bytes().startswith(starts[kind])
        if kind == "svg":
            ET.parse(first)  # noqa: S314


class TestCommand:
    @pytest.mark.smoke
    def test_a_run(self, tiny, capsys):
        assert command(["plot", str(tiny), "--only", "speedup", "--only", "time"]) == 0
        written = capsys.readouterr().out.splitlines()
        assert written == [str(tiny / "plots" / "speedup.png"), str(tiny / "plots" / "time.png")]
        assert all(Path(path).stat().st_size > 5000 for path in written)

    def test_of_a_folder_the_newest_run(self, tmp_path):
        for name in ("a", "b"):
            write_run(tmp_path / name, run_id=name, **SMALL)
        change_run(tmp_path / "b", created="2025-01-02T00:00:00Z")
        words = ["--only", "speedup", "--format", "svg"]
        assert command(["plot", str(tmp_path), *words]) == 0
        assert [path.parent.parent.name for path in tmp_path.glob("*/plots/speedup.svg")] == ["b"]
        assert command(["plot", str(tmp_path / "a"), *words, "--out", str(tmp_path / "figures")]) == 0
        assert (tmp_path / "figures" / "speedup.svg").exists()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["missing"], "does not exist"),
            (["empty-run"], "nothing to plot"),
            (["run", "--only", "nonsense"], "There is no figure 'nonsense'"),
            (["run", "--format", "gif"], "gif"),
            (["plain"], "no speculative configuration"),
            ([], "RUN"),
        ],
    )
    def test_refusals(self, tmp_path, monkeypatch, capsys, arguments, message):
        for name in ("run", "empty-run"):
            write_run(tmp_path / name, **SMALL)
        write_run(tmp_path / "plain", drafters=(), categories=("chat",))
        write_lines(tmp_path / "empty-run", [])
        monkeypatch.chdir(tmp_path)
        assert command(["plot", *arguments]) == 2
        said = capsys.readouterr()
        assert message in said.err
        assert len(said.err.splitlines()) == 1
        assert said.out == ""
        assert not list(tmp_path.glob("*/plots"))
