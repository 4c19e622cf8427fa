"""The step trace: what happened in every step, as events to keep in a file.

A trace is a sequence of plain dicts: one header, at most one prefill, the steps and an end. Written as JSON Lines it
can be read and shown again later (``specbench.show.trace``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO

import msgspec

from specbench._version import __version__
from specbench.base.errors import UsageError
from specbench.base.record import Count, Json, Number, Record, wrong_field
from specbench.decoding.records import FinishReason, Prefill, Step

TRACE_VERSION = 1
"""Version of the trace format, written in its header. 1: first release."""

Event = Json
"""One line of a trace: JSON-ready, its kind under ``event``."""

_PROMPT_TAIL = 240  # characters of the prompt's end that a header keeps
_SMALLEST_Q = 2.0**-126  # smallest normal float32, the floor that the acceptance test puts under q
_LONGEST_LINE = 1 << 24  # bytes; a file without line ends is not read whole before it is refused


# --- Events ---------------------------------------------------------------------------------------


def header_event(
    *,
    target: str,
    drafter: str,
    dtype: str,
    options: Mapping[str, Any],
    prompt: str,
    prompt_tokens: int,
    greedy: bool,
    lossless: bool,
) -> Event:
    """The first event.

    Args:
        target, drafter: The names of what is run.
        dtype: The target's dtype.
        options: JSON-ready options by name, in the order to show them; the view leaves out ``None`` values.
        prompt: The whole prompt as text; only its end is kept.
        prompt_tokens: Its length in tokens.
        greedy: Whether decoding is greedy, so that p and q decide nothing.
        lossless: False with the residual adjustment off.
    """
    return {
        "event": "header",
        "trace_version": TRACE_VERSION,
        "specbench": __version__,
        "target": target,
        "drafter": drafter,
        "dtype": dtype,
        "options": dict(options),
        "prompt_tokens": prompt_tokens,
        "prompt_tail": prompt[-_PROMPT_TAIL:],
        "greedy": greedy,
        "lossless": lossless,
    }


def prefill_event(prefill: Prefill, piece: Callable[[int], str]) -> Event:
    """The pass over the prompt; ``piece`` gives a token's raw text."""
    text = None if prefill.token is None else piece(prefill.token)
    probability = _finite(prefill.probability)
    return {"event": "prefill", **asdict(prefill), "probability": probability, "text": text}


def step_event(step: Step, piece: Callable[[int], str]) -> Event:
    """One step with everything its record says, the ratios p/q and the texts of all tokens; of a tree also its shape.

    Args:
        step: Recorded with verdicts.
        piece: Gives a token's raw text.

    Raises:
        ValueError: The step was recorded without verdicts.
    """
    if step.verdicts is None:
        raise ValueError(f"step {step.index} was recorded without verdicts; ask the loop for a trace")
    return {
        "event": "step",
        "index": step.index,
        "position": step.position,
        "gamma": step.gamma,
        "drafted": list(step.drafted),
        "accepted": step.accepted,
        "tested": step.tested,
        "tokens": list(step.tokens),
        "texts": [piece(token) for token in step.tokens],
        "closing": step.closing,
        "closing_probability": _finite(step.closing_probability),
        "expected_acceptance": [_finite(value) for value in step.expected_acceptance],
        "times": asdict(step.times),
        "finish_reason": step.finish_reason,
        "policy": {name: _finite(value) for name, value in step.policy.items()},
        "verdicts": [
            {
                "token": verdict.token,
                "text": piece(verdict.token),
                "q": _finite(verdict.q),
                "p": _finite(verdict.p),
                "ratio": None if verdict.p is None else _finite(verdict.p / max(verdict.q, _SMALLEST_Q)),
                "r": verdict.r,
                "verdict": verdict.verdict,
            }
            for verdict in step.verdicts
        ],
        "siblings": [
            {"place": place, "token": token, "text": piece(token)} for place, token in step.siblings
        ],
        **({} if step.parents is None else {"parents": list(step.parents)}),
    }


def _finite(value: float | None) -> float | None:
    """JSON has no word for what a broken model's logits may lead to."""
    return value if value is not None and math.isfinite(value) else None


def end_event(
    *,
    finish_reason: FinishReason | None,
    new_tokens: int,
    steps: int,
    tokens_per_step: float | None,
    drafted: int,
    accepted: int,
    acceptance_rate: float | None,
    tokens_per_second: float | None,
) -> Event:
    """The last event: a summary under the names that the run's JSON uses.

    ``finish_reason`` is ``None`` for an interrupted run, a rate where there is nothing to divide by.
    """
    return {
        "event": "end",
        "finish_reason": finish_reason,
        "new_tokens": new_tokens,
        "steps": steps,
        "tokens_per_step": tokens_per_step,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": acceptance_rate,
        "tokens_per_second": tokens_per_second,
    }


# --- Files ----------------------------------------------------------------------------------------


def write_event(file: TextIO, event: Event) -> None:
    """Append one event as a line of ASCII JSON and flush it, so that a crash costs no finished step."""
    file.write(json.dumps(event, allow_nan=False) + "\n")
    file.flush()


def read_trace(path: Path) -> Iterator[Event]:
    """The events of a trace file, one by one.

    Raises:
        UsageError: The file cannot be opened, is not a trace, comes from a newer version, or is broken; the
            events before a broken line have been yielded by then.
    """
    try:
        with path.open("rb") as file:
            yield from parse_trace(file, str(path))
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror or error}.") from error


def parse_trace(file: BinaryIO, name: str) -> Iterator[Event]:
    """Like `read_trace`, from an open binary file (a pipe as well) that messages call ``name``."""
    hint = "Give a file that `specbench generate --trace-file` wrote."
    in_trace = False
    for n, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
        if line.isspace():
            continue
        try:
            event = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            if not in_trace:
                raise UsageError(f"{name} is not a step trace: line {n} is no JSON.", hint) from error
            if not line.endswith(b"\n"):
                raise UsageError(
                    f"{name}, line {n} is cut short: the run that wrote it did not get further.",
                    "Everything before it was read.",
                ) from error
            raise UsageError(f"{name}, line {n} is broken: it is no JSON.", hint) from error
        kind = event.get("event") if isinstance(event, dict) else None
        if not in_trace and kind != "header":
            raise UsageError(f"{name} is not a step trace: line {n} is no header.", hint)
        if kind == "header":
            _check_version(event, name, n)
            in_trace = True
        if not isinstance(kind, str) or kind not in _EVENTS:
            raise UsageError(f"{name}, line {n} is broken: it is no event of a trace.", hint)
        wrong = _wrong(event, kind)
        if wrong is not None:
            raise UsageError(f"{name}, line {n} is broken: {wrong} is missing or wrong.", hint)
        yield event
    if not in_trace:
        raise UsageError(f"{name} is not a step trace: it is empty.", hint)


def _wrong(event: Event, kind: str) -> str | None:
    """Which field of an event is missing or holds what it cannot hold."""
    try:
        msgspec.convert(event, _EVENTS[kind])
    except ValueError as error:
        return f"{kind}.{wrong_field(error)}"
    return _misplaced(event)


def _misplaced(event: Event) -> str | None:
    """What is wrong with the tree of a step: every draft has one before it that it stands behind, or -1."""
    parents = event.get("parents", ())
    fit = all(-1 <= parent < node for node, parent in enumerate(parents))
    return None if not parents or (fit and len(parents) == len(event["verdicts"])) else "step.parents"


def _check_version(header: Event, name: str, number: int) -> None:
    version = header.get("trace_version")
    if type(version) is not int or version < 1:
        raise UsageError(f"{name}, line {number} is broken: it has no trace version.")
    if version > TRACE_VERSION:
        raise UsageError(
            f"{name} is a trace of version {version}, and this specbench reads up to {TRACE_VERSION}.",
            "Update specbench.",
        )


# What an event must hold for the view to show it.
_Finish = Literal["eos", "stop-string", "length", "context-limit"] | None


class _Header(Record, tag_field="event", tag="header"):
    target: str
    drafter: str
    dtype: str
    options: Json
    prompt_tokens: Count
    prompt_tail: str
    greedy: bool
    lossless: bool


class _Prefill(Record, tag_field="event", tag="prefill"):
    prompt_tokens: Count
    text: str | None
    time_s: Number
    finish_reason: _Finish
    probability: Number | None


class _Times(Record):
    draft_s: Number
    verify_s: Number
    accept_s: Number
    rollback_s: Number
    other_s: Number
    draft_prefill_s: Number


class _Verdict(Record):
    text: str
    q: Number | None
    p: Number | None
    ratio: Number | None
    r: Number | None
    verdict: Literal["accepted", "rejected", "untested"]


class _Sibling(Record):
    place: Count
    text: str


class _Step(Record, tag_field="event", tag="step"):
    index: Count
    position: Count
    gamma: Count
    accepted: Count
    texts: list[str]
    closing: Literal["corrected", "bonus", "target"] | None
    closing_probability: Number | None
    times: _Times
    finish_reason: _Finish
    policy: dict[str, Number | None]
    verdicts: list[_Verdict]
    siblings: list[_Sibling] = []
    parents: list[int] = []


class _End(Record, tag_field="event", tag="end"):
    finish_reason: _Finish
    new_tokens: Count
    steps: Count
    tokens_per_step: Number | None
    drafted: Count
    accepted: Count
    acceptance_rate: Number | None
    tokens_per_second: Number | None


_EVENTS = {"header": _Header, "prefill": _Prefill, "step": _Step, "end": _End}
