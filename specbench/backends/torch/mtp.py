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

from specbench.backends.torch.cache_layers import PreallocatedLayer
from specbench.backends.torch.head_forward import HeadForward, HeadInput
from specbench.backends.torch.head_scorers import HeadScorer, HeadSteps, OfTarget, Reading, node_depths
from specbench.backends.torch.heads import Attend, EagleShape, RecurrentHead
from specbench.backends.torch.scorer import DeviceTokens
from specbench.decoding.protocols import ForwardRequest

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
    s_aux: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Compute attention by ``attend``; arguments and result as of the attention functions of ``transformers``.

    Raises:
        ValueError: Scores are changed in ways that ``attend`` does not support.
    """
    if changed := [name for name in _CHANGES if arguments.get(name) is not None]:
        raise ValueError(f"its attention has {_CHANGES[changed[0]]}")
    usual = query.shape[-1] ** -0.5
    sinks = {} if s_aux is None else {"sinks": s_aux}
    return attend(query if scaling in (None, usual) else query * (scaling / usual), key, value, **sinks), None


_CHANGES = {"softcap": "capped scores", "position_bias": "a bias of positions"}
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


def build_mtp_layers(
    config: PreTrainedConfig,
    blocks: Sequence[Mapping[str, Tensor]],
    *,
    final_norm: bool,
    hidden_first: bool,
    kind: str = "full_attention",
) -> list[MtpLayer]:
    """Make MTP layers with the decoder layers of a target's class; only these get their weights.

    ``transformers`` itself loads the decoder layers, as the layers of a model without vocabulary, so names and forms of
    tensors are converted as those of the target's layers are.

    Args:
        config: The target's configuration.
        blocks: The tensors of each decoder layer, by their names in the checkpoint.
        final_norm: Whether there is a norm after the decoder layer.
        hidden_first, kind: See ``Layout``.

    Raises:
        ValueError: Tensors are missing, or do not belong to such a layer.
    """
    AttentionInterface.register(PASSED, passed_attention)
    text = config.get_text_config(decoder=True)
    own = _layer_config(text, [any(".experts." in name for name in block) for block in blocks], kind)
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = classes[type(text) if type(text) in classes else type(config)]
    tensors = {
        f"model.layers.{layer}.{name}": tensor
        for layer, block in enumerate(blocks)
        for name, tensor in block.items()
    }
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

    kinds = getattr(own, "layer_types", None) or [None] * len(blocks)
    return [
        MtpLayer(
            block,
            decoder.rotary_emb,
            (norm(), norm(), norm() if final_norm else None),
            text,
            kind=kind,
            hidden_first=hidden_first,
        )
        for block, kind in zip(decoder.layers, kinds, strict=True)
    ]


def _layer_config(text: PreTrainedConfig, sparse: Sequence[bool], kind: str = "full_attention") -> Any:
    """Return a target's configuration with other layers and without a vocabulary: its kinds of layers are by index.

    Args:
        text: The target's.
        sparse: Whether each layer has experts.
        kind: The layers' kind of attention, unless it is in the configuration.
    """
    given: Any = text
    own: Any = copy.deepcopy(text)
    layers = len(sparse)
    first = next((layer for layer, has in enumerate(sparse) if has), layers)
    kinds = getattr(given, "mtp_layer_types", None) or [kind]
    changed: dict[str, Any] = {
        "layer_types": [kinds[layer % len(kinds)] for layer in range(layers)],
        "mlp_layer_types": ["sparse" if has else "dense" for has in sparse],
        "first_k_dense_replace": first,  # DeepSeek, GLM
        "mlp_only_layers": [layer for layer, has in enumerate(sparse) if not has],  # Qwen
        "decoder_sparse_step": 1,
        "moe_layer_start_index": first,  # Ernie
        "moe_layer_end_index": layers,
        "moe_layer_interval": 1,
        "per_layer_config": getattr(given, "mtp_per_layer_config", None),
    }
    own.num_hidden_layers = layers
    for name, value in changed.items():
        if getattr(given, name, None) is not None:
            setattr(own, name, value)
    own.vocab_size = 2
    own.tie_word_embeddings = False
    own.pad_token_id = own.bos_token_id = own.eos_token_id = None
    return own


# -- several layers --------------------------------------------------------------------------------


class MtpLayers(nn.Module):
    """Several MTP layers, each of which drafts one token; see ``MtpScorer``, and for ``chained`` ``Layout``."""

    embed_tokens: nn.Embedding | None

    def __init__(self, layers: Sequence[MtpLayer], *, chained: bool = True) -> None:
        super().__init__()
        self.embed_tokens = None
        self.chained, self.shape = chained, layers[0].shape
        self.layers = nn.ModuleList(layers)


class MtpScorer(HeadScorer):
    """MTP layers, each with keys and values of its own. An input is tokens of one request for a layer.

    Entry i of layer k is the token k + 1 + i, with feature i of this layer: the target's state at i, or, if the
    layers are chained, the output of layer k - 1 at its entry i. Features are kept for the whole context.
    """

    reads_context = True

    def __init__(self, head: MtpLayers, target: OfTarget) -> None:
        super().__init__(head, target)
        self.longest = len(head.layers)
        self._forwards = [HeadForward(layer) for layer in self.head.layers]
        # Keys and values of each layer, and then the features of each.
        self._caches = [PreallocatedLayer() for _ in range(2 * self.longest)]

    def _reset(self) -> None:
        super()._reset()
        count = len(self.head.layers)
        self._read = [0] * count  # entries of the context, by layer
        self._drafted: list[list[int]] = [[] for _ in range(count)]  # nodes whose entries come after these
        self._outputs: list[dict[int, Tensor]] = [{} for _ in range(count)]  # at these nodes
        self._rows: dict[int, Tensor] = {}  # logits after nodes; -1 is the context

    @property
    def cached_len(self) -> int:
        return self._read[0] + 1 if self._read[0] else 0

    def can_read(self, context: Sequence[int], drafted: Sequence[int]) -> bool:
        # The last layer has no entry for the first tokens.
        return super().can_read(context, drafted) and len(context) >= len(self._read)

    def take_states(self, length: int, states: Tensor) -> None:
        fresh = states[self._known - length :].to(self.device, self._dtype)
        self._add_features(0, self.head.layers[0].fuse(fresh))
        self._known = length

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:
        """Drop entries of drafts, and those of the context after the first ``length`` tokens."""
        entries = max(0, length - 1)  # of layer 0
        for layer, read in enumerate(self._read):
            self._read[layer] = min(read, max(0, entries - layer))
            self._caches[layer].rollback(self._read[layer])
            if layer and self.head.chained:
                self._features(layer).rollback(self._read[layer - 1])
            self._drafted[layer], self._outputs[layer] = [], {}
        self._rows = {-1: self._rows[-1]} if -1 in self._rows else {}

    def _features(self, layer: int) -> PreallocatedLayer:
        return self._caches[len(self._read) + layer * self.head.chained]

    def _add_features(self, layer: int, features: Tensor) -> None:
        self._features(layer).update(features[None, None], features[None, None, :, :0])

    def steps(self, request: ForwardRequest, rows: int) -> HeadSteps:
        if self._read[0] < len(request.context) - 1:
            self._rows = {}
        depths = node_depths(request)
        for layer in range(max(depths) + 1):
            nodes = [row - 1 for row, depth in enumerate(depths) if depth == layer]
            if fresh := [node for node in nodes if node not in self._rows]:
                yield from self._run(layer, fresh, request)
        return torch.stack([self._rows[row - 1] for row in range(len(depths) - rows, len(depths))])

    def _run(self, layer: int, wanted: Sequence[int], request: ForwardRequest) -> Reading:
        """Run a layer over what it has not read of the context and of the branches of nodes at its depth."""
        context, first = request.context, self._read[layer]
        base = len(context) - 1 - layer  # entries of the context
        parents = [*range(-1, len(request.tokens) - 1)] if request.parents is None else [*request.parents]
        last = [node for node in wanted if node >= 0]
        before = {node for leaf in last for node in _branch(leaf, parents)[:-1]}
        nodes = [*sorted(before.difference(self._drafted[layer])), *last]
        branches = {node: _branch(node, parents) for node in nodes}
        places = [base + len(branch) - 1 for branch in branches.values()]
        known = self._features(layer).keys[0, 0]
        if self.head.chained:
            after = [
                known[base] if parents[node] < 0 else self._outputs[layer - 1][parents[node]]
                for node in nodes
            ]
        else:
            after = [known[place] for place in places]
        features = torch.cat([known[first:base], *(feature[None] for feature in after)])
        mask = None
        positions: range | Tensor = range(first, base + len(nodes))
        if request.parents is not None and nodes:
            positions = torch.tensor([*range(first, base), *places], device=self.device)
            mask = self._mask(layer, base, branches)
        given = HeadInput(
            self._embed(self._ids(request, layer + 1 + first, nodes)),
            features,
            positions,
            mask,
            [self._caches[layer]],
            len(wanted),
        )
        output = yield self._forwards[layer], given
        own_entries = base - first
        if layer + 1 < len(self._read) and self.head.chained:
            self._add_features(layer + 1, output.features[:own_entries])
        self._read[layer] = base
        self._drafted[layer] += nodes
        self._outputs[layer] |= zip(nodes, output.features[own_entries:], strict=True)
        self._rows |= zip(wanted, output.logits, strict=True)

    def _ids(self, request: ForwardRequest, start: int, nodes: Sequence[int]) -> Tensor:
        """Return the tokens of the context from ``start`` on, and those of nodes."""
        drafted = request.tokens
        every = drafted.tensor if isinstance(drafted, DeviceTokens) else torch.tensor([*drafted])
        chosen = every[list(nodes)].to(self.device, torch.long)
        return torch.cat(
            (torch.tensor(request.context[start:], dtype=torch.long, device=self.device), chosen)
        )

    def _mask(self, layer: int, base: int, branches: dict[int, list[int]]) -> Tensor:
        """Return which entries new ones attend to, see ``HeadInput``: nodes to the context and to their branch."""
        first, earlier = self._read[layer], self._drafted[layer]
        column = {node: base + place for place, node in enumerate([*earlier, *branches])}
        mask = torch.zeros(base - first + len(branches), base + len(column), dtype=torch.bool)
        mask[: base - first, :base] = torch.ones(base - first, base, dtype=torch.bool).tril_(first)
        for row, branch in enumerate(branches.values(), start=base - first):
            mask[row, :base] = True
            mask[row, [column[node] for node in branch]] = True
        return mask.to(self.device)[None, None]


def _branch(node: int, parents: Sequence[int]) -> list[int]:
    """Return the nodes from the root to a node, which is the last."""
    branch = [node]
    while parents[branch[-1]] >= 0:
        branch.append(parents[branch[-1]])
    return branch[::-1]
