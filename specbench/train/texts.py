"""The prompts to train on, and the texts that a target writes to them: files of the cache folder, a text a line.

A head learns its target's choices far better from these texts than from others. Lines are only appended, so a killed
process loses only unfinished texts, and the next training with the same target, prompts and length reuses all others.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from specbench.base.cache import cache_folder
from specbench.base.errors import UsageError
from specbench.base.files import refuse_link
from specbench.base.record import Count, Record
from specbench.bench.prompts import ALL_SETS, Prompt, load_prompts
from specbench.decoding.sampling import Sampling
from specbench.generate import GenerationRun
from specbench.generate_many import GenerationRuns

if TYPE_CHECKING:
    from specbench.models.target import Target

_BATCH, _QUEUED = 64, 256
"""Texts written in one batch, and most texts queued together."""

_TEMPERATURES = (0.7, 1.0)
"""Temperatures of the rounds after the first one, which is greedy, in turn (docs/training.md)."""


def training_prompts(sources: Sequence[str | Path]) -> list[Prompt]:
    """Load prompts to train on.

    Raises:
        UsageError: See ``load_prompts``; or a prompt is also in a benchmark set.
    """
    prompts = load_prompts(sources)
    measured = {turn for prompt in load_prompts([ALL_SETS]) for turn in prompt.turns}
    shared = next((prompt.id for prompt in prompts if measured.intersection(prompt.turns)), None)
    if shared is not None:
        raise UsageError(f"The training prompt {shared!r} is also in a benchmark set.", "Remove it.")
    return prompts


class Text(Record):
    """A prompt with the target's answer.

    Attributes:
        round: Index of the round, in each of which all prompts are answered once.
        start: Length of the prompt.
        tokens: Token ids of prompt and answer, which is empty if the prompt does not fit the context.
    """

    round: Count
    prompt: Count
    start: Count
    tokens: tuple[Count, ...]

    @property
    def written(self) -> int:
        """Number of tokens of the answer."""
        return len(self.tokens) - self.start


def texts_file(target: Target, prompts: Sequence[Sequence[int]], answer_tokens: int, seed: int) -> Path:
    """Return the file for texts of a target, in its dtype, to these prompts."""
    facts = [target.language_model.fingerprint, target.dtype, [*map(list, prompts)], answer_tokens, seed]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_folder() / "texts" / name / "texts-0.jsonl"


def read_texts(file: Path) -> dict[tuple[int, int], Text]:
    """Return the texts of a file by round and prompt, without lines cut short by a crash."""
    if not file.is_file():
        return {}
    texts: dict[tuple[int, int], Text] = {}
    for line in file.read_bytes().split(b"\n"):
        try:
            text = msgspec.json.decode(line, type=Text)
        except (ValueError, RecursionError):
            continue
        texts[text.round, text.prompt] = text
    return texts


def write_texts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    answer_tokens: int,
    seed: int,
    update: Callable[[str, int, int | None, str], object],
) -> list[Text]:
    """Let a target answer the prompts, first greedily and then at temperatures above 0, until there is enough text.

    Args:
        tokens: Tokens of all answers together.
        update: Receives the progress, see ``train_head``.

    Returns:
        The first answers with so many tokens; those that were stored are not written again.

    Raises:
        UsageError: No prompt fits the target's context.
        OSError: The cache folder cannot be written.
    """
    file = texts_file(target, prompts, answer_tokens, seed)
    known, texts, written = read_texts(file), list[Text](), 0
    order = ((number, place) for number in itertools.count() for place in range(len(prompts)))
    while written < tokens:
        group = [*itertools.islice(order, min(_QUEUED, -(-(tokens - written) // answer_tokens)))]
        missing = [key for key in group if key not in known]
        runs = [_run(target, prompts[place], number, place, answer_tokens, seed) for number, place in missing]
        answers: list[list[int]] = [[] for _ in missing]
        for i, event in GenerationRuns(runs, max_batch=_BATCH):
            if not isinstance(event, Exception):
                answers[i] += event.tokens
                done = written + sum(map(len, answers))
                update("the target writes", min(done, tokens), tokens, f"{done:,} of {tokens:,} tokens")
                if event.finish_reason is None:
                    continue
            elif not isinstance(event, UsageError):  # which says that the prompt does not fit
                raise event
            number, place = missing[i]
            prompt = prompts[place]
            text = Text(round=number, prompt=place, start=len(prompt), tokens=(*prompt, *answers[i]))
            _add(file, text)
            known[number, place] = text
        texts += (known[key] for key in group)
        written = sum(text.written for text in texts)
        if not written and len(texts) >= len(prompts):
            raise UsageError(f"No prompt fits into the context of {target.name}.", "Name shorter ones.")
    return texts


def _add(file: Path, text: Text) -> None:
    """Append a text; its line begins with a line break, since the one before may be cut short."""
    file.parent.mkdir(parents=True, exist_ok=True)
    refuse_link(file)
    with file.open("ab") as stream:
        stream.write(b"\n" + msgspec.json.encode(text))


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
