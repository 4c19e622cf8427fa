"""`specbench generate --prompts`: many prompts in batches, each with a line or a text of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specbench.base.errors import RunError, UsageError
from specbench.cli.console import write_json, write_out
from specbench.cli.progress import StageProgress

if TYPE_CHECKING:
    from specbench.bench.prompts import Prompt
    from specbench.cli.watchers import ShownOptions
    from specbench.decoding.records import Generation
    from specbench.generate import GenerationRun

BATCH = 8


def decode_prompts(
    prompts: Sequence[Prompt],
    batch: int,
    start: Callable[[Prompt], GenerationRun],
    more: Mapping[str, Any],
    show: ShownOptions,
) -> None:
    """Decode, and print the result of each prompt, in their order; JSON lines get the fields ``more`` too.

    Raises:
        RunError: Some prompts failed; the others are printed.
        KeyboardInterrupt: Ctrl-C; finished results are printed.
    """
    from specbench.cli.summary import show_many
    from specbench.generate_many import GenerationRuns

    def begun(prompt: Prompt) -> GenerationRun | Exception:
        try:
            return start(prompt)
        except UsageError as error:
            return error

    as_json, quiet = show.json_output, show.quiet
    begun_runs = [begun(prompt) for prompt in prompts]

    runs = GenerationRuns(begun_runs, max_batch=batch)
    results: dict[int, Generation | Exception] = {}
    printed = 0  # results so far: each waits for all before it
    began = time.perf_counter()
    try:
        with StageProgress(quiet or (sys.stdout.isatty() and not as_json), animated=False) as progress:
            for index, event in runs:
                if isinstance(event, Exception) or event.finish_reason is not None:
                    results[index] = runs.result(index)
                    while printed in results:
                        _print(prompts[printed], results[printed], more, as_json=as_json)
                        printed += 1
                    progress.update("decoding", len(results), len(prompts))
    except KeyboardInterrupt:
        for index in sorted(index for index in results if index >= printed):
            _print(prompts[index], results[index], more, as_json=as_json)
        raise
    finally:
        failed = sum(isinstance(result, Exception) for result in results.values())
        factory = runs.factory
        if not (quiet or as_json):
            show_many(
                [result for result in results.values() if not isinstance(result, Exception)],
                prompts=len(prompts),
                failed=failed,
                seconds=time.perf_counter() - began,
                use=None if factory is None else factory.use,
                why_not_batched=None if factory is None or runs.max_batch == 1 else factory.why_not_batched,
                spaced=sys.stdout.isatty(),
            )
    if failed:
        raise RunError(f"{failed} of {len(prompts)} prompts failed; the output says why.")


def _print(prompt: Prompt, result: Generation | Exception, more: Mapping[str, Any], *, as_json: bool) -> None:
    from specbench.decoding.metrics import summary

    if not as_json:
        text = f"FAILED: {result}" if isinstance(result, Exception) else result.text or ""
        write_out(f"== {prompt.id} ({prompt.category})\n{text.rstrip()}\n\n")
        return
    line: dict[str, Any] = {"id": prompt.id, "category": prompt.category}
    if isinstance(result, Exception):
        line["error"] = str(result)
    else:
        line |= summary(result) | {"queued_s": result.prefill.queued_s, **more}
    write_json(line)
