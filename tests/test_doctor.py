"""`specbench doctor`: every planted fault is named, and nothing is alarming about a healthy server."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from cli_runs import Cli, Result
from scripted_server import Manner, ScriptedServer, prompt_of

from specbench.doctor import probes
from specbench.doctor.checks import Examined, diagnose
from specbench.doctor.probes import Observations
from specbench.findings.catalog import Finding
from specbench.servers.client import (
    Chunk,
    SpeculationCounters,
    StreamedAnswer,
)

pytestmark = pytest.mark.timeout(60)  # whatever a socket is waited for


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch) -> None:
    monkeypatch.setattr(probes, "_LATE_S", 0.0)


GOOD_LOGPROBS = {
    "content": [
        {"token": "a", "logprob": -0.1,
         "top_logprobs": [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -3.0}]},
        {"token": "b", "logprob": -0.5, "top_logprobs": [{"token": "b", "logprob": -0.5}]},
    ]
}  # fmt: skip


@dataclasses.dataclass
class Counts:
    """Drafts of every answer: steps by the number of draft tokens that they kept, at a draft length.

    Attributes:
        histogram: ``None`` for a server that drafts nothing.
        told: What answers say instead; ``None`` for the same.
        skewed: What is added to the counter of accepted tokens.
    """

    histogram: Sequence[int] | None = (2, 2, 2, 2, 8)
    gamma: int = 4
    told: Sequence[int] | None = None
    skewed: int = 0

    def metrics(self, answers: int) -> str:
        """As vLLM writes them."""
        steps = self.histogram or ()
        kept = [sum(steps[place:]) for place in range(1, len(steps))]
        drafts, accepted = sum(steps), sum(kept) + self.skewed
        labels = 'engine="0",model_name="tiny"'
        lines = [
            "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
            "# TYPE vllm:spec_decode_num_drafts_total counter",
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(drafts * answers)}",
            f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7536e+09",
            f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {float(drafts * self.gamma * answers)}",
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {float(accepted * answers)}",
        ]
        for place, count in enumerate(kept):
            name = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{place}"}}'
            lines.append(f"{name} {float(count * answers)}")
        return "\n".join(lines) + "\n"

    def facts(self) -> Mapping[str, Any]:
        """As an answer of vLLM has them."""
        steps = self.told or self.histogram
        if steps is None:
            return {}
        accepted = sum(kept * count for kept, count in enumerate(steps))
        counts = {"num_draft_tokens": sum(steps) * self.gamma, "num_accepted_draft_tokens": accepted}
        return {"metrics": {"speculative_decoding": {**counts, "acceptance_histogram": list(steps)}}}


def vllm(
    counts: Counts | None = None,
    *,
    cached: Callable[[int], int] = lambda known: known // 16 * 16,
    **manner: Any,
) -> Manner:
    """The manner of vLLM with speculation: it names ids, and finds whole blocks of earlier turns in its cache."""
    counts = counts or Counts()

    def facts(body: Mapping[str, Any]) -> Mapping[str, Any]:
        turns = [each["content"] for each in body.get("messages", ())]
        texts = turns or prompt_of(body).split("\n")
        lengths = [len(text.split()) for text in texts]
        known = sum(lengths[:-2])
        usage = {
            "prompt_tokens": sum(lengths),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": cached(known)},
        }
        return {**({} if manner.get("usage") else {"usage": usage}), **counts.facts()}

    usual = {"owner": "vllm", "per_piece": 3, "named": True, "logprobs": GOOD_LOGPROBS, "facts": facts}
    return Manner(**{**usual, **manner})


class Doctored(ScriptedServer):
    """A scripted server that counts drafts with every answer."""

    def __init__(self, manner: Manner, counts: Counts) -> None:
        super().__init__(manner)
        before = manner.wrong
        manner.metrics = counts.metrics(0)

        def count(body: dict[str, Any]) -> str | int | None:
            manner.metrics = counts.metrics(len(self.asked))
            return before(body)

        manner.wrong = count


@pytest.fixture
def examine(cli: Cli, models) -> Callable[..., tuple[Result, list[dict[str, str]]]]:
    def call(
        manner: Manner, counts: Counts | None = None, *words: object
    ) -> tuple[Result, list[dict[str, str]]]:
        with Doctored(manner, counts or Counts()) as server:
            done = cli("doctor", server.url, "--json", *words)
        return done, json.loads(done.out)["findings"] if done.out else []

    return call


def problems(findings: Sequence[Mapping[str, str]]) -> set[str]:
    return {topic(finding) for finding in findings if finding["severity"] == "problem"}


def topic(finding: Mapping[str, str]) -> str:
    return finding["id"].partition(".")[0]


def test_a_healthy_server_has_no_problem(examine, models):
    done, findings = examine(vllm(), None, "--target", models / "target", "--expect", "on")
    assert (done.code, problems(findings)) == (0, set()), findings
    said = {finding["id"]: finding["text"] for finding in findings}
    assert "256 draft tokens" in said["speculation.on"]
    assert "γ 4.0, 84%" in said["speculation.length"]
    assert "88%, 75%, 62%, 50%" in said["acceptance.positions"]
    sound = {topic(finding) for finding in findings if finding["severity"] == "ok"}
    assert {"tokens", "logprobs", "cache", "repeat", "counters"} <= sound


def test_servers_without_speculation_have_no_problem(examine, cli, models):
    target = ("--target", models / "target")
    plain = Manner(owner="llamacpp", facts={"timings": {"predicted_n": 64, "cache_n": 5}})
    done, findings = examine(plain, Counts(None), "--expect", "off", *target)
    assert (done.code, problems(findings)) == (0, set()), findings
    for manner, said in (
        # vLLM has no draft counters then, but others.
        (Manner(owner="vllm", named=True, metrics="vllm:num_requests_running 0.0"), "is off"),
        (Manner(owner="vllm", named=True), "does not report"),
        (Manner(), ""),
    ):
        with ScriptedServer(manner) as server:
            done = cli("doctor", server.url, "--json", *target)
        findings = json.loads(done.out)["findings"]
        assert (done.code, problems(findings)) == (0, set()), findings
        assert said in next(finding["text"] for finding in findings if topic(finding) == "speculation")
    notes = {topic(finding) for finding in findings if finding["severity"] == "note"}
    assert notes == {"speculation", "logprobs", "cache"}


def flipping() -> Manner:
    """Answers differ from one request to the next."""
    manner = vllm()

    def flip(body: dict[str, Any]) -> None:
        manner.another = body["max_tokens"] == 64 and not manner.another

    manner.wrong = flip
    return manner


def breaking(body: dict[str, Any]) -> str | None:
    return "cut" if "rules of a house" in json.dumps(body) else None


NAN = {"content": [{"token": "a", "logprob": float("nan"), "top_logprobs": []}]}
SHIFTED = {"tokens": ["a"], "token_logprobs": [-4.0], "top_logprobs": [{"a": -4.0, "b": -0.1}]}
FAULTS: dict[str, tuple[Callable[[], Manner], Counts, str]] = {
    "nothing is drafted": (lambda: vllm(Counts(None)), Counts(None), "speculation"),
    "no draft is kept": (lambda: vllm(Counts((16,))), Counts((16,)), "acceptance"),
    "the ends of drafts are dummies": (
        lambda: vllm(Counts((2, 2, 12))),
        Counts((2, 2, 12, 0, 0)),
        "acceptance",
    ),
    "answers count otherwise": (lambda: vllm(Counts(told=(3, 2, 2, 2, 8))), Counts(), "counters"),
    "counters contradict each other": (lambda: vllm(facts={}), Counts(skewed=9), "counters"),
    "usage counts steps": (lambda: vllm(usage="events"), Counts(), "tokens"),
    "a log probability is NaN": (lambda: vllm(logprobs=NAN), Counts(), "logprobs"),
    "log probabilities are another token's": (lambda: vllm(logprobs=SHIFTED), Counts(), "logprobs"),
    "greedy answers differ": (flipping, Counts(), "repeat"),
    "the second turn finds nothing in the cache": (lambda: vllm(cached=lambda _: 0), Counts(), "cache"),
    "the cache is lost below a length": (
        lambda: vllm(cached=lambda known: max(0, known // 400 - 1) * 400),
        Counts(),
        "cache",
    ),
    "long prompts break the stream": (lambda: vllm(wrong=breaking), Counts(), "cache"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(examine, fault):
    manner, counts, check = FAULTS[fault]
    done, findings = examine(manner(), counts)
    assert problems(findings) == {check}, findings
    assert done.code == 1
    assert all(finding["remedy"] for finding in findings if finding["severity"] == "problem")


def test_the_prompt_cache_is_tried_at_several_lengths(examine):
    """Up to the server's context; the finding says at which lengths it was used."""

    def too_long(body: dict[str, Any]) -> int | None:
        return 400 if "Rule 60:" in json.dumps(body) else None

    lossy = vllm(cached=lambda known: known if known > 500 else 0)
    for manner, counts in ((vllm(wrong=too_long), {"ok": 3}), (lossy, {"problem": 2, "ok": 2})):
        said = [finding for finding in examine(manner)[1] if topic(finding) == "cache"]
        assert {finding["severity"]: finding["text"].count(" of ") - 1 for finding in said} == counts


def test_what_is_expected(examine):
    assert problems(examine(vllm(), None, "--expect", "off")[1]) == {"speculation"}
    assert problems(examine(Manner(owner="llamacpp"), Counts(None), "--expect", "on")[1]) == {"speculation"}


# -- observations that are made up -------------------------------------------------------------------


def answer(drafted: int | None = 0) -> StreamedAnswer:
    """64 tokens in as many chunks."""
    pieces = tuple(Chunk(number / 63, "x", (number,)) for number in range(64))
    accepted = drafted and drafted // 2
    return StreamedAnswer(pieces, "length", 1.0, 9, 64, drafted=drafted, accepted=accepted)


def drafting(gamma: int, accepted_at: tuple[int, ...], drafts: int = 100, **more: Any) -> Examined:
    counted = SpeculationCounters(drafts, gamma * drafts, sum(accepted_at), accepted_at)
    seen = Observations("vllm", "m", counted=counted, **more)
    seen.answers = [answer(None)] * 4
    return Examined(seen)


def found(examined: Examined, check: str) -> Finding:
    return next(finding for finding in diagnose(examined) if finding.topic == check)


def test_other_clients_are_noticed():
    busy = drafting(2, (90, 80), idle=SpeculationCounters(1, 2, 1, (1,)))
    assert found(busy, "counters").severity == "note"


def test_acceptance_that_collapses_at_a_temperature_is_named(examine):
    def facts(body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"timings": {"draft_n": 40, "draft_n_accepted": 1 if body["temperature"] else 30}}

    _, findings = examine(Manner(owner="llamacpp", facts=facts), Counts(None))
    (named,) = [finding for finding in findings if topic(finding) == "temperature"]
    assert named["severity"] == "problem"
    share = "of draft tokens are accepted at temperature 0.8"
    assert named["text"] == f"Acceptance collapses: 2% {share}, 75% at 0."
    said = found(drafting(4, (70, 30, 20, 10), sampled=(400, 67)), "temperature")
    assert (said.severity, said.text) == ("ok", f"17% {share}, 32% at 0.")


# -- the command --------------------------------------------------------------------------------------


def test_the_command_says_what_to_do(cli, models):
    with Doctored(vllm(cached=lambda _: 0), Counts()) as server:
        done = cli("doctor", f"here={server.url}")
    assert done.code == 1
    assert "cache         PROBLEM" in done.out
    assert "cache: Switch prefix caching on" in done.out
    assert "finds only 0 of" in done.out
    assert done.out.endswith("1 problem found.\n")


def test_a_server_without_chat_continues_texts(cli):
    def no_chat(body: dict[str, Any]) -> int | None:
        return 400 if "messages" in body else None

    with Doctored(vllm(wrong=no_chat), Counts()) as server:
        assert cli("doctor", server.url).code == 0
        assert "prompt" in server.asked[-1]


@pytest.mark.parametrize(
    ("words", "code", "fragment"),
    [
        (["http://127.0.0.1:9/v1"], 1, "The server at 127.0.0.1:9 cannot be reached"),
        (["near=http://127.0.0.1:9/v1"], 1, "The server near cannot be reached"),
        (["nowhere"], 2, "no http:// or https:// address"),
    ],
)
def test_what_is_refused(cli, words, code, fragment):
    done = cli("doctor", *words)
    assert done.code == code
    assert fragment in done.err
