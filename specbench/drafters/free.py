"""What drafters without a model have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from specbench.decoding.clocks import Clock, WallClock
from specbench.decoding.distributions import FixedCandidates
from specbench.decoding.drafts import Draft, GrowingTree
from specbench.decoding.protocols import Drafter
from specbench.decoding.verdicts import top

if TYPE_CHECKING:
    from specbench.decoding.protocols import Decoding, DraftPolicy, Drawing, ScorerLike
    from specbench.decoding.sampling import Randomness, Sampling


@dataclass(frozen=True, slots=True)
class Guess:
    """The next token as a drafter without a model has it.

    Attributes:
        token: The token, where it is certain.
        evidence: What speaks for it, see ``Draft``.
        q: The distribution it is yet to be drawn from, float32 [vocab]; ``None`` where it is certain.
    """

    token: int
    match_confidence: float
    q: torch.Tensor | None = None


class FreeDrafter(Drafter):
    """A drafter whose tokens cost next to nothing, so that it can be asked at every position of a draft.

    Whoever inherits it takes in the context, and guesses.

    Args:
        spec: What it is called.
        clock: Times the reading of the prompt.
    """

    longest: int | None = None
    """The most tokens of a draft; ``None``: as many as are wanted."""

    def __init__(self, spec: object, clock: Clock | None = None) -> None:
        super().__init__(str(spec))
        self.spec: Any = spec
        self._clock = clock or WallClock()
        self._epoch = 0
        self._read = 0  # so many tokens of the context

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
        """Take in what is new in the context and begin a draft; the seconds of the first reading of a prompt, or 0."""
        first = self._read == 0
        began = self._clock.now()
        self.take_in(context, self._read)
        self._read = len(context)
        return self._clock.now() - began if first else 0.0

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> Guess | None:
        """The token behind ``context + drafted``, whoever drafted those; ``None`` where nothing is known that counts.

        ``context`` is what was read last.
        """
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
        """Draft guess after guess until a miss."""
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
    """Drafts the likeliest candidate, token after token, or a tree of several. None of them is ever drawn.

    Whoever inherits it says what the candidates are.
    """

    takes_trees = certain = True

    def candidates(self, context: Sequence[int], drafted: Sequence[int]) -> Mapping[int, float]:
        """What may stand behind ``context + drafted``, the likeliest first, each with its chance."""
        raise NotImplementedError

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> Guess | None:
        """The likeliest candidate, whoever drafted what stands before it."""
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
        """Draft the likeliest candidates. They are certain, so any way to verify is right for trees of them."""
        if not policy.branches:
            return (yield from super().propose(context, budget, policy, sampling, random, drawing))
        tree = GrowingTree(prefill_s=self.read(context))
        nodes = policy.expand(tree) if policy.begin(budget) else ()
        while nodes:
            known = {node: FixedCandidates(self.candidates(context, tree.branch(node))) for node in nodes}
            prospects = {node: each for node, each in known.items() if each.best(1)}
            if not prospects or not tree.grow(policy, prospects, top, random):
                break
            nodes = policy.expand(tree)
        kept = policy.prune(tree)
        return tree if kept is None else tree.pruned(kept)
