"""Traces of a service: when its requests came, and how long their prompts and answers were (``sweep --trace``).

Mooncake (FAST'25) and AIPerf (0.14) write JSON Lines, which can hold texts, and BurstGPT (1.1) CSV. Without texts,
prompts are those of the sweep, after a text that makes each as long as in the trace.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbench.base.errors import UsageError
from specbench.base.files import reason
from specbench.base.textsafe import counted, encodable
from specbench.bench.prompts import Prompt, Replayed, interleave
from specbench.specs.sweeps import Replay

_FORMS = (
    "Each line needs timestamp (milliseconds), input_length or text_input, and output_length; a CSV file the columns"
    " Timestamp (seconds), Request tokens and Response tokens."
)
_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
_FIELDS = (
    ("timestamp", "created_time"),
    ("input_length", "input_tokens"),
    ("output_length", "output_tokens"),
)


@dataclass(frozen=True)
class Trace:
    """Requests of a trace that have a time and an answer, by time from 0 s on, the number of others, and its name."""

    requests: tuple[Replayed, ...]
    left_out: int
    arrivals: Replay

    def prompts(
        self,
        chosen: Sequence[Prompt],
        text: str,
        count: Callable[[Prompt], int],
        limit: int | None = None,
    ) -> tuple[tuple[Prompt, ...], list[str]]:
        """Return a prompt for each request, and notes on what could not be as in the trace.

        Args:
            chosen: The prompts to take in turn; where one is too long, the shortest.
            text: What makes them longer.
            count: Returns the number of tokens of a prompt.
            limit: Of tokens of a prompt and its answer; ``None`` if not known.

        Raises:
            UsageError: No request is left.
        """
        firsts, longest = [replace(each, turns=each.turns[:1]) for each in interleave(chosen)], limit or 0
        lengths = dict.fromkeys((each.id for each in firsts), 0)
        if not all(each.text for each in self.requests):  # else no tokenizer is needed
            lengths = {each.id: count(each) for each in firsts}
            longest = count(replace(firsts[0], turns=(text,)))
        shortest = min(firsts, key=lambda each: lengths[each.id])
        made, longer = list[Prompt](), 0
        for number, request in enumerate(self.requests):
            needed = request.prompt_tokens + request.answer_tokens
            if request.prompt_tokens > longest or (limit is not None and needed > limit):
                continue
            base = firsts[number % len(firsts)]
            if request.text:
                base = replace(base, category="trace", turns=(request.text,), system=None)
            elif lengths[base.id] > request.prompt_tokens:
                base = shortest
                longer += lengths[base.id] > request.prompt_tokens
            made.append(replace(base, id=f"request-{number + 1}", replayed=request))
        if not made:
            raise UsageError("No request of the trace fits the model.", "Take another trace.")
        notes = [
            f"The trace has {counted(len(made), 'request')} within {self.requests[-1].at_s:.0f} s.",
            f"{longer} of their prompts are longer than in it." if longer else "",
            f"Left out: {self.left_out} without a time or an answer." if self.left_out else "",
        ]
        if too_long := len(self.requests) - len(made):
            notes.append(f"Left out: {too_long} longer than the model or the text for prompts.")
        return tuple(made), [*filter(None, notes)]


def read_trace(name: str) -> Trace:
    """Read ``FILE`` or ``FILE:speed=X``, in which requests come X times as fast.

    Raises:
        UsageError: The file cannot be read, has another form, or no request with an answer.
    """
    path, given, speed = name, None, 1.0
    if (found := re.fullmatch(r"(.+):speed=(\d{1,6}\.?\d{0,6})", name, re.DOTALL)) is not None:
        path, given, speed = found[1], found[2], float(found[2])
    if not speed:
        raise UsageError("The speed of a trace is 0.", "Give a number above 0, such as speed=0.5.")
    try:
        data = Path(path).read_bytes()
        lines = data.decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"The trace {path} cannot be read: {why}.", "Check its path.") from None
    read = [_request(fields, f"Line {number} of the trace {path}") for number, fields in _rows(lines, path)]
    kept = sorted((each for each in read if each is not None), key=lambda each: each.at_s)
    if not kept:
        raise UsageError(f"The trace {path} has no request with a time and an answer.", _FORMS)
    requests = tuple(replace(each, at_s=(each.at_s - kept[0].at_s) / speed) for each in kept)
    called = re.sub(r"[^\w.-]+", "-", Path(path).name)
    ending = f"@{hashlib.sha256(data).hexdigest()[:8]}" + (f"×{speed:g}" if given else "")
    return Trace(requests, len(read) - len(kept), Replay(called + ending))


def _rows(lines: Sequence[str], path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield numbers of lines, and their fields as in JSON Lines."""
    if not lines or not lines[0].lstrip().startswith("{"):
        rows = csv.DictReader(lines)
        if not {*_COLUMNS} <= {*(rows.fieldnames or ())}:
            raise UsageError(f"The trace {path} has none of the known forms.", _FORMS)
        for number, row in enumerate(rows, 2):
            fields: Any = {name: row[column] for column, (name, _) in zip(_COLUMNS, _FIELDS, strict=True)}
            yield number, {**fields, "per_second": 1.0}
        return
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise UsageError(f"Line {number} of the trace {path} is no JSON object.", _FORMS)
        yield number, fields


def _request(fields: Mapping[str, Any], where: str) -> Replayed | None:
    """Return a request; ``None`` for one that failed, or that comes when an earlier one of its session has ended."""
    at, prompt, answer = (fields.get(name, fields.get(other)) for name, other in _FIELDS)
    said = fields.get("text_input")
    text = encodable(said) if isinstance(said, str) and said.strip() else ""
    if at is None or answer is None:
        return None
    try:
        at_s = float(str(at)) / fields.get("per_second", 1000.0)
        asked, given = int(str(prompt or 0)), int(str(answer))
    except ValueError:
        at_s = -1.0
    if not 0 <= at_s < 1e12 or min(asked, given) < 0:
        raise UsageError(f"{where} has a value that is no number, or is negative.", _FORMS)
    return Replayed(at_s, asked, given, text) if given and (asked or text) else None
