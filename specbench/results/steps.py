"""The steps of many generations as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from specbench.decoding.records import PARTS
from specbench.results.lines import STEP_FIGURES, StepLists

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of many generations, one array per figure, each of shape [steps].

    Attributes:
        row: Index of the generation in ``Results.generations``.
        prompt: A number per prompt.
        numbers: Numbers of tokens and forward passes, and seconds, by the names of ``STEP_FIGURES``; ``steps[name]`` is
            short for ``steps.numbers[name]``.
        alpha_sum: Sum of the step's expected acceptances.
        alpha_at: Index of the step's first entry in ``alphas``; it has one for each tested position.
        alphas: Expected acceptances of all steps, shape [tested positions].
        tree: Index of the step's draft tree in ``trees``; -1 for a chain.
        trees: The distinct draft trees of all steps, as the parent of each node, -1 for the context.
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
        """Collect the steps of all finished generations of ``Results``."""
        rows = np.flatnonzero((generations["status"] == "ok").to_numpy())
        lists: list[StepLists] = generations["steps"].iloc[rows].tolist()
        joined: dict[str, NDArray[Any]] = {
            name: np.fromiter(
                chain.from_iterable(getattr(each, name) for each in lists),
                np.int64 if kind is int else np.float64,
            )
            for name, kind in STEP_FIGURES.items()
        }
        row = np.repeat(rows, [len(each.drafted) for each in lists])
        by_step = chain.from_iterable(each.expected_acceptance for each in lists)
        alphas = np.fromiter(chain.from_iterable(by_step), dtype=np.float64)
        ends = np.cumsum(joined["tested"])
        sums = np.concatenate(([0.0], np.cumsum(alphas)))
        begins = ends - joined["tested"]
        trees: dict[tuple[int, ...], int] = {}
        tree = np.full(len(row), -1, dtype=np.intp)
        place = 0
        for each in lists:
            for step, shape in enumerate(each.parents, start=place):
                if shape:
                    tree[step] = trees.setdefault(tuple(parent - 1 for parent in shape), len(trees))
            place += len(each.drafted)
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
        """Return some of the steps, by index, mask or slice."""
        return replace(
            self,
            row=self.row[which],
            prompt=self.prompt[which],
            numbers={name: values[which] for name, values in self.numbers.items()},
            alpha_sum=self.alpha_sum[which],
            alpha_at=self.alpha_at[which],
            tree=self.tree[which],
        )

    def split(self, codes: NDArray[np.intp]) -> dict[int, Steps]:
        """Return the steps of each group, in their order, by the group's code. All steps are sorted once."""
        order = np.argsort(codes, kind="stable")
        ordered = self.take(order)
        found, starts = np.unique(codes[order], return_index=True)
        edges = np.append(starts, len(order))
        slices = zip(found, edges[:-1], edges[1:], strict=True)
        return {int(code): ordered.take(slice(begin, end)) for code, begin, end in slices}

    def total_s(self) -> Floats:
        """Return the seconds of each step."""
        return np.asarray(sum(self[f"{part}_s"] for part in PARTS))

    def rates(self, longest: int) -> Floats:
        """Return accepted over tested at positions 1 to ``longest``; NaN at positions where none was tested.

        If the accepted path ends at the end of a branch that is not the tree's longest, that counts like a rejection,
        since the step cannot accept more.
        """
        ended = np.minimum(self["accepted"] + 1, self["drafted"])
        tested = np.where(self["nodes"] > self["drafted"], ended, self["tested"])
        part, whole = at_least(self["accepted"], longest), at_least(tested, longest)
        return np.asarray(np.divide(part, whole, out=np.full(longest, _NAN), where=whole > 0))

    def alpha_by_position(self, longest: int) -> Floats:
        """Return the mean expected acceptance at positions 1 to ``longest``; NaN at positions where none was tested."""
        at = [self.alpha_at[self["tested"] > i] + i for i in range(longest)]
        return np.array([self.alphas[places].mean() if len(places) else _NAN for places in at])


def at_least(lengths: Ints, longest: int) -> Ints:
    """Return how many of the lengths are at least 1, 2, ..., ``longest``."""
    counts = np.bincount(lengths, minlength=longest + 1)
    return np.asarray(counts[::-1].cumsum()[::-1][1 : longest + 1])


def rank_counts(generations: pd.DataFrame) -> dict[tuple[int, int], list[int]]:
    """Return by (depth from 1, rank from 0) how many tree nodes of some generations were tested and accepted."""
    counts: dict[tuple[int, int], list[int]] = {}
    lists: list[StepLists] = generations["steps"].tolist()
    pairs = (zip(each.widths, each.ranks, strict=True) for each in lists)
    for stood, kept in chain.from_iterable(pairs):
        for depth, width in enumerate(stood, start=1):
            for rank in range(width):
                counts.setdefault((depth, rank), [0, 0])[0] += 1
        for depth, rank in enumerate(kept, start=1):
            counts.setdefault((depth, rank), [0, 0])[1] += 1
    return counts
