"""Greedy outputs: speculative against plain decoding and against ``transformers``' own ``generate``, token by token."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from specbench.backends.torch.parity import (
    Difference,
    difference_at,
    first_difference,
    tie_units,
    units_below,
)
from specbench.check.deviation import Columns, clean_rows, deviation
from specbench.check.invariants import Rules, Violation, check_observation, check_run
from specbench.check.observe import DecodingSetup, Observation, observe
from specbench.decoding.records import Step

Verdict = Literal["identical", "numerical tie", "wrong"]

_BEST = 16


@dataclass(frozen=True)
class Top:
    """The largest logits a run saw before a token, after the repetition penalty: ids and values, at most 16."""

    ids: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, scores: torch.Tensor) -> Top:
        """Of one row, [vocab]."""
        best = scores.float().topk(min(_BEST, scores.shape[-1]))
        return cls(tuple(best.indices.tolist()), tuple(best.values.tolist()))

    def allows(self, tokens: Sequence[int | None], dtype: torch.dtype) -> bool:
        """Whether each of the tokens lies within ``tie_units`` of the best one."""
        values = dict(zip(self.ids, self.values, strict=True))
        return all(
            token in values and units_below(values[token], self.values[0], dtype) <= tie_units(dtype)
            for token in tokens
        )


@dataclass(frozen=True)
class Output:
    """A greedy output and what its run saw.

    Attributes:
        tokens: The output.
        tops: Before every token.
        columns: A part of the logits before every token, float32 [columns]; empty for a reference.
        digests: Of the bits of all of them; empty for a reference.
        violations: Invariants that do not hold.
        steps, drafted, accepted: Counts of the run.
    """

    tokens: tuple[int, ...]
    tops: tuple[Top, ...]
    columns: tuple[torch.Tensor, ...] = ()
    digests: tuple[bytes, ...] = ()
    violations: tuple[Violation, ...] = ()
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def top(self, position: int) -> Top | None:
        """What it saw before a token; ``None`` where it had ended."""
        return self.tops[position] if position < len(self.tops) else None


@dataclass(frozen=True)
class PlainRun:
    """Plain decoding of a prompt; any number of configurations with the same target can be held against it.

    Attributes:
        output: What it gave.
        clean: Of the logits of a clean pass over that, the same columns, row by row.
    """

    output: Output
    clean: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class GreedyResult:
    """What came of one prompt.

    Attributes:
        prompt: Its id.
        tokens: Length of the speculative output.
        steps, drafted, accepted: Counts of the speculative run.
        against_plain, against_transformers: The first difference; ``None`` where there is none.
        compared_with_transformers: Whether there was anything to compare with.
        violations: Of both runs' invariants; the speculative run's first.
        deviations, plain_deviations: Of the runs' logits from a clean pass, row by row.
        bitwise_rows, bitwise_equal: Rows of logits that both runs computed behind the same tokens, and how many of them
            are the same to the last bit.
    """

    prompt: str
    tokens: int
    steps: int
    drafted: int
    accepted: int
    against_plain: Difference | None
    against_transformers: Difference | None
    compared_with_transformers: bool
    violations: tuple[Violation, ...]
    deviations: tuple[float, ...]
    plain_deviations: tuple[float, ...]
    bitwise_rows: int
    bitwise_equal: int


def verdict_of(difference: Difference | None) -> Verdict:
    """What a first difference, or none, amounts to."""
    if difference is None:
        return "identical"
    return "numerical tie" if difference.numerical_tie else "wrong"


def run_greedy(setup: DecodingSetup, prompt: Sequence[int], *, plain: bool = False) -> Output:
    """Decode greedily and keep what the run saw."""
    rules = Rules.of(setup, prompt, greedy=True)
    tokens: list[int] = []
    tops: list[Top] = []
    columns: list[torch.Tensor] = []
    digests: list[bytes] = []
    violations: list[Violation] = []
    steps = drafted = accepted = 0
    before: Observation | None = None
    for seen in observe(setup, prompt, greedy=True, plain=plain):
        violations += check_observation(seen, before, rules)
        if isinstance(seen.record, Step):
            steps += 1
            drafted += seen.record.gamma
            accepted += seen.record.accepted
        for row, context in _rows(seen):
            tops.append(Top.of(rules.sampling.scores(row.unsqueeze(0), context)[0]))
            columns.append(Columns.of(len(row)).take(row))
            digests.append(_digest(row))
        tokens += seen.tokens
        before = seen
    reason = None if before is None else before.record.finish_reason
    violations += check_run(tokens, reason, rules)
    return Output(
        tuple(tokens),
        tuple(tops),
        tuple(columns),
        tuple(digests),
        tuple(violations),
        steps,
        drafted,
        accepted,
    )


def _rows(seen: Observation) -> list[tuple[torch.Tensor, list[int]]]:
    """Logits before every emitted token, with the context they stand behind."""
    return [(row, [*seen.context, *seen.tokens[:i]]) for i, row in enumerate(seen.deciding)]


def run_plain(setup: DecodingSetup, prompt: Sequence[int]) -> PlainRun:
    """Decode a prompt plainly, and score what came of it in a clean pass."""
    output = run_greedy(setup, prompt, plain=True)
    return PlainRun(output, _clean_columns(setup, prompt, output))


def check_greedy(
    setup: DecodingSetup,
    name: str,
    prompt: Sequence[int],
    reference: Output | None,
    dtype: torch.dtype,
    plainly: PlainRun | None = None,
) -> GreedyResult:
    """Check one prompt.

    Args:
        setup: What decodes.
        name: The prompt's id.
        prompt: Its token ids.
        reference: What ``reference_output`` gave; ``None`` to leave it out.
        dtype: Whose rounding explains a tie.
        plainly: What ``run_plain`` gave with the same target, cache and rules of stopping; ``None`` runs it.
    """
    speculative = run_greedy(setup, prompt)
    plainly = plainly or run_plain(setup, prompt)
    plain = plainly.output
    same_tokens = speculative.tokens == plain.tokens
    clean = plainly.clean if same_tokens else _clean_columns(setup, prompt, speculative)
    same = first_difference(speculative.tokens, plain.tokens)
    shared = len(plain.tokens) if same is None else same + 1  # also the row where they part
    bits = list(zip(speculative.digests[:shared], plain.digests[:shared], strict=False))
    return GreedyResult(
        prompt=name,
        tokens=len(speculative.tokens),
        steps=speculative.steps,
        drafted=speculative.drafted,
        accepted=speculative.accepted,
        against_plain=compare_outputs(setup, prompt, speculative, plain, dtype),
        against_transformers=None
        if reference is None
        else compare_outputs(setup, prompt, speculative, reference, dtype),
        compared_with_transformers=reference is not None,
        violations=(*speculative.violations, *plain.violations),
        deviations=_deviations(speculative, clean),
        plain_deviations=_deviations(plain, plainly.clean),
        bitwise_rows=len(bits),
        bitwise_equal=sum(first == second for first, second in bits),
    )


def _clean_columns(setup: DecodingSetup, prompt: Sequence[int], output: Output) -> tuple[torch.Tensor, ...]:
    rows = clean_rows(setup.target, prompt, output.tokens)
    return tuple(Columns.of(len(row)).take(row) for row in rows)


def _deviations(output: Output, clean: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """Of an output's rows from those of a clean pass."""
    return tuple(deviation(*pair) for pair in zip(output.columns, clean, strict=False))


def _digest(row: torch.Tensor) -> bytes:
    return hashlib.blake2b(
        row.contiguous().view(torch.uint8).cpu().numpy().tobytes(), digest_size=16
    ).digest()


def compare_outputs(
    setup: DecodingSetup, prompt: Sequence[int], first: Output, second: Output, dtype: torch.dtype
) -> Difference | None:
    """The first difference of two outputs, judged by a clean pass and by what both runs saw there.

    It is a tie only if all three have both tokens within ``tie_units`` of their best logit.
    """
    position = first_difference(first.tokens, second.tokens)
    if position is None:
        return None
    context = [*prompt, *first.tokens[:position]]
    setup.target.begin()
    logits = setup.target.logits(context, rows=1)
    setup.target.begin()
    tokens = tuple(
        output.tokens[position] if position < len(output.tokens) else None for output in (first, second)
    )
    scores = setup.transforms(prompt, greedy=True).scores(logits, context)[0]
    difference = difference_at(position, (tokens[0], tokens[1]), scores, dtype)
    seen = [output.top(position) for output in (first, second)]
    explained = difference.numerical_tie and all(
        top is not None and top.allows(tokens, dtype) for top in seen
    )
    return replace(difference, numerical_tie=explained)
