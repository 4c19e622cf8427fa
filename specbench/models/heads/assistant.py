"""Gemma 4's assistant: its configuration, and whether it fits a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedConfig

from specbench.backends.torch.assistant import Assistant, SharedLayer, shared_layers
from specbench.base.errors import RunError, UsageError
from specbench.models.checkpoints import read_any_config, text_config

ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Model types of assistants."""


def make_assistant(folder: Path, name: str) -> Assistant:
    """Make an assistant without weights; raise ``RunError`` if its configuration is damaged."""
    config: Any = read_any_config(folder, name)
    layers: Any = text_config(config)
    if not config.use_ordered_embeddings:
        return Assistant(layers, config.backbone_hidden_size, None)
    groups, best = config.num_centroids, config.centroid_intermediate_top_k
    if not 0 < best <= groups or layers.vocab_size % groups:
        raise RunError(
            f"The config.json of {name} is damaged: {layers.vocab_size} tokens are not in {groups} groups, of which"
            f" {best} get logits."
        )
    return Assistant(layers, config.backbone_hidden_size, (groups, best))


def layers_of_target(folder: Path, name: str, target: PreTrainedConfig) -> dict[str, SharedLayer]:
    """Return the target's layers that an assistant attends to, see ``shared_layers``.

    Raises:
        UsageError: The target is of another family, or its keys have another size. RunError: See ``make_assistant``.
    """
    own, text = cast("Any", text_config(read_any_config(folder, name))), cast("Any", text_config(target))
    if text.model_type != own.model_type:
        raise UsageError(
            f"{name} is an assistant of a target of type {own.model_type!r}, not of {text.model_type!r}.",
            _OTHER,
        )
    shared = shared_layers(text, own)
    for number, kind in enumerate(own.layer_types):
        if kind not in shared:
            raise UsageError(f"{name} attends to layers with {kind}, which the target does not have.", _OTHER)
        ours, theirs = own.per_layer_config[number], text.per_layer_config[shared[kind].number]
        if ours.head_dim != theirs.head_dim or ours.num_attention_heads % theirs.num_key_value_heads:
            raise UsageError(
                f"{name} attends with {ours.num_attention_heads} heads of size {ours.head_dim} to layers of the target"
                f" with {theirs.num_key_value_heads} of size {theirs.head_dim}.",
                _OTHER,
            )
    return shared


_OTHER = "Choose the assistant of this target."
