"""Which dtype a checkpoint is decoded in where none is asked for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tiny import save_tiny, tiny_llama

from specbench.backends.torch.dtype_timing import sample_in, time_samples
from specbench.backends.torch.kernels import native
from specbench.models import dtypes, load
from specbench.models.dtypes import DtypeChoice, decide, dtype_key, exact_dtypes
from specbench.models.load import load_model
from specbench.options import LoadOptions

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
AUTO = LoadOptions(device="cpu")


@pytest.mark.parametrize(
    ("stored", "exact"),
    [
        ((F32,), (F32,)),
        ((BF16,), (BF16, F32)),
        ((F16, torch.int64), (F16, F32)),
        ((F16, BF16), (F32,)),
        ((F32, BF16), (F32,)),
        ((torch.float64,), ()),
        ((BF16, torch.float8_e4m3fn), ()),
        ((), ()),
    ],
)
def test_dtypes_that_hold_every_value(stored, exact):
    assert exact_dtypes(Counter(stored)) == exact


def rounds(ratio: float, disturbed: int = 0) -> list[tuple[float, float]]:
    """Times of two ways, the first so many times as long as the second; in some rounds the second took ten times."""
    times = [(ratio * (1 + 0.001 * i), 1 + 0.001 * i) for i in range(15)]
    return [(one, 10 * other if i < disturbed else other) for i, (one, other) in enumerate(times)]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        (rounds(1.3), "float32"),
        (rounds(1.3, disturbed=3), "float32"),
        (rounds(1.3, disturbed=4), None),
        (rounds(1.02), "bfloat16"),
        (rounds(0.5), "bfloat16"),
        (rounds(0.5, disturbed=7), "bfloat16"),
        ([(1.0, 0.8), (1.0, 1.2)] * 7 + [(1.0, 1.0)], None),
    ],
)
def test_only_what_is_sure_is_chosen(times, chosen):
    choice = decide("m", BF16, F32, times)
    assert (choice and choice.dtype) == chosen
    if choice is not None:
        assert choice.low <= choice.speedup <= choice.high
        assert {choice.dtype, choice.other} == {"bfloat16", "float32"}
        assert choice.dtype in choice.sentence


def test_a_choice_holds_for_what_it_was_measured_with(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    key = dtype_key("0" * 64)
    assert key == dtype_key("0" * 64)
    assert key != dtype_key("1" * 64)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert key != dtype_key("0" * 64)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert key == dtype_key("0" * 64)
    monkeypatch.setattr(native, "_load", lambda: "it has gone")
    assert key != dtype_key("0" * 64)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_sample_computes_what_the_model_does(dtype):
    model: Any = tiny_llama(layers=3, dtype=BF16)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    sample: Any = sample_in(model, dtype)
    assert sample.dtype == dtype
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        found, expected = sample(ids).logits.float(), model(ids).logits.float()[..., :64]
    assert found.shape == expected.shape
    assert (found - expected).norm() < 0.1 * expected.norm()
    after = model.state_dict()
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def test_samples_are_timed_in_turn():
    model = tiny_llama(dtype=BF16)
    times = time_samples({dtype: sample_in(model, dtype) for dtype in (BF16, F32)}, 4, 60.0)
    assert len(times) == 4
    assert [next(iter(each)) for each in times] == [BF16, F32, BF16, F32]
    assert all(seconds > 0 for each in times for seconds in each.values())


def test_what_takes_too_long_is_given_up(monkeypatch):
    model = tiny_llama(dtype=BF16)
    assert time_samples({BF16: sample_in(model, BF16)}, 4, 0.0) == []
    monkeypatch.setattr(dtypes, "_WORTH_MEASURING", 0)
    monkeypatch.setattr(dtypes, "_PATIENCE_S", 0.0)
    assert dtypes.measure_dtypes(model, "m", BF16, F32) is None


class Machine:
    """Stands in for measuring."""

    def __init__(self, gain: float | None) -> None:
        self.gain, self.asked = gain, 0

    def __call__(self, _: Any, name: str, usual: torch.dtype, other: torch.dtype) -> DtypeChoice | None:
        self.asked += 1
        return None if self.gain is None else decide(name, usual, other, [(self.gain, 1.0)] * 15)


@pytest.fixture
def machine(monkeypatch, tmp_path) -> Machine:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "has_bfloat16", lambda: True)
    stands_in = Machine(2.0)
    monkeypatch.setattr(load, "measure_dtypes", stands_in)
    return stands_in


def test_what_is_quickest_is_loaded_and_kept(machine, tmp_path):
    folder = str(save_tiny(tmp_path / "m", dtype=BF16))
    assert load_model(folder, AUTO, tokenizer=False).dtype == "bfloat16"  # nobody asked to measure
    assert machine.asked == 0
    loaded = load_model(folder, AUTO, measure=True)
    assert (loaded.dtype, loaded.model.dtype, machine.asked) == ("float32", F32, 1)
    assert loaded.tokenizer is not None
    assert loaded.dtype_choice is not None
    assert loaded.notes == [loaded.dtype_choice.sentence]
    again = load_model(folder, AUTO, tokenizer=False)
    assert (again.dtype, again.notes, machine.asked) == ("float32", [], 1)
    assert again.dtype_choice == loaded.dtype_choice
    assert load_model(folder, LoadOptions(dtype="bfloat16", device="cpu"), measure=True).dtype == "bfloat16"
    assert load_model(folder, LoadOptions(dtype="int8", device="cpu"), measure=True).dtype_choice is None


def test_a_damaged_choice_is_measured_again(machine, tmp_path):
    folder = str(save_tiny(tmp_path / "m", dtype=BF16))
    load_model(folder, AUTO, measure=True)
    (kept,) = (tmp_path / "cache" / "dtypes").iterdir()
    for text in ("{", kept.read_text().replace('"dtype": "float32"', '"dtype": "int8"')):
        kept.write_text(text)
        assert load_model(folder, AUTO, measure=True).dtype == "float32"
    assert machine.asked == 3


@pytest.mark.parametrize(("gain", "kept"), [(None, 0), (0.5, 1)])
def test_the_usual_dtype_stays_where_nothing_else_is_sure(machine, tmp_path, gain, kept):
    machine.gain = gain
    folder = str(save_tiny(tmp_path / "m", dtype=BF16))
    assert load_model(folder, AUTO, measure=True).dtype == "bfloat16"
    found = tmp_path / "cache" / "dtypes"
    assert len(list(found.iterdir()) if found.exists() else []) == kept


def test_a_checkpoint_in_float32_has_no_choice(machine, tmp_path):
    folder = str(save_tiny(tmp_path / "m"))
    assert load_model(folder, AUTO, measure=True).dtype == "float32"
    assert machine.asked == 0


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(machine, tmp_path):
    (tmp_path / "cache").write_text("a file")
    folder = str(save_tiny(tmp_path / "m", dtype=BF16))
    for asked in (1, 2):
        assert load_model(folder, AUTO, measure=True).dtype == "float32"
        assert machine.asked == asked


def test_small_models_are_not_measured(monkeypatch):
    monkeypatch.setattr(dtypes, "time_samples", lambda *_: pytest.fail("was timed"))
    assert dtypes.measure_dtypes(tiny_llama(dtype=BF16), "m", BF16, F32) is None


def test_a_model_is_measured_by_its_passes(monkeypatch):
    monkeypatch.setattr(dtypes, "_WORTH_MEASURING", 0)
    monkeypatch.setattr(dtypes, "time_samples", lambda samples, n, _: [{d: d.itemsize for d in samples}] * n)
    choice = dtypes.measure_dtypes(tiny_llama(dtype=BF16), "m", F32, BF16)
    assert choice == DtypeChoice("m", "bfloat16", "float32", 2.0, 2.0, 2.0)
