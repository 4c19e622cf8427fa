"""Training of heads on texts that the target itself writes, and its settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training.

    Attributes:
        kind: One of ``specbench.train.trainer.STUDENTS``.
        tokens: Tokens of the target's own texts to train on.
        repeats: How often the head learns from each text.
        batch_tokens: Tokens of a step, padding included; a longer text is a step of its own.
    """

    kind: str = "eagle"
    tokens: int = 400_000
    answer_tokens: int = 256
    depth: int = 4
    repeats: int = 4
    batch_tokens: int = 1024
    seed: int = 0
