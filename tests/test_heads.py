"""Trained heads: their arithmetic against the papers' formulas, their files, and what the loop puts out with them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import refusal
from head_files import (
    DRAFTED,
    HEADS,
    LAYER,
    MASK,
    SHARED,
    SIZE,
    VOCAB,
    WIDTH,
    block_settings,
    block_tensors,
    eagle_one_settings,
    eagle_one_tensors,
    eagle_settings,
    eagle_tensors,
    few_head,
    few_tokens,
    layer_tensors,
    medusa_settings,
    medusa_tensors,
    midlayer,
    parallel_settings,
    parallel_tensors,
    speculators_block_settings,
    speculators_settings,
    write_head,
)
from scripted import steps_of, tokens_of
from tiny import save_tiny, tiny_language_model
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

from specbench.backends.torch.caches import CACHE_KINDS
from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import RunError, SpecbenchError, UsageError
from specbench.decoding.drafts import StepOutcome
from specbench.decoding.protocols import Drafter, DraftPolicy, ForwardRequest, NoDraft, StepPlan, run_to_end
from specbench.decoding.records import Generation, SharedPass, Step
from specbench.decoding.sampling import Randomness, Sampling
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import HeadDrafter
from specbench.generate import GenerationRun
from specbench.generate_many import GenerationRuns
from specbench.models.drafters import load_drafter
from specbench.models.head_files import find_head
from specbench.models.target import Target, wrap_target
from specbench.options import LoadOptions
from specbench.policies import FixedLength
from specbench.policies.batch_costs import BatchCosts
from specbench.policies.trees import StaticTreePolicy
from specbench.specs.models import parse_model

CONTEXT = [5, 19, 2, 77, 11, 3, 140, 9]
DRAFT = [44, 8, 61]
PLAIN = LoadOptions(dtype="float32")


@cache
def target_model() -> Any:
    model = tiny_language_model(layers=3).model
    model.config.architectures = ["LlamaForCausalLM"]  # as if it had been loaded
    return model


def tiny_target(**options: Any) -> Target:
    return wrap_target(target_model(), name="tiny", pack=False, **options)


def drafter_of(folder: Path, target: Target, options: LoadOptions = PLAIN) -> HeadDrafter:
    drafter = load_drafter(str(folder), target, options)
    assert isinstance(drafter, HeadDrafter)
    return drafter


def target_states(tokens: Sequence[int], layers: Sequence[int], model: Any = None) -> torch.Tensor:
    """What ``transformers`` gives, [tokens, layers, width]."""
    with torch.inference_mode():
        output = (model or target_model())(input_ids=torch.tensor([tokens]), output_hidden_states=True)
    return torch.stack([output.hidden_states[layer][0] for layer in layers], dim=1)


def outcome_of(context: Sequence[int], layers: Sequence[int], first: int = 0) -> StepOutcome:
    """The target has read a context but for its last token, and gives its states from ``first`` on."""
    return StepOutcome(context, 1, torch.empty(0), states=target_states(context[:-1], layers)[first:])


# -- the papers' formulas, written without anything of the package ---------------------------------


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + LAYER["rms_norm_eps"]).sqrt() * weight


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, size]: pairs (i, i + size / 2) as complex numbers, turned."""
    half = SIZE // 2
    angles = positions[:, None, None] / LAYER["rope_theta"] ** (torch.arange(half) * 2 / SIZE)
    numbers = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((numbers.real, numbers.imag), dim=-1)


def layer_of(tensors: Mapping[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    """A layer's tensors."""
    named = f"layers.{layer}."
    return {name.removeprefix(named): each for name, each in tensors.items() if name.startswith(named)}


def attended(
    query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Grouped attention of one query, [heads, size], to keys and values, [shared, size]."""
    outs = []
    for head in range(HEADS):
        group = head // (HEADS // SHARED)
        scores = torch.stack([query[head] @ key[group] for key in keys]) / SIZE**0.5
        outs.append(sum(w * value[group] for w, value in zip(scores.softmax(0), values, strict=True)))
    return torch.cat(outs)


def mlp(part: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    gate = x @ part["mlp.gate_proj.weight"].T
    return (gate * gate.sigmoid() * (x @ part["mlp.up_proj.weight"].T)) @ part["mlp.down_proj.weight"].T


class Formulas:
    """EAGLE-3, entry by entry, each with keys and values that it is told to see."""

    layers: Sequence[int] = (0, 1, 2)

    def __init__(self, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:
        self.tensors, self.settings = tensors, settings
        self.depth = settings.get("transformer_layer_config", settings).get("num_hidden_layers", 1)
        self.keys: list[list[torch.Tensor]] = [[] for _ in range(self.depth)]
        self.values: list[list[torch.Tensor]] = [[] for _ in range(self.depth)]

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        if self.settings.get("fc_norm"):
            states = torch.stack(
                [rms(each, self.tensors[f"fc_norm.{i}.weight"]) for i, each in enumerate(states)]
            )
        wide = states.flatten()
        if self.settings.get("norm_before_fc"):
            wide = rms(wide, self.tensors["input_norm.weight"])
        return self.tensors["fc.weight"] @ wide + self.tensors.get("fc.bias", 0.0)

    def embedded(self, token: int) -> torch.Tensor:
        embedding = self.tensors.get("embed_tokens.weight")
        return (target_model().get_input_embeddings().weight if embedding is None else embedding)[token]

    def inputs(self, token: int, feature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads, and what it is added to."""
        part = layer_of(self.tensors, 0)
        normed = rms(feature, part["hidden_norm.weight"])
        both = torch.cat((rms(self.embedded(token), part["input_layernorm.weight"]), normed))
        return both, normed if self.settings.get("norm_before_residual") else feature

    def entry(self, token: int, feature: torch.Tensor, position: int, seen: Sequence[int]) -> torch.Tensor:
        """The last layer's output at a token; ``seen`` are the entries before it that it attends to."""
        out = self.through(0, *self.inputs(token, feature), position, seen)
        for layer in range(1, self.depth):
            read = rms(out, self.tensors[f"layers.{layer}.input_layernorm.weight"])
            out = self.through(layer, read, out, position, seen)
        return out

    def through(
        self, layer: int, read: torch.Tensor, residual: torch.Tensor, position: int, seen: Sequence[int]
    ) -> torch.Tensor:
        """A layer's output, by what its attention reads and what that is added to."""
        part, keys, values = layer_of(self.tensors, layer), self.keys[layer], self.values[layer]

        def projected(name: str, heads: int) -> torch.Tensor:
            out = part[f"self_attn.{name}_proj.weight"] @ read + part.get(f"self_attn.{name}_proj.bias", 0.0)
            return out.view(heads, SIZE)

        def placed(name: str, heads: int) -> torch.Tensor:
            out, norm = projected(name, heads), part.get(f"self_attn.{name}_norm.weight")
            return turned((out if norm is None else rms(out, norm))[None], torch.tensor([position]))[0]

        keys.append(placed("k", SHARED))
        values.append(projected("v", SHARED))
        own = [*seen, len(keys) - 1]
        out = attended(placed("q", HEADS), [keys[each] for each in own], [values[each] for each in own])
        residual = residual + part["self_attn.o_proj.weight"] @ out
        return residual + mlp(part, rms(residual, part["post_attention_layernorm.weight"]))

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Over the target's vocabulary."""
        head = self.tensors.get("lm_head.weight", target_model().get_output_embeddings().weight)
        steps = self.tensors.get("d2t")
        if steps is None:
            return head @ rms(out, self.tensors["norm.weight"])
        places = [draft + int(step) for draft, step in enumerate(steps)]
        if "lm_head.weight" not in self.tensors:
            head = head[places]
        whole = torch.full((VOCAB,), float("-inf"))
        whole[places] = head @ rms(out, self.tensors["norm.weight"])
        return whole

    def rows(self, context: Sequence[int], draft: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        """Logits behind a context and behind each node of a draft."""
        last, outs, branches = len(context) - 1, [self.read(context)], [list(range(len(context) - 1))]
        for token, parent in zip(draft, parents, strict=True):
            feature = outs[parent + 1]
            if self.settings.get("norm_output"):
                feature = rms(feature, self.tensors["norm.weight"])
            seen = branches[parent + 1]
            outs.append(self.entry(token, feature, len(seen), seen))
            branches.append([*seen, len(self.keys[0]) - 1])
        assert len(branches[0]) == last
        return torch.stack([self.logits(each) for each in outs])

    def read(self, context: Sequence[int]) -> torch.Tensor:
        """The output behind a context."""
        states = target_states(context, self.settings.get("eagle_aux_hidden_state_layer_ids", self.layers))
        entries = (
            self.entry(token, self.fuse(state), place, range(place))
            for place, (token, state) in enumerate(zip(context[1:], states, strict=False))
        )
        return [*entries][-1]


class ParallelFormulas(Formulas):
    """P-EAGLE: behind the context stand masks, each of which sees all before it."""

    def guesses(self, context: Sequence[int], number: int) -> torch.Tensor:
        """Logits behind a context and at masks, ``number`` in all."""
        outs, known = [self.read(context)], len(context) - 1
        feature = self.fuse(self.tensors["mask_hidden"].view(3, WIDTH))
        outs += [self.entry(MASK, feature, place, range(place)) for place in range(known, known + number - 1)]
        return torch.stack([self.logits(each) for each in outs])


class FirstFormulas(Formulas):
    """EAGLE-1: the target's state behind its final norm, no norm before attention, and the target's own head."""

    layers = (3,)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return states[0]

    def inputs(self, token: int, feature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tensors["fc.weight"] @ torch.cat((self.embedded(token), feature))
        x = x + self.tensors.get("fc.bias", 0.0)
        return x, x

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        return self.tensors.get("lm_head.weight", target_model().get_output_embeddings().weight) @ out


def biased(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = [f"layers.0.self_attn.{name}_proj" for name in "qkv"]
    return tensors | {f"{name}.bias": torch.linspace(-1, 1, len(tensors[f"{name}.weight"])) for name in names}


def without(tensors: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


SCALE = torch.linspace(0.5, 1.5, 3 * WIDTH)
STATE_NORMS = {f"fc_norm.{i}.weight": SCALE[i : i + WIDTH] for i in range(3)}
OUTPUT = eagle_tensors(3, drafted=None)["lm_head.weight"]
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "speculators": (speculators_settings(), eagle_tensors()),
    "speculators, embeddings": (speculators_settings(), eagle_tensors() | {"embed_tokens.weight": OUTPUT}),
    "EAGLE-3.1": (
        speculators_settings(norm_before_residual=True, fc_norm=True, norm_output=True),
        eagle_tensors() | STATE_NORMS,
    ),
    "norm before fc": (
        speculators_settings(norm_before_fc=True),
        eagle_tensors() | {"input_norm.weight": SCALE},
    ),
    "SpecForge": (eagle_settings(), midlayer(eagle_tensors())),
    "AngelSlim": (
        eagle_settings(attention_bias=True),
        {f"model.{name}": tensor for name, tensor in midlayer(biased(eagle_tensors())).items()},
    ),
    "head norms": (
        speculators_settings(),
        eagle_tensors()
        | layer_tensors(0, {"self_attn.q_norm": SCALE[:SIZE], "self_attn.k_norm": SCALE[-SIZE:]}),
    ),
    "without a head": (speculators_settings(), without(eagle_tensors(), "lm_head.weight")),
    "EAGLE-1": (eagle_one_settings(), eagle_one_tensors()),
    "EAGLE-1 without a bias": (eagle_one_settings(bias=False), eagle_one_tensors(biased=False)),
    "EAGLE-1 with biases in attention": (eagle_one_settings(), biased(eagle_one_tensors())),
    "EAGLE-1 of vLLM": (
        {"model_type": "eagle", "architectures": ["EagleLlamaForCausalLM"], "model": eagle_one_settings()},
        {f"model.{name}": tensor for name, tensor in eagle_one_tensors().items()}
        | {"lm_head.weight": OUTPUT},
    ),
    "EAGLE-1 of speculators": (
        {"speculators_model_type": "eagle", "transformer_layer_config": LAYER, "fusion_bias": True},
        {
            name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): tensor
            for name, tensor in eagle_one_tensors().items()
        },
    ),
}


def plain_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As ``eagle_tensors`` calls them."""
    others = {"midlayer": "layers.0", "transformer.": "layers.0.", "fusion_fc": "fc"}
    plain = {}
    for name, tensor in tensors.items():
        for other, own in others.items():
            name = name.replace(other, own)
        plain[name.removeprefix("model.")] = tensor
    return plain


def assert_rows(scorer: Any, expected: torch.Tensor, *asked: Any, **more: Any) -> None:
    """A head gives these rows, over all tokens of its target."""
    rows = scorer.score(ForwardRequest(scorer, *asked, **more)).logits
    found = rows if scorer.vocabulary is None else scorer.vocabulary.spread(rows, -torch.inf)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_eagle_are_those_of_the_formulas(tmp_path, layout):
    settings, tensors = LAYOUTS[layout]
    formulas = FirstFormulas if layout.startswith("EAGLE-1") else Formulas
    drafter = drafter_of(write_head(tmp_path / "head", settings, tensors), tiny_target())
    scorer = drafter.scorer
    parents = [-1, 0, -1]
    expected = formulas(plain_names(tensors), settings)
    with torch.inference_mode():
        chain = expected.rows(CONTEXT, DRAFT, [-1, 0, 1])
        tree = formulas(expected.tensors, settings).rows(CONTEXT, DRAFT, parents)
        shorter = formulas(expected.tensors, settings).rows(CONTEXT[:5], [CONTEXT[5], 70], [-1, 0])
    scorer.begin()
    drafter.update(outcome_of(CONTEXT[:5], drafter.traits.layers))
    assert_rows(scorer, shorter, CONTEXT[:5], [CONTEXT[5], 70])
    drafter.update(outcome_of(CONTEXT, drafter.traits.layers, 2))
    assert_rows(scorer, chain[:1], CONTEXT, rows=1)
    assert_rows(scorer, chain[:2], CONTEXT, DRAFT[:1])
    assert_rows(scorer, chain, CONTEXT, DRAFT)
    drafter.update(StepOutcome(CONTEXT, 0, torch.empty(0)))
    assert scorer.cached_len == len(CONTEXT) - 1  # the last token is read again
    assert_rows(scorer, tree, CONTEXT, DRAFT, parents)


@pytest.mark.parametrize("layout", ["speculators", "of two layers", "vLLM", "norms"])
def test_rows_of_p_eagle_are_those_of_the_formulas(tmp_path, layout):
    layers = 2 if layout == "of two layers" else 1
    settings, tensors = parallel_settings(layers=layers), parallel_tensors(layers=layers)
    written = tensors
    if layout == "norms":
        settings |= {"norm_before_residual": True, "fc_norm": True}
        written = tensors = tensors | STATE_NORMS
    elif layout == "vLLM":
        settings = eagle_settings(ptd_token_id=MASK)
        written = {**midlayer(tensors), "mask_hidden": tensors["mask_hidden"][0]}
    drafter = drafter_of(write_head(tmp_path / "head", settings, written), tiny_target())
    scorer = drafter.scorer
    assert scorer.longest == (8 if layout == "vLLM" else 3)
    known = dict(settings) | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    with torch.inference_mode():
        first, second = (
            ParallelFormulas(tensors, known).guesses(context, 3) for context in (CONTEXT[:5], CONTEXT)
        )
    assert_rows_of_blocks(drafter, first, second, longer=layout == "vLLM")


def assert_rows_of_blocks(
    drafter: HeadDrafter, first: torch.Tensor, second: torch.Tensor, *, longer: bool = False
) -> None:
    """A head that guesses two tokens (or ``longer``) gives these rows behind a part of the context and all of it."""
    scorer = drafter.scorer
    scorer.begin()
    drafter.update(outcome_of(CONTEXT[:5], drafter.traits.layers))
    assert_rows(scorer, first[:2], CONTEXT[:5], DRAFT[:1])
    drafter.update(outcome_of(CONTEXT, drafter.traits.layers))
    assert_rows(scorer, second[:1], CONTEXT, rows=1)
    assert_rows(scorer, second, CONTEXT, DRAFT[:2])
    drafter.update(StepOutcome(CONTEXT, 0, torch.empty(0)))
    assert scorer.cached_len == len(CONTEXT) - 1  # the last token is read again
    assert_rows(scorer, second[[1, 1, 2]], CONTEXT, DRAFT, [-1, -1, 1], rows=3)
    assert drafter.can_read(CONTEXT, DRAFT[:2])
    assert drafter.can_read(CONTEXT, DRAFT) == longer


def test_p_eagle_drafts_in_one_pass(tmp_path, monkeypatch):
    drafter = drafter_of(
        write_head(tmp_path / "head", parallel_settings(), parallel_tensors()), tiny_target()
    )
    scorer: Any = drafter.scorer
    read, passes = scorer.head.read, []
    monkeypatch.setattr(scorer.head, "read", lambda *given: passes.append(given[0].shape[1]) or read(*given))
    drafter.begin(CONTEXT[:5])
    drafter.update(outcome_of(CONTEXT[:5], drafter.traits.layers))
    draft = run_to_end(
        drafter.propose(CONTEXT[:5], StepPlan(9, FixedLength(9), Sampling(1.0), Randomness(0)))
    )
    assert len(draft.tokens) == 3
    drafter.update(outcome_of(CONTEXT, drafter.traits.layers, 4))
    run_to_end(drafter.propose(CONTEXT, StepPlan(9, FixedLength(2), Sampling(), Randomness(0))))
    assert passes == [4 + 2, 3 + 2]  # tokens that are new, and masks


@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_medusa_are_those_of_the_formula(tmp_path, shared):
    tensors = medusa_tensors(blocks=2, drafted=DRAFTED)
    settings = medusa_settings(num_hidden_layers=2, truncated_vocab_size=DRAFTED, original_lm_head=shared)
    if shared:
        tensors = without(tensors, "lm_heads.1.weight", "lm_heads.2.weight")
    folder = write_head(tmp_path / "head", settings, tensors)
    drafter = drafter_of(folder, tiny_target())
    drafter.begin(CONTEXT)
    drafter.update(outcome_of(CONTEXT, (3,)))
    rows = []
    for head in range(3):
        x = target_states(CONTEXT[:-1], (3,))[-1, 0]
        for block in range(2):
            inner = tensors[f"blocks.{head}.layers.{block}.weight"] @ x
            x = x + inner * inner.sigmoid()
        whole = torch.full((VOCAB,), float("-inf"))
        whole[tensors.get("token_map", torch.arange(VOCAB))] = (
            tensors[f"lm_heads.{0 if shared else head}.weight"] @ x
        )
        rows.append(whole)
    assert_rows(drafter.scorer, torch.stack(rows), CONTEXT, DRAFT[:2])
    assert_rows(drafter.scorer, torch.stack([rows[1], rows[2]]), CONTEXT, DRAFT, [-1, -1, 1], rows=2)
    assert drafter.can_read(CONTEXT, DRAFT[:2])
    assert not drafter.can_read(CONTEXT, DRAFT)


PROMPT = [1, 2, 0]


# -- real models -----------------------------------------------------------------------------------


def outputs(
    target: Scorer, drafter: Drafter, policy: DraftPolicy, **options: Any
) -> tuple[list[int], list[Step]]:
    options |= {"sampling": Sampling(), "random": Randomness(0), "max_new_tokens": 20}
    prefill, *steps = steps_of(PROMPT, target, drafter, policy=policy, **options)
    return tokens_of([prefill, *steps]), [step for step in steps if isinstance(step, Step)]


OTHERS = ("eagle-1", "mtp", "peagle", "dflash", "dflash2", "dspark", "medusa")
ON_CACHES = [  # a head that reads states on every kind of cache, the others on one in turn
    *((kept, "eagle") for kept in CACHE_KINDS),
    *zip(itertools.cycle(CACHE_KINDS), OTHERS, strict=False),
]


@pytest.mark.parametrize(("kept", "kind"), ON_CACHES)
def test_greedy_outputs_are_the_targets(tmp_path, kept, kind):
    target = wrap_target(few_tokens(), cache=kept, pack=False)
    expected, _ = outputs(target.scorer, NoDraft(), FixedLength(1))
    head = few_head(tmp_path / "head", kind, target)
    tree = StaticTreePolicy.shaped((-1, -1, -1, 0, 0, 1, 3, 3))
    accepted = 0
    for drafter, policy in (
        (head, FixedLength(3)),
        (CascadeDrafter(LookupDrafter(), head), FixedLength(4)),
        *([] if kept == "none" else [(head, tree)]),
    ):
        for first in (True, False):
            found, steps = outputs(target.scorer, drafter, policy, first_target=first)
            assert found == expected
            if drafter is head:  # it knows nothing before the target's first forward pass
                assert bool(steps[0].drafted) == first
            accepted += sum(step.accepted for step in steps)
    assert accepted > 10


@pytest.mark.parametrize(
    ("kept", "kind"),
    [
        ("preallocated", "eagle"),
        ("dynamic", "medusa"),
        *(pytest.param("dynamic", kind, marks=pytest.mark.slow) for kind in ("eagle", "mtp", "dspark")),
    ],
)
def test_requests_side_by_side_have_heads_of_their_own(tmp_path, kept, kind, monkeypatch):
    target = wrap_target(few_tokens(), cache=kept, pack=False)
    head = few_head(tmp_path / "head", kind, target)
    prompts = [[*PROMPT, *[number % 9] * number * 3] for number in range(5)]
    tree = StaticTreePolicy.shaped((-1, -1, 0, 0, 1))
    runs: list[GenerationRun] = []
    for drafter in (head, CascadeDrafter(LookupDrafter(), head)):
        policy = tree if drafter is head else FixedLength(3)
        runs += [
            GenerationRun(prompt, target, drafter, policy=policy, max_new_tokens=20) for prompt in prompts
        ]
    # Prompts are read in parts, and there is no room for all: somebody is put back, and read again.
    made: list[SharedPass] = []
    monkeypatch.setattr(BatchCosts, "observe", lambda _, shared: made.append(shared))
    many = GenerationRuns(runs, max_batch=4, max_tokens_per_pass=14, pool_tokens=112)
    for each, found in zip(runs, many.results(), strict=True):
        alone = GenerationRun(each.prompt, target, each.drafter, policy=each.policy, max_new_tokens=20)
        assert all(True for _ in alone)
        assert isinstance(found, Generation), found
        assert found.token_ids == alone.result().token_ids
        assert [step.drafted for step in found.steps] == [step.drafted for step in alone.result().steps]
    assert sum(step.accepted for each in runs for step in each.result().steps) > 20
    drafting = [each for each in made if not each.target]
    shared = kept == "dynamic"
    assert ({each.model for each in drafting} == {head.scorer}) == shared
    assert any(len(each.requests) > 1 for each in drafting) == shared


@pytest.mark.parametrize("kind", ["eagle", "dspark"])
def test_a_shared_pass_that_fails_fails_nobody_who_can_be_read_alone(tmp_path, kind, monkeypatch):
    """Shared passes of the head fail when they have been made, and so do all of one request's of the target."""
    target = wrap_target(few_tokens(), pack=False)
    head = few_head(tmp_path / "head", kind, target)
    prompts = [[1, 2, 3], [4, 5, 3, 4, 5], [8, 8, 1], [2, 7]]
    policy = FixedLength(3)

    def runs() -> list[GenerationRun]:
        return [GenerationRun(each, target, head, policy=policy, max_new_tokens=14) for each in prompts]

    alone = runs()
    assert all(True for each in alone for _ in each)
    scorer, fit, calls = head.scorer, Scorer.fit, []

    def failing(part: Any) -> Any:
        def run(wanted: Sequence[Any]) -> Any:
            given = part(wanted)
            calls.append(len(wanted))
            if len(wanted) > 1 and len(calls) % 3 == 0:
                raise RuntimeError("made in vain")
            return given

        return run

    def failing_fit(scorer: Scorer, logits: torch.Tensor) -> torch.Tensor:
        slot: Any = scorer.cache
        if slot.length >= 12 and not doomed:
            doomed.append(scorer)
        if scorer in doomed:
            raise RuntimeError("no logits")
        return fit(scorer, logits)

    doomed: list[Scorer] = []
    if kind == "eagle":
        monkeypatch.setattr(scorer, "_forward", failing(scorer._forward))
    else:
        monkeypatch.setattr(scorer, "_parts", [failing(part) for part in scorer._parts])
    monkeypatch.setattr(Scorer, "fit", failing_fit)
    many = GenerationRuns(runs(), max_batch=4)
    found = many.results()
    wrong = [i for i, each in enumerate(found) if isinstance(each, Exception)]
    assert len(wrong) == 1
    assert str(found[wrong[0]]) == "no logits"
    for each, expected in zip(found, alone, strict=True):
        if not isinstance(each, Exception):
            assert each.token_ids == expected.result().token_ids
            assert [step.drafted for step in each.steps] == [step.drafted for step in expected.result().steps]
    assert max(calls) > 1
    assert many.factory is not None
    assert many.factory.use is not None
    assert many.factory.use.used == 0


@pytest.mark.parametrize("drafter", ["head", "cascade"])
def test_every_draft_begins_behind_the_targets_own_states(tmp_path, drafter, monkeypatch):
    """Whatever was drafted, kept and dropped before: the first row is that of a head that has read nothing else."""
    target = wrap_target(few_tokens(), pack=False)
    head = few_head(tmp_path / "head", "eagle", target)
    fresh = few_head(tmp_path / "other", "eagle", target).scorer
    score, firsts = head.scorer.score, []

    def noted(asked: ForwardRequest) -> Any:
        rows = score(asked)
        if not asked.tokens:
            firsts.append((list(asked.context), rows.logits[-1].clone()))
        return rows

    monkeypatch.setattr(head.scorer, "score", noted)
    if drafter == "head":
        _, steps = outputs(target.scorer, head, StaticTreePolicy.shaped((-1, -1, -1, 0, 0, 1, 3, 3)))
    else:
        _, steps = outputs(target.scorer, CascadeDrafter(LookupDrafter(), head), FixedLength(3))
    assert sum(step.accepted for step in steps) > 5
    assert len(firsts) > 2
    for context, row in firsts:
        fresh.begin()
        fresh.take_states(len(context) - 1, target_states(context[:-1], head.traits.layers, few_tokens()))
        torch.testing.assert_close(
            fresh.score(ForwardRequest(fresh, context)).logits[0], row, atol=1e-4, rtol=1e-4
        )


def test_heads_are_int8_on_a_cpu_unless_told_otherwise(tmp_path):
    target = tiny_target()
    folder = write_head(tmp_path / "head", speculators_settings(), eagle_tensors(spread=0.1))
    quick, exact = drafter_of(folder, target, LoadOptions()), drafter_of(folder, target)
    assert (quick.traits.name, exact.traits.name) == ("head (int8)", "head (float32)")
    vocabularies = [each.traits.vocabulary for each in (quick, exact)]
    assert all(each is not None and len(each.ids) == DRAFTED for each in vocabularies)
    assert vocabularies[0].ids == vocabularies[1].ids
    rows = []
    for drafter in (quick, exact):
        drafter.begin(CONTEXT)
        drafter.update(outcome_of(CONTEXT, drafter.traits.layers))
        rows.append(drafter.scorer.score(ForwardRequest(drafter.scorer, CONTEXT, DRAFT)).logits)
    assert rows[0].shape == (4, DRAFTED)
    assert (rows[0] - rows[1]).norm() < 0.05 * rows[1].norm()


# -- files that are not what they should be ---------------------------------------------------------


LAST = torch.arange(VOCAB - DRAFTED, VOCAB) - torch.arange(DRAFTED)
WRONG: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], str]] = {
    "layers that the target lacks": (
        speculators_settings((0, 1, 3)), eagle_tensors(), "0, 1, 3, but the target's layers are 0 to 2."
    ),
    "another vocabulary": (
        speculators_settings(vocab=VOCAB + 1), eagle_tensors(),
        f"trained for another target: for tokens {VOCAB + 1}, and tiny has {VOCAB}."
    ),
    "a tensor is missing": (
        speculators_settings(), without(eagle_tensors(), "fc.weight", "norm.weight"),
        'Missing key(s) in state_dict: "fc.weight"',
    ),
    "no map": (
        speculators_settings(), without(eagle_tensors(), "d2t", "t2d"),
        f"does not say which of the {VOCAB} tokens of its target it drafts."
    ),
    "a token beyond": (speculators_settings(), eagle_tensors() | {"d2t": LAST + 1}, "does not say which"),
    "EAGLE-1 of two layers": (
        {"model_type": "eagle", "model": eagle_one_settings(num_hidden_layers=2)}, eagle_one_tensors(),
        "kind that is not supported: it has 2 layers."
    ),
    "a window": (
        speculators_settings(transformer_layer_config={**LAYER, "sliding_window": 64}), eagle_tensors(),
        "a sliding window of 64 tokens"
    ),
    "no size": (speculators_settings(transformer_layer_config={}), eagle_tensors(), "its vocab_size is missing"),
    "Medusa of its authors": ({"medusa_num_heads": 5}, {}, "it is stored as by its authors"),
    "MLP speculator": ({"model_type": "mlp_speculator"}, {}, "mlp_speculator"),
    "DFlash with a projector": (
        speculators_block_settings(projector_type="domino"), block_tensors(drafted=DRAFTED), "it has projector_type."
    ),
    "DFlash without a mask": (
        block_settings(dflash_config={"target_layer_ids": [0, 2]}), block_tensors(), "mask_token_id"
    ),
    "an MTP layer without weights": (
        {"speculators_model_type": "mtp"}, {}, "they lack eh_proj.weight of an MTP layer"
    ),
    "EAGLE-1 with norms": (
        eagle_one_settings(bias=True, add_para_norm=True), eagle_one_tensors(), "normalizes its inputs, as HASS does"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_in_a_sentence(tmp_path, case):
    settings, tensors, message = WRONG[case]
    folder = write_head(tmp_path / "head", settings, tensors)
    assert message in refusal(load_drafter, str(folder), tiny_target(), PLAIN, kind=SpecbenchError)


def test_a_head_goes_with_its_target_alone(tmp_path):
    folder = write_head(tmp_path / "head", speculators_settings(), eagle_tensors())
    target = tiny_target()
    (folder / "model.safetensors").write_bytes(b"nonsense")
    assert "damaged" in refusal(load_drafter, str(folder), target, PLAIN, kind=RunError)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "are pickled" in refusal(load_drafter, str(folder), target, PLAIN, kind=UsageError)


def test_a_target_whose_hidden_states_have_another_shape_takes_no_head(tmp_path):
    """Gemma 3n keeps several states for every token and layer."""
    config = Gemma3nTextConfig(
        vocab_size=9, hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=5,
        intermediate_size=[48] * 5, num_kv_shared_layers=2, vocab_size_per_layer_input=9,
        hidden_size_per_layer_input=8, layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        activation_sparsity_pattern=[0.0] * 5, sliding_window=64,
    )  # fmt: skip
    target = wrap_target(Gemma3nForCausalLM(config).eval(), name="gemma", pack=False)
    files = write_head(tmp_path / "head", medusa_settings(9), medusa_tensors(vocab=9))
    with pytest.raises(UsageError, match="gemma does not give one hidden state per token and layer"):
        load_drafter(str(files), target, PLAIN)


def test_a_llama_of_one_layer_is_no_head(tmp_path):
    """EAGLE-1's authors give their heads its configuration: the weights tell."""
    head = write_head(tmp_path / "head", eagle_one_settings(), eagle_one_tensors())
    llama = save_tiny(tmp_path / "llama", layers=1)
    assert find_head(parse_model(str(llama))) is None
    found = find_head(parse_model(str(head)))
    assert found is not None
    assert (found.kind, found.layers(3)) == ("eagle-1", (3,))
    (head / "model.safetensors").unlink()
    assert find_head(parse_model(str(head))) is None


# -- the command line ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("models")
    save_tiny(made / "tiny", layers=3)
    write_head(made / "eagle", speculators_settings(), eagle_tensors())
    write_head(made / "medusa", medusa_settings(), medusa_tensors())
    return made


@pytest.mark.smoke
def test_heads_on_the_command_line(cli, folder):
    def tiny(*arguments: object) -> Any:
        common = ("--target", folder / "tiny", "--dtype", "float32", "the thing", "-n", 12)
        return cli("generate", *common, *arguments)

    plain = tiny("--drafter", "none", "--json").json()["text"]
    eagle, medusa = folder / "eagle", folder / "medusa"
    for drafter in (eagle, medusa, f"lookup+{eagle}"):
        figures = tiny("--drafter", drafter, "--gamma", 2, "--json").json()
        assert figures["text"] == plain
        assert figures["drafted"] > 0
    assert tiny("--drafter", f"{eagle}|{medusa}", "--gamma", 2, "--json").json()["text"] == plain
    for tree in ("static-tree:nodes=6,depth=3", "dynamic-tree"):
        assert tiny("--drafter", eagle, "--draft-policy", tree, "--json").json()["text"] == plain
    shown = tiny("--drafter", eagle, "--debug", "-t", 1)
    assert shown.code == 0
    assert "eagle (int8)" in shown.err
    tiny("--drafter", f"{eagle}:device=cpu").refused(2, "always runs on its target's device")
