"""Shared test settings: no hub, and the helper modules of this folder importable."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault(
    "GOMP_SPINCOUNT", "1000"
)  # the suite may share its cores; must be set before torch is loaded
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny, and every core has a worker
sys.path.insert(0, str(Path(__file__).parent))
