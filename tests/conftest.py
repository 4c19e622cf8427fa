"""Shared test settings: no hub, and the helper modules of this folder importable."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault(
    "GOMP_SPINCOUNT", "1000"
)  # the suite may share its cores; must be set before torch is loaded
sys.path.insert(0, str(Path(__file__).parent))
