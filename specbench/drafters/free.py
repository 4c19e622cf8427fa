"""Base classes of drafters without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from specbench.decoding.clocks import Clock
from specbench.decoding.distributions import FixedCandidates
from specbench.decoding.drafts import Draft, GrowingTree, Guess, Source
from specbench.decoding.protocols import Drafter, DrafterTraits, top
from specbench.decoding.tree import grow_tree
from specbench.specs.policies import LONGEST_DRAFT

if TYPE_CHECKING:
    from specbench.decoding.protocols import Decoding, ScorerLike, StepPlan
    from specbench.decoding.sampling import Sampling
    from specbench.specs.drafters import FreeSpec


def make_free(spec: FreeSpec, target: Any = None) -> FreeDrafter:
    """Make the drafter of a spec for a target."""
    assert spec.drafter is not None
    module, _, name = spec.drafter.partition(":")
    return getattr(import_module(f"specbench.drafters.{module}"), name)(spec, target)


class FreeDrafter(Drafter):
    """A drafter whose tokens cost almost nothing; subclasses define ``take_in`` and ``guess``.

    A subclass that learns from the context forgets it in ``begin``, which calls ``super().begin`` too, and one whose
    ``__init__`` takes anything else overrides ``fork``, which makes a fresh copy for each request of a batch.

    Args:
        spec: Its spec, which is its name.
        target: The ``specbench.Target`` that it drafts for; ``None`` if it need not know.

    Attributes:
        clock: Times the reading of the prompt.

    Examples:
        >>> class Repeats(FreeDrafter):  # the last token again
        ...     def take_in(self, context, first): pass
        ...     def guess(self, context, drafted, sampling):
        ...         return Guess([*context[-1:], *drafted][-1], match_confidence=0.5)
        >>> result = speculative_generate("Count to 5.", target, Repeats("repeats"), gamma=2, max_new_tokens=8)
        >>> result.token_ids == autoregressive_generate("Count to 5.", target, max_new_tokens=8).token_ids
        True
    """

    trees = False
    """Whether it also drafts trees; see ``CandidateDrafter``."""

    forces = False
    """Whether it also drafts what the format of the output forces."""

    def __init__(self, spec: object, target: Any = None) -> None:
        super().__init__(DrafterTraits(str(spec), trees=self.trees, certain=self.trees))
        self.spec: Any = spec
        self.target = target
        self.clock: Clock = perf_counter
        self._epoch = 0
        self._read = 0  # tokens of the context read so far

    @property
    def epoch(self) -> int:
        return self._epoch

    def fork(self, scorer_like: ScorerLike) -> FreeDrafter:
        return type(self)(self.spec, self.target)

    def begin(self, prompt: Sequence[int]) -> None:
        self._epoch += 1
        self._read = 0

    def take_in(self, context: Sequence[int], first: int) -> None:
        """Learn from ``context[first:]``, which is new."""
        raise NotImplementedError

    def read(self, context: Sequence[int]) -> float:
        """Take in the new part of the context; return the seconds of a prompt's first reading, or 0."""
        first = self._read == 0
        began = self.clock()
        self.take_in(context, self._read)
        self._read = len(context)
        return self.clock() - began if first else 0.0

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> Guess | None:
        """Return a guess after ``context + drafted``, or ``None``; ``context`` is what was read last.

        ``sampling`` has the transforms of the target's distribution; a guess may ignore it.
        """
        raise NotImplementedError

    def allowed_guess(
        self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling
    ) -> Guess | None:
        """Return a guess that the format of the output allows: the draft ends where it would leave the format."""
        guess = self.guess(context, drafted, sampling)
        if guess is None or (mask := sampling.mask_after(context, drafted)) is None:
            return guess
        if guess.q is None:
            return guess if mask.allows(guess.token) else None
        q = guess.q.clone()
        mask.apply(q, 0.0)
        total = float(q.sum())
        return replace(guess, q=q / total) if total > 0.0 else None

    def propose(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        """Draft guesses until one is missing."""
        yield from ()  # no passes
        growing = MixedDraft(self, plan, context)
        draft, policy = growing.draft, plan.policy
        draft.passes = None
        limit = policy.begin_step(plan.budget)
        while growing.continues(limit):
            draft.guess = self.allowed_guess(context, draft.tokens, plan.sampling)
            if draft.guess is None or not policy.expand(draft):
                break
            growing.add_guess(draft.guess)
        return growing.finished()


class CandidateDrafter(FreeDrafter):
    """Drafts chains or trees of the likeliest candidates; none is drawn. Subclasses define ``candidates``."""

    trees = True

    def candidates(self, context: Sequence[int], drafted: Sequence[int]) -> Mapping[int, float]:
        """Return candidates after ``context + drafted`` with their probabilities, the likeliest first."""
        raise NotImplementedError

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> Guess | None:
        return next((Guess(*best) for best in self._allowed(context, drafted, sampling).items()), None)

    def _allowed(
        self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling
    ) -> Mapping[int, float]:
        """Return the candidates that the format of the output allows."""
        candidates = self.candidates(context, drafted)
        mask = sampling.mask_after(context, drafted)
        return candidates if mask is None else {k: v for k, v in candidates.items() if mask.allows(k)}

    def propose(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        """Draft the likeliest candidates; they are certain, so any verification is exact."""
        policy = plan.policy
        if not policy.branches:
            return (yield from super().propose(context, plan))
        tree = GrowingTree(prefill_s=self.read(context))
        nodes = policy.expand(tree) if policy.begin_step(plan.budget) else ()
        while nodes:
            allowed = {node: self._allowed(context, tree.branch(node), plan.sampling) for node in nodes}
            known = {node: FixedCandidates(candidates) for node, candidates in allowed.items()}
            distributions = {node: candidates for node, candidates in known.items() if candidates.best(1)}
            if not distributions or not grow_tree(tree, replace(plan, drawing=top), distributions):
                break
            nodes = policy.expand(tree)
        kept = policy.prune(tree)
        return tree if kept is None else tree.pruned(kept)


class MixedDraft:
    """A chain under construction, with guesses, forced tokens and, in a cascade, tokens drawn by a model.

    Args:
        free: Makes the guesses; it reads the context now.
        plan, context: See ``Drafter.propose``.
    """

    def __init__(self, free: FreeDrafter, plan: StepPlan, context: Sequence[int]) -> None:
        self.draft = Draft(prefill_s=free.read(context), passes=0)
        self._q: list[torch.Tensor | None] = []
        self._context, self._plan = context, plan
        self._forces, self._forced = free.forces, 0

    def continues(self, limit: int) -> bool:
        """Add the tokens that are forced now; return whether a token of another origin may follow.

        Args:
            limit: The longest draft, without its forced tokens.
        """
        tokens, plan = self.draft.tokens, self._plan
        while self._forces and len(tokens) < min(plan.budget, LONGEST_DRAFT):
            mask = plan.sampling.mask_after(self._context, tokens)
            if mask is None or mask.only is None:
                break
            self.add(mask.only, "forced", None)
            self._forced += 1
        return len(tokens) - self._forced < limit and len(tokens) < plan.budget

    def add_guess(self, guess: Guess) -> None:
        """Add a guess; one with a distribution is drawn now, and in greedy decoding its likeliest token is taken."""
        token, q = int(guess.token), guess.q
        if q is not None and self._plan.sampling.greedy:
            token, q = int(q.argmax()), None
        elif q is not None:
            q = q.clone()  # its owner may write the next one into it
            token = self._plan.random.draw(q)
        self.add(token, guess, q)

    def add(self, token: int, source: Source, q: torch.Tensor | None) -> None:
        """Add a token from a source; ``q`` is the distribution that it was drawn from."""
        self.draft.tokens.append(token)
        self.draft.sources.append(source)
        self.draft.guess = None
        self._q.append(q)

    def finished(self) -> Draft:
        draft = self.draft
        known = next((q for q in self._q if q is not None), None)
        if known is not None:
            rows = zip(draft.tokens, self._q, strict=True)
            draft.q = torch.stack([_one_hot(token, known) if q is None else q for token, q in rows])
        return draft


def _one_hot(token: int, like: torch.Tensor) -> torch.Tensor:
    row = torch.zeros_like(like)
    row[token] = 1.0
    return row
