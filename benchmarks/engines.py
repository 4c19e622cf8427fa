"""Compare what specbench exports with what the engine does: its text, and the tokens that it accepts.

    python benchmarks/engines.py --engine llama.cpp --engine-command "python benchmarks/llama_server.py" \\
        --target TARGET.gguf --drafter ngram-simple --drafter SMALL.gguf
    python benchmarks/engines.py --engine vllm --target FOLDER --drafter ngram --drafter HEAD -- --dtype float32

For each drafter a server of the engine is started with the exported options, and answers prompts greedily. specbench
decodes the same prompts with the same drafter and a fixed γ. Reported are, for each drafter: the share of answers that
are those of the engine's own plain decoding; the mean share of an answer's characters before it differs from
specbench's (another engine rounds otherwise, so greedy answers part sooner or later); tokens per step in both; their
ratio with its 95% interval over prompts; and acceptance by position.

Goal for each drafter: the server drafts, and the ratio is within 3% of 1 or its interval holds 1. Prints a line of JSON
at the end; exit code 1 if the goal is missed. A drafter that copies another match than specbench's (the notes of
`specbench export` name it) can miss it.

vLLM and SGLang draft beyond the last token that was asked for, and count what they accept there. So does specbench
here, next to them; otherwise their tokens per step seem higher by 2 to 3%.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench.bench.engines.launched import LaunchedEngine
from specbench.bench.grid import SweepOptions
from specbench.bench.prompts import Prompt, load_prompts
from specbench.cli.started import commands_of, engine_configs, engine_drafters, engine_target, started_engine
from specbench.decoding.records import Step
from specbench.export.start import PLAIN, EngineDrafter, StartedEngine, settings_of
from specbench.generate import GenerationRun, encode_messages
from specbench.models.drafters import load_drafter
from specbench.models.target import Target, load_target
from specbench.options import DecodingOptions, LoadOptions
from specbench.policies import build_policy
from specbench.results import stats
from specbench.specs.drafters import parse_drafter
from specbench.specs.policies import parse_policy

WITHIN = 0.03
"""Difference of tokens per step that is none."""

DRAFT_BEYOND = ("vllm", "sglang")
"""Engines that draft beyond the last token that was asked for."""


@dataclass
class Measured:
    """An answer: its text, its tokens, and how many draft tokens were accepted at each position."""

    text: str
    tokens: int
    kept_at: list[int]

    @property
    def steps(self) -> int:
        """The number of steps that accepted tokens and those of the answer imply; engines do not count it."""
        return max(1, self.tokens - 1 - sum(self.kept_at))

    @property
    def tokens_per_step(self) -> float:
        return (self.tokens - 1) / self.steps


def ours(
    target: Target,
    drafter: EngineDrafter,
    own: str,
    prompts: Sequence[Prompt],
    gamma: int,
    new: int,
    *,
    beyond: bool,
) -> list[Measured]:
    """Decode the prompts with specbench; ``beyond`` completes the step that emits the last of the ``new`` tokens."""
    spec = parse_drafter(own) if isinstance(drafter.spec, str) else drafter.spec
    options = LoadOptions(dtype="float32", any_target=True)
    loaded = load_drafter(spec, target, options)
    found = []
    for prompt in prompts:
        ids = encode_messages(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
        policy = build_policy(parse_policy(f"fixed:gamma={gamma}"))
        most = new + (gamma + 1 if beyond else 0)
        run = GenerationRun(ids, target, loaded, policy=policy, max_new_tokens=most, ignore_eos=True)
        records = [record for record in run if isinstance(record, Step)]
        steps = [step for step in records if step.position < len(ids) + new]
        kept = [sum(step.accepted > at for step in steps) for at in range(gamma)]
        text = target.tokenizer.decode(run.result().token_ids[:new], skip_special_tokens=True)
        found.append(Measured(text, new, kept))
    return found


def compare(
    engine: StartedEngine,
    name: str,
    mine: Sequence[Measured],
    there: Sequence[Measured],
    plain: Sequence[Measured],
) -> dict[str, object]:
    """Return the figures of one drafter, and whether they are as they should be."""
    ratio = stats.geometric_mean(
        [b.tokens_per_step / a.tokens_per_step for a, b in zip(mine, there, strict=True)],
        range(len(mine)),
        [0] * len(mine),
    )
    holds = ratio.low is not None and ratio.high is not None and ratio.low <= 1.0 <= ratio.high
    return {
        "engine": engine.name,
        "drafter": name,
        "as_its_plain": round(
            sum(a.text == b.text for a, b in zip(there, plain, strict=True)) / len(there), 3
        ),
        "text_in_common": round(
            sum(_common(a.text, b.text) for a, b in zip(mine, there, strict=True)) / len(there), 3
        ),
        "tokens_per_step": [round(_tokens_per_step(each), 3) for each in (mine, there)],
        "ratio": [None if each is None else round(each, 3) for each in (ratio.value, ratio.low, ratio.high)],
        "acceptance": [[round(rate, 3) for rate in _rates(each)] for each in (mine, there)],
        "right": any(sum(each.kept_at) for each in there) and (abs(ratio.value - 1.0) <= WITHIN or holds),
    }


def _common(a: str, b: str) -> float:
    same = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same / max(1, len(a), len(b))


def _tokens_per_step(measured: Sequence[Measured]) -> float:
    return sum(each.tokens - 1 for each in measured) / sum(each.steps for each in measured)


def _rates(measured: Sequence[Measured]) -> list[float]:
    """Return accepted tokens per step at each position."""
    steps = sum(each.steps for each in measured)
    longest = max(len(each.kept_at) for each in measured)
    return [
        sum(each.kept_at[at] for each in measured if at < len(each.kept_at)) / steps for at in range(longest)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", required=True, choices=("vllm", "sglang", "llama.cpp"))
    parser.add_argument("--engine-command", default="")
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", action="append", required=True)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("-n", "--new", type=int, default=48)
    parser.add_argument("--dtype", default="float32", help="of the target in specbench")
    parser.add_argument("more", nargs="*", help="options of the engine, after --")
    asked = parser.parse_args(arguments)
    engine = started_engine(asked.engine)
    model = engine_target(engine, asked.target, elsewhere=False)
    drafters = engine_drafters(engine, asked.drafter, usual=False, elsewhere=False)
    settings = settings_of(
        engine, model, drafters, gammas=(asked.gamma,), policies=[parse_policy("fixed")], trees=False
    )
    prompts = load_prompts(("all",), (), asked.limit)
    decoding = DecodingOptions(max_new_tokens=asked.new, ignore_eos=True)
    target = load_target(asked.target, LoadOptions(dtype=asked.dtype, device="cpu"))
    base = SweepOptions(gammas=(), decoding=decoding, turns=1, servers=tuple(each.name for each in settings))
    there: dict[str, list[Measured]] = {}
    with tempfile.TemporaryDirectory() as logs:
        commands = commands_of(engine, model, settings, asked.more, asked.engine_command)
        launched = LaunchedEngine(commands, Path(logs), limit=1, decoding=decoding)
        try:
            for config in engine_configs(base, settings):
                there[config.drafter] = answers = []
                for prompt in prompts:
                    bare = Prompt(id=prompt.id, category="", turns=prompt.turns)
                    outcome = launched.generate(config, launched.encode(bare, []), decoding, seed=0)
                    assert outcome.server is not None
                    answers.append(
                        Measured(outcome.server.text, outcome.tokens, outcome.server.kept_at or [0])
                    )
        finally:
            for left in launched.close():
                print(left)
    found = []
    for drafter, setting in zip(drafters, settings[1:], strict=True):
        own = engine.ngrams.get(str(drafter.spec), "")
        same = own if isinstance(own, str) else "lookup:n=4,min=4"  # the nearest of specbench's own
        beyond = asked.engine in DRAFT_BEYOND
        mine = ours(target, drafter, same, prompts, asked.gamma, asked.new, beyond=beyond)
        found.append(compare(engine, setting.name, mine, there[setting.name], there[PLAIN]))
        print(json.dumps(found[-1]))
    print(json.dumps({"drafters": len(found), "right": sum(bool(each["right"]) for each in found)}))
    return 0 if all(each["right"] for each in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
