"""Speed on one GPU at the sizes of real models, with random weights and acceptance by a script.

    python benchmarks/gpu.py --out gpu.json            # on one card of the class of an H100: below ten minutes
    python benchmarks/gpu.py --device cpu --tiny       # what a machine without a GPU can try: every side, tiny sizes

Targets: one of 1.5 billion parameters with a drafter of 0.5 billion (the shapes of Qwen2.5), and one of 7 billion with
an EAGLE-3 head, and with the drafter of 0.5 billion. Random models have no text to agree on, so a script decides: it
raises the logit of the next token of a fixed sequence in the target's passes, and in the drafter's that of the same
token 3 times out of 4, else of another one. Passes, verification and roll-back are those of a real decoding; only
acceptance is given.

Sides, which decode the same prompts in turn: `generate` of `transformers` with its dynamic cache, and with its static
cache, which it compiles; plain and speculative decoding (chains of 4) with each kind of cache of specbench: dynamic,
static (replayed as CUDA graphs) and compiled; batches of 8 and 32 requests, plain and speculative, with the dynamic
cache. Tokens per second leave out the first token, those of batches include the prompts. Prints a table and one line
of JSON, with the median milliseconds that a step drafts and verifies. The first round of each side, in which graphs
are captured and forwards compiled, is reported apart and not counted. Compiled and static sides of all targets come
first; the result is written after each target, and parts that `--minutes` leaves no time for are named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import parts  # before torch
import torch
import transformers
from safetensors.torch import save_file

from specbench.backends.torch.batch import BatchedModel
from specbench.backends.torch.graph_forward import COMPILERS
from specbench.backends.torch.head_scorers import HeadBatch
from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import SpecbenchError
from specbench.decoding.protocols import Drafter, ForwardOutput, ForwardRequest
from specbench.generate import GenerationRun
from specbench.generate_many import speculative_generate_many
from specbench.models.drafters import load_drafter, wrap_drafter
from specbench.models.load import wrap_model
from specbench.models.target import Target, wrap_target
from specbench.options import CacheKind
from specbench.policies import FixedLength

GAMMA, RIGHT = 4, 0.75
PLAIN, DRAFTED_BY = "plain", f"γ={GAMMA} with"
PROMPTS, BATCHES = 3, (8, 32)
PHASES: tuple[tuple[CacheKind, ...], ...] = (("compiled", "static"), ("dynamic",))
"""Kinds of cache: what is fast on a GPU is measured for all targets first."""
RAISED = 1e4
"""Far above any logit of a random model, and exact in bfloat16's range."""

_QWEN = {"rope_theta": 1_000_000.0, "max_position_embeddings": 32_768}
SIZES: dict[str, dict[str, Any]] = {
    "7b": {
        "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False, **_QWEN,
    },
    "1.5b": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True, **_QWEN,
    },
    "0.5b": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True, **_QWEN,
    },
    "tiny": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": True, "max_position_embeddings": 1024,
    },
}  # fmt: skip
TARGETS = {"1.5b": ("0.5b",), "7b": ("head", "0.5b")}
"""The drafters of each target."""
DRAFTED = 32_000
"""Tokens that a head drafts; the script's tokens are among them."""


def random_model(
    size: Mapping[str, Any], device: str, dtype: torch.dtype, seed: int
) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**size))
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    found: transformers.PreTrainedModel = model.eval().requires_grad_(False)
    return found


def write_random_head(folder: Path, size: Mapping[str, Any], dtype: torch.dtype, device: str) -> Path:
    """Write an EAGLE-3 head for a target of this size, with random weights."""
    width, inner = size["hidden_size"], size["intermediate_size"]
    each, shared = width // size["num_attention_heads"], size["num_key_value_heads"]
    drafted = min(DRAFTED, size["vocab_size"])
    torch.manual_seed(2)
    shapes = {
        "fc": (width, 3 * width), "lm_head": (drafted, width), "midlayer.self_attn.q_proj": (width, 2 * width),
        "midlayer.self_attn.k_proj": (shared * each, 2 * width),
        "midlayer.self_attn.v_proj": (shared * each, 2 * width),
        "midlayer.self_attn.o_proj": (width, width), "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width), "midlayer.mlp.down_proj": (width, inner),
    }  # fmt: skip
    tensors = {
        f"{name}.weight": (0.02 * torch.randn(shape, dtype=dtype, device=device)).cpu()
        for name, shape in shapes.items()
    }
    norms = ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm")
    tensors |= {f"{name}.weight": torch.ones(width, dtype=dtype) for name in norms}
    tensors["d2t"] = torch.zeros(drafted, dtype=torch.int64)  # it drafts the first tokens
    tensors["t2d"] = torch.arange(size["vocab_size"]) < drafted
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": drafted,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "head_dim": each, **size, "num_hidden_layers": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


class Script:
    """The tokens of all outputs, by place in the context, and what the drafter guesses.

    Args:
        places: How many there are.
        tokens: Tokens to choose from.
        device: Where the logits are.
    """

    def __init__(self, places: int, tokens: int, device: str) -> None:
        choice = Random(1)
        said = [choice.randrange(1, tokens) for _ in range(places)]
        guessed = [token if choice.random() < RIGHT else token % (tokens - 1) + 1 for token in said]
        self.said = torch.tensor(said, device=device)
        self.guessed = torch.tensor(guessed, device=device)

    @contextmanager
    def played(self, target: Target) -> Iterator[None]:
        """Have it decide the passes of a target, and of all its drafters."""
        model = target.language_model.model

        def raised(
            requests: Sequence[ForwardRequest], outputs: Sequence[ForwardOutput]
        ) -> list[ForwardOutput]:
            for request, output in zip(requests, outputs, strict=True):
                rows = len(output.logits)
                first = len(request.context) + len(request.tokens) + 1 - rows
                wanted = self.said if getattr(request.scorer, "model", None) is model else self.guessed
                tokens = wanted[first : first + rows].to(output.logits.device)
                output.logits.scatter_(1, tokens[:, None], RAISED)  # without waiting for the device
            return [*outputs]

        single, batched, heads = Scorer.score, BatchedModel.score, HeadBatch.score

        def score(self: Scorer, request: ForwardRequest) -> ForwardOutput:
            output = single(self, request)
            return output if self.batch is not None else raised([request], [output])[0]

        Scorer.score = score  # type: ignore[method-assign]
        BatchedModel.score = lambda self, requests: raised(requests, batched(self, requests))  # type: ignore[method-assign]
        HeadBatch.score = lambda self, requests: raised(requests, heads(self, requests))  # type: ignore[method-assign]
        try:
            with torch.inference_mode():
                yield
        finally:
            Scorer.score, BatchedModel.score, HeadBatch.score = single, batched, heads  # type: ignore[method-assign]


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class Measured(NamedTuple):
    """One run: tokens per second and step, the median milliseconds of a step for drafting and verifying, and why the
    requests of a batch had passes of their own, if they had.
    """

    tokens_per_second: float
    tokens_per_step: float
    draft_ms: float | None = None
    verify_ms: float | None = None
    why_not_batched: str | None = None


def decode(target: Target, drafter: Drafter | None, prompt: Sequence[int], tokens: int) -> Measured:
    """Decode one prompt; the speed is that after the first token."""
    policy = None if drafter is None else FixedLength(GAMMA)
    run = GenerationRun(prompt, target, drafter, policy=policy, max_new_tokens=tokens, ignore_eos=True)
    first = 0.0
    for _ in run:
        first = first or time.perf_counter()
    took, made = time.perf_counter() - first, run.result()
    times = [step.times for step in made.steps]
    tokens = len(made.token_ids) - 1
    draft, verify = (
        1e3 * statistics.median(each) for each in zip(*((t.draft_s, t.verify_s) for t in times), strict=True)
    )
    return Measured(tokens / took, tokens / len(times), draft, verify)


def decode_many(
    target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]], tokens: int
) -> Measured:
    """Decode prompts together; the speed is that of all of them."""
    began = time.perf_counter()
    runs = speculative_generate_many(
        prompts, target, drafter, gamma=None if drafter is None else GAMMA, max_batch=len(prompts),
        max_new_tokens=tokens, ignore_eos=True,
    )  # fmt: skip
    results = list(runs.results())
    took = time.perf_counter() - began
    made = steps = 0
    for each in results:
        if isinstance(each, Exception):
            raise each
        made, steps = made + len(each.token_ids), steps + len(each.steps)
    why = None if runs.factory is None else runs.factory.why_not_batched
    return Measured(made / took, (made - len(results)) / steps, why_not_batched=why)


def generate(model: Any, prompt: Sequence[int], tokens: int, cache: str | None) -> Measured:
    """Decode one prompt with ``generate``; the speed is that after the first token."""
    ids = torch.tensor([prompt], device=model.device)
    times: list[float] = []

    class Clock(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            synchronize(str(model.device))
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
        cache_implementation=cache, stopping_criteria=transformers.StoppingCriteriaList([Clock()]),
    )  # fmt: skip
    return Measured((tokens - 1) / (times[-1] - times[0]), 1.0)


class Bench:
    """The sides of one target.

    Args:
        name: One of ``TARGETS``.
        given: The command line.
        end: When to stop, on the clock of ``time.monotonic``.
    """

    def __init__(self, name: str, given: argparse.Namespace, end: float) -> None:
        self.name, self.given, self.end = name, given, end
        self.device, self.dtype = given.device, torch.bfloat16 if given.device != "cpu" else torch.float32
        self._model: transformers.PreTrainedModel | None = None
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[str] = []
        choice = Random(0)
        self.size = self.sized(name)
        tokens = min(DRAFTED, self.size["vocab_size"])
        self.prompts = [
            [choice.randrange(1, tokens) for _ in range(given.prompt_tokens)] for _ in range(max(BATCHES))
        ]
        self.script = Script(given.prompt_tokens + given.tokens + 4 * GAMMA, tokens, self.device)

    def sized(self, name: str) -> dict[str, Any]:
        return SIZES["tiny" if self.given.tiny else name]

    def model(self, size: Mapping[str, Any], seed: int) -> transformers.PreTrainedModel:
        return random_model(size, self.device, self.dtype, seed)

    def drafter(self, name: str, target: Target, cache: CacheKind) -> Drafter:
        if name != "head":  # without a tokenizer to compare, both have as many tokens
            size = {**self.sized(name), "vocab_size": self.size["vocab_size"]}
            small = wrap_model(self.model(size, 1), None, "drafter")
            return wrap_drafter(small, target, cache=cache)
        with tempfile.TemporaryDirectory() as folder:
            head = write_random_head(Path(folder), self.size, self.dtype, self.device)
            return load_drafter(str(head), target)

    def run(self, caches: Sequence[CacheKind]) -> None:
        """Measure the sides with these kinds of cache; with the dynamic one batches too."""
        self._model = self._model or self.model(self.size, 0)
        for cache in caches:
            if cache in ("static", "dynamic"):
                kind = "static" if cache == "static" else None
                self.measure(
                    f"transformers generate, {cache} cache", 1, partial(self.theirs, self._model, kind)
                )
            if cache == "compiled" and torch.device(self.device).type not in COMPILERS:
                self.skipped.append("compiled passes (a CPU has native ones instead)")
                continue
            target = wrap_target(self._model, name="target", cache=cache, pack=False)
            with self.script.played(target):
                sides = {PLAIN: None, **{f"{DRAFTED_BY} {each}": each for each in TARGETS[self.name]}}
                for side, drafted in sides.items():
                    if time.monotonic() > self.end:
                        self.skipped.append(f"{side}, {cache} cache (no time left)")
                        continue
                    try:
                        drafter = None if drafted is None else self.drafter(drafted, target, cache)
                    except (SpecbenchError, RuntimeError) as error:
                        self.skipped.append(f"{side}, {cache} cache ({first_line(error)})")
                        continue
                    self.measure(f"{side}, {cache} cache", 1, partial(self.single, target, drafter))
                    for batch in BATCHES if cache == "dynamic" else ():
                        self.measure(f"{side}, batch {batch}", batch, partial(self.many, target, drafter))

    def theirs(self, model: Any, cache: str | None, prompts: Sequence[Sequence[int]]) -> Measured:
        return generate(model, prompts[0], self.given.tokens, cache)

    def single(self, target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]]) -> Measured:
        return decode(target, drafter, prompts[0], self.given.tokens)

    def many(self, target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]]) -> Measured:
        return decode_many(target, drafter, prompts, self.given.tokens)

    def measure(self, side: str, batch: int, once: Callable[[Sequence[Sequence[int]]], Measured]) -> None:
        """Measure a side in some rounds, after one that is not counted."""
        if time.monotonic() > self.end:
            self.skipped.append(f"{side} (no time left)")
            return
        began = time.perf_counter()
        try:
            once(self.prompts[:batch])
            first_s = time.perf_counter() - began
            taken = [once((2 * self.prompts)[i : i + batch]) for i in range(1, self.given.rounds + 1)]
        except (SpecbenchError, RuntimeError, ValueError) as error:
            self.skipped.append(f"{side} ({first_line(error)})")
            return
        speeds = [each.tokens_per_second for each in taken]
        row = {
            "target": self.name, "side": side, "batch": batch, "first_s": round(first_s, 2),
            "tokens_per_second": round(statistics.median(speeds), 2), "slowest": round(min(speeds), 2),
            "fastest": round(max(speeds), 2),
        }  # fmt: skip
        for name in ("tokens_per_step", "draft_ms", "verify_ms"):
            known = [value for each in taken if (value := getattr(each, name)) is not None]
            row |= {name: round(statistics.median(known), 3)} if known else {}
        if taken[0].why_not_batched is not None:
            row["why_not_batched"] = taken[0].why_not_batched
        self.rows.append(row)
        print(
            f"{self.name:5} {side:40} {row['tokens_per_second']:10.1f} tokens/s, first {first_s:.1f} s",
            flush=True,
        )


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return, of one target, our best over the best ``generate``, and speculative over plain by cache and batch."""
    speeds = {row["side"]: row["tokens_per_second"] for row in rows}
    theirs = [speed for side, speed in speeds.items() if side.startswith("transformers")]
    found = {}
    for kind in dict.fromkeys(
        side.partition(",")[0] for side in speeds if not side.startswith("transformers")
    ):
        ours = [speed for side, speed in speeds.items() if side.startswith(f"{kind},") and "cache" in side]
        if ours and theirs:
            found[f"best {kind} / best generate"] = round(max(ours) / max(theirs), 3)
    for side, speed in speeds.items():
        kind, _, where = side.partition(", ")
        plain = speeds.get(f"{PLAIN}, {where}")
        if plain and kind.startswith(DRAFTED_BY):
            found[f"{side} / {PLAIN}"] = round(speed / plain, 3)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = parts.parser(__doc__)
    parser.add_argument("--target", choices=[*TARGETS], nargs="+", default=[*TARGETS])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tiny", action="store_true", help="tiny models: a dry run")
    parser.add_argument("--out", type=Path, help="file for the result")
    given = parser.parse_args(arguments)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print(
            "This machine has no GPU that torch sees; a dry run takes --device cpu --tiny.", file=sys.stderr
        )
        return 1
    transformers.logging.set_verbosity_error()
    end = time.monotonic() + 60 * given.minutes
    result: dict[str, Any] = {
        "benchmark": "gpu", "devices": [torch.cuda.get_device_name(0)] if given.device != "cpu" else ["cpu"],
        "torch": torch.__version__, "transformers": transformers.__version__, "tokens": given.tokens,
        "prompt_tokens": given.prompt_tokens, "gamma": GAMMA, "right": RIGHT, "tiny": given.tiny,
        "sides": [], "ratios": {}, "skipped": {},
    }  # fmt: skip
    benches = [Bench(name, given, end) for name in given.target]
    line = ""
    for caches in PHASES:
        for bench in benches:
            bench.run(caches)
            result["sides"] = [row for each in benches for row in each.rows]
            result["ratios"] = {each.name: ratios(each.rows) for each in benches}
            result["skipped"] = {each.name: each.skipped for each in benches}
            line = json.dumps(result, ensure_ascii=False)
            if given.out is not None:  # what is measured is kept if time runs out
                given.out.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
