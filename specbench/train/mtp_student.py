"""An MTP layer in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from specbench.backends.torch.attention import causal_attention
from specbench.backends.torch.mtp import MtpLayer, build_mtp_layers
from specbench.base.progress import quiet_transformers
from specbench.base.record import Json
from specbench.models.checkpoints import text_config
from specbench.models.mtp_layouts import SPECULATORS
from specbench.train.students import EagleStudent, layer_config, layer_settings, start_from_highest

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MtpStudent(EagleStudent):
    """One MTP layer that drafts all tokens, and so learns to continue its own outputs.

    FastMTP (Cai et al. 2025, arXiv 2509.18362) trains MTP layers so: one layer for all tokens, on the target's own
    answers, with weights of the loss that fall from token to token. The decoder layer is of the target's class, and
    begins as its last one with full attention; where such a layer cannot be run by itself, it is a random one of
    Llama's. Its input begins as the target's hidden state before the final norm, in the size of that layer's inputs.
    """

    algorithm = "mtp"

    def read_layers(self, total: int) -> tuple[int, ...]:
        return (total,)

    def make_head(self, model: PreTrainedModel) -> Any:
        head = _layer_of_target(model)
        if head is None:
            own = layer_config(self.config)
            head = _mtp_layer(own, LlamaDecoderLayer(own, 0))
        del head.lm_head
        start_from_highest(head.eh_proj, self.config.hidden_size)
        return head

    def settings(self) -> Json:
        return {
            "architectures": ["MTPDraftModel"],
            "num_nextn_predict_layers": 1,
            "transformer_layer_config": layer_settings(self.head.shape.layer),
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"mtp_layers.0.{SPECULATORS.stored_name(name)}": tensor.detach()
            for name, tensor in self.head.state_dict().items()
        }


def _layer_of_target(model: PreTrainedModel) -> MtpLayer | None:
    """Return a copy of the target's last layer with full attention.

    ``None`` if such a layer needs more than the arguments of an MTP layer, or its attention is of another form.
    """
    untyped: Any = model
    try:
        decoder = untyped.get_decoder()
        kinds = getattr(text_config(model.config), "layer_types", None) or [None] * len(decoder.layers)
        place = max(
            i
            for i, (layer, kind) in enumerate(zip(decoder.layers, kinds, strict=True))
            if kind in (None, "full_attention") and hasattr(layer, "self_attn")
        )
        head = _mtp_layer(model.config, decoder.layers[place])
        head.norm.load_state_dict({"weight": decoder.norm.weight.float()})
        _scale_inputs(head, untyped, place)
        tokens = torch.zeros(1, 2, text_config(model.config).hidden_size)
        with torch.no_grad():
            head.read(tokens, tokens, torch.arange(2)[None], [causal_attention])
    except Exception:  # what configurations and layers of other shapes raise
        return None
    return head


@torch.no_grad()
def _scale_inputs(head: MtpLayer, model: Any, place: int) -> None:
    """Let the norms give inputs of the size of the target's at a layer, and the one of states undo the final norm."""
    ids = torch.arange(_TOKENS, device=model.device)[None] % text_config(model.config).vocab_size
    states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    # The first tokens of many models have far larger states than the others.
    inputs, last = (states[layer][0, _TOKENS // 2 :].float().cpu() for layer in (place, -1))
    ones = torch.ones(last.shape[-1])
    gain = head.norm(ones)
    gain = torch.where(gain.abs() < _SMALLEST, _SMALLEST, gain)
    undone = last / last.pow(2).mean(-1, keepdim=True).sqrt() / gain
    size = inputs.pow(2).mean().sqrt()
    for norm, wanted in ((head.enorm, size * ones), (head.hnorm, size / undone.pow(2).mean().sqrt() / gain)):
        weight: Any = norm.weight
        weight.copy_(wanted - (norm(ones) - weight))  # some norms add 1 to their weights


_SMALLEST = 1e-3
"""Smallest gain of the final norm that is undone."""

_TOKENS = 32
"""Tokens, of which the second half shows the size of a layer's inputs."""


def _mtp_layer(config: PreTrainedConfig, block: Any) -> MtpLayer:
    """Return an MTP layer in float32 with the weights of a decoder layer."""
    weights = {
        name: tensor.to("cpu", torch.float32, copy=True) for name, tensor in block.state_dict().items()
    }
    with quiet_transformers():
        (head,) = build_mtp_layers(config, [weights], final_norm=True, hidden_first=False)
    return head
