"""DSpark and DFlash 2: rows as of the formulas, and their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from head_files import (
    BLOCK,
    DRAFTED,
    GROUP,
    HEADS,
    MASK,
    RANK,
    SHARED,
    SIZE,
    VOCAB,
    block_settings,
    block_tensors,
    conditional_tensors,
    flash_two_settings,
    spark_settings,
    speculators_block_settings,
    write_head,
)
from test_heads import (
    CONTEXT,
    DRAFT,
    assert_rows_of_blocks,
    layer_of,
    mlp,
    outcome_of,
    rms,
    target_model,
    target_states,
    tiny_target,
    turned,
)

from specbench.base.errors import RunError
from specbench.decoding.protocols import ForwardRequest
from specbench.models.drafters import load_drafter
from specbench.options import LoadOptions

Tensors = Mapping[str, torch.Tensor]


def drafter_of(folder: Path, settings: Mapping[str, Any], tensors: Tensors) -> Any:
    return load_drafter(
        str(write_head(folder, settings, tensors)), tiny_target(), LoadOptions(dtype="float32")
    )


# -- the formulas, written without anything of the package -----------------------------------------


def convolved(x: torch.Tensor, base: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Channel c of token t: the sum over taps k of (base[k, c] + added[t, k, group of c]) · x[t - k, c]."""
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for tap in range(min(2, token + 1)):
            for channel in range(x.shape[1]):
                weight = base[tap, channel] + added[token, tap, channel // GROUP]
                out[token, channel] += weight * x[token - tap, channel]
    return out


def hidden_of(
    tensors: Tensors, layers: Sequence[int], context: Sequence[int], *, window: int = 999, causal: bool = False,
    scale: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """The normed outputs of a block after a context, [block, width]."""
    known = len(context) - 1
    states = target_states(context[:-1], layers).flatten(1)
    features = rms(states @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    embedding = target_model().get_input_embeddings().weight
    x = scale * embedding[[context[-1], *[MASK] * (BLOCK - 1)]]
    positions = torch.arange(known + BLOCK)
    distance = positions[known:, None] - positions
    hidden_from = (distance >= window) | (causal & (distance < 0))
    for layer in range(2):
        part = layer_of(tensors, layer)

        def around(
            name: str, read: torch.Tensor, inner: Any, part: Mapping[str, torch.Tensor] = part
        ) -> torch.Tensor:
            """What a part of the layer adds, with convolutions around it if there are any."""
            if f"{name}.base_kernel" not in part:
                return inner(read)
            base = part[f"{name}.base_kernel"]
            added = (read @ part[f"{name}.kernel_projection.weight"].T).view(len(read), 2, 2, -1)
            return convolved(inner(convolved(read, base[0], added[:, 0])), base[1], added[:, 1])

        def attention(read: torch.Tensor, part: Mapping[str, torch.Tensor] = part) -> torch.Tensor:
            def projected(name: str, heads: int, read: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
                by_head = (read @ part[f"self_attn.{name}_proj.weight"].T).view(-1, heads, SIZE)
                if name == "v":
                    return by_head
                return turned(rms(by_head, part[f"self_attn.{name}_norm.weight"]), at)

            both = torch.cat((features, read))
            query = projected("q", HEADS, read, positions[known:])
            keys, values = (
                projected(name, SHARED, both, positions).repeat_interleave(HEADS // SHARED, 1)
                for name in "kv"
            )
            scores = torch.einsum("qhs,khs->hqk", query, keys) / SIZE**0.5
            weights = scores.masked_fill(hidden_from, -torch.inf).softmax(-1)
            out = torch.einsum("hqk,khs->qhs", weights, values).flatten(1)
            return out @ part["self_attn.o_proj.weight"].T

        x = x + around("attention_conv", rms(x, part["input_layernorm.weight"]), attention)
        x = x + around("mlp_conv", rms(x, part["post_attention_layernorm.weight"]), partial(mlp, part))
    return rms(x, tensors["norm.weight"])


def output_rows(tensors: Tensors) -> torch.Tensor:
    return tensors.get("lm_head.weight", target_model().get_output_embeddings().weight)


def spread(tensors: Tensors, row: torch.Tensor) -> torch.Tensor:
    """Over the target's vocabulary."""
    if "d2t" not in tensors:
        return row
    whole = torch.full((VOCAB,), -torch.inf)
    whole[torch.arange(DRAFTED) + tensors["d2t"]] = row
    return whole


def spark_row(tensors: Tensors, hidden: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
    """DSpark's logits after a path, which has the token before each place of the block: the context's last token,
    before the place of this token itself too, and draft tokens.
    """
    head = {name.removeprefix("markov_head."): each for name, each in tensors.items()}
    state = torch.zeros(RANK)
    for place, token in enumerate(path):
        known = latent = head["markov_w1.weight"][token]
        if "gate_proj.weight" in head:
            read = torch.cat((hidden[place], known))
            latent = known * (head["gate_proj.weight"] @ read + head["gate_proj.bias"]).sigmoid()
        if "joint_proj.weight" in head:
            read = torch.cat((state, known, hidden[place]))
            gate, fresh, out = (head["joint_proj.weight"] @ read + head["joint_proj.bias"]).chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * fresh.tanh()
            latent = out.tanh()
    last = len(path) - 1
    row = output_rows(tensors) @ hidden[last] + head["markov_w2.weight"] @ latent
    return spread(tensors, row)


def selected_row(tensors: Tensors, logits: torch.Tensor, hidden: torch.Tensor, token: int) -> torch.Tensor:
    """DFlash 2's scores of the four most probable tokens at a place, after a token."""
    part = {name.removeprefix("candidate_selector."): each for name, each in tensors.items()}
    read = part["predecessor_codebook"][token] * (part["hidden_projection.weight"] @ hidden)
    row = torch.full((VOCAB,), -torch.inf)
    for candidate in logits.topk(4).indices.tolist():
        row[candidate] = logits[candidate] + part["successor_codebook"][candidate] @ read
    return row


def rows_after(drafter: Any, tokens: Sequence[int], parents: Sequence[int] | None = None) -> torch.Tensor:
    """All rows of the head after the context and a draft, over the target's vocabulary."""
    scorer = drafter.scorer
    scorer.begin()
    for end in (5, len(CONTEXT)):
        drafter.update(outcome_of(CONTEXT[:end], drafter.traits.layers))
    rows = scorer.score(ForwardRequest(scorer, CONTEXT, tokens, parents)).logits
    return rows if scorer.vocabulary is None else scorer.vocabulary.spread(rows, -torch.inf)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "drafted", "layers"),
    [(block_settings(), None, (1, 3)), (speculators_block_settings(), DRAFTED, (1, 2))],
)
def test_rows_of_dflash_are_those_of_the_formulas(tmp_path, settings, drafted, layers):
    tensors = block_tensors(drafted=drafted)
    drafter = drafter_of(tmp_path / "head", settings, tensors)
    assert drafter.traits.layers == layers
    rows = []
    for context in (CONTEXT[:5], CONTEXT):
        outs = hidden_of(tensors, layers, context)[1:] @ output_rows(tensors).T
        rows.append(torch.stack([spread(tensors, row) for row in outs]))
    assert_rows_of_blocks(drafter, *rows)


@pytest.mark.parametrize(
    ("markov", "form"),
    [("vanilla", "authors"), ("gated", "speculators"), ("rnn", "speculators, from the first mask")],
)
def test_rows_of_dspark_are_those_of_the_formulas(tmp_path, markov, form):
    authors, first = form == "authors", int("mask" in form)
    tensors = conditional_tensors("dspark", drafted=None if authors else DRAFTED, markov=markov)
    named = {
        "speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "projector_type": None,
        "markov_rank": RANK, "sample_from_anchor": not first,
    }  # fmt: skip
    settings = spark_settings() if authors else speculators_block_settings(**named)
    settings["markov_head_type"] = markov
    drafter = drafter_of(tmp_path / "head", settings, tensors)
    assert drafter.traits.layers == ((1, 3) if authors else (1, 2))
    assert drafter.scorer.longest == BLOCK - first
    hidden = hidden_of(tensors, drafter.traits.layers, CONTEXT)
    for parents, paths in ((None, [[], DRAFT[:1], DRAFT[:2]]), ([-1, -1, 1], [[], [44], [8], [8, 61]])):
        tokens = DRAFT[:2] if parents is None else DRAFT
        found = rows_after(drafter, tokens, parents)
        expected = [spark_row(tensors, hidden, [*[CONTEXT[-1]] * (1 + first), *path]) for path in paths]
        close(found, torch.stack(expected))


@pytest.mark.parametrize("form", ["authors", "speculators"])
def test_rows_of_dflash_2_are_those_of_the_formulas(tmp_path, form):
    tensors = conditional_tensors("dflash2")
    named = {
        "speculators_model_type": "dflash2", "draft_vocab_size": VOCAB, "conv_group_size": GROUP,
        "selector_rank": RANK, "selector_top_k": 4, "projector_type": None,
    }  # fmt: skip
    settings = flash_two_settings() if form == "authors" else speculators_block_settings(**named)
    drafter = drafter_of(tmp_path / "head", settings, tensors)
    hidden = hidden_of(tensors, drafter.traits.layers, CONTEXT)[1:]
    logits = hidden @ output_rows(tensors).T
    found = rows_after(drafter, [44, 8, 61], [-1, -1, 1])
    places = [(0, CONTEXT[-1]), (1, 44), (1, 8), (2, 61)]
    expected = [selected_row(tensors, logits[place], hidden[place], token) for place, token in places]
    close(found, torch.stack(expected))


WINDOWED = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}


@pytest.mark.parametrize("causal", [True, False, None])
def test_blocks_see_through_windows_and_have_caps(tmp_path, causal):
    more = {} if causal is None else {"is_causal": causal}
    more |= {"final_logit_softcapping": 2.0, "output_multiplier": 0.5, "input_embedding_scale": 1.5}
    tensors = block_tensors()
    drafter = drafter_of(tmp_path / "head", block_settings(**WINDOWED, **more), tensors)
    hidden = hidden_of(
        tensors, drafter.traits.layers, CONTEXT, window=5, causal=causal is not False, scale=1.5
    )
    expected = 2 * torch.tanh(hidden[1:] @ output_rows(tensors).T * 0.5 / 2)
    close(rows_after(drafter, DRAFT[:2]), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (spark_settings(markov_head_type="other"), "markov_head_type"),
        (flash_two_settings(conv_group_size=7), "conv_group_size"),
        (block_settings(final_logit_softcapping=-1), "final_logit_softcapping"),
        (block_settings(**{**WINDOWED, "sliding_window": None}), "sliding_window"),
        (block_settings(block_size=1), "block_size"),
    ],
)
def test_damaged_settings_are_refused(tmp_path, settings, message):
    with pytest.raises(RunError, match=message):
        drafter_of(tmp_path / "head", settings, conditional_tensors("dspark"))
