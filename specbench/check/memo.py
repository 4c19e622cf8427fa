"""Scorers that remember: a context that was fed once is not fed again.

The sampled test decodes a few tokens behind one context some ten thousand times. Only new contexts cost a pass then,
and a context always has the very same logits, so that p is one distribution and not one per width of pass.

What a scorer computes still depends on what it was *fed*, by whom, and on what was rolled back, never on the context
it is handed: a decoder that forgets a roll-back or a token gets the logits of the wrong text here as well.
"""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from specbench.backends.torch.caches import KVCache, NoKVCache
from specbench.backends.torch.head_scorers import AnyHeadScorer
from specbench.backends.torch.scorer import Scorer
from specbench.check.observe import DecodingSetup
from specbench.decoding.protocols import Drafter, Pass, Rows
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.heads import HeadDrafter
from specbench.drafters.model import ModelDrafter
from specbench.drafters.several import SeveralDrafters

__all__ = ["MemoHead", "MemoScorer", "memoised"]

_MOST_BYTES = 512 << 20

Entry = tuple[int, int]
"""A token in a cache, and the number of the scorer that fed it."""


class _Rows:
    """Logits by what was fed before them; the least recently used go first when 512 MB are full."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._rows: OrderedDict[tuple[Any, ...], torch.Tensor] = OrderedDict()
        self._bytes, self._most = 0, most_bytes

    def get(self, key: tuple[Any, ...]) -> torch.Tensor | None:
        row = self._rows.get(key)
        if row is not None:
            self._rows.move_to_end(key)
        return row

    def put(self, key: tuple[Any, ...], row: torch.Tensor) -> None:
        if key not in self._rows:
            self._bytes += row.nbytes
        self._rows[key] = row
        while self._bytes > self._most and len(self._rows) > 1:
            self._bytes -= self._rows.popitem(last=False)[1].nbytes


class _TwoCaches:
    """A cache as the decoder sees it, and the real one behind it, which is only brought up to date for a real pass."""

    prefill_apart = False

    def __init__(self, real: KVCache) -> None:
        self.real = real
        self.seen: list[Entry] = []
        self.scorers: list[MemoScorer] = []
        self._keeps = not isinstance(real, NoKVCache)
        self._fed: list[Entry] = []
        self._untouched = True  # the real one may hold anything before the first pass

    @property
    def length(self) -> int:
        return len(self.seen) if self._keeps else 0

    def rollback(self, length: int) -> None:
        del self.seen[max(length, 0) :]

    def reset(self) -> None:
        self.seen.clear()

    def compute(
        self, entries: Sequence[Entry], rows: int, states: int = 0, layers: Sequence[int] = ()
    ) -> Rows:
        """Logits behind the last ``rows`` of ``entries``, by a real pass of the scorer that fed the last one.

        With ``layers``, hidden states of the last ``states`` entries at least.
        """
        scorer = self.scorers[entries[-1][1]].inner
        tokens = [token for token, _ in entries]
        if not self._keeps:
            return scorer.score(Pass(scorer, tokens, rows=rows, layers=layers))
        keep = min(_common(self._fed, entries), len(entries) - max(rows, states))
        self._keep(keep, scorer)
        for start, end in _segments(entries, keep)[:-1]:  # what others fed before
            self.scorers[entries[start][1]].inner.logits(tokens[:end], rows=1)
            self.real.rollback(end)  # of nothing: caches that forget want it between passes
        found = scorer.score(Pass(scorer, tokens, rows=rows, layers=layers))
        self._fed = list(entries)
        return found

    def compute_tree(
        self,
        context: Sequence[Entry],
        nodes: Sequence[Entry],
        parents: Sequence[int],
        states: int = 0,
        layers: Sequence[int] = (),
    ) -> Rows:
        """Logits behind the context and behind each node of a tree, by a pass of the scorer that fed its last token.

        With ``layers``, hidden states of the last ``states`` entries and nodes at least.
        """
        scorer = self.scorers[context[-1][1]].inner
        tokens = [token for token, _ in context]
        keep = min(_common(self._fed, context), len(context) - max(1, states - len(nodes)))
        self._keep(keep, scorer)
        for start, end in _segments(context, keep)[:-1]:
            self.scorers[context[start][1]].inner.logits(tokens[:end], rows=1)
            self.real.rollback(end)
        drafted = [token for token, _ in nodes]
        found = scorer.score(Pass(scorer, tokens, drafted, list(parents), layers=layers))
        self.real.rollback(len(context))
        self._fed = list(context)
        return found

    def _keep(self, length: int, scorer: Scorer) -> None:
        if self._untouched or length == 0:
            self._untouched = False
            self._fed = []
            scorer.begin()
            return
        try:
            self.real.rollback(length)
            self._fed = self._fed[:length]
        except ValueError:  # a window that has given up what would be needed
            self._fed = []
            scorer.begin()


def _segments(entries: Sequence[Entry], start: int) -> list[tuple[int, int]]:
    """Begin and end of the runs of one owner each, from ``start`` on."""
    ends = [i for i in range(start + 1, len(entries)) if entries[i][1] != entries[i - 1][1]]
    return list(zip([start, *ends], [*ends, len(entries)], strict=True))


def _common(first: Sequence[Entry], second: Sequence[Entry]) -> int:
    """Length of the common beginning."""
    length = min(len(first), len(second))
    return next((i for i in range(length) if first[i] != second[i]), length)


class MemoScorer:
    """Stands in for a scorer.

    Args:
        inner: The scorer.
        caches: Its cache, shared with the scorers that share the real one.
        rows: What is remembered.
    """

    def __init__(self, inner: Scorer, caches: _TwoCaches, rows: _Rows) -> None:
        self.inner, self.cache, self._rows = inner, caches, rows
        self.number = len(caches.scorers)
        caches.scorers.append(self)
        self.context_limit, self.device = inner.context_limit, inner.device
        self.vocab_size, self.embeddings = inner.vocab_size, inner.embeddings
        self.vocabulary = inner.vocabulary
        self.passes = self.epoch = 0
        self.takes_trees, self.reads_trees = inner.takes_trees, inner.reads_trees
        self._root = 0  # length of the last pass's context

    gives_hidden = True
    batch = None
    reads_in_parts = True

    @property
    def held(self) -> int:
        return self.cache.length

    def reserve(self, asked: Pass) -> bool:  # noqa: ARG002
        return True

    def begin(self) -> None:
        self.epoch += 1
        self.cache.reset()

    def keep(self, length: int, path: Sequence[int] = ()) -> None:
        held, root = self.cache.seen, self._root
        read = [node for node in path if root + node < self.cache.length]
        if len(read) < len(path):
            length = min(length, root + len(read))
        held[root : root + len(read)] = [held[root + node] for node in read]
        self.cache.rollback(length)

    def score(self, asked: Pass) -> Rows:
        rows = len(asked.tokens) + 1 if asked.rows is None else asked.rows
        tokens = [*asked.context, *asked.tokens]
        held = self.cache.seen
        if self.cache.length == 0:
            held.clear()  # without a cache every pass feeds everything
        before = len(held)
        held += [(token, self.number) for token in tokens[len(held) :]]
        self._root = root = len(asked.context)
        if asked.parents is None:
            logits = self._behind(held, rows)
        else:
            logits = self._behind_tree(held[:root], held[root:], asked.parents)[-rows:]
        return Rows(logits, self._states(held, before, asked) if asked.layers else None)

    def _states(self, entries: list[Entry], before: int, asked: Pass) -> torch.Tensor:
        """Hidden states of what a pass feeds, the entries from ``before`` on, [entries, layers, width]."""
        root = len(asked.context)
        branches = [tuple(entries[: place + 1]) for place in range(root)]
        for node, parent in enumerate(
            range(-1, len(entries) - root - 1) if asked.parents is None else asked.parents
        ):
            branches.append((*branches[root + parent], entries[root + node]))
        keys = [(id(self.cache), self.number, *asked.layers, *branch) for branch in branches[before:]]
        found = [self._rows.get(key) for key in keys]
        missing = next((i for i, state in enumerate(found) if state is None), None)
        if missing is not None:
            self.passes += 1
            wanted = len(keys) - missing
            if asked.parents is None:
                made = self.cache.compute(entries, 1, wanted, asked.layers)
            else:
                made = self.cache.compute_tree(
                    entries[:root], entries[root:], asked.parents, wanted, asked.layers
                )
            assert made.hidden is not None
            found[missing:] = [state.clone() for state in made.hidden[-wanted:]]
            for key, state in zip(keys[missing:], found[missing:], strict=True):
                assert state is not None
                self._rows.put(key, state)
        return torch.stack([state for state in found if state is not None])

    def row(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits behind ``tokens`` if this scorer alone had fed them, [vocab]; the decoder's cache stays as it is."""
        return self._behind([(token, self.number) for token in tokens], 1)[0]

    def _behind(self, entries: list[Entry], rows: int) -> torch.Tensor:
        ends = range(len(entries) - rows + 1, len(entries) + 1)
        keys = [(id(self.cache), self.number, *entries[:end]) for end in ends]
        found = [self._rows.get(key) for key in keys]
        missing = next((i for i, row in enumerate(found) if row is None), None)
        if missing is not None:
            self.passes += 1
            fresh = self.cache.compute(entries, rows - missing).logits
            found[missing:] = [row.clone() for row in fresh]
            for key, row in zip(keys[missing:], found[missing:], strict=True):
                assert row is not None
                self._rows.put(key, row)
        return torch.stack([row for row in found if row is not None])

    def _behind_tree(
        self, context: list[Entry], nodes: Sequence[Entry], parents: Sequence[int]
    ) -> torch.Tensor:
        """Logits behind the context and behind each node; those that are missing take one pass together."""
        branches: list[tuple[int, ...]] = [()]
        for node, parent in enumerate(parents):
            branches.append((*branches[parent + 1], node))
        keys = [
            (id(self.cache), self.number, *context, *(nodes[node] for node in branch)) for branch in branches
        ]
        found = [self._rows.get(key) for key in keys]
        missing = [place for place, row in enumerate(found) if row is None]
        if missing:
            self.passes += 1
            fed = sorted({node for place in missing for node in branches[place]})
            place_of = {-1: -1} | {node: i for i, node in enumerate(fed)}
            fresh = self.cache.compute_tree(
                context, [nodes[node] for node in fed], [place_of[parents[node]] for node in fed]
            ).logits
            for place in missing:
                row = found[place] = fresh[place_of[place - 1] + 1].clone()
                self._rows.put(keys[place], row)
        return torch.stack([row for row in found if row is not None])


class MemoHead(AnyHeadScorer):
    """Stands in for a trained head: what it has read of a context and a draft, and with whose states, tells its rows.

    Args:
        inner: The head. For rows that are not remembered it reads everything anew.
        rows: What is remembered.
    """

    def __init__(self, inner: AnyHeadScorer, rows: _Rows) -> None:
        super().__init__(inner.layers, inner.device, inner.fitted, inner.context_limit, inner.embeddings)
        self.inner, self.longest, self._remembered = inner, inner.longest, rows
        self.passes = 0
        self._forget()

    def _forget(self) -> None:
        self._states: list[torch.Tensor] = []  # by position, [layers, width]
        self._tokens: list[int] = []  # that were read, each with the states at the position before it
        self._read = [b""]  # a digest of what was read, up to each of them
        self._nodes: list[tuple[int, int]] = []  # of a draft behind them: token, and what it stands behind

    @property
    def held(self) -> int:
        return len(self._tokens) + 1 if self._tokens else 0

    def begin(self) -> None:
        super().begin()
        self._forget()

    def resume(self, kept: int) -> None:
        super().resume(kept)
        self._states, self._tokens, self._nodes = self._states[:kept], self._tokens[:kept], []
        self._read = self._read[: len(self._tokens) + 1]

    def take_states(self, length: int, states: torch.Tensor) -> None:
        self._states += states[states.shape[0] + self._known - length :].clone()
        self._known = length

    def keep(self, length: int, path: Sequence[int] = ()) -> None:  # noqa: ARG002
        if self._tokens and self.held > length:
            del self._tokens[-1], self._read[-1]
        self._nodes = []

    def score(self, asked: Pass) -> Rows:
        context = asked.context
        if len(self._tokens) < len(context) - 1:
            self._nodes = []
            for token, state in zip(
                context[len(self._tokens) + 1 :], self._states[len(self._tokens) :], strict=True
            ):
                digest = hashlib.sha256(self._read[-1] + token.to_bytes(8, "little"))
                digest.update(state.contiguous().view(torch.uint8).cpu().numpy().tobytes())
                self._tokens.append(token)
                self._read.append(digest.digest())
        parents = range(-1, len(asked.tokens) - 1) if asked.parents is None else asked.parents
        fresh = slice(len(self._nodes), None)
        self._nodes += zip(list(asked.tokens)[fresh], list(parents)[fresh], strict=True)
        branches: list[tuple[int, ...]] = [()]
        for token, parent in self._nodes:
            branches.append((*branches[parent + 1], token))
        rows = len(asked.tokens) + 1 if asked.rows is None else asked.rows
        keys = [(id(self.inner), self._read[-1], branch) for branch in branches]
        known = [self._remembered.get(key) for key in keys[-rows:]]
        found = [row for row in known if row is not None]
        if len(found) < rows:
            found = self._computed(context[0])
            for key, row in zip(keys, found, strict=True):
                self._remembered.put(key, row)
        return Rows(torch.stack(found[-rows:]))

    def _computed(self, first: int) -> list[torch.Tensor]:
        """The rows behind what was read and behind each node, by a pass over all of it.

        Args:
            first: The context's first token, which heads do not read.
        """
        self.passes += 1
        self.inner.begin()
        self.inner.take_states(len(self._tokens), torch.stack(self._states[: len(self._tokens)]))
        tokens, parents = [token for token, _ in self._nodes], [parent for _, parent in self._nodes]
        asked = Pass(self.inner, [first, *self._tokens], tokens, parents)
        return [row.clone() for row in self.inner.score(asked).logits]


def memoised(setup: DecodingSetup) -> tuple[DecodingSetup, MemoScorer]:
    """The same setup over scorers that remember, and its target."""
    caches: dict[int, _TwoCaches] = {}
    rows = _Rows()

    def remember(scorer: Scorer) -> MemoScorer:
        shared = caches.setdefault(id(scorer.cache), _TwoCaches(scorer.cache))
        return MemoScorer(scorer, shared, rows)

    target = remember(setup.target)

    def drafter_of(drafter: Drafter) -> Drafter:
        if isinstance(drafter, ModelDrafter):
            copied = copy.copy(drafter)
            if isinstance(drafter, HeadDrafter):
                copied.scorer = MemoHead(drafter.scorer, rows)  # type: ignore[assignment]
            else:
                copied.scorer = remember(drafter.scorer)  # type: ignore[assignment]
            return copied
        if isinstance(drafter, CascadeDrafter):
            cascade = copy.copy(drafter)
            cascade.model = drafter_of(drafter.model)  # type: ignore[assignment]
            return cascade
        if isinstance(drafter, SeveralDrafters):
            return SeveralDrafters([drafter_of(each) for each in drafter.drafters])
        return drafter

    return replace(setup, target=target, drafter=drafter_of(setup.drafter)), target  # type: ignore[arg-type]
