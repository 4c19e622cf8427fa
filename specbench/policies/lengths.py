"""Policies that draft chains until the drafter, or the outcomes of earlier steps, say stop.

Those that read the entropy of the drafter's untempered softmax draft up to their maximum with a drafter without logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from specbench.decoding.logits import Logits
from specbench.decoding.protocols import NewPrompt
from specbench.policies.base import ChainPolicy, confidence, normalized_entropy
from specbench.specs.policies import Confidence, Egag, EntropyBound, Heuristic, Svip

if TYPE_CHECKING:
    from specbench.decoding.distributions import TokenDistribution
    from specbench.decoding.drafts import Draft
    from specbench.decoding.records import Step


class EntropyGuidedLength(ChainPolicy):
    """EGAG: the draft length falls as the entropy at the start of the step rises.

    ``H_norm = H(q_1) / log V``, smoothed ``H_ema = β·H_ema + (1-β)·H_norm`` (the first value stands for itself), and
    ``γ = gamma_max - (gamma_max - gamma_min) · min(1, H_ema / scale)``, rounded, then cut by the budget. The entropy
    comes from the pass that drafts the first token.
    """

    spec: Egag

    def begin(self, prompt: NewPrompt) -> None:
        self._average: float | None = None
        self._notes: dict[str, float] = {}

    def begin_step(self, budget: int) -> int:
        self._notes = {}
        self._gamma = super().begin_step(budget)
        return self._gamma

    def should_continue(self, draft: Draft) -> bool:
        return len(draft.tokens) < self._gamma

    def num_children(
        self, draft: Draft, nodes: Sequence[int], distributions: Sequence[TokenDistribution]
    ) -> Sequence[int]:
        if not self._notes:
            logits = distributions[0]
            assert isinstance(logits, Logits)
            h = normalized_entropy(logits)
            past, beta = h if self._average is None else self._average, self.spec.ema_beta
            self._average = beta * past + (1 - beta) * h
            fall = (self.gamma_max - self.spec.gamma_min) * min(1.0, self._average / self.spec.scale)
            self._gamma = min(math.floor(self.gamma_max - fall + 0.5), self._limit)
            self._notes = {"H_norm": h, "H_ema": self._average, "gamma": float(self._gamma)}
        return (1,)

    def notes(self) -> Mapping[str, float]:
        return self._notes


def _entropy_root(draft: Draft, factor: float) -> float:
    """Return the root of a multiple of the entropy that the last token was drawn at; 0 without a token or logits."""
    source = draft.sources[-1] if draft.sources else None
    return math.sqrt(factor * source.entropy) if isinstance(source, Logits) else 0.0


class SvipLength(ChainPolicy):
    """SVIP (Zhang et al. 2024, arXiv 2411.18462): stops after a token with ``sqrt(0.15 · H(q_i)) > threshold``."""

    spec: Svip

    def should_continue(self, draft: Draft) -> bool:
        return _entropy_root(draft, 0.15) <= self.spec.threshold


class EntropyBoundLength(ChainPolicy):
    """AdaEDL (Agrawal et al. 2024, arXiv 2410.18351): stops where a bound on the chance of acceptance falls below λ.

    The bound is ``1 - sqrt(0.2 · H(q_i))``; drafting stops after the first token where it is below λ. After every
    step with drafts

        AR ← 0.5·AR + 0.5·accepted/drafted
        λ' = λ + 0.01 if AR < 0.9;  λ - 0.01 if fewer were accepted than the budget allows;  else λ
        λ  ← 0.9·λ + 0.1·λ'

    AR begins at 0.9, and λ at the given threshold.
    """

    spec: EntropyBound

    def begin(self, prompt: NewPrompt) -> None:
        self.threshold, self._rate = self.spec.threshold, 0.9

    def should_continue(self, draft: Draft) -> bool:
        return 1 - _entropy_root(draft, 0.2) >= self.threshold

    def observe(self, step: Step) -> None:
        if step.gamma == 0 or step.closing is None:
            return  # after a stop the acceptance is unknown
        self._rate = 0.5 * self._rate + 0.5 * step.accepted / step.gamma
        wanted = self.threshold
        if self._rate < 0.9:
            wanted += 0.01
        elif step.accepted < self._limit:
            wanted -= 0.01
        self.threshold = 0.9 * self.threshold + 0.1 * wanted

    def notes(self) -> Mapping[str, float]:
        return {"lambda": self.threshold}


class HeuristicLength(ChainPolicy):
    """Drafts two tokens more after a step in which all were accepted, one less after any other."""

    spec: Heuristic

    def begin(self, prompt: NewPrompt) -> None:
        self.gamma = self.spec.first

    def begin_step(self, budget: int) -> int:
        return min(self.gamma, budget)

    def observe(self, step: Step) -> None:
        if step.gamma == 0 or step.closing is None:
            return  # nothing was drafted, or a stop came first
        change = 2 if step.accepted == step.gamma else -1
        self.gamma = min(max(self.gamma + change, self.spec.gamma_min), self.gamma_max)

    def notes(self) -> Mapping[str, float]:
        return {"gamma": float(self.gamma)}


class ConfidenceLength(ChainPolicy):
    """Stops after a token whose probability ``q_i(t_i)`` is below the threshold, as ``transformers`` does."""

    spec: Confidence

    def should_continue(self, draft: Draft) -> bool:
        last = len(draft.tokens) - 1
        return last < 0 or confidence(draft, last) >= self.spec.threshold
