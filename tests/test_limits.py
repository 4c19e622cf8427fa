"""What the machine can do, other decoders in processes of their own, and what copies lose: on tiny models."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import limits
import passes
import peers
import pytest
import quality
import torch
import vs_transformers
from peers import PeerError, Taken, check_peer, check_python, load_peer
from tiny import tiny_language_model

from specbench.backends.torch.scorer import Scorer


def last_json(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """What a benchmark has printed, and its line of JSON."""
    printed = capsys.readouterr().out
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return printed, result


# -- limits -------------------------------------------------------------------------------------------


def test_every_form_is_measured_against_memory(models, capsys, monkeypatch):
    monkeypatch.setattr(passes, "BUFFER_BYTES", 1 << 16)
    monkeypatch.setattr(limits, "PROFILED", 2)
    forms = [word for form in ("float32", "int8", limits.DRAFTER) for word in ("--form", form)]
    arguments = ["--model", str(models / "target"), *forms, "--context", "8", "--rounds", "3"]
    assert limits.main(arguments) == 0
    printed, result = last_json(capsys)
    rows = {row["form"]: row for row in result["rows"]}
    assert list(rows) == ["float32", "int8", limits.DRAFTER]
    assert rows["float32"]["over_float32"] == 1
    assert rows["int8"]["over_float32"] == pytest.approx(
        rows["float32"]["pass_ms"] / rows["int8"]["pass_ms"], abs=0.01
    )
    assert rows["float32"]["weight_mb"] == pytest.approx(4 * rows["int8"]["weight_mb"], abs=0.02)
    for row in rows.values():
        assert row["model"] == "target"
        assert row["least_ms"] / row["pass_ms"] == pytest.approx(row["share"], abs=0.1)
        assert len(row["operators"]) == limits.SHOWN
        assert all(each["ms"] > 0 and each["calls"] > 0 for each in row["operators"])
        spent = sum(each["ms"] for each in row["operators"]) + row["other_operators_ms"]
        assert row["outside_ms"] == pytest.approx(max(0.0, row["pass_ms"] - spent), abs=0.01)
        assert f"target {row['form']}, ms of a pass" in printed
    assert result["beside"] == result["busy"] == []


def test_passes_beside_a_busy_process(models, capsys, monkeypatch):
    monkeypatch.setattr(passes, "BUFFER_BYTES", 1 << 16)
    monkeypatch.setattr(limits, "PROFILED", 1)
    sizes = ["--context", "8", "--rounds", "2", "--form", "float32"]
    assert limits.main(["--model", str(models / "target"), *sizes, "--busy"]) == 0
    printed, result = last_json(capsys)
    assert {row["tokens"] for row in result["busy"]} == {1, limits.VERIFIED}
    for row in result["busy"]:
        assert row["ratio"] == pytest.approx(row["busy_ms"] / row["quiet_ms"], rel=0.05)
        assert f"{row['form']:12} {row['way']:12}" in printed


def test_a_model_that_cannot_be_loaded_is_left_out_with_its_reason(models, capsys, monkeypatch):
    monkeypatch.setattr(passes, "BUFFER_BYTES", 1 << 16)
    arguments = ["--model", str(models / "nowhere"), "--form", "float32"]
    assert limits.main(arguments) == 0
    printed, result = last_json(capsys)
    (row,) = result["rows"]
    assert "reason" in row
    assert "left out" in printed


def test_beside_others(models, capsys, monkeypatch):
    monkeypatch.setattr(passes, "BUFFER_BYTES", 1 << 16)
    monkeypatch.setattr(limits, "PROFILED", 1)
    sizes = ["--context", "8", "--rounds", "2", "--limit", "2", "--tokens", "6", "--form", "float32"]
    drafts = ["--setting", "lookup@2", "--peer", "ctranslate2"]
    arguments = ["--model", str(models / "target"), *sizes, "--beside", "float32", *drafts]
    assert limits.main(arguments) == 0
    (found,) = last_json(capsys)[1]["beside"]
    assert (found["dtype"], found["prompts"]) == ("float32", 2)
    names = {row["name"] for row in found["rows"]}
    assert {"generate", "prompt lookup", "specbench plain", "specbench lookup@2"} <= names


# -- peers --------------------------------------------------------------------------------------------

STAND_IN = """
import json, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

class CommonParams(SimpleNamespace):
    def __init__(self):
        super().__init__(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace(),
                         speculative=SimpleNamespace(draft=SimpleNamespace(mparams=SimpleNamespace())))

common_speculative_type = SimpleNamespace(
    COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE=1, COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE=2
)

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["n_predict"] == 13:
            self.send_error(500)
            return
        tokens = [token + 1 for token in asked["prompt"]][: asked["n_predict"]]
        answer = json.dumps({"tokens": tokens, "timings": {"predicted_ms": 250.0}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass

class Server:
    def __init__(self, params):
        print("what a library prints")
        server = HTTPServer(("127.0.0.1", 0), Handler)
        self.listening_address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
"""


@pytest.fixture
def python(tmp_path) -> str:
    """An interpreter of an environment of its own, which has a stand-in for llama.cpp."""
    (tmp_path / "xllamacpp.py").write_text(STAND_IN)
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


@pytest.fixture
def gguf(tmp_path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


needs_a_shell = pytest.mark.skipif(os.name == "nt", reason="the stand-in is started by a shell")


@needs_a_shell
@pytest.mark.parametrize("way", ["", ":lookup", ":draft"])
def test_a_decoder_answers_from_its_own_environment(tmp_path, gguf, python, way):
    places = f"{gguf},{gguf}" if way == ":draft" else str(gguf)
    peer = check_peer(f"xllamacpp{way}={places}")
    decode = load_peer(peer, tiny_language_model(), tmp_path, 1, {"xllamacpp": python})
    for count in (2, 3):
        taken = decode([5, 6, 7], count)
        assert taken == Taken([6, 7, 8][:count], taken.seconds, 0.25, 1)
        assert taken.seconds > 0
    with pytest.raises(PeerError, match="HTTPError"):
        decode([5], 13)


@pytest.mark.parametrize("peer", ["ctranslate2", "onnxruntime-genai"])
def test_what_is_not_installed_has_a_reason(tmp_path, peer):
    with pytest.raises(PeerError, match="No module named"):
        load_peer(peer, tiny_language_model(), tmp_path, 1)


@needs_a_shell
def test_a_decoder_that_dies_has_a_reason(tmp_path, gguf):
    dead = tmp_path / "dead"
    dead.write_text("#!/bin/sh\nexit 3\n")
    dead.chmod(0o755)
    with pytest.raises(PeerError, match="exit code 3"):
        load_peer(f"xllamacpp={gguf}", tiny_language_model(), tmp_path, 1, {"xllamacpp": str(dead)})


def test_names_of_decoders(tmp_path, gguf):
    for peer in ("ctranslate2", f"openvino-genai={tmp_path}", f"xllamacpp:draft={gguf},{gguf}"):
        assert check_peer(peer) == peer
    for peer in (
        "nobody",
        "xllamacpp",
        f"xllamacpp={gguf}x",
        f"xllamacpp:draft={gguf}",
        f"ctranslate2={gguf}",
    ):
        with pytest.raises(ValueError, match=r".*"):
            check_peer(peer)
    assert check_python(f"xllamacpp={sys.executable}") == ("xllamacpp", sys.executable)
    for text in ("xllamacpp", "xllamacpp=nowhere", f"nobody={sys.executable}"):
        with pytest.raises(ValueError, match=r".*"):
            check_python(text)


@needs_a_shell
def test_others_stand_in_the_table(models, gguf, python, capsys):
    arguments = ["--target", str(models / "target"), "--dtype", "float32", "--limit", "1", "--tokens", "4"]
    given = ["--peer", f"xllamacpp={gguf}", "--peer-python", f"xllamacpp={python}", "--peer", "ctranslate2"]
    assert vs_transformers.main([*arguments, *given]) == 0
    printed = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(printed.out.splitlines()[-1])["rows"]}
    assert rows["xllamacpp"]["differs"] == 1
    assert "ctranslate2" not in rows
    assert "ctranslate2 is left out: ModuleNotFoundError" in printed.err
    peer = rows["xllamacpp"]["over_best_peer"][0]
    assert peer == 1
    plain = rows["specbench plain"]
    over = plain["tokens_per_second"][0] / rows["xllamacpp"]["tokens_per_second"][0]
    assert plain["over_best_peer"][0] == pytest.approx(over, rel=0.01)


def test_outputs_of_a_rounded_target_are_compared_with_its_plain_ones(models, capsys):
    arguments = ["--target", str(models / "target"), "--dtype", "int8", "--limit", "2", "--tokens", "12"]
    assert vs_transformers.main([*arguments, "--setting", "lookup@3"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]}
    assert rows["specbench plain"]["identical"] == 2
    assert rows["specbench lookup@3"]["differs"] == 0
    assert rows["generate"]["over_best_peer"] is None
    with pytest.raises(SystemExit):
        vs_transformers.parse([*arguments, "--without", "specbench plain"])


# -- quality ------------------------------------------------------------------------------------------


def test_copies_are_compared_with_the_original(models, capsys):
    forms = [word for form in quality.FORMS for word in ("--form", form)]
    sizes = ["--prompts", "chat", "--limit", "3", "--tokens", "20"]
    assert quality.main(["--model", str(models / "target"), *forms, *sizes]) == 0
    printed, result = last_json(capsys)
    rows = {row["form"]: row for row in result["rows"]}
    assert list(rows) == list(quality.FORMS)
    for row in rows.values():
        assert row["places"] == 3 * 20
        mean, low, high = row["kl"]
        assert 0 < low < mean < high < row["kl_99"]
        assert 0.5 < row["agreement"][0] <= 1
        assert row["form"] in printed
    assert rows["bfloat16"]["kl"][0] < rows["int8"]["kl"][0]


def test_an_answer_is_read_in_parts(monkeypatch):
    scorer = Scorer(tiny_language_model().model)
    prompt, answer = [1, 2, 3], [5, 8, 13, 21, 34, 55, 89]
    rows = quality.answer_rows(scorer, prompt, answer)
    scorer.begin()
    whole = scorer.logits(prompt, answer[:-1])
    torch.testing.assert_close(rows, whole)
    monkeypatch.setattr(quality, "CHUNK", 3)
    torch.testing.assert_close(quality.answer_rows(scorer, prompt, answer), whole)


def test_the_divergence_is_that_of_distributions():
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])
    kl, same = quality.differences(p.log() + 3, q.log() - 2)
    expected = torch.tensor([0.25 * torch.log(torch.tensor(2.0)), 0.0], dtype=torch.float64)
    torch.testing.assert_close(kl, expected, atol=1e-6, rtol=0)
    assert same.tolist() == [False, True]


def test_the_other_interpreter_needs_nothing_of_specbench():
    source = Path(peers.__file__).read_text()
    outside = [
        line for line in source.splitlines() if line.startswith(("import specbench", "from specbench"))
    ]
    assert outside == []
