"""Generations by `transformers`' own `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from specbench.base.errors import UsageError
from specbench.base.progress import quiet_transformers
from specbench.options import DecodingOptions
from specbench.results.lines import Generation
from specbench.rows import LOOKUP_TOKENS, OtherLibrary, Row

if TYPE_CHECKING:
    from specbench.decoding.clocks import Clock
    from specbench.models.load import LanguageModel


class _EmissionTimes(StoppingCriteria):
    """A stopping criterion that never stops, but records the time: ``generate`` calls it after every emission."""

    first_at = last_at = 0.0
    first_length = 0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> Any:
        self.last_at = self._clock()
        if not self.first_length:
            self.first_at, self.first_length = self.last_at, input_ids.shape[1]
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generate_with_transformers(
    reference: LanguageModel,
    assistant: LanguageModel | None,
    target: LanguageModel,
    limit: int | None,
    config: Row,
    prompt: Sequence[int],
    decoding: DecodingOptions,
    seed: int,
    clock: Clock,
) -> Generation:
    """Call ``generate`` with exactly the settings, end tokens and seed of specbench's own loop.

    ``reference`` and ``assistant`` are target and drafter as ``transformers`` loads them, before layers are changed;
    ``target`` is what specbench decodes with, and ``limit`` the context that it holds.

    Raises:
        UsageError: The prompt does not fit the target's context.
    """
    longest = decoding.max_new_tokens
    budget = longest if limit is None else min(longest, limit - len(prompt))
    if budget < 1:
        raise UsageError(
            f"The prompt has {len(prompt)} tokens, but the target's context holds only {limit}.",
            "Shorten the prompt.",
        )
    end_ids = decoding.end_ids(target.end_ids)
    extra: dict[str, Any] = {}
    if assistant is not None:
        # Its defaults (20 tokens, confidence 0.4), set again each time: transformers stores adapted values there.
        assistant.model.generation_config = GenerationConfig()
        extra["assistant_model"] = assistant.model
    elif config.kind == "assisted":
        extra["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
    if (form := decoding.format) is not None:
        matcher = target.formats.compile(form).matcher(len(prompt))
        extra["logits_processor"] = LogitsProcessorList([matcher.process])
    rules = target.defaults.with_options(decoding).applied
    greedy = config.condition.temperature == 0
    beams = config.decoder.beams if isinstance(config.decoder, OtherLibrary) else None
    settings = GenerationConfig(
        do_sample=not greedy,
        max_new_tokens=budget,
        eos_token_id=list(end_ids) or None,
        pad_token_id=next(iter(target.end_ids), 0),
        **({} if beams is None else {"num_beams": beams}),
        **rules,
        **({} if greedy else {"temperature": config.condition.temperature, "top_k": 0, "top_p": 1.0}),
    )
    # What the call leaves unset would come from the model's own file, sampling defaults and all.
    reference.model.generation_config = GenerationConfig()
    device = torch.device(reference.device)
    ids = torch.tensor([list(prompt)], device=device)
    times = _EmissionTimes(clock)
    with quiet_transformers(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model: Any = reference.model
        began = clock()
        output = model.generate(
            inputs=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            stopping_criteria=StoppingCriteriaList([times]),
            **extra,
        )
    tokens = tuple(output[0, len(prompt) :].tolist())
    reason = "length" if len(tokens) == longest else "context-limit"
    if tokens and tokens[-1] in end_ids:
        reason = "eos"
    return Generation.of(
        tokens,
        times.first_at - began,
        times.last_at - times.first_at,
        prompt_tokens=len(prompt),
        finish_reason=reason,
        first_tokens=times.first_length - len(prompt),
    )
