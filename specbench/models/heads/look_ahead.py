"""PaSS: embeddings that the target reads in place of tokens to come, in a form of our own, as no other is published.

ahead    [look_ahead, hidden]

config.json has the ``model_type`` ``pass``, ``look_ahead``, ``hidden_size`` and ``vocab_size``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specbench.backends.torch.scorer import Scorer
from specbench.backends.torch.self_forms import cheaper_form
from specbench.base.errors import UsageError
from specbench.drafters.parallel import LookAheadDrafter
from specbench.models.heads.base import TrainedHead, register
from specbench.models.target import Target


class LookAheadEmbedding(nn.Module):
    """A target's embeddings, and after them those of tokens to come, whose ids begin at the target's number of tokens.

    Args:
        own: The target's.
        ahead: The others, [look-ahead, hidden].
    """

    def __init__(self, own: nn.Module, ahead: Tensor) -> None:
        super().__init__()
        self.own, self.ahead = own, nn.Parameter(ahead, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The target's own, [tokens, hidden]."""
        own: Any = self.own
        weight: Tensor = own.weight
        return weight

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., hidden]."""
        first = len(self.weight)
        own = self.own(ids.clamp(max=first - 1))
        return torch.where((ids < first)[..., None], own, self.ahead[(ids - first).clamp(min=0)])


@register("pass", makes="drafter", claims=lambda files, _: files.settings.get("model_type") == "pass")
def _drafter(head: TrainedHead, target: Target) -> LookAheadDrafter:
    model: Any = target.language_model.model
    own, count = model.get_input_embeddings(), head.files.number("look_ahead")
    with torch.device("meta"):
        module = nn.ParameterDict({"ahead": torch.empty(count, head.files.number("hidden_size"))})
    head.fill(module, head.tensors)
    try:
        copy: Any = cheaper_form(model, range(target.language_model.layers))
    except ValueError as error:
        raise UsageError(
            f"This target takes no further embeddings: {error}.", "Use another drafter."
        ) from error
    copy.set_input_embeddings(LookAheadEmbedding(own, module["ahead"].to(own.weight)))
    scorer = Scorer(copy, target.scorer.cache, context_limit=target.scorer.context_limit)
    first = len(own.weight)
    return LookAheadDrafter(scorer, head.name, range(first, first + count))
