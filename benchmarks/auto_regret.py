"""Hold `auto` against every fixed γ, generation by generation in turn, quiet or next to a busy core.

    python benchmarks/auto_regret.py --busy          # the built-in model, its default drafter, 12 prompts × 96 tokens
    python benchmarks/auto_regret.py --busy --drafter self:int8 --resume int8.jsonl --minutes 8     # in parts

Every round decodes one prompt with `auto`, every fixed γ and without drafts, in an order of its own, so that whatever
else the machine does falls on all alike. With --busy another process keeps a core busy throughout. Prints tokens per
second over plain decoding, and `auto` over each γ, prompt by prompt with 95% intervals (geometric means over prompts).
Two figures stand for "the best fixed γ": the one that is best in these rounds, which luck favors, and for each prompt
the one that is best on all others. Goal: 0.97. Prints one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from parts import Parts, busy_core

from specbench.base.errors import SpecbenchError
from specbench.base.record import Estimate
from specbench.bench.prompts import load_prompts
from specbench.cli.options import DEFAULT_TARGET
from specbench.decoding.protocols import DraftPolicy
from specbench.generate import as_tokens, speculative_generate
from specbench.models.default import default_drafter
from specbench.models.drafters import load_drafter
from specbench.models.target import load_target
from specbench.options import LoadOptions
from specbench.policies import build_policy
from specbench.recipe import Recipe
from specbench.results import stats
from specbench.results.stats import ratio_text
from specbench.specs.models import parse_model

PLAIN, AUTO, GOAL = "plain", "auto", 0.97
GAMMAS = (1, 2, 3, 4, 5, 6, 8)


def policies(gammas: Sequence[int]) -> dict[str, Callable[[], DraftPolicy] | None]:
    """Return what makes each policy; ``None`` drafts nothing."""
    fixed = {f"γ={gamma}": f"fixed:gamma={gamma}" for gamma in gammas}
    makers = {name: lambda spec=spec: build_policy(spec) for name, spec in {AUTO: AUTO, **fixed}.items()}
    return {PLAIN: None, **makers}


def play(
    parts: Parts,
    rounds: int,
    prompts: Sequence[Sequence[int]],
    makers: Mapping[str, Callable[[], DraftPolicy] | None],
    decode: Callable[[Sequence[int], DraftPolicy | None], Any],
    until: float = math.inf,
) -> None:
    """Decode the rounds that are missing.

    Args:
        parts: Those that are done, and where the others go.
        rounds: For each prompt.
        prompts: Token ids.
        makers: See ``policies``.
        decode: Returns a ``Generation``.
        until: When to stop, on the clock of ``time.monotonic``.
    """
    for number in range(len(parts.done), rounds * len(prompts)):
        if time.monotonic() > until:
            return
        order = Random(f"{number}").sample(list(makers), len(makers))
        part: dict[str, Any] = {"prompt": number % len(prompts), "repeat": number // len(prompts)}
        for name in order:
            make = makers[name]
            made = decode(prompts[part["prompt"]], None if make is None else make())
            part[name] = {
                "seconds": sum(step.times.total_s for step in made.steps),
                "tokens": sum(len(step.tokens) for step in made.steps),
                "drafted": sum(step.gamma for step in made.steps) / max(1, len(made.steps)),
            }
        parts.add(part)


def summarize(done: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return speedups, the ratios of ``auto`` to each γ, and to the best one by both definitions."""
    prompts = [part["prompt"] for part in done]
    repeats = [part["repeat"] for part in done]
    rates = {name: [part[name]["tokens"] / part[name]["seconds"] for part in done] for name in names}

    def over(one: Sequence[float], other: Sequence[float]) -> Estimate:
        return stats.geometric_mean([a / b for a, b in zip(one, other, strict=True)], prompts, repeats)

    gammas = [name for name in names if name not in (PLAIN, AUTO)]
    others = {
        left_out: _best(gammas, rates, [place for place, prompt in enumerate(prompts) if prompt != left_out])
        for left_out in set(prompts)
    }
    held_out = [rates[others[prompt]][place] for place, prompt in enumerate(prompts)]
    best = _best(gammas, rates, range(len(done)))
    return {
        "rounds": len(done),
        "speedup": {name: over(rates[name], rates[PLAIN]) for name in names},
        "drafted": {name: sum(part[name]["drafted"] for part in done) / len(done) for name in names},
        "over": {name: over(rates[AUTO], rates[name]) for name in gammas},
        "best": best,
        "over_best": over(rates[AUTO], rates[best]),
        "over_held_out": over(rates[AUTO], held_out),
    }


def _best(gammas: Sequence[str], rates: Mapping[str, Sequence[float]], places: Sequence[int]) -> str:
    """Return the γ with the highest geometric mean at these places; the first if there are none."""
    return max(gammas, key=lambda name: sum(math.log(rates[name][place]) for place in places))


def _interval(value: Estimate) -> list[float | None]:
    return [value.value, value.low, value.high]


def text_of(found: Mapping[str, Any]) -> str:
    lines = [f"{'':8} {'over plain':>22} {'drafted':>8}  auto over it"]
    for name, speedup in found["speedup"].items():
        ratio = ratio_text(found["over"][name]) if name in found["over"] else ""
        lines.append(f"{name:8} {ratio_text(speedup):>22} {found['drafted'][name]:8.2f}  {ratio}")
    lines.append(f"auto over {found['best']}, the best here: {ratio_text(found['over_best'])} (goal {GOAL})")
    lines.append(f"auto over the best on the other prompts: {ratio_text(found['over_held_out'])}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code: 1 if the goal is missed, 3 if rounds are left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--drafter", help="default: as of the commands")
    parser.add_argument("--gammas", type=lambda text: tuple(map(int, text.split(","))), default=GAMMAS)
    parser.add_argument("--limit", type=int, default=12, help="prompts")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2, help="of every prompt")
    parser.add_argument("--busy", action="store_true", help="another process keeps one core busy")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="continue from this file")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time limit; --resume continues")
    given = parser.parse_args(arguments)
    given.drafter = given.drafter or str(default_drafter(Recipe(parse_model(given.target))))
    until = time.monotonic() + 60 * given.minutes
    settings = {
        name: getattr(given, name) for name in ("target", "drafter", "gammas", "limit", "tokens", "busy")
    }
    parts, makers = Parts(given.resume, settings), policies(given.gammas)
    try:
        target = load_target(given.target, LoadOptions())
        drafter = load_drafter(given.drafter, target)
        prompts = [as_tokens(prompt.turns[0], target) for prompt in load_prompts(["all"], limit=given.limit)]
    except SpecbenchError as error:
        print(error, file=sys.stderr)
        return 2

    def decode(prompt: Sequence[int], plan: DraftPolicy | None) -> Any:
        return speculative_generate(
            prompt, target, None if plan is None else drafter, policy=plan,
            max_new_tokens=given.tokens, ignore_eos=True,
        )  # fmt: skip

    with busy_core(given.busy):
        play(parts, given.rounds, prompts, makers, decode, until)
    if not parts.done:
        return 3
    found = summarize(parts.done, list(makers))
    print(text_of(found))
    print(
        json.dumps({"benchmark": "auto_regret", **settings, **found}, ensure_ascii=False, default=_interval)
    )
    if len(parts.done) < given.rounds * len(prompts):
        return 3
    return 0 if found["over_best"].value >= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
