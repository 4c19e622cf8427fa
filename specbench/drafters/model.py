"""Drafting with a small model, a cheaper form of the target on its cache, or a trained head: chains and trees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from specbench.decoding.distributions import Scores
from specbench.decoding.drafts import Draft, GrowingTree
from specbench.decoding.protocols import ForwardRequest
from specbench.decoding.tree import grow_tree
from specbench.drafters.chain import ChainDrafter, warn_of_no_numbers

if TYPE_CHECKING:
    import torch

    from specbench.backends.torch.head_scorers import HeadScorer
    from specbench.backends.torch.scorer import Scorer
    from specbench.decoding.drafts import StepOutcome
    from specbench.decoding.protocols import Decoding, StepPlan
    from specbench.decoding.sampling import Sampling

_DROPPED = -2
"""Marks a node that was read and is not verified."""


class ModelDrafter(ChainDrafter):
    """Drafts a chain, see ``ChainDrafter``, or a tree depth by depth where the draft policy branches.

    In greedy decoding a tree's probabilities are those of the untempered softmax.
    """

    def __init__(self, scorer: Scorer, name: str) -> None:
        super().__init__(scorer, name)
        self.traits = replace(self.traits, trees=scorer.reads_trees)
        self._read_nodes: list[int] = []  # nodes of the last tree that the model has read, in that order

    def propose(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        self._read_nodes = []
        if plan.policy.branches:
            return self._grow(context, plan)
        return super().propose(context, plan)

    def _grow(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        tree, policy = GrowingTree(passes=0), plan.policy
        if not policy.begin_step(self._room(context, plan.budget)):
            return Draft(passes=0)
        with self.drafting(context, tree):
            while nodes := policy.expand(tree):
                self._read_nodes += [node for node in nodes if node >= 0]
                logits = yield from self._run(self._frontier(context, tree, len(nodes)), tree)
                distributions = self._distributions_after(logits, context, tree, nodes, plan.sampling)
                if not distributions or not grow_tree(tree, plan, distributions):
                    break
        kept = policy.prune(tree)
        if kept is None:
            return tree
        place = {node: i for i, node in enumerate(kept)}
        self._read_nodes = [place.get(node, _DROPPED) for node in self._read_nodes]
        return tree.pruned(kept)

    def _frontier(self, context: Sequence[int], tree: GrowingTree, rows: int) -> ForwardRequest:
        """Return the pass that gives the logits after the last frontier, after the context if there is none yet."""
        if not self._read_nodes:
            return ForwardRequest(self.scorer, context, rows=1)
        place = {-1: -1} | {node: i for i, node in enumerate(self._read_nodes)}
        tokens = [tree.tokens[node] for node in self._read_nodes]
        parents = [place[tree.parents[node]] for node in self._read_nodes]
        return ForwardRequest(self.scorer, context, tokens, parents, rows=rows)

    def _distributions_after(
        self,
        logits: torch.Tensor,
        context: Sequence[int],
        tree: GrowingTree,
        nodes: Sequence[int],
        sampling: Sampling,
    ) -> dict[int, Scores]:
        """Return the distribution after each of the nodes read last, except where every token is ruled out."""
        logits, vocabulary = self._as_seen(logits, sampling)
        rows = self._memory(
            1 + len(self._read_nodes) - len(nodes), len(logits), logits.shape[-1], logits.device
        )
        ruled_out = set[int]()
        if sampling.greedy and not sampling.context_dependent:
            rows.copy_(sampling.scores(logits, context))
        else:
            for row, node, into in zip(logits.split(1), nodes, rows.split(1), strict=True):
                node_context = [*context, *tree.branch(node)] if sampling.context_dependent else context
                if sampling.rules_out_all(row, node_context):
                    ruled_out.add(node)
                elif sampling.greedy:
                    into.copy_(sampling.scores(row, node_context))
                else:
                    sampling.probabilities(row, node_context, out=into)
        for node, largest in zip(nodes, rows.amax(dim=-1).tolist(), strict=True):
            if node not in ruled_out and not largest > -math.inf:
                ruled_out.add(node)
                warn_of_no_numbers(self.traits.name)
        every = Scores.of(rows, normalized=not sampling.greedy, vocabulary=vocabulary)
        return {node: scores for node, scores in zip(nodes, every, strict=True) if node not in ruled_out}

    def update(self, outcome: StepOutcome) -> None:
        if not self._read_nodes:
            super().update(outcome)
            return
        place = {node: i for i, node in enumerate(self._read_nodes)}
        path = [place.get(node, len(place)) for node in outcome.path]
        if len(place) in path:  # it was not read, so nothing after it was
            path = path[: path.index(len(place)) + 1]
        self.scorer.rollback(len(outcome.context) - 1, path)


class SelfDrafter(ModelDrafter):
    """Drafts with a cheaper form of the target, whose scorer has the target's cache, so that it needs no prefill.

    Its keys and values are removed before the target verifies, so that the target reads only its own.
    """

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new prompt; the target has emptied the shared cache."""
        self._forget_prompt()

    def unread(self, prompt: Sequence[int]) -> int:
        """Return 0: the target's cache has the prompt."""
        return 0

    @contextmanager
    def drafting(self, context: Sequence[int], draft: Draft) -> Iterator[None]:
        """Restore the cache afterwards."""
        verified = self.scorer.cached_len
        with super().drafting(context, draft):
            yield
        if self.scorer.cached_len > verified:
            self.scorer.rollback(verified)

    def update(self, outcome: StepOutcome) -> None:
        """Do nothing: the target rolls their cache back."""


class HeadDrafter(ModelDrafter):
    """Drafts with a trained head, see ``ModelDrafter``. It drafts nothing before the target's first forward pass."""

    scorer: HeadScorer  # type: ignore[assignment]
    takes_guesses = False  # after a token the head reads its own hidden state, which is not known of guesses

    def __init__(self, scorer: HeadScorer, name: str) -> None:
        super().__init__(scorer, name)  # type: ignore[arg-type]
        self.traits = replace(self.traits, layers=scorer.layers)

    def can_read(self, context: Sequence[int], drafted: Sequence[int]) -> bool:
        return self.scorer.can_read(context, drafted)

    def unread(self, prompt: Sequence[int]) -> int:
        return super().unread(prompt) if self.scorer.reads_context else 0

    def _room(self, context: Sequence[int], budget: int) -> int:
        longest = self.scorer.longest
        return super()._room(context, budget if longest is None else min(budget, longest))

    def update(self, outcome: StepOutcome) -> None:
        """Drop all entries of drafts; the head reads accepted tokens again, with the target's states."""
        length = len(outcome.context) - 1
        if outcome.states is not None:
            self.scorer.take_states(length, outcome.states)
        self.scorer.rollback(length, outcome.path)


class ParallelDrafter(ModelDrafter):
    """Drafts a chain in one pass of a small model, which reads masks after the context: PARD (An et al. 2025, arXiv
    2504.18583).

    The model was trained to predict the next token at each mask. So every token of a draft is drawn from a distribution
    that depends on the context and its place in the draft alone, and q of a draft is their product.
    In a cascade the pass also reads the draft tokens before its first one.

    Args:
        scorer, name: See ``ChainDrafter``.
        masks: The tokens that it reads after the context, one fewer than it drafts at most.
    """

    takes_guesses = False

    def __init__(self, scorer: Scorer, name: str, masks: Sequence[int]) -> None:
        super().__init__(scorer, name)
        self.traits = replace(self.traits, trees=False)
        self._masks = tuple(masks)
        self._rows: torch.Tensor | None = None  # logits of the step's pass
        self._context_len = self._first = 0  # tokens of context and draft that it has read

    def _forget_prompt(self) -> None:
        super()._forget_prompt()
        self._rows = None

    def _room(self, context: Sequence[int], budget: int) -> int:
        return super()._room(context, min(budget, len(self._masks) + 1))

    def can_read(self, context: Sequence[int], drafted: Sequence[int]) -> bool:
        if self._rows is None:
            return super().can_read(context, drafted)
        return len(drafted) - self._first < len(self._rows)

    def has_read(self, draft: Draft) -> bool:
        return self._rows is not None and len(draft.tokens) - self._first < len(self._rows)

    def _next_logits(
        self, context: Sequence[int], draft: Draft, sampling: Sampling, limit: int
    ) -> Decoding[torch.Tensor]:
        place = len(draft.tokens)
        if self._rows is None:
            room = super()._room(context, limit) - place
            tokens = [*draft.tokens, *self._masks[: room - 1]]
            request = ForwardRequest(self.scorer, context, tokens, rows=1 + len(tokens) - place)
            self._rows = yield from self._run(request, draft)
            self._context_len, self._first = len(context), place
        return self._rows[place - self._first][None]

    def update(self, outcome: StepOutcome) -> None:
        """Drop the masks, and what was rejected before them."""
        if self._rows is None:
            super().update(outcome)
            return
        self._rows = None
        read = [node for node in outcome.path if node < self._first]
        length = min(len(outcome.context) - 1, self._context_len + len(read))
        self.scorer.rollback(length, read)
