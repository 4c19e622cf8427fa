"""The tokens that the format of the output forces, drafted without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specbench.decoding.drafts import Guess
from specbench.drafters.free import FreeDrafter, make_free

if TYPE_CHECKING:
    from specbench.decoding.drafts import StepOutcome
    from specbench.decoding.sampling import Sampling
    from specbench.specs.drafters import Grammar


class GrammarDrafter(FreeDrafter):
    """Drafts tokens where the format of the output allows only one, and another free drafter's guesses elsewhere.

    Forced tokens are always accepted: the target's masked distribution gives them probability 1. They do not count
    towards the length that the draft policy chooses.

    Args:
        spec: Its spec, with the other drafter's, if any.
    """

    forces = True

    def __init__(self, spec: Grammar, target: Any = None) -> None:
        super().__init__(spec, target)
        self.rest = None if spec.rest is None else make_free(spec.rest, target)

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        if self.rest is not None:
            self.rest.begin(prompt)

    def take_in(self, context: Sequence[int], first: int) -> None:
        if self.rest is not None:
            self.rest.read(context)

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> Guess | None:
        return None if self.rest is None else self.rest.guess(context, drafted, sampling)

    def update(self, outcome: StepOutcome) -> None:
        if self.rest is not None:
            self.rest.update(outcome)
