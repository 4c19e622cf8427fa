"""Models whose logits are a table or a function, with a cache that is as easily spoilt as a real one.

What a scripted scorer computes depends on the tokens it was *fed*, never on the context it is handed: a wrong
rollback, a missing catch-up or keys and values of another model show up as wrong logits or a failed assertion.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from specbench.decoding.clocks import Clock
from specbench.decoding.drafts import Draft
from specbench.decoding.logits import DraftVocabulary
from specbench.decoding.loop import decode_steps
from specbench.decoding.protocols import Drafter, DraftPolicy, ForwardOutput, ForwardRequest, NewPrompt
from specbench.decoding.records import Prefill, Step
from specbench.decoding.request import Request
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.theory import PassCosts, reading_seconds
from specbench.decoding.verify import Verdict, verification_of
from specbench.policies import build_policy
from specbench.policies.auto import AutoLength
from specbench.policies.costs import CostTable
from specbench.specs.policies import PolicySpec

Logits = Callable[[Sequence[int]], torch.Tensor]


class ScriptedCache:
    """Holds who fed which token; several scorers may share one."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, object]] = []

    @property
    def length(self) -> int:
        return len(self.entries)

    def rollback(self, length: int) -> None:
        del self.entries[max(length, 0) :]

    def reset(self) -> None:
        self.entries.clear()


class ScriptedScorer:
    """A scorer over ``logits(fed tokens) -> [vocab]``; counts its passes and the rows of each.

    With ``states(fed tokens) -> [layers, width]`` it gives hidden states.
    """

    def __init__(
        self,
        logits: Logits,
        vocab_size: int,
        *,
        cache: ScriptedCache | None = None,
        context_limit: int | None = None,
        own_entries_only: bool = True,
        states: Logits | None = None,
    ) -> None:
        self.function, self.states = logits, states
        self.vocab_size = self.embeddings = vocab_size
        self.cache = cache or ScriptedCache()
        self.context_limit = context_limit
        self.device, self.rounding = torch.device("cpu"), torch.float32
        self.own_entries_only = own_entries_only
        self.passes: list[int] = []

        self.epoch = 0
        self.root = 0

    takes_trees = True
    reads_trees = True
    batch = None
    reads_in_parts = True
    vocabulary: DraftVocabulary | None = None

    @property
    def cached_len(self) -> int:
        return self.cache.length

    def reserve(self, asked: ForwardRequest) -> bool:
        return True

    def begin(self) -> None:
        self.epoch += 1
        self.cache.reset()

    def logits(
        self,
        context: Sequence[int],
        drafted: Sequence[int] = (),
        rows: int | None = None,
        prompt: int | None = None,
    ) -> torch.Tensor:
        """The logits of a pass over a chain."""
        return self.score(ForwardRequest(self, context, drafted, rows=rows, prompt=prompt)).logits

    def score(self, asked: ForwardRequest) -> ForwardOutput:
        parents = range(-1, len(asked.tokens) - 1) if asked.parents is None else asked.parents
        rows = len(asked.tokens) + 1 if asked.rows is None else asked.rows
        self.root = len(asked.context)
        tokens = [*asked.context, *asked.tokens]
        held = self.cache.length
        fresh = tokens[held:]
        assert len(fresh) >= rows, "rows are wanted of tokens that are not fed"
        self.cache.entries += [(token, self) for token in fresh]
        self.passes.append(len(fresh))
        if self.own_entries_only:
            assert all(owner is self for _, owner in self.cache.entries), "reads what another model fed"
        fed = [token for token, _ in self.cache.entries]
        behind = [fed[: self.root - row] for row in range(max(0, rows - 1 - len(parents)), -1, -1)]
        for node, parent in enumerate(parents):
            assert parent < node, "a child stands before its parent"
            behind.append([*behind[parent - node], fed[self.root + node]])
        if self.context_limit is not None:
            assert max(map(len, behind)) <= self.context_limit, "fed beyond the context limit"
        logits = torch.stack([self.function(each) for each in behind[-rows:]])
        if not asked.layers:
            return ForwardOutput(logits)
        assert self.states is not None
        last = behind[len(behind) - len(parents) :]
        fed_now = [fed[: place + 1] for place in range(held, self.root)] + last
        every = torch.stack([self.states(each) for each in fed_now[-len(fresh) :]])
        return ForwardOutput(logits, every[:, [*asked.layers]])

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:
        held = [node for node in path if self.root + node < self.cache.length]
        if len(held) < len(path):
            length = min(length, self.root + len(held))
        entries = self.cache.entries
        self.arrange(entries, [self.root + node for node in held])
        self.cache.rollback(length)

    def arrange(self, entries: list[tuple[int, object]], path: Sequence[int]) -> None:
        """Put what is kept of a draft behind its context."""
        entries[self.root : self.root + len(path)] = [entries[place] for place in path]


def random_table(seed: int, vocab_size: int, order: int = 2, spread: float = 1.5) -> Logits:
    """Logits that depend on the last ``order`` tokens, random but fixed by the seed."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn((vocab_size,) * order + (vocab_size,), generator=generator) * spread

    def logits(tokens: Sequence[int]) -> torch.Tensor:
        key = tuple(([0] * order + list(tokens))[-order:])
        return table[key].clone()

    return logits


def fixed_script(tokens: Sequence[int], vocab_size: int, start: int) -> Logits:
    """A model that always continues a context of length ``start + i`` with ``tokens[i]``."""

    def logits(context: Sequence[int]) -> torch.Tensor:
        row = torch.zeros(vocab_size)
        row[tokens[(len(context) - start) % len(tokens)]] = 10.0
        return row

    return logits


class Replay:
    """Stands in for ``Randomness``: takes prescribed branches and keeps the probability of having taken them."""

    def __init__(self, branches: Sequence[int]) -> None:
        self.branches = list(branches)
        self.widths: list[int] = []
        self.weight = 1.0
        self.drawn = -1
        self.last: dict[int, float] = {}
        """Where the last event was a draw: the weight of the run with each token in place of ``drawn``."""

    def _branch(self, probabilities: Sequence[float]) -> int:
        possible = [i for i, probability in enumerate(probabilities) if probability > 0.0]
        taken = len(self.widths)
        if taken == len(self.branches):
            self.branches.append(0)
        self.widths.append(len(possible))
        outcome = possible[self.branches[taken]]
        self.weight *= probabilities[outcome]
        return outcome

    def draw(self, probabilities: torch.Tensor) -> int:
        exact = probabilities.double()
        shares = (exact / exact.sum()).tolist()
        self.last = {token: self.weight * share for token, share in enumerate(shares) if share > 0.0}
        self.drawn = self._branch(shares)
        return self.drawn

    def test(self, acceptance: torch.Tensor) -> tuple[int, list[float]]:
        passed, outcomes = 1.0, []
        for chance in acceptance.double().tolist():
            outcomes.append(passed * (1.0 - chance))
            passed *= chance
        self.last = {}
        return self._branch([*outcomes, passed]), [0.5] * len(acceptance)


def enumerate_outcomes(
    run: Callable[[Replay], tuple[int, ...]], length: int | None = None
) -> dict[tuple[int, ...], float]:
    """The exact distribution of what ``run`` returns, over all of its random events.

    Args:
        run: Returns tokens.
        length: Of the longest outputs, which end there whatever their last token is: of runs that differ in the draw of
            that token alone, one is made.
    """
    distribution: dict[tuple[int, ...], float] = {}
    branches: list[int] | None = []
    while branches is not None:
        replay = Replay(branches)
        outcome = run(replay)
        if len(outcome) == length and replay.last:
            assert outcome[-1] == replay.drawn, "the token drawn last is not the last of the output"
            weights = {(*outcome[:-1], token): weight for token, weight in replay.last.items()}
            del replay.widths[-1]
        else:
            weights = {outcome: replay.weight}
        for each, weight in weights.items():
            distribution[each] = distribution.get(each, 0.0) + weight
        branches = _next(replay)
    return distribution


def _next(replay: Replay) -> list[int] | None:
    """The branches after these, in the order of an odometer whose last wheel turns fastest."""
    branches = replay.branches[: len(replay.widths)]
    while branches:
        if branches[-1] + 1 < replay.widths[len(branches) - 1]:
            branches[-1] += 1
            return branches
        branches.pop()
    return None


def sequences(vocab_size: int, length: int) -> Iterator[tuple[int, ...]]:
    """All sequences of exactly this length."""
    return itertools.product(range(vocab_size), repeat=length)


class Careful(ScriptedScorer):
    """Holds nothing but the very tokens of context and draft after every pass, each fed once."""

    def score(self, asked: ForwardRequest) -> ForwardOutput:
        rows = super().score(asked)
        if asked.parents is None:
            assert [token for token, _ in self.cache.entries] == [*asked.context, *asked.tokens]
        return rows


class Ticking:
    """A clock that moves by some seconds whenever somebody reads it."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.time, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        self.time += self.seconds
        return self.time


class GivenCosts(CostTable):
    """Costs for ``auto`` that no clock changes: seconds of a drafter's pass, of the target's by their tokens, and of
    reading what the drafter has not read, by number of tokens."""

    def __init__(
        self, draft_s: float, verify_s: Mapping[int, float], reading_s: Mapping[int, float] | None = None
    ) -> None:
        self.first_s = self.later_s = draft_s
        self._passes, self._reading = PassCosts(verify_s), reading_s or {}

    def verify_s(self, n: int) -> float:
        return self._passes.target_pass_s(n)

    @property
    def reading_s(self) -> float:
        return reading_seconds(self._reading, self._unread)


def build_with(costs: CostTable, spec: str | PolicySpec) -> DraftPolicy:
    """Build a policy, and let it decide by these costs if it is ``auto``."""
    policy = build_policy(spec)
    if isinstance(policy, AutoLength):
        policy.table = costs
        policy.begin(NewPrompt())
    return policy


def steps_of(
    prompt: Sequence[int], target: Any, drafter: Drafter, clock: Clock | None = None, **options: Any
) -> Iterator[Any]:
    """Decode a request with these fields, sampling greedily with seed 0 unless they say otherwise."""
    settings = {"sampling": Sampling(), "random": Randomness(0), **options}
    yield from decode_steps(Request(prompt, target, drafter, **settings), clock)


def tokens_of(records: Iterable[Prefill | Step]) -> list[int]:
    """The output of a generation with these records."""
    tokens: list[int] = []
    for record in records:
        if isinstance(record, Step):
            tokens += record.tokens
        elif record.token is not None:
            tokens.append(record.token)
    return tokens


def judge(
    draft: Draft,
    logits: torch.Tensor,
    context: Sequence[int],
    sampling: Sampling,
    random: Randomness,
) -> Verdict:
    """The verdict on a draft under these transforms."""
    verification = verification_of(sampling)
    return verification.judge(draft, logits, context, sampling, random)
