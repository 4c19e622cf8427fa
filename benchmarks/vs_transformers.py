"""Compare specbench with `transformers`' own decoding: same models, prompts and number of tokens, in turn.

    python benchmarks/vs_transformers.py --setting lookup@5 --setting self:int8@5         # the built-in model
    python benchmarks/vs_transformers.py --target FOLDER --assistant SMALL --setting SMALL@5 --setting self:int8@auto

For every prompt, in random order: `generate`; assisted generation with --assistant, with its defaults and with 5
tokens in every step and no threshold; prompt lookup; specbench plain, with its defaults and with every --setting,
written DRAFTER@γ or DRAFTER@POLICY. All greedy with a fixed length. Times are of the whole call with the prompt; decode
speeds are given too. Outputs are compared with those of `generate`: identical, different after a numerical tie, or
different. With --dtype int8 or int4 `generate` decodes the stored weights, and outputs are compared with specbench's
plain ones. Ratios are geometric means over prompts with 95% intervals, over `generate` and the best assisted setting.
Prints one line of JSON at the end; exit code 1 if an output (not of `transformers` with int8 and int4) differs beyond a
tie.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import parts
import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from specbench.backends.torch.parity import find_difference
from specbench.base.progress import quiet_transformers
from specbench.bench.environment import describe_environment
from specbench.bench.prompts import load_prompts
from specbench.cli.options import DEFAULT_TARGET
from specbench.decoding.metrics import time_split
from specbench.decoding.sampling import Sampling
from specbench.generate import GenerationRun, encode_prompt
from specbench.models.default import default_drafter
from specbench.models.drafters import load_drafter
from specbench.models.load import load_model
from specbench.models.target import Target, load_target
from specbench.options import LoadOptions, ModelOptions, quantized
from specbench.policies import build_policy
from specbench.recipe import Recipe
from specbench.results import stats
from specbench.results.stats import ratio_text
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import parse_model
from specbench.specs.policies import parse_policy

GENERATE, ASSISTED, ASSISTED_5, LOOKUP = (
    "generate", "assisted, defaults", "assisted, 5 and no threshold", "prompt lookup",
)  # fmt: skip
CONSTANT_5 = {
    "num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0,
}  # fmt: skip
OURS = "specbench"
PLAIN = f"{OURS} plain"
RATIOS = ("over_generate", "decode_over_generate", "over_best_assisted")
WARMUP_TOKENS = 12


class Taken(NamedTuple):
    """An answer.

    Attributes:
        tokens: Of the output.
        seconds: Of the whole call.
        decode_s: After the first emission.
        first: Tokens of the first emission.
    """

    tokens: list[int]
    seconds: float
    decode_s: float
    first: int


Way = Callable[[list[int], int], Taken]
"""Decodes a prompt: token ids, and how many tokens to add."""


# --- The ways -------------------------------------------------------------------------------------


class _Watch(StoppingCriteria):
    """Never stops; ``generate`` calls it after every emission, and it notes the time."""

    def __init__(self) -> None:
        self.first_at = self.last_at = 0.0
        self.first_length = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:  # noqa: ARG002
        self.last_at = time.perf_counter()
        if not self.first_length:
            self.first_at, self.first_length = self.last_at, input_ids.shape[1]
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def transformers_way(
    model: PreTrainedModel,
    pad: int,
    assistant: PreTrainedModel | None = None,
    assistant_settings: Mapping[str, Any] | None = None,
    **extra: Any,
) -> Way:
    """Return `generate`, with an assistant if given, whose settings are reset for every call, since it adapts them."""

    def run(prompt: list[int], count: int) -> Taken:
        # What a call leaves unset would come from the model's own file.
        model.generation_config = GenerationConfig()
        if assistant is not None:
            assistant.generation_config = GenerationConfig(**(assistant_settings or {}))
        settings = GenerationConfig(
            do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=pad
        )
        ids = torch.tensor([prompt])
        watch = _Watch()
        given = dict(extra) if assistant is None else {**extra, "assistant_model": assistant}
        began = time.perf_counter()
        output = model.generate(  # type: ignore[operator]
            inputs=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            stopping_criteria=StoppingCriteriaList([watch]),
            **given,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        ended = time.perf_counter()
        return Taken(tokens, ended - began, watch.last_at - watch.first_at, watch.first_length - len(prompt))

    return run


def specbench_way(target: Target, drafter: str, rule: str, options: LoadOptions) -> tuple[str, Way]:
    """Return specbench with a drafter and a draft policy, and its name."""
    loaded_drafter = load_drafter(drafter, target, options)
    policy = build_policy(f"fixed:gamma={rule}" if rule.isdecimal() else rule)

    def run(prompt: list[int], count: int) -> Taken:
        began = time.perf_counter()
        run = GenerationRun(
            prompt,
            target,
            loaded_drafter,
            policy=policy,
            max_new_tokens=count,
            ignore_eos=True,
            model_defaults=False,
        )
        for _ in run:
            pass
        ended = time.perf_counter()
        result = run.result()
        _, times = time_split(result.prefill, result.steps)
        return Taken(list(result.token_ids), ended - began, times.total_s, 1)

    return f"{OURS} {loaded_drafter.traits.name}@{rule}", run


def load_ways(given: argparse.Namespace) -> tuple[dict[str, Way], Target]:
    """Load everything to be timed, by name, and the target that judges outputs."""
    options = LoadOptions(dtype=given.dtype, device="cpu")
    target = load_target(given.target, options)
    model = load_model(given.target, options, tokenizer=False)
    pad = next(iter(model.end_ids), 0)
    ways = {GENERATE: transformers_way(model.model, pad)}
    if given.assistant is not None:
        assistant = load_model(given.assistant, LoadOptions(device="cpu"), tokenizer=False).model
        ways[ASSISTED] = transformers_way(model.model, pad, assistant)
        ways[ASSISTED_5] = transformers_way(model.model, pad, assistant, CONSTANT_5)
    ways[LOOKUP] = transformers_way(model.model, pad, prompt_lookup_num_tokens=10)
    _, ways[PLAIN] = specbench_way(target, "none", "1", options)
    drafter_options = LoadOptions(dtype=given.drafter_dtype)  # a head goes where its target is
    models = ModelOptions(dtype=given.dtype, device="cpu")
    usual = default_drafter(Recipe(parse_model(given.target), models=models))
    for setting in dict.fromkeys([f"{usual}@auto", *given.setting]):
        drafter, _, rule = setting.rpartition("@")
        name, way = specbench_way(target, drafter, rule, drafter_options)
        ways[name] = way
    return ways, target


# --- Measuring ------------------------------------------------------------------------------------


def measure(
    ways: Mapping[str, Way], target: Target, prompt: list[int], tokens: int, place: str
) -> dict[str, dict[str, Any]]:
    """Decode one prompt in all ways, in an order that ``place`` fixes.

    Returns:
        By name: ``seconds``, ``tokens``, ``decode_s`` and ``decoded`` (tokens after the first emission),
        ``agreement`` with `generate`, or with plain decoding of a rounded target ("identical", "tie" or "differs"), and
        the place of the first difference.
    """
    order = list(ways)
    random.Random(place).shuffle(order)
    taken = {}
    for name in order:
        with quiet_transformers():
            taken[name] = ways[name](prompt, tokens)
    expected = taken[GENERATE if target.quantization is None else PLAIN].tokens
    rows = {}
    for name, mine in taken.items():
        difference = find_difference(target.scorer, prompt, mine.tokens, expected, Sampling())
        agreement = "identical" if difference is None else "tie" if difference.numerical_tie else "differs"
        rows[name] = {
            "seconds": mine.seconds,
            "tokens": len(mine.tokens),
            "decode_s": mine.decode_s,
            "decoded": len(mine.tokens) - mine.first,
            "agreement": agreement,
            "position": None if difference is None else difference.position,
        }
    return rows


def summary(done: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per way, in the order of loading."""
    names = list(done[0]["names"])
    prompts, repeats = ([part[what] for part in done] for what in ("prompt", "repeat"))

    def speeds(name: str, tokens: str, seconds: str) -> list[float]:
        rows = [part["rows"][name] for part in done]
        return [row[tokens] / row[seconds] if row[seconds] > 0 else math.nan for row in rows]

    total = {name: speeds(name, "tokens", "seconds") for name in names}
    decode = {name: speeds(name, "decoded", "decode_s") for name in names}

    def over(speed: Mapping[str, list[float]], name: str, base: str) -> stats.Estimate:
        ratios = [mine / other for mine, other in zip(speed[name], speed[base], strict=True)]
        return stats.geometric_mean(ratios, prompts, repeats)

    def fastest(some: list[str]) -> str | None:
        return max(some, key=lambda name: over(total, name, GENERATE).value, default=None)

    assisted = fastest([name for name in names if name.startswith((ASSISTED, ASSISTED_5))])
    lines = []
    for name in names:
        agreements = [part["rows"][name]["agreement"] for part in done]
        lines.append(
            {
                "name": name,
                "tokens_per_second": stats.geometric_mean(total[name], prompts, repeats),
                "over_generate": over(total, name, GENERATE),
                "decode_tokens_per_second": stats.geometric_mean(decode[name], prompts, repeats),
                "decode_over_generate": over(decode, name, GENERATE),
                "over_best_assisted": None if assisted is None else over(total, name, assisted),
                **{kind: agreements.count(kind) for kind in ("identical", "tie", "differs")},
            }
        )
    return lines


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print the table."""
    width = max(len(line["name"]) for line in lines)
    print(f"\n{'':{width}} {'tokens/s':>9} {'over generate':>20} {'after the first':>20} {'over assisted':>20}"
          "  identical/tie/differs")  # fmt: skip
    for line in lines:
        ratios = [line[name] for name in RATIOS]
        texts = ["" if ratio is None else ratio_text(ratio, "") for ratio in ratios]
        print(
            f"{line['name']:{width}} {line['tokens_per_second'].value:9.2f} "
            + " ".join(f"{text:>20}" for text in texts)
            + f"  {line['identical']}/{line['tie']}/{line['differs']}"
        )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parts.parser(__doc__)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--assistant", help="a small model, for assisted generation")
    parser.add_argument("--setting", action="append", default=[], metavar="DRAFTER@RULE",
                        help="of specbench, repeatable: lookup@5, self:int8@auto, FOLDER@egag:max=8")  # fmt: skip
    parser.add_argument("--dtype", default="auto", help="of the target, here and there")
    parser.add_argument("--drafter-dtype", default="auto", help="of specbench's drafter models; auto is int8")
    parser.add_argument("--prompts", nargs="+", default=["all"], help="sets or files")
    parser.add_argument("--limit", type=int, default=12, help="prompts, in turn from the categories")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=1)
    given = parser.parse_args(arguments)
    for setting in given.setting:
        drafter, _, rule = setting.rpartition("@")
        if not drafter:
            parser.error(f"{setting!r} is no setting: write DRAFTER@γ or DRAFTER@RULE")
        if not rule.isdecimal():
            Recipe(parse_model(given.target), parse_drafter(drafter), parse_policy(rule)).check()
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    given = parse(arguments)
    done = decode_all(given)
    lines = summary(done)
    show(lines)
    result = {
        "benchmark": "vs_transformers",
        # By name: a path is nobody else's business.
        **{name: _without_folders(value) for name, value in vars(given).items()},
        **{name: metadata.version(name) for name in ("torch", "transformers")},
        "cpu": describe_environment().cpu,
        "threads": torch.get_num_threads(),
        "rows": [{key: plain(value) for key, value in line.items()} for line in lines],
    }
    print(json.dumps(result))
    exact = quantized(given.dtype) is None
    return int(any(line["differs"] for line in lines if line["name"].startswith(OURS) or exact))


def decode_all(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode every prompt in every way; return a part for each prompt and repeat."""
    prompts, (ways, target) = load_prompts(given.prompts, limit=given.limit), load_ways(given)
    assert target.tokenizer is not None
    encoded = {p.id: encode_prompt(target.tokenizer, p.turns[0], system=p.system) for p in prompts}
    for way in ways.values():
        with quiet_transformers():
            way(next(iter(encoded.values())), WARMUP_TOKENS)
    done = []
    for repeat in range(given.repeats):
        for name, prompt in encoded.items():
            rows = measure(ways, target, prompt, given.tokens, f"0/{name}/{repeat}")
            done.append({"prompt": name, "repeat": repeat, "names": list(ways), "rows": rows})
            speeds = ", ".join(f"{way} {rows[way]['tokens'] / rows[way]['seconds']:.1f}" for way in ways)
            print(f"{len(done):3} {name}: {speeds} tokens/s", flush=True)
    return done


def plain(value: Any) -> Any:
    """Return an estimate as [value, low, high]."""
    if isinstance(value, stats.Estimate):
        ends = (value.value, value.low, value.high)
        return [None if end is None or not math.isfinite(end) else round(end, 4) for end in ends]
    return value


def _without_folders(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    return Path(value).name if isinstance(value, str) and value.startswith((".", "/", "~")) else value


if __name__ == "__main__":
    sys.exit(main())
