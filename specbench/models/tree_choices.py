"""Which tree is best for a drafter, as `specbench calibrate --tree` found out: kept in the cache folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from specbench.errors import SpecbenchError
from specbench.lengths import build_policy
from specbench.lengths.trees import StaticTree
from specbench.models.shelf import Shelf
from specbench.specs.notation import Dashed
from specbench.specs.rules import RuleSpec, parse_rule

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter
    from specbench.decoding.sampling import Sampling
    from specbench.models.prepare import Target


@dataclass(frozen=True)
class TreeKey:
    """What a tree holds for.

    Attributes:
        fingerprint, dtype, device: Of the target: its weights, in what they are, and the kind of device.
        drafter: Its name.
        weights: Fingerprints of its models.
        temperature: 0 for greedy decoding. Of the transforms no other counts.
        verification: How drafts are verified; empty in greedy decoding, where all ways are the same.
    """

    fingerprint: str
    dtype: str
    device: str
    drafter: str
    weights: str
    temperature: float
    verification: str

    @property
    def name(self) -> str:
        """Of the file."""
        rest = "\n".join([self.dtype, self.device, self.drafter, self.weights, f"{self.temperature:g}"])
        digest = hashlib.sha256(f"{rest}\n{self.verification}".encode()).hexdigest()[:12]
        return f"{self.fingerprint}-{digest}"


@dataclass(frozen=True)
class TreeChoice:
    """A tree, and what it was chosen for.

    Attributes:
        target, drafter: Their names.
        temperature, verification: See ``TreeKey``.
        ranks: By rank, how many of a hundred nodes have that candidate kept.
        tested: At how many nodes that was counted.
        nodes, depth: With the highest predicted speedup.
        speedup: That speedup, over plain decoding.
    """

    target: str
    drafter: str
    temperature: float
    verification: str
    ranks: tuple[int, ...]
    tested: int
    nodes: int
    depth: int
    speedup: float

    @property
    def rule(self) -> RuleSpec:
        """As ``--length-policy`` takes it."""
        return parse_rule(StaticTree(self.nodes, self.depth, self.ranks).name)

    @property
    def circumstances(self) -> str:
        """What it was chosen for, in words."""
        return f"{self.drafter} at {_circumstances(self.temperature, self.verification)}"


def _circumstances(temperature: float, verification: str) -> str:
    return f"temperature {temperature:g}" + (f" by {verification}" if verification else "")


def _parse(data: Mapping[str, Any]) -> TreeChoice | None:
    values: dict[str, Any] = {field.name: data.get(field.name) for field in fields(TreeChoice)}
    if not (
        all(isinstance(values[name], str) for name in ("target", "drafter", "verification"))
        and all(type(values[name]) is int for name in ("tested", "nodes", "depth"))
        and all(type(values[name]) in (int, float) for name in ("temperature", "speedup"))
        and isinstance(values["ranks"], list)
        and all(type(share) is int and 0 <= share <= 100 for share in values["ranks"])
    ):
        return None
    values["ranks"] = tuple(values["ranks"])
    choice = TreeChoice(**values)
    sound = choice.ranks and sum(choice.ranks) <= 100 and 1 <= choice.nodes <= 64 and choice.depth >= 1
    return choice if sound else None


_SHELF = Shelf(
    "trees", "The stored tree is", "Run `specbench calibrate --tree` with this target and drafter.", _parse
)


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


def read_tree(key: TreeKey) -> TreeChoice | None:
    """See ``Shelf.read``."""
    return _SHELF.read(key.name)


def write_tree(key: TreeKey, choice: TreeChoice) -> None:
    """See ``Shelf.write``."""
    _SHELF.write(key.name, choice)


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
    choice = read_tree(key)
    if choice is not None:
        found: dict[str, Any] = {"ranks": Dashed(choice.ranks)}
        if not rule.options.keys() & {"nodes", "depth"}:
            found |= {"nodes": choice.nodes, "depth": choice.depth}
        fitted = rule.with_options(found)
        return fitted, f"The tree is the one calibrated for {choice.circumstances}: {fitted}."
    others = _others(key)
    if not others:
        return rule, None
    wanted = f"{drafter.name} at {_circumstances(key.temperature, key.verification)}"
    return rule, (
        f"A tree is calibrated for {others[0]}, and none for {wanted}, so that {rule} goes by usual figures;"
        " `specbench calibrate --tree` finds a better one."
    )


def _others(key: TreeKey) -> list[str]:
    """For what else trees are calibrated, those of the same target first; what is damaged is passed over."""
    mine, found = _SHELF.names(f"{key.fingerprint}-"), []
    for name in dict.fromkeys([*mine, *_SHELF.names()]):
        with suppress(SpecbenchError):
            choice = _SHELF.read(name)
            if choice is not None:
                end = "" if name in mine else f" with {choice.target}"
                found.append(choice.circumstances + end)
    return found
