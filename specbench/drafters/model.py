"""A small model as drafter, and a target that drafts for itself on its own cache."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from specbench.backends.torch.scorer import DeviceTokens, Scorer
from specbench.decoding.clocks import Clock, clock_for
from specbench.decoding.distributions import Scores
from specbench.decoding.drafts import Draft, GrowingTree
from specbench.decoding.logits import DraftVocabulary, Logits
from specbench.decoding.protocols import Drafter, ForwardRequest
from specbench.decoding.verdicts import top

if TYPE_CHECKING:
    from specbench.decoding.drafts import StepOutcome
    from specbench.decoding.protocols import Decoding, DraftPolicy, Drawing, ScorerLike
    from specbench.decoding.sampling import Randomness, Sampling

_READ_LATE = ("cuda",)
"""Devices that work on while nobody reads what they have computed."""

_FEW = 8
"""A pass that reads more tokens than this costs more than a usual one."""


_DROPPED = -2
"""Stands for a node that was read and is not verified."""


class Drawn(NamedTuple):
    """A drafted token: its id, the logits it was drawn by, and the distribution, [vocab]; ``None`` in greedy mode."""

    token: int
    logits: Logits
    q: torch.Tensor | None


class ModelDrafter(Drafter):
    """Drafts with a causal language model that keeps its own cache and reads the prompt at its first proposal.

    Args:
        scorer: The model; its logits must be as wide as the target's, or those of its ``DraftVocabulary``.
        name: How the command line names it.
        clock: Tells the prefill from the rest; ``None`` for the one right for the model's device.
    """

    def __init__(self, scorer: Scorer, name: str, clock: Clock | None = None) -> None:
        super().__init__(name)
        self.scorer = scorer
        self._clock = clock or clock_for(str(scorer.device))
        self._has_read = False
        self._read_nodes: list[int] = []  # of the last tree, those the model has read, in that order
        self._distributions = torch.empty(0, 0)

    @property
    def epoch(self) -> int:
        return self.scorer.epoch

    @property
    def takes_trees(self) -> bool:
        return self.scorer.reads_trees

    @cached_property
    def draftable(self) -> frozenset[int] | None:
        vocabulary = self.scorer.vocabulary
        return None if vocabulary is None else frozenset(vocabulary.ids)

    def fork(self, scorer_like: ScorerLike) -> ModelDrafter:
        return type(self)(scorer_like(self.scorer), self.name, self._clock)

    def begin(self, prompt: Sequence[int]) -> None:
        self._has_read = False
        self._read_nodes = []
        self.scorer.begin()

    def resume(self, prompt: Sequence[int], kept: int) -> None:
        self._has_read = False
        self._read_nodes = []
        self.scorer.resume(kept)

    def propose(
        self,
        context: Sequence[int],
        budget: int,
        policy: DraftPolicy,
        sampling: Sampling,
        random: Randomness,
        drawing: Drawing = top,
    ) -> Decoding[Draft]:
        """Draft token by token; nothing once the context is behind the model's own limit or holds ids it lacks.

        A tree takes one pass for each depth: of the nodes that are read, each beside the others of its depth. In greedy
        decoding its chances are those of the untempered softmax.
        """
        self._read_nodes = []
        limit = policy.begin(max(0, min(budget, self._room(context))))
        if policy.branches:
            return (
                (yield from self._grow(context, policy, drawing, sampling, random))
                if limit
                else Draft(passes=0)
            )
        plain_greedy = sampling.greedy and not sampling.context_dependent
        if self.scorer.device.type in _READ_LATE and policy.unconditional and plain_greedy:
            return (yield from self._propose_unread(context, limit))
        draft = Draft(logits=[], passes=0)
        with self.drafting():
            while len(draft.tokens) < limit and policy.expand(draft):
                drawn = yield from self.draw(context, draft, policy, sampling, random)
                if drawn is None:
                    break
                draft.logits.append(drawn.logits)  # type: ignore[union-attr]
                draft.tokens.append(drawn.token)
        if draft.tokens and not sampling.greedy:
            draft.q = self._distributions[: len(draft.tokens)]
        return draft

    def _grow(
        self,
        context: Sequence[int],
        policy: DraftPolicy,
        drawing: Drawing,
        sampling: Sampling,
        random: Randomness,
    ) -> Decoding[Draft]:
        tree = GrowingTree(passes=0)
        with self.drafting():
            while nodes := policy.expand(tree):
                self._read_nodes += [node for node in nodes if node >= 0]
                logits = yield from self._frontier_logits(context, tree, len(nodes))
                prospects = self._prospects(logits, context, tree, nodes, sampling)
                if not prospects or not tree.grow(policy, prospects, drawing, random):
                    break
        kept = policy.prune(tree)
        if kept is None:
            return tree
        place = {node: i for i, node in enumerate(kept)}
        self._read_nodes = [place.get(node, _DROPPED) for node in self._read_nodes]
        return tree.pruned(kept)

    def _frontier_logits(
        self, context: Sequence[int], tree: GrowingTree, rows: int
    ) -> Decoding[torch.Tensor]:
        """Logits after the nodes that were chosen last, see ``ForwardOutput``; after the
        context if none has been yet."""
        if not self._read_nodes:
            return (yield from self._next_logits(context, tree))
        tree.passes = (tree.passes or 0) + 1
        place = {-1: -1} | {node: i for i, node in enumerate(self._read_nodes)}
        tokens = [tree.tokens[node] for node in self._read_nodes]
        parents = [place[tree.parents[node]] for node in self._read_nodes]
        return (yield ForwardRequest(self.scorer, context, tokens, parents, rows=rows)).logits

    def _prospects(
        self,
        logits: torch.Tensor,
        context: Sequence[int],
        tree: GrowingTree,
        nodes: Sequence[int],
        sampling: Sampling,
    ) -> dict[int, Scores]:
        """Return by node what the model expects after it, for the nodes read last (logits: see ``ForwardOutput``).

        A node after which every token is ruled out is left out.
        """
        logits, vocabulary = self._as_seen(logits, sampling)
        rows = self._memory(
            1 + len(self._read_nodes) - len(nodes), len(logits), logits.shape[-1], logits.device
        )
        if sampling.greedy and not sampling.context_dependent:
            scores = sampling.scores(logits, context, out=rows)
            if scores is not rows:
                rows.copy_(scores)
            return dict(zip(nodes, Scores.of(rows, normalized=False, vocabulary=vocabulary), strict=True))
        ruled_out = set[int]()
        for row, node, into in zip(logits.split(1), nodes, rows.split(1), strict=True):
            behind = [*context, *tree.branch(node)] if sampling.context_dependent else context
            if sampling.rules_out_all(row, behind):
                ruled_out.add(node)
            elif sampling.greedy:
                into.copy_(sampling.scores(row, behind))
            else:
                sampling.probabilities(row, behind, out=into)
        every = Scores.of(rows, normalized=not sampling.greedy, vocabulary=vocabulary)
        return {node: each for node, each in zip(nodes, every, strict=True) if node not in ruled_out}

    def _as_seen(
        self, logits: torch.Tensor, sampling: Sampling
    ) -> tuple[torch.Tensor, DraftVocabulary | None]:
        """Logits as transforms take them, and whose they are: those that look back have to know every token."""
        vocabulary = self.scorer.vocabulary
        if vocabulary is None or not sampling.context_dependent:
            return logits, vocabulary
        return vocabulary.spread(logits, -math.inf), None

    def _memory(self, place: int, rows: int, width: int, device: torch.device) -> torch.Tensor:
        """Memory for the distributions of tokens of a draft, [rows, width], by the place of the first, from 0.

        The system takes longer to hand out fresh memory than a softmax takes, so every draft gets the same.
        """
        held, end = self._distributions, place + rows
        if held.shape[-1] != width or held.device != device:
            held = self._distributions = torch.empty(_FEW, width, device=device)
        if end > held.shape[0]:
            self._distributions = torch.empty(2 * end, width, device=device)
            self._distributions[: held.shape[0]] = held
        return self._distributions[place:end]

    def _propose_unread(self, context: Sequence[int], length: int) -> Decoding[Draft]:
        """So many tokens, greedily, and not one of them is read before the target has verified them."""
        tokens, vocabulary = DeviceTokens(), self.scorer.vocabulary
        draft = Draft(tokens, logits=[], passes=0)  # type: ignore[arg-type]
        with self.drafting():
            for _ in range(length):
                logits = yield from self._next_logits(context, draft)
                draft.logits.append(Logits(logits[0], vocabulary))  # type: ignore[union-attr]
                best = logits[0].argmax()
                tokens.append(best if vocabulary is None else vocabulary.tokens.take(best))
        return draft

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Around the draws of a step."""
        yield

    def draw(
        self,
        context: Sequence[int],
        draft: Draft,
        policy: DraftPolicy,
        sampling: Sampling,
        random: Randomness,
    ) -> Decoding[Drawn | None]:
        """One pass, and the token behind ``context + draft.tokens``; ``None`` if the policy has seen enough, or every
        token is ruled out there.

        The pass feeds all that the cache lacks, whoever drafted or emitted it. It is counted in the draft, and timed
        there as prefill if it is the first one or has to catch up with more than a few tokens.
        """
        logits = yield from self._next_logits(context, draft)
        known = Logits(logits[0], self.scorer.vocabulary)
        if not policy.num_children(draft, (len(draft.tokens) - 1,), (known,))[0]:
            return None
        logits, vocabulary = self._as_seen(logits, sampling)
        if sampling.rules_out_all(logits, context, draft.tokens):
            return None
        if vocabulary is not self.scorer.vocabulary:
            known = Logits(logits[0], vocabulary)
        if sampling.greedy:
            return Drawn(known.token(sampling.choose(logits, context, draft.tokens)[0]), known, None)
        width = logits.shape[-1] if vocabulary is None else vocabulary.size
        row = self._memory(len(draft.tokens), 1, width, logits.device)
        if vocabulary is None:
            q = sampling.probabilities(logits, context, draft.tokens, row)[0]
        else:
            q = vocabulary.spread(sampling.probabilities(logits, context, draft.tokens), 0.0, row)[0]
        return Drawn(random.draw(q), known, q)

    def _next_logits(self, context: Sequence[int], draft: Draft) -> Decoding[torch.Tensor]:
        """Logits behind context and draft, one row, see ``ForwardOutput``."""
        draft.passes = (draft.passes or 0) + 1
        asked = self._asked(context, draft.tokens)
        held = self.scorer.cached_len
        catching_up = held > 0 and len(asked.context) + len(asked.tokens) - held > _FEW
        if (self._has_read or held > 0) and not catching_up:
            return (yield asked).logits
        self._has_read = True
        began = self._clock.now()
        logits = (yield asked).logits
        draft.prefill_s += self._clock.now() - began
        return logits

    def _asked(self, context: Sequence[int], drafted: Sequence[int]) -> ForwardRequest:
        """The pass that gives the distribution behind them."""
        return ForwardRequest(self.scorer, context, drafted, rows=1)

    def can_read(self, context: Sequence[int], drafted: Sequence[int]) -> bool:
        """Whether the model can draft a token behind ``context + drafted``."""
        fresh = (*context[self.scorer.cached_len :], *drafted)
        limit = self.scorer.context_limit
        # A padding id of the target's wider vocabulary has no embedding here.
        known = all(token < self.scorer.embeddings for token in fresh)
        return known and (limit is None or len(context) + len(drafted) <= limit)

    def _room(self, context: Sequence[int]) -> int:
        """How many tokens this model can draft behind the context; 0 or less for none."""
        if not self.can_read(context, ()):
            return 0
        limit = self.scorer.context_limit
        # The last draft is never fed, so one more token fits than the context has room for.
        return sys.maxsize if limit is None else limit - self._length(context) + 1

    def _length(self, context: Sequence[int]) -> int:
        """Of a context, in the model's own tokens."""
        return len(context)

    def update(self, outcome: StepOutcome) -> None:
        path = outcome.path
        if self._read_nodes:
            place = {node: i for i, node in enumerate(self._read_nodes)}
            read = [place.get(node, len(place)) for node in path]
            path = read[: read.index(len(place)) + 1] if len(place) in read else read
        self.scorer.rollback(len(outcome.context) - 1, path)


class SelfDrafter(ModelDrafter):
    """Drafts with a cheaper form of the target on top of the target's own cache.

    The drafts' keys and values are taken off the cache again before the target verifies, so that what the target reads
    is its own work alone. No second prefill is needed.

    Args:
        scorer: The cheaper form, sharing the target's cache object.
        name: How the command line names it.
        clock: See ``ModelDrafter``.
    """

    def begin(self, prompt: Sequence[int]) -> None:
        """The target has just emptied the cache they share."""
        self._has_read = False

    def resume(self, prompt: Sequence[int], kept: int) -> None:
        """The target has just rolled the cache back that they share."""
        self.begin(prompt)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Give the cache back as it was."""
        verified = self.scorer.cached_len
        yield
        if self.scorer.cached_len > verified:
            self.scorer.rollback(verified)

    def update(self, outcome: StepOutcome) -> None:
        """The target rolls their cache back."""
