"""Measure what relaxed rules gain, and how far their outputs diverge from the target's: the lossy frontier.

    python benchmarks/relaxed.py --drafter lookup+smollm2-135m-head --prompts 6
    python benchmarks/relaxed.py --target FOLDER --drafter SMALL --prompts 24 --out rows.jsonl

Decodes prompts greedily: plainly, losslessly, and with each rule. Prints by rule: tokens per step, the speed as a
multiple of plain decoding (which depends on the load of the machine; the other figures do not), the share of tokens
that are not the target's own choice after the same text (by its logits in a pass over the whole output), the share of
outputs that differ from plain decoding's, and the mean log-probability of a token under the target, less that of its
own greedy output. ``--out`` continues what the file holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import parts

from specbench.base.progress import quiet_transformers
from specbench.bench.prompts import load_prompts
from specbench.cli.options import DEFAULT_TARGET
from specbench.decoding.protocols import Drafter, ForwardRequest
from specbench.generate import GenerationRun, encode_prompt
from specbench.models.drafters import load_drafter
from specbench.models.target import Target, load_target
from specbench.options import LoadOptions
from specbench.policies import build_policy
from specbench.results.stats import mean_interval
from specbench.specs.verification import Relaxed

RULES = ("top-k:2", "top-k:5", "top-k:10", "margin:0.1", "margin:0.3", "top-k:10+margin:0.6", "typical:0.09")
PLAIN, LOSSLESS = "plain", "lossless"


def judge(target: Target, prompt: Sequence[int], output: Sequence[int]) -> tuple[int, float]:
    """Return how many tokens of an output are not the target's choice, and the sum of their log-probabilities."""
    target.scorer.begin()
    rows = target.scorer.score(ForwardRequest(target.scorer, prompt, output)).logits[: len(output)].float()
    chosen = rows.argmax(dim=-1).tolist()
    scores = rows.log_softmax(dim=-1)
    total = sum(float(scores[place, token]) for place, token in enumerate(output))
    return sum(token != best for token, best in zip(output, chosen, strict=True)), total


def decode(
    target: Target, drafter: Drafter | None, policy: str, prompt: Sequence[int], tokens: int
) -> dict[str, Any]:
    """Return the figures of an output."""
    run = GenerationRun(prompt, target, drafter, policy=build_policy(policy), max_new_tokens=tokens)
    for _ in run:
        pass
    found = run.result()
    other, total = judge(target, prompt, found.token_ids)
    return {
        "token_ids": found.token_ids,
        "steps": len(found.steps),
        "decoded": sum(len(step.tokens) for step in found.steps),
        "seconds": sum(step.times.total_s for step in found.steps),
        "other": other,
        "log_probability": total,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--drafter", default="self:int8")
    parser.add_argument("--drafter-dtype", default="auto")
    parser.add_argument("--draft-policy", default="fixed:gamma=4")
    parser.add_argument("--rule", action="append", type=Relaxed.parse, help="only these; repeatable")
    parser.add_argument("--tokens", type=int, default=64, help="of each output, at most")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--out", type=Path, help="continue from this file")
    args = parser.parse_args(arguments)

    rules = [str(rule) for rule in args.rule or RULES]
    settings = {key: str(value) for key, value in vars(args).items() if key not in ("out", "prompts", "rule")}
    kept = parts.Parts(args.out, {**settings, "rules": rules})
    prompts = load_prompts(["all"])
    with quiet_transformers():
        target = load_target(args.target)
        drafter = load_drafter(args.drafter, target, LoadOptions(dtype=args.drafter_dtype))
        for number in range(len(kept.done), args.prompts):
            prompt = prompts[(number * 7) % len(prompts)]
            ids = encode_prompt(target.tokenizer, prompt.turns[0])
            ways = {PLAIN: decode(target, None, args.draft_policy, ids, args.tokens)}
            ways[LOSSLESS] = decode(target, drafter, args.draft_policy, ids, args.tokens)
            for rule in rules:
                ways[rule] = decode(target, drafter, f"{args.draft_policy},relaxed={rule}", ids, args.tokens)
            kept.add({"prompt": prompt.id, **ways})
            print(f"{number + 1}: {prompt.id}", file=sys.stderr, flush=True)
    print(json.dumps(report(kept.done[: args.prompts])))
    return 0


def report(done: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Print a row for each way to decode; return the same figures."""

    def per_token(row: dict[str, Any]) -> float:
        return float(row["log_probability"]) / max(1, len(row["token_ids"]))

    def speed(row: dict[str, Any]) -> float:
        return float(row["decoded"]) / row["seconds"] if row["seconds"] else 0.0

    print(f"{len(done)} prompts; x plain depends on the load of the machine, the other figures do not")
    print(
        f"{'rule':<22} tokens/step  x plain  other tokens  other outputs  log-probability, less the target's"
    )
    figures: dict[str, Any] = {"prompts": len(done)}
    for way in [each for each in done[0] if each != "prompt"]:
        rows = [part[way] for part in done]
        tokens = sum(len(row["token_ids"]) for row in rows)
        losses = [per_token(part[way]) - per_token(part[PLAIN]) for part in done]
        ratios = [speed(part[way]) / speed(part[PLAIN]) for part in done if speed(part[PLAIN])]
        found = {
            "tokens_per_step": sum(row["decoded"] for row in rows)
            / max(1, sum(row["steps"] for row in rows)),
            "times_plain": sum(ratios) / max(1, len(ratios)),
            "other_tokens": sum(row["other"] for row in rows) / tokens,
            "other_outputs": sum([*part[way]["token_ids"]] != [*part[PLAIN]["token_ids"]] for part in done)
            / len(done),
            "log_probability": sum(losses) / len(losses),
            "interval": mean_interval(losses),
        }
        shown = "" if found["interval"] is None else " [{:.3f}, {:.3f}]".format(*found["interval"])
        print(
            f"{way:<22} {found['tokens_per_step']:11.3f}  {found['times_plain']:7.2f}  {found['other_tokens']:12.1%}"
            f"  {found['other_outputs']:13.0%}  {found['log_probability']:+.3f}{shown}"
        )
        figures[way] = found
    return figures


if __name__ == "__main__":
    sys.exit(main())
