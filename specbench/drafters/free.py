"""Base classes of drafters without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from specbench.decoding.clocks import Clock, WallClock
from specbench.decoding.distributions import FixedCandidates
from specbench.decoding.drafts import Draft, GrowingTree
from specbench.decoding.protocols import Drafter
from specbench.decoding.tree import grow_tree
from specbench.decoding.verdicts import top

if TYPE_CHECKING:
    from specbench.decoding.protocols import Decoding, DraftPolicy, Drawing, ScorerLike
    from specbench.decoding.sampling import Randomness, Sampling


@dataclass(frozen=True, slots=True)
class Guess:
    """A guess at the next token.

    Attributes:
        token: The token, if it is certain.
        match_confidence: See ``Draft``.
        q: The distribution to draw it from, float32 [vocab]; ``None`` if it is certain.
    """

    token: int
    match_confidence: float
    q: torch.Tensor | None = None


class FreeDrafter(Drafter):
    """A drafter whose tokens cost almost nothing; subclasses define ``take_in`` and ``guess``.

    Args:
        spec: Its spec, which is its name.
        clock: Times the reading of the prompt.
    """

    longest: int | None = None
    """The longest draft; ``None`` for no limit."""

    def __init__(self, spec: object, clock: Clock | None = None) -> None:
        super().__init__(str(spec))
        self.spec: Any = spec
        self._clock = clock or WallClock()
        self._epoch = 0
        self._read = 0  # tokens of the context read so far

    def fork(self, scorer_like: ScorerLike) -> FreeDrafter:
        return type(self)(self.spec, self._clock)

    @property
    def epoch(self) -> int:
        return self._epoch

    def begin(self, prompt: Sequence[int]) -> None:
        self._epoch += 1
        self._read = 0

    def take_in(self, context: Sequence[int], first: int) -> None:
        """Learn from ``context[first:]``, which is new."""
        raise NotImplementedError

    def read(self, context: Sequence[int]) -> float:
        """Take in the new part of the context; return the seconds of a prompt's first reading, or 0."""
        first = self._read == 0
        began = self._clock.now()
        self.take_in(context, self._read)
        self._read = len(context)
        return self._clock.now() - began if first else 0.0

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> Guess | None:
        """Return a guess after ``context + drafted``, or ``None``; ``context`` is what was read last."""
        raise NotImplementedError

    def propose(
        self,
        context: Sequence[int],
        budget: int,
        policy: DraftPolicy,
        sampling: Sampling,
        random: Randomness,
        drawing: Drawing = top,
    ) -> Decoding[Draft]:
        """Draft guesses until one is missing."""
        yield from ()  # no passes
        draft = Draft(match_confidence=[], prefill_s=self.read(context))
        limit = policy.begin(budget if self.longest is None else min(budget, self.longest))
        distributions: list[torch.Tensor] = []
        while len(draft.tokens) < limit:
            guess = self.guess(context, draft.tokens, sampling)
            if guess is None:
                break
            draft.match_confidence.append(guess.match_confidence)  # type: ignore[union-attr]
            if not policy.expand(draft):
                draft.rejected_guess = guess.token if guess.q is None else None
                break
            if guess.q is not None:
                distributions.append(guess.q)
            draft.tokens.append(guess.token if guess.q is None else random.draw(guess.q))
        if distributions:
            draft.q = torch.stack(distributions)
        return draft


class CandidateDrafter(FreeDrafter):
    """Drafts chains or trees of the likeliest candidates; none is drawn. Subclasses define ``candidates``."""

    takes_trees = certain = True

    def candidates(self, context: Sequence[int], drafted: Sequence[int]) -> Mapping[int, float]:
        """Return candidates after ``context + drafted`` with their probabilities, the likeliest first."""
        raise NotImplementedError

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> Guess | None:
        return next((Guess(*each) for each in self.candidates(context, drafted).items()), None)

    def propose(
        self,
        context: Sequence[int],
        budget: int,
        policy: DraftPolicy,
        sampling: Sampling,
        random: Randomness,
        drawing: Drawing = top,
    ) -> Decoding[Draft]:
        """Draft the likeliest candidates; they are certain, so any verification is exact."""
        if not policy.branches:
            return (yield from super().propose(context, budget, policy, sampling, random, drawing))
        tree = GrowingTree(prefill_s=self.read(context))
        nodes = policy.expand(tree) if policy.begin(budget) else ()
        while nodes:
            known = {node: FixedCandidates(self.candidates(context, tree.branch(node))) for node in nodes}
            distributions = {node: each for node, each in known.items() if each.best(1)}
            if not distributions or not grow_tree(tree, policy, distributions, top, random):
                break
            nodes = policy.expand(tree)
        kept = policy.prune(tree)
        return tree if kept is None else tree.pruned(kept)
