"""Run other decoders that load the same weights, for vs_transformers.py and limits.py, each in a process of its own.

    python -m venv ~/peers && ~/peers/bin/pip install xllamacpp
    python benchmarks/vs_transformers.py --peer xllamacpp=model.gguf --peer-python xllamacpp=~/peers/bin/python

Each is installed with pip, in the environment of `--peer-python` or of specbench. `ctranslate2` (tried: 4.8.5) and
`onnxruntime-genai` (0.18.0; its conversion needs `onnx`, `onnx-ir`, `torch` and `transformers`) convert a model of
`transformers` themselves. On a CPU neither computes in bfloat16, so they get float32 weights, or on request their own
quantization, which is another model with other tokens. `openvino-genai` (2026.4.1) takes an exported folder (its
exporter, `optimum-intel`, needs an older `transformers`), or a GGUF file. `xllamacpp` is llama.cpp, and takes GGUF
files.

This file also runs in that process, without specbench: it reads a line of JSON for every prompt, and answers.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from specbench.models.load import LanguageModel


class Taken(NamedTuple):
    """One output and its times.

    Attributes:
        tokens: The output.
        seconds: Of the whole call.
        decode_s: From the first emission to the last; 0 where nobody knows.
        first: Tokens of the first emission.
    """

    tokens: list[int]
    seconds: float
    decode_s: float
    first: int


class PeerError(Exception):
    """The reason why a decoder is not available."""


PEERS = (
    "ctranslate2", "ctranslate2:int8", "onnxruntime-genai", "onnxruntime-genai:int4",
    "openvino-genai=MODEL", "openvino-genai:f32=MODEL", "openvino-genai:lookup=MODEL",
    "openvino-genai:draft=MODEL,MODEL",
    "xllamacpp=MODEL", "xllamacpp:lookup=MODEL", "xllamacpp:draft=MODEL,MODEL",
)  # fmt: skip
"""What ``load_peer`` takes: a package, a precision or a way to draft, and the files or folders it needs."""

PEER_NAMES = tuple(dict.fromkeys(peer.partition("=")[0] for peer in PEERS))
"""The same without files and folders: what rows are called."""

Decode = Callable[[list[int], int], Taken]
"""Decodes a prompt: token ids, and how many tokens to add."""


def check_peer(peer: str) -> str:
    """Return the name if it is one of ``PEERS`` and its files or folders exist.

    Raises:
        ValueError: It is not.
    """
    what, equals, places = peer.partition("=")
    form = what + equals + re.sub("[^,]+", "MODEL", places)
    if form not in PEERS or not all(Path(place).exists() for place in places.split(",") if place):
        raise ValueError(peer)
    return peer


def check_python(text: str) -> tuple[str, str]:
    """Return package and interpreter of PACKAGE=PATH.

    Raises:
        ValueError: It is something else.
    """
    name, _, path = text.partition("=")
    if name not in {peer.partition(":")[0] for peer in PEER_NAMES} or not Path(path).is_file():
        raise ValueError(text)
    return name, path


# --- Here ----------------------------------------------------------------------------------------------


def load_peer(
    peer: str, model: LanguageModel, folder: Path, threads: int, pythons: Mapping[str, str] | None = None
) -> Decode:
    """Start a decoder, which converts the model first if it has to.

    Args:
        peer: One of ``PEERS``.
        model: The weights, and the tokenizer.
        folder: For what is converted.
        threads: For it to use.
        pythons: Interpreters by package; this one where nothing is said.

    Raises:
        PeerError: It is not installed, or does not take this model.
    """
    what, _, places = peer.partition("=")
    name, _, way = what.partition(":")
    source = folder / "transformers"
    if not places and not source.exists():
        assert model.tokenizer is not None
        model.model.save_pretrained(source)
        model.tokenizer.save_pretrained(source)
    asked = {
        "name": name,
        "way": way,
        "places": [str(Path(place).resolve()) for place in places.split(",") if place],
        "source": str(source),
        "folder": str(folder / re.sub("[^a-z0-9-]", "-", what)),
        "threads": threads,
    }
    child = subprocess.Popen(
        [(pythons or {}).get(name, sys.executable), __file__, json.dumps(asked)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""},
        text=True,
    )
    _answer(child, name)  # ready

    def run(prompt: list[int], count: int) -> Taken:
        assert child.stdin is not None
        child.stdin.write(json.dumps([prompt, count]) + "\n")
        child.stdin.flush()
        return Taken(**_answer(child, name))

    return run


def _answer(child: subprocess.Popen[str], name: str) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise PeerError(f"{name} ended with exit code {child.wait()}")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise PeerError(answer["error"])
    return answer


# --- There ---------------------------------------------------------------------------------------------


def _ctranslate2(asked: Mapping[str, Any]) -> Decode:
    ctranslate2 = importlib.import_module("ctranslate2")
    converters = importlib.import_module("ctranslate2.converters")
    transformers = importlib.import_module("transformers")
    precision = asked["way"] or "float32"
    converters.TransformersConverter(asked["source"]).convert(asked["folder"], quantization=precision)
    generator = ctranslate2.Generator(
        asked["folder"], device="cpu", compute_type=precision, intra_threads=asked["threads"]
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked["source"])

    def run(prompt: list[int], count: int) -> Taken:
        began = time.perf_counter()
        (result,) = generator.generate_batch(
            [tokenizer.convert_ids_to_tokens(prompt)],
            max_length=count,
            min_length=count,
            sampling_topk=1,
            end_token=[],
            include_prompt_in_result=False,
        )
        return Taken(list(result.sequences_ids[0]), time.perf_counter() - began, 0.0, 1)

    return run


def _onnxruntime(asked: Mapping[str, Any]) -> Decode:
    genai = importlib.import_module("onnxruntime_genai")
    folder = Path(asked["folder"])
    builder = [
        sys.executable,
        "-m",
        "onnxruntime_genai.models.builder",
        "-e",
        "cpu",
        "-p",
        asked["way"] or "fp32",
    ]
    places = ["-i", asked["source"], "-o", str(folder), "-c", str(folder.parent / "cache")]
    built = subprocess.run([*builder, *places], capture_output=True, text=True)
    if built.returncode:
        raise RuntimeError(
            f"the conversion failed: {(built.stderr.splitlines() or ['nobody knows why'])[-1]}"
        )
    config = genai.Config(str(folder))
    options = {"session_options": {"intra_op_num_threads": asked["threads"]}}
    config.overlay(json.dumps({"model": {"decoder": options}}))
    loaded = genai.Model(config)

    def run(prompt: list[int], count: int) -> Taken:
        began = time.perf_counter()
        settings = genai.GeneratorParams(loaded)
        longest = len(prompt) + count
        settings.set_search_options(max_length=longest, min_length=longest, do_sample=False)
        generator = genai.Generator(loaded, settings)
        generator.append_tokens(prompt)
        first_at = 0.0
        while not generator.is_done():
            generator.generate_next_token()
            first_at = first_at or time.perf_counter()
        ended = time.perf_counter()
        tokens = [int(token) for token in generator.get_sequence(0)[len(prompt) :]]
        return Taken(tokens, ended - began, ended - first_at, 1)

    return run


_DRAFTED = 5
"""Draft length for openvino-genai; llama.cpp keeps its own default."""


def _openvino(asked: Mapping[str, Any]) -> Decode:
    numpy = importlib.import_module("numpy")
    genai = importlib.import_module("openvino_genai")
    tensor = importlib.import_module("openvino").Tensor
    way, places = asked["way"], asked["places"]
    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": asked["threads"]}
    if way in ("", "f32"):
        settings["INFERENCE_PRECISION_HINT"] = way or "bf16"
    elif way == "lookup":
        settings["prompt_lookup"] = True
    else:
        settings["draft_model"] = genai.draft_model(places[1], "CPU")
    pipeline = genai.LLMPipeline(places[0], "CPU", **settings)

    def run(prompt: list[int], count: int) -> Taken:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        if way in ("lookup", "draft"):
            config.num_assistant_tokens = _DRAFTED
        if way == "lookup":
            config.max_ngram_size = 3
        began = time.perf_counter()
        result = pipeline.generate(tensor(numpy.array([prompt], dtype=numpy.int64)), config)
        return Taken([int(token) for token in result.tokens[0]], time.perf_counter() - began, 0.0, 1)

    return run


def _llama_cpp(asked: Mapping[str, Any]) -> Decode:
    xllamacpp = importlib.import_module("xllamacpp")
    places = asked["places"]
    params = xllamacpp.CommonParams()
    params.model.path = places[0]
    params.n_ctx, params.n_parallel = 4096, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
    kinds = xllamacpp.common_speculative_type
    if asked["way"] == "lookup":
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    elif asked["way"] == "draft":
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        params.speculative.draft.mparams.path = places[1]
    server = xllamacpp.Server(params)

    def run(prompt: list[int], count: int) -> Taken:
        body = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0.0,
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        request = urllib.request.Request(  # noqa: S310 - its own address
            f"{server.listening_address}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        began = time.perf_counter()
        with urllib.request.urlopen(request) as answer:  # noqa: S310 - its own address
            found = json.load(answer)
        took = time.perf_counter() - began
        return Taken(found["tokens"], took, found["timings"]["predicted_ms"] / 1e3, 1)

    return run


def serve(asked: Mapping[str, Any]) -> None:
    """Load the requested decoder, and answer prompts until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    load = {
        "ctranslate2": _ctranslate2,
        "onnxruntime-genai": _onnxruntime,
        "openvino-genai": _openvino,
        "xllamacpp": _llama_cpp,
    }[asked["name"]]
    try:
        run = load(asked)
        say({})
        for line in sys.stdin:
            prompt, count = json.loads(line)
            say(run(prompt, count)._asdict())
    except Exception as error:  # whatever a library raises is the reason why it is left out
        say({"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"})


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
