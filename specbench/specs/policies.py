"""Specs of draft policies: a word and its options, as in ``egag:scale=0.5,max=12``.

``parse_policy`` parses one and ``str`` writes it as results store it; ``specbench.policies`` builds the policy from it.
A class declares everything about a policy except how it decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from specbench.base.errors import UsageError, unknown
from specbench.specs.drafters import DrafterSpec
from specbench.specs.notation import Option, Spec, dashed, option
from specbench.specs.own_code import names_in, told

VerificationName = Literal["rejection", "block", "traversal", "naive", "recursive", "specinfer"]

VERIFICATIONS: tuple[VerificationName, ...] = get_args(VerificationName)


def verification_name(text: str) -> VerificationName:
    """Return a name as a verification method; raise ``ValueError`` if there is no such method."""
    if text not in VERIFICATIONS:
        raise ValueError(f"no verification: {text}")
    return text


LONGEST_DRAFT = 256
"""The longest draft, in tokens."""

_GAMMA = 5
"""The draft length where none is given."""

MOST_NODES = 64
"""The most nodes of a tree. Each node keeps a distribution over the vocabulary: 39 MB with 152,000 tokens."""


@dataclass(frozen=True, kw_only=True)
class PolicySpec(Spec):
    """A draft policy as ``--draft-policy`` takes it.

    Attributes:
        policy: The class that decides, as ``module:Class`` in ``specbench.policies``; it is made from the spec.
        needs_logits: Whether it uses the drafter's distributions, which n-gram and lookup lack.
        tree: Whether it drafts trees rather than chains.
    """

    policy: ClassVar[str]
    needs_logits: ClassVar[bool] = False
    tree: ClassVar[bool] = False

    verification: VerificationName | None = option(  # noqa: RUF009 - its type cannot change
        None,
        "verification=NAME",
        "verification method above temperature 0 (the one that accepts most draft tokens)",
        parse=verification_name,
        expected="verification method",
    )

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        verification, *own = super().options()
        return (*own, verification)

    @property
    def label(self) -> str:
        """Its name in tables."""
        return str(self)

    def with_gamma(self, gamma: int | None) -> PolicySpec:
        """Return the policy with the draft length of ``--gamma``, unless the spec has one already.

        Raises:
            UsageError: The policy takes none.
        """
        if gamma is None:
            return self
        takers = ", ".join(other.word for other in POLICIES if issubclass(other, TakesGamma))
        raise UsageError(f"The draft policy {self.word} has no option --gamma.", f"It belongs to {takers}.")

    @classmethod
    def applies(cls, drafter: DrafterSpec) -> bool:
        """Return whether it works with a drafter."""
        if len(drafter.parts) > 1:
            return cls is Fixed
        return drafter.trees if cls.tree else drafter.has_logits or not cls.needs_logits


@dataclass(frozen=True)
class TakesGamma(PolicySpec):
    """A policy whose draft length ``--gamma`` can give; ``gamma`` is ``None`` until that is known."""

    gamma: int | None = None

    def with_gamma(self, gamma: int | None) -> PolicySpec:
        return self if gamma is None or self.gamma is not None else replace(self, gamma=gamma)


def rank_shares(text: str) -> tuple[int, ...]:
    """Parse percentages with dashes in between, as in ``70-12-5-3``; raise ``ValueError`` for anything else."""
    shares = dashed(text)
    if not all(0 <= share <= 100 for share in shares) or sum(shares) > 100:
        raise ValueError("no percentages")
    return shares


def _whole(default: int | None, syntax: str, help_text: str, most: Any = LONGEST_DRAFT) -> Any:
    return option(default, syntax, help_text, least=1, most=most)


def _number(default: float, syntax: str, help_text: str, least: float = 0.0, most: float = 1.0) -> Any:
    return option(default, syntax, help_text, parse=float, expected="number", least=least, most=most)


def _most(default: int) -> Any:
    return _whole(default, "max=N", "maximum number of tokens drafted in a step")


@dataclass(frozen=True)
class Auto(PolicySpec, word="auto", policy="auto:AutoLength"):
    """Continues while one more draft token is expected to save more time than it costs, both measured while decoding.
    Nothing to tune.
    """

    gamma_max: int = _most(16)


@dataclass(frozen=True)
class Fixed(TakesGamma, word="fixed", policy="base:FixedLength"):
    """The same length in every step."""

    gamma: int | None = _whole(None, "gamma=N", "the length (5)")

    @property
    def gamma_max(self) -> int:
        return self.gamma or _GAMMA

    @property
    def rest(self) -> str:
        """What tells it from others of its length, as ``,verification=block``; usually nothing."""
        return replace(self, gamma=None).written("").replace(":", ",", 1)

    @property
    def label(self) -> str:
        return f"γ={self.gamma_max}{self.rest}"


@dataclass(frozen=True)
class Egag(PolicySpec, word="egag", policy="lengths:EntropyGuidedLength", needs_logits=True):
    """Entropy-guided: the less certain the drafter is at the start of a step, the shorter the draft."""

    gamma_min: int = _whole(1, "min=N", "length where the drafter is uncertain", lambda spec: spec.gamma_max)
    gamma_max: int = _whole(8, "max=N", "length where it is certain")
    ema_beta: float = _number(
        0.0, "beta=B", "weight of earlier steps in the average of the entropy, 0 for none", most=0.999
    )
    scale: float = _number(0.3, "scale=H", "normalized entropy that counts as uncertain", least=1e-6)


@dataclass(frozen=True)
class Confidence(PolicySpec, word="confidence", policy="lengths:ConfidenceLength"):
    """Stops after a token that the drafter gave little probability."""

    threshold: float = _number(0.4, "threshold=P", "the threshold")
    gamma_max: int = _most(20)


@dataclass(frozen=True)
class EntropyBound(PolicySpec, word="entropy-bound", policy="lengths:EntropyBoundLength", needs_logits=True):
    """AdaEDL: stops where a lower bound on the acceptance probability, computed from the entropy, is below a moving
    threshold.
    """

    threshold: float = _number(0.6, "lambda=L", "the threshold at the beginning")
    gamma_max: int = _most(20)


@dataclass(frozen=True)
class Svip(PolicySpec, word="svip", policy="lengths:SvipLength", needs_logits=True):
    """Stops after a token whose distribution had a high entropy."""

    threshold: float = _number(0.3, "threshold=H", "the threshold", 1e-6, 1e6)
    gamma_max: int = _most(40)


@dataclass(frozen=True)
class Heuristic(TakesGamma, word="heuristic", policy="lengths:HeuristicLength"):
    """Two tokens more when everything was accepted, one less otherwise."""

    gamma: int | None = _whole(None, "gamma=N", "length of the first draft (5)", lambda spec: spec.gamma_max)
    gamma_min: int = _whole(
        1, "min=N", "never shorter", lambda spec: min(spec.gamma or _GAMMA, spec.gamma_max)
    )
    gamma_max: int = _whole(40, "max=N", "never longer")

    @property
    def first(self) -> int:
        """The length of the first draft."""
        return self.gamma or min(_GAMMA, self.gamma_max)


@dataclass(frozen=True)
class StaticTree(PolicySpec, word="static-tree", policy="trees:StaticTreePolicy", tree=True):
    """The same tree in every step: the best one for the acceptance of candidates by their rank (Sequoia)."""

    nodes: int = _whole(12, "nodes=N", "most nodes", MOST_NODES)
    depth: int = _whole(6, "depth=N", "deepest branch", None)
    ranks: tuple[int, ...] = option(
        (70, 12, 5, 3),
        "ranks=N-N-...",
        "percentage of nodes at which the candidate of each rank is accepted",
        parse=rank_shares,
        expected="list of percentages such as 70-12-5-3",
    )


@dataclass(frozen=True)
class DynamicTree(PolicySpec, word="dynamic-tree", policy="trees:DynamicTreePolicy", tree=True):
    """Expands the drafter's most probable tokens at every depth, and verifies the best of all nodes (EAGLE-2)."""

    top_k: int = _whole(4, "top-k=K", "nodes expanded at every depth, and tokens drafted after each", None)
    nodes: int = _whole(12, "nodes=N", "most nodes", MOST_NODES)
    depth: int = _whole(6, "depth=N", "deepest branch", None)


POLICIES: tuple[type[PolicySpec], ...] = (
    Auto, Fixed, Egag, Confidence, EntropyBound, Svip, Heuristic, StaticTree, DynamicTree
)  # fmt: skip
"""All kinds, in the order of listings."""


@dataclass(frozen=True)
class OwnPolicy(PolicySpec, word="FILE.py"):
    """A draft policy of your own, such as ./mine.py:MyPolicy: a class in a file, which is made without arguments."""

    cls: str
    file: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.cls}"

    def make(self) -> Any:
        """Make a new one.

        Raises:
            UsageError: There is no such file or class.
            RunError: The file cannot be imported, or the class not be made.
        """
        kind = names_in(self.file).get(self.cls)
        if not isinstance(kind, type):
            raise UsageError(f"There is no class {self.cls!r} in {Path(self.file).name}.", "Check its name.")
        with told(f"The draft policy {self} cannot be made", kind, "__init__"):
            return kind()


def default_policy(*, greedy: bool, gamma: int | None = None) -> PolicySpec:
    """Return the default policy: ``auto``, or ``fixed`` with a γ or above temperature 0.

    ``auto`` depends on measured times. This does not change greedy outputs, but it changes the outputs of a seed.
    """
    return Auto() if greedy and gamma is None else Fixed()


def parse_policy(text: str) -> PolicySpec:
    """Parse a policy with its options.

    Raises:
        UsageError: There is no such policy or option, or a value has the wrong type or is outside its range.
    """
    word, _, name = text.strip().rpartition(":")
    if word.endswith(".py"):
        return OwnPolicy(cls=name, file=word)
    word = text.partition(":")[0].strip()
    kind = next((policy for policy in POLICIES if policy.word == word), None)
    if kind is None:
        raise unknown("draft policy", word, (each.word for each in POLICIES))
    return kind.read(text)
