"""What a model's generation_config.json asks for, against ``generate`` of transformers with the same file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checked import request_of
from tiny import TURN_END, save_tiny, tiny_llama, tiny_tokenizer
from transformers import GenerationConfig, PreTrainedModel

from specbench.base.errors import RunError, UsageError
from specbench.check.reference import reference_output
from specbench.check.sampled import check_exact
from specbench.decoding.model_defaults import ModelDefaults
from specbench.decoding.sampling import Sampling
from specbench.generate import speculative_generate
from specbench.models.drafters import load_drafter
from specbench.models.load import wrap_model
from specbench.models.target import wrap_target
from specbench.options import DecodingOptions
from specbench.policies import build_policy

PROMPT, NEW = [5, 6, 7, 5, 6, 7, 5, 6], 24


def answer(model: Any, prompt: list[int], **settings: Any) -> list[int]:
    """What `generate` says with the model's own file and these settings."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, pad_token_id=0, **settings
        )
    return list(output[0, len(prompt) :].tolist())


def usual() -> list[int]:
    return answer(tiny_llama(), PROMPT)


FIRST, SECOND, THIRD, *_ = USUAL = usual()
SETTINGS: dict[str, dict[str, Any]] = {
    "suppress": {"suppress_tokens": [SECOND, THIRD]},
    "bad words": {"bad_words_ids": [[SECOND], [FIRST, 9], USUAL[2:4]], "eos_token_id": 9},
    "at least": {"eos_token_id": [USUAL[4], 3], "min_new_tokens": 12},
    "at least, with the prompt": {"eos_token_id": USUAL[4], "min_length": len(PROMPT) + 9},
    "penalty": {"repetition_penalty": 1.8},
    "no repeats": {"no_repeat_ngram_size": 1},
    "several": {
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [THIRD],
        "bad_words_ids": [[SECOND, 9]],
        "eos_token_id": [3],
        "min_new_tokens": 5,
    },
}


def model_with(settings: dict[str, Any]) -> PreTrainedModel:
    model = tiny_llama()
    model.generation_config = GenerationConfig(**settings)
    return model


@cache
def expected_with(name: str) -> list[int]:
    """What `generate` answers with these settings."""
    return answer(model_with(SETTINGS[name]), PROMPT)


@pytest.mark.parametrize("drafter", ["none", "lookup", "self:int8", "self:layers=1"])
@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_outputs_are_those_of_generate(name, drafter):
    expected = expected_with(name)
    assert expected != USUAL, "the settings change nothing: the test shows nothing"
    target = wrap_target(model_with(SETTINGS[name]), pack=False)
    policy = build_policy("heuristic" if drafter == "self:layers=1" else "fixed:gamma=4")
    result = speculative_generate(
        PROMPT, target, load_drafter(drafter, target), policy=policy, max_new_tokens=NEW
    )
    assert list(result.token_ids) == expected
    if drafter == "none":
        known = wrap_model(model_with(SETTINGS[name]), None)
        assert reference_output(known, DecodingOptions(max_new_tokens=NEW), PROMPT) == expected
        without = speculative_generate(
            PROMPT, target, None, max_new_tokens=NEW, ignore_eos=True, model_defaults=False
        )
        assert list(without.token_ids) == USUAL


@pytest.mark.parametrize("own", [{}, {"min_new_tokens": 2}, {"min_length": len(PROMPT) + 3}])
def test_no_end_token_before_so_many_new_tokens(own):
    model = model_with({"eos_token_id": [USUAL[4], 3], **own})
    expected = answer(model, PROMPT, min_new_tokens=12)
    assert len(expected) >= 12
    target = wrap_target(model, pack=False)
    for drafter in ("none", "lookup", "self:int8"):
        result = speculative_generate(PROMPT, target, drafter, gamma=4, max_new_tokens=NEW, min_new_tokens=12)
        assert list(result.token_ids) == expected
    with pytest.raises(UsageError, match="min_new_tokens is -1"):
        DecodingOptions(min_new_tokens=-1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["none", "self:int8"])
def test_settings_that_leave_no_token_are_named(temperature, drafter):
    target = wrap_target(model_with({"suppress_tokens": [*range(300)], "min_length": 1}), pack=False)
    sampling = Sampling(temperature=temperature)
    with pytest.raises(RunError, match="suppress_tokens") as raised:
        speculative_generate(PROMPT, target, load_drafter(drafter, target), gamma=2, sampling=sampling)
    assert "dtype" not in str(raised.value)


@pytest.mark.parametrize("name", SETTINGS)
def test_distributions_are_those_of_generate(name):
    """All rows of one pass, each in its own context."""
    model: Any = model_with(SETTINGS[name])
    ids = torch.tensor([PROMPT])
    torch.manual_seed(0)
    with torch.inference_mode():
        sampled = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.3, top_k=40, top_p=0.95,
            max_new_tokens=NEW, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
            output_logits=True,
        )  # fmt: skip
    logits, tokens = torch.cat(sampled.logits), sampled.sequences[0, len(PROMPT) :].tolist()
    before = logits.clone()
    known = wrap_model(model, None)
    sampling = Sampling(temperature=1.3, top_k=40, top_p=0.95).with_defaults(known.defaults, known.vocab_size)
    sampling = sampling.at(len(PROMPT), known.end_ids)
    p = sampling.probabilities(logits, PROMPT, tokens[:-1])
    torch.testing.assert_close(p, torch.cat(sampled.scores).softmax(-1), rtol=1e-5, atol=1e-7)
    assert torch.equal(logits, before), "the logits were written to"


@pytest.mark.parametrize("drafter", ["lookup", "self:int8"])
def test_sampled_outputs_are_exact(drafter):
    model = model_with(SETTINGS["several"])
    target = wrap_target(model, pack=False)
    sampling = Sampling(temperature=1.0).with_defaults(target.language_model.defaults, target.vocab_size)
    drafting = load_drafter(drafter, target)
    request = request_of(target.scorer, drafting, None, sampling, NEW, prompt=PROMPT, end_ids=target.end_ids)
    case = check_exact(request, "a")
    assert case.sound, case.positions
    assert not case.violations
    assert len(case.positions) > 5


# -- what is told, and what is refused -------------------------------------------------------------


def test_what_is_applied_and_what_is_not():
    settings = {
        "do_sample": True, "temperature": 0.6, "top_k": 20, "num_beams": 1, "suppress_tokens": [1, 2],
        "repetition_penalty": 1.1, "bad_words_ids": [[1, 2]], "forced_eos_token_id": 0, "eos_token_id": 3,
        "no_repeat_ngram_size": 0, "guidance_scale": 2.0, "max_new_tokens": 7,
    }  # fmt: skip
    defaults = ModelDefaults.of(GenerationConfig(**settings))
    assert defaults.applied == {
        "repetition_penalty": 1.1,
        "bad_words_ids": [[1, 2]],
        "suppress_tokens": [1, 2],
    }
    assert json.loads(json.dumps(defaults.applied)) == defaults.applied
    assert defaults.unused == {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "guidance_scale": 2.0,
        "forced_eos_token_id": 0,
    }
    applied, unused = defaults.notes(applied=True)
    assert "suppress_tokens (--no-model-defaults" in applied
    assert "guidance_scale 2.0" in unused
    for none in (None, GenerationConfig()):
        assert ModelDefaults.of(none).notes(applied=True) == []


def test_a_penalty_of_ones_own_goes_before_the_models():
    defaults = ModelDefaults({"repetition_penalty": 1.5})
    assert Sampling().with_defaults(defaults, 9) == Sampling(repetition_penalty=1.5)
    assert Sampling(repetition_penalty=1.2).with_defaults(defaults, 9) == Sampling(repetition_penalty=1.2)
    assert not Sampling().with_defaults(ModelDefaults(), 9).context_dependent
    assert Sampling().with_defaults(ModelDefaults({"suppress_tokens": [1]}), 9).context_dependent


@pytest.mark.parametrize(
    "settings",
    [
        {"suppress_tokens": "all"}, {"bad_words_ids": [[10**6]]}, {"no_repeat_ngram_size": 1.5},
        {"repetition_penalty": -1.0}, {"repetition_penalty": "high"}, {"min_length": "long"},
    ],
)  # fmt: skip
def test_damaged_settings_are_refused_by_name_of_the_way_out(settings):
    with pytest.raises(UsageError, match="own generation settings cannot be applied") as caught:
        Sampling().with_defaults(ModelDefaults(settings), 64)
    assert "--no-model-defaults" in str(caught.value.hint)
    assert "\n" not in caught.value.message


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model folder whose file asks for something."""
    save_tiny(tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps({"suppress_tokens": [SECOND, THIRD], "no_repeat_ngram_size": 1, "top_k": 7}))
    return tmp_path / "model"


COMMON = ["--dtype", "float32", "--device", "cpu", "--ignore-eos", "-n", "16"]


def test_the_command_line_applies_them_and_can_leave_them_out(folder, cli):
    words = ["generate", "the and the", "--target", folder, *COMMON, "--drafter", "lookup", "--json"]
    applied = cli(*words)
    options = applied.json()["options"]
    assert options["model_defaults"] == {"no_repeat_ngram_size": 1, "suppress_tokens": [SECOND, THIRD]}
    plain = cli(*words, "--no-model-defaults")
    assert plain.json()["options"]["model_defaults"] is None
    assert "suppress_tokens" in plain.err
    assert applied.json()["token_ids"] != plain.json()["token_ids"]
    (folder / "generation_config.json").write_text("{}")
    assert cli(*words).json()["token_ids"] == plain.json()["token_ids"]


def test_a_special_token_as_a_stop_string(folder, cli):
    """It is all that the model may say; end tokens are ignored."""
    words = ["--target", folder, *COMMON, "--drafter", "self:layers=1", "--stop", TURN_END, "--json"]
    (special,) = tiny_tokenizer().convert_tokens_to_ids([TURN_END])
    others = [token for token in range(tiny_llama().config.vocab_size) if token != special]
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": others}))
    figures = cli("generate", "the", *words).json()
    assert (figures["token_ids"], figures["finish_reason"], figures["text"]) == ([special], "stop-string", "")
    said = cli("generate", "the", *words, "--stop", f"{TURN_END}\n")
    assert said.code == 2
    assert "joins the special token" in said.err
