"""A step trace as one HTML page: the output, and every step with its draft, p, q, verdicts and times.

All steps are in the page, so that it can be read without script and printed. With script, one step is shown at a time,
chosen with a slider, the arrow keys, or a token of the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from jinja2 import Environment

from specbench.base.textsafe import terminal_safe, visible
from specbench.decoding.records import PARTS
from specbench.results.trace import Event, TraceEnd, TraceHeader, TracePrefill, TraceStep, TraceTimes
from specbench.show import html
from specbench.show.trace import (
    SIGNS,
    VerdictRule,
    branches,
    milliseconds,
    note_text,
    number_text,
    option_text,
)

_FOLDER = Path(__file__).parent
_BAR = 40  # width of the bar of a probability of 1
_STRIP_HEIGHT = 40  # of the column of the step with the most tokens
_STRIP_WIDTH = 8

Origin = Literal["accepted", "corrected", "bonus", "target"]


@dataclass(frozen=True)
class Token:
    """A token of the output, and where it is from."""

    text: str
    origin: Origin


@dataclass(frozen=True)
class Node:
    """A draft token: a row of a step's table."""

    number: int
    lines: str  # drawn before it in a tree
    parent: str  # said to screen readers in a tree
    token: str
    q: str
    p: str
    ratio: str
    r: str
    q_bar: float
    p_bar: float
    verdict: str
    sign: str


@dataclass(frozen=True)
class Part:
    """A part of a step's time; ``start`` and ``width`` are in percent of the step."""

    name: str
    time: str
    start: float
    width: float


@dataclass
class Section:
    """The prefill or a step."""

    title: str
    summary: str
    tokens: list[Token] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    is_tree: bool = False
    facts: list[tuple[str, str]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


@dataclass
class Trace:
    """One generation: what its header says, and its sections."""

    header: TraceHeader
    rule: VerdictRule
    sections: list[Section] = field(default_factory=list)
    end: str = "The generation was interrupted, or its trace is incomplete."

    def facts(self) -> list[tuple[str, str]]:
        """Return what is said above the output."""
        header = self.header
        options = [option_text(name, value) for name, value in header.options.items() if value is not None]
        return [
            ("target", f"{header.target} ({header.dtype})"),
            ("drafter", header.drafter),
            ("options", " · ".join(options)),
            ("prompt", f"{header.prompt_tokens} tokens, ending with: {header.prompt_tail}"),
            ("verdicts", self.rule.sentence()),
            *(("note", text) for text, _ in self.rule.notes()),
        ]

    def columns(self) -> list[tuple[float, float, float]]:
        """Return the strip: for each section x, and the heights of its accepted and of all of its tokens."""
        most = max((len(each.tokens) for each in self.sections), default=0) or 1
        unit = _STRIP_HEIGHT / most
        return [
            (i * _STRIP_WIDTH, unit * sum(token.origin == "accepted" for token in each.tokens), unit * len(each.tokens))
            for i, each in enumerate(self.sections)
        ]  # fmt: skip


def to_html(events: Iterable[Event]) -> str:
    """Return the page of a trace, or of several in one file."""
    return html.page(_templates(), _FOLDER, traces=list(_traces(events)))


@cache
def _templates() -> Environment:
    return html.templates(_FOLDER, text=terminal_safe)


def _traces(events: Iterable[Event]) -> Iterator[Trace]:
    trace: Trace | None = None
    for event in events:
        if isinstance(event, TraceHeader):
            if trace is not None:
                yield trace
            trace = Trace(event, VerdictRule.of(event))
            continue
        assert trace is not None  # parse_trace yields a header first
        match event:
            case TracePrefill():
                trace.sections.append(_prefill(event, trace.rule))
            case TraceStep():
                trace.sections.append(_step(event, trace.rule))
            case TraceEnd():
                trace.end = _end(event)
    if trace is not None:
        yield trace


def _prefill(event: TracePrefill, rule: VerdictRule) -> Section:
    section = Section("Prefill", f"{event.prompt_tokens} tokens, {milliseconds(event.time_s)} ms")
    if event.text is not None:
        section.tokens = [Token(event.text, "target")]
        section.facts.append(
            ("target", f"{visible(event.text)}  {rule.origin_from('p₁', event.probability)}")
        )
    if event.finish_reason is not None:
        section.facts.append(("stop", event.finish_reason))
    return section


def _step(event: TraceStep, rule: VerdictRule) -> Section:
    parents = event.parents or []
    size = f"{len(parents)} nodes" if parents else f"γ {event.gamma}"
    seconds = [getattr(event.times, f"{part}_s") for part in PARTS]
    end = len(event.texts) if event.closing is None else min(event.accepted, len(event.texts) - 1)
    kept = f"{size}, {event.accepted} accepted" if event.gamma else "nothing drafted"
    section = Section(
        f"Step {event.index + 1}",
        f"position {event.position}, {kept}, {milliseconds(sum(seconds))} ms",
        [
            Token(text, "accepted" if i < end else event.closing or "bonus")
            for i, text in enumerate(event.texts)
        ],
        list(_nodes(event, parents)),
        bool(parents),
    )
    if event.closing is not None and event.texts:
        section.facts.append((event.closing, f"{visible(event.texts[end])}  {rule.origin(event)}"))
    if event.finish_reason is not None:
        section.facts.append(("stop", event.finish_reason))
    if event.experts:
        section.facts.append(("experts", event.experts.text))
    if event.policy:
        notes = (f"{name} {note_text(value)}" for name, value in event.policy.items())
        section.facts.append(("policy", " · ".join(notes)))
    section.parts = list(_parts(event.times, seconds))
    return section


def _nodes(event: TraceStep, parents: Sequence[int]) -> Iterator[Node]:
    verdicts = event.verdicts
    for i, lines in branches(verdicts, parents) if parents else ((i, "") for i in range(len(verdicts))):
        each = verdicts[i]
        parent = parents[i] if parents else i - 1
        yield Node(
            number=i + 1,
            lines=lines,
            parent="after the context"
            if parent < 0
            else f"after {parent + 1}, {visible(verdicts[parent].text)}",
            token=visible(each.text),
            q=number_text(each.q),
            p=number_text(each.p),
            ratio=number_text(each.ratio),
            r=number_text(each.r),
            q_bar=_bar(each.q),
            p_bar=_bar(each.p),
            verdict="forced" if i in event.forced and each.verdict == "accepted" else each.verdict,
            sign=SIGNS[each.verdict],
        )


def _bar(probability: float | None) -> float:
    return round(_BAR * min(max(probability or 0.0, 0.0), 1.0), 1)


def _parts(times: TraceTimes, seconds: Sequence[float]) -> Iterator[Part]:
    total = sum(seconds) or 1.0
    start = 0.0
    for name, value in zip(PARTS, seconds, strict=True):
        width = 100 * max(value, 0.0) / total
        prefill = times.draft_prefill_s if name == "draft" else 0
        includes = f", prefill {milliseconds(prefill)} of it" if prefill else ""
        yield Part(name, f"{milliseconds(value)} ms{includes}", round(start, 2), round(width, 2))
        start += width


def _end(event: TraceEnd) -> str:
    facts = [f"{event.new_tokens} tokens in {event.steps} steps"]
    if event.tokens_per_step is not None:
        facts.append(f"{event.tokens_per_step:.2f} tokens per step")
    if event.acceptance_rate is not None:
        facts.append(
            f"{event.accepted} of {event.drafted} draft tokens accepted ({100 * event.acceptance_rate:.1f}%)"
        )
    if event.tokens_per_second is not None:
        facts.append(f"{event.tokens_per_second:.1f} tokens/s")
    return f"{', '.join(facts)}. Ended by: {event.finish_reason or 'interruption'}."
