"""The records of decoding: frozen and without tensors; traces, metrics, sweeps and files read them.

Terms are those of docs/metrics.md: a step ends with a *corrected* token (after a rejection), a *bonus* token (all
accepted) or a *target* token (nothing was drafted).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from specbench.base.textsafe import counted

PARTS = ("draft", "verify", "accept", "rollback", "other")
"""The parts of a step's time, in order."""

_SHOWN = 60  # characters of a generation's text in its repr

FinishReason = Literal["eos", "stop-string", "length", "context-limit"]
"""Why an output ended: an end token, a stop string, the requested length, or a full context."""

Closing = Literal["corrected", "bonus", "target"]
"""The source of a step's last token: the residual after a rejection, or the target after an accepted or empty draft."""

Origin = Literal["accepted", "forced", Closing]
"""The source of an output's token: an accepted draft, one that the format forced, or what closes a step."""

ORIGINS: dict[Origin, str] = {
    "accepted": "accepted draft",
    "forced": "forced by the format",
    "corrected": "corrected",
    "bonus": "bonus",
    "target": "the target's own",
}
"""What each is called in a legend."""


def depths_of(parents: Iterable[int]) -> list[int]:
    """Return the depth of each node of a draft (see ``Draft.parents``), 1 right after the context."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def depth_of(tokens: int, parents: Sequence[int] | None) -> int:
    """Return the length of the longest branch of a draft."""
    return tokens if parents is None else max(depths_of(parents), default=0)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step's time, in seconds.

    In ``draft_prefill_s``, a part of ``draft_s``, the drafter read a prompt. ``mask_s`` is the time for the masks of
    the output's format, in ``draft_s`` and ``accept_s``.
    """

    draft_s: float = 0.0
    verify_s: float = 0.0
    accept_s: float = 0.0
    rollback_s: float = 0.0
    other_s: float = 0.0
    draft_prefill_s: float = 0.0
    mask_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the whole step, without the consumer's time."""
        return self.draft_s + self.verify_s + self.accept_s + self.rollback_s + self.other_s


@dataclass(frozen=True, slots=True)
class DraftVerdict:
    """A drafted token in a trace; in greedy decoding p and q are of the untempered softmax and decide nothing.

    Attributes:
        token: The token id.
        q: The drafter's probability of it; 1 for a drafter without probabilities.
        p: The target's probability of it; ``None`` if untested.
        r: The uniform number it was tested with; ``None`` if untested or in greedy decoding.
        verdict: ``untested`` after a rejection or a stop; siblings of an accepted tree node are ``rejected``.
    """

    token: int
    q: float
    p: float | None
    r: float | None
    verdict: Literal["accepted", "rejected", "untested"]


@dataclass(frozen=True, slots=True)
class Prefill:
    """The target's forward pass over the prompt; empty if the first step reads the prompt (no first-target pass).

    Attributes:
        prompt_tokens: Length of the prompt in tokens.
        token: The first token of the output; ``None`` without a first-target pass, or in a full context.
        time_s: Seconds; 0 without a first-target pass.
        finish_reason: Set if the output ends here.
        probability: The target's probability of ``token`` in a trace, else ``None``.
        queued_s: Seconds that the request waited for its turn.

    Examples:
        >>> result.prefill.token == result.token_ids[0]
        True
    """

    prompt_tokens: int
    token: int | None
    time_s: float
    finish_reason: FinishReason | None = None
    probability: float | None = None
    queued_s: float = 0.0

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token, if there is one."""
        return () if self.token is None else (self.token,)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The source of the token, if there is one."""
        return () if self.token is None else ("target",)


@dataclass(frozen=True, slots=True)
class ExpertsRead:
    """The experts that a forward pass of the target has read; several passes are added up.

    Attributes:
        by_layer: How many different ones each layer with experts read.
        one: How many a pass over one of its tokens alone would read in all layers, on average over the tokens.

    Examples:
        >>> ExpertsRead((12, 14), 16.0).ratio
        1.625
    """

    by_layer: tuple[int, ...]
    one: float

    @property
    def total(self) -> int:
        """Experts read in all layers."""
        return sum(self.by_layer)

    @property
    def ratio(self) -> float:
        """How many times the experts of one token were read."""
        return self.total / self.one if self.one else 1.0


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """One round: draft, verify, accept, roll back.

    Attributes:
        index: The step's number, 0 for the first one.
        position: Length of the context, in tokens, when the step began.
        drafted: The drafted tokens; all nodes of a tree.
        accepted: How many draft tokens were accepted and are output; those after a stop do not count.
        tested: How many were tested; in a tree, the number of nodes at which a candidate was accepted or all failed.
        tokens: The emitted tokens: accepted ones, and the closing one unless a stop came before it.
        closing: The source of the token after the accepted ones; ``None`` if a stop came before it.
        expected_acceptance: By tested position ``sum_x min(p(x), q(x))`` of the deciding distributions (0 or 1 in
            greedy decoding, p of the token for a drafter without probabilities).
        times: Seconds of its parts.
        finish_reason: Why the output ends; set in the last step only.
        policy: The draft policy's notes, by name.
        verdicts: One per drafted token in a trace, else ``None``.
        closing_probability: The closing token's probability under its distribution in a trace, else ``None``.
        passes: The drafter's forward passes; ``None`` if it has no model or runs one per token.
        parents: By tree node the index of its parent, -1 for the context; ``None`` for a chain.
        path: The accepted nodes of a tree, root to leaf, ignoring stops; empty for a chain.
        forced: Places of the draft tokens that the drafter ``grammar`` drafted: the format allows no others there.
        experts: What its pass read; ``None`` for a target without experts, or where they are not counted.

    Examples:
        >>> step = result.steps[0]
        >>> step.accepted <= step.gamma, len(step.tokens) <= step.accepted + 1
        (True, True)
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
    passes: int | None = None
    parents: tuple[int, ...] | None = None
    path: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    experts: ExpertsRead | None = None

    @property
    def forced_accepted(self) -> int:
        """How many of the accepted draft tokens were forced: all that were reached and are output."""
        return sum(place < self.accepted for place in self.forced)

    @property
    def gamma(self) -> int:
        """The draft length γ; the depth of a tree."""
        return depth_of(len(self.drafted), self.parents)

    @property
    def verified(self) -> int:
        """Rows of the target's pass: one for the context, one for each draft token."""
        return 1 + len(self.drafted)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The source of each of ``tokens``."""
        origins: list[Origin] = [
            "forced" if place in self.forced else "accepted" for place in range(self.accepted)
        ]
        if self.closing is not None:
            origins.append(self.closing)
        return tuple(origins)

    def __repr__(self) -> str:
        parts = [f"{self.accepted} of {self.gamma} drafts accepted"] if self.drafted else []
        parts += [counted(len(self.tokens), "token")]
        parts += [self.closing] if self.closing else []
        return f"Step({self.index}: {', '.join(parts)}, {1000 * self.times.total_s:.1f} ms)"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SharedPass:
    """A forward pass of a scheduler, for one request or several.

    Attributes:
        model: The loaded model, the same object in all batches.
        target: Whether it is the requests' target.
        requests: Their numbers.
        fed: Tokens of each.
        drafted: Draft tokens among these.
        seconds: Its duration.
    """

    model: object
    target: bool
    requests: tuple[int, ...]
    fed: tuple[int, ...]
    drafted: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True, repr=False)
class Generation:
    """A finished or interrupted output with its records.

    Attributes:
        token_ids: The emitted tokens, including the end token or those of a stop string.
        text: The output without end token and stop string; ``None`` without a tokenizer.
        finish_reason: ``None`` if interrupted.
        target, drafter: Their names.
        dtype: The target's dtype.
        seed: The seed of all random draws.
        policy: The draft policy, as ``--draft-policy`` takes it; ``none`` where nothing is drafted.

    Examples:
        >>> result.drafter, result.seed
        ('lookup', 0)
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
    policy: str = "none"

    def __repr__(self) -> str:
        text = self.text or ""
        text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
        parts = [f"{len(self.token_ids)} tokens"]
        if self.steps:
            emitted = sum(len(step.tokens) for step in self.steps)
            parts += [f"{emitted / len(self.steps):.2f} per step"]
            if drafted := sum(step.gamma for step in self.steps):
                parts += [f"{sum(step.accepted for step in self.steps)} of {drafted} drafts accepted"]
        parts += [self.finish_reason or "interrupted"]
        return f"Generation({', '.join(parts)}: {text!r})"
