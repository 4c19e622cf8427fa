"""Draft-length rules: how many tokens to draft in a step. docs/lengths.md lists them; each class describes its own."""

from specbench.lengths.auto import AutoLength
from specbench.lengths.base import FixedLength, KeptState
from specbench.lengths.costs import CostSource, check_costs, load_costs, parse_costs, read_costs
from specbench.lengths.entropies import EntropyBoundLength, EntropyGuidedLength, SvipLength
from specbench.lengths.outcomes import ConfidenceLength, HeuristicLength
from specbench.lengths.words import (
    POLICY_WORDS,
    PolicyOption,
    PolicyWord,
    applies,
    build_policy,
    check_policy,
    default_policy,
    policy_names,
    policy_word,
    read_policy,
)

__all__ = [
    "POLICY_WORDS",
    "AutoLength",
    "ConfidenceLength",
    "CostSource",
    "EntropyBoundLength",
    "EntropyGuidedLength",
    "FixedLength",
    "HeuristicLength",
    "KeptState",
    "PolicyOption",
    "PolicyWord",
    "SvipLength",
    "applies",
    "build_policy",
    "check_costs",
    "check_policy",
    "default_policy",
    "load_costs",
    "parse_costs",
    "policy_names",
    "policy_word",
    "read_costs",
    "read_policy",
]
