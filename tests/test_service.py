"""Load as people have it: traces that are replayed, goodput within limits, and the cost of tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Cli, write_prompts
from scripted_engine import ScriptedEngine, make_sweep, new_store, quiet
from scripted_server import Manner, ScriptedServer, prompt_of, tokenizer
from stored_runs import described, line_of, read_lines, write_stored
from stored_runs import prompt_of as stored_prompt

from specbench.base.errors import UsageError
from specbench.bench.contexts import load_context_text
from specbench.bench.grid import make_groups
from specbench.bench.prompts import Prompt
from specbench.bench.runner import run_sweep
from specbench.bench.traces import Trace, read_trace
from specbench.results.goodput import Service, service_rows
from specbench.results.results import load_results
from specbench.results.summary import summarize
from specbench.rows import Condition, Row, Server
from specbench.show import tables

MOONCAKE = [
    {"timestamp": 27482, "input_length": 30, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 30535, "input_length": 20, "output_length": 3, "hash_ids": [0]},
    {"timestamp": 27482, "input_length": 4, "output_length": 2, "hash_ids": [3]},
]
AIPERF = [
    {"timestamp": 1000, "text_input": "Hello there", "output_length": 4, "session_id": "a"},
    {"delay": 50, "text_input": "And now?", "output_length": 4, "session_id": "a"},
    {"created_time": 2000.5, "input_tokens": 12, "output_tokens": 3},
]
BURST_GPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,API log
118,GPT-4,417,276,693,Conversation log
"""


def write_trace(path: Path, lines: list[dict[str, Any]] | str) -> Path:
    text = lines if isinstance(lines, str) else "".join(f"{json.dumps(line)}\n" for line in lines)
    path.write_text(text)
    return path


def times(trace: Trace) -> list[tuple[float, int, int]]:
    return [(each.at_s, each.prompt_tokens, each.answer_tokens) for each in trace.requests]


# -- traces ------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_three_forms_of_traces(tmp_path):
    mooncake = read_trace(str(write_trace(tmp_path / "m.jsonl", MOONCAKE)))
    assert times(mooncake) == [(0.0, 30, 5), (0.0, 4, 2), (pytest.approx(3.053), 20, 3)]
    aiperf = read_trace(str(write_trace(tmp_path / "a.jsonl", AIPERF)))
    assert times(aiperf) == [(0.0, 0, 4), (pytest.approx(1.0005), 12, 3)]
    assert (aiperf.requests[0].text, aiperf.left_out) == ("Hello there", 1)
    burst = read_trace(str(write_trace(tmp_path / "b.csv", BURST_GPT)))
    assert (times(burst), burst.left_out) == ([(0.0, 472, 18), (113.0, 417, 276)], 1)
    fast = read_trace(f"{tmp_path / 'b.csv'}:speed=2.5")
    assert times(fast)[1][0] == pytest.approx(113 / 2.5)
    assert str(fast.arrivals) == f"{burst.arrivals}×2.5" != str(burst.arrivals)
    assert str(tmp_path) not in str(burst.arrivals)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "has none of the known forms"),
        ("", "has none of the known forms"),
        ('{"timestamp": 1', "Line 1 of the trace .* is no JSON object"),
        ('{"timestamp": -5, "input_length": 3, "output_length": 3}', "is no number, or is negative"),
        ('{"timestamp": "soon", "input_length": 3, "output_length": 3}', "is no number, or is negative"),
        ('{"timestamp": 5, "input_length": 3}', "no request with a time and an answer"),
        (BURST_GPT + "200,GPT-4,many,3,3,API log\n", "Line 5 of the trace .* is no number"),
    ],
)
def test_bad_traces(tmp_path, text, said):
    with pytest.raises(UsageError, match=said):
        read_trace(str(write_trace(tmp_path / "bad", text)))
    with pytest.raises(UsageError, match="No such file"):
        read_trace(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="speed of a trace is 0"):
        read_trace("x.csv:speed=0")


def test_prompts_are_taken_in_turn_and_cut_into_windows(tmp_path):
    lines = [{"timestamp": 500 * n, "input_length": 5 + n, "output_length": 2} for n in range(100)]
    trace = read_trace(str(write_trace(tmp_path / "long.jsonl", lines)))
    chosen = [Prompt(f"p-{n}", f"kind-{n}", ("one two three four five six " * (n + 1),)) for n in range(3)]
    count = ScriptedEngine().count_tokens
    prompts, notes = trace.prompts(chosen, load_context_text(), count, limit=100)
    assert len(prompts) == 94, "some are longer than 100 tokens with their answers"
    assert notes == [
        "The trace has 94 requests within 50 s.",
        "1 of their prompts are longer than in it.",
        "Left out: 6 longer than the model or the text for prompts.",
    ]
    assert {each.category for each in prompts[:7]} == {"kind-0"}, "others are too long"
    assert {each.category for each in prompts[20:]} == {"kind-0", "kind-1", "kind-2"}
    groups = make_groups(prompts, trace.arrivals)
    assert [len(each.prompts) for each in groups] == [24, 24, 24, 22]
    assert sum((each.prompts for each in groups), ()) == tuple(each.id for each in prompts)
    assert all(each.times == tuple(0.5 * n for n in range(len(each.times))) for each in groups)
    assert len(make_groups(prompts[:30], trace.arrivals)) == 1


def test_a_trace_decides_when_requests_come_and_how_long_they_are(tmp_path):
    trace = read_trace(str(write_trace(tmp_path / "m.jsonl", MOONCAKE)))
    engine = ScriptedEngine()
    prompts, _ = trace.prompts([Prompt("p", "chat", ("one two",))], load_context_text(), engine.count_tokens)
    sweep = make_sweep(
        prompts, batch=(2,), arrivals=(str(trace.arrivals),), turns=1, repeats=1, warmup=0, max_new_tokens=4,
    )  # fmt: skip
    from dataclasses import replace

    sweep = replace(sweep, text=load_context_text())
    run_sweep(sweep, new_store(tmp_path / "run", sweep), engine, snapshot=quiet)
    assert {name for name, _ in engine.workloads} == {each.id for each in sweep.configs}
    for name, workload in engine.workloads:
        assert name.endswith(f",b=2,{trace.arrivals}")
        assert (workload.clients, [*workload.times]) == (None, [0.0, 0.0, pytest.approx(3.053)])
        assert [each.tokens for each in workload.requests] == [5, 2, 3], "as in the trace, but at most 4"
    lengths = [
        each.limited(sweep.options.decoding).max_new_tokens for each in engine.workloads[0][1].requests
    ]
    assert lengths == [4, 2, 3]


@pytest.fixture
def sweep(cli, tmp_path, monkeypatch) -> Cli:
    monkeypatch.chdir(tmp_path)
    write_prompts(tmp_path / "mine.jsonl", {f"a-{i}": [f"Question {i}?"] for i in range(4)})
    return lambda *words, **more: cli("sweep", "--prompts", "./mine.jsonl", "--repeats", 1, *words, **more)


def test_servers_replay_a_trace(sweep, cli, models, tmp_path):
    lines = [{**each, "timestamp": each["timestamp"] / 1000} for each in MOONCAKE]
    write_trace(tmp_path / "m.jsonl", [*lines, {"timestamp": 28, "text_input": "Hello", "output_length": 6}])
    asked = ["--trace", "m.jsonl:speed=2", "--target", models / "target", "--api", "completions"]
    views = ["--slo", "ttft=9s,tpot=900ms", "--price-per-hour", 3.6]
    manner = {"owner": "llamacpp", "named": True}
    with ScriptedServer(Manner(**manner)) as one, ScriptedServer(Manner(**manner, per_piece=3)) as two:
        servers = ["--server", f"base={one.url}", "--server", f"fast={two.url}"]
        result = sweep(*servers, *asked, *views, "--out", "run")
        assert result.code == 0, result.err
        assert "The trace has 4 requests within 0 s" in " ".join(result.err.split())
        sent = {prompt_of(body): body["max_tokens"] for body in one.asked if "model" in body}
    lengths = {len(tokenizer()(text)["input_ids"]): tokens for text, tokens in sent.items()}
    assert lengths.items() >= {30: 5, 20: 3}.items()
    assert sent["Hello"] == 6
    (line,) = [
        each for each in read_lines(Path("run")) if each["config"].startswith("fast,") and not each["warmup"]
    ]
    assert line["clients"] is None
    assert [each["new_tokens"] for each in line["requests"]] == [5, 2, 6, 3]
    assert "goodput" in result.out
    done = cli("report", "run", *views)
    assert done.code == 0, done.err
    report = (tmp_path / "run" / "report.md").read_text()
    assert "Goodput and cost" in report
    assert "ttft 9000 ms, tpot 900 ms" in report
    assert "Goodput and cost" not in (cli("report", "run"), (tmp_path / "run" / "report.md").read_text())[1]


def test_models_replay_a_trace(sweep, models, tmp_path):
    write_trace(tmp_path / "m.jsonl", MOONCAKE)
    asked = ["--target", models / "target", "--dtype", "float32", "--drafter", "lookup", "--gamma", 2]
    asked += ["--draft-policy", "fixed", "--trace", "m.jsonl", "--out", "run", "--ignore-eos"]
    sweep(*asked).refused(2, "needs a batch")
    done = sweep(*asked, "--batch", 2, "--slo", "e2el=9s")
    assert done.code == 0, done.err
    assert "over plain decoding" in done.out
    lines = [each for each in read_lines(Path("run")) if not each["warmup"]]
    assert len(lines) == 2
    for line in lines:
        assert [each["new_tokens"] for each in line["requests"]] == [5, 2, 3], line["error"]
        assert [each["arrived_s"] for each in line["requests"]] == [0.0, 0.0, pytest.approx(3.053)]
        assert line["requests"][0]["prompt_tokens"] == 30
    (summary,) = [each for each in summarize(load_results("run")).rows if not each.is_baseline]
    assert summary.identical_share == 1.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--trace", "none.jsonl"), "No such file"),
        (("--slo", "ttft=500"), "'ttft=500' is no limit of latency"),
        (("--slo", "ttft=1s,ttft=2s"), "given twice"),
        (("--slo", "itl=3ms"), "is no limit of latency"),
        (("--price-per-hour", 0), "price per hour is 0"),
        (("--arrivals", "trace:x"), "Name its file with --trace"),
    ],
)
def test_what_cannot_be_asked_for(sweep, words, said):
    sweep("--server", "a=http://127.0.0.1:9/v1", *words).refused(2, said)


# -- goodput and cost --------------------------------------------------------------------------------

LOOP = Condition(batch=2, arrivals="closed:2")
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


@pytest.mark.smoke
def test_goodput_and_cost_by_hand(served):
    results = load_results(served)
    service = Service.of("ttft=500ms, tpot=0.15s", 7.2)
    assert service is not None
    base, fast = service_rows(results, service)
    # Two clients, so half of the sum of latencies. base: 3, 4 and 3 s / 2; fast: 2, 2 and 2 s / 2.
    assert [row.requests for row in (base, fast)] == [6, 6]
    assert [row.rate.value for row in (base, fast)] == pytest.approx([6 / 5, 6 / 3])
    assert [row.within for row in (base, fast)] == pytest.approx([3 / 6, 5 / 6])
    assert [row.goodput.value for row in (base, fast)] == pytest.approx([3 / 5, 5 / 3])
    assert fast.goodput_ratio.value == pytest.approx((5 / 3) / (3 / 5))
    assert math.isnan(base.goodput_ratio.value), "it is the baseline"
    # 56 tokens each, at 0.002 a second.
    assert base.cost.value == pytest.approx(0.002 * 5 / 56 * 1e6)
    assert fast.cost.value == pytest.approx(0.002 * 3 / 56 * 1e6)
    assert fast.cost_ratio.value == pytest.approx(3 / 5)
    assert fast.cost_ratio.low is not None
    assert fast.cost_ratio.low < 3 / 5
    whole = service_rows(results, Service({"e2el": 1.45}))[1]
    assert (whole.within, whole.cost.value == whole.cost.value) == (1.0, False)


def test_of_goodput_and_cost_only_what_was_asked_for_is_shown(served):
    results = load_results(served)

    def headings(slo: str | None, price: float | None) -> list[str]:
        service = Service.of(slo, price)
        assert service is not None
        return tables.service_sheet(service_rows(results, service), service, "base").headings[3:]

    assert headings("ttft=1s", None) == ["within", "goodput", "goodput ×"]
    assert headings(None, 2.5) == ["cost/M", "cost ×"]
    assert len(headings("ttft=1s", 2.5)) == 5
    assert Service.of(None, None) is None
    assert summarize(results).over == "base"
