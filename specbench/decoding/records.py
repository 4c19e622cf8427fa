"""What decoding yields: frozen records, free of tensors, that trace, metrics, sweeps and files all read.

The vocabulary is that of docs/metrics.md: *drafted* tokens are proposed by the drafter, *accepted* ones are kept,
and a step is closed by a *corrected* token (after a rejection), a *bonus* token (everything was accepted) or a
*target* token (nothing was drafted).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from specbench.base.textsafe import counted
from specbench.decoding.origins import Origin, as_html

SCHEMA_VERSION = 1
"""Version of the records as written to files. 1: first release."""

LONGEST_DRAFT = 256
"""Tokens that may be drafted in a step."""

PARTS = ("draft", "verify", "accept", "rollback", "other")
"""Of a step's time, in its order."""

_SHOWN = 60  # characters of a text in the repr of its generation

FinishReason = Literal["eos", "stop-string", "length", "context-limit"]
"""Why an output ended: an end token, a stop string, the asked-for length, or the model's context was full."""

Closing = Literal["corrected", "bonus", "target"]
"""Where the last token of a step came from: the residual after a rejection, the target after a whole accepted
draft, or the target in a step that drafted nothing."""


def depth_of(tokens: int, parents: Sequence[int] | None) -> int:
    """Tokens of the longest branch of so many with these parents (see ``decoding.protocols.Draft``)."""
    if parents is None:
        return tokens
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the time of a step went, in seconds of wall clock.

    ``draft_prefill_s`` is the part of ``draft_s`` in which a drafter read a prompt for the first time.
    """

    draft_s: float = 0.0
    verify_s: float = 0.0
    accept_s: float = 0.0
    rollback_s: float = 0.0
    other_s: float = 0.0
    draft_prefill_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds from the start of the step to its end; the consumer's time is not in it."""
        return self.draft_s + self.verify_s + self.accept_s + self.rollback_s + self.other_s


@dataclass(frozen=True, slots=True)
class DraftVerdict:
    """One drafted token as a trace shows it.

    Attributes:
        token: The drafted token id.
        q: The drafter's probability of it; 1 for a drafter without probabilities.
        p: The target's probability of it, ``None`` if the verdict never reached it.
        r: The uniform number it was tested with, ``None`` in greedy decoding and where it was not tested.
        verdict: ``untested`` stands behind a rejection or a stop. In a tree ``rejected`` is also what stands beside an
            accepted token.

    In greedy decoding p and q are read off the untempered softmax, and neither decides anything.
    """

    token: int
    q: float
    p: float | None
    r: float | None
    verdict: Literal["accepted", "rejected", "untested"]


@dataclass(frozen=True, slots=True)
class Prefill:
    """The target's pass over the prompt, before any step.

    Attributes:
        prompt_tokens: Length of the prompt in tokens.
        token: The first token of the output; ``None`` without a first-target pass, or without room for a token.
        time_s: Seconds it took; 0 without a first-target pass.
        finish_reason: Set when the output ends right here.
        probability: The target's probability of ``token`` when a trace was asked for, else ``None``.
        queued_s: Seconds that the request waited before that for others to end.
    """

    prompt_tokens: int
    token: int | None
    time_s: float
    finish_reason: FinishReason | None = None
    probability: float | None = None
    queued_s: float = 0.0

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where the token came from, if there is one."""
        return () if self.token is None else ("target",)


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """One round: draft, verify, accept, roll back.

    Attributes:
        index: 0 for the first step.
        position: Length of the context, in tokens, when the step began.
        drafted: The proposed tokens, after all cuts of the draft length; of a tree all nodes.
        accepted: How many of them were kept (a stop inside the accepted run cuts this too).
        tested: How many of them got a verdict that counts; of a tree, at how many nodes one was kept or could have
            been.
        tokens: What the step emitted: the accepted tokens, unless a stop cut them off the closing one, and behind that
            the target's next one if the closing token was among the siblings.
        closing: Where the token behind the accepted ones came from; ``None`` when a stop among those ended the output.
        expected_acceptance: For each tested position ``sum_x min(p(x), q(x))`` of the distributions that decide
            (0 or 1 in greedy decoding, p of the token for a drafter without probabilities).
        times: Where the time went.
        finish_reason: Set in the last step.
        policy: What the draft policy noted for this step, by name.
        verdicts: One per drafted token when a trace was asked for, else ``None``.
        closing_probability: Probability of the closing token under the distribution it was drawn from, when a trace
            was asked for, else ``None``.
        siblings: Alternatives to drafted tokens that were verified beside them, as pairs of the draft's place, from 0,
            and the token (``specbench.decoding.tree``).
        passes: Passes of the drafter's model; ``None`` if it has none or makes one for every draft.
        parents: Of a tree, by node: the index of the one it stands behind, -1 for the context; ``None`` for a chain.
        path: The nodes of a tree that were kept, root to leaf, stops aside; empty for a chain.
    """

    index: int
    position: int
    drafted: tuple[int, ...]
    accepted: int
    tested: int
    tokens: tuple[int, ...]
    closing: Closing | None
    expected_acceptance: tuple[float, ...]
    times: StepTimes
    finish_reason: FinishReason | None = None
    policy: Mapping[str, float] = field(default_factory=dict)
    verdicts: tuple[DraftVerdict, ...] | None = None
    closing_probability: float | None = None
    siblings: tuple[tuple[int, int], ...] = ()
    passes: int | None = None
    parents: tuple[int, ...] | None = None
    path: tuple[int, ...] = ()

    @property
    def gamma(self) -> int:
        """Number of tokens drafted in this step, one behind the other: of a tree its depth."""
        return depth_of(len(self.drafted), self.parents)

    @property
    def widths(self) -> tuple[int, ...]:
        """Of a tree, by tested position: how many nodes stood there, behind the one kept before; none of a chain."""
        if self.parents is None:
            return ()
        return tuple(self.parents.count(node) for node in (-1, *self.path)[: self.tested])

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of a tree, by accepted node: how many of those it stood beside come before it; none of a chain."""
        if self.parents is None:
            return ()
        return tuple(self.parents[:node].count(self.parents[node]) for node in self.path[: self.accepted])

    @property
    def verified(self) -> int:
        """Rows of logits of the target's pass: one for the context, and one for each draft and sibling."""
        return 1 + len(self.drafted) + len(self.siblings)

    @property
    def gained(self) -> int:
        """Tokens emitted behind the closing one: 1 if that was among the siblings, else 0."""
        return len(self.tokens) - self.accepted - (self.closing is not None)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where each of ``tokens`` came from."""
        origins: list[Origin] = ["accepted"] * self.accepted
        if self.gained:
            origins += ["sibling", "bonus"]
        elif self.closing is not None:
            origins.append(self.closing)
        return tuple(origins)

    def __repr__(self) -> str:
        parts = [f"{self.accepted} of {self.gamma} drafts accepted"] if self.drafted else []
        parts += [counted(len(self.tokens), "token")]
        parts += [self.closing] if self.closing else []
        return f"Step({self.index}: {', '.join(parts)}, {1000 * self.times.total_s:.1f} ms)"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict with every field."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SharedPass:
    """A pass of a model that a scheduler has made, for one request or several.

    Attributes:
        model: What was loaded to make it: the same object for the same model, in other batches too.
        target: Whether it was the requests' target.
        requests: Their numbers.
        fed: Tokens that each of them brought to it.
        drafted: How many of these were drafts.
        began_s: When it began, by the scheduler's clock.
        seconds: How long it took.
        active, waiting: Requests under way, and those whose turn had not come.
    """

    model: object
    target: bool
    requests: tuple[int, ...]
    fed: tuple[int, ...]
    drafted: tuple[int, ...]
    began_s: float
    seconds: float
    active: int
    waiting: int


@dataclass(frozen=True, slots=True, repr=False)
class Generation:
    """One finished (or interrupted) output with everything that was recorded on the way.

    A notebook shows its text with the tokens colored by where they came from.

    Attributes:
        token_ids: The emitted tokens, with the end token or every token up to the one completing a stop string.
        text: The output as text, without end token and stop string; ``None`` without a tokenizer.
        finish_reason: ``None`` if decoding was interrupted.
        target, drafter: The names of what was run.
        dtype: The target's dtype.
        seed: Seed of the generator all draws came from.
        lossless: Whether the run keeps the target's distribution (False only with the residual adjustment off).
        policy: The draft policy, as ``--draft-policy`` takes it; ``none`` where nothing is drafted.
        costs: What the policy went by if it goes by the times of passes, as ``--costs`` takes it.
        pieces: The text token by token, each piece with where its token came from; characters of several tokens go with
            the last. ``None`` without a tokenizer.
    """

    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason | None
    prefill: Prefill
    steps: tuple[Step, ...]
    target: str
    drafter: str
    dtype: str
    seed: int
    lossless: bool
    policy: str = "none"
    costs: Mapping[str, Any] | None = None
    pieces: tuple[tuple[Origin, str], ...] | None = None

    def __repr__(self) -> str:
        text = self.text or ""
        text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
        return f"Generation({self._in_short()}: {text!r})"

    def _repr_html_(self) -> str | None:
        """What a notebook shows; ``None`` has it take the ``repr``."""
        return None if self.pieces is None else as_html(self.pieces, self._in_short())

    def _in_short(self) -> str:
        parts = [f"{len(self.token_ids)} tokens"]
        if self.steps:
            emitted = sum(len(step.tokens) for step in self.steps)
            parts += [f"{emitted / len(self.steps):.2f} per step"]
            if drafted := sum(step.gamma for step in self.steps):
                parts += [f"{sum(step.accepted for step in self.steps)} of {drafted} drafts accepted"]
        return ", ".join([*parts, self.finish_reason or "interrupted"])
