"""Parsing of the axes of a sweep: draft lengths, baselines, batches, contexts, draft policies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from specbench.base.errors import UsageError
from specbench.base.textsafe import counted
from specbench.bench.grid import MAX_BATCH, MAX_BEAMS, MAX_CONTEXT
from specbench.rows import OtherLibrary
from specbench.specs.policies import LONGEST_DRAFT, Fixed, PolicySpec, parse_policy

_RANGE = re.compile(r"\s*(\d{1,9})(?:\s*\.\.\s*(\d{1,9})(?:\s*\.\.\s*(\d{1,9}))?)?\s*", re.ASCII)


def parse_baselines(names: Sequence[str]) -> tuple[OtherLibrary, ...]:
    """Parse additional baselines: ``transformers``, ``assisted`` and ``beam:N``.

    Raises:
        UsageError: A name is none of these, or a number of beams is too small or too large.
    """
    words = [OtherLibrary(word) for word in ("transformers", "assisted") if word in names]
    beams = set[int]()
    for name in {*names} - {"transformers", "assisted"}:
        found = re.fullmatch(r"beam:(\d{1,9})", name, re.ASCII)
        if found is None:
            raise UsageError(f"There is no baseline {name!r}.", "Choose transformers, assisted or beam:N.")
        beams.add(int(found[1]))
    for count in beams:
        if not 2 <= count <= MAX_BEAMS:
            raise UsageError(f"The beam search has {counted(count, 'beam')}.", f"Give 2 to {MAX_BEAMS}.")
    return (*words, *(OtherLibrary("beam", count) for count in sorted(beams)))


def _parse_range(what: str, most: int, text: str | None) -> list[int]:
    """Parse numbers: ``1..8``, ``1,2,4``, ``2..16..2`` (from, to, step) or a mixture; ascending, none of ``None``.

    Raises:
        UsageError: The text has none of these forms, or a number is outside 1 to ``most``.
    """
    numbers: set[int] = set()
    for part in [] if text is None else text.split(","):
        found = _RANGE.fullmatch(part)
        first, last, step = (
            (int(found[1]), int(found[2] or found[1]), int(found[3] or 1)) if found else (0, 0, 0)
        )
        if not 1 <= first <= last <= most or step < 1:
            raise UsageError(
                f"{text!r} is not a range of {what}.",
                f"Write numbers from 1 to {most} as 1..8, 2..16..2 (with a step) or 1,2,4.",
            )
        numbers.update(range(first, last + 1, step))
    return sorted(numbers)


parse_gammas = partial(_parse_range, "γ", LONGEST_DRAFT)
parse_batches = partial(_parse_range, "batch sizes", MAX_BATCH)
parse_contexts = partial(_parse_range, "lengths of context", MAX_CONTEXT)
"""Parse the values of these options."""


def parse_thinking(text: str | None) -> list[bool]:
    """Parse ``on``, ``off`` or both, separated by a comma; ``None`` is neither.

    Raises:
        UsageError: There is another word.
    """
    values = {"on": True, "off": False}
    words = [] if text is None else [word.strip() for word in text.split(",")]
    if wrong := [word for word in words if word not in values]:
        raise UsageError(f"--thinking is on or off, not {wrong[0]!r}.", "Write on, off or on,off.")
    return [values[word] for word in words]


def parse_policies(specs: Sequence[str]) -> tuple[PolicySpec, ...]:
    """Parse draft policies, with or without options after a colon.

    Raises:
        UsageError: A policy or option is unknown, a value is out of range, or a policy is given twice.
    """
    policies = [parse_policy(spec) for spec in specs]
    for policy in policies:
        if isinstance(policy, Fixed) and policy.gamma is not None:
            raise UsageError(
                "The draft lengths of the policy fixed are those of --gamma.",
                f"Give --gamma {policy.gamma}.",
            )
    refuse_repeated(policies)
    return tuple(policies)


def refuse_repeated(policies: Sequence[PolicySpec]) -> None:
    """Raise ``UsageError`` if a draft policy is given twice."""
    names = [str(policy) for policy in policies]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"The draft policy {repeated[0]} is given twice.", "Give each once.")
