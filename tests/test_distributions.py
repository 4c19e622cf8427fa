"""Every verification × draft policy × drafter × transform keeps the target's distribution, or is refused in a sentence.

The table is that of ``benchmarks/distributions.py``, which enumerates all of its cells. Here each verification meets
each policy with every sixth drafter (with all of them where slow tests run), and transforms take turns.
"""

from __future__ import annotations

import importlib
import itertools
from dataclasses import fields
from typing import Any

import pytest
from scripted import steps_of
from scripted_drafters import DRAFTERS, VOCAB, scripted_target

from specbench.base.errors import UsageError
from specbench.decoding.model_defaults import ModelDefaults
from specbench.decoding.records import Step
from specbench.decoding.sampling import Sampling
from specbench.decoding.verdicts import METHODS
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.several import SeveralDrafters
from specbench.models.heads import FORMATS
from specbench.policies import build_policy
from specbench.specs import drafters as specs
from specbench.specs.policies import VERIFICATIONS, parse_policy

table: Any = importlib.import_module("distributions")

REFUSALS = (
    "verifies chains only, and the draft is a tree.",
    "with which {verification} is not lossless.",
    "does not verify the drafts of several drafters.",
    "drafts only chains",
    "Several drafters draft chains of one fixed length",
    "reads the drafter's distribution, and",
)


def test_no_axis_of_the_table_leaves_anything_out():
    assert set(METHODS) == set(VERIFICATIONS)
    built = [specs.parse_drafter(entry.spec) for entry in DRAFTERS.values()]
    # One from outside drafts by code of its own: tests/test_outside.py.
    assert {type(each) for each in built} == {*specs.DRAFTERS} - {specs.Outside}
    # Gemma 4's assistant reads a target of its own family: enumerated in tests/test_assistant.py.
    assert {entry.head for entry in DRAFTERS.values()} == {*FORMATS, None} - {"assistant"}
    plain = Sampling(temperature=1.0)
    for each in fields(Sampling):
        if each.name not in ("rules", "matcher", "seed"):  # made for one output, or no transform
            values = {str(getattr(sampling, each.name)) for sampling in table.SAMPLINGS.values()}
            assert values - {str(getattr(plain, each.name))}, f"no transform of the table changes {each.name}"
    assert len(list(table.cells())) == len(VERIFICATIONS) * len(table.POLICIES) * len(DRAFTERS) * len(
        table.SAMPLINGS
    )


def _parts() -> list[Any]:
    """By verification and policy which part of the drafters is tried; all but the first part are slow."""
    return [
        pytest.param(verification, policy, part, marks=pytest.mark.slow if part else (),
                     id=f"{verification}-{policy}" + (f"-{part}" if part else ""))
        for part, verification, policy in itertools.product(range(6), VERIFICATIONS, table.POLICIES)
    ]  # fmt: skip


@pytest.mark.parametrize(("verification", "policy", "part"), _parts())
def test_a_cell_is_exact_or_refused(verification, policy, part):
    row = list(VERIFICATIONS).index(verification) + table.POLICIES.index(policy)
    for place, drafter in enumerate(DRAFTERS):
        if (place + row) % 6 != part:
            continue
        sampling = list(table.SAMPLINGS)[(2 * row + 5 * place) % len(table.SAMPLINGS)]
        cell = table.Cell(verification, policy, drafter, sampling)
        gap, refusal = _measured(cell)
        if refusal is None:
            assert gap < table.TOLERANCE, cell
        else:
            known = [text.format(verification=verification) for text in REFUSALS]
            assert any(text in refusal.message for text in known), f"{cell}: {refusal.message}"
            assert refusal.hint, cell


def _measured(cell: Any) -> tuple[float, UsageError | None]:
    """The gap of a cell, or why it is refused."""
    try:
        return table.measure(cell), None
    except UsageError as error:
        return 1.0, error


@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_every_verification_takes_a_chain_of_a_model(verification):
    assert table.measure(table.Cell(verification, "fixed:gamma=2", "model", "multinomial")) < table.TOLERANCE


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", table.POLICIES)
@pytest.mark.parametrize("drafter", ["trimmed vocabulary", "lookup+trimmed", "trimmed|lookup"])
def test_a_drafter_whose_every_token_is_banned_proposes_nothing(drafter, policy, temperature, caplog):
    """The drafter knows two tokens, and the model's own settings suppress both."""
    trimmed = DRAFTERS["trimmed vocabulary"].build
    build, spec = {
        "trimmed vocabulary": (trimmed, "org/model"),
        "lookup+trimmed": (lambda target: CascadeDrafter(LookupDrafter(), trimmed(target)), "lookup+org/model"),
        "trimmed|lookup": (lambda target: SeveralDrafters([trimmed(target), LookupDrafter()]), "org/model|lookup"),
    }[drafter]  # fmt: skip
    rule = parse_policy(policy)
    if not rule.applies(specs.parse_drafter(spec)):
        return
    target = scripted_target()
    sampling = Sampling(temperature=temperature).with_defaults(
        ModelDefaults({"suppress_tokens": [1, 2]}), VOCAB
    )
    policy = build_policy(rule)
    records = steps_of([0, 0, 0], target, build(target), policy=policy, sampling=sampling, max_new_tokens=6)
    steps = [record for record in records if isinstance(record, Step)]
    assert {token for step in steps for token in step.tokens} == {0}
    assert not caplog.records, "its logits are numbers"
    drafted = [token for step in steps for token in step.drafted]
    assert drafted == [] if drafter == "trimmed vocabulary" else set(drafted) <= {0}
