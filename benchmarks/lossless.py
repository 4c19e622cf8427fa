"""Compare every drafter, cache, γ and tree with the tokens of `transformers`' own `generate` (greedy, float32).

    python benchmarks/lossless.py                       # the built-in model, 12 prompts × 128 tokens
    python benchmarks/lossless.py --target FOLDER --drafters self:int8 FOLDER2 --prompts 4 --gammas 2 5
    python benchmarks/lossless.py --batch 8 --pool paged           # all prompts in batches of eight

Prints a line per combination, every difference with the gap of the two best logits, and one line of JSON at the end.
Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Literal

import torch
from transformers import GenerationConfig

from specbench.backends.torch.parity import find_difference
from specbench.bench.prompts import load_prompts
from specbench.decoding.records import Generation
from specbench.decoding.sampling import Greedy
from specbench.generate import GenerationRun, encode_prompt
from specbench.generate_many import GenerationRuns
from specbench.models.drafters import load_drafter
from specbench.models.load import load_model
from specbench.models.target import load_target
from specbench.options import LoadOptions
from specbench.policies import build_policy
from specbench.specs.drafters import parse_drafter
from specbench.specs.policies import parse_policy

DRAFTERS = ["none", "lookup", "ngram:top-k=2", "suffix", "self:int8", "self:layers=10", "smollm2-135m"]


def applies(rule: str, drafter: str) -> bool:
    """Return whether a policy applies to a drafter."""
    return parse_policy(rule).applies(parse_drafter(drafter))


def decoded(
    runs: list[GenerationRun], batch: int | None, pool: Literal["slotted", "paged"]
) -> list[Generation]:
    """Return their outputs, decoded one by one or in batches."""
    if batch is None:
        for run in runs:
            for _ in run:
                pass
        return [run.result() for run in runs]
    found = GenerationRuns(runs, max_batch=batch, pool=pool).results()
    for each in found:
        if isinstance(each, Exception):
            raise each
    return [each for each in found if isinstance(each, Generation)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS)
    parser.add_argument("--caches", nargs="+", default=["dynamic", "preallocated"])
    parser.add_argument("--gammas", nargs="+", type=int, default=[1, 2, 5, 8])
    parser.add_argument("--rules", nargs="*", default=["dynamic-tree"], help="in addition to every γ")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, help="batch size; default: one by one")
    parser.add_argument("--pool", choices=("slotted", "paged"), default="slotted", help="of --batch")
    arguments = parser.parse_args()

    options = LoadOptions(dtype=arguments.dtype, device="cpu")
    prompts = load_prompts(["all"], limit=arguments.prompts)
    reference = load_model(arguments.target, options)
    encoded = [encode_prompt(reference.tokenizer, p.turns[0], system=p.system) for p in prompts]
    expected = []
    for ids in encoded:
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=arguments.tokens,
            eos_token_id=list(reference.end_ids),
            pad_token_id=reference.end_ids[0],
        )
        batch = torch.tensor([ids])
        with torch.inference_mode():
            output = reference.model.generate(
                batch, attention_mask=torch.ones_like(batch), generation_config=config
            )
        expected.append(output[0, len(ids) :].tolist())
    print(f"transformers generate: {sum(map(len, expected))} tokens for {len(expected)} prompts", flush=True)
    del reference

    results, differences = [], []
    for cache in arguments.caches:
        target = load_target(arguments.target, options, cache=cache)
        for spec in arguments.drafters:
            drafter = load_drafter(spec, target, cache=cache)
            rules = [f"fixed:gamma={gamma}" for gamma in ([1] if spec == "none" else arguments.gammas)]
            for rule in [*rules, *(rule for rule in arguments.rules if applies(rule, spec))]:
                began, same, accepted, drafted = time.perf_counter(), 0, 0, 0
                runs = [
                    GenerationRun(
                        ids, target, drafter, policy=build_policy(rule), max_new_tokens=arguments.tokens
                    )
                    for ids in encoded
                ]
                results_of_rule = decoded(runs, arguments.batch, arguments.pool)
                for prompt, ids, tokens, result in zip(
                    prompts, encoded, expected, results_of_rule, strict=True
                ):
                    accepted += sum(step.accepted for step in result.steps)
                    drafted += sum(step.gamma for step in result.steps)
                    part = find_difference(target.scorer, ids, result.token_ids, tokens, Greedy())
                    same += part is None
                    if part is not None:
                        print(f"  DIFFERS {prompt.id}: {part}", flush=True)
                        differences.append([cache, spec, rule, prompt.id, part.position, part.gap_units])
                results.append([cache, spec, rule, same, len(prompts), accepted, drafted])
                print(
                    f"{cache:12} {spec:22} {rule}: {same}/{len(prompts)} identical, "
                    f"{accepted}/{drafted} accepted, {time.perf_counter() - began:.0f} s",
                    flush=True,
                )
    print(
        json.dumps(
            {
                "benchmark": "lossless",
                "target": target.name,
                "dtype": arguments.dtype,
                "prompts": len(prompts),
                "tokens": arguments.tokens,
                "batch": arguments.batch,
                "combinations": len(results),
                "runs": len(results) * len(prompts),
                "differences": differences,
            }
        )
    )
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
