"""Files of aiperf, guidellm and `vllm bench serve`: what is read, what is compared, what is said, what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Cli
from stored_runs import write_exact

from specbench.results.compare_others import compare_loads
from specbench.results.others import FIGURES, LoadFigures, own_figures, read_other
from specbench.results.results import load_results

AIPERF = {
    "schema_version": "1.4",
    "aiperf_version": "0.13.0",
    "request_count": {"unit": "requests", "avg": 8.0},
    "error_request_count": {"unit": "requests", "avg": 1.0},
    "request_throughput": {"unit": "requests/sec", "avg": 0.5},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 20.0},
    "time_to_first_token": {"unit": "ms", "avg": 200.0, "p50": 180.0, "p99": 400.0},
    "inter_token_latency": {"unit": "ms", "avg": 40.0, "p50": 38.0, "p99": 60.0},
    "request_latency": {"unit": "ms", "avg": 1800.0, "p50": 1700.0, "p99": 2500.0},
    "input_sequence_length": {"unit": "tokens", "avg": 32.0},
    "output_sequence_length": {"unit": "tokens", "avg": 41.0},
    "total_usage_accepted_prediction_tokens": {"unit": "tokens", "avg": 30.0},
    "total_usage_rejected_prediction_tokens": {"unit": "tokens", "avg": 90.0},
    "input_config": {"models": {"items": [{"name": "tiny"}]}},
}


def summary(mean: float, median: float, p99: float) -> dict[str, Any]:
    """A distribution of guidellm."""
    return {
        "successful": {"mean": mean, "median": median, "percentiles": {"p50": median, "p99": p99}},
        "errored": None,
    }


def guidellm(*clients: int) -> dict[str, Any]:
    """A report of guidellm with a load for each number of clients, which make everything slower."""
    return {
        "metadata": {"version": 2, "guidellm_version": "0.8.1"},
        "benchmarks": [
            {
                "config": {"strategy": {"type_": "concurrent", "streams": n}, "backend": {"model": "tiny"}},
                "metrics": {
                    "request_totals": {"successful": 8, "errored": 1, "incomplete": 0, "total": 9},
                    "requests_per_second": summary(0.5 * n, 0.5 * n, 0.5 * n),
                    "output_tokens_per_second": summary(20.0 * n, 20.0, 21.0),
                    "time_to_first_token_ms": summary(100.0 * n, 90.0 * n, 200.0 * n),
                    "inter_token_latency_ms": summary(20.0 * n, 19.0 * n, 30.0 * n),
                    "request_latency": summary(0.9 * n, 0.85 * n, 1.25 * n),
                    "prompt_token_count": summary(32.0, 32.0, 32.0),
                    "output_token_count": summary(41.0, 41.0, 41.0),
                },
            }
            for n in clients
        ],
    }


VLLM = {
    "date": "20261125-140000", "backend": "openai", "label": None, "model_id": "tiny", "num_prompts": 9,
    "request_rate": "inf", "max_concurrency": 2, "duration": 16.0, "completed": 8, "total_input_tokens": 256,
    "total_output_tokens": 328, "request_throughput": 0.5, "output_throughput": 20.5, "total_token_throughput": 36.5,
    "mean_ttft_ms": 200.0, "median_ttft_ms": 180.0, "std_ttft_ms": 9.0, "p99_ttft_ms": 400.0, "mean_tpot_ms": 40.0,
    "median_tpot_ms": 38.0, "p99_tpot_ms": 60.0, "mean_itl_ms": 80.0, "spec_decode_acceptance_rate": 25.0,
    "spec_decode_acceptance_length": 2.0, "spec_decode_num_drafts": 40,
}  # fmt: skip

SHARED = {
    "requests": 8.0, "failed requests": 1.0, "requests/s": 0.5, "TTFT (ms), mean": 200.0, "TTFT (ms), median": 180.0,
    "TTFT (ms), p99": 400.0, "per token (ms), mean": 40.0, "per token (ms), median": 38.0,
    "per token (ms), p99": 60.0, "prompt tokens, mean": 32.0, "output tokens, mean": 41.0,
}  # fmt: skip


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    """A file of each tool."""
    found = {}
    for name, content in {"aiperf": AIPERF, "guidellm": guidellm(2), "vllm": VLLM}.items():
        found[name] = tmp_path / f"{name}.json"
        found[name].write_text(json.dumps(content))
    return found


def only(path: Path) -> LoadFigures:
    (found,) = read_other(path)
    return found


@pytest.mark.smoke
def test_each_quantity_is_read_under_one_name(files):
    aiperf, guide, vllm = (only(files[name]) for name in ("aiperf", "guidellm", "vllm"))
    assert [each.tool for each in (aiperf, guide, vllm)] == [
        "aiperf 0.13.0",
        "guidellm 0.8.1",
        "vllm bench serve",
    ]
    assert {each.model for each in (aiperf, guide, vllm)} == {"tiny"}
    latency = {"latency (ms), mean": 1800.0, "latency (ms), median": 1700.0, "latency (ms), p99": 2500.0}
    assert aiperf.figures == {**SHARED, **latency, "output tokens/s": 20.0, "accepted (%)": 25.0}
    assert guide.figures == {**SHARED, **latency, "requests/s": 1.0, "output tokens/s": 40.0}
    assert vllm.figures == {**SHARED, "output tokens/s": 20.5, "tokens per step": 2.0, "accepted (%)": 25.0}
    assert (guide.label, vllm.label) == ("concurrent 2", "2 clients")
    for each in (aiperf, guide, vllm):
        assert [*each.figures] == [name for name in FIGURES if name in each.figures]


def test_a_file_may_hold_several_loads(tmp_path):
    path = tmp_path / "benchmarks.json"
    path.write_text(json.dumps(guidellm(1, 4)))
    assert [each.label for each in read_other(path)] == ["concurrent 1", "concurrent 4"]
    path.write_text("\n".join(json.dumps({**VLLM, "label": name}) for name in ("one", "two")))
    assert [each.label for each in read_other(path)] == ["one", "two"]


def test_our_own_figures_have_the_same_names(tmp_path):
    """Two configurations that take 1 s for the first token and then 10 or 20 tokens per second."""
    run = write_exact(
        tmp_path / "run",
        {"plain": {"a-1": [10.0], "a-2": [10.0]}, "lookup@4": {"a-1": [20.0], "a-2": [20.0]}},
    )
    results = load_results(run)
    plain, lookup = own_figures(results)
    assert (plain.tool, plain.label, lookup.label) == ("specbench", "plain", "lookup γ=4")
    row = results.done[results.done["config"] == "plain"].iloc[0]
    per_token = 1000.0 * (row["total_s"] - row["ttft_s"]) / (row["new_tokens"] - 1)
    assert plain.figures["requests"] == 2.0
    assert plain.figures["per token (ms), median"] == pytest.approx(per_token) == pytest.approx(100.0)
    assert plain.figures["per token (ms), p99"] / lookup.figures["per token (ms), p99"] == pytest.approx(
        2.0, rel=0.2
    )
    assert plain.figures["output tokens/s"] == pytest.approx(row["new_tokens"] / row["total_s"])
    assert plain.figures["tokens per step"] == 1.0


def test_loads_are_compared_by_label_and_without_verdicts():
    one, four, other = (
        LoadFigures("t", name, "m", {"requests/s": value})
        for name, value in (("1", 2.0), ("4", 3.0), ("x", 4.0))
    )
    both = compare_loads(([one, four], [four, one]), ("A", "B"))
    assert [(pair.a.label, pair.ratios["requests/s"]) for pair in both.pairs] == [("1", 1.0), ("4", 1.0)]
    assert [
        pair.ratios["requests/s"] for pair in compare_loads(([one, four], [other]), ("A", "B")).pairs
    ] == [0.5, 0.75]
    assert "no intervals" in both.notes[1]
    assert "in turns" in both.notes[2]


def test_the_command_compares_files_of_two_tools(cli: Cli, files):
    done = cli("compare", files["aiperf"], files["vllm"], "--json")
    found = json.loads(done.out)
    (pair,) = found["pairs"]
    assert pair["ratios"]["output tokens/s"] == pytest.approx(20.0 / 20.5)
    assert pair["ratios"]["accepted (%)"] == 1.0
    assert all(math.isfinite(value) for value in pair["ratios"].values())
    text = cli("compare", files["guidellm"], files["vllm"]).out
    assert "guidellm 0.8.1, concurrent 2 / vllm bench serve, 2 clients" in text
    assert "Only one side reports drafts." in text
    assert "Different tool" in text
    assert (
        "| per token (ms), mean | 40.0 |" in cli("compare", files["aiperf"], files["vllm"], "--markdown").out
    )


def test_files_are_compared_with_runs_and_shown_beside_them(cli: Cli, files, tmp_path):
    run = write_exact(tmp_path / "run", {"plain": {"a-1": [10.0]}, "lookup@4": {"a-1": [20.0]}})
    text = cli("compare", run, files["vllm"], "--a", "plain").out
    assert "specbench, plain / vllm bench serve, 2 clients" in text
    assert "counts tokens per step over the steps that drafted" in " ".join(text.split())
    assert cli("report", run, files["vllm"], files["guidellm"], "--out", tmp_path / "out").code == 0
    report = (tmp_path / "out" / "report.md").read_text()
    assert "## Other tools" in report
    assert "| specbench: lookup γ=4 |" in report
    assert "| guidellm 0.8.1: concurrent 2 (guidellm.json) |" in report
    assert "Other tools" in (tmp_path / "out" / "report.html").read_text()


def test_a_folder_of_aiperf_stands_for_its_file(cli: Cli, files, tmp_path):
    (tmp_path / "artifacts").mkdir()
    files["aiperf"].rename(tmp_path / "artifacts" / "profile_export_aiperf.json")
    assert cli("compare", tmp_path / "artifacts", files["vllm"]).code == 0


BAD = {
    "not JSON": ("{", "is not JSON"),
    "not text": (b"\xff\xfe\x00", "is not JSON"),
    "nested too deep": ("[" * 200_000, "is not JSON"),
    "NaN": (json.dumps({**VLLM, "mean_ttft_ms": math.nan}), "is not JSON"),
    "another tool's": ('{"a": 1}', "is no file of aiperf"),
    "a list": ("[1]", "is no file of aiperf"),
    "a number": ("3", "is no file of aiperf"),
    "empty": ("", "is no file of aiperf"),
    "of two tools": (f"{json.dumps(VLLM)}\n{json.dumps(AIPERF)}", "is no file of aiperf"),
    "negative": (json.dumps({**VLLM, "mean_ttft_ms": -1}), "is negative or infinite"),
    "too large": (json.dumps(VLLM).replace("0.5", "1e999"), "is negative or infinite"),
    "an integer too large": (json.dumps({**VLLM, "mean_ttft_ms": 10**400}), "is negative or infinite"),
    "no answers": (json.dumps({**VLLM, "completed": 0}), "No request"),
    "no benchmarks": (json.dumps(guidellm()), "No request"),
    "ill-typed": (
        json.dumps({"metadata": 1, "benchmarks": [3, {"metrics": []}, {"config": 1}]}),
        "No request",
    ),
}


def test_a_rate_too_large_for_a_float_is_no_part_of_a_loads_name(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({**VLLM, "request_rate": 10**400}))
    (load,) = read_other(tmp_path / "a.json")
    assert load.label == "2 clients"


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_refused_in_a_sentence(cli: Cli, tmp_path, files, what):
    content, said = BAD[what]
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = cli("compare", path, files["vllm"])
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert "Traceback" not in done.err


def test_what_needs_generations_is_refused(cli: Cli, files, tmp_path):
    a, b = files["aiperf"], files["vllm"]
    for words in (["--measure", "speedup"], ["--fail-below", "0.9"], ["--categories"]):
        done = cli("compare", a, b, *words)
        assert done.code == 2
        assert f"{words[0]} needs generations" in done.err
    assert "Name two" in cli("compare", a).err
    assert "There is no 'x'" in cli("compare", a, b, "--a", "x").err
    assert "Name a run in addition to them" in cli("report", a).err
    many = tmp_path / "many.json"
    many.write_text(json.dumps(guidellm(*range(1, 7))))
    assert "not clear what to compare" in cli("compare", many, b).err
    assert cli("compare", many, b, "--a", "concurrent 3").code == 0
