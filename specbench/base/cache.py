"""The cache folder."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "SPECBENCH_CACHE"


def cache_folder() -> Path:
    """Return the cache folder: `SPECBENCH_CACHE`, or the one in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    return platformdirs.user_cache_path("specbench", appauthor=False)
