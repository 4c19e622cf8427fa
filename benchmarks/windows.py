"""Greedy parity in float32 of a model with sliding windows, for contexts around and beyond its window.

    python benchmarks/windows.py gemma-3-270m-q4_k_m.gguf
    python benchmarks/windows.py FILE.gguf --tokens 48 --text docs/design.md

Prompts that end before the window, so that decoding crosses it, and prompts beyond it are decoded with the native pass:
plainly, with guesses that are right 3 times out of 4 (γ 1, 4, 7), with lookup, with the model's int8 copy, and as a
batch. Counts the tokens that are not those of `generate` of `transformers`, whose model is read from the file anew.
Prints one line of JSON; exit code 1 if a token is wrong or the pass is not native.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import architectures as survey
import torch
import transformers

from specbench.backends.torch.forward import NativeForward
from specbench.generate import GenerationRun
from specbench.generate_many import speculative_generate_many
from specbench.models.drafters import load_drafter
from specbench.models.target import Target, load_target
from specbench.options import LoadOptions
from specbench.policies import FixedLength

BESIDE_WINDOW = (-16, 3, 60)
"""Lengths of prompts, relative to the window."""


def answer(model: Any, ids: list[int], tokens: int) -> list[int]:
    """Return the greedy output of `generate`."""
    batch = torch.tensor([ids])
    settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=tokens, pad_token_id=0)
    with torch.inference_mode():
        output = model.generate(batch, attention_mask=torch.ones_like(batch), generation_config=settings)
    found: list[int] = output[0, len(ids) :].tolist()
    return found


def wrong(found: list[int], expected: list[int]) -> int:
    """Return how many tokens differ from the first difference on."""
    same = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
    return abs(len(found) - len(expected)) if same is None else len(expected) - same


def decode(target: Target, ids: list[int], drafter: Any, gamma: int, tokens: int) -> tuple[list[int], int]:
    """Return the output, and how many drafts were accepted."""
    policy = FixedLength(gamma)
    run = GenerationRun(ids, target, drafter, policy=policy, max_new_tokens=tokens, ignore_eos=True)
    accepted = sum(getattr(record, "accepted", 0) for record in run)
    return list(run.result().token_ids), accepted


def examine(path: Path, text: str, tokens: int) -> dict[str, Any]:
    """Return the counts."""
    target = load_target(str(path), LoadOptions(dtype="float32"))
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,  # as the converted copy
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    reference = reference.float().eval()
    reference.generation_config = transformers.GenerationConfig()
    window = reference.config.get_text_config().sliding_window
    assert target.language_model.tokenizer is not None
    ids = target.language_model.tokenizer(text, add_special_tokens=False)["input_ids"]
    prompts = [ids[: window + beside] for beside in BESIDE_WINDOW]
    expected = [answer(reference, prompt, tokens) for prompt in prompts]
    del reference
    rows, accepted = [], 0
    for prompt, right in zip(prompts, expected, strict=True):
        drafters: list[tuple[str, Any, int]] = [
            ("none", None, 1),
            *((f"guesses γ={g}", survey.Guesses(prompt, right, g), g) for g in (1, 4, 7)),
            ("lookup", load_drafter("lookup", target), 4),
            ("self:int8", load_drafter("self:int8", target), 4),
        ]
        for name, drafter, gamma in drafters:
            found, kept = decode(target, prompt, drafter, gamma, tokens)
            accepted += kept
            rows.append((len(prompt), name, wrong(found, right)))
            print(f"{len(prompt)} tokens, {name}: {rows[-1][2]} of {tokens} wrong", flush=True)
    together = speculative_generate_many(
        prompts, target, "lookup", max_batch=len(prompts), max_new_tokens=tokens, ignore_eos=True
    )
    for prompt, right, output in zip(prompts, expected, together.results(), strict=True):
        rows.append((len(prompt), "batch", wrong(list(output.token_ids), right)))
    return {
        "benchmark": "windows",
        "model": path.name,
        "forward": type(target.scorer.forward).__name__,
        "native": isinstance(target.scorer.forward, NativeForward),
        "window": window,
        "prompts": [len(prompt) for prompt in prompts],
        "outputs": len(rows),
        "tokens": tokens * len(rows),
        "accepted": accepted,
        "wrong": sum(count for *_, count in rows),
        "wrong_outputs": [f"{length} tokens, {name}" for length, name, count in rows if count],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--tokens", type=int, default=48, help="of each output")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "docs" / "design.md")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = examine(given.model, given.text.read_text(encoding="utf-8"), given.tokens)
    print(json.dumps(found))
    return 0 if found["native"] and not found["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
