"""Tiny models and tokenizers that the tests build in memory; nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from specbench import kernels
from specbench.backends.torch.submodels import structural_copy
from specbench.models.load import LanguageModel, wrap_model
from specbench.options import QuantizedName

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

# Joined in this order on top of the 256 bytes; every pair's halves exist when its turn comes.
WORDS = [
    "the", "and", "ing", "tion", "Ġa", "Ġthe", "Ġof", "Ġto", "Ġand", "Ġin", "Ġis", "er", "re", "on", "en"
]  # fmt: skip

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_tokenizer(
    *, special_tokens: Sequence[str] = SPECIAL_TOKENS, chat_template: str | None = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of some 290 tokens: every text round-trips, and emoji straddle tokens.

    The first special token ends a text, and is also the beginning and the padding token.
    """
    vocabulary = {piece: number for number, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=special_tokens[0],
        eos_token=special_tokens[0],
        pad_token=special_tokens[0],
        clean_up_tokenization_spaces=False,
    )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def letter_tokenizer(letters: str = "ab", merges: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are single letters, then ``merges`` of two, then an end token."""
    vocabulary = {piece: number for number, piece in enumerate([*letters, *merges])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[(pair[0], pair[1]) for pair in merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")  # noqa: S106


def tiny_llama(
    seed: int = 0,
    layers: int = 2,
    vocab_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    context: int = 512,
) -> PreTrainedModel:
    """Make a random Llama: hidden size 32, four heads on two key/value heads; the global generator is left as it was.

    ``vocab_size`` is by default `tiny_tokenizer`'s, and ``context`` the `max_position_embeddings`.
    """
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer()) if vocab_size is None else vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,  # wide enough that the greedy token differs from place to place, without ties
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    # No end of text of its own: a random model would stop anywhere. A tokenizer adds its own to `end_ids`.
    model.generation_config = GenerationConfig(do_sample=False)
    return model.to(dtype).eval()


def tiny_language_model(
    seed: int = 0,
    layers: int = 2,
    vocab_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    context: int = 512,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> LanguageModel:
    """`tiny_llama` with `tiny_tokenizer` (or the one given), wrapped as `load_model` would return it."""
    model = tiny_llama(seed, layers, vocab_size, dtype, context=context)
    return wrap_model(model, tokenizer or tiny_tokenizer(), name=f"tiny-{seed}")


def save_tiny(folder: Path, seed: int = 0, layers: int = 2, dtype: torch.dtype = torch.float32) -> Path:
    """An ordinary model folder with `tiny_llama` and `tiny_tokenizer` in it; returns ``folder``."""
    tiny_llama(seed, layers, dtype=dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def quantized_copy(model: Any, kind: QuantizedName = "int8") -> Any:
    """Return a copy with quantized layers that shares everything else with a model."""
    clone = structural_copy(model)
    kernels.quantize(clone, kind, None)
    return clone
