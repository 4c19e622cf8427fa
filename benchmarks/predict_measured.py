"""Predicted against measured: tokens per step and speedups of a drafter by γ, greedy and sampled, on a quiet machine.

    nohup python benchmarks/predict_measured.py --target MODEL --drafter MODEL --out measured.jsonl > said.txt &
    python benchmarks/predict_measured.py ... --server http://127.0.0.1:8000/v1    # answers from the log of a server

Plain decoding gives each prompt's answer, with the target's probabilities; or a server with the same target is asked
for it, and its log is read as ``specbench predict`` reads it (``specbench serve`` gives no logprobs: --temperatures 0).
From these answers and one pass of the drafter the law of the steps predicts. Then every γ and plain decoding really
decode the prompts, in an order of its own for each, and both are held against each other: tokens per step with 95%
intervals over prompts, and speedups as geometric means over prompts of times paired by prompt. Goals: within 2% greedy,
within the interval when sampled, speedups within 5%. Prints one line of JSON at the end. A real pair takes minutes for
each temperature: everything goes to --out, and a second call continues.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import msgspec
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
from specbench.predict.forecast import forecast
from specbench.predict.law import Answer
from specbench.predict.logs import read_log
from specbench.results import stats
from specbench.results.lines import CostLine


class Kept:
    """What was measured, by name; a line of JSON for each."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._found = path, dict[str, Any]()
        if path is not None and path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._found |= json.loads(line)

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return what is known, or measure it."""
        if name not in self._found:
            self._found[name] = measure()
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({name: self._found[name]}) + "\n")
        return self._found[name]


def plain_answer(
    target: Target, prompt: Sequence[int], sampling: Sampling, tokens: int, seed: int
) -> tuple[list[int], list[float]]:
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
    return ids, chances


def asked(url: str, text: str, name: str, temperature: float, tokens: int, seed: int) -> dict[str, Any]:
    """Ask a server, and return the line of a log."""
    model = httpx2.get(f"{url}/models").json()["data"][0]["id"]
    sampled = {"logprobs": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": seed} if temperature else {}
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": temperature,
            "max_tokens": tokens, **sampled}  # fmt: skip
    answer = httpx2.post(f"{url}/chat/completions", json=body, timeout=600.0)
    return {"id": name, "request": body, "response": answer.raise_for_status().json()}


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
    parser.add_argument("--out", type=Path, metavar="FILE", help="what was measured; a second call continues")
    parser.add_argument(
        "--server", metavar="URL", help="of a server with the same target, which gives the answers"
    )
    given = parser.parse_args(arguments)
    target = load_target(given.target)
    drafter = load_drafter(given.drafter, target)
    texts = {each.id: each.turns[0] for each in load_prompts(["all"], given.prompts)}
    gammas: list[int] = given.gammas
    kept, rows = Kept(given.out), list[dict[str, Any]]()
    for temperature in given.temperatures:
        sampling = Sampling(temperature=temperature)
        applied = target.language_model.transforms(sampling, DecodingOptions())
        answers: list[Answer] = []
        for seed, (name, text) in enumerate(texts.items()):
            what = f"{temperature:g}/{name}"
            if given.server:
                words = given.server, text, name, temperature, given.tokens, seed
                line = kept.once(f"{what}/asked", lambda words=words: asked(*words))
                log = read_log([json.dumps(line).encode()], target.tokenizer)
                print("".join(f"{name}: {note}\n" for note in log.notes()), end="")
                answers += log.answers
            else:
                prompt = as_tokens(text, target)
                words = target, prompt, sampling, given.tokens, seed
                ids, chances = kept.once(f"{what}/plain", lambda words=words: plain_answer(*words))
                p = None if sampling.greedy else np.array(chances)
                answers.append(Answer(prompt, ids, applied, p, given.tokens, name))
        asked_s = time.perf_counter()
        found = forecast(drafter, answers, gammas, target=target.scorer)
        print(f"\ntemperature {temperature:g}: prediction {time.perf_counter() - asked_s:.1f} s", flush=True)
        counts: dict[int, list[tuple[int, int, float]]] = {gamma: [] for gamma in (0, *gammas)}
        lines: list[CostLine] = []
        clock, widths = clock_for(str(target.scorer.device)), cost_widths(gammas)
        for seed, answer in enumerate(answers, 1000):
            order = list(counts)
            Random(seed).shuffle(order)

            what = target.scorer, {found.drafter: drafter}, answer.prompt, widths, clock, 1, Random(seed)
            passes = kept.once(
                f"{temperature:g}/{answer.name}/passes",
                lambda what=what: msgspec.to_builtins(time_passes(*what)),
            )
            lines += msgspec.convert(passes, list[CostLine])
            for gamma in order:
                run = GenerationRun(
                    answer.prompt, target, drafter if gamma else None, sampling=sampling, seed=seed,
                    policy=build_policy(f"fixed:gamma={gamma or 1}"), max_new_tokens=given.tokens,
                )  # fmt: skip
                measured = kept.once(f"{temperature:g}/{answer.name}/{gamma}", lambda run=run: decoded(run))
                counts[gamma].append(tuple(measured))
        costs = pass_costs(lines)
        names = [each.name for each in answers]
        plain = [s / max(1, t) for t, _, s in counts[0]]
        for row, gamma in zip(found.rows, gammas, strict=True):
            tokens, steps, seconds = zip(*counts[gamma], strict=True)
            really = stats.pooled_rate(tokens, steps, names)
            speedup = stats.geometric_mean(
                [each / (s / max(1, t)) for each, s, t in zip(plain, seconds, tokens, strict=True)], names
            )
            predicted, faster = found.tokens_per_step(row), found.speedup(row, costs)
            print(
                f"  γ={gamma}: tokens per step {stats.ratio_text(predicted, '')} predicted,"
                f" {stats.ratio_text(really, '')} measured, {really.value / predicted.value - 1:+.1%};"
                f" speedup {stats.ratio_text(faster)} predicted, {stats.ratio_text(speedup)} measured,"
                f" {speedup.value / faster.value - 1:+.1%}",
                flush=True,
            )
            rows.append({"temperature": temperature, "gamma": gamma, "predicted": predicted.value,
                         "measured": really.value, "predicted_speedup": faster.value,
                         "measured_speedup": speedup.value})  # fmt: skip
    print(json.dumps({"target": given.target, "drafter": given.drafter, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
