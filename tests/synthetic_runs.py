"""Runs made up with known truth: acceptance, costs and speeds are what the arguments say, plus noise."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CATEGORIES = (
    "chat", "question-answering", "summarisation", "translation", "mathematics", "code", "code-editing",
    "structured-output", "retrieval",
)  # fmt: skip
PASS_S = {
    n: 0.12 * v
    for n, v in {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.01, 5: 1.02, 6: 1.04, 7: 1.06, 8: 1.09, 9: 1.12}.items()
}


@dataclass(frozen=True)
class Drafter:
    """A drafter that is accepted with chance ``alpha`` (± by category) at ``c`` target passes per token."""

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
    noise: float = 0.03,
    seed: int = 0,
    temperature: float = 0.0,
    target: str = "Qwen2.5-Coder-1.5B-Instruct",
    entropy_policy: bool = False,
    policies: tuple[str, ...] = (),
    transformers_row: bool = False,
    run_id: str = "c0ffee",
    costs: bool = True,
) -> Path:
    """Write a run folder; every generation emits ``tokens`` tokens, the first of them by the prefill."""
    rng = np.random.default_rng(seed)
    path.mkdir(parents=True, exist_ok=True)
    configs: list[dict[str, Any]] = [_config("plain", "plain", "plain", "none", None, "none", temperature)]
    for drafter in drafters:
        configs += [
            _config(
                f"{drafter.name}-g{g}",
                f"{drafter.name} γ={g}",
                "speculative",
                drafter.name,
                g,
                "fixed",
                temperature,
            )
            for g in gammas
        ]
    if entropy_policy:
        name = drafters[0].name
        configs.append(_config("egag", f"{name} egag", "speculative", name, None, "egag", temperature))
    for name in policies:
        who = drafters[0].name
        configs.append(_config(name, f"{who} {name}", "speculative", who, None, name, temperature))
    if transformers_row:
        configs.append(_config("hf", "transformers", "transformers", "none", None, "none", temperature))
    by_name = {drafter.name: drafter for drafter in drafters}
    prompts = [f"{category}-{i + 1:02d}" for category in categories for i in range(prompts_per_category)]
    tilt = dict(zip(categories, np.linspace(-1.2, 1.2, len(categories)), strict=True))
    lines = []
    for prompt in prompts:
        category = prompt.rsplit("-", 1)[0]
        own = rng.normal() * 0.4
        answer = rng.integers(0, 30000, tokens).tolist()
        for repeat in range(repeats):
            drift = np.exp(rng.normal() * 0.1)
            for order, place in enumerate(rng.permutation(len(configs)).tolist()):
                config = configs[place]
                who = by_name.get(config["drafter"])
                alpha = (
                    0.0
                    if who is None
                    else float(np.clip(who.alpha + who.spread * (tilt[category] + own), 0.02, 0.98))
                )
                steps = _steps(rng, config, who, alpha, tokens - 1, noise, drift)
                plain_s = 0.0
                if config["kind"] == "transformers":
                    plain_s = 1.6 * PASS_S[1] * (tokens - 1) * drift * float(np.exp(rng.normal() * noise))
                    steps = {name: {} if name == "policy" else [] for name in steps}
                decode = plain_s + sum(
                    sum(steps[f"{part}_s"]) for part in ("draft", "verify", "accept", "rollback", "other")
                )
                ttft = 0.4 * drift
                lines.append(
                    {
                        "schema": 1,
                        "run_id": run_id,
                        "config": config["id"],
                        "prompt": prompt,
                        "category": category,
                        "turn": 0,
                        "repeat": repeat,
                        "order": order,
                        "warmup": False,
                        "status": "ok",
                        "error": None,
                        "prompt_tokens": 80,
                        "new_tokens": tokens,
                        "first_tokens": 1,
                        "token_ids": answer,
                        "finish_reason": "length",
                        "ttft_s": ttft,
                        "prefill_s": ttft,
                        "decode_s": decode,
                        "total_s": ttft + decode,
                        "peak_memory_bytes": 4_200_000_000,
                        "load_average": 0.5,
                        "started": 0.0,
                        "steps": steps,
                        "warnings": [],
                    }
                )
    run = {
        "schema": 1, "kind": "specbench-sweep", "specbench": "0.1.0", "run_id": run_id, "command": ["sweep"],
        "options": {}, "environment": {"cpu": "AMD EPYC 9R14", "cores": 2, "threads": 2, "ram_gb": 25.0, "devices": []},
        "target": {"name": target, "fingerprint": "0", "dtype": "bfloat16", "device": "cpu", "vocab_size": 151936},
        "configs": configs, "prompts": [{"id": p, "category": p.rsplit("-", 1)[0], "turns": 1} for p in prompts],
        "seed": seed, "repeats": repeats, "warmup": 1, "max_new_tokens": tokens, "ignore_eos": True,
        "created": "2025-01-01T00:00:00Z", "finished": "2025-01-01T01:00:00Z",
        "costs": {
            "target_pass_s": {str(n): s for n, s in PASS_S.items()},
            "drafter_pass_s": {d.name: d.c * PASS_S[1] for d in drafters},
        } if costs else None,
    }  # fmt: skip
    (path / "run.json").write_text(json.dumps(run))
    (path / "generations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _config(
    id_: str, label: str, kind: str, drafter: str, gamma: int | None, policy: str, temperature: float
) -> dict[str, Any]:
    return {
        "id": id_, "label": label, "kind": kind, "drafter": drafter, "drafter_fingerprint": None, "gamma": gamma,
        "policy": policy, "temperature": temperature, "cache": "dynamic", "baseline": "plain",
    }  # fmt: skip


def _steps(
    rng: np.random.Generator,
    config: dict[str, Any],
    drafter: Drafter | None,
    alpha: float,
    tokens: int,
    noise: float,
    drift: float,
) -> dict[str, Any]:
    names = (
        "drafted", "tested", "accepted", "emitted", "draft_s", "draft_prefill_s", "verify_s", "accept_s",
        "rollback_s", "other_s", "expected_acceptance", "closing",
    )  # fmt: skip
    steps: dict[str, Any] = {name: [] for name in names}
    policy: dict[str, list[float]] = {"H_norm": [], "H_bar": [], "gamma": []}
    left, smooth = tokens, 0.15
    while left:
        gamma = 0
        if drafter is not None and rng.random() < drafter.finds:
            wanted = config["gamma"]
            if wanted is None:
                h = float(np.clip(rng.gamma(1.3, 0.12), 0, 1))
                smooth = 0.7 * smooth + 0.3 * h
                wanted = max(1, round(8 - 14 * smooth))
                policy["H_norm"].append(h)
                policy["H_bar"].append(smooth)
                policy["gamma"].append(wanted)
            gamma = min(wanted, left - 1)
        passed = rng.random(gamma) < alpha
        accepted = int(np.cumprod(passed).sum())
        tested = min(gamma, accepted + 1)
        wobble = drift * float(np.exp(rng.normal() * noise))
        verify = float(np.interp(gamma + 1, list(PASS_S), list(PASS_S.values())))
        c = 0.0 if drafter is None else drafter.c
        values = {
            "drafted": gamma, "tested": tested, "accepted": accepted, "emitted": accepted + 1,
            "draft_s": gamma * c * PASS_S[1] * wobble, "draft_prefill_s": 0.0, "verify_s": verify * wobble,
            "accept_s": 0.0012 * wobble, "rollback_s": 0.0004 * wobble, "other_s": 0.0003 * wobble,
            "expected_acceptance": [float(np.clip(alpha + 0.05 * rng.normal(), 0, 1)) for _ in range(tested)],
            "closing": "target" if not gamma else "bonus" if accepted == gamma else "corrected",
        }  # fmt: skip
        if "tree" in config["policy"]:  # two candidates for every draft, the second of them kept now and then
            ranks = (rng.random(accepted) < 0.2).astype(int).tolist()
            values |= {"nodes": 2 * gamma, "widths": [2] * tested, "ranks": ranks}
        for name, value in values.items():
            steps.setdefault(name, []).append(value)
        left -= accepted + 1
    steps["policy"] = policy if len(policy["H_norm"]) == len(steps["drafted"]) else {}
    return steps
