"""What ``transformers`` answers to the prompts of a check, by greedy decoding within the check's own limits."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.bench.encoding import encode_conversation
from specbench.bench.engines.hf import generate_with_transformers
from specbench.rows import Condition, OtherLibrary, Row

if TYPE_CHECKING:
    from specbench.bench.prompts import Prompt
    from specbench.models.load import LanguageModel
    from specbench.options import DecodingOptions

_ROW = Row(OtherLibrary("transformers"), Condition())


def prompts_that_fit(model: LanguageModel, prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Return the token ids of the first turns that fit into a model's context, by the ids of their prompts.

    Raises:
        UsageError: None fits.
    """
    limit = model.context_limit
    encoded = {prompt.id: encode_conversation(model, prompt) for prompt in prompts}
    fitting = {name: ids for name, ids in encoded.items() if limit is None or len(ids) < limit}
    if not fitting:
        raise UsageError(
            f"All prompts are too long for the target's context of {limit} tokens.", "Choose shorter prompts."
        )
    return fitting


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
