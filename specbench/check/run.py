"""Carry a check out, part by part; what is done stays when it breaks off."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from specbench.check.chisquare import SIGNIFICANCE
from specbench.check.deviation import judge_deviations
from specbench.check.greedy import GreedyResult, Output, PlainRun, check_greedy, run_plain
from specbench.check.memo import memoised
from specbench.check.observe import DecodingSetup
from specbench.check.results import CheckResult
from specbench.check.sampled import (
    DEPTH,
    ExactCase,
    SampledTest,
    check_exact,
    choose_contexts,
    plan_context,
    sample_context,
)
from specbench.progress import Progress

__all__ = ["Case", "DecodingCheck", "estimated_seconds"]

_DECODINGS = (3.0, 4.0)
"""Decodings of all prompts, clean passes included, in units of ``transformers``' own; without and with sampling."""

_SHARED_DECODINGS = 1.7
"""Of these, those that several configurations share: ``transformers``' own and plain decoding."""

_TIMED_OUTPUTS = 100
"""Sampled outputs that tell how long the others take."""


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
    """Checks a configuration. Call ``greedy``, then ``exact`` and ``sampled`` if it samples; ``result`` at any time.

    Args:
        setup: What is checked.
        cases: The prompts.
        bias: The bias that sampling is to find with 95% power.
        dtype: Whose rounding explains a tie: the logits', or coarser if rounding happens in coarser steps within.
        no_transformers: Why the cases have no reference; ``None`` if they have.
        bit_exact: Whether plain and speculative logits have to be the same to the last bit.
        plain_runs: Plain decoding of the prompts so far, by their token ids. Checks that share target, cache and stop
            rules may share this; it is added to.

    Attributes:
        progress: Told how far it has come; ``None`` for nobody.
        announce: Told once, when the first outputs are sampled, how many there will be at most and in how many seconds;
            ``None`` for nobody.
    """

    def __init__(
        self,
        setup: DecodingSetup,
        cases: Sequence[Case],
        *,
        bias: float = 0.05,
        dtype: torch.dtype = torch.float32,
        no_transformers: str | None = None,
        bit_exact: bool = False,
        plain_runs: dict[tuple[int, ...], PlainRun] | None = None,
    ) -> None:
        self.setup, self.cases, self.bias, self.dtype = setup, tuple(cases), bias, dtype
        self._no_transformers, self._bit_exact = no_transformers, bit_exact
        self._plain_runs = {} if plain_runs is None else plain_runs
        self.progress: Progress | None = None
        self.announce: Callable[[int, float], None] | None = None
        self._greedy: list[GreedyResult] = []
        self._exact: list[ExactCase] = []
        self._sampled: list[SampledTest] = []

    def _tell(self, stage: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress.update(stage, done, total)

    def _tell_sampled(self, before: int, total: int, began: float, done: int) -> None:
        self._tell("sampled outputs", before + done, total)
        if before + done == _TIMED_OUTPUTS and self.announce is not None:
            self.announce(total, (time.monotonic() - began) / done * total)

    def greedy(self) -> None:
        """Greedy outputs of all prompts."""
        for done, case in enumerate(self.cases):
            self._tell("greedy outputs", done, len(self.cases))
            if case.prompt not in self._plain_runs:
                self._plain_runs[case.prompt] = run_plain(self.setup, case.prompt)
            plain = self._plain_runs[case.prompt]
            result = check_greedy(self.setup, case.id, case.prompt, case.reference, self.dtype, plain)
            self._greedy.append(result)

    def exact(self) -> None:
        """The distribution of every step of a sampled output of each prompt."""
        for done, case in enumerate(self.cases):
            self._tell("exact distributions", done, len(self.cases))
            self._exact.append(check_exact(self.setup, case.id, case.prompt))

    def sampled(self) -> None:
        """Many short outputs behind the sharpest contexts that ``exact`` has met."""
        candidates = [candidate for case in self._exact for candidate in case.candidates]
        chosen = choose_contexts(candidates, self.setup.target.context_limit)
        if not chosen:
            return
        limit = SIGNIFICANCE / (len(chosen) * DEPTH)  # Bonferroni
        setup, target = memoised(self.setup)
        plans = []
        for done, candidate in enumerate(chosen):
            self._tell("planning the samples", done, len(chosen))
            plans.append(plan_context(target, setup.sampling, candidate, self.bias, limit))
        total, before, began = sum(plan.runs for plan in plans), 0, time.monotonic()
        for number, plan in enumerate(plans):
            setup = replace(setup, seed=self.setup.seed + number)
            told = partial(self._tell_sampled, before, total, began)
            found = sample_context(setup, target, plan, limit, told)
            self._sampled += found
            before += plan.runs
            if not all(test.sound for test in found):
                break  # it is proven

    def result(self, *, complete: bool = True) -> CheckResult:
        """What was found so far."""
        speculative = [value for each in self._greedy for value in each.deviations]
        plain = [value for each in self._greedy for value in each.plain_deviations]
        return CheckResult(
            greedy=tuple(self._greedy),
            deviations=judge_deviations(speculative, plain, self.dtype),
            exact=tuple(self._exact),
            sampled=tuple(self._sampled),
            bias=None if self.setup.sampling.greedy else self.bias,
            no_transformers=self._no_transformers,
            bit_exact=self._bit_exact,
            complete=complete,
        )


def estimated_seconds(plainly_s: float, *, sampled: bool, configurations: int = 1) -> float:
    """How long a check may take but for the sampled outputs, from how long ``transformers`` takes for its answers.

    Args:
        plainly_s: Seconds for the answers to all prompts.
        sampled: Whether something is sampled: one output of each prompt is then decoded step by step.
        configurations: How many are checked.
    """
    runs = _DECODINGS[sampled]
    return plainly_s * (_SHARED_DECODINGS + configurations * (runs - _SHARED_DECODINGS))
