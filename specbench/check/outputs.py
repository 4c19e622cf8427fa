"""Check greedy outputs of other engines: whether their tokens are the target's own choices.

The format is one JSON object per line (docs/check.md). Reading needs no model; scoring takes one forward per line.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import msgspec

from specbench.backends.torch.parity import Difference, difference_at
from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import UsageError
from specbench.base.record import Json
from specbench.check.deviation import clean_rows
from specbench.check.greedy import Piece, Verdict, count_verdicts, difference_json, worst
from specbench.decoding.sampling import Sampling


@dataclass(frozen=True)
class ExternalOutput:
    """A line of the file.

    Attributes:
        line: Its number, from 1.
        id: Its "id", or the line number as text.
    """

    line: int
    id: str
    prompt: str | tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class RejectedLine:
    """A line that cannot be checked, and the reason."""

    line: int
    reason: str


@dataclass(frozen=True)
class OutputResult:
    """The result for a line.

    Attributes:
        first: The first token that is not the target's choice, with that choice; ``None`` if there is none.
        first_wrong: The first of these tokens that is not a tie.
        ties, wrong: Numbers of ties and of wrong tokens. Each token is judged in the context of the output's own
            tokens.
        after_end: Position of an end token that the output continues after; ``None`` for none.
    """

    line: int
    id: str
    tokens: int
    first: Difference | None
    first_wrong: Difference | None
    ties: int
    wrong: int
    after_end: int | None

    @property
    def verdict(self) -> Verdict:
        if self.wrong or self.after_end is not None:
            return "wrong"
        return "numerical tie" if self.ties else "identical"


@dataclass(frozen=True)
class OutputsResult:
    """The findings on a file so far; ``failed`` are lines that could not be scored."""

    outputs: tuple[OutputResult, ...] = ()
    rejected: tuple[RejectedLine, ...] = ()
    failed: tuple[RejectedLine, ...] = ()
    complete: bool = True

    @property
    def verdict(self) -> Verdict:
        return worst([each.verdict for each in self.outputs] or ["nothing tested"])

    def to_dict(self, piece: Piece | None) -> Json:
        """Return the JSON object. ``piece`` gives the texts of tokens; ``None`` leaves them out."""

        def shown(result: OutputResult) -> Json:
            found = {"first": result.first, "first_wrong": result.first_wrong}
            texts = {name: each and difference_json(each, piece) for name, each in found.items()}
            return {"verdict": result.verdict, **asdict(result), **texts}

        return {
            **count_verdicts([each.verdict for each in self.outputs]),
            "verdict": self.verdict,
            "complete": self.complete,
            "tokens": sum(each.tokens for each in self.outputs),
            "outputs": [shown(each) for each in self.outputs],
            "rejected": [asdict(each) for each in self.rejected],
            "failed": [asdict(each) for each in self.failed],
        }


def read_outputs(lines: Sequence[bytes], limit: int | None = None) -> Iterator[ExternalOutput | RejectedLine]:
    """Read the lines of a file. Empty ones are skipped, invalid ones rejected."""
    given = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    for count, (number, line) in enumerate(given):
        if count == limit:
            return
        try:
            yield _parse_line(number, line)
        except UsageError as error:
            yield RejectedLine(number, error.message)


class _Line(msgspec.Struct):
    prompt: str | tuple[int, ...]
    token_ids: tuple[int, ...]
    id: str | int | None = None


def _parse_line(number: int, line: bytes) -> ExternalOutput:
    try:
        fields = msgspec.json.decode(line.removeprefix(codecs.BOM_UTF8), type=_Line)
    except msgspec.ValidationError as error:
        raise UsageError(f"The line does not have the format: {error}.") from None
    except (ValueError, RecursionError) as error:  # syntax, encoding, thousands of nested lists
        raise UsageError(f"The line is not JSON: {error}.") from None
    for name in ("prompt", "token_ids"):
        value = getattr(fields, name)
        if not (value.strip() if isinstance(value, str) else value):
            raise UsageError(f'"{name}" is empty.')
    identity = str(number if fields.id is None else fields.id)
    return ExternalOutput(number, identity, fields.prompt, fields.token_ids)


def find_misfit(
    prompt: Sequence[int], output: Sequence[int], vocab_size: int, limit: int | None
) -> str | None:
    """Return why the target cannot score an output; ``None`` if it can."""
    for what, ids in (("prompt", prompt), ("token_ids", output)):
        unknown = next((token for token in ids if not 0 <= token < vocab_size), None)
        if unknown is not None:
            return f'"{what}" contains {unknown}, but the target has the tokens 0 to {vocab_size - 1}.'
    if limit is not None and len(prompt) + len(output) - 1 > limit:
        return f"Prompt and output have {len(prompt) + len(output)} tokens, more than the target's context ({limit})."
    return None


def check_output(
    target: Scorer,
    given: ExternalOutput,
    prompt: Sequence[int],
    sampling: Sampling,
    end_ids: Sequence[int] = (),
) -> OutputResult:
    """Score an output with the target and compare every token with the largest logit.

    Args:
        target: Runs one forward over prompt and output, see ``clean_rows``.
        sampling: Its repetition penalty and the model's own settings apply, but no forced end: the limit is unknown.
        end_ids: Tokens that end an output; empty if the outputs ignore them.

    Raises:
        RunError: The logits contain NaN.
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
        token = output[position]
        if float(scores[token]) == float(scores[best]):
            continue
        found = difference_at(position, (token, best), scores, target.rounding)
        first = first or found
        if found.numerical_tie:
            ties += 1
        else:
            wrong += 1
            first_wrong = first_wrong or found
    ends = set(end_ids)
    after_end = next((i for i, token in enumerate(output[:-1]) if token in ends), None)
    return OutputResult(given.line, given.id, len(output), first, first_wrong, ties, wrong, after_end)
