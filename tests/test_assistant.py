"""Gemma 4's assistant: its arithmetic against ``transformers``' own module, outputs, caches, batches and refusals."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import refusal
from safetensors.torch import load_file, save_file
from scripted import GivenCosts, build_with
from tiny import tiny_tokenizer
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specbench.base.errors import RunError, SpecbenchError, UsageError
from specbench.decoding.protocols import ForwardRequest
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.lookup import LookupDrafter
from specbench.export.registry import load_engine
from specbench.export.setting import Setting
from specbench.generate import Generation, GenerationRun, speculative_generate
from specbench.generate_many import GenerationRuns
from specbench.models.drafters import check_drafter, load_drafter
from specbench.models.head_files import find_head
from specbench.models.load import load_config
from specbench.models.target import Target, load_target, wrap_target
from specbench.options import LoadOptions
from specbench.policies import FixedLength
from specbench.policies.batch_costs import BatchCosts
from specbench.recipe import Recipe
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import parse_model
from specbench.specs.policies import parse_policy

WINDOW = 6
WIDTH = 32
VOCAB = len(tiny_tokenizer())
CONTEXT = [5, 19, 2, 77, 11, 3, 140, 9, 31, 6, 8]
"""Longer than the window."""
DRAFT = [44, 8, 61]
PLAIN = LoadOptions(dtype="float32")
FORMS = ("gemma4", "gemma4, no sharing", "gemma4, k = v", "gemma4_unified", "gemma4, centroids")

_TEXT: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "global_head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.3, "sliding_window": WINDOW,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "layer_types": ["sliding_attention",
    "full_attention"] * 2, "num_hidden_layers": 4,
}  # fmt: skip


class Pair:
    """A target and its assistant, and the folders they are in."""

    def __init__(self, folder: Path, form: str, vocab: int = VOCAB, **changed: Any) -> None:
        kind, _, detail = form.partition(", ")
        torch.manual_seed(3)
        text, whole = CONFIG_MAPPING[f"{kind}_text"], {**_TEXT, "vocab_size": vocab}
        target = {**whole, "num_kv_shared_layers": 0 if detail == "no sharing" or kind != "gemma4" else 2}
        if kind == "gemma4":
            target |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": vocab}
            whole |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
        if detail == "k = v":
            target |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
            whole |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
        own = text(**{**whole, "hidden_size": 24, "num_kv_shared_layers": 4, **changed})
        settings: dict[str, Any] = {"text_config": own, "backbone_hidden_size": WIDTH}
        if detail == "centroids":
            settings |= {"use_ordered_embeddings": True, "num_centroids": 4, "centroid_intermediate_top_k": 2}
        self.target = AutoModelForCausalLM.from_config(text(**target)).eval()
        self.assistant = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[f"{kind}_assistant"](**settings)
        ).eval()
        if detail == "centroids":
            self.assistant.masked_embedding.token_ordering.copy_(torch.randperm(vocab))
        self.folder, self.own_folder = folder / "gemma", folder / "gemma-assistant"
        self.target.generation_config.do_sample = False
        self.target.save_pretrained(self.folder)
        if vocab == VOCAB:
            tiny_tokenizer().save_pretrained(self.folder)
        self.assistant.save_pretrained(self.own_folder)
        self.target.config.name_or_path = str(self.folder)

    @torch.inference_mode()
    def rows(self, context: list[int], drafted: list[int]) -> torch.Tensor:
        """Logits after a context and after each drafted token, by `transformers`' module, [1 + drafted, vocab].

        The target's layers with a window have what they show the last token: one position less than their window.
        """
        output = self.target(
            input_ids=torch.tensor([context[:-1]]),
            output_hidden_states=True,
            return_shared_kv_states=True,
            past_key_values=None,
            use_cache=False,
        )
        shared = dict(output.shared_kv_states)
        shared["sliding_attention"] = tuple(
            each[:, :, -(WINDOW - 1) :] for each in shared["sliding_attention"]
        )
        state, rows = output.hidden_states[-1][:, -1:], []
        for token in (context[-1], *drafted):
            embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
            made = self.assistant(
                inputs_embeds=torch.cat((embedded, state), dim=-1),
                position_ids=torch.tensor([[len(context) - 1]]),
                shared_kv_states=shared,
            )
            rows.append(made.logits[0, 0])
            state = made.last_hidden_state
        return torch.stack(rows)


@pytest.fixture(scope="module", autouse=True)
def sharing():
    """Let `transformers` 5.23 make assistants: it looks for layers to share with where all layers share."""
    patch = pytest.MonkeyPatch()
    for kind in ("gemma4_text", "gemma4_unified_text"):
        config: Any = CONFIG_MAPPING[kind]
        modes = config.kv_sharing_modes.fget

        def of(own: Any, modes: Any = modes) -> Any:
            if own.num_kv_shared_layers == own.num_hidden_layers:
                return ["reuse"] * own.num_hidden_layers
            found = modes(own)
            if "store" not in found:  # as 5.24 has it: the last layer of each kind is read by assistants
                found[-2:] = ["store"] * 2
            return found

        patch.setattr(config, "kv_sharing_modes", property(of))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    @cache
    def made(form: str, vocab: int = VOCAB) -> Pair:
        return Pair(tmp_path_factory.mktemp("pair"), form, vocab)

    return made


def loaded(pair: Pair, cache: Any = "dynamic") -> tuple[Target, Any]:
    target = load_target(str(pair.folder), PLAIN, cache=cache)
    return target, load_drafter(str(pair.own_folder), target, PLAIN)


def prepared(target: Target, drafter: Any, context: list[int]) -> Any:
    """The drafter's scorer, when the target has read all of a context but its last token."""
    target.scorer.begin()
    drafter.scorer.begin()
    request = ForwardRequest(target.scorer, context[:-1], layers=drafter.traits.layers)
    drafter.scorer.take_states(len(context) - 1, target.scorer.score(request).hidden)
    target.scorer.rollback(len(context) - 1)
    return drafter.scorer


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("form", "kept"), [*zip(FORMS, itertools.cycle(("dynamic", "preallocated")), strict=False)]
)
def test_rows_of_a_chain_are_those_of_transformers(pair, form, kept):
    made = pair(form)
    target, drafter = loaded(made, kept)
    for context in (CONTEXT, CONTEXT[:3], CONTEXT[:2], CONTEXT * 4):
        scorer = prepared(target, drafter, context)
        assert scorer.can_read(context, DRAFT)
        found = scorer.score(ForwardRequest(scorer, context, DRAFT)).logits
        torch.testing.assert_close(found, made.rows(context, DRAFT), atol=1e-4, rtol=1e-4)


def test_rows_of_a_tree_are_those_of_its_branches(pair):
    """No layer of the assistant has entries, so branches see the same."""
    made = pair("gemma4")
    scorer = prepared(*loaded(made), CONTEXT)
    tokens, parents = [44, 8, 61, 30, 7], [-1, -1, 0, 0, 2]
    for end, rows in ((2, 3), (4, 2), (5, 1)):
        found = scorer.score(ForwardRequest(scorer, CONTEXT, tokens[:end], parents[:end], rows=rows)).logits
        for row, node in zip(found, range(end - rows, end), strict=True):
            branch = [] if node < 0 else [node]
            while branch and parents[branch[0]] >= 0:
                branch.insert(0, parents[branch[0]])
            expected = made.rows(CONTEXT, [tokens[each] for each in branch])[-1]
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)


def decoded(target: Target, drafter: Any, prompt: list[int], policy: Any, **options: Any) -> Generation:
    return speculative_generate(
        prompt, target, drafter, policy=policy, max_new_tokens=24, min_new_tokens=24, **options
    )


COSTS = GivenCosts(0.1, {1: 1.0, 9: 1.1})
FEW = 9
"""A vocabulary in which random drafts are right now and then."""
PROMPTS = [[1, 2, 3], [4, 5, 3, 4, 5, 1, 7, 7, 2, 0, 3], [8, 8, 1, 6, 2], [2, 7]]


def few(made: Pair, kept: Any = "dynamic") -> tuple[Target, Any]:
    target = wrap_target(made.target, cache=kept, pack=False)
    return target, load_drafter(str(made.own_folder), target, PLAIN)


@pytest.mark.parametrize("kept", ["dynamic", "preallocated"])
def test_greedy_outputs_are_the_targets(pair, kept):
    """With a fixed number of draft tokens and a chosen one, over drafts that are accepted, cut and rejected."""
    made = pair("gemma4", FEW)
    target, drafter = few(made, kept)
    accepted = 0
    for prompt in PROMPTS[1:3]:
        expected = made.target.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[
            0
        ].tolist()
        for each, policy in (
            (drafter, FixedLength(3)),
            (drafter, build_with(COSTS, "auto")),
            (CascadeDrafter(LookupDrafter(), drafter), FixedLength(7)),
        ):
            found = decoded(target, each, prompt, policy)
            assert [*prompt, *found.token_ids] == expected
            assert sum(len(step.drafted) for step in found.steps) > 10
            accepted += sum(step.accepted for step in found.steps)
    assert accepted > 20


@pytest.mark.parametrize(
    ("form", "kept", "shared"),
    [
        ("gemma4, no sharing", "dynamic", True),
        ("gemma4, no sharing", "preallocated", False),
        ("gemma4", "dynamic", True),
    ],
)
def test_requests_side_by_side_have_their_own_keys_and_values(pair, monkeypatch, form, kept, shared):
    """In shared passes where the target's are shared."""
    target, drafter = few(pair(form, FEW), kept)
    policy, watched = FixedLength(3), []
    runs = [GenerationRun(prompt, target, drafter, policy=policy, max_new_tokens=12) for prompt in PROMPTS]
    monkeypatch.setattr(BatchCosts, "observe", lambda _, made: watched.append(made))
    many = GenerationRuns(runs, max_batch=4)
    for each, found in zip(runs, many.results(), strict=True):
        alone = speculative_generate(each.prompt, target, drafter, policy=policy, max_new_tokens=12)
        assert isinstance(found, Generation), found
        assert found.token_ids == alone.token_ids
        assert [step.drafted for step in found.steps] == [step.drafted for step in alone.steps]
    assert any(len(each.requests) > 1 for each in watched if not each.target) == shared


def test_it_drafts_nothing_where_the_target_has_to_read_again(pair):
    target, drafter = loaded(pair("gemma4"))
    scorer = prepared(target, drafter, CONTEXT)
    assert scorer.can_read(CONTEXT, ())
    target.scorer.begin()
    assert not scorer.can_read(CONTEXT, ())
    found = scorer.score(ForwardRequest(scorer, CONTEXT, DRAFT)).logits
    assert found.shape == (4, VOCAB)
    assert not found.any(), "a draft that had begun goes on with tokens that are alike"


def refused(pair: Pair, target: str | None = None, kind: type[SpecbenchError] = UsageError) -> str:
    spec = parse_drafter(str(pair.own_folder))
    return refusal(check_drafter, spec, parse_model(target or str(pair.folder)), kind=kind)


def test_a_target_that_it_does_not_fit_is_refused_in_a_sentence(pair, tmp_path):
    made = pair("gemma4")
    other = pair("gemma4_unified")
    assert "not of 'gemma4_unified_text'" in refused(made, str(other.folder))
    assert "not of 'llama'" in refused(made, "smollm2-135m")
    heads = Pair(tmp_path / "heads", "gemma4", num_attention_heads=3, num_key_value_heads=3)
    assert "attends with 3 heads of size 8" in refused(heads)
    settings = json.loads((made.own_folder / "config.json").read_text())
    wide = change(made, tmp_path / "wide", settings | {"backbone_hidden_size": 64})
    assert "trained for another target: for hidden states of the size 64" in refused(wide)
    text = settings["text_config"]
    few_tokens = change(made, tmp_path / "few", settings | {"text_config": text | {"vocab_size": 9}})
    assert "trained for another target: for tokens 9" in refused(few_tokens)


def change(pair: Pair, folder: Path, settings: dict[str, Any], **tensors: torch.Tensor | None) -> Pair:
    """The same pair with another config.json of the assistant, and other tensors."""
    changed = object.__new__(Pair)
    vars(changed).update(vars(pair))
    changed.own_folder = folder
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    kept = load_file(pair.own_folder / "model.safetensors") | tensors
    save_file({name: each for name, each in kept.items() if each is not None}, folder / "model.safetensors")
    return changed


def test_damaged_files_are_refused_in_a_sentence(pair, tmp_path):
    made = pair("gemma4, centroids")
    settings = json.loads((made.own_folder / "config.json").read_text())
    target = load_target(str(made.folder), PLAIN)

    def loading(folder: Path, kind: type[SpecbenchError] = UsageError) -> str:
        return refusal(load_drafter, str(folder), target, PLAIN, kind=kind)

    odd = change(made, tmp_path / "odd", settings | {"num_centroids": 3})
    assert f"{VOCAB} tokens are not in 3 groups" in loading(odd.own_folder, RunError)
    lost = change(made, tmp_path / "lost", settings, **{"post_projection.weight": None})
    assert "post_projection.weight" in loading(lost.own_folder)
    assert "damaged" in refused(
        change(made, tmp_path / "own", settings | {"text_config": {"num_hidden_layers": "x"}}), kind=RunError
    )


def test_what_it_does_not_go_with_is_refused_in_a_sentence(pair):
    made, unified = pair("gemma4"), pair("gemma4_unified")
    assert "keys and values, which --cache none does not keep" in refusal(
        loaded, made, "none", kind=UsageError
    )
    mtp = parse_drafter("mtp"), parse_model(str(unified.folder))
    assert "Name the folder of its assistant" in refusal(check_drafter, *mtp, kind=UsageError)
    alone = refusal(load_config, parse_model(str(made.own_folder)), kind=UsageError)
    assert "it drafts from the keys and values of a Gemma 4 target" in alone
    setting = Setting(
        Recipe(parse_model(str(made.folder)), parse_drafter(str(made.own_folder)), parse_policy("fixed")),
        2,
        head=find_head(parse_model(str(made.own_folder))).training,  # type: ignore[union-attr]
    )
    assert "no Gemma 4 assistant heads" in refusal(load_engine("vllm").export, setting, kind=UsageError)
