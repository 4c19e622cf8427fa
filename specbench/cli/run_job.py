"""What sweeps and searches say and write around their measurements."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from specbench.base.files import file_errors, write_text
from specbench.base.textsafe import terminal_safe
from specbench.findings import review
from specbench.results.results import load_results
from specbench.results.store import write_csv

if TYPE_CHECKING:
    from specbench.base.load import LoadSnapshot
    from specbench.bench.session import Session
    from specbench.results.summary import Summary


class RunJob:
    """A measurement into the folder of a run, with its models loaded, or its servers reached."""

    def __init__(self, session: Session, quiet: bool) -> None:
        self.session, self.folder, self.quiet = session, session.store.path, quiet
        self.console = Console(stderr=True, highlight=False)
        self.recipes = {each.id: each.recipe for each in session.sweep.configs if each.recipe is not None}
        """The recipes of configurations, with models as they were named."""

    def say_at_start(self, start: LoadSnapshot, continued: str | None) -> None:
        """Print notes on models and the machine, and that a run is continued (``None``: it begins)."""
        for note in self.session.notes:
            self.say(f"note: {note}")
        for finding in review.warn_at_start(start):
            self.say(finding.line)
        if continued is not None and not self.quiet:
            self.say(f"Continuing {self.folder}{continued}.")

    @property
    def where(self) -> str:
        """Where the measurements are, and the command that shows them."""
        return f"Results: {self.folder}; specbench report {shlex.quote(str(self.folder))} shows them."

    def summary(self) -> Summary:
        """Return the figures of the run so far."""
        from specbench.results.summary import Summary

        return Summary(load_results(self.folder))

    def write_summary(self, summary: Summary, text: str) -> None:
        """Write the table and the answer into two files."""
        problem = f"The summary in {str(self.folder)!r} cannot be written"
        with file_errors(problem, "What was measured is kept."):
            write_csv(summary.table(), self.folder / "summary.csv")
            write_text(self.folder / "summary.md", text)

    def say(self, line: str) -> None:
        """Print a line on stderr."""
        text = Text(terminal_safe(line))
        self.console.print(text, soft_wrap=not self.console.is_terminal)
