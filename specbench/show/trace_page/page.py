"""A step trace as one HTML page: the output, and every step with its draft, p, q, verdicts and times.

All steps are in the page, so that it can be read without script and printed. With script, one step is shown at a time,
chosen with a slider, the arrow keys, or a token of the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from specbench.base.textsafe import terminal_safe
from specbench.results.trace import Event, TraceEnd, TraceHeader
from specbench.show import html
from specbench.show.document import Facts, Sheet
from specbench.show.trace import TraceParts, tokens_of

_STRIP_HEIGHT = 40  # of the column of the step with the most tokens
_STRIP_WIDTH = 8
_COLUMNS = 1000  # of a line, which the browser breaks


@dataclass
class Section:
    """The prefill or a step: its tokens with their origins, and the parts that the terminal shows."""

    title: str
    tokens: list[tuple[str, str]]
    sheets: list[Sheet]
    facts: Facts


@dataclass
class Trace:
    """One generation: its header, its sections, and its end."""

    target: str
    drafter: str
    facts: Facts
    sections: list[Section] = field(default_factory=list)
    end: Facts | None = None

    def columns(self) -> list[tuple[float, float, float]]:
        """Return the strip: for each section x, and the heights of its accepted and of all of its tokens."""
        unit = _STRIP_HEIGHT / max([1, *(len(each.tokens) for each in self.sections)])
        accepted = [sum(origin == "accepted" for _, origin in each.tokens) for each in self.sections]
        return [
            (i * _STRIP_WIDTH, unit * accepted[i], unit * len(each.tokens))
            for i, each in enumerate(self.sections)
        ]


def to_html(events: Iterable[Event]) -> str:
    """Return the page of a trace, or of several in one file."""
    return html.page(Path(__file__).parent, {"text": terminal_safe}, traces=list(_traces(events)))


def _traces(events: Iterable[Event]) -> Iterator[Trace]:
    trace: Trace | None = None
    parts = TraceParts(_COLUMNS, growing=False)
    for event in events:
        title, sheets, facts = parts.of(event)
        if isinstance(event, TraceHeader):
            if trace is not None:
                yield trace
            trace = Trace(event.target, event.drafter, facts)
            continue
        assert trace is not None  # parse_trace yields a header first
        if isinstance(event, TraceEnd):
            trace.end = Facts(
                [
                    ("end", [(title.removeprefix("end · "), "")]),
                    *(pair for pair in facts.pairs if pair[0] != "text"),
                ]
            )
        else:
            trace.sections.append(Section(title, tokens_of(event), sheets, facts))
    if trace is not None:
        yield trace
