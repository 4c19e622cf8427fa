"""The engines that `specbench export` knows."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specbench.export.engine import ExportEngine

ENGINES: Mapping[str, str] = {
    "transformers": "transformers:Transformers",
    "vllm": "vllm:VLLM",
    "sglang": "sglang:SGLang",
    "llama.cpp": "llama_cpp:LlamaCpp",
    "mlx-lm": "mlx_lm:MlxLm",
}
"""Module and class of each engine by its name, in the order of listings."""


def load_engine(name: str) -> ExportEngine:
    """Import an engine by its name."""
    module, _, kind = ENGINES[name].partition(":")
    engine: ExportEngine = getattr(import_module(f"specbench.export.{module}"), kind)()
    return engine
