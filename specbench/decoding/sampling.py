"""Sampling transforms, and the source of random draws.

The order of the transforms: repetition penalty (with a model's own settings), format, temperature, top-k, top-p, min-p,
softmax in float32. They agree with the logits processors of ``transformers``, apply to target and drafter alike, and
never write to their input.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.base.errors import RunError
from specbench.decoding.formats import CompiledFormat, Mask, Matcher
from specbench.decoding.logits import NoTokenError
from specbench.decoding.model_defaults import ContextRules, ModelDefaults
from specbench.options import SamplingOptions

_NUCLEUS_CANDIDATES = 256
"""Most probable tokens that are searched for a nucleus before the whole vocabulary is sorted."""

_BLOCK, _SMALL = 256, 4096
"""Tokens in a block that a draw from a large vocabulary sums, and the largest vocabulary without blocks."""

_PIECE = 32_000
"""Elements that torch converts in one thread."""


class _Seen(NamedTuple):
    """The tokens that occur in a context.

    Attributes:
        context: A copy of the context.
        mask: Whether each token occurs, [vocab].
        ids: The tokens that occur, on the logits' device.
    """

    context: list[int]
    mask: NDArray[np.bool_]
    ids: torch.Tensor

    def and_more(self, context: Sequence[int], scores: torch.Tensor) -> _Seen:
        """Return the tokens seen in another context; if that continues this one, only its new tokens are read."""
        n, width = len(self.context), scores.shape[-1]
        begin = context if n == len(context) else context[:n]
        known = begin == self.context if isinstance(begin, list) else list(begin) == self.context
        if not known or len(self.mask) != width or self.ids.device != scores.device:
            nothing = _Seen([], np.zeros(width, dtype=np.bool_), self.ids[:0].to(scores.device))
            return nothing.and_more(context, scores) if context else nothing
        if n == len(context):
            return self
        mask = self.mask.copy()
        mask[[token for token in context[n:] if token < width]] = True
        return _Seen(list(context), mask, torch.from_numpy(np.flatnonzero(mask)).to(scores.device))


@dataclass(frozen=True)
class Sampling(SamplingOptions):
    """The transforms of logits: the options, with a model's own settings and a format.

    Attributes:
        defaults: The model's own settings (``with_defaults``), if any remain to apply.
        format: What the output has to look like; ``None`` for any text.
        rules, matcher: Own settings and format for one output (``at``).

    Raises:
        UsageError: A value outside its range.

    Examples:
        >>> Sampling(temperature=0.7, top_p=0.9).greedy
        False
    """

    defaults: ModelDefaults | None = None
    rules: ContextRules | None = None
    format: CompiledFormat | None = None
    matcher: Matcher | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # A cache of the last context's tokens, not a field.
        nothing = _Seen([], np.zeros(0, dtype=np.bool_), torch.empty(0, dtype=torch.long))
        object.__setattr__(self, "_seen", nothing)

    @property
    def context_dependent(self) -> bool:
        """Whether the transforms depend on the context."""
        return self.repetition_penalty != 1.0 or self.defaults is not None or self.format is not None

    def with_format(self, format: CompiledFormat | None) -> Sampling:  # noqa: A002
        """Return the transforms with a format for the output."""
        return self if format is None else replace(self, format=format)

    def with_defaults(self, defaults: ModelDefaults, vocab_size: int) -> Sampling:
        """Return the transforms with a model's own settings; a repetition penalty that is set wins.

        Raises:
            UsageError: The settings cannot be applied to this vocabulary.
        """
        applied = defaults.applied
        if self.defaults is not None or not applied:
            return self
        ContextRules(applied, applied.get("repetition_penalty", 1.0), 1, (0,)).try_out(vocab_size)
        penalty = self.repetition_penalty
        if penalty == 1.0:
            penalty = float(applied.get("repetition_penalty", 1.0))
        more = applied.keys() - {"repetition_penalty"}
        return replace(self, repetition_penalty=penalty, defaults=defaults if more else None)

    def at(self, prompt: int, end_ids: Iterable[int]) -> Sampling:
        """Return the transforms for one output; for the arguments see ``ContextRules``."""
        if not self.context_dependent:
            return self
        rules, matcher = None, None
        if self.defaults is not None:
            rules = ContextRules(self.defaults.applied, self.repetition_penalty, prompt, end_ids)
        if self.format is not None:
            matcher = self.format.matcher(prompt)
        return replace(self, rules=rules, matcher=matcher)  # the cached context belongs to one output

    def greedily(self) -> Sampling:
        """Return the transforms with greedy choice."""
        return replace(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)

    def scores(
        self,
        logits: torch.Tensor,
        context: Sequence[int],
        drafted: Sequence[int] = (),
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits after the context-dependent transforms; their argmax is the greedy choice.

        Args:
            logits: [rows, vocab], any float dtype. The last row follows ``context + drafted``, the one before it one
                draft token less, and so on.
            context: Tokens, including the prompt.
            drafted: At least ``rows - 1`` tokens after the context.
            out: Memory for the result, float32 [rows, vocab], if one is needed; for one row, or transforms that are not
                context-dependent.

        Returns:
            Float32 [rows, vocab].
        """
        scores = _float32(logits, out)
        if not self.context_dependent:
            return scores
        if self.defaults is not None:
            assert self.rules is not None, "at() comes first"
            scores = self.rules(scores, context, drafted)
        elif scores is logits:
            scores = scores.clone()
        if self.repetition_penalty != 1.0 and self.defaults is None:
            self._penalize_seen(scores, context, drafted)
        return scores if self.format is None else self._matcher.apply(scores, context, drafted)

    @property
    def _matcher(self) -> Matcher:
        assert self.matcher is not None, "at() comes first"
        return self.matcher

    def _penalize_seen(self, scores: torch.Tensor, context: Sequence[int], drafted: Sequence[int]) -> None:
        """Apply the repetition penalty, in place."""
        seen: _Seen = self._seen.and_more(context, scores)  # type: ignore[attr-defined]
        object.__setattr__(self, "_seen", seen)
        self._penalize(scores, seen.ids)
        fresh = [
            (place, token)
            for place, token in enumerate(drafted)
            if token < scores.shape[-1] and not seen.mask[token]
        ]
        for row, drafts in enumerate(range(len(drafted) - len(scores) + 1, len(drafted) + 1)):
            ids = [token for place, token in fresh if place < drafts]
            if ids:
                self._penalize(scores[row : row + 1], torch.tensor(ids, device=scores.device))

    def rules_out_all(
        self, logits: torch.Tensor, context: Sequence[int], drafted: Sequence[int] = ()
    ) -> bool:
        """Return whether the model's own settings and the format leave no token after ``context + drafted``.

        Args:
            logits: One row, [1, vocab]; for all arguments see ``scores``.
        """
        if self.defaults is None and self.format is None:
            return False
        return float(self.scores(logits, context, drafted).max()) == -math.inf

    def why_no_token(self, logits: torch.Tensor) -> RunError:
        """Return the error that no token can be chosen by a target's logits, [rows, vocab]."""
        if self.defaults is None or not bool((logits.amax(dim=-1) > -math.inf).all()):
            return NoTokenError()
        names = [*self.defaults.applied, *(() if self.format is None else ("the format",))]
        return RunError(
            f"No token is left: {', '.join(names)} together rule all of them out.",
            "Change these, or leave the model's own settings out with --no-model-defaults.",
        )

    def mask_after(self, context: Sequence[int], drafted: Sequence[int] = ()) -> Mask | None:
        """Return the tokens that the format allows after ``context + drafted``; ``None`` for all."""
        return None if self.format is None else self._matcher.mask_after(context, drafted)

    def _penalize(self, scores: torch.Tensor, ids: torch.Tensor) -> None:
        """Penalize tokens in all rows, in place."""
        values = scores.index_select(-1, ids)
        penalized = torch.where(
            values < 0, values * self.repetition_penalty, values / self.repetition_penalty
        )
        scores.index_copy_(-1, ids, penalized)

    def choose(self, logits: torch.Tensor, context: Sequence[int], drafted: Sequence[int] = ()) -> list[int]:
        """Return the greedy choice of every row, the first of equals; for the arguments see ``scores``.

        Raises:
            NoTokenError: A row holds NaN, or -inf alone.
        """
        if self.format is not None and self.defaults is None and self.repetition_penalty == 1.0:
            return self._choose_allowed(logits, context, drafted)
        return _best(self.scores(logits, context, drafted) if self.context_dependent else logits)

    def _choose_allowed(
        self, logits: torch.Tensor, context: Sequence[int], drafted: Sequence[int]
    ) -> list[int]:
        """Return the choices under masks alone: mostly the best token is allowed, and its row is not masked."""
        masks = self._matcher.masks(context, drafted, len(logits))
        choices = _best(logits)
        for row, mask in enumerate(masks):
            if mask is not None and mask.only is not None:
                choices[row] = mask.only
            elif mask is not None and not mask.allows(choices[row]):
                before = drafted[: len(drafted) - len(logits) + 1 + row]
                scores = logits[row : row + 1].float().clone()
                choices[row] = _best(self._matcher.apply(scores, context, before))[0]
        return choices

    def probabilities(
        self,
        logits: torch.Tensor,
        context: Sequence[int],
        drafted: Sequence[int] = (),
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the distributions to draw from, in ``out`` if given; for the arguments see ``scores``.

        Returns:
            Float32 [rows, vocab]; one-hot rows in greedy decoding.
        """
        scores = self.scores(logits, context, drafted, out)
        if self.greedy:
            best = scores.argmax(dim=-1, keepdim=True)
            return (torch.zeros_like(scores) if out is None else out.zero_()).scatter_(-1, best, 1.0)
        own = scores is not logits  # a copy may be written to
        if self.temperature != 1.0:
            scores = scores.div_(self.temperature) if own else scores / self.temperature
        if self.top_k:
            scores = _keep_top_k(scores, self.top_k)
        if self.top_p < 1.0:
            scores = _keep_nucleus(scores, self.top_p)
        if self.min_p > 0.0:
            scores = _keep_min_p(scores, self.min_p)
        own = scores is not logits and scores.device.type == "cpu" and not scores.requires_grad
        if out is None and own:
            out = scores
        # In place: allocating takes longer than the softmax.
        return torch.softmax(scores, dim=-1, out=out)


# numpy's argmax works on whole vectors, where torch's goes element by element; both take the first of equals, and NaN
# for the largest. But numpy knows no bfloat16. To convert or sum many elements torch calls up its other threads, which
# takes longer than the work on one row, and 50 times as long where another process has their core: hence pieces.


def _argmax_by_pieces(row: torch.Tensor) -> tuple[int, float]:
    """The first of the largest elements of a row on the CPU, and its value; NaN counts as the largest."""
    best, largest = 0, -math.inf
    for begin in range(0, len(row), _PIECE):
        piece = row[begin : begin + _PIECE].detach().float().numpy()
        index = int(piece.argmax())
        value = float(piece[index])
        if value != value:
            return begin + index, value
        if value > largest:
            best, largest = begin + index, value
    return best, largest


def _best(scores: torch.Tensor) -> list[int]:
    """Return the largest entry of every row, the first of equals; raises ``NoTokenError`` for NaN, or -inf alone."""
    if scores.device.type != "cpu":
        largest = scores.float().max(dim=-1)
        none = ~(largest.values > -math.inf)
        choices = largest.indices.masked_fill(none, -1).tolist()  # the device is read once
        failed = -1 in choices
    elif scores.dtype == torch.float32 or scores.numel() <= _PIECE:
        rows = scores.detach().float().numpy()
        best = rows.argmax(axis=-1)
        choices, failed = best.tolist(), not bool((rows[np.arange(len(rows)), best] > -math.inf).all())
    else:
        pieces = [_argmax_by_pieces(row) for row in scores]
        choices, failed = [index for index, _ in pieces], not all(value > -math.inf for _, value in pieces)
    if failed:
        raise NoTokenError
    return choices


def _float32(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Logits as float32, themselves if they are that already."""
    if logits.dtype == torch.float32 or logits.device.type != "cpu" or (out is None and logits.shape[0] != 1):
        return logits.float()
    converted = torch.empty(logits.shape, dtype=torch.float32) if out is None else out
    if logits.numel() <= _PIECE:
        return converted.copy_(logits)
    width = _PIECE // logits.shape[0]
    for piece, into in zip(logits.split(width, dim=-1), converted.split(width, dim=-1), strict=True):
        into.copy_(piece)
    return converted


def _keep_top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Mask everything below the k-th largest score of its row. Shapes [rows, vocab] -> [rows, vocab]."""
    smallest_kept = scores.topk(min(k, scores.shape[-1]), dim=-1).values[..., -1:]
    return scores.masked_fill(scores < smallest_kept, -math.inf)


def _keep_nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Mask everything outside the smallest set of mass top_p (Holtzman et al. 2020). Shapes [rows, vocab] -> same.

    A token stays iff the mass of it and everything less probable exceeds 1 - top_p, with ties in the order of an
    ascending sort, as in ``transformers``. A few hundred candidates decide nearly every row without a full sort.
    """
    candidates = min(_NUCLEUS_CANDIDATES, scores.shape[-1])
    largest = scores.topk(candidates, dim=-1).values
    below = (largest - scores.logsumexp(dim=-1, keepdim=True)).exp().cumsum(dim=-1)
    # Strictly inside the candidates, away from ties and from rounding at the border, the cut can be read off there.
    index = (below < top_p).sum(dim=-1, keepdim=True)
    margin = (below - top_p).abs().amin(dim=-1)
    if bool((index < candidates - 1).all()) and bool((margin > 1e-5).all()):
        edge = largest.gather(-1, index)
        tied = largest.gather(-1, index + 1) == edge
        if not bool(tied.any()):
            return scores.masked_fill(scores < edge, -math.inf)
    ascending, order = scores.sort(dim=-1)
    dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    dropped[..., -1] = False
    return scores.masked_fill(dropped.scatter(-1, order, dropped), -math.inf)


def _keep_min_p(scores: torch.Tensor, min_p: float) -> torch.Tensor:
    """Mask tokens less probable than min_p times the most probable one. Shapes [rows, vocab] -> [rows, vocab]."""
    probabilities = scores.softmax(dim=-1)
    top = probabilities.amax(dim=-1, keepdim=True)
    return scores.masked_fill(probabilities < min_p * top, -math.inf)


class Randomness:
    """Every random draw of a run, from one explicitly seeded generator.

    Two kinds of event exist, and nothing else in the program is random: a token is *drawn* from a distribution, and the
    drafts of a step are *tested* in order. (Tests that enumerate a run put another object of this shape in its place.)

    Args:
        seed: Seed of the generator; the same seed, model, dtype and options give the same tokens. It is on the CPU,
            wherever the distributions are, so that another device draws the same but for rounding.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, probabilities: torch.Tensor) -> int:
        """One token id from ``probabilities``, [vocab], which need not sum to 1. Inverse CDF in float64."""
        u = float(torch.rand(1, generator=self.generator, dtype=torch.float64))
        if probabilities.device.type in ("cpu", "mps"):  # Apple's GPUs have no float64
            return _at_share(probabilities.cpu(), u)
        cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
        total = _positive(float(cumulative[-1]))
        index = int(torch.searchsorted(cumulative, u * total, right=True))
        return index if index < len(cumulative) else _last_possible(probabilities)

    def test(self, acceptance: torch.Tensor) -> tuple[int, list[float]]:
        """Test drafts in order, draft i passing with probability ``acceptance[i]``, until one fails.

        Args:
            acceptance: Float32 [γ], each in [0, 1].

        Returns:
            The number of drafts that passed before the first failure, and the γ uniform numbers.
        """
        r = torch.rand(len(acceptance), generator=self.generator).tolist()
        chances = acceptance.tolist()
        accepted = next((i for i, chance in enumerate(chances) if not r[i] < chance), len(r))
        return accepted, r


def _at_share(probabilities: torch.Tensor, u: float) -> int:
    """The token at which the cumulative sum, in float64, passes the share ``u`` of the total.

    In a large vocabulary sums of blocks find the block, and only within that are tokens added up one by one.
    """
    values = probabilities.detach().numpy()
    begin, end, before = 0, len(values), 0.0
    share: float | None = None
    if end > _SMALL:
        blocks = end // _BLOCK
        whole = blocks * _BLOCK
        sums = np.add.reduce(values[:whole].reshape(blocks, _BLOCK), axis=1, dtype=np.float64)
        sums[-1] += np.add.reduce(values[whole:], dtype=np.float64)
        cumulative = sums.cumsum()
        share = u * _positive(cumulative[-1])
        block = min(int(cumulative.searchsorted(share, side="right")), blocks - 1)
        begin, end = block * _BLOCK, end if block == blocks - 1 else (block + 1) * _BLOCK
        before = cumulative[block - 1] if block else 0.0
    within = values[begin:end].cumsum(dtype=np.float64)
    if share is None:
        share = u * _positive(within[-1])
    index = int(within.searchsorted(share - before, side="right"))
    # Behind the end if the product with the total, or the difference of two sums, was rounded up to it.
    return begin + index if index < len(within) else _last_possible(probabilities[:end])


def _positive(total: float) -> float:
    """Return a total mass; raise ``NoTokenError`` if it is 0 or NaN."""
    if not total > 0.0:
        raise NoTokenError
    return total


def _last_possible(probabilities: torch.Tensor) -> int:
    """The last token with any mass."""
    return int(probabilities.nonzero()[-1])
