"""`/metrics` in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/).

Metrics that vLLM has too are repeated under its names, with its labels, for tools that read those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from specbench.serve.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_VLLM_NAMES = {"requests_running": "num_requests_running", "requests_waiting": "num_requests_waiting"}
"""vLLM's names of metrics that have other names here."""


class _Metric(NamedTuple):
    """A metric: one value, or values by those of a label."""

    name: str
    kind: Literal["counter", "gauge"]
    meaning: str
    value: float | Mapping[str, float]
    label: str = ""

    def lines(self, prefix: str, labels: str = "") -> Iterator[str]:
        """Yield its lines, with further labels."""
        name = f"{prefix}:{self.name}"
        yield f"# HELP {name} {self.meaning}"
        yield f"# TYPE {name} {self.kind}"
        values = self.value if isinstance(self.value, Mapping) else {"": self.value}
        for each, count in values.items():
            shown = ",".join(filter(None, (labels, self.label and f'{self.label}="{each}"')))
            yield f"{name}{{{shown}}} {count}" if shown else f"{name} {count}"


def metrics_text(engine: Engine) -> str:
    """Return the counters and gauges of an engine."""
    counts, use = engine.counts, engine.factory.use
    ended, by_accepted = engine.ended.copy(), counts.steps_by_accepted.copy()
    accepted_at = {
        str(place): sum(steps for accepted, steps in by_accepted.items() if accepted > place)
        for place in range(counts.longest)
    }
    shared = [
        _Metric("requests_running", "gauge", "Requests being decoded.", engine.running),
        _Metric("requests_waiting", "gauge", "Requests waiting for their turn.", engine.waiting),
        _Metric("prompt_tokens_total", "counter", "Prompt tokens.", counts.prompt),
        _Metric("generation_tokens_total", "counter", "Emitted tokens.", counts.completion),
        _Metric("spec_decode_num_drafts_total", "counter", "Steps that drafted.", by_accepted.total()),
        _Metric("spec_decode_num_draft_tokens_total", "counter", "Drafted tokens.", counts.drafted),
        _Metric("spec_decode_num_accepted_tokens_total", "counter", "Accepted draft tokens.", counts.accepted),
        _Metric("spec_decode_num_accepted_tokens_per_pos_total", "counter",
                "Accepted draft tokens, by position in the draft.", accepted_at, "position"),
    ]  # fmt: skip
    own = [
        _Metric("requests_ended_total", "counter", "Ended requests, by reason.", ended, "reason"),
        _Metric("steps_total", "counter", "Steps after prefill.", counts.steps),
    ]
    reasons = {
        "stop": ended["eos"] + ended["stop-string"],
        "length": ended["length"] + ended["context-limit"],
        "abort": ended["cancelled"],
        "error": ended["failed"],
    }
    theirs = [each._replace(name=_VLLM_NAMES.get(each.name, each.name)) for each in shared]
    theirs.append(
        _Metric("request_success_total", "counter", "Ended requests, by reason.", reasons, "finished_reason")
    )
    if use is not None:
        own.append(_Metric("kv_blocks", "gauge", "Blocks of the target's KV cache pool.", use.blocks))
        own.append(_Metric("kv_blocks_used", "gauge", "Used blocks of it.", use.used))
        share = use.used / max(1, use.blocks)
        theirs.append(_Metric("kv_cache_usage_perc", "gauge", "Share of used blocks, from 0 to 1.", share))
    model = engine.target.name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines = [line for each in (*shared, *own) for line in each.lines("specbench")]
    lines += [line for each in theirs for line in each.lines("vllm", f'engine="0",model_name="{model}"')]
    return "\n".join(lines) + "\n"
