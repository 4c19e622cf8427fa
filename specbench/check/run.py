"""Run a check, prompt by prompt; results so far stay when it is interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.base.progress import Progress
from specbench.check.deviation import judge_deviations
from specbench.check.greedy import GreedyOutput, GreedyResult, check_greedy, run_plain
from specbench.check.observe import scorer_of
from specbench.check.results import CheckResult
from specbench.check.sampled import ExactCase, check_exact
from specbench.decoding.request import Request


@dataclass(frozen=True)
class Case:
    """A prompt to check with.

    Attributes:
        request: What decides its output.
        reference: The output of ``transformers``; ``None`` for no comparison.
    """

    id: str
    request: Request
    reference: GreedyOutput | None = None


class DecodingCheck:
    """A check of one configuration: call ``check_steps``. ``result`` works at any time.

    Args:
        cases: At least one, which differ only in their prompts.
        no_transformers: Why the cases have no reference; ``None`` if they have.
        bit_exact: Whether logits of plain and speculative decoding have to be equal bit for bit.
        plain_outputs: Outputs of plain decoding so far, by the prompt's token ids; new ones are added. Checks with the
            same target, cache and stop rules can share it.

    Attributes:
        progress: Receives the stages; ``None`` for none.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        *,
        no_transformers: str | None = None,
        bit_exact: bool = False,
        plain_outputs: dict[tuple[int, ...], GreedyOutput] | None = None,
    ) -> None:
        self._cases, self._one = cases, cases[0].request
        self._sampled = not self._one.sampling.greedy
        self._no_transformers, self._bit_exact = no_transformers, bit_exact
        self._plain_outputs = {} if plain_outputs is None else plain_outputs
        self.progress: Progress | None = None
        self._greedy: list[GreedyResult] = []
        self._exact: list[ExactCase] = []

    @property
    def label(self) -> str:
        """The configuration as sweeps name it."""
        return self.result().label

    def check_steps(self) -> None:
        """Check greedy outputs of all prompts, and above temperature 0 every step's distribution."""
        for done, case in enumerate(self._cases):
            if self.progress is not None:
                self.progress.update("prompts", done, len(self._cases))
            prompt = tuple(case.request.prompt)
            if prompt not in self._plain_outputs:
                self._plain_outputs[prompt] = run_plain(case.request)
            plain = self._plain_outputs[prompt]
            self._greedy.append(check_greedy(case.request, case.id, case.reference, plain))
            if self._sampled:
                self._exact.append(check_exact(case.request, case.id))

    def result(self, *, complete: bool = True) -> CheckResult:
        """Return what was found so far."""
        speculative = [value for each in self._greedy for value in each.deviations]
        plain = [value for each in self._greedy for value in each.plain_deviations]
        return CheckResult(
            drafter=self._one.drafter.traits.name,
            draft_policy=self._one.policy.name,
            greedy=tuple(self._greedy),
            deviations=judge_deviations(speculative, plain, scorer_of(self._one).rounding),
            exact=tuple(self._exact),
            no_transformers=self._no_transformers,
            bit_exact=self._bit_exact,
            sampled=self._sampled,
            complete=complete,
        )
