"""The axes of a sweep as they are typed: draft lengths, baselines, requests side by side, draft policies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from specbench.base.errors import UsageError
from specbench.base.textsafe import counted
from specbench.bench.grid import LARGEST_BATCH, MOST_BEAMS
from specbench.decoding.records import LONGEST_DRAFT
from specbench.specs.policies import PolicySpec, parse_policy, share_options


def parse_baselines(names: Sequence[str]) -> tuple[bool, tuple[int, ...]]:
    """Whether ``transformers``' own ``generate`` is measured too, and with how many beams its beam search, ascending.

    Args:
        names: ``transformers`` and ``beam:N``.

    Raises:
        UsageError: One of them is something else, or there are too few or too many beams.
    """
    beams: set[int] = set()
    for name in names:
        found = re.fullmatch(r"beam:(\d{1,9})", name, re.ASCII)
        if found is None and name != "transformers":
            raise UsageError(f"There is no baseline {name!r}.", "Choose transformers, or beam:N.")
        if found is not None:
            beams.add(int(found[1]))
    for count in beams:
        if not 2 <= count <= MOST_BEAMS:
            raise UsageError(f"The beam search has {counted(count, 'beam')}.", f"Give 2 to {MOST_BEAMS}.")
    return "transformers" in names, tuple(sorted(beams))


def parse_gammas(text: str) -> list[int]:
    """Draft lengths from ``1..8``, ``1,2,4``, ``2..16..2`` (from, to, step) or a mixture like ``1..4,8``; ascending.

    Raises:
        UsageError: It is none of these, or a length is outside 1 to 256.
    """
    return _parse_range(text, "γ", LONGEST_DRAFT, "plain decoding is always measured.")


def parse_batches(text: str) -> list[int]:
    """Batches, spelled as draft lengths are.

    Raises:
        UsageError: It is no range, or a batch is outside 1 to 256.
    """
    return _parse_range(text, "--batch", LARGEST_BATCH, "without --batch, one prompt follows the other.")


def _parse_range(text: str, what: str, most: int, otherwise: str) -> list[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(
            r"\s*(\d{1,9})(?:\s*\.\.\s*(\d{1,9})(?:\s*\.\.\s*(\d{1,9}))?)?\s*", part, re.ASCII
        )
        if found is None:
            raise UsageError(
                f"{text!r} is no range of {what}"
                + (f": {part.strip()!r} is no number or range." if part != text else "."),
                "Write 1..8, 2..16..2 (with a step) or 1,2,4.",
            )
        first = int(found[1])
        last = int(found[2] or first)
        step = int(found[3] or 1)
        if last < first:
            raise UsageError(
                f"The range of {what} {part.strip()!r} runs backwards.", f"Write {last}..{first}."
            )
        if step == 0:
            raise UsageError(
                f"The range of {what} {part.strip()!r} has a step of 0.", "Give a step of at least 1."
            )
        if first < 1 or last > most:
            raise UsageError(
                f"{what} is {first if first < 1 else last} in {text!r}.",
                f"Give 1 to {most}; {otherwise}",
            )
        numbers.update(range(first, last + 1, step))
    return sorted(numbers)


def parse_policies(specs: Sequence[str], **options: Any) -> tuple[PolicySpec, ...]:
    """Draft policies with the options that several may share.

    Args:
        specs: Policies, with options of their own behind a colon or without.
        options: Those of ``build_policy`` but for ``gamma`` and ``costs``; each goes to the policies that take it, and
            what their specs say comes first. ``None`` and False stand for none.

    Raises:
        UsageError: An unknown policy or option, a value outside its range, a repeated policy, or an option that none of
            the policies takes.
    """
    from specbench.policies import build_policy

    policies = [parse_policy(spec) for spec in specs]
    for policy in policies:
        if policy.word == "fixed" and "gamma" in policy.options:
            raise UsageError(
                "The lengths of the policy fixed are those of --gamma.",
                f"Give --gamma {policy.options['gamma']}.",
            )
    policies = share_options(policies, options)
    for policy in policies:
        build_policy(policy)  # refuses values outside their ranges
    names = [str(policy) for policy in policies]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"The draft policy {repeated[0]} is given twice.", "Give each once.")
    return tuple(policies)
