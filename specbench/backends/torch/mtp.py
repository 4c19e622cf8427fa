"""MTP (multi-token prediction) layers: decoder layers of the target's own class that draft from its last hidden state.

DeepSeek-AI 2024, arXiv 2412.19437. The decoder layer is the one of ``transformers``; its attention calls the ``Attend``
that a forward pass of a head passes to it, so that such a layer drafts chains and trees and in batches as other heads
do.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specbench.backends.torch.heads import Attend, EagleShape, RecurrentHead

PASSED = "specbench_passed"
"""Name of the attention of these layers in ``transformers``: it calls the function that is passed to the layer."""


def passed_attention(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    attend: Attend,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Compute attention by ``attend``; arguments and result as of the attention functions of ``transformers``.

    Raises:
        ValueError: Scores are changed in ways that ``attend`` does not support.
    """
    if changed := [name for name in _CHANGES if arguments.get(name) is not None]:
        raise ValueError(f"its attention has {_CHANGES[changed[0]]}")
    usual = query.shape[-1] ** -0.5
    return attend(query if scaling in (None, usual) else query * (scaling / usual), key, value), None


_CHANGES = {"softcap": "capped scores", "position_bias": "a bias of positions", "s_aux": "sinks"}
"""Arguments that change attention scores."""


class MtpLayer(RecurrentHead):
    """An MTP layer. The feature that goes with the next token is its output after the final norm, if it has one.

    Args:
        block: The decoder layer, whose attention is ``passed_attention``.
        rotary: Returns cosines and sines for embeddings and positions.
        norms: The norms of embeddings and of hidden states, and the final norm; ``None`` without one.
        config: The target's configuration.
        kind: Kind of its attention, if the rotary embedding depends on it.
        hidden_first: See ``Layout``.
    """

    lm_head: nn.Linear

    def __init__(
        self,
        block: nn.Module,
        rotary: Any,
        norms: tuple[nn.Module, nn.Module, nn.Module | None],
        config: PreTrainedConfig,
        *,
        kind: str | None = None,
        hidden_first: bool = False,
    ) -> None:
        super().__init__()
        text: Any = config
        width, vocab = text.hidden_size, text.vocab_size
        self.shape = EagleShape(1, width, vocab, cast("LlamaConfig", config))
        self.embed_tokens = None
        self.enorm, self.hnorm, norm = norms
        self.norm = nn.Identity() if norm is None else norm
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([block])
        self.window = text.sliding_window if kind == "sliding_attention" else None
        self.lm_head = nn.Linear(width, vocab, bias=False, device="meta")  # the target's, or one from a file
        self._hidden_first = hidden_first
        by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
        self._kind = {"layer_type": kind} if by_kind else {}
        self._rotary = (rotary,)  # no submodule: a conversion would round its frequencies

    def read(
        self, embedded: Tensor, features: Tensor, positions: Tensor, attends: Sequence[Attend]
    ) -> Tensor:
        joined = [self.enorm(embedded), self.hnorm(features)]
        x = self.eh_proj(torch.cat(joined[::-1] if self._hidden_first else joined, dim=-1))
        (rotary,), (attend,) = self._rotary, attends
        out = self.layers[0](
            x,
            position_embeddings=rotary(x, positions, **self._kind),
            attention_mask=None,
            position_ids=positions,
            past_key_values=None,
            attend=attend,
        )
        return out[0] if isinstance(out, tuple) else out

    def recurring(self, out: Tensor) -> Tensor:
        return self.norm(out)


def build_mtp_layer(
    config: PreTrainedConfig,
    block: Mapping[str, Tensor],
    *,
    final_norm: bool,
    hidden_first: bool,
) -> MtpLayer:
    """Make an MTP layer with a decoder layer of the target's class; only the decoder layer gets its weights.

    ``transformers`` itself loads it, as the layer of a model without vocabulary, so names and forms of tensors are
    converted as those of the target's layers are.

    Args:
        config: The target's configuration.
        block: The tensors of the decoder layer, by their names in the checkpoint.
        final_norm: Whether there is a norm after the decoder layer.
        hidden_first: See ``Layout``.

    Raises:
        ValueError: Tensors are missing, or do not belong to such a layer.
    """
    AttentionInterface.register(PASSED, passed_attention)
    text = config.get_text_config(decoder=True)
    own = _layer_config(text, sparse=any(".experts." in name for name in block))
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = classes[type(text) if type(text) in classes else type(config)]
    tensors = {f"model.layers.0.{name}": tensor for name, tensor in block.items()}
    model, report = model_class.from_pretrained(
        None,
        config=own,
        trust_remote_code=False,
        state_dict=tensors,
        output_loading_info=True,
        dtype=next(iter(tensors.values())).dtype,
    )
    for what, names in (("lacks", report["missing_keys"]), ("has no place for", report["unexpected_keys"])):
        if wrong := sorted(name for name in names if ".layers." in name):
            raise ValueError(f"a decoder layer of {own.model_type} {what} {wrong[0]}")
    model.set_attn_implementation(PASSED)
    decoder = model.get_decoder()

    def norm() -> Any:
        return type(decoder.norm)(text.hidden_size, eps=text.rms_norm_eps)

    (layer_type,) = getattr(own, "layer_types", None) or [None]
    return MtpLayer(
        decoder.layers[0],
        decoder.rotary_emb,
        (norm(), norm(), norm() if final_norm else None),
        text,
        kind=layer_type,
        hidden_first=hidden_first,
    )


def _layer_config(text: PreTrainedConfig, *, sparse: bool) -> Any:
    """Return a target's configuration with one layer, which is ``sparse`` if it has experts, and no vocabulary."""
    given: Any = text
    own: Any = copy.deepcopy(text)
    changed: dict[str, Any] = {
        "layer_types": (getattr(given, "mtp_layer_types", None) or ["full_attention"])[:1],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "first_k_dense_replace": int(not sparse),  # DeepSeek, GLM
        "mlp_only_layers": [] if sparse else [0],  # Qwen
        "decoder_sparse_step": 1,
        "moe_layer_start_index": int(not sparse),  # Ernie
        "moe_layer_end_index": 1,
        "moe_layer_interval": 1,
        "per_layer_config": getattr(given, "mtp_per_layer_config", None),
    }
    own.num_hidden_layers = 1
    for name, value in changed.items():
        if getattr(given, name, None) is not None:
            setattr(own, name, value)
    own.vocab_size = 2
    own.tie_word_embeddings = False
    own.pad_token_id = own.bos_token_id = own.eos_token_id = None
    return own
