"""LoRA adapters: what is merged, into which base, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models import change_weights, edit_config
from tiny import save_tiny

from specbench.base.errors import RunError, SpecbenchError, UsageError
from specbench.decoding.metrics import acceptance_rate
from specbench.export.setting import refuse_adapter
from specbench.generate import speculative_generate
from specbench.models.load import load_config, load_model, load_tokenizer
from specbench.models.target import load_target
from specbench.options import LoadOptions
from specbench.recipe import Recipe
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import parse_model

CPU = LoadOptions("float32", "cpu")
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("adapters") / "base")


def write_adapter(folder: Path, base: Path | str | None, *, rank: int = 2, **settings: Any) -> Path:
    """Write an adapter for the query projection of the first layer."""
    torch.manual_seed(5)
    folder.mkdir()
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 3, "base_model_name_or_path": base and str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(told | settings))
    name = f"base_model.model.{QUERY}"
    tensors = {f"{name}.lora_A.weight": torch.randn(rank, 32), f"{name}.lora_B.weight": torch.randn(32, rank)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def weights(model: str) -> dict[str, torch.Tensor]:
    return load_model(model, CPU, tokenizer=False).model.state_dict()


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({}, 3 / 2),
        ({"use_rslora": True}, 3 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 8}, "rank_pattern": {"q_proj": 2}, "r": 16}, 8 / 2),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 8}}, 3 / 2),
    ],
)
def test_the_weights_are_those_of_base_and_adapter(base, tmp_path, settings, factor):
    folder = write_adapter(tmp_path / "lora", base, **settings)
    up, down = (
        load_file(folder / "adapter_model.safetensors")[f"base_model.model.{QUERY}.lora_{x}.weight"]
        for x in "BA"
    )
    plain, merged = weights(str(base)), weights(str(folder))
    changed = plain.pop(f"{QUERY}.weight") + factor * up @ down
    assert torch.allclose(merged.pop(f"{QUERY}.weight"), changed, atol=1e-6)
    assert all(torch.equal(plain[name], merged[name]) for name in plain)


@pytest.mark.smoke
def test_a_target_and_a_drafter_have_adapters_of_their_own(base, tmp_path):
    folder = write_adapter(tmp_path / "lora", base)
    target = load_target(str(folder), CPU)
    assert target.name == "base:adapter=lora"
    assert target.language_model.notes == ["The adapter lora (LoRA of rank 2) was merged into base."]
    plain = speculative_generate([1, 2, 3], target, "none", max_new_tokens=12, ignore_eos=True)
    for drafter in (str(base), f"{base}:adapter={folder},dtype=float32", "self:int8"):
        found = speculative_generate([1, 2, 3], target, drafter, max_new_tokens=12, ignore_eos=True)
        assert found.token_ids == plain.token_ids
    same = speculative_generate(
        [1, 2, 3], target, f"{folder}:dtype=float32", gamma=3, max_new_tokens=12, ignore_eos=True
    )
    assert acceptance_rate(same.steps) == 1


def test_an_adapted_model_is_another_model(base, tmp_path):
    folder = write_adapter(tmp_path / "lora", base)
    plain, adapted = load_model(str(base), CPU), load_model(f"{base}:adapter={folder}", CPU)
    assert adapted.name == "base:adapter=lora"
    assert plain.fingerprint != adapted.fingerprint == load_model(str(folder), CPU).fingerprint
    assert plain.identity != adapted.identity
    assert plain.files.place != adapted.files.place
    assert plain.files.digest != adapted.files.digest
    assert load_config(str(folder)).hidden_size == plain.model.config.hidden_size


def test_an_adapter_can_have_a_tokenizer_and_template(base, tmp_path):
    folder = write_adapter(tmp_path / "lora", base)
    for file in base.glob("tokenizer*"):
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert load_model(str(folder), CPU).tokenizer.chat_template.endswith("!")
    assert load_tokenizer(f"{base}:adapter={folder}").chat_template.endswith("!")


def test_the_base_is_the_one_that_the_adapter_names(base, tmp_path, monkeypatch):
    folder = write_adapter(tmp_path / "lora", "base")
    with pytest.raises(SpecbenchError, match="base"):
        load_model(str(folder), CPU)
    monkeypatch.chdir(base.parent)
    assert load_model(str(folder), CPU).notes
    other = save_tiny(tmp_path / "other")
    assert "names another base, base." in load_model(f"{other}:adapter={folder}", CPU).notes[0]
    edit_adapter(folder, base_model_name_or_path="/no/such/folder")
    with pytest.raises(UsageError, match="not to be found: /no/such/folder") as refusal:
        load_model(str(folder), CPU)
    assert "BASE:adapter=lora" in refusal.value.hint
    edit_adapter(folder, base_model_name_or_path=None)
    with pytest.raises(UsageError, match="does not say what its base model is"):
        load_model(str(folder), CPU)


def edit_adapter(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "PROMPT_TUNING"),
        ({"use_dora": True}, "use_dora"),
        ({"task_type": "SEQ_CLS"}, "SEQ_CLS"),
        ({"bias": "all"}, "biases"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"some_new_option": 1}, "some_new_option"),
        ({"alpha_pattern": {"(a+)+": 1}}, "alpha_pattern"),
    ],
)
def test_other_kinds_of_adapters_are_refused(base, tmp_path, settings, says):
    folder = write_adapter(tmp_path / "lora", base, **settings)
    with pytest.raises(UsageError, match=f"adapter lora cannot be merged: .*{says}"):
        load_model(str(folder), CPU)


NAME = f"base_model.model.{QUERY}"


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({f"{NAME}.lora_A.weight": torch.ones(2, 32)}, "it has only lora_A"),
        (
            {f"{NAME}.lora_A.weight": torch.ones(2, 48), f"{NAME}.lora_B.weight": torch.ones(32, 2)},
            "another shape",
        ),
        (
            {"model.layers.9.x.lora_A": torch.ones(2, 2), "model.layers.9.x.lora_B": torch.ones(2, 2)},
            "layers.9.x",
        ),
        ({"lm_head.weight": torch.ones(3, 32)}, "lm_head.weight has another shape"),
        ({f"{NAME}.lora_magnitude_vector": torch.ones(2)}, "of no known kind"),
    ],
)
def test_tensors_that_do_not_fit_the_base_are_refused(base, tmp_path, tensors, says):
    folder = write_adapter(tmp_path / "lora", base)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(UsageError, match=says):
        load_model(str(folder), CPU)


def test_layers_that_were_trained_as_a_whole_are_replaced_unless_they_are_shared(base, tmp_path):
    folder = write_adapter(tmp_path / "lora", base, modules_to_save=["lm_head"])
    head = torch.randn_like(weights(str(base))["lm_head.weight"])
    save_file({"base_model.model.lm_head.weight": head}, folder / "adapter_model.safetensors")
    assert torch.equal(weights(str(folder))["lm_head.weight"], head)
    tied = save_tiny(tmp_path / "tied")
    change_weights(tied, {}, without="lm_head.weight")
    edit_config(tied, tie_word_embeddings=True)
    with pytest.raises(UsageError, match="uses in two places"):
        load_model(f"{tied}:adapter={folder}", CPU)


def test_files_that_are_damaged_or_pickled(base, tmp_path):
    folder = write_adapter(tmp_path / "lora", base)
    path = folder / "adapter_model.safetensors"
    torch.save(load_file(path), folder / "adapter_model.bin")
    merged = weights(str(folder))[f"{QUERY}.weight"]
    path.unlink()
    with pytest.raises(UsageError, match="is pickled"):
        load_model(str(folder), CPU)
    loaded = load_model(str(folder), CPU, allow_pickle=True).model
    assert torch.equal(loaded.state_dict()[f"{QUERY}.weight"], merged)
    path.write_bytes(b"damaged")
    with pytest.raises(RunError, match=r"weights of the adapter lora in '.*' are damaged"):
        load_model(str(folder), CPU)
    edit_adapter(folder, lora_alpha="much")
    with pytest.raises(RunError, match="lora_alpha has an invalid value"):
        load_model(str(folder), CPU)
    with pytest.raises(UsageError, match=r"no adapter: it has no adapter_config\.json"):
        load_model(f"{base}:adapter={base}", CPU)


def test_recipes_keep_adapters_without_their_paths(base, tmp_path, monkeypatch):
    folder = write_adapter(tmp_path / "lora", base)
    spec = f"{base}:adapter={folder}"
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
