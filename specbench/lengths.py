"""Draft-length rules: how many tokens to draft in a step.

A rule keeps the output's distribution as long as whether token i+1 is drafted depends only on what is known before that
token is drawn: earlier steps, clocks, the drafts so far and the drafter's distributions up to and including q_{i+1}
(Leviathan et al. 2023, section 2; docs/design.md). So a rule is asked *before* a token is drawn and can never take a
drawn token back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from specbench.records import Step

__all__ = ["FixedLength", "LengthPolicy"]


class LengthPolicy(Protocol):
    """Decides the draft length of every step; one object serves one prompt at a time."""

    @property
    def name(self) -> str:
        """The rule and its options in the notation of the command line."""
        ...

    def reset(self) -> None:
        """Forget everything: a new prompt begins."""
        ...

    def begin(self, room: int) -> int:
        """Start a step in which at most ``room`` tokens may be drafted; return the most it wants (0: none)."""
        ...

    def draw_next(self, drafted: int, logits: torch.Tensor | None) -> bool:
        """Whether to draw draft ``drafted + 1``.

        Args:
            drafted: Tokens drafted in this step so far.
            logits: The drafter's logits for the token in question, shape [vocab], before any sampling transform;
                ``None`` from a drafter that has none.
        """
        ...

    def observe(self, step: Step) -> None:
        """Learn from a finished step."""
        ...

    def notes(self) -> Mapping[str, float]:
        """What to record about the current step, by name."""
        ...


class FixedLength:
    """Draft ``gamma`` tokens in every step, fewer only where the room ends."""

    def __init__(self, gamma: int) -> None:
        if gamma < 1:
            raise ValueError(f"gamma is {gamma}; a fixed draft length is at least 1")
        self.gamma = gamma

    @property
    def name(self) -> str:
        return f"fixed({self.gamma})"

    def reset(self) -> None:
        """A fixed length learns nothing, so there is nothing to forget."""

    def begin(self, room: int) -> int:
        return min(self.gamma, room)

    def draw_next(self, drafted: int, logits: torch.Tensor | None) -> bool:  # noqa: ARG002
        return True

    def observe(self, step: Step) -> None:
        """A fixed length learns nothing."""

    def notes(self) -> Mapping[str, float]:
        return {}
