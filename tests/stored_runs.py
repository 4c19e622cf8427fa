"""Run folders as a sweep leaves them: the one place where tests build stored runs.

``write_exact`` has the very speeds that a test gives; ``write_run`` draws steps at random from known acceptance and
costs; ``write_stored`` writes any lines; ``read_lines``, ``change_run`` and ``change_lines`` read one and change it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbench.base.errors import UsageError
from specbench.base.record import from_dict
from specbench.options import DecodingOptions
from specbench.recipe import Recipe, options_of, with_models
from specbench.results.lines import Measurement, parse_line
from specbench.results.run import VERSION, Run
from specbench.results.store import read_run
from specbench.rows import Condition, LoadedName, OtherLibrary, Row
from specbench.specs.drafters import DrafterSpec, SmallModel, parse_drafter
from specbench.specs.models import BUILTIN_MODELS, ModelSpec
from specbench.specs.policies import parse_policy

ENVIRONMENT = {
    "cpu": "Example CPU", "physical_cores": 2, "cores": 2, "threads": 2, "ram_gb": 16.0, "devices": [],
    "os": "Example 1", "python": "3.11.0", "torch": "2.0", "transformers": "5.0", "specbench": "0.1.0",
}  # fmt: skip
STEPS = 5
TOKENS = 1 + 2 * STEPS  # one by the prefill, two in every step

# -- their parts -------------------------------------------------------------------------------------


def row_of(
    name: str, *, drafter: str | None = None, fingerprint: str | None = None, temperature: float = 0.0
) -> Row:
    """The row called ``plain``, ``transformers``, ``drafter@γ`` or ``drafter@policy``, with ``,t=`` and a temperature.

    ``drafter`` is its name, where that is not in the row's; one that is no known name is a model.
    """
    name, _, hot = name.partition(",t=")
    at = Condition(float(hot or temperature))
    if name == "transformers":
        return Row(OtherLibrary("transformers"), at)
    recipe = Recipe(ModelSpec("folder", "model"))
    if name == "plain":
        return Row(recipe, at)
    front, _, draft_policy = name.rpartition("@")
    drafter = drafter or front
    draft_policy = f"fixed:gamma={draft_policy}" if draft_policy.isdecimal() else draft_policy
    recipe = replace(recipe, drafter=_drafter(drafter), policy=parse_policy(draft_policy))
    dtype = re.search(r" \((\w+)\)$", drafter)
    return Row(recipe, at, LoadedName(drafter, dtype and dtype[1], fingerprint))


def prompt_of(name: str, **changed: Any) -> dict[str, Any]:
    """A prompt called ``category-number``."""
    return {"id": name, "category": name.rsplit("-", 1)[0], "turns": 1, "fingerprint": None, **changed}


def described(rows: Iterable[Row], prompts: Iterable[dict[str, Any]], **changed: Any) -> dict[str, Any]:
    """What ``run.json`` holds, with the rows as they are."""
    return {
        "schema": VERSION, "kind": "specbench-sweep", "specbench": "0.1.0", "run_id": "c0ffee", "command": ["sweep"],
        "options": {}, "environment": ENVIRONMENT,
        "target": {"name": "target", "fingerprint": "f0", "dtype": "float32", "device": "cpu"},
        "configs": [*rows], "prompts": [*prompts], "seed": 0, "repeats": 2, "warmup": 1, "max_new_tokens": TOKENS,
        "ignore_eos": True, "created": "2025-01-01T00:00:00+00:00", "finished": "2025-01-01T01:00:00+00:00",
        "costs": None, "differences": [], "warnings": [], **changed,
    }  # fmt: skip


def line_of(config: str, prompt: str, repeat: int = 0, **changed: Any) -> dict[str, Any]:
    """A line of ``generations.jsonl``: of a generation that failed, unless ``changed`` says how it went."""
    return {
        "schema": VERSION, "run_id": "c0ffee", "config": config, "prompt": prompt, "category": prompt.rsplit("-", 1)[0],
        "turn": 0, "repeat": repeat, "order": 0, "warmup": False, "status": "failed", "error": "out of memory",
        "warnings": [], **changed,
    }  # fmt: skip


def finished(decode_s: float, tokens: Sequence[int], steps: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The fields of a generation that was measured; half a second of prefill emits its first token."""
    return {
        "status": "ok", "error": None, "prompt_tokens": 5, "new_tokens": len(tokens), "first_tokens": 1,
        "token_ids": [*tokens], "finish_reason": "length", "ttft_s": 0.5, "prefill_s": 0.5, "decode_s": decode_s,
        "total_s": 0.5 + decode_s, "peak_memory_bytes": 1_000_000_000, "load_average": 0.5, "started": 0.0,
        "steps": steps, **changed,
    }  # fmt: skip


def steps_of(
    drafted: Sequence[int],
    accepted: Sequence[int],
    emitted: Sequence[int],
    draft_s: Sequence[float],
    verify_s: Sequence[float],
    **changed: Any,
) -> dict[str, Any]:
    """Steps as a line holds them; what a chain tests and how a step ended follow from its counts."""
    none = [0.0] * len(drafted)
    return {
        "drafted": [*drafted], "tested": [min(g, a + 1) for g, a in zip(drafted, accepted, strict=True)],
        "accepted": [*accepted], "emitted": [*emitted], "draft_s": [*draft_s], "draft_prefill_s": none,
        "verify_s": [*verify_s], "accept_s": none, "rollback_s": none, "other_s": none,
        "nodes": [*drafted], "passes": [*drafted], "forced": [0] * len(drafted), "mask_s": none,
        "expected_acceptance": [[]] * len(drafted),
        "closing": [
            "target" if not g else "bonus" if a == g else "corrected" for g, a in zip(drafted, accepted, strict=True)
        ],
        "policy": {}, **changed,
    }  # fmt: skip


def decoded_in(run: dict[str, Any], row: Row) -> Row:
    """A row with the target and the options of a run."""
    if not isinstance(row.decoder, Recipe):
        return row
    options, target = run["options"], _model(run["target"].get("name") or "model")
    recipe = replace(row.decoder, target=target, decoding=options_of(DecodingOptions, options))
    return Row(recipe, row.condition, row.loaded)


def _model(name: str) -> ModelSpec:
    if name in BUILTIN_MODELS:
        return ModelSpec("builtin", name)
    return ModelSpec("hub" if "/" in name else "gguf" if name.endswith(".gguf") else "folder", name)


def _drafter(name: str) -> DrafterSpec:
    name = re.sub(r" \((int4)?\w*\)", lambda dtype: ":dtype=int4" if dtype[1] else "", name)
    front, plus, model = name.rpartition("+")
    try:
        return with_models(
            parse_drafter(name), lambda each: each if each.kind == "mtp" else _model(each.name)
        )
    except UsageError:
        if not plus:
            return SmallModel(_model(model))
        return replace(parse_drafter(f"{front}+self:int8"), back=SmallModel(_model(model)))  # type: ignore[call-arg]


# -- reading and altering them -----------------------------------------------------------------------


def write_stored(path: Path, run: dict[str, Any], lines: Iterable[dict[str, Any]]) -> Path:
    """A run folder of these contents; the lines get the run's id."""
    path.mkdir(parents=True, exist_ok=True)
    configs = [decoded_in(run, row).to_json() for row in run["configs"]]
    (path / "run.json").write_text(json.dumps({**run, "configs": configs}), encoding="utf-8")
    write_lines(path, ({**line, "run_id": run["run_id"]} for line in lines))
    return path


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "generations.jsonl").write_text(text, encoding="utf-8")


def read_lines(path: Path) -> list[dict[str, Any]]:
    text = (path / "generations.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def change_run(path: Path, **fields: Any) -> Path:
    """Set fields of ``run.json``."""
    file = path / "run.json"
    file.write_text(json.dumps(run_json(path) | fields), encoding="utf-8")
    return path


def change_lines(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """Merge what ``change`` gives for a line into that line."""
    write_lines(path, [line | change(line) for line in read_lines(path)])
    return path


# -- as the package reads them -----------------------------------------------------------------------


def kept_run(name: str) -> Path:
    """A run in ``results/``. Where it is missing, or of another schema than today's, the test is skipped."""
    path = Path(__file__).parents[1] / "results" / name
    try:
        read_run(path)
    except UsageError as error:
        pytest.skip(f"{error}")
    return path


def run_json(folder: Path) -> dict[str, Any]:
    """``run.json`` of a folder."""
    found: dict[str, Any] = json.loads((Path(folder) / "run.json").read_text())
    return found


def run_of(fields: Mapping[str, Any]) -> Run:
    """A run with these fields."""
    return from_dict(dict(fields), Run)


def measurement(row: Mapping[str, Any]) -> Measurement:
    """A line of ``generations.jsonl``."""
    return parse_line(json.dumps(row).encode())


# -- with given speeds -------------------------------------------------------------------------------


def write_exact(
    path: Path,
    speeds: Mapping[str, Mapping[str, Sequence[float | None]]],
    *,
    rows: Mapping[str, Row] | None = None,
    environment: Mapping[str, Any] | None = None,
    target: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
    tokens: Mapping[str, Sequence[int]] | None = None,
    disturbed: Sequence[str] = (),
    **run: Any,
) -> Path:
    """Write a run.

    Args:
        path: Its folder.
        speeds: Decode tokens/s by configuration, by prompt (``code-01`` of category ``code``, or ``code-01#1`` for
            its second turn), and by repeat; ``None`` for a generation that failed. ``plain`` is the baseline.
        rows: Rows other than ``row_of`` of these names.
        environment, target: Fields other than the usual.
        texts: Fingerprints of prompts.
        tokens: Output of a configuration.
        disturbed: Ids of what disturbed every generation.
        run: Other fields of ``run.json``.
    """
    lines = []
    rows = {name: row_of(name) for name in speeds} | dict(rows or {})
    for config, prompts in speeds.items():
        for name, repeats in prompts.items():
            prompt, _, turn = name.partition("#")
            for repeat, speed in enumerate(repeats):
                given = list((tokens or {}).get(config, range(TOKENS)))
                how = {} if speed is None else measured(speed, config, given)
                lines.append(
                    line_of(
                        rows[config].id, prompt, repeat, turn=int(turn or 0), warnings=[*disturbed], **how
                    )
                )
    names = dict.fromkeys(name for prompts in speeds.values() for name in prompts)
    turns = Counter(name.partition("#")[0] for name in names)
    facts = described(
        [rows[name] for name in speeds],
        [prompt_of(name, turns=count, fingerprint=(texts or {}).get(name)) for name, count in turns.items()],
        run_id=path.name,
        repeats=max(len(each) for prompts in speeds.values() for each in prompts.values()),
    )
    facts["environment"] = {**facts["environment"], **(environment or {})}
    facts["target"] = {**facts["target"], **(target or {})}
    return write_stored(path, {**facts, **run}, lines)


PROMPTS = ("chat-01", "chat-02", "chat-03", "code-01", "code-02", "code-03")
PLAIN = {prompt: [10.0, 10.0] for prompt in PROMPTS}
"""Speeds of plain decoding, as ``write_exact`` takes them."""


def times(factor: float, spread: float = 0.02, code: float = 1.0) -> dict[str, list[float]]:
    """Speeds around ``factor`` × plain's, the spread cancelling out over the prompts of a category."""
    return {
        prompt: [10 * factor * (code if "code" in prompt else 1.0) * math.exp(sign * spread)] * 2
        for prompt, sign in zip(PROMPTS, (-1, 1, 0, -1, 1, 0), strict=True)
    }


def measured(speed: float, config: str, tokens: list[int]) -> dict[str, Any]:
    """The figures of a generation: steps that accept the first of two drafts, or plain ones in its place."""
    seconds = 2 * STEPS / speed
    drafts = "@" in config
    count = 0 if config == "transformers" else STEPS if drafts else 2 * STEPS
    share = [seconds / count / 2 if count else 0.0] * count
    steps = steps_of(
        [2 * drafts] * count, [1 * drafts] * count, [1 + drafts] * count, share, share,
        expected_acceptance=[[0.75, 0.25] if drafts else []] * count,
    )  # fmt: skip
    return finished(seconds, tokens, steps, new_tokens=TOKENS)


# -- drawn at random ---------------------------------------------------------------------------------

CATEGORIES = (
    "chat", "question-answering", "summarisation", "translation", "mathematics", "code", "code-editing",
    "structured-output", "retrieval",
)  # fmt: skip
PASS_S = {n: 0.12 * v for n, v in enumerate((1.0, 1.0, 1.0, 1.01, 1.02, 1.04, 1.06, 1.09, 1.12), 1)}
NOISE = 0.03
"""Of times, on the logarithmic scale."""


@dataclass(frozen=True)
class Drafter:
    """A drafter that is accepted with chance ``alpha`` (± by prompt) at ``c`` target passes per token."""

    name: str
    alpha: float
    c: float
    spread: float = 0.08
    finds: float = 1.0  # chance of a step to draft anything


DRAFTERS = (
    Drafter("Qwen2.5-Coder-0.5B-Instruct", 0.72, 0.26),
    Drafter("self:int8", 0.9, 0.55, spread=0.03),
    Drafter("ngram", 0.42, 0.002, spread=0.2, finds=0.7),
    Drafter("lookup", 0.6, 0.001, spread=0.25, finds=0.35),
)


def write_run(
    path: Path,
    *,
    drafters: tuple[Drafter, ...] = DRAFTERS,
    gammas: tuple[int, ...] = tuple(range(1, 9)),
    categories: tuple[str, ...] = CATEGORIES,
    prompts_per_category: int = 2,
    tokens: int = 64,
    repeats: int = 2,
    target: str = "Qwen2.5-Coder-1.5B-Instruct",
    policies: tuple[str, ...] = (),
    transformers_row: bool = False,
    run_id: str = "c0ffee",
    costs: bool = True,
) -> Path:
    """Write a run folder; every generation emits ``tokens`` tokens, the first of them by the prefill."""
    rng = np.random.default_rng(0)
    rows = [row_of("plain"), *(row_of(f"{each.name}@{g}") for each in drafters for g in gammas)]
    rows += [row_of(f"{drafters[0].name}@{policy}") for policy in policies]
    rows += [row_of("transformers")] if transformers_row else []
    by_name = {drafter.name: drafter for drafter in drafters}
    prompts = [f"{category}-{i + 1:02d}" for category in categories for i in range(prompts_per_category)]
    lines = []
    for prompt in prompts:
        easy = rng.normal() * 0.5
        answer = rng.integers(0, 30000, tokens).tolist()
        for repeat in range(repeats):
            drift = np.exp(rng.normal() * 0.1)
            for order, place in enumerate(rng.permutation(len(rows)).tolist()):
                row = rows[place]
                who = by_name.get(row.drafter)
                alpha = 0.0 if who is None else float(np.clip(who.alpha + who.spread * easy, 0.02, 0.98))
                steps = _steps(rng, row, who, alpha, tokens - 1, drift)
                plain_s = 0.0
                if row.kind == "transformers":
                    plain_s = 1.6 * PASS_S[1] * (tokens - 1) * drift * float(np.exp(rng.normal() * NOISE))
                    steps = steps_of([], [], [], [], [])
                decode = plain_s + sum(
                    sum(steps[f"{part}_s"]) for part in ("draft", "verify", "accept", "rollback", "other")
                )
                ttft = 0.4 * drift
                how = finished(
                    decode, answer, steps, prompt_tokens=80, ttft_s=ttft, prefill_s=ttft, total_s=ttft + decode,
                    peak_memory_bytes=4_200_000_000,
                )  # fmt: skip
                lines.append(line_of(row.id, prompt, repeat, order=order, **how))
    times = {
        "target_pass_s": {str(n): s for n, s in PASS_S.items()},
        "drafter_pass_s": {d.name: d.c * PASS_S[1] for d in drafters},
    }
    run = described(
        rows, map(prompt_of, prompts), run_id=run_id, repeats=repeats, max_new_tokens=tokens,
        environment={"cpu": "AMD EPYC 9R14", "cores": 2, "threads": 2, "ram_gb": 25.0, "devices": []},
        target={"name": target, "fingerprint": "0", "dtype": "bfloat16", "device": "cpu", "vocab_size": 151936},
        costs=times if costs else None,
    )  # fmt: skip
    return write_stored(path, run, lines)


def _steps(
    rng: np.random.Generator,
    row: Row,
    drafter: Drafter | None,
    alpha: float,
    tokens: int,
    drift: float,
) -> dict[str, Any]:
    steps: dict[str, Any] = {}
    left = tokens
    while left:
        gamma = 0
        if drafter is not None and rng.random() < drafter.finds:
            gamma = min(row.gamma or int(rng.integers(3, 8)), left - 1)
        passed = rng.random(gamma) < alpha
        accepted = int(np.cumprod(passed).sum())
        tested = min(gamma, accepted + 1)
        wobble = drift * float(np.exp(rng.normal() * NOISE))
        verify = float(np.interp(gamma + 1, list(PASS_S), list(PASS_S.values())))
        c = 0.0 if drafter is None else drafter.c
        values = {
            "drafted": gamma, "accepted": accepted, "emitted": accepted + 1,
            "draft_s": gamma * c * PASS_S[1] * wobble, "verify_s": verify * wobble,
            "accept_s": 0.0012 * wobble, "rollback_s": 0.0004 * wobble, "other_s": 0.0003 * wobble,
            "expected_acceptance": [float(np.clip(alpha + 0.05 * rng.normal(), 0, 1)) for _ in range(tested)],
        }  # fmt: skip
        for name, value in values.items():
            steps.setdefault(name, []).append(value)
        left -= accepted + 1
    return steps_of(**steps)
