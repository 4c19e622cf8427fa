"""The report of a run: one HTML file, which loads no other, and a Markdown file with image files next to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from specbench.base.files import file_errors, refuse_link, write_text
from specbench.results.results import load_results
from specbench.show.document import to_markdown
from specbench.show.html import to_html
from specbench.show.report.content import Report, make_report

__all__ = ["write_report"]


def write_report(
    folder: Path,
    out: Path | None = None,
    limits: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Report, list[Path]]:
    """Write ``report.html``, ``report.md``, and the figures of ``report.md`` in ``plots/``.

    Args:
        folder: The run's folder.
        out: The folder to write to; ``None`` for the run's folder.
        limits: See ``make_report``.

    Returns:
        The report, and the paths of ``report.html`` and ``report.md``.

    Raises:
        UsageError: There is no run, no generation of it has finished, or a file to write is a symbolic link.
        RunError: The report cannot be written.
    """
    results = load_results(folder)
    out = folder if out is None else out
    with file_errors(f"The report cannot be written to {str(out)!r}", "Give another --out."):
        refuse_link(out / "plots")
        (out / "plots").mkdir(parents=True, exist_ok=True)
        report = make_report(results, folder.resolve().name, out / "plots", limits)
        texts = {"report.html": to_html(report.name, report.parts), "report.md": to_markdown(*report.parts)}
        for name, text in texts.items():
            write_text(out / name, text)
    return report, [out / name for name in texts]
