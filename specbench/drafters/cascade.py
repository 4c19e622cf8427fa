"""A cascade: a drafter without a model where it has a guess, and a model elsewhere.

The choice is made at every position, from what precedes it: the context, the draft so far and what the free drafter
remembers. So every token is drawn from one distribution that was chosen before it, as rejection sampling needs
(Leviathan et al. 2023, section 2). One draft can have tokens of both: a model begins a name, and a copy completes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specbench.decoding.drafts import Draft, StepOutcome
from specbench.decoding.logits import Logits
from specbench.decoding.protocols import Drafter
from specbench.decoding.verdicts import top
from specbench.drafters.free import FreeDrafter, Guess
from specbench.drafters.model import ModelDrafter
from specbench.specs.drafters import cascade_name

if TYPE_CHECKING:
    from specbench.decoding.protocols import Decoding, DraftPolicy, Drawing, ScorerLike
    from specbench.decoding.sampling import Randomness, Sampling


class CascadeDrafter(Drafter):
    """Takes the next token from a free drafter if it has a guess, and from a model otherwise.

    The model reads lazily: its next forward pass feeds all tokens it has missed. Beyond its context limit the free
    drafter drafts alone.

    Args:
        free: The free drafter, tried first.
        model: A small model, or a cheaper form of the target.
        max_passes: The most forward passes of the model in a step; ``None`` leaves that to the draft policy.
    """

    def __init__(self, free: FreeDrafter, model: ModelDrafter, max_passes: int | None = None) -> None:
        super().__init__(cascade_name(free.name, max_passes, model.name))
        self.free, self.model, self.max_passes = free, model, max_passes
        self._model_was_used = False

    @property
    def draftable(self) -> frozenset[int] | None:
        return self.model.draftable

    @property
    def layers(self) -> Sequence[int]:
        return self.model.layers

    @property
    def epoch(self) -> tuple[object, object]:
        return self.free.epoch, self.model.epoch

    def fork(self, scorer_like: ScorerLike) -> CascadeDrafter:
        return CascadeDrafter(self.free.fork(scorer_like), self.model.fork(scorer_like), self.max_passes)

    def begin(self, prompt: Sequence[int]) -> None:
        self.free.begin(prompt)
        self.model.begin(prompt)
        self._model_was_used = False

    def resume(self, prompt: Sequence[int], cached_tokens: int) -> None:
        self.free.resume(prompt, cached_tokens)
        self.model.resume(prompt, cached_tokens)
        self._model_was_used = False

    def propose(
        self,
        context: Sequence[int],
        budget: int,
        policy: DraftPolicy,
        sampling: Sampling,
        random: Randomness,
        drawing: Drawing = top,
    ) -> Decoding[Draft]:
        mixed = _MixedDraft(self.free.read(context))
        draft = mixed.draft
        limit = policy.begin(budget)
        with self.model.drafting():
            while len(draft.tokens) < limit:
                guess = self.free.guess(context, draft.tokens, sampling)
                if guess is not None:
                    draft.match_confidence.append(guess.match_confidence)  # type: ignore[union-attr]
                    if policy.prefers_model(draft) and self._may_draw(context, draft):
                        draft.match_confidence.pop()  # type: ignore[union-attr]
                        guess = None
                if guess is not None:
                    if not policy.expand(draft):
                        draft.rejected_guess = guess.token if guess.q is None else None
                        break
                    mixed.add_guess(guess, guess.token if guess.q is None else random.draw(guess.q))
                else:
                    if not (self._may_draw(context, draft) and policy.expand(draft)):
                        break
                    drawn = yield from self.model.draw(context, draft, policy, sampling, random)
                    if drawn is None:
                        break
                    mixed.add_drawn(*drawn)
        self._model_was_used = bool(draft.passes)
        return mixed.finished()

    def _may_draw(self, context: Sequence[int], draft: Draft) -> bool:
        allowed = self.max_passes is None or (draft.passes or 0) < self.max_passes
        return allowed and self.model.can_read(context, draft.tokens)

    def update(self, outcome: StepOutcome) -> None:
        self.free.update(outcome)
        # The model knows no path through tokens of others alone.
        self.model.update(outcome if self._model_was_used else replace(outcome, path=()))


class _MixedDraft:
    """A draft under construction, with tokens of both.

    Until the model's first token it has no logits, and no q for certain tokens; from then on it has both for all.
    """

    def __init__(self, prefill_s: float) -> None:
        self.draft = Draft(match_confidence=[], prefill_s=prefill_s, passes=0)
        self._q: list[torch.Tensor | None] = []

    def add_guess(self, guess: Guess, token: int) -> None:
        draft = self.draft
        if draft.logits:
            draft.logits.append(_as_logits(token, guess.q))
        draft.tokens.append(token)
        self._q.append(guess.q)

    def add_drawn(self, token: int, logits: Logits, q: torch.Tensor | None) -> None:
        draft = self.draft
        assert draft.match_confidence is not None
        if draft.logits is None:
            earlier = zip(draft.tokens, self._q, strict=True)
            draft.logits = [_as_logits(token, certain) for token, certain in earlier]
        draft.logits.append(logits)
        draft.tokens.append(token)
        draft.match_confidence.append(math.nan)
        self._q.append(q)

    def finished(self) -> Draft:
        draft = self.draft
        known = next((q for q in self._q if q is not None), None)
        if known is not None:
            rows = zip(draft.tokens, self._q, strict=True)
            draft.q = torch.stack([_one_hot(token, known) if q is None else q for token, q in rows])
        return draft


def _one_hot(token: int, like: torch.Tensor) -> torch.Tensor:
    row = torch.zeros_like(like)
    row[token] = 1.0
    return row


def _as_logits(token: int, q: torch.Tensor | None) -> Logits:
    """Return logits whose softmax is q, or one-hot."""
    return Logits.certain(token) if q is None else Logits(q.log())
