"""What `specbench calibrate` found out of a target and its drafters: kept in the cache folder."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

from specbench.lengths.trees import StaticTree
from specbench.models.json_store import JsonStore
from specbench.specs.drafters import SelfForm
from specbench.specs.rules import RuleSpec, parse_rule


@dataclass(frozen=True)
class ChoiceKey:
    """What a choice holds for: a target by its fingerprint, in one dtype, on one kind of device."""

    fingerprint: str
    dtype: str
    device: str

    @property
    def name(self) -> str:
        """Of the file."""
        return f"{self.fingerprint}-{self.dtype}-{self.device}"


@dataclass(frozen=True)
class Choice:
    """A form of the target, and the figures it was chosen for.

    Attributes:
        target: The target's name.
        layers: How many decoder layers the target has.
        int8: Whether the drafter's linear layers are quantized.
        skip: The layers it leaves out, counted from 0, ascending.
        accepted: Share of one-token drafts that were the target's greedy choice, on prompts that had no part in the
            choice.
        tested: Number of those drafts.
        cost: c, the time of a drafter's pass over that of a target's pass with one token.
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

    @property
    def form(self) -> SelfForm:
        """As ``--drafter`` takes it."""
        return SelfForm(int8=self.int8, skip=tuple(sorted(set(self.skip))))


FORMS = JsonStore(
    "calibrations",
    Choice,
    "The stored calibration is",
    "Run `specbench calibrate` with this target, dtype and device.",
    lambda choice: (choice.int8 or bool(choice.skip)) and all(0 < i < choice.layers for i in choice.skip),
)
"""By the names of ``ChoiceKey``."""


def read_choice(key: ChoiceKey) -> Choice:
    """What was chosen for a target, see ``JsonStore.require``."""
    return FORMS.require(
        key.name, f"No calibration is stored for this target in {key.dtype} on {key.device}."
    )


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
        return circumstances(self.drafter, self.temperature, self.verification)


def circumstances(drafter: str, temperature: float, verification: str) -> str:
    """What a tree is chosen for, in words."""
    return f"{drafter} at temperature {temperature:g}" + (f" by {verification}" if verification else "")


def _is_tree(choice: TreeChoice) -> bool:
    shares = bool(choice.ranks) and min(choice.ranks) >= 0 and sum(choice.ranks) <= 100
    return shares and 1 <= choice.nodes <= 64 and choice.depth >= 1


TREES = JsonStore(
    "trees",
    TreeChoice,
    "The stored tree is",
    "Run `specbench calibrate --tree` with this target and drafter.",
    _is_tree,
)
"""By the names of ``TreeKey``."""


@dataclass(frozen=True)
class TokenCounts:
    """How often a target writes each token.

    A drafter's head may be cut to the tokens that the target writes most often (FR-Spec, Zhao et al. 2025, arXiv
    2502.14856; VocabTrim, Goel et al. 2025, arXiv 2506.22694).

    Attributes:
        target: Its name.
        ranked: The tokens that were seen, the most frequent first.
        counted: Number of tokens of its own outputs that were counted.
        held_out: Tokens of outputs that were not.
    """

    target: str
    ranked: tuple[int, ...]
    counted: int
    held_out: tuple[int, ...]

    def most_frequent(self, number: int, among: Collection[int]) -> list[int]:
        """So many ids, ascending. Where fewer were seen the lowest ids follow: merges come in the order of frequency.

        Args:
            number: How many.
            among: Those that can be taken.
        """
        seen = [token for token in dict.fromkeys(self.ranked) if token in among]
        rest = set(among).difference(seen)
        return sorted([*seen, *sorted(rest)][:number])

    def coverage(self, kept: Collection[int]) -> float:
        """Share of the tokens of other outputs that are among these."""
        kept = frozenset(kept)
        return sum(token in kept for token in self.held_out) / len(self.held_out)


COUNTS = JsonStore(
    "vocabularies",
    TokenCounts,
    "The stored counts are",
    "Run `specbench calibrate --vocab 16000` with this target.",
    lambda counts: bool(counts.held_out) and min((*counts.ranked, *counts.held_out)) >= 0,
)
"""By fingerprints of targets."""


def not_counted(target: str) -> str:
    """That the tokens of a target were not counted."""
    return f"The tokens that {target} writes were not counted yet."
