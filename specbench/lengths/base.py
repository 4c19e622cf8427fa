"""What a draft-length rule is, what it can read off a draft, and the simplest one.

A rule keeps the output's distribution as long as whether token i+1 is drafted depends only on what is known before that
token is drawn: earlier steps, clocks, the drafts so far and the drafter's distributions up to and including q_{i+1}
(Leviathan et al. 2023, section 2; docs/lengths.md). So a rule is asked *before* a pass is spent on a token, and again
before the token is drawn, and never after that: it can stop behind a token, but not take it back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from specbench.decoding.protocols import LengthPolicy
from specbench.decoding.records import LONGEST_DRAFT
from specbench.decoding.tree import choose_siblings
from specbench.errors import UsageError

if TYPE_CHECKING:
    from specbench.decoding.protocols import Draft, Sibling
    from specbench.decoding.records import Step

__all__ = [
    "FixedLength",
    "KeptState",
    "Rule",
    "WithSiblings",
    "confidence",
    "entropy",
    "is_free",
    "normalised_entropy",
    "written",
]


_SIBLING_PRICE = 0.02
"""Where nothing is known of what a pass costs: a token more takes a few per cent of it on a processor."""


class Rule:
    """A rule that drafts ``gamma_max`` tokens in every step and learns nothing; others override what they need.

    Args:
        gamma_max: The most tokens drafted in a step, 1 to ``LONGEST_DRAFT``.

    Raises:
        UsageError: It is less or more.
    """

    def __init__(self, gamma_max: int) -> None:
        if not 1 <= gamma_max <= LONGEST_DRAFT:
            raise UsageError(f"The longest draft is {gamma_max} tokens.", f"Give 1 to {LONGEST_DRAFT}.")
        self.gamma_max = gamma_max

    @property
    def name(self) -> str:
        raise NotImplementedError

    def reset(self) -> None:
        """There is nothing to forget."""

    def begin(self, room: int) -> int:
        return min(self.gamma_max, room)

    def another(self, draft: Draft) -> bool:  # noqa: ARG002
        return True

    def rather_pass(self, draft: Draft) -> bool:  # noqa: ARG002
        return False

    def look(self, logits: torch.Tensor) -> bool:  # noqa: ARG002
        return True

    most_siblings = 0
    unconditional = False

    def siblings(self, draft: Draft) -> Sequence[Sibling]:  # noqa: ARG002
        return ()

    def sibling_price(self, rows: int) -> float:  # noqa: ARG002
        """The chance of giving a token from which on one more to verify, with ``rows`` there, is worth its time."""
        return _SIBLING_PRICE

    def observe(self, step: Step) -> None:
        """There is nothing to learn."""

    def notes(self) -> Mapping[str, float]:
        return {}

    def costs(self) -> dict[str, Any] | None:
        return None


class FixedLength(Rule):
    """Draft ``gamma`` tokens in every step, fewer only where the room ends.

    Args:
        gamma: 1 to ``LONGEST_DRAFT``.

    Raises:
        UsageError: It is less or more.
    """

    unconditional = True

    def __init__(self, gamma: int = 5) -> None:
        super().__init__(gamma)

    @property
    def gamma(self) -> int:
        return self.gamma_max

    @property
    def name(self) -> str:
        return f"fixed:gamma={self.gamma}"


class WithSiblings:
    """A rule that also has alternatives verified beside its drafts.

    Args:
        policy: The rule.
        most: How many alternatives in a step, 0 or more.
        default: How many the rule has where its name says nothing of them.

    Raises:
        UsageError: ``most`` is negative.
    """

    def __init__(self, policy: Rule, most: int, default: int = 0) -> None:
        if most < 0:
            raise UsageError(f"The most siblings of a draft are {most}.", "Give 0 or more.")
        self.policy, self.most_siblings, self._default = policy, most, default
        self.unconditional = policy.unconditional and most == 0
        self.reset, self.begin, self.another, self.look = (
            policy.reset, policy.begin, policy.another, policy.look,
        )  # fmt: skip
        self.rather_pass = policy.rather_pass
        self.observe, self.notes, self.costs = policy.observe, policy.notes, policy.costs

    @property
    def name(self) -> str:
        name = self.policy.name
        if self.most_siblings == self._default:
            return name
        return f"{name}{',' if ':' in name else ':'}siblings={self.most_siblings}"

    def siblings(self, draft: Draft) -> Sequence[Sibling]:
        return choose_siblings(draft, self.most_siblings, self.policy.sibling_price(len(draft.tokens) + 1))


class KeptState:
    """A rule that carries what it learnt from one prompt to the next.

    Args:
        policy: The rule.
    """

    def __init__(self, policy: LengthPolicy) -> None:
        self.policy, self.unconditional = policy, policy.unconditional
        self.begin, self.another, self.look = policy.begin, policy.another, policy.look
        self.rather_pass = policy.rather_pass
        self.most_siblings, self.siblings = policy.most_siblings, policy.siblings
        self.observe, self.notes, self.costs = policy.observe, policy.notes, policy.costs

    @property
    def name(self) -> str:
        return f"{self.policy.name}, kept"

    def reset(self) -> None:
        """The point is not to."""


def entropy(logits: torch.Tensor) -> float:
    """Entropy of the untempered softmax of ``logits``, shape [vocab], in nats."""
    return max(0.0, float(torch.special.entr(logits.float().softmax(dim=-1)).sum()))


def normalised_entropy(logits: torch.Tensor) -> float:
    """Entropy over that of the uniform distribution on as many tokens: 0 to 1."""
    return entropy(logits) / math.log(logits.shape[-1]) if logits.shape[-1] > 1 else 0.0


def is_free(draft: Draft, i: int) -> bool:
    """Whether draft ``i`` came, or would come, without a pass of the model that a cascade asks otherwise."""
    evidence = draft.evidence
    counted = draft.passes is not None and evidence is not None
    return counted and i < len(evidence) and not math.isnan(evidence[i])  # type: ignore[arg-type, index]


def confidence(draft: Draft, i: int) -> float:
    """How sure the drafter was of draft ``i``.

    Returns:
        The token's probability in the untempered softmax; of a token that comes without logits what the drafter offers
        in ``evidence``, or 1 if it offers nothing.
    """
    if draft.logits is not None and not is_free(draft, i):
        logits = draft.logits[i].float()
        return float((logits[draft.tokens[i]] - logits.logsumexp(dim=-1)).exp())
    return draft.evidence[i] if draft.evidence is not None else 1.0


def written(word: str, **options: tuple[object, object]) -> str:
    """A rule's name, a spec itself: its word and, behind a colon, each option whose (value, default) differ."""
    changed = [
        option if value is True else f"{option}={value}"
        for option, (value, default) in options.items()
        if value != default
    ]
    return f"{word}:{','.join(changed)}" if changed else word
