"""Draft policies: how many tokens are drafted in a step, and in which shape (docs/draft-policies.md)."""

from specbench.policies.auto import AutoLength
from specbench.policies.base import FixedLength
from specbench.policies.build import build_policy
from specbench.policies.costs import CostTable, GivenCosts
from specbench.policies.entropies import EntropyBoundLength, EntropyGuidedLength, SvipLength
from specbench.policies.outcomes import ConfidenceHeadLength, ConfidenceLength, HeuristicLength

__all__ = [
    "AutoLength",
    "ConfidenceHeadLength",
    "ConfidenceLength",
    "CostTable",
    "EntropyBoundLength",
    "EntropyGuidedLength",
    "FixedLength",
    "GivenCosts",
    "HeuristicLength",
    "SvipLength",
    "build_policy",
]
