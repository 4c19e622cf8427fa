"""Greedy outputs of ``transformers`` itself, under the check's own limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from specbench.base.progress import quiet_transformers
from specbench.check.greedy import GreedyOutput, TopLogits
from specbench.decoding.stops import StopRules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbench.decoding.formats import CompiledFormat


def reference_output(
    model: PreTrainedModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    end_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
    tokenizer: Any = None,
    repetition_penalty: float = 1.0,
    context_rules: Mapping[str, Any] | None = None,
    context_limit: int | None = None,
    format: CompiledFormat | None = None,  # noqa: A002
) -> GreedyOutput:
    """Return the output of ``generate(do_sample=False)`` with the given settings only.

    Stop strings are cut afterwards as in the decoding loop, because ``generate`` matches them differently.

    Args:
        model: As ``transformers`` loads it; its own generation settings are removed meanwhile.
        max_new_tokens, end_ids, stop, tokenizer: See ``DecodingSetup``.
        context_rules: See ``DecodingOptions.context_rules``.
        context_limit: Of the target; ``None`` for no limit.
        format: Of the output; ``None`` for any text.
    """
    from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

    limit = max_new_tokens if context_limit is None else min(max_new_tokens, context_limit - len(prompt))
    if limit < 1:
        return GreedyOutput()
    rules = {**(context_rules or {}), "repetition_penalty": repetition_penalty}
    if limit < max_new_tokens:  # the forced end comes after max_new_tokens
        rules.pop("forced_eos_token_id", None)
    tops: list[TopLogits] = []

    class Note(LogitsProcessor):
        def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            tops.append(TopLogits.from_row(scores[0]))
            return scores

    untyped: Any = model
    ids = torch.tensor([list(prompt)], device=untyped.get_input_embeddings().weight.device)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=limit,
        eos_token_id=list(end_ids) or None,
        pad_token_id=next(iter(end_ids), 0),
        **rules,
    )
    masks = [] if format is None else [format.matcher(len(prompt)).process]
    own = untyped.generation_config
    untyped.generation_config = GenerationConfig()  # the default of everything that the call leaves unset
    try:
        with torch.inference_mode(), quiet_transformers():
            output = untyped.generate(
                inputs=ids,
                attention_mask=torch.ones_like(ids),
                logits_processor=LogitsProcessorList([*masks, Note()]),
                generation_config=config,
            )
    finally:
        untyped.generation_config = own
    tokens = output[0, len(prompt) :].tolist()
    kept, _ = StopRules(end_ids, stop, tokenizer).cut(tokens)
    return GreedyOutput(tokens[:kept], tops[:kept])
