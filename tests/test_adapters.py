"""LoRA adapters: what is merged, into which base, and what is refused."""

from __future__ import annotations

import copy
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel
from safetensors.torch import load_file
from test_composites import whole_model
from tiny import save_tiny, tiny_llama

from specbench.base.errors import RunError, UsageError
from specbench.decoding.metrics import acceptance_rate
from specbench.export.setting import refuse_adapter
from specbench.generate import speculative_generate
from specbench.models.composites import text_model
from specbench.models.load import load_config, load_model, load_tokenizer
from specbench.models.target import load_target
from specbench.options import LoadOptions
from specbench.recipe import Recipe
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import parse_model

CPU = LoadOptions("float32", "cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("adapters") / "base")


def save_adapter(
    folder: Path, model: Any, base: Path | str | None = None, kind: Any = LoraConfig, **settings: Any
) -> Path:
    """Write an adapter of ``model`` with random weights, as `peft` saves it."""
    if kind is LoraConfig:
        settings = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]} | settings
    config = kind(**settings)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(5)
        tuned = PeftModel(copy.deepcopy(model), config)
        for name, weight in tuned.named_parameters():
            if ".default" in name or "modules_to_save" in name:
                weight.data = weight.data.float().normal_(std=0.2)
        tuned.save_pretrained(folder, safe_serialization=True)
    edit_adapter(folder, base_model_name_or_path=base and str(base))
    return folder


def write_adapter(folder: Path, base: Path | str | None, **settings: Any) -> Path:
    return save_adapter(folder, tiny_llama(), base, **settings)


def on(base: Path, folder: Path) -> str:
    return f"{base}:adapter={folder}"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([[1, 2, 3, 4]])).logits
    return found


def peft_logits(model: Any, folder: Path) -> torch.Tensor:
    """Logits of a model with an adapter that is not merged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return logits(PeftModel.from_pretrained(copy.deepcopy(model), folder, torch_device="cpu").eval())


ALL = {"target_modules": "all-linear"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
        {"modules_to_save": ["lm_head"]},
        {"use_dora": True},
        {"kind": IA3Config, "target_modules": ["v_proj"], "feedforward_modules": []},
    ],
    ids=lambda settings: ",".join(settings) or "plain",
)
def test_merged_logits_are_those_of_peft(tmp_path, settings, tied):
    model = tiny_llama()
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(tmp_path / "base")
    folder = save_adapter(tmp_path / "lora", model, tmp_path / "base", **settings)
    merged = logits(load_model(on(tmp_path / "base", folder), CPU, tokenizer=False).model)
    assert torch.allclose(merged, peft_logits(model, folder), atol=1e-4)
    assert not torch.allclose(merged, logits(model), atol=1e-2)


@pytest.mark.parametrize("kind", ["mistral3", "qwen2_5_vl"])
def test_of_a_model_that_also_sees_the_text_part_is_merged(tmp_path, kind):
    """The layers of both parts have names and shapes alike."""
    model = whole_model(kind)
    model.save_pretrained(tmp_path / "base")
    folder = save_adapter(tmp_path / "both", model, tmp_path / "base", **ALL)
    loaded = load_model(on(tmp_path / "base", folder), CPU, tokenizer=False)
    assert torch.allclose(logits(loaded.model), peft_logits(model, folder), atol=1e-4)
    text = save_adapter(tmp_path / "text", text_model(whole_model(kind)), tmp_path / "base", **ALL)
    plain = load_model(str(tmp_path / "base"), CPU, tokenizer=False).model
    merged = load_model(on(tmp_path / "base", text), CPU, tokenizer=False)
    assert torch.allclose(logits(merged.model), peft_logits(plain, text), atol=1e-4)
    sight = save_adapter(
        tmp_path / "sight", model, tmp_path / "base", target_modules=".*(vision_tower|visual).*proj"
    )
    with pytest.raises(UsageError, match="cannot be merged into base: peft says"):
        load_model(on(tmp_path / "base", sight), CPU, tokenizer=False)


@pytest.mark.smoke
def test_a_target_and_a_drafter_have_adapters_of_their_own(base, tmp_path):
    folder = write_adapter(tmp_path / "lora", base)
    target = load_target(on(base, folder), CPU)
    assert target.name == "base:adapter=lora"
    assert target.language_model.notes == ["The adapter lora (LORA) was merged into base."]
    plain = speculative_generate([1, 2, 3], target, "none", max_new_tokens=12, ignore_eos=True)
    for drafter in (str(base), f"{base}:adapter={folder},dtype=float32", "self:int8"):
        found = speculative_generate([1, 2, 3], target, drafter, max_new_tokens=12, ignore_eos=True)
        assert found.token_ids == plain.token_ids
    same = speculative_generate(
        [1, 2, 3],
        target,
        f"{base}:adapter={folder},dtype=float32",
        gamma=3,
        max_new_tokens=12,
        ignore_eos=True,
    )
    assert acceptance_rate(same.steps) == 1
    shutil.copytree(base, tmp_path / "merged")
    load_model(on(base, folder), CPU).model.save_pretrained(tmp_path / "merged")
    for dtype in ("int8", "int4"):
        found, whole = (
            load_target(str(each), LoadOptions(dtype, "cpu"))
            for each in (on(base, folder), tmp_path / "merged")
        )
        assert torch.equal(logits(found.language_model.model), logits(whole.language_model.model))


def test_an_adapted_model_is_another_model(base, tmp_path):
    folder = write_adapter(tmp_path / "lora", base)
    plain, adapted = load_model(str(base), CPU), load_model(on(base, folder), CPU)
    assert adapted.name == "base:adapter=lora"
    assert plain.fingerprint != adapted.fingerprint
    assert plain.identity != adapted.identity
    assert plain.files.place != adapted.files.place
    assert plain.files.digest != adapted.files.digest
    assert load_config(on(base, folder)).hidden_size == plain.model.config.hidden_size
    other = f"{save_tiny(tmp_path / 'other')}:adapter={folder}"
    assert f"names another base, {base}" in load_model(other, CPU).notes[0]
    with pytest.raises(UsageError, match="holds an adapter") as refusal:
        load_model(str(folder), CPU)
    assert "BASE:adapter=FOLDER" in refusal.value.hint


def test_an_adapter_can_have_a_tokenizer_and_template(base, tmp_path):
    folder = write_adapter(tmp_path / "lora", base)
    for file in base.glob("tokenizer*"):
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert load_model(on(base, folder), CPU).tokenizer.chat_template.endswith("!")
    assert load_tokenizer(on(base, folder)).chat_template.endswith("!")


def edit_adapter(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "do not change weights"),
        ({"task_type": "SEQ_CLS"}, "SEQ_CLS"),
        ({"peft_type": "SOMETHING"}, "into base: peft says .*SOMETHING"),
        ({"some_new_option": 1}, "into base: peft says .*some_new_option"),
        ({"target_modules": ["other"]}, "into base: peft says .*other"),
        ({"target_modules": ["o_proj"]}, "into base: it has no weights for model.layers.0.self_attn.o_proj"),
        ({"target_modules": ["q_proj"]}, "into base: there is no model.layers.0.self_attn.v_proj"),
        ({"r": 3}, "into base: peft says .*size mismatch"),
        ({"layer_replication": [[0, 2], [0, 2]]}, "into base: "),
        ({"lora_alpha": "much"}, "into base: peft says"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(base, tmp_path, settings, says):
    folder = write_adapter(tmp_path / "lora", base)
    edit_adapter(folder, **settings)
    with pytest.raises(UsageError, match=f"adapter lora cannot be merged.*{says}"):
        load_model(on(base, folder), CPU)
    assert all("peft" not in str(type(each)) for each in load_model(str(base), CPU).model.modules())


def test_a_sentence_says_how_to_install_peft(base, tmp_path, monkeypatch):
    folder = write_adapter(tmp_path / "lora", base)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        UsageError, match=r"need the package peft\. Install it: pip install 'specbench-llm\[lora\]'"
    ):
        load_model(on(base, folder), CPU)


def test_files_that_are_damaged_or_pickled(base, tmp_path):
    folder = write_adapter(tmp_path / "lora", base)
    path = folder / "adapter_model.safetensors"
    torch.save(load_file(path), folder / "adapter_model.bin")
    merged = logits(load_model(on(base, folder), CPU).model)
    path.unlink()
    with pytest.raises(UsageError, match="is pickled"):
        load_model(on(base, folder), CPU)
    assert torch.equal(logits(load_model(on(base, folder), CPU, allow_pickle=True).model), merged)
    path.write_bytes(b"damaged")
    with pytest.raises(RunError, match=r"weights of the adapter lora in '.*' are damaged"):
        load_model(on(base, folder), CPU)
    edit_adapter(folder, task_type=3)
    with pytest.raises(RunError, match="task_type has an invalid value"):
        load_model(on(base, folder), CPU)
    with pytest.raises(UsageError, match=r"no adapter: it has no adapter_config\.json"):
        load_model(f"{base}:adapter={base}", CPU)


def test_recipes_keep_adapters_without_their_paths(base, tmp_path, monkeypatch):
    folder = write_adapter(tmp_path / "lora", base)
    spec = on(base, folder)
    recipe = Recipe(parse_model(spec), parse_drafter(f"{spec},dtype=float32"))
    assert str(recipe.drafter) == "base:adapter=lora,dtype=float32"
    assert recipe.arguments()[:4] == ["--drafter", f"{spec},dtype=float32", "--target", spec]
    stored = recipe.to_json()
    assert str(tmp_path) not in json.dumps(stored)
    shutil.copytree(base, tmp_path / "base")
    found = Recipe.from_json(stored).found_in(tmp_path)
    assert found.target.argument == f"{tmp_path / 'base'}:adapter={folder}"
    assert found.drafter.model == found.target
    with pytest.raises(UsageError, match="which is not exported"):
        refuse_adapter(recipe.target)
