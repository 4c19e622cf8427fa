"""Times of passes: of the target by the number of its tokens, of drafters for one token, and of several requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from specbench.decoding.theory import PassCosts, SharedCosts
from specbench.results.lines import (
    CostLine,
    DrafterTimes,
    SharedDrafterTimes,
    SharedTargetTimes,
    TargetTimes,
    TreeTimes,
)

if TYPE_CHECKING:
    import torch

    from specbench.backends.torch.scorer import Scorer
    from specbench.base.progress import Progress
    from specbench.decoding.clocks import Clock
    from specbench.decoding.drafts import StepOutcome
    from specbench.decoding.protocols import Decoding, Drafter, ForwardOutput, ForwardRequest
    from specbench.models.target import Target

_CONTEXT = 256  # tokens of context at which passes are timed
_SHARED_CONTEXT = 128  # of each of several requests, which all have to be read
_BESIDE = 64  # positions of a pool beside that, to begin with
TREE_NODES = (1, 2, 4, 8)
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
    def of(cls, lines: Iterable[CostLine]) -> PassTimes:
        """What the lines of ``costs.jsonl`` hold of single passes."""
        target: dict[int, list[float]] = {}
        drafters: dict[str, list[float]] = {}
        trees: dict[tuple[str, int], list[float]] = {}
        context = 0
        for line in lines:
            if isinstance(line, TargetTimes):
                target.setdefault(line.tokens, []).extend(line.seconds)
            elif isinstance(line, DrafterTimes):
                drafters.setdefault(line.drafter, []).extend(line.seconds)
            elif isinstance(line, TreeTimes):
                trees.setdefault((line.drafter, line.nodes), []).extend(line.seconds)
            else:
                continue
            context = line.context_tokens
        return cls(dict(sorted(target.items())), drafters, context, trees)

    def lines(self) -> list[CostLine]:
        """The lines of ``costs.jsonl``."""
        at = self.context
        return [
            *(
                TargetTimes(tokens=n, seconds=list(times), context_tokens=at)
                for n, times in self.target.items()
            ),
            *(
                DrafterTimes(drafter=name, seconds=list(times), context_tokens=at)
                for name, times in self.drafters.items()
            ),
            *(
                TreeTimes(drafter=name, nodes=nodes, seconds=list(times), context_tokens=at)
                for (name, nodes), times in self.trees.items()
            ),
        ]

    def medians(self) -> PassCosts:
        """What a pass usually takes: of two that draft a tree, the second is what the first leaves of both."""
        drafters = {name: median(times) for name, times in self.drafters.items()}
        rows: dict[str, dict[int, float]] = {}
        for (name, nodes), times in sorted(self.trees.items()):
            if name in drafters:
                one = drafters[name]
                rows.setdefault(name, {})[nodes] = max(one, median(times) - one)
        return PassCosts({n: median(times) for n, times in self.target.items()}, drafters, self.context, rows)


@dataclass(frozen=True, slots=True)
class SharedTimes:
    """Times of passes that several requests share, in seconds, as measured one by one.

    Attributes:
        target: By number of requests, and of tokens that each brings to the pass.
        drafters: Of drafting one token for each, by drafter and number of requests.
        context: Tokens of context of each.
    """

    target: Mapping[tuple[int, int], Sequence[float]]
    drafters: Mapping[tuple[str, int], Sequence[float]]
    context: int

    @classmethod
    def of(cls, lines: Iterable[CostLine]) -> SharedTimes:
        """What the lines of ``costs.jsonl`` hold of shared passes."""
        target: dict[tuple[int, int], list[float]] = {}
        drafters: dict[tuple[str, int], list[float]] = {}
        context = 0
        for line in lines:
            if isinstance(line, SharedTargetTimes):
                target.setdefault((line.requests, line.tokens), []).extend(line.seconds)
            elif isinstance(line, SharedDrafterTimes):
                drafters.setdefault((line.drafter, line.requests), []).extend(line.seconds)
            else:
                continue
            context = line.context_tokens
        return cls(dict(sorted(target.items())), drafters, context)

    def lines(self) -> list[CostLine]:
        """The lines of ``costs.jsonl``."""
        at = self.context
        return [
            *(
                SharedTargetTimes(requests=requests, tokens=n, seconds=list(times), context_tokens=at)
                for (requests, n), times in self.target.items()
            ),
            *(
                SharedDrafterTimes(drafter=name, requests=requests, seconds=list(times), context_tokens=at)
                for (name, requests), times in self.drafters.items()
            ),
        ]

    def medians(self) -> SharedCosts:
        """What a pass usually takes."""
        target: dict[int, dict[int, float]] = {}
        for (requests, n), times in self.target.items():
            target.setdefault(requests, {})[n] = median(times)
        drafters: dict[str, dict[int, float]] = {}
        for (name, requests), times in self.drafters.items():
            drafters.setdefault(name, {})[requests] = median(times)
        return SharedCosts(target, drafters, self.context)


def shared_widths(gammas: Sequence[int], nodes: Sequence[int] = ()) -> list[int]:
    """Tokens that each of several requests brings to passes that are timed: one, and n + 1 for every n drafted.

    Without any γ, where policies decide alone, they are those of some drafts of up to 8 tokens.
    """
    return sorted({1, *(n + 1 for n in (*(gammas or (1, 2, 4, 8)), *nodes))})


def cost_widths(gammas: Sequence[int], nodes: Sequence[int] = ()) -> list[int]:
    """Widths of target passes to time: one token, n + 1 for every n drafted, all in between as far as that is cheap.

    Without any γ, where policies decide alone, they are those of drafts of up to 16 tokens.

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
    tree_nodes: Sequence[int] = (),
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
    from specbench.decoding.protocols import ForwardRequest, run_to_end
    from specbench.decoding.sampling import Greedy, Randomness
    from specbench.policies import FixedLength
    from specbench.policies.trees import StaticTree

    room = scorer.context_limit or _CONTEXT + max(widths)
    length = max(1, min(_CONTEXT, room - max(widths)))
    context = (list(prompt) * (length // max(1, len(prompt)) + 1))[:length]
    device = str(scorer.device)

    def target_pass(n: int) -> float:
        drafted = [context[i % length] for i in range(n - 1)]
        began = clock.now()
        scorer.logits(context, drafted)
        took = clock.now() - began
        scorer.rollback(length - 1)
        return took

    def drafter_pass(drafter: Drafter) -> float:
        began = clock.now()
        run_to_end(drafter.propose(context, 1, FixedLength(1), Greedy(), Randomness(0, device)))
        took = clock.now() - began
        drafter.update(_nothing_emitted(context))
        return took

    def tree(drafter: Drafter, nodes: int) -> float:
        shape = StaticTree.shaped((-1,) * nodes + tuple(range(nodes)))
        began = clock.now()
        run_to_end(drafter.propose(context, 2, shape, Greedy(), Randomness(0, device)))
        took = clock.now() - began
        drafter.update(_nothing_emitted(context))
        return took

    scorer.begin()
    target_pass(1)  # reads the context
    for drafter in drafters.values():
        drafter.begin(context)
        if drafter.layers:
            scorer.begin()
            states = scorer.score(ForwardRequest(scorer, context[:-1], rows=1, layers=drafter.layers)).hidden
            assert states is not None
            drafter.update(_nothing_emitted(context, states))
        drafter_pass(drafter)  # reads it too, if it keeps anything
    trees = [
        (name, nodes)
        for name, drafter in drafters.items()
        if tree_nodes and drafter.takes_trees
        for nodes in tree_nodes
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


def time_shared_passes(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompt: Sequence[int],
    requests: int,
    widths: Sequence[int],
    clock: Clock,
    rounds: int,
    order: Random,
) -> SharedTimes:
    """Time passes that several requests share, of the target and of one-token drafts in turn.

    Args:
        target: The model of all requests.
        drafters: By name.
        prompt: Tokens, repeated to fill the context of each request, of each from another one on.
        requests: How many.
        widths: Numbers of tokens that each brings to a pass of the target.
        clock, rounds, order: See ``time_passes``.
    """
    from specbench.backends.torch.batch import RequestFactory
    from specbench.decoding.protocols import ForwardRequest
    from specbench.decoding.sampling import Greedy, Randomness
    from specbench.drafters.plain import NoDraft
    from specbench.policies import FixedLength

    room = target.scorer.context_limit or _SHARED_CONTEXT + max(widths)
    length = max(1, min(_SHARED_CONTEXT, room - max(widths)))
    text = list(prompt) * (length // max(1, len(prompt)) + 2)
    contexts = [text[i % len(prompt) :][:length] for i in range(requests)]
    device = str(target.scorer.device)
    places = requests * (1 + len(drafters))  # all contexts stay read
    tokens = places * (length + max(widths) + _BESIDE) if requests > 1 else None
    factory = RequestFactory(target.scorer, tokens, places, "slotted")

    def target_pass(scorers: Sequence[Scorer], n: int) -> float:
        passes = [
            ForwardRequest(each, text, text[: n - 1]) for each, text in zip(scorers, contexts, strict=True)
        ]
        began = clock.now()
        _made(passes)
        took = clock.now() - began
        for each in scorers:
            each.rollback(length - 1)
        return took

    def plain_pass() -> float:
        """Behind another one, as plain decoding makes them: behind a heavier pass it takes longer."""
        target_pass(scorers, 1)
        return target_pass(scorers, 1)

    def draft(opened: Sequence[Drafter]) -> float:
        asking = [
            each.propose(text, 1, FixedLength(1), Greedy(), Randomness(0, device))
            for each, text in zip(opened, contexts, strict=True)
        ]
        began = clock.now()
        _answered_together(asking)
        took = clock.now() - began
        for each, text in zip(opened, contexts, strict=True):
            each.update(_nothing_emitted(text))
        return took

    scorers = [factory.open(NoDraft())[0] for _ in contexts]
    jobs: dict[int | str, Callable[[], float]] = {
        n: partial(target_pass, scorers, n) if n > 1 else plain_pass for n in widths
    }
    used = list(scorers)
    for name, drafter in drafters.items():
        opened = [factory.open(drafter) for _ in contexts]
        for (scorer, own), text in zip(opened, contexts, strict=True):
            own.begin(text)
            if own.layers:
                states = scorer.score(ForwardRequest(scorer, text[:-1], rows=1, layers=own.layers)).hidden
                assert states is not None
                own.update(_nothing_emitted(text, states))
        used += [scorer for scorer, _ in opened]
        jobs[name] = partial(draft, [own for _, own in opened])
    times = time_in_turn(jobs, rounds, order)  # whose first, untimed round reads the contexts
    for scorer in used:
        scorer.rollback(0)
    return SharedTimes(
        {(requests, n): times[n] for n in widths},
        {(name, requests): times[name] for name in drafters},
        length,
    )


def _nothing_emitted(context: Sequence[int], states: torch.Tensor | None = None) -> StepOutcome:
    """What takes a timed draft back, so that it can be made again."""
    import torch

    from specbench.decoding.drafts import StepOutcome

    return StepOutcome(context, 0, torch.empty(1, 1), states=states)


def _made(passes: Sequence[ForwardRequest]) -> Sequence[ForwardOutput]:
    """The rows of passes of one model, in one pass where that can be."""
    batch = passes[0].scorer.batch
    return [each.scorer.score(each) for each in passes] if batch is None else batch.score(passes)


def _answered_together(asking: Sequence[Decoding[Any]]) -> None:
    """Let all come to their end, those that wait for the same model by one pass."""
    waiting: dict[int, ForwardRequest] = {}
    for place, each in enumerate(asking):
        with suppress(StopIteration):
            waiting[place] = next(each)
    while waiting:
        first = next(iter(waiting.values())).scorer
        model = first.batch or first
        group = [place for place, asked in waiting.items() if (asked.scorer.batch or asked.scorer) is model]
        answers = _made([waiting.pop(place) for place in group])
        for place, rows in zip(group, answers, strict=True):
            with suppress(StopIteration):
                waiting[place] = asking[place].send(rows)


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
