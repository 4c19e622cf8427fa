"""The parts of a drafter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.chain import ChainDrafter
from specbench.drafters.several import SeveralDrafters

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter


def drafting_parts(drafter: Drafter) -> list[Drafter]:
    """Return the parts that run forward passes: each of several drafters, and a cascade's model."""
    if isinstance(drafter, SeveralDrafters):
        return [part for member in drafter.drafters for part in drafting_parts(member)]
    return [drafter.model if isinstance(drafter, CascadeDrafter) else drafter]


def models_of(drafter: Drafter) -> list[ChainDrafter]:
    """Return the parts that draft with a model."""
    return [part for part in drafting_parts(drafter) if isinstance(part, ChainDrafter)]


def context_limit(drafter: Drafter) -> int | None:
    """Return the longest context that all models of a drafter take; ``None`` without a limit."""
    limits = (model.context_limit for model in models_of(drafter))
    return min((limit for limit in limits if limit is not None), default=None)


@contextmanager
def without_guesses(drafters: Iterable[Drafter]) -> Iterator[None]:
    """Let models read no guesses within the block, so that each of their passes gives one token."""
    taking = [model for drafter in drafters for model in models_of(drafter) if model.takes_guesses]
    for model in taking:
        model.takes_guesses = False
    try:
        yield
    finally:
        for model in taking:
            model.takes_guesses = True
