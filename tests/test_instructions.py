"""What an older processor's stand-in may use."""

from __future__ import annotations

import platform

import pytest
import torch

from specbench.base.machine import processor_name
from specbench.kernels import instructions, native
from specbench.kernels.instructions import has_bfloat16, has_vnni, is_allowed
from specbench.kernels.weights import can_pack


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        (None, {"avx512", "vnni", "bfloat16"}),
        ("ALL", {"avx512", "vnni", "bfloat16"}),
        ("AVX512_CORE_BF16", {"avx512", "vnni", "bfloat16"}),
        ("avx512_core_vnni", {"avx512", "vnni"}),
        ("AVX512_CORE", {"avx512"}),
        ("AVX2_VNNI", {"vnni"}),
        ("AVX2", set()),
    ],
)
@pytest.mark.parametrize("name", instructions._LIMITS)
def test_a_limit_of_onednn_holds_for_everything(monkeypatch, name, limit, left):
    for each in instructions._LIMITS:
        monkeypatch.delenv(each, raising=False)
    if limit is not None:
        monkeypatch.setenv(name, limit)
    assert {each for each in ("avx512", "vnni", "bfloat16") if is_allowed(each)} == left


def test_what_is_not_allowed_is_not_there(monkeypatch):
    monkeypatch.setattr(native, "_load", lambda: "it was not built")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert not has_vnni()
    assert not has_bfloat16()
    assert not can_pack(torch.bfloat16, "cpu")
    assert not can_pack(torch.float16, "cpu")


def test_what_is_allowed_has_to_be_there(monkeypatch):
    for each in instructions._LIMITS:
        monkeypatch.delenv(each, raising=False)
    for there in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda there=there: there)
        assert has_vnni() is there


@pytest.mark.skipif(platform.system() not in ("Linux", "Darwin"), reason="others tell it otherwise")
def test_the_processor_has_a_name():
    name = processor_name()
    assert name
    assert name == name.strip()
