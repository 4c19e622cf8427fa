"""Decoding one prompt for `specbench generate`: shown as it comes, traced, compared with plain decoding."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from specbench.bench.pairs import Pairs, compared_tokens, token_text
from specbench.cli.console import write_json
from specbench.cli.progress import StageProgress
from specbench.cli.setting import deciding_options
from specbench.cli.summary import show_summary
from specbench.cli.watchers import TextOutput, TraceOutput
from specbench.decoding.clocks import peak_memory
from specbench.decoding.metrics import summary
from specbench.policies.auto import TOO_SLOW_NOTE
from specbench.results.trace import PROMPT_TAIL, TraceHeader

if TYPE_CHECKING:
    from specbench.cli.watchers import Paint, ShownOptions
    from specbench.decoding.protocols import Drafter
    from specbench.decoding.records import Generation
    from specbench.generate import GenerationRun
    from specbench.loaded import LoadedRecipe


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


def _draftable_share(drafter: Drafter, tokens: Sequence[int]) -> float | None:
    """Return the share of tokens that the drafter's model could draft; ``None`` where it can draft any."""
    vocabulary = drafter.traits.vocabulary
    if vocabulary is None or not tokens:
        return None
    return sum(token in vocabulary.places for token in tokens) / len(tokens)


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
        trace_to.begin(_trace_header(loaded, prompt, text), partial(token_text, loaded.target))
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
        figures |= compared_tokens(pairs, loaded, prompt)
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
