"""Verifiers of a simulated server, on a made-up model: exact ones, and those with faults that engines had.

Each draws like a server with chains of drafts: the first token of an answer is the target's, then steps of drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from specbench.check.bias import Positions

Fault = Literal[
    "",
    "target only",
    "no residual",
    "argmax",
    "shared noise",
    "shared test",
    "top-p of q",
    "top-p of p",
    "bfloat16",
]
Vector = np.ndarray


def normalized(weights: Vector) -> Vector:
    total = weights.sum()
    return weights / total if total > 0 else np.full_like(weights, 1 / len(weights))


def rounded(logits: Vector) -> Vector:
    """Logits in bfloat16."""
    bits = logits.astype(np.float32).view(np.uint32)
    return ((bits + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(float)


def cut(p: Vector, share: float) -> Vector:
    """The likeliest tokens that have this share of the mass."""
    order = np.argsort(-p)
    kept = order[: int(np.searchsorted(p[order].cumsum(), share)) + 1]
    return normalized(np.where(np.isin(np.arange(len(p)), kept), p, 0.0))


@dataclass
class MadeUpModel:
    """A target and a drafter whose next token depends on the prompt, the place and the last two tokens.

    Attributes:
        spread: Standard deviations of logits, from flat to peaked contexts.
        off: How far the drafter is off.
    """

    seed: int = 0
    vocab: int = 60
    spread: tuple[float, float] = (1.5, 5.0)
    off: float = 1.5
    memory: dict[tuple[int, ...], tuple[Vector, Vector, Vector]] = field(default_factory=dict)

    def at(self, prompt: int, answer: list[int]) -> tuple[Vector, Vector, Vector]:
        """p, q and the target's logits of the next token."""
        key = (prompt, len(answer), *answer[-2:])
        if key not in self.memory:
            random = np.random.default_rng([self.seed, *key])
            logits = random.normal(size=self.vocab) * random.uniform(*self.spread)
            others = logits + self.off * random.normal(size=self.vocab)
            self.memory[key] = normalized(np.exp(logits)), normalized(np.exp(others)), logits
        return self.memory[key]


class ThreeTokens(MadeUpModel):
    """The example of vllm#54282: with shared noise 10, 60 and 30 percent become 10, 63 and 27."""

    def at(self, prompt: int, answer: list[int]) -> tuple[Vector, Vector, Vector]:
        p = np.array([0.1, 0.6, 0.3])
        return p, np.array([0.8, 0.1, 0.1]), np.log(p)


def answer_of(model: MadeUpModel, prompt: int, tokens: int, random: np.random.Generator, fault: Fault = "",
              gamma: int = 4) -> list[int]:  # fmt: skip
    """An answer of a server whose verifier has a fault; none are exact, and so is ``target only``."""
    answer: list[int] = []

    def target() -> Vector:
        p, _, logits = model.at(prompt, answer)
        p = normalized(np.exp(rounded(logits))) if fault == "bfloat16" else p
        return cut(p, 0.95) if fault == "top-p of p" else p

    def draw(p: Vector) -> int:
        return min(int(np.searchsorted(p.cumsum(), random.random())), len(p) - 1)

    answer.append(draw(target()))
    while len(answer) < tokens:
        r = random.random()
        for _ in range(gamma):
            p, q = target(), model.at(prompt, answer)[1]
            noise = random.exponential(size=len(p))
            drafted = int(np.argmax((cut(q, 0.9) if fault == "top-p of q" else q) / noise))
            if fault == "target only":  # draws from p, and keeps the draft as long as both are equal
                answer.append(draw(p))
                if answer[-1] != drafted:
                    break
                continue
            r = r if fault == "shared test" else random.random()
            if drafted == p.argmax() if fault == "argmax" else r < p[drafted] / q[drafted]:
                answer.append(drafted)
                continue
            left = p if fault in ("no residual", "argmax") else normalized(np.maximum(0, p - q))
            answer.append(int(np.argmax(left / noise)) if fault == "shared noise" else draw(left))
            break
        else:
            answer.append(draw(target()))
    return answer[:tokens]


Sampler = Callable[[int, np.random.Generator], list[int]]


def sampler(model: MadeUpModel, tokens: int, fault: Fault = "") -> Sampler:
    """A server."""
    return lambda prompt, random: answer_of(model, prompt, tokens, random, fault)


def answers_of(server: Sampler, prompts: int, each: int, seed: int) -> list[list[list[int]]]:
    """Answers by prompt."""
    random = np.random.default_rng(seed)
    return [[server(prompt, random) for _ in range(each)] for prompt in range(prompts)]


Score = Callable[[int, list[int]], tuple[np.ndarray, np.ndarray]]


def score_of(model: MadeUpModel, likeliest: int = 16) -> Score:
    """The exact probabilities of an answer's tokens, as the check takes them from a target."""

    def score(prompt: int, answer: list[int]) -> tuple[np.ndarray, np.ndarray]:
        rows, chosen = [], []
        for place, token in enumerate(answer):
            p = model.at(prompt, answer[:place])[0]
            order = [int(each) for each in np.argsort(-p)[:likeliest]]
            rows.append([*p[order], max(0.0, 1 - p[order].sum())])
            chosen.append(order.index(token) if token in order else likeliest)
        return np.array(rows), np.array(chosen)

    return score


def positions_of(model: MadeUpModel, answers: list[list[list[int]]]) -> Positions:
    """All tokens of answers behind the first ones."""
    score, numbers, rows = score_of(model), itertools.count(), list[Any]()
    contexts: dict[tuple[int, ...], int] = {}
    for prompt, group in enumerate(answers):
        for answer, number in zip(group, numbers, strict=False):
            for place, (p, token) in enumerate(zip(*score(prompt, answer), strict=True)):
                if place:
                    rows.append(
                        (p, token, number, contexts.setdefault((prompt, *answer[:place]), len(contexts)))
                    )
    return Positions(*map(np.array, zip(*rows, strict=True)))
