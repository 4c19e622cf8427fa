"""Specs of draft policies: a word and its options, as in ``egag:scale=0.5,max=12``.

``parse_policy`` parses one and ``str`` writes it as results store it; ``specbench.policies`` builds the policy from it
and checks the ranges of its options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specbench.base.errors import UsageError
from specbench.specs.drafters import DrafterSpec
from specbench.specs.notation import Dashed, Option, dashed, join_spec, read_options, split_spec
from specbench.specs.verification import verification_name


@dataclass(frozen=True)
class PolicyKind:
    """A kind of draft policy.

    Attributes:
        word: Its name.
        summary: Description in a sentence.
        policy: Its class in ``specbench.policies``, as ``module:Class``.
        own: Its own options, named as the class's arguments.
        needs_logits: Whether it uses the drafter's distributions, which n-gram and lookup lack.
        tree: Whether it drafts trees rather than chains.
    """

    word: str
    summary: str
    policy: str
    own: tuple[Option, ...]
    needs_logits: bool = False
    tree: bool = False

    @property
    def options(self) -> tuple[Option, ...]:
        """All its options."""
        return (*self.own, _VERIFICATION)

    def takes(self, name: str) -> bool:
        """Return whether it has an option of this name."""
        return any(each.name == name for each in self.options)


_VERIFICATION = Option(
    "verification=NAME",
    "verification method above temperature 0 (the one that accepts most draft tokens)",
    parse=verification_name,
    expected="verification method",
    name="verification",
)


def rank_shares(text: str) -> Dashed:
    """Parse percentages with dashes in between, as in ``70-12-5-3``; raise ``ValueError`` for anything else."""
    shares = dashed(text)
    if not all(0 <= share <= 100 for share in shares) or sum(shares) > 100:
        raise ValueError("no percentages")
    return shares


LONGEST_DRAFT = 256
"""The longest draft, in tokens."""

MOST_NODES = 64
"""The most nodes of a tree. Each node keeps a distribution over the vocabulary: 39 MB with 152,000 tokens."""


def _whole(name: str, written: str, default: int, meaning: str, most: Any = None) -> Option:
    return Option(written, f"{meaning} ({default})", default, least=1, most=most, name=name)


def _number(
    name: str, written: str, default: float, meaning: str, least: float = 0.0, most: float = 1.0
) -> Option:
    return Option(
        written, f"{meaning} ({default:g})", default, parse=float, expected="number", least=least, most=most,
        name=name,
    )  # fmt: skip


def _most(default: int) -> Option:
    return _whole("gamma_max", "max=N", default, "maximum number of tokens drafted in a step", LONGEST_DRAFT)


def _nodes(default: int) -> Option:
    return _whole("nodes", "nodes=N", default, "most nodes", MOST_NODES)


_DEPTH = _whole("depth", "depth=N", 6, "deepest branch")

POLICIES: tuple[PolicyKind, ...] = (
    PolicyKind(
        "auto",
        "Continues while one more draft token is expected to save more time than it costs, both measured while"
        " decoding. Nothing to tune.",
        "auto:AutoLength",
        (_most(16),),
    ),
    PolicyKind(
        "fixed",
        "The same length in every step.",
        "base:FixedLength",
        (Option("gamma=N", "the length (5)", least=1, most=LONGEST_DRAFT, name="gamma"),),
    ),
    PolicyKind(
        "egag",
        "Entropy-guided: the less certain the drafter is at the start of a step, the shorter the draft.",
        "entropies:EntropyGuidedLength",
        (
            _whole(
                "gamma_min",
                "min=N",
                1,
                "length where the drafter is uncertain",
                lambda values: values.gamma_max,
            ),
            _whole("gamma_max", "max=N", 8, "length where it is certain", LONGEST_DRAFT),
            _number(
                "ema_beta",
                "beta=B",
                0.0,
                "weight of earlier steps in the average of the entropy, 0 for none",
                most=0.999,
            ),
            _number("scale", "scale=H", 0.3, "normalized entropy that counts as uncertain", least=1e-6),
        ),
        needs_logits=True,
    ),
    PolicyKind(
        "confidence",
        "Stops after a token that the drafter gave little probability.",
        "outcomes:ConfidenceLength",
        (
            _number("threshold", "threshold=P", 0.4, "the threshold"),
            Option("adapt", "adapt the threshold to acceptance (no)", False, name="adapt"),
            _most(20),
        ),
    ),
    PolicyKind(
        "confidence-head",
        "Stops where a DSpark head predicts that the draft will hardly be accepted that far.",
        "outcomes:ConfidenceHeadLength",
        (
            _number("threshold", "threshold=P", 0.2, "the least predicted probability that all is accepted"),
            _most(16),
        ),
        needs_logits=True,
    ),
    PolicyKind(
        "entropy-bound",
        "AdaEDL: stops where a lower bound on the acceptance probability, computed from the entropy, is below a"
        " moving threshold.",
        "entropies:EntropyBoundLength",
        (_number("threshold", "lambda=L", 0.6, "the threshold at the beginning"), _most(20)),
        needs_logits=True,
    ),
    PolicyKind(
        "svip",
        "Stops after a token whose distribution had a high entropy.",
        "entropies:SvipLength",
        (_number("threshold", "threshold=H", 0.3, "the threshold", 1e-6, 1e6), _most(40)),
        needs_logits=True,
    ),
    PolicyKind(
        "heuristic",
        "Two tokens more when everything was accepted, one less otherwise.",
        "outcomes:HeuristicLength",
        (
            _whole("gamma", "gamma=N", 5, "length of the first draft", lambda values: values.gamma_max),
            _whole("gamma_min", "min=N", 1, "never shorter", lambda values: values.gamma),
            _whole("gamma_max", "max=N", 40, "never longer", LONGEST_DRAFT),
        ),
    ),
    PolicyKind(
        "static-tree",
        "The same tree in every step: the best one for the acceptance of candidates by their rank (Sequoia).",
        "trees:StaticTree",
        (
            _nodes(12),
            _DEPTH,
            Option(
                "ranks=N-N-...",
                "percentage of nodes at which the candidate of each rank is accepted (70-12-5-3)",
                Dashed((70, 12, 5, 3)),
                parse=rank_shares,
                expected="list of percentages such as 70-12-5-3",
                name="ranks",
            ),
        ),
        needs_logits=True,
        tree=True,
    ),
    PolicyKind(
        "dynamic-tree",
        "Expands the drafter's most probable tokens at every depth, and verifies the best of all nodes (EAGLE-2).",
        "trees:DynamicTree",
        (
            _whole("top_k", "top-k=K", 4, "nodes expanded at every depth, and tokens drafted after each"),
            _nodes(12),
            _DEPTH,
        ),
        needs_logits=True,
        tree=True,
    ),
)
"""In the order in which listings have them."""


@dataclass(frozen=True)
class PolicySpec:
    """A draft policy as ``--draft-policy`` takes it.

    Attributes:
        kind: Its kind.
        options: The given options by their Python names; their ranges are checked when the policy is built.
    """

    kind: PolicyKind
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = [(each, self.options[each.name]) for each in self.kind.options if each.name in self.options]
        return join_spec(self.word, [each.write(value) for each, value in given if value != each.default])

    @property
    def word(self) -> str:
        return self.kind.word

    @property
    def nodes(self) -> int:
        """The maximum number of nodes of its trees; 0 for chains."""
        return self._value("nodes") or 0

    @property
    def depth(self) -> int | None:
        """The maximum depth of its trees; ``None`` for no limit, and for chains."""
        depth = self._value("depth")
        return None if depth is None else min(depth, self.nodes)

    def _value(self, name: str) -> int | None:
        """Return an option's value or default; ``None`` if there is no such option."""
        return next(
            (self.options.get(name, each.default) for each in self.kind.options if each.name == name), None
        )

    def takes(self, name: str) -> bool:
        """Return whether it has an option of this name."""
        return self.kind.takes(name)

    def require(self, name: str) -> None:
        """Raise ``UsageError`` for an option it does not have."""
        if not self.takes(name):
            takers = ", ".join(other.word for other in POLICIES if other.takes(name))
            raise UsageError(
                f"The draft policy {self.word} has no option --{name.replace('_', '-')}.",
                f"It belongs to {takers}." if takers else "See docs/draft-policies.md for its options.",
            )

    def with_options(self, options: Mapping[str, Any]) -> PolicySpec:
        """Return the policy with additional options; those already given are not replaced. ``None`` and False are
        ignored.

        Raises:
            UsageError: The policy has no such option.
        """
        given = {name: value for name, value in options.items() if value is not None and value is not False}
        for name in given:
            self.require(name)
        return replace(self, options={**given, **self.options})

    def applies(self, drafter: DrafterSpec) -> bool:
        """Return whether it works with a drafter."""
        if len(drafter.parts) > 1:
            return self.word == "fixed"
        return drafter.trees if self.kind.tree else drafter.has_logits or not self.kind.needs_logits

    def check(self, drafter: DrafterSpec) -> None:
        """Raise ``UsageError`` for a drafter it does not work with."""
        if len(drafter.parts) > 1 and not self.applies(drafter):
            raise UsageError(
                f"Several drafters draft chains of one fixed length, but {self.word} decides the length while"
                f" drafting.",
                "Give --gamma N.",
            )
        if self.kind.tree and not drafter.trees:
            raise UsageError(
                f"The drafter {drafter} drafts only chains, but {self.word} needs trees.",
                "Choose suffix, self:... or a model, or another draft policy.",
            )
        if not self.applies(drafter):
            others = ", ".join(policy.word for policy in POLICIES if PolicySpec(policy).applies(drafter))
            raise UsageError(
                f"The draft policy {self.word} reads the drafter's distribution, and {drafter.word} has none.",
                f"Choose {others}.",
            )


def policy_words() -> tuple[str, ...]:
    """Return the names of all policies."""
    return tuple(policy.word for policy in POLICIES)


def default_policy(*, greedy: bool, gamma: int | None = None) -> PolicySpec:
    """Return the default policy: ``auto``, or ``fixed`` with a γ or above temperature 0.

    ``auto`` depends on measured times. This does not change greedy outputs, but it changes the outputs of a seed.
    """
    return parse_policy("auto" if greedy and gamma is None else "fixed")


def parse_policy(text: str) -> PolicySpec:
    """Parse a policy with its options; ranges are not checked yet.

    Raises:
        UsageError: There is no such policy or option, or a value has the wrong type.
    """
    word = text.partition(":")[0].strip()
    kind = next((policy for policy in POLICIES if policy.word == word), None)
    if kind is None:
        raise UsageError(f"There is no draft policy {word!r}.", f"Choose {', '.join(policy_words())}.")
    return PolicySpec(kind, read_options(word, split_spec(text)[1], kind.options))
