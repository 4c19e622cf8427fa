"""Answers of stored runs: the plain outputs of a sweep, whose prompts are found again by their names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from specbench.base.errors import UsageError
from specbench.bench.encoding import encode_conversation
from specbench.bench.manifest import prompt_fingerprint
from specbench.bench.prompts import load_prompts
from specbench.decoding.sampling import Sampling
from specbench.models.tokenizers import end_of_turn
from specbench.predict.law import Answer
from specbench.predict.logs import Log, UnusableError
from specbench.results.lines import Generation
from specbench.results.store import read_lines, read_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from specbench.bench.prompts import Prompt
    from specbench.recipe import Recipe
    from specbench.results.run import Run


def stored_answers(folder: Path, tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> Log:
    """Read the outputs of plain decoding in a stored run, one after the other.

    Args:
        folder: The run.
        tokenizer: The target's.
        limit: How many answers to read.

    Raises:
        UsageError: The run has no plain decoding, or its prompts are not here.
    """
    run = read_run(folder)
    prompts, log = _prompts(run), Log()
    plain = {
        each.id: each.recipe
        for each in run.configs
        if each.kind == "plain" and each.recipe and each.condition.batch is each.condition.context is None
    }
    if not plain:
        raise UsageError(f"The run {folder.name} has no plain decoding of single prompts.", "Name another.")
    earlier: dict[tuple[str, str, int], list[Sequence[int]]] = {}
    for number, each in enumerate(read_lines(folder, []), 1):
        line, found = each.line, each.result
        if line.warmup or line.config not in plain or not isinstance(found, Generation):
            continue
        recipe, history = plain[line.config], earlier.setdefault((line.config, line.prompt, line.repeat), [])
        sampling = _sampling(run, recipe)
        if line.turn != len(history):
            continue
        history.append(found.token_ids)
        if line.repeat and sampling.greedy:  # the same again
            continue
        if limit is not None and len(log.answers) >= limit:
            log.unread = True
            break
        try:
            prompt = prompts[line.prompt].told(recipe.template)
            tokens = _encoded(tokenizer, prompt, history[:-1], found.prompt_tokens)
            if found.new_tokens < 2:
                raise UnusableError("short")
        except UnusableError as error:
            log.left_out.setdefault(error.args[0], []).append(number)
            continue
        seconds = found.decode_s / (found.new_tokens - 1)
        log.answers.append(
            Answer(tokens, found.token_ids, sampling, None, run.max_new_tokens, line.prompt,
                   seconds if seconds > 0 else None)
        )  # fmt: skip
    return log


def _sampling(run: Run, recipe: Recipe) -> Sampling:
    """Return the transforms of a recipe, with the target's own penalty."""
    sampling = Sampling(**recipe.sampling.transforms)
    penalty = (run.target.model_defaults or {}).get("repetition_penalty", 1.0)
    return replace(sampling, repetition_penalty=penalty) if sampling.repetition_penalty == 1.0 else sampling


def _prompts(run: Run) -> dict[str, Prompt]:
    """Return the prompts of a run by id.

    Raises:
        UsageError: They are not here, or have changed.
    """
    names = run.options.get("prompts") or []
    try:
        prompts = {prompt.id: prompt for prompt in load_prompts(names)}
    except UsageError as error:
        raise UsageError(
            f"A run does not hold its prompts, and those of this one are not here: {error.message}",
            f"Run it in the folder that has {', '.join(map(str, names))}.",
        ) from error
    for prompt in run.prompts:
        if prompt.id not in prompts or prompt_fingerprint(prompts[prompt.id]) != prompt.fingerprint:
            raise UsageError(
                f"The prompt {prompt.id!r} is not the one that this run had.",
                "Name a run of today's prompts.",
            )
    return prompts


def _encoded(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, answers: Sequence[Sequence[int]], length: int
) -> list[int]:
    ends = {tokenizer.eos_token_id, end_of_turn(tokenizer)} - {None}
    target: Any = SimpleNamespace(tokenizer=tokenizer, end_ids=tuple(ends))
    try:
        tokens = encode_conversation(target, prompt, answers)
    except UsageError:
        raise UnusableError("template") from None
    if len(tokens) != length:
        raise UnusableError("tokenizer")
    return tokens
