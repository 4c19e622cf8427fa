"""The drafter that commands take where none is named."""

from __future__ import annotations

import pytest

from specbench import kernels
from specbench.cli.options import DEFAULT_TARGET
from specbench.models import devices
from specbench.models.default import default_drafter
from specbench.options import ModelOptions
from specbench.recipe import Recipe
from specbench.specs.models import parse_model


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("target", "native_passes", "options", "expected"),
    [
        (DEFAULT_TARGET, True, ModelOptions(device="cpu"), "lookup+self:int4"),
        (DEFAULT_TARGET, True, ModelOptions(device="cpu", dtype="float32"), "lookup+self:int4"),
        (DEFAULT_TARGET, True, ModelOptions(device="cpu", dtype="int8"), "lookup"),
        (DEFAULT_TARGET, True, ModelOptions(device="no device"), "lookup"),
        (DEFAULT_TARGET, True, ModelOptions(device="auto"), "lookup"),
        (DEFAULT_TARGET, False, ModelOptions(device="cpu"), "lookup"),
        ("org/name", True, ModelOptions(device="cpu"), "lookup"),
    ],
)
def test_the_built_in_model_drafts_for_itself_where_int4_is_fast(
    monkeypatch, target, native_passes, options, expected
):
    """The device "auto" is a GPU here."""
    monkeypatch.setattr(kernels, "is_available", lambda: native_passes)
    monkeypatch.setattr(devices, "_has_mps", lambda: True)
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: False)
    assert str(default_drafter(Recipe(parse_model(target), models=options))) == expected


@pytest.mark.real
def test_commands_take_it_where_none_is_named(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    usual = str(default_drafter(Recipe(parse_model(DEFAULT_TARGET))))

    def drafter(*more: object) -> str:
        return str(cli("generate", "Count to five.", "-n", 4, "--json", *more).json()["drafter"])

    assert drafter() == usual
    assert drafter("--drafter", "ngram") == "ngram"
