"""The lines of ``generations.jsonl`` and ``costs.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta

from specbench.base.record import (
    Count,
    Figure,
    Number,
    Record,
    Seconds,
    Small,
    doc,
    ratio,
    rounded,
    to_json,
)
from specbench.decoding.records import Step
from specbench.results.run import VERSION

Key = tuple[str, str, int, int, bool]
"""What is measured at most once: configuration, prompt or group, turn, repeat, and whether it is a warm-up."""

# -- generations.jsonl -----------------------------------------------------------------------------


class Line(Record):
    """The fields of every line."""

    schema: Count = VERSION
    run_id: str | None = None
    config: Annotated[str, doc("id of the configuration")]
    prompt: Annotated[
        str, doc("id of the prompt, or name of the group: its number and a hash of its prompts")
    ]
    category: Annotated[str | None, doc("of the prompt; `null` for a group")] = None
    turn: Annotated[
        Count,
        doc("from 0; every turn of a conversation is a generation, after this configuration's own answers"),
    ]
    repeat: Annotated[Count, doc("from 0")]
    order: Annotated[
        Count, doc("place in the random order in which the configurations decoded this turn, back to back")
    ] = 0
    warmup: Annotated[bool, doc("whether it only warms up: not used for any figure")]
    seed: Annotated[
        Annotated[int, Meta(ge=0)] | None, doc("of sampling; the same for all configurations of a turn")
    ] = None
    started: Annotated[Number | None, doc("Unix time")] = None
    load_average: Annotated[Number | None, doc("at the start")] = None
    status: Annotated[Literal["ok", "failed"], doc("a failed line has only the fields of this table")]
    error: Annotated[str | None, doc("why it failed")] = None
    steal_share: Annotated[
        Number | None,
        doc("share of processor time that the host of a virtual machine gave to others meanwhile"),
    ] = None
    busy_elsewhere: Annotated[Number | None, doc("cores that other programs kept busy meanwhile")] = None
    warnings: Annotated[
        list[str],
        doc(
            "ids of disturbances: `machine-busy, steal, frequency-drop, memory-pressure, stopped` (the process"
            " was stopped and continued even when measured again)"
        ),
    ] = []

    @property
    def key(self) -> Key:
        return self.config, self.prompt, self.turn, self.repeat, self.warmup


class StepLists(Record):
    """The steps of a generation, lists with an element per step. Times are rounded to the nanosecond.

    Of a server only ``drafted``, ``tested``, ``accepted``, ``emitted`` and ``nodes`` are known; other lists are empty.
    """

    drafted: Annotated[list[Small], doc("tokens; of a tree along its longest branch (docs/metrics.md)")]
    tested: Annotated[list[Small], doc("of them")]
    accepted: Annotated[list[Small], doc("of them")]
    emitted: Annotated[list[Small], doc("tokens")]
    draft_s: list[Figure] = []
    draft_prefill_s: Annotated[list[Figure], doc("within `draft_s`")] = []
    verify_s: list[Figure] = []
    accept_s: list[Figure] = []
    rollback_s: list[Figure] = []
    other_s: list[Figure] = []
    nodes: Annotated[list[Small], doc("tokens drafted, in a tree all nodes")]
    passes: Annotated[list[Small], doc("forward passes of the drafter's model")] = []
    forced: Annotated[list[Small], doc("accepted draft tokens that the output's format forced")] = []
    mask_s: Annotated[list[Figure], doc("the time for masks, within `draft_s` and `accept_s`")] = []
    expected_acceptance: Annotated[
        list[list[Figure]], doc("for each step a list over its tested positions")
    ] = []
    closing: Annotated[
        list[str | None],
        doc('`"bonus"`, `"corrected"`, `"target"`, or `null` if the output stopped among accepted tokens'),
    ] = []
    policy: Annotated[
        dict[str, list[Figure | None]], doc("what the draft policy noted, for each name a list; see below")
    ] = {}
    experts: Annotated[
        list[Small],
        doc("of targets with experts, else empty: how many the pass read, summed over its layers"),
    ] = []
    experts_one: Annotated[
        list[Figure],
        doc("of targets with experts, else empty: how many a pass over one of its tokens reads, on average"),
    ] = []

    def __post_init__(self) -> None:
        count = len(self.drafted)
        needed = [self.tested, self.accepted, self.emitted, self.nodes, *self.policy.values()]
        optional = (*STEP_FIGURES, "expected_acceptance", "closing", "experts", "experts_one")
        given = filter(None, (getattr(self, name) for name in optional))
        expected = self.expected_acceptance
        if (
            any(len(each) != count for each in (*needed, *given))
            or bool(self.experts) != bool(self.experts_one)
            or (expected and sum(map(len, expected)) != sum(self.tested))
        ):
            raise ValueError("the lists of steps do not fit together")

    @classmethod
    def of(cls, steps: Sequence[Step]) -> StepLists:
        """Convert the steps of a generation to their stored form."""
        notes = dict.fromkeys(name for step in steps for name in step.policy)
        read = [step.experts for step in steps if step.experts is not None]
        read = read if len(read) == len(steps) else []
        times = {
            name: [round(getattr(step.times, name), 9) for step in steps]
            for name, kind in STEP_FIGURES.items()
            if kind is float
        }
        return cls(
            drafted=[step.gamma for step in steps],
            tested=[step.tested for step in steps],
            accepted=[step.accepted for step in steps],
            emitted=[len(step.tokens) for step in steps],
            **times,
            nodes=[len(step.drafted) for step in steps],
            passes=[step.gamma if step.passes is None else step.passes for step in steps],
            forced=[step.forced_accepted for step in steps],
            expected_acceptance=[[round(value, 9) for value in step.expected_acceptance] for step in steps],
            closing=[step.closing for step in steps],
            policy={name: [rounded(step.policy.get(name)) for step in steps] for name in notes},
            experts=[each.total for each in read],
            experts_one=[round(each.one, 3) for each in read],
        )

    @classmethod
    def reported(cls, steps: Sequence[tuple[int, int]], tokens: int) -> StepLists:
        """Make the steps that a server reports for an output of so many tokens; none if they give more.

        Args:
            steps: Drafted and accepted tokens of each. Steps that drafted nothing may be left out.
            tokens: The first is the prefill's. Accepted tokens of the last step can lie behind the end.
        """
        emitted, left = [], max(0, tokens - 1)
        for _, accepted in steps:
            emitted.append(min(accepted + 1, left))
            left -= emitted[-1]
        steps = [] if 0 in emitted else steps
        drafted, kept = [step[0] for step in steps], [step[1] for step in steps]
        tested = [min(accepted + 1, count) for count, accepted in steps]
        return cls(
            drafted=drafted, tested=tested, accepted=kept, emitted=emitted[: len(steps)], nodes=drafted
        )


STEP_FIGURES: dict[str, type] = {
    **dict.fromkeys(("drafted", "tested", "accepted", "emitted"), int),
    **dict.fromkeys(
        ("draft_s", "draft_prefill_s", "verify_s", "accept_s", "rollback_s", "other_s", "mask_s"), float
    ),
    **dict.fromkeys(("nodes", "passes", "forced"), int),
}
"""The lists of ``StepLists`` with a number per step: tokens and forward passes, or seconds."""


class Speculation(Record):
    """What a server reports about its drafts; ``null`` if it does not."""

    drafted: Annotated[Count | None, doc("tokens drafted")] = None
    accepted: Annotated[Count | None, doc("of them accepted")] = None
    drafts: Annotated[Count | None, doc("steps that drafted")] = None
    accepted_at: Annotated[
        list[Count] | None, doc("how many drafts were accepted at each position, from the first")
    ] = None


class ServerAnswer(Speculation):
    """What a server reports about an answer that it generated."""

    text: str
    counted_by: Annotated[str, doc("how its tokens were counted: `ids`, `usage` or `tokenizer`")]
    problem: Annotated[str | None, doc("which counts disagree, a sentence")] = None
    pieces: Annotated[Count, doc("of its stream")]
    bursts: Annotated[Count, doc("pieces that came together count as one")]
    attempts: Annotated[Count, doc("how often it was requested")] = 1
    cached_tokens: Annotated[Count | None, doc("tokens of the prompt taken from a cache")] = None


class MeasuredOutput(Record):
    """What is measured of one output."""

    prompt_tokens: Annotated[Count, doc("0 if a server does not report it")]
    new_tokens: Annotated[Count, doc("of the output")]
    token_ids: Annotated[
        list[Small],
        doc(
            "the output, whose text is not stored; of a server its own ids, else those of the tokenizer, else none"
        ),
    ]
    finish_reason: str | None = None
    first_tokens: Annotated[
        Count,
        doc(
            "tokens in the first emission: 1, or more if `transformers`' assisted generation starts with a draft"
        ),
    ] = 1
    ttft_s: Annotated[Seconds, doc("time to the first emission; of a request, from when it was sent")]
    prefill_s: Annotated[Seconds, doc("of that, the target's prefill")]
    decode_s: Annotated[Seconds, doc("time after the first emission")]
    total_s: Annotated[Seconds, doc("both; to the last token")]
    thinking_tokens: Annotated[
        Count | None,
        doc("how many of the first tokens are thinking, with the marks around it; `null` if not known"),
    ] = None
    thinking_s: Annotated[
        Seconds | None, doc("from the first emission to the end of the thinking; `null` if not known")
    ] = None
    log_probability: Annotated[
        Number | None,
        doc(
            "with `--baseline beam:N`, of beam search and of greedy plain decoding: natural logarithm of the output's"
            " probability under the target"
        ),
    ] = None
    steps: Annotated[StepLists, doc("empty for `transformers`, `beam`, `assisted` and most servers")]
    server: Annotated[ServerAnswer | None, doc("what a server reports about its answer")] = None

    @property
    def speed(self) -> float:
        """Decode tokens/s; NaN if undefined (docs/metrics.md)."""
        rest = self.new_tokens - self.first_tokens
        return ratio(rest, self.decode_s) if rest > 0 else math.nan

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        ttft_s: float,
        decode_s: float,
        steps: Sequence[Step] | StepLists = (),
        **fields: Any,
    ) -> Self:
        """Return an output of its tokens, with other fields; all times are rounded to the nanosecond."""
        made = {
            "new_tokens": len(tokens),
            "ttft_s": ttft_s,
            "prefill_s": ttft_s,
            "decode_s": decode_s,
            **fields,
        }
        made["total_s"] = ttft_s + decode_s
        times = {name: round(value, 9) for name, value in made.items() if isinstance(value, float)}
        lists = steps if isinstance(steps, StepLists) else StepLists.of(steps)
        return cls(token_ids=list(tokens), steps=lists, **{**made, **times})


class Generation(MeasuredOutput):
    """An output that was decoded alone."""

    peak_memory_bytes: Annotated[
        Count | None,
        doc(
            "peak memory meanwhile: allocated by torch on a CUDA device, else resident, including everything that was"
            " loaded"
        ),
    ] = None


class RequestLine(MeasuredOutput):
    """One of several outputs that were decoded side by side."""

    prompt: Annotated[str, doc("id of the prompt")]
    category: str | None = None
    arrived_s: Annotated[Seconds, doc("when it was sent, from when the first could be")]
    queued_s: Annotated[Seconds, doc("how long it waited for its turn; within `ttft_s`")]


class Pool(Record):
    """The pool of the target's KV cache blocks."""

    block: Annotated[Count, doc("positions in a block")]
    blocks: Count
    peak: Annotated[Count, doc("most blocks in use")]
    bytes: Annotated[Count, doc("of the whole pool")]


class Group(Record):
    """Outputs that were decoded side by side. If one of its requests fails, the whole group has failed."""

    requests: Annotated[list[RequestLine], doc("in order of arrival")]
    clients: Annotated[Count | None, doc("of a closed loop; `null` if requests arrived by the clock")]
    seconds: Annotated[
        Seconds, doc("from when the first request could be sent to the end of the last of `requests`")
    ]
    tokens: Annotated[
        Count, doc("emitted in this time, including those for unlisted requests that kept the clients busy")
    ]
    pool: Annotated[Pool | None, doc("`null` without one (batch 1)")] = None
    peak_memory_bytes: Annotated[Count | None, doc("as of a generation")] = None
    speculation: Annotated[
        Speculation | None, doc("of a server that counts for all requests, what it drafted meanwhile")
    ] = None

    @property
    def speed(self) -> float:
        """Throughput; NaN if undefined (docs/metrics.md)."""
        tokens = sum(each.new_tokens for each in self.requests)
        if self.clients is None:
            return ratio(tokens, self.seconds)
        # Each client is always waiting for one of them.
        return ratio(self.clients * tokens, sum(each.total_s for each in self.requests))


@dataclass(frozen=True, slots=True)
class Measurement:
    """A line of ``generations.jsonl``.

    Attributes:
        line: What was measured, and under which conditions.
        result: ``None`` if it failed.
    """

    line: Line
    result: Generation | Group | None

    @property
    def key(self) -> Key:
        return self.line.key

    @property
    def speed(self) -> float:
        """Decode tokens/s; for a group, its throughput; NaN if undefined."""
        return math.nan if self.result is None else self.result.speed

    def outputs(self) -> Iterator[tuple[str, Generation | RequestLine]]:
        """Yield each output of the line with its prompt; nothing if it failed."""
        if isinstance(self.result, Generation):
            yield self.line.prompt, self.result
        elif self.result is not None:
            yield from ((each.prompt, each) for each in self.result.requests)

    def to_json(self) -> bytes:
        """Return the line as JSON.

        Raises:
            ValueError: A number is not finite.
        """
        return to_json(self.line, *([] if self.result is None else [self.result])) + b"\n"


_LINE, _FIELDS = msgspec.json.Decoder(Line), msgspec.json.Decoder(dict[str, msgspec.Raw])
_GENERATION, _GROUP = msgspec.json.Decoder(Generation), msgspec.json.Decoder(Group)


def parse_line(line: bytes) -> Measurement:
    """Parse a line of ``generations.jsonl``.

    Raises:
        ValueError, RecursionError: It is cut short or invalid.
    """
    head = _LINE.decode(line)
    if head.status == "failed":
        return Measurement(head, None)
    decoder = _GROUP if "requests" in _FIELDS.decode(line) else _GENERATION
    return Measurement(head, decoder.decode(line))


# -- costs.jsonl -----------------------------------------------------------------------------------


class CostLine(Record, omit_defaults=True):
    """Times of one kind of forward pass; fields of other kinds are left out."""

    kind: Literal["target", "drafter", "reading"]
    seconds: Annotated[list[Seconds], doc("every single time")]
    context_tokens: Annotated[Count, doc("before them")]
    tokens: Annotated[Count, doc("`target`: in the pass")] = 0
    drafter: Annotated[str, doc("the others: its name")] = ""
    passes: Annotated[Count, doc("`drafter`: forward passes of the draft")] = 1


_COST = msgspec.json.Decoder(CostLine)


def parse_costs_line(line: bytes) -> CostLine:
    """Parse a line of ``costs.jsonl``; errors are those of ``parse_line``."""
    return _COST.decode(line)
