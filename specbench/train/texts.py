"""Texts that a target writes to the training prompts: stored in the cache folder, one line of JSON for each.

A head learns its target's choices far better from these texts than from others. Lines are only appended, so a killed
process loses only unfinished texts, and the next training with the same target, prompts and length reuses all others.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from specbench.base.cache import CACHE_VARIABLE, cache_folder
from specbench.base.errors import RunError, UsageError
from specbench.base.files import file_errors, refuse_link
from specbench.base.record import Count
from specbench.decoding.sampling import Sampling
from specbench.generate import GenerationRun
from specbench.generate_many import GenerationRuns

if TYPE_CHECKING:
    from specbench.models.target import Target

BATCH = 64
"""Texts written in one batch."""

_GROUP = 4
"""Batches queued together."""

_TEMPERATURES = (0.7, 1.0)
"""Temperatures of the rounds after the first one, which is greedy, in turn (docs/training.md)."""


@dataclass(frozen=True)
class Text:
    """A prompt with the target's answer.

    Attributes:
        round: Index of the round, in each of which all prompts are answered once.
        tokens: Token ids of prompt and answer; empty for a prompt that does not fit the context.
    """

    round: Count
    prompt: Count
    start: Count
    tokens: tuple[Count, ...]

    @property
    def key(self) -> tuple[int, int]:
        return self.round, self.prompt

    @property
    def written(self) -> int:
        """Number of tokens of the answer."""
        return len(self.tokens) - self.start


class TextStore:
    """Texts in a folder, in one file.

    Args:
        within, advice: Name of the folder and hint in error messages.
    """

    def __init__(self, folder: Path, *, within: str | None = None, advice: str = "") -> None:
        self.folder, self._file = folder, folder / "texts-0.jsonl"
        self._within = within or f"cache folder {str(cache_folder())!r}"
        self._advice = advice or f"Set {CACHE_VARIABLE} to another folder, and continue with --resume."

    def read(self) -> dict[tuple[int, int], Text]:
        """Return all texts by their keys, in order, without a line cut short by a crash."""
        if not self._file.is_file():
            return {}
        with file_errors(f"The texts in {str(self._file)!r} cannot be read"):
            lines = self._file.read_text(encoding="utf-8", errors="replace").split("\n")
        found = {text.key: text for text in filter(None, map(_parsed, lines))}
        return dict(sorted(found.items()))

    def add(self, texts: Iterable[Text]) -> None:
        lines = "".join(json.dumps(vars(text), separators=(",", ":")) + "\n" for text in texts)
        full = RunError(
            f"No space is left for texts in the {self._within}; those written are kept.",
            f"Free some space. {self._advice}",
        )
        with file_errors(f"The {self._within} cannot be written", self._advice, full=full):
            self.folder.mkdir(parents=True, exist_ok=True)
            refuse_link(self._file)
            with self._file.open("a+b") as file:
                end = file.seek(0, os.SEEK_END)
                if end:
                    file.seek(end - 1)
                    lines = lines if file.read(1) == b"\n" else f"\n{lines}"  # after a line cut short
                file.write(lines.encode())
                file.flush()


def _parsed(line: str) -> Text | None:
    try:
        text = msgspec.json.decode(line, type=Text)
    except (ValueError, RecursionError):
        return None
    return None if text.start > len(text.tokens) else text


def store_for(target: Target, prompts: Sequence[Sequence[int]], answer_tokens: int, seed: int) -> TextStore:
    """Return the store for texts of a target, in its dtype, to these prompts."""
    facts = [target.language_model.fingerprint, target.dtype, [*map(list, prompts)], answer_tokens, seed]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return TextStore(cache_folder() / "texts" / name)


def write_texts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    store: TextStore,
    *,
    answer_tokens: int,
    seed: int,
    enough: Callable[[int, int], bool],
    cut: TextStore | None = None,
) -> None:
    """Let a target answer the prompts, first greedily and then at temperatures above 0, until there is enough text.

    Args:
        store: Store of the texts; texts already in it are not written again.
        enough: Called with two numbers of tokens: in all answers before the first missing one, and in all answers
            including unfinished ones. Returns whether to stop.
        cut: Store for unfinished answers; ``None`` to discard them.

    Raises:
        UsageError: No prompt fits the target's context.
        RunError: See ``TextStore.add``.
    """
    known, places = store.read(), range(len(prompts))
    written, everything = count_complete(known, places), sum(text.written for text in known.values())
    number = 0
    while places and not enough(written, everything):
        missing = [place for place in places if (number, place) not in known]
        for first in range(0, len(missing), BATCH * _GROUP):
            group = missing[first : first + BATCH * _GROUP]
            runs = {
                place: _run(target, prompts[place], number, place, answer_tokens, seed) for place in group
            }
            answers: dict[int, list[int]] = {place: [] for place in group}
            for place, fresh, ended in _write_answers(runs):
                answers[place] += fresh
                everything += len(fresh)
                if ended:
                    text = _text(number, place, prompts[place], answers.pop(place))
                    store.add([text])
                    known[text.key] = text
                    written = count_complete(known, places)
                if enough(written, everything):
                    if cut is None:
                        return
                    for place, answer in answers.items():
                        if answer:
                            cut.add([_text(number, place, prompts[place], answer)])
                    return
        if not any(known[number, place].written for place in places):
            raise UsageError(
                f"None of the prompts fits into the context of {target.name}.", "Name shorter ones."
            )
        number += 1


def count_complete(known: Mapping[tuple[int, int], Text], places: Sequence[int]) -> int:
    """Count the tokens of the answers before the first missing one, round by round."""
    total = 0
    for number in itertools.count():
        for place in places:
            if (text := known.get((number, place))) is None:
                return total
            total += text.written
    return total


def _text(number: int, place: int, prompt: Sequence[int], answer: Sequence[int]) -> Text:
    """Return a text; without an answer, it is empty, as for a prompt that does not fit."""
    return Text(number, place, len(prompt), (*prompt, *answer)) if answer else Text(number, place, 0, ())


def _run(
    target: Target, prompt: Sequence[int], number: int, place: int, answer_tokens: int, seed: int
) -> GenerationRun:
    digest = hashlib.sha256(f"{seed} {number} {place}".encode()).digest()
    return GenerationRun(
        prompt,
        target,
        sampling=Sampling(_TEMPERATURES[(number - 1) % len(_TEMPERATURES)] if number else 0.0),
        max_new_tokens=answer_tokens,
        seed=int.from_bytes(digest[:4], "big"),
    )


def _write_answers(runs: Mapping[int, GenerationRun]) -> Iterator[tuple[int, Sequence[int], bool]]:
    """Yield new tokens of the answers as they are decoded:
    index of the prompt, tokens, and whether they are the last.
    """
    places = [*runs]
    for i, event in GenerationRuns([*runs.values()], max_batch=BATCH):
        if isinstance(event, UsageError):
            yield places[i], (), True
            continue
        if isinstance(event, Exception):
            raise event
        yield places[i], event.tokens, event.finish_reason is not None
