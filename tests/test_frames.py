"""Few frames lie between a generation and a pass of its models, and docs/design.md names them."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
from test_hooks import CONTEXT, plain_model

import specbench
from specbench.generate import speculative_generate
from specbench.generate_many import speculative_generate_many
from specbench.kernels import native
from specbench.models.drafters import load_drafter
from specbench.models.target import wrap_target

PACKAGE = str(Path(specbench.__file__).parent)
NAMED = (Path(__file__).parents[1] / "docs" / "design.md").read_text(encoding="utf-8")


def frames() -> list[str]:
    """The package's functions that are running, the outermost first."""
    found, frame = [], sys._getframe()
    while frame := frame.f_back:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_qualname)
    return found[::-1]


@pytest.mark.smoke
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("batch", [False, True])
def test_eight_at_most(pack, batch, monkeypatch):
    monkeypatch.setattr(native, "most_rows", lambda dtype: 8)  # prompts are not native, and steps are
    target = wrap_target(plain_model("Llama"), pack=pack)
    drafter = load_drafter("self:layers=1", target)
    seen: list[list[str]] = []
    for kind, name in ((type(target.language_model.model), "forward"), (native.DecoderStack, "__call__")):
        whole = getattr(kind, name)

        @functools.wraps(whole)
        def probe(*given, whole=whole, **more):
            seen.append(frames())
            return whole(*given, **more)

        monkeypatch.setattr(kind, name, probe)
    options = {"gamma": 3, "max_new_tokens": 8, "ignore_eos": True}
    if batch:
        runs = speculative_generate_many([CONTEXT, CONTEXT[:3]], target, drafter, **options)
        seen.clear()  # of trials
        runs.results()
    else:
        speculative_generate(CONTEXT, target, drafter, **options)
    assert max(map(len, seen)) <= 8, max(seen, key=len)
    assert {name for each in seen for name in each if f"`{name}`" not in NAMED} == set()
