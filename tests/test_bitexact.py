"""Bit-exact passes: had where they are claimed, refused where they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_zoo import zoo_model
from tiny import tiny_llama
from transformers import Lfm2Config, LlamaConfig, LlamaForCausalLM

from specbench.backends.torch import attention, forward, trials
from specbench.backends.torch.attention import KEY_BLOCK, LONGEST_PASS
from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import UsageError
from specbench.decoding.protocols import ForwardRequest
from specbench.generate import speculative_generate
from specbench.kernels import linear, native
from specbench.kernels.weights import can_pack
from specbench.models.drafters import load_drafter
from specbench.models.load import wrap_model
from specbench.models.target import Target, default_cache, prepare_target, wrap_target
from specbench.options import QuantizedName

needs_packing = pytest.mark.skipif(not can_pack(torch.float32, "cpu"), reason="no packed layers here")


def grouped_llama(groups: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """A random Llama with so many query heads per key/value head, of which there are two."""
    config = LlamaConfig(
        vocab_size=100, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2 * groups,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(groups)
        return LlamaForCausalLM(config).to(dtype).eval()


def rounded_target(model: Any, rounded: QuantizedName = "int8") -> Target:
    """The model in int8 or int4, as ``load_target`` makes a target of it."""
    loaded = wrap_model(model, None, "tiny", quantize=rounded)
    return prepare_target(loaded, default_cache(model.config, quantized=True))


def scorer_of(model: Any, cache: Any = "preallocated", *, pack: bool = True) -> Scorer:
    return wrap_target(model, name="tiny", cache=cache, pack=pack).scorer


@pytest.fixture(params=["native", "operators"])
def way(request, monkeypatch) -> str:
    """How targets of the Llama family make short passes, where there is a native library."""
    if request.param == "operators":
        monkeypatch.setattr(trials, "_native_is_right", lambda *_: False)
    return str(request.param)


def at_the_edge(own: Any, query: Any, key: Any, value: Any, masks: Any, scale: Any) -> Any:
    return own(query, key, value, masks, scale) * (1 + 1e-6 * (masks is None))


def of_five_rows(own: Any, layer: Any, x: torch.Tensor) -> Any:
    return own(layer, x) * (1 + 1e-6 * (x.shape[-2] == 5))


def with_states(own: Any, way: Any, ids: Any, count: int, layers: Any, *others: Any) -> Any:
    made = own(way, ids, count, layers, *others)
    return made._replace(logits=made.logits * (1 + 1e-6 * bool(layers)))


@needs_packing
@pytest.mark.parametrize(
    ("way", "owner", "name", "shaky", "told"),
    [
        ("operators", attention, "attend", at_the_edge, "of one"),
        ("operators", linear.PackedLinear, "forward", of_five_rows, "5 tokens"),
        ("operators", forward.HFForward, "run", with_states, "hidden states"),
        ("native", forward.NativeForward, "run", with_states, "hidden states"),
    ],
    indirect=["way"],
)
@pytest.mark.usefixtures("way")
def test_the_trial_finds_what_depends_on_the_pass(owner, name, shaky, told, monkeypatch):
    scorer = scorer_of(grouped_llama(2, torch.float32))
    if name == "run" and type(scorer.forward) is not owner:
        pytest.skip("no native passes here")
    assert scorer.why_not_bit_exact() is None
    own = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: shaky(own, *given))
    assert told in (scorer.why_not_bit_exact() or "")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("rounded", "dtype", "groups", "edge"),
    [
        (None, torch.float32, 2, 2 * KEY_BLOCK),
        (None, torch.bfloat16, 1, KEY_BLOCK),
        (None, torch.bfloat16, 3, KEY_BLOCK),
        ("int8", torch.float32, 3, KEY_BLOCK),
        ("int4", torch.bfloat16, 1, 2 * KEY_BLOCK),
    ],
)
def test_over_the_edge_of_a_block_every_pass_gives_the_same_bits(rounded, dtype, groups, edge):
    if not can_pack(dtype, "cpu") or (rounded == "int4" and not native.is_available()):
        pytest.skip("no packed layers here, or no native ones")
    model = grouped_llama(groups, dtype)
    scorer = rounded_target(model, rounded).scorer if rounded else scorer_of(model)
    generator = torch.Generator().manual_seed(groups)
    tokens = torch.randint(0, 100, (edge + LONGEST_PASS,), generator=generator).tolist()
    start = edge - 3

    def read(length: int, width: int) -> torch.Tensor:
        scorer.rollback(length)
        return scorer.logits(tokens[: length + width], rows=width)

    scorer.begin()
    scorer.logits(tokens[:start], rows=1)
    alone = [read(start + i, 1)[0] for i in range(LONGEST_PASS)]
    for width in (2, 3, 4, 5, 7, 11, 17, 22, 32):
        together = read(start, width)
        assert [torch.equal(one, many) for one, many in zip(alone, together, strict=False)] == [True] * width


@pytest.mark.parametrize("rounded", ["int8", "int4"])
def test_a_rounded_target_is_bit_exact_or_says_why_not(rounded, monkeypatch):
    if not can_pack(torch.float32, "cpu") or (rounded == "int4" and not native.is_available()):
        pytest.skip("no packed layers here, or no native ones")
    target = rounded_target(tiny_llama(), rounded)
    assert target.dtype == target.quantization == rounded
    assert target.bit_exact
    assert target.widths_differ is None
    assert target.scorer.rounding == torch.int8
    assert not target.scorer.takes_trees
    loaded = wrap_model(tiny_llama(), None, "tiny", quantize=rounded)
    grown = prepare_target(loaded, "dynamic")
    assert not grown.bit_exact
    assert "preallocated" in (grown.widths_differ or "")
    assert not wrap_target(tiny_llama(), name="tiny").bit_exact
    # Where rows are not rounded, nothing is made of a last bit.
    monkeypatch.setattr(native, "_load", lambda: "it was not built")
    monkeypatch.setattr(linear, "_prepack_int8", lambda quantized: None)
    coarse = rounded_target(tiny_llama(), rounded)
    assert coarse.dtype == rounded
    assert coarse.scorer.rounding == torch.float32
    assert coarse.widths_differ is None


def test_a_cache_that_cannot_hold_the_layers_is_no_default():
    config = Lfm2Config(hidden_size=32, num_hidden_layers=2, layer_types=["conv", "full_attention"])
    assert default_cache(config, quantized=True) == "dynamic"
    assert default_cache(tiny_llama().config, quantized=True) == "preallocated"
    assert default_cache(tiny_llama().config, quantized=False) == "dynamic"


def test_a_tree_changes_no_bit_of_the_rows_beside_it():
    """A prompt of more tokens than a short pass has rows is read by itself, as without a tree. A tree of more nodes, a
    long chain with other nodes beside its first, is read in parts.
    """
    scorer, small = scorer_of(grouped_llama(4, torch.bfloat16)), scorer_of(tiny_llama().to(torch.bfloat16))
    if scorer.why_not_bit_exact() is not None or small.why_not_bit_exact() is not None:
        pytest.skip("not bit-exact here")
    for length in range(LONGEST_PASS + 1, LONGEST_PASS + 30):
        context = [7 * place % 100 for place in range(length)]
        scorer.begin()
        alone = scorer.score(ForwardRequest(scorer, context)).logits
        scorer.begin()
        rows = scorer.score(ForwardRequest(scorer, context, [1, 2, 3], (-1, -1, 0))).logits
        assert rows.shape[0] == 4
        assert torch.equal(rows[:1], alone), length
    context, chain = list(range(1, 12)), [7 * place % 30 for place in range(LONGEST_PASS + 4)]
    tokens, parents = [*chain[:1], 40, 41, *chain[1:]], [-1, -1, -1, 0, *range(3, len(chain) + 1)]
    small.begin()
    one_by_one = [small.logits([*context, *chain[:end]])[0] for end in range(len(chain) + 1)]
    small.begin()
    rows = small.score(ForwardRequest(small, context, tokens, parents)).logits
    assert all(map(torch.equal, rows[[0, 1, *range(4, len(chain) + 3)]], one_by_one))


def test_what_is_not_bit_exact_says_so():
    reason = scorer_of(tiny_llama(), "dynamic").why_not_bit_exact()
    assert "preallocated" in (reason or "")
    with pytest.raises(UsageError, match="sliding window"):
        wrap_target(zoo_model("mistral"), name="tiny", cache="bit-exact")
    with pytest.raises(UsageError, match="too short"):
        wrap_target(tiny_llama(context=32), name="tiny", cache="bit-exact")


# -- rounded targets ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("rounded", "spec"), [("int8", "lookup"), ("int4", "lookup+self:layers=1")])
def test_drafts_change_nothing_of_a_rounded_targets_output(rounded, spec):
    target = rounded_target(grouped_llama(2, torch.bfloat16), rounded)
    if not target.bit_exact:
        pytest.skip(target.widths_differ or "activations are not rounded here")
    for prompt in ([5, 6, 7] * 4, list(range(40)), [9] * 30):
        plain = speculative_generate(prompt, target, None, max_new_tokens=40)
        for gamma in (1, 5, 12):
            drafted = speculative_generate(
                prompt, target, load_drafter(spec, target), gamma=gamma, max_new_tokens=40
            )
            assert drafted.token_ids == plain.token_ids
