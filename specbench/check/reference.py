"""Greedy outputs of ``transformers`` itself, under the check's own limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from specbench.base.progress import quiet_transformers
from specbench.decoding.stops import StopRules
from specbench.loaded import transforms_of

if TYPE_CHECKING:
    from specbench.models.load import LanguageModel
    from specbench.recipe import Recipe


def reference_output(model: LanguageModel, recipe: Recipe, prompt: Sequence[int]) -> list[int]:
    """Return the token ids of ``generate(do_sample=False)`` with the settings of a recipe only.

    Stop strings are cut afterwards as in the decoding loop, because ``generate`` matches them differently.

    Args:
        model: As ``transformers`` loads it; its own generation settings are removed meanwhile.
        recipe: The limits and rules of the output; of the transforms only the repetition penalty and the format apply.
        prompt: Token ids.
    """
    from transformers import GenerationConfig, LogitsProcessorList

    decoding, sampling = recipe.decoding, transforms_of(recipe, model)
    limit, end_ids = decoding.max_new_tokens, decoding.end_ids(model.end_ids)
    if model.context_limit is not None:
        limit = min(limit, model.context_limit - len(prompt))
    if limit < 1:
        return []
    rules = decoding.context_rules(model.defaults.applied)
    rules = {**rules, "repetition_penalty": sampling.repetition_penalty}
    if limit < decoding.max_new_tokens:  # the forced end comes after max_new_tokens
        rules.pop("forced_eos_token_id", None)
    untyped: Any = model.model
    ids = torch.tensor([list(prompt)], device=untyped.get_input_embeddings().weight.device)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=limit,
        eos_token_id=list(end_ids) or None,
        pad_token_id=next(iter(end_ids), 0),
        **rules,
    )
    masks = [] if sampling.format is None else [sampling.format.matcher(len(prompt)).process]
    own = untyped.generation_config
    untyped.generation_config = GenerationConfig()  # the default of everything that the call leaves unset
    try:
        with torch.inference_mode(), quiet_transformers():
            output = untyped.generate(
                inputs=ids,
                attention_mask=torch.ones_like(ids),
                logits_processor=LogitsProcessorList(masks),
                generation_config=config,
            )
    finally:
        untyped.generation_config = own
    tokens = output[0, len(prompt) :].tolist()
    kept, _ = StopRules(end_ids, decoding.stop, model.tokenizer).cut(tokens)
    return list(tokens[:kept])
