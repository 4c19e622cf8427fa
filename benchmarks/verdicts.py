"""Compare verification methods by the tokens that they keep of the same drafts.

    python benchmarks/verdicts.py --drafter self:layers=20 --steps 400
    python benchmarks/verdicts.py --target FOLDER --drafter SMALL --shape chain --steps 5000 --out rows.jsonl

Decodes prompts with chains and with trees, drawn without replacement. From every step's rows p and q follows the
*expected* number of tokens that each method keeps of its drafts: rejection, block and hsd (capped HSD, arXiv
2601.05724, which keeps exactly what block keeps) for a chain, recursive and traversal for a tree, and naive for both,
as if they were deterministic. So no draw adds noise. Prints tokens per step
(with the closing one) and the ratio to rejection or recursive, with 95% intervals over prompts, and one line of JSON
at the end. ``--out`` continues what the file holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import parts
import torch

from specbench.base.progress import quiet_transformers
from specbench.bench.prompts import load_prompts
from specbench.cli.options import DEFAULT_TARGET
from specbench.decoding.clocks import Stopwatch
from specbench.decoding.drafts import Draft
from specbench.decoding.loop import decode
from specbench.decoding.protocols import Decoding, ForwardRequest
from specbench.decoding.request import Request
from specbench.decoding.sampling import Randomness, Sampling
from specbench.generate import encode_prompt
from specbench.models.drafters import load_drafter
from specbench.models.target import Target, load_target
from specbench.options import LoadOptions
from specbench.policies import build_policy
from specbench.results.stats import mean_interval

TINY = torch.finfo(torch.float32).tiny
TargetRows = Callable[[int], torch.Tensor]
WAYS = {"chain": ("rejection", "block", "hsd", "naive"), "tree": ("recursive", "traversal", "naive")}


# --- Expected tokens of a draft, over all tosses --------------------------------------------------


def draws_of(draft: Draft, node: int) -> list[tuple[int, torch.Tensor]]:
    """Return the candidates of a node, with the q that each was drawn from."""
    return [(token, q) for tokens, q in draft.draws(node) if q is not None for token in tokens]


def node_of(draft: Draft, parent: int, token: int) -> int:
    node = draft.child(parent, token)
    assert node is not None
    return node


def kept_naive(draft: Draft, p: TargetRows, node: int = -1) -> float:
    """Return the expected tokens of ``naive``: a node is kept with its p, if its parent is."""
    return sum(
        float(p(node)[token]) * (1 + kept_naive(draft, p, node_of(draft, node, token)))
        for token in {token for each in draft.draws(node) for token in each.tokens}
    )


def kept_in_turn(draft: Draft, p: TargetRows, node: int = -1) -> float:
    """Return the expected tokens of rejection, recursive for several candidates."""
    candidates = draws_of(draft, node)
    here, left, expected = p(node) if candidates else None, 1.0, 0.0
    q: torch.Tensor | None = None
    for token, drawn_from in candidates:
        assert here is not None
        q = drawn_from if q is None else q
        child = node_of(draft, node, token)
        chance = min(1.0, float(here[token] / q[token].clamp_min(TINY)))
        expected += left * chance * (1 + kept_in_turn(draft, p, child))
        left *= 1 - chance
        here, q = _normalized((here - q).clamp_min(0), here), _without(q, token)
    return expected


def kept_from_below(draft: Draft, p: TargetRows, node: int = -1, chance: float = 1.0) -> tuple[float, float]:
    """Return the expected tokens of block and traversal verification.

    Returns:
        The chance that something of the branch is kept, this node at least, and the tokens after this node that are
        expected, counted as none where nothing is kept.
    """
    candidates = draws_of(draft, node)
    here, failed, kept, expected = p(node) if candidates else None, 1.0, 0.0, 0.0
    q: torch.Tensor | None = None
    for token, drawn_from in candidates:
        assert here is not None
        q = drawn_from if q is None else q
        child = node_of(draft, node, token)
        ratio = min(1.0, chance * float(here[token] / q[token].clamp_min(TINY)))
        below, tokens = kept_from_below(draft, p, child, ratio)
        kept += failed * below
        expected += failed * (below + tokens)
        failed *= 1 - below
        rest = (chance * here - q).clamp_min(0)
        total = float(rest.sum())
        here, q = _normalized(rest, here), _without(q, token)
        chance = total / (total + 1 - chance) if chance < 1 else 1.0
    return kept + failed * chance, expected


def kept_by_hsd(draft: Draft, p: TargetRows) -> float:
    """Return the expected tokens of capped HSD for a chain, by its definitions.

    r(i) is the product of p / q over the first i tokens, and r*(i) = r(i) / max(1, r(1), ..., r(i - 1)). The whole
    chain of n tokens is kept with min(1, r*(n)). Otherwise, from the longest prefix on, one of i tokens is kept with
    D(p, q) / D(q, p): the sums of (r* - 1)⁺ q and of (1 - r*)⁺ q over all tokens that could follow it.
    """
    ratios, node, branches = [1.0], -1, list[float]()
    while candidates := draws_of(draft, node):
        ((token, q),) = candidates
        here, capped = p(node), ratios[-1] / max(ratios)
        more, less = (float(side.clamp_min(0).sum()) for side in (capped * here - q, q - capped * here))
        branches.append(more / less if less > 0 else 1.0)
        ratios.append(ratios[-1] * float(here[token] / q[token].clamp_min(TINY)))
        node = node_of(draft, node, token)
    length = len(branches)
    kept = min(1.0, ratios[length] / max(ratios[:length]))
    expected, left = length * kept, 1.0 - kept
    for place in range(length - 1, 0, -1):
        kept = min(1.0, branches[place])
        expected += left * place * kept
        left *= 1.0 - kept
    return expected


def _normalized(rest: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    total = rest.sum()
    return rest / total if float(total) > TINY else otherwise


def _without(q: torch.Tensor, token: int) -> torch.Tensor:
    rest = q.clone()
    rest[token] = 0
    return _normalized(rest, rest)


KEPT: dict[str, Callable[[Draft, TargetRows], float]] = {
    "naive": kept_naive,
    "rejection": kept_in_turn,
    "recursive": kept_in_turn,
    "block": lambda draft, p: kept_from_below(draft, p)[1],
    "hsd": kept_by_hsd,
    "traversal": lambda draft, p: kept_from_below(draft, p)[1],
}


# --- Recording ------------------------------------------------------------------------------------


class Noted:
    """A drafter that keeps its latest draft."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.latest = Draft()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, *arguments: Any) -> Decoding[Draft]:
        self.latest = yield from self._drafter.propose(*arguments)
        return self.latest


def judged(request: Request, drafter: Noted) -> Iterator[tuple[Draft, TargetRows]]:
    """Yield every step's draft with the rows that verify it."""
    decoding = decode(request, Stopwatch(None))
    for each in decoding:
        while isinstance(each, ForwardRequest):
            rows = each.scorer.score(each)
            if each.scorer is request.target and each.tokens:
                p = request.sampling.probabilities(rows.logits, each.context)
                yield drafter.latest, lambda node, p=p: p[node + 1]  # type: ignore[misc]
            each = decoding.send(rows)


def record(
    target: Target, drafter: Noted, prompt: Sequence[int], args: argparse.Namespace, seed: int
) -> dict[str, dict[str, float]]:
    """Return the expected tokens of every method, summed over the steps of one prompt."""
    found: dict[str, dict[str, float]] = {}
    rules = {"chain": f"fixed:gamma={args.gamma}", "tree": args.tree}
    for shape in args.shape or WAYS:
        request = Request(
            prompt, target.scorer, drafter, build_policy(rules[shape]), Sampling(temperature=args.temperature),
            Randomness(seed), args.tokens,
        )  # fmt: skip
        sums = dict.fromkeys(WAYS[shape], 0.0)
        count = 0
        for draft, p in judged(request, drafter):
            for way in sums:
                sums[way] += 1 + KEPT[way](draft, p)
            count += 1
        found[shape] = {**sums, "steps": count}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--drafter", default="self:int8")
    parser.add_argument("--drafter-dtype", default="auto")
    parser.add_argument("--shape", action="append", choices=WAYS, help="only these; repeatable")
    parser.add_argument("--gamma", type=int, default=8, help="length of chains")
    parser.add_argument("--tree", default="static-tree:nodes=12", help="a rule that drafts trees")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=96, help="of each output")
    parser.add_argument("--steps", type=int, default=400, help="of the first shape in all, at least")
    parser.add_argument("--out", type=Path, help="continue from this file")
    args = parser.parse_args(arguments)

    prompts = load_prompts(["all"])
    settings = {key: str(value) for key, value in vars(args).items() if key not in ("out", "steps")}
    kept = parts.Parts(args.out, settings)
    with quiet_transformers():
        target = load_target(args.target)
        drafter = Noted(load_drafter(args.drafter, target, LoadOptions(dtype=args.drafter_dtype)))
        shape = (args.shape or [*WAYS])[0]
        while sum(part[shape]["steps"] for part in kept.done) < args.steps:
            number = len(kept.done)
            prompt = prompts[(number * 7) % len(prompts)]
            ids = encode_prompt(target.tokenizer, prompt.turns[0])
            kept.add({"prompt": prompt.id, **record(target, drafter, ids, args, number)})
            print(f"{number + 1}: {prompt.id}", file=sys.stderr, flush=True)
    print(json.dumps(report(kept.done)))
    return 0


def report(done: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Print tokens per step by method, and ratios to the first method of each shape."""
    figures: dict[str, Any] = {"prompts": len(done)}
    for shape, ways in WAYS.items():
        if any(shape not in part for part in done):
            continue
        steps = sum(part[shape]["steps"] for part in done)
        print(f"{shape}: {steps} steps of {len(done)} prompts")
        for way in ways:
            mean = sum(part[shape][way] for part in done) / steps
            ratios = [part[shape][way] / part[shape][ways[0]] for part in done]
            ratio, interval = sum(ratios) / len(ratios), mean_interval(ratios)
            shown = "" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]"
            print(f"  {way:<10} {mean:6.3f} tokens per step, {ratio:.3f}{shown} x {ways[0]}")
            figures[f"{shape}/{way}"] = {"tokens_per_step": mean, "ratio": ratio, "interval": interval}
        figures[f"{shape}/steps"] = steps
    return figures


if __name__ == "__main__":
    sys.exit(main())
