"""What is to be decoded: everything that decides an output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench.decoding.protocols import Drafter, LengthPolicy, Scorer
from specbench.decoding.records import FinishReason
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.stops import StopRules
from specbench.decoding.tree import NO_SIBLINGS, Siblings
from specbench.errors import UsageError

__all__ = ["DraftPolicy", "Request"]


@dataclass(frozen=True)
class DraftPolicy:
    """What a step drafts.

    Attributes:
        rule: Decides the length.
        siblings: Verified beside it, where that can be.
        usual_siblings: How many the rule has where its name says nothing of them.
        kept: Whether the rule carries what it learns from one prompt to the next.
    """

    rule: LengthPolicy
    siblings: Siblings = NO_SIBLINGS
    usual_siblings: int = 0
    kept: bool = False

    @classmethod
    def of(cls, policy: LengthPolicy | DraftPolicy) -> DraftPolicy:
        """A rule by itself has no siblings."""
        return policy if isinstance(policy, cls) else cls(policy)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """The rule's, with what was added to it."""
        name = self.rule.name
        if self.siblings.most != self.usual_siblings:
            name += f"{',' if ':' in name else ':'}siblings={self.siblings.most}"
        return f"{name}, kept" if self.kept else name

    def costs(self) -> dict[str, Any] | None:
        """See ``LengthPolicy.costs``."""
        return self.rule.costs()


@dataclass(frozen=True)
class Request:
    """One output to decode; for what the fields mean see ``decode_steps``.

    Raises:
        UsageError: The prompt is empty or longer than the target's context, or ``max_new_tokens`` is below 1.
    """

    prompt: Sequence[int]
    target: Scorer
    drafter: Drafter
    policy: DraftPolicy
    sampling: Sampling
    random: Randomness
    max_new_tokens: int
    stops: StopRules = field(default_factory=StopRules)
    first_target: bool = True
    residual_adjustment: bool = True
    trace: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UsageError("The prompt is empty.", "Give at least one token.")
        if self.max_new_tokens < 1:
            raise UsageError(f"The number of new tokens is {self.max_new_tokens}.", "Ask for at least 1.")
        room = self.target.context_limit
        if room is not None and len(self.prompt) > room:
            raise UsageError(
                f"The prompt has {len(self.prompt)} tokens, the target's context holds {room}.",
                "Shorten the prompt.",
            )

    @property
    def limit(self) -> int:
        """The most tokens that prompt and output may have."""
        end, room = len(self.prompt) + self.max_new_tokens, self.target.context_limit
        return end if room is None else min(end, room)

    def end_at(self, length: int) -> FinishReason | None:
        """Why an output ends with a context of so many tokens; ``None`` if it goes on."""
        if length < self.limit:
            return None
        return "length" if length >= len(self.prompt) + self.max_new_tokens else "context-limit"
