"""The native library under sanitizers: random passes in a program of its own (native_harness.c)."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("native_harness.c")


def compiled(source: Path, program: Path, *options: str) -> str | None:
    """Compile a program; what the compiler said if it could not."""
    compiler = os.environ.get("CC") or "cc"
    command = [compiler, "-std=c11", "-g", "-O1", *options, "-o", program, source, "-lm", "-pthread"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except OSError as error:
        return str(error)
    return done.stderr if done.returncode else None


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="it is written for Linux on x86-64"
)
@pytest.mark.parametrize(("sanitizers", "passes"), [("address,undefined", 40), ("thread", 20), ("", 400)])
def test_passes_are_clean(sanitizers, passes, tmp_path):
    options = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"] if sanitizers else []
    empty = tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    if (reason := compiled(empty, tmp_path / "empty", *options)) is not None:
        pytest.skip(f"no compiler with these sanitizers: {reason[:200]}")
    assert compiled(HARNESS, tmp_path / "harness", *options) is None
    command = [tmp_path / "harness", str(passes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
