"""What the last start has packed is packed at once: the model is the same, whatever became of its files meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny

from specbench.backends.torch.kernels import ahead as packing
from specbench.backends.torch.kernels import linear
from specbench.backends.torch.kernels.ahead import PackedAhead
from specbench.backends.torch.kernels.linear import can_pack, pack_weight
from specbench.models import starts
from specbench.models.cache import cache_folder, clear_derived
from specbench.models.prepare import Target, prepare
from specbench.models.starts import Ahead
from specbench.options import ModelOptions
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import parse_model

pytestmark = pytest.mark.skipif(not can_pack(torch.float32, "cpu"), reason="no packed layers here")

FLOAT32 = ModelOptions(dtype="float32", device="cpu")
PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def _small_models_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(starts, "_WORTH_IT", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "m")


@pytest.fixture
def packed_here(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of weights that are packed where they are needed, and not ahead."""
    shapes: list[tuple[int, ...]] = []

    def noted(weight: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(weight.shape))
        return pack_weight(weight)

    monkeypatch.setattr(linear, "pack_weight", noted)
    return shapes


def packers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "PackedAhead" in repr(vars(thread).get("_target"))]


def begun(folder: Path, options: ModelOptions = FLOAT32) -> Ahead:
    """A start, when all is packed that will be packed ahead."""
    found = Ahead(parse_model(str(folder)), options.target)
    for thread in packers():
        thread.join(PATIENCE_S)
    return found


def started(folder: Path, options: ModelOptions = FLOAT32) -> Target:
    with begun(folder, options) as ahead:
        target, _ = prepare(parse_model(str(folder)), [parse_drafter("none")], options, ahead=ahead)
    return target


def logits(target: Target) -> torch.Tensor:
    scorer = target.scorer
    scorer.begin()
    return scorer.logits([1, 5, 9, 2, 7], rows=3).clone()


def record() -> Path:
    (path,) = (cache_folder() / "starts").iterdir()
    return path


def scaled(folder: Path, factor: float) -> None:
    """Write other weights in the place of a model's."""
    path = folder / "model.safetensors"
    weights = {name: weight * factor for name, weight in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})


def test_a_second_start_takes_what_was_packed_ahead(folder: Path, packed_here: list[tuple[int, ...]]) -> None:
    first = logits(started(folder))
    known = json.loads(record().read_text())
    assert "model.layers.0.mlp.gate_proj+up_proj" in known["places"]
    assert len(packed_here) >= len(known["places"])
    packed_here.clear()
    target = started(folder)
    assert not packed_here
    assert torch.equal(logits(target), first)
    assert target.packed
    saved = target.language_model.model.state_dict()
    assert all(
        torch.equal(saved[name], weight) for name, weight in load_file(folder / "model.safetensors").items()
    )


def test_what_is_not_packed_yet_is_packed_by_whoever_needs_it(
    folder: Path, packed_here: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = logits(started(folder))
    packed_here.clear()
    reached, let_go = threading.Event(), threading.Event()

    def slow(weight: torch.Tensor) -> torch.Tensor:
        reached.set()
        assert let_go.wait(PATIENCE_S)
        return pack_weight(weight)

    monkeypatch.setattr(packing, "pack_weight", slow)
    take = PackedAhead.take

    def taken(self: PackedAhead, place: str) -> torch.Tensor | None:
        if place == last:
            let_go.set()
        return take(self, place)

    *_, last = json.loads(record().read_text())["places"]
    monkeypatch.setattr(PackedAhead, "take", taken)
    with Ahead(parse_model(str(folder)), FLOAT32.target) as ahead:
        assert reached.wait(PATIENCE_S)
        target, _ = prepare(parse_model(str(folder)), [parse_drafter("none")], FLOAT32, ahead=ahead)
    assert len(packed_here) == len(json.loads(record().read_text())["places"]) - 1
    assert torch.equal(logits(target), first)


def test_other_weights_are_packed_anew(folder: Path, packed_here: list[tuple[int, ...]]) -> None:
    first = logits(started(folder))
    scaled(folder, 0.5)
    other = logits(started(folder))
    assert not torch.equal(other, first)
    packed_here.clear()
    assert torch.equal(logits(started(folder)), other)
    assert not packed_here


def test_files_that_change_while_they_are_packed_are_packed_anew(folder: Path) -> None:
    started(folder)
    with begun(folder) as ahead:
        scaled(folder, 0.5)
        target, _ = prepare(parse_model(str(folder)), [parse_drafter("none")], FLOAT32, ahead=ahead)
    found = logits(target)
    clear_derived()
    assert torch.equal(found, logits(started(folder)))


def tampered(change: Callable[[dict[str, Any]], object]) -> None:
    known = json.loads(record().read_text())
    change(known)
    record().write_text(json.dumps(known))


@pytest.mark.parametrize(
    "change",
    [
        lambda known: known.clear(),
        lambda known: known.update(files=[]),
        lambda known: known.update(files=[["a", 1, 2]]),
        lambda known: known.update(files=[["\0", 1, 2, 3]]),
        lambda known: known.update(nbytes="1"),
        lambda known: known.update(places={}),
        lambda known: known.update(places=[1]),
        lambda known: known.update(places=[]),
        lambda known: known["places"].insert(1, "model.layers.0.mlp.another_proj"),
        lambda known: known["places"].append(""),
        lambda known: known["places"].append("model.layers.0.self_attn.q_proj+o_proj"),
        lambda known: known.update(digest="another"),
    ],
)
def test_a_record_that_does_not_fit_changes_nothing(
    folder: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    first = logits(started(folder))
    tampered(change)
    assert torch.equal(logits(started(folder)), first)
    assert not packers()


def test_without_room_nothing_is_packed_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = logits(started(folder))
    nbytes = json.loads(record().read_text())["nbytes"]
    monkeypatch.setattr(starts, "available_memory", lambda: 3 * nbytes - 1)
    with Ahead(parse_model(str(folder)), FLOAT32.target) as ahead:
        assert not packers()
        target, _ = prepare(parse_model(str(folder)), [parse_drafter("none")], FLOAT32, ahead=ahead)
    assert torch.equal(logits(target), first)


def test_other_options_are_another_start(folder: Path) -> None:
    started(folder)
    with begun(folder, ModelOptions(dtype="bfloat16", device="cpu")) as ahead:
        assert ahead._packer is None


def test_a_dtype_that_was_not_settled_is_not_packed_ahead(folder: Path) -> None:
    started(folder, ModelOptions(device="cpu"))
    assert not (cache_folder() / "starts").exists()


def test_a_start_that_fails_leaves_no_thread(folder: Path) -> None:
    started(folder)

    def fail() -> None:
        with Ahead(parse_model(str(folder)), FLOAT32.target):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not packers()
