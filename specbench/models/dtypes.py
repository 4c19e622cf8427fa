"""The default dtype of a checkpoint on a CPU: the fastest one, measured once and stored in the cache folder.

Only dtypes that represent every weight of the checkpoint exactly are compared: the stored one and float32. Both give
the same model up to the rounding of activations; which one is faster depends on the processor's instructions.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from msgspec import Meta

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
"""Of 15 sorted ratios, these hold the median with probability 0.965, whatever their distribution."""

_PATIENCE_S = 15.0
"""Longest measurement; a quiet machine needs two to five seconds."""

_MARGIN = 1.05
"""Smallest speedup that is worth another dtype."""

_WORTH_MEASURING = 1 << 25
"""Smallest number of weights that is worth measuring."""

_Name = Literal["float32", "bfloat16", "float16"]
_Ratio = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class DtypeChoice:
    """A chosen dtype, with the measurement that it was chosen by.

    Attributes:
        target: The model's name.
        dtype, other: The chosen dtype and the other one.
        speedup: Speedup of forward passes in ``dtype`` over those in ``other``, median of rounds.
        low, high: Interval of the speedup.
    """

    target: str
    dtype: _Name
    other: _Name
    speedup: _Ratio
    low: _Ratio
    high: _Ratio

    @property
    def sentence(self) -> str:
        """Return a note for the user, who has waited for the measurement."""
        return (
            f"{self.target} runs in {self.dtype}: measured {self.speedup:.2f}× as fast as {self.other} here, and kept"
            " for later starts."
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def exact_dtypes(counts: Counter[torch.dtype]) -> tuple[torch.dtype, ...]:
    """Return the dtypes that represent every weight of a checkpoint exactly; empty if they are not known.

    Args:
        counts: Number of weights in each dtype.
    """
    kinds = [kind for kind in counts if kind.is_floating_point]
    if any(kind not in (torch.float32, torch.bfloat16, torch.float16) for kind in kinds) or not kinds:
        return ()
    return (torch.float32,) if len(kinds) > 1 or kinds == [torch.float32] else (kinds[0], torch.float32)


def dtype_key(weights: str) -> str:
    """Return the key of a choice, from the weights
    (``checkpoints.headers_digest``), processor, threads and versions.
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
        model: The model as ``transformers`` has loaded it; it is not changed.
        name: The model's name.
        usual: The default dtype.
        other: Another dtype that represents its weights exactly.

        Returns:
            The choice; ``None`` if the machine is too busy to decide, or the model is too small or cannot be cut.
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
    """Return the other dtype if it is certain to pay, the usual one if it is certain not to, and otherwise ``None``.

    ``times`` has the times of both dtypes in each round.
    """
    gains = sorted(mine / its for mine, its in times)
    low, middle, high = gains[_INNER][0], median(gains), gains[_INNER][-1]
    names: dict[torch.dtype, _Name] = {
        torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"
    }  # fmt: skip
    if low >= _MARGIN:
        return DtypeChoice(name, names[other], names[usual], middle, low, high)
    if high <= _MARGIN:
        return DtypeChoice(name, names[usual], names[other], 1 / middle, 1 / high, 1 / low)
    return None


_STORE = JsonStore("dtypes", DtypeChoice, "The stored dtype is", "It is measured again.")


def read_dtype(key: str) -> DtypeChoice | None:
    """Return a stored choice; ``None`` if there is none, or if it cannot be read and has to be measured again."""
    with suppress(SpecbenchError):
        return _STORE.read(key)
    return None


def write_dtype(key: str, choice: DtypeChoice) -> None:
    """Store a choice if the cache folder can be written."""
    with suppress(SpecbenchError):
        _STORE.write(key, choice)
