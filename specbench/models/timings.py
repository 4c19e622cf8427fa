"""Timings of this machine that decide how forward passes are run, stored in the cache folder for later starts.

They come out alike at every start, take more than a second, and would decide anew which of two sums a logit's last bit
is from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata

import torch

from specbench._version import __version__
from specbench.backends.torch.kernels import native
from specbench.backends.torch.kernels.instructions import cpu_signature
from specbench.backends.torch.kernels.timings import measured
from specbench.base.errors import SpecbenchError
from specbench.base.record import Seconds
from specbench.models.json_store import JsonStore

_MOST = 500
"""Timings that are kept; the oldest go."""


@dataclass(frozen=True)
class _Timings:
    """Measurements by name (``measured_once``)."""

    measured: dict[str, Seconds]


_STORE = JsonStore("timings", _Timings, "The stored timings are", "They are measured again.")


def machine_key() -> str:
    """Return a key of what timings depend on: processor, threads, native library and versions."""
    versions = (torch.__version__, metadata.version("transformers"), __version__)
    facts = [*cpu_signature(), native.why_unavailable(), torch.get_num_threads(), *versions]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


@contextmanager
def kept_timings() -> Iterator[None]:
    """Know what earlier starts have measured, and keep what is measured meanwhile, if the cache folder allows it."""
    key = machine_key()
    with suppress(SpecbenchError):
        stored = _STORE.read(key)
        for name, value in ({} if stored is None else stored.measured).items():
            measured.setdefault(name, value)
    before = len(measured)
    yield
    if len(measured) > before:
        with suppress(SpecbenchError):
            _STORE.write(key, _Timings(dict([*measured.items()][-_MOST:])))
