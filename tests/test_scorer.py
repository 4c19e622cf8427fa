"""Hidden states of a pass are those of ``transformers``, wherever its rows come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_llama

from specbench.backends.torch.attention import fold_attention
from specbench.backends.torch.forward import NativeForward
from specbench.backends.torch.scorer import Scorer
from specbench.decoding.protocols import ForwardRequest
from specbench.kernels.surgery import pack

CONTEXT, DRAFT, LAYERS = [5, 9, 2, 7, 11, 3], [4, 8, 6], (0, 1, 2)


def states(model: Any, tokens: list[int], rows: int) -> torch.Tensor:
    """What ``transformers`` gives without a cache, [rows, layers, width]."""
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
    return torch.stack([output.hidden_states[layer][0, -rows:] for layer in LAYERS], dim=1)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "preallocated", "none", "static"])
def test_a_chain(cache, short):
    model = tiny_llama(layers=2)
    fed = CONTEXT + DRAFT
    expected = states(model, fed, len(fed))
    if short:
        fold_attention(model)
        pack(model)
    scorer = Scorer(model, cache)
    assert isinstance(scorer.forward, NativeForward) <= (short and cache not in ("static", "none"))
    scorer.begin()
    held = 0 if cache == "none" else 4
    scorer.logits(CONTEXT[:4])
    found = scorer.score(ForwardRequest(scorer, CONTEXT, DRAFT, layers=LAYERS))
    assert found.hidden is not None
    torch.testing.assert_close(found.hidden, expected[held:], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.logits, Scorer(model, "none").logits(CONTEXT, DRAFT))
    scorer.rollback(len(CONTEXT))
    assert scorer.score(ForwardRequest(scorer, CONTEXT, DRAFT, rows=2)).hidden is None
    scorer.begin()
    found = scorer.score(ForwardRequest(scorer, CONTEXT, rows=1, layers=(1,)))
    assert found.logits.shape[0] == 1
    assert found.hidden is not None
    torch.testing.assert_close(found.hidden, expected[: len(CONTEXT), 1:2], atol=1e-5, rtol=1e-4)


def test_a_tree():
    model = tiny_llama(layers=2)
    scorer = Scorer(model)
    assert scorer.takes_trees
    scorer.begin()
    found = scorer.score(
        ForwardRequest(scorer, CONTEXT, [4, 8, 6], parents=[-1, 0, -1], layers=LAYERS)
    ).hidden
    assert found is not None
    torch.testing.assert_close(found[:-1], states(model, [*CONTEXT, 4, 8], 8))
    torch.testing.assert_close(found[-1:], states(model, [*CONTEXT, 6], 1))
