"""Models that draft several tokens in one pass: PARD."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from head_files import (
    VOCAB,
    few_head,
    few_tokens,
    wrapped_pard,
    write_model,
)
from test_zoo import zoo_model
from tiny import tiny_language_model, tiny_llama, tiny_tokenizer

from specbench import RunError, load_drafter, speculative_generate, wrap_target
from specbench.backends.torch.caches import CACHE_KINDS
from specbench.decoding.drafts import Draft, StepOutcome
from specbench.decoding.logits import Logits
from specbench.decoding.protocols import Drafter, StepPlan, run_to_end
from specbench.decoding.records import Generation
from specbench.decoding.sampling import Randomness, Sampling
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ParallelDrafter
from specbench.models.head_files import find_head
from specbench.models.target import Target
from specbench.options import LoadOptions
from specbench.policies import FixedLength
from specbench.specs.models import parse_model

CONTEXT = [5, 19, 2, 77, 11, 3, 140, 9]
MASK = VOCAB - 1
PLAIN = LoadOptions(dtype="float32")
PROMPT = [1, 2, 0, 1, 2]


def target(**options: Any) -> Target:
    return wrap_target(tiny_llama(layers=3), tiny_tokenizer(), name="tiny", pack=False, **options)


def pard_folder(folder: Path, **settings: Any) -> Path:
    """A PARD model of the target's family, with its tokenizer."""
    tiny_tokenizer().save_pretrained(folder)
    return write_model(folder, tiny_llama(seed=4), **{"pard_token": MASK, "spd_type": "pard", **settings})


def proposed(drafter: Drafter, context: Sequence[int], gamma: int) -> Draft:
    plan = StepPlan(gamma, FixedLength(gamma), Sampling(1.0), Randomness(0))
    return run_to_end(drafter.propose(context, plan))


def assert_rows(draft: Draft, expected: torch.Tensor) -> None:
    assert (draft.passes, len(draft.tokens)) == (1, len(expected))
    found = torch.stack([each.values for each in draft.sources if isinstance(each, Logits)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(draft.q, expected.softmax(-1), atol=1e-4, rtol=1e-4)


# -- the arithmetic --------------------------------------------------------------------------------


@torch.inference_mode()
def test_rows_of_pard_are_those_after_its_masks(tmp_path):
    folder = pard_folder(tmp_path)
    drafter = load_drafter(str(folder), target(), PLAIN)
    assert type(drafter) is ParallelDrafter
    reference = tiny_llama(seed=4)
    drafter.begin(CONTEXT)
    for end, gamma in ((5, 4), (6, 1), (7, 6)):  # what was read before is not read again, and masks are gone
        ids = torch.tensor([[*CONTEXT[:end], *[MASK] * (gamma - 1)]])
        assert_rows(proposed(drafter, CONTEXT[:end], gamma), reference(input_ids=ids).logits[0, -gamma:])
        drafter.update(StepOutcome(CONTEXT[: end + 1], 1, torch.empty(0)))
        assert drafter.scorer.cached_len == end


@torch.inference_mode()
@pytest.mark.parametrize("right", [0, 1, 2])
def test_tokens_of_a_cascade_are_read_before_the_masks(tmp_path, right):
    drafter: Any = load_drafter(str(pard_folder(tmp_path)), target(), PLAIN)
    drafter.begin(CONTEXT)
    draft = Draft([44, 8], passes=0)
    plan = StepPlan(5, FixedLength(5), Sampling(1.0), Randomness(0))
    ids = torch.tensor([[*CONTEXT, *draft.tokens, MASK, MASK]])
    for expected in tiny_llama(seed=4)(input_ids=ids).logits[0, -3:]:
        assert drafter.can_read(CONTEXT, draft.tokens)
        token, logits, _ = run_to_end(drafter.draw(CONTEXT, draft, plan, 5))
        torch.testing.assert_close(logits.values, expected, atol=1e-4, rtol=1e-4)
        draft.tokens.append(token)
    assert draft.passes == 1
    assert not drafter.can_read(CONTEXT, draft.tokens)
    context = [*CONTEXT, *draft.tokens[:right], 7]
    drafter.update(StepOutcome(context, right + 1, torch.empty(0), draft.tokens, [*range(right)]))
    assert drafter.scorer.cached_len == len(CONTEXT) + right


# -- outputs ---------------------------------------------------------------------------------------


def decoded(own: Target, drafter: Drafter | None, prompt: Sequence[int] = PROMPT, **more: Any) -> Generation:
    settings = {"policy": FixedLength(4), "max_new_tokens": 40, "ignore_eos": True, **more}
    return speculative_generate(prompt, own, drafter, **settings)


def accepted(found: Generation) -> int:
    return sum(step.accepted for step in found.steps)


@pytest.mark.parametrize("kept", CACHE_KINDS)
def test_greedy_outputs_are_the_targets(tmp_path, kept):
    own = wrap_target(few_tokens(), cache=kept, pack=False)
    drafter = few_head(tmp_path, "pard", own)
    expected = decoded(own, None).token_ids
    total = 0
    for each in (drafter, CascadeDrafter(LookupDrafter(), drafter)):
        found = decoded(own, each)
        assert found.token_ids == expected
        total += accepted(found)
    assert total > 10


@pytest.mark.parametrize(("family", "changed"), [("mistral", {"sliding_window": 4}), ("lfm2", {})])
def test_drafters_and_targets_whose_caches_slide_or_recur(family, changed):
    own = wrap_target(zoo_model(family, vocab_size=9, **changed), pack=False)
    expected = decoded(own, None).token_ids
    drafter = wrapped_pard(zoo_model(family, 1, vocab_size=9, **changed), own)
    for each in (drafter, CascadeDrafter(LookupDrafter(), drafter)):
        for new in (40, 12):
            assert decoded(own, each, max_new_tokens=new).token_ids == expected[:new]


# -- files and commands ----------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, VOCAB, None])
def test_a_model_without_a_mask_is_refused(tmp_path, token):
    folder = pard_folder(tmp_path, pard_token=token)
    files = find_head(parse_model(str(folder)))
    assert files is not None
    assert files.kind == "pard"
    with pytest.raises(RunError, match="pard_token"):
        load_drafter(str(folder), target(), PLAIN)


def test_a_model_of_another_size_drafts_for_the_target(tmp_path):
    """Its vocabulary is padded to another size, as those of one family often are."""
    own = tiny_language_model(layers=3)
    wide = tiny_llama(seed=4, vocab_size=VOCAB + 7)
    tiny_tokenizer().save_pretrained(tmp_path)
    folder = write_model(tmp_path, wide, pard_token=VOCAB + 2)
    whole = wrap_target(own.model, own.tokenizer, pack=False)
    drafter = load_drafter(str(folder), whole, PLAIN)
    assert decoded(whole, drafter, CONTEXT).token_ids == decoded(whole, None, CONTEXT).token_ids


@pytest.mark.smoke
def test_on_the_command_line(cli, tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    write_model(tmp_path / "target", tiny_llama(layers=3))
    pard_folder(tmp_path / "pard")
    found = cli(
        "generate", "--target", tmp_path / "target", "--drafter", tmp_path / "pard", "--gamma", "3",
        "--max-new-tokens", "8", "--compare", "the",
    )  # fmt: skip
    assert found.code == 0, found.err
