"""Share what benchmarks have in common: stored progress, a busy neighbor, and the command line's torch settings.

Import it before torch, which reads the settings when it is loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
if Path("/sys/kernel/mm/transparent_hugepage").exists():
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
for _capacity in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_capacity, "128")


class Parts:
    """Finished parts of a benchmark, one JSON line each after a line with the settings; kept in a file or nowhere.

    Args:
        path: The file, begun or not; ``None`` keeps the parts in memory only.
        settings: What all parts have in common, JSON-ready; a file with others is refused.

    Attributes:
        done: The parts so far, in order.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.done: list[dict[str, Any]] = []
        if path is None:
            return
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # a crash may have cut the last one short
        if not whole:
            path.write_text(json.dumps(settings) + "\n", encoding="utf-8")
            return
        if json.loads(whole[0]) != json.loads(json.dumps(settings)):
            sys.exit(f"{path} was begun with other settings: {whole[0].strip()}. Name another file.")
        self.done = [json.loads(line) for line in whole[1:]]
        if whole != lines:
            path.write_text("".join(whole), encoding="utf-8")

    def add(self, part: Mapping[str, Any]) -> None:
        """Add a part, on disk before this returns."""
        self.done.append(dict(part))
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(part) + "\n")
                file.flush()
                os.fsync(file.fileno())


_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(100_000): pass"


@contextmanager
def busy_core(wanted: bool = True) -> Iterator[None]:
    """Keep one core busy with another process, which ends with this one in any case."""
    if not wanted:
        yield
        return
    child = subprocess.Popen([sys.executable, "-c", _BUSY, str(os.getpid())])
    try:
        yield
    finally:
        child.terminate()
        child.wait()
