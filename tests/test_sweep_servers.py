"""`sweep --server`: what is asked of servers, what is made of their answers, and every way in which they go wrong."""

from __future__ import annotations

import json
import math
import random
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from cli_runs import Cli, Result, refusal, write_prompts
from scripted_engine import ENVIRONMENT
from scripted_server import Manner, ScriptedServer, prompt_of, tokenizer
from stored_runs import run_json
from test_serve import Running, engine_of

from specbench.base.errors import UsageError
from specbench.bench.engines.servers import ServerEngine
from specbench.bench.grid import Sweep, SweepOptions, server_rows
from specbench.bench.manifest import command_line, describe_run
from specbench.bench.prompts import Prompt
from specbench.bench.session import Session
from specbench.findings.review import review
from specbench.generate import encode_messages
from specbench.options import DecodingOptions
from specbench.results.acceptance import positions, schedule, shorter
from specbench.results.compare import compare_runs
from specbench.results.results import load_results
from specbench.results.store import RunStore
from specbench.results.summary import Summary
from specbench.show.answer import find_answers
from specbench.show.plots import draw_figures
from specbench.show.report import write_report
from specbench.specs.servers import ServerSpec, parse_server, parse_servers

pytestmark = pytest.mark.timeout(180)  # whatever a socket is waited for

NEW = 24
CACHED = {"prompt_tokens": 40, "completion_tokens": 24, "prompt_tokens_details": {"cached_tokens": 39}}
LLAMACPP = {"timings": {"draft_n": 20, "draft_n_accepted": 15, "cache_n": 0}}

# -- how servers are named -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "url", "model"),
    [
        ("a=http://h:8000/v1", "http://h:8000/v1", None),
        ("a=http://h:8000", "http://h:8000/v1", None),
        ("a=https://h/some/where/v1/#Qwen/Q-1.5B", "https://h/some/where/v1", "Qwen/Q-1.5B"),
        ("a=http://[::1]:80/v1/chat/completions#m=1", "http://[::1]:80/v1", "m=1"),
        (" a=http://h/v1/completions", "http://h/v1", None),
    ],
)
def test_servers_are_named_by_name_address_and_model(text, url, model):
    assert parse_server(text) == ServerSpec("a", url, model)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("http://h/v1", "NAME=URL"),
        ("a=", "no address"),
        ("a b=http://h", "other characters"),
        *((f"a={each}", "http://") for each in ("h:8000", "ftp://h", "http://", "http://h:port")),
        ("a=http://me:secret@h/v1", "SPECBENCH_KEY_A"),
        ("a.b=http://h/v1?key=secret", "SPECBENCH_KEY_A_B"),
    ],
)
def test_bad_servers(text, fragment):
    said = refusal(parse_server, text, kind=UsageError)
    assert fragment in said
    assert "secret" not in said


def test_command_lines_are_kept_without_addresses():
    given = "--server a=http://host:1/v1#org/m --server=b=https://host/v1 --server c=http://h#/home/me/m http://host:1"
    kept = "--server a=URL#org/m --server=b=URL --server c=URL#m URL"
    assert command_line(given.split()) == kept.split()


def test_every_other_repeat_has_the_order_reversed():
    options = SweepOptions(gammas=(), policies=(), repeats=4, warmup=0, turns=1, servers=("a", "b", "c"))
    configs = server_rows(options, [("a", None), ("b", None), ("c", None)])
    asked = tuple(Prompt(f"p{i}", "x", ("?",)) for i in range(8))
    cells = Sweep(options, asked, tuple(configs)).plan()
    orders: dict[tuple[str, int], str] = {}
    for each in cells:
        orders[each.prompt, each.repeat] = orders.get((each.prompt, each.repeat), "") + each.config
    assert all(order == orders[prompt, repeat ^ 1][::-1] for (prompt, repeat), order in orders.items())
    assert len(set(orders.values())) > 2
    assert {config.baseline for config in configs} == {"a"}


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def sweep(cli, tmp_path, monkeypatch) -> Cli:
    """The command with four short prompts, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    write_prompts(tmp_path / "mine.jsonl", {f"{'ab'[i % 2]}-{i}": [f"Question {i}?"] for i in range(4)})

    def call(*arguments: object, **servers: ScriptedServer | str) -> Result:
        words = ["--prompts", "./mine.jsonl", "-n", NEW, "--repeats", 2, "--out", "run", *arguments]
        for name, server in servers.items():
            words += ["--server", f"{name}={server if isinstance(server, str) else server.url}"]
        return cli("sweep", *words)

    return call


@pytest.fixture
def plain() -> Iterator[ScriptedServer]:
    with ScriptedServer(Manner(owner="llamacpp")) as server:
        yield server


@pytest.fixture
def fast() -> Iterator[ScriptedServer]:
    with ScriptedServer(Manner(owner="llamacpp", per_piece=4, facts=LLAMACPP)) as server:
        yield server


def stored(tmp_path: Path) -> list[dict[str, Any]]:
    lines = (tmp_path / "run" / "generations.jsonl").read_text().splitlines()
    return [row for line in lines if not (row := json.loads(line))["warmup"]]


def test_two_servers_from_beginning_to_end(sweep, plain, fast, models, tmp_path):
    result = sweep("--target", models / "target", base=plain, drafting=fast)
    assert result.code == 0, result.err
    run, rows = run_json(tmp_path / "run"), stored(tmp_path)
    assert {(row["config"], row["status"], row["server"]["counted_by"]) for row in rows} == {
        ("base", "ok", "usage"), ("drafting", "ok", "usage"),
    }  # fmt: skip
    assert len(rows) == 4 * 2 * 2
    for row in rows:
        assert (row["new_tokens"], row["prompt_tokens"], row["server"]["problem"]) == (NEW, 7, None)
        assert tokenizer().decode(row["token_ids"]) == row["server"]["text"]
        assert row["first_tokens"] == (1 if row["config"] == "base" else 4)
    assert run["differences"] == []
    assert run["target"]["name"] == "tiny"
    assert run["options"]["servers"] == ["base: tiny", "drafting: tiny"]
    everything = json.dumps(run) + (tmp_path / "run" / "generations.jsonl").read_text()
    assert "127.0.0.1" not in everything
    assert str(tmp_path) not in everything

    frame = load_results(tmp_path / "run")
    summary = frame.table().set_index("config")
    assert summary.loc["base", "speedup"] == 1.0
    assert summary.loc["drafting", "identical_share"] == 1.0
    # 23 tokens behind the first, 15 of them drafts that were kept.
    assert summary.loc["drafting", "tokens_per_step"] == pytest.approx(23 / 8)
    assert summary.loc["drafting", "acceptance_rate"] == pytest.approx(0.75)
    assert summary["step_source"].tolist() == ["bursts", "server"]
    assert summary.loc["drafting", "warming"] > 0
    (answer,) = find_answers(Summary(frame))
    assert ("over base" in answer.headline, answer.command) == (True, "")
    assert "drafting" in result.out
    assert compare_runs(frame, frame, a="drafting", b="base").rows[0].ratio.prompts == 4
    write_report(tmp_path / "run")
    assert {"speedup"} <= {path.stem for path in (tmp_path / "run" / "plots").iterdir()}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "127.0.0.1" not in page
    assert "plain decoding" not in page


def test_a_server_is_judged_by_a_stored_run(cli, sweep, plain, fast, tmp_path):
    assert sweep(base=plain, drafting=fast).code == 0
    words = ["--metric", "tokens_per_step,acceptance_rate", "--worse-than", "3%", "--json"]
    with ScriptedServer(Manner(owner="llamacpp", per_piece=4, facts=LLAMACPP)) as same:
        judged = cli("compare", "run:drafting", same.url, *words)
    assert [(row["metric"], row["prompts"], row["ratio"], row["verdict"]) for row in judged.json()["rows"]] == [
        ("tokens_per_step", 4, 1.0, "not worse"), ("acceptance_rate", 4, 1.0, "not worse"),
    ]  # fmt: skip
    (measured,) = (tmp_path / "results").iterdir()
    assert f"Measured: results/{measured.name}." in judged.err
    run = run_json(measured)
    assert [row["decoder"]["name"] for row in run["configs"]] == ["new"]
    assert {name: run[name] for name in ("prompts", "repeats", "max_new_tokens", "warmup", "seed")} == {
        name: run_json(tmp_path / "run")[name]
        for name in ("prompts", "repeats", "max_new_tokens", "warmup", "seed")
    }
    assert "127.0.0.1" not in json.dumps(run)
    fewer = {"timings": {"draft_n": 20, "draft_n_accepted": 12, "cache_n": 0}}
    with ScriptedServer(Manner(owner="llamacpp", per_piece=4, facts=fewer)) as worse:
        judged = cli("compare", "run:drafting", worse.url, *words)
    assert {row["verdict"] for row in judged.json(1)["rows"]} == {"worse"}
    cli("compare", "run", plain.url, *words).refused(2, "Name it: RUN:NAME")
    cli("compare", "run:drafting", "http://me:secret@h", *words).refused(2, "SPECBENCH_KEY_NEW")


def test_a_prompt_goes_out_as_it_is_and_caches_are_off(sweep, plain, tmp_path):
    assert sweep(base=plain).code == 0
    asked = [body for body in plain.asked if prompt_of(body).startswith("Question")]
    assert len(asked) == 4 * 2 + 1
    for body in asked:
        assert body["messages"] == [{"role": "user", "content": prompt_of(body)}]
        assert body["cache_prompt"] is False
        assert (body["temperature"], body["stream"], body["model"]) == (0.0, True, "tiny")
        assert {"seed", "ignore_eos", "top_k"}.isdisjoint(body)
    assert asked[-1]["max_tokens"] == NEW
    assert run_json(tmp_path / "run")["options"]["salt"] == "none"


def test_prompts_get_text_in_front_for_lengths_of_context(sweep, plain, fast, models, tmp_path):
    asked = ("--context", "32,64")
    sweep(*asked, base=plain).refused(2, "--context needs the tokenizer", "--target MODEL")
    before = len(plain.asked)
    result = sweep(*asked, "--target", models / "target", "--repeats", 1, base=plain, drafting=fast)
    assert result.code == 0, result.err
    sent = [body for body in plain.asked[before:] if prompt_of(body).endswith("?")]
    assert {len(encode_messages(tokenizer(), body["messages"])) for body in sent} == {32, 64}
    assert {prompt_of(body).rpartition("Question")[2] for body in sent} == {f" {i}?" for i in range(4)}
    summary = Summary(load_results(tmp_path / "run"))
    assert len({row.config.id for row in summary.rows}) == 2 * 2


def test_caches_without_a_switch_get_nothing_to_find(sweep, tmp_path):
    with ScriptedServer() as one, ScriptedServer() as two:
        result = sweep(a=one, b=two)
        assert result.code == 0
        assert "unique first line" in result.err
        prompts = [
            [prompt_of(body) for body in each.asked if "Question" in prompt_of(body)] for each in (one, two)
        ]
    assert sorted(prompts[0]) == sorted(prompts[1]), "the same for both"
    assert all(prompt.count("\n") == 1 and prompt[0] == "[" for prompt in prompts[0])
    assert len(set(prompts[0])) == 4 * 2 + 1, "and never the same again"
    frame = load_results(tmp_path / "run")
    assert frame.table().set_index("config").loc["b", "identical_share"] == 1.0


def counting(
    server: ScriptedServer, drafts: int, drafted: int, accepted_at: tuple[int, ...], apart: int = 0
) -> None:
    """Let a server count so much for every answer, and something else ``apart`` from its own answers."""

    def count(body: dict[str, Any]) -> None:
        n = len(server.asked) + apart
        places = "".join(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}} {n * kept}\n'
            for place, kept in enumerate(accepted_at)
        )
        totals = {"drafts": drafts, "draft_tokens": drafted, "accepted_tokens": sum(accepted_at)}
        lines = [f"vllm:spec_decode_num_{name}_total {count * n}\n" for name, count in totals.items()]
        server.manner.metrics = "".join(lines) + places

    count({})
    server.manner.wrong = count


@pytest.mark.parametrize("batch", [None, 2])
def test_acceptance_by_position_from_counters(sweep, tmp_path, batch):
    with ScriptedServer(Manner(owner="vllm")) as plain, ScriptedServer(Manner(owner="vllm")) as server:
        counting(server, 10, 30, (8, 6, 0))
        assert sweep(*(() if batch is None else ("--batch", batch)), plain=plain, drafting=server).code == 0
    told = [row for row in stored(tmp_path) if row["config"].startswith("drafting")]
    for row in told:
        counts = row["server" if batch is None else "speculation"]
        assert [counts["drafts"] * share for share in (0.8, 0.6, 0.0)] == pytest.approx(counts["accepted_at"])
    frame = load_results(tmp_path / "run")
    rows = positions(Summary(frame))
    assert {row.config.id for row in rows} == {told[0]["config"]}, "the other one says nothing"
    assert [row.rate for row in rows] == pytest.approx([0.8, 0.75, 0.0])
    assert [row.rate_of_drafted for row in rows] == pytest.approx([0.8, 0.6, 0.0])
    assert not any(row.least for row in rows)


@pytest.mark.parametrize("batch", [None, "1,2"])
@pytest.mark.parametrize("missing", [0, 3])
def test_steps_that_a_server_reports(sweep, tmp_path, batch, missing):
    """As vLLM reports them with `--per-request-spec-decode-metrics detailed`; ``missing`` ones drafted nothing."""
    accepted, drafted = [4, 4, 0, 3, 1, 4, 1], [4, 4, 4, 4, 4, 4, 2]  # the last token lies behind the end
    if missing:
        accepted, drafted = accepted[:4], drafted[:4]
    told = {
        "num_draft_tokens": sum(drafted), "num_accepted_draft_tokens": sum(accepted),
        "acceptance_histogram": [accepted.count(kept) for kept in range(5)],
        "per_step_accepted": accepted, "per_step_drafted": drafted,
    }  # fmt: skip
    facts = {"metrics": {"speculative_decoding": told}}
    with (
        ScriptedServer(Manner(owner="vllm")) as plain,
        ScriptedServer(Manner(owner="vllm", facts=facts)) as server,
    ):
        words = () if batch is None else ("--batch", batch)
        assert sweep(*words, plain=plain, drafting=server).code == 0
    results = load_results(tmp_path / "run")
    summary = Summary(results)
    row = summary.rows[-1]
    steps, kept = (7, [4, 4, 0, 3, 1, 4, 0]) if not missing else (23 - 11, accepted)
    assert row.tokens_per_step.value == pytest.approx((steps + sum(kept)) / steps)
    assert row.acceptance_tested.value == pytest.approx(
        sum(accepted) / sum(map(min, drafted, [5, 5, 1, 4, 2, 5, 2]))
    )
    assert row.mean_gamma.value == pytest.approx(sum(drafted) / steps)
    assert math.isnan(row["share_draft"].value), "times of its steps are not known"
    places = [each for each in positions(summary) if each.config is row.config]
    generations = row.generations
    assert [each.drafted for each in places] == [
        sum(d > at for d in drafted) * generations for at in range(4)
    ]
    assert [each.accepted for each in places] == [
        sum(k > at for k in accepted) * generations for at in range(4)
    ]
    assert not any(each.least for each in places)
    assert results.placed_steps.empty == bool(missing)
    fewer = [each for each in shorter(summary) if each.config is row.config]
    # Of drafts of 4, 3 of 4 (2 of 3) were accepted at their end: so often the next step goes on with the same draft.
    expected = (
        [(14 + 3 * 12) / 4, (11 + 3 * 9) / 4, (10 + 3 * 7) / 4, 7]
        if not missing
        else [8 + (9 + 2 * 8) / 3, 8 + (7 + 2 * 6) / 3, 8 + (6 + 2 * 4) / 3, 12]
    )
    assert [each.tokens_per_step.value for each in fewer] == pytest.approx([23 / count for count in expected])
    assert fewer[-1].speedup == pytest.approx(row.speedup.value)
    write_report(tmp_path / "run")
    page = (tmp_path / "run" / "report.md").read_text().replace("\\", "")
    assert "Predicted with shorter drafts" in page
    assert ("num_speculative_tokens_per_batch_size" in page) == (batch is not None)


def test_the_fastest_draft_length_by_batch_size():
    def made(batch: int | None, *speedups: float) -> list[SimpleNamespace]:
        config = SimpleNamespace(drafter="d", condition=SimpleNamespace(batch=batch))
        return [SimpleNamespace(config=config, gamma=g, speedup=s) for g, s in enumerate(speedups, 1)]

    rows = [*made(16, 0.9, 0.8), *made(None, 1.2, 1.3), *made(4, 1.1, 1.0)]
    assert schedule(rows) == {"d": [[1, 1, 2], [2, 4, 1], [5, 16, 0]]}
    assert schedule(made(4, 1.2)) == schedule(made(4, math.nan)) == {}


def test_places_of_other_answers_are_left_out(sweep, tmp_path):
    facts = {"timings": {"draft_n": 30, "draft_n_accepted": 12, "cache_n": 0}}
    with ScriptedServer(Manner(owner="llamacpp", facts=facts)) as server:
        counting(server, 20, 60, (16, 12, 0))  # as much again for somebody else
        assert sweep(drafting=server).code == 0
    for row in stored(tmp_path):
        told = row["server"]
        assert (told["drafted"], told["accepted"], told["drafts"], told["accepted_at"]) == (
            30,
            12,
            None,
            None,
        )
    frame = load_results(tmp_path / "run")
    assert positions(Summary(frame)) == []
    assert "positions" not in draw_figures(frame)[0]


def test_servers_over_batches(sweep, plain, fast, tmp_path):
    result = sweep("--batch", "1,2,4", base=plain, drafting=fast)
    assert result.code == 0, result.err
    rows = stored(tmp_path)
    assert len({row["config"] for row in rows}) == 2 * 3
    assert {row["clients"] for row in rows} == {1, 2, 4}
    for row in rows:
        assert [each["new_tokens"] for each in row["requests"]] == [NEW] * row["clients"]
        assert row["seconds"] > 0
        assert row["tokens"] >= NEW * row["clients"]
    frame = load_results(tmp_path / "run")
    (answer,) = find_answers(Summary(frame))
    assert "over base" in answer.headline
    assert [row.config.condition.batch for row in Summary(frame).rows] == [1, 1, 2, 2, 4, 4]


# -- what goes wrong -------------------------------------------------------------------------------


def test_wrong_counts_are_noticed(sweep, models, tmp_path):
    with ScriptedServer(Manner(per_piece=2, usage="events")) as server:
        result = sweep("--target", models / "target", a=server)
    assert result.code == 0
    for row in stored(tmp_path):
        assert (row["new_tokens"], row["server"]["counted_by"]) == (NEW, "tokenizer")
        assert f"reports {NEW // 2} tokens" in row["server"]["problem"]
    assert "token-counts" in [each["id"] for each in run_json(tmp_path / "run")["warnings"]]


def test_a_server_without_usage_needs_the_tokenizer(sweep, models, tmp_path):
    with ScriptedServer(Manner(usage="none")) as server:
        sweep(a=server).refused(2, "does not report how many tokens", "Add --target")
        assert sweep("--target", models / "target", a=server).code == 0
    assert {row["new_tokens"] for row in stored(tmp_path)} == {NEW}


@pytest.mark.parametrize(
    ("manner", "note", "warning"),
    [
        (Manner(owner="llamacpp"), "a: token counts are the server's own", "tokens-unchecked"),
        (Manner(owner="llamacpp", per_piece=1000), "a: an answer comes in one chunk", "one-piece"),
        (Manner(owner="vllm", facts={"usage": CACHED}), "98% of the prompts' tokens came", "prompt-cache"),
    ],
)
def test_what_is_noticed_of_a_server_is_told(sweep, plain, tmp_path, manner, note, warning):
    with ScriptedServer(manner) as server:
        result = sweep(base=plain, a=server)
    warnings = {finding["id"]: finding["text"] for finding in run_json(tmp_path / "run")["warnings"]}
    assert note in result.err + warnings[warning]
    summary = load_results(tmp_path / "run").table().set_index("config")
    assert summary["tokens_per_second"].notna().tolist() == [True, manner.per_piece == 1]
    assert summary["speedup_total"].notna().all()


@pytest.mark.parametrize("wrong", ["error", "cut", 500])
def test_a_broken_answer_fails_alone_and_is_tried_again(sweep, plain, tmp_path, wrong):
    def breaks(body: dict[str, Any]) -> str | int | None:
        return wrong if "Question 2" in prompt_of(body) else None

    with ScriptedServer(Manner(owner="llamacpp", wrong=breaks)) as server:
        result = sweep(base=plain, a=server)
        assert result.code == 1
        assert "2 generations failed" in result.err
        failed = [row for row in stored(tmp_path) if row["status"] == "failed"]
        assert {(row["config"], row["prompt"]) for row in failed} == {("a", "a-2")}
        assert all("The " in row["error"] and "server a" in row["error"] for row in failed)
        server.manner.wrong = lambda body: None
        again = sweep("--resume", base=plain, a=server)
    assert again.code == 0, again.err
    frame = load_results(tmp_path / "run")
    assert (frame.generations["status"] == "ok").all()
    assert len(frame.generations) == 16


def test_outputs_that_part_are_found(sweep, plain, models, tmp_path):
    with ScriptedServer(Manner(owner="llamacpp", another=True)) as server:
        target = ("--target", models / "target")
        result = sweep(*target, base=plain, a=server)
        assert result.code == 0
        differences = run_json(tmp_path / "run")["differences"]
        assert {each["prompt"] for each in differences} == {"a-0", "b-1", "a-2", "b-3"}
        assert {each["numerical_tie"] for each in differences} == {None}
    assert "check --outputs" in result.err


@pytest.mark.parametrize(
    ("words", "field"), [(["--ignore-eos"], "ignore_eos"), (["--temperature", 0, "--temperature", 1], "seed")]
)
def test_a_field_that_is_refused_is_found_before_anything_is_measured(sweep, tmp_path, words, field):
    with ScriptedServer(Manner(wrong=lambda body: 400 if field in body else None)) as server:
        sweep(*words, a=server).refused(2, "status 400: not now", "its model and the options")
        assert sweep(a=server).code == 0


def test_a_key_is_read_from_the_environment_and_kept_nowhere(sweep, tmp_path, monkeypatch):
    with ScriptedServer(Manner(key="sesame-1")) as server:
        sweep(a=server).refused(2, "a needs a key (status 401)", "SPECBENCH_KEY_A")
        monkeypatch.setenv("SPECBENCH_KEY_A", "sesame-2")
        refused = sweep(a=server)
        refused.refused(2, "refuses the key in SPECBENCH_KEY_A (status 401)")
        assert "sesame" not in refused.err
        for wrong in ("", "two\nlines", "schlüssel"):
            monkeypatch.setenv("SPECBENCH_KEY_A", wrong)
            sweep(a=server).refused(2, "SPECBENCH_KEY_A holds no key")
        monkeypatch.setenv("SPECBENCH_KEY_A", "sesame-1")
        result = sweep(a=server)
        assert result.code == 0, result.err
        server.manner.key = "another"
        monkeypatch.setenv("SPECBENCH_KEY_A", "sesame-1")
    written = "".join(path.read_text() for path in (tmp_path / "run").iterdir() if path.is_file())
    assert "sesame" not in written + result.out + result.err


def test_models_that_are_not_there(sweep):
    with ScriptedServer(Manner(models=("one", "two"))) as server:
        sweep(a=server).refused(2, "The server a lists 2 models: one, two", "Name one after a #")
        sweep(a=f"{server.url}#three").refused(2, "there is no model three", "Its models are one, two")
        assert sweep(a=f"{server.url}#two").code == 0
        assert {body["model"] for body in server.asked} == {"two", "three"}


def test_servers_that_are_none(sweep, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    sweep(a=free).refused(1, "The server a cannot be reached", f"Check that it runs at {free}")
    for models in (b"<html>", b'{"models": []}'):
        with ScriptedServer(Manner(models=models)) as server:
            sweep(a=server).refused(1, "The server a does not speak the OpenAI protocol")
    with ScriptedServer(Manner(models=b'{"data": []}')) as server:
        sweep(a=server).refused(2, "The server a lists 0 models")
    assert not (tmp_path / "run").exists()


# -- the engine, by a clock of its own ---------------------------------------------------------------


class TimedEvents(httpx2.AsyncByteStream):
    """Events, and how long each takes to come."""

    def __init__(self, clock: list[float], events: list[tuple[float, Any]]) -> None:
        self._clock, self._events = clock, events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for seconds, event in self._events:
            self._clock[0] += seconds
            yield b"data: " + json.dumps(event).encode() + b"\n\n"


class Timed:
    """A server whose answers of nine tokens take as long as it is told, and those who ask it."""

    def __init__(self, seconds: Callable[[str, str], float], statuses: tuple[int, ...] = ()) -> None:
        self.clock, self.pauses, self._seconds = [0.0], list[float](), seconds
        self._statuses = list(statuses)

    def handle(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            listed = {"data": [{"id": "m", "owned_by": "llamacpp"}]}
            return httpx2.Response(200 if request.url.path == "/v1/models" else 404, json=listed)
        body = json.loads(request.content)
        is_probe = prompt_of(body) == "Count from one to ten."
        if self._statuses and not is_probe and (status := self._statuses.pop(0)) != 200:
            return httpx2.Response(status, json={})
        each = self._seconds(request.url.host, prompt_of(body))
        events: list[tuple[float, Any]] = [(0.5, {"choices": [{"delta": {"content": "a"}}]})]
        events += [(each, {"choices": [{"delta": {"content": " b"}}]})] * 8
        ending = {"choices": [{"delta": {}, "finish_reason": "length"}], "usage": {"completion_tokens": 9}}
        stream = TimedEvents(self.clock, [*events, (0.0, ending)])
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=stream)

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def engine(self, *names: str) -> ServerEngine:
        return ServerEngine(
            parse_servers([f"{name}=http://{name}.test" for name in names]),
            keys={},
            transport=httpx2.MockTransport(self.handle),
            clock=lambda: self.clock[0],
            pause=self.pause,
        )


def measured(path: Path, timed: Timed, *names: str, prompts: int = 8) -> Any:
    """The rows of a sweep over servers whose times are scripted."""
    asked = tuple(Prompt(f"p{i}", "x", (f"Question {i}",)) for i in range(prompts))
    decoding = DecodingOptions(max_new_tokens=9)
    options = SweepOptions(
        gammas=(), policies=(), turns=1, servers=names, repeats=2, warmup=0, decoding=decoding
    )
    sweep = Sweep(options, asked, tuple(server_rows(options, [(name, None) for name in names])))
    with closing(timed.engine(*names)) as engine:
        target = engine.describe_target(decoding)
        run = describe_run(sweep, target, {}, environment=ENVIRONMENT)
        with RunStore.create(path, run) as store:
            Session(sweep, store, engine).run_all()
    return load_results(path)


def test_times_are_those_of_the_stream(tmp_path):
    scatter = random.Random(0)
    timed = Timed(lambda host, prompt: (0.1 if host[0] == "a" else 0.05) * scatter.uniform(0.95, 1.05))
    frame = measured(tmp_path / "run", timed, "a", "b")
    rows = frame.generations
    assert rows["ttft_s"].tolist() == pytest.approx([0.5] * 32)
    assert (rows["tokens_per_second"] * rows["decode_s"]).tolist() == pytest.approx([8.0] * 32)
    summary = frame.table().set_index("config")
    assert summary.loc["b", "speedup"] == pytest.approx(2.0, rel=0.05)
    assert summary.loc["b", "verdict"] == "faster"
    assert summary.loc["b", "tokens_per_step"] == pytest.approx(1.0)
    assert (summary["warming_low"] < 1).all()
    assert "warm-pool" not in [each.id for each in review(Summary(frame))]
    (answer,) = find_answers(Summary(frame))
    assert re.match(r"Yes, b: (1\.9|2\.0)\d× \[.*\] over a", answer.headline)


def test_a_server_that_remembers_is_told_apart(tmp_path):
    seen: dict[str, int] = {}
    scatter = random.Random(1)

    def seconds(host: str, prompt: str) -> float:
        seen[host + prompt] = seen.get(host + prompt, 0) + 1
        again = host[0] == "b" and seen[host + prompt] > 1
        return (0.04 if again else 0.1) * scatter.uniform(0.95, 1.05)

    frame = measured(tmp_path / "run", Timed(seconds), "a", "b")
    summary = frame.table().set_index("config")
    assert summary.loc["b", "warming"] == pytest.approx(2.5, rel=0.1)
    assert summary.loc["b", "speedup"] > 1.4
    (warning,) = [each for each in review(Summary(frame)) if each.id == "warm-pool"]
    assert warning.text.startswith("b: 2.")


def test_a_busy_server_is_asked_again_and_a_failing_one_is_not(tmp_path):
    timed = Timed(lambda *_: 0.1, statuses=(503, 429, 200, 503, 503, 503, 500))
    frame = measured(tmp_path / "run", timed, "a", prompts=3)
    assert timed.pauses == [1.0, 2.0, 1.0, 2.0]
    assert frame.generations["status"].tolist().count("failed") == 2
    assert sorted(frame.done["attempts"]) == [1, 1, 1, 3]


# -- our own server --------------------------------------------------------------------------------


def test_our_own_server_is_measured(cli, sweep, tmp_path):
    with Running(engine_of()) as ours:
        result = sweep("--ignore-eos", ours=ours.url)
        batches = sweep("--ignore-eos", "--batch", 2, "--out", "many", ours=ours.url)
    assert result.code == 0, result.err
    assert batches.code == 0, batches.err
    assert cli("report", tmp_path / "many", "--slo", "ttft=99s").code == 0
    assert "goodput" in (tmp_path / "many" / "report.md").read_text(encoding="utf-8")
    rows = stored(tmp_path)
    assert {row["new_tokens"] for row in rows} == {NEW}
    for told in (row["server"] for row in rows):
        assert told["drafted"] >= told["accepted"] == sum(told["accepted_at"])
        assert told["drafted"] <= told["drafts"] * len(told["accepted_at"]) <= 3 * told["drafts"]
    assert run_json(tmp_path / "run")["options"]["salt"] == "none", "nothing is kept of a prompt"
    summary = load_results(tmp_path / "run").table()
    assert summary["step_source"].tolist() == ["server"]
    accepted, drafted = (sum(row["server"][name] for row in rows) for name in ("accepted", "drafted"))
    assert summary["acceptance_rate"].tolist() == pytest.approx([accepted / drafted])
