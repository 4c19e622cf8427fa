"""Drafters by the words of the command line. A word not in the list is a model spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DRAFTER_WORDS", "DrafterWord", "drafter_word"]


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
        },
        "certain (one-hot); drawn from the counts with 'sample'",
    ),
    DrafterWord(
        "self",
        "The target's own weights, on the target's own cache: no second model needed.",
        {"int8": "all layers in int8", "layers=N": "the first N layers (early exit)"},
        "yes",
    ),
    DrafterWord(
        "MODEL",
        "A small model with the target's tokenizer: hub id, folder, .gguf file or built-in name.",
        {},
        "yes",
    ),
)


def drafter_word(spec: str) -> str | None:
    """The drafter word a spec begins with, or ``None`` if it names a model."""
    word = spec.partition(":")[0].strip()
    return word if word in {entry.word for entry in DRAFTER_WORDS if entry.word != "MODEL"} else None
