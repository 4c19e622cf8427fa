"""Tokenizers of GGUF files, built from the file's vocabulary by the rules of llama.cpp.

``transformers`` builds tokenizers too, but some split or begin texts otherwise than llama.cpp: it has no rule for
`smollm`, merges the tokens of Llama 3, and adds no BOS token that the file does not ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from specbench.base.errors import UsageError

ORIGINAL = "Use the original checkpoint, in safetensors, instead."

# A rule is a list of regular expressions. Text is cut into the matches of the first and what is between them, each of
# these by the second, and so on.
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|{_SPACES}"

_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt-2 a.x-4.0 mellum trillion granite-docling", (_GPT2,)),
    ("smollm mellum2", (r"\p{N}", _GPT2)),
    ("llama3 llama-v3 llama-bpe falcon3 pixtral midm-2.0 lfm2", (_LLAMA3,)),
    ("qwen2 deepseek-r1-qwen kormo megrez", (_QWEN2,)),
    ("qwen35", (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
        rf"|{_SPACES}",
    )),
)  # fmt: skip

PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    name: rule for names, rule in _RULES for name in names.split()
}
"""llama.cpp's names of pre-tokenizers whose rules are known."""

_BOS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2"}
"""Pre-tokenizers whose texts begin with a BOS token, if the file does not say; and that keep a piece whole if it is a
token, in place of merging it from its parts."""

_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens by the names that `transformers` uses, and what llama.cpp calls them."""

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # llama.cpp's types of tokens
_ENDS = {
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<｜end▁of▁sentence｜>",
    "<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<reponame>", "<|file_sep|>",
}  # fmt: skip
"""Tokens of Llama, Qwen, SmolLM and DeepSeek that end an output in llama.cpp, whatever the file says of them."""
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_FIM = {f"<{bar}fim_{part}{bar}>" for part in ("prefix", "middle", "suffix") for bar in ("|", "")}
_ALWAYS_CONTROL = _ENDS | _FIM
"""Tokens that llama.cpp treats as special even if the file does not mark them so."""


def end_ids(keys: Mapping[str, Any]) -> list[int]:
    """Return the ids of the tokens with which llama.cpp ends an output of a file with this header."""
    ids = {token: i for i, token in enumerate(keys["tokenizer.ggml.tokens"])}
    named = (keys.get(f"tokenizer.ggml.{key}_token_id", -1) for key in _END_KEYS)
    return sorted(
        {end for end in named if 0 <= end < len(ids)} | {ids[token] for token in _ENDS & ids.keys()}
    )


def build_tokenizer(keys: Mapping[str, Any], file: str) -> PreTrainedTokenizerFast:
    """Build the tokenizer that a file's header describes.

    Args:
        file: The file as messages name it.

    Raises:
        UsageError: The kind of tokenizer or its pre-tokenizer is not known.
    """
    keys = {key.removeprefix("tokenizer."): value for key, value in keys.items()}
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(keys["ggml.tokens"])]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise UsageError(f"The GGUF file {file!r} has a token twice in its vocabulary.", ORIGINAL)
    types = dict(zip(tokens, keys.get("ggml.token_type") or [1] * len(tokens), strict=True))
    special = {token for token, kind in types.items() if kind in (_UNKNOWN, _CONTROL)}
    special |= _ALWAYS_CONTROL & types.keys()
    ids = {name: keys.get(f"ggml.{key}_token_id") for name, key in _NAMED.items()}
    kind, pre = keys.get("ggml.model"), keys.get("ggml.pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise UsageError(
            f"The GGUF file {file!r} has a tokenizer of the kind {kind!r} and splits its text with the pre-tokenizer"
            f" {pre!r}, whose rule is not known.",
            ORIGINAL,
        )
    pairs = [(merge[:at], merge[at + 1 :]) for merge in keys["ggml.merges"] for at in [merge.index(" ", 1)]]
    tokenizer = Tokenizer(BPE(vocabulary, pairs, ignore_merges=pre in _BOS))
    tokenizer.pre_tokenizer = splitter(str(pre))
    tokenizer.decoder = decoders.ByteLevel()
    add_bos = keys.get("ggml.add_bos_token", pre in _BOS)
    if add_bos and ids["bos"] is None:
        raise UsageError(
            f"The GGUF file {file!r} does not say its BOS token, with which texts begin.", ORIGINAL
        )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token in tokens if types[token] == _USER_DEFINED]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in tokens if token in special]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=keys.get("chat_template"),
        add_bos_token=add_bos,
        add_eos_token=keys.get("ggml.add_eos_token", False),
        **{f"{name}_token": tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)},
    )


def splitter(pre: str) -> pre_tokenizers.PreTokenizer:
    """Return what splits text by the rule of a pre-tokenizer, and spells the pieces by their bytes."""
    stages = [pre_tokenizers.Split(Regex(stage), behavior="isolated") for stage in PRE_TOKENIZERS[pre]]
    return pre_tokenizers.Sequence(
        [*stages, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
