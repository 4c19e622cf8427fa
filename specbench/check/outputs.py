"""Check greedy outputs of other engines: whether their tokens are the target's own choices.

The format is one JSON object per line (docs/check.md). Reading needs no model; scoring takes one forward per line.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import msgspec

from specbench.backends.torch.parity import Difference, difference_at
from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import UsageError
from specbench.base.record import Json
from specbench.check.deviation import clean_rows
from specbench.check.greedy import Piece, Verdict, count_verdicts, difference_json, worst
from specbench.decoding.sampling import Sampling
from specbench.generate import encode_prompt
from specbench.models.target import Target
from specbench.options import TemplateOptions

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


def outputs_json(outputs: Sequence[OutputResult], piece: Piece | None) -> Json:
    """Return the results as JSON data. ``piece`` gives the texts of tokens; ``None`` leaves them out."""
    verdicts = [output.verdict for output in outputs]
    return {
        **count_verdicts(verdicts),
        "verdict": worst(verdicts or ["nothing tested"]),
        "tokens": sum(output.tokens for output in outputs),
        "outputs": [
            {
                "verdict": output.verdict,
                **asdict(output),
                "first": output.first and difference_json(output.first, piece),
            }
            for output in outputs
        ],
    }


def read_outputs(lines: Sequence[bytes], limit: int | None = None) -> dict[int, ExternalOutput]:
    """Return what the lines of a file hold, by number. Empty ones are skipped.

    Raises:
        UsageError: A line does not have the format.
    """
    outputs: dict[int, ExternalOutput] = {}
    for number, line in [(number, line) for number, line in enumerate(lines, 1) if line.strip()][:limit]:
        try:
            output = msgspec.json.decode(line.removeprefix(codecs.BOM_UTF8), type=ExternalOutput)
        except (ValueError, RecursionError) as error:  # syntax, encoding, thousands of nested lists
            raise UsageError(f"Line {number} cannot be read: {error}.", _LINE) from None
        for name, value in (("prompt", output.prompt), ("token_ids", output.token_ids)):
            if not (value.strip() if isinstance(value, str) else value):
                raise UsageError(f'In line {number} "{name}" is empty.', _LINE)
        outputs[number] = output
    return outputs


def check_outputs(
    target: Target,
    outputs: Mapping[int, ExternalOutput],
    sampling: Sampling,
    end_ids: Sequence[int],
    template: TemplateOptions,
) -> Iterator[OutputResult]:
    """Return an iterator that scores outputs, by line; see ``check_output``.

    Args:
        template: What the chat template is told, for prompts that are texts.

    Raises:
        UsageError: The target cannot score one of them. Nothing is scored then.
    """
    vocab, limit = min(target.vocab_size, target.scorer.embeddings), target.scorer.context_limit
    prompts: dict[int, Sequence[int]] = {}
    for line, output in outputs.items():
        if not isinstance(output.prompt, str):
            prompts[line] = output.prompt
        elif target.tokenizer is None:
            raise UsageError("The target has no tokenizer.", "Choose a model folder that holds one.")
        else:
            prompts[line] = encode_prompt(target.tokenizer, output.prompt, template=template)
        whole = [*prompts[line], *output.token_ids]
        unknown = next((token for token in whole if not 0 <= token < vocab), None)
        if unknown is not None:
            raise UsageError(
                f"Line {line} contains {unknown}, but the target has the tokens 0 to {vocab - 1}.",
                "Give the target that made it.",
            )
        if limit is not None and len(whole) - 1 > limit:
            raise UsageError(
                f"Prompt and output of line {line} are longer than the target's context ({limit}).",
                "Leave it out.",
            )
    return (
        check_output(target.scorer, line, output, prompts[line], sampling, end_ids)
        for line, output in outputs.items()
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
        sampling: Its repetition penalty and the model's own settings apply.
        end_ids: Tokens that end an output; empty if the outputs ignore them.

    Raises:
        RunError: The logits contain NaN.
    """
    differences: list[Difference] = []
    output = given.token_ids
    sampling = sampling.at(len(prompt), end_ids)
    for position, row in enumerate(clean_rows(target, prompt, output)):
        context = [*prompt, *output[:position]]
        best = sampling.choose(row.unsqueeze(0), context)[0]
        scores = sampling.scores(row.unsqueeze(0), context)[0]
        if float(scores[output[position]]) != float(scores[best]):
            differences.append(difference_at(position, (output[position], best), scores, target.rounding))
    wrong = [difference for difference in differences if not difference.numerical_tie]
    after_end = next((i for i, token in enumerate(output[:-1]) if token in end_ids), None)
    name, first = str(line if given.id is None else given.id), next(iter([*wrong, *differences]), None)
    ties = len(differences) - len(wrong)
    return OutputResult(line, name, len(output), first, ties, len(wrong), after_end)
