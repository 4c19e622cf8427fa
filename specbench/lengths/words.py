"""Draft-length rules by the words of the command line, and the notation of their options: ``egag:scale=0.5,max=12``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from specbench.decoding.protocols import LengthPolicy
from specbench.errors import UsageError
from specbench.lengths.auto import AutoLength
from specbench.lengths.base import FixedLength, KeptState, Rule, WithSiblings
from specbench.lengths.entropies import EntropyBoundLength, EntropyGuidedLength, SvipLength
from specbench.lengths.outcomes import ConfidenceLength, HeuristicLength
from specbench.specs.drafters import DrafterSpec
from specbench.specs.notation import split_spec

__all__ = [
    "POLICY_WORDS",
    "PolicyOption",
    "PolicyWord",
    "applies",
    "build_policy",
    "check_policy",
    "default_policy",
    "policy_names",
    "policy_word",
    "read_policy",
]


@dataclass(frozen=True)
class PolicyOption:
    """An option of a rule.

    Attributes:
        name: In ``build_policy``; with dashes, on the command line.
        key: Behind the colon of a rule, and in its name; ``None`` if it cannot stand there.
        argument: Of the rule's class.
        kind: What its value is.
        meaning: What it means, with its default.
    """

    name: str
    key: str | None
    argument: str
    kind: type
    meaning: str


@dataclass(frozen=True)
class PolicyWord:
    """A word that ``--length-policy`` takes, for help and listings.

    Attributes:
        word: The rule's name.
        summary: What it does, in a sentence.
        options: What it takes.
        needs_logits: Whether it reads the drafter's distributions, which n-gram and lookup have none of.
        build: Its class.
        siblings: How many siblings it has verified if nothing is said.
    """

    word: str
    summary: str
    options: tuple[PolicyOption, ...]
    needs_logits: bool
    build: Callable[..., Rule]
    siblings: int = 0

    def option(self, name: str) -> PolicyOption | None:
        """The option of that name."""
        return next((option for option in self.options if option.name == name), None)

    def require(self, name: str) -> PolicyOption:
        """The same.

        Raises:
            UsageError: The rule has no such option.
        """
        option = self.option(name)
        if option is None:
            takers = ", ".join(other.word for other in POLICY_WORDS if other.option(name))
            raise UsageError(
                f"The draft-length rule {self.word} has no option --{name.replace('_', '-')}.",
                f"It belongs to {takers}." if takers else "See docs/lengths.md for its options.",
            )
        return option


_SIBLINGS = PolicyOption(
    "siblings",
    "siblings",
    "siblings",
    int,
    "most alternatives verified beside a draft in greedy decoding (auto: 8, others: 0)",
)


def _most(default: int) -> PolicyOption:
    return PolicyOption("gamma_max", "max", "gamma_max", int, f"most tokens drafted in a step ({default})")


_WORDS: tuple[PolicyWord, ...] = (
    PolicyWord(
        "auto",
        "Goes on as long as one more draft is likely to pay for its time, measured as the run goes. Nothing to tune.",
        (
            _most(16),
            PolicyOption(
                "costs", None, "costs", object, "a file with costs to use instead of measuring them"
            ),
        ),
        False,
        AutoLength,
        siblings=8,
    ),
    PolicyWord(
        "fixed",
        "The same length in every step.",
        (PolicyOption("gamma", "gamma", "gamma", int, "the length (5)"),),
        False,
        FixedLength,
    ),
    PolicyWord(
        "egag",
        "Entropy-guided: the less certain the drafter is at the start of a step, the shorter the draft.",
        (
            PolicyOption("gamma_min", "min", "gamma_min", int, "length where the drafter is uncertain (1)"),
            PolicyOption("gamma_max", "max", "gamma_max", int, "length where it is certain (8)"),
            PolicyOption(
                "egag_ema_beta",
                "beta",
                "ema_beta",
                float,
                "weight of earlier steps in the average of the entropy, 0 for none (0)",
            ),
            PolicyOption(
                "egag_scale", "scale", "scale", float, "normalised entropy that counts as uncertain (0.3)"
            ),
        ),
        True,
        EntropyGuidedLength,
    ),
    PolicyWord(
        "confidence",
        "Stops behind a token that the drafter gave little probability.",
        (
            PolicyOption("confidence", "threshold", "threshold", float, "the threshold (0.4)"),
            PolicyOption(
                "adapt_confidence", "adapt", "adapt", bool, "move the threshold by what was accepted (no)"
            ),
            _most(20),
        ),
        False,
        ConfidenceLength,
    ),
    PolicyWord(
        "entropy-bound",
        "AdaEDL: stops where a bound on the chance of acceptance, from the entropy, falls below a moving threshold.",
        (
            PolicyOption(
                "entropy_lambda", "lambda", "threshold", float, "the threshold at the beginning (0.6)"
            ),
            _most(20),
        ),
        True,
        EntropyBoundLength,
    ),
    PolicyWord(
        "svip",
        "Stops behind a token whose distribution had a high entropy.",
        (PolicyOption("svip_threshold", "threshold", "threshold", float, "the threshold (0.3)"), _most(40)),
        True,
        SvipLength,
    ),
    PolicyWord(
        "heuristic",
        "Two tokens more when everything was accepted, one less otherwise.",
        (
            PolicyOption("gamma", "gamma", "gamma", int, "length of the first draft (5)"),
            PolicyOption("gamma_min", "min", "gamma_min", int, "never shorter (1)"),
            PolicyOption("gamma_max", "max", "gamma_max", int, "never longer (40)"),
        ),
        False,
        HeuristicLength,
    ),
)
POLICY_WORDS = tuple(replace(word, options=(*word.options, _SIBLINGS)) for word in _WORDS)


def policy_names() -> tuple[str, ...]:
    """The words that ``build_policy`` takes."""
    return tuple(policy.word for policy in POLICY_WORDS)


def policy_word(spec: str) -> PolicyWord:
    """The rule that a spec such as ``egag`` or ``egag:scale=0.5`` begins with.

    Raises:
        UsageError: There is no such rule.
    """
    word = spec.partition(":")[0].strip()
    for policy in POLICY_WORDS:
        if policy.word == word:
            return policy
    raise UsageError(f"There is no draft-length rule {word!r}.", f"Choose {', '.join(policy_names())}.")


def read_policy(spec: str) -> tuple[PolicyWord, dict[str, Any]]:
    """A rule and the options behind its colon, by their names in ``build_policy``; values are not checked yet.

    Raises:
        UsageError: There is no such rule, it has no such option, or a value is of another kind.
    """
    policy = policy_word(spec)
    options = {}
    for key, text in split_spec(spec)[1].items():
        option = next((option for option in policy.options if option.key == key), None)
        if option is None:
            raise UsageError(f"The draft-length rule {policy.word} has no option {key!r}.", _hint(policy))
        options[option.name] = _value(text, option, policy)
    return policy, options


def _value(text: str | bool, option: PolicyOption, policy: PolicyWord) -> Any:
    if option.kind is bool:
        if text is True:
            return True
        raise UsageError(f"The option {option.key!r} of {policy.word} takes no value.", _hint(policy))
    if isinstance(text, bool):
        raise UsageError(f"The option {option.key!r} of {policy.word} needs a value.", _hint(policy))
    try:
        return option.kind(text)
    except ValueError:
        what = "whole number" if option.kind is int else "number"
        raise UsageError(
            f"The option {option.key!r} of {policy.word} is {text!r}, which is no {what}.", _hint(policy)
        ) from None


def _hint(policy: PolicyWord) -> str:
    keys = [f"{o.key}" if o.kind is bool else f"{o.key}=N" for o in policy.options if o.key]
    return f"Options of {policy.word}: {', '.join(keys)}."


def default_policy(*, greedy: bool, gamma: int | None = None) -> str:
    """The rule where none is asked for.

    ``auto`` goes by clocks, which changes no output in greedy decoding; a sampled one is to be the same whenever its
    seed is, so there it is ``fixed``, and where a γ is given.
    """
    return "auto" if greedy and gamma is None else "fixed"


def build_policy(spec: str, *, keep: bool = False, **options: Any) -> LengthPolicy:
    """Build a draft-length rule.

    Args:
        spec: One of ``policy_names()``, with options behind a colon or without: ``egag:scale=0.5,max=12``. The ``name``
            of a rule is such a spec too.
        keep: Carry what it learns from one prompt to the next.
        options: Those of the rule (``POLICY_WORDS``); ``None`` and False leave one at its default, and what the spec
            says comes first. ``costs`` is what ``read_costs`` or ``parse_costs`` returns.

    Raises:
        UsageError: There is no such rule, it has no such option, or a value is outside its range.
    """
    policy, own = read_policy(spec)
    given = {option: value for option, value in options.items() if value is not None and value is not False}
    taken = {policy.require(name).argument: value for name, value in {**given, **own}.items()}
    most = taken.pop("siblings", policy.siblings)
    rule = policy.build(**taken)
    built: LengthPolicy = WithSiblings(rule, most, policy.siblings) if most or policy.siblings else rule
    return KeptState(built) if keep else built


def applies(spec: str, drafter: DrafterSpec) -> bool:
    """Whether a rule has something to read with a drafter.

    Raises:
        UsageError: There is no such rule.
    """
    return not policy_word(spec).needs_logits or drafter.has_logits


def check_policy(spec: str, drafter: DrafterSpec) -> None:
    """Refuse a rule that has nothing to read with a drafter.

    Raises:
        UsageError: There is no such rule, or it reads distributions and the drafter has none.
    """
    if not applies(spec, drafter):
        others = ", ".join(policy.word for policy in POLICY_WORDS if not policy.needs_logits)
        raise UsageError(
            f"The draft-length rule {policy_word(spec).word} reads the drafter's distribution, and {drafter.word} has"
            " none.",
            f"Choose {others}.",
        )
