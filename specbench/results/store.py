"""Results on disk: a folder per run that a crash at any moment leaves readable, and its reader.

A run is described once, in ``run.json``; every finished generation is one line of ``generations.jsonl``,
written in one piece and synchronised before the next one begins. docs/results-format.md describes the fields.
"""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from sys import intern
from types import TracebackType
from typing import TYPE_CHECKING, Any

from specbench.errors import RunError, UsageError
from specbench.files import explained, reason, refuse_link, sync, try_lock, write_text
from specbench.models.stories import STORY_SHAPE
from specbench.results.rows import (
    STEP_FIELDS,
    STEP_OTHERS,
    Key,
    generations,
    key_of,
    numbers,
    parse_json,
    parse_line,
    step_columns,
)
from specbench.results.upgrade import upgraded
from specbench.shapes import count, length, misfit, not_json, number, size

if TYPE_CHECKING:
    from pandas import DataFrame

RESULTS_VERSION = 2
"""Version of the files of a run. 1: first form. 2: configurations have recipes."""

KIND = "specbench-sweep"
RUN, GENERATIONS, COSTS, LOCK = "run.json", "generations.jsonl", "costs.jsonl", ".lock"

# -- writing ---------------------------------------------------------------------------------------


class RunStore:
    """The folder of one run, open for writing; nobody else can open it until it is closed or its process is
    gone.

    Use ``create`` or ``open``, and close it (it is a context manager).

    Attributes:
        path: The folder.
        run: What ``run.json`` holds.
        problems: What was wrong with the lines that were there, a sentence each; those lines are not used.
    """

    def __init__(self, path: Path, lock: Any) -> None:
        self.path = path
        self.run: dict[str, Any] = {}
        self.problems: list[str] = []
        self._lock = lock
        self._file: int | None = None
        self._done: dict[Key, str] = {}

    @classmethod
    def create(cls, path: str | Path, run: Mapping[str, Any]) -> RunStore:
        """Start a run in a folder that holds none; the folder is made.

        Raises:
            UsageError: There are results already, another process writes there, or the folder cannot be
                written. RunError: The disk is full.
        """
        store = cls._locked(Path(path), make=True)
        try:
            if cls.exists(path):
                raise UsageError(
                    f"The folder {str(path)!r} holds results already.",
                    "Add --resume to go on with them, or give another --out.",
                )
            store.run = {**run, "schema": RESULTS_VERSION, "kind": KIND}
            store._write_run()
            store._open_lines()
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open(cls, path: str | Path) -> RunStore:
        """Go on with a run. What a crash left of an unfinished line is removed.

        Raises:
            UsageError: There is no run, a newer version wrote it, another process writes there, or it is
                read-only.
        """
        run = read_run(path)
        store = cls._locked(Path(path), make=False)
        try:
            store.run = run
            store._open_lines()
            for row in _rows(store.path / GENERATIONS, store.problems):
                store._remember(row)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def check_writable(cls, path: str | Path) -> None:
        """Refuse early, before models are loaded, a folder that cannot be written or that another process writes to.

        Raises:
            UsageError: It is one of these.
        """
        cls._locked(Path(path), make=True).close()

    @staticmethod
    def exists(path: str | Path) -> bool:
        """Whether the folder holds results, however few."""
        return any((Path(path) / name).exists() for name in (RUN, GENERATIONS))

    @classmethod
    def _locked(cls, path: Path, *, make: bool) -> RunStore:
        with _writing(path):
            if make:
                try:
                    path.mkdir(parents=True, exist_ok=True)
                except (FileExistsError, NotADirectoryError):
                    raise UsageError(f"{str(path)!r} is no folder.", "Give another --out.") from None
            for name in (RUN, GENERATIONS, COSTS, LOCK):
                refuse_link(path / name)
            lock = try_lock(path / LOCK)
        if lock is None:
            raise UsageError(
                f"Another sweep is writing to {str(path)!r}.", "Wait for it, or give another --out."
            )
        return cls(path, lock)

    def _open_lines(self) -> None:
        with _writing(self.path):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            file = self._file = os.open(self.path / GENERATIONS, flags, 0o644)
            _end_last_line(file, (self.path / GENERATIONS).read_bytes(), parse_line)
            sync(self.path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one line. When this returns the line has reached the disk; when it raises, nothing of it is
        there.

        Raises:
            RunError: The disk is full or fails.
            ValueError: A number is not finite, or the key is there already.
        """
        if self._file is None:
            raise ValueError("the store is closed")
        if self._done.get(key_of(row)) == "ok":
            raise ValueError(f"{key_of(row)} has been measured already")
        with _writing(self.path, begun=True):
            _append(self._file, _line(row))
        self._remember(row)

    def append_costs(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add raw times of single passes to ``costs.jsonl``.

        Raises:
            RunError: The disk is full or fails.
        """
        with _writing(self.path, begun=True):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            file = os.open(self.path / COSTS, flags, 0o644)
            try:
                _end_last_line(file, (self.path / COSTS).read_bytes(), parse_json)
                _append(file, b"".join(map(_line, rows)))
            finally:
                os.close(file)

    def costs(self) -> list[dict[str, Any]]:
        """The lines of ``costs.jsonl``; what a crash or a hand has damaged is left out."""
        file = self.path / COSTS
        rows = [parse_json(line) for line in file.read_bytes().splitlines()] if file.exists() else []
        return [row for row in rows if misfit(row, _COST_SHAPES) is None]

    def update(self, **fields: Any) -> None:
        """Change fields of ``run.json``, all or nothing.

        Raises:
            RunError: The disk is full or fails; the file is as it was.
        """
        self.run = {**self.run, **fields}
        self._write_run()

    def _write_run(self) -> None:
        with _writing(self.path, begun=self._file is not None):
            write_text(self.path / RUN, json.dumps(self.run, indent=1, allow_nan=False) + "\n")

    def done_keys(self, *, retry_failed: bool = False) -> set[Key]:
        """What needs no measuring; with ``retry_failed``, failed generations do."""
        return {key for key, status in self._done.items() if status == "ok" or not retry_failed}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every usable line as it was written, one per key (see ``load_results`` about repeated ones)."""
        yield from _unique(_rows(self.path / GENERATIONS, []), [])

    def _remember(self, row: Mapping[str, Any]) -> None:
        key = key_of(row)
        if self._done.get(key) != "ok":
            self._done[key] = row["status"]

    def close(self) -> None:
        """Let others in."""
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


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def _append(file: int, data: bytes) -> None:
    """Write at the end of a file and wait for the disk; take back what was written if that does not
    succeed."""
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
    """End what a crash left behind the last line break: add the break if that is all it lacks, or cut it."""
    start = data.rfind(b"\n") + 1
    if start == len(data):
        return
    if parse(data[start:]) is not None:
        _append(file, b"\n")
    else:
        os.ftruncate(file, start)
        os.fsync(file)


def _writing(path: Path, *, begun: bool = False) -> AbstractContextManager[None]:
    """What a file system refuses while a run is written; ``begun``: something measured is there to be kept."""
    kept = "What was measured before is kept."
    full = RunError(
        f"The disk is full: {str(path)!r} takes no more results.{f' {kept}' if begun else ''}",
        "Free some space, then add --resume.",
    )
    if begun:
        return explained(f"The results in {str(path)!r} can no longer be written", kept, full=full)
    problem = f"The results folder {str(path)!r} cannot be written"
    return explained(problem, "Give another --out.", kind=UsageError, full=full)


def write_csv(frame: DataFrame, path: str | Path) -> None:
    """Write a table as CSV that a spreadsheet shows and never runs.

    Text that looks like a formula gets a quote, also where a spreadsheet of another language would begin a cell: behind
    a semicolon, a tab, a bar or a line break.
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
    """The folders of runs that are meant: each path is a run, a file in one, or a folder with runs in it.

    Raises:
        UsageError: A path does not exist, or no run is there.
    """
    found: dict[Path, None] = {}
    for given in [paths] if isinstance(paths, str | Path) else paths:
        path = Path(given)
        if not path.exists():
            raise UsageError(
                f"There are no results at {str(given)!r}: it does not exist.", "Run `specbench sweep` first."
            )
        folder = path.parent if path.is_file() and path.name in (RUN, GENERATIONS) else path
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


def stored_runs(folder: str | Path) -> list[tuple[Path, dict[str, Any]]]:
    """The readable runs in a folder, each with its ``run.json``, the newest first; none where there is none."""
    found = []
    with suppress(UsageError):
        for path in find_runs(folder):
            with suppress(UsageError):
                found.append((path, read_run(path)))
    return sorted(found, key=lambda each: str(each[1].get("created")), reverse=True)


def measured_configs(path: str | Path) -> set[str]:
    """Ids of the configurations of a run that have a finished generation, warm-ups apart."""
    return {
        str(row["config"])
        for line in _rows(Path(path) / GENERATIONS, [])
        for row in generations(line)
        if row["status"] == "ok" and not row["warmup"]
    }


def read_run(path: str | Path) -> dict[str, Any]:
    """What ``run.json`` in a folder holds.

    Raises:
        UsageError: It is missing, damaged, of another program, or of a newer version of specbench.
    """
    file = Path(path) / RUN
    try:
        run = json.loads(file.read_bytes(), parse_constant=not_json)
    except FileNotFoundError:
        raise UsageError(
            f"There are no results in {str(path)!r}: it has no {RUN}.", "Name another folder."
        ) from None
    except OSError as error:
        raise UsageError(f"{str(file)!r} cannot be read ({reason(error)}).") from error
    except (ValueError, RecursionError):
        raise UsageError(
            f"{str(file)!r} is damaged: it is not JSON.", "Restore it, or measure anew."
        ) from None
    if not isinstance(run, dict) or run.get("kind") != KIND:
        raise UsageError(f"{str(file)!r} does not describe a specbench sweep.", "Name another folder.")
    _check_version(run.get("schema"), file)
    wrong = misfit(run, _RUN_SHAPE)
    if wrong is not None:
        raise UsageError(
            f"{str(file)!r} is damaged: {wrong} is missing or holds what it cannot be.",
            "Restore it, or measure anew.",
        )
    return upgraded(run, RESULTS_VERSION)


_MAYBE_TEXT = (str, None)
_FACT = (str, bool, number, None)
_MACHINE = (
    "cpu", "cpu_capability", "physical_cores", "cores", "threads", "huge_pages", "ram_gb", "os", "python", "torch",
    "transformers", "specbench", "git_commit",
)  # fmt: skip
_ENVIRONMENT = {**{f"{name}?": _FACT for name in _MACHINE}, "devices?": ([str], None)}
_TARGET = {f"{name}?": _FACT for name in ("name", "fingerprint", "dtype", "device", "vocab_size", "packed")}
_MODEL = {"kind": ("hub", "folder", "gguf", "builtin", "packaged"), "name": str}
_OPTIONS = {str: (str, bool, number, None, [str])}
_RECIPE = {
    "target": _MODEL, "drafter": str, "drafter_models": [_MODEL], "rule": _MAYBE_TEXT, "costs": _MAYBE_TEXT,
    "models": _OPTIONS, "caching": _OPTIONS, "decoding": _OPTIONS, "sampling": _OPTIONS,
}  # fmt: skip
_CONFIG_SHAPE = {
    "id": str, "label": str, "kind": str, "drafter": str, "gamma": (length, None), "policy": str, "temperature": size,
    "cache": str, "baseline": str, "drafter_fingerprint?": _MAYBE_TEXT, "batch?": (count, None),
    "arrivals?": _MAYBE_TEXT, "beams?": (count, None), "drafter_dtype?": _MAYBE_TEXT, "recipe?": (_RECIPE, None),
}  # fmt: skip


def _are_pass_times(value: object) -> bool:
    """Whether it maps numbers of tokens to seconds."""
    return isinstance(value, dict) and all(
        n.isdecimal() and n.isascii() and len(n) < 9 and size(seconds) and seconds > 0
        for n, seconds in value.items()
    )


def _are_shared_times(value: object) -> bool:
    """Whether it maps numbers of requests to pass times."""
    return isinstance(value, dict) and all(
        n.isdecimal() and n.isascii() and len(n) < 9 and _are_pass_times(times) for n, times in value.items()
    )


_UNEXPLAINED = {
    "config": str, "prompt": str, "turn": count, "repeat": count, "position": count, "numerical_tie?": None,
}  # fmt: skip
_DIFFERENCE = _UNEXPLAINED | {"gap": number, "numerical_tie?": bool}
_ESTIMATE = {"value": size, "low": (size, None), "high": (size, None), "prompts": count}
_TOLD = {"speedup": _ESTIMATE, "share?": _ESTIMATE, "categories": {str: _ESTIMATE}, "verdict": str}
_ANSWER = {"headline": str, "details": [str], "choice": str, "provisional": bool, "measured": {str: _TOLD}}
_RUN_SHAPE = {
    "run_id": str,
    "options": dict,
    "environment": _ENVIRONMENT,
    "target": _TARGET,
    "configs": [_CONFIG_SHAPE],
    "prompts": [{"id": str, "category?": str, "turns?": count, "fingerprint?": _MAYBE_TEXT}],
    "specbench?": str,
    "command?": [str],
    "seed?": count,
    "repeats?": count,
    "warmup?": count,
    "max_new_tokens?": count,
    "ignore_eos?": bool,
    "created?": str,
    "finished?": _MAYBE_TEXT,
    "costs?": (None, {"target_pass_s": _are_pass_times, "drafter_pass_s?": {str: (size, None)},
                     "drafter_rows_s?": {str: _are_pass_times}}),
    "shared_costs?": (None, {"target_pass_s": _are_shared_times, "drafter_pass_s?": {str: _are_pass_times}}),
    "differences?": (None, [(_DIFFERENCE, _UNEXPLAINED)]),
    "warnings?": [{"id": str, "severity": str, "message": str, "advice": str}],
    "tuning?": (None, {"predicted": {str: number}, "raced": [str], "left_out": {str: str}, "ranking?": [str],
                       "verdict?": str, "answer?": _ANSWER}),
    "heads?": {str: STORY_SHAPE},
    "changes?": [{"differing?": [str], "environment?": _ENVIRONMENT, "options?": dict}],
}  # fmt: skip
"""Of ``run.json``, as docs/results-format.md describes it; what came later may be missing."""


def _check_version(version: object, file: Path) -> None:
    if not isinstance(version, int) or version < 1:
        raise UsageError(f"{str(file)!r} is damaged: its schema version is {version!r}.", "Restore it.")
    if version > RESULTS_VERSION:
        raise UsageError(
            f"{str(file)!r} has schema version {version}, this specbench reads up to {RESULTS_VERSION}.",
            "Update specbench.",
        )


def load_results(path: str | Path | Sequence[str | Path]) -> DataFrame:
    """Read runs into a table with one row per generation (prompt turn, configuration and repeat) without
    warm-ups.

    Args:
        path: A run's folder, a folder with runs in it, or several of either.

    Returns:
        The fields of ``generations.jsonl``, those of the row's configuration (``label``, ``kind``,
        ``drafter``, ``gamma``, ``policy``, ``temperature``, ``cache``, ``baseline``, ``batch``, ``arrivals``),
        ``target`` (its name), of what was decoded side by side that of its ``group`` (else empty, and NaN),
        and derived from the steps: ``tokens_per_second`` (behind the first emission), ``tokens_per_step``,
        ``acceptance_rate`` and ``alpha``, NaN where they have no meaning. The steps' numbers are arrays with
        an element per step in columns ``steps_<name>``; ``steps_expected_acceptance`` is a list of lists,
        ``steps_closing`` a list of strings and ``None``, ``steps_policy`` a dict of arrays. Generations that
        failed have ``status`` "failed", NaN for figures and no steps.

        ``attrs["runs"]`` maps each run id to its ``run.json`` and ``attrs["run"]`` is that of the first;
        ``attrs["problems"]`` says in sentences which lines could not be used. A line cut short by a crash is
        one of them. Of two lines with one key the first counts, except that a success replaces a failure.

    Raises:
        UsageError: There are no results, or a newer version wrote them.
    """
    import pandas as pd

    columns = _Columns()
    runs: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    with _no_collecting():
        for folder in find_runs(path):
            run = read_run(folder)
            if run["run_id"] in runs:
                raise UsageError(
                    f"{str(folder)!r} is a copy of another run that was named.", "Name each run once."
                )
            runs[run["run_id"]] = run
            columns.read(folder, run, problems)
        frame = pd.DataFrame(columns.values)
    frame.attrs = {"run": next(iter(runs.values())), "runs": runs, "problems": problems}
    return frame


@contextmanager
def _no_collecting() -> Iterator[None]:
    """Pause the search for cycles: parsed JSON has none, and looking through millions of lists takes most of
    the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _rows(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The usable lines of ``generations.jsonl``; what is wrong with the others is added to ``problems``."""
    try:
        file = path.open("rb")
    except FileNotFoundError:  # a crash right at the start
        return
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read ({reason(error)}).") from error
    with file:
        for number, line in enumerate(file, 1):
            row = parse_line(line)
            if row is None:
                what = "is damaged" if line.endswith(b"\n") else "was cut short by a crash"
                problems.append(f"Line {number} of {path.parent.name}/{path.name} {what} and is not used.")
                continue
            if row["schema"] > RESULTS_VERSION:
                _check_version(row["schema"], path)
            yield row


_COST_SHAPES = (
    {"kind": "target", "tokens": count, "seconds": [size], "context_tokens": count},
    {"kind": "drafter", "drafter": str, "seconds": [size], "context_tokens": count},
    {"kind": "tree", "drafter": str, "nodes": count, "seconds": [size], "context_tokens": count},
    {"kind": "shared-target", "requests": count, "tokens": count, "seconds": [size], "context_tokens": count},
    {"kind": "shared-drafter", "drafter": str, "requests": count, "seconds": [size], "context_tokens": count},
)


def _unique(rows: Iterable[dict[str, Any]], problems: list[str]) -> Iterator[dict[str, Any]]:
    """Rows in order with one per key: the first, or the first success if that failed."""
    waiting: dict[Key, dict[str, Any]] = {}  # failures that a later line may replace
    done: set[Key] = set()
    repeated = 0
    for row in rows:
        key = key_of(row)
        if key in done:
            repeated += 1
        elif row["status"] == "failed":
            waiting.setdefault(key, row)
        else:
            waiting.pop(key, None)
            done.add(key)
            yield row
    if repeated:
        problems.append(f"{repeated} generations stand there more than once; the first of each is used.")
    yield from waiting.values()


_NAN = float("nan")
_CONFIG_FIELDS = (
    "label", "kind", "drafter", "gamma", "policy", "temperature", "cache", "baseline", "batch", "arrivals",
)  # fmt: skip
_NUMBERS = ("gamma", "batch")
"""Of these; NaN where there is none."""

_PLAIN_FIELDS = (
    "run_id", "config", "group", "prompt", "category", "turn", "repeat", "order", "status", "error", "finish_reason",
    "started",
)  # fmt: skip
_MEASURED_FIELDS = (
    "prompt_tokens", "new_tokens", "ttft_s", "prefill_s", "decode_s", "total_s", "peak_memory_bytes", "log_probability",
    "load_average", "arrived_s", "queued_s",
)  # fmt: skip
_DERIVED = ("tokens_per_second", "tokens_per_step", "acceptance_rate", "alpha")
_NO_FIGURES_OF_SERVERS = ("text", "counted_by", "problem", "kept_at", "step_source")
_OF_SERVERS = (
    "pieces", "bursts", "attempts", "cached_tokens", "drafted", "accepted", "drafts", "emitted_in_steps", "told_steps",
)  # fmt: skip
_OF_GROUPS = (
    "throughput", "pool_blocks", "pool_peak_blocks", "pool_peak_bytes", "group_drafted", "group_accepted",
    "group_drafts",
)  # fmt: skip


class _Columns:
    """A table in the making, column by column: step lists become arrays as soon as they are read, to save
    memory."""

    def __init__(self) -> None:
        names = (
            *_PLAIN_FIELDS, *_MEASURED_FIELDS, "token_ids", "warnings", "target", *_CONFIG_FIELDS, *_DERIVED,
            *_NO_FIGURES_OF_SERVERS, *_OF_SERVERS, *_OF_GROUPS, "group_kept_at",
            *(f"steps_{field.name}" for field in STEP_FIELDS), *(f"steps_{name}" for name in STEP_OTHERS),
        )  # fmt: skip
        self.values: dict[str, list[Any]] = {name: [] for name in names}

    def read(self, folder: Path, run: Mapping[str, Any], problems: list[str]) -> None:
        """Add the rows of one run."""
        configs = {config["id"]: config for config in run["configs"]}
        foreign = unknown = damaged = 0
        for row in _unique(_rows(folder / GENERATIONS, problems), problems):
            if row["warmup"]:
                continue
            if row.get("run_id") != run["run_id"]:
                foreign += 1
            elif row["config"] not in configs:
                unknown += 1
            else:
                config, target = configs[row["config"]], run["target"].get("name")
                try:
                    group = _of_group(row)
                    found = [_cells(each, config, target) | group for each in generations(row)]
                except (ValueError, TypeError, AttributeError, KeyError, OverflowError):
                    damaged += 1
                    continue
                for cells in found:
                    for name, values in self.values.items():
                        values.append(cells[name])
        for lines, what in (
            (foreign, "belong to another run"),
            (unknown, "name a configuration that run.json lacks"),
            (damaged, "hold something else than numbers"),
        ):
            if lines:
                problems.append(f"{lines} lines of {folder.name}/{GENERATIONS} {what} and are not used.")


def _cells(row: Mapping[str, Any], config: Mapping[str, Any], target: str | None) -> dict[str, Any]:
    """A line as the row of the table."""
    cells: dict[str, Any] = {"target": target, "warnings": row.get("warnings") or []}
    for name in _PLAIN_FIELDS:
        value = row.get(name)
        cells[name] = intern(value) if isinstance(value, str) else value
    for name in _MEASURED_FIELDS:
        value = row.get(name)
        cells[name] = _NAN if value is None else value
    for name in _CONFIG_FIELDS:
        value = config.get(name)
        cells[name] = _NAN if name in _NUMBERS and value is None else value
    cells["token_ids"] = numbers(row.get("token_ids") or [], int)
    steps = step_columns(row.get("steps") or {})
    cells.update({f"steps_{name}": values for name, values in steps.items()})
    cells.update(_derived(row, steps))
    cells.update(_of_server(row))
    return cells


def speed_of(row: Mapping[str, Any]) -> float:
    """Decode tokens/s of a line, of a group its throughput; NaN without any. docs/metrics.md defines both."""
    if "requests" not in row:
        rest = row["new_tokens"] - row.get("first_tokens", 1)
        return _ratio(rest, row["decode_s"]) if rest > 0 else _NAN
    tokens = sum(each["new_tokens"] for each in row["requests"])
    if row["clients"] is None:
        return _ratio(tokens, row["seconds"])
    # Each client is always waiting for one of them.
    return _ratio(row["clients"] * tokens, sum(each["total_s"] for each in row["requests"]))


def _of_server(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a server told, and what follows from that; docs/metrics.md defines it.

    Behind the first token every step emits what it keeps and one token more, so that tokens and kept drafts give the
    number of steps. Where a server does not say what was kept, the bursts that its answer came in stand for steps.
    """
    server = row.get("server")
    if not server:
        return {**dict.fromkeys(_NO_FIGURES_OF_SERVERS), **dict.fromkeys(_OF_SERVERS, _NAN)}
    told = {name: server.get(name) for name in _NO_FIGURES_OF_SERVERS}
    figures = {name: _NAN if server.get(name) is None else server[name] for name in _OF_SERVERS}
    if server.get("accepted") is not None:
        emitted, by = row["new_tokens"] - 1, "server"
        steps = emitted - server["accepted"]
    else:
        emitted, by = row["new_tokens"] - row.get("first_tokens", 1), "bursts"
        steps = server["bursts"] - 1
    if emitted > 0 and steps > 0:
        told["step_source"] = by
        figures |= {"emitted_in_steps": emitted, "told_steps": steps}
    return {
        **told,
        **figures,
        "tokens_per_step": figures["emitted_in_steps"] / figures["told_steps"],
        "acceptance_rate": _ratio(figures["accepted"], figures["drafted"]),
    }


def _of_group(row: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a line that belong to all of its generations; docs/metrics.md defines them."""
    if "requests" not in row:
        return {**dict.fromkeys(_OF_GROUPS, _NAN), "group_kept_at": None}
    pool = row.get("pool") or {}
    blocks, peak = pool.get("blocks", _NAN), pool.get("peak", _NAN)
    speculation = row.get("speculation") or {}
    return {
        "throughput": speed_of(row),
        "pool_blocks": blocks,
        "pool_peak_blocks": peak,
        "pool_peak_bytes": pool.get("bytes", _NAN) * _ratio(peak, blocks),
        "group_drafted": speculation.get("drafted", _NAN),
        "group_accepted": speculation.get("accepted", _NAN),
        "group_drafts": speculation.get("drafts", _NAN),
        "group_kept_at": speculation.get("kept_at"),
    }


def _derived(row: Mapping[str, Any], steps: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a row; docs/metrics.md defines them."""
    if row["status"] != "ok":
        return dict.fromkeys(_DERIVED, _NAN)
    alphas = numbers([value for step in steps["expected_acceptance"] for value in step], float)
    return {
        "tokens_per_second": speed_of(row),
        "tokens_per_step": _ratio(float(steps["emitted"].sum()), len(steps["emitted"])),
        "acceptance_rate": _ratio(float(steps["accepted"].sum()), float(steps["drafted"].sum())),
        "alpha": float(alphas.mean()) if len(alphas) else _NAN,
    }


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else _NAN
