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
from specbench.check.observe import greedily, plainly, scorer_of
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
        columns: Some of the logits before every token, float32 [columns] each.
        digests: Hash of all bits of the logits before every token.
        clean: The same columns of a clean forward over the output; for plain decoding only.
        steps, drafted, accepted: Counts of the run.
    """

    tokens: list[int] = field(default_factory=list)
    columns: list[torch.Tensor] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    clean: list[torch.Tensor] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class GreedyResult:
    """The result for one prompt.

    Attributes:
        tokens: Length of the speculative output.
        steps, drafted, accepted: Counts of the speculative run.
        differences: The first difference from each output that it was compared with; ``None`` for none.
        violations: Violated invariants of both generations, the speculative one first.
        deviations, plain_deviations: Deviation of each row of logits from a clean forward, speculative and plain.
        bitwise: For each row that both generations computed after the same tokens, whether its bits are equal.
    """

    prompt: str
    tokens: int
    steps: int
    drafted: int
    accepted: int
    differences: Mapping[Against, Difference | None]
    violations: tuple[Violation, ...]
    deviations: tuple[float, ...]
    plain_deviations: tuple[float, ...]
    bitwise: tuple[bool, ...]


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
    """Decode a request greedily and record the logits."""
    request = greedily(request)
    rules, out = RunRules(request), GreedyOutput()
    for seen in checked(request, rules, out.violations):
        if isinstance(seen.record, Step):
            out.steps += 1
            out.drafted += seen.record.gamma
            out.accepted += seen.record.accepted
        for row in seen.decision_logits:
            out.columns.append(sample_columns(row))
            out.digests.append(_digest(row))
        out.tokens += seen.tokens
    return out


def run_plain(request: Request) -> GreedyOutput:
    """Decode a request plainly, and run a clean forward over the output."""
    output = run_greedy(plainly(request))
    output.clean = _clean_columns(request, output)
    return output


def check_greedy(
    request: Request, name: str, reference: Sequence[int] | None, plain: GreedyOutput
) -> GreedyResult:
    """Check one prompt.

    Args:
        reference: Tokens of ``reference_output``; ``None`` for no comparison.
        plain: Result of ``run_plain`` with the same target, cache and stop rules.
    """
    speculative = run_greedy(request)
    differs_at = first_difference(speculative.tokens, plain.tokens)
    clean = plain.clean if differs_at is None else _clean_columns(request, speculative)
    shared = len(plain.tokens) if differs_at is None else differs_at + 1  # the row of the difference included
    bits = zip(speculative.digests[:shared], plain.digests[:shared], strict=False)
    sampling, target = RunRules(greedily(request)).sampling, scorer_of(request)

    def difference(other: Sequence[int]) -> Difference | None:
        return find_difference(target, request.prompt, speculative.tokens, other, sampling)

    differences: dict[Against, Difference | None] = {"plain": difference(plain.tokens)}
    if reference is not None:
        differences["transformers"] = difference(reference)
    return GreedyResult(
        prompt=name,
        tokens=len(speculative.tokens),
        steps=speculative.steps,
        drafted=speculative.drafted,
        accepted=speculative.accepted,
        differences=differences,
        violations=(*speculative.violations, *plain.violations),
        deviations=tuple(map(deviation, speculative.columns, clean)),
        plain_deviations=tuple(map(deviation, plain.columns, plain.clean)),
        bitwise=tuple(first == second for first, second in bits),
    )


def _clean_columns(request: Request, output: GreedyOutput) -> list[torch.Tensor]:
    return list(map(sample_columns, clean_rows(scorer_of(request), request.prompt, output.tokens)))


def _digest(row: torch.Tensor) -> bytes:
    data = row.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()
