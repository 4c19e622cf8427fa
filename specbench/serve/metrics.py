"""`/metrics` in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/).

Metrics that vLLM has too are repeated under its names, with its labels, for tools that read those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specbench.serve.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(engine: Engine) -> str:
    """Return the counters and gauges of an engine."""
    counts, use = engine.counts, engine.factory.use
    accepted_at = {str(place): count for place, count in sorted(counts.kept_at.copy().items())}
    lines = [
        *_metric("requests_running", "gauge", "Requests being decoded.", engine.running),
        *_metric("requests_waiting", "gauge", "Requests waiting for their turn.", engine.waiting),
        *_metric("requests_ended_total", "counter", "Ended requests, by reason.", counts.ended.copy(), "reason"),
        *_metric("prompt_tokens_total", "counter", "Prompt tokens.", counts.prompt_tokens),
        *_metric("generation_tokens_total", "counter", "Emitted tokens.", counts.tokens),
        *_metric("steps_total", "counter", "Steps after prefill.", counts.steps),
        *_metric("spec_decode_num_drafts_total", "counter", "Steps that drafted.", counts.drafts),
        *_metric("spec_decode_num_draft_tokens_total", "counter", "Drafted tokens.", counts.drafted),
        *_metric("spec_decode_num_accepted_tokens_total", "counter", "Accepted draft tokens.", counts.accepted),
        *_metric("spec_decode_num_accepted_tokens_per_pos_total", "counter",
                 "Accepted draft tokens, by position in the draft.", accepted_at, "position"),
    ]  # fmt: skip
    if use is not None:
        lines += _metric("kv_blocks", "gauge", "Blocks of the target's KV cache pool.", use.blocks)
        lines += _metric("kv_blocks_used", "gauge", "Used blocks of it.", use.used)
        lines += _vllm("kv_cache_usage_perc", "gauge", use.used / max(1, use.blocks), engine.target.name)
    lines += _vllm_metrics(engine)
    return "\n".join(lines) + "\n"


def _vllm_metrics(engine: Engine) -> list[str]:
    """Return the metrics that vLLM has as well, under its names."""
    counts, model = engine.counts, engine.target.name
    values = (
        ("num_requests_running", "gauge", engine.running),
        ("num_requests_waiting", "gauge", engine.waiting),
        ("prompt_tokens_total", "counter", counts.prompt_tokens),
        ("generation_tokens_total", "counter", counts.tokens),
        ("spec_decode_num_drafts_total", "counter", counts.drafts),
        ("spec_decode_num_draft_tokens_total", "counter", counts.drafted),
        ("spec_decode_num_accepted_tokens_total", "counter", counts.accepted),
    )
    lines = [line for name, kind, value in values for line in _vllm(name, kind, value, model)]
    places = {f'position="{place}"': count for place, count in sorted(counts.kept_at.copy().items())}
    lines += _vllm("spec_decode_num_accepted_tokens_per_pos_total", "counter", places, model)
    ended = counts.ended.copy()
    reasons = {
        "stop": ended["eos"] + ended["stop-string"],
        "length": ended["length"] + ended["context-limit"],
        "abort": ended["cancelled"],
        "error": ended["failed"],
    }
    labeled = {f'finished_reason="{reason}"': count for reason, count in reasons.items()}
    return lines + _vllm("request_success_total", "counter", labeled, model)


def _vllm(name: str, kind: str, value: float | Mapping[str, float], model: str) -> list[str]:
    """Return the lines of a metric under vLLM's name: one value, or values by a further label."""
    escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    labels = f'engine="0",model_name="{escaped}"'
    values = {"": value} if not isinstance(value, Mapping) else value
    samples = (f"vllm:{name}{{{labels}{',' * bool(each)}{each}}} {count}" for each, count in values.items())
    return [f"# HELP vllm:{name} As in vLLM.", f"# TYPE vllm:{name} {kind}", *samples]


def _metric(
    name: str, kind: str, meaning: str, value: float | Mapping[str, float], label: str = ""
) -> list[str]:
    """Return the lines of a metric with one value, or with values by a label's."""
    name = f"specbench:{name}"
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
    if isinstance(value, Mapping):
        return [*lines, *(f'{name}{{{label}="{each}"}} {count}' for each, count in value.items())]
    return [*lines, f"{name} {value}"]
