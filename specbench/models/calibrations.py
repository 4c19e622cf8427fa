"""Results of `specbench calibrate`, kept in the cache folder: self-drafting forms and trees."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from specbench.base.errors import SpecbenchError
from specbench.models.json_store import JsonStore
from specbench.policies import build_policy
from specbench.policies.trees import StaticTree
from specbench.specs.drafters import SelfForm
from specbench.specs.notation import Dashed
from specbench.specs.policies import PolicySpec, parse_policy

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter
    from specbench.decoding.sampling import Sampling
    from specbench.models.target import Target


@dataclass(frozen=True)
class Choice:
    """The chosen form of a self-drafting target, with the figures it was chosen for.

    Attributes:
        target: The target's name.
        layers: Number of the target's decoder layers.
        int8: Whether the drafter's linear layers are quantized.
        skip: The skipped layers, counted from 0, ascending.
        accepted: Acceptance rate of one-token drafts in greedy decoding, on held-out prompts.
        tested: Number of those drafts.
        cost: c, the time of a drafter's forward pass divided by that of the target with one token.
        gamma: The draft length with the highest predicted speedup.
        speedup: That speedup, over plain decoding.
    """

    target: str
    layers: int
    int8: bool
    skip: tuple[int, ...]
    accepted: float
    tested: int
    cost: float
    gamma: int
    speedup: float

    def __post_init__(self) -> None:
        if not (self.int8 or self.skip) or not all(0 < layer < self.layers for layer in self.skip):
            raise ValueError("no form of the target")

    @property
    def form(self) -> SelfForm:
        """The spec of this form, as ``--drafter`` takes it."""
        return SelfForm(int8=self.int8, skip=tuple(sorted(set(self.skip))))


FORMS = JsonStore(
    "calibrations",
    Choice,
    "The stored calibration is",
    "Run `specbench calibrate` with this target, dtype and device.",
)
"""By ``form_key``."""


def form_key(target: Target) -> str:
    """Return the key of a target's form: its weights, dtype and kind of device."""
    return f"{target.language_model.fingerprint}-{target.dtype}-{target.scorer.device.type}"


def calibrated_form(target: Target) -> SelfForm:
    """Return the form that was chosen for a target; for errors see ``JsonStore.require``."""
    missing = f"No calibration is stored for this target in {target.dtype} on {target.scorer.device.type}."
    return FORMS.require(form_key(target), missing).form


@dataclass(frozen=True)
class TreeKey:
    """The circumstances that a tree was calibrated for.

    Attributes:
        fingerprint, dtype, device: The target's weights, dtype and kind of device.
        drafter: The drafter's name.
        weights: Fingerprints of the drafter's models.
        temperature: The temperature, 0 for greedy decoding. Other sampling transforms are ignored.
        verification: The verification method; empty in greedy decoding, where all methods give the same.
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
        """The name of the tree's entry in ``TREES``."""
        rest = "\n".join([self.dtype, self.device, self.drafter, self.weights, f"{self.temperature:g}"])
        digest = hashlib.sha256(f"{rest}\n{self.verification}".encode()).hexdigest()[:12]
        return f"{self.fingerprint}-{digest}"


@dataclass(frozen=True)
class TreeChoice:
    """The chosen draft tree, with the figures it was chosen for.

    Attributes:
        target, drafter: Their names.
        temperature, verification: See ``TreeKey``.
        ranks: Percentage of nodes at which the candidate of each rank is accepted.
        tested: Number of those nodes.
        nodes, depth: Size of the tree with the highest predicted speedup.
        speedup: That speedup, over plain decoding.
    """

    target: str
    drafter: str
    temperature: float
    verification: str
    ranks: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]
    tested: int
    nodes: Annotated[int, Meta(ge=1, le=64)]
    depth: Annotated[int, Meta(ge=1)]
    speedup: float

    def __post_init__(self) -> None:
        if sum(self.ranks) > 100:
            raise ValueError("more than 100%")

    @property
    def policy(self) -> PolicySpec:
        """The draft policy with this tree, as ``--draft-policy`` takes it."""
        return parse_policy(StaticTree(self.nodes, self.depth, self.ranks).name)

    @property
    def circumstances(self) -> str:
        """The drafter, temperature and verification it was chosen for, as text."""
        return _circumstances(self)


def _circumstances(of: TreeKey | TreeChoice) -> str:
    method = f" by {of.verification}" if of.verification else ""
    return f"{of.drafter} at temperature {of.temperature:g}{method}"


TREES = JsonStore(
    "trees",
    TreeChoice,
    "The stored tree is",
    "Run `specbench calibrate --tree` with this target and drafter.",
)
"""By ``TreeKey.name``."""


def tree_key(
    target: Target, drafter: Drafter, weights: str, sampling: Sampling, policy: PolicySpec
) -> TreeKey:
    """Return the key of a drafter's tree; ``weights`` are the fingerprints of its models."""
    return TreeKey(
        target.language_model.fingerprint,
        target.dtype,
        target.scorer.device.type,
        drafter.name,
        weights,
        sampling.temperature,
        "" if sampling.greedy else build_policy(policy).method(drafter),
    )


def calibrated_tree(
    policy: PolicySpec, target: Target, drafter: Drafter, weights: str, sampling: Sampling
) -> tuple[PolicySpec, str | None]:
    """Fill in the options of a ``static-tree`` that are not given, from its calibration.

    These are the acceptance by rank, and the size of the tree if neither nodes nor depth is given.

    Args:
        policy: The requested draft policy.
        target, drafter, sampling: Target, drafter and sampling to decode with.
        weights: Fingerprints of the drafter's models; empty without any.

    Returns:
        The draft policy, and a note for the user if there is one.

    Raises:
        UsageError: The stored tree is damaged. RunError: It cannot be read.
    """
    if policy.word != "static-tree" or "ranks" in policy.options:
        return policy, None
    key = tree_key(target, drafter, weights, sampling, policy)
    choice = TREES.read(key.name)
    if choice is not None:
        found: dict[str, Any] = {"ranks": Dashed(choice.ranks)}
        if not policy.options.keys() & {"nodes", "depth"}:
            found |= {"nodes": choice.nodes, "depth": choice.depth}
        fitted = policy.with_options(found)
        return fitted, f"The tree is the one calibrated for {choice.circumstances}: {fitted}."
    same_target = TREES.names(f"{key.fingerprint}-")
    for name in dict.fromkeys([*same_target, *TREES.names()]):
        with suppress(SpecbenchError):  # another tree's damage is no matter here
            if (other := TREES.read(name)) is not None:
                end = "" if name in same_target else f" with {other.target}"
                return policy, (
                    f"A tree is calibrated for {other.circumstances}{end}, and none for {_circumstances(key)}, so"
                    f" {policy} assumes typical acceptance rates; `specbench calibrate --tree` finds a better tree."
                )
    return policy, None
