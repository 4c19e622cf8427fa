"""The draft-length rule that a command line asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from specbench.specs.drafters import DrafterSpec

__all__ = ["LengthRule", "left_out", "length_rules", "refuse_siblings"]


class LengthRule:
    """The draft-length rule that is asked for, or ``default_policy``; building it checks its options."""

    def __init__(
        self,
        length_policy: str | None,
        egag: bool,
        costs: Path | None,
        options: dict[str, Any],
        *,
        greedy: bool,
        chained: str | None = None,
    ) -> None:
        from specbench.errors import UsageError
        from specbench.lengths import build_policy, check_costs, default_policy, load_costs, policy_word

        if egag and length_policy is not None:
            raise UsageError("--egag and --length-policy are both given.", "Give one of them.")
        default = default_policy(greedy=greedy, gamma=options.get("gamma"))
        self.spec = "egag" if egag else length_policy or default
        self._options, self._costs = dict(options), None
        if chained and options.get("siblings") is None:
            self._options["siblings"] = 0
        self.name: str = build_policy(self.spec, **self._options).name
        if chained:
            refuse_siblings([self.name], chained)
        if costs is not None:
            policy_word(self.spec).require("costs")
            self._costs = load_costs(costs)
            check_costs(self._costs)

    def build(self, drafter: str) -> Any:
        """The rule for a drafter by its name."""
        from specbench.lengths import build_policy, parse_costs

        costs = None if self._costs is None else parse_costs(self._costs, drafter)
        return build_policy(self.spec, **self._options, costs=costs)


def length_rules(
    specs: Sequence[str],
    costs: Path | None,
    gammas: Sequence[int],
    options: dict[str, Any],
    *,
    greedy: bool,
    chained: str | None = None,
) -> list[LengthRule]:
    """Every rule that is asked for; those that begin with a γ once with each.

    Args:
        specs: Their words and own options; empty for the rule that is the default.
        costs: A file for those that take it.
        gammas: Lengths; empty if none are asked for.
        options: Others that they may share. Each goes to the rules that take it.
        greedy: Whether nothing is sampled.
        chained: The option that asks for passes that are the same to the bit, so that nothing may stand beside a draft.

    Raises:
        UsageError: An option that none of the rules takes, or one rule twice.
    """
    from specbench.errors import UsageError
    from specbench.lengths import policy_word, read_policy

    starts: Sequence[int | None] = gammas or [None]
    if not specs:
        rules = [
            LengthRule(None, False, costs, {**options, "gamma": gamma}, greedy=greedy, chained=chained)
            for gamma in starts
        ]
    else:
        asked = {name: value for name, value in options.items() if value is not None and value is not False}
        words = [policy_word(spec) for spec in specs]
        given = [*asked, *(["gamma"] if gammas else []), *(["costs"] if costs else [])]
        for name in given:
            if not any(word.option(name) for word in words):
                words[0].require(name)
        rules = []
        for spec, word in zip(specs, words, strict=True):
            taken = {name: value for name, value in asked.items() if word.option(name)}
            open_start = word.option("gamma") and "gamma" not in read_policy(spec)[1]
            own = costs if word.option("costs") else None
            rules += [
                LengthRule(spec, False, own, {**taken, "gamma": gamma}, greedy=greedy, chained=chained)
                for gamma in (starts if open_start else [None])
            ]
    names = [rule.name for rule in rules]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise UsageError(f"The draft-length rule {repeated[0]} is given twice.", "Give each once.")
    return rules


def refuse_siblings(policies: Sequence[str], chained: str) -> None:
    """Refuse rules that have siblings verified, where passes are to be the same to the bit by this option.

    Raises:
        UsageError: One of them does: its passes sum up what another one's do in another order.
    """
    from specbench.errors import UsageError
    from specbench.lengths import build_policy

    for policy in policies:
        if build_policy(policy).most_siblings:
            raise UsageError(
                f"{chained} does not go with siblings, as in {policy}.",
                "Write siblings=0, or leave them out.",
            )


def left_out(policies: Sequence[str], drafters: Sequence[DrafterSpec]) -> list[str]:
    """Rules that do not apply to a drafter, a sentence each.

    Raises:
        UsageError: One applies to none of them.
    """
    from specbench.lengths import applies, check_policy

    notes = []
    for policy in policies:
        blind = [drafter for drafter in drafters if not applies(policy, drafter)]
        if blind and len(blind) == len(drafters):
            check_policy(policy, blind[0])
        if blind:
            names = ", ".join(map(str, blind))
            notes.append(
                f"{policy} is left out with {names}: it reads the drafter's distribution, and there is none."
            )
    return notes
