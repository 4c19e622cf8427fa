"""A drafter's head cut to the tokens that the target writes: what is counted and drafted, and that it is exact."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from tiny import save_tiny, tiny_language_model, tiny_llama, tiny_tokenizer

from specbench.base.errors import UsageError
from specbench.decoding.distributions import Scores
from specbench.decoding.logits import DraftVocabulary, Logits
from specbench.decoding.sampling import Multinomial
from specbench.generate import autoregressive_generate, speculative_generate
from specbench.models.calibrations import COUNTS, TokenCounts, not_counted
from specbench.models.drafters import load_drafter, wrap_drafter
from specbench.models.prepare import prepare
from specbench.models.target import Target, wrap_target
from specbench.options import ModelOptions
from specbench.policies import build_policy
from specbench.specs.drafters import Cascade, SmallModel, parse_drafter
from specbench.specs.models import parse_model
from specbench.tune.vocabulary import count_tokens, ranked_tokens

KEPT = (0, 5, 17, 64, 65, 101, 200, 280)


pytestmark = pytest.mark.usefixtures("own_cache")


def counted(target: Target, ranked: tuple[int, ...] = KEPT) -> None:
    COUNTS.write(target.language_model.fingerprint, TokenCounts(target.name, ranked, 9, (5, 5, 17, 3)))


# -- the notation ------------------------------------------------------------------------------------


def test_options_follow_the_last_colon(tmp_path, monkeypatch):
    spec = parse_drafter("org/name@v1:vocab=16000")
    assert spec == SmallModel(parse_model("org/name@v1"), 16000)
    assert str(spec) == "org/name@v1:vocab=16000"
    cascade = parse_drafter("lookup:n=4+smollm2-135m: vocab=100")
    assert isinstance(cascade, Cascade)
    assert cascade.back == SmallModel(parse_model("smollm2-135m"), 100)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:vocab=3").mkdir()
    assert parse_drafter("a:vocab=3") == SmallModel(parse_model("a:vocab=3"))
    assert parse_drafter("./a:vocab=3:vocab=4") == SmallModel(parse_model("./a:vocab=3"), 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("org/name:vocab=many", "'vocab' of a model is 'many', which is no whole number"),
        ("org/name:vocab=", "An option is empty"),
        ("org/name:vocab=0", "The option 'vocab' of MODEL is 0"),
        ("org/name:vocab=1,vocab=2", "given twice"),
        ("org/name:words=3", "is not a model name"),
        ("org/name:vocab", "is not a model name"),
    ],
)
def test_options_that_are_none(text, message):
    with pytest.raises(UsageError, match=message):
        parse_drafter(text)


# -- what is counted ---------------------------------------------------------------------------------


def test_the_order_of_tokens():
    assert ranked_tokens([7, 8, 8, 9, 8, 9], [2], [9, 4, 4, 3]) == (2, 8, 9, 7, 4, 3)


def test_what_was_not_seen_follows_by_its_id():
    counts = TokenCounts("t", (9, 4, 30), 3, (4, 4, 1, 8))
    assert counts.most_frequent(2, range(20)) == [4, 9]
    assert counts.most_frequent(5, range(20)) == [0, 1, 2, 4, 9]
    assert counts.most_frequent(2, (1, 4, 8)) == [1, 4]
    assert counts.coverage([4, 9]) == 0.5


def test_every_third_answer_shows_what_is_covered():
    target = wrap_target(tiny_llama(0), tiny_tokenizer())
    prompts = [[place, 40 + place, 7] for place in range(1, 7)]
    found = count_tokens(target, prompts, 5)
    answers = [autoregressive_generate(prompt, target, max_new_tokens=5).token_ids for prompt in prompts]
    assert found.held_out == (*answers[2], *answers[5])
    assert found.counted == sum(len(answers[i]) for i in (0, 1, 3, 4))
    assert set(found.ranked) == {
        *target.end_ids, *(t for i in (0, 1, 3, 4) for t in (*answers[i], *prompts[i]))
    }  # fmt: skip
    with pytest.raises(UsageError, match="at least 2 prompts"):
        count_tokens(target, prompts[:1], 5)


def test_counts_are_kept_and_damage_is_noticed(tmp_path):
    counts = TokenCounts("t", (3, 1), 2, (1, 5))
    with pytest.raises(UsageError, match="The tokens that t writes were not counted yet") as caught:
        COUNTS.require("f", not_counted("t"))
    assert "specbench calibrate --vocab" in str(caught.value.hint)
    COUNTS.write("f", counts)
    assert COUNTS.require("f", not_counted("t")) == counts
    file = next((tmp_path / "cache").rglob("f.json"))
    whole = file.read_text()
    for text in ("{", "[]", '{"format": 1}', whole.replace("[1, 5]", "[]"), whole.replace("3", "-3")):
        file.write_text(text)
        with pytest.raises(UsageError, match="damaged"):
            COUNTS.require("f", not_counted("t"))


# -- what is drafted ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("int8", [False, True])
def test_logits_are_the_whole_heads_and_none_elsewhere(tied, int8):
    target = wrap_target(tiny_llama(0), tiny_tokenizer())
    counted(target)
    models = [tiny_language_model(1), tiny_language_model(1)]
    for each in models if tied else []:
        head = torch.nn.Linear(32, each.vocab_size, bias=False)
        head.weight = each.model.get_input_embeddings().weight  # type: ignore[assignment]
        each.model.set_output_embeddings(head)
    embedding: Any = models[1].model.get_input_embeddings()
    before = embedding.weight.clone()
    whole = wrap_drafter(models[0], target, int8=int8).scorer.logits([3, 4, 5], [6])
    drafter = wrap_drafter(models[1], target, int8=int8, vocab=len(KEPT))
    trimmed = drafter.scorer.logits([3, 4, 5], [6])
    assert drafter.draftable == frozenset(KEPT)
    torch.testing.assert_close(trimmed, whole[:, KEPT], rtol=1e-4, atol=2e-2 if int8 else 1e-5)
    assert torch.equal(embedding.weight, before)
    assert drafter.name == f"tiny-1:vocab=8 ({'int8' if int8 else 'float32'})"


@pytest.mark.parametrize("rule", ["fixed:gamma=3", "static-tree:nodes=6", "dynamic-tree", "auto-tree"])
@pytest.mark.parametrize("sampling", [None, Multinomial()])
def test_the_target_s_own_twin_is_accepted_where_it_may_draft(sampling, rule):
    target = wrap_target(tiny_llama(0), tiny_tokenizer())
    plain = autoregressive_generate([3, 4, 5], target, max_new_tokens=30, ignore_eos=True)
    seen = tuple(dict.fromkeys(plain.token_ids[:15]))
    counted(target, seen)
    drafter = wrap_drafter(tiny_language_model(0), target, vocab=len(seen))
    found = speculative_generate(
        [3, 4, 5],
        target,
        drafter,
        policy=build_policy(rule),
        max_new_tokens=30,
        ignore_eos=True,
        sampling=sampling,
    )
    assert all(token in seen for step in found.steps for token in step.drafted)
    assert any(step.drafted for step in found.steps)
    if sampling is None:
        assert found.token_ids == plain.token_ids
        assert sum(step.accepted for step in found.steps) > 0


def test_a_few_tokens_have_the_chances_that_they_have_where_all_others_are_impossible():
    vocabulary = DraftVocabulary(torch.tensor([7, 2, 5, 0]), 9)
    values = torch.tensor([[1.0, -0.5, 3.0, 0.2], [0.3, 0.1, -2.0, 4.0]])
    spread = vocabulary.spread(values, -math.inf)
    for row, wide in zip(values, spread, strict=True):
        few, known = Logits(row, vocabulary), Logits(wide)
        assert few.log_sum == pytest.approx(known.log_sum, abs=1e-5)
        assert [few.log_chance(t) for t in range(9)] == pytest.approx(
            [known.log_chance(t) for t in range(9)], abs=1e-5
        )
        for count, least in ((2, -math.inf), (9, -3.0)):
            found, expected = few.likeliest(count, least), known.likeliest(count, least)
            assert {token for _, token in found} == {token for _, token in expected}
            assert all(chance == pytest.approx(few.log_chance(token), abs=1e-5) for chance, token in found)
    own = Scores.of(values.clone(), normalized=False, vocabulary=vocabulary)
    for each, whole in zip(own, Scores.of(spread.clone(), normalized=False), strict=True):
        assert each.best(3) == whole.best(3)
        assert each.chances(3) == pytest.approx(whole.chances(3), abs=1e-5)
        torch.testing.assert_close(each.q, whole.q)
    assert Logits.certain(4).log_chance(4) == 0.0
    assert Logits.certain(4).likeliest(3, -math.inf) == [(0.0, 4)]


@pytest.mark.parametrize("everywhere", [-math.inf, math.inf])
def test_logits_without_an_end_have_none_in_sum(everywhere):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Logits(torch.full((4,), everywhere)).log_sum == everywhere


def test_a_trace_has_the_chances_of_the_tokens_that_are_drafted():
    target = wrap_target(tiny_llama(0), tiny_tokenizer())
    counted(target)
    drafter = wrap_drafter(tiny_language_model(1), target, vocab=len(KEPT))
    found = speculative_generate([3, 4, 5], target, drafter, gamma=2, max_new_tokens=9, trace=True)
    step, draft = found.steps[0], found.steps[0].verdicts
    assert draft is not None
    drafter.scorer.begin()
    rows = drafter.scorer.logits([3, 4, 5, found.token_ids[0]], [draft[0].token]).softmax(-1)
    expected = [float(row[KEPT.index(each.token)]) for row, each in zip(rows, draft, strict=True)]
    assert [each.q for each in draft] == pytest.approx(expected, rel=1e-4)
    assert step.drafted == tuple(each.token for each in draft)


def test_a_vocabulary_that_cannot_be():
    target = wrap_target(tiny_llama(0), tiny_tokenizer())
    with pytest.raises(UsageError, match="not counted yet"):
        wrap_drafter(tiny_language_model(1), target, vocab=5)
    counted(target)
    with pytest.raises(UsageError, match=f"vocab={target.vocab_size} leaves none out"):
        wrap_drafter(tiny_language_model(1), target, vocab=target.vocab_size)
    quantized = tiny_language_model(1)
    wrap_drafter(quantized, target, int8=True)
    with pytest.raises(UsageError, match="not an ordinary linear layer"):
        wrap_drafter(quantized, target, vocab=5)
    trimmed = tiny_language_model(1)
    wrap_drafter(trimmed, target, vocab=5)
    with pytest.raises(UsageError, match="trimmed to another vocabulary"):
        wrap_drafter(trimmed, target)


def test_one_model_with_several_vocabularies(tmp_path):
    folders = [save_tiny(tmp_path / name, seed) for seed, name in enumerate(("target", "small"))]
    target = wrap_target(tiny_llama(0), tiny_tokenizer())
    loaded = prepare(parse_model(str(folders[0])), [], ModelOptions(dtype="float32"))[0]
    counted(loaded)
    small = folders[1]
    words = [f"{small}", f"{small}:vocab=5", f"lookup+{small}:vocab=5", f"{small}:vocab=8"]
    _, loaded_drafters = prepare(
        parse_model(str(folders[0])), list(map(parse_drafter, words)), ModelOptions(dtype="float32")
    )
    widths = [getattr(each.drafter, "draftable", None) for each in loaded_drafters]
    assert [None if width is None else len(width) for width in widths] == [None, 5, 5, 8]
    assert load_drafter(words[1], loaded).name == "small:vocab=5 (int8)"
    assert target.vocab_size == loaded.vocab_size


# -- the command line --------------------------------------------------------------------------------


def test_from_the_command_line(tmp_path, cli):
    folders = [save_tiny(tmp_path / name, seed) for seed, name in enumerate(("target", "small"))]
    models = ["--target", folders[0], "--dtype", "float32"]
    generate = ["generate", *models, "-n", 12, "--gamma", 3, "the thing", "--drafter"]
    drafter = f"{folders[1]}:vocab=40"
    cli(*generate, drafter).refused(2, "were not counted yet", "specbench calibrate --vocab 16000")
    count = ["calibrate", *models, "--vocab", 40, "--limit", 4, "--tokens", 4, "--quiet"]
    figures = cli(*count, "--json").json()
    assert (figures["vocab"], figures["tested"]) == (40, 4)
    assert f"40 tokens cover {figures['coverage']:.1%} of 4 tokens of other answers." in cli(*count).out
    found = cli(*generate, drafter, "--json").json()
    assert found["token_ids"] == cli(*generate, "none", "--json").json()["token_ids"]
    assert 0 <= found["draftable_share"] <= 1
    assert found["drafter"] == "small:vocab=40 (int8)"
