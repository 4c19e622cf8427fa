"""From the spec of a draft policy to the policy."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from specbench.decoding.request import DraftPlan
from specbench.policies.costs import CostTable
from specbench.specs.policies import PolicySpec, parse_policy


def build_policy(spec: str | PolicySpec, costs: CostTable | None = None, **options: Any) -> DraftPlan:
    """Build a draft policy, with what else a request needs to draft by it.

    Args:
        spec: A policy's word and its options, as in ``egag:scale=0.5,max=12``; the ``name`` of a policy is one too.
        costs: What ``auto`` decides by in place of measured times (``GivenCosts``).
        options: Those of the policy (``specbench.specs.policies``); ``None`` and False leave one at its default, and
            what the spec says comes first.

    Raises:
        UsageError: There is no such policy, it has no such option, or a value is outside its range.
    """
    spec = (parse_policy(spec) if isinstance(spec, str) else spec).with_options(options)
    taken = dict(spec.options) if costs is None else {**spec.options, "costs": costs}
    module, _, name = spec.kind.policy.partition(":")
    made: Any = getattr(import_module(f"specbench.policies.{module}"), name)
    verification = taken.pop("verification", None)
    return DraftPlan(made(**taken), verification=verification)
