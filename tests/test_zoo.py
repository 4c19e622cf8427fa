"""The lossless matrix over the families of models people use: tiny, random, and decoded beyond their windows.

Plain decoding and `transformers`' own `generate` say what is right. benchmarks/architectures.py asks the same of every
model class of `transformers`; docs/models.md tells what it found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import architectures as survey
import pytest
import torch
import transformers as hf

from specbench.base.errors import UsageError
from specbench.generate import autoregressive_generate
from specbench.kernels.linear import PackedLinear
from specbench.kernels.weights import can_pack
from specbench.models.checkpoints import check_config
from specbench.models.drafters import load_drafter
from specbench.models.load import wrap_model
from specbench.models.target import wrap_target

VOCABULARY, WINDOW = 64, 16
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


QUICK = ("gemma4", "mixtral", "gpt-oss", "deepseek-v3", "gpt2", "bloom", "lfm2")
"""The others are decoded greedily in ``test_native.py`` or ``test_caches.py`` too."""


@pytest.mark.parametrize(
    ("name", "full"),
    [
        *((name, False) for name in QUICK),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ZOO),
    ],
)
def test_greedy_tokens_are_those_of_generate(name, full):
    """Packed or not, in each cache, with drafts of all sorts; of the model that does not repeat itself at once."""
    models = (zoo_model(name, seed) for seed in range(20))
    texts = ((model, [survey.generated(model, prompt) for prompt in (BEYOND, WITHIN)]) for model in models)
    model, expected = next(each for each in texts if all(len(set(text)) > 8 for text in each[1]))
    for cache, prompt, text in (("none", BEYOND, expected[0]), ("dynamic", WITHIN, expected[1])):
        target, guesses = wrap_target(model, cache=cache, pack=False), survey.Guesses(prompt, text, 9)
        assert survey.decoded(prompt, target, guesses, 4) == text
    caches = survey.CACHES[:1] if name in DYNAMIC_ALONE else survey.CACHES
    assert survey.greedy(model, BEYOND, caches if full else caches[-1:], expected[0]) == []
    assert any(isinstance(each, PackedLinear) for each in model.modules()) == can_pack(torch.float32, "cpu")
    if full:
        assert survey.greedy(model, WITHIN, caches, expected[1]) == []
        sibling = wrap_model(zoo_model(name, 20), None, "sibling")
        assert survey.greedy(model, BEYOND, caches, expected[0], sibling) == []


def test_a_context_that_yarn_has_lengthened():
    yarn = {"max_position_embeddings": 32, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    model = build("Qwen2ForCausalLM", hf.Qwen2Config(**USUAL | yarn))
    prompt = BEYOND[:28]
    expected = survey.generated(model, prompt)
    assert len(prompt) + len(expected) > 32
    for cache in ("dynamic", "preallocated", "static"):
        target = wrap_target(model, name="long", cache=cache, pack=False)
        guesses, int8 = survey.Guesses(prompt, expected, 2), load_drafter("self:int8", target)
        for drafter, gamma in ((None, 1), (guesses, 4), (int8, 3)):
            assert survey.decoded(prompt, target, drafter, gamma) == expected
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
