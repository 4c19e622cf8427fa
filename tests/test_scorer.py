"""Hidden states of a pass are those of ``transformers``, wherever its rows come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_llama

from specbench.backends.torch.scorer import Scorer
from specbench.decoding.protocols import Pass
from specbench.errors import UsageError

CONTEXT, DRAFT, LAYERS = [5, 9, 2, 7, 11, 3], [4, 8, 6], (0, 1, 2)


def states(model: Any, tokens: list[int], rows: int) -> torch.Tensor:
    """What ``transformers`` gives without a cache, [rows, layers, width]."""
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
    return torch.stack([output.hidden_states[layer][0, -rows:] for layer in LAYERS], dim=1)


@pytest.mark.parametrize("cache", ["dynamic", "preallocated", "none"])
def test_a_chain(cache: Any) -> None:
    model = tiny_llama(layers=2)
    scorer = Scorer(model, cache)
    scorer.begin()
    scorer.logits(CONTEXT[:-2])
    found = scorer.score(Pass(scorer, CONTEXT, DRAFT, layers=LAYERS))
    assert found.hidden is not None
    torch.testing.assert_close(found.hidden, states(model, CONTEXT + DRAFT, 4))
    torch.testing.assert_close(found.logits, Scorer(model, "none").logits(CONTEXT, DRAFT))
    scorer.keep(len(CONTEXT))
    assert scorer.score(Pass(scorer, CONTEXT, DRAFT, rows=2)).hidden is None


def test_a_tree() -> None:
    model = tiny_llama(layers=2)
    scorer = Scorer(model)
    assert scorer.takes_trees
    scorer.begin()
    found = scorer.score(Pass(scorer, CONTEXT, [4, 8, 6], parents=[-1, 0, -1], layers=LAYERS)).hidden
    assert found is not None
    torch.testing.assert_close(found[:3], states(model, [*CONTEXT, 4, 8], 3))
    torch.testing.assert_close(found[3:], states(model, [*CONTEXT, 6], 1))


def test_passes_of_fixed_shapes_have_none() -> None:
    scorer = Scorer(tiny_llama(layers=2), "static")
    assert not scorer.gives_hidden
    scorer.begin()
    with pytest.raises(UsageError, match="give no hidden states"):
        scorer.score(Pass(scorer, CONTEXT, layers=LAYERS))
