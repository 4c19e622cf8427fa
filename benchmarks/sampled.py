"""Compare sampled runs with the target's own probabilities, on real (tiny) transformers.

    python benchmarks/sampled.py                 # finds a bias of 1% with 95% power; some minutes per drafter
    python benchmarks/sampled.py --bias 0.05     # coarser and fast

Two random Llamas over 8 tokens, float32, with real caches and rollbacks. The exact probability of every output of
three tokens comes from full passes of the target; the second and third token of many seeded runs are tested against
it with χ². "A bias of 1%" is a distribution in which every probability is off by 2% of itself, a total variation of
1%. The last row switches the residual adjustment off and must come out wrong. Prints a table and one line of JSON;
exit code 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from scipy.stats import chi2, ncx2
from transformers import LlamaConfig, LlamaForCausalLM

from specbench.backends.torch.kernels.surgery import first_layers, quantized_copy
from specbench.backends.torch.scorer import Scorer
from specbench.decoding.loop import decode_steps
from specbench.decoding.protocols import Drafter
from specbench.decoding.records import Prefill
from specbench.decoding.sampling import Randomness, Sampling
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter, SelfDrafter
from specbench.drafters.ngram import NGramDrafter
from specbench.options import CacheKind
from specbench.policies import FixedLength
from specbench.specs.drafters import NGram

VOCAB, NEW, GAMMA = 8, 3, 2
PROMPT = [1, 5, 2, 7, 1, 5, 2]
SAMPLING = Sampling(temperature=0.8, top_k=6, repetition_penalty=1.2)
SIGNIFICANCE = 0.01  # of the whole family of tests: a sound build fails one time in a hundred
POWER = 0.95


def tiny_model(seed: int) -> LlamaForCausalLM:
    """Return a random Llama whose logits are spread widely enough to make drafts fail."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.lm_head.weight.mul_(25.0)
    return model


DRAFTERS: dict[str, Callable[[Scorer, LlamaForCausalLM], Drafter]] = {
    "model": lambda target, draft: ModelDrafter(Scorer(draft, vocab_size=VOCAB), "model"),
    "self:int8": lambda target, draft: SelfDrafter(
        Scorer(quantized_copy(target.model), target.cache), "self:int8"
    ),
    "self:layers=1": lambda target, draft: SelfDrafter(
        Scorer(first_layers(target.model, 1), target.cache), "self:layers=1"
    ),
    "ngram": lambda target, draft: NGramDrafter(),
    "ngram:sample": lambda target, draft: NGramDrafter(NGram(sample=True)),
    "lookup": lambda target, draft: LookupDrafter(),
}


@dataclass(frozen=True)
class Outcome:
    """One row of the table: the χ² tests of tokens 2 and 3."""

    name: str
    cache: str
    runs: int
    p_values: tuple[float, ...]
    significance: float

    @property
    def sound(self) -> bool:
        return min(self.p_values) >= self.significance


def exact_marginals(target: LlamaForCausalLM) -> list[list[float]]:
    """Return the probability of every token at output positions 1 to NEW, by the chain rule."""
    marginals = [[0.0] * VOCAB for _ in range(NEW)]
    growing = {(): 1.0}
    for position in range(NEW):
        grown = {}
        for tokens, weight in growing.items():
            context = [*PROMPT, *tokens]
            with torch.inference_mode():
                logits = target(input_ids=torch.tensor([context])).logits[0, -1:]
            p = SAMPLING.probabilities(logits, context)[0].double()
            for token, share in enumerate((p / p.sum()).tolist()):
                if share > 0:
                    grown[*tokens, token] = weight * share
                    marginals[position][token] += weight * share
        growing = grown
    return marginals


def runs_needed(bias: float, significance: float) -> int:
    """Return the runs that a χ² test of VOCAB cells needs to find a relative shift of 2·bias with the wanted power."""
    freedom = VOCAB - 1
    threshold = chi2.isf(significance, freedom)
    low, high = 1.0, 1e9
    for _ in range(100):
        middle = math.sqrt(low * high)
        found = ncx2.sf(threshold, freedom, middle * (2 * bias) ** 2)
        low, high = (middle, high) if found < POWER else (low, middle)
    return math.ceil(high)


def p_value(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    """Return the p-value of a χ² test of counts; cells with fewer than 5 expected counts are pooled."""
    runs = sum(counts)
    large = [(c, runs * p) for c, p in zip(counts, probabilities, strict=True) if runs * p >= 5]
    small = [(c, runs * p) for c, p in zip(counts, probabilities, strict=True) if runs * p < 5]
    if sum(c for c, expected in small if expected == 0):
        return 0.0  # something impossible was drawn
    rest = (sum(c for c, _ in small), sum(e for _, e in small))
    cells = [*large, rest] if rest[1] >= 5 else large
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


def sample(
    name: str,
    cache: CacheKind,
    runs: int,
    significance: float,
    *,
    residual_adjustment: bool = True,
    seed: int = 0,
) -> Outcome:
    """Decode ``runs`` times with one stream of randomness and test tokens 2 and 3."""
    model, draft = tiny_model(1), tiny_model(2)
    target = Scorer(model, cache)
    drafter = DRAFTERS[name](target, draft)
    random = Randomness(seed)
    counts = [Counter[int]() for _ in range(NEW)]
    for _ in range(runs):
        tokens: list[int] = []
        for record in decode_steps(
            PROMPT,
            target,
            drafter,
            policy=FixedLength(GAMMA),
            sampling=SAMPLING,
            random=random,
            max_new_tokens=NEW,
            # The first step drafts from the prompt, so that token 2 is as often drafted as bonus or corrected.
            first_target=False,
            residual_adjustment=residual_adjustment,
        ):
            if not isinstance(record, Prefill):
                tokens += record.tokens
        for position, token in enumerate(tokens):
            counts[position][token] += 1
    exact = exact_marginals(model)
    values = tuple(p_value([counts[i][token] for token in range(VOCAB)], exact[i]) for i in range(1, NEW))
    label = name if residual_adjustment else f"{name}, adjustment off"
    return Outcome(label, cache, runs, values, significance)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bias", type=float, default=0.01)
    parser.add_argument("--caches", nargs="+", default=["dynamic", "preallocated"])
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tests = (NEW - 1) * len(arguments.caches) * len(arguments.drafters)
    significance = SIGNIFICANCE / tests  # Bonferroni
    runs = runs_needed(arguments.bias, significance)
    print(
        f"{runs} runs each, to find a bias of {arguments.bias:.0%} with {POWER:.0%} power in {tests} tests",
        flush=True,
    )
    outcomes = []
    for cache in arguments.caches:
        for name in arguments.drafters:
            outcomes.append(sample(name, cache, runs, significance, seed=arguments.seed))
            _show(outcomes[-1])
    control = sample("model", "dynamic", runs, significance, residual_adjustment=False, seed=arguments.seed)
    _show(control)
    fine = all(outcome.sound for outcome in outcomes) and not control.sound
    print(
        json.dumps(
            {
                "benchmark": "distribution",
                "bias": arguments.bias,
                "runs": runs,
                "significance": significance,
                "p_values": {f"{o.name} {o.cache}": o.p_values for o in [*outcomes, control]},
                "as_expected": fine,
            }
        )
    )
    return 0 if fine else 1


def _show(outcome: Outcome) -> None:
    values = ", ".join(f"{value:.3g}" for value in outcome.p_values)
    print(
        f"{outcome.name:24} {outcome.cache:12} p-values {values:24} {'sound' if outcome.sound else 'WRONG'}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
