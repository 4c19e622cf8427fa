"""What the decoding loop asks of others: a drafter, a draft-length rule, a scorer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from specbench.decoding.records import Step
    from specbench.decoding.sampling import Randomness, Sampling

__all__ = ["Draft", "Drafter", "FreeDrafter", "Guess", "LengthPolicy", "Scorer", "Sibling"]


class Sibling(NamedTuple):
    """An alternative to a drafted token: the draft's place, from 0, and the token."""

    place: int
    token: int


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


class LengthPolicy(Protocol):
    """Decides the draft length of every step; one object serves one prompt at a time.

    In each step the drafter calls ``begin`` once, then ``another`` before every draft, and ``look`` between the pass
    that gives the draft's distribution and the draw, if it has passes. Where a cascade has a token without a pass it
    calls ``rather_pass`` before all that. The loop calls ``observe`` when the step is
    over.
    """

    @property
    def name(self) -> str:
        """The rule, with those of its options that are not the defaults."""
        ...

    def reset(self) -> None:
        """Forget everything: a new prompt begins."""
        ...

    @property
    def unconditional(self) -> bool:
        """Whether a step's length is settled with ``begin``, and nothing is read off the draft."""
        ...

    def begin(self, room: int) -> int:
        """Start a step in which at most ``room`` tokens may be drafted; return the most it wants (0: none)."""
        ...

    def another(self, draft: Draft) -> bool:
        """Whether to draft one more token. Asked before a drafter's pass is spent on it.

        Args:
            draft: The draft so far. The rule may read it again as long as the step lasts, and never writes to it.
        """
        ...

    def rather_pass(self, draft: Draft) -> bool:
        """Whether a cascade's model is to draft the next token although one has come without a pass.

        Args:
            draft: The draft so far, with the evidence for that token behind that of the others.
        """
        ...

    def look(self, logits: torch.Tensor) -> bool:
        """Whether to draw the token after all, now that its distribution is known.

        Args:
            logits: The drafter's for this token, shape [vocab], before any sampling transform.
        """
        ...

    @property
    def most_siblings(self) -> int:
        """How many alternatives it may ask to be verified in a step; 0 if it never does."""
        ...

    def siblings(self, draft: Draft) -> Sequence[Sibling]:
        """Alternatives to verify beside a finished draft. Asked in greedy decoding only."""
        ...

    def observe(self, step: Step) -> None:
        """Learn from a finished step."""
        ...

    def notes(self) -> Mapping[str, float]:
        """What to record about the current step, by name."""
        ...

    def costs(self) -> dict[str, Any] | None:
        """The costs of passes it went by so far, ready for JSON (see ``parse_costs``); ``None`` if it needs none."""
        ...


class Scorer(Protocol):
    """A model with the keys and values of one context: it reads what it lacks of it and gives logits."""

    @property
    def context_limit(self) -> int | None:
        """The longest context the model can read, in tokens; ``None`` for no limit."""
        ...

    @property
    def takes_siblings(self) -> bool:
        """Whether alternatives can be verified beside a draft."""
        ...

    @property
    def epoch(self) -> object:
        """Another one after every ``begin``."""
        ...

    def begin(self) -> None:
        """Start on a new context."""
        ...

    def logits(
        self, context: Sequence[int], drafted: Sequence[int] = (), *, siblings: Sequence[Sibling] = ()
    ) -> torch.Tensor:
        """Logits behind the context, each of ``drafted`` and each of the siblings, [rows, vocab]."""
        ...

    def move(self, source: int, to: int) -> None:
        """Put a cached position in the place of another: a sibling that was right in that of the draft."""
        ...

    def rollback(self, length: int) -> None:
        """Keep at most the first ``length`` tokens of the context."""
        ...


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
