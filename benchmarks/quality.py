"""Measure what cheaper copies of a model lose, by their distributions on the original's own answers.

    python benchmarks/quality.py                                     # the built-in model, 12 prompts × 64 tokens
    python benchmarks/quality.py --model FOLDER --form int8 --form int4

The original decodes every prompt greedily in float32, and every copy then reads prompt and answer. Per position of
the answer: KL divergence KL(original || copy) in nats, mean and 99th percentile, and the share of positions with the
same top token (greedy agreement), each as a mean over prompts with a 95% interval. Copies: bfloat16, int8 and int4 as
of --dtype; drafter-int8, a drafter's form on a CPU (the same as int8 with native products); and int4-shifted, weights
only, in groups that begin 16 inputs later.

A model made of a 4-bit file (everything converted from GGUF, the built-in one too) loses less than one trained in its
dtype: groups of 32 inputs match the blocks of such a file, which int4 reproduces. Those of int4-shifted do not, and
show the loss for weights that never were in 4 bits. Prints one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import parts  # noqa: F401 - before torch
import torch
from limits import DRAFTER, load_form
from torch import nn
from transformers import PreTrainedModel

from specbench.backends.torch.kernels.linear import fake_quantize_int4
from specbench.backends.torch.scorer import Scorer
from specbench.bench.prompts import load_prompts
from specbench.cli.options import DEFAULT_TARGET
from specbench.generate import autoregressive_generate, encode_prompt
from specbench.models.load import load_model
from specbench.models.target import load_target
from specbench.options import LoadOptions
from specbench.results.stats import mean_interval

SHIFTED, SHIFT = "int4-shifted", 16
FORMS = ("bfloat16", "int8", "int4", DRAFTER, SHIFTED)
CHUNK = 32
"""Tokens of an answer in a pass: as in verification, and not more logits at a time than that takes."""


def load_copy(name: str, form: str) -> PreTrainedModel:
    """Load a model in a form."""
    if form != SHIFTED:
        return load_form(name, form)
    model = load_model(name, LoadOptions(dtype="float32", device="cpu"), tokenizer=False).model
    for module in model.modules():
        if isinstance(module, nn.Linear):
            shifted = fake_quantize_int4(module.weight.detach().roll(-SHIFT, 1)).roll(SHIFT, 1)
            module.weight = nn.Parameter(shifted, requires_grad=False)
    return model


def answer_rows(scorer: Scorer, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Return the logits at each position of an answer, [tokens, vocabulary], read in narrow passes."""
    scorer.begin()
    found, known = [], list(prompt)
    for first in range(0, len(answer), CHUNK):
        part = list(answer[first : first + CHUNK])
        # A pass gives one row more than it reads drafts: the last draft's own place is the next pass's first row.
        found.append(scorer.logits(known, part[:-1]).float().clone())
        known += part
        scorer.rollback(len(known) - 1)
    return torch.cat(found)


def differences(original: torch.Tensor, copy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By row of two [rows, vocabulary] logits: KL(original || copy) in nats, and whether the best tokens agree."""
    width = min(original.shape[1], copy.shape[1])
    p, q = (each[:, :width].double().log_softmax(dim=-1) for each in (original, copy))
    return (p.exp() * (p - q)).sum(dim=-1).clamp_min(0.0), p.argmax(dim=-1) == q.argmax(dim=-1)


def with_interval(values: Sequence[float]) -> list[float | None]:
    """Return the mean over prompts and the ends of its 95% interval."""
    low, high = mean_interval(values) or (None, None)
    return [statistics.mean(values), low, high]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Read all answers with the original and with every copy."""
    target = load_target(given.model, LoadOptions(dtype="float32", device="cpu"))
    assert target.tokenizer is not None
    texts = []
    for prompt in load_prompts(given.prompts, limit=given.limit):
        ids = encode_prompt(target.tokenizer, prompt.turns[0], system=prompt.system)
        limit = target.scorer.context_limit
        if limit is not None and len(ids) + given.tokens > limit:
            continue
        made = autoregressive_generate(
            ids, target, max_new_tokens=given.tokens, ignore_eos=True, model_defaults=False
        )
        texts.append((ids, list(made.token_ids)))
    originals = [answer_rows(target.scorer, ids, answer) for ids, answer in texts]
    name = target.name
    del target
    rows = []
    for form in given.form:
        scorer = Scorer(load_copy(given.model, form))
        compared = [
            differences(original, answer_rows(scorer, ids, answer))
            for original, (ids, answer) in zip(originals, texts, strict=True)
        ]
        everywhere = torch.cat([kl for kl, _ in compared])
        rows.append(
            {
                "form": form,
                "places": len(everywhere),
                "kl": with_interval([float(kl.mean()) for kl, _ in compared]),
                "kl_99": float(everywhere.quantile(0.99)),
                "agreement": with_interval([float(same.double().mean()) for _, same in compared]),
            }
        )
        del scorer
    return {
        "benchmark": "quality",
        "model": Path(name).name,
        "prompts": len(texts),
        "tokens": given.tokens,
        "rows": rows,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_TARGET)
    parser.add_argument("--form", action="append", choices=FORMS, help="repeatable; all of them")
    parser.add_argument("--prompts", nargs="+", default=["all"], help="sets or files")
    parser.add_argument("--limit", type=int, default=12, help="prompts, of which those are taken that fit")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    given = parser.parse_args(arguments)
    given.form = given.form or list(FORMS)
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    result = measure(parse(arguments))
    print(f"{'':14} {'KL, nats':>28} {'99%':>9} {'greedy agreement':>24}")
    for row in result["rows"]:
        print(
            f"{row['form']:14} {_interval(row['kl'], 5):>28} {row['kl_99']:9.4f} {_interval(row['agreement'], 4):>24}"
        )
    print(json.dumps(result))
    return 0


def _interval(values: Sequence[float | None], digits: int) -> str:
    value, low, high = values
    ends = "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return f"{value:.{digits}f}{ends}"


if __name__ == "__main__":
    sys.exit(main())
