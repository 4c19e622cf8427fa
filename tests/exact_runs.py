"""Run folders with the very speeds that a test asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "cpu": "Example CPU", "physical_cores": 2, "cores": 2, "threads": 2, "ram_gb": 16.0, "devices": [],
    "os": "Example 1", "python": "3.11.0", "torch": "2.0", "transformers": "5.0", "specbench": "0.1.0",
}  # fmt: skip
STEPS = 5
TOKENS = 1 + 2 * STEPS  # one by the prefill, two in every step


def write_exact(
    path: Path,
    speeds: Mapping[str, Mapping[str, Sequence[float | None]]],
    *,
    configs: Mapping[str, Mapping[str, Any]] | None = None,
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
        configs, environment, target: Fields other than the usual.
        texts: Fingerprints of prompts.
        tokens: Output of a configuration.
        disturbed: Ids of what disturbed every generation.
        run: Other fields of ``run.json``.
    """
    path.mkdir(parents=True)
    run_id = str(run.pop("run_id", path.name))
    lines = []
    for config, prompts in speeds.items():
        for name, repeats in prompts.items():
            prompt, _, turn = name.partition("#")
            for repeat, speed in enumerate(repeats):
                line = {
                    "schema": 1, "run_id": run_id, "config": config, "prompt": prompt,
                    "category": prompt.rsplit("-", 1)[0], "turn": int(turn or 0), "repeat": repeat, "order": 0,
                    "warmup": False, "status": "failed", "error": "out of memory", "warnings": [*disturbed],
                }  # fmt: skip
                if speed is not None:
                    line |= measured(speed, config, list((tokens or {}).get(config, range(TOKENS))))
                lines.append(line)
    prompts_of_all = dict.fromkeys(name for prompts in speeds.values() for name in prompts)
    turns: dict[str, int] = {}
    for name in prompts_of_all:
        turns[name.partition("#")[0]] = turns.get(name.partition("#")[0], 0) + 1
    described = {
        "schema": 1, "kind": "specbench-sweep", "specbench": "0.1.0", "run_id": run_id, "command": ["sweep"],
        "options": {}, "environment": {**ENVIRONMENT, **(environment or {})},
        "target": {"name": "target", "fingerprint": "f0", "dtype": "float32", "device": "cpu", **(target or {})},
        "configs": [{**config_of(name), **(configs or {}).get(name, {})} for name in speeds],
        "prompts": [
            {"id": name, "category": name.rsplit("-", 1)[0], "turns": count, "fingerprint": (texts or {}).get(name)}
            for name, count in turns.items()
        ],
        "seed": 0, "repeats": max(len(each) for prompts in speeds.values() for each in prompts.values()),
        "warmup": 1, "max_new_tokens": TOKENS, "ignore_eos": True, "created": "2025-01-01T00:00:00+00:00",
        "finished": "2025-01-01T01:00:00+00:00", "costs": None, "differences": [], "warnings": [], "changes": [],
        **run,
    }  # fmt: skip
    (path / "run.json").write_text(json.dumps(described), encoding="utf-8")
    (path / "generations.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    return path


def config_of(name: str) -> dict[str, Any]:
    """A configuration called ``drafter@gamma``, ``plain``, or what ``transformers`` does."""
    drafter, _, gamma = name.partition("@")
    kind = "plain" if name == "plain" else "transformers" if name == "transformers" else "speculative"
    return {
        "id": name, "label": f"{drafter} γ={gamma}" if gamma else name, "kind": kind,
        "drafter": drafter if kind == "speculative" else "none", "drafter_fingerprint": None,
        "gamma": int(gamma) if gamma else None, "policy": "fixed" if kind == "speculative" else "none",
        "temperature": 0.0, "cache": "dynamic", "baseline": "plain",
    }  # fmt: skip


def measured(speed: float, config: str, tokens: list[int]) -> dict[str, Any]:
    """The figures of a generation: steps that accept the first of two drafts, or plain ones in its place."""
    seconds = 2 * STEPS / speed
    drafts = "@" in config
    count = STEPS if drafts else 2 * STEPS
    if config == "transformers":
        count = 0
    share = seconds / count / 2 if count else 0.0
    return {
        "status": "ok", "error": None, "prompt_tokens": 5, "new_tokens": TOKENS, "first_tokens": 1,
        "token_ids": tokens, "finish_reason": "length", "ttft_s": 0.5, "prefill_s": 0.5, "decode_s": seconds,
        "total_s": 0.5 + seconds, "peak_memory_bytes": 1_000_000_000,
        "steps": {
            "drafted": [2 * drafts] * count, "tested": [2 * drafts] * count, "accepted": [1 * drafts] * count,
            "emitted": [1 + drafts] * count, "draft_s": [share] * count, "draft_prefill_s": [0.0] * count,
            "verify_s": [share] * count, "accept_s": [0.0] * count, "rollback_s": [0.0] * count,
            "other_s": [0.0] * count, "expected_acceptance": [[0.75, 0.25] if drafts else []] * count,
            "closing": ["corrected" if drafts else "target"] * count, "policy": {},
        },
    }  # fmt: skip
