"""Decoding one prompt for `specbench generate`: shown as it comes, traced, compared with plain decoding."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from specbench.backends.torch.parity import find_difference
from specbench.bench.engines.hf import generate_with_transformers
from specbench.bench.pairs import Pairs
from specbench.cli import options as opt
from specbench.cli.conflicts import given, without_effect
from specbench.cli.console import write_json
from specbench.cli.progress import StageProgress
from specbench.cli.setting import facts
from specbench.cli.summary import show_summary
from specbench.cli.watchers import TextOutput, TraceOutput
from specbench.decoding.clocks import clock_for, peak_memory
from specbench.decoding.metrics import summary
from specbench.policies import FixedLength
from specbench.policies.auto import TOO_SLOW_NOTE
from specbench.results.trace import PROMPT_TAIL, TraceHeader
from specbench.rows import Condition, OtherLibrary, Row

if TYPE_CHECKING:
    from specbench.cli.watchers import Paint, ShownOptions
    from specbench.decoding.protocols import Drafter
    from specbench.decoding.records import Generation
    from specbench.generate import GenerationRun
    from specbench.loaded import LoadedRecipe
    from specbench.models.load import LanguageModel
    from specbench.models.target import Target
    from specbench.recipe import Recipe

WARM_UP_TOKENS = 16

_TIMED_TOKENS, _TIMED_S = 64, 10.0
"""How many tokens `transformers` decodes to be timed, and about how long, at most."""


def transformers_speed(model: LanguageModel, recipe: Recipe, prompt: Sequence[int]) -> float | None:
    """Return the tokens per second of ``generate`` of `transformers`, after a warm-up and the first token.

    ``None`` if it ends too early to be timed. The model is as `transformers` has loaded it.
    """
    row, clock = (
        Row(OtherLibrary("transformers"), Condition(recipe.sampling.temperature)),
        clock_for(model.device),
    )
    longest, speed = recipe.decoding.max_new_tokens, 0.0
    for _ in range(2):
        tokens = int(max(WARM_UP_TOKENS, min(_TIMED_TOKENS, _TIMED_S * speed)))
        decoding = recipe.decoding.with_changes(max_new_tokens=min(tokens, longest))
        outcome = generate_with_transformers(
            model, None, model, model.context_limit, row, prompt, decoding, recipe.sampling.seed, clock
        )
        timed = len(outcome.token_ids) - outcome.first_tokens
        if timed < 1 or not outcome.decode_s:
            return None
        speed = timed / outcome.decode_s
    return speed


def warm_up(loaded: LoadedRecipe, prompt: Sequence[int]) -> None:
    """Decode once with the drafter and once plainly, so that later times do not include the costs of a first use.

    With fixed tensor shapes, each new shape takes long at its first use, so whole outputs are decoded.
    """
    decoding = loaded.recipe.decoding
    if loaded.recipe.caching.cache not in ("static", "compiled"):
        decoding = decoding.with_changes(max_new_tokens=min(WARM_UP_TOKENS, decoding.max_new_tokens))
    for plain in (False, True):
        for _ in loaded.start(prompt, plain=plain, decoding=decoding):
            pass


def deciding_options(loaded: LoadedRecipe) -> dict[str, Any]:
    """Return the options that decide the output, by name; ``None`` for those that are switched off."""
    policy = loaded.policy
    branches = policy.branches or loaded.drafter.traits.several
    named = (branches or policy.verification is not None) and not loaded.sampling.greedy
    return {
        "draft_policy": policy.name,
        "verification": policy.method(loaded.drafter) if named else None,
        "gamma": policy.gamma if isinstance(policy, FixedLength) else None,
        **opt.deciding(loaded.recipe, loaded.sampling, loaded.target.language_model),
    }


def _trace_header(loaded: LoadedRecipe, prompt: Sequence[int], text: str) -> TraceHeader:
    return TraceHeader(
        target=loaded.target.name,
        drafter=loaded.drafter.traits.name,
        dtype=loaded.target.dtype,
        options=deciding_options(loaded),
        prompt_tokens=len(prompt),
        prompt_tail=text[-PROMPT_TAIL:],
        greedy=loaded.sampling.greedy,
    )


def _piece(target: Target, token: int) -> str:
    """Return the text of a token, special tokens included."""
    assert target.tokenizer is not None
    return str(target.tokenizer.decode([token], skip_special_tokens=False))


def _draftable_share(drafter: Drafter, tokens: Sequence[int]) -> float | None:
    """Return the share of tokens that the drafter's model could draft; ``None`` where it can draft any."""
    vocabulary = drafter.traits.vocabulary
    if vocabulary is None or not tokens:
        return None
    return sum(token in vocabulary.places for token in tokens) / len(tokens)


def notes_of(ctx: typer.Context, loaded: LoadedRecipe, chat: bool | None) -> list[str]:
    """Return what the user should know before reading the output, and which options have no effect."""
    lines: list[str] = []
    if loaded.sampling.greedy:
        why = "at temperature 0: the most probable token is taken"
        lines += without_effect(ctx, why, "top_k", "top_p", "min_p", "seed")
    if loaded.recipe.drafter.is_plain:
        lines += without_effect(ctx, "with the drafter none", "draft_policy", "gamma")
    dtype, drafter = loaded.target.quantization, loaded.recipe.drafter
    if dtype and loaded.recipe.target.kind == "builtin" and not given(ctx, "drafter", "recipe"):
        lines.append(f"The drafter is {drafter}: a model in {dtype} does not draft for itself.")
    lines += facts(loaded)
    if chat is not False and not getattr(loaded.target.tokenizer, "chat_template", None):
        lines.append("The model has no chat template: the prompt is continued as raw text.")
    return lines


def decode(
    loaded: LoadedRecipe,
    prompt: Sequence[int],
    text: str,
    trace_to: TraceOutput | None,
    paint: Paint | None,
    show: ShownOptions,
    transformers_speed: float | None = None,
) -> None:
    """Decode, print the text, compare with plain decoding, and print a summary.

    Args:
        text: The prompt's.
        transformers_speed: Tokens per second of `transformers`, to compare with too.

    Raises:
        KeyboardInterrupt: Ctrl-C; what there was by then has been shown.
    """
    run = loaded.start(prompt, trace=trace_to is not None)
    on_screen = trace_to is not None and trace_to.on_screen
    watchers: list[TextOutput | TraceOutput] = []
    if trace_to is not None:
        trace_to.begin(_trace_header(loaded, prompt, text), partial(_piece, loaded.target))
        watchers.append(trace_to)
    if not show.json_output:
        watchers.append(TextOutput(run, paint, streamed=show.streamed, after_trace=on_screen))
    max_new_tokens = loaded.recipe.decoding.max_new_tokens

    def decode_once(plain: bool) -> Generation:
        if not pairs.speculative:
            _follow(run, watchers, "decoding", max_new_tokens, quiet=show.quiet or show.streamed or on_screen)
            return run.result()
        repeat, done = loaded.start(prompt, plain=plain), len(pairs.plain if plain else pairs.speculative)
        stage = f"decoding {'plainly' if plain else 'with the drafter'}, to compare ({done + 1})"
        _follow(repeat, (), stage, max_new_tokens, quiet=show.quiet)
        return repeat.result()

    pairs = Pairs(decode_once)
    finished = True
    try:
        if show.compare:
            pairs.measure()
        else:
            pairs.measure_one(plain=False)
    except KeyboardInterrupt:
        finished = False
    result = run.result()
    figures = summary(result) | {
        "options": deciding_options(loaded),
        "device": str(loaded.target.scorer.device),
        "draftable_share": _draftable_share(loaded.drafter, result.token_ids),
        "too_slow": any(TOO_SLOW_NOTE in step.policy for step in result.steps),
    }
    figures |= pairs.figures()
    if pairs.plain:
        figures |= {"transformers_tokens_per_second": transformers_speed}
        figures |= _compared_tokens(pairs, loaded, prompt)
    if show.json_output:
        write_json(figures | {"peak_memory_bytes": peak_memory(str(loaded.target.scorer.device))})
    if not (show.quiet or show.json_output):
        notes = loaded.target.language_model.notes
        show_summary(figures, spaced=sys.stdout.isatty(), notes=notes, verbose=show.verbose)
    if not finished:
        raise KeyboardInterrupt


def _follow(
    run: GenerationRun,
    watchers: Sequence[TextOutput | TraceOutput],
    stage: str,
    max_new_tokens: int,
    *,
    quiet: bool,
) -> None:
    """Run to the end, or to Ctrl-C. The watchers see the end in any case."""
    done = 0
    try:
        with StageProgress(quiet, animated=False) as progress:
            for record in run:
                for watcher in watchers:
                    watcher.record(record)
                done += len(record.tokens)
                progress.update(stage, done, max_new_tokens)
    finally:
        for watcher in watchers:
            watcher.end(run.result())


def _compared_tokens(pairs: Pairs, loaded: LoadedRecipe, prompt: Sequence[int]) -> dict[str, Any]:
    """Return the figures of the plain run, and where the tokens of a pair first differ."""
    found: dict[str, Any] = {"plain": summary(pairs.plain[0]), "identical": None}
    if not loaded.sampling.greedy:  # sampled outputs differ by design: the draws fall on other events
        return found
    both = [
        (fast.token_ids, slow.token_ids) for fast, slow in zip(pairs.speculative, pairs.plain, strict=False)
    ]
    differing = [(fast, slow) for fast, slow in both if fast != slow]
    found |= {"identical": not differing, "differing_repeats": len(differing)}
    if differing:
        decoding = loaded.recipe.decoding
        last = len(prompt) + decoding.max_new_tokens
        transforms = loaded.sampling.at(len(prompt), last, decoding.end_ids(loaded.target.end_ids))
        difference = find_difference(loaded.target.scorer, prompt, *differing[0], transforms)
        assert difference is not None
        texts = [None if token is None else _piece(loaded.target, token) for token in difference.tokens]
        rounding = str(loaded.target.scorer.rounding).removeprefix("torch.")
        found["difference"] = {**asdict(difference), "rounding": rounding, "texts": texts}
    return found
