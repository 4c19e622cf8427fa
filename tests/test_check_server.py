"""`specbench check --server`: planted faults of verifiers are found at the promised sizes, exact ones pass."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import httpx2
import numpy as np
import pytest
from biased_verifiers import Fault, MadeUpModel, ThreeTokens, answers_of, positions_of, sampler, score_of
from scripted_server import Manner, ScriptedServer

import specbench.check.bias
import specbench.check.servers
from specbench.base.errors import RunError, UsageError
from specbench.check.bias import LEVEL, Positions, compare_samples, compare_with_target, level_at
from specbench.check.render import server_parts
from specbench.check.servers import ServerCheck
from specbench.servers.client import ServerClient
from specbench.show.document import Paragraph
from specbench.specs.servers import ServerSpec

# --- Statistics -----------------------------------------------------------------------------------

FAULTS: dict[Fault, tuple[int, int | None]] = {
    "no residual": (400, 1000),
    "argmax": (100, 250),
    "top-p of p": (200, None),
    "top-p of q": (400, None),
    "shared noise": (600, 2000),
    "shared test": (600, None),
}
"""Answers of 8 tokens to each of two prompts with which a fault is found: by exact probabilities, and against an exact
server if so many show it.
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_engines_were_shipped_with_are_found(fault):
    exact, against = FAULTS[fault]
    model = ThreeTokens() if fault.startswith("shared") else MadeUpModel(seed=1)
    answers = answers_of(sampler(model, 8, fault), 2, exact, seed=1)
    found = compare_with_target(positions_of(model, answers))
    assert found.p <= LEVEL
    if fault in ("argmax", "top-p of p"):
        assert found.peaked
    if against is not None:
        answers = answers_of(sampler(model, 8, fault), 2, against, seed=1)
        assert compare_samples(answers, answers_of(sampler(model, 8), 2, against, seed=2)).p <= LEVEL


@pytest.mark.parametrize("verifier", ["", "target only", "bfloat16"])
def test_exact_verifiers_pass_in_19_of_20_checks(verifier, monkeypatch):
    """Rounding to bfloat16 moves less mass than so many answers can show."""
    monkeypatch.setattr(specbench.check.bias, "_PERMUTATIONS", 200)
    alarms = np.zeros(2)
    for seed in range(20):
        model = MadeUpModel(seed)
        answers = answers_of(sampler(model, 6, verifier), 2, 60, seed)
        found = [
            compare_with_target(positions_of(model, answers), LEVEL),
            compare_samples(answers, answers_of(sampler(model, 6), 2, 60, seed + 100)),
        ]
        alarms += [each.p <= LEVEL for each in found]
        assert found[0].detectable is not None
        assert found[0].detectable > 0.01
    assert (alarms <= 1).all()


def test_looks_share_the_level_and_empty_or_equal_samples_say_nothing():
    fractions = (0.125, 0.25, 0.5, 1.0)
    levels = [level_at(now, before) for before, now in itertools.pairwise((0.0, *fractions))]
    assert sum(levels) == pytest.approx(LEVEL)
    same = [[("a", "b")] * 8]
    assert compare_samples(same, same).p == 1.0
    certain = Positions(np.array([[1.0, 0.0]] * 9), np.zeros(9, int), np.arange(9), np.zeros(9, int))
    found = compare_with_target(certain, LEVEL)
    assert (found.p > LEVEL, found.detectable) == (True, None)
    nothing = Positions(np.zeros((0, 2)), np.zeros(0, int), np.zeros(0, int), np.zeros(0, int))
    assert compare_with_target(nothing, LEVEL).detectable is None


def test_what_is_detectable_is_found_so_often():
    """A likeliest token in place of the drawn one, with half and all of the promised mass."""
    model, random = MadeUpModel(seed=3), np.random.default_rng(0)
    answers = answers_of(sampler(model, 8), 2, 300, seed=3)
    sample = positions_of(model, answers)
    promised = compare_with_target(sample, LEVEL).detectable
    assert promised is not None
    share = promised / float((1 - sample.probabilities[:, 0]).mean())
    found = dict[float, int]()
    for part in (0.5, 1.0):
        found[part] = 0
        for _ in range(40):
            drawn = (sample.probabilities.cumsum(1) < random.random((len(sample.tokens), 1))).sum(1)
            drawn = np.minimum(drawn, sample.probabilities.shape[1] - 1)
            moved = np.where(random.random(len(drawn)) < part * share, 0, drawn)
            planted = Positions(sample.probabilities, moved, sample.answers, np.arange(len(moved)))
            found[part] += compare_with_target(planted).p <= LEVEL
    assert found[1.0] >= 34 > 2 * found[0.5] - 20


# --- Servers --------------------------------------------------------------------------------------


class Simulated:
    """Servers that answer as their verifiers do, by the host of the address; a fault may also be an HTTP status.

    Attributes:
        drafted: Draft tokens that each answer reports; ``None`` for none.
        names: Whether answers name tokens; else only log probabilities do, which accepted draft tokens do not have.
        asked: Bodies of requests for answers, with the host.
    """

    def __init__(self, patch: pytest.MonkeyPatch, **faults: Fault | int) -> None:
        self.model, self.faults = MadeUpModel(seed=1), faults
        self.drafted: int | None = 3
        self.names = True
        self.asked: list[dict[str, Any]] = []
        transport = httpx2.MockTransport(self._answer)
        patch.setattr(specbench.check.servers, "ServerClient", partial(ServerClient, transport=transport))

    def check(self, *hosts: str, rounds: int = 40, score: bool = False) -> ServerCheck:
        def scored(prompt: int, ids: Sequence[int], ended: bool) -> tuple[np.ndarray, np.ndarray]:
            assert not ended
            return score_of(self.model)(prompt, list(ids))

        specs = [ServerSpec(host, f"http://{host}.test/v1") for host in hosts]
        prompts = [[{"role": "user", "content": str(prompt)}] for prompt in range(2)]
        return ServerCheck(specs, {}, prompts, 1.0, 8, rounds, scored if score else None)

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        host = request.url.host.removesuffix(".test")
        if request.method == "GET":
            return httpx2.Response(200, json={"data": [{"id": "m", "owned_by": "specbench"}]})
        body = json.loads(request.content)
        self.asked.append({**body, "host": host})
        fault = self.faults.get(host, "")
        if isinstance(fault, int):
            return httpx2.Response(fault, json={"error": {"message": "busy"}})
        prompt, off = int(body["messages"][-1]["content"]), body.get("speculation") == "off"
        random = np.random.default_rng([body["seed"], len(host)])
        ids = sampler(self.model, body["max_tokens"], "" if off else fault)(prompt, random)
        text = "".join(f" w{token}" for token in ids)
        facts = {} if self.drafted is None else {
            "timings": {"draft_n": 0 if off else self.drafted, "draft_n_accepted": 0}
        }  # fmt: skip
        facts["usage"] = {"prompt_tokens": 7}
        choice: dict[str, Any] = {"message": {"content": text}, "finish_reason": "length"}
        if self.names:
            choice["token_ids"] = ids
        if body.get("logprobs"):
            content = list[dict[str, Any]]()
            for place, token in enumerate(ids):
                p = self.model.at(prompt, ids[:place])[0]
                likeliest = dict.fromkeys([token, *np.argsort(-p)])  # as vLLM lists them
                listed = [{"token": f"t{other}", "logprob": math.log(p[other])} for other in [*likeliest][:6]]
                known = self.names or not place
                content.append({"token": f"t{token}", "id": token, "top_logprobs": listed if known else []})
            choice["logprobs"] = {"content": content}
        return httpx2.Response(200, json={"choices": [choice], **facts})


def said(check: ServerCheck) -> str:
    return " ".join(part.text for part in server_parts(check) if isinstance(part, Paragraph))


@pytest.mark.parametrize("how", ["target", "log probabilities", "server", "off"])
def test_a_biased_server_is_found_and_an_exact_one_passes(how, monkeypatch):
    servers = Simulated(monkeypatch, good="target only", bad="argmax", plain="")
    for host, verdict in (("good", "no deviation"), ("bad", "biased")):
        others = {"server": ("plain",), "off": (host,)}.get(how, ())
        check = servers.check(host, *others, rounds=160, score=how == "target")
        servers.asked.clear()
        assert all(done < 160 for done in check.run())
        assert check.verdict == verdict
        assert check.against == ("server" if how == "off" else how)
        assert check.complete
        assert len(servers.asked) <= check.requests + len(check.specs)
        seeds = [body["seed"] for body in servers.asked if body["seed"]]
        assert len(seeds) == len(set(seeds)), "no answer repeats the random numbers of another"
    if how != "server":
        assert check.done < 160, "a bias that is sure ends the check early"
    assert said(check).startswith("BIASED: sampled output differs from ")
    assert ": likely tokens are too frequent, p = " in said(check)


def test_each_sentence_says_only_what_its_numbers_hold(monkeypatch):
    servers = Simulated(monkeypatch, good="")
    check = servers.check("good", "good")
    assert said(check).startswith(
        "Too few positions: no round of answers is complete (0 answers, 0 positions"
    )
    assert (check.verdict, check.to_dict()["p"]) == ("too few positions", None)
    few = servers.check("good", rounds=1, score=True)
    list(few.run())
    assert "hardly anything was drafted (2 answers, 14 positions, 6 draft tokens)" in said(few)
    servers.drafted = None
    few = servers.check("good", "good", rounds=1)
    list(few.run())
    assert "not even a large deviation would have been found" in said(few)
    unknown = servers.check("good", rounds=60, score=True)
    list(unknown.run())
    assert said(unknown).startswith("No deviation from the target above ")
    assert "The server does not report its drafts: this holds only if it speculates." in said(unknown)
    other = servers.check("good", rounds=60)
    other.score = lambda prompt, ids, _: score_of(MadeUpModel(seed=9))(prompt, list(ids))
    list(other.run())
    assert "First tokens, which are never drafted, differ as well" in said(other)
    other.biased = False
    assert "Only first tokens differ, which are never drafted" in said(other)


def test_a_server_is_scored_as_far_as_it_names_its_tokens(monkeypatch):
    servers = Simulated(monkeypatch, good="")
    servers.names = False
    check = servers.check("good", rounds=40, score=True)
    check.lengths = [7, 7]
    list(check.run())
    assert check.verdict == "no deviation"
    check = servers.check("good", score=True)
    check.lengths = [7, 8]
    with pytest.raises(UsageError, match="reads a prompt of 8 tokens as 7"):
        list(check.run())
    with pytest.raises(UsageError, match="no log probabilities of accepted draft tokens"):
        list(servers.check("good").run())


def test_an_interrupt_keeps_complete_rounds_and_a_busy_server_is_asked_again(monkeypatch):
    monkeypatch.setattr(specbench.check.servers, "_PAUSE_S", 0.0)
    servers = Simulated(monkeypatch, good="")
    check = servers.check("good", score=True)
    running: Iterator[int] = check.run()
    for _ in range(5):
        next(running)
    running.close()
    check.look()
    assert (check.done, check.complete) == (4, False)
    assert "Interrupted: these are the results so far." in said(check)
    servers = Simulated(monkeypatch, down=503)
    with pytest.raises(RunError, match="refuses a request with status 503: busy"):
        list(servers.check("down").run())
    assert len(servers.asked) == 4


# --- The command ----------------------------------------------------------------------------------


def test_two_servers_are_compared_from_the_command_line(cli, monkeypatch):
    with ScriptedServer() as one, ScriptedServer(Manner(another=True)) as other:
        asked = ("check", "--server", one.url, "--against", other.url, "-t", 1, "--limit", 200)
        result = cli(*asked)
        assert result.code == 1
        assert "BIASED: sampled output differs from the other server" in result.out
        assert "First tokens, which are never drafted, differ as well" in result.out
        assert "Sends at most 400 requests: 4 prompts, 50 times each to each of 2 servers" in result.err
        figures = cli(*asked, "--json").json(code=1)
        assert (figures["check"], figures["verdict"], figures["complete"]) == ("server", "biased", True)
        assert cli("check", "--server", one.url, "--against", one.url, "-t", 1, "--limit", 16, "-q").code == 1
        assert len(other.asked) < 400

        original = ServerCheck._keep

        def interrupted(check: ServerCheck, received: Any) -> None:
            if check.done == 3:
                raise KeyboardInterrupt
            original(check, received)

        monkeypatch.setattr(ServerCheck, "_keep", interrupted)
        result = cli(*asked)
        assert result.code == 130
        assert "(12 answers, " in result.out
        assert "Interrupted: these are the results so far." in result.out


def test_what_cannot_be_checked_is_refused(cli):
    with ScriptedServer() as server:
        for words, fragment in (
            ((), "--server checks sampled output"),
            (("-t", 0.5), "Log probabilities of servers are those of temperature 1"),
            (("-t", 1, "--gamma", 3), "--gamma does not go with --server"),
            (("-t", 1, "--against", "off"), "No field of a request switches the speculation"),
            (("-t", 1, "--target", "x", "--against", server.url), "--target does not go with --against"),
            (("-t", 1, "--limit", 4), "refuses a request with status 400: no log probabilities"),
        ):
            cli("check", "-q", "--server", server.url, *words).refused(2, fragment)
        server.manner.logprobs = {"content": [{"token": "a"}]}
        cli("check", "-q", "--server", server.url, "-t", 1).refused(2, "log probabilities have another form")
    cli("check", "--against", "off").refused(2, "--against is given without --server")
