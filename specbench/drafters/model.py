"""Drafting with a small model, or with a cheaper form of the target on the target's cache."""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from specbench.backends.torch.scorer import DeviceTokens, Scorer
from specbench.decoding.clocks import Clock, clock_for
from specbench.decoding.distributions import Scores
from specbench.decoding.drafts import Draft, GrowingTree
from specbench.decoding.logits import DraftVocabulary, Logits, NoTokenError
from specbench.decoding.protocols import Drafter, DrafterTraits, ForwardRequest
from specbench.decoding.tree import grow_tree
from specbench.drafters.guesses import Guesses

if TYPE_CHECKING:
    from specbench.decoding.drafts import StepOutcome
    from specbench.decoding.protocols import Decoding, ScorerLike, StepPlan
    from specbench.decoding.sampling import Sampling

_log = logging.getLogger("specbench")

_READ_LATE = ("cuda",)
"""Devices that compute asynchronously until a result is read."""

_FEW = 8
"""A forward pass over more tokens than this takes noticeably longer."""

_DROPPED = -2
"""Marks a node that was read and is not verified."""


class Drawn(NamedTuple):
    """A drafted token: its id, the logits it was drawn by, and the distribution, [vocab]; ``None`` in greedy mode."""

    token: int
    logits: Logits
    q: torch.Tensor | None


class ModelDrafter(Drafter):
    """Drafts with a causal language model, which has its own cache and reads the prompt at its first proposal.

    Its passes over chains also read guesses, see ``Guesses``, where wrong ones are cheap to drop.

    Args:
        scorer: The model; its logits are as wide as the target's, or those of its ``DraftVocabulary``.
        name: Its name on the command line.
        clock: Times its prefill; ``None`` for the device's clock.

    Attributes:
        guesses: What its next passes may read ahead; ``None`` for a pass per token.
        assumed: A sentence on what its files do not say; empty if they say everything.
    """

    _takes_guesses = _takes_trees = True
    assumed = ""

    def __init__(self, scorer: Scorer, name: str, clock: Clock | None = None) -> None:
        super().__init__(DrafterTraits(name, vocabulary=scorer.vocabulary, trees=self._can_grow(scorer)))
        self.scorer = scorer
        self._clock = clock or clock_for(str(scorer.device))
        self.guesses = Guesses() if self._takes_guesses else None
        self._said = set[str]()  # what was said of it once; forks share it
        self._has_read = False
        self._read_nodes: list[int] = []  # nodes of the last tree that the model has read, in that order
        self._distributions = torch.empty(0, 0)

    @property
    def epoch(self) -> int:
        return self.scorer.epoch

    @property
    def context_limit(self) -> int | None:
        """The longest context after which it can draft, in tokens; ``None`` without a limit."""
        return self.scorer.context_limit

    def fork(self, scorer_like: ScorerLike) -> ModelDrafter:
        fork = copy.copy(self)
        fork.scorer = scorer_like(self.scorer)
        fork.traits = replace(self.traits, trees=self._can_grow(fork.scorer))
        fork.guesses = Guesses() if self._takes_guesses else None
        fork._distributions = torch.empty(0, 0)
        return fork

    def _can_grow(self, scorer: Scorer) -> bool:
        return self._takes_trees and scorer.reads_trees

    def _say_no_numbers(self) -> None:
        """Say once that its logits were not numbers somewhere."""
        if not self._said:
            self._said.add("no numbers")
            _log.warning(
                "Logits of the drafter %s are not numbers (NaN): it drafts nothing there.", self.traits.name
            )

    def begin(self, prompt: Sequence[int], cached_tokens: int = 0) -> None:
        self._start_prompt()
        if cached_tokens:
            self.scorer.resume(cached_tokens)
        else:
            self.scorer.begin()

    def _start_prompt(self) -> None:
        self._has_read = False
        self._read_nodes = []
        if self.guesses is not None:
            self.guesses.begin()

    def unread(self, prompt: Sequence[int]) -> int:
        return max(0, len(prompt) - self.scorer.cached_len)

    def propose(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        """Draft token by token, or a tree depth by depth; nothing beyond the model's context limit or vocabulary.

        In greedy decoding a tree's probabilities are those of the untempered softmax.
        """
        self._read_nodes = []
        policy, sampling = plan.policy, plan.sampling
        limit = policy.begin_step(max(0, min(plan.budget, self._room(context))))
        if policy.branches:
            return (yield from self._grow(context, plan)) if limit else Draft(passes=0)
        plain_greedy = sampling.greedy and not sampling.context_dependent
        if self.scorer.device.type in _READ_LATE and policy.unconditional and plain_greedy:
            return (yield from self._propose_unread(context, limit))
        draft = Draft(logits=[], passes=0)
        with self.drafting(context, draft):
            while len(draft.tokens) < limit:
                draft.next_is_read = self.has_read(draft)
                if not policy.expand(draft):
                    break
                drawn = yield from self.draw(context, draft, plan, limit)
                if drawn is None:
                    break
                draft.logits.append(drawn.logits)  # type: ignore[union-attr]
                draft.tokens.append(drawn.token)
        if draft.tokens and not sampling.greedy:
            draft.q = self._distributions[: len(draft.tokens)]
        return draft

    def _grow(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        tree, policy = GrowingTree(passes=0), plan.policy
        with self.drafting(context, tree):
            while nodes := policy.expand(tree):
                self._read_nodes += [node for node in nodes if node >= 0]
                logits = yield from self._frontier_logits(context, tree, len(nodes))
                distributions = self._distributions_after(logits, context, tree, nodes, plan.sampling)
                if not distributions or not grow_tree(tree, plan, distributions):
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
        """Return the logits after the last frontier, after the context if there is none yet."""
        if not self._read_nodes:
            return (yield from self._next_logits(context, tree))
        tree.passes = (tree.passes or 0) + 1
        place = {-1: -1} | {node: i for i, node in enumerate(self._read_nodes)}
        tokens = [tree.tokens[node] for node in self._read_nodes]
        parents = [place[tree.parents[node]] for node in self._read_nodes]
        return (yield ForwardRequest(self.scorer, context, tokens, parents, rows=rows)).logits

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
                self._say_no_numbers()
        every = Scores.of(rows, normalized=not sampling.greedy, vocabulary=vocabulary)
        return {node: each for node, each in zip(nodes, every, strict=True) if node not in ruled_out}

    def _as_seen(
        self, logits: torch.Tensor, sampling: Sampling
    ) -> tuple[torch.Tensor, DraftVocabulary | None]:
        """Return logits for the transforms, and their vocabulary: context-dependent ones need all tokens."""
        vocabulary = self.scorer.vocabulary
        if vocabulary is None or not sampling.context_dependent:
            return logits, vocabulary
        return vocabulary.spread(logits, -math.inf), None

    def _memory(self, place: int, rows: int, width: int, device: torch.device) -> torch.Tensor:
        """Return memory for a draft's distributions from ``place`` on, [rows, width].

        It is reused, as allocating takes longer than a softmax.
        """
        memory, end = self._distributions, place + rows
        if memory.shape[-1] != width or memory.device != device:
            memory = self._distributions = torch.empty(_FEW, width, device=device)
        if end > memory.shape[0]:
            self._distributions = torch.empty(2 * end, width, device=device)
            self._distributions[: memory.shape[0]] = memory
        return self._distributions[place:end]

    def _propose_unread(self, context: Sequence[int], length: int) -> Decoding[Draft]:
        """Draft greedily without reading a token back from the device before the target has verified it."""
        tokens, vocabulary = DeviceTokens(), self.scorer.vocabulary
        draft = Draft(tokens, logits=[], passes=0)  # type: ignore[arg-type]
        with self.drafting(context, draft):
            for _ in range(length):
                logits = yield from self._next_logits(context, draft)
                draft.logits.append(Logits(logits[0], vocabulary))  # type: ignore[union-attr]
                best = logits[0].argmax()
                tokens.append(best if vocabulary is None else vocabulary.tokens.take(best))
        return draft

    def has_read(self, draft: Draft) -> bool:
        """Return whether the last pass has given the logits after this draft."""
        return self.guesses is not None and self.guesses.has_read(draft.tokens)

    @contextmanager
    def drafting(self, context: Sequence[int], draft: Draft) -> Iterator[None]:
        """Surround the forward passes of a step, after which the cache holds no wrong guesses."""
        yield
        self._drop_guesses(context, draft)

    def draw(
        self, context: Sequence[int], draft: Draft, plan: StepPlan, limit: int
    ) -> Decoding[Drawn | None]:
        """Draw the token after ``context + draft.tokens``, after a forward pass unless the last one has read so far.

        Args:
            context, draft, plan: See ``propose``.
            limit: The longest draft.

        Returns:
            The token; ``None`` if the policy stops there, or every token is ruled out.
        """
        sampling = plan.sampling
        logits = yield from self._chain_logits(context, draft, sampling, limit)
        known = Logits(logits[0], self.scorer.vocabulary, self._predicted_acceptance())
        try:
            if not plan.policy.num_children(draft, (len(draft.tokens) - 1,), (known,))[0]:
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
            return Drawn(plan.random.draw(q), known, q)
        except NoTokenError:
            self._say_no_numbers()
            return None

    def _predicted_acceptance(self) -> float | None:
        """Return the predicted acceptance of the token after the last row, see ``Logits``."""
        return None

    def _chain_logits(
        self, context: Sequence[int], draft: Draft, sampling: Sampling, limit: int
    ) -> Decoding[torch.Tensor]:
        """Return the logits after context and draft, one row; for the arguments see ``draw``."""
        if self.guesses is None or not self._reads_guesses:
            return (yield from self._next_logits(context, draft))
        known = self.guesses.row_after(draft.tokens)
        if known is not None:
            return known
        self._drop_guesses(context, draft)
        most = limit - 1 - len(draft.tokens)  # no more than the chain can use
        guesses: Sequence[int] = self.guesses.find(context, draft.tokens, most, sampling)
        if not self.can_read(context, [*draft.tokens, *guesses]):
            guesses = ()
        logits = yield from self._next_logits(context, draft, guesses)
        if guesses:
            self.guesses.keep(draft.tokens, guesses, logits)
        return logits[:1]

    @property
    def _reads_guesses(self) -> bool:
        """Whether the next pass may read guesses.

        Recurrent states and sliding windows can go back once in a step, not after every wrong guess. A pass over an
        empty cache may run what follows the prompt separately. In a batch the other requests would wait for the rows,
        and their pass is made anyway. On GPUs the gain is not measured.
        """
        scorer = self.scorer
        alone = scorer.batch is None and scorer.device.type not in _READ_LATE
        return alone and scorer.reads_trees and scorer.cached_len > 0

    def _drop_guesses(self, context: Sequence[int], draft: Draft) -> None:
        """Roll back what the last pass has read and the draft has not taken."""
        right = None if self.guesses is None else self.guesses.settle(draft.tokens)
        if right is not None:
            self.scorer.rollback(len(context) + right)

    def _next_logits(
        self, context: Sequence[int], draft: Draft, guesses: Sequence[int] = ()
    ) -> Decoding[torch.Tensor]:
        """Return the logits after context and draft and after each guess, [1 + guesses, vocab].

        A prefill or catching up is timed as drafting.
        """
        draft.passes = (draft.passes or 0) + 1
        asked = self._asked(context, draft.tokens)
        cached = self.scorer.cached_len
        catching_up = cached > 0 and len(asked.context) + len(asked.tokens) - cached > _FEW
        if guesses:
            asked = asked._replace(tokens=[*asked.tokens, *guesses], rows=1 + len(guesses))
        if (self._has_read or cached > 0) and not catching_up:
            return (yield asked).logits
        self._has_read = True
        began = self._clock.now()
        logits = (yield asked).logits
        draft.prefill_s += self._clock.now() - began
        return logits

    def _asked(self, context: Sequence[int], drafted: Sequence[int]) -> ForwardRequest:
        """Return the forward request for the distribution after these tokens."""
        return ForwardRequest(self.scorer, context, drafted, rows=1)

    def can_read(self, context: Sequence[int], drafted: Sequence[int]) -> bool:
        """Return whether the model can draft a token after ``context + drafted``."""
        fresh = (*context[self.scorer.cached_len :], *drafted)
        limit = self.context_limit
        # A padding id of the target's wider vocabulary has no embedding here.
        known = all(token < self.scorer.embeddings for token in fresh)
        return known and (limit is None or len(context) + len(drafted) <= limit)

    def _room(self, context: Sequence[int]) -> int:
        """Return how many tokens the model can draft after the context; 0 or less for none."""
        if not self.can_read(context, ()):
            return 0
        limit = self.context_limit
        # The last draft token is never fed, so one more fits.
        return sys.maxsize if limit is None else limit - self._length(context) + 1

    def _length(self, context: Sequence[int]) -> int:
        """Return a context's length in the model's own tokens."""
        return len(context)

    def update(self, outcome: StepOutcome) -> None:
        path = outcome.path
        if self._read_nodes:
            place = {node: i for i, node in enumerate(self._read_nodes)}
            read = [place.get(node, len(place)) for node in path]
            path = read[: read.index(len(place)) + 1] if len(place) in read else read
        self.scorer.rollback(len(outcome.context) - 1, path)


class SelfDrafter(ModelDrafter):
    """Drafts with a cheaper form of the target on the target's cache, so that it needs no prefill of its own.

    Its keys and values are removed before the target verifies, which so reads only its own.

    Args:
        scorer: The cheaper form, sharing the target's cache object.
        name, clock: See ``ModelDrafter``.
    """

    def begin(self, prompt: Sequence[int], cached_tokens: int = 0) -> None:
        """Start a new prompt; the target has emptied the shared cache, or rolled it back."""
        self._start_prompt()

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
        """The target rolls their cache back."""
