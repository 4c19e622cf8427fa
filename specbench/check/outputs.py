"""Greedy outputs that were made elsewhere: are their tokens the target's own choices?

The format is one JSON object per line, described in docs/check.md. Reading needs no model; scoring takes one pass per
line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from specbench.backends.torch.parity import tie_units, units_below
from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import UsageError
from specbench.check.deviation import clean_rows
from specbench.decoding.sampling import Sampling


@dataclass(frozen=True)
class GivenOutput:
    """A line of the file.

    Attributes:
        line: Its number, from 1.
        id: Its "id", or its line number as text.
        prompt: Text, or token ids.
        token_ids: The output; never empty.
    """

    line: int
    id: str
    prompt: str | tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Refused:
    """A line that cannot be checked, and why."""

    line: int
    reason: str


@dataclass(frozen=True)
class Mismatch:
    """A token that is not the target's choice.

    Attributes:
        position: In the output.
        token, best: It, and what the target prefers.
        logits: Of the two, after the repetition penalty.
        gap: Their distance.
        gap_units: The same in units of the dtype's rounding.
        numerical_tie: Whether the gap is within ``tie_units``.
    """

    position: int
    token: int
    best: int
    logits: tuple[float, float]
    gap: float
    gap_units: float
    numerical_tie: bool


@dataclass(frozen=True)
class OutputResult:
    """What came of a line.

    Attributes:
        line, id: Which.
        tokens: How many there are.
        first: The first token that is not the target's choice; ``None`` if all are.
        first_wrong: The first of these that is no tie.
        ties, wrong: How many of each. Every token is judged behind the output's own tokens before it.
        behind_end: Position of an end token that the output goes on behind; ``None`` if it does not.
    """

    line: int
    id: str
    tokens: int
    first: Mismatch | None
    first_wrong: Mismatch | None
    ties: int
    wrong: int
    behind_end: int | None

    @property
    def verdict(self) -> Literal["identical", "numerical tie", "wrong"]:
        if self.wrong or self.behind_end is not None:
            return "wrong"
        return "numerical tie" if self.ties else "identical"


def read_outputs(lines: Sequence[bytes], limit: int | None = None) -> Iterator[GivenOutput | Refused]:
    """The lines of a file. Empty ones are skipped; one that breaks the format is refused, the others are not.

    Args:
        lines: As they stand in the file.
        limit: Only so many lines that are not empty; ``None`` for all.
    """
    given = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    for count, (number, line) in enumerate(given):
        if count == limit:
            return
        try:
            yield _parsed(number, line)
        except UsageError as error:
            yield Refused(number, error.message)


def _parsed(number: int, line: bytes) -> GivenOutput:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise UsageError("It is not UTF-8.") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"It is not JSON: {error.msg} at column {error.colno}.") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, thousands of nested lists
        raise UsageError("It is not JSON that can be read.") from None
    if not isinstance(fields, dict):
        raise UsageError("It is not a JSON object.")
    identity = fields.get("id", number)
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise UsageError('Its "id" is neither a string nor a whole number.')
    return GivenOutput(number, str(identity), _prompt(fields), _ids(fields, "token_ids"))


def _prompt(fields: Mapping[str, Any]) -> str | tuple[int, ...]:
    prompt = fields.get("prompt")
    if not isinstance(prompt, str):
        return _ids(fields, "prompt", "a text or a list of token ids")
    if not prompt.strip():
        raise UsageError('Its "prompt" is empty.')
    return prompt


def _ids(fields: Mapping[str, Any], key: str, called: str = "a list of token ids") -> tuple[int, ...]:
    if key not in fields:
        raise UsageError(f'It has no "{key}".')
    ids = fields[key]
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise UsageError(f'Its "{key}" is not {called}.')
    if not ids:
        raise UsageError(f'Its "{key}" is empty.')
    return tuple(ids)


def misfit(prompt: Sequence[int], output: Sequence[int], vocab_size: int, limit: int | None) -> str | None:
    """Why the target cannot score an output; ``None`` if it can.

    Args:
        prompt, output: Token ids.
        vocab_size: Width of the target's logits.
        limit: Its longest context, ``None`` for no limit.
    """
    for what, ids in (("prompt", prompt), ("token_ids", output)):
        unknown = next((token for token in ids if not 0 <= token < vocab_size), None)
        if unknown is not None:
            return f'Its "{what}" holds {unknown}, and the target has the tokens 0 to {vocab_size - 1}.'
    if limit is not None and len(prompt) + len(output) - 1 > limit:
        return (
            f"Prompt and output have {len(prompt) + len(output)} tokens, the target's context holds {limit}."
        )
    return None


def check_output(
    target: Scorer,
    given: GivenOutput,
    prompt: Sequence[int],
    sampling: Sampling,
    end_ids: Sequence[int] = (),
    dtype: torch.dtype | None = None,
) -> OutputResult:
    """Score an output under the target and compare every token with the largest logit.

    Args:
        target: Makes one pass over prompt and output (more where the rows of a long output would not fit at once).
        given: The output.
        prompt: Token ids of its prompt.
        sampling: Its repetition penalty and the model's own settings apply (no forced end: nobody knows the limit).
        end_ids: Tokens behind which nothing may come; none if the outputs ignore them.
        dtype: Whose rounding is the unit of a gap; ``None`` for the logits' own.

    Raises:
        RunError: The logits hold NaN.
    """
    first = first_wrong = None
    ties = wrong = 0
    output = given.token_ids
    sampling = sampling.at(len(prompt), None, end_ids)
    for position, row in enumerate(clean_rows(target, prompt, output)):
        context = [*prompt, *output[:position]]
        logits = row.unsqueeze(0)
        best = sampling.choose(logits, context)[0]
        scores = sampling.scores(logits, context)[0]
        high, low = float(scores[best]), float(scores[output[position]])
        if low == high:
            continue
        found = _mismatch(position, output[position], best, low, high, dtype or row.dtype)
        first = first or found
        if found.numerical_tie:
            ties += 1
        else:
            wrong += 1
            first_wrong = first_wrong or found
    ends = set(end_ids)
    behind = next((i for i, token in enumerate(output[:-1]) if token in ends), None)
    return OutputResult(given.line, given.id, len(output), first, first_wrong, ties, wrong, behind)


def _mismatch(position: int, token: int, best: int, low: float, high: float, dtype: torch.dtype) -> Mismatch:
    units = units_below(low, high, dtype)
    largest = torch.finfo(torch.float32).max
    low = max(low, -largest)  # -inf has no place in JSON
    gap = min(high - low, largest)
    return Mismatch(position, token, best, (low, high), gap, units, units <= tie_units(dtype))
