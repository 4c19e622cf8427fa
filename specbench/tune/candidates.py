"""What `specbench tune` tries, and what it expects of it: configurations of a sweep's grid, and predicted speedups.

A few short generations with each drafter, of ``PROBED`` tokens a step or of trees, tell how many drafts are kept; the
times of single passes tell what they cost. Together they predict the speedup of every configuration
(``theory.predicted_speedup``); whatever is far behind by that is not raced. Everything here is a pure function.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from specbench.bench.grid import SweepConfig
from specbench.decoding.theory import PassCosts, never_falling, predicted_speedup
from specbench.results.lines import StepLists
from specbench.specs.drafters import (
    Cascade,
    DrafterSpec,
    Lookup,
    Recycle,
    SelfForm,
    SmallModel,
    Suffix,
    parse_drafter,
)
from specbench.specs.rules import RuleSpec, parse_rule

GAMMAS = (1, 2, 3, 4, 6, 8)
"""Lengths that the rule fixed is tried with; only the one that is predicted best is raced."""

PROBED = GAMMAS[-1]
"""γ of the short generations: the longest tells what shorter ones would have kept."""

PROBED_TREE, CALIBRATED_TREE = "dynamic-tree", "static-tree"
"""The tree of the short generations, and the one that is tried where `specbench calibrate --tree` has found it."""

BEHIND = 0.75
"""What is predicted to reach a smaller share of the best prediction is not raced. The margin is for what predictions
leave out: rules and trees that adapt, prompts that differ, passes that are slower in a step than alone."""

_TOGETHER = "auto:siblings=0,verification=block"
"""The chain of ``auto``, above temperature 0."""

_FRONTS = ("lookup", "suffix")
"""Drafters without a model that are put before each model."""


# -- what there is to try --------------------------------------------------------------------------


def drafters_to_try(given: Sequence[DrafterSpec], forms: Sequence[SelfForm]) -> list[DrafterSpec]:
    """Those that need no model, forms of the target, what is given, and cascades of the former with the latter.

    Args:
        given: Models, trained heads or anything else that the user names; plain decoding is left out.
        forms: Of the target, which it has here.
    """
    asked = [spec for spec in given if not spec.is_plain]
    backs = [spec for spec in (*forms, *asked) if isinstance(spec, SelfForm | SmallModel)]
    cascades = [_cascade(front, back) for back in backs for front in _FRONTS]
    return list(dict.fromkeys([Lookup(), Suffix(), Recycle(), *forms, *asked, *cascades]))


def _cascade(front: str, back: SelfForm | SmallModel) -> Cascade:
    model = parse_drafter(f"{front}+self:int8")
    assert isinstance(model, Cascade)
    return replace(model, back=back)


def rules_to_try(*, greedy: bool, chained: bool) -> tuple[str, ...]:
    """Draft-length rules and trees.

    Args:
        greedy: Above temperature 0 chains without siblings are tried too, for these alone are verified together.
        chained: Whether passes have to be the same to the bit, so that nothing may stand beside a draft.
    """
    together = () if greedy else (_TOGETHER,)
    if chained:
        return ("auto:siblings=0", "fixed", *together)
    return ("auto", *together, "fixed", PROBED_TREE, "auto-tree", CALIBRATED_TREE)


def is_tried(rule: RuleSpec, drafter: DrafterSpec) -> bool:
    """Whether a rule of these is tried with a drafter.

    A static tree is, where one is calibrated. Verifying a chain together tells nothing of drafts that are certain,
    which every way to verify keeps with the same chance.
    """
    if rule.word == CALIBRATED_TREE:
        return "ranks" in rule.options
    return drafter.has_logits or rule != parse_rule(_TOGETHER)


def probes_of(configs: Sequence[SweepConfig]) -> list[SweepConfig]:
    """Those of the configurations that are tried for a few tokens: of each drafter the longest chain, and a tree."""
    return [
        config
        for config in configs
        if config.gamma == PROBED or (config.kind == "speculative" and config.rule.word == PROBED_TREE)
    ]


# -- what is expected of it ------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """The steps of short generations with one configuration, a number per step each.

    Attributes:
        drafted: Tokens in the draft; in a tree, along its longest branch.
        accepted: Of them kept.
        emitted: With the one behind them.
        passes: Of the drafter.
        nodes: That were verified beside the token before them.
    """

    drafted: list[int]
    accepted: list[int]
    emitted: list[int]
    passes: list[int]
    nodes: list[int]

    @classmethod
    def of(cls, generations: Iterable[StepLists]) -> Probe:
        """The steps of some generations."""
        found = cls([], [], [], [], [])
        for steps in generations:
            found.drafted.extend(steps.drafted)
            found.accepted.extend(steps.accepted)
            found.emitted.extend(steps.emitted)
            found.passes.extend(steps.passes)
            found.nodes.extend(steps.nodes)
        return found

    def chain(self, gamma: int, c: float, costs: PassCosts) -> float:
        """Speedup of a shorter chain: what these steps would have kept of their first γ drafts, and taken.

        Steps would then begin elsewhere, which this leaves out.

        Args:
            gamma: γ, at most what was tried.
            c: Of the drafter's pass.
            costs: For v.
        """
        share = sum(self.passes) / max(1, sum(self.drafted))  # free tokens of a cascade take none
        lengths = [min(gamma, drafted) for drafted in self.drafted]
        tokens = sum(1 + min(gamma, accepted) for accepted in self.accepted)
        return _speedup(tokens, share * sum(lengths), c, lengths, costs)

    def as_it_was(self, c: float, costs: PassCosts) -> float:
        """Speedup of these very steps at the usual times of their passes."""
        return _speedup(sum(self.emitted), sum(self.passes), c, self.nodes, costs)


def _speedup(tokens: float, passes: float, c: float, drafts: Sequence[int], costs: PassCosts) -> float:
    if not drafts:
        return 0.0
    return predicted_speedup(tokens, passes, c, sum(costs.v(drafted + 1) for drafted in drafts))


def predict(
    configs: Sequence[SweepConfig], probes: Mapping[str, Probe], costs: PassCosts
) -> dict[str, float]:
    """Predicted speedups over plain decoding, by id; configurations whose drafter was not tried are left out.

    ``auto`` is taken for the best length, and ``auto-tree`` for the better of that and the tree that was tried.

    Args:
        configs: Of the grid.
        probes: By the ids of the configurations that were tried.
        costs: Of single passes.
    """
    costs = msgspec.structs.replace(costs, target_s=never_falling(costs.target_s))
    chains: dict[str, dict[int, float]] = {}
    trees: dict[str, float] = {}
    for config in probes_of(configs):
        probe = probes.get(config.id)
        if probe is None or config.drafter not in costs.drafter_s:
            continue
        c = costs.c(config.drafter)
        if config.gamma == PROBED:
            chains[config.drafter] = {gamma: probe.chain(gamma, c, costs) for gamma in GAMMAS}
        else:
            trees[config.drafter] = probe.as_it_was(c, costs)
    found = {}
    for config in configs:
        if config.kind != "speculative":
            continue
        best = max(chains.get(config.drafter, {}).values(), default=None)
        tree = trees.get(config.drafter)
        if config.gamma is not None:
            expected = chains.get(config.drafter, {}).get(config.gamma)
        elif config.rule.word == PROBED_TREE:
            expected = tree
        elif config.rule.kind.tree:
            expected = max((each for each in (best, tree) if each is not None), default=None)
        else:
            expected = best
        if expected is not None:
            found[config.id] = expected
    return found


# -- who is raced ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """Who is raced.

    Attributes:
        raced: Ids, the most promising first.
        left_out: Why others are not, by id; of fixed lengths only the one that is predicted best is looked at.
    """

    raced: tuple[str, ...]
    left_out: Mapping[str, str]


def choose(
    configs: Sequence[SweepConfig],
    predicted: Mapping[str, float],
    *,
    plain_s: float,
    first_s: float,
    seconds: float,
    blocks: int,
    failed: Mapping[str, str],
    kept: Iterable[Collection[str]] = (),
) -> Chosen:
    """Choose whom to race: of each drafter's fixed lengths the best, nobody far behind, as many as there is time for.

    Args:
        configs: Of the grid.
        predicted: Speedups, by id.
        plain_s: Of plain decoding a whole output.
        first_s: To the first token, which is the same for all.
        seconds: For the race.
        blocks: How many there should be time for.
        failed: Why drafters could not be tried, by name.
        kept: Of each of these groups the best fixed length is raced too if it is predicted to pay, far behind or not,
            and before all but the best where there is little time.
    """
    left_out: dict[str, str] = {}
    ranked = sorted(predicted, key=lambda name: -predicted[name])
    best = max([1.0, *predicted.values()])
    by_id = {config.id: config for config in configs}
    lengths: dict[str, str] = {}
    paying = [name for name in ranked if predicted[name] > 1.0 and by_id[name].gamma is not None]
    spared = {name for group in kept for name in [each for each in paying if each in group][:1]}
    raced: list[str] = []
    block_s = first_s + plain_s
    for name in sorted(ranked, key=lambda name: (name != ranked[0], name not in spared)):
        config = by_id[name]
        took = first_s + plain_s / max(predicted[name], 1e-9)
        if config.gamma is not None and lengths.setdefault(config.drafter, name) != name:
            continue
        if predicted[name] < BEHIND * best and name not in spared:
            left_out[name] = f"predicted below {BEHIND:g} of the best"
        elif raced and blocks * (block_s + took) > seconds:
            left_out[name] = f"no time for {blocks} blocks with it too; more --minutes give it some"
        else:
            raced.append(name)
            block_s += took
    for config in configs:
        if config.kind == "speculative" and config.id not in predicted and config.gamma in (None, PROBED):
            reason = failed.get(config.drafter)
            left_out[config.id] = f"failed: {reason}" if reason else "no time to try it"
    return Chosen(tuple(sorted(raced, key=ranked.index)), left_out)
