"""Goodput within limits of latency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stored_runs import described, kept_run, line_of, read_lines, write_lines, write_stored
from stored_runs import prompt_of as stored_prompt

from specbench.results.results import load_results
from specbench.results.summary import Summary, parse_limits
from specbench.rows import Condition, Row, Server
from specbench.specs.sweeps import Closed


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ("ttft=500", "'ttft=500' is no limit of latency"),
        ("ttft=1s,ttft=2s", "given twice"),
        ("itl=3ms", "is no limit of latency"),
    ],
)
def test_what_cannot_be_asked_for(cli, tmp_path, limits, said):
    cli("report", tmp_path, "--slo", limits).refused(2, said)


def test_requests_one_after_the_other_have_no_goodput(cli, tmp_path):
    run = kept_run("qwen2.5-coder-int4")
    cli("report", run, "--out", tmp_path, "--slo", "ttft=1s").refused(2, "side by side", "--batch")


LOOP = Condition(batch=2, arrivals=Closed(2))
ROWS = [Row(Server(name, "base"), LOOP) for name in ("base", "fast")]


def group_of(row: Row, name: str, requests: list[tuple[float, float, int]]) -> dict[str, Any]:
    """A group of two clients: of each request TTFT, the time after that, and its tokens."""
    steps = {
        name: [] for name in (
            "drafted", "tested", "accepted", "emitted", "draft_s", "draft_prefill_s", "verify_s", "accept_s",
            "rollback_s", "other_s", "nodes", "passes", "forced", "mask_s", "expected_acceptance",
        )
    }  # fmt: skip
    server = {"text": "", "counted_by": "usage", "pieces": 2, "bursts": 2}
    return line_of(
        row.id, name, status="ok", error=None, category=None, clients=2,
        seconds=9.0, tokens=100,
        requests=[
            {
                "prompt": f"a-{n}", "category": "a", "prompt_tokens": 5, "new_tokens": tokens, "first_tokens": 1,
                "token_ids": [], "finish_reason": "length", "ttft_s": ttft, "prefill_s": ttft, "decode_s": rest,
                "total_s": ttft + rest, "arrived_s": 0.0, "queued_s": 0.0, "steps": steps, "server": server,
            }
            for n, (ttft, rest, tokens) in enumerate(requests)
        ],
    )  # fmt: skip


@pytest.fixture
def served(tmp_path) -> Path:
    """Three groups of two servers."""
    lines = [
        group_of(ROWS[0], "group-1", [(0.4, 1.0, 11), (0.6, 1.0, 11)]),  # the second starts too late
        group_of(ROWS[0], "group-2", [(0.4, 2.0, 11), (0.4, 1.2, 1)]),  # 200 ms per token; only one token
        group_of(ROWS[0], "group-3", [(0.4, 1.0, 11), (0.6, 1.0, 11)]),
        group_of(ROWS[1], "group-1", [(0.3, 0.5, 11), (0.3, 0.9, 11)]),
        group_of(ROWS[1], "group-2", [(0.4, 0.8, 11), (0.6, 0.2, 1)]),
        group_of(ROWS[1], "group-3", [(0.3, 0.5, 11), (0.3, 0.9, 11)]),
    ]
    return write_stored(tmp_path / "run", described(ROWS, map(stored_prompt, ("a-0", "a-1"))), lines)


LIMITS = parse_limits("ttft=500ms, tpot=0.15s")


@pytest.mark.smoke
def test_goodput_by_hand(served):
    base, fast = Summary(load_results(served), LIMITS).rows
    # Two clients, so half of the sum of latencies. base: 3, 4 and 3 s / 2; fast: 2, 2 and 2 s / 2.
    assert [row.goodput.value for row in (base, fast)] == pytest.approx([3 / 5, 5 / 3])
    assert Summary(load_results(served), {"e2el": 1.45}).rows[1].goodput.value == pytest.approx(6 / 3)
    # A group that failed has no time.
    lines = read_lines(served)
    lines[4] = line_of(ROWS[1].id, "group-2", status="failed", error="gone")
    write_lines(served, lines)
    fast = Summary(load_results(served), LIMITS).rows[1]
    assert fast.goodput.value == pytest.approx(4 / 2)
