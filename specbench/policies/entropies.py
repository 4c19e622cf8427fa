"""Policies that read the entropy of the drafter's untempered softmax: EGAG, AdaEDL's bound and SVIP.

With a drafter without logits they draft up to their maximum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from specbench.decoding.logits import Logits
from specbench.decoding.protocols import NewPrompt
from specbench.policies.base import ChainPolicy, normalized_entropy

if TYPE_CHECKING:
    from specbench.decoding.distributions import TokenDistribution
    from specbench.decoding.drafts import Draft
    from specbench.decoding.records import Step


class EntropyGuidedLength(ChainPolicy):
    """EGAG: the draft length falls as the entropy at the start of the step rises.

    ``H_norm = H(q_1) / log V``, smoothed ``H_ema = β·H_ema + (1-β)·H_norm`` (the first value stands for itself), and
    ``γ = gamma_max - (gamma_max - gamma_min) · min(1, H_ema / scale)``, rounded, then cut by the budget. The entropy
    comes from the pass that drafts the first token.

    Args:
        gamma_min: γ at and above the scale, at least 1.
        gamma_max: γ where the drafter is certain.
        ema_beta: Weight of the past, from 0 (none) to below 1.
        scale: The H_norm at which γ reaches ``gamma_min``, above 0 and at most 1; with real vocabularies far below 1.
    """

    def __init__(
        self, gamma_min: int = 1, gamma_max: int = 8, ema_beta: float = 0.0, scale: float = 0.3
    ) -> None:
        super().__init__("egag", gamma_max, gamma_min=gamma_min, ema_beta=ema_beta, scale=scale)
        self.gamma_min, self.ema_beta, self.scale = gamma_min, ema_beta, scale
        self.begin(NewPrompt())

    def begin(self, prompt: NewPrompt) -> None:  # noqa: ARG002
        self._average: float | None = None
        self._notes: dict[str, float] = {}

    def begin_step(self, budget: int) -> int:
        self._notes = {}
        self._limit = self._gamma = super().begin_step(budget)
        return self._limit

    def should_continue(self, draft: Draft) -> bool:
        return len(draft.tokens) < self._gamma

    def num_children(
        self,
        draft: Draft,  # noqa: ARG002
        nodes: Sequence[int],  # noqa: ARG002
        distributions: Sequence[TokenDistribution],
    ) -> Sequence[int]:
        if not self._notes:
            logits = distributions[0]
            assert isinstance(logits, Logits)
            h = normalized_entropy(logits)
            past = h if self._average is None else self._average
            self._average = self.ema_beta * past + (1 - self.ema_beta) * h
            fall = (self.gamma_max - self.gamma_min) * min(1.0, self._average / self.scale)
            self._gamma = min(math.floor(self.gamma_max - fall + 0.5), self._limit)
            self._notes = {"H_norm": h, "H_ema": self._average, "gamma": float(self._gamma)}
        return (1,)

    def notes(self) -> Mapping[str, float]:
        return self._notes


class SvipLength(ChainPolicy):
    """SVIP (Zhang et al. 2024, arXiv 2411.18462): stops after a token with ``sqrt(0.15 · H(q_i)) > threshold``.

    Args:
        threshold: Above 0.
        gamma_max: The most tokens drafted in a step.
    """

    factor = 0.15

    def __init__(self, threshold: float = 0.3, gamma_max: int = 40) -> None:
        super().__init__("svip", gamma_max, threshold=threshold)
        self.threshold = threshold

    def should_continue(self, draft: Draft) -> bool:
        return not draft.logits or math.sqrt(self.factor * draft.logits[-1].entropy) <= self.threshold


class EntropyBoundLength(ChainPolicy):
    """AdaEDL (Agrawal et al. 2024, arXiv 2410.18351): stops where a bound on the chance of acceptance falls below λ.

    The bound is ``1 - sqrt(0.2 · H(q_i))``; drafting stops after the first token where it is below λ. After every
    step with drafts

        AR ← 0.5·AR + 0.5·accepted/drafted
        λ' = λ + 0.01 if AR < 0.9;  λ - 0.01 if fewer were accepted than the budget allows;  else λ
        λ  ← 0.9·λ + 0.1·λ'

    AR begins at 0.9.

    Args:
        threshold: λ at the beginning, from 0 to 1.
        gamma_max: The most tokens drafted in a step.
    """

    factor = 0.2
    target_rate = 0.9
    step = 0.01

    def __init__(self, threshold: float = 0.6, gamma_max: int = 20) -> None:
        super().__init__("entropy-bound", gamma_max, threshold=threshold)
        self.initial_threshold = threshold
        self.begin(NewPrompt())

    def begin(self, prompt: NewPrompt) -> None:  # noqa: ARG002
        self.threshold, self._rate, self._limit = self.initial_threshold, self.target_rate, self.gamma_max

    def begin_step(self, budget: int) -> int:
        self._limit = super().begin_step(budget)
        return self._limit

    def should_continue(self, draft: Draft) -> bool:
        if not draft.logits:
            return True
        return 1 - math.sqrt(self.factor * draft.logits[-1].entropy) >= self.threshold

    def observe(self, step: Step) -> None:
        if step.gamma == 0 or step.closing is None:
            return  # after a stop the acceptance is unknown
        self._rate = 0.5 * self._rate + 0.5 * step.accepted / step.gamma
        wanted = self.threshold
        if self._rate < self.target_rate:
            wanted += self.step
        elif step.accepted < self._limit:
            wanted -= self.step
        self.threshold = 0.9 * self.threshold + 0.1 * wanted

    def notes(self) -> Mapping[str, float]:
        return {"lambda": self.threshold}
