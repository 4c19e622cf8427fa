"""The cache folder: layers that are packed or rounded once, what is bounded, and what is cleared."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny

from specbench.base.cache import cache_folder
from specbench.kernels import native, weights
from specbench.kernels.weights import Int8Weight, int8_weight, quantize_int8
from specbench.models import kept_layers as module
from specbench.models.drafters import load_drafter
from specbench.models.kept_layers import kept_layers
from specbench.models.load import LanguageModel, load_model
from specbench.models.target import load_target
from specbench.options import LoadOptions

CPU = LoadOptions(device="cpu")
INT8 = LoadOptions(dtype="int8", device="cpu")
TEXT = torch.arange(24)[None]


needs_native = pytest.mark.skipif(not native.is_available(), reason="no native library here")


@pytest.fixture(autouse=True)
def _small_models_too(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_WORTH_KEEPING", 0)


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_tiny(tmp_path / "m", dtype=torch.bfloat16)


@pytest.fixture
def roundings(monkeypatch) -> list[torch.Size]:
    """The shapes of all weights that are rounded."""
    done: list[torch.Size] = []

    def counted(weight: torch.Tensor) -> Int8Weight:
        done.append(weight.shape)
        return quantize_int8(weight)

    monkeypatch.setattr(weights, "quantize_int8", counted)
    in_panels = native.Panels.quantize_int4
    monkeypatch.setattr(
        native.Panels, "quantize_int4", lambda weight: done.append(weight.shape) or in_panels(weight)
    )
    return done


def entries() -> list[Path]:
    kept = cache_folder() / "layers"
    return sorted(kept.iterdir()) if kept.exists() else []


def int8_logits(folder: Path, options: LoadOptions = INT8) -> torch.Tensor:
    model: Any = load_target(str(folder), options).scorer.model
    with torch.inference_mode():
        found: torch.Tensor = model(TEXT).logits
    return found


ROUNDED = ["int8", pytest.param("int4", marks=needs_native)]


@pytest.mark.parametrize("kind", ROUNDED)
def test_a_second_start_rounds_nothing_and_computes_the_same(folder, roundings, kind):
    options = LoadOptions(dtype=kind, device="cpu")
    first = int8_logits(folder, options)
    made = len(roundings)
    assert made == 2 * 4 + 1  # qkv, output, gate and up, down; the head
    assert len(entries()) == 1
    again = int8_logits(folder, options)
    assert len(roundings) == made
    assert torch.equal(first, again)


@pytest.mark.parametrize("kind", ROUNDED)
def test_a_target_and_its_drafters_share_what_is_kept(folder, roundings, kind):
    options = LoadOptions(dtype=kind, device="cpu")
    load_target(str(folder), options)
    made = len(roundings)
    target = load_target(str(folder), CPU)
    for drafter in (f"self:{kind}", str(folder)):
        load_drafter(drafter, target, options)
        assert len(roundings) == made, drafter
    kept = entries()
    load_drafter(f"self:{kind},layers=1", target)  # a form of some layers is not kept
    assert len(roundings) > made
    assert len(entries()) == len(kept)


@pytest.mark.skipif(
    not native.is_available() or native.loaded().level < 3, reason="bfloat16 is not packed in 12 bits here"
)
def test_packed_layers_are_kept(folder, monkeypatch):
    made: list[int] = []
    shorten = native.Panels.shorten_bfloat16

    def counted(weight: torch.Tensor) -> native.Panels | None:
        made.append(len(weight))
        return shorten(weight)

    monkeypatch.setattr(native.Panels, "shorten_bfloat16", counted)
    bfloat16 = LoadOptions(dtype="bfloat16", device="cpu")
    first = int8_logits(folder, bfloat16)
    count = len(made)
    assert count > 0
    target = load_target(str(folder), bfloat16)
    assert len(made) == count
    model: Any = target.scorer.model
    assert torch.equal(model.lm_head.weight, load_file(folder / "model.safetensors")["lm_head.weight"])
    assert torch.equal(int8_logits(folder, bfloat16), first)
    load_drafter(str(folder), target, bfloat16)
    assert len(made) == count
    assert len(entries()) == 1


@needs_native
@pytest.mark.parametrize("part", ["sizes", "scales", "panels"])
def test_kept_layers_of_another_form_are_made_again(folder, part, roundings, monkeypatch):
    """Files that are whole, as another version has made them."""
    if part == "scales":
        monkeypatch.setattr(native, "_load", lambda: "it was not built")
    expected = int8_logits(folder)
    made, (entry,) = len(roundings), entries()
    stored = load_file(entry)
    name = next(name for name in stored if "lm_head" in name and name.endswith(part))
    stored[name] = torch.full_like(stored[name], 24) if part == "sizes" else stored[name][:-1].clone()
    save_file(stored, entry)
    target = load_target(str(folder), INT8)
    assert len(target.language_model.notes) == 1
    assert made < len(roundings)
    assert entries() == []
    assert torch.equal(int8_logits(folder), expected)
    assert len(entries()) == 1


def test_a_cut_head_is_another_entry(folder, roundings):
    def of(rows: tuple[int, ...] | None) -> LanguageModel:
        model = load_model(str(folder), CPU)
        model.head_rows = rows
        return model

    for number, rows in enumerate([None, (1, 2), (1, 3)], 1):
        with kept_layers(of(rows), "int8") as layers:
            assert layers is not None
            assert layers.find("lm_head") is None
            layers.save("lm_head", int8_weight(torch.ones(2, 8)))
        assert len(entries()) == number
    with kept_layers(of((1, 2)), "int8") as layers:
        assert layers is not None
        assert layers.find("lm_head") is not None
        assert layers.find("another") is None


HARMS: dict[str, Any] = {
    "cut": lambda entry: entry.write_bytes(entry.read_bytes()[:-100]),
    "no header": lambda entry: entry.write_text("[" * 100_000),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_damaged_is_made_anew_with_a_sentence(folder, harm, roundings):
    expected = int8_logits(folder)
    (entry,) = entries()
    HARMS[harm](entry)
    made = len(roundings)
    target = load_target(str(folder), INT8)
    assert len(roundings) == 2 * made
    assert "damaged" in str(target.language_model.notes)
    assert torch.equal(int8_logits(folder), expected)
    assert len(roundings) == 2 * made
    assert entries() == [entry]


def test_files_that_have_changed_and_another_version_make_it_anew(folder, roundings, monkeypatch):
    int8_logits(folder)
    made, (old,) = len(roundings), entries()
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] = weights["lm_head.weight"] * 2  # of one size and header
    state = path.stat()
    save_file(weights, path, metadata={"format": "pt"})
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    target = load_target(str(folder), INT8)
    assert len(roundings) == 2 * made
    assert "other model files" in str(target.language_model.notes)
    (new,) = entries()
    assert new != old
    for version in ("another", module.__version__):  # which leaves the entry alone
        monkeypatch.setattr(module, "__version__", version)
        int8_logits(folder)
        assert len(roundings) == 3 * made
    assert len(entries()) == 2


def test_what_was_not_used_for_longest_goes_first(tmp_path, monkeypatch):
    folders = [save_tiny(tmp_path / name, seed=i) for i, name in enumerate("abcd")]
    kept = []
    for number, each in enumerate(folders[:3]):
        load_target(str(each), INT8)
        (new,) = set(entries()) - set(kept)
        kept.append(new)
        os.utime(new, (number, number))
    load_target(str(folders[0]), INT8)  # is used again
    abandoned = cache_folder() / "layers" / ".abandoned"
    abandoned.write_text("")
    os.utime(abandoned, (0, 0))
    monkeypatch.setattr(module, "MOST_BYTES", int(2.5 * kept[0].stat().st_size))
    load_target(str(folders[3]), INT8)
    left = set(entries())
    assert {kept[1], kept[2], abandoned}.isdisjoint(left)
    assert kept[0] in left
    assert len(left) == 2


@pytest.mark.parametrize("problem", ["a file", "full"])
def test_without_room_for_it_a_model_starts_as_before(folder, monkeypatch, problem):
    expected = int8_logits(folder)
    shutil.rmtree(cache_folder())
    if problem == "a file":
        cache_folder().write_text("")
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    target = load_target(str(folder), INT8)
    assert target.dtype == "int8"
    (note,) = target.language_model.notes
    assert (
        f"could not be kept in the cache folder ({'Not a dir' if problem == 'a file' else 'No space'}" in note
    )
    assert torch.equal(int8_logits(folder), expected)
    assert problem == "a file" or entries() == []


def test_a_start_that_fails_leaves_nothing(folder):
    def interrupted() -> None:
        with kept_layers(load_model(str(folder), CPU), "int8") as layers:
            assert layers is not None
            layers.save("x", int8_weight(torch.ones(2, 2)))
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        interrupted()
    assert entries() == []


def test_small_models_and_those_of_no_file_keep_nothing(folder, monkeypatch):
    model = load_model(str(folder), CPU)
    model.files = None
    with kept_layers(model, "int8") as layers:
        assert layers is None
    monkeypatch.setattr(module, "_WORTH_KEEPING", 1 << 25)
    load_target(str(folder), INT8)
    assert entries() == []
