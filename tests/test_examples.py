"""The examples in the docstrings of everything that `specbench` exports, run with the built-in model.

Each may use the exported names, and the objects that the others make: `target`, `drafter`, `result`, `results`.
"""

from __future__ import annotations

import doctest
import inspect

import pytest
import torch
from stored_runs import write_run
from transformers import LlamaConfig, LlamaForCausalLM

import specbench
from specbench.decoding.sampling import Randomness

EXPORTED = [
    name for name in specbench.__all__ if inspect.isroutine(getattr(specbench, name)) or name[0].isupper()
]
ERRORS = {"RunError", "SpecbenchError", "UsageError"}


@pytest.fixture(scope="module")
def names(tmp_path_factory, small_pages):
    target = specbench.load_target("smollm2-135m")
    drafter = specbench.load_drafter("lookup", target)
    run_folder = write_run(tmp_path_factory.mktemp("run"))
    return {
        **{name: getattr(specbench, name) for name in specbench.__all__},
        **{
            "torch": torch,
            "LlamaConfig": LlamaConfig,
            "LlamaForCausalLM": LlamaForCausalLM,
            "Randomness": Randomness,
        },
        "target": target,
        "drafter": drafter,
        "result": specbench.speculative_generate(
            "Count from 1 to 9.", target, drafter, max_new_tokens=16, ignore_eos=True
        ),
        "run_folder": run_folder,
        "folder": run_folder.parent,
        "results": specbench.load_results(run_folder),
    }


@pytest.mark.real
@pytest.mark.parametrize("name", sorted({*EXPORTED} - ERRORS))
def test_the_example_is_right(names, name):
    described = getattr(specbench, name)
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(described) or "", dict(names), name, None, None)
    assert test.examples, f"{name} has no example"
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    assert runner.run(test, out=said.append).failed == 0, "".join(said)
