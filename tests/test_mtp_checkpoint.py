"""A target with a trained MTP layer as one checkpoint, for engines that read such layers from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import Cli, refusal
from mtp_files import LAYERS, VOCAB, Made, make_checkpoint
from safetensors.torch import load_file, save_file
from tiny import save_tiny
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from specbench.base.errors import UsageError
from specbench.decoding.protocols import ForwardRequest
from specbench.export.checkpoint import in_checkpoint
from specbench.export.registry import load_engine
from specbench.export.setting import Model, Setting
from specbench.models.drafters import load_drafter
from specbench.models.head_files import find_head
from specbench.models.load import load_config
from specbench.models.mtp_checkpoint import write_mtp_checkpoint
from specbench.models.mtp_layouts import WRITTEN, find_mtp_tensors
from specbench.models.target import load_target
from specbench.models.training_metadata import TrainingMetadata
from specbench.options import LoadOptions
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import parse_model
from specbench.specs.policies import parse_policy
from specbench.train.kinds import make_student
from specbench.train.lessons import Teacher
from specbench.train.result import write_head

CONTEXT = [5, 19, 2, 77, 11, 3, 140, 9]
DRAFT = [44, 8, 61]
PLAIN = LoadOptions(dtype="float32")
DRAFTED = torch.arange(VOCAB)
FAMILIES = {
    "deepseek": "deepseek_v3",
    "glm": "glm4_moe",
    "qwen3-next": "qwen3_next",
    "qwen3.5": "qwen3_5_text",
}


def trained(folder: Path, family: str) -> tuple[Made, Path]:
    """Make a checkpoint with an MTP layer of its own, and another layer for it as ``specbench train`` writes it."""
    made = make_checkpoint(folder / "target", family)
    with torch.no_grad():  # the head has its rows in bfloat16
        made.target.lm_head.weight.copy_(made.target.lm_head.weight.bfloat16())
    tensors = load_file(made.folder / "model.safetensors") | {
        "lm_head.weight": made.target.lm_head.weight.data
    }
    save_file(tensors, made.folder / "model.safetensors", {"format": "pt"})
    teacher = Teacher(made.target, DRAFTED)
    student: Any = make_student("mtp", made.target, teacher.head, 4, 0)
    assert student.started_from, "its class is the target's"
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for weight in student.head.parameters():
            weight += 0.05 * torch.randn_like(weight)
    target = load_target(str(made.folder), PLAIN)
    write_head(folder / "head", student, target, teacher.head, DRAFTED, compact=False)
    return made, folder / "head"


def rows(target: str, drafter: str, made: Made) -> torch.Tensor:
    loaded: Any = load_drafter(drafter, load_target(target, PLAIN), PLAIN)
    loaded.scorer.begin()
    with torch.inference_mode():
        output = made.target(input_ids=torch.tensor([CONTEXT[:-1]]), output_hidden_states=True)
    loaded.scorer.take_states(len(CONTEXT) - 1, output.hidden_states[-1][0, :, None])
    found: torch.Tensor = loaded.scorer.score(ForwardRequest(loaded.scorer, CONTEXT, DRAFT)).logits
    return found


def write(made: Made, head: Path, out: Path) -> None:
    files = find_head(parse_model(str(head)))
    assert files is not None
    target = parse_model(str(made.folder))
    write_mtp_checkpoint(files, target, load_config(target), out)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_layer_has_the_names_of_its_family_and_drafts_as_before(tmp_path, family):
    made, head = trained(tmp_path, family)
    out = tmp_path / "out"
    write(made, head, out)
    before, after = (find_mtp_tensors(each, LAYERS) for each in (made.folder, out))
    assert before is not None
    assert after is not None
    names = {*after.places}
    if WRITTEN[FAMILIES[family]][0].appended:
        names -= {f"model.layers.{LAYERS}.shared_head.head.weight"}
    assert names == {*before.places}
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    stored = {name: path.name for path in out.glob("*.safetensors") for name in load_file(path)}
    assert index == stored
    config = AutoConfig.from_pretrained(out)
    assert getattr(config, WRITTEN[FAMILIES[family]][1]) == 1
    model, report = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    ids = torch.tensor([CONTEXT])
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, made.target(ids).logits)
    expected = rows(str(made.folder), str(head), made)
    torch.testing.assert_close(rows(str(out), "mtp", made), expected, atol=1e-4, rtol=1e-4)


def test_transformers_drafts_with_a_trained_layer(tmp_path):
    made, head = trained(tmp_path, "glm")
    write(made, head, tmp_path / "out")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}.*"]  # of other sizes in its class
    with torch.inference_mode():
        states = made.target(input_ids=torch.tensor([CONTEXT[:-1]]), output_hidden_states=True).hidden_states
        _, found, _ = MtpModel.from_pretrained(model)(
            input_ids=torch.tensor([CONTEXT[1:]]),
            last_hidden_states=states[-1],
            attention_mask=None,
            position_ids=torch.arange(1, len(CONTEXT))[None],
            mtp_cache=MtpCache(config=model.config.get_mtp_config()),
        )
    torch.testing.assert_close(found[0], rows(str(made.folder), str(head), made)[:1], atol=1e-4, rtol=1e-4)
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(torch.tensor([CONTEXT]), **asked)
    assert torch.equal(model.generate(torch.tensor([CONTEXT]), use_mtp=True, **asked), plain)


def test_export_writes_the_checkpoint_that_its_command_names(cli: Cli, tmp_path, monkeypatch):
    trained(tmp_path, "qwen3.5")
    monkeypatch.chdir(tmp_path)
    Path("specbench.toml").write_text(
        'version = 1\ntarget = "target"\ndrafter = "head"\ndraft-policy = "fixed:gamma=2"'
    )
    export = ("export", "specbench.toml", "--to")
    found = cli(*export, "vllm", "--checkpoint", "out").out
    assert f"vllm serve {tmp_path / 'out'}" in found
    assert '"method": "mtp"' in found
    assert "replace it by a path" not in found
    assert find_mtp_tensors(Path("out"), LAYERS) is not None
    cli(*export, "vllm", "--checkpoint", "out").refused(2, "The folder out is not empty")
    cli(*export, "vllm").refused(2, "--checkpoint FOLDER")
    cli(*export, "mlx-lm", "--checkpoint", "other").refused(2, "drafter mtp")
    cli(*export, "transformers", "--checkpoint", "other").refused(2, "model type qwen3_5_text")
    Path("specbench.toml").write_text(
        'version = 1\ntarget = "target"\ndrafter = "lookup"\ndraft-policy = "fixed"'
    )
    cli(*export, "vllm", "--checkpoint", "other").refused(2, "drafter lookup")
    assert not Path("other").exists()


def test_families_that_no_engine_reads_are_refused(tmp_path):
    target, head = save_tiny(tmp_path / "llama"), TrainingMetadata(kind="mtp")
    setting = Setting(Model(str(target)), parse_drafter("org/head"), parse_policy("fixed"), 2, head=head)
    for engine in map(load_engine, ("vllm", "sglang", "llama.cpp", "transformers")):
        message = refusal(in_checkpoint, engine, setting, tmp_path / "out", kind=UsageError)
        assert all(each in message for each in ("model type llama", *engine.mtp_types))
        assert {*engine.mtp_types} <= {*WRITTEN}


def test_a_checkpoint_is_written_only_of_what_fits(tmp_path):
    made, head = trained(tmp_path, "qwen3.5")
    settings = json.loads((head / "config.json").read_text())
    settings["transformer_layer_config"]["model_type"] = "llama"
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(settings))
    assert "is not of the class of the layers" in refusal(
        write, made, other, tmp_path / "out", kind=UsageError
    )
    built_in = parse_model("smollm2-135m")
    files = find_head(parse_model(str(head)))
    config = load_config(parse_model(str(made.folder)))
    message = refusal(write_mtp_checkpoint, files, built_in, config, tmp_path / "out", kind=UsageError)
    assert "is no safetensors checkpoint" in message
    assert not (tmp_path / "out").exists()


def test_files_that_do_not_change_are_linked(tmp_path):
    """A target of two files, of which one has its own MTP layer."""
    made, head = trained(tmp_path, "qwen3.5")
    whole = load_file(made.folder / "model.safetensors")
    own = {name: tensor for name, tensor in whole.items() if name.startswith("mtp.")}
    split = {
        "model-1.safetensors": whole.keys() - own.keys(),
        "model-2.safetensors": {*own, "model.norm.weight"},
    }
    split["model-1.safetensors"] -= {"model.norm.weight"}
    for name, names in split.items():
        save_file({each: whole[each] for each in names}, made.folder / name, {"format": "pt"})
    index = {each: name for name, names in split.items() for each in names}
    (made.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (made.folder / "model.safetensors").unlink()
    out = tmp_path / "out"
    write(made, head, out)
    same = [
        (made.folder / "model-1.safetensors").samefile(out / "model-00001-of-00002.safetensors"),
        (made.folder / "tokenizer.json").samefile(out / "tokenizer.json"),
    ]
    assert all(same)
    assert [*load_file(out / "model-00002-of-00002.safetensors")] == ["model.norm.weight"]
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, made.target.state_dict()[name]) for name, tensor in loaded.items())
