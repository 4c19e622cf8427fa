"""What a drafter is: something that proposes tokens, and says with what probability it drew them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from specbench.lengths import LengthPolicy
    from specbench.sampling import Randomness, Sampling

__all__ = ["Draft", "Drafter", "FreeDrafter", "Guess", "NoDraft"]


@dataclass(slots=True)
class Draft:
    """The proposal of one step.

    Attributes:
        tokens: The γ drafted token ids; empty when there is nothing to propose.
        q: The distributions they were drawn from, float32 [γ, vocab], after the sampling transforms; ``None`` when
            every token was certain to its drafter (q is then one-hot, and never written out). It holds until the
            drafter's next proposal, which may take the same memory.
        logits: The drafter's untransformed logits, γ tensors of shape [vocab]; ``None`` from a drafter without any. A
            cascade puts -inf but for the token itself where a token was certain to it.
        evidence: What a drafter without logits knows instead: for each token a number from 0 to 1, the higher the more
            speaks for it, on the condition that the drafts before it are right. It may run ahead of ``tokens``.
            ``None`` from a drafter that has logits or knows nothing of the kind; NaN where a cascade took the token
            from a model.
        prefill_s: Seconds in which the drafter read a prompt for the first time, or caught up with more than a few
            tokens that it had no part in.
        passes: How many passes of a model the draft took so far. A token with evidence took none then, and the next one
            takes none if there is evidence for it. ``None`` where they are not counted: one per token.
    """

    tokens: list[int] = field(default_factory=list)
    q: torch.Tensor | None = None
    logits: list[torch.Tensor] | None = None
    evidence: list[float] | None = None
    prefill_s: float = 0.0
    passes: int | None = None


class Drafter(Protocol):
    """Proposes tokens. The loop calls ``begin`` per prompt, then ``propose``, ``commit``, ``rollback`` per step."""

    @property
    def name(self) -> str:
        """How the command line names it, with its options."""
        ...

    @property
    def epoch(self) -> object:
        """Another one after every ``begin`` that has taken the state of an unfinished context away."""
        ...

    def begin(self, prompt: Sequence[int]) -> None:
        """Start on a new prompt: forget the last one (unless told to keep something) and read this one lazily."""
        ...

    def propose(
        self, context: Sequence[int], room: int, policy: LengthPolicy, sampling: Sampling, random: Randomness
    ) -> Draft:
        """Draft up to ``min(room, what policy allows)`` tokens that continue ``context``.

        Args:
            context: All tokens so far; the last one has not been fed to any model yet.
            room: The most tokens this step may draft; 0 or more.
            policy: Asked how many tokens, before each whether to go on, and again before it is drawn from its logits.
            sampling: The transforms the target uses; a drafter with probabilities draws with the same ones.
            random: The one source of random draws.
        """
        ...

    def commit(self, context: Sequence[int], emitted: int, logits: torch.Tensor) -> None:
        """Learn from a step (or the first-target pass).

        Args:
            context: All tokens including the ``emitted`` new ones at its end.
            emitted: Number of new tokens, at least 1.
            logits: The target's logits that judged them, [>= emitted, vocab]: row i stood before new token i.
        """
        ...

    def rollback(self, length: int) -> None:
        """Keep at most the first ``length`` tokens of the context in whatever state there is."""
        ...


@dataclass(frozen=True, slots=True)
class Guess:
    """The next token as a drafter without a model has it.

    Attributes:
        token: The token, where it is certain.
        evidence: What speaks for it, see ``Draft``.
        q: The distribution it is yet to be drawn from, float32 [vocab]; ``None`` where it is certain.
    """

    token: int
    evidence: float
    q: torch.Tensor | None = None


class FreeDrafter(Drafter, Protocol):
    """A drafter whose tokens cost next to nothing, so that it can be asked at every position of a draft."""

    def read(self, context: Sequence[int]) -> float:
        """Take in what is new in the context and begin a draft; the seconds of the first reading of a prompt, or 0."""
        ...

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> Guess | None:
        """The token behind ``context + drafted``, whoever drafted those; ``None`` where nothing is known that counts.

        ``context`` is what was read last.
        """
        ...


class NoDraft:
    """Proposes nothing, so that every step is a plain target pass: plain decoding."""

    name = "none"
    epoch = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def begin(self, prompt: Sequence[int]) -> None:
        """Nothing to prepare."""

    def propose(
        self, context: Sequence[int], room: int, policy: LengthPolicy, sampling: Sampling, random: Randomness
    ) -> Draft:
        return Draft()

    def commit(self, context: Sequence[int], emitted: int, logits: torch.Tensor) -> None:
        """Nothing to learn."""

    def rollback(self, length: int) -> None:
        """Nothing to roll back."""
