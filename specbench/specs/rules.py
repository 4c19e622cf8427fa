"""Draft-length rules as the command line names them: a word and its options, as in ``egag:scale=0.5,max=12``.

``parse_rule`` reads one, once, and ``str`` writes it again as results call it. What drafts by it is built of it in
``specbench.lengths``, which checks the ranges of its options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specbench.errors import UsageError
from specbench.specs.drafters import DrafterSpec
from specbench.specs.notation import Dashed, dashed, join_spec, split_spec
from specbench.specs.verification import verification_name


@dataclass(frozen=True)
class RuleOption:
    """An option of a rule.

    Attributes:
        name: In Python; with dashes, on the command line.
        key: Behind the colon of a rule, and in its name; ``None`` if it cannot stand there.
        argument: Of the rule's class.
        kind: What its value is made with.
        default: What a rule's name leaves out; ``None`` if it always says it.
        meaning: What it means, with its default.
    """

    name: str
    key: str | None
    argument: str
    kind: Callable[[Any], Any]
    default: object
    meaning: str


@dataclass(frozen=True)
class RuleWord:
    """A word that ``--length-policy`` takes, for help and listings.

    Attributes:
        word: The rule's name.
        summary: What it does, in a sentence.
        options: What it takes.
        needs_logits: Whether it reads the drafter's distributions, which n-gram and lookup have none of.
        siblings: How many siblings it has verified if nothing is said.
        tree: Whether it decides the shape of trees, and not the length of chains.
    """

    word: str
    summary: str
    options: tuple[RuleOption, ...]
    needs_logits: bool
    siblings: int = 0
    tree: bool = False

    def option(self, name: str) -> RuleOption | None:
        """The option of that name."""
        return next((option for option in self.options if option.name == name), None)


_SIBLINGS = RuleOption(
    "siblings",
    "siblings",
    "siblings",
    int,
    None,
    "most alternatives verified beside a draft in greedy decoding (auto: 8, others: 0)",
)


_VERIFICATION = RuleOption(
    "verification",
    "verification",
    "verification",
    verification_name,
    None,
    "how drafts are verified above temperature 0 (what applies and keeps most)",
)


def rank_shares(text: str) -> Dashed:
    """Percentages with dashes in between, as in ``70-12-5-3``.

    Raises:
        ValueError: They are something else, or more than 100 together.
    """
    shares = dashed(text)
    if not all(0 <= share <= 100 for share in shares) or sum(shares) > 100:
        raise ValueError("no percentages")
    return shares


_COSTS = RuleOption("costs", None, "costs", str, None, "a file with costs to use instead of measuring them")


def _nodes(default: int) -> RuleOption:
    return RuleOption("nodes", "nodes", "nodes", int, default, f"most nodes ({default})")


def _most(default: int) -> RuleOption:
    return RuleOption(
        "gamma_max", "max", "gamma_max", int, default, f"most tokens drafted in a step ({default})"
    )


_WORDS: tuple[RuleWord, ...] = (
    RuleWord(
        "auto",
        "Goes on as long as one more draft is likely to pay for its time, measured as the run goes. Nothing to tune.",
        (_most(16), _COSTS),
        False,
        siblings=8,
    ),
    RuleWord(
        "fixed",
        "The same length in every step.",
        (RuleOption("gamma", "gamma", "gamma", int, None, "the length (5)"),),
        False,
    ),
    RuleWord(
        "egag",
        "Entropy-guided: the less certain the drafter is at the start of a step, the shorter the draft.",
        (
            RuleOption("gamma_min", "min", "gamma_min", int, 1, "length where the drafter is uncertain (1)"),
            RuleOption("gamma_max", "max", "gamma_max", int, 8, "length where it is certain (8)"),
            RuleOption(
                "egag_ema_beta",
                "beta",
                "ema_beta",
                float,
                0.0,
                "weight of earlier steps in the average of the entropy, 0 for none (0)",
            ),
            RuleOption(
                "egag_scale",
                "scale",
                "scale",
                float,
                0.3,
                "normalised entropy that counts as uncertain (0.3)",
            ),
        ),
        True,
    ),
    RuleWord(
        "confidence",
        "Stops behind a token that the drafter gave little probability.",
        (
            RuleOption("confidence", "threshold", "threshold", float, 0.4, "the threshold (0.4)"),
            RuleOption(
                "adapt_confidence",
                "adapt",
                "adapt",
                bool,
                False,
                "move the threshold by what was accepted (no)",
            ),
            _most(20),
        ),
        False,
    ),
    RuleWord(
        "entropy-bound",
        "AdaEDL: stops where a bound on the chance of acceptance, from the entropy, falls below a moving threshold.",
        (
            RuleOption(
                "entropy_lambda", "lambda", "threshold", float, 0.6, "the threshold at the beginning (0.6)"
            ),
            _most(20),
        ),
        True,
    ),
    RuleWord(
        "svip",
        "Stops behind a token whose distribution had a high entropy.",
        (
            RuleOption("svip_threshold", "threshold", "threshold", float, 0.3, "the threshold (0.3)"),
            _most(40),
        ),
        True,
    ),
    RuleWord(
        "heuristic",
        "Two tokens more when everything was accepted, one less otherwise.",
        (
            RuleOption("gamma", "gamma", "gamma", int, 5, "length of the first draft (5)"),
            RuleOption("gamma_min", "min", "gamma_min", int, 1, "never shorter (1)"),
            RuleOption("gamma_max", "max", "gamma_max", int, 40, "never longer (40)"),
        ),
        False,
    ),
    RuleWord(
        "auto-tree",
        "A tree that grows as long as one more node is likely to pay for its row, and a depth for its pass.",
        (_nodes(16), _COSTS),
        True,
        tree=True,
    ),
    RuleWord(
        "static-tree",
        "One tree in every step: the best for what calibration measured of this drafter (Sequoia).",
        (
            _nodes(12),
            RuleOption("depth", "depth", "depth", int, 6, "deepest branch (6)"),
            RuleOption(
                "ranks",
                "ranks",
                "ranks",
                rank_shares,
                Dashed((70, 12, 5, 3)),
                "by rank, the percentage of nodes at which that candidate is kept (70-12-5-3)",
            ),
        ),
        True,
        tree=True,
    ),
    RuleWord(
        "dynamic-tree",
        "The drafter's likeliest tokens at every depth, and the best of all verified (EAGLE-2).",
        (
            RuleOption(
                "tree_top_k", "top-k", "top_k", int, 4, "nodes read at every depth, tokens behind each (4)"
            ),
            _nodes(12),
            RuleOption("depth", "depth", "depth", int, 6, "deepest branch (6)"),
        ),
        True,
        tree=True,
    ),
    RuleWord(
        "chains",
        "Several chains drawn independently of each other; equal beginnings share their rows (SpecInfer).",
        (
            RuleOption("chains", "k", "chains", int, 4, "how many (4)"),
            RuleOption("length", "length", "length", int, 4, "tokens of each (4)"),
        ),
        True,
        tree=True,
    ),
)
RULES = tuple(
    replace(
        word,
        options=(
            *word.options,
            *(() if word.tree else (replace(_SIBLINGS, default=word.siblings),)),
            _VERIFICATION,
        ),
    )
    for word in _WORDS
)
"""In the order in which listings have them."""


@dataclass(frozen=True)
class RuleSpec:
    """What ``--length-policy`` asks for.

    Attributes:
        kind: Which rule.
        options: What is said of it, by the options' names in Python. Their ranges are checked when it is built.
    """

    kind: RuleWord
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = {each: self.options[each.name] for each in self.kind.options if each.name in self.options}
        items = [(each.key, value) for each, value in given.items() if each.key and value != each.default]
        return join_spec(self.word, [key if value is True else f"{key}={value}" for key, value in items])

    @property
    def word(self) -> str:
        return self.kind.word

    @property
    def siblings(self) -> int:
        """The most alternatives verified beside a draft."""
        return int(self.options.get("siblings", self.kind.siblings))

    @property
    def nodes(self) -> int:
        """The most nodes of its trees; 0 where it drafts chains."""
        if not self.kind.tree:
            return 0
        said = self._said
        return int(said["nodes"] if "nodes" in said else said["chains"] * said["length"])

    @property
    def depth(self) -> int | None:
        """The deepest branch that its trees may have; ``None`` where it says nothing of it, or drafts chains."""
        said = self._said
        depth = said.get("depth", said.get("length"))
        return None if depth is None else min(int(depth), self.nodes)

    @property
    def _said(self) -> dict[str, Any]:
        """Its options with their defaults."""
        return {each.name: self.options.get(each.name, each.default) for each in self.kind.options}

    def takes(self, name: str) -> bool:
        """Whether it has an option of that name."""
        return self.kind.option(name) is not None

    def require(self, name: str) -> RuleOption:
        """The option of that name.

        Raises:
            UsageError: It has none.
        """
        option = self.kind.option(name)
        if option is None:
            takers = ", ".join(other.word for other in RULES if other.option(name))
            raise UsageError(
                f"The draft-length rule {self.word} has no option --{name.replace('_', '-')}.",
                f"It belongs to {takers}." if takers else "See docs/lengths.md for its options.",
            )
        return option

    def with_options(self, options: Mapping[str, Any]) -> RuleSpec:
        """The same with more options; ``None`` and False stand for none, and what it says already comes first.

        Raises:
            UsageError: It has no such option.
        """
        given = {name: value for name, value in options.items() if value is not None and value is not False}
        for name in given:
            self.require(name)
        return replace(self, options={**given, **self.options})

    def applies(self, drafter: DrafterSpec) -> bool:
        """Whether it has something to read with a drafter, and that drafts what it asks for."""
        if len(drafter.parts) > 1:
            return self.word == "fixed"
        return drafter.trees if self.kind.tree else drafter.has_logits or not self.kind.needs_logits

    def check(self, drafter: DrafterSpec) -> None:
        """Refuse a drafter that it has nothing to read of.

        Raises:
            UsageError: It reads distributions and the drafter has none.
        """
        if len(drafter.parts) > 1 and not self.applies(drafter):
            raise UsageError(
                f"Several drafters draft chains of one length, and {self.word} decides as a draft goes.",
                "Give --gamma N.",
            )
        if self.kind.tree and not drafter.trees:
            raise UsageError(
                f"The drafter {drafter} drafts chains only, and {self.word} asks for trees.",
                "Choose suffix, recycle, self:... or a model, or another draft-length rule.",
            )
        if not self.applies(drafter):
            others = ", ".join(rule.word for rule in RULES if RuleSpec(rule).applies(drafter))
            raise UsageError(
                f"The draft-length rule {self.word} reads the drafter's distribution, and {drafter.word} has none.",
                f"Choose {others}.",
            )


def rule_words() -> tuple[str, ...]:
    """The words of all rules."""
    return tuple(rule.word for rule in RULES)


def default_rule(*, greedy: bool, gamma: int | None = None) -> RuleSpec:
    """The rule where none is asked for.

    ``auto`` goes by clocks, which changes no output in greedy decoding; a sampled one is to be the same whenever its
    seed is, so there it is ``fixed``, and where a γ is given.
    """
    return parse_rule("auto" if greedy and gamma is None else "fixed")


def parse_rule(text: str) -> RuleSpec:
    """A rule and the options behind its colon; their ranges are not checked yet.

    Raises:
        UsageError: There is no such rule, it has no such option, or a value is of another kind.
    """
    word = text.partition(":")[0].strip()
    kind = next((rule for rule in RULES if rule.word == word), None)
    if kind is None:
        raise UsageError(f"There is no draft-length rule {word!r}.", f"Choose {', '.join(rule_words())}.")
    options = {}
    for key, value in split_spec(text)[1].items():
        option = next((option for option in kind.options if option.key == key), None)
        if option is None:
            raise UsageError(f"The draft-length rule {kind.word} has no option {key!r}.", _hint(kind))
        options[option.name] = _value(value, option, kind)
    return RuleSpec(kind, options)


def parse_tree(text: str) -> RuleSpec | int:
    """What ``--tree`` means: a rule that decides the shape of trees, or how many siblings stand beside chains.

    Raises:
        UsageError: There is no such tree, or no such option of it.
    """
    word, given = split_spec(text)
    trees = {kind.word.removesuffix("-tree"): kind.word for kind in RULES if kind.tree}
    if word in trees:
        return parse_rule(text.replace(word, trees[word], 1))
    if word == "chain" and not given:
        return 0
    if word == "siblings" and given.keys() <= {"nodes"}:
        nodes = replace(_SIBLINGS, key="nodes")
        beside = replace(RULES[0], word=word, options=(nodes,))  # for messages
        return int(_value(given.get("nodes", "8"), nodes, beside))
    raise UsageError(
        f"There is no tree {text!r}.",
        f"Choose chain, siblings:nodes=N, {', '.join(trees)}; docs/trees.md has their options.",
    )


def share_options(rules: Sequence[RuleSpec], options: Mapping[str, Any]) -> list[RuleSpec]:
    """Rules with the options that several may have: each goes to those that take it.

    ``None`` and False stand for none, and what a rule says itself comes first.

    Raises:
        UsageError: None of the rules takes one of them.
    """
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    for name in given:
        if not any(rule.takes(name) for rule in rules):
            rules[0].require(name)
    return [
        rule.with_options({name: value for name, value in given.items() if rule.takes(name)})
        for rule in rules
    ]


def _value(text: str | bool, option: RuleOption, rule: RuleWord) -> Any:
    if option.kind is bool:
        if text is True:
            return True
        raise UsageError(f"The option {option.key!r} of {rule.word} takes no value.", _hint(rule))
    if isinstance(text, bool):
        raise UsageError(f"The option {option.key!r} of {rule.word} needs a value.", _hint(rule))
    try:
        return option.kind(text)
    except ValueError:
        what = _KINDS.get(option.kind, "number")
        raise UsageError(
            f"The option {option.key!r} of {rule.word} is {text!r}, which is no {what}.", _hint(rule)
        ) from None


_KINDS: Mapping[Callable[[Any], Any], str] = {
    int: "whole number",
    verification_name: "way to verify",
    rank_shares: "list of percentages such as 70-12-5-3",
}


def _hint(rule: RuleWord) -> str:
    values = {bool: "", verification_name: "=NAME", rank_shares: "=N-N-..."}
    keys = [f"{o.key}{values.get(o.kind, '=N')}" for o in rule.options if o.key]
    return f"Options of {rule.word}: {', '.join(keys)}."
