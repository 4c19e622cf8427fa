"""The recipe and the draft policies that a command line asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specbench.base.errors import UsageError
from specbench.cli.options import cache_for
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import parse_model
from specbench.specs.policies import default_policy, parse_policy, share_options

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import typer

    from specbench.cli.options import DraftingOptions
    from specbench.decoding.request import DraftPlan
    from specbench.models.prepare import LoadedDrafter
    from specbench.options import (
        CacheOptions,
        DecodingOptions,
        ModelOptions,
        SamplingOptions,
        SharedPolicyOptions,
    )
    from specbench.recipe import Recipe
    from specbench.specs.drafters import DrafterSpec
    from specbench.specs.policies import PolicySpec


def parse_recipe(
    ctx: typer.Context,
    drafting: DraftingOptions,
    models: ModelOptions,
    length: SharedPolicyOptions,
    decoding: DecodingOptions,
    caching: CacheOptions,
    sampling: SamplingOptions,
) -> Recipe:
    """Return the recipe that a command line requests.

    Raises:
        UsageError: The request is impossible.
    """
    from specbench.recipe import Recipe

    kind = cache_for(ctx, drafting.target, models, caching)
    target, drafter = parse_model(drafting.target), parse_drafter(drafting.drafter)
    greedy = sampling.temperature == 0 and len(drafter.parts) == 1  # several draft chains of one length
    spec = drafting.draft_policy
    policy = parse_policy(spec) if spec else default_policy(greedy=greedy, gamma=drafting.gamma)
    policy = policy.with_options({**length.given, "gamma": drafting.gamma})
    return Recipe(
        target, drafter, policy, length.costs, models, replace(caching, cache=kind), decoding, sampling
    )


class RequestedPolicy:
    """A draft policy with its options checked, and costs from a file, if there is one.

    With ``chained``, the option that asks for bit-exact forward passes, drafts are chains.
    """

    def __init__(self, spec: PolicySpec, costs: Path | None, *, chained: str | None = None) -> None:
        from specbench.policies import build_policy, check_costs, load_costs

        if chained:
            refuse_trees([spec], chained)
        self.spec = spec
        self.name: str = build_policy(spec).name
        self._costs = None
        if costs is not None:
            spec.require("costs")
            self._costs = load_costs(costs)
            check_costs(self._costs)

    def build(self, loaded: LoadedDrafter) -> DraftPlan:
        """Return the policy for a drafter; costs may be those of several drafters."""
        from specbench.policies import FixedLength, build_policy, parse_costs

        costs = None if self._costs is None else parse_costs(self._costs, loaded.name)
        if self.spec.kind.tree and loaded.spec.is_plain:  # it has no effect
            return DraftPlan(FixedLength())
        return build_policy(self.spec, costs=costs)


def requested_policies(
    specs: Sequence[str],
    costs: Path | None,
    gammas: Sequence[int],
    options: dict[str, Any],
    *,
    greedy: bool,
    chained: str | None = None,
) -> list[RequestedPolicy]:
    """Return every requested policy, without ``specs`` the default one; one that takes a γ once with each.

    Raises:
        UsageError: An option that none of the policies takes, or one policy twice.
    """
    starts: Sequence[int | None] = gammas or [None]
    words = [*map(parse_policy, specs)] or [default_policy(greedy=greedy, gamma=starts[0])]
    share_options(words, {"gamma": gammas or None, "costs": costs})  # refuses what none of them takes
    policies = [
        RequestedPolicy(
            policy.with_options({"gamma": gamma}), costs if policy.takes("costs") else None, chained=chained
        )
        for policy in share_options(words, options)
        for gamma in (starts if policy.takes("gamma") and "gamma" not in policy.options else [None])
    ]
    names = [policy.name for policy in policies]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise UsageError(f"The draft policy {repeated[0]} is given twice.", "Give each once.")
    return policies


def refuse_trees(policies: Sequence[PolicySpec], chained: str) -> None:
    """Check that no policy drafts trees, if ``chained``, the option for bit-exact forward passes, is given.

    Raises:
        UsageError: A policy does.
    """
    for policy in policies:
        if policy.kind.tree:
            raise UsageError(f"{chained} does not go with trees, as in {policy}.", "Draft chains.")


def left_out(policies: Sequence[PolicySpec], drafters: Sequence[DrafterSpec]) -> list[str]:
    """Return a sentence for each policy that does not apply to a drafter.

    Raises:
        UsageError: One applies to none of them.
    """
    notes = []
    for policy in policies:
        blind = [drafter for drafter in drafters if not policy.applies(drafter)]
        if blind and len(blind) == len(drafters):
            policy.check(blind[0])
        if blind:
            names = ", ".join(map(str, blind))
            why = "it reads the drafter's distribution, and there is none"
            if policy.kind.tree:
                why = "it drafts trees, and only chains can be drafted"
            notes.append(f"{policy} is left out with {names}: {why}.")
    return notes
