"""Draft policies: how many tokens are drafted in a step, and in which shape (docs/draft-policies.md)."""

from specbench.policies.base import FixedLength, build_policy

__all__ = ["FixedLength", "build_policy"]
