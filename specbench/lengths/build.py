"""From the spec of a draft-length rule to the rule."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from specbench.decoding.request import DraftPolicy
from specbench.decoding.tree import Siblings
from specbench.lengths.base import Rule
from specbench.specs.rules import RuleSpec, parse_rule


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
    taken = dict(spec.options)
    module, _, name = spec.kind.policy.partition(":")
    made: Any = getattr(import_module(f"specbench.lengths.{module}"), name)
    verification = taken.pop("verification", None)
    if spec.kind.tree:
        return DraftPolicy(made(**taken), kept=keep, verification=verification)
    most = taken.pop("siblings", spec.siblings)
    rule: Rule = made(**taken)
    return DraftPolicy(
        rule,
        Siblings(most, rule.row_price),
        usual_siblings=spec.kind.siblings,
        kept=keep,
        verification=verification,
    )
