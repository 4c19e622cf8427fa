"""Drafting a chain with a model: token by token, each drawn from the model's logits after those before it."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, TypeAlias

import torch

from specbench.backends.torch.scorer import DeviceTokens, Scorer
from specbench.decoding.clocks import Clock, clock_for
from specbench.decoding.drafts import Draft
from specbench.decoding.logits import DraftVocabulary, Logits, NoTokenError
from specbench.decoding.protocols import Drafter, DrafterTraits, ForwardRequest
from specbench.drafters.guesses import Guesses

if TYPE_CHECKING:
    from specbench.decoding.drafts import StepOutcome
    from specbench.decoding.protocols import Decoding, ScorerLike, StepPlan
    from specbench.decoding.sampling import Sampling

_READ_LATE = ("cuda",)
"""Devices that compute asynchronously until a result is read."""

_FEW = 8
"""A forward pass over more tokens than this takes noticeably longer."""


@functools.cache  # to say it once
def warn_of_no_numbers(name: str) -> None:
    logging.getLogger("specbench").warning(
        "Logits of the drafter %s are not numbers (NaN): it drafts nothing there.", name
    )


Drawn: TypeAlias = tuple[int, Logits, torch.Tensor | None]
"""A drafted token: its id, the logits it was drawn by, and the distribution, [vocab]; ``None`` in greedy mode."""


class ChainDrafter(Drafter):
    """Drafts chains with a causal language model, which has its own cache and reads the prompt at its first proposal.

    Its passes also read guesses, see ``Guesses``, where wrong ones are cheap to drop.

    Args:
        scorer: The model; its logits are as wide as the target's, or those of its ``DraftVocabulary``.
        name: Its name on the command line.

    Attributes:
        clock: Times its prefill; the device's clock.
        takes_guesses: Whether its next passes may read guesses; otherwise each gives one token.
    """

    takes_guesses = True

    def __init__(self, scorer: Scorer, name: str) -> None:
        super().__init__(DrafterTraits(name, vocabulary=scorer.vocabulary))
        self.scorer = scorer
        self._guesses = Guesses()
        self.clock: Clock = clock_for(str(scorer.device))
        self._has_read = False  # anything of the prompt
        self._distributions = torch.empty(0, 0)

    def propose(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        """Draft token by token; nothing beyond the model's context limit or vocabulary."""
        policy, sampling = plan.policy, plan.sampling
        limit = policy.begin_step(self._room(context, plan.budget))
        plain_greedy = sampling.greedy and not sampling.context_dependent
        if self.scorer.device.type in _READ_LATE and policy.unconditional and plain_greedy:
            return (yield from self._propose_unread(context, plan, limit))
        draft = Draft(passes=0)
        with self.drafting(context, draft):
            while len(draft.tokens) < limit:
                draft.next_is_read = self.has_read(draft)
                if not policy.expand(draft):
                    break
                drawn = yield from self.draw(context, draft, plan, limit)
                if drawn is None:
                    break
                token, logits, _ = drawn
                draft.sources.append(logits)
                draft.tokens.append(token)
        if draft.tokens and not sampling.greedy:
            draft.q = self._distributions[: len(draft.tokens)]
        return draft

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
        sampling, own = plan.sampling, self.scorer.vocabulary
        logits = yield from self._next_logits(context, draft, sampling, limit)
        known = Logits(logits[0], own)
        try:
            if not plan.policy.num_children(draft, (len(draft.tokens) - 1,), (known,))[0]:
                return None
            logits, vocabulary = self._as_seen(logits, sampling)
            if sampling.rules_out_all(logits, context, draft.tokens):
                return None
            if vocabulary is not own:
                known = Logits(logits[0], vocabulary)
            if sampling.greedy:
                return known.token(sampling.choose(logits, context, draft.tokens)[0]), known, None
            width = logits.shape[-1] if vocabulary is None else vocabulary.size
            row = self._memory(len(draft.tokens), 1, width, logits.device)
            if vocabulary is None:
                q = sampling.probabilities(logits, context, draft.tokens, row)[0]
            else:
                q = vocabulary.spread(sampling.probabilities(logits, context, draft.tokens), 0.0, row)[0]
            return plan.random.draw(q), known, q
        except NoTokenError:
            warn_of_no_numbers(self.traits.name)
            return None

    def _next_logits(
        self, context: Sequence[int], draft: Draft, sampling: Sampling, limit: int
    ) -> Decoding[torch.Tensor]:
        """Return the logits after context and draft, [1, vocab], after a pass if the last one has not given them."""
        logits = self._guesses.row_after(draft.tokens)
        if logits is None:
            request = self._asked(context, draft, sampling, limit)
            logits = yield from self._run(request, draft)
            if len(logits) > 1:
                self._guesses.keep(draft.tokens, request.tokens, logits)
                logits = logits[:1]
        return logits

    def _asked(self, context: Sequence[int], draft: Draft, sampling: Sampling, limit: int) -> ForwardRequest:
        """Return the pass that gives the logits after context and draft, and those after guesses that pay."""
        self._drop_guesses(context, draft)
        tokens = draft.tokens
        if self._may_guess():
            most = limit - 1 - len(tokens)  # no more than the chain can use
            guesses = self._guesses.find(context, tokens, most, sampling)
            if guesses and self.can_read(context, [*tokens, *guesses]):
                return ForwardRequest(self.scorer, context, [*tokens, *guesses], rows=1 + len(guesses))
        return ForwardRequest(self.scorer, context, tokens, rows=1)

    def _run(self, request: ForwardRequest, draft: Draft) -> Decoding[torch.Tensor]:
        """Run a pass of the model and return its logits; reading the prompt or catching up counts as prefill."""
        draft.passes = (draft.passes or 0) + 1
        cached = self.scorer.cached_len
        known = len(request.context) + len(request.tokens) - (request.rows or 1)
        if (cached > 0 or self._has_read) and not 0 < cached <= known - _FEW:
            return (yield request).logits
        self._has_read = True
        began = self.clock()
        logits = (yield request).logits
        draft.prefill_s += self.clock() - began
        return logits

    def _propose_unread(self, context: Sequence[int], plan: StepPlan, limit: int) -> Decoding[Draft]:
        """Draft greedily without reading a token back from the device before the target has verified it."""
        tokens, vocabulary = DeviceTokens(), self.scorer.vocabulary
        draft = Draft(tokens, passes=0)  # type: ignore[arg-type]
        with self.drafting(context, draft):
            for _ in range(limit):
                logits = yield from self._next_logits(context, draft, plan.sampling, limit)
                draft.sources.append(Logits(logits[0], vocabulary))
                best = logits[0].argmax()
                tokens.append(best if vocabulary is None else vocabulary.tokens.take(best))
        return draft

    @contextmanager
    def drafting(self, context: Sequence[int], draft: Draft) -> Iterator[None]:
        """Surround the forward passes of a step, after which the cache holds no wrong guesses."""
        yield
        self._drop_guesses(context, draft)

    def has_read(self, draft: Draft) -> bool:
        """Return whether the last pass has given the logits after this draft."""
        return self._guesses.has_read(draft.tokens)

    def _may_guess(self) -> bool:
        """Return whether the next pass may read guesses.

        Recurrent states and sliding windows can go back once in a step, not after every wrong guess. A pass over an
        empty cache may run what follows the prompt separately. In a batch the other requests would wait for the rows,
        and their pass is made anyway. On GPUs the gain is not measured.
        """
        scorer = self.scorer
        alone = self.takes_guesses and scorer.batch is None and scorer.device.type not in _READ_LATE
        return alone and scorer.reads_trees and scorer.cached_len > 0

    def _drop_guesses(self, context: Sequence[int], draft: Draft) -> None:
        """Roll back what the last pass has read and the draft has not taken."""
        right = self._guesses.settle(draft.tokens)
        if right is not None:
            self.scorer.rollback(len(context) + right)

    # -- its logits ------------------------------------------------------------------------------------

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

    # -- its context -----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.scorer.epoch

    @property
    def context_limit(self) -> int | None:
        """The longest context after which it can draft, in tokens; ``None`` without a limit."""
        return self.scorer.context_limit

    def fork(self, scorer_like: ScorerLike) -> Self:
        fork = copy.copy(self)
        fork.scorer = scorer_like(self.scorer)
        fork._guesses = Guesses()
        fork._distributions = torch.empty(0, 0)
        return fork

    def begin(self, prompt: Sequence[int]) -> None:
        self._forget_prompt()
        self.scorer.begin()

    def _forget_prompt(self) -> None:
        self._has_read = False
        self._guesses.begin()

    def unread(self, prompt: Sequence[int]) -> int:
        return max(0, len(prompt) - self.scorer.cached_len)

    def can_read(self, context: Sequence[int], drafted: Sequence[int]) -> bool:
        """Return whether the model can draft a token after ``context + drafted``."""
        fresh = (*context[self.scorer.cached_len :], *drafted)
        limit = self.context_limit
        # A padding id of the target's wider vocabulary has no embedding here.
        known = all(token < self.scorer.embeddings for token in fresh)
        return known and (limit is None or len(context) + len(drafted) <= limit)

    def _room(self, context: Sequence[int], budget: int) -> int:
        """Return how many tokens the model can draft after the context, at most ``budget``."""
        if not self.can_read(context, ()):
            return 0
        limit = self.context_limit
        # The last draft token is never fed, so one more fits.
        return budget if limit is None else max(0, min(budget, limit - self._length(context) + 1))

    def _length(self, context: Sequence[int]) -> int:
        """Return a context's length in the model's own tokens."""
        return len(context)

    def update(self, outcome: StepOutcome) -> None:
        self.scorer.rollback(len(outcome.context) - 1, outcome.path)
