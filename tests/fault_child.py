"""What test_faults.py runs in processes of their own, to be killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


def prepare(gguf: Path, place: Path, begin: Any, stop_at: str | None) -> None:
    """Prepare a GGUF file once ``begin`` is set, noting every stage in a file; forever in ``stop_at``, if given."""
    from specbench.models.builtin import prepare_gguf

    class Stages:
        def update(self, stage: str, done: int, total: int | None) -> None:
            with (place / "stages").open("a", encoding="utf-8") as file:
                file.write(f"{stage}\n")
            while stop_at is not None and stage.startswith(stop_at) and done:
                time.sleep(0.01)

    (place / "ready").touch()
    begin.wait()
    (place / "folder").write_text(str(prepare_gguf(gguf, progress=Stages())), encoding="utf-8")
