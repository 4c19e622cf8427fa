"""Run a check, prompt by prompt; results so far stay when it is interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specbench.base.progress import Progress
from specbench.check.deviation import judge_deviations
from specbench.check.greedy import GreedyOutput, GreedyResult, check_greedy, run_plain
from specbench.check.observe import DecodingSetup
from specbench.check.results import CheckResult
from specbench.check.sampled import ExactCase, check_exact
from specbench.drafters.plain import NoDraft


@dataclass(frozen=True)
class Case:
    """A prompt to check with.

    Attributes:
        reference: The output of ``transformers``; ``None`` for no comparison.
    """

    id: str
    prompt: tuple[int, ...]
    reference: GreedyOutput | None = None


class DecodingCheck:
    """A check of one configuration: call ``check_steps``. ``result`` works at any time.

    Args:
        dtype: The dtype whose rounding explains a tie: that of the logits, or a coarser one used within the model.
        no_transformers: Why the cases have no reference; ``None`` if they have.
        bit_exact: Whether logits of plain and speculative decoding have to be equal bit for bit.
        plain_outputs: Outputs of plain decoding so far, by the prompt's token ids; new ones are added. Checks with the
            same target, cache and stop rules can share it.

    Attributes:
        progress: Receives the stages; ``None`` for none.
    """

    def __init__(
        self,
        setup: DecodingSetup,
        cases: Sequence[Case],
        *,
        dtype: torch.dtype = torch.float32,
        no_transformers: str | None = None,
        bit_exact: bool = False,
        plain_outputs: dict[tuple[int, ...], GreedyOutput] | None = None,
    ) -> None:
        self.setup, self.cases, self.dtype = setup, tuple(cases), dtype
        self._no_transformers, self._bit_exact = no_transformers, bit_exact
        self._plain_outputs = {} if plain_outputs is None else plain_outputs
        self.progress: Progress | None = None
        self._greedy: list[GreedyResult] = []
        self._exact: list[ExactCase] = []

    def check_steps(self) -> None:
        """Check greedy outputs of all prompts, and above temperature 0 every step's distribution."""
        for done, case in enumerate(self.cases):
            if self.progress is not None:
                self.progress.update("prompts", done, len(self.cases))
            if case.prompt not in self._plain_outputs:
                self._plain_outputs[case.prompt] = run_plain(self.setup, case.prompt)
            plain = self._plain_outputs[case.prompt]
            self._greedy.append(
                check_greedy(self.setup, case.id, case.prompt, case.reference, self.dtype, plain)
            )
            if not self.setup.sampling.greedy:
                self._exact.append(check_exact(self.setup, case.id, case.prompt))

    def result(self, *, complete: bool = True) -> CheckResult:
        """Return what was found so far."""
        speculative = [value for each in self._greedy for value in each.deviations]
        plain = [value for each in self._greedy for value in each.plain_deviations]
        return CheckResult(
            greedy=tuple(self._greedy),
            deviations=judge_deviations(speculative, plain, self.dtype),
            exact=tuple(self._exact),
            no_transformers=self._no_transformers,
            bit_exact=self._bit_exact,
            plain=isinstance(self.setup.drafter, NoDraft),
            sampled=not self.setup.sampling.greedy,
            complete=complete,
        )
