"""Tiny random checkpoints with an MTP layer, in every layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_tokenizer
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WIDTH = 32
VOCAB = len(tiny_tokenizer())
LAYERS = 2
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "initializer_range": 0.3, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "partial_rotary_factor": 0.5,
}  # fmt: skip
_APPENDED = {
    "enorm": f"model.layers.{LAYERS}.enorm", "hnorm": f"model.layers.{LAYERS}.hnorm",
    "eh_proj": f"model.layers.{LAYERS}.eh_proj", "norm": f"model.layers.{LAYERS}.shared_head.norm",
    "block": f"model.layers.{LAYERS}",
}  # fmt: skip
_MTP = {
    "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc", "norm": "mtp.norm",
    "block": "mtp.layers.0",
}  # fmt: skip
_MIMO = {
    "enorm": "model.mtp_layers.0.token_layernorm", "hnorm": "model.mtp_layers.0.hidden_layernorm",
    "eh_proj": "model.mtp_layers.0.input_proj", "norm": "model.mtp_layers.0.final_layernorm",
    "block": "model.mtp_layers.0",
}  # fmt: skip
_ERNIE = {
    "enorm": "model.mtp_emb_norm.0", "hnorm": "model.mtp_hidden_norm.0", "eh_proj": "model.mtp_linear_proj.0",
    "block": "model.mtp_block.0",
}  # fmt: skip


class Family(NamedTuple):
    """A family of models, and how its checkpoints name an MTP layer."""

    model_type: str
    names: dict[str, str]
    settings: Mapping[str, Any] = MappingProxyType({})
    layer: Mapping[str, Any] = MappingProxyType({})  # settings of the MTP layer
    hidden_first: bool = False


FAMILIES = {
    "deepseek": Family(
        "deepseek_v3",
        _APPENDED,
        {
            **_EXPERTS, "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 4, "kv_lora_rank": 8,
            "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8,
        },
        {"first_k_dense_replace": 0},
    ),
    "glm": Family(
        "glm4_moe",
        _APPENDED,
        {
            **_EXPERTS, "n_shared_experts": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        {"first_k_dense_replace": 0},
    ),
    "step": Family("qwen3", {**_APPENDED, "block": f"model.layers.{LAYERS}.transformer"}),
    "mimo": Family("qwen2", _MIMO, hidden_first=True),
    "qwen3-next": Family(
        "qwen3_next",
        _MTP,
        {**_HYBRID, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
        {"layer_types": ["full_attention"]},
    ),
    "qwen3.5": Family("qwen3_5_text", _MTP, _HYBRID, {"layer_types": ["full_attention"]}),
    "ernie": Family("ernie4_5", _ERNIE),
    "mellum": Family(
        "mellum",
        _MTP,
        {
            **_EXPERTS, "num_experts": 4, "num_mtp_layers": 1, "mtp_layer_types": ["full_attention"],
            "layer_types": ["full_attention"] * LAYERS,
        },
        {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]},
    ),
}  # fmt: skip


class Made(NamedTuple):
    """A checkpoint with an MTP layer.

    Attributes:
        folder: Its folder.
        target: The target.
        parts: The norms and the linear layer, by their names in ``MtpLayer``.
        donor: A model of one layer, which is the MTP layer's decoder layer, with its final norm.
    """

    folder: Path
    target: Any
    parts: dict[str, torch.Tensor]
    donor: Any
    hidden_first: bool


def make_checkpoint(folder: Path, family: str, seed: int = 0) -> Made:
    """Write a checkpoint of a family with an MTP layer."""
    model_type, names, settings, layer, hidden_first = FAMILIES[family]
    kind = CONFIG_MAPPING[model_type]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target = AutoModelForCausalLM.from_config(kind(**{**_BASE, **settings})).eval()
        donor = AutoModelForCausalLM.from_config(
            kind(**{**_BASE, **settings, "num_hidden_layers": 1, **layer})
        ).eval()
        parts = {name: torch.rand(WIDTH) + 0.5 for name in ("enorm", "hnorm", "norm") if name in names}
        parts["eh_proj"] = torch.randn(WIDTH, 2 * WIDTH) * 0.2
    with torch.no_grad():
        if "norm" in parts:
            donor.model.norm.weight.copy_(parts["norm"])
        else:
            donor.model.norm = torch.nn.Identity()
    target.generation_config.do_sample = False
    target.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    donor.save_pretrained(folder / "donor")
    own = load_file(folder / "model.safetensors")
    stored = load_file(folder / "donor" / "model.safetensors")
    own |= {
        name.replace("model.layers.0", names["block"]): tensor
        for name, tensor in stored.items()
        if name.startswith("model.layers.0.")
    }
    own |= {f"{names[name]}.weight": tensor for name, tensor in parts.items()}
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    for file in (folder / "donor").iterdir():
        file.unlink()
    (folder / "donor").rmdir()
    return Made(folder, target, parts, donor, hidden_first)


@torch.inference_mode()
def formula(made: Made, tokens: list[int], drafted: int = 0) -> torch.Tensor:
    """Return the logits after tokens, and after each of the last ``drafted`` ones, [1 + drafted, vocab].

    The layer reads token t + 1 with the target's state at t, and each drafted token with its own output before it.
    """
    embeddings, norm = made.target.get_input_embeddings(), type(made.target.model.norm)
    context = tokens[: len(tokens) - drafted]
    hidden = made.target(input_ids=torch.tensor([context]), output_hidden_states=True).hidden_states[-1]
    features, norms = hidden[0, :-1], {}
    for name in ("enorm", "hnorm"):
        norms[name] = norm(WIDTH, eps=made.target.config.rms_norm_eps)
        norms[name].weight.copy_(made.parts[name])
    rows = []
    for end in range(len(context), len(tokens) + 1):
        joined = [norms["enorm"](embeddings(torch.tensor(tokens[1:end]))), norms["hnorm"](features)]
        x = torch.cat(joined[::-1] if made.hidden_first else joined, dim=-1) @ made.parts["eh_proj"].T
        # The layer's own positions begin at 0, as those of the layer in the package do.
        out = made.donor.model(inputs_embeds=x[None]).last_hidden_state[0]
        rows.append(made.target.lm_head(out[-1]))
        features = torch.cat((features, out[-1:]))
    return torch.stack(rows)
