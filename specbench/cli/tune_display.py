"""What is shown while `specbench tune` searches, and what it stores and prints at the end."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import typer
from msgspec import structs

from specbench.base.textsafe import counted, terminal_safe
from specbench.cli.console import broken, duration, write_json, write_out
from specbench.cli.signals import exit_code_of_interrupt
from specbench.results import stats
from specbench.results.results import load_results
from specbench.tune.answer import answer_parts, answer_text, as_json, find_answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.base.record import Json
    from specbench.cli.progress import StageProgress
    from specbench.cli.run_job import RunJob
    from specbench.cli.tune_options import SearchOptions
    from specbench.results.run import TuningAnswer
    from specbench.tune.search import Search


def _race_state(search: Search) -> str:
    """Return a line on the running candidates of the race."""
    race, lead = search.race, search.rows[search.race.leader].label
    if race.leader != race.plain:
        lead += f" {stats.decimals(race.speedup(race.leader).value)}× plain"
    who = "decided" if race.decided else f"first of {len(race.running)}"
    left = duration(max(0.0, search.left_s))
    return f"{counted(race.blocks, 'block')}, {left} left, {who}: {lead}"


def run_search(job: RunJob, search: Search, progress: StageProgress) -> TuningAnswer:
    """Search, show the race, and store the answer in the run for reports and exports."""
    ended, store = False, job.session.store
    try:
        for _ in search.measure():
            progress.update("racing", 0, None, note=_race_state(search))
        ended = search.race.ending != "interrupted"
    finally:
        if not ended:
            job.say(
                f"Measurements are in {job.folder}; to continue, run the same command with --results"
                f" {shlex.quote(str(job.folder))} --resume."
            )
    answer = find_answer(search, load_results(job.folder))
    assert store.run.tuning is not None
    store.update(tuning=structs.replace(store.run.tuning, answer=answer))
    return answer


def finish_search(
    job: RunJob,
    search: Search,
    answer: TuningAnswer,
    asked: SearchOptions,
    lines: Sequence[str],
    facts: Json,
    ending: Sequence[str],
) -> None:
    """Store and print the answer with more lines, or as JSON with more facts; then what is said at the end.

    Raises:
        typer.Exit: The search was interrupted.
    """
    from specbench.show.document import to_markdown
    from specbench.show.tables import summary_sheet

    summary = job.summary()
    stored = [] if job.recipes else lines  # commands name the folders of models
    parts = [to_markdown(*answer_parts(answer, search)), *stored, to_markdown(summary_sheet(summary))]
    job.write_summary(summary, "\n\n".join(parts))
    if asked.json_output:
        write_json({**as_json(answer, search), **facts, "results": str(job.folder)})
    else:
        text = answer_text(answer, search, lines, verbose=asked.verbose)
        write_out(broken(terminal_safe(text), sys.stdout))
    for warning in job.session.warnings:
        job.warn(warning)
    for line in (*ending, job.where):
        job.say(line)
    if search.race.ending == "interrupted":
        raise typer.Exit(exit_code_of_interrupt())
