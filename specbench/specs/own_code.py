"""Classes of the user's own, in Python files or given as they are.

A file runs only where the user names it (``./mine.py:MyDrafter``): stored results do not know its folder. Whatever goes
wrong in such code is told in a sentence with the file and the line.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from specbench.base.errors import RunError, UsageError
from specbench.base.textsafe import one_line

_OTHERS = ("<", str(Path(__file__).parents[1]), str(Path(traceback.__file__).parent / "importlib"))
"""Beginnings of file names in a traceback that do not belong to the user's code."""


_GIVEN: dict[str, dict[str, type]] = {}
"""Classes that were given as they are, by what stands for their files."""


def name_of(kind: type) -> str:
    """Return a class as if it were named in a file: ``names_in`` then knows it."""
    source = f"{kind.__module__.rpartition('.')[2]}.py"
    _GIVEN.setdefault(source, {})[kind.__name__] = kind
    return f"{source}:{kind.__name__}"


def names_in(source: str) -> dict[str, Any]:
    """Run a file as a module, once until it changes, and return its names.

    Raises:
        UsageError: There is no such file.
        RunError: It cannot be imported.
    """
    if source in _GIVEN:
        return _GIVEN[source]
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"There is no file {source!r}.", "Check the path.")
    return _names_in(path, path.stat().st_mtime_ns)


@cache
def _names_in(path: Path, changed: int) -> dict[str, Any]:  # noqa: ARG001 - a changed file runs again
    spec = importlib.util.spec_from_file_location(f"specbench_drafter_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with told(f"{path.name} cannot be imported"):
        spec.loader.exec_module(module)
    return vars(module)


@contextmanager
def told(what: str, kind: type | None = None, *methods: str) -> Iterator[None]:
    """Turn an exception within the block, also an attempt to exit, into a sentence with the user's line that raised it.

    Args:
        what: The sentence's beginning.
        kind, methods: The user's class, and its methods that are at fault if no line of the user's raised it, the
            likeliest last.
    """
    try:
        yield
    except (RunError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        places = [(each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__)]
        codes = (getattr(getattr(kind, name, None), "__code__", None) for name in methods)
        places = [(code.co_filename, code.co_firstlineno) for code in codes if code] + places
        if isinstance(error, SyntaxError):
            places.append((error.filename or "", error.lineno))
        own = [(file, line) for file, line in places if not file.startswith(_OTHERS)]
        place = f"{Path(own[-1][0]).name}, line {own[-1][1]}" if own else "its file"
        said = one_line(error)
        if not isinstance(error, UsageError):
            said = f"{type(error).__name__}: {said}" if said else type(error).__name__
        hint = "Correct it; docs/drafters.md says what a drafter promises."
        raise RunError(f"{what} ({place}): {said.rstrip('. ')}.", hint) from error
