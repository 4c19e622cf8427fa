"""Several MTP layers as a scorer: layer k drafts the token k + 1 places after the context.

DeepSeek-AI 2024, arXiv 2412.19437, section 2.2. Layer k reads each token together with the output of layer k - 1 at the
token before it; layer 0 reads the target's hidden state there. So nothing that a layer computes for the context depends
on draft tokens. Layers that are not chained read the target's state there, too (MiMo-V2, as SGLang runs it). A layer
reads what is new of the context in the pass in which it first drafts, before the draft tokens
that precede the one it drafts.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from specbench.backends.torch.cache_layers import PreallocatedLayer
from specbench.backends.torch.head_forward import HeadForward, HeadInput, HeadOutput
from specbench.backends.torch.head_scorers import HeadScorer, HeadSteps, OfTarget, node_depths
from specbench.backends.torch.mtp import MtpLayers
from specbench.backends.torch.scorer import DeviceTokens
from specbench.decoding.protocols import ForwardRequest


class MtpScorer(HeadScorer):
    """MTP layers, each with keys and values of its own. An input is tokens of one request for a layer.

    Entry i of layer k is the token k + 1 + i, with feature i of this layer: the target's state at i, or, if the
    layers are chained, the output of layer k - 1 at its entry i. Features are kept for the whole context.
    """

    reads_context = True

    def __init__(self, head: MtpLayers, target: OfTarget) -> None:
        super().__init__(head, target)
        self.longest = len(head.layers)
        self._forwards = [HeadForward(layer) for layer in head.mtp_layers]
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
        self._add_features(0, self.head.fuse(fresh))
        self._known = length

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:  # noqa: ARG002
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
        cache: PreallocatedLayer = self._caches[len(self._read) + layer * self.head.chained]
        return cache

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

    def _run(
        self, layer: int, wanted: Sequence[int], request: ForwardRequest
    ) -> Generator[tuple[int, HeadInput], HeadOutput]:
        """Run a layer over what it has not read of the context and of the branches of nodes at its depth."""
        context, first = request.context, self._read[layer]
        base = len(context) - 1 - layer  # entries of the context
        parents = [*range(-1, len(request.tokens) - 1)] if request.parents is None else [*request.parents]
        last = [node for node in wanted if node >= 0]
        before = {node for each in last for node in _branch(each, parents)[:-1]}
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
        features = torch.cat([known[first:base], *(each[None] for each in after)])
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
        found = yield layer, given
        own_entries = base - first
        if layer + 1 < len(self._read) and self.head.chained:
            self._add_features(layer + 1, found.features[:own_entries])
        self._read[layer] = base
        self._drafted[layer] += nodes
        self._outputs[layer] |= zip(nodes, found.features[own_entries:], strict=True)
        self._rows |= zip(wanted, found.logits, strict=True)

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

    def compute(self, part: int, inputs: Sequence[HeadInput]) -> list[HeadOutput]:
        return self._forwards[part](inputs)


def _branch(node: int, parents: Sequence[int]) -> list[int]:
    """Return the nodes from the root to a node, which is the last."""
    branch = [node]
    while parents[branch[-1]] >= 0:
        branch.append(parents[branch[-1]])
    return branch[::-1]
