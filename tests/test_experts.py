"""How many experts a target's passes read, in steps, batches, traces, stored runs and reports."""

from __future__ import annotations

from functools import lru_cache
from random import Random
from typing import Any

import architectures as survey
import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specbench.backends.torch.experts import expert_modules
from specbench.backends.torch.scorer import Scorer
from specbench.bench.pairs import predict
from specbench.decoding.protocols import ForwardRequest
from specbench.decoding.records import ExpertsRead
from specbench.generate import speculative_generate
from specbench.generate_many import speculative_generate_many
from specbench.models.target import wrap_target
from specbench.results.lines import StepLists

FAMILIES = (
    "qwen3_moe", "olmoe", "mixtral", "granitemoe", "deepseek_v3", "qwen3_5_moe_text", "qwen3_next", "gpt_oss", "phimoe",
)  # fmt: skip
IDS = Random(1).choices(range(3, survey.VOCABULARY), k=24)


@lru_cache(maxsize=1)
def built(kind: str) -> Any:
    """A tiny random model with wide weights, so that its routers choose many experts."""
    config_class = next(each for each in MODEL_FOR_CAUSAL_LM_MAPPING if each.model_type == kind)
    torch.manual_seed(0)
    config = survey.tiny_config(config_class)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[config_class](config).eval().requires_grad_(False)
    model.generation_config = survey.GenerationConfig()
    return model


def chosen(model: Any, ids: list[int]) -> list[torch.Tensor]:
    """The experts of each token by layer, from the logits that routers give in a pass of `transformers`."""
    with torch.inference_mode():
        logits = model(
            input_ids=torch.tensor([ids]), output_router_logits=True, use_cache=False
        ).router_logits
    return [each.reshape(len(ids), -1).topk(model.config.num_experts_per_tok).indices for each in logits]


def read(by_layer: list[torch.Tensor], rows: slice) -> tuple[int, ...]:
    return tuple(len(each[rows].unique()) for each in by_layer)


@pytest.mark.parametrize("kind", FAMILIES)
def test_counts_are_those_of_the_routers(kind):
    model = built(kind)
    expected = chosen(model, IDS)
    scorer = Scorer(model)
    alone = sum(each.shape[1] for each in expected)
    whole = scorer.score(ForwardRequest(scorer, IDS[:16], counts_experts=True)).experts
    assert whole == ExpertsRead(read(expected, slice(0, 16)), alone)
    step = scorer.score(ForwardRequest(scorer, IDS[:17], IDS[17:21], counts_experts=True)).experts
    assert step == ExpertsRead(read(expected, slice(16, 21)), alone)
    assert step.total > alone, "the tokens choose the same experts, which shows nothing"
    assert step.ratio == step.total / alone
    scorer.rollback(16)
    assert scorer.score(ForwardRequest(scorer, IDS[:17], IDS[17:21])).experts is None
    assert not any(each._forward_pre_hooks for each in expert_modules(model)), "a hook stays behind"


@pytest.mark.smoke
def test_a_dense_model_has_no_experts():
    model = built("qwen3")
    scorer = Scorer(model)
    assert scorer.score(ForwardRequest(scorer, IDS, counts_experts=True)).experts is None
    assert not expert_modules(model)


def decoded(model: Any, **options: Any) -> Any:
    target = wrap_target(model, name="tiny", pack=False)
    drafter = survey.Guesses(IDS, survey.generated(model, IDS), 4)
    return speculative_generate(IDS, target, drafter, gamma=4, max_new_tokens=20, ignore_eos=True, **options)


def test_steps_keep_what_their_pass_read():
    model = built("qwen3_moe")
    result = decoded(model)
    for step in result.steps:
        text = [*IDS, *result.token_ids][: step.position]
        expected = chosen(model, [*text, *step.drafted])
        assert step.experts == ExpertsRead(read(expected, slice(step.position - 1, None)), 4.0)
    explained = predict(result)
    assert explained is None or explained["experts"] is not None
    lists = StepLists.of(result.steps)
    assert lists.experts == [sum(step.experts.by_layer) for step in result.steps]
    assert lists.experts_one == [4.0] * len(result.steps)
    assert StepLists.of([]).experts == StepLists.of(decoded(built("qwen3")).steps).experts == []


def test_trees_and_batches_count_each_request_alone():
    model = built("olmoe")
    target = wrap_target(model, name="tiny", pack=False)
    prompts = [IDS[: 12 + 3 * each] for each in range(3)]
    options: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    together = speculative_generate_many(prompts, target, "lookup", max_batch=3, **options)
    for prompt, found in zip(prompts, together.results(), strict=True):
        for step in found.steps:
            text = [*prompt, *found.token_ids][: step.position]
            expected = chosen(model, [*text, *step.drafted])
            assert step.experts.by_layer == read(expected, slice(step.position - 1, None))
    scorer = Scorer(model)
    scorer.logits(IDS[:-1])
    tree = ForwardRequest(scorer, IDS, [5, 9, 7], [-1, -1, 0], counts_experts=True)
    branches = [chosen(model, [*IDS, *branch])[0][len(IDS) - 1 :] for branch in ([5, 7], [9])]
    assert scorer.score(tree).experts.by_layer[0] == len(
        torch.cat([each.flatten() for each in branches]).unique()
    )
