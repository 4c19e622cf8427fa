"""Heads that come with specbench: found by name, read with their hash checked, and drafting by default where they are
ahead."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pack_head
import pytest
import torch
from cli_runs import refusal
from head_files import eagle_tensors, speculators_settings, write_head
from safetensors.torch import load_file, save_file
from test_heads import PLAIN, tiny_target
from tiny import save_tiny

from specbench.base.errors import RunError, UsageError
from specbench.base.files import sha256
from specbench.cli import options
from specbench.generate import autoregressive_generate, speculative_generate
from specbench.models import training_metadata
from specbench.models.drafters import load_drafter
from specbench.models.heads import find_head, load_head
from specbench.models.load import load_config
from specbench.models.training_metadata import (
    PACKED_WEIGHTS,
    TRAINING_FILE,
    WEIGHTS,
    is_packaged,
    read_metadata,
)
from specbench.specs import models as specs
from specbench.specs.models import BUILTIN_MODELS, PACKAGED_HEADS, ModelSpec

ALIAS = "smollm2-135m-head"
LARGEST = 6_000_000
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def packaged(tmp_path, monkeypatch) -> Path:
    """A stand-in for the head, for a tiny target."""
    monkeypatch.setattr(training_metadata, "_PACKAGED", tmp_path / "packaged")
    folder = write_head(tmp_path / "packaged" / ALIAS, speculators_settings(), eagle_tensors())
    training = {"sha256": sha256(folder / WEIGHTS), "kind": "eagle"}
    (folder / TRAINING_FILE).write_text(json.dumps(training))
    return folder


def test_it_drafts(packaged):
    target = tiny_target()
    drafter = load_drafter(ALIAS, target, PLAIN)
    assert drafter.traits.name == f"{ALIAS} (float32)"
    found = speculative_generate([5, 9, 14], target, drafter, gamma=3, max_new_tokens=20)
    assert found.token_ids == autoregressive_generate([5, 9, 14], target, max_new_tokens=20).token_ids
    assert any(step.drafted for step in found.steps)


def test_its_best_measurement_says_what_is_expected_of_it(packaged):
    target = tiny_target()
    assert load_drafter(ALIAS, target, PLAIN).traits.prior.acceptance is None, "it was never measured"
    measured = [
        {"tokens": 1, "tokens_per_step": each, "accepted": [accepted], "categories": {}}
        for each, accepted in ((1.2, 0.1), (1.8, 0.4), (1.5, 0.3))
    ]
    facts = {
        **json.loads((packaged / TRAINING_FILE).read_text()),
        "data": {"tokens": 3},
        "seconds": 1.0,
        "measured": measured,
    }
    (packaged / TRAINING_FILE).write_text(json.dumps(facts))
    for drafter in (ALIAS, f"lookup+{ALIAS}"):
        assert load_drafter(drafter, target, PLAIN).traits.prior.acceptance == 0.4
    for useless in ([0.0], [1.0], []):
        measured[1]["accepted"] = useless
        (packaged / TRAINING_FILE).write_text(json.dumps(facts))
        assert load_drafter(ALIAS, target, PLAIN).traits.prior.acceptance is None


def test_weights_that_are_not_its_own_are_refused(packaged):
    whole = (packaged / WEIGHTS).read_bytes()
    (packaged / WEIGHTS).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    message = refusal(load_drafter, ALIAS, tiny_target(), PLAIN, kind=RunError)
    assert "are not those that its training.json describes" in message
    (packaged / TRAINING_FILE).write_text("{}")
    assert "is damaged" in refusal(load_drafter, ALIAS, tiny_target(), PLAIN, kind=RunError)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = find_head(ModelSpec("folder", str(folder)))
    assert files is not None
    return dict(load_head(files).tensors)


@pytest.fixture
def compact(tmp_path) -> Path:
    """A head whose matrices are in int8: one with a step too coarse to be rounded, the others with fine ones."""
    folder = write_head(tmp_path / "compact", speculators_settings(), eagle_tensors())
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in list(tensors.items()):
        if tensor.dim() == 2 and tensor.is_floating_point():
            scales = tensor.float().abs().amax(dim=1) / (5 if name == "fc.weight" else 127)
            tensors[name] = (tensor.float() / scales[:, None]).round().to(torch.int8)
            tensors[f"{name}_scale"] = scales
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    (folder / TRAINING_FILE).write_text(json.dumps({"sha256": sha256(folder / WEIGHTS)}))
    return folder


def test_packed_weights_are_those_of_the_head_but_for_the_step(compact, tmp_path):
    whole = tensors_of(compact)
    for bits, error in ((8, 0.0), (5, 4.001)):  # half a step of 8 old ones
        out = tmp_path / f"bits{bits}"
        pack_head.pack(compact, out, bits)
        assert {each.name for each in out.iterdir()} == {"config.json", PACKED_WEIGHTS, TRAINING_FILE}
        read, coarse = tensors_of(out), 0
        assert read.keys() == whole.keys()
        for name, tensor in whole.items():
            step = tensor.float().abs().amax(dim=-1, keepdim=True) / 127
            far = (read[name].float() - tensor.float()).abs()
            assert bool((far <= error * step + 1e-7).all()), name
            coarse += bool(far.any())
        assert torch.equal(read["fc.weight"], whole["fc.weight"])
        assert (coarse > 3) == (bits == 5)
    assert load_drafter(str(out), tiny_target(), PLAIN).traits.trees


def test_packed_weights_that_are_damaged_are_refused(compact):
    pack_head.pack(compact, compact, 8)
    file = compact / PACKED_WEIGHTS
    content = file.read_bytes()
    for wrong, said in (
        (content[:-9], "are damaged"),
        (b"no gzip", "are damaged"),
        (pack_head.packed(b"no tensors"), "are damaged"),
        (pack_head.zlib.compress(bytes(10_000_000), wbits=31), "they unpack to too much"),
    ):
        file.write_bytes(wrong)
        assert "are not those" in refusal(load_drafter, str(compact), tiny_target(), PLAIN, kind=RunError)
        (compact / TRAINING_FILE).write_text(json.dumps({"sha256": sha256(file)}))
        assert said in refusal(load_drafter, str(compact), tiny_target(), PLAIN, kind=RunError)


def test_where_it_is_missing_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(training_metadata, "_PACKAGED", tmp_path)
    assert "is not part of this specbench" in refusal(load_drafter, ALIAS, tiny_target(), kind=UsageError)
    assert "only drafts for smollm2-135m" in refusal(load_config, ALIAS, kind=UsageError)


def test_it_drafts_by_default_where_it_is_there_and_ahead(cli, packaged, tmp_path, monkeypatch):
    target = save_tiny(tmp_path / "tiny", layers=3)
    monkeypatch.setattr(specs, "PACKAGED_HEADS", {ALIAS: str(target)})
    monkeypatch.chdir(tmp_path)

    def drafter(*more: object) -> str:
        words = ("generate", "the thing", "--target", target, "--dtype", "float32", "-n", 8, "--json")
        return str(cli(*words, *more).json()["drafter"])

    assert drafter() == "lookup"
    monkeypatch.setattr(options, "HEADS_AHEAD", {str(target): f"lookup+{ALIAS}"})
    assert drafter() == f"lookup+{ALIAS} (int8)"
    assert drafter("--drafter", "ngram") == "ngram"
    (tmp_path / "specbench.toml").write_text('version = 1\ndrafter = "suffix"\n')
    assert drafter() == "suffix"
    (tmp_path / "specbench.toml").unlink()
    (packaged / TRAINING_FILE).unlink()
    assert drafter() == "lookup"


@pytest.mark.parametrize("alias", PACKAGED_HEADS)
def test_what_is_shipped_is_small_whole_and_attributed(alias):
    """Of the heads that are there."""
    if not is_packaged(alias):
        pytest.skip(f"{alias} is not there")
    folder = training_metadata.packaged_folder(alias)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= LARGEST
    training_metadata.check_weights(folder, alias)
    assert read_metadata(folder) is not None
    assert alias in (ROOT / "NOTICE").read_text(encoding="utf-8")


def test_every_head_is_for_a_built_in_model_and_ahead_of_it_alone():
    assert set(PACKAGED_HEADS.values()) <= set(BUILTIN_MODELS)
    assert set(options.HEADS_AHEAD) <= set(PACKAGED_HEADS.values())
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert all(re.search(rf"\b{alias}\b", notice) for alias in PACKAGED_HEADS)
