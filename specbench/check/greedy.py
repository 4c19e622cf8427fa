"""Compare greedy outputs of speculative decoding with plain decoding's and ``transformers``', token by token."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from specbench.backends.torch.parity import Difference, find_difference, first_difference
from specbench.base.record import Json
from specbench.check.deviation import clean_rows, deviation, sample_columns
from specbench.check.invariants import RunRules, Violation, checked
from specbench.check.observe import greedily, scorer_of
from specbench.decoding.records import Step
from specbench.decoding.request import Request

Verdict = Literal["identical", "numerical tie", "nothing tested", "wrong"]

Against = Literal["plain", "transformers"]
"""What an output is compared with."""

Piece = Callable[[int], str]
"""Returns a token's own text."""


@dataclass
class GreedyOutput:
    """A greedy output and its logits.

    Attributes:
        digests: Hash of all bits of the logits before every token.
        deviations: Deviation of these logits from those of one clean forward over the output.
        violations: Violated invariants.
        steps, drafted, accepted: Counts of the run.
    """

    tokens: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    deviations: list[float] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class GreedyResult:
    """The result for one prompt.

    Attributes:
        output, plain: What speculative and plain decoding gave.
        differences: The first difference from each output that it was compared with; ``None`` for none.
    """

    prompt: str
    output: GreedyOutput
    plain: GreedyOutput
    differences: Mapping[Against, Difference | None]

    @property
    def violations(self) -> list[Violation]:
        """Violated invariants of both generations, the speculative one first."""
        return [*self.output.violations, *self.plain.violations]

    @property
    def bitwise(self) -> list[bool]:
        """For each row of logits that both generations computed after the same tokens, whether its bits are equal."""
        differs_at = first_difference(self.output.tokens, self.plain.tokens)
        rows = None if differs_at is None else differs_at + 1  # the row of the difference included
        both = zip(self.output.digests[:rows], self.plain.digests[:rows], strict=False)
        return [digest == other for digest, other in both]


def verdict_of(difference: Difference | None) -> Verdict:
    """Return the verdict on an output, given its first difference."""
    if difference is None:
        return "identical"
    return "numerical tie" if difference.numerical_tie else "wrong"


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on several outputs together; ``identical`` if there are none."""
    order: tuple[Verdict, ...] = ("wrong", "nothing tested", "numerical tie")
    return next((verdict for verdict in order if verdict in verdicts), "identical")


def count_verdicts(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the verdict on several outputs, and how many have which."""
    numbers = Counter(verdicts)
    ties, wrong = numbers["numerical tie"], numbers["wrong"]
    return {"verdict": worst(verdicts), "identical": numbers["identical"], "ties": ties, "wrong": wrong}


def difference_json(difference: Difference, piece: Piece | None) -> Json:
    """Return the JSON object of a difference; ``piece`` gives the texts of its tokens."""
    texts = piece and [None if token is None else piece(token) for token in difference.tokens]
    return {**asdict(difference), "texts": texts}


def run_greedy(request: Request) -> GreedyOutput:
    """Decode a request greedily, and compare its logits with those of a clean forward over the output."""
    request = greedily(request)
    rules, out = RunRules(request), GreedyOutput()
    columns: list[torch.Tensor] = []  # some of the logits before every token
    for seen in checked(request, rules, out.violations):
        if isinstance(seen.record, Step):
            out.steps += 1
            out.drafted += seen.record.gamma
            out.accepted += seen.record.accepted
        for row in seen.decision_logits:
            columns.append(sample_columns(row))
            out.digests.append(_digest(row))
        out.tokens += seen.tokens
    clean = map(sample_columns, clean_rows(scorer_of(request), request.prompt, out.tokens))
    out.deviations = list(map(deviation, columns, clean))
    return out


def check_greedy(
    request: Request, name: str, reference: Sequence[int] | None, plain: GreedyOutput
) -> GreedyResult:
    """Check one prompt.

    Args:
        reference: Tokens of ``reference_output``; ``None`` for no comparison.
        plain: Result of plain decoding with the same target, cache and stop rules.
    """
    output = run_greedy(request)
    sampling, target = RunRules(greedily(request)).sampling, scorer_of(request)

    def difference(other: Sequence[int]) -> Difference | None:
        return find_difference(target, request.prompt, output.tokens, other, sampling)

    differences: dict[Against, Difference | None] = {"plain": difference(plain.tokens)}
    if reference is not None:
        differences["transformers"] = difference(reference)
    return GreedyResult(name, output, plain, differences)


def _digest(row: torch.Tensor) -> bytes:
    data = row.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()
