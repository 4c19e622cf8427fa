"""Settings of a training, and its measurements."""

from __future__ import annotations

from dataclasses import dataclass

from specbench.base.errors import UsageError
from specbench.models.training_metadata import TrainingMeasurement

_RATES = {"eagle": 1.6e-3, "mtp": 1.6e-3, "medusa": 1e-3}
_WIDTH = 576
"""Width of hidden states above which the learning rate of decoder layers falls in proportion (Yang et al. 2022, arXiv
2203.03466)."""
_MIN_VOCAB = 8192
_FIXED_LAYERS = {"mtp": "one layer", "medusa": "no layers"}
_LAYERS = 2
"""Default number of decoder layers of a head that has them."""


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training. With the same settings, prompts and target the result is the same.

    Attributes:
        kind: One of ``specbench.train.learner.KINDS``.
        tokens: Tokens of the target's own texts to train on; ``None`` if the time decides.
        minutes: Total time, over all starts; ``None`` if the tokens decide.
        epochs: Number of epochs where the tokens decide.
        layers: Decoder layers of an EAGLE head; ``None`` for 2.
        vocab: Size of the draft vocabulary; ``None`` for a quarter of the target's, at least 8192.
        learning_rate: Its maximum; ``None`` for the kind's default.
        batch_tokens: Tokens of a step, padding included; longer texts are cut.
        held_out: Number of prompts that are used for measuring only.
        patience: Number of consecutive measurements without improvement that ends the training.
        start: Fingerprint of the head to continue from; ``None`` to begin from scratch.

    Raises:
        UsageError: Not exactly one of tokens and minutes is given, a value is out of range, or layers are given for
            a head without them.
    """

    kind: str = "eagle"
    tokens: int | None = None
    minutes: float | None = None
    answer_tokens: int = 256
    epochs: int = 4
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
    start: str | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.minutes is None):
            message = "--tokens and --minutes are both " + ("missing." if self.tokens is None else "given.")
            raise UsageError(message, "Give either --tokens or --minutes.")
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise UsageError(f"The training time is {self.minutes:g} minutes.", "Give more than 0.")
        if self.layers is not None and self.kind in _FIXED_LAYERS:
            raise UsageError(
                f"A head of kind {self.kind} has {_FIXED_LAYERS[self.kind]}.", "Leave --layers out."
            )
        if self.start is not None and (self.layers, self.vocab) != (None, None):
            raise UsageError(
                "--start keeps the head's layers and draft vocabulary.", "Leave --layers and --vocab out."
            )

    def rate(self, width: int) -> float:
        """Return the largest learning rate, for hidden states of a width."""
        wide = 1.0 if self.kind == "medusa" else max(1.0, width / _WIDTH)
        return self.learning_rate or _RATES[self.kind] / wide

    def draft_vocab(self, whole: int) -> int:
        """Return the size of the draft vocabulary, given the size of the target's.

        Raises:
            UsageError: The requested size is larger than the target's.
        """
        if self.vocab is None:
            return min(whole, max(_MIN_VOCAB, whole // 4))
        if self.vocab > whole:
            raise UsageError(
                f"The draft vocabulary of {self.vocab} tokens is larger than the target's ({whole}).",
                "Give a smaller --vocab, or leave it out.",
            )
        return self.vocab

    def head_layers(self, whole: int) -> int:
        """Return the number of decoder layers of a head, given the target's.

        Raises:
            UsageError: The requested number is larger than the target's.
        """
        if self.layers is None:
            return min(whole, _LAYERS)
        if self.layers > whole:
            raise UsageError(
                f"A head of {self.layers} layers is larger than its target ({whole}).",
                "Give a smaller --layers, or leave it out.",
            )
        return self.layers


class Measured(TrainingMeasurement):
    """A measurement of a head: greedy decoding of held-out prompts with chains.

    Attributes:
        loss: Mean cross-entropy of the first drafted token since the last measurement; ``None`` before the first step.
        step_cost: Time of a step with a full draft over that of a plain step, for one prompt; ``None`` if not measured.
    """

    step: int
    loss: float | None
    seconds: float
    step_cost: float | None

    def speedup(self, kind: str) -> float | None:
        """Return the predicted speedup over plain decoding at the best draft length; ``None`` if nothing was timed.

        A draft of γ tokens gives 1 + a₁ + a₁·a₂ + … tokens, where aᵢ is the acceptance rate at position i. EAGLE and
        MTP heads need a forward pass for each drafted token, Medusa heads one for all.
        """
        if self.step_cost is None:
            return None
        depth, tokens, kept = len(self.accepted), 1.0, 1.0
        best = self.tokens_per_step / self.step_cost
        for gamma, accepted in enumerate(self.accepted, start=1):
            kept *= accepted
            tokens += kept
            cost = 1 + (self.step_cost - 1) * (gamma / depth if kind != "medusa" else 1.0)
            best = max(best, tokens / cost)
        return best
