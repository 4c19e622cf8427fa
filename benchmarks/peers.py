"""Other decoders that load the same weights, for vs_transformers.py; each is installed apart with pip.

`ctranslate2` (tried: 4.8.5) and `onnxruntime-genai` (0.18.0, with `onnx` and `onnx-ir` for the conversion) have wheels
for Linux and convert a model of `transformers` themselves. On a CPU neither computes in bfloat16, so they get the
weights in float32, or, when asked for, quantised in their own way: then it is another model, and its tokens differ.
`openvino-genai` (2026.4.1) has wheels too and computes in bfloat16, but what converts for it (`optimum-intel`) wants
an older `transformers`: export the model in an environment of its own, and name the folder.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

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


PEERS = (
    "ctranslate2", "ctranslate2:int8", "onnxruntime-genai", "onnxruntime-genai:int4",
    "openvino-genai=FOLDER", "openvino-genai:f32=FOLDER",
)  # fmt: skip
"""What ``load_peer`` takes: a package, a precision, and the folder of a model that was converted already."""


def check_peer(peer: str) -> str:
    """The same name if it is one of ``PEERS``, with a folder that exists in the place of FOLDER.

    Raises:
        ValueError: It is not.
    """
    form = re.sub("=.+", "=FOLDER", peer)
    if form not in PEERS or ("=" in peer and not Path(peer.partition("=")[2]).is_dir()):
        raise ValueError(peer)
    return peer


def load_peer(peer: str, model: LanguageModel, folder: Path, threads: int) -> Any:
    """Convert the model into ``folder`` and load it; a function from prompt and number of tokens to ``Taken``."""
    what, _, converted = peer.partition("=")
    name, _, precision = what.partition(":")
    if name == "openvino-genai":
        return _openvino(converted, precision or "bf16", threads)
    source = folder / "transformers"
    if not source.exists():
        assert model.tokenizer is not None
        model.model.save_pretrained(source)
        model.tokenizer.save_pretrained(source)
    load = {"ctranslate2": _ctranslate2, "onnxruntime-genai": _onnxruntime}[name]
    return load(source, folder / peer.replace(":", "-"), precision, threads, model)


def _ctranslate2(source: Path, folder: Path, precision: str, threads: int, model: LanguageModel) -> Any:
    ctranslate2 = importlib.import_module("ctranslate2")
    converters = importlib.import_module("ctranslate2.converters")
    converters.TransformersConverter(str(source)).convert(str(folder), quantization=precision or "float32")
    generator = ctranslate2.Generator(
        str(folder), device="cpu", compute_type=precision or "float32", intra_threads=threads
    )
    tokenizer: Any = model.tokenizer

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


def _onnxruntime(source: Path, folder: Path, precision: str, threads: int, _: LanguageModel) -> Any:
    genai = importlib.import_module("onnxruntime_genai")
    builder = [
        sys.executable,
        "-m",
        "onnxruntime_genai.models.builder",
        "-e",
        "cpu",
        "-p",
        precision or "fp32",
    ]
    places = ["-i", str(source), "-o", str(folder), "-c", str(folder.parent / "cache")]
    subprocess.run([*builder, *places], check=True, capture_output=True)
    config = genai.Config(str(folder))
    config.overlay(
        f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {threads}}}}}}}}}'
    )
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


def _openvino(folder: str, precision: str, threads: int) -> Any:
    import numpy as np

    genai = importlib.import_module("openvino_genai")
    tensor = importlib.import_module("openvino").Tensor
    pipeline = genai.LLMPipeline(
        folder, "CPU", INFERENCE_PRECISION_HINT=precision, INFERENCE_NUM_THREADS=threads
    )

    def run(prompt: list[int], count: int) -> Taken:
        settings = genai.GenerationConfig()
        settings.max_new_tokens, settings.ignore_eos, settings.do_sample = count, True, False
        began = time.perf_counter()
        result = pipeline.generate(tensor(np.array([prompt], dtype=np.int64)), settings)
        return Taken([int(token) for token in result.tokens[0]], time.perf_counter() - began, 0.0, 1)

    return run
