"""Check greedy outputs of other engines: whether their tokens are the target's own choices.

The format is one JSON object per line (docs/check.md). Reading needs no model; scoring takes one forward per line.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import msgspec

from specbench.backends.torch.parity import Difference, difference_at
from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import UsageError
from specbench.base.record import Json
from specbench.check.deviation import clean_rows
from specbench.check.greedy import Piece, Verdict, count_verdicts, difference_json, worst
from specbench.decoding.sampling import Sampling

_LINE = 'Write {"prompt": text or ids, "token_ids": [...]} in each line.'


class ExternalOutput(msgspec.Struct, frozen=True):
    """What a line of the file holds."""

    prompt: str | tuple[int, ...]
    token_ids: tuple[int, ...]
    id: str | int | None = None


@dataclass(frozen=True)
class OutputResult:
    """The result for a line.

    Attributes:
        line: Its number, from 1.
        id: Its "id", or the line number as text.
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


@dataclass
class OutputsResult:
    """The findings on a file so far."""

    outputs: list[OutputResult] = field(default_factory=list)
    complete: bool = False

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
        }


def read_outputs(lines: Sequence[bytes], limit: int | None = None) -> dict[int, ExternalOutput]:
    """Return what the lines of a file hold, by number. Empty ones are skipped.

    Raises:
        UsageError: A line does not have the format.
    """
    given = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    return {number: _parse_line(number, line) for number, line in given[:limit]}


def _parse_line(number: int, line: bytes) -> ExternalOutput:
    try:
        output = msgspec.json.decode(line.removeprefix(codecs.BOM_UTF8), type=ExternalOutput)
    except (ValueError, RecursionError) as error:  # syntax, encoding, thousands of nested lists
        raise UsageError(f"Line {number} cannot be read: {error}.", _LINE) from None
    for name, value in (("prompt", output.prompt), ("token_ids", output.token_ids)):
        if not (value.strip() if isinstance(value, str) else value):
            raise UsageError(f'In line {number} "{name}" is empty.', _LINE)
    return output


def refuse_misfit(
    line: int, prompt: Sequence[int], output: Sequence[int], vocab_size: int, limit: int | None
) -> None:
    """Raise ``UsageError`` for an output that the target cannot score."""
    for what, ids in (("prompt", prompt), ("token_ids", output)):
        unknown = next((token for token in ids if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise UsageError(
                f'In line {line} "{what}" contains {unknown}, but the target has the tokens 0 to {vocab_size - 1}.',
                "Give the target that made it.",
            )
    if limit is not None and len(prompt) + len(output) - 1 > limit:
        raise UsageError(
            f"Prompt and output of line {line} have {len(prompt) + len(output)} tokens, more than the target's context"
            f" ({limit}).",
            "Leave it out.",
        )


def check_output(
    target: Scorer,
    line: int,
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
    name = str(line if given.id is None else given.id)
    return OutputResult(line, name, len(output), first, first_wrong, ties, wrong, after_end)
