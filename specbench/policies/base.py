"""The base class of policies that draft chains, the policy of fixed length, and how policies are built.

A policy keeps the output's distribution as long as whether token i+1 is drafted depends only on what is known before
that token is drawn: earlier steps, clocks, the drafts so far and the drafter's distributions up to q_{i+1} (Leviathan
et al. 2023, section 2; docs/draft-policies.md). So the drafter asks its policy *before* the forward pass for a token,
and again before the token is drawn: a policy can end the draft, but not remove its last token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from specbench.decoding.drafts import Guess
from specbench.decoding.logits import Logits, NoTokenError
from specbench.decoding.protocols import DraftPolicy
from specbench.specs.policies import Fixed, OwnPolicy, PolicySpec, parse_policy

if TYPE_CHECKING:
    from specbench.decoding.distributions import TokenDistribution
    from specbench.decoding.drafts import Draft


class ChainPolicy(DraftPolicy):
    """Drafts chains of ``gamma_max`` tokens; subclasses override ``should_continue`` or ``num_children``.

    Args:
        spec: Its options, ``gamma_max`` among them; a subclass names its own kind of spec.
    """

    spec: PolicySpec
    gamma_max: int

    def __init__(self, spec: PolicySpec) -> None:
        self.spec, self.name, self.verification = spec, str(spec), spec.verification
        self.gamma_max = spec.gamma_max  # type: ignore[attr-defined]

    def begin_step(self, budget: int) -> int:
        self._limit = min(self.gamma_max, budget)
        return self._limit

    def should_continue(self, draft: Draft) -> bool:
        """Return whether to draft one more token; called before the drafter runs a forward pass for it."""
        return True

    def expand(self, draft: Draft) -> Sequence[int]:
        return (len(draft.tokens) - 1,) if self.should_continue(draft) else ()

    def num_children(
        self, draft: Draft, nodes: Sequence[int], distributions: Sequence[TokenDistribution]
    ) -> Sequence[int]:
        return (1,)


class FixedLength(ChainPolicy):
    """Drafts ``gamma`` tokens in every step, 1 to 256; fewer only where the budget ends.

    Examples:
        >>> FixedLength(4).gamma
        4
    """

    unconditional = True

    def __init__(self, gamma: int | Fixed = 5) -> None:
        spec = gamma if isinstance(gamma, Fixed) else Fixed(gamma)
        super().__init__(replace(spec, gamma=spec.gamma_max))

    @property
    def gamma(self) -> int:
        return self.gamma_max


def build_policy(spec: str | PolicySpec) -> DraftPolicy:
    """Build a draft policy.

    Args:
        spec: A policy's word and its options, as in ``egag:scale=0.5,max=12``, or a class in a file, as in
            ``./mine.py:MyPolicy``; the ``name`` of a policy is one too.

    Raises:
        UsageError: There is no such policy, it has no such option, or a value is outside its range.
    """
    spec = parse_policy(spec) if isinstance(spec, str) else spec
    if isinstance(spec, OwnPolicy):
        return spec.make()
    module, _, name = spec.policy.partition(":")
    return getattr(import_module(f"specbench.policies.{module}"), name)(spec)


def normalized_entropy(logits: Logits) -> float:
    """Return the entropy of the softmax over that of the uniform distribution, 0 to 1."""
    return logits.entropy / math.log(logits.size) if logits.size > 1 else 0.0


def is_guess(draft: Draft, i: int) -> bool:
    """Return whether token ``i`` was found without a forward pass; the next one may be known already."""
    return isinstance(draft.source(i), Guess | str)  # or forced by the format


def confidence(draft: Draft, i: int) -> float:
    """Return the drafter's confidence in token ``i``.

    It is the token's probability in the untempered softmax, 0 where that is none; of a guess its ``match_confidence``;
    1 if nothing is known.
    """
    source = draft.source(i)
    if isinstance(source, Logits):
        try:
            return math.exp(source.log_chance(draft.tokens[i]))
        except NoTokenError:
            return 0.0
    return source.match_confidence if isinstance(source, Guess) else 1.0
