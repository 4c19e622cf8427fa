"""What a user is told: by a command that ran in this process, and by what is refused in Python."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest

from specbench.errors import SpecbenchError


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

    def refused(self, code: int, *fragments: str) -> None:
        """Nothing on stdout, and one sentence on stderr that holds the fragments."""
        assert (self.code, self.out) == (code, ""), self.err
        assert re.fullmatch(r"specbench: [^\n]+\.\n", self.err), self.err
        for fragment in fragments:
            assert fragment in self.err


def refusal(call: Any, *arguments: Any, kind: type[SpecbenchError], **options: Any) -> str:
    """What ``call`` is refused with: one sentence and a hint, on one line."""
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message
