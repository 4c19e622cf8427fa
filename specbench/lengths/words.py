"""Draft-length rules by the words of the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specbench.errors import UsageError
from specbench.lengths.auto import AutoLength
from specbench.lengths.base import FixedLength, KeptState, LengthPolicy
from specbench.lengths.entropies import EntropyBoundLength, EntropyGuidedLength, SvipLength
from specbench.lengths.outcomes import ConfidenceLength, HeuristicLength

__all__ = ["POLICY_WORDS", "PolicyWord", "build_policy", "check_policy", "policy_names"]


@dataclass(frozen=True)
class PolicyWord:
    """A word that ``--length-policy`` takes, for help and listings.

    Attributes:
        word: The rule's name.
        summary: What it does, in a sentence.
        options: The options it takes, by their names in ``build_policy``, with what they mean and their defaults.
        needs_logits: Whether it reads the drafter's distributions, which n-gram and lookup have none of.
        build: Its class; it takes the options by the names in ``arguments``.
        arguments: Names of the class's own arguments where they differ from those of the options.
    """

    word: str
    summary: str
    options: Mapping[str, str]
    needs_logits: bool
    build: Callable[..., LengthPolicy]
    arguments: Mapping[str, str]


POLICY_WORDS: tuple[PolicyWord, ...] = (
    PolicyWord(
        "auto",
        "Goes on as long as one more draft is likely to pay for its time, measured as the run goes. Nothing to tune.",
        {
            "gamma_max": "most tokens drafted in a step (16)",
            "costs": "costs to use instead of measuring them",
        },
        False,
        AutoLength,
        {},
    ),
    PolicyWord(
        "fixed", "The same length in every step.", {"gamma": "the length (5)"}, False, FixedLength, {}
    ),
    PolicyWord(
        "egag",
        "Entropy-guided: the less certain the drafter is at the start of a step, the shorter the draft.",
        {
            "gamma_min": "length where the drafter is uncertain (1)",
            "gamma_max": "length where it is certain (8)",
            "egag_ema_beta": "weight of earlier steps in the average of the entropy, 0 for none (0)",
            "egag_scale": "normalised entropy that counts as uncertain (0.3)",
        },
        True,
        EntropyGuidedLength,
        {"egag_ema_beta": "ema_beta", "egag_scale": "scale"},
    ),
    PolicyWord(
        "confidence",
        "Stops behind a token that the drafter gave little probability.",
        {
            "confidence": "the threshold (0.4)",
            "adapt_confidence": "move the threshold by what was accepted (no)",
            "gamma_max": "most tokens drafted in a step (20)",
        },
        False,
        ConfidenceLength,
        {"confidence": "threshold", "adapt_confidence": "adapt"},
    ),
    PolicyWord(
        "entropy-bound",
        "AdaEDL: stops where a bound on the chance of acceptance, from the entropy, falls below a moving threshold.",
        {
            "entropy_lambda": "the threshold at the beginning (0.6)",
            "gamma_max": "most tokens drafted in a step (20)",
        },
        True,
        EntropyBoundLength,
        {"entropy_lambda": "threshold"},
    ),
    PolicyWord(
        "svip",
        "Stops behind a token whose distribution had a high entropy.",
        {"svip_threshold": "the threshold (0.3)", "gamma_max": "most tokens drafted in a step (40)"},
        True,
        SvipLength,
        {"svip_threshold": "threshold"},
    ),
    PolicyWord(
        "heuristic",
        "Two tokens more when everything was accepted, one less otherwise.",
        {
            "gamma": "length of the first draft (5)",
            "gamma_min": "never shorter (1)",
            "gamma_max": "never longer (40)",
        },
        False,
        HeuristicLength,
        {},
    ),
)


def policy_names() -> tuple[str, ...]:
    """The words that ``build_policy`` takes."""
    return tuple(policy.word for policy in POLICY_WORDS)


def _find(name: str) -> PolicyWord:
    for policy in POLICY_WORDS:
        if policy.word == name:
            return policy
    raise UsageError(f"There is no draft-length rule {name!r}.", f"Choose {', '.join(policy_names())}.")


def build_policy(name: str, *, keep: bool = False, **options: Any) -> LengthPolicy:
    """Build a draft-length rule.

    Args:
        name: One of ``policy_names()``.
        keep: Carry what it learns from one prompt to the next.
        options: Those of the rule (``POLICY_WORDS``); ``None`` and False leave one at its default. ``costs`` is what
            ``read_costs`` or ``parse_costs`` returns.

    Raises:
        UsageError: There is no such rule, it has no such option, or a value is outside its range.
    """
    policy = _find(name)
    given = {option: value for option, value in options.items() if value is not None and value is not False}
    for option in given:
        if option not in policy.options:
            takers = ", ".join(other.word for other in POLICY_WORDS if option in other.options)
            written = "--" + option.replace("_", "-")
            raise UsageError(
                f"The draft-length rule {name} has no option {written}.",
                f"It belongs to {takers}." if takers else "See docs/lengths.md for its options.",
            )
    built = policy.build(**{policy.arguments.get(option, option): value for option, value in given.items()})
    return KeptState(built) if keep else built


def check_policy(name: str, drafter: str, *, has_logits: bool) -> None:
    """Refuse a rule that has nothing to read.

    Args:
        name: The rule.
        drafter: What the user calls the drafter.
        has_logits: Whether it has distributions: models and self-drafting do, n-gram and lookup do not.

    Raises:
        UsageError: There is no such rule, or it reads distributions and the drafter has none.
    """
    if _find(name).needs_logits and not has_logits:
        others = ", ".join(policy.word for policy in POLICY_WORDS if not policy.needs_logits)
        raise UsageError(
            f"The draft-length rule {name} reads the drafter's distribution, and {drafter} has none.",
            f"Choose {others}.",
        )
