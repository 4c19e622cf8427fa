"""What a command that runs in this process prints (the fixture ``cli``), and what Python callers are refused with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from specbench.base.errors import SpecbenchError


class Result(NamedTuple):
    """What one command did."""

    code: int
    out: str
    err: str

    def json(self, code: int = 0) -> dict[str, Any]:
        """The one object on stdout."""
        assert self.code == code, self.err
        assert self.out.count("\n") == 1
        return dict(json.loads(self.out))

    def refused(self, code: int, *fragments: str, stages: bool = False) -> None:
        """Nothing on stdout, and on stderr one sentence that holds the fragments, after stages of loading if any."""
        assert (self.code, self.out) == (code, ""), self.err
        assert re.fullmatch(r"([^\n]+ \.\.\.\n)*" * stages + r"specbench: [^\n]+\.\n", self.err), self.err
        for fragment in fragments:
            assert fragment in self.err


Cli = Callable[..., Result]


def write_prompts(path: Path, prompts: Mapping[str, Sequence[str]]) -> Path:
    """A file of prompts: turns by id; the category is the id up to its last hyphen."""
    lines = [
        {"id": name, "category": name.rpartition("-")[0] or name, "turns": [*turns]}
        for name, turns in prompts.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def refusal(call: Any, *arguments: Any, kind: type[SpecbenchError], **options: Any) -> str:
    """What ``call`` is refused with: one sentence and a hint, on one line."""
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message
