"""Check every language model class of the installed transformers, tiny and random, for lossless decoding.

    python benchmarks/architectures.py                  # all of them, about an hour; writes the table
    python benchmarks/architectures.py llama gemma3_text qwen3_5
    python benchmarks/architectures.py --seen FILE      # notes verdicts in a file, and goes on from there

For each model type, in float32 and with contexts beyond a sliding window of 8 tokens:

- causal: do the logits of a position stay the same when later tokens change?
- cache: does a context that grows and is rolled back give the logits of a pass over everything?
- greedy: do partly wrong drafts, both caches, ordinary and packed layers, and the model's first layer and int8 form
  as drafters reproduce the tokens of `transformers`' own `generate`?

Models that also see or hear are saved as a folder, and their text part is loaded from it; `generate` is that of the
whole model. Prints a line per type and one line of JSON at the end. Exit code 1 if a type that is not refused is wrong.
docs/models.md has the results.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from specbench.backends.torch.caches import make_cache
from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import SpecbenchError
from specbench.decoding.drafts import Draft
from specbench.decoding.protocols import Decoding, Drafter, DrafterTraits, StepPlan
from specbench.generate import GenerationRun
from specbench.models.checkpoints import check_config
from specbench.models.composites import without_timm
from specbench.models.drafters import load_drafter, wrap_drafter
from specbench.models.load import LanguageModel, load_model
from specbench.models.target import Target, wrap_target
from specbench.options import CacheKind, LoadOptions
from specbench.policies import FixedLength

UNDECLARED: dict[str, dict[str, Any]] = {
    **{kind: {"vision_start_token_id": 62} for kind in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")},
    "timm_wrapper": {"hidden_size": 32, "model_args": {"embed_dim": 32}},
    "dots3_note_text": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
        "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
}  # fmt: skip
"""Settings that configurations have without declaring them."""

VOCABULARY, WINDOW, PROMPT, NEW = 64, 8, 24, 40
CACHES: tuple[CacheKind, ...] = ("dynamic", "preallocated")
LARGEST = 20_000_000
"""Parameters from which a type counts as not made small by the settings below."""

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "max_position_embeddings": 256,
    "n_positions": 256, "n_ctx": 256, "max_seq_len": 256, "hidden_size": 32, "n_embd": 32, "d_model": 32,
    "word_embed_proj_dim": 32, "embedding_size": 32, "hidden_dim": 32, "dim_model_base": 32,
    "hidden_size_per_layer_input": 8, "intermediate_size": 48, "n_inner": 48, "ffn_dim": 48, "decoder_ffn_dim": 48,
    "ffn_hidden_size": 48, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "query_pre_attn_scalar": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "rotary_dim": 8, "sliding_window": WINDOW, "window_size": WINDOW,
    "attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "moe_ffn_hidden_size": 32,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_kv_shared_layers": 0,
    "initializer_range": 0.3, "init_std": 0.3, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip

LATENT = (
    "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "minicpm3", "youtu",
    "dots3_note_text",
)  # fmt: skip
PADDED = (
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
OTHERWISE: dict[str, dict[str, Any]] = {
    **{kind: {"head_dim": ..., "num_key_value_heads": 4} for kind in LATENT},
    **{kind: {"pad_token_id": 1} for kind in PADDED},
    "cwm": {"bos_token_id": 1, "eos_token_id": 2},
    "modernbert-decoder": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "opt": {"init_std": 0.3},
    "reformer": {"axial_pos_embds": False, "is_decoder": True},
    **{
        kind: {
            "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
        }
        for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    },
    **{
        kind: {
            "linear_head_dim": 8, "linear_num_heads": 4, "head_dim": ..., "num_key_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        }
        for kind in ("kimi_linear", "bailing_hybrid")
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "bamba": {
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1],
        "time_step_limit": (0.1, 0.5),
    },
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 48,
    },
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2,
        "hybrid_override_pattern": "M*", "time_step_min": 0.1,
    },
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "time_step_min": 0.1},
    "mamba2": {"num_heads": 8, "head_dim": 8},
}  # fmt: skip
"""What other types need; ``...`` leaves a setting at its default. Many time steps are beyond their bounds."""

TEXTS = ("text_config", "llm_config", "decoder")
SEEING: dict[str, Any] = {
    "depth": 2, "embed_dim": 32, "out_hidden_size": 32, "image_size": 32, "patch_size": 8, "num_channels": 3,
    "projection_dim": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}  # fmt: skip
"""Settings of parts that see or hear, where they differ from those of texts."""
PARTS = ("with a causal class of their text", "with the class of the whole model, by token ids")
NEEDS = "with a causal class, compared with its `generate`, for that of the whole model takes no text alone"
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
"""Positions of several axes, for heads of 8 numbers."""

OTHERWISE |= {
    **{kind: {"rope_parameters": AXES} for kind in (
        "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_text", "glm_ocr_text",
        "cosmos3_edge_text", "hunyuan_vl_text", "paddleocr_vl_text", "qwen2_5_omni_text", "qwen3_omni_moe_text",
    )},
    "qwen3_omni_moe_text": {"rope_parameters": AXES, "sliding_window": ...},
    "glm4v_moe_text": {"rope_parameters": {**AXES, "mrope_section": [1, 1, 0]}},
    **{kind: {"head_dim": ..., "num_key_value_heads": 4} for kind in ("mistral4", "mistral_large4_text")},
    **{kind: {"pad_token_id": 0} for kind in ("gemma4_text", "gemma4_unified_text", "step3p5")},
    **{kind: {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} for kind in ("emu3_text_model", "evolla")},
    "chameleon": {"vocabulary_map": {"<image>": 60}, "pad_token_id": 0},
    "clip_vision_model": {"hidden_size": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": AXES}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "dots3_note_text": {
        "num_key_value_heads": 4, "head_dim": 16, "layer_types": ["indexed_attention", "sliding_attention"],
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32, "mlp_layer_types": ["dense"] * 2},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "emu3": {"vocabulary_map": {"<image>": 60}},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": (1, 1), "attn_resolutions": (1,)},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 32], "rope_parameters": {**AXES, "mrope_section": [1, 1, 2]},
    },
    "glm5_next_text": {
        "num_key_value_heads": 4, "qk_rope_head_dim": 0, "head_dim": ..., "linear_head_dim": 8, "linear_num_heads": 4,
        "layer_types": ["linear_attention", "indexed_attention"], "mlp_layer_types": ["dense", "sparse"],
    },
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "spatial_target_layers": [], "downsample_rate": "1/2"},
    "inkling2_vision": {"text_hidden_size": 32},
    **{kind: {"layers": 2, "embed_dim": 32, "ffn_dim": 48, "attention_heads": 4, "pad_token_id": 1} for kind in (
        "kosmos_2_text_model", "kosmos_2_5_text_model",
    )},
    "mllama_text_model": {
        "num_hidden_layers": 3, "cross_attention_layers": [1], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    },
    "molmo2_vision": {"image_size": [32, 32]},
    "molmo2_adapter": {"vision_feature_layer": [0, 1], "text_hidden_size": 32},
    "muse_spark_audio": {
        "num_hidden_layers": 2, "patch_sizes": [2, 2], "hidden_sizes": [16, 32], "depths": [1, 1],
    },
    "radio": {"video_temporal_patch_size": 2},
    **{kind: {"encoder_attention_heads": 4, "encoder_layers": 2, "encoder_ffn_dim": 32, "output_dim": 32} for kind in (
        "qwen2_5_omni_audio_encoder", "qwen3_omni_moe_audio_encoder", "qwen2_audio_encoder",
    )},
    "qwen3_asr": {"eos_token_id": 2, "pad_token_id": 0},
}  # fmt: skip


class Guesses(Drafter):
    """Drafts what `generate` answered, with every few tokens a wrong one, so that steps end everywhere."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], seed: int, wrong: float = 0.25) -> None:
        super().__init__(DrafterTraits("guesses"))
        self.text, self.wrong = [*prompt, *answer], wrong
        self.random = Random(seed)

    def propose(self, context: Any, plan: StepPlan) -> Decoding[Draft]:
        yield from ()
        rest = self.text[len(context) : len(context) + plan.policy.begin_step(plan.budget)]
        return Draft([(t + 1) % VOCABULARY if self.random.random() < self.wrong else t for t in rest])


def tiny_config(config_class: Any) -> Any:
    """Return a small configuration of this class, from the settings above that it has."""
    return config_class(**tiny_settings(config_class))


def tiny_settings(config_class: Any, more: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the settings above, and ``more``, that a class of configurations has."""
    known = set(inspect.signature(config_class.__init__).parameters)
    for each in config_class.__mro__:
        known |= set(getattr(each, "__annotations__", {}))
    settings = {**SMALL, **more, **OTHERWISE.get(config_class.model_type, {})}
    other_names = getattr(config_class, "attribute_map", {})
    return {
        name: value
        for name, value in settings.items()
        if name in known and value is not ... and other_names.get(name) not in settings
    } | UNDECLARED.get(config_class.model_type, {})


def tiny_composite(config_class: Any) -> Any:
    """Return a small configuration of a model with several parts, each with its default class."""

    def settings(own: Any, kind: Any, is_text: bool) -> dict[str, Any]:
        parts = {name: getattr(own, name, None) for name in kind.sub_configs}
        return tiny_settings(kind, {} if is_text else SEEING) | {
            name: {**settings(part, type(part), name in TEXTS), "model_type": part.model_type}
            for name, part in parts.items()
            if isinstance(part, PreTrainedConfig)
        }

    return config_class(**settings(config_class(), config_class, not config_class.sub_configs))


def examine(config_class: Any, model_class: Any) -> tuple[str, str]:
    """Return the verdict (lossless, refused, wrong, not tried) on a model type, and its reason."""
    kind = config_class.model_type
    try:
        config = tiny_config(config_class)
        check_config(config, kind)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(config).parameters())
    except SpecbenchError as error:
        return "refused", error.message
    except Exception as error:
        return "not tried", f"no small configuration: {first_line(error)}"
    if size > LARGEST:
        return "not tried", f"no small configuration: {size} parameters"
    torch.manual_seed(0)
    try:
        model = model_class(config).eval().requires_grad_(False)
        model.generation_config = GenerationConfig()
        whole(model, list(range(3, 20)))
    except Exception as error:
        return "not tried", f"the random model does not run: {first_line(error)}"
    ids = Random(1).choices(range(3, VOCABULARY), k=PROMPT)
    kinds, notes = caches_of(config)
    facts = [f"{model.config._attn_implementation} attention", *notes]
    return verdict(
        lambda: [*cause(model, ids), *cached(model, ids, kinds), *greedy(model, ids, kinds)], facts
    )


def caches_of(config: Any) -> tuple[list[CacheKind], list[str]]:
    """Return the kinds of cache that a model can have, and why it cannot have the others."""
    kinds, notes = list[CacheKind](), []
    for kind in CACHES:
        try:
            make_cache(kind, config)
            kinds.append(kind)
        except SpecbenchError as error:
            notes.append(error.message)
    return kinds, notes


def verdict(checks: Callable[[], list[str]], facts: Sequence[str]) -> tuple[str, str]:
    """Return the verdict on a model, and what the checks say against it, or facts of it if they say nothing."""
    try:
        said = checks()
    except SpecbenchError as error:
        return "refused", error.message
    except Exception as error:
        return "wrong", first_line(error)
    return ("wrong", "; ".join(said)) if said else ("lossless", "; ".join(facts))


def examine_composite(config_class: Any, whole_class: Any) -> tuple[str, str]:
    """Return the verdict on the text part of a model with several parts, which is saved and loaded as a folder."""
    kind = config_class.model_type
    try:
        check_config(config_class(), kind)
        config = tiny_composite(config_class)
        with torch.device("meta"), without_timm():
            size = sum(parameter.numel() for parameter in whole_class(config).parameters())
    except SpecbenchError as error:
        return "refused", error.message
    except Exception as error:
        return "not tried", f"no small configuration: {first_line(error)}"
    if size > 8 * LARGEST:
        return "not tried", f"no small configuration: {size} parameters"
    ids = Random(1).choices(range(3, VOCABULARY), k=PROMPT)
    with TemporaryDirectory() as place:
        loaded = []
        for seed in range(2):
            folder = str(Path(place) / f"tiny-{seed}")
            torch.manual_seed(seed)
            try:
                with without_timm():
                    whole = whole_class(config).eval().requires_grad_(False)
                whole.generation_config = GenerationConfig()
                whole.save_pretrained(folder)
                loaded.append(load_model(folder, LoadOptions("float32"), tokenizer=False))
                if not seed:
                    own = generating(whole, ids)
                    expected = generated(own, ids)
            except SpecbenchError as error:
                return "refused", error.message
            except Exception as error:
                return "not tried", f"the random model does not run: {first_line(error)}"
        target, sibling = loaded
        read = sum(tensor.numel() for tensor in target.model.state_dict().values())
        fact = PARTS[isinstance(target.model, whole_class)] if isinstance(own, whole_class) else NEEDS
        if target.files is not None and target.files.numbers != read:
            return "wrong", f"{target.files.numbers} weights are counted, and {read} loaded"
        kinds, notes = caches_of(target.model.config)
        return verdict(
            lambda: [
                *cause(target.model, ids),
                *([] if bounds_prompts(target.model.config) else cached(target.model, ids, kinds)),
                *greedy(target.model, ids, kinds, expected, sibling),
            ],
            [fact, *notes],
        )


def generating(whole: Any, ids: list[int]) -> Any:
    """Return a whole model, or the part of it that has a `generate`, if that of the whole takes no text alone."""
    try:
        generated(whole, ids, 1)
    except Exception:
        return next(each for each in whole.modules() if each is not whole and hasattr(each, "generate"))
    return whole


def first_line(error: Exception) -> str:
    """Return an error as a short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def whole(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return the logits of one pass over everything without a cache, [tokens, vocabulary]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, in units of the logits' spread."""
    return float((found - expected).abs().max() / expected.std().clamp_min(1e-9))


def cause(model: Any, ids: list[int]) -> list[str]:
    changed = [*ids[:-1], (ids[-1] + 1) % VOCABULARY]
    gap = deviation(whole(model, changed)[: len(ids) - 1], whole(model, ids)[: len(ids) - 1])
    return [f"not causal (later tokens move earlier logits by {gap:.2g})"] if gap > 1e-3 else []


def bounds_prompts(config: PreTrainedConfig) -> bool:
    """Return whether models of this configuration bound time steps, in prompts alone."""
    if config.model_type in ("nemotron_h", "zamba2"):
        return bool(config.time_step_min > 0)
    unbounded = (0.0, float("inf"))
    return tuple(getattr(config, "time_step_limit", None) or unbounded) != unbounded


def cached(model: Any, ids: list[int], kinds: Sequence[CacheKind] = CACHES) -> list[str]:
    said = []
    for kind in kinds:
        scorer, random, context = Scorer(model, kind), Random(2), list(ids)
        worst = 0.0
        for gamma in (0, 3, 5, 1, 9, 0, 12, 4):
            drafted = random.choices(range(3, VOCABULARY), k=gamma)
            found = scorer.logits(context, drafted)
            worst = max(worst, deviation(found, whole(model, [*context, *drafted])[-gamma - 1 :]))
            context += [*drafted[: random.randint(0, gamma)], random.randrange(3, VOCABULARY)]
            scorer.rollback(len(context) - 1)
        if not worst < 1e-3:
            said.append(f"the {kind} cache is off by {worst:.2g}")
    return said


def one_by_one(model: Any, ids: Sequence[int], prompt: int) -> torch.Tensor:
    """Return the logits of `transformers`' own decoding, [tokens, vocabulary]: the prompt at first, then single tokens.

    Some recurrent models (Zamba 2, Nemotron-H) bound the time steps of a prompt, but not those of outputs.
    """
    own = getattr(sys.modules[type(model).__module__], "MiniMaxCache", None)
    cache = transformers.DynamicCache(config=model.config) if own is None else own()
    names = inspect.signature(model.forward).parameters
    keyword = next(name for name in ("cache_params", "cache", "past_key_values") if name in names)
    found, past = [], 0
    with torch.inference_mode():
        for piece in (ids[:prompt], *([token] for token in ids[prompt:])):
            arguments: dict[str, Any] = {
                keyword: cache,
                "input_ids": torch.tensor([list(piece)]),
                "use_cache": True,
            }
            if "position_ids" in names:
                arguments["position_ids"] = torch.arange(past, past + len(piece))[None]
            found.append(model(**arguments).logits[0])
            past += len(piece)
    return torch.cat(found)


def generated(model: Any, ids: list[int], new: int = NEW) -> list[int]:
    """Return the greedy output of transformers' `generate`."""
    batch = torch.tensor([ids])
    settings = GenerationConfig(do_sample=False, max_new_tokens=new, pad_token_id=0)
    with torch.inference_mode():
        output = model.generate(batch, attention_mask=torch.ones_like(batch), generation_config=settings)
    answer: list[int] = output[0, len(ids) :].tolist()
    return answer


def greedy(
    model: Any,
    ids: list[int],
    kinds: Sequence[CacheKind] = CACHES,
    expected: Sequence[int] = (),
    sibling: LanguageModel | None = None,
) -> list[str]:
    expected = [*expected] or generated(model, ids)
    """Return which combinations of packing, cache and drafter do not give the tokens of `generate`."""
    said = []
    for packed in (False, True) if sibling is None else (True,):
        for kind in kinds:
            target = wrap_target(model, name="tiny", cache=kind, pack=packed)
            for word, gamma in (
                ("none", 1),
                ("guesses", 1),
                ("guesses", 5),
                ("self:layers=1", 3),
                ("self:int8", 4),
                ("lookup", 3),
                *([("sibling", 2)] if sibling else []),
            ):
                drafter: Any
                if word == "guesses":
                    drafter = Guesses(ids, expected, gamma)
                elif word == "sibling":
                    assert sibling is not None
                    drafter = wrap_drafter(sibling, target, cache=kind)
                else:
                    drafter = build(word, target)
                try:
                    tokens = decoded(ids, target, drafter, gamma)
                except Exception as error:
                    said.append(f"{word}: {first_line(error)}")
                    continue
                if tokens != expected:
                    same = [a == b for a, b in zip(tokens, expected, strict=False)]
                    at = same.index(False) if False in same else len(same)
                    said.append(f"{word} γ={gamma} {kind}{' packed' * packed}: differs from generate at {at}")
    return list(dict.fromkeys(said))


def decoded(ids: list[int], target: Target, drafter: Any, gamma: int, new: int = NEW) -> list[int]:
    """Return the greedy output of specbench."""
    run = GenerationRun(ids, target, drafter, policy=FixedLength(gamma), max_new_tokens=new, ignore_eos=True)
    for _ in run:
        pass
    return list(run.result().token_ids)


def build(word: str, target: Target) -> Any:
    """Return a drafter; ``None`` if this kind of target cannot have it."""
    try:
        return load_drafter(word, target)
    except SpecbenchError:
        return None


def write_table(found: Mapping[str, tuple[str, str]]) -> None:
    """Write what was found of models that also see or hear into docs/models.md."""
    groups: dict[str, list[str]] = {each: [] for each in (*PARTS, NEEDS, "not tried here", "wrong")}
    refused: dict[str, list[str]] = {}
    for kind, (result, reason) in sorted(found.items()):
        name = reason.partition("; ")[0] if result == "lossless" else result.replace("tried", "tried here")
        place = groups
        if result == "refused":
            _, other, why = reason.rstrip(".").partition(" cannot be decoded speculatively: ")
            place, name = refused, why if other else f"it {reason.rstrip('.').partition(') ')[2]}"
        place.setdefault(name, []).append(f"`{kind}`")
    groups |= {f"refused: {why}": kinds for why, kinds in refused.items()}
    rows = [f"| {name} | {len(kinds)} | {', '.join(kinds)} |" for name, kinds in groups.items() if kinds]
    page = Path(__file__).parents[1] / "docs/models.md"
    start, end = "<!-- benchmarks/architectures.py writes this -->\n", "<!-- end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(start)
    table = "\n".join(["", "| loaded | | types |", "|---|---|---|", *rows, "", ""])
    page.write_text(f"{before}{start}{table}{end}{rest.partition(end)[2]}", encoding="utf-8")


def main() -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="model types; all without any")
    parser.add_argument(
        "--seen", type=Path, help="file of verdicts: types in it are skipped, others are added"
    )
    given = parser.parse_args()
    wanted, seen = given.types, given.seen
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found: dict[str, tuple[str, str]] = {}
    if seen is not None and seen.exists():
        found = {kind: (result, reason) for kind, result, reason in map(json.loads, seen.open())}
    for mapping, look in (
        (MODEL_FOR_MULTIMODAL_LM_MAPPING, examine_composite),
        (MODEL_FOR_CAUSAL_LM_MAPPING, examine),
    ):
        for config_class, model_class in mapping.items():
            kind = config_class.model_type
            if kind not in found and (not wanted or kind in wanted):
                found[kind] = look(config_class, model_class)
                print(f"{kind:24} {found[kind][0]:10} {found[kind][1]}", flush=True)
                if seen is not None:
                    with seen.open("a") as file:
                        print(json.dumps([kind, *found[kind]]), file=file)
    composites = [config.model_type for config in MODEL_FOR_MULTIMODAL_LM_MAPPING]
    if found.keys() >= {*composites}:
        write_table({kind: found[kind] for kind in composites})
    counts = Counter(result for result, _ in found.values())
    print(json.dumps({"transformers": transformers.__version__, **counts}))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
