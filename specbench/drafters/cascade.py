"""A cascade: a drafter without a model where it has a guess, and a model elsewhere.

At every position the choice depends only on what precedes it: the context, the draft so far and what the free drafter
remembers. So every token is drawn from one distribution that was chosen before it, as rejection sampling needs
(Leviathan et al. 2023, section 2). One draft can have tokens of both: a model begins a name, and a copy completes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specbench.decoding.drafts import Draft, StepOutcome
from specbench.decoding.protocols import Drafter
from specbench.drafters.chain import ChainDrafter
from specbench.drafters.free import FreeDrafter, MixedDraft

if TYPE_CHECKING:
    from specbench.decoding.protocols import Decoding, ScorerLike, StepPlan


class CascadeDrafter(Drafter):
    """Takes the next token from a free drafter if it has a guess, and from a model otherwise.

    The model reads lazily: its next forward pass feeds all tokens it has missed. Beyond its context limit the free
    drafter drafts alone.

    Args:
        free: The free drafter, tried first.
        model: A small model, or a cheaper form of the target.
    """

    def __init__(self, free: FreeDrafter, model: ChainDrafter) -> None:
        name = f"{free.traits.name}+{model.traits.name}"
        super().__init__(replace(model.traits, name=name, trees=False))
        self.free, self.model = free, model
        self._model_was_used = False

    @property
    def epoch(self) -> tuple[object, object]:
        return self.free.epoch, self.model.epoch

    def unread(self, prompt: Sequence[int]) -> int:
        return self.model.unread(prompt)

    def fork(self, scorer_like: ScorerLike) -> CascadeDrafter:
        return CascadeDrafter(self.free.fork(scorer_like), self.model.fork(scorer_like))

    def begin(self, prompt: Sequence[int]) -> None:
        self.free.begin(prompt)
        self.model.begin(prompt)
        self._model_was_used = False

    def propose(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        mixed = MixedDraft(self.free, plan, context)
        draft, policy = mixed.draft, plan.policy
        limit = policy.begin_step(plan.budget)
        with self.model.drafting(context, draft):
            while mixed.continues(limit):
                draft.next_is_read = self.model.has_read(draft)
                guess = draft.guess = self.free.allowed_guess(context, draft.tokens, plan.sampling)
                if (
                    guess is not None
                    and policy.prefers_model(draft)
                    and self.model.can_read(context, draft.tokens)
                ):
                    guess = draft.guess = None
                if guess is not None:
                    if not policy.expand(draft):
                        break
                    mixed.add_guess(guess)
                else:
                    if not (self.model.can_read(context, draft.tokens) and policy.expand(draft)):
                        break
                    drawn = yield from self.model.draw(context, draft, plan, limit)
                    if drawn is None:
                        break
                    mixed.add(*drawn)
        self._model_was_used = bool(draft.passes)
        return mixed.finished()

    def update(self, outcome: StepOutcome) -> None:
        self.free.update(outcome)
        # The model knows no path through tokens of others alone.
        self.model.update(outcome if self._model_was_used else replace(outcome, path=()))
