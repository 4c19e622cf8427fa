"""specbench: speculative decoding, exact and measured.

from specbench import load_target, load_drafter, speculative_generate

target = load_target("smollm2-135m")
drafter = load_drafter("lookup", target)
print(speculative_generate("Why is the sky blue?", target, drafter).text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from specbench._version import __version__

if TYPE_CHECKING:
    from specbench.base.errors import RunError, SpecbenchError, UsageError
    from specbench.decoding.drafts import Guess
    from specbench.decoding.metrics import summary
    from specbench.decoding.records import Generation, Prefill, Step
    from specbench.decoding.sampling import Sampling
    from specbench.drafters.free import FreeDrafter
    from specbench.generate import GenerationRun, autoregressive_generate, encode_prompt, speculative_generate
    from specbench.generate_many import GenerationRuns, speculative_generate_many
    from specbench.loaded import LoadedRecipe, load_recipe
    from specbench.models.drafters import load_drafter, wrap_drafter
    from specbench.models.target import Target, load_target, wrap_target
    from specbench.options import DecodingOptions, LoadOptions
    from specbench.policies import FixedLength
    from specbench.results.results import load_results
    from specbench.results.store import read_recipe
    from specbench.sweeps import sweep

_HOMES = {
    "decoding.drafts": ("Guess",),
    "base.errors": ("RunError", "SpecbenchError", "UsageError"),
    "sweeps": ("sweep",),
    "drafters.free": ("FreeDrafter",),
    "generate": ("GenerationRun", "autoregressive_generate", "encode_prompt", "speculative_generate"),
    "generate_many": ("GenerationRuns", "speculative_generate_many"),
    "loaded": ("LoadedRecipe", "load_recipe"),
    "policies": ("FixedLength",),
    "models.drafters": ("load_drafter", "wrap_drafter"),
    "models.target": ("Target", "load_target", "wrap_target"),
    "decoding.metrics": ("summary",),
    "options": ("DecodingOptions", "LoadOptions"),
    "decoding.records": ("Generation", "Prefill", "Step"),
    "decoding.sampling": ("Sampling",),
    "results.results": ("Results", "load_results"),
    "results.store": ("read_recipe",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "DecodingOptions", "FixedLength", "FreeDrafter", "Generation", "GenerationRun", "GenerationRuns", "Guess",
    "LoadOptions", "LoadedRecipe", "Prefill", "Results", "RunError", "Sampling", "SpecbenchError",
    "Step", "Target", "UsageError", "__version__", "autoregressive_generate",
    "encode_prompt", "load_drafter", "load_recipe", "load_results", "load_target", "read_recipe",
    "speculative_generate", "speculative_generate_many", "summary", "sweep", "wrap_drafter", "wrap_target",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name on first use: torch takes seconds to import, and ``specbench --help`` does not need it."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'specbench' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"specbench.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
