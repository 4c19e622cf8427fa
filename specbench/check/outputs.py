"""Check greedy outputs of other engines: whether their tokens are the target's own choices.

The format is one JSON object per line (docs/check.md). Reading needs no model; scoring takes one forward per line.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import asdict, dataclass

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
        first: The first wrong token with the target's choice there, or else the first tie; ``None`` if there is none.
        ties, wrong: Numbers of ties and of wrong tokens. Each token is judged in the context of the output's own
            tokens.
        after_end: Position of an end token that the output continues after; ``None`` for none.
    """

    line: int
    id: str
    tokens: int
    first: Difference | None
    ties: int
    wrong: int
    after_end: int | None

    @property
    def verdict(self) -> Verdict:
        if self.wrong or self.after_end is not None:
            return "wrong"
        return "numerical tie" if self.ties else "identical"


def verdict_on(outputs: Sequence[OutputResult]) -> Verdict:
    """Return the verdict on all outputs."""
    return worst([each.verdict for each in outputs] or ["nothing tested"])


def outputs_json(outputs: Sequence[OutputResult], piece: Piece | None) -> Json:
    """Return the results as JSON data. ``piece`` gives the texts of tokens; ``None`` leaves them out."""
    return {
        **count_verdicts([each.verdict for each in outputs]),
        "verdict": verdict_on(outputs),
        "tokens": sum(each.tokens for each in outputs),
        "outputs": [
            {
                "verdict": each.verdict,
                **asdict(each),
                "first": each.first and difference_json(each.first, piece),
            }
            for each in outputs
        ],
    }


def read_outputs(lines: Sequence[bytes], limit: int | None = None) -> dict[int, ExternalOutput]:
    """Return what the lines of a file hold, by number. Empty ones are skipped.

    Raises:
        UsageError: A line does not have the format.
    """
    found: dict[int, ExternalOutput] = {}
    for number, line in [each for each in enumerate(lines, 1) if each[1].strip()][:limit]:
        try:
            output = msgspec.json.decode(line.removeprefix(codecs.BOM_UTF8), type=ExternalOutput)
        except (ValueError, RecursionError) as error:  # syntax, encoding, thousands of nested lists
            raise UsageError(f"Line {number} cannot be read: {error}.", _LINE) from None
        for name, value in (("prompt", output.prompt), ("token_ids", output.token_ids)):
            if not (value.strip() if isinstance(value, str) else value):
                raise UsageError(f'In line {number} "{name}" is empty.', _LINE)
        found[number] = output
    return found


def refuse_misfit(
    line: int, prompt: Sequence[int], output: Sequence[int], vocab_size: int, limit: int | None
) -> None:
    """Raise ``UsageError`` for an output that the target cannot score."""
    unknown = next((token for token in (*prompt, *output) if not 0 <= token < vocab_size), None)
    if unknown is not None:
        raise UsageError(
            f"Line {line} contains {unknown}, but the target has the tokens 0 to {vocab_size - 1}.",
            "Give the target that made it.",
        )
    if limit is not None and len(prompt) + len(output) - 1 > limit:
        raise UsageError(
            f"Prompt and output of line {line} are longer than the target's context ({limit}).",
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
    found: list[Difference] = []
    output = given.token_ids
    sampling = sampling.at(len(prompt), None, end_ids)
    for position, row in enumerate(clean_rows(target, prompt, output)):
        context = [*prompt, *output[:position]]
        best = sampling.choose(row.unsqueeze(0), context)[0]
        scores = sampling.scores(row.unsqueeze(0), context)[0]
        if float(scores[output[position]]) != float(scores[best]):
            found.append(difference_at(position, (output[position], best), scores, target.rounding))
    wrong = [each for each in found if not each.numerical_tie]
    after_end = next((i for i, token in enumerate(output[:-1]) if token in end_ids), None)
    name, first = str(line if given.id is None else given.id), next(iter([*wrong, *found]), None)
    return OutputResult(line, name, len(output), first, len(found) - len(wrong), len(wrong), after_end)
