"""What ``transformers`` itself answers greedily, under the check's own limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from specbench.base.progress import quiet_transformers
from specbench.check.greedy import Output, Top
from specbench.decoding.stops import StopRules

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ReferenceSettings:
    """What ``generate`` is told: those of ``DecodingSetup``, which needs the packed target and so comes later.

    Attributes:
        repetition_penalty: 1 for none.
        context_rules: What else is applied by the context alone (``DecodingOptions.context_rules``).
        context_limit: Longest prompt and output together; ``None`` for no limit.
    """

    max_new_tokens: int
    end_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    tokenizer: Any = None
    repetition_penalty: float = 1.0
    context_rules: Mapping[str, Any] = field(default_factory=dict)
    context_limit: int | None = None


def reference_output(model: PreTrainedModel, prompt: Sequence[int], settings: ReferenceSettings) -> Output:
    """What ``generate(do_sample=False)`` answers, with the check's end tokens, settings and limits and no others.

    Stop strings cut it afterwards, by the rule of the decoding loop: ``generate`` matches them in its own way.

    Args:
        model: As ``transformers`` loads it; its own generation settings are put aside meanwhile.
        prompt: Token ids.
        settings: The limits.
    """
    from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

    room = settings.max_new_tokens
    if settings.context_limit is not None:
        room = min(room, settings.context_limit - len(prompt))
    if room < 1:
        return Output((), ())
    defaults = {**settings.context_rules, "repetition_penalty": settings.repetition_penalty}
    if room < settings.max_new_tokens:  # an end is forced behind the tokens asked for, which are not reached
        defaults.pop("forced_eos_token_id", None)
    tops: list[Top] = []

    class Note(LogitsProcessor):
        def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            tops.append(Top.of(scores[0]))
            return scores

    untyped: Any = model
    ids = torch.tensor([list(prompt)], device=untyped.get_input_embeddings().weight.device)
    asked = GenerationConfig(
        do_sample=False,
        max_new_tokens=room,
        eos_token_id=list(settings.end_ids) or None,
        pad_token_id=next(iter(settings.end_ids), 0),
        **defaults,
    )
    own = untyped.generation_config
    untyped.generation_config = (
        GenerationConfig()
    )  # what the call leaves unset would come from the model's file
    try:
        with torch.inference_mode(), quiet_transformers():
            output = untyped.generate(
                inputs=ids,
                attention_mask=torch.ones_like(ids),
                logits_processor=LogitsProcessorList([Note()]),
                generation_config=asked,
            )
    finally:
        untyped.generation_config = own
    tokens = output[0, len(prompt) :].tolist()
    kept, _ = StopRules(settings.end_ids, settings.stop, settings.tokenizer).cut(tokens)
    return Output(tuple(tokens[:kept]), tuple(tops[:kept]))
