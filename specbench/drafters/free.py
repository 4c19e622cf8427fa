"""What drafters without a model have in common that know several candidates for the next token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specbench.decoding.clocks import Clock, WallClock
from specbench.decoding.drafts import Draft, GrowingTree
from specbench.decoding.prospects import Known
from specbench.decoding.protocols import Asking, Guess
from specbench.decoding.verdicts import top

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drawing, LengthPolicy, TreePolicy
    from specbench.decoding.sampling import Randomness, Sampling

__all__ = ["CandidateDrafter"]


class CandidateDrafter:
    """Drafts the likeliest candidate, token after token, or a tree of several. None of them is ever drawn.

    Whoever inherits it says what the candidates are, and takes in what it learns them from.

    Args:
        spec: What it is called.
        clock: Times the reading of the prompt.
    """

    takes_trees = True
    certain = True

    def __init__(self, spec: object, clock: Clock | None = None) -> None:
        self.name = str(spec)
        self.epoch = 0
        self._clock = clock or WallClock()
        self._read = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def candidates(self, context: Sequence[int], drafted: Sequence[int]) -> Mapping[int, float]:
        """What may stand behind ``context + drafted``, the likeliest first, each with its chance."""
        raise NotImplementedError

    def take_in(self, context: Sequence[int], first: int) -> None:
        """Learn from ``context[first:]``, which is new."""
        raise NotImplementedError

    def begin(self, prompt: Sequence[int]) -> None:
        self.epoch += 1
        self._read = 0

    def read(self, context: Sequence[int]) -> float:
        first = self._read == 0
        began = self._clock.now()
        self.take_in(context, self._read)
        self._read = len(context)
        return self._clock.now() - began if first else 0.0

    def propose(
        self, context: Sequence[int], room: int, policy: LengthPolicy, sampling: Sampling, random: Randomness
    ) -> Asking[Draft]:
        yield from ()  # no passes
        draft = Draft(evidence=[], prefill_s=self.read(context))
        limit = policy.begin(room)
        while len(draft.tokens) < limit:
            guess = self.guess(context, draft.tokens, sampling)
            if guess is None:
                break
            draft.evidence.append(guess.evidence)  # type: ignore[union-attr]
            if not policy.another(draft):
                break
            draft.tokens.append(guess.token)
        return draft

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> Guess | None:
        """The likeliest candidate, whoever drafted what stands before it."""
        return next((Guess(*each) for each in self.candidates(context, drafted).items()), None)

    def propose_tree(
        self,
        context: Sequence[int],
        room: int,
        policy: TreePolicy,
        drawing: Drawing,
        sampling: Sampling,
        random: Randomness,
    ) -> Asking[Draft]:
        """Draft a tree of the likeliest candidates. They are certain, so any way to verify is right for them."""
        yield from ()  # no passes
        tree, prefill_s = GrowingTree(), self.read(context)
        frontier: Sequence[int] = [-1] if policy.begin(room) else []
        while frontier:
            known = {node: Known(self.candidates(context, tree.branch(node))) for node in frontier}
            nodes = [node for node in frontier if known[node].best(1)]
            if not nodes:
                break
            first = len(tree)
            widths = policy.widths(tree, nodes, [known[node] for node in nodes])
            for node, width in zip(nodes, widths, strict=True):
                if width:
                    tree.add(node, top(known[node], width, random), known[node])
            frontier = policy.onwards(tree, range(first, len(tree)))
        kept = policy.kept(tree)
        return replace((tree if kept is None else tree.pruned(kept)).draft(), prefill_s=prefill_s)

    def commit(self, context: Sequence[int], emitted: int, logits: torch.Tensor) -> None:
        """New tokens are read at the next proposal."""

    def keep(self, length: int, path: Sequence[int] = ()) -> None:
        """Only emitted tokens are ever learnt from, so there is nothing to take back."""
