"""Results on disk: a folder per run, which stays readable after a crash at any moment.

``run.json`` describes the run; every finished generation is one line of ``generations.jsonl``, written in one piece and
synchronized before the next one begins. docs/results-format.md describes the fields.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from specbench.base.errors import RunError, UsageError
from specbench.base.files import file_errors, reason, refuse_link, sync, try_lock, write_bytes, write_text
from specbench.base.record import finite, from_dict, to_dict, to_json, wrong_field
from specbench.base.textsafe import one_line
from specbench.results.lines import CostLine, Key, Measurement, parse_costs_line, parse_line
from specbench.results.run import KIND, VERSION, Run, find_config

if TYPE_CHECKING:
    from pandas import DataFrame

    from specbench.recipe import Recipe

RUN, GENERATIONS, COSTS, LOCK = "run.json", "generations.jsonl", "costs.jsonl", ".lock"
PACKED = f"{GENERATIONS}.gz"
"""In place of ``GENERATIONS``, for runs that are kept; it is unpacked to continue the run."""

_MOST_PACKED = 100
"""How many times larger than its file the content of ``PACKED`` may be; that of real runs is 4 to 6 times."""

# -- writing ---------------------------------------------------------------------------------------


class RunStore:
    """The folder of one run, locked for writing until it is closed or its process ends.

    Use ``create`` or ``open``, and close it (it is a context manager).

    Attributes:
        path: The folder.
        run: Content of ``run.json``.
        problems: A sentence for each existing line that is wrong and not used.
    """

    def __init__(self, path: Path, lock: Any) -> None:
        self.path = path
        self.run: Run
        self.problems: list[str] = []
        self._lock = lock
        self._file: int | None = None
        self._done: set[Key] = set()

    @classmethod
    def create(cls, path: str | Path, run: Run) -> RunStore:
        """Create a run in a folder without a run; the folder is made if needed.

        Raises:
            UsageError: The folder has results already or is not writable, or another process writes there.
            RunError: The disk is full.
        """
        store = cls._locked(Path(path), make=True)
        try:
            cls.check_empty(path)
            store.replace(run)
            store._open_lines()
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open(cls, path: str | Path) -> RunStore:
        """Open a run to continue it; an unfinished line left by a crash is removed.

        Raises:
            UsageError: There is no run, another version wrote it, another process writes there, or the folder is
            read-only.
        """
        run = read_run(path)
        store = cls._locked(Path(path), make=False)
        try:
            store.run = run
            store._open_lines()
            for measurement in read_lines(store.path, store.problems):
                store._remember(measurement)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def check_empty(cls, path: str | Path) -> None:
        """Raise ``UsageError`` if a folder holds a run."""
        if cls.exists(path):
            raise UsageError(
                f"The folder {str(path)!r} holds results already.",
                "Add --resume to continue them, or give another --out.",
            )

    @classmethod
    def check_writable(cls, path: str | Path) -> None:
        """Check that a folder can be written, before models are loaded.

        Raises:
            UsageError: The folder is not writable, or another process writes to it.
        """
        cls._locked(Path(path), make=True).close()

    @staticmethod
    def exists(path: str | Path) -> bool:
        """Return whether the folder holds any results."""
        return any((Path(path) / name).exists() for name in (RUN, GENERATIONS, PACKED))

    @classmethod
    def _locked(cls, path: Path, *, make: bool) -> RunStore:
        with _writing(path):
            if make:
                try:
                    path.mkdir(parents=True, exist_ok=True)
                except (FileExistsError, NotADirectoryError):
                    raise UsageError(f"{str(path)!r} is not a folder.", "Give another --out.") from None
            for name in (RUN, GENERATIONS, PACKED, COSTS, LOCK):
                refuse_link(path / name)
            lock = try_lock(path / LOCK)
        if lock is None:
            raise UsageError(
                f"Another sweep is writing to {str(path)!r}.", "Wait for it, or give another --out."
            )
        return cls(path, lock)

    def _open_lines(self) -> None:
        if not (self.path / GENERATIONS).exists() and (self.path / PACKED).exists():
            with _writing(self.path):
                write_bytes(self.path / GENERATIONS, b"".join(_unpacked(self.path / PACKED)))
                (self.path / PACKED).unlink()
        with _writing(self.path):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            file = self._file = os.open(self.path / GENERATIONS, flags, 0o644)
            _end_last_line(file, (self.path / GENERATIONS).read_bytes(), parse_line)
            sync(self.path)

    def append(self, measurement: Measurement) -> Measurement:
        """Add one line. It is on the disk when this returns; if this raises an error, nothing of it is.

        Returns:
            What is stored: a failure in place of a result that could not be read back.

        Raises:
            RunError: The disk is full or fails.
            ValueError: The conditions of the measurement cannot be stored, or the key exists already.
        """
        if self._file is None:
            raise ValueError("the store is closed")
        if measurement.key in self._done:
            raise ValueError(f"{measurement.key} has been measured already")
        try:
            parse_line(measurement.to_json())
        except ValueError as error:
            why = f"This measurement cannot be stored: {error}."
            failed = msgspec.structs.replace(measurement.line, status="failed", error=why)
            measurement = Measurement(failed, None)
        with _writing(self.path, begun=True):
            _append(self._file, measurement.to_json())
        self._remember(measurement)
        return measurement

    def append_costs(self, lines: Iterable[CostLine]) -> None:
        """Add times of single forward passes to ``costs.jsonl``.

        Raises:
            RunError: The disk is full or fails.
        """
        with _writing(self.path, begun=True):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            file = os.open(self.path / COSTS, flags, 0o644)
            try:
                _end_last_line(file, (self.path / COSTS).read_bytes(), parse_costs_line)
                _append(file, b"".join(to_json(line) + b"\n" for line in lines))
            finally:
                os.close(file)

    def costs(self) -> list[CostLine]:
        """Return the lines of ``costs.jsonl`` that are not damaged."""
        file = self.path / COSTS
        lines = file.read_bytes().splitlines() if file.exists() else []
        found = []
        for line in lines:
            with suppress(ValueError, RecursionError):
                found.append(parse_costs_line(line))
        return found

    def update(self, **fields: Any) -> None:
        """Change fields of ``run.json`` atomically: all of them, or none.

        Raises:
            RunError: The disk is full or fails; the file is unchanged.
        """
        self.replace(msgspec.structs.replace(self.run, **fields))

    def replace(self, run: Run) -> None:
        """Replace ``run.json`` atomically."""
        self.run = from_dict(finite(to_dict(run)), Run)
        with _writing(self.path, begun=self._file is not None):
            write_text(self.path / RUN, to_json(self.run, indent=1).decode() + "\n")

    def done_keys(self) -> set[Key]:
        """Return the keys that need not be measured; failed ones are measured again."""
        return self._done

    def measurements(self) -> Iterator[Measurement]:
        """Yield every usable line, one per key (see ``distinct``)."""
        yield from distinct(read_lines(self.path, []), [])

    def _remember(self, measurement: Measurement) -> None:
        if measurement.line.status == "ok":
            self._done.add(measurement.key)

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._lock.release()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _append(file: int, data: bytes) -> None:
    """Write at the end of a file and wait for the disk; on failure remove what was written."""
    before = os.fstat(file).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
    except BaseException:
        with suppress(OSError):
            os.ftruncate(file, before)
        raise


def _end_last_line(file: int, data: bytes, parse: Callable[[bytes], Any]) -> None:
    """Complete or remove an unfinished last line, which a crash can leave."""
    start = data.rfind(b"\n") + 1
    if start == len(data):
        return
    try:
        parse(data[start:])
    except (ValueError, RecursionError):
        os.ftruncate(file, start)
        os.fsync(file)
    else:
        _append(file, b"\n")


def _writing(path: Path, *, begun: bool = False) -> AbstractContextManager[None]:
    """Turn file-system errors into messages; ``begun`` says whether anything was measured before."""
    kept = "What was measured before is kept."
    full = RunError(
        f"The disk is full: {str(path)!r} takes no more results.{f' {kept}' if begun else ''}",
        "Free some space, then add --resume.",
    )
    if begun:
        return file_errors(f"The results in {str(path)!r} can no longer be written", kept, full=full)
    problem = f"The results folder {str(path)!r} cannot be written"
    return file_errors(problem, "Give another --out.", kind=UsageError, full=full)


def write_csv(frame: DataFrame, path: str | Path) -> None:
    """Write a table as CSV, so that a spreadsheet runs no text of it as a formula.

    Text that looks like a formula gets a quote. So does such text after a semicolon, tab, bar or line break, where a
    spreadsheet set to another language would begin a new cell.
    """
    safe = frame.map(_no_formula).rename(columns=_no_formula)
    write_text(path, safe.to_csv(index=False, lineterminator="\n"))


_FORMULA = re.compile("(^|[;,|\t\n])(?=[\\s'\"]*[=+@\uff1d\uff0b\uff0d\uff20-])|^(?=[\t\n])")


def _no_formula(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    # A bare carriage return would end the row: Python's csv module does not quote it.
    return _FORMULA.sub(r"\1'", re.sub("\r\n?", "\n", value))


# -- reading ---------------------------------------------------------------------------------------


def find_runs(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return folders of runs; each path is a run, a file in one, or a folder with runs in it.

    Raises:
        UsageError: A path does not exist, or there is no run in it.
    """
    found: dict[Path, None] = {}
    for given in [paths] if isinstance(paths, str | Path) else paths:
        path = Path(given)
        if not path.exists():
            raise UsageError(
                f"There are no results at {str(given)!r}: it does not exist.", "Run `specbench sweep` first."
            )
        folder = path.parent if path.is_file() and path.name in (RUN, GENERATIONS, PACKED) else path
        if RunStore.exists(folder):
            runs = [folder]
        else:
            inside = sorted(folder.iterdir()) if folder.is_dir() else []
            runs = [each for each in inside if each.is_dir() and RunStore.exists(each)]
        if not runs:
            raise UsageError(
                f"There are no results in {str(given)!r}.",
                "Name a folder that `specbench sweep` has written.",
            )
        found.update(dict.fromkeys(runs))
    return list(found)


def stored_runs(folder: str | Path) -> list[tuple[Path, Run]]:
    """Return the readable runs in a folder, each with its ``run.json``, the newest first."""
    found = []
    with suppress(UsageError):
        for path in find_runs(folder):
            with suppress(UsageError):
                found.append((path, read_run(path)))
    return sorted(found, key=lambda each: str(each[1].created), reverse=True)


def measured_configs(path: str | Path) -> set[str]:
    """Return the ids of configurations that have a finished generation other than warm-ups."""
    return {
        each.line.config
        for each in read_lines(Path(path), [])
        if each.result is not None and not each.line.warmup
    }


def read_run(path: str | Path) -> Run:
    """Read ``run.json`` in a folder.

    Raises:
        UsageError: The file is missing, a field of it is invalid, or another program or another version of specbench
            wrote it.
    """
    file = Path(path) / RUN
    try:
        found = msgspec.json.decode(file.read_bytes())
    except FileNotFoundError:
        raise UsageError(
            f"There are no results in {str(path)!r}: it has no {RUN}.", "Name another folder."
        ) from None
    except OSError as error:
        raise UsageError(f"{str(file)!r} cannot be read ({reason(error)}).") from error
    except (ValueError, RecursionError):
        raise UsageError(
            f"{str(file)!r} is damaged: it is not JSON.", "Restore it, or measure again."
        ) from None
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise UsageError(f"{str(file)!r} does not describe a specbench sweep.", "Name another folder.")
    _check_version(found.get("schema"), file)
    try:
        return from_dict(found, Run)
    except ValueError as error:
        what = f"{wrong_field(error) or 'a field'} is missing or invalid"
        raise UsageError(f"{str(file)!r} is damaged: {what}.", "Restore it, or measure again.") from None


def _check_version(version: object, file: Path) -> None:
    if not isinstance(version, int) or version < 1:
        raise UsageError(f"{str(file)!r} is damaged: its schema version is {version!r}.", "Restore it.")
    if version != VERSION:
        raise UsageError(
            f"{str(file)!r} has schema version {version}, and this specbench reads only {VERSION}.",
            "Update specbench." if version > VERSION else "Measure again.",
        )


def read_recipe(run: str | Path, name: str) -> Recipe:
    """Return the recipe of a row of a run, by its name in the tables or its id.

    Runs store no paths: ``found_in`` of the recipe looks for models that are folders or files.

    Raises:
        UsageError: There is no such row, or specbench did not decode it.

    Examples:
        >>> str(read_recipe("results/smollm2-135m", "lookup auto").drafter)
        'lookup'
    """
    described = read_run(Path(run))
    row = find_config(described, name, str(run))
    if row.recipe is None:
        raise UsageError(f"{name!r} in {run} was not decoded by specbench.", "Name another row.")
    return replace(row.recipe, measured_with=(described.target.fingerprint, row.fingerprint))


def read_lines(folder: Path, problems: list[str]) -> Iterator[Measurement]:
    """Yield the usable lines of ``generations.jsonl``, and add to ``problems`` what is wrong with others."""
    path = folder / GENERATIONS
    for number, line in enumerate(_stored_lines(folder), 1):
        try:
            measurement = parse_line(line)
        except (ValueError, RecursionError) as error:
            what = f"is damaged ({wrong_field(error) or 'no JSON'})"
            what = what if line.endswith(b"\n") else "was cut short by a crash"
            problems.append(f"Line {number} of {folder.name}/{GENERATIONS} {what} and is not used.")
            continue
        _check_version(measurement.line.schema, path)
        yield measurement


def _stored_lines(folder: Path) -> Iterator[bytes]:
    """Yield the lines of a run, packed or not; none after a crash right at the start."""
    path = folder / GENERATIONS
    try:
        with path.open("rb") as file:
            yield from file
    except FileNotFoundError:
        if (folder / PACKED).exists():
            yield from _unpacked(folder / PACKED)
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read ({reason(error)}).") from error


def _unpacked(path: Path) -> Iterator[bytes]:
    """Yield the lines of a packed file."""
    left = _MOST_PACKED * path.stat().st_size
    try:
        with gzip.open(path) as file:
            while line := file.readline(left + 1):
                left -= len(line)
                if left < 0:
                    raise UsageError(f"{str(path)!r} is much larger than its size says.", "Restore it.")
                yield line
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{str(path)!r} is damaged: {one_line(error)}.", "Restore it.") from error


def distinct(measurements: Iterable[Measurement], problems: list[str]) -> Iterator[Measurement]:
    """Yield one measurement per key: the first success, or the first failure if there is no success."""
    waiting: dict[Key, Measurement] = {}  # failures that a later line may replace
    done: set[Key] = set()
    repeated = 0
    for each in measurements:
        if each.key in done:
            repeated += 1
        elif each.result is None:
            waiting.setdefault(each.key, each)
        else:
            waiting.pop(each.key, None)
            done.add(each.key)
            yield each
    if repeated:
        problems.append(f"{repeated} generations are there more than once; the first of each is used.")
    yield from waiting.values()
