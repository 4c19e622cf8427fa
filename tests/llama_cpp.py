"""What llama.cpp itself makes of tiny GGUF files, as the wheel xllamacpp brings it.

    python tests/llama_cpp.py

asks it anew, and writes its answers to ``llama_cpp.json``.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from gguf_files import FACTS, HIDDEN, PROMPT, SIZE, TEXTS, TOKENIZERS, tokenizer_file, write_tiny
from hard_strings import HARD_STRINGS
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specbench.models.gguf_tokenizers import PRE_TOKENIZERS

ANSWERS = Path(__file__).with_suffix(".json")
_BYTES = bytes_to_unicode()
_EVERY = 48  # of the logarithms of probabilities, which are kept


@contextmanager
def llama_cpp(path: Path) -> Iterator[Any]:
    """Serve a file in float32, and yield a function that posts to the server."""
    import xllamacpp

    os.environ["GGML_NO_BACKTRACE"] = "1"
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.port, settings.n_ctx, settings.n_parallel = str(path), 0, 256, 1
    settings.warmup = settings.fit_params = False
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.verbosity = -1
    server = xllamacpp.Server(settings)
    address = server.listening_address

    def post(place: str, **body: Any) -> Any:
        return httpx2.post(address + place, json=body, timeout=60).json()

    yield post
    del server


def log_probabilities(path: Path) -> list[float]:
    """Of every token after the prompt."""
    with llama_cpp(path) as post:
        answer = post("/completion", prompt=PROMPT, n_predict=1, temperature=0, samplers=[], n_probs=SIZE)
    ranked = answer["completion_probabilities"][0]["top_logprobs"]
    return [value for _, value in sorted((each["id"], each["logprob"]) for each in ranked)]


def kept(values: Sequence[float]) -> list[float]:
    """The most likely token, and the logarithms of some probabilities."""
    return [int(np.argmax(values)), *(round(float(value), 4) for value in values[::_EVERY])]


def spelled(text: str) -> str:
    """A text as byte-level tokenizers spell it."""
    return "".join(_BYTES[byte] for byte in text.encode())


def pieces(pre: str, folder: Path) -> list[list[str]]:
    """How llama.cpp splits the hard strings: by a vocabulary that merges whatever is not split."""
    parts: dict[str, None] = dict.fromkeys(_BYTES.values())
    merges: dict[str, None] = {}
    texts = [spelled(text) for text in HARD_STRINGS]
    longer = {
        text[i:j] for text in texts for i, j in itertools.combinations(range(len(text) + 1), 2) if j > i + 1
    }
    for part in sorted(longer, key=lambda part: (len(part), part)):
        parts[part] = None
        merges |= dict.fromkeys(f"{part[:at]} {part[at:]}" for at in range(1, len(part)))
    tokens = list(parts)
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": list(merges), "add_bos_token": False}
    path = write_tiny(
        folder / "splits.gguf",
        "llama",
        tensors={"token_embd.weight": np.zeros((len(tokens), HIDDEN), np.float32), "output.weight": None},
        tokenizer={f"ggml.{key}": value for key, value in keys.items()},
    )
    with llama_cpp(path) as post:
        return [[tokens[i] for i in post("/tokenize", content=text)["tokens"]] for text in HARD_STRINGS]


def tokens_of(path: Path) -> list[list[int]]:
    """The tokens of a few texts, as a prompt."""
    with llama_cpp(path) as post:
        return [
            post("/tokenize", content=text, add_special=True, parse_special=True)["tokens"] for text in TEXTS
        ]


def checksums(splits: Sequence[Sequence[str]]) -> bytes:
    """A byte for each hard string's split."""
    return bytes(zlib.crc32(repr(list(each)).encode()) & 255 for each in splits)


def ask() -> dict[str, Any]:
    """What is kept of llama.cpp's answers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        facts = {
            str(fact): kept(log_probabilities(write_tiny(folder / "tiny.gguf", fact.architecture, keys=fact.keys,
                                                         tensors=fact.tensors)))
            for fact in FACTS
            if fact.refused is None
        }  # fmt: skip
        splits = {}
        for names in rules():
            answers = {checksums(pieces(pre, folder)) for pre in names}
            assert len(answers) == 1, f"llama.cpp tells {names} apart"
            splits[names[0]] = base64.b64encode(answers.pop()).decode()
        tokens = {name: tokens_of(tokenizer_file(name, folder)) for name in TOKENIZERS}
        return {"facts": facts, "tokens": tokens, "splits": splits}


def rules() -> list[list[str]]:
    """The names of pre-tokenizers that share a rule."""
    return [list(names) for _, names in itertools.groupby(PRE_TOKENIZERS, PRE_TOKENIZERS.get)]


if __name__ == "__main__":
    parts = [
        f'"{part}": {{\n'
        + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in answers.items())
        + "\n}"
        for part, answers in ask().items()
    ]
    ANSWERS.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
