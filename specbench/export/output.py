"""An export as a file, and the fastest setting that an engine supports."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from specbench._version import __version__
from specbench.base.errors import UsageError
from specbench.base.textsafe import one_line
from specbench.export.engine import Export, ExportEngine
from specbench.export.setting import Setting


def export_fastest(engine: ExportEngine, settings: Sequence[Setting]) -> tuple[Setting, Export]:
    """Export the fastest setting of a run that an engine supports; ``settings`` has the fastest first.

    Raises:
        UsageError: The engine supports none of the settings.
    """
    first, what = settings[0].measured, ""
    for each in settings:
        setting = engine.nearest(each)
        try:
            export = engine.export(setting)
        except UsageError as error:
            what = what or error.message
            continue
        return replace(setting, instead_of=None if setting.measured is first else first), export
    drafters = dict.fromkeys(str(setting.drafter) for setting in settings)
    if len(drafters) > 1:
        what = (
            f"{engine.title} supports none of the measured drafters: {', '.join(drafters)}. Supported:"
            f" {engine.describe_drafters()}."
        )
    raise UsageError(what, "Measure one of these with `specbench sweep --drafter`, or choose another engine.")


def as_file(engine: ExportEngine, setting: Setting, export: Export, source: str) -> str:
    """Return what to run, with all notes as comments before and after it."""
    head = [
        f"Made for {engine.title} {engine.version} by specbench {__version__}, from {source}.",
        *_measured_notes(engine, setting),
        *(f"Required: {each}" for each in export.needs),
    ]
    foot = [
        *(f"Not supported: {each}" for each in export.missing),
        *(f"Different: {each}" for each in export.differs),
        f"To verify: {export.check}",
    ]
    return f"{_comments(head)}\n{export.text}\n{_comments(foot)}"


def _measured_notes(engine: ExportEngine, setting: Setting) -> Iterator[str]:
    measured = setting.measured
    if measured is None:
        return
    which = "Fastest setting of the run" if measured.best else "Measured"
    at = f" at temperature {setting.temperature:g}" if setting.temperature else ""
    unsure = f" A fixed γ of {setting.gamma} was not measured." if engine.replaces_policy(setting) else ""
    yield f"{which}{at}: {measured}, in specbench.{unsure} Costs differ by engine and machine: measure there too."
    if setting.instead_of is not None:
        yield f"It is exported in place of {setting.instead_of}, which {engine.title} does not have."
    if measured.verdict == "slower":
        yield "It was slower than plain decoding: better leave speculation off."
    elif measured.verdict != "faster":
        yield "It is not clear that it is faster than plain decoding: measure more before you deploy it."


def _comments(notes: list[str]) -> str:
    wrapped = textwrap.TextWrapper(
        100, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
    )
    return "".join(f"{wrapped.fill(one_line(note))}\n" for note in notes)
