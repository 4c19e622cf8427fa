"""What `specbench generate` prints, and what takes the records of a run: text on stdout, steps in a trace."""

from __future__ import annotations

import os
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeAlias

from specbench.base.errors import RunError, UsageError
from specbench.base.textsafe import terminal_safe
from specbench.cli.console import has_styles, write_out
from specbench.decoding.thinking import ThinkingSplit
from specbench.options import OUTPUT, group

if TYPE_CHECKING:
    from collections.abc import Callable

    from specbench.decoding.records import Generation, Origin, Prefill, Step
    from specbench.decoding.thinking import Labeled
    from specbench.generate import GenerationRun
    from specbench.results.trace import Event

    Paint: TypeAlias = Callable[[str, Origin], str]


_output = group(OUTPUT)


@dataclass(frozen=True)
class ShownOptions:
    """Output options."""

    compare: bool = _output(
        False,
        "--compare",
        "Also decode plainly, in turn, and with transformers; show the speedup with its interval.",
    )
    show_accepted: bool = _output(
        False, "--show-accepted", "Colors by origin: accepted drafts, corrected tokens, the target's own."
    )
    debug: bool = _output(False, "--debug", "Show every step on stderr.")
    trace_file: Path | None = _output(
        None, "--trace-file FILE", "File to write every step to, as JSON Lines."
    )
    json_output: bool = _output(
        False, "--json", "Print one JSON object instead of text, or a line for each of --prompts."
    )
    verbose: bool = _output(False, "--verbose -v", "Print all numbers and notes.")
    quiet: bool = _output(False, "--quiet -q", "No progress, no summary.")

    @property
    def streamed(self) -> bool:
        """Whether text is printed as it is decoded."""
        return not self.json_output and not self.debug


class TraceOutput:
    """Shows the records of a run on the terminal, writes them to a file, or both.

    A file that fails in the middle does not end the run. An existing trace stays until the first pass has ended.
    """

    def __init__(self, path: Path | None, debug: bool) -> None:
        self._path, self._view = path, None
        self._file: TextIO | None = None
        self._problem: str | None = None
        if debug:
            from rich.console import Console

            from specbench.show.trace import TraceView

            self._view = TraceView(Console(stderr=True))
        if path is not None and (
            path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)
        ):
            raise UsageError(f"The trace file {str(path)!r} cannot be written.", "Give another --trace-file.")

    def __enter__(self) -> TraceOutput:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    @property
    def on_screen(self) -> bool:
        """Whether steps are shown on the terminal."""
        return self._view is not None

    def begin(self, header: Event, piece: Callable[[int], str]) -> None:
        """Begin a trace; ``piece`` gives a token's raw text."""
        self._header, self._piece = header, piece
        if self._view is not None:
            self._view.show(header)

    def record(self, record: Prefill | Step) -> None:
        from specbench.decoding.records import Prefill
        from specbench.results.trace import prefill_event, step_event

        if isinstance(record, Prefill):
            self._add(prefill_event(record, self._piece))
        else:
            self._add(step_event(record, self._piece))

    def end(self, result: Generation) -> None:
        from specbench.decoding.metrics import summary
        from specbench.results.trace import TraceEnd

        figures = summary(result)
        event = TraceEnd(**{name: figures[name] for name in TraceEnd.__struct_fields__})
        if self._file is None:  # no pass has ended, or the file has failed
            self._show(event)
        else:
            self._add(event)

    def _add(self, event: Event) -> None:
        """Write and show one event."""
        from specbench.results.trace import write_event

        if self._path is not None and self._problem is None:
            try:
                if self._file is None:
                    self._file = self._path.open("w", encoding="utf-8")
                    write_event(self._file, self._header)
                write_event(self._file, event)
            except OSError as error:
                self._problem = str(error.strerror)
        self._show(event)

    def _show(self, event: Event) -> None:
        if self._view is not None:
            self._view.show(event)

    def complain(self) -> None:
        """Raise an error if the file is not complete."""
        if self._problem is not None:
            raise RunError(
                f"The trace file {str(self._path)!r} is not complete: {self._problem}.",
                "The output above is complete.",
            )


class TextOutput:
    """Writes text as soon as it is final, or at the end; on a terminal thinking is dim.

    Args:
        paint: Styles text by its origin.
        streamed: Whether text is written before the end.
        after_trace: Whether a trace is on screen, from which an empty line separates the text.
    """

    def __init__(
        self,
        run: GenerationRun,
        paint: Paint | None = None,
        *,
        streamed: bool = True,
        after_trace: bool = False,
    ) -> None:
        stream, tokenizer = run.text_stream(), run.target.tokenizer
        assert stream is not None
        assert tokenizer is not None
        self._stream, self._paint, self._streamed, self._after_trace = stream, paint, streamed, after_trace
        self._split = ThinkingSplit(tokenizer, run.prompt)
        self._origins: deque[Origin] = deque()  # of the tokens that it holds
        self._pieces: list[tuple[tuple[Origin, bool], str]] = []

    def record(self, record: Prefill | Step) -> None:
        from specbench.generate import shown_tokens

        tokens = shown_tokens(record.tokens, record.finish_reason)
        for token, origin in zip(tokens, record.origins, strict=False):
            self._origins.append(origin)
            self._label(self._split.push(token))
        if self._streamed:
            self._write()

    def end(self, result: Generation) -> None:
        self._label(self._split.finish())
        self._pieces += self._stream.finish(("target", self._split.thinks))
        if self._after_trace:
            sys.stderr.write("\n")
        self._write()
        if result.text and not result.text.endswith("\n"):
            write_out("\n")

    def _label(self, labeled: Labeled) -> None:
        for token, part in labeled:
            self._pieces += self._stream.push(token, (self._origins.popleft(), part != "answer"))

    def _write(self) -> None:
        pieces, self._pieces = self._pieces, []
        for (origin, thinking), text in pieces:
            if self._paint is not None:
                sys.stdout.write(self._paint(text, origin))
            elif thinking and text and has_styles():
                sys.stdout.write(f"\x1b[2m{terminal_safe(text)}\x1b[0m")
            else:
                write_out(text)
        sys.stdout.flush()
