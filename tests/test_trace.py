"""The step trace: what events hold, how files fail, and how the view looks, to the letter."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from specbench.base.errors import UsageError
from specbench.base.record import to_dict
from specbench.cli.trace import trace
from specbench.decoding.records import DraftVerdict, Prefill, Step, StepTimes
from specbench.results.trace import (
    Event,
    TraceEnd,
    TraceHeader,
    TraceStep,
    parse_trace,
    prefill_event,
    read_trace,
    step_event,
    write_event,
)
from specbench.show.trace import TraceView

PIECES = ["The", " sky", " is", " blue", " because", "\n\n", "<|im_end|>", " air", " scatters", " light"]
THE, SKY, IS, BLUE, BECAUSE, BREAK, END, AIR, SCATTERS, LIGHT = range(10)
TIMES = StepTimes(draft_s=0.0121, verify_s=0.0203, accept_s=0.0004, rollback_s=0.0001, other_s=0.0023)


def verdict(token: int, q: float, p: float | None, r: float | None) -> DraftVerdict:
    """Untested without p; else by r < p/q, or accepted in greedy decoding."""
    if p is None:
        return DraftVerdict(token, q, None, None, "untested")
    return DraftVerdict(token, q, p, r, "rejected" if r is not None and r >= p / q else "accepted")


def header(**changes: Any) -> Event:
    settings: dict[str, Any] = {
        "target": "org/target",
        "drafter": "org/drafter, int8",
        "dtype": "bfloat16",
        "options": {"gamma": 3, "temperature": 0.8, "top_k": None, "stop": ["\n\n\n"], "seed": 0},
        "prompt_tokens": 37,
        "prompt_tail": "Why is the sky blue?\n",
        "greedy": False,
    }
    return TraceHeader(**(settings | changes))


def prefill(token: int | None = THE) -> Event:
    return prefill_event(
        Prefill(37, token, 0.1203, probability=None if token is None else 0.8123), PIECES.__getitem__
    )


def step(index: int, closing: Any, tokens: tuple[int, ...], *verdicts: DraftVerdict, **fields: Any) -> Step:
    """A step with these drafts, at position 42."""
    kept = [each.verdict for each in verdicts]
    usual = {
        "index": index, "position": 42, "drafted": tuple(each.token for each in verdicts),
        "accepted": kept.count("accepted"), "tested": len(kept) - kept.count("untested"), "tokens": tokens,
        "closing": closing, "expected_acceptance": (), "times": TIMES, "verdicts": verdicts,
    }  # fmt: skip
    return Step(**(usual | fields))


ACCEPTED_ALL = step(
    0, "bonus", (SKY, IS, BLUE, BECAUSE),
    verdict(SKY, 0.9123, 0.953, 0.3124), verdict(IS, 0.64, 0.512, 0.1133), verdict(BLUE, 0.002, 0.97, 0.99),
    times=StepTimes(0.1121, 0.0203, 0.0004, 0.0001, 0.0023, draft_prefill_s=0.1),
    policy={"H_norm": 0.12345, "gamma": 3.0}, closing_probability=0.614,
)  # fmt: skip
REJECTION = step(
    1, "corrected", (AIR, SCATTERS),
    verdict(AIR, 0.5, 0.25, 0.4), verdict(BREAK, 0.7, 3e-7, 0.1133), verdict(IS, 1e-9, None, None),
    expected_acceptance=(0.9, 0.1), closing_probability=0.0314,
)  # fmt: skip
NOTHING_DRAFTED = step(
    11, "target", (LIGHT,), times=StepTimes(0.0002, 0.0201), finish_reason="length", closing_probability=0.5
)
STOP_CUT = step(
    2, None, (LIGHT, END),
    verdict(LIGHT, 1.0, 0.9, 0.2), verdict(END, 1.0, 0.95, 0.1), verdict(THE, 1.0, None, None), finish_reason="eos",
)  # fmt: skip
GREEDY = step(
    0, "corrected", (SKY, BLUE),
    verdict(SKY, 0.9123, 0.953, None), DraftVerdict(IS, 0.6, 0.3, None, "rejected"), closing_probability=0.61,
)  # fmt: skip
SUMMARY = TraceEnd(
    finish_reason="eos", new_tokens=9, steps=3, tokens_per_step=8 / 3, drafted=9, accepted=6, acceptance_rate=2 / 3,
    tokens_per_second=31.24,
)  # fmt: skip


def event(step: Step) -> TraceStep:
    return step_event(step, PIECES.__getitem__)


def shown(*events: Event, width: int = 80, **console: Any) -> str:
    file = io.StringIO()
    terminal = {"force_terminal": True, "color_system": None} | console
    view = TraceView(Console(file=file, width=width, **terminal))
    for each in events:
        view.show(each)
    return without_blanks(file.getvalue())


def without_blanks(text: str) -> str:
    """Text without blanks at the ends of its lines."""
    return re.sub(" +\n", "\n", text)


def last(*events: Event, **options: Any) -> str:
    """What showing the last event adds."""
    return shown(*events, **options).removeprefix(shown(*events[:-1], **options))


# --- What events hold -----------------------------------------------------------------------------


TREE = step(
    1, "bonus", (BREAK, SKY, BECAUSE),
    DraftVerdict(AIR, 0.5, 0.25, None, "rejected"), DraftVerdict(BREAK, 0.25, 0.5, None, "accepted"),
    DraftVerdict(IS, 0.5, 0.125, None, "rejected"), DraftVerdict(SKY, 0.5, 0.75, None, "accepted"),
    DraftVerdict(BLUE, 0.25, None, None, "untested"),
    parents=(-1, -1, 1, 1, 0), path=(1, 3), tested=2, closing_probability=0.0314,
)  # fmt: skip


def test_a_tree_is_drawn_by_branches(snapshot):
    assert event(TREE).parents == [-1, -1, 1, 1, 0]
    snapshot(last(header(), event(TREE)))


@pytest.mark.parametrize("method", ["naive", "traversal"])
def test_the_header_says_how_a_tree_is_verified(method):
    options = {"draft_policy": "static-tree", "verification": method}
    beginning = header(options=options)
    assert f"by {method}, see docs/draft-policies.md" in shown(beginning)
    assert "r < p/q" not in shown(beginning)
    corrected = last(beginning, event(replace(TREE, closing="corrected")))
    assert ("the residual of p₃" in corrected) == (method != "naive")
    assert "max(0" not in corrected


def test_values_that_json_lacks_are_left_open():
    nan = float("nan")
    made = Step(
        0, 5, (SKY, IS), 1, 2, (SKY, IS), "corrected", (nan, 0.0), TIMES,
        policy={"H_norm": float("inf")},
        verdicts=(DraftVerdict(SKY, 0.0, 0.5, 0.1, "accepted"), DraftVerdict(IS, nan, nan, 0.1, "rejected")),
        closing_probability=nan,
    )  # fmt: skip
    held = event(made)
    first, second = held.verdicts
    assert first.ratio == 0.5 * 2.0**126  # as if q were the smallest normal float
    assert (second.q, second.p, second.ratio) == (None, None, None)
    assert (held.closing_probability, held.expected_acceptance) == (None, [None, 0.0])
    assert held.policy == {"H_norm": None}
    file = io.StringIO()
    write_event(file, header())
    write_event(file, held)
    read = list(parse_trace(io.BytesIO(file.getvalue().encode()), "it"))
    assert shown(*read) == shown(header(), held)


# --- Files ----------------------------------------------------------------------------------------

HOSTILE = [
    "[red]", "[/]", "\x1b[31m\x9b2J", "\x00\r", "👩\u200d👧", "שלום\u202e", "\ud800", " \u2028\n", ":smile:",
    "</td><script>alert(1)</script>", '"><img src=x onerror=alert(1)>{{ 1 }}',
]  # fmt: skip


def hostile_events() -> list[Event]:
    drafted = tuple(range(len(HOSTILE)))
    verdicts = tuple(verdict(token, 0.5, 0.5, 0.2) for token in drafted)
    n = len(drafted)
    made = Step(0, 9, drafted, n, n, (*drafted, 0), "bonus", (), TIMES, None, {"[b]\x1b": 1.0}, verdicts, 0.5)
    text = "".join(HOSTILE)
    return [
        header(target=text, drafter=text, dtype=text, options={text: text, "stop": [text]}, prompt_tail=text),
        prefill_event(Prefill(9, 2, 0.1, probability=0.5), HOSTILE.__getitem__),
        step_event(made, HOSTILE.__getitem__),
        SUMMARY,
    ]


@pytest.fixture
def trace_file(tmp_path) -> Callable[..., Path]:
    def write(*events: Event, rest: bytes = b"") -> Path:
        path = tmp_path / "trace.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for each in events:
                write_event(file, each)
        path.write_bytes(path.read_bytes() + rest)
        return path

    return write


def test_round_trip(trace_file):
    events = [header(), prefill(), *map(event, (ACCEPTED_ALL, REJECTION, NOTHING_DRAFTED, STOP_CUT)), SUMMARY]
    events += hostile_events()  # a second trace in the same file
    path = trace_file(*events)
    assert list(read_trace(path)) == events
    assert len(path.read_bytes().splitlines()) == len(events)
    assert path.read_bytes().isascii()


def test_a_last_line_cut_short_is_reported_after_the_rest(trace_file):
    path = trace_file(header(), prefill(), rest=as_line(event(REJECTION))[:100])
    events = read_trace(path)
    assert [next(events), next(events)] == [header(), prefill()]
    with pytest.raises(UsageError, match=r"trace\.jsonl, line 3 is cut short") as raised:
        next(events)
    assert raised.value.exit_code == 2


def as_line(event: Event, **changes: Any) -> bytes:
    return json.dumps(to_dict(event) | changes).encode() + b"\n"


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (b'{"event": \n{}\n', "line 2 is damaged: it is missing or wrong"),
        (b'{"event": "leap"}\n', "line 2 is damaged: event is missing or wrong"),
        (as_line(event(REJECTION), texts=None), "line 2 is damaged: texts is"),
        *(
            (as_line(event(TREE), parents=parents), "parents is missing or wrong")
            for parents in ([-1, -1, 1, 1], [-1, 1, 1, 1, 0], [-2, -1, 1, 1, 0])
        ),
        (as_line(header(), trace_version=2), "is not a step trace of version 1"),
    ],
)
def test_broken_lines(trace_file, rest, message):
    events = read_trace(trace_file(header(), rest=rest))
    assert next(events) == header()
    with pytest.raises(UsageError, match=message):
        next(events)


@pytest.mark.parametrize("content", [b"", b"Dear diary\n", b'{"text": "a result"}\n', as_line(SUMMARY), None])
def test_files_that_are_no_trace(tmp_path, trace_file, content):
    path = tmp_path / "absent" if content is None else trace_file(rest=content)
    with pytest.raises(
        UsageError, match=r"is not a step trace|line 1 is damaged|Cannot read .*: No such file"
    ):
        next(read_trace(path))


# --- The view -------------------------------------------------------------------------------------


NOTHING = TraceEnd(
    finish_reason=None, new_tokens=0, steps=0, tokens_per_step=None, drafted=0, accepted=0, acceptance_rate=None,
    tokens_per_second=None,
)  # fmt: skip


@pytest.mark.smoke
@pytest.mark.parametrize("width", [60, 72, 200])
def test_no_line_is_wider_than_the_console(width):
    deep = step(
        9998, "bonus", (SKY,) * 13, *[verdict(SKY, 1e-30, 1.0, 0.1)] * 12,
        position=1_234_567, times=StepTimes(9.9, 9.9, 9.9, 9.9, 9.9, 5.0), finish_reason="context-limit",
        policy={f"note_{i}": i / 7 for i in range(9)}, closing_probability=1e-5,
    )  # fmt: skip
    branch = {"drafted": (AIR,) * 20, "parents": tuple(range(-1, 19))}
    untested = tuple(DraftVerdict(AIR, 0.5, None, None, "untested") for _ in range(20))
    steps = (
        ACCEPTED_ALL,
        REJECTION,
        STOP_CUT,
        NOTHING_DRAFTED,
        deep,
        replace(TREE, verdicts=untested, **branch),
    )
    for greedy in (False, True):
        events = [header(greedy=greedy), prefill(None), *map(event, steps), SUMMARY, NOTHING]
        events[4:4] = [event(GREEDY)] * greedy
        lines = shown(*events, width=width).splitlines()
        assert max(map(cell_len, lines)) <= width
        assert sum("untested" in line for line in lines) >= 20


def test_hostile_text_stays_text():
    plain = shown(*hostile_events())
    assert {c for c in plain if not c.isprintable()} <= {"\n", "\u200d", "\u2028"}
    assert all(
        piece in plain for piece in ("[red]", "[/]", "\\x1b[31m\\x9b2J", "\\x00\\r", "\\ud800", ":smile:")
    )


# --- The command ----------------------------------------------------------------------------------


def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(trace)
    return app


def test_command(trace_file):
    """In a file lines are not broken, and have no trailing blanks."""
    events = [header(), prefill(), event(ACCEPTED_ALL), SUMMARY]
    path = trace_file(*events)
    result = CliRunner().invoke(command(), [str(path)])
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert not [line for line in lines if line != line.rstrip()]
    assert all(line.strip() in result.stdout for line in shown(*events).splitlines() if " · " in line)
    assert CliRunner().invoke(command(), ["-"], input=path.read_bytes()).stdout == result.stdout


def test_command_shows_what_there_is_before_it_complains(trace_file):
    result = CliRunner().invoke(command(), [str(trace_file(header(), rest=b'{"event"'))])
    assert "drafter" in result.stdout
    assert isinstance(result.exception, UsageError)
