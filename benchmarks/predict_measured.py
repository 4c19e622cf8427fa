"""Predicted against measured: tokens per step and speedups of a drafter by γ, greedy and sampled, on a quiet machine.

    python benchmarks/predict_measured.py --target MODEL --drafter MODEL [--prompts 24] [--tokens 64] [--gammas 2 4 8]

Plain decoding gives each prompt's answer, with the target's probabilities. From these answers and one pass of the
drafter the law of the steps predicts (``specbench predict``). Then every γ and plain decoding really decode the
prompts, in an order of its own for each, and both are held against each other: tokens per step with 95% intervals over
prompts, and speedups as geometric means over prompts of times paired by prompt. Goals: within 2% greedy, within the
interval when sampled, speedups within 5%. Prints one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from specbench.bench.passes import cost_widths, pass_costs, time_passes
from specbench.bench.prompts import load_prompts
from specbench.decoding.clocks import clock_for
from specbench.decoding.records import Prefill, Step
from specbench.decoding.sampling import Sampling
from specbench.generate import GenerationRun, as_tokens
from specbench.models.drafters import load_drafter
from specbench.models.target import Target, load_target
from specbench.options import DecodingOptions
from specbench.policies import build_policy
from specbench.predict.answers import Answer
from specbench.predict.forecast import forecast
from specbench.results import stats


def plain_answer(
    target: Target, prompt: Sequence[int], name: str, sampling: Sampling, tokens: int, seed: int
) -> Answer:
    """Decode a prompt plainly, and return the answer with the probability of each token."""
    ids, chances = list[int](), list[float]()
    for record in GenerationRun(
        prompt, target, None, sampling=sampling, seed=seed, max_new_tokens=tokens, trace=True
    ):
        if isinstance(record, Prefill):
            ids, chances = [record.token or 0], [record.probability or 0.0]
        else:
            ids += record.tokens
            chances.append(record.closing_probability or 0.0)
    applied = target.language_model.transforms(sampling, DecodingOptions())
    return Answer(prompt, ids, applied, None if sampling.greedy else np.array(chances), tokens, name)


def decoded(run: GenerationRun) -> tuple[int, int, float]:
    """Return tokens and steps after the first token, and their seconds."""
    began, tokens, steps = 0.0, 0, 0
    for record in run:
        if isinstance(record, Step):
            tokens += len(record.tokens)
            steps += 1
        else:
            began = time.perf_counter()
    return tokens, steps, time.perf_counter() - began


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--gammas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    given = parser.parse_args(arguments)
    target = load_target(given.target)
    drafter = load_drafter(given.drafter, target)
    prompts = {each.id: as_tokens(each.turns[0], target) for each in load_prompts(["all"], given.prompts)}
    gammas: list[int] = given.gammas
    rows: list[dict[str, Any]] = []
    for temperature in given.temperatures:
        sampling = Sampling(temperature=temperature)
        began = time.perf_counter()
        answers = [
            plain_answer(target, prompt, name, sampling, given.tokens, seed)
            for seed, (name, prompt) in enumerate(prompts.items())
        ]
        asked = time.perf_counter()
        found = forecast(drafter, answers, gammas)
        predicting = time.perf_counter()
        text, clock = answers[0].prompt, clock_for(str(target.scorer.device))
        widths = cost_widths(gammas)
        costs = pass_costs(
            time_passes(target.scorer, {found.drafter: drafter}, text, widths, clock, 8, Random(0))
        )
        print(
            f"\ntemperature {temperature:g}: answers {asked - began:.0f} s, prediction {predicting - asked:.1f} s"
        )
        counts: dict[int, list[tuple[int, int, float]]] = {gamma: [] for gamma in (0, *gammas)}
        for seed, prompt in enumerate(prompts.values(), 1000):
            order = list(counts)
            Random(seed).shuffle(order)
            for gamma in order:
                policy = build_policy(f"fixed:gamma={gamma or 1}")
                counts[gamma].append(
                    decoded(GenerationRun(prompt, target, drafter if gamma else None, policy=policy, sampling=sampling,
                                          seed=seed, max_new_tokens=given.tokens))
                )  # fmt: skip
        names = list(prompts)
        plain = [s / max(1, t) for t, _, s in counts[0]]
        for row, gamma in zip(found.rows, gammas, strict=True):
            tokens, steps, seconds = zip(*counts[gamma], strict=True)
            measured = stats.pooled_rate(tokens, steps, names)
            speedup = stats.geometric_mean(
                [each / (s / max(1, t)) for each, s, t in zip(plain, seconds, tokens, strict=True)], names
            )
            predicted, faster = found.tokens_per_step(row), found.speedup(row, costs)
            print(
                f"  γ={gamma}: tokens per step {stats.ratio_text(predicted, '')} predicted,"
                f" {stats.ratio_text(measured, '')} measured, {measured.value / predicted.value - 1:+.1%};"
                f" speedup {stats.ratio_text(faster)} predicted, {stats.ratio_text(speedup)} measured,"
                f" {speedup.value / faster.value - 1:+.1%}",
                flush=True,
            )
            rows.append({"temperature": temperature, "gamma": gamma, "predicted": predicted.value,
                         "measured": measured.value, "predicted_speedup": faster.value,
                         "measured_speedup": speedup.value})  # fmt: skip
    print(json.dumps({"target": given.target, "drafter": given.drafter, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
