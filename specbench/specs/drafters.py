"""Drafters by the words of the command line. A word not in the list is a model spec.

What a drafter is called on the command line, in two parts where it is a cascade: ``lookup+self:int8``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CASCADE", "DRAFTER_WORDS", "DrafterWord", "drafter_word", "model_part", "split_cascade"]

CASCADE = "cascade"
"""What ``drafter_word`` calls two drafters with a plus between them."""

_FREE = ("lookup", "ngram")


@dataclass(frozen=True)
class DrafterWord:
    """A word that ``--drafter`` takes, for help and listings."""

    word: str
    summary: str
    options: Mapping[str, str]
    probabilities: str


DRAFTER_WORDS: tuple[DrafterWord, ...] = (
    DrafterWord("none", "Proposes nothing: plain decoding, the baseline of every comparison.", {}, "none"),
    DrafterWord(
        "lookup",
        "Prompt lookup: finds the end of the text earlier in prompt and output, copies what followed.",
        {"n=N": "longest match tried first, in tokens, or 'any'", "min=N": "shortest match that counts"},
        "certain (one-hot)",
    ),
    DrafterWord(
        "ngram",
        "Counts of what followed the last tokens in prompt and output, with back-off.",
        {
            "order=N": "2 for bigrams to 4 (default) and up: contexts of N-1 tokens and less",
            "max=N": "most tokens drafted in a step",
            "window=N": "forget tokens that left the last N",
            "top-k=K": "also count the target's K most probable tokens at each verified position",
            "keep": "keep the counts between prompts",
            "sample": "draw from the counts instead of taking the most frequent",
            "min=N": "shortest context that counts, in tokens",
        },
        "certain (one-hot); drawn from the counts with 'sample'",
    ),
    DrafterWord(
        "self",
        "The target's own weights, on the target's own cache: no second model needed.",
        {
            "int8": "in int8; also together with layers or skip",
            "layers=N": "the first N layers (early exit)",
            "skip=I-J-...": "all layers but these, counted from 0",
            "calibrated": "what `specbench calibrate` chose for this target, dtype and device",
        },
        "yes",
    ),
    DrafterWord(
        "MODEL",
        "A small model with the target's tokenizer: hub id, folder, .gguf file or built-in name.",
        {},
        "yes",
    ),
    DrafterWord(
        "A+B",
        "A cascade, such as lookup+self:int8. Token by token, lookup or ngram drafts where it has a match of two tokens"
        " or more (min=N), and B, self or a MODEL, where it has none.",
        {"passes=N": "an option of A then: most passes of B in a step, while A may go on"},
        "A's and B's, token by token",
    ),
)


def drafter_word(spec: str) -> str | None:
    """The drafter word a spec begins with, ``CASCADE`` for two drafters, or ``None`` if it names a model."""
    if split_cascade(spec) is not None:
        return CASCADE
    word = spec.partition(":")[0].strip()
    return word if word in {entry.word for entry in DRAFTER_WORDS if entry.word.islower()} else None


def split_cascade(spec: str) -> tuple[str, str] | None:
    """The specs of a cascade's two drafters, or ``None`` if it is none: ``lookup`` or ``ngram`` stands before the plus.

    (Names of models may contain a plus.)
    """
    first, plus, second = spec.partition("+")
    return (first.strip(), second.strip()) if plus and first.partition(":")[0].strip() in _FREE else None


def model_part(spec: str) -> str:
    """The part of a spec that says what passes are made of: a cascade's second drafter, or all of it."""
    cascade = split_cascade(spec)
    return spec if cascade is None else cascade[1]
