"""Time a model's first layers in several dtypes, in turn."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specbench.backends.torch.kernels.attention import fold_attention
from specbench.backends.torch.kernels.surgery import first_layers, pack_linears
from specbench.backends.torch.scorer import Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WEIGHTS = 96_000_000
"""Numbers in a sample's layers, if the model has enough: more than caches hold, in any dtype."""

_WORDS = 64  # tokens of a sample's vocabulary: a whole one takes as much memory as many layers
_CONTEXT = 64  # tokens that are read before forwards are timed
_DRAFTED = 4  # drafts in a verification


def sample_in(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model's first layers in a dtype, packed, with a vocabulary of a few tokens; the model is left as it is.

    Raises:
        ValueError: Its layers or its vocabulary were not found. UsageError: They are wrapped.
    """
    total = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    one, two = (_numbers(first_layers(model, min(count, total))) for count in (1, 2))
    sample: Any = first_layers(model, min(total, max(1, _WEIGHTS // max(1, two - one))))
    _shorten(sample.get_input_embeddings(), sample.get_output_embeddings())
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in sample.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                if weight not in made:
                    made[weight] = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
                module._parameters[name] = made[weight]
    fold_attention(sample)
    pack_linears(sample)
    found: PreTrainedModel = sample
    return found


def _numbers(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _shorten(embeddings: Any, head: Any) -> None:
    """Keep the first words of embeddings and a head, which belong to the sample alone."""
    if not isinstance(embeddings, nn.Embedding) or type(head) is not nn.Linear:
        raise ValueError("its vocabulary was not found")
    for words in (embeddings, head):
        words.weight = nn.Parameter(words.weight.detach()[:_WORDS], requires_grad=False)
    embeddings.num_embeddings, embeddings.padding_idx = len(embeddings.weight), None
    head.out_features = len(head.weight)
    if head.bias is not None:
        head.bias = nn.Parameter(head.bias.detach()[:_WORDS], requires_grad=False)


@torch.inference_mode()
def time_samples(
    samples: Mapping[torch.dtype, PreTrainedModel], rounds: int, patience_s: float
) -> list[dict[torch.dtype, float]]:
    """Time two forwards together, one over a single token and one that verifies a draft, in seconds.

    Args:
        samples: Models of the same layers, by their dtype.
        rounds: How often each is timed. They take turns, and each round begins with another one.
        patience_s: Seconds after which no new round is begun, since forwards can take very long on a busy machine.

    Returns:
        The times of each round.
    """
    until = time.perf_counter() + patience_s
    scorers = {dtype: Scorer(sample) for dtype, sample in samples.items()}
    names, times = list(scorers), []
    for scorer in scorers.values():
        scorer.begin()
        _seconds(scorer)  # reads the context, and meets every shape
    for turn in range(rounds):
        if time.perf_counter() >= until:
            break
        first = turn % len(names)
        times.append({dtype: _seconds(scorers[dtype]) for dtype in (*names[first:], *names[:first])})
    return times


def _seconds(scorer: Scorer) -> float:
    context: Sequence[int] = [place % min(_WORDS, scorer.embeddings) for place in range(_CONTEXT)]
    began = time.perf_counter()
    for drafted in ((), context[:_DRAFTED]):
        scorer.logits(context, drafted)
        scorer.rollback(len(context) - 1)
    return time.perf_counter() - began
