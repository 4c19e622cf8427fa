"""An n-gram drafter: continuations counted in the prompt and the output themselves, and no model to run."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from specbench.decoding.clocks import Clock, WallClock
from specbench.decoding.protocols import Draft, Guess
from specbench.errors import UsageError
from specbench.specs.notation import Options, join_spec

if TYPE_CHECKING:
    from specbench.decoding.protocols import LengthPolicy
    from specbench.decoding.sampling import Randomness, Sampling

__all__ = ["NGramDrafter"]

_HIGHEST_ORDER = 16
"""Every token is counted once per context length, so the order multiplies the memory."""

_WRITTEN = {
    "order": "order=N",
    "max": "max=TOKENS",
    "window": "window=TOKENS",
    "keep": "keep",
    "top-k": "top-k=K",
    "sample": "sample",
    "min": "min=TOKENS",
}
_DEFAULTS: Mapping[str, object] = {
    "order": 4,
    "max": None,
    "window": None,
    "keep": False,
    "top-k": 1,
    "sample": False,
    "min": 1,
}
_DEFAULTS_IN_CASCADE: Mapping[str, object] = {**_DEFAULTS, "min": 2}


class _Continuations:
    """How often each token followed one context, and which did so most often (of equals the last seen)."""

    __slots__ = ("_best", "counts", "total")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}  # the token seen last stands last
        self.total = 0
        self._best: int | None = None  # None: find it when it is asked for

    def add(self, token: int) -> None:
        count = self.counts.pop(token, 0) + 1
        self.counts[token] = count
        self.total += 1
        if self._best is not None and count >= self.counts[self._best]:
            self._best = token

    def remove(self, token: int) -> None:
        """Take back the oldest sight of ``token``; its last one, if another is left, is where it was."""
        self.total -= 1
        if self.counts[token] > 1:
            self.counts[token] -= 1
        else:
            del self.counts[token]
        if token == self._best:
            self._best = None

    def most_frequent(self) -> int:
        if self._best is None:
            highest = max(self.counts.values())
            self._best = next(token for token in reversed(self.counts) if self.counts[token] == highest)
        return self._best

    def evidence(self) -> float:
        """What speaks for the most frequent token: its share of the counts and one sight of something else."""
        return self.counts[self.most_frequent()] / (self.total + 1)


class NGramDrafter:
    """Drafts the most frequent continuation of the longest known context, token after token until a miss.

    Continuations are counted for contexts of 1 to ``order - 1`` tokens, in the prompt and in what was
    emitted. A draft looks up the longest context first and backs off to shorter ones; of equally frequent
    tokens the one seen last is taken. Its own drafts extend the context. When nothing is known it proposes
    nothing: a plain target pass.

    The prompt is read at the first proposal or commit after ``begin``. Work per token does not depend on the
    length of the context.

    Args:
        order: Length of the longest n-gram counted, context and continuation together: 2 (bigrams) to 16.
        max_drafts: The most tokens drafted in a step; ``None`` leaves that to the draft-length rule.
        window: Forget what was counted at tokens that are no longer among the last ``window`` read; ``None``
            forgets nothing before the next prompt.
        keep: Keep the counts between prompts (no n-gram spans two of them). Without a window they grow for
            ever.
        top_k: With k > 1, every emitted token also adds 1 to the counts of the k tokens that the target's
            untransformed logits prefer in its place. It is itself counted once, among them or not. It passes
            for the last one seen, and the others for seen the earlier the less probable they are. The window
            forgets them all together. With 1 only the emitted token is counted.
        sample: Draw from the normalised counts of the longest known context instead, and keep them as q; the
            sampling transforms do not apply to them. In greedy decoding, and before the first commit has
            shown how large the vocabulary is, the most frequent token is taken all the same.
        clock: Times the reading of the prompt.
        min_context: Shortest context that counts, in tokens: 1 to ``order - 1``.
        defaults: What ``name`` leaves out, by the names of the options.

    Raises:
        UsageError: A value outside its range.
    """

    def __init__(
        self,
        order: int = 4,
        max_drafts: int | None = None,
        window: int | None = None,
        keep: bool = False,
        top_k: int = 1,
        sample: bool = False,
        clock: Clock | None = None,
        min_context: int = 1,
        defaults: Mapping[str, object] = _DEFAULTS,
    ) -> None:
        if not 2 <= order <= _HIGHEST_ORDER:
            raise UsageError(
                f"The n-gram order is {order}.", f"Give a number from 2 (bigrams) to {_HIGHEST_ORDER}."
            )
        for what, value in (("draft limit", max_drafts), ("window", window), ("top-k", top_k)):
            if value is not None and value < 1:
                raise UsageError(f"The n-gram {what} is {value}.", "Give at least 1.")
        if not 1 <= min_context < order:
            raise UsageError(
                f"The shortest context of the n-grams is {min_context} tokens.",
                f"Give 1 to {order - 1}, the longest for order {order}.",
            )
        self.order = order
        self.min_context = min_context
        self._defaults = defaults
        self.max_drafts = max_drafts
        self.window = window
        self.keep = keep
        self.top_k = top_k
        self.sample = sample
        self._clock = clock or WallClock()
        self.epoch = 0
        self._continuations: dict[tuple[int, ...], _Continuations] = {}
        self._recent: deque[tuple[list[tuple[int, ...]], list[int]]] = (
            deque()
        )  # one entry per token in the window
        self._read = 0
        self._vocabulary: int | None = None
        self._device = torch.device("cpu")

    @classmethod
    def from_options(cls, options: Mapping[str, str | bool], *, in_cascade: bool = False) -> NGramDrafter:
        """Build one from the options of the command line: order, min, max, window, keep, top-k, sample.

        Args:
            options: What was given.
            in_cascade: Whether a model drafts where this one does not: then a context has two tokens at least.

        Raises:
            UsageError: An unknown option or a bad value.
        """
        given = Options("ngram", options, _WRITTEN)
        order = given.integer("order", 4)
        return cls(
            order=order,
            min_context=given.integer("min", min(2, order - 1) if in_cascade else 1),
            defaults=_DEFAULTS_IN_CASCADE if in_cascade else _DEFAULTS,
            max_drafts=given.integer("max", None),
            window=given.integer("window", None),
            keep=given.flag("keep"),
            top_k=given.integer("top-k", 1),
            sample=given.flag("sample"),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def name(self) -> str:
        values = {
            "order": self.order,
            "max": self.max_drafts,
            "window": self.window,
            "keep": self.keep,
            "top-k": self.top_k,
            "sample": self.sample,
            "min": self.min_context,
        }
        return join_spec("ngram", values, self._defaults)

    def begin(self, prompt: Sequence[int]) -> None:
        self.epoch += 1
        if not self.keep:
            self._continuations.clear()
            self._recent.clear()
        self._read = 0
        self._vocabulary = None

    def propose(
        self, context: Sequence[int], room: int, policy: LengthPolicy, sampling: Sampling, random: Randomness
    ) -> Draft:
        draft = Draft(evidence=[], prefill_s=self.read(context))
        limit = policy.begin(room if self.max_drafts is None else min(room, self.max_drafts))
        distributions: list[torch.Tensor] = []
        while len(draft.tokens) < limit:
            guess = self.guess(context, draft.tokens, sampling)
            if guess is None:
                break
            draft.evidence.append(guess.evidence)  # type: ignore[union-attr]
            if not policy.another(draft):
                break
            if guess.q is not None:
                distributions.append(guess.q)
            draft.tokens.append(guess.token if guess.q is None else random.draw(guess.q))
        if distributions:
            draft.q = torch.stack(distributions)
        return draft

    def read(self, context: Sequence[int]) -> float:
        first = self._read == 0
        began = self._clock.now()
        if first:
            self._read_up_to(len(context), context)
        return self._clock.now() - began if first else 0.0

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> Guess | None:
        """By the longest context that is known; nothing behind ``max_drafts`` drafts."""
        if self.max_drafts is not None and len(drafted) >= self.max_drafts:
            return None
        known = self._longest_known([*context[-(self.order - 1) :], *drafted][-(self.order - 1) :])
        if known is None:
            return None
        sampled = self.sample and not sampling.greedy and self._vocabulary is not None
        return Guess(known.most_frequent(), known.evidence(), self._distribution(known) if sampled else None)

    def _longest_known(self, tail: Sequence[int]) -> _Continuations | None:
        """What followed the longest suffix of ``tail`` that counts and was ever followed by anything."""
        for first in range(len(tail) - self.min_context + 1):
            known = self._continuations.get(tuple(tail[first:]))
            if known is not None:
                return known
        return None

    def _distribution(self, known: _Continuations) -> torch.Tensor:
        """The normalised counts, float32 [vocab]."""
        counts = torch.tensor(list(known.counts.values()), dtype=torch.float32)
        tokens = torch.tensor(list(known.counts), device=self._device)
        q = torch.zeros(self._vocabulary or 0, device=self._device)
        return q.scatter_(0, tokens, (counts / counts.sum()).to(self._device))

    def commit(self, context: Sequence[int], emitted: int, logits: torch.Tensor) -> None:
        self._vocabulary = logits.shape[-1]
        self._device = logits.device
        fresh = len(context) - emitted
        self._read_up_to(fresh, context)
        if self.top_k > 1:
            best = logits[:emitted].topk(min(self.top_k, logits.shape[-1]), dim=-1).indices.tolist()
            for i, ranked in enumerate(best, start=fresh):
                self._count(context, i, [token for token in reversed(ranked) if token != context[i]])
            self._read = len(context)
        else:
            self._read_up_to(len(context), context)

    def rollback(self, length: int) -> None:
        """Only emitted tokens are ever counted, so there is nothing to take back."""

    def _read_up_to(self, end: int, context: Sequence[int]) -> None:
        """Count the tokens of ``context[:end]`` that were not read yet."""
        for i in range(self._read, end):
            self._count(context, i)
        self._read = max(self._read, end)

    def _count(self, context: Sequence[int], i: int, others: Sequence[int] = ()) -> None:
        """Count token ``i``, and ``others`` that might have stood there, for every context before it."""
        contexts = [tuple(context[i - n : i]) for n in range(1, min(self.order - 1, i) + 1)]
        tokens = [*others, context[i]]
        for key in contexts:
            known = self._continuations.get(key)
            if known is None:
                known = self._continuations[key] = _Continuations()
            for token in tokens:
                known.add(token)
        if self.window is not None:
            self._recent.append((contexts, tokens))
            if len(self._recent) > self.window:
                self._forget(*self._recent.popleft())

    def _forget(self, contexts: Sequence[tuple[int, ...]], tokens: Sequence[int]) -> None:
        for key in contexts:
            known = self._continuations[key]
            for token in tokens:
                known.remove(token)
            if not known.counts:
                del self._continuations[key]
