"""Speed of a hybrid model at the sizes of Qwen3.5-0.8B: 18 of 24 layers are recurrent; random weights in bfloat16.

    python benchmarks/hybrid.py --rounds 5 --tokens 48

Each round measures three sides in turn: `generate`, plain decoding, and the target's passes over drafts of 4 tokens, of
which a script accepts each 3 times out of 4. With `--batch 4`, also plain decoding of 4 requests in a batch. Prints
medians over the rounds in one line of JSON: CPU time per token, ratios of it, tokens per step, and the share of a step
that is spent in rolling back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from random import Random

import torch
import transformers

from specbench.generate import GenerationRun
from specbench.generate_many import GenerationRuns
from specbench.models.target import Target, wrap_target

GAMMA, RIGHT = 4, 0.75
PROMPT = [Random(0).randrange(1000, 100_000) for _ in range(200)]


def random_model() -> transformers.PreTrainedModel:
    config = transformers.Qwen3_5TextConfig(
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128,
        linear_value_head_dim=128, vocab_size=151_936, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.Qwen3_5ForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    model.generation_config = transformers.GenerationConfig()
    return model


def decode(target: Target, tokens: int) -> float:
    """Return the CPU seconds per token of plain decoding, after the first token."""
    run = GenerationRun(PROMPT, target, None, max_new_tokens=tokens, ignore_eos=True)
    first = 0.0
    for _ in run:
        first = first or time.process_time()
    return (time.process_time() - first) / (len(run.result().token_ids) - 1)


def scripted(target: Target, tokens: int) -> dict[str, float]:
    """Run the target's passes of drafts that are accepted by a script.

    In bfloat16 a random model chooses between close logits, so that what a real decoding accepts is left to chance.
    """
    random, scorer = Random(1), target.scorer
    context = list(PROMPT)
    scorer.begin()
    scorer.logits(context, rows=1)
    steps, rolling, began = 0, 0.0, time.process_time()
    while len(context) - len(PROMPT) < tokens:
        context.append(random.randrange(1000, 100_000))
        draft = [random.randrange(1000, 100_000) for _ in range(GAMMA)]
        scorer.logits(context, draft).argmax(dim=-1)
        while draft and random.random() < RIGHT:
            context.append(draft.pop(0))
        rollback = time.process_time()
        scorer.rollback(len(context))
        rolling += time.process_time() - rollback
        steps += 1
    took, made = time.process_time() - began, len(context) - len(PROMPT)
    return {"seconds": took / made, "tokens_per_step": made / steps, "rollback_share": rolling / took}


def batched(target: Target, tokens: int, batch: int) -> float:
    """Return the CPU seconds per token of plain decoding in a batch, after the first token of each request."""
    runs = GenerationRuns(
        [GenerationRun(PROMPT, target, None, max_new_tokens=tokens, ignore_eos=True) for _ in range(batch)],
        max_batch=batch,
    )
    assert runs.factory is not None
    if runs.factory.why_not_batched is not None:
        raise SystemExit(runs.factory.why_not_batched)
    begun, first = set[int](), 0.0
    for index, _ in runs:
        begun.add(index)
        if len(begun) == batch:
            first = first or time.process_time()
    return (time.process_time() - first) / (batch * (tokens - 1))


def generate(model: transformers.PreTrainedModel, tokens: int) -> float:
    """Return the CPU seconds per token of `generate`, after the first token."""
    ids = torch.tensor([PROMPT])
    times: list[float] = []

    class Clock(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            times.append(time.process_time())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
        stopping_criteria=transformers.StoppingCriteriaList([Clock()]),
    )  # fmt: skip
    return (times[-1] - times[0]) / (tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=0, help="requests of a batch; 0 for none")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model = random_model()
    target = wrap_target(model, name="random", pack=False)
    decode(target, 4)
    rows = []
    for _ in range(given.rounds):
        own, plain = generate(model, given.tokens), decode(target, given.tokens)
        drafted = scripted(target, given.tokens)
        more = {}
        if given.batch:
            more = {"batch_over_plain": plain / batched(target, given.tokens, given.batch)}
        rows.append(
            {
                **more,
                "generate_ms": own * 1e3,
                "plain_ms": plain * 1e3,
                "plain_over_generate": own / plain,
                "scripted_over_plain": plain / drafted["seconds"],
                "tokens_per_step": drafted["tokens_per_step"],
                "rollback_share": drafted["rollback_share"],
            }
        )
    medians = {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]}
    print(json.dumps({"benchmark": "hybrid", "rounds": given.rounds, "tokens": given.tokens, **medians}))


if __name__ == "__main__":
    main()
