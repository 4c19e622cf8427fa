"""Carry a check out, part by part; what is done stays when it breaks off."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specbench.base.progress import Progress
from specbench.check.deviation import judge_deviations
from specbench.check.greedy import GreedyResult, Output, PlainRun, check_greedy, run_plain
from specbench.check.observe import DecodingSetup
from specbench.check.results import CheckResult
from specbench.check.sampled import ExactCase, SampledTest, check_exact, sample


@dataclass(frozen=True)
class Case:
    """A prompt to check with.

    Attributes:
        id: Its name.
        prompt: Token ids.
        reference: What ``transformers`` answers; ``None`` to leave that out.
    """

    id: str
    prompt: tuple[int, ...]
    reference: Output | None = None


class DecodingCheck:
    """Checks a configuration. Call ``steps``, then ``sampled`` to sample as well; ``result`` at any time.

    Args:
        setup: What is checked.
        cases: The prompts.
        dtype: Whose rounding explains a tie: the logits', or coarser if rounding happens in coarser steps within.
        no_transformers: Why the cases have no reference; ``None`` if they have.
        bit_exact: Whether plain and speculative logits have to be the same to the last bit.
        plain_runs: Plain decoding of the prompts so far, by their token ids. Checks that share target, cache and stop
            policies may share this; it is added to.

    Attributes:
        progress: Told how far it has come; ``None`` for nobody.
        announce: Called once, after the first of several prompts, with the seconds that a prompt took and how many of
            these were plain decoding; ``None`` for nobody.
    """

    def __init__(
        self,
        setup: DecodingSetup,
        cases: Sequence[Case],
        *,
        dtype: torch.dtype = torch.float32,
        no_transformers: str | None = None,
        bit_exact: bool = False,
        plain_runs: dict[tuple[int, ...], PlainRun] | None = None,
    ) -> None:
        self.setup, self.cases, self.dtype = setup, tuple(cases), dtype
        self._no_transformers, self._bit_exact = no_transformers, bit_exact
        self._plain_runs = {} if plain_runs is None else plain_runs
        self.progress: Progress | None = None
        self.announce: Callable[[float, float], None] | None = None
        self._greedy: list[GreedyResult] = []
        self._exact: list[ExactCase] = []
        self._sampled: SampledTest | None = None

    def _tell(self, stage: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress.update(stage, done, total)

    def steps(self) -> None:
        """Greedy outputs of all prompts; above temperature 0 also every step's distribution in a sampled output."""
        for done, case in enumerate(self.cases):
            self._tell("prompts", done, len(self.cases))
            began = time.monotonic()
            if case.prompt not in self._plain_runs:
                self._plain_runs[case.prompt] = run_plain(self.setup, case.prompt)
            plainly_s = time.monotonic() - began
            plain = self._plain_runs[case.prompt]
            result = check_greedy(self.setup, case.id, case.prompt, case.reference, self.dtype, plain)
            self._greedy.append(result)
            if not self.setup.sampling.greedy:
                self._exact.append(check_exact(self.setup, case.id, case.prompt))
            if done == 0 and self.announce is not None:
                self.announce(time.monotonic() - began, plainly_s)

    def sampled(self, *, bias: float, seconds: float) -> None:
        """Sample outputs of the prompts until a bias of this size would be found, or for so many seconds."""
        self._sampled = sample(
            self.setup,
            [case.prompt for case in self.cases],
            bias=bias,
            seconds=seconds,
            report=lambda spent: self._tell("sampling, at most", round(min(spent, seconds)), round(seconds)),
        )

    def result(self, *, complete: bool = True) -> CheckResult:
        """What was found so far."""
        speculative = [value for each in self._greedy for value in each.deviations]
        plain = [value for each in self._greedy for value in each.plain_deviations]
        return CheckResult(
            greedy=tuple(self._greedy),
            deviations=judge_deviations(speculative, plain, self.dtype),
            exact=tuple(self._exact),
            sampled=self._sampled,
            no_transformers=self._no_transformers,
            bit_exact=self._bit_exact,
            complete=complete,
        )
