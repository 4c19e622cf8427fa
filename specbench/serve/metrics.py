"""`/metrics` in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/).

Metrics of speculation have the names and meanings that vLLM and llama.cpp give them.
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
    return "\n".join(lines) + "\n"


def _metric(
    name: str, kind: str, meaning: str, value: float | Mapping[str, float], label: str = ""
) -> list[str]:
    """Return the lines of a metric with one value, or with values by a label's."""
    name = f"specbench:{name}"
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
    if isinstance(value, Mapping):
        return [*lines, *(f'{name}{{{label}="{each}"}} {count}' for each, count in value.items())]
    return [*lines, f"{name} {value}"]
