"""MTP layers of a target's own checkpoint: their layouts, arithmetic, outputs and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from cli_runs import refusal
from head_files import VOCAB, mtp_settings, mtp_tensors, write_head
from mtp_files import FAMILIES, LAYERS, Made, formula, make_checkpoint
from safetensors.torch import load_file, save_file
from tiny import save_tiny, tiny_language_model, tiny_tokenizer

from specbench.base.errors import UsageError
from specbench.decoding.protocols import ForwardRequest
from specbench.generate import speculative_generate
from specbench.models.default import default_drafter
from specbench.models.drafters import check_drafter, load_drafter
from specbench.models.head_files import find_head
from specbench.models.heads import load_head
from specbench.models.heads.mtp import checkpoint_files
from specbench.models.mtp_layouts import find_mtp_tensors
from specbench.models.target import Target, load_target, wrap_target
from specbench.options import LoadOptions
from specbench.policies import FixedLength
from specbench.policies.trees import StaticTreePolicy
from specbench.recipe import Recipe
from specbench.specs.drafters import Mtp
from specbench.specs.models import parse_model

CONTEXT = [5, 19, 2, 77, 11, 3, 140, 9]
DRAFT = [44, 8, 61]
PLAIN = LoadOptions(dtype="float32")


@cache
def checkpoint(family: str, folder: Path) -> Made:
    return make_checkpoint(folder / family, family)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made: Path = tmp_path_factory.mktemp("checkpoints")
    return made


def tell(scorer: Any, made: Made, context: list[int]) -> None:
    """Give a scorer the target's states of a context."""
    with torch.inference_mode():
        output = made.target(input_ids=torch.tensor([context[:-1]]), output_hidden_states=True)
    scorer.take_states(len(context) - 1, output.hidden_states[-1][0, :, None])


def prepared(made: Made, context: list[int]) -> Any:
    drafter: Any = load_drafter("mtp", load_target(str(made.folder), PLAIN), PLAIN)
    drafter.scorer.begin()
    tell(drafter.scorer, made, context)
    return drafter.scorer


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_every_layout_are_those_of_the_formula(folder, family):
    """Of several layers the first drafts all tokens."""
    made = checkpoint(family, folder)
    scorer = prepared(made, CONTEXT)
    found = scorer.score(ForwardRequest(scorer, CONTEXT, DRAFT)).logits
    torch.testing.assert_close(found, formula(made, CONTEXT + DRAFT, len(DRAFT)), atol=1e-4, rtol=1e-4)


def test_layers_in_the_folder_of_a_model_that_sees_draft_for_its_text(folder, tmp_path):
    """As Qwen3.5 is published: the configuration and the tensors of its text are parts of larger ones."""
    made = checkpoint("qwen3.5", folder)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(made.folder / "model.safetensors").items()
    }
    save_file(
        tensors | {"model.visual.merger.norm.weight": torch.ones(4)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    text = json.loads((made.folder / "config.json").read_text())
    whole = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tiny_tokenizer().save_pretrained(tmp_path)
    scorer = prepared(made._replace(folder=tmp_path), CONTEXT)
    found = scorer.score(ForwardRequest(scorer, CONTEXT, DRAFT)).logits
    torch.testing.assert_close(found, formula(made, CONTEXT + DRAFT, len(DRAFT)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["deepseek", "qwen3-next"])
def test_greedy_outputs_are_the_targets(folder, family):
    made = checkpoint(family, folder)
    target = load_target(str(made.folder), PLAIN)
    drafter = load_drafter("mtp", target, PLAIN)
    options: Any = {"max_new_tokens": 12, "min_new_tokens": 12}
    expected = speculative_generate(CONTEXT, target, None, **options).token_ids
    policies = [FixedLength(3)]
    if family == "deepseek":  # the other takes no trees
        policies.append(StaticTreePolicy.shaped((-1, -1, 0, 0, 1)))
    for policy in policies:
        found = speculative_generate(CONTEXT, target, drafter, policy=policy, **options)
        assert found.token_ids == expected
        assert any(step.drafted for step in found.steps)


@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("deepseek", "float32", ("--drafter", "mtp", "--draft-policy", "dynamic-tree")),
        ("deepseek", "float32", ("--drafter", "lookup+mtp", "--draft-policy", "confidence")),
        ("mimo", "int8", ("--drafter", "mtp", "--gamma", "2")),  # the output layer is that of the checkpoint
    ],
)
def test_a_checkpoints_own_layer_on_the_command_line(cli, folder, family, dtype, options):
    target = checkpoint(family, folder).folder
    words = ("generate", "the thing", "--target", target, "--dtype", dtype, "-n", 8)
    plain = cli(*words, "--drafter", "none", "--json").json()
    found = cli(*words, *options, "--json").json()
    assert found["token_ids"] == plain["token_ids"]
    assert found["drafted"] > 0


@pytest.mark.parametrize("family", ["deepseek", "mimo"])
def test_layers_of_a_quantized_checkpoint_are_unpacked(tmp_path, family):
    made = make_checkpoint(tmp_path / "m", family)
    weights = load_file(made.folder / "model.safetensors")
    for key in [key for key in weights if key.endswith("proj.weight")]:
        weights[f"{key}_scale_inv"] = torch.full([-(-size // 16) for size in weights[key].shape], 0.01)
        weights[key] = (weights[key] * 100).to(torch.float8_e4m3fn)
    save_file(weights, made.folder / "model.safetensors", {"format": "pt"})
    config = json.loads((made.folder / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    (made.folder / "config.json").write_text(json.dumps(config | {"quantization_config": fp8}))
    target = load_target(str(made.folder), PLAIN)
    drafter = load_drafter("mtp", target, PLAIN)
    stored = load_file(made.folder / "model.safetensors")
    name = next(key for key in stored if key.endswith(("eh_proj.weight", "input_proj.weight")))
    expected = stored[name].float() * 0.01
    head = load_head(checkpoint_files(made.folder, target.language_model.model.config, "m"), LAYERS)
    assert torch.equal(head.tensors[name], expected)
    assert not any("scale" in name for name in head.tensors)
    speculative_generate(CONTEXT, target, drafter, max_new_tokens=8)
    assert default_for(str(made.folder)) == "mtp"


def test_a_target_without_the_layers_is_refused_in_a_sentence(tmp_path):
    save_tiny(tmp_path / "tiny")
    spec = parse_model(str(tmp_path / "tiny"))
    message = refusal(check_drafter, Mtp(), spec, kind=UsageError)
    assert "The checkpoint of tiny has no MTP layer in a known layout" in message
    wrapped: Target = wrap_target(tiny_language_model().model, name="tiny", pack=False)
    assert "was not loaded from a folder" in refusal(load_drafter, "mtp", wrapped, kind=UsageError)


def test_layers_of_the_target_are_no_mtp_layers(folder):
    """A checkpoint of fewer layers would have its MTP layer where this one has an ordinary layer."""
    made = checkpoint("deepseek", folder)
    found = find_mtp_tensors(made.folder, LAYERS)
    assert found is not None
    assert all(f"layers.{LAYERS}." in name for name in found.places)
    assert find_mtp_tensors(made.folder, LAYERS + 2) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mtp_layers.0.input_proj.weight": torch.zeros(32, 32)}, "size mismatch for eh_proj.weight"),
        ({"mtp_layers.0.self_attn.extra.weight": torch.zeros(1)}, "has no place for"),
        ({"mtp_layers.0.token_layernorm.weight": torch.zeros(32, dtype=torch.int8)}, "are quantized"),
    ],
)
def test_a_wrong_layer_is_refused_in_a_sentence(tmp_path, changed, message):
    head = write_head(tmp_path / "head", mtp_settings(), mtp_tensors() | changed)
    target = wrap_target(tiny_language_model(vocab_size=VOCAB).model, name="tiny", pack=False)
    assert message in refusal(load_drafter, str(head), target, PLAIN, kind=UsageError)


def test_weights_of_a_layer_on_the_hub_are_fetched(tmp_path):
    files, fetched = find_head(parse_model(str(write_head(tmp_path, mtp_settings(), mtp_tensors())))), []
    assert files is not None
    hub: Any = SimpleNamespace(fetch_weights=lambda *_, **__: fetched.append(True))
    assert load_head(replace(files, hub=hub)).tensors.keys() == mtp_tensors().keys()
    assert fetched


def default_for(target: str) -> str:
    return str(default_drafter(Recipe(parse_model(target))))


def test_layers_of_a_hub_model_are_found_before_its_weights_are_fetched(folder, tmp_path, monkeypatch):
    made, asked = checkpoint("deepseek", folder), []
    (tmp_path / "config.json").write_bytes((made.folder / "config.json").read_bytes())

    def fetch(repository: str, *, revision: str | None, **_: Any) -> str:
        asked.append((repository, revision))
        return str(tmp_path)

    def headers(repository: str, *, revision: str | None) -> Any:
        tensors = load_file(made.folder / "model.safetensors")
        known = {name: SimpleNamespace(dtype="F32", shape=[*each.shape]) for name, each in tensors.items()}
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=known)})

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", headers)
    assert default_for("org/model@1") == "mtp"
    assert asked == [("org/model", "1")]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(made.folder / "missing"))
    assert default_for("org/model@1") == "lookup"
    monkeypatch.delattr(huggingface_hub, "get_safetensors_metadata")  # the weights are in the cache
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(made.folder))
    assert default_for("org/model@1") == "mtp"
