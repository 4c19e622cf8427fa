"""What was measured of this machine, by name, so that nothing is measured twice.

``specbench.models.timings`` keeps it for later starts.
"""

from __future__ import annotations

from collections.abc import Callable

measured: dict[str, float] = {}


def measured_once(name: str, measure: Callable[[], float]) -> float:
    """Return a measurement, which is made if there is none of this name yet."""
    if name not in measured:
        measured[name] = measure()
    return measured[name]
