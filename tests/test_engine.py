from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scripted import Ticking
from scripted_engine import grid_of, specs_of
from tiny import save_tiny, tiny_language_model, tiny_tokenizer
from transformers import GenerationConfig

import specbench.models.drafters
import specbench.models.prepare
from specbench.base.errors import RunError, UsageError
from specbench.bench.axes import parse_baselines
from specbench.bench.engines.own import ModelEngine, load_engine
from specbench.bench.grid import SweepOptions
from specbench.bench.passes import pass_costs
from specbench.bench.prompts import Prompt
from specbench.drafters.cascade import CascadeDrafter
from specbench.generate import autoregressive_generate
from specbench.models.drafters import load_drafter, wrap_drafter
from specbench.models.prepare import LoadedDrafter, prepare
from specbench.models.target import wrap_target
from specbench.options import DecodingOptions, ModelOptions
from specbench.recipe import Recipe
from specbench.rows import Row, conditions_of
from specbench.specs.drafters import Lookup, parse_drafter
from specbench.specs.models import ModelSpec, parse_model

PROMPT = [5, 17, 200, 33, 5, 17, 200]


DECODING = DecodingOptions(max_new_tokens=12, ignore_eos=True)


@pytest.fixture
def engine() -> ModelEngine:
    return engine_of()


def engine_of(**asked: Any) -> ModelEngine:
    """``asked``: what the model's own file asks for."""
    model = tiny_language_model().model
    model.generation_config = GenerationConfig(**asked)
    target = wrap_target(model, tiny_tokenizer(), name="tiny", pack=False)
    drafters = {name: load_drafter(name, target) for name in ("lookup", "self:int8")}
    small = tiny_language_model(seed=1, layers=1)
    drafters["small"] = wrap_drafter(small, target)
    return ModelEngine(
        target,
        [LoadedDrafter(name, spec, drafters[name]) for name, spec in specs_of(*drafters).items()],
        reference=tiny_language_model(),
        assistants={"small": tiny_language_model(seed=1, layers=1)},
    )


def grid(temperature: float = 0.0, others: Sequence[str] = ("transformers", "assisted")) -> list[Row]:
    at = conditions_of(temperature=[temperature])
    made = SweepOptions(at, gammas=(3,), others=parse_baselines(others))
    return grid_of(made, "lookup", "self:int8", "small", small="f")


def run(engine: ModelEngine, config: Row, **changed: Any) -> Any:
    prompt, seed = changed.pop("prompt", PROMPT), changed.pop("seed", 3)
    return engine.generate(config, prompt, DECODING.with_changes(**changed), seed=seed)


def plainly(engine: ModelEngine) -> list[int]:
    """The tokens of plain decoding."""
    return [*autoregressive_generate(PROMPT, engine.target, max_new_tokens=12, ignore_eos=True).token_ids]


def test_every_greedy_configuration_gives_the_tokens_of_plain_decoding(engine):
    expected = plainly(engine)
    for config in grid():
        outcome = run(engine, config)
        assert outcome.token_ids == expected, config.id
        assert outcome.prompt_tokens == len(PROMPT)
        assert outcome.finish_reason == "length"
        assert outcome.ttft_s > 0
        assert outcome.decode_s > 0
        assert outcome.peak_memory_bytes > 0
        assert bool(outcome.steps.drafted) == (config.kind in ("plain", "speculative"))


def test_beam_search_is_that_of_transformers_and_rated_by_the_target(engine):
    engine._rate_answers = True
    assert engine.reference is not None
    whole: Any = engine.reference.model
    greedy = run(engine, grid()[0])
    (config,) = (config for config in grid(others=("transformers", "beam:3")) if config.kind == "beam")
    searched = run(engine, config)
    ids = torch.tensor([PROMPT])
    settings = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    expected = whole.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert searched.token_ids == expected[0, len(PROMPT) :].tolist()
    assert (searched.first_tokens, searched.finish_reason) == (1, "length")
    for outcome in (greedy, searched):
        with torch.inference_mode():
            logits = whole(torch.tensor([[*PROMPT, *outcome.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
        each = logits.log_softmax(-1)[range(12), list(outcome.token_ids)]
        assert outcome.log_probability == pytest.approx(float(each.sum()), abs=1e-3)
    speculative = run(engine, next(config for config in grid() if config.kind == "speculative"))
    assert speculative.log_probability is None


def test_end_tokens_are_the_same_for_transformers(engine):
    tokens = plainly(engine)
    engine.target.language_model.end_ids = (tokens[4],)
    stop = tokens.index(tokens[4]) + 1
    for config in grid():
        outcome = run(engine, config, ignore_eos=False)
        assert outcome.token_ids == tokens[:stop], config.id
        assert outcome.finish_reason == "eos"


def test_sampling_settings_of_the_models_own_file_are_not_used(engine):
    assert engine.reference is not None
    own = engine.reference.model.generation_config
    own.repetition_penalty, own.top_k, own.do_sample = 5.0, 1, True
    plain, theirs = (
        next(config for config in grid() if config.kind == kind) for kind in ("plain", "transformers")
    )
    assert run(engine, theirs).token_ids == run(engine, plain).token_ids


def test_what_the_models_own_file_asks_for_beside_sampling_holds_for_all():
    usual = run(engine_of(), grid()[0]).token_ids
    asked = {"suppress_tokens": [usual[1]], "repetition_penalty": 1.5}
    engine = engine_of(**asked)
    outputs = {tuple(run(engine, config).token_ids) for config in grid()}
    assert len(outputs) == 1
    assert tuple(usual) not in outputs
    assert engine.describe_target(DECODING).model_defaults == asked
    assert engine.difference(PROMPT, (*outputs.pop(),), usual, DECODING) is not None
    assert all(run(engine, config, model_defaults=False).token_ids == usual for config in grid())
    assert engine.describe_target(DECODING.with_changes(model_defaults=False)).model_defaults == {}


def test_sampled_outputs_depend_on_the_seed_alone(engine):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for config in grid(temperature=1.5):
        first, again, other = (run(engine, config, seed=seed).token_ids for seed in (3, 3, 4))
        assert first == again, config.id
        assert first != other, config.id
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["transformers", "assisted"])
def test_transformers_is_timed_from_emission_to_emission(engine, kind):
    engine._clock = Ticking()
    config = next(config for config in grid() if config.kind == kind)
    outcome = run(engine, config)
    assert outcome.ttft_s == outcome.prefill_s == 1.0
    assert 1 <= outcome.first_tokens <= 12
    # One look per emission: 12 tokens, one each or several at once.
    assert (
        outcome.decode_s == 11.0 if kind == "transformers" else outcome.decode_s <= 12 - outcome.first_tokens
    )


def test_the_context_limit_holds_for_all(engine):
    engine.target.scorer.context_limit = len(PROMPT) + 4
    for config in grid():
        outcome = run(engine, config)
        assert len(outcome.token_ids) == 4, config.id
        assert outcome.finish_reason == "context-limit"
        with pytest.raises(UsageError, match="the target's context holds only 11"):
            run(engine, config, prompt=PROMPT * 2)


def test_running_out_of_memory_is_an_error_of_this_generation(engine, monkeypatch):
    plain = grid()[0]
    expected = run(engine, plain).token_ids
    cpu = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    for error in (MemoryError(), torch.OutOfMemoryError("no"), cpu):
        with monkeypatch.context() as patch:
            fails = lambda *_, error=error, **__: (_ for _ in ()).throw(error)  # noqa: E731
            patch.setattr(engine.target.scorer, "_read", fails)
            with pytest.raises(RunError, match="not enough memory"):
                run(engine, plain)
        assert run(engine, plain).token_ids == expected


def test_costs_are_times_of_single_passes(engine):
    engine._clock = Ticking()
    costs = engine.measure_costs(PROMPT, [1, 2, 5])
    readings = [line for line in costs if line.kind == "reading"]
    assert all(len(line.seconds) == 1 for line in readings)
    assert [line.seconds for line in costs if line not in readings] == [[1.0, 1.0]] * 9
    assert {line.context_tokens for line in costs} == {256}
    assert pass_costs(costs).target_s == {1: 1.0, 2: 1.0, 5: 1.0}
    assert len(pass_costs(costs).drafter_s) == 3
    assert {line.passes for line in costs if line.kind == "drafter"} == {1, 4}
    # Nothing is left behind.
    assert run(engine, grid()[0]).token_ids == plainly(engine)


# -- prompts ---------------------------------------------------------------------------------------


def test_conversations_go_through_the_chat_template(engine):
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    prompt = Prompt("p", "c", ("Hello", "More", "Last"), system="Be kind")
    answer = tokenizer("Fine")["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in engine.target.end_ids
    ids = engine.encode(prompt, [[*answer, end]])
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nFine<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    )
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        + str(tokenizer.chat_template)
    )
    text = tokenizer.decode(engine.encode(Prompt("p", "c", ("Hello",), system="Be kind"), []))
    assert text == "<|im_start|>user\nBe kind\n\nHello<|im_end|>\n<|im_start|>assistant\n"
    tokenizer.chat_template = None
    assert tokenizer.decode(engine.encode(prompt, [answer])) == "Be kind\n\nHello\n\nFine\n\nMore"


# -- loading ---------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_before_anything_is_loaded(tmp_path):
    target = parse_model(str(save_tiny(tmp_path / "target")))
    with pytest.raises(UsageError, match="Unknown dtype"):
        load_engine(Recipe(target, models=ModelOptions("float8")), (Lookup(),))
    with pytest.raises(UsageError, match="Two drafters are called"):
        load_engine(Recipe(target), (Lookup(), Lookup()))


def test_a_model_is_loaded_once_whoever_drafts_with_it(tmp_path, monkeypatch):
    target, small = save_tiny(tmp_path / "target"), save_tiny(tmp_path / "small", seed=1, layers=1)
    loaded: list[str] = []
    original = specbench.models.prepare.load_model

    def load(spec: ModelSpec, *given: Any, **options: Any) -> Any:
        loaded.append(spec.name)
        return original(spec, *given, **options)

    for module in (specbench.models.drafters, specbench.models.prepare):
        monkeypatch.setattr(module, "load_model", load)
    words = ["lookup", str(small), f"lookup+{small}", "self:int8", "lookup:min=1+self:int8"]
    met: list[list[str]] = []
    ready, loaded_drafters = prepare(
        parse_model(str(target)),
        [parse_drafter(word) for word in words],
        ModelOptions("float32"),
        before_packing=lambda model: met.append([model.name, *loaded]),
    )
    assert loaded == ["target", "small"]
    assert met == [["target", "target", "small"]], "before that no drafter's model may turn out not to fit"
    assert [each.name for each in loaded_drafters] == [
        "lookup", "small (int8)", "lookup+small (int8)", "self:int8", "lookup:min=1+self:int8",
    ]  # fmt: skip
    one, small_alone, small_behind, own_alone, own_behind = (each.drafter for each in loaded_drafters)
    assert isinstance(small_behind, CascadeDrafter)
    assert isinstance(own_behind, CascadeDrafter)
    assert (small_behind.model, own_behind.model) == (small_alone, own_alone)
    assert [bool(each.models) for each in loaded_drafters] == [False, True, True, False, False]
    assert ready.name == "target"
    assert one.traits.name == "lookup"


def test_a_drafter_that_cannot_be_loaded_is_missed_where_it_is_asked_for(tmp_path, monkeypatch):
    original = specbench.models.prepare.load_model

    def load(spec: ModelSpec, *given: Any, **options: Any) -> Any:
        if spec.name == "small":
            raise RunError("There is not enough memory for small.")
        return original(spec, *given, **options)

    for module in (specbench.models.drafters, specbench.models.prepare):
        monkeypatch.setattr(module, "load_model", load)
    save_tiny(tmp_path / "small")
    target = parse_model(str(save_tiny(tmp_path / "target")))
    specs = [parse_drafter(str(tmp_path / "small")), parse_drafter(f"lookup+{tmp_path / 'small'}"), Lookup()]
    _, loaded_drafters = prepare(target, specs, ModelOptions())
    assert [each.name for each in loaded_drafters] == ["small", "lookup+small", "lookup"]
    for each in loaded_drafters[:2]:
        with pytest.raises(RunError, match="not enough memory"):
            _ = each.drafter
    assert loaded_drafters[2].drafter.traits.name == "lookup"
