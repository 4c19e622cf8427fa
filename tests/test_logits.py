"""Logits of a few tokens, and of none with an end."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from specbench.decoding.distributions import Scores
from specbench.decoding.logits import DraftVocabulary, Logits, NoTokenError


def test_a_few_tokens_have_the_chances_that_they_have_where_all_others_are_impossible():
    vocabulary = DraftVocabulary(torch.tensor([7, 2, 5, 0]), 9)
    values = torch.tensor([[1.0, -0.5, 3.0, 0.2], [0.3, 0.1, -2.0, 4.0]])
    spread = vocabulary.spread(values, -math.inf)
    for row, wide in zip(values, spread, strict=True):
        few, known = Logits(row, vocabulary), Logits(wide)
        assert few.log_sum == pytest.approx(known.log_sum, abs=1e-5)
        assert [few.log_chance(t) for t in range(9)] == pytest.approx(
            [known.log_chance(t) for t in range(9)], abs=1e-5
        )
        assert few.best(2) == known.best(2)
    own = Scores.of(values.clone(), normalized=False, vocabulary=vocabulary)
    for each, whole in zip(own, Scores.of(spread.clone(), normalized=False), strict=True):
        assert each.best(3) == whole.best(3)
        torch.testing.assert_close(each.q, whole.q)


@pytest.mark.parametrize("everywhere", [-math.inf, math.inf, math.nan])
def test_logits_without_an_end_are_an_error(everywhere):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NoTokenError):
            _ = Logits(torch.full((4,), everywhere)).log_sum
