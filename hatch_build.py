"""The native library, built with the package where there is a C compiler.

Without one, and elsewhere than on Linux on x86-64, the package is the same but for the library, and decodes in torch's
own operators. ``CC`` names another compiler. ``python hatch_build.py`` builds it in a checkout.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("specbench/kernels")
SOURCE, LIBRARY = KERNELS / "native.c", KERNELS / "_native.so"
OPTIONS = (
    "-std=c11",
    "-O3",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fvisibility=default",
    "-shared",
    "-fPIC",
)


def build(root: Path) -> str | None:
    """Build the library in a tree; what an earlier build has left there goes.

    Returns:
        Why it was not built; ``None`` if it was.
    """
    library = root / LIBRARY
    library.unlink(missing_ok=True)
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "it is written for Linux on x86-64"
    work = library.with_name(f".{library.name}.{os.getpid()}")
    compiler = shlex.split(os.environ.get("CC") or "cc")
    command = [*compiler, *OPTIONS, "-o", str(work), str(root / SOURCE), "-lm"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        work.replace(library)
    except (OSError, subprocess.SubprocessError) as error:
        work.unlink(missing_ok=True)
        told = getattr(error, "stderr", None) or str(error)
        return f"no C compiler could build it ({str(told).strip().splitlines()[0]})"
    return None


class NativeLibrary(BuildHookInterface[Any]):
    """Builds the library for a wheel and for an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before the wheel is put together."""
        reason = build(Path(self.root))
        if reason is not None:
            self.app.display_warning(f"The native library is left out: {reason}.")
        elif version != "editable":
            build_data["artifacts"].append(LIBRARY.as_posix())
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    failed = build(Path(__file__).parent)
    sys.exit(f"The native library was not built: {failed}." if failed else 0)
