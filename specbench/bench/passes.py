"""Times of single passes: of the target by the number of its tokens, and of drafters for one token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from specbench.decoding.theory import PassCosts

if TYPE_CHECKING:
    from specbench.backends.torch.scorer import Scorer
    from specbench.decoding.clocks import Clock
    from specbench.decoding.protocols import Drafter
    from specbench.progress import Progress

__all__ = ["ABREAST", "PassTimes", "cost_widths", "time_in_turn", "time_passes"]

_CONTEXT = 256  # tokens of context at which passes are timed
ABREAST = (1, 2, 4, 8)
"""Nodes of a tree that drafters are timed with reading at once."""

Name = TypeVar("Name")


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Times of single passes in seconds, as measured one by one.

    Attributes:
        target: By number of tokens in the pass.
        drafters: Of drafting one token, by drafter.
        context: Tokens of context they were measured at.
        trees: Of drafting several nodes and one more behind each of them, by drafter and their number.
    """

    target: Mapping[int, Sequence[float]]
    drafters: Mapping[str, Sequence[float]]
    context: int
    trees: Mapping[tuple[str, int], Sequence[float]] = field(default_factory=dict)

    @classmethod
    def of_rows(cls, rows: Iterable[Mapping[str, Any]]) -> PassTimes:
        """All that the lines of ``costs.jsonl`` hold."""
        target: dict[int, list[float]] = {}
        drafters: dict[str, list[float]] = {}
        trees: dict[tuple[str, int], list[float]] = {}
        context = 0
        for row in rows:
            context = row["context_tokens"]
            if row["kind"] == "target":
                target.setdefault(row["tokens"], []).extend(row["seconds"])
            elif row["kind"] == "drafter":
                drafters.setdefault(row["drafter"], []).extend(row["seconds"])
            else:
                trees.setdefault((row["drafter"], row["nodes"]), []).extend(row["seconds"])
        return cls(dict(sorted(target.items())), drafters, context, trees)

    def rows(self) -> list[dict[str, Any]]:
        """The lines of ``costs.jsonl``."""
        target: list[dict[str, Any]] = [
            {"kind": "target", "tokens": n, "seconds": list(times)} for n, times in self.target.items()
        ]
        drafters: list[dict[str, Any]] = [
            {"kind": "drafter", "drafter": name, "seconds": list(times)}
            for name, times in self.drafters.items()
        ]
        trees: list[dict[str, Any]] = [
            {"kind": "tree", "drafter": name, "nodes": nodes, "seconds": list(times)}
            for (name, nodes), times in self.trees.items()
        ]
        return [{**row, "context_tokens": self.context} for row in (*target, *drafters, *trees)]

    def medians(self) -> PassCosts:
        """What a pass usually takes: of two that draft a tree, the second is what the first leaves of both."""
        drafters = {name: median(times) for name, times in self.drafters.items()}
        rows: dict[str, dict[int, float]] = {}
        for (name, nodes), times in sorted(self.trees.items()):
            if name in drafters:
                one = drafters[name]
                rows.setdefault(name, {})[nodes] = max(one, median(times) - one)
        return PassCosts({n: median(times) for n, times in self.target.items()}, drafters, self.context, rows)


def cost_widths(gammas: Sequence[int], nodes: Sequence[int] = ()) -> list[int]:
    """Widths of target passes to time: one token, n + 1 for every n drafted, all in between as far as that is cheap.

    Without any γ, where rules decide alone, they are those of drafts of up to 16 tokens.

    Args:
        gammas: Lengths of chains.
        nodes: The most nodes of trees.
    """
    longest = max((*(gammas or (16,)), *nodes)) + 1
    return sorted({*range(1, min(longest, 17) + 1), *(n + 1 for n in (*gammas, *nodes))})


def time_passes(
    scorer: Scorer,
    drafters: Mapping[str, Drafter],
    prompt: Sequence[int],
    widths: Sequence[int],
    clock: Clock,
    rounds: int,
    order: Random,
    progress: Progress | None = None,
    *,
    abreast: Sequence[int] = (),
) -> PassTimes:
    """Time passes of a target and one-token drafts in turn, behind the same context. The target's cache is left empty.

    Args:
        scorer: The target's.
        drafters: By name.
        prompt: Tokens, repeated to fill the context.
        widths: Numbers of tokens in the target's passes.
        clock: For the target's device.
        rounds: How many passes of each kind are timed.
        order: Shuffles them.
        progress: Told how many rounds are done.
        abreast: How many nodes of a tree drafters are to read at once, those that draft trees.
    """
    from specbench.decoding.protocols import Pass, answered
    from specbench.decoding.sampling import Greedy, Randomness
    from specbench.decoding.verdicts import top
    from specbench.lengths import FixedLength
    from specbench.lengths.trees import StaticTree

    room = scorer.context_limit or _CONTEXT + max(widths)
    length = max(1, min(_CONTEXT, room - max(widths)))
    context = (list(prompt) * (length // max(1, len(prompt)) + 1))[:length]
    device = str(scorer.device)

    def target_pass(n: int) -> float:
        drafted = [context[i % length] for i in range(n - 1)]
        began = clock.now()
        scorer.logits(context, drafted)
        took = clock.now() - began
        scorer.keep(length - 1)
        return took

    def drafter_pass(drafter: Drafter) -> float:
        began = clock.now()
        answered(drafter.propose(context, 1, FixedLength(1), Greedy(), Randomness(0, device)))
        took = clock.now() - began
        drafter.keep(length - 1)
        return took

    def tree(drafter: Drafter, nodes: int) -> float:
        shape = StaticTree.shaped((-1,) * nodes + tuple(range(nodes)))
        began = clock.now()
        answered(drafter.propose_tree(context, 2, shape, top, Greedy(), Randomness(0, device)))
        took = clock.now() - began
        drafter.keep(length - 1)
        return took

    scorer.begin()
    target_pass(1)  # reads the context
    for drafter in drafters.values():
        drafter.begin(context)
        if drafter.layers:
            scorer.begin()
            states = scorer.score(Pass(scorer, context[:-1], rows=1, layers=drafter.layers)).hidden
            assert states is not None
            drafter.take_states(context, states)
        drafter_pass(drafter)  # reads it too, if it keeps anything
    trees = [
        (name, nodes)
        for name, drafter in drafters.items()
        if abreast and drafter.takes_trees
        for nodes in abreast
    ]
    jobs: dict[int | str | tuple[str, int], Callable[[], float]] = {
        **{n: partial(target_pass, n) for n in widths},
        **{name: partial(drafter_pass, drafter) for name, drafter in drafters.items()},
        **{(name, nodes): partial(tree, drafters[name], nodes) for name, nodes in trees},
    }
    times = time_in_turn(jobs, rounds, order, progress)
    scorer.begin()
    return PassTimes(
        {n: times[n] for n in widths},
        {name: times[name] for name in drafters},
        length,
        {each: times[each] for each in trees},
    )


def time_in_turn(
    jobs: Mapping[Name, Callable[[], float]],
    rounds: int,
    order: Random,
    progress: Progress | None = None,
) -> dict[Name, list[float]]:
    """What measurements that each return seconds come to, to the nanosecond, in rounds of all in a fresh random order.

    A disturbance then spoils a few times of each and not the median of one.
    """
    for measure in jobs.values():
        measure()  # so that every shape of pass has met the machine before
    times: dict[Name, list[float]] = {name: [] for name in jobs}
    names = list(jobs)
    for done in range(rounds):
        if progress is not None:
            progress.update("timing passes", done, rounds)
        order.shuffle(names)
        for name in names:
            times[name].append(round(jobs[name](), 9))
    return times
