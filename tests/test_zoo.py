"""The lossless matrix over the families of models people use: tiny, random, and decoded beyond their windows.

Plain decoding and `transformers`' own `generate` say what is right. benchmarks/architectures.py asks the same of every
model class of `transformers`; docs/models.md tells what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import architectures as survey
import pytest
import torch
import transformers as hf
from tiny import quantized_copy

from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import UsageError
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.model import ModelDrafter
from specbench.drafters.ngram import NGramDrafter
from specbench.generate import GenerationRun, autoregressive_generate
from specbench.kernels.linear import PackedLinear
from specbench.kernels.weights import can_pack
from specbench.models.checkpoints import check_config
from specbench.models.drafters import load_drafter
from specbench.models.target import Target, wrap_target
from specbench.options import CacheKind
from specbench.policies import FixedLength
from specbench.specs.drafters import NGram

VOCABULARY, WINDOW, NEW = 64, 16, 40
BEYOND = list(range(5, 35))  # a prompt that is longer than the window
WITHIN = [7, 40, 8]  # one whose output crosses it

PLAIN: dict[str, Any] = {
    "vocab_size": VOCABULARY, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
USUAL: dict[str, Any] = PLAIN | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
GEMMA: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
FALCON: dict[str, Any] = PLAIN | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip


def family(class_name: str, config_name: str = "", **settings: Any) -> tuple[str, Callable[..., Any]]:
    """A model class by its prefix or name, and what makes its configuration, with some settings changed."""
    config = getattr(hf, f"{config_name or class_name}Config")
    whole_name = class_name if "Head" in class_name else f"{class_name}ForCausalLM"
    return whole_name, lambda **changed: config(**settings | changed)


MIXED = ["sliding_attention", "full_attention"]
ZOO: dict[str, tuple[str, Callable[..., Any]]] = {
    "llama": family("Llama", **USUAL),
    "qwen2": family("Qwen2", **USUAL),
    "qwen3": family("Qwen3", **USUAL, head_dim=8),
    "gemma2": family("Gemma2", **USUAL, **GEMMA),
    "gemma3": family("Gemma3", "Gemma3Text", **USUAL, **GEMMA, layer_types=MIXED),
    "gemma4": family("Gemma4", "Gemma4Text", **USUAL | GEMMA4, layer_types=MIXED * 2),
    "mistral": family("Mistral", **USUAL, sliding_window=WINDOW),
    "phi3": family("Phi3", **USUAL),
    "olmo2": family("Olmo2", **USUAL),
    "mixtral": family("Mixtral", **USUAL, **EXPERTS),
    "gpt-oss": family("GptOss", **USUAL, **EXPERTS, head_dim=8, sliding_window=WINDOW),
    "deepseek-v3": family("DeepseekV3", **USUAL | LATENT),
    "gpt2": family("GPT2LMHeadModel", "GPT2", **PLAIN, n_embd=32, n_layer=2, n_head=4, n_positions=256),
    "gpt-neox": family("GPTNeoX", **{k: v for k, v in USUAL.items() if k != "num_key_value_heads"}),
    "falcon": family("Falcon", **FALCON, multi_query=True),
    "falcon-alibi": family("Falcon", **FALCON, alibi=True, new_decoder_architecture=True),
    "bloom": family("Bloom", **PLAIN, hidden_size=32, n_layer=2, n_head=4),
    "lfm2": family("Lfm2", **USUAL, conv_L_cache=3, layer_types=["conv", "full_attention"]),
}
DYNAMIC_ALONE = ("lfm2",)
NO_EARLY_EXIT = ("lfm2", "gemma4")  # convolution states know no length; embeddings of every layer


def build(class_name: str, config: Any, seed: int = 0) -> Any:
    """A random model in float32 that stops nowhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(hf, class_name)(config).eval().requires_grad_(False)
    model.generation_config = hf.GenerationConfig()
    return model


def zoo_model(name: str, seed: int = 0, **changed: Any) -> Any:
    """A random model of a family, with some settings changed."""
    class_name, config = ZOO[name]
    return build(class_name, config(**changed), seed)


def talkative(name: str) -> tuple[Any, dict[str, list[int]]]:
    """A random model that does not repeat itself at once, and what `generate` makes of both prompts."""
    for seed in range(20):
        model = zoo_model(name, seed)
        expected = {"beyond": survey.generated(model, BEYOND), "within": survey.generated(model, WITHIN)}
        if all(len(set(answer)) > 8 for answer in expected.values()):
            return model, expected
    raise AssertionError("every output repeats itself, which would show nothing")


def decode(target: Target, prompt: Sequence[int], drafter: Any, gamma: int, first_target: bool) -> list[int]:
    options: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True, "first_target": first_target}
    run = GenerationRun(prompt, target, drafter, policy=FixedLength(gamma), **options)
    drafted = sum(len(record.drafted) for record in run if hasattr(record, "drafted"))
    assert drafted > 0 or drafter is None, "nothing was drafted: the comparison shows nothing"
    return list(run.result().token_ids)


def matrix(
    name: str, target: Target, cache: CacheKind, expected: dict[str, list[int]], chosen: slice
) -> list[str]:
    """Every combination, of those chosen, whose tokens are not those of `generate`."""
    model = target.language_model.model
    twin = quantized_copy(model)

    def twin_drafter() -> ModelDrafter:
        return ModelDrafter(Scorer(twin, cache), "twin")

    runs: list[tuple[str, Any, int, bool]] = [
        ("none", None, 1, True),
        *(
            ("guesses", survey.Guesses(BEYOND, expected["beyond"], gamma), gamma, gamma < 7)
            for gamma in (1, 4, 7)
        ),
        ("lookup", load_drafter("lookup", target), 3, True),
        ("ngram", load_drafter("ngram:top-k=2", target), 5, True),
        ("self:int8", load_drafter("self:int8", target), 4, True),
        ("model", twin_drafter(), 3, False),
        ("cascade", CascadeDrafter(NGramDrafter(NGram(order=2)), twin_drafter()), 5, True),
    ]
    if name not in NO_EARLY_EXIT:
        runs.append(("self:layers=1", load_drafter("self:layers=1", target), 2, False))
    wrong = [
        f"{drafter} γ={gamma}"
        for drafter, made, gamma, first in runs[chosen]
        if decode(target, BEYOND, made, gamma, first) != expected["beyond"]
    ]
    # A second, shorter prompt on the same caches, which crosses the window while it is decoded.
    for drafter, made, gamma in (
        ("guesses", survey.Guesses(WITHIN, expected["within"], 0), 5),
        ("model", twin_drafter(), 2),
    ):
        if decode(target, WITHIN, made, gamma, True) != expected["within"]:
            wrong.append(f"{drafter} γ={gamma} after a short prompt")
    return wrong


PAIRS = ((False, "preallocated"), (True, "dynamic"))
"""Packed or not, and the cache: each with each other, and with all drafters, only in the slow test."""


QUICK = ("llama", "gemma3", "gemma4", "mixtral", "gpt-oss", "deepseek-v3", "gpt2", "bloom", "lfm2")
"""The others are decoded greedily in ``test_native.py`` or ``test_caches.py`` too."""


@pytest.mark.parametrize(
    ("name", "full"),
    [
        *((name, False) for name in QUICK),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ZOO),
    ],
)
def test_greedy_tokens_are_those_of_generate(name, full):
    model, expected = talkative(name)
    wrong = []
    for packed in (False, True):
        target = wrap_target(model, name=name, pack=packed)
        packs = packed and can_pack(torch.float32, "cpu")
        assert any(isinstance(module, PackedLinear) for module in model.modules()) == packs
        for cache in survey.CACHES if name not in DYNAMIC_ALONE else ("dynamic",):
            if not full and name not in DYNAMIC_ALONE and (packed, cache) not in PAIRS:
                continue
            chosen = slice(None) if full else slice(int(packed), None, 2)
            own = wrap_target(model, name=name, cache=cache, pack=False)
            found = matrix(name, own, cache, expected, chosen)
            wrong += [f"{each}, {cache} cache{', packed' * packed}" for each in found]
        target = wrap_target(model, name=name, cache="none", pack=False)
        recomputed = survey.Guesses(BEYOND, expected["beyond"], 9)
        if decode(target, BEYOND, recomputed, 4, True) != expected["beyond"]:
            wrong.append(f"guesses, no cache{', packed' * packed}")
    assert wrong == []


@pytest.mark.parametrize("cache", ["dynamic", "preallocated", "static"])
def test_a_context_that_yarn_has_lengthened(cache):
    config = hf.Qwen2Config(
        **USUAL | {"max_position_embeddings": 32}, rope_scaling={"type": "yarn", "factor": 4.0}
    )
    model = build("Qwen2ForCausalLM", config)
    prompt = BEYOND[:28]
    expected = survey.generated(model, prompt)
    target = wrap_target(model, name="long", cache=cache, pack=False)
    assert len(prompt) + len(expected) > 32
    guesses, int8 = survey.Guesses(prompt, expected, 2), load_drafter("self:int8", target)
    for drafter, gamma in ((None, 1), (guesses, 4), (int8, 3)):
        assert decode(target, prompt, drafter, gamma, True) == expected
    whole = autoregressive_generate(prompt, target, max_new_tokens=200, ignore_eos=True)
    assert (len(whole.token_ids), whole.finish_reason) == (128 - 28, "context-limit")


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "architecture", "says"),
    [
        (hf.RwkvConfig(), "RwkvForCausalLM", "recurrent state"),
        *(
            (kind(), "", "recurrent state")
            for kind in (hf.MambaConfig, hf.FalconMambaConfig, hf.JambaConfig, hf.ZambaConfig)
        ),
        (hf.RecurrentGemmaConfig(), "", "recurrent state"),
        (hf.MiniMaxConfig(), "", "lightning attention"),
        (hf.T5Config(), "T5ForConditionalGeneration", "encoder-decoder"),
        (hf.BartConfig(), "BartForCausalLM", "encoder-decoder"),
        (hf.BertConfig(), "BertForMaskedLM", "no causal language model"),
        (hf.BertConfig(), "BertLMHeadModel", "no causal language model"),
        (hf.BertGenerationConfig(), "", "no causal language model"),
        (hf.LlamaConfig(), "LlamaForSequenceClassification", "no causal language model"),
        (hf.XLNetConfig(), "", "depend on later tokens"),
        (hf.CpmAntConfig(), "", "positions of its own"),
        (hf.MoshiConfig(), "", "frames of sound"),
        (hf.ReformerConfig(is_decoder=True), "", "hash buckets"),
        (hf.TrOCRConfig(use_learned_position_embeddings=False), "", "padding tokens"),
    ],
)
def test_what_cannot_be_rolled_back_or_is_not_causal_is_refused_unloaded(config, architecture, says):
    config.architectures = [architecture] if architecture else None
    with pytest.raises(UsageError, match=says) as caught:
        check_config(config, "my-model")
    assert "my-model" in caught.value.message
    assert caught.value.hint
