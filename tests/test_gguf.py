"""GGUF files mean what llama.cpp takes them for: every fact of a header, and every rule that splits text."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_runs import refusal
from gguf_files import (
    FACTS,
    FAMILIES,
    PROMPT,
    SIZE,
    TEXTS,
    TOKENIZERS,
    VOCABULARY,
    Fact,
    byte_level,
    tokenizer_file,
    write_tiny,
)
from hard_strings import HARD_STRINGS
from llama_cpp import (
    ANSWERS,
    ask,
    checksums,
    kept,
    rules,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from specbench.base.errors import UsageError
from specbench.models.gguf import MODEL_TYPES, convert_gguf
from specbench.models.gguf_tokenizers import PRE_TOKENIZERS, splitter
from specbench.models.load import load_model
from specbench.options import LoadOptions

LLAMA_CPP: dict[str, Any] = json.loads(ANSWERS.read_text(encoding="utf-8"))
CONVERTED = [fact for fact in FACTS if fact.refused is None]


def converted(path: Path) -> Path:
    folder = path.parent / "converted"
    folder.mkdir(exist_ok=True)
    convert_gguf(path, folder, name=path.name)
    return folder


def written(fact: Fact, folder: Path) -> Path:
    return write_tiny(folder / "tiny.gguf", fact.architecture, keys=fact.keys, tensors=fact.tensors)


def after_prompt(folder: Path, prompt: list[int] = PROMPT) -> np.ndarray[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).numpy()


# -- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fact", CONVERTED, ids=str)
def test_the_converted_model_has_llama_cpps_probabilities(tmp_path, fact):
    best, *values = kept(after_prompt(converted(written(fact, tmp_path))))
    assert [best, *values] == pytest.approx(LLAMA_CPP["facts"][str(fact)], abs=3e-3)


@pytest.mark.parametrize("fact", [fact for fact in FACTS if fact.refused], ids=str)
def test_a_fact_that_cannot_be_converted_is_named(tmp_path, fact):
    message = refusal(converted, written(fact, tmp_path), kind=UsageError)
    assert fact.refused in message
    assert "safetensors" in message


@pytest.mark.slow
def test_llama_cpp_still_says_so():
    pytest.importorskip("xllamacpp", reason="llama.cpp (pip install xllamacpp) is not installed")
    answers = ask()
    for fact, values in LLAMA_CPP["facts"].items():
        assert answers["facts"][fact] == pytest.approx(values, abs=1e-3), fact
    for part in ("tokens", "splits"):
        assert answers[part] == LLAMA_CPP[part]


def test_files_of_another_kind_are_refused_by_name(tmp_path):
    adapter = Fact("llama", "", {"general.type": "adapter"})
    assert "adapter" in refusal(converted, written(adapter, tmp_path), kind=UsageError)
    path = tmp_path / "gpt-oss.gguf"
    path.write_bytes((tmp_path / "tiny.gguf").read_bytes().replace(b"llama", b"phi3x"))
    message = refusal(converted, path, kind=UsageError)
    assert "'phi3x') cannot be converted" in message
    assert "original checkpoint" in message


# -- the tokenizer -------------------------------------------------------------------------------


@pytest.mark.parametrize("names", rules(), ids=lambda names: names[0])
def test_text_is_split_as_in_llama_cpp(names):
    rule = splitter(names[0])
    splits = [[piece for piece, _ in rule.pre_tokenize_str(text)] for text in HARD_STRINGS]
    answers = base64.b64decode(LLAMA_CPP["splits"][names[0]])
    assert [
        split for split, ours, its in zip(splits, checksums(splits), answers, strict=True) if ours != its
    ] == []


@pytest.mark.parametrize(
    "keys",
    [
        {"pre": "no-such-rule"},
        {"pre": "deepseek-llm"},
        {"model": "llama"},
        {"merges": None},
    ],
)
def test_a_tokenizer_without_a_known_rule(tmp_path, keys):
    given = byte_level("gpt-2") | {f"ggml.{key}": value for key, value in keys.items()}
    path = write_tiny(tmp_path / "tiny.gguf", "llama", tokenizer=given)
    ((key, value),) = keys.items()
    assert str(value or key) in refusal(converted, path, kind=UsageError)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_becomes_the_tokens_of_llama_cpp(tmp_path, name):
    tokenizer = AutoTokenizer.from_pretrained(converted(tokenizer_file(name, tmp_path)))
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert ids == LLAMA_CPP["tokens"][name]
    for text, each in zip(TEXTS, ids, strict=True):
        shown = str(tokenizer.decode(each, skip_special_tokens=True))
        assert "<" in text or "  " in text or shown.strip() == text.strip()


@pytest.mark.parametrize(
    ("given", "ends"),
    [
        (["<|im_start|>", "<|im_end|>", "<|endoftext|>"], ["<|im_end|>", "<|endoftext|>"]),
        (["<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>"], ["<|eot_id|>", "<|eom_id|>"]),
        (["<a>", "<b>", "<c>"], ["<a>", "<c>"]),
    ],
)
def test_an_output_ends_where_it_does_in_llama_cpp(tmp_path, given, ends):
    """Its end tokens have these names, or the file says which they are."""
    tokens = [*VOCABULARY[: -len(given)], *given]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = byte_level("gpt-2", tokens=tokens, token_type=[1] * SIZE, merges=["1 2"], eos_token_id=0)
    if "<a>" in given:
        tokenizer |= {
            "ggml.eot_token_id": ids["<a>"],
            "ggml.eom_token_id": ids["<c>"],
            "ggml.eos_token_id": None,
        }
        tokenizer |= {"ggml.bos_token_id": None}
    path = write_tiny(tmp_path / "tiny.gguf", "llama", tokenizer=tokenizer)
    expected = {ids[token] for token in ends} | {tokenizer["ggml.eos_token_id"]} - {None}
    assert {*load_model(str(path), LoadOptions("float32", "cpu")).end_ids} == expected


def test_the_documentation_lists_what_can_be_read():
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
    assert {fact.architecture for fact in FACTS} == {*FAMILIES} == {*MODEL_TYPES}
    assert all(f"`{name}`" in page for name in (*FAMILIES, *PRE_TOKENIZERS))
