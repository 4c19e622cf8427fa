"""From the spec of a draft-length rule to the rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specbench.decoding.protocols import Policy
from specbench.decoding.request import DraftPolicy
from specbench.decoding.tree import Siblings
from specbench.lengths.auto import AutoLength
from specbench.lengths.auto_tree import AutoTree
from specbench.lengths.base import FixedLength, Rule
from specbench.lengths.entropies import EntropyBoundLength, EntropyGuidedLength, SvipLength
from specbench.lengths.outcomes import ConfidenceLength, HeuristicLength
from specbench.lengths.trees import DynamicTree, IndependentChains, StaticTree
from specbench.specs.rules import RuleSpec, parse_rule

_CLASSES: Mapping[str, Callable[..., Rule]] = {
    "auto": AutoLength,
    "fixed": FixedLength,
    "egag": EntropyGuidedLength,
    "confidence": ConfidenceLength,
    "entropy-bound": EntropyBoundLength,
    "svip": SvipLength,
    "heuristic": HeuristicLength,
}
_TREES: Mapping[str, Callable[..., Policy]] = {
    "auto-tree": AutoTree,
    "static-tree": StaticTree,
    "dynamic-tree": DynamicTree,
    "chains": IndependentChains,
}
"""By the words of ``specbench.specs.rules``."""


def build_policy(spec: str | RuleSpec, *, keep: bool = False, **options: Any) -> DraftPolicy:
    """Build a draft-length rule, with the siblings to verify beside its drafts.

    Args:
        spec: A rule's word, with options behind a colon or without: ``egag:scale=0.5,max=12``. The ``name`` of a rule
            is such a spec too.
        keep: Carry what it learns from one prompt to the next.
        options: Those of the rule (``specbench.specs.rules``); ``None`` and False leave one at its default, and what
            the spec says comes first. ``costs`` is what ``read_costs`` or ``parse_costs`` returns.

    Raises:
        UsageError: There is no such rule, it has no such option, or a value is outside its range.
    """
    spec = (parse_rule(spec) if isinstance(spec, str) else spec).with_options(options)
    taken = {spec.require(name).argument: value for name, value in spec.options.items()}
    verification = taken.pop("verification", None)
    if spec.kind.tree:
        return DraftPolicy(_TREES[spec.word](**taken), kept=keep, verification=verification)
    most = taken.pop("siblings", spec.siblings)
    rule = _CLASSES[spec.word](**taken)
    return DraftPolicy(
        rule,
        Siblings(most, rule.row_price),
        usual_siblings=spec.kind.siblings,
        kept=keep,
        verification=verification,
    )
