"""Models that also see: their text part gives what the whole model's `generate` does, and nothing else is read."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import architectures as survey
import pytest
import torch
from accelerate import dispatch_model
from head_files import DRAFTED, eagle_tensors, speculators_settings, write_head
from safetensors.torch import load_file, save_file
from tiny import letter_tokenizer
from transformers import (
    Gemma3Config,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    core_model_loading,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from specbench.backends.torch.forward import NativeForward
from specbench.base.errors import UsageError
from specbench.kernels import native
from specbench.models.checkpoints import check_config, read_config, weights_of
from specbench.models.composites import unread_weights
from specbench.models.drafters import load_drafter
from specbench.models.hub import HubModel
from specbench.models.load import load_model
from specbench.models.target import prepare_target, wrap_target
from specbench.options import LoadOptions

WHOLE = {each.model_type: each for each in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING}
FAMILIES = {
    "qwen3_5": "Qwen3_5ForCausalLM",  # a causal class of its own
    "mistral3": "MistralForCausalLM",  # that of its text part
    "llama4": "Llama4ForCausalLM",  # which the whole model contains
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",  # none: positions of three axes
    "gemma3n": "Gemma3nForCausalLM",  # needs timm to see
}
PLAIN = LoadOptions("float32")
IDS = Random(1).choices(range(3, survey.VOCABULARY), k=survey.PROMPT)


def whole_model(kind: str, seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]), survey.without_timm():
        torch.manual_seed(seed)
        model: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[WHOLE[kind]](survey.tiny_composite(WHOLE[kind]))
    model.generation_config = GenerationConfig()
    return model.eval().requires_grad_(False)


@cache
def saved(kind: str, place: Path, seed: int = 0, **options: Any) -> str:
    folder = place / f"{kind}-{seed}-{len(options)}"
    whole_model(kind, seed).save_pretrained(folder, **options)
    return str(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    made: Path = tmp_path_factory.mktemp("wholes")
    return made


@pytest.mark.parametrize("kind", FAMILIES)
def test_outputs_are_those_of_the_whole_models_generate(place, kind):
    expected = survey.generated(whole_model(kind), IDS)
    target, sibling = (load_model(saved(kind, place, seed), PLAIN, tokenizer=False) for seed in range(2))
    assert type(target.model).__name__ == FAMILIES[kind]
    assert not survey.greedy(target.model, IDS, ("dynamic",), expected, sibling)


def test_other_parts_are_neither_counted_nor_read(place, monkeypatch):
    folder, read = saved("mistral3", place, max_shard_size="20KB"), []
    own = core_model_loading.spawn_materialize

    def note(pool: Any, tensor: Any, *rest: Any, **more: Any) -> Any:
        read.append(tensor)
        return own(pool, tensor, *rest, **more)

    monkeypatch.setattr(core_model_loading, "spawn_materialize", note)
    loaded = load_model(folder, PLAIN, tokenizer=False)
    tensors = loaded.model.state_dict()
    assert len(read) == len(tensors)
    assert loaded.files is not None
    config = read_config(Path(folder), "x")
    assert loaded.files.numbers == weights_of(config) == sum(each.numel() for each in tensors.values())
    names = json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]
    parts = {name.split(".")[0] for name in unread_weights(config, names)}
    assert parts == {"vision_tower", "multi_modal_projector"}


@pytest.mark.parametrize(("section", "dtype"), [(None, "float32"), ("text_config", "int8")])
def test_quantized_texts_are_unpacked(place, tmp_path, section, dtype):
    whole = whole_model("mistral3")
    whole.save_pretrained(tmp_path)
    tensors, unpacked = load_file(tmp_path / "model.safetensors"), {}
    for name, weight in [*tensors.items()]:
        if name.startswith("language_model.model.layers") and name.endswith("proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
            unpacked[name.removeprefix("language_model.")] = tensors[name] * scale
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}}
    (config if section is None else config[section])["quantization_config"] = settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_model(str(tmp_path), LoadOptions(dtype), tokenizer=False)
    target = prepare_target(loaded, "dynamic")
    assert "unpacked to" in target.language_model.notes[0]
    if dtype == "float32":
        state = loaded.model.state_dict()
        assert len(unpacked) == 14
        assert all(torch.equal(state[name], weight) for name, weight in unpacked.items())
    survey.decoded(IDS, target, load_drafter("lookup", target), 3)


def test_memory_before_a_download_is_that_of_the_text(place, monkeypatch, tmp_path):
    folder, asked = Path(saved("mistral3", place, max_shard_size="20KB")), []

    class Hub(HubModel):
        def __init__(self, *_: Any) -> None:
            self.folder = folder

        def fetch_weights(self, *_: Any, check_size: Any, **__: Any) -> None:
            check_size(10**15)

    monkeypatch.setattr("specbench.models.find.HubModel", Hub)
    monkeypatch.setattr("specbench.models.load.check_memory", lambda needed, **_: asked.append(needed))
    load_model("some/whole", PLAIN, tokenizer=False)
    assert asked[0] == asked[1] < 10**6


@pytest.mark.parametrize("spread", [False, True])
def test_loaded_objects_of_whole_models_are_targets_where_they_lie(spread):
    whole = whole_model("mistral3")
    expected = survey.generated(whole, IDS)
    if spread:
        whole = dispatch_model(whole, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)
    target = wrap_target(whole, name="whole")
    model = target.language_model.model
    assert type(model).__name__ == "MistralForCausalLM"
    assert getattr(model, "hf_device_map", None) == getattr(whole, "hf_device_map", None)
    assert hasattr(model, "hf_device_map") == spread
    assert survey.decoded(IDS, target, load_drafter("lookup", target), 3) == expected


def wide_llava() -> Any:
    """A model whose text is of a family with native passes, and wide enough for these."""
    text = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    sight = survey.tiny_composite(LlavaConfig).vision_config
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=sight)).eval()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("llava", torch.bfloat16),
        *((kind, torch.float32) for kind in ("qwen3_5", "mistral3", "gemma3", "llama4", "kimi_k25")),
    ],
)
def test_texts_have_the_layers_passes_and_caches_of_their_twin(kind, dtype):
    whole = (wide_llava() if kind == "llava" else whole_model(kind)).to(dtype)
    texts = [wrap_target(whole, name="whole")]
    model = texts[0].language_model.model
    texts.append(wrap_target(type(model)(copy.deepcopy(model.config)).to(dtype).eval(), name="twin"))
    ours, twins = (
        {
            "layers": [(name, type(module)) for name, module in text.language_model.model.named_modules()],
            "attention": text.language_model.model.config._attn_implementation,
            "forward": type(text.scorer.forward),
            "caches": [type(layer) for layer in text.scorer.cache.held.layers],
            "packed": text.packed,
            "trees": text.scorer.takes_trees,
        }
        for text in texts
    )
    assert ours == twins
    if kind == "llava" and native.is_available():
        assert ours["forward"] is NativeForward


@pytest.mark.parametrize("kind", ["mistral3", "qwen2_5_vl"])
def test_heads_of_whole_models_draft_for_their_text(place, kind, tmp_path):
    folder = saved(kind, place)
    target = prepare_target(load_model(folder, PLAIN, tokenizer=False), "dynamic")
    tensors = eagle_tensors(vocab=survey.VOCABULARY, drafted=DRAFTED)
    expected = survey.generated(whole_model(kind), IDS)

    def head_for(named: str) -> Any:
        verifier = {"speculators_config": {"verifier": {"architectures": [named]}}}
        settings = speculators_settings((0, 1, 1), vocab=survey.VOCABULARY, **verifier)
        return load_drafter(str(write_head(tmp_path / named, settings, tensors)), target, PLAIN)

    for named in target.language_model.model.config.architectures:
        assert survey.decoded(IDS, target, head_for(named), 3) == expected
    with pytest.raises(UsageError, match="for a LlamaForCausalLM"):
        head_for("LlamaForCausalLM")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (WHOLE["paligemma"](), "attend to later ones"),
        (WHOLE["idefics"](), "without a picture"),
        (WHOLE["qwen4_exp"](), "cannot be rolled back"),
        (WHOLE["udop"](), "encoder-decoder"),
        (WHOLE["pi0"](), "no causal language model"),
        (WHOLE["unlimited_ocr"](), "a window after it"),
        (Gemma3Config(architectures=["Gemma3ForSequenceClassification"]), "no causal language model"),
    ],
)
def test_refusals_say_why(config, said):
    with pytest.raises(UsageError, match=said):
        check_config(config, "x")


def test_models_whose_positions_depend_on_padding_tokens_are_refused():
    whole = whole_model("kosmos-2.5")
    with pytest.raises(UsageError, match="leave out padding tokens"):
        check_config(whole.config, "x")
    with pytest.raises(UsageError, match="leave out padding tokens"):
        wrap_target(whole)


def test_commands_take_folders_of_whole_models_as_target_and_drafter(place, tmp_path, cli):
    folders = [Path(saved("qwen2_5_vl", tmp_path, seed)) for seed in range(2)]
    for folder in folders:
        letter_tokenizer("".join(map(chr, range(ord("A"), ord("A") + 50)))).save_pretrained(folder)
        template = (
            "{% for each in messages %}{% for part in each.content %}{{ part.text }}{% endfor %}{% endfor %}"
        )
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    outputs = [
        cli("generate", "--target", str(folders[0]), "--drafter", drafter, "--max-new-tokens", "12", "ABCAB")
        for drafter in ("none", str(folders[1]), "self:layers=1")
    ]
    assert all(output.code == 0 for output in outputs), outputs[0].err
    assert len({output.out for output in outputs}) == 1
