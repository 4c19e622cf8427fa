"""Share what benchmarks have in common: the parser of their options, and the command line's torch settings.

Import it before torch, which reads the settings when it is loaded.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
if Path("/sys/kernel/mm/transparent_hugepage").exists():
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
for _capacity in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_capacity, "128")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a script's docstring."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
