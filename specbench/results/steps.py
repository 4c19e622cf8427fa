"""The steps of many generations as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from specbench.decoding.metrics import count_ranks
from specbench.decoding.records import PARTS
from specbench.results.lines import STEP_FIGURES

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of many generations, one array per figure, each of shape [steps].

    Attributes:
        row: Place of the generation in ``Results.generations``.
        prompt: A number per prompt.
        numbers: Tokens, passes and seconds, by the names of ``STEP_FIGURES``; ``steps[name]`` is short for them.
        alpha_sum: Sum of the step's expected acceptances.
        alpha_at: Where they begin in ``alphas``; there are as many as were tested.
        alphas: The expected acceptances of all steps, shape [tested positions].
        tree: Place in ``trees``; -1 for a chain.
        trees: The trees there are, by node the one it stands behind, -1 for the context. Like ``alphas`` of all steps.
    """

    row: NDArray[np.intp]
    prompt: NDArray[np.intp]
    numbers: dict[str, NDArray[Any]]
    alpha_sum: Floats
    alpha_at: Ints
    alphas: Floats
    tree: NDArray[np.intp]
    trees: Sequence[tuple[int, ...]]

    @classmethod
    def of(cls, generations: pd.DataFrame) -> Steps:
        """The steps of all finished generations.

        Args:
            generations: See ``Results``.
        """
        rows = np.flatnonzero((generations["status"] == "ok").to_numpy())
        joined = {
            name: _joined(
                generations[f"steps_{name}"].to_numpy()[rows], np.int64 if kind is int else np.float64
            )
            for name, kind in STEP_FIGURES.items()
        }
        lengths = np.array(
            [len(each) for each in generations["steps_drafted"].to_numpy()[rows]], dtype=np.intp
        )
        row = np.repeat(rows, lengths)
        by_step = chain.from_iterable(generations["steps_expected_acceptance"].to_numpy()[rows])
        alphas = np.fromiter(chain.from_iterable(by_step), dtype=np.float64)
        ends = np.cumsum(joined["tested"])
        sums = np.concatenate(([0.0], np.cumsum(alphas)))
        begins = ends - joined["tested"]
        trees: dict[tuple[int, ...], int] = {}
        tree = np.full(len(row), -1, dtype=np.intp)
        for first, shapes in zip(
            np.cumsum(lengths) - lengths, generations["steps_parents"].to_numpy()[rows], strict=True
        ):
            for place, shape in enumerate(shapes, start=first):
                if shape:
                    tree[place] = trees.setdefault(tuple(parent - 1 for parent in shape), len(trees))
        return cls(
            row=row,
            prompt=pd.factorize(generations["prompt"])[0][row],
            numbers=joined,
            alpha_sum=sums[ends] - sums[begins],
            alpha_at=begins,
            alphas=alphas,
            tree=tree,
            trees=tuple(trees),
        )

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.numbers[name]

    def take(self, which: NDArray[Any] | slice) -> Steps:
        """Some of the steps, by place, by a mask or by a slice."""
        return Steps(
            self.row[which],
            self.prompt[which],
            {name: values[which] for name, values in self.numbers.items()},
            self.alpha_sum[which],
            self.alpha_at[which],
            self.alphas,
            self.tree[which],
            self.trees,
        )

    def split(self, codes: NDArray[np.intp]) -> dict[int, Steps]:
        """The steps of each code, in their order, without a copy per code."""
        order = np.argsort(codes, kind="stable")
        ordered = self.take(order)
        found, starts = np.unique(codes[order], return_index=True)
        edges = np.append(starts, len(order))
        slices = zip(found, edges[:-1], edges[1:], strict=True)
        return {int(code): ordered.take(slice(begin, end)) for code, begin, end in slices}

    def total_s(self) -> Floats:
        """Seconds of each step."""
        return np.asarray(sum(self[f"{part}_s"] for part in PARTS))

    def rates(self, longest: int) -> Floats:
        """Accepted over tested at positions 1 to ``longest``; NaN where none was tested.

        The end of a branch that is not a tree's longest counts like a rejection behind it: a step keeps no more.
        """
        ended = np.minimum(self["accepted"] + 1, self["drafted"])
        tested = np.where(self["nodes"] > self["drafted"], ended, self["tested"])
        return _shares(at_least(self["accepted"], longest), at_least(tested, longest))

    def alpha_by_position(self, longest: int) -> Floats:
        """Mean expected acceptance at positions 1 to ``longest``; NaN where none was tested."""
        at = [self.alpha_at[self["tested"] > i] + i for i in range(longest)]
        return np.array([self.alphas[places].mean() if len(places) else _NAN for places in at])


def _joined(lists: NDArray[Any], kind: type) -> NDArray[Any]:
    return (
        np.concatenate([np.asarray(each, dtype=kind) for each in lists])
        if len(lists)
        else np.empty(0, dtype=kind)
    )


def at_least(lengths: Ints, longest: int) -> Ints:
    """How many of the lengths reach 1, 2, ..., ``longest``."""
    counts = np.bincount(lengths, minlength=longest + 1)
    return np.asarray(counts[::-1].cumsum()[::-1][1 : longest + 1])


def _shares(part: NDArray[Any], whole: NDArray[Any]) -> Floats:
    return np.asarray(np.divide(part, whole, out=np.full(len(part), _NAN), where=whole > 0))


def rank_counts(generations: pd.DataFrame) -> dict[tuple[int, int], list[int]]:
    """``count_ranks`` of all steps of some generations."""
    widths, ranks = (chain.from_iterable(generations[f"steps_{name}"]) for name in ("widths", "ranks"))
    return count_ranks(zip(widths, ranks, strict=True))
