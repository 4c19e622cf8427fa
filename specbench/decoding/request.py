"""What is to be decoded: everything that decides an output."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench.base.errors import UsageError
from specbench.decoding.drafts import Draft
from specbench.decoding.protocols import Decoding, Drafter, DraftPolicy, Drawing, Scorer
from specbench.decoding.records import FinishReason
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.stops import StopRules
from specbench.decoding.tree import NO_SIBLINGS, Siblings
from specbench.decoding.verdicts import METHODS
from specbench.specs.notation import add_option
from specbench.specs.verification import VerificationName


def _always() -> bool:
    return True


@dataclass(frozen=True)
class DraftPlan:
    """What a step drafts.

    Attributes:
        policy: Decides how much, and in which shape.
        siblings: Verified beside it, where that can be.
        usual_siblings: How many the policy has where its name says nothing of them.
        kept: Whether the policy carries what it learns from one prompt to the next.
        verification: How drafts are verified above temperature 0; ``None`` for what fits.
        allowed: Whether there is any draft in the step that begins.
    """

    policy: DraftPolicy
    siblings: Siblings = NO_SIBLINGS
    usual_siblings: int = 0
    kept: bool = False
    verification: VerificationName | None = None
    allowed: Callable[[], bool] = _always

    @classmethod
    def of(cls, policy: DraftPolicy | DraftPlan) -> DraftPlan:
        """A policy by itself has no siblings."""
        return policy if isinstance(policy, cls) else cls(policy)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """The policy's, with what was added to it."""
        name = self.policy.name
        if self.siblings.most != self.usual_siblings:
            name = add_option(name, f"siblings={self.siblings.most}")
        if self.verification is not None:
            name = add_option(name, f"verification={self.verification}")
        return f"{name}, kept" if self.kept else name

    def method(self, drafter: Drafter) -> VerificationName:
        """How the drafts of a drafter are verified."""
        if self.verification is not None:
            return self.verification
        if drafter.several:
            return "specinfer"
        if not self.policy.branches:
            return "residual"
        return "naive" if self.policy.certain_only or drafter.certain else "traversal"

    def costs(self) -> dict[str, Any] | None:
        """See ``Policy.costs``."""
        return self.policy.costs()

    def fork(self) -> DraftPlan:
        """The same policy for another request; what it has learned is its own from now on."""
        return copy.deepcopy(self)

    def propose(
        self,
        drafter: Drafter,
        context: Sequence[int],
        room: int,
        sampling: Sampling,
        random: Randomness,
        drawing: Drawing,
    ) -> Decoding[Draft]:
        """What a drafter drafts by this policy, with its siblings; for the arguments see ``Drafter``."""
        room = room if self.allowed() else 0
        asking = drafter.propose(context, room, self.policy, sampling, random, drawing)
        return self._with_siblings(asking) if self.siblings.most else asking

    def _with_siblings(self, asking: Decoding[Draft]) -> Decoding[Draft]:
        return self.siblings.widen((yield from asking))


@dataclass(frozen=True)
class Request:
    """One output to decode; for what the fields mean see ``decode_steps``.

    Attributes:
        kept: So many tokens of the prompt target and drafter have read already, in the context before this one.

    Raises:
        UsageError: The prompt is empty or longer than the target's context, or ``max_new_tokens`` is below 1.
    """

    prompt: Sequence[int]
    target: Scorer
    drafter: Drafter
    policy: DraftPlan
    sampling: Sampling
    random: Randomness
    max_new_tokens: int
    stops: StopRules = field(default_factory=StopRules)
    first_target: bool = True
    residual_adjustment: bool = True
    trace: bool = False
    kept: int = 0

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
        self._check_tree()

    def _check_tree(self) -> None:
        policy, method, several = self.policy.policy, self.method, self.drafter.several
        if not self.residual_adjustment and (policy.branches or method not in ("rejection", "residual")):
            raise UsageError(
                f"{method} has no residual adjustment to leave out.",
                "Use rejection and a chain to show what it is for.",
            )
        if not policy.branches and not several:
            return
        if not self.target.takes_trees:
            raise UsageError(
                "This target takes no trees with this cache: a pass over one does not give what separate passes give.",
                "Leave the tree out, or use another --cache.",
            )
        if policy.branches and not self.drafter.takes_trees:
            raise UsageError(
                f"The drafter {self.drafter.name} drafts chains only, here at least.", "Leave the tree out."
            )
        if self.sampling.greedy:
            return
        if several and not METHODS[method].several:
            raise UsageError(
                f"{method} does not verify the drafts of several drafters.",
                f"Use {', '.join(name for name, each in METHODS.items() if each.several)}.",
            )
        if METHODS[method].chains_only:
            raise UsageError(
                f"{method} verifies chains only, and the draft is a tree.",
                "Use traversal or recursive, or leave the tree out.",
            )
        if policy.branches and policy.certain_only and method != "naive":
            raise UsageError(
                f"{policy.name} keeps drafts by their own probabilities, which {method} must not be given.",
                "Verify it with naive.",
            )

    @property
    def method(self) -> VerificationName:
        """How drafts are verified."""
        return self.policy.method(self.drafter)

    @property
    def asked(self) -> int:
        """Length of the prompt and of the new tokens asked for."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def limit(self) -> int:
        """The most tokens that prompt and output may have."""
        room = self.target.context_limit
        return self.asked if room is None else min(self.asked, room)

    def end_at(self, length: int) -> FinishReason | None:
        """Why an output ends with a context of so many tokens; ``None`` if it goes on."""
        if length < self.limit:
            return None
        return "length" if length >= self.asked else "context-limit"
