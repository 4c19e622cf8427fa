"""The tree that `specbench calibrate --tree` found best for a drafter, where a rule leaves its tree open."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from specbench.base.errors import SpecbenchError
from specbench.lengths import build_policy
from specbench.models.calibrations import TREES, TreeKey, circumstances
from specbench.specs.notation import Dashed
from specbench.specs.rules import RuleSpec

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter
    from specbench.decoding.sampling import Sampling
    from specbench.models.target import Target


def tree_key(target: Target, drafter: Drafter, weights: str, sampling: Sampling, rule: RuleSpec) -> TreeKey:
    """Under which the tree is kept for a drafter, with such weights, and a rule's way to verify."""
    verification = "" if sampling.greedy else build_policy(rule).method(drafter)
    return TreeKey(
        target.language_model.fingerprint,
        target.dtype,
        target.scorer.device.type,
        drafter.name,
        weights,
        sampling.temperature,
        verification,
    )


def calibrated_tree(
    rule: RuleSpec, target: Target, drafter: Drafter, weights: str, sampling: Sampling
) -> tuple[RuleSpec, str | None]:
    """A rule with what was calibrated where it leaves that open, and a sentence about it if there is anything to say.

    Only ``static-tree`` leaves anything open: its ranks; and with them nodes and depth, if it names neither.

    Args:
        rule: What is asked for.
        target, drafter, sampling: What decodes.
        weights: Fingerprints of the drafter's models; empty without any.

    Raises:
        UsageError: The stored tree is damaged. RunError: It cannot be read.
    """
    if rule.word != "static-tree" or "ranks" in rule.options:
        return rule, None
    key = tree_key(target, drafter, weights, sampling, rule)
    choice = TREES.read(key.name)
    if choice is not None:
        found: dict[str, Any] = {"ranks": Dashed(choice.ranks)}
        if not rule.options.keys() & {"nodes", "depth"}:
            found |= {"nodes": choice.nodes, "depth": choice.depth}
        fitted = rule.with_options(found)
        return fitted, f"The tree is the one calibrated for {choice.circumstances}: {fitted}."
    others = _others(key)
    if not others:
        return rule, None
    wanted = circumstances(drafter.name, key.temperature, key.verification)
    return rule, (
        f"A tree is calibrated for {others[0]}, and none for {wanted}, so that {rule} goes by usual figures;"
        " `specbench calibrate --tree` finds a better one."
    )


def _others(key: TreeKey) -> list[str]:
    """For what else trees are calibrated, those of the same target first; what is damaged is passed over."""
    mine, found = TREES.names(f"{key.fingerprint}-"), []
    for name in dict.fromkeys([*mine, *TREES.names()]):
        with suppress(SpecbenchError):
            choice = TREES.read(name)
            if choice is not None:
                end = "" if name in mine else f" with {choice.target}"
                found.append(choice.circumstances + end)
    return found
