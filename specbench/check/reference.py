"""Greedy outputs of ``transformers`` itself, under the check's own limits."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from specbench.bench.engines.hf import generate_with_transformers
from specbench.rows import Condition, OtherLibrary, Row

if TYPE_CHECKING:
    from specbench.models.load import LanguageModel
    from specbench.options import DecodingOptions

_ROW = Row(OtherLibrary("transformers"), Condition())


def reference_output(model: LanguageModel, decoding: DecodingOptions, prompt: Sequence[int]) -> list[int]:
    """Return the token ids of ``generate(do_sample=False)`` with the model's rules, the format and the limits.

    Args:
        model: As ``transformers`` loads it; its own generation settings are removed meanwhile.
        decoding: The limits and rules of the output, without stop strings.
        prompt: Token ids that fit into the context.
    """
    own = model.model.generation_config
    try:
        made = generate_with_transformers(
            model, None, model, model.context_limit, _ROW, prompt, decoding, 0, perf_counter
        )
    finally:
        model.model.generation_config = own
    return list(made.token_ids)
