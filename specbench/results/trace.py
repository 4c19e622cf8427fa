"""The step trace: what happened in every step, as events in a file.

A trace has a header, at most one prefill, the steps and an end, as JSON Lines. ``specbench.show.trace`` shows it.
Fields with a default can be missing, since older traces lack some.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal, TextIO

import msgspec
from msgspec import UNSET, UnsetType

from specbench._version import __version__
from specbench.base.errors import UsageError
from specbench.base.record import Count, Json, Number, Record, finite, finite_or_none, to_dict, wrong_field
from specbench.decoding.records import ExpertsRead, Prefill, Step, StepTimes

TRACE_VERSION = 1
"""Version of the trace format, written in its header. 1: first release."""

PROMPT_TAIL = 240
"""Characters of the prompt's end that a header keeps."""

_SMALLEST_Q = 2.0**-126  # smallest normal float32, the lower limit of q in the acceptance test
_LONGEST_LINE = 1 << 24  # bytes; a file without line breaks is refused before it is read whole

_Finish = Literal["eos", "stop-string", "length", "context-limit"] | None


# --- Events ---------------------------------------------------------------------------------------


class TraceHeader(Record, tag_field="event", tag="header"):
    """The first event.

    Attributes:
        target, drafter: Names of the target and the drafter.
        dtype: The target's dtype.
        options: JSON-ready options by name, in the order to show them; the view leaves out ``None`` values.
        prompt_tokens: Length of the prompt.
        prompt_tail: The end of its text.
        greedy: Whether decoding is greedy, so that p and q do not affect the verdicts.
    """

    trace_version: int = TRACE_VERSION
    specbench: str = __version__
    target: str
    drafter: str
    dtype: str
    options: Json
    prompt_tokens: Count
    prompt_tail: str
    greedy: bool


class TracePrefill(Record, tag_field="event", tag="prefill"):
    """The forward pass over the prompt, and the token that it gave."""

    prompt_tokens: Count
    token: int | None = None
    time_s: Number
    finish_reason: _Finish
    probability: Number | None
    text: str | None


class TraceVerdict(Record):
    """A draft token with its verdict; ``ratio`` is p/q, and ``r`` the random number that it was compared with."""

    token: int = -1
    text: str
    q: Number | None
    p: Number | None
    ratio: Number | None
    r: Number | None
    verdict: Literal["accepted", "rejected", "untested"]


class TraceStep(Record, tag_field="event", tag="step"):
    """A step with all fields of its record; for a tree, also the parent of each node, -1 for the context.

    ``forced`` are the places of draft tokens that the output's format forced.
    """

    index: Count
    position: Count
    gamma: Count
    drafted: list[int] = []
    accepted: Count
    tested: Count = 0
    tokens: list[int] = []
    texts: list[str]
    closing: Literal["corrected", "bonus", "target"] | None
    closing_probability: Number | None
    expected_acceptance: list[Number | None] = []
    times: StepTimes
    finish_reason: _Finish
    policy: dict[str, Number | None]
    verdicts: list[TraceVerdict]
    forced: list[int] = []
    parents: list[int] | UnsetType = UNSET
    experts: ExpertsRead | UnsetType = UNSET

    def __post_init__(self) -> None:
        parents = self.parents or []
        if parents and len(parents) != len(self.verdicts):
            raise ValueError("a tree has a parent for each of its nodes - at `$.parents`")
        if not all(-1 <= parent < node for node, parent in enumerate(parents)):
            raise ValueError("a node stands before its parent - at `$.parents`")


class TraceEnd(Record, tag_field="event", tag="end"):
    """The last event, with metrics named as in ``generate --json``.

    ``finish_reason`` is ``None`` if the generation was interrupted. A rate is ``None`` if its denominator is 0.
    """

    finish_reason: _Finish
    new_tokens: Count
    steps: Count
    tokens_per_step: Number | None
    drafted: Count
    accepted: Count
    forced: Count = 0
    corrected: Count | None = None
    acceptance_rate: Number | None
    tokens_per_second: Number | None


Event = TraceHeader | TracePrefill | TraceStep | TraceEnd


def prefill_event(prefill: Prefill, piece: Callable[[int], str]) -> TracePrefill:
    """Convert a prefill; ``piece`` gives a token's raw text."""
    return TracePrefill(
        prompt_tokens=prefill.prompt_tokens,
        token=prefill.token,
        time_s=prefill.time_s,
        finish_reason=prefill.finish_reason,
        probability=finite_or_none(prefill.probability),
        text=None if prefill.token is None else piece(prefill.token),
    )


def step_event(step: Step, piece: Callable[[int], str]) -> TraceStep:
    """Convert a step that was recorded with verdicts; ``piece`` gives a token's raw text.

    Raises:
        ValueError: The step was recorded without verdicts.
    """
    if step.verdicts is None:
        raise ValueError(f"step {step.index} was recorded without verdicts; trace the loop")
    fields: Json = finite(step.to_dict())
    for name in ("parents", "experts"):
        if fields[name] is None:
            del fields[name]
    for each, made in zip(fields["verdicts"], step.verdicts, strict=True):
        p, q = made.p, max(made.q, _SMALLEST_Q)
        each.update(text=piece(made.token), ratio=None if p is None else finite_or_none(p / q))
    texts = [piece(token) for token in step.tokens]
    return msgspec.convert({**fields, "gamma": step.gamma, "texts": texts}, TraceStep)


# --- Files ----------------------------------------------------------------------------------------


def write_event(file: TextIO, event: Event) -> None:
    """Append one event as a line of ASCII JSON and flush it, so that a crash loses no finished step."""
    file.write(json.dumps(to_dict(event), allow_nan=False) + "\n")
    file.flush()


def read_trace(path: Path) -> Iterator[Event]:
    """Read the events of a trace file, one by one.

    Raises:
        UsageError: The file cannot be opened, is not a trace, comes from a newer version, or is damaged. Events before
            a damaged line are yielded before the error is raised.
    """
    try:
        with path.open("rb") as file:
            yield from parse_trace(file, str(path))
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror or error}.") from error


def parse_trace(file: BinaryIO, name: str) -> Iterator[Event]:
    """Read events like ``read_trace`` from an open binary file or pipe, called ``name`` in messages."""
    hint = "Give a file that `specbench generate --trace-file` wrote."
    started = False
    for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
        if line.isspace():
            continue
        try:
            event = msgspec.convert(json.loads(line.decode("utf-8")), Event)
        except (ValueError, RecursionError) as error:
            field = wrong_field(error) if isinstance(error, msgspec.ValidationError) else "it"
            what = (
                f"is damaged: {field or 'it'} is missing or wrong" if line.endswith(b"\n") else "is cut short"
            )
            raise UsageError(f"{name}, line {number} {what}.", hint) from error
        started = started or isinstance(event, TraceHeader)
        if not started or (isinstance(event, TraceHeader) and event.trace_version != TRACE_VERSION):
            break
        yield event
    else:
        if started:
            return
    raise UsageError(f"{name} is not a step trace of version {TRACE_VERSION}.", hint)
