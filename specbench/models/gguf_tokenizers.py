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
_UNCONTRACTED = rf"{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|{_SPACES}"
_QWEN2 = f"{_CONTRACTION}|{_UNCONTRACTED}"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|{_SPACES}"


def _by_case(letters: str, ending: str, digits: str) -> str:
    """Words end before an upper-case letter that follows a lower-case one."""
    before, upper, lower = r"[^\r\n\p{L}\p{N}]?", rf"[{letters}&&[^a-z]]", rf"[{letters}&&[^A-Z]]"
    words = f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}|{_SIGNS}[\r\n/]*|{_SPACES}"


def _marked(digits: str) -> str:
    """Words of letters and marks, whatever their case."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_CONTRACTION}?"
    return rf"{word}|{digits}|{_SIGNS}[\r\n/]*|{_SPACES}"


_GPT4O = _by_case(r"\p{L}", f"{_CONTRACTION}?", r"\p{N}{1,3}")
_ASCII_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_SIGNED_WORD = rf"{_ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = rf"{_SIGNED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_CJK = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+"
_OLD_CJK = r"[[\x{800}-\x{9fa5}\x{ac00}-\x{d7ff}]&&[^\s]]+"
_ALPHABETIC = (  # the letters with case that Unicode had when DeepSeek's rule was written
    r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c88}\x{2d00}-\x{2d2d}\x{a790}-\x{ab68}"
    r"\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1df1e}]]"
)
_FULL_WIDTH = r"\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3001}\x{3002}"
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+"
_HAN = r"\x{3400}-\x{4dbf}\x{4e00}-\x{9fff}\x{f900}-\x{faff}\x{20000}-\x{2a6df}\x{2a700}-\x{2ebef}\x{2f800}-\x{2fa1f}"
_KIMI_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_CONTRACTION}?"
_ASIAN = (
    r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{8c48}-\x{faff}\x{3040}-\x{30ff}\x{ff65}-\x{ff9f}\x{2f00}-\x{2fdf}"
    r"\x{e40}-\x{eff}\x{1780}-\x{17ff}\x{1000}-\x{109f}\x{aa60}-\x{aa7f}\x{a9e0}-\x{a9ff}\x{ac00}-\x{d7af}"
    r"\x{1100}-\x{11ff}]+"
)
_KOREAN = r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+"
_CJK_SIGNS = (
    r"[\x{ff01}\x{2026}\x{201c}\x{201d}\x{2018}\x{2019}\x{2014}\x{ff1a}\x{ff1b}\x{ff0c}\x{3001}-\x{303f}]+"
)

_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("default", (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}")),
    (
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe modern-bert gigachat"
        " a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling",
        (_GPT2,),
    ),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        (r"\p{N}", _GPT2),
    ),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe glm4"
        " chatglm-bpe",
        (_LLAMA3,),
    ),
    ("jais-2", (_LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + "|".join(
        [rf"\s{{{1 << size}}}(?!\S)" for size in range(9, 1, -1)] + [r"\s{1,2}(?!\S)", r"\s"]),)),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        (_QWEN2,),
    ),
    ("qwen35", (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
        rf"|{_SPACES}",
    )),
    ("laguna", (r"[^\n]+|\n+", _QWEN2)),
    ("ufakzeka", (_UNCONTRACTED,)),
    ("minicpm5", (r"\p{N}{1,3}", _QWEN2.replace(r"|\p{N}|", r"|\p{N}+|"))),
    ("seed-coder", (rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    ("bailingmoe bailingmoe2 llada-moe", (
        rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    )),
    ("exaone-moe", (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_SIGNS}[\r\n/]?"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )),
    ("tekken", (_by_case(r"\p{L}", "", r"\p{N}"),)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", (_GPT4O,)),
    ("granite-embed-multi-97m", (_by_case(r"[\p{L}\p{M}]", f"{_CONTRACTION}?", r"\p{N}{1,3}"),)),
    ("tiny_aya cohere2moe", (_marked(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"),)),
    ("youtu", (rf"{_KOREAN}|{_CJK_SIGNS}|[\x{{3105}}-\x{{312f}}]+|{_CJK}", _marked(r"\p{N}"))),
    ("deepseek-llm", (
        r"[\r\n]", rf"\s?{_ALPHABETIC}+", rf"\s?[!-/:-~{_FULL_WIDTH}]+", r"\s+\z", _OLD_CJK, r"\p{N}+",
    )),
    ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _OLD_CJK, r"\p{N}")),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", (r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    ("spark2_5", (
        r"\p{N}{1,3}", _CJK, rf"{_SIGNED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}",
    )),
    ("afmoe", (r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _DEEPSEEK3)),
    ("kimi-k2", (rf"[{_HAN}]+|{_KIMI_WORD}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|{_SPACES}",)),
    ("falcon", (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}")),
    ("bloom poro-chat gpt3-finnish", (_BLOOM,)),
    ("viking", (_BLOOM, r"\p{N}")),
    ("superbpe", (r"\p{N}+", r"(?=([0-9]{3})+(?![0-9]))")),
    ("chameleon", (
        "<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2,
    )),
)  # fmt: skip

PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    name: rule for names, rule in _RULES for name in names.split()
}
"""llama.cpp's names of pre-tokenizers whose rules are known."""

_BOS = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
}  # fmt: skip
_BOS_BY_DEFAULT = {*_BOS, "chameleon"}
_WHOLE_PIECES = {*_BOS, "youtu", "minicpm5", "granite-embed-multi-97m"}
"""Pre-tokenizers that keep a piece whole if it is a token, in place of merging it from its parts."""

_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens by the names that `transformers` uses, and what llama.cpp calls them."""

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # llama.cpp's types of tokens
_ALWAYS_CONTROL = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
    "[EOT]", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|eom_id|>", "<|fim_prefix|>", "<fim-prefix>",
    "<fim_prefix>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<|fim_middle|>", "<fim-middle>", "<fim_middle>",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<|file_sep|>",
}  # fmt: skip
"""Tokens that llama.cpp treats as special even if the file does not mark them so."""


def build_tokenizer(keys: Mapping[str, Any], file: str) -> PreTrainedTokenizerFast:
    """Build the tokenizer that a file's header describes.

    Args:
        file: The file as messages name it.

    Raises:
        UsageError: The kind of tokenizer or its pre-tokenizer is not known.
    """
    model = str(keys.get("general.name", "")).lower()
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
            pre = keys.get("ggml.pre") or "default"
            tokenizer = _byte_level(vocabulary, keys.get("ggml.merges"), pre, file)
            add_bos = pre in _BOS_BY_DEFAULT
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
    stripping = special if "phi-3" in model or "phi3" in model else set()
    stripping = stripping - {"<unk>", "<s>", "<|endoftext|>"}
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token in tokens if types[token] == _USER_DEFINED]
    )
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True, rstrip=token in stripping)
            for token in tokens
            if token in special
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=keys.get("chat_template"),
        add_bos_token=add_bos,
        add_eos_token=keys.get("ggml.add_eos_token", False),
        **{f"{name}_token": tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)},
    )


def _byte_level(vocabulary: dict[str, int], merges: list[str] | None, pre: str, file: str) -> Tokenizer:
    if pre not in PRE_TOKENIZERS:
        raise UsageError(
            f"The GGUF file {file!r} splits its text with the pre-tokenizer {pre!r}, whose rule is not known.",
            SAFETENSORS,
        )
    if merges is None:
        raise UsageError(f"The GGUF file {file!r} has no merges for its tokens.", SAFETENSORS)
    pairs = [(merge[:at], merge[at + 1 :]) for merge in merges for at in [merge.index(" ", 1)]]
    tokenizer = Tokenizer(BPE(vocabulary, pairs, ignore_merges=pre in _WHOLE_PIECES))
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
