"""Timings of this machine that decide how forward passes are run, stored in the cache folder for later starts.

They come out alike at every start, take more than a second, and would decide anew which of two sums a logit's last bit
is from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Literal

import msgspec
import torch

from specbench._version import __version__
from specbench.backends.torch.kernels import native
from specbench.backends.torch.kernels.instructions import cpu_signature
from specbench.backends.torch.kernels.timings import measured
from specbench.base.errors import SpecbenchError
from specbench.base.files import write_text
from specbench.base.record import Record, Seconds, to_json
from specbench.models.cache import cache_folder

_MOST = 500
"""Timings that are kept; the oldest go."""


class _Timings(Record):
    """Measurements by name (``measured_once``)."""

    format: Literal[1] = 1
    measured: dict[str, Seconds]


def machine_key() -> str:
    """Return a key of what timings depend on: processor, threads, native library and versions."""
    versions = (torch.__version__, metadata.version("transformers"), __version__)
    facts = [*cpu_signature(), native.why_unavailable(), torch.get_num_threads(), *versions]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


@contextmanager
def kept_timings() -> Iterator[None]:
    """Know what earlier starts have measured, and keep what is measured meanwhile, if the cache folder allows it."""
    path = cache_folder() / "timings" / f"{machine_key()}.json"
    with suppress(OSError, ValueError, RecursionError):
        stored = msgspec.json.decode(path.read_bytes(), type=_Timings)
        for name, value in stored.measured.items():
            measured.setdefault(name, value)
    before = len(measured)
    yield
    if len(measured) > before:
        kept = _Timings(measured=dict([*measured.items()][-_MOST:]))
        with suppress(OSError, SpecbenchError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, to_json(kept).decode() + "\n")
