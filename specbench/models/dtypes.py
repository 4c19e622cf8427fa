"""In which dtype a checkpoint is decoded on a CPU where none is asked for: measured once, and kept in the cache folder.

Only dtypes that hold every value of the checkpoint are compared: the one it is stored in, and float32. Two of them give
the same model up to the rounding of activations, and which one is quicker depends on the processor's instructions.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from statistics import median
from typing import TYPE_CHECKING

import torch

from specbench._version import __version__
from specbench.backends.torch.dtype_timing import sample_in, time_samples
from specbench.backends.torch.kernels import native
from specbench.backends.torch.kernels.instructions import cpu_signature
from specbench.base.errors import SpecbenchError
from specbench.models.json_store import JsonStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROUNDS = 15
_INNER = slice(3, -3)
"""Of so many ratios in their order, these hold the median with a chance of 0.965, however they are distributed."""

_PATIENCE_S = 15.0
"""What measuring may take: a quiet machine needs two to five."""

_MARGIN = 1.05
"""Less than that is not worth another dtype."""

_WORTH_MEASURING = 1 << 25
"""Numbers of a checkpoint below which any dtype will do."""


@dataclass(frozen=True)
class DtypeChoice:
    """A dtype, and what it was chosen over.

    Attributes:
        target: The model's name.
        dtype, other: Such as "bfloat16" and "float32".
        speedup: How many times as quick passes are in ``dtype``, as the median of rounds.
        low, high: Of its interval.
    """

    target: str
    dtype: str
    other: str
    speedup: float
    low: float
    high: float

    @property
    def sentence(self) -> str:
        """For whoever waited for it."""
        return (
            f"{self.target} runs in {self.dtype}: measured {self.speedup:.2f}× as fast as {self.other} here, and kept"
            " for later starts."
        )


def exact_dtypes(counts: Counter[torch.dtype]) -> tuple[torch.dtype, ...]:
    """The dtypes that hold every value of files with such numbers; empty where that is not known.

    Args:
        counts: How many numbers there are of each dtype.
    """
    kinds = [kind for kind in counts if kind.is_floating_point]
    if any(kind not in (torch.float32, torch.bfloat16, torch.float16) for kind in kinds) or not kinds:
        return ()
    return (torch.float32,) if len(kinds) > 1 or kinds == [torch.float32] else (kinds[0], torch.float32)


def dtype_key(weights: str) -> str:
    """The name of a choice's file: for such weights, this processor and what may use it, threads and versions.

    Args:
        weights: See ``checkpoints.headers_digest``.
    """
    facts = [
        *cpu_signature(),
        native.why_unavailable(),
        torch.__version__,
        metadata.version("transformers"),
        __version__,
    ]
    return f"{weights[:16]}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"


def measure_dtypes(
    model: PreTrainedModel, name: str, usual: torch.dtype, other: torch.dtype
) -> DtypeChoice | None:
    """Time a model's first layers in two dtypes, in turn.

    Args:
        model: As ``transformers`` has loaded it; it is left as it is.
        name: What it is called.
        usual: What is taken where nothing can be said.
        other: Another dtype that holds its values.

    Returns:
        ``None`` where the machine is too busy to tell, or the model is too small to, or cannot be cut.
    """
    if sum(weight.numel() for weight in model.parameters()) < _WORTH_MEASURING:
        return None
    try:
        samples = {dtype: sample_in(model, dtype) for dtype in (usual, other)}
    except (ValueError, SpecbenchError):
        return None
    times = time_samples(samples, _ROUNDS, _PATIENCE_S)
    if len(times) < _ROUNDS:
        return None
    return decide(name, usual, other, [(each[usual], each[other]) for each in times])


def decide(
    name: str, usual: torch.dtype, other: torch.dtype, times: Sequence[tuple[float, float]]
) -> DtypeChoice | None:
    """The other dtype if it is surely worth it, the usual one if that is surely not so, and otherwise ``None``.

    Args:
        name, usual, other: See ``measure_dtypes``.
        times: Of both in every round.
    """
    gains = sorted(mine / its for mine, its in times)
    inner = gains[_INNER]
    usual_name, other_name = (str(dtype).removeprefix("torch.") for dtype in (usual, other))
    middle = median(gains)
    if inner[0] >= _MARGIN:
        return DtypeChoice(name, other_name, usual_name, middle, inner[0], inner[-1])
    if inner[-1] <= _MARGIN:
        return DtypeChoice(name, usual_name, other_name, 1 / middle, 1 / inner[-1], 1 / inner[0])
    return None


_KNOWN = ("float32", "bfloat16", "float16")

_STORE = JsonStore(
    "dtypes",
    DtypeChoice,
    "The stored dtype is",
    "It is measured again.",
    lambda choice: (
        {choice.dtype, choice.other} <= {*_KNOWN} and min(choice.speedup, choice.low, choice.high) > 0
    ),
)


def read_dtype(key: str) -> DtypeChoice | None:
    """What was chosen; ``None`` for nothing, or nothing that can be read: it is measured again."""
    with suppress(SpecbenchError):
        return _STORE.read(key)
    return None


def write_dtype(key: str, choice: DtypeChoice) -> None:
    """Keep a choice, where the cache folder can be written."""
    with suppress(SpecbenchError):
        _STORE.write(key, choice)
