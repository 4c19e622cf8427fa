"""`/metrics` in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/).

What vLLM counts too has its name behind another prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specbench.serve.engine import Engine


def metrics_text(engine: Engine) -> str:
    """Return the counters and gauges of an engine."""
    counts, use = engine.counts, engine.factory.use
    by_accepted = counts.steps_by_accepted.copy()
    accepted_at = {
        f'position="{place}"': sum(steps for accepted, steps in by_accepted.items() if accepted > place)
        for place in range(counts.longest)
    }
    ended = {f'reason="{reason}"': count for reason, count in engine.ended.copy().items()}
    metrics: list[tuple[str, str, float | Mapping[str, float]]] = [
        ("num_requests_running", "Requests being decoded.", engine.running),
        ("num_requests_waiting", "Requests waiting for their turn.", engine.waiting),
        ("requests_ended_total", "Ended requests, by reason.", ended),
        ("prompt_tokens_total", "Prompt tokens.", counts.prompt),
        ("generation_tokens_total", "Emitted tokens.", counts.completion),
        ("steps_total", "Steps after prefill.", counts.steps),
        ("spec_decode_num_drafts_total", "Steps that drafted.", by_accepted.total()),
        ("spec_decode_num_draft_tokens_total", "Drafted tokens.", counts.drafted),
        ("spec_decode_num_accepted_tokens_total", "Accepted draft tokens.", counts.accepted),
        ("spec_decode_num_accepted_tokens_per_pos_total", "Accepted ones by position.", accepted_at),
    ]
    if use is not None:
        share = use.used / max(1, use.blocks)
        metrics.append(("kv_cache_usage_perc", "Used share of the target's KV cache, from 0 to 1.", share))
    lines = []
    for name, meaning, value in metrics:
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP specbench:{name} {meaning}", f"# TYPE specbench:{name} {kind}"]
        samples = value if isinstance(value, Mapping) else {"": value}
        for label, count in samples.items():
            lines.append(f"specbench:{name}{f'{{{label}}}' if label else ''} {count}")
    return "\n".join(lines) + "\n"
