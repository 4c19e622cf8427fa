"""How a head is trained, and what is told of it while it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from specbench.base.errors import UsageError
from specbench.base.record import Json

_RATES = {"eagle": 1.6e-3, "medusa": 1e-3, "pass": 1e-2}
_WIDTH = 576
"""Of hidden states: on wider ones an EAGLE head learns at a rate that is lower in proportion (Yang et al. 2022, arXiv
2203.03466)."""
_SMALL_VOCAB = 8192
_LAYERS = 2
"""Of an EAGLE head (docs/log.md)."""


@dataclass(frozen=True)
class TrainingSettings:
    """What a training is asked for. Two with the same settings, prompts and target are the same.

    Attributes:
        kind: ``eagle``, ``medusa`` or ``pass``.
        tokens: Tokens of the target's own texts to train on; ``None`` if the time decides.
        minutes: How long all of it may take, over all starts; ``None`` if the tokens decide.
        answer_tokens: Length of an answer at most.
        epochs: How often each text is trained on at most; ``None`` for 4 times, or as often as there are minutes for.
        depth: Tokens it learns to draft.
        layers: Decoder layers of an EAGLE head; ``None`` for 2.
        vocab: Size of the draft vocabulary; ``None`` for a quarter of the target's, which small ones keep whole.
        learning_rate: At its highest; ``None`` for what the kind takes.
        batch_tokens: Of each step, padding included; longer texts are cut.
        held_out: Prompts that it is measured on and not trained on.
        measured_tokens: Of each of these.
        measures: How often it is measured.
        patience: After how many measures in a row without a gain it ends.
        seed: Of all that is random.
        store_states: Whether the target's hidden states are stored until it ends, see ``HiddenStates``.
        compact: See ``write_head``.
        start: Fingerprint of the head that it goes on from; ``None`` to begin anew.

    Raises:
        UsageError: Tokens and minutes are both given, or neither, or one of them is too small; layers are given for a
            head that has none.
    """

    kind: str = "eagle"
    tokens: int | None = None
    minutes: float | None = None
    answer_tokens: int = 256
    epochs: int | None = None
    depth: int = 4
    layers: int | None = None
    vocab: int | None = None
    learning_rate: float | None = None
    batch_tokens: int = 1024
    held_out: int = 24
    measured_tokens: int = 64
    measures: int = 10
    patience: int = 6
    seed: int = 0
    store_states: bool = False
    compact: bool = False
    start: str | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.minutes is None):
            said = "not said" if self.tokens is None else "said twice"
            raise UsageError(f"How long to train is {said}.", "Give either --tokens or --minutes.")
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise UsageError(f"The time for training is {self.minutes:g} minutes.", "Give more than 0.")
        if self.learning_rate is not None and not 0 < self.learning_rate < 1:
            raise UsageError(
                f"The learning rate is {self.learning_rate:g}.", "Give one between 0 and 1, such as 0.0008."
            )

        if self.layers is not None and self.kind != "eagle":
            raise UsageError(f"A head of the kind {self.kind} has no layers.", "Leave --layers out.")
        if self.store_states and self.kind == "pass":
            raise UsageError(
                "A head of the kind pass learns from no hidden states.", "Leave --store-states out."
            )
        if self.start is not None and (self.layers, self.vocab) != (None, None):
            raise UsageError(
                "A head that is gone on from has its layers and its draft vocabulary.",
                "Leave --layers and --vocab out.",
            )

    def rate(self, width: int) -> float:
        """The learning rate at its highest, on hidden states of a width."""
        wide = max(1.0, width / _WIDTH) if self.kind == "eagle" else 1.0
        return self.learning_rate or _RATES[self.kind] / wide

    def draft_vocab(self, whole: int) -> int:
        """How many of a target's tokens are drafted.

        Raises:
            UsageError: More than there are.
        """
        if self.vocab is None:
            return min(whole, max(_SMALL_VOCAB, whole // 4))
        if self.vocab > whole:
            raise UsageError(
                f"The draft vocabulary of {self.vocab} tokens is larger than the target's, {whole}.",
                "Give less with --vocab, or leave it out.",
            )
        return self.vocab

    def head_layers(self, whole: int) -> int:
        """How many decoder layers an EAGLE head has.

        Args:
            whole: How many the target has.

        Raises:
            UsageError: More than that.
        """
        if self.layers is None:
            return min(whole, _LAYERS)
        if self.layers > whole:
            raise UsageError(
                f"A head of {self.layers} layers is larger than its target, which has {whole}.",
                "Give less with --layers, or leave it out.",
            )
        return self.layers

    def facts(self) -> Json:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Measured:
    """How a head does with the real decoder, on prompts that it was not trained on: greedily, as a chain.

    Attributes:
        step: Of the training.
        tokens: Trained on so far, of answers.
        loss: Mean cross-entropy of the first drafted token since the measure before; ``None`` before the first step.
        tokens_per_step: Emitted tokens over steps.
        accepted: By place of the draft: of those tested the share accepted.
        categories: Tokens per step by category of the prompts.
        seconds: Of the training so far.
        step_cost: How many plain steps a step with the whole draft takes, of one prompt by itself; ``None`` where that
            was not measured.
    """

    step: int
    tokens: int
    loss: float | None
    tokens_per_step: float
    accepted: tuple[float, ...]
    categories: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    step_cost: float | None = None

    def speedup(self, kind: str) -> float | None:
        """Over plain decoding, at the best length of drafts, by these figures; ``None`` where nothing was timed.

        A draft of γ tokens brings 1 + a₁ + a₁·a₂ + … tokens. An EAGLE head drafts one token in a pass, so γ of them
        cost in proportion; heads of the other kinds draft all at once.
        """
        if self.step_cost is None:
            return None
        depth, tokens, kept = len(self.accepted), 1.0, 1.0
        best = self.tokens_per_step / self.step_cost
        for gamma, accepted in enumerate(self.accepted, start=1):
            kept *= accepted
            tokens += kept
            cost = 1 + (self.step_cost - 1) * (gamma / depth if kind == "eagle" else 1.0)
            best = max(best, tokens / cost)
        return best

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Measured:
        """As it was stored."""
        return cls(**{**facts, "accepted": tuple(facts["accepted"])})


class Watch(Protocol):
    """Told how far a training has come."""

    def wrote(self, tokens: int, wanted: int | None, left_s: float | None) -> None:
        """The target has written so many tokens of those wanted, and will write for so many seconds more."""

    def trained(self, step: int, steps: int, loss: float, left_s: float) -> None:
        """So many steps are made; what is left takes so many seconds, measures included."""

    def measured(self, measured: Measured, *, best: bool) -> None:
        """The head was measured; whether it has done best so far."""
