"""Heads of every layout with random weights, as their tools write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import tiny_llama, tiny_tokenizer

from specbench.models.drafters import load_drafter, wrap_drafter
from specbench.models.load import wrap_model
from specbench.models.target import Target
from specbench.options import LoadOptions

WIDTH, INNER, HEADS, SHARED, SIZE = 32, 48, 4, 2, 8
VOCAB = len(tiny_tokenizer())
DRAFTED = 40
LAYER: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": SHARED,
    "head_dim": SIZE, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "max_position_embeddings": 256, "hidden_act": "silu",
    "num_hidden_layers": 1, "vocab_size": VOCAB, "model_type": "llama",
}  # fmt: skip


def attention(random: Any, width: int = WIDTH) -> dict[str, torch.Tensor]:
    """Of a layer that reads vectors of ``width``, by the names of its modules."""
    return {
        "self_attn.q_proj": random(HEADS * SIZE, width),
        "self_attn.k_proj": random(SHARED * SIZE, width),
        "self_attn.v_proj": random(SHARED * SIZE, width),
        "self_attn.o_proj": random(WIDTH, HEADS * SIZE),
        "mlp.gate_proj": random(INNER, WIDTH),
        "mlp.up_proj": random(INNER, WIDTH),
        "mlp.down_proj": random(WIDTH, INNER),
    }


def drawn(seed: int, spread: float) -> tuple[torch.Generator, Any, Any]:
    """A generator, and what draws weights and norms from it."""
    generator = torch.Generator().manual_seed(seed)
    return (
        generator,
        lambda *shape: torch.randn(shape, generator=generator) * spread,
        lambda size: 0.5 + torch.rand(size, generator=generator),
    )


def layer_tensors(layer: int, modules: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"layers.{layer}.{name}.weight": tensor for name, tensor in modules.items()}


def eagle_tensors(
    seed: int = 0, *, vocab: int = VOCAB, drafted: int | None = DRAFTED, states: int = 3, layers: int = 1,
    spread: float = 0.3,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Of an EAGLE-3 head, its layers called ``layers.i``; ``None`` for a draft vocabulary of all tokens."""
    generator, random, norm = drawn(seed, spread)
    tensors = {"fc.weight": random(WIDTH, states * WIDTH)}
    norms = {name: norm(WIDTH) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    tensors |= layer_tensors(0, {**norms, **attention(random, 2 * WIDTH)})
    tensors |= {"norm.weight": norm(WIDTH), "lm_head.weight": random(drafted or vocab, WIDTH)}
    if drafted is not None:
        places = torch.randperm(vocab, generator=generator)[:drafted].sort().values
        tensors["d2t"] = places - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, places, True)
    further = block_tensors(seed + 1, layers=layers, spread=spread)
    return tensors | {
        name: tensor
        for name, tensor in further.items()
        if name.startswith("layers.") and not name.startswith("layers.0.") and "_norm" not in name
    }


def parallel_tensors(
    seed: int = 0, *, vocab: int = VOCAB, drafted: int = DRAFTED, layers: int = 1
) -> dict[str, torch.Tensor]:
    """Of a P-EAGLE head with embeddings of its own."""
    generator = torch.Generator().manual_seed(seed + 2)
    return {
        **eagle_tensors(seed, vocab=vocab, drafted=drafted, layers=layers),
        "embed_tokens.weight": torch.randn(vocab, WIDTH, generator=generator) * 0.3,
        "mask_hidden": torch.randn(1, 1, 3 * WIDTH, generator=generator),
    }


def parallel_settings(vocab: int = VOCAB, layers: int = 1, **more: Any) -> dict[str, Any]:
    """A ``config.json`` of ``speculators`` for P-EAGLE with three tokens in a pass."""
    named = {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle", "mask_token_id": MASK}
    layer = {**LAYER, "vocab_size": vocab, "num_hidden_layers": layers}
    return speculators_settings(vocab=vocab, **{"transformer_layer_config": layer, **named, **more})


def eagle_one_tensors(
    seed: int = 0, *, vocab: int = VOCAB, biased: bool = True, spread: float = 0.15
) -> dict[str, torch.Tensor]:
    """Of an EAGLE-1 head, as its authors call them; the head itself is the target's."""
    _, random, norm = drawn(seed, spread)
    tensors = {"embed_tokens.weight": random(vocab, WIDTH), "fc.weight": random(WIDTH, 2 * WIDTH)}
    tensors |= layer_tensors(0, {**attention(random), "post_attention_layernorm": norm(WIDTH)})
    return {**tensors, "fc.bias": random(WIDTH)} if biased else tensors


def eagle_one_settings(vocab: int = VOCAB, **more: Any) -> dict[str, Any]:
    """A ``config.json`` of EAGLE-1's authors: that of a Llama with one layer."""
    return {"architectures": ["LlamaForCausalLM"], **LAYER, "vocab_size": vocab, **more}


def mtp_tensors(seed: int = 0, spread: float = 0.3) -> dict[str, torch.Tensor]:
    """Of an MTP layer as ``speculators`` calls them; its decoder layer has the sizes of ``tiny_llama``."""
    _, random, norm = drawn(seed, spread)
    modules = attention(random) | {
        "mlp.gate_proj": random(64, WIDTH), "mlp.up_proj": random(64, WIDTH), "mlp.down_proj": random(WIDTH, 64),
        "input_proj": random(WIDTH, 2 * WIDTH),
    }  # fmt: skip
    modules |= {name: norm(WIDTH) for name in ("input_layernorm", "post_attention_layernorm")}
    modules |= {f"{name}_layernorm": norm(WIDTH) for name in ("token", "hidden", "final")}
    return {f"mtp_layers.0.{name}.weight": tensor for name, tensor in modules.items()}


def mtp_settings(vocab: int = VOCAB, **more: Any) -> dict[str, Any]:
    """A ``config.json`` of ``speculators`` for an MTP layer."""
    return {
        "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "num_nextn_predict_layers": 1,
        "transformer_layer_config": {**LAYER, "vocab_size": vocab, "intermediate_size": 64}, **more,
    }  # fmt: skip


BLOCK, MASK = 4, 7


def block_tensors(
    seed: int = 0, *, vocab: int = VOCAB, drafted: int | None = None, layers: int = 2, spread: float = 0.3
) -> dict[str, torch.Tensor]:
    """Of a DFlash head that reads two states; the head itself is the target's, unless it has a draft vocabulary."""
    _, random, norm = drawn(seed, spread)
    tensors = {
        "fc.weight": random(WIDTH, 2 * WIDTH), "hidden_norm.weight": norm(WIDTH), "norm.weight": norm(WIDTH)
    }  # fmt: skip
    for layer in range(layers):
        norms = {name: norm(SIZE) for name in ("self_attn.q_norm", "self_attn.k_norm")}
        norms |= {name: norm(WIDTH) for name in ("input_layernorm", "post_attention_layernorm")}
        tensors |= layer_tensors(layer, {**attention(random), **norms})
    if drafted is not None:
        others = eagle_tensors(seed, vocab=vocab, drafted=drafted)
        tensors |= {name: others[name] for name in ("lm_head.weight", "d2t", "t2d")}
    return tensors


def block_settings(vocab: int = VOCAB, **more: Any) -> dict[str, Any]:
    """A ``config.json`` of DFlash's authors: what the layers 0 and 2 put out is read."""
    return {
        "architectures": ["DFlashDraftModel"], **LAYER, "vocab_size": vocab, "num_hidden_layers": 2,
        "block_size": BLOCK, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]}, **more,
    }  # fmt: skip


def speculators_block_settings(**more: Any) -> dict[str, Any]:
    """A ``config.json`` of ``speculators`` for DFlash: what the layers 1 and 2 read is read."""
    return {
        "speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"], "draft_vocab_size": DRAFTED,
        "transformer_layer_config": {**LAYER, "num_hidden_layers": 2}, "block_size": BLOCK, "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [1, 2], "projector_type": "dflash", "sample_from_anchor": False, **more,
    }  # fmt: skip


def conditional_tensors(
    kind: str, seed: int = 0, *, vocab: int = VOCAB, drafted: int | None = None, markov: str = "vanilla",
    spread: float = 0.3,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Of a DSpark (``dspark``) or DFlash 2 (``dflash2``) head: those of DFlash, and what they add."""
    tensors = block_tensors(seed, vocab=vocab, drafted=drafted, spread=spread)
    _, random, _ = drawn(seed + 1, spread)
    if kind == "dspark":
        tensors |= {
            "markov_head.markov_w1.weight": 3 * random(vocab, RANK),
            "markov_head.markov_w2.weight": random(drafted or vocab, RANK),
            "confidence_head.proj.weight": random(1, WIDTH + RANK),
            "confidence_head.proj.bias": random(1),
        }
        gate, joint = random(RANK, WIDTH + RANK), random(3 * RANK, 2 * RANK + WIDTH)
        more = {"gated": ("gate_proj", gate, RANK), "rnn": ("joint_proj", joint, 3 * RANK)}
        if markov in more:
            name, weight, rows = more[markov]
            tensors |= {f"markov_head.{name}.weight": weight, f"markov_head.{name}.bias": random(rows)}
        return tensors
    tensors |= {
        "candidate_selector.predecessor_codebook": 3 * random(vocab, RANK),
        "candidate_selector.successor_codebook": 3 * random(vocab, RANK),
        "candidate_selector.hidden_projection.weight": random(RANK, WIDTH),
    }
    for layer in range(2):
        for name in ("attention_conv", "mlp_conv"):
            tensors |= {
                f"layers.{layer}.{name}.base_kernel": 1 + random(2, 2, WIDTH),
                f"layers.{layer}.{name}.kernel_projection.weight": random(2 * 2 * WIDTH // GROUP, WIDTH),
            }
    return tensors


RANK, GROUP = 5, 8


def spark_settings(vocab: int = VOCAB, **more: Any) -> dict[str, Any]:
    """A ``config.json`` of DSpark's authors."""
    return {
        "architectures": ["Qwen3DSparkModel"], **LAYER, "vocab_size": vocab, "num_hidden_layers": 2,
        "block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [0, 2], "num_anchors": 512,
        "markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, **more,
    }  # fmt: skip


def flash_two_settings(vocab: int = VOCAB, **more: Any) -> dict[str, Any]:
    """A ``config.json`` of DFlash 2's authors."""
    section = {
        "block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [0, 2], "conv_group_size": GROUP,
        "conv_kernel_size": 2, "selector_rank": RANK, "selector_top_k": 4,
    }  # fmt: skip
    return {
        "architectures": ["DFlash2DraftModel"], **LAYER, "vocab_size": vocab, "num_hidden_layers": 2,
        "is_causal": False, "dflash_config": {**section, **more},
    }  # fmt: skip


def write_head(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """A folder with a head in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def midlayer(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As the authors of EAGLE-3, AngelSlim and SpecForge call them."""
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}


def speculators_settings(
    layers: Sequence[int] = (0, 1, 2), vocab: int = VOCAB, **more: Any
) -> dict[str, Any]:
    """A ``config.json`` of ``speculators``."""
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "speculators_config": {
            "proposal_methods": [{"speculative_tokens": 3}],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {**LAYER, "vocab_size": vocab}, "draft_vocab_size": DRAFTED,
        "eagle_aux_hidden_state_layer_ids": [*layers], **more,
    }  # fmt: skip


def eagle_settings(layers: Sequence[int] = (0, 1, 2), vocab: int = VOCAB, **more: Any) -> dict[str, Any]:
    """A ``config.json`` of SpecForge, which names the layer that puts a state out."""
    read = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers], "use_aux_hidden_state": True}
    return {
        "architectures": ["LlamaForCausalLMEagle3"], **LAYER, "vocab_size": vocab, "draft_vocab_size": DRAFTED,
        "eagle_config": read, **more,
    }  # fmt: skip


def medusa_tensors(
    seed: int = 0, heads: int = 3, blocks: int = 1, vocab: int = VOCAB, drafted: int | None = None, spread: float = 0.3
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Of Medusa heads, as vLLM calls them."""
    generator, random, _ = drawn(seed, spread)
    tensors: dict[str, torch.Tensor] = {}
    for head in range(heads):
        for block in range(blocks):
            tensors[f"blocks.{head}.layers.{block}.weight"] = random(WIDTH, WIDTH)
        tensors[f"lm_heads.{head}.weight"] = random(drafted or vocab, WIDTH)
    if drafted is not None:
        tensors["token_map"] = torch.randperm(vocab, generator=generator)[:drafted]
    return tensors


def medusa_settings(vocab: int = VOCAB, **more: Any) -> dict[str, Any]:
    """A ``config.json`` for vLLM."""
    return {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": WIDTH, "num_heads": 3,
        "num_hidden_layers": 1, "vocab_size": vocab, "truncated_vocab_size": vocab, **more,
    }  # fmt: skip


def few_tokens() -> Any:
    """A target of nine tokens, so that random drafts are right now and then."""
    return tiny_llama(vocab_size=9, layers=3, seed=1)


def write_model(folder: Path, model: Any, **settings: Any) -> Path:
    """A folder with a causal language model in it, and further settings in its ``config.json``."""
    model.config.update(settings)
    model.save_pretrained(folder)
    return folder


def wrapped_pard(model: Any, target: Target) -> Any:
    """A drafter of a model of nine tokens, the last of which is the mask."""
    model.config.pard_token = 8
    return wrap_drafter(wrap_model(model, None, "pard"), target)


def few_head(folder: Path, kind: str, target: Target) -> Any:
    """A drafter of such a target, made of a folder: of one of the kinds of heads."""
    if kind == "pard":
        return wrapped_pard(tiny_llama(vocab_size=9, layers=1, seed=2), target)
    known: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
        "medusa": (medusa_settings(9), medusa_tensors(vocab=9)),
        "mtp": (mtp_settings(9), mtp_tensors()),
        "dflash": (block_settings(9), block_tensors(vocab=9)),
        "dspark": (spark_settings(9), conditional_tensors("dspark", vocab=9)),
        "dflash2": (flash_two_settings(9), conditional_tensors("dflash2", vocab=9)),
        "peagle": (
            parallel_settings(9, 2, draft_vocab_size=6),
            parallel_tensors(vocab=9, drafted=6, layers=2),
        ),
        "eagle-1": (eagle_one_settings(9), eagle_one_tensors(vocab=9)),
    }
    eagle = speculators_settings((1, 2, 0), 9, draft_vocab_size=6), eagle_tensors(2, vocab=9, drafted=6)
    settings, tensors = known.get(kind, eagle)
    return load_drafter(str(write_head(folder, settings, tensors)), target, LoadOptions(dtype="float32"))
