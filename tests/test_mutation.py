"""The suite notices bugs of the algorithm, which benchmarks/mutation.py plants, with others of caches and batches."""

from __future__ import annotations

import ast

import mutation
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("bug", mutation.ALGORITHM, ids=lambda bug: bug.name)
def test_a_planted_bug_is_noticed(bug):
    assert mutation.noticed_by(bug) is not None


@pytest.mark.slow
def test_what_changes_nothing_goes_unnoticed():
    assert mutation.noticed_by(mutation.CONTROL) is None


def test_every_bug_has_its_place():
    for bug in (*mutation.ALGORITHM, *mutation.SYSTEM):
        mutation.mutated(bug, mutation.ROOT / "specbench")


def test_a_place_is_found_by_name_and_not_by_format(tmp_path):
    (tmp_path / "new.py").write_text(
        "class A:\n    def f(self, a):\n        b = (  # why\n            a + 1)\n        return b, b\n",
        encoding="utf-8",
    )

    def planted(where: str, old: str, new: str) -> str:
        return ast.unparse(mutation.mutated(mutation.Bug("", where, old, new, ""), tmp_path)[1])

    assert "b = a - 1" in planted("new.py:A.f", "a+1", "a - 1")
    for where, old in (("new.py:A.f", "a + 2"), ("new.py:A.g", "a + 1"), ("new.py:A.f", "b")):
        with pytest.raises(mutation.LostError, match=where.rpartition(":")[2]):
            planted(where, old, "a")
