"""Setups of the decoding loop over scripted models, and what the check finds in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from scripted import ScriptedCache, ScriptedScorer, random_table

import specbench.check.observe
from specbench.check.run import DecodingCheck
from specbench.decoding.clocks import Stopwatch
from specbench.decoding.loop import DecodingLoop, decode
from specbench.decoding.records import Step
from specbench.decoding.request import Request
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.stops import StopRules
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter, SelfDrafter
from specbench.drafters.ngram import NGramDrafter
from specbench.policies import FixedLength
from specbench.specs.drafters import NGram

VOCAB = 8
PROMPTS = ((1, 5, 2, 7, 1, 5, 2), (3, 3, 6))
TARGET, DRAFT = random_table(1, VOCAB), random_table(2, VOCAB)


def draft_model(table: Any = DRAFT, name: str = "model") -> ModelDrafter:
    return ModelDrafter(ScriptedScorer(table, VOCAB), name)


DRAFTERS: dict[str, Callable[[ScriptedScorer], Any]] = {
    "model": lambda target: draft_model(),
    "self": lambda target: SelfDrafter(
        ScriptedScorer(DRAFT, VOCAB, cache=target.cache, own_entries_only=False), "self"
    ),
    "lookup": lambda target: LookupDrafter(),
    "ngram:sample": lambda target: NGramDrafter(NGram(sample=True)),
    "cascade": lambda target: CascadeDrafter(NGramDrafter(NGram(sample=True)), draft_model()),
}


Decoder = Callable[[Request, Stopwatch], DecodingLoop]
"""Something like ``decode``."""


def request_of(
    target: Any,
    drafter: Any,
    policy: Any = None,
    sampling: Sampling | None = None,
    max_new_tokens: int = 12,
    *,
    prompt: Sequence[int] = PROMPTS[0],
    end_ids: Iterable[int] = (),
    stop: Sequence[str] = (),
    tokenizer: Any = None,
    **changes: Any,
) -> Request:
    """A request with seed 0: three drafts a step, sampled."""
    return Request(
        prompt, target, drafter, policy or FixedLength(3), sampling or Sampling(0.9), Randomness(0),
        max_new_tokens, StopRules(end_ids, stop, tokenizer), **changes,
    )  # fmt: skip


def setup_of(drafter: str = "model", target: Any = None, **changes: Any) -> Request:
    """Everything but the prompt: that of the request is the first one."""
    target = target or ScriptedScorer(TARGET, VOCAB, cache=ScriptedCache())
    return request_of(target, DRAFTERS[drafter](target), **changes)


def result_of(setup: Request, decoder: Decoder = decode) -> DecodingCheck:
    """What the check of both prompts finds, with another loop perhaps."""
    checking = DecodingCheck({str(i): replace(setup, prompt=prompt) for i, prompt in enumerate(PROMPTS)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specbench.check.observe, "decode", decoder)
        list(checking.check_steps())
    return checking


def violated(result: DecodingCheck) -> set[str]:
    return {violation.invariant for _, violation in result.violations}


def decoder_with(**changed: Any) -> Decoder:
    """The loop with another request than the one it is given."""
    return lambda request, watch: decode(replace(request, **changed), watch)


def with_records(change: Callable[[Step], Step]) -> Decoder:
    """The loop with changed steps in its records."""

    def decoder(request: Request, watch: Stopwatch) -> DecodingLoop:
        decoding, output = decode(request, watch), None
        with suppress(StopIteration):
            while True:
                each = decoding.send(output)  # type: ignore[arg-type]
                output = yield change(each) if isinstance(each, Step) else each

    return decoder
