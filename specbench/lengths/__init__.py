"""Draft-length rules: how many tokens to draft in a step. docs/lengths.md lists them; each class describes its own."""

from specbench.lengths.auto import AutoLength
from specbench.lengths.base import FixedLength
from specbench.lengths.build import build_policy
from specbench.lengths.costs import CostSource, check_costs, load_costs, parse_costs, read_costs
from specbench.lengths.entropies import EntropyBoundLength, EntropyGuidedLength, SvipLength
from specbench.lengths.outcomes import ConfidenceLength, HeuristicLength

__all__ = [
    "AutoLength",
    "ConfidenceLength",
    "CostSource",
    "EntropyBoundLength",
    "EntropyGuidedLength",
    "FixedLength",
    "HeuristicLength",
    "SvipLength",
    "build_policy",
    "check_costs",
    "load_costs",
    "parse_costs",
    "read_costs",
]
