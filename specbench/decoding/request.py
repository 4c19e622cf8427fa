"""A request: everything that decides an output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specbench.base.errors import UsageError
from specbench.decoding.protocols import Drafter, DraftPolicy, Scorer
from specbench.decoding.records import FinishReason
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.stops import StopRules
from specbench.decoding.verdicts import METHODS
from specbench.decoding.verify import Verification, verification_of
from specbench.specs.policies import VerificationName


@dataclass(frozen=True)
class Request:
    """One output to decode.

    Attributes:
        prompt: Token ids, at least one.
        target: The model whose output distribution is kept.
        drafter: Proposes tokens.
        policy: Decides how many tokens are drafted, and in which shape.
        sampling: The transforms of both models' logits.
        random: The source of every random draw.
        max_new_tokens: The longest output, at least 1.
        stops: What ends the output earlier.
        first_target: Whether the target reads the prompt and emits the first token before anything is drafted. If not,
            the ``Prefill`` is empty, and the target reads the prompt in the first step, together with its draft.
        trace: Whether q, p, r and the verdict of every drafted token are recorded.

    Raises:
        UsageError: The prompt is empty or longer than the target's context, ``max_new_tokens`` is below 1, or its parts
            do not go together.
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
    trace: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UsageError("The prompt is empty.", "Give at least one token.")
        if self.max_new_tokens < 1:
            raise UsageError(f"The number of new tokens is {self.max_new_tokens}.", "Ask for at least 1.")
        limit = self.target.context_limit
        if limit is not None and len(self.prompt) > limit:
            raise UsageError(
                f"The prompt has {len(self.prompt)} tokens, but the target's context holds only {limit}.",
                "Shorten the prompt.",
            )
        self._check_tree()

    def _check_tree(self) -> None:
        policy, method, several = self.policy, self.method, self.drafter.traits.several
        if not policy.branches and not several:
            return
        if not self.target.takes_trees:
            raise UsageError(
                "The target cannot verify draft trees with this cache: a forward pass over a tree gives other"
                " logits than separate ones.",
                "Leave the tree out, or use another --cache.",
            )
        if policy.branches and not self.drafter.traits.trees:
            raise UsageError(
                f"The drafter {self.drafter.traits.name} drafts only chains with these models and options.",
                "Leave the tree out.",
            )
        if self.sampling.greedy:
            return
        if several and not METHODS[method].several_drafters:
            raise UsageError(
                f"{method} does not verify the drafts of several drafters.",
                f"Use {', '.join(name for name, rule in METHODS.items() if rule.several_drafters)}.",
            )
        if METHODS[method].chains_only:
            raise UsageError(
                f"{method} verifies chains only, and the draft is a tree.",
                "Use traversal or recursive, or leave the tree out.",
            )
        if policy.branches and policy.certain_only and method != "naive":
            raise UsageError(
                f"{policy.name} selects draft tokens by their probability, with which {method} is not lossless.",
                "Verify it with naive.",
            )

    @property
    def method(self) -> VerificationName:
        """How drafts are verified."""
        return self.policy.method(self.drafter)

    @property
    def transforms(self) -> Sampling:
        """The transforms for this output, with a fresh state."""
        return self.sampling.at(len(self.prompt), self.stops.end_ids)

    def verification(self, sampling: Sampling) -> Verification:
        """Return what judges the drafts, with the transforms of this output."""
        return verification_of(sampling, self.method)

    def begin(self) -> tuple[object, object]:
        """Begin the context of target and drafter; return their epochs, which change with the next context."""
        self.target.begin()
        self.drafter.begin(self.prompt)
        return self.target.epoch, self.drafter.epoch

    def check_epochs(self, begun: tuple[object, object]) -> None:
        """Raise ``UsageError`` if target or drafter has begun another context since ``begin``."""
        if (self.target.epoch, self.drafter.epoch) != begun:
            raise UsageError(
                "This generation was interrupted by another one on its target or its drafter.",
                "Let one finish before the next begins, or give each a target and a drafter of its own.",
            )

    @property
    def requested_length(self) -> int:
        """The length of the prompt and the requested new tokens."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def limit(self) -> int:
        """The longest prompt and output together, in tokens."""
        most = self.target.context_limit
        return self.requested_length if most is None else min(self.requested_length, most)

    def end_at(self, length: int) -> FinishReason | None:
        """Return why an output ends at this length of the context; ``None`` if it continues."""
        if length < self.limit:
            return None
        return "length" if length >= self.requested_length else "context-limit"
