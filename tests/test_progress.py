"""Progress of slow stages: lines where no terminal draws a bar, and the time that is left."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from specbench.cli import progress as module
from specbench.cli.progress import StageProgress


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "PATIENCE_S", 2.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    return clock


@pytest.mark.smoke
def test_slow_stages_are_printed_and_again_when_they_took_three_times_as_long(clock, capsys):
    with StageProgress(animated=False) as progress:
        progress.update("quick", 0, None)
        clock.now += 1.5
        progress.update("loading big", 0, 40)
        for _ in range(40):
            clock.now += 0.5
            progress.update("loading big", min(40, int(2 * (clock.now - 101.5))), 40)
        progress.update("measuring 9 generations", 0, 9, note="lookup γ=3")
        clock.now += 70
        progress.update("measuring 9 generations", 1, 9, note="plain")
        progress.update("measuring 9 generations", 2, 9)
        progress.update("packing big", 0, None)
        clock.now += 2
        progress.update("packing big", 0, None)
    assert capsys.readouterr().err.splitlines() == [
        "loading big ... 10%, 2 s, 18 s left",
        "loading big ... 30%, 6 s, 14 s left",
        "loading big ... 90%, 18 s, 2 s left",
        "measuring 9 generations: plain ... 11%, 1 min, 9 min left",
        "packing big ... 2 s",
    ]


@pytest.mark.parametrize("width", [60, 80])
def test_a_terminal_has_the_bar_in_one_line(clock, monkeypatch, width):
    screen = io.StringIO()
    made = Console(file=screen, force_terminal=True, width=width, _environ={"TERM": "xterm"})
    monkeypatch.setattr("rich.console.Console", lambda **_: made)
    with StageProgress(animated=False) as progress:
        progress.update("measuring 240 generations", 0, 240, note="qwen2.5-coder-0.5b (int4) γ=4")
        clock.now += 100
        progress.update("measuring 240 generations", 60, 240, note="qwen2.5-coder-0.5b (int4) γ=4")
    drawn = screen.getvalue()
    assert "25%" in drawn
    assert "2 min, 5 min left" in drawn
    assert "measuring 240" in drawn
