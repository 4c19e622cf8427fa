"""Tiny random checkpoints with MTP layers, in every layout."""

from __future__ import annotations

import shutil
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
# Names of tensors; N is the number of a layer, M that number counted after the target's layers.
_APPENDED = {
    "enorm": "model.layers.M.enorm", "hnorm": "model.layers.M.hnorm", "eh_proj": "model.layers.M.eh_proj",
    "norm": "model.layers.M.shared_head.norm", "block": "model.layers.M",
}  # fmt: skip
_MTP = {
    "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc", "norm": "mtp.norm",
    "block": "mtp.layers.N",
}  # fmt: skip
_MIMO = {
    "enorm": "model.mtp_layers.N.token_layernorm", "hnorm": "model.mtp_layers.N.hidden_layernorm",
    "eh_proj": "model.mtp_layers.N.input_proj", "norm": "model.mtp_layers.N.final_layernorm",
    "block": "model.mtp_layers.N",
}  # fmt: skip
_ERNIE = {
    "enorm": "model.mtp_emb_norm.N", "hnorm": "model.mtp_hidden_norm.N", "eh_proj": "model.mtp_linear_proj.N",
    "block": "model.mtp_block.N",
}  # fmt: skip


class Family(NamedTuple):
    """A family of models, and how its checkpoints name an MTP layer."""

    model_type: str
    names: dict[str, str]
    settings: Mapping[str, Any] = MappingProxyType({})
    layer: Mapping[str, Any] = MappingProxyType({})  # settings of the MTP layer
    hidden_first: bool = False


def _mellum(attention: str, **more: Any) -> Family:
    """Mellum with MTP layers of a kind of attention."""
    settings = {
        **_EXPERTS, "num_experts": 4, "num_mtp_layers": 1, "mtp_layer_types": [attention],
        "layer_types": ["full_attention"] * LAYERS, **more,
    }  # fmt: skip
    return Family("mellum", _MTP, settings, {"layer_types": [attention], "mlp_layer_types": ["sparse"]})


FAMILIES = {
    "deepseek": Family(
        "deepseek_v3",
        _APPENDED,
        {
            **_EXPERTS, "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 4, "kv_lora_rank": 8,
            "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8, "num_nextn_predict_layers": 1,
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
    "mimo": Family("qwen2", _MIMO, hidden_first=True),
    "qwen3-next": Family(
        "qwen3_next",
        _MTP,
        {**_HYBRID, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
        {"layer_types": ["full_attention"]},
    ),
    "qwen3.5": Family("qwen3_5_text", _MTP, _HYBRID, {"layer_types": ["full_attention"]}),
    "ernie": Family("ernie4_5", _ERNIE),
    "mellum": _mellum("full_attention"),
    "mellum, sliding": _mellum("sliding_attention", sliding_window=3),
}  # fmt: skip


class Made(NamedTuple):
    """A checkpoint with MTP layers, of which the first counts.

    Attributes:
        parts: The norms and the linear layer, by their names in ``MtpLayer``.
        donor: A model of one layer, which is the MTP layer's decoder layer, with its final norm.
    """

    folder: Path
    target: Any
    parts: dict[str, torch.Tensor]
    donor: Any
    hidden_first: bool


def make_checkpoint(folder: Path, family: str, seed: int = 0) -> Made:
    """Write a checkpoint of a family with two MTP layers."""
    model_type, names, settings, layer, hidden_first = FAMILIES[family]
    kind = CONFIG_MAPPING[model_type]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target = AutoModelForCausalLM.from_config(kind(**{**_BASE, **settings})).eval()
        own = {**_BASE, **settings, "num_hidden_layers": 1, **layer}
        donor = AutoModelForCausalLM.from_config(kind(**own)).eval()
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
    stored = load_file(folder / "donor" / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    for number in (1, 0):  # the first last: names without a number are its own
        place = {
            part: name.replace("M", str(LAYERS + number)).replace("N", str(number))
            for part, name in names.items()
        }
        tensors |= {
            name.replace("model.layers.0", place["block"]): tensor + number
            for name, tensor in stored.items()
            if name.startswith("model.layers.0.")
        }
        tensors |= {f"{place[name]}.weight": tensor + number for name, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.rmtree(folder / "donor")
    target.config.name_or_path = str(folder)
    return Made(folder, target, parts, donor, hidden_first)


@torch.inference_mode()
def formula(made: Made, tokens: list[int], drafted: int = 0) -> torch.Tensor:
    """Return the logits after tokens, and after each of the last ``drafted`` ones, [1 + drafted, vocab].

    The layer reads token t + 1 with the target's state at t, and each drafted token with its own output before it.
    """
    context = tokens[: len(tokens) - drafted]
    features = made.target(input_ids=torch.tensor([context]), output_hidden_states=True).hidden_states[-1][
        0, :-1
    ]
    rows = []
    for end in range(len(context), len(tokens) + 1):
        out = _run(made, tokens[1:end], features)
        rows.append(made.target.lm_head(out[-1]))
        features = torch.cat((features, out[-1:]))
    return torch.stack(rows)


def _run(made: Made, tokens: list[int], features: torch.Tensor) -> torch.Tensor:
    """Return the layer's outputs at tokens, given the features that go with them."""
    parts, normed = made.parts, []
    inputs = made.target.get_input_embeddings()(torch.tensor(tokens)), features
    for name, each in zip(("enorm", "hnorm"), inputs, strict=True):
        norm = type(made.target.model.norm)(WIDTH, eps=made.target.config.rms_norm_eps)
        norm.weight.copy_(parts[name])
        normed.append(norm(each))
    x = torch.cat(normed[::-1] if made.hidden_first else normed, dim=-1) @ parts["eh_proj"].T
    # The layer's own positions begin at 0, as those of the layer in the package do.
    out: torch.Tensor = made.donor.model(inputs_embeds=x[None]).last_hidden_state[0]
    return out
