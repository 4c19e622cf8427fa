"""What passes cost as a function of the experts they read, and how `auto` does with it; random weights in bfloat16.

    python benchmarks/experts.py                       # Qwen3-MoE, OLMoE and a dense Qwen3, some six minutes
    python benchmarks/experts.py qwen3-moe --steps 60

Two parts for each model, both in CPU time of one thread:

- fit: passes over 1 to 9 tokens, drawn from few or many different ones, so that passes over equally many tokens read
  different numbers of experts. Prints R² of time = a + b · experts, and for comparison of time = a + b · tokens, of
  the shortest of several times of each kind of pass: others are prolonged by what else runs.
- auto: steps whose drafts a script accepts with a fixed chance each, while the target's passes and the choices of
  `auto` are real. A drafter's pass is taken to cost 0.05 of a pass over one token. The rate of `auto` after its first
  steps, and that of every fixed γ, follow from the chance and from the median times of passes over 1 to 9 tokens that
  are made in turn between the steps, so without the luck of a run. `rows` is `auto` without the counts of experts.

Prints a line per model and one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers

from specbench.backends.torch.scorer import Scorer
from specbench.decoding.drafts import Draft
from specbench.decoding.protocols import ForwardRequest
from specbench.decoding.records import ExpertsRead, Step, StepTimes
from specbench.models.target import wrap_target
from specbench.policies.auto import AutoLength

VOCABULARY, CONTEXT, LONGEST = 8192, 64, 8
CHANCES = (0.5, 0.75, 0.9)
DRAFTING = 0.05
_APART = 8  # steps between rounds of timed passes
PLAIN: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 4096, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # Half of Qwen3-30B-A3B's and OLMoE-1B-7B's widths, and fewer layers: 1.8 and 1.7 GB.
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 384, "num_hidden_layers": 6},
    ),
    "olmoe": (
        "Olmoe",
        {"num_experts": 64, "num_experts_per_tok": 8, "intermediate_size": 512, "num_hidden_layers": 8},
    ),
    "qwen3": ("Qwen3", {"intermediate_size": 3072, "num_hidden_layers": 14}),
}


def random_model(name: str) -> Any:
    class_name, settings = SHAPES[name]
    config = getattr(transformers, f"{class_name}Config")(**PLAIN, **settings)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = getattr(transformers, f"{class_name}ForCausalLM")(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config = transformers.GenerationConfig()
    return model


class Passes:
    """The timed passes of a target over a context that stays short."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer, self._random = scorer, Random(1)
        self._context = [self._token() for _ in range(CONTEXT)]
        scorer.begin()
        scorer.logits(self._context[:-1])
        self.seconds: dict[int, list[float]] = defaultdict(list)

    def _token(self, kinds: int = VOCABULARY) -> int:
        return self._random.randrange(kinds)

    def run(self, tokens: int, kinds: int = VOCABULARY) -> tuple[float, ExpertsRead | None]:
        """Run a pass over random tokens, as many of ``kinds`` different ones; return CPU seconds and experts."""
        self._context[-1] = self._token(kinds)
        drafted = [self._token(kinds) for _ in range(tokens - 1)]
        began = time.process_time()
        output = self._scorer.score(ForwardRequest(self._scorer, self._context, drafted, counts_experts=True))
        seconds = time.process_time() - began
        self._scorer.rollback(CONTEXT - 1)
        return seconds, output.experts

    def sample(self) -> None:
        """Time a pass over each number of tokens for ``medians``."""
        for n in self._random.sample(range(1, LONGEST + 2), LONGEST + 1):
            self.seconds[n].append(self.run(n)[0])

    def medians(self) -> list[float]:
        """Return the median seconds of passes over 0, 1, ... different tokens, never falling."""
        found = [median(self.seconds[n]) for n in range(1, LONGEST + 2)]
        return [0.0, *np.maximum.accumulate(found).tolist()]


def explained(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> float:
    """Return R² of a linear fit."""
    matrix = np.array([[1.0] * len(seconds), *columns]).T
    times = np.array(seconds)
    rest = times - matrix @ np.linalg.lstsq(matrix, times, rcond=None)[0]
    return float(1.0 - (rest @ rest) / ((times - times.mean()) @ (times - times.mean())))


def fit(passes: Passes, rounds: int) -> dict[str, float]:
    """Return how well experts and tokens explain the times of passes, each the shortest of ``rounds`` in turn."""
    kinds = (1, 2, 4, 16, VOCABULARY)
    cases = [(n, each) for n in range(1, LONGEST + 2) for each in kinds]
    made: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    order = Random(2)
    for _ in range(rounds):
        for case in order.sample(cases, len(cases)):
            seconds, experts = passes.run(*case)
            made[case].append((seconds, 0.0 if experts is None else float(experts.total)))
    seconds = [min(each for each, _ in found) for found in made.values()]
    experts = [float(np.mean([each for _, each in found])) for found in made.values()]
    tokens = [float(n) for n, _ in made]
    slope, base = np.polyfit(experts, seconds, 1) if any(experts) else (0.0, 0.0)
    return {
        "r2_experts": explained([experts], seconds) if any(experts) else float("nan"),
        "r2_tokens": explained([tokens], seconds),
        "r2_both": explained([experts, tokens], seconds) if any(experts) else float("nan"),
        "base_ms": 1e3 * float(base),
        "expert_us": 1e6 * float(slope),
    }


def drafted_by_auto(passes: Passes, chance: float, plain_s: float, steps: int, *, counts: bool) -> list[int]:
    """Return the draft lengths of `auto`, and keep the costs that it has measured."""
    policy, random, gammas = AutoLength(LONGEST), Random(3), []
    policy.reset()
    for index in range(steps):
        if index % _APART == 0:
            passes.sample()
        limit = policy.begin(LONGEST)
        draft, kept = Draft(match_confidence=[]), []
        while len(draft.tokens) < limit and policy.should_continue(draft):
            kept.append(random.random() < chance)
            draft.match_confidence.append(0.7)  # type: ignore[union-attr]
            draft.tokens.append(0)
        gamma = len(draft.tokens)
        seconds, experts = passes.run(gamma + 1)
        accepted = next((place for place, each in enumerate(kept) if not each), gamma)
        step = Step(
            index=index,
            position=CONTEXT,
            drafted=(0,) * gamma,
            accepted=accepted,
            tested=min(gamma, accepted + 1),
            tokens=(0,) * (accepted + 1),
            closing="corrected" if accepted < gamma else "bonus" if gamma else "target",
            expected_acceptance=(1.0,) * min(gamma, accepted + 1),
            times=StepTimes(draft_s=DRAFTING * plain_s * gamma, verify_s=seconds),
        )
        policy.observe(replace(step, experts=experts if counts else None))
        gammas.append(gamma)
    return gammas


def rate(gammas: Sequence[int], chance: float, v: Sequence[float]) -> float:
    """Return the expected tokens per second of steps with these draft lengths."""
    tokens = sum(sum(chance**i for i in range(gamma + 1)) for gamma in gammas)
    return tokens / sum(DRAFTING * v[1] * gamma + v[gamma + 1] for gamma in gammas)


def examine(name: str, steps: int, rounds: int) -> dict[str, Any]:
    """Return the figures of a model."""
    target = wrap_target(random_model(name), name=name)
    passes = Passes(target.scorer)
    for _ in range(3):
        passes.sample()
    plain_s = median(passes.seconds[1])
    passes.seconds.clear()
    found: dict[str, Any] = {"model": name, "forward": type(target.scorer.forward).__name__}
    found |= fit(passes, rounds)
    ratios = defaultdict(list)
    for n in range(1, LONGEST + 2):
        for _ in range(5):
            _, experts = passes.run(n)
            ratios[n].append(1.0 if experts is None else experts.ratio)
    chosen = {
        (chance, counts): drafted_by_auto(passes, chance, plain_s, steps, counts=counts)[steps // 4 :]
        for chance in CHANCES
        for counts in (True, False)
    }
    v = passes.medians()
    found["experts_of_one"] = {n: round(float(np.mean(each)), 2) for n, each in ratios.items()}
    found["v"] = {n: round(v[n] / v[1], 2) for n in range(1, LONGEST + 2)}
    found["pass_ms"] = 1e3 * v[1]
    for chance in CHANCES:
        rates = [rate([gamma], chance, v) for gamma in range(LONGEST + 1)]
        found[f"at_{chance}"] = {
            "best_gamma": int(np.argmax(rates)),
            "speedup": round(max(rates) * v[1], 3),
            "auto": round(rate(chosen[chance, True], chance, v) / max(rates), 3),
            "rows": round(rate(chosen[chance, False], chance, v) / max(rates), 3),
            "mean_gamma": round(float(np.mean(chosen[chance, True])), 2),
        }
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", choices=[*SHAPES, []], help="all by default")
    parser.add_argument("--steps", type=int, default=120, help="of auto, for each chance")
    parser.add_argument("--rounds", type=int, default=7, help="of timed passes in the fit")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = []
    for name in given.models or SHAPES:
        found.append(examine(name, given.steps, given.rounds))
        print(found[-1], flush=True)
    print(json.dumps({"benchmark": "experts", "steps": given.steps, "models": found}))


if __name__ == "__main__":
    main()
