"""What a user is told of what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from specbench.errors import SpecbenchError


def refusal(call: Any, *arguments: Any, kind: type[SpecbenchError], **options: Any) -> str:
    """What ``call`` is refused with: one sentence and a hint, on one line."""
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message
