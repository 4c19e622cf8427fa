"""Passes of fixed shapes: the static cache, the capture of passes, and drafts that nobody reads before the verdict."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from head_files import few_head, few_tokens
from test_zoo import zoo_model
from tiny import tiny_language_model, tiny_llama

import specbench.backends.torch.caches
from specbench.backends.torch.attention import fold_attention
from specbench.backends.torch.graph_forward import COMPILERS, GraphForward, compiled, cuda_capture
from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import RunError, UsageError
from specbench.decoding.protocols import ForwardOutput, ForwardRequest
from specbench.decoding.records import Step
from specbench.generate import speculative_generate
from specbench.models.drafters import load_drafter
from specbench.models.target import wrap_target
from specbench.policies import build_policy

CONTEXT = [5, 9, 14, 3, 8, 21, 2]


def repeated(run: Callable[[], ForwardOutput]) -> tuple[Callable[[], None], ForwardOutput]:
    """Stands in for a CUDA graph: does the same once more, with what the buffers hold then, into the same output."""
    CAPTURES.append(1)
    given = run()
    hidden = None if given.hidden is None else torch.full_like(given.hidden, float("nan"))
    output = ForwardOutput(torch.full_like(given.logits, float("nan")), hidden)

    def replay() -> None:
        for buffer, value in zip(output, run(), strict=True):
            if buffer is not None and value is not None:
                buffer.copy_(value)

    return replay, output


CAPTURES: list[int] = []


def static(model: Any, *, captured: bool = False) -> Scorer:
    scorer = Scorer(model, "static")
    if captured:
        CAPTURES.clear()
        assert isinstance(scorer.forward, GraphForward)
        scorer.forward._capture = repeated
    return scorer


def both(scorer: Scorer, other: Scorer, do: Callable[[Scorer], Any], close: float = 1e-4) -> None:
    """Two scorers do the same and give close logits, if any."""
    found, expected = do(scorer), do(other)
    if isinstance(found, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=close, atol=close / 10)


def assert_alike(scorer: Scorer, other: Scorer, close: float = 1e-4) -> None:
    """Both give the same logits in passes of several widths, with drafts rolled back in between."""
    context = list(CONTEXT)
    both(scorer, other, lambda each: each.begin())
    for width, kept in ((3, 1), (1, 1), (5, 0), (3, 3), (1, 0), (40, 2), (3, 2)):
        drafted = [(7 * i + width) % 20 for i in range(width)]
        given = (list(context), drafted)
        both(scorer, other, lambda each, given=given: each.logits(*given), close)
        context += [*drafted[:kept], width % 20]
        for each in (scorer, other):
            each.rollback(len(context) - 1)
            assert each.cache.length == len(context) - 1


@pytest.mark.parametrize(("captured", "fold"), [(False, False), (True, True)])
def test_its_passes_are_those_of_other_caches(fold, captured):
    model = tiny_llama()
    if fold:
        fold_attention(model)
    assert_alike(static(model, captured=captured), Scorer(model))
    if captured:
        assert 3 <= len(CAPTURES) <= 6, "one for each width, and none for the widest"


def test_the_result_of_a_captured_pass_stays_when_it_is_repeated():
    scorer = static(tiny_llama(), captured=True)
    scorer.begin()
    scorer.logits(CONTEXT)
    first = scorer.logits([*CONTEXT, 4])
    kept = first.clone()
    scorer.rollback(len(CONTEXT))
    second = scorer.logits([*CONTEXT, 9])
    assert not torch.equal(first, second)
    assert torch.equal(first, kept)


@pytest.mark.parametrize("captured", [False, True])
def test_it_grows_and_captures_anew(captured, monkeypatch):
    monkeypatch.setattr(specbench.backends.torch.caches, "INITIAL_CAPACITY", 8)
    model = tiny_llama()
    scorer, other = static(model, captured=captured), Scorer(model)
    both(scorer, other, lambda each: each.begin())
    context = list(CONTEXT)
    for i in range(30):
        both(scorer, other, lambda each: each.logits(context))
        context.append(i % 20)
    assert scorer.cache.capacity == 64  # type: ignore[attr-defined]
    if captured:
        assert len(CAPTURES) >= 3, "the buffers have moved"


def test_trees_are_verified_in_captured_passes():
    model = tiny_llama()
    scorer, other = static(model, captured=True), Scorer(model)
    assert scorer.takes_trees
    both(scorer, other, lambda each: each.begin())
    both(scorer, other, lambda each: each.logits(CONTEXT))
    both(scorer, other, lambda each: each.rollback(len(CONTEXT) - 1))
    tree = (CONTEXT, [3, 4, 6, 12], (-1, 0, 0, -1))
    both(scorer, other, lambda each: each.score(ForwardRequest(each, *tree)).logits)
    both(scorer, other, lambda each: each.rollback(len(CONTEXT) + 1, [3]))
    both(scorer, other, lambda each: each.logits([*CONTEXT, 12, 7]))


def test_models_it_cannot_hold_are_refused():
    with pytest.raises(UsageError, match="cannot hold layers of the kind"):
        Scorer(zoo_model("mistral"), "static")
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(UsageError, match="does not support this model"):
            Scorer(zoo_model("bloom").to(dtype), "static")


@pytest.mark.parametrize("kind", ["qwen3", "phi3", "mixtral"])
def test_families_of_models_give_the_same_in_it(kind):
    model = zoo_model(kind)
    assert_alike(static(model, captured=True), Scorer(model), close=1e-3)


# --- Whole outputs --------------------------------------------------------------------------------


def output(spec: str | None, rule: str, cache: Any = "static") -> tuple[list[int], Sequence[Step]]:
    language_model = tiny_language_model()
    target = wrap_target(language_model.model, language_model.tokenizer, cache=cache)
    drafter = None if spec is None else load_drafter(spec, target, cache=cache)
    found = speculative_generate(
        CONTEXT, target, drafter, policy=build_policy(rule), max_new_tokens=32, ignore_eos=True
    )
    return list(found.token_ids), found.steps


@pytest.fixture
def read_late(monkeypatch):
    """Draft as on a device that works on by itself."""
    monkeypatch.setattr(importlib.import_module("specbench.drafters.chain"), "_READ_LATE", ("cpu",))


@pytest.mark.parametrize(
    ("spec", "rule", "cache"),
    [
        ("self:layers=1", "svip", "dynamic"),
        ("self:int8", "auto", "static"),
        ("lookup+self:layers=1", "fixed:gamma=4", "static"),
    ],
)
def test_the_output_is_the_targets_own(spec, rule, cache, read_late):
    expected, _ = output(None, "fixed:gamma=1", "dynamic")
    found, steps = output(spec, rule, cache)
    assert found == expected
    assert any(step.drafted for step in steps)


@pytest.mark.parametrize("kind", ["eagle", "dflash", "medusa", "mtp", "pard"])
def test_heads_whose_drafts_are_read_late_leave_the_output_as_it_is(kind, read_late, tmp_path):
    target = wrap_target(few_tokens(), pack=False)
    head = few_head(tmp_path, kind, target)
    plain, drafted = (
        speculative_generate([1, 2, 3, 1, 2], target, drafter, gamma=3, max_new_tokens=40, ignore_eos=True)
        for drafter in (None, head)
    )
    assert plain.token_ids == drafted.token_ids


def test_drafts_read_late_are_the_same_drafts(read_late, monkeypatch):
    late = [step.drafted for step in output("self:layers=1", "fixed:gamma=4")[1]]
    monkeypatch.setattr(importlib.import_module("specbench.drafters.chain"), "_READ_LATE", ())
    assert [step.drafted for step in output("self:layers=1", "fixed:gamma=4")[1]] == late


def test_a_pass_that_cannot_be_captured_says_so(monkeypatch):
    class Stream:
        def wait_stream(self, _: Any) -> None: ...

    def fails(_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    for name, given in (("current_stream", Stream), ("Stream", Stream), ("stream", fails)):
        monkeypatch.setattr(torch.cuda, name, given)
    with pytest.raises(RunError, match=r"a CUDA graph: operation not permitted .* --cache dynamic"):
        cuda_capture(lambda: torch.zeros(1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("cache", ["static", "compiled"])
def test_cuda_graphs_give_what_single_operators_give(cache):
    model = tiny_llama().to("cuda")
    assert_alike(Scorer(model, cache), Scorer(model), close=1e-3)


class CountingCompiler:
    """A backend of ``torch.compile`` that counts what it is asked to compile, and runs it as traced."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, _inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def compiler(monkeypatch) -> CountingCompiler:
    torch._dynamo.reset()
    counting = CountingCompiler()
    monkeypatch.setitem(COMPILERS, "cpu", counting)
    return counting


def test_compiled_passes_are_those_of_other_caches(compiler):
    model = tiny_llama()
    assert_alike(Scorer(model, "compiled"), Scorer(model))
    assert compiler.graphs > 0


@pytest.mark.slow
def test_every_width_is_compiled_once(compiler):
    scorer = Scorer(tiny_llama(layers=1), "compiled")
    scorer.begin()
    scorer.logits(CONTEXT)
    scorer.rollback(len(CONTEXT) - 1)
    counts = []
    for width in range(10):  # torch recompiles eight times by itself
        scorer.logits(CONTEXT, [1] * width)
        scorer.rollback(len(CONTEXT) - 1)
        counts.append(compiler.graphs)
    context = [*CONTEXT, *range(12)]
    for end in range(len(CONTEXT), len(context)):
        scorer.logits(context[:end], rows=1)
    assert compiler.graphs == counts[-1], "a width was compiled again as the cache filled"
    met = "the limit of recompiling was met"
    assert all(later > earlier for earlier, later in itertools.pairwise(counts)), met


def test_what_cannot_be_compiled_is_refused(compiler, monkeypatch):
    def broken(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("no such compiler")

    monkeypatch.setitem(COMPILERS, "cpu", broken)
    scorer = Scorer(tiny_llama(), "compiled")
    scorer.begin()
    with pytest.raises(RunError, match=r"cannot be compiled here.*--cache"):
        scorer.logits(CONTEXT)


@pytest.mark.parametrize("missing", ["layers", "wrapped"])
def test_layers_that_cannot_be_replaced_are_refused(compiler, missing):
    model = tiny_llama()
    if missing == "layers":
        model.config.num_hidden_layers = 7
    else:
        model.model.layers[1].forward = model.model.layers[1].forward
    with pytest.raises(UsageError, match=r"were not found|layers are wrapped"):
        compiled(model, torch.device("cpu"))


def test_a_cpu_compiles_nothing():
    with pytest.raises(UsageError, match="not supported on the device cpu"):
        Scorer(tiny_llama(), "compiled")
