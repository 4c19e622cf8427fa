"""What `/metrics` says, in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/).

Figures of speculation have the names and meanings that vLLM and llama.cpp give theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specbench.serve.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(engine: Engine) -> str:
    """The counters and gauges of an engine."""
    counts, use = engine.counts, engine.factory.use
    lines = [
        *_metric("requests_running", "gauge", "Requests that are decoded now.", engine.running),
        *_metric("requests_waiting", "gauge", "Requests that wait for their turn.", engine.waiting),
        *_metric("requests_ended_total", "counter", "Requests that have ended, by why.", counts.ended.copy(), "reason"),
        *_metric("prompt_tokens_total", "counter", "Tokens of the prompts.", counts.prompt_tokens),
        *_metric("generation_tokens_total", "counter", "Tokens emitted.", counts.tokens),
        *_metric("steps_total", "counter", "Passes of the target behind the prompts.", counts.steps),
        *_metric("spec_decode_num_drafts_total", "counter", "Steps that drafted.", counts.drafts),
        *_metric("spec_decode_num_draft_tokens_total", "counter", "Tokens drafted.", counts.drafted),
        *_metric("spec_decode_num_accepted_tokens_total", "counter", "Drafted tokens kept.", counts.accepted),
        *_metric(
            "spec_decode_num_accepted_tokens_per_pos_total",
            "counter",
            "Drafted tokens kept, by their place in the draft.",
            {str(place): kept for place, kept in sorted(counts.kept_at.copy().items())},
            "position",
        ),
    ]  # fmt: skip
    if use is not None:
        lines += _metric("kv_blocks", "gauge", "Blocks of the target's pool.", use.blocks)
        lines += _metric("kv_blocks_used", "gauge", "Blocks of it that are taken.", use.used)
    return "\n".join(lines) + "\n"


def _metric(
    name: str, kind: str, meaning: str, value: float | Mapping[str, float], label: str = ""
) -> list[str]:
    """Its lines.

    Args:
        name: Without the prefix that all have.
        kind: ``counter`` or ``gauge``.
        meaning: A sentence.
        value: The figure, or figures by what the label says.
        label: Its name.
    """
    name = f"specbench:{name}"
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
    if isinstance(value, Mapping):
        return [*lines, *(f'{name}{{{label}="{each}"}} {figure}' for each, figure in value.items())]
    return [*lines, f"{name} {value}"]
