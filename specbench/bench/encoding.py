"""Prompts as a target reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.generate import encode_prompt

if TYPE_CHECKING:
    from specbench.bench.prompts import Prompt
    from specbench.models.target import Target


def encode_turns(target: Target, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of the first turns. A system message that the template has no place for goes before the turn.

    Raises:
        UsageError: The target has no tokenizer, or its template refuses a prompt.
    """
    if target.tokenizer is None:
        raise UsageError("The target has no tokenizer.", "Choose a model folder that holds one.")
    found = []
    for prompt in prompts:
        try:
            ids = encode_prompt(target.tokenizer, prompt.turns[0], system=prompt.system)
        except UsageError:
            if prompt.system is None:
                raise
            ids = encode_prompt(target.tokenizer, f"{prompt.system}\n\n{prompt.turns[0]}")
        found.append(ids)
    return found
