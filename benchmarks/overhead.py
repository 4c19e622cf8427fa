"""Measure the cost of the loop itself, with models of zero cost.

    python benchmarks/overhead.py                      # about a minute
    python benchmarks/overhead.py --gammas 4 --vocabularies 50000

The real loop with the real model drafter runs over models that return slices of a table of logits. First table: µs
per step and per token, and the unavoidable operations over the vocabulary: in greedy decoding an argmax per draft and
over the target's γ + 1 rows; in sampling a softmax and a draw per draft, a softmax over the target's rows and a draw.
They are timed in turn with the loop, each as the fastest of several implementations. Goals: greedy at most 100 µs +
1.2 × the reductions, sampling at most 1.5 × the softmaxes and draws. Second table: µs per step by context length,
which must not matter; γ = 0 is plain decoding. Third table: a greedy step with a tree of 12 nodes against a chain of
12; goal: at most 1.5 times as long. Prints one line of JSON at the end.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import parts  # before torch
import torch

from specbench.decoding.loop import decode_steps
from specbench.decoding.protocols import Drafter, DraftPolicy, ForwardOutput, ForwardRequest, NoDraft
from specbench.decoding.records import Step
from specbench.decoding.request import Request
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.stops import StopRules
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter
from specbench.drafters.ngram import NGramDrafter
from specbench.policies import FixedLength, build_policy

NODES = 12
GREEDY_US, GREEDY_SHARE, SAMPLING_SHARE = 100.0, 1.2, 1.5
SAMPLINGS = {
    "greedy": Sampling(),
    "sampling": Sampling(temperature=1.0),
    "greedy, penalty": Sampling(repetition_penalty=1.1),
}


class TableCache:
    """Only counts."""

    length = 0

    def rollback(self, length: int) -> None:
        self.length = min(self.length, length)

    def reset(self) -> None:
        self.length = 0


class TableScorer:
    """A scorer whose logits after the k-th draft are row k of a table, whatever the context.

    Args:
        table: Shape [longest draft + 1, vocab].
    """

    context_limit = vocabulary = None
    takes_trees = reads_trees = True
    batch = None
    reads_in_parts = True
    epoch = 0
    device = torch.device("cpu")

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.cache = TableCache()
        self.embeddings = self.vocab_size = table.shape[-1]
        self._of_trees: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def cached_len(self) -> int:
        return self.cache.length

    def begin(self) -> None:
        self.cache.reset()

    def reserve(self, asked: ForwardRequest) -> bool:  # noqa: ARG002
        return True

    def score(self, asked: ForwardRequest) -> ForwardOutput:
        self.cache.length = len(asked.context) + len(asked.tokens)
        end = len(asked.tokens) + 1
        if asked.parents is not None:
            depths = [0]
            for parent in asked.parents:
                depths.append(depths[parent + 1] + 1)
            places = tuple(depths[0 if asked.rows is None else end - asked.rows :])
            if places not in self._of_trees:  # copying rows would be work of a model
                self._of_trees[places] = self.table[list(places)]
            return ForwardOutput(self._of_trees[places])
        return ForwardOutput(self.table[0 if asked.rows is None else end - asked.rows : end])

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:  # noqa: ARG002
        self.cache.rollback(length)


def tables(gamma: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of a target and a drafter that agree on every argmax and mostly in sampling: [γ + 1, vocab]."""
    generator = torch.Generator().manual_seed(vocabulary)
    target = torch.randn(gamma + 1, vocabulary, generator=generator) * 2.0
    best = torch.randint(vocabulary, (gamma + 1, 1), generator=generator)
    target.scatter_(-1, best, 12.0)
    drafter = target + 0.3 * torch.randn(gamma + 1, vocabulary, generator=generator)
    drafter.scatter_(-1, best, 12.0)
    return target.bfloat16(), drafter.bfloat16()


def steps(
    target: Any,
    drafter: Drafter,
    policy: DraftPolicy,
    sampling: Sampling,
    prompt: Sequence[int],
) -> Iterator[Step]:
    """Yield the steps of an endless run."""
    endless = sys.maxsize - len(prompt)
    request = Request(prompt, target, drafter, policy, sampling, Randomness(0), endless, StopRules([-1]))
    run = decode_steps(request)
    next(run)  # the prefill
    for record in run:
        assert isinstance(record, Step)
        yield record


def in_turn(jobs: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Return the median µs of each job, called in turn for that many seconds, at least 7 times after 2 warm-ups."""
    times: list[list[float]] = [[] for _ in jobs]
    until = time.perf_counter() + seconds
    for job in (*jobs, *jobs):
        job()
    while len(times[-1]) < 7 or time.perf_counter() < until:
        for job, taken in zip(jobs, times, strict=True):
            began = time.perf_counter()
            job()
            taken.append(time.perf_counter() - began)
    return [1e6 * statistics.median(taken) for taken in times]


# --- What cannot be avoided -----------------------------------------------------------------------


def _argmax_torch(rows: torch.Tensor) -> object:
    return rows.argmax(dim=-1)


def _argmax_numpy(rows: torch.Tensor) -> object:
    return rows.float().numpy().argmax(axis=-1)


def _argmax_pieces(rows: torch.Tensor) -> object:
    return [
        row[begin : begin + 32_000].float().numpy().argmax()
        for row in rows
        for begin in range(0, len(row), 32_000)
    ]


def _softmax(rows: torch.Tensor) -> torch.Tensor:
    return rows.softmax(dim=-1, dtype=torch.float32)


def _draw_cumulative(p: torch.Tensor) -> object:
    cumulative = p.cumsum(dim=-1, dtype=torch.float64)
    return int(torch.searchsorted(cumulative, torch.rand(1, dtype=torch.float64) * cumulative[-1:]))


def _draw_blocks(p: torch.Tensor) -> object:
    blocks = p[: len(p) // 256 * 256].view(-1, 256)
    sums = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    share = torch.rand(1, dtype=torch.float64) * sums[-1:]
    block = min(int(torch.searchsorted(sums, share)), len(sums) - 1)
    return int(torch.searchsorted(blocks[block].cumsum(dim=-1, dtype=torch.float64), share - sums[block - 1]))


def _draw_multinomial(p: torch.Tensor) -> object:
    return int(torch.multinomial(p, 1))


def floor(mode: str, target: torch.Tensor, drafter: torch.Tensor, seconds: float) -> float:
    """Return the µs of a step's operations over the vocabulary, each as its fastest implementation."""
    gamma = len(target) - 1
    row = drafter[:1]
    if mode.startswith("greedy"):
        ways = (_argmax_torch, _argmax_numpy, _argmax_pieces)
        times = in_turn([*(lambda way=way: way(target) for way in ways),
                         *(lambda way=way: way(row) for way in ways)], seconds)  # fmt: skip
        return min(times[: len(ways)]) + gamma * min(times[len(ways) :])
    p = _softmax(row)[0]
    draws = (_draw_cumulative, _draw_blocks, _draw_multinomial)
    times = in_turn(
        [lambda: _softmax(target), lambda: _softmax(row), *(lambda way=way: way(p) for way in draws)], seconds
    )
    return times[0] + gamma * times[1] + (gamma + 1) * min(times[2:])


# --- The two tables -------------------------------------------------------------------------------


def measure(mode: str, gamma: int, vocabulary: int, seconds: float) -> dict[str, Any]:
    """Return one line of the first table."""
    target, drafter = tables(gamma, vocabulary)
    run = steps(
        TableScorer(target),
        ModelDrafter(TableScorer(drafter), "table") if gamma else NoDraft(),  # type: ignore[arg-type]
        FixedLength(max(1, gamma)),
        SAMPLINGS[mode],
        list(range(100)),
    )
    seen: list[Step] = []
    halves: list[tuple[float, float]] = []
    for _ in range(2):  # the loop and its reference in turn, so that both meet the same machine
        (taken,) = in_turn([lambda: seen.append(next(run))], seconds / 4)
        halves.append((taken, floor(mode, target, drafter, seconds / 4)))
    step_us, floor_us = (statistics.mean(column) for column in zip(*halves, strict=True))
    tokens = sum(len(step.tokens) for step in seen) / len(seen)
    limit = GREEDY_US + GREEDY_SHARE * floor_us if mode == "greedy" else SAMPLING_SHARE * floor_us
    median_us = {
        f"{part}_us": round(1e6 * statistics.median(getattr(step.times, f"{part}_s") for step in seen), 1)
        for part in ("draft", "verify", "accept", "rollback", "other")
    }
    return {
        "mode": mode,
        "gamma": gamma,
        "vocabulary": vocabulary,
        "step_us": round(step_us, 1),
        "token_us": round(step_us / tokens, 1),
        "floor_us": round(floor_us, 1),
        "limit_us": round(limit, 1),
        "within": step_us <= limit,
        **median_us,
    }


def measure_growth(name: str, mode: str, lengths: Sequence[int], seconds: float) -> dict[str, Any]:
    """Return one line of the second table: γ = 4, 1,000 tokens of vocabulary."""
    target, drafter = tables(4, 1000)
    taken = []
    generator = torch.Generator().manual_seed(0)
    for length in lengths:
        prompt = torch.randint(1000, (length,), generator=generator).tolist()
        made: Drafter
        if name == "model":
            made = ModelDrafter(TableScorer(drafter), "table")  # type: ignore[arg-type]
        else:
            made = {"none": NoDraft, "lookup": LookupDrafter, "ngram": NGramDrafter}[name]()
        run = steps(TableScorer(target), made, FixedLength(4), SAMPLINGS[mode], prompt)
        next(run)  # a drafter reads the prompt in the first step
        taken += in_turn([lambda run=run: next(run)], seconds)  # type: ignore[misc]
    figures = [round(each, 1) for each in taken]
    return {"drafter": name, "mode": mode, "contexts": list(lengths), "step_us": figures}


def measure_tree(rule: str, vocabulary: int, seconds: float) -> dict[str, Any]:
    """Return one line of the third table."""
    target, drafter = tables(NODES, vocabulary)
    runs = [
        steps(
            TableScorer(target),
            ModelDrafter(TableScorer(drafter), "table"),  # type: ignore[arg-type]
            policy,
            SAMPLINGS["greedy"],
            list(range(100)),
        )
        for policy in (FixedLength(NODES), build_policy(rule))
    ]
    seen: list[Step] = []
    chain, tree = in_turn([lambda: next(runs[0]), lambda: seen.append(next(runs[1]))], seconds)
    return {
        "tree": rule,
        "vocabulary": vocabulary,
        "nodes": statistics.median(len(step.drafted) for step in seen),
        "chain_us": round(chain, 1),
        "tree_us": round(tree, 1),
        "ratio": round(tree / chain, 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = parts.parser(__doc__)
    parser.add_argument("--gammas", nargs="+", type=int, default=[0, 1, 2, 4, 8, 16])
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[1000, 50_000, 262_144])
    parser.add_argument("--contexts", nargs="*", type=int, default=[100, 1000, 8000, 32_000])
    parser.add_argument("--seconds", type=float, default=0.8, help="per line of the first table")
    given = parser.parse_args(arguments)

    print(f"logits in bfloat16, {torch.get_num_threads()} threads\n")
    print(f"{'':10}{'vocabulary':>10} {'γ':>3} {'µs/step':>9} {'µs/token':>9} {'cannot avoid':>12} {'limit':>9}"
          f"   {'draft':>8} {'verify':>7} {'accept':>8} {'other':>7}")  # fmt: skip
    lines = []
    for mode in ("greedy", "sampling"):
        for vocabulary in given.vocabularies:
            for gamma in given.gammas:
                line = measure(mode, gamma, vocabulary, given.seconds)
                lines.append(line)
                print(
                    f"{mode:10}{vocabulary:10,} {gamma:3} {line['step_us']:9,.0f} {line['token_us']:9,.0f} "
                    f"{line['floor_us']:12,.0f} {line['limit_us']:9,.0f}{' ' if line['within'] else '!'}  "
                    f"{line['draft_us']:8,.0f} {line['verify_us']:7,.0f} {line['accept_us']:8,.0f} "
                    f"{line['other_us'] + line['rollback_us']:7,.0f}",
                    flush=True,
                )
    growth = []
    if given.contexts:
        print(f"\nµs per step, γ 4, vocabulary 1,000, after a context of{'':9}"
              + " ".join(f"{length:>8,}" for length in given.contexts))  # fmt: skip
        for mode in SAMPLINGS:
            for name in ("none", "model", "lookup", "ngram") if mode != "greedy, penalty" else ("model",):
                line = measure_growth(name, mode, given.contexts, given.seconds / 4)
                growth.append(line)
                figures = " ".join(f"{each:8,.0f}" for each in line["step_us"])
                print(f"{name + ', ' + mode:62} {figures}", flush=True)
    print(
        f"\n{'greedy, tree':28} {'vocabulary':>10} {'nodes':>5} {'chain µs':>9} {'tree µs':>9} {'ratio':>6}"
    )
    trees = []
    for rule in (f"static-tree:nodes={NODES}", f"dynamic-tree:nodes={NODES}"):
        for vocabulary in given.vocabularies:
            line = measure_tree(rule, vocabulary, given.seconds)
            trees.append(line)
            print(
                f"{rule:28} {vocabulary:10,} {line['nodes']:5.0f} {line['chain_us']:9,.0f} {line['tree_us']:9,.0f} "
                f"{line['ratio']:6.2f}",
                flush=True,
            )
    held_to = [line for line in lines if line["vocabulary"] == 50_000]
    print(json.dumps({"benchmark": "overhead", "threads": torch.get_num_threads(),
                      "within_goals_at_50000": all(line["within"] for line in held_to) if held_to else None,
                      "steps": lines, "growth": growth, "trees": trees}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
