"""From the spec of a draft policy to the policy."""

from __future__ import annotations

from importlib import import_module

from specbench.decoding.protocols import DraftPolicy
from specbench.specs.policies import PolicySpec, parse_policy


def build_policy(spec: str | PolicySpec) -> DraftPolicy:
    """Build a draft policy.

    Args:
        spec: A policy's word and its options, as in ``egag:scale=0.5,max=12``; the ``name`` of a policy is one too.

    Raises:
        UsageError: There is no such policy, it has no such option, or a value is outside its range.
    """
    spec = parse_policy(spec) if isinstance(spec, str) else spec
    module, _, name = spec.policy.partition(":")
    return getattr(import_module(f"specbench.policies.{module}"), name)(spec)  # type: ignore[no-any-return]
