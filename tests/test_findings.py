"""The catalog of findings: each is returned somewhere, reads well, and says no more than its numbers hold."""

from __future__ import annotations

import ast
import math
import re
import string
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stored_runs import PLAIN, PROMPTS, times, write_exact
from test_doctor import answer, drafting

from specbench.base.record import Estimate
from specbench.doctor.checks import Examined, diagnose
from specbench.doctor.probes import Observations
from specbench.findings.catalog import CATALOG, Finding
from specbench.findings.review import review
from specbench.results.results import load_results
from specbench.results.stats import verdict
from specbench.results.summary import Summary
from specbench.show.answer import find_answers, how_far_it_pays

PACKAGE = Path(__file__).parents[1] / "specbench"
EVIL = "[red]a\x1b[31m\nb"
ESTIMATES = {"speedup", "low", "high"}
LISTS = {"shares", "found", "names", "others", "counts"}


def fields(name: str) -> dict[str, str]:
    """The names in a finding's sentence and remedy, with their forms."""
    found: dict[str, str] = {}
    for _, field, spec, _ in string.Formatter().parse(" ".join(CATALOG[name][1:])):
        if field:
            found[field] = spec or found.get(field, "")
    return found


def numbers(name: str, number: int) -> dict[str, Any]:
    """``number`` of everything, 0 being infinite where it is no count, and an interval if it is of several."""
    found: dict[str, Any] = {}
    for field, spec in fields(name).items():
        found[field] = number if spec else EVIL
        if spec.endswith(("f", "g", "%")):
            found[field] = float(number or math.inf)
        elif field in ESTIMATES and not spec:
            ends = (1.5, 2.5, number, "prompts") if number > 2 else (None, None, number)
            found[field] = Estimate(2.0, *ends)  # type: ignore[arg-type]
        elif field in LISTS:
            found[field] = [EVIL] * min(max(number, 1), 20)
    return found


def test_the_ids_in_the_code_are_those_of_the_catalog():
    """Ids of failed probes are made of the names of probes."""
    texts, returned = set(), set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and path.name != "catalog.py":
                texts.add(node.value)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Finding":
                returned |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    assert returned <= CATALOG.keys(), "not in the catalog"
    rest = {name.removesuffix(".failed") for name in CATALOG.keys() - texts}
    assert rest <= texts, "no logic returns it"
    for name, (severity, _, remedy) in CATALOG.items():
        assert remedy or severity in ("ok", "note"), f"{name} says not what to do"
    options = {*re.findall(r"--[a-z][a-z-]+", " ".join(" ".join(row) for row in CATALOG.values()))}
    files = (PACKAGE.parent / "docs" / "cli.md", Path(__file__).with_name("engine_options.json"))
    known = "".join(file.read_text(encoding="utf-8") for file in files)
    unknown = {option for option in options if not re.search(rf"{option}\b(?!-)", known)}
    assert unknown == {"--enable-metrics", "--enable-prefix-caching"}, (
        "of SGLang and vLLM, not used in exports"
    )


@pytest.mark.parametrize("number", [0, 1, 2, 1234567])
def test_every_sentence_is_whole_and_safe(number):
    for name, (_, *templates) in CATALOG.items():
        finding = Finding(name, **numbers(name, number))
        for template, said in zip(templates, (finding.text, finding.remedy), strict=True):
            assert said.isprintable()
            assert not re.search(r"[{}]|  | ,|\.\.|\b(inf|nan)\b", said), said
            assert not template or template.endswith("}") or said.endswith("."), said
            assert not re.search(r"\b1 (\w+ )?(\w+s of|\w+ (are|have|were|say))\b", said), said


def check_claims(text: str, *, prompts: int, rivals: int) -> None:
    """Fail if a text says more than so many prompts and measured rivals hold: a star marks intervals over repeats."""
    assert not re.search(r"\b0 of 0\b|\bnan\b|\binf\b|None(?! of)", text), text
    assert rivals > 1 or not re.search(r"\b([Bb]est|fastest|[Nn]o other|none of these)\b", text), text
    assert prompts > 1 or not re.search(r"\[[\d., ]+\](?!\*)", text), text


def held(findings: Iterator[Finding], *, prompts: int, rivals: int) -> set[str]:
    """The ids of findings, which say no more than so many prompts and rivals hold."""
    found = [*findings]
    for finding in found:
        check_claims(finding.line, prompts=prompts, rivals=rivals)
    return {finding.id for finding in found}


ONE = {"plain": {"chat-01": [10.0]}, "d@2": {"chat-01": [20.0]}}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "one prompt": (ONE, {}, {"few-prompts"}),
    "nothing compared": ({"plain": {"chat-01": [10.0]}}, {}, {"few-prompts"}),
    "a rival failed": (ONE | {"d@5": {"chat-01": [None]}}, {}, {"few-prompts", "failed.all"}),
    "all failed": ({name: {"chat-01": [None]} for name in ("plain", "d@2")}, {}, {"failed.all"}),
    "always disturbed": (ONE, {"disturbed": ("steal", "<b>")}, {"few-prompts", "steal"}),
    "wide": ({"plain": PLAIN, "d@2": times(2.0, 1.0)}, {}, {"few-prompts", "wide-intervals"}),
    "a slow baseline": (
        {"plain": PLAIN, "transformers": times(2.0)}, {}, {"few-prompts", "baseline-slow"}),
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_a_run_with_little_in_it_is_not_overrated(tmp_path, case):
    speeds, run, expected = RUNS[case]
    summary = Summary(load_results(write_exact(tmp_path / "run", speeds, **run)))
    rivals = [row for row in summary.rows if row.config.kind == "speculative" and row.measured]
    numbers = {"prompts": len(PROMPTS) if speeds["plain"] is PLAIN else 1, "rivals": len(rivals)}
    assert held(review(summary), **numbers) == expected
    for said in find_answers(summary):
        check_claims(" ".join([said.headline, *said.details]), **numbers)
        assert said.headline.startswith(("Yes, ", "No, ", "Not known, "))
        assert bool(said.command) == (said.verdict in ("faster", "slower"))


def on_curve(batch: int, speedup: float) -> Any:
    """A row with an interval of 10%; 0 is one without."""
    ends = (0.9 * speedup, 1.1 * speedup, 8, "prompts") if speedup else (None, None, 1)
    ratio = Estimate(speedup or 2.0, *ends)  # type: ignore[arg-type]
    condition = SimpleNamespace(context=None, batch=batch)
    config = SimpleNamespace(name="d", condition=condition)
    return SimpleNamespace(config=config, speedup=ratio, verdict=verdict(ratio))


@pytest.mark.parametrize(
    ("speedups", "said"),
    [
        ([2.0], "only"), ([2.0, 1.5], "everywhere most"), ([1.5, 2.0], "everywhere"), ([2.0, 1.0], "up-to holds"),
        ([2.0, 0.5], "up-to below"), ([0.5, 2.0], "at below"), ([1.0, 0.5], "nowhere holds"), ([0.5], "slower"),
        ([0.0], "unknown"), ([2.0, 0.0], "up-to few"), ([0.5, 0.0], "nowhere few"),
    ],
)  # fmt: skip
def test_a_curve_pays_as_far_as_its_intervals_say(speedups, said):
    rows = [on_curve(2**number, speedup) for number, speedup in enumerate(speedups)]
    found = [finding.id.removeprefix("curve.") for finding in how_far_it_pays(rows)]
    assert found == said.split()


def observed(**fields: Any) -> Examined:
    return Examined(Observations("vllm", "m", **fields))


def test_a_server_that_says_little_is_not_overrated():
    nothing = {"tokens.counted", "logprobs.none"}
    cases: list[tuple[Examined, set[str]]] = [
        (observed(failed={"answers": "cut"}), {"answers.failed"}),
        (observed(answers=[answer(None)]), {*nothing, "speculation.unknown"}),
        (observed(answers=[answer()]), {*nothing, "speculation.off"}),
        (observed(answers=[answer(90)]), {*nothing, "speculation.on", "acceptance.rate"}),
    ]
    for examined, expected in cases:
        assert held(diagnose(examined), prompts=1, rivals=1) == expected
    every = held(diagnose(drafting(4, (0, 0, 0, 0))), prompts=4, rivals=1)
    assert "acceptance.none" in every
