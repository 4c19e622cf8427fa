"""Public benchmarks: what is fetched, which prompts are drawn, and how tasks are reported."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

import httpx2
import pytest
from huggingface_hub import constants
from stored_runs import Drafter, change_run, write_run

from specbench.base.errors import RunError, UsageError
from specbench.base.record import to_dict
from specbench.bench import suites
from specbench.results.results import load_results
from specbench.results.run import StoredSuite
from specbench.results.store import read_run
from specbench.results.summary import Summary
from specbench.show import tables

MT_BENCH = dict.fromkeys(("writing", "math"), "multi-turn conversation")


def as_file(*categories: str, each: int = 20) -> bytes:
    lines = [
        {"question_id": i, "category": name, "turns": [f"{name} {i}"]}
        for i, name in enumerate(categories * each)
    ]
    return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


@pytest.fixture
def served(monkeypatch, tmp_path):
    """A suite with two tasks of three categories; what its address answers can be changed, and requests are counted."""
    content = as_file("writing", "math", "qa")
    answers: dict[str, Any] = {"content": content, "status": 200, "requests": 0}

    def answer(request: httpx2.Request) -> httpx2.Response:
        answers["requests"] += 1
        return httpx2.Response(answers["status"], content=answers["content"])

    def stream(method: str, url: str, **_: Any) -> Any:
        return httpx2.Client(transport=httpx2.MockTransport(answer)).stream(method, url)

    digest = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(
        suites.SUITES,
        "two-tasks",
        StoredSuite(
            name="two-tasks", source="https://host/two.jsonl", sha256=digest, license="MIT", tasks=MT_BENCH
        ),
    )
    monkeypatch.setattr(suites.httpx2, "stream", stream)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    return answers


def test_a_suite_is_fetched_once_and_again_if_it_is_damaged(served, tmp_path):
    prompts, (stored,) = suites.choose_prompts(["two-tasks"])
    assert len(prompts) == 60
    assert (stored.name, stored.license, stored.prompts, stored.tasks) == ("two-tasks", "MIT", 60, MT_BENCH)
    suites.choose_prompts(["two-tasks"])
    assert served["requests"] == 1
    (tmp_path / "cache/suites/two-tasks.jsonl").write_bytes(b"damaged")
    assert suites.choose_prompts(["two-tasks"])[0] == prompts
    assert served["requests"] == 2


@pytest.mark.parametrize("content", [b"{}", as_file("writing", "math", "qa", each=21)])
def test_what_is_not_the_suite_is_not_kept(served, tmp_path, content):
    served["content"] = content
    with pytest.raises(RunError, match="another sha256 than it should have"):
        suites.choose_prompts(["two-tasks"])
    assert not list((tmp_path / "cache").glob("suites/*"))


def test_without_a_network_the_address_is_named(served, monkeypatch):
    served["status"] = 503
    with pytest.raises(RunError, match="could not be fetched"):
        suites.choose_prompts(["two-tasks"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RunError, match=r"Download https://host/two\.jsonl"):
        suites.choose_prompts(["two-tasks"])


def test_a_downloaded_file_is_known_by_its_sha256(served, tmp_path):
    path = tmp_path / "downloaded.jsonl"
    path.write_bytes(served["content"])
    assert suites.choose_prompts([str(path)])[1][0].name == "two-tasks"
    path.write_bytes(as_file("writing", each=2))
    prompts, stored = suites.choose_prompts([str(path)])
    assert (len(prompts), stored, served["requests"]) == (2, [], 0)


def test_a_limit_draws_as_many_of_each_task(served):
    def drawn(limit: int, seed: int = 0) -> list[str]:
        return [prompt.id for prompt in suites.choose_prompts(["two-tasks"], limit=limit, seed=seed)[0]]

    prompts, _ = suites.choose_prompts(["two-tasks"], limit=20)
    assert Counter(prompt.category for prompt in prompts) == {"writing": 5, "math": 5, "qa": 10}
    assert drawn(8) == drawn(20)[:8]
    assert drawn(20) != drawn(20, seed=1)
    assert [int(name) for name in drawn(20)] != sorted(map(int, drawn(20)))


def test_other_prompts_beside_a_suite_are_refused(served):
    with pytest.raises(UsageError, match="two-tasks is a public benchmark and chat is not"):
        suites.choose_prompts(["chat", "two-tasks"])


def test_a_sweep_keeps_what_is_known_of_a_suite(served, cli, tmp_path, models):
    out = tmp_path / "run"
    sweep = ["sweep", "--target", models / "target", "--dtype", "float32", "--drafter", "lookup"]
    sweep += ["--gamma", 2, "--draft-policy", "fixed"]
    found = cli(*sweep, "--prompts", "two-tasks", "--limit", 4, "-n", 4, "--repeats", 1, "--out", out)
    assert found.code == 0, found.err
    run = read_run(out)
    assert [suite.name for suite in run.suites] == ["two-tasks"]
    assert Counter(prompt.category for prompt in run.prompts) == {"qa": 2, "writing": 1, "math": 1}
    cli("report", out)
    page = (out / "report.md").read_text(encoding="utf-8")
    assert "| multi-turn conversation |" in page
    assert f"https://host/two.jsonl, sha256 {run.suites[0].sha256}" in page


def test_a_task_is_the_mean_over_the_prompts_of_its_categories(tmp_path):
    categories = ("writing", "math", "qa")
    write_run(tmp_path / "run", drafters=(Drafter("lookup", 0.6, 0.01),), gammas=(2,), categories=categories)
    results = load_results(tmp_path / "run")
    apart = {row.category: row for row in Summary(results).categories}
    suite = StoredSuite(name="s", source="s", sha256="0", prompts=9, tasks=MT_BENCH)
    results = load_results(change_run(tmp_path / "run", suites=[to_dict(suite)]))
    together = {row.category: row for row in Summary(results).categories}
    assert together.keys() == {"multi-turn conversation", "qa"}
    parts = [apart[name] for name in MT_BENCH]
    both = together["multi-turn conversation"]
    assert both.prompts.value == sum(part.prompts.value for part in parts)
    assert both.speedup.value == pytest.approx((parts[0].speedup.value * parts[1].speedup.value) ** 0.5)
    assert both.tokens_per_step.value > 1
    summary = Summary(results)
    sheet = tables.category_sheet(summary)
    (row,) = sheet.rows
    assert sheet.headings == ["configuration", "multi-turn conversation", "qa", "overall"]
    assert row[-1].endswith(f"; {summary.row('lookup@2').tokens_per_step.value:.2f}")
