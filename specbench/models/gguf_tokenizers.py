"""Tokenizers of GGUF files, built from the file's vocabulary by the rules of llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from specbench.base.errors import UsageError

SAFETENSORS = "Use the model's safetensors instead."

# A rule is a list of regular expressions. Text is cut into the matches of the first and what is between them, each of
# these by the second, and so on. Where the original `tokenizer.json` says something else than llama.cpp does, the rule
# is llama.cpp's: for `tekken`, say, letters outside ASCII have no case.
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|{_SPACES}"


_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]*[\p{L}&&[^A-Z]]+|[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]+[\p{L}&&[^A-Z]]*"
    rf"|\p{{N}}|{_SIGNS}[\r\n/]*|{_SPACES}"
)
_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt-2 a.x-4.0 mellum trillion granite-docling", (_GPT2,)),
    ("smollm mellum2", (r"\p{N}", _GPT2)),
    ("llama3 llama-v3 llama-bpe falcon3 pixtral midm-2.0 lfm2", (_LLAMA3,)),
    ("qwen2 deepseek-r1-qwen kormo megrez", (_QWEN2,)),
    ("qwen35", (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
        rf"|{_SPACES}",
    )),
    ("tekken", (_TEKKEN,)),
)  # fmt: skip

PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    name: rule for names, rule in _RULES for name in names.split()
}
"""llama.cpp's names of pre-tokenizers whose rules are known."""

_BOS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2", "tekken"}
"""Pre-tokenizers whose texts begin with a BOS token, if the file does not say; and that keep a piece whole if it is a
token, in place of merging it from its parts."""

_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens by the names that `transformers` uses, and what llama.cpp calls them."""

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # llama.cpp's types of tokens
_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>",
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<turn|>",
    "<end_of_utterance>", "<|tool_response>", "<｜end▁of▁sentence｜>",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
}  # fmt: skip
"""Tokens that end an output in llama.cpp, whatever the file says of them."""
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ALWAYS_CONTROL = _ENDS | {
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>",
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>",
}  # fmt: skip
"""Tokens that llama.cpp treats as special even if the file does not mark them so."""


def end_ids(keys: Mapping[str, Any]) -> list[int]:
    """Return the ids of the tokens with which llama.cpp ends an output of a file with this header."""
    ids = {token: i for i, token in enumerate(keys["tokenizer.ggml.tokens"])}
    ends = _ENDS & ids.keys()
    if {"<|return|>", "<|call|>"} <= ends or ("<|flush|>" in ends and ends & {"<|call|>", "<|calls|>"}):
        ends.discard("<|end|>")  # there it ends a message, and others follow
    if "<|tool_response>" in ends:
        ends.discard("</s>")
    given = (keys.get(f"tokenizer.ggml.{key}_token_id", -1) for key in _END_KEYS)
    return sorted({each for each in given if 0 <= each < len(ids)} | {ids[token] for token in ends})


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
        raise UsageError(f"The GGUF file {file!r} has a token twice in its vocabulary.", SAFETENSORS)
    types = dict(zip(tokens, keys.get("ggml.token_type") or [1] * len(tokens), strict=True))
    special = {token for token, kind in types.items() if kind in (_UNKNOWN, _CONTROL)}
    special |= _ALWAYS_CONTROL & types.keys()
    ids = {name: keys.get(f"ggml.{key}_token_id") for name, key in _NAMED.items()}
    match keys.get("ggml.model"):
        case "gpt2":
            pre = keys.get("ggml.pre")
            tokenizer = _byte_level(vocabulary, keys.get("ggml.merges"), pre, file)
            add_bos = pre in _BOS
        case "llama":
            prefix = keys.get("ggml.add_space_prefix", True)
            tokenizer = _sentencepiece(vocabulary, keys["ggml.scores"], prefix=prefix)
            add_bos = True
            for name, token in {"bos": 1, "eos": 2, "unk": 0}.items():
                if ids[name] is None and tokens[token] in special:
                    ids[name] = token
        case other:
            raise UsageError(
                f"The GGUF file {file!r} has a tokenizer of the kind {other!r}; 'gpt2' and 'llama' can be read.",
                SAFETENSORS,
            )
    add_bos = keys.get("ggml.add_bos_token", add_bos)
    if add_bos and ids["bos"] is None:
        raise UsageError(
            f"The GGUF file {file!r} does not say its BOS token, with which texts begin.", SAFETENSORS
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


def _byte_level(vocabulary: dict[str, int], merges: list[str] | None, pre: Any, file: str) -> Tokenizer:
    if pre not in PRE_TOKENIZERS:
        raise UsageError(
            f"The GGUF file {file!r} splits its text with the pre-tokenizer {pre!r}, whose rule is not known.",
            SAFETENSORS,
        )
    if merges is None:
        raise UsageError(f"The GGUF file {file!r} has no merges for its tokens.", SAFETENSORS)
    pairs = [(merge[:at], merge[at + 1 :]) for merge in merges for at in [merge.index(" ", 1)]]
    tokenizer = Tokenizer(BPE(vocabulary, pairs, ignore_merges=pre in _BOS))
    tokenizer.pre_tokenizer = splitter(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: dict[str, int], scores: list[float], *, prefix: bool) -> Tokenizer:
    """Merges in the order of the scores; with ``prefix``, a space begins each text, also one that begins with one."""
    merges = generate_merges(vocabulary, dict(zip(vocabulary, scores, strict=True)))
    tokenizer = Tokenizer(BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces] if prefix else [spaces])
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if prefix else decoding)
    return tokenizer


def splitter(pre: str) -> pre_tokenizers.PreTokenizer:
    """Return what splits text by the rule of a pre-tokenizer, and spells the pieces by their bytes."""
    stages = [pre_tokenizers.Split(Regex(stage), behavior="isolated") for stage in PRE_TOKENIZERS[pre]]
    return pre_tokenizers.Sequence(
        [*stages, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
