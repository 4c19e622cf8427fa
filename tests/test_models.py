"""Specs, options, the checks before weights are loaded, loading itself, and the comparison of tokenizers."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_runs import refusal
from safetensors.torch import load_file, save_file
from tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, save_tiny, tiny_language_model, tiny_llama, tiny_tokenizer
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Olmo3Config, RwkvConfig
from transformers.utils import logging as transformers_logging

from specbench.base.errors import RunError, SpecbenchError, UsageError
from specbench.generate import autoregressive_generate, speculative_generate
from specbench.kernels import native, passes
from specbench.models import checkpoints, devices, load
from specbench.models.default import default_drafter
from specbench.models.devices import check_options
from specbench.models.drafters import wrap_drafter
from specbench.models.load import load_config, load_model, wrap_model
from specbench.models.pairing import translation_of
from specbench.models.target import load_target, wrap_target
from specbench.models.tokenizers import end_ids_of
from specbench.options import LoadOptions
from specbench.recipe import Recipe
from specbench.specs.models import ModelSpec, parse_model

CPU = LoadOptions(device="cpu")


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_tiny(tmp_path / "tiny-model")


def logits(model: Any) -> torch.Tensor:
    return model(torch.arange(8)[None]).logits  # type: ignore[no-any-return]


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, changes: dict[str, torch.Tensor], *, without: str = "") -> None:
    weights = load_file(folder / "model.safetensors") | changes
    weights.pop(without, None)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


# -- specs ---------------------------------------------------------------------------------------


def test_which_kind_a_name_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_model("org/name") == ModelSpec("hub", "org/name")
    for name in ("smollm2-135m", "org/name", "model"):
        (tmp_path / name).mkdir(parents=True)
    assert parse_model("org/name") == ModelSpec("folder", "org/name")
    assert parse_model("smollm2-135m") == ModelSpec("builtin", "smollm2-135m")
    assert parse_model("./smollm2-135m").kind == "folder"
    assert parse_model("~/model") == ModelSpec("folder", str(tmp_path / "model"))
    assert ModelSpec("folder", str(tmp_path / "mine") + os.sep).name == "mine", "names hold no path"
    assert ModelSpec("gguf", str(tmp_path / "mine.gguf")).name == "mine.gguf"


def test_hub_ids():
    for text in ("gpt2", "Qwen/Qwen2.5-Coder-1.5B-Instruct", "org/name@abc123", "org/name@refs/pr/1"):
        name, _, revision = text.partition("@")
        assert parse_model(text) == ModelSpec("hub", name, revision or None)
        assert parse_model(text).name == text


PATHS = (
    "./no-such", "~/no-such", "/no/such", "../no-such", "a/b/c", "model.gguf", "org/model.GGUF", "org//x", "~nobody/x"
)  # fmt: skip
NO_NAMES = (
    "", " ", "two words", "org/name@", "org/name@a b", "@rev", "a--b", "x\0y", "\x1b[31m", "y" * 9999
)  # fmt: skip


@pytest.mark.parametrize("text", [*PATHS, *NO_NAMES, __file__])
def test_what_names_no_model(text):
    message = refusal(parse_model, text, kind=UsageError)
    assert message.isprintable()
    assert ("no such file or folder" in message) == (text in PATHS)
    assert ("Python file" in message) == (text == __file__)


# -- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(
            ({"device": device}, "Unknown device")
            for device in ("gpu", "cuda:", "cuda:x", "cpu:0", "mps:1", "", "cuda:-1", "cuda:²")
        ),
        ({"device": "cuda:0"}, "cuda:0 is not available"),
        ({"device": "mps"}, "mps is not available"),
        ({"dtype": "fp8"}, "Unknown dtype 'fp8'"),
    ],
)
def test_options_that_cannot_be(monkeypatch, options, says):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert says in refusal(check_options, LoadOptions(**options), kind=UsageError)
    assert load.resolve_device("auto") == torch.device("cpu")


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert "out of range" in refusal(check_options, LoadOptions(device="cuda:2"), kind=UsageError)
    assert load.resolve_device("cuda:0") == torch.device("cuda", 0)
    assert load.resolve_device("auto") == load.resolve_device("cuda") == torch.device("cuda", 1)


# -- loading -------------------------------------------------------------------------------------


def test_a_folder_is_loaded_as_it_was_saved(folder):
    loaded = load_model(str(folder), CPU)
    original = tiny_llama()
    assert torch.equal(logits(loaded.model), logits(original))
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.name, loaded.dtype, loaded.device) == ("tiny-model", "float32", "cpu")
    assert (loaded.layers, loaded.vocab_size, loaded.context_limit) == (2, original.config.vocab_size, 512)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("naïve 🎉")) == "naïve 🎉"
    assert str(folder.parent) not in repr(loaded.model.config) + repr(loaded.tokenizer)


def test_a_model_of_the_same_files_takes_the_tokenizer_of_another(folder, tmp_path):
    first, small = load_model(str(folder), CPU), save_tiny(tmp_path / "small", seed=1, layers=1)
    assert load_model(str(small), CPU, share_tokenizer_with=first).tokenizer is first.tokenizer
    path = small / "tokenizer_config.json"
    path.write_text(path.read_text() + "\n")
    assert load_model(str(small), CPU, share_tokenizer_with=first).tokenizer is not first.tokenizer


@pytest.mark.parametrize(("instructions", "products"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        *((torch.bfloat16, asked) for asked in ("auto", "float32", "int8")),
        (torch.float32, "int4"),
        (torch.float16, "auto"),
    ],
)
def test_the_cpu_gets_the_dtype_it_is_good_at(tmp_path, monkeypatch, stored, asked, instructions, products):
    monkeypatch.setattr(passes, "has_bfloat16", lambda: instructions)
    monkeypatch.setattr(native, "is_available", lambda: products)
    save_tiny(tmp_path / "m", dtype=stored)
    loaded = load_model(str(tmp_path / "m"), LoadOptions(dtype=asked, device="cpu"), tokenizer=False)
    half = stored is torch.bfloat16 and (instructions or products)  # it does not hold the values of float16
    assert loaded.dtype == ("bfloat16" if half and asked != "float32" else "float32")
    assert bool(loaded.slower) == (half and asked == "float32")
    assert loaded.quantize == (asked if asked.startswith("int") else None)


def test_the_dtype_is_read_from_the_weights_when_the_config_is_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "reads_bfloat16", lambda: True)
    folder = save_tiny(tmp_path / "m", dtype=torch.bfloat16)
    edit_config(folder, dtype=None)
    assert load_model(str(folder), CPU, tokenizer=False).dtype == "bfloat16"


def test_device_maps(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    loaded = load_model(str(folder), LoadOptions(device="balanced"), tokenizer=False)
    assert loaded.device == "cpu"
    assert torch.equal(logits(loaded.model), logits(tiny_llama()))


def test_progress_is_told_and_nothing_written_to_the_terminal(folder, capfd):
    verbosity = transformers_logging.get_verbosity()
    seen: list[tuple[str, int, int | None]] = []
    change_weights(folder, {"model.layers.0.extra": torch.zeros(3)})
    load_model(str(folder), CPU, progress=SimpleNamespace(update=lambda *step: seen.append(step)))
    assert capfd.readouterr() == ("", "")
    assert transformers_logging.get_verbosity() == verbosity
    stage, done, total = seen[-1]
    assert stage == "loading tiny-model"
    assert done == total == len(load_file(folder / "model.safetensors")) - 1


def test_sharded_weights(tmp_path):
    tiny_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert torch.equal(logits(load_model(str(tmp_path), CPU, tokenizer=False).model), logits(tiny_llama()))
    shard = max(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    message = refusal(load_model, str(tmp_path), CPU, tokenizer=False, kind=RunError)
    assert "incomplete" in message
    assert shard.name in message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_an_mxfp4_checkpoint_is_that_of_its_unpacked_weights(tmp_path, monkeypatch, dtype):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 8}
    config = GptOssConfig(**sizes, head_dim=8, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for key in [key for key in weights if key.endswith("experts.down_proj")]:
        experts, inputs, outputs = weights.pop(key).shape
        weights[f"{key}_scales"] = torch.full((experts, outputs, inputs // 32), 120, dtype=torch.uint8)
        weights[f"{key}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    asked: list[int] = []
    monkeypatch.setattr(load, "check_memory", lambda needed, **_: asked.append(needed))
    model = load_model(str(tmp_path), LoadOptions(dtype=dtype, device="cpu"), tokenizer=False).model
    taken = sum(each.nbytes for each in model.parameters())
    assert taken <= asked[0] <= 1.5 * taken


# -- folders that are refused --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").rename(folder / "model.gguf"), "name the file itself"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "adapter"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no model.safetensors"),
        *((partial(edit_config, model_type=kind), "names no model_type") for kind in (None, "", 3)),
        (partial(edit_config, model_type="no-such-type"), "'no-such-type'"),
    ],
)
def test_folders_that_hold_no_model(folder, change, says):
    change(folder)
    assert says in refusal(load_model, str(folder), CPU, kind=UsageError)


EVIL = "open(__file__ + '.ran', 'w').close()\n"


@pytest.mark.smoke
def test_code_of_a_model_is_never_run(folder):
    (folder / "evil.py").write_text(EVIL)
    custom = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit_config(folder, auto_map=custom)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(EVIL)
    assert type(load_model(str(folder), CPU).model).__name__ == "LlamaForCausalLM"
    edit_config(folder, model_type="evil")
    assert "never run" in refusal(load_model, str(folder), CPU, kind=UsageError)
    assert not list(folder.rglob("*.ran"))


def test_code_of_a_tokenizer_is_never_run(folder):
    (folder / "evil.py").write_text(EVIL)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    settings["tokenizer_class"] = "EvilTokenizer"
    path.write_text(json.dumps(settings))
    assert "never run" in refusal(load_model, str(folder), CPU, kind=UsageError)
    assert not list(folder.rglob("*.ran"))


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        *(("config.json", text, r"config\.json.*damaged") for text in ("", "{", "[]", "\0")),
        ("config.json", '{"model_type": "llama", "hidden_size": "wide"}', r"config\.json.*damaged"),
        ("tokenizer.json", "{", "The tokenizer of tiny-model cannot be loaded"),
        *(("model.safetensors", kept, r"safetensors.*(damaged|truncated)") for kept in (0, 7, 8, 100, -1)),
        *(
            ("model.safetensors", content, r"model\.safetensors' is damaged")
            for content in (b"not safetensors at all, but long enough", struct.pack("<Q", 2**63) + b"{}")
        ),
        *(
            (INDEX, text, r"index\.json' is damaged")
            for text in ("", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": {}}')
        ),
    ],
)
def test_damaged_files(folder, file, content, says):
    path = folder / file
    if isinstance(content, int):
        content = path.read_bytes()[:content]
    if file == INDEX:
        (folder / "model.safetensors").unlink()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert re.search(says, refusal(load_model, str(folder), CPU, kind=RunError))


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("config.json", "num_hidden_layers", 10**9, "num_hidden_layers is too large"),
        ("config.json", "num_labels", 10**9, "num_labels is too large"),
        ("config.json", "vocab_size", 10**400, "vocab_size is too large"),
        ("generation_config.json", "eos_token_id", "x", "eos_token_id is neither a token id nor a list"),
        ("generation_config.json", "eos_token_id", [math.nan], "eos_token_id is neither"),
        ("generation_config.json", "no_repeat_ngram_size", 1.5, "generation settings cannot be applied"),
        ("tokenizer_config.json", "model_max_length", "x", "its model_max_length is no number"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_ill_typed_fields(folder, name, field, value, said):
    """Those that once ended in an error that should not happen, or in memory that ran out."""
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(SpecbenchError) as caught:
        autoregressive_generate("Hi", load_target(str(folder)), max_new_tokens=1)
    assert said in caught.value.message


def test_weights_of_the_wrong_shape_or_missing_are_not_made_up(folder):
    change_weights(folder, {"lm_head.weight": torch.zeros(3, 32)})
    assert "cannot be loaded" in refusal(load_model, str(folder), CPU, kind=RunError)
    change_weights(folder, {}, without="lm_head.weight")
    message = refusal(load_model, str(folder), CPU, kind=RunError)
    assert "incomplete" in message
    assert "lm_head.weight" in message


@pytest.mark.parametrize(
    "shard",
    ["../elsewhere.safetensors", "/etc/passwd", "a/../../b", "..\\b.safetensors", "C:\\b", "a\0b", ""],
)
def test_weights_outside_the_folder(tmp_path, shard):
    folder = save_tiny(tmp_path / "m")
    edit_config(folder, transformers_weights=shard)
    assert "outside its own folder" in refusal(load_model, str(folder), CPU, kind=UsageError)
    edit_config(folder, transformers_weights=None)
    shutil.move(folder / "model.safetensors", tmp_path / "elsewhere.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": shard}}))
    assert "outside its own folder" in refusal(load_model, str(folder), CPU, kind=UsageError)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "are pickled" in refusal(load_model, str(folder), CPU, kind=UsageError)


def test_not_enough_memory(folder, monkeypatch):
    size = sum(weight.nbytes for weight in load_file(folder / "model.safetensors").values())
    monkeypatch.setattr(checkpoints, "available_memory", lambda device: size - 1)
    message = refusal(load_model, str(folder), CPU, kind=RunError)
    assert "Loading tiny-model takes up to 0.0 GB of memory" in message
    load_model(str(folder), LoadOptions(dtype="bfloat16", device="cpu"), tokenizer=False)  # less of that fits
    monkeypatch.setattr(checkpoints, "available_memory", lambda device: size)
    load_model(str(folder), CPU, tokenizer=False)


def test_memory_that_runs_out_in_the_middle(folder, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: not enough memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    assert "not enough memory for tiny-model" in refusal(load_model, str(folder), CPU, kind=RunError)


def test_a_container_may_leave_less_memory_than_the_machine_has(monkeypatch):
    group = {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 500\ninactive_file 100\n"}
    monkeypatch.setattr(Path, "read_text", lambda self, *_: group[self.name])
    assert devices.available_memory() == 400
    group["memory.max"] = "max"
    assert devices.available_memory() > 1000


# -- what a loaded model tells -------------------------------------------------------------------


def test_wrapping_keeps_paths_out_of_the_name_and_ends_training(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert wrap_model(model, None).name == "tiny-model"
    model.config.name_or_path = "org/name"
    assert wrap_model(model, None).name == "org/name"
    wrapped = wrap_model(tiny_llama().train(), None)
    assert wrapped.name == "LlamaForCausalLM"
    assert not wrapped.model.training
    assert not any(parameter.requires_grad for parameter in wrapped.model.parameters())


def test_the_fingerprint_tells_weights_and_nothing_else_apart(folder, tmp_path):
    def of(path: Path, dtype: str = "float32") -> str:
        return load_model(str(path), LoadOptions(dtype=dtype, device="cpu"), tokenizer=False).fingerprint

    copy = shutil.copytree(folder, tmp_path / "renamed")
    assert of(folder) == of(copy) == wrap_model(tiny_llama(), None).fingerprint
    assert of(folder) != of(folder, "bfloat16")
    assert of(folder) != of(save_tiny(tmp_path / "other", seed=1))
    edit_config(copy, rms_norm_eps=1e-3)
    assert of(folder) != of(copy)


YARN, LLAMA3 = {"rope_type": "yarn", "factor": 4.0}, {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        (YARN | {"original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 4.0}, 256),  # without an original, and as older files spell it
        (YARN | {"original_max_position_embeddings": 16}, 64),  # DeepSeek: the maximum holds it
        (YARN | {"factor": 2.5, "original_max_position_embeddings": 63}, 157),
        ({"rope_type": "linear", "factor": 4.0}, 64),
        ({"rope_type": "dynamic", "factor": 4.0}, 64),  # from there on rotations would go by the pass
        ({"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8} | LLAMA3, 64),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, 64),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
            | {"original_max_position_embeddings": 16},
            16,
        ),
    ],
)
def test_a_context_is_as_long_as_its_scaling_makes_it(rope, limit):
    config = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    assert load._context_limit(LlamaConfig(**config, rope_scaling=dict(rope))) == limit
    assert load._context_limit(LlamaConfig(**config, rope_parameters=dict(rope))) == limit


def test_a_scaling_of_one_type_of_layers_counts():
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    config = Olmo3Config(
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=64,
        rope_parameters={"sliding_attention": plain, "full_attention": YARN | {"rope_theta": 10000.0}},
    )
    assert load._context_limit(config) == 256


def test_end_ids_come_from_everywhere():
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    end_of_text, _, turn_end = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    assert end_ids_of(model, None) == ()
    assert end_ids_of(model, tokenizer) == (end_of_text, turn_end)
    model.generation_config.eos_token_id = [5, 7]
    model.config.eos_token_id = 6
    assert end_ids_of(model, tokenizer) == (5, 6, 7, end_of_text, turn_end)


@pytest.mark.parametrize(
    ("template", "closes"),
    [
        (CHAT_TEMPLATE, True),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + ' <|im_end|>\\n' }}{% endfor %}", True),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\\nUser:<|im_end|>' }}{% endfor %}", False),
        ("{{ raise_exception('Only with a system prompt') }}", False),
        ("{% for m in messages %}", False),
        ("nothing of the conversation", False),
        (None, False),
    ],
)
def test_the_chat_template_tells_how_a_turn_ends(template, closes):
    tokenizer = tiny_tokenizer(chat_template=template)
    turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (turn_end in end_ids_of(tiny_llama(), tokenizer)) is closes


# -- two models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [(7, 0), (0, 7)])
def test_the_same_tokenizer_is_compatible_whatever_the_padding(padding):
    width = len(tiny_tokenizer())
    models = [tiny_language_model(seed, vocab_size=width + more) for seed, more in enumerate(padding)]
    target = wrap_target(models[0].model, models[0].tokenizer)
    plain = autoregressive_generate([1, 2, 3], target, max_new_tokens=12, ignore_eos=True)
    drafter = wrap_drafter(models[1], target)
    drafted = speculative_generate([1, 2, 3], target, drafter, gamma=3, max_new_tokens=12, ignore_eos=True)
    assert any(step.drafted for step in drafted.steps)
    assert drafted.token_ids == plain.token_ids


def test_a_model_too_narrow_for_its_tokens():
    width = len(tiny_tokenizer())
    narrow = tiny_language_model(vocab_size=width - 1)
    message = refusal(translation_of, tiny_language_model(), narrow, kind=UsageError)
    assert f"{width - 1} logits for {width} tokens" in message


def test_without_tokenizers_only_widths_are_compared():
    bare = [wrap_model(tiny_llama(vocab_size=width), None) for width in (300, 300, 320)]
    translation_of(bare[0], bare[1])
    assert "300 logits against 320" in refusal(translation_of, bare[0], bare[2], kind=UsageError)


# -- the hub -------------------------------------------------------------------------------------


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty hub cache and no network, as the hub client sees them."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.mark.smoke
def test_a_hub_model_that_is_cached(hub_cache):
    home = hub_cache / "models--org--name"
    snapshot = save_tiny(home / "snapshots" / ("0" * 40))
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(snapshot.name)
    loaded = load_model("org/name", CPU)
    assert loaded.name == "org/name"
    assert loaded.tokenizer is not None
    assert load_model(f"org/name@{'0' * 40}", CPU).name == f"org/name@{'0' * 40}"
    assert load_config("org/name").num_hidden_layers == 2
    (snapshot / "model.safetensors").unlink()
    for name in ("org/name", "org/other"):
        assert "not in the hub's cache" in refusal(load_model, name, CPU, kind=RunError)
    (snapshot / "adapter_config.json").write_text("{}")  # refused before weights are fetched
    assert "adapter" in refusal(load_model, "org/name", CPU, kind=UsageError)
    (snapshot / "adapter_config.json").unlink()
    RwkvConfig().save_pretrained(snapshot)
    assert "recurrent state" in refusal(load_model, "org/name", CPU, kind=UsageError)


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_out_of_reach_is_told_at_once(hub_cache, monkeypatch, capfd, offline):
    """In one sentence that names a variable only if it is set, and without the client's attempts."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits"))
    assert str(default_drafter(Recipe(parse_model("org/name")))) == "lookup"
    message = refusal(load_model, "org/name", CPU, kind=RunError)
    assert "cannot be reached" in message
    assert ("HF_HUB_OFFLINE" in message) == offline
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("RepositoryNotFoundError", UsageError, "There is no model 'org/name@v1' on the hub"),
        ("GatedRepoError", RunError, "is gated"),
        ("RevisionNotFoundError", UsageError, "no revision 'v1'"),
        ("HfHubHTTPError", RunError, "cannot be fetched: Refused."),
        ("", RunError, "No space is left in the hub's cache"),
    ],
)
def test_what_the_hub_may_answer(monkeypatch, name, kind, says):
    from huggingface_hub import errors

    def download(*_: Any, **__: Any) -> str:
        if name:
            raise getattr(errors, name)("Refused.", response=SimpleNamespace(headers={}, request=None))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert says in refusal(load_model, "org/name@v1", CPU, kind=kind)


def test_a_hub_model_without_what_it_must_have(monkeypatch, folder):
    monkeypatch.setattr("specbench.models.hub._why_unreachable", str)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    assert load_model("org/name", CPU).name == "org/name"
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "no safetensors weights" in refusal(load_model, "org/name", CPU, kind=UsageError)
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(load_model, "org/name", CPU, kind=UsageError)
