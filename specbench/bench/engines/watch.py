"""When `transformers`' own `generate` emits, and why it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specbench.decoding.clocks import Clock


def finish_reason(tokens: Sequence[int], end_ids: Sequence[int], max_new_tokens: int) -> str:
    if tokens and tokens[-1] in end_ids:
        return "eos"
    return "length" if len(tokens) == max_new_tokens else "context-limit"


def watch_generate(clock: Clock) -> Any:
    """A stopping criterion that never stops: ``generate`` calls it behind every emission, and it notes the time."""
    import torch
    from transformers import StoppingCriteria

    class Watch(StoppingCriteria):
        first_at = last_at = 0.0
        first_length = 0

        def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            self.last_at = clock.now()
            if not self.first_length:
                self.first_at, self.first_length = self.last_at, input_ids.shape[1]
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    return Watch()
