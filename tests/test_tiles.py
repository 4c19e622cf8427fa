"""Products by tiles (AMX), emulated (emulated_tiles.h): they have the bits of products by vectors."""

from __future__ import annotations

import ctypes
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_native import BY_GROUPS, CONTEXT, LAYERS, rounded_target
from test_sanitizers import compiled

from specbench.backends.torch.kernels import native
from specbench.decoding.protocols import ForwardRequest

SOURCE = Path(native.__file__).with_name("native.c")
EMULATION = Path(__file__).with_name("emulated_tiles.h")
EMULATED = f'-DSPECBENCH_EMULATE_TILES="{EMULATION}"'

pytestmark = pytest.mark.skipif(
    not native.is_available() or native.loaded().highest < 2, reason="no native library, or no AVX-512"
)


@pytest.fixture(scope="module", params=["in C", pytest.param("trapped", marks=pytest.mark.slow)])
def tiles(request, tmp_path_factory) -> Any:
    """The library with tiles: in C, or with the instructions themselves, which are emulated as they are refused."""
    if request.param == "trapped" and "amx_tile" in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor refuses no tiles")
    library = tmp_path_factory.mktemp("tiles") / "native.so"
    options = ["-DTRAP_TILES", "-O3"] if request.param == "trapped" else ["-O2"]
    reason = compiled(SOURCE, library, "-shared", "-fPIC", "-fno-strict-aliasing", EMULATED, *options)
    if reason is not None:
        pytest.skip(f"no compiler: {reason[:200]}")
    loaded = native._load(str(library))
    assert not isinstance(loaded, str), loaded
    return loaded


def by_both(monkeypatch: pytest.MonkeyPatch, tiles: Any, made: Any) -> tuple[Any, Any]:
    """What a function returns with this processor's library, and with tiles."""
    own = made()
    monkeypatch.setattr(native, "loaded", lambda: tiles)
    found = made()
    monkeypatch.undo()
    return own, found


@pytest.mark.parametrize("form", [*LAYERS, *BY_GROUPS])
def test_products_have_the_same_bits(form, tiles, monkeypatch):
    choice = random.Random(0)
    for _ in range(40):
        outputs, inputs = choice.randint(1, 100), choice.choice((32, 512, 544, choice.randint(1, 1300)))
        weight, bias = torch.randn(outputs, inputs), choice.choice((None, torch.randn(outputs)))
        panels = LAYERS[form](weight, None).panels if form in LAYERS else BY_GROUPS[form](weight)
        x = torch.randn(choice.choice((2, 16, 17, 128, 257, choice.randint(1, 150))), inputs)
        own, found = by_both(
            monkeypatch, tiles, lambda panels=panels, x=x, bias=bias: panels.product(x, bias)
        )
        assert torch.equal(own, found)


@pytest.mark.parametrize("bits", [8, 4])
def test_passes_have_the_same_bits(bits, tiles, monkeypatch):
    scorer = rounded_target("Qwen3", bits).scorer

    def logits() -> list[torch.Tensor]:
        scorer.begin()
        ends = (100, 101, 106, 123, len(CONTEXT))
        return [scorer.score(ForwardRequest(scorer, CONTEXT[:end], rows=5)).logits for end in ends]

    own, found = by_both(monkeypatch, tiles, logits)
    assert all(map(torch.equal, own, found))


def anew(tiles: Any, path: Path) -> Any:
    """The same library, which has tried nothing yet."""
    shutil.copy(tiles.library._name, path)
    loaded = native._load(str(path))
    assert not isinstance(loaded, str)
    return loaded


def test_tiles_whose_bits_differ_are_not_used(tiles, monkeypatch, tmp_path):
    panels, x = native.Panels.quantize_int4(torch.randn(64, 64)), torch.randn(4, 64)
    expected, library = panels.product(x), anew(tiles, tmp_path / "wrong.so")
    monkeypatch.setattr(native, "loaded", lambda: library)
    ctypes.c_int.in_dll(library.library, "wrong_tiles").value = 1
    assert native.tiles_of(4) == "no, their bits differ"
    assert torch.equal(panels.product(x), expected)
    ctypes.c_int.in_dll(library.library, "wrong_tiles").value = 0
    assert native.tiles_of(8) == "from 2 tokens on"


@pytest.mark.parametrize("limit", ["AVX512_CORE_BF16", "AVX512_CORE_AMX"])
def test_a_limit_of_onednn_holds_for_tiles(limit, tiles, monkeypatch, tmp_path):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    library = anew(tiles, tmp_path / "limited.so")
    monkeypatch.setattr(native, "loaded", lambda: library)
    assert native.tiles_of(8) == ("from 2 tokens on" if "AMX" in limit else "no, there are none")
