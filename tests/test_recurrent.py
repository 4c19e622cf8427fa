"""Targets and drafters with recurrent layers: rolled back by choosing among states, exact, and read once per step."""

from __future__ import annotations

import copy
from functools import cache, wraps
from random import Random

import architectures as survey
import pytest
import torch
from scripted import ScriptedScorer, enumerate_outcomes, random_table, steps_of, tokens_of
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specbench.backends.torch.batch import RequestFactory
from specbench.backends.torch.parity import find_difference
from specbench.backends.torch.recurrent_cache import LONGEST_FORWARD
from specbench.backends.torch.scorer import Scorer
from specbench.check.deviation import clean_rows
from specbench.decoding.sampling import Sampling
from specbench.decoding.schedule import Scheduler
from specbench.drafters.model import ModelDrafter
from specbench.generate import GenerationRun, speculative_generate
from specbench.generate_many import GenerationRuns, speculative_generate_many
from specbench.kernels import native
from specbench.kernels.recurrence import delta_rule
from specbench.models.drafters import load_drafter
from specbench.models.target import wrap_target
from specbench.policies import FixedLength

FAMILIES = (
    "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "mamba2", "nemotron_h",
    "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2",
)  # fmt: skip
KINDS = ("mamba2", "kimi_linear", "qwen3_next")
"""One for each function of `transformers`."""
QUICK = [pytest.param(kind, marks=() if kind in KINDS else pytest.mark.slow) for kind in FAMILIES]
BOUNDED = ("bamba", "nemotron_h", "zamba2")
"""Families that bound the time steps of a prompt, as the tiny ones have it."""
LATENT = ("bailing_hybrid", "kimi_linear")
"""Families whose attention is computed from latent vectors, which a joint pass does not do."""
IDS = Random(1).choices(range(3, survey.VOCABULARY), k=24)


@cache
def built(kind, vocabulary=survey.VOCABULARY):
    """A tiny random model, and what `generate` answers to ``IDS``."""
    config_class = next(each for each in MODEL_FOR_CAUSAL_LM_MAPPING if each.model_type == kind)
    config = survey.tiny_config(config_class)
    config.vocab_size = vocabulary
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[config_class](config).eval().requires_grad_(False)
    model.generation_config = survey.GenerationConfig()
    return model, survey.generated(model, IDS) if vocabulary == survey.VOCABULARY else []


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_tokens_are_those_of_generate(kind):
    model, expected = built(kind)
    target = wrap_target(model, name="tiny", pack=False)
    drafters = [(survey.Guesses(IDS, expected, 4), 4), (load_drafter("self:int8", target), 4)]
    if kind in KINDS:
        drafters += [(None, 1), (survey.Guesses(IDS, expected, 7), 7), (load_drafter("lookup", target), 4)]
    for drafter, gamma in drafters:
        assert survey.decoded(IDS, target, drafter, gamma) == expected, f"{drafter} γ={gamma}"


# -- sampled exactness ------------------------------------------------------------------------------

FEW, NEW = 4, 3
PROMPT = [1, 2, 0, 1, 2]


def outcomes(model, drafter, sampling, gamma, first_target=True):
    """The probability of every output of ``NEW`` tokens, over all drafts and verdicts."""
    target = Scorer(model)

    def run(random):
        records = steps_of(
            PROMPT, target, drafter, policy=FixedLength(gamma), sampling=sampling, random=random, max_new_tokens=NEW,
            first_target=first_target,
        )  # fmt: skip
        return tuple(tokens_of(records))

    return enumerate_outcomes(run, NEW)


def of_the_target(model, sampling):
    """The same by the chain rule, from `transformers`' own decoding of every output."""
    growing = {(): 1.0}
    for _ in range(NEW):
        grown = {}
        for tokens, weight in growing.items():
            context = [*PROMPT, *tokens]
            logits = survey.one_by_one(model, context, len(PROMPT))[-1:]
            p = sampling.probabilities(logits, context)[0].double()
            grown |= {(*tokens, token): weight * float(p[token] / p.sum()) for token in range(FEW)}
        growing = grown
    return growing


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2"])
def test_sampled_outputs_have_the_targets_distribution(kind):
    """The drafts' every rejection rolls the states back, and a hybrid drafter's own states as well."""
    model, _ = built(kind, FEW)
    drafters = [ModelDrafter(ScriptedScorer(random_table(2, FEW), FEW), "table")]
    if kind == "qwen3_next":
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.1
        drafters.append(ModelDrafter(Scorer(other), "hybrid"))
    for drafter, sampling, gamma, first_target in (
        (drafters[0], Sampling(1.5), 2, True),
        (drafters[-1], Sampling(temperature=2.0, top_k=3), 1, False),
    ):
        expected = of_the_target(model, sampling)
        found = outcomes(model, drafter, sampling, gamma, first_target)
        assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
        assert max(abs(found.get(tokens, 0.0) - weight) for tokens, weight in expected.items()) < 1e-5


@pytest.mark.parametrize("kind", QUICK)
def test_a_pass_after_any_rollback_gives_the_logits_of_decoding_token_by_token(kind):
    model, expected = built(kind)
    text, prompt = [*IDS, *expected], len(IDS)
    whole = survey.one_by_one(model, text, prompt)
    random = Random(3)
    for rights, rejects in (((0, 3, 1, 6, 2, 5), True), ((4, 0, 4, 0, 0, 2), False)):
        scorer, read = Scorer(model), prompt
        scorer.logits(IDS)
        for right in rights:
            wrong = random.choices(range(3, survey.VOCABULARY), k=random.randint(0, 4) if rejects else 0)
            context = text[: read + 1]
            found = scorer.logits(context, [*text[read + 1 : read + 1 + right], *wrong])[: right + 1]
            torch.testing.assert_close(found, whole[read : read + right + 1], atol=2e-4, rtol=0)
            read += 1 + (random.randint(0, right) if rejects else right)
            scorer.rollback(read)


def noted_passes(model, monkeypatch):
    """Return a list that gets the rows of each pass from now on; the model's forward keeps its signature."""
    fed, forward = [], type(model).forward

    @wraps(forward)
    def run(*given, **named):
        fed.append(named["input_ids"].shape[1])
        return forward(*given, **named)

    monkeypatch.setattr(type(model), "forward", run)
    return fed


@pytest.mark.parametrize("kind", QUICK)
def test_the_target_is_read_once_per_step(kind, monkeypatch):
    """Neither a rejection nor a step without a draft reads anything again."""
    model, expected = built(kind)
    target = wrap_target(model, name="tiny", pack=False)
    fed = noted_passes(model, monkeypatch)
    drafter = survey.Guesses(IDS, expected, 4)
    result = speculative_generate(IDS, target, drafter, gamma=4, max_new_tokens=40, ignore_eos=True)
    assert list(result.token_ids) == expected
    assert len(fed) == len(result.steps) + 1, "the prompt's pass and one for each step"
    assert sum(fed) == len(IDS) + sum(1 + len(step.drafted) for step in result.steps)


@pytest.mark.parametrize("kind", QUICK)
def test_batches_give_what_requests_give_alone(kind, monkeypatch):
    model, _ = built(kind)
    prompts = [IDS[:length] for length in (3, 8, 17, 24)]
    expected = [survey.generated(model, prompt) for prompt in prompts]
    target = wrap_target(model, name="tiny", pack=False)
    joint = RequestFactory(target.scorer, 4096, 1024).why_not_batched is None
    assert joint == (kind not in LATENT)
    rows = noted_passes(model, monkeypatch)
    for batch in (1, 4):
        rows.clear()
        outputs = speculative_generate_many(
            prompts, target, "lookup", max_batch=batch, max_new_tokens=survey.NEW, ignore_eos=True
        )
        results = outputs.results()
        assert [list(output.token_ids) for output in results] == expected
        passes = [len(output.steps) + 1 for output in results]
        assert len(rows) <= max(passes) + 1 if joint and batch == 4 else len(rows) >= sum(passes)


@pytest.mark.parametrize("kind", BOUNDED)
@pytest.mark.parametrize("length", [1, 24])
def test_time_steps_are_bounded_in_prompts_alone(kind, length):
    """Passes of outputs longer than a draft usually is, and of the context again, do not bound them."""
    model, _ = built(kind)
    prompt, new = IDS[:length], LONGEST_FORWARD + 40
    expected = survey.generated(model, prompt, new)
    target = wrap_target(model, name="tiny", pack=False)
    for wrong in (0.0, 0.02):
        drafter = survey.Guesses(prompt, expected, 1, wrong)
        assert survey.decoded(prompt, target, drafter, LONGEST_FORWARD + 20, new) == expected
    assert survey.decoded(prompt, wrap_target(model, cache="none"), drafter, 4, 20) == expected[:20]
    assert find_difference(target.scorer, prompt, expected, expected[:90], Sampling()).numerical_tie is False
    clean = list(clean_rows(target.scorer, prompt, expected[:90]))
    assert [int(row.argmax()) for row in clean] == expected[:90]


@pytest.mark.parametrize("kind", BOUNDED)
@pytest.mark.parametrize("pool", ["roomy", "small"])
def test_the_end_of_a_long_prompt_is_read_like_its_beginning(kind, pool, monkeypatch):
    """A pass has at most 512 tokens; in a small pool, requests are preempted and read again."""
    model, _ = built(kind)
    monkeypatch.setattr(model.config, "max_position_embeddings", 1024, raising=False)
    lengths = (540, 20) if pool == "roomy" else (70, 80, 90)
    prompts = [Random(length).choices(range(3, survey.VOCABULARY), k=length) for length in lengths]
    expected = [survey.generated(model, prompt) for prompt in prompts]
    target = wrap_target(model, name="tiny", pack=False)
    preempt, preempted = Scheduler._preempt, []
    monkeypatch.setattr(Scheduler, "_preempt", lambda *given: preempted.append(given) or preempt(*given))
    many = speculative_generate_many(
        prompts, target, "lookup", max_batch=3, max_new_tokens=survey.NEW, ignore_eos=True,
        **({} if pool == "roomy" else {"pool_tokens": 260}),
    )  # fmt: skip
    assert [list(output.token_ids) for output in many.results()] == expected
    assert bool(preempted) == (pool == "small")


def test_drafts_in_the_first_pass_of_a_batch_are_no_part_of_the_prompt():
    """Zamba 2 bounds the time steps of a prompt, and a rejected draft must not have it read again."""
    model, _ = built("zamba2")
    prompts = [[*IDS[:4], *IDS[:4]], [*IDS[5:9], *IDS[5:9], *IDS[5:7]]]
    expected = [survey.generated(model, prompt) for prompt in prompts]
    target = wrap_target(model, name="tiny", pack=False)
    options = {"max_new_tokens": survey.NEW, "ignore_eos": True, "first_target": False}
    runs = [
        GenerationRun(prompt, target, load_drafter("lookup", target), policy=FixedLength(3), **options)
        for prompt in prompts
    ]
    results = GenerationRuns(runs, max_batch=2).results()
    assert all(output.steps[0].drafted for output in results)
    assert [list(output.token_ids) for output in results] == expected


def test_what_is_no_longer_kept_is_read_again():
    model, expected = built("qwen3_next")
    scorer = Scorer(model)
    first = scorer.logits([*IDS, *expected])
    scorer.rollback(len(IDS))
    assert scorer.cached_len == 0, "a first pass keeps its last state alone"
    scorer.logits(IDS)
    long = Random(2).choices(range(3, survey.VOCABULARY), k=LONGEST_FORWARD + 5)
    scorer.logits(IDS, long)
    scorer.rollback(len(IDS) + 3)
    assert scorer.cached_len == 0
    torch.testing.assert_close(scorer.logits([*IDS, *expected]), first)


def test_other_caches_and_other_models_are_read_as_before():
    model, expected = built("mamba2")
    scorer = Scorer(model)
    other = type(model)(model.config)
    assert [type(each) for each in other.modules()] != [type(each) for each in model.modules()]
    assert not any(hasattr(each, "keeps_states") for each in other.modules())
    for _ in range(2):
        scorer.logits(IDS)
        scorer.logits([*IDS, expected[0]])  # a state has been handed out, and is not to be found by others
        assert survey.generated(model, IDS) == expected
        scorer.rollback(0)


def test_a_pass_that_failed_leaves_nothing_behind(monkeypatch):
    model, expected = built("mamba2")
    scorer = Scorer(model)
    scorer.logits(IDS)
    head = model.get_output_embeddings()
    monkeypatch.setattr(head, "forward", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        scorer.logits([*IDS, expected[0]], expected[1:4])
    monkeypatch.undo()
    scorer.rollback(len(IDS))
    assert survey.generated(model, IDS) == expected
    found = scorer.logits([*IDS, expected[0]], expected[1:4])
    whole = survey.one_by_one(model, [*IDS, *expected], len(IDS))
    torch.testing.assert_close(found, whole[len(IDS) : len(IDS) + 4], atol=2e-4, rtol=0)


@pytest.mark.skipif(not native.is_available(), reason="there is no native library")
@pytest.mark.parametrize("level", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("decays", "adds"),
    [((), False), ((24,), False), ((), True)],
    ids=["one decay", "a decay for each key", "Mamba 2"],
)
def test_the_native_delta_rule_follows_its_formula_with_the_same_bits_in_passes_of_any_length(
    level, decays, adds, monkeypatch
):
    own = native.loaded()
    if own.level < level:
        pytest.skip("this processor has no such instructions")
    monkeypatch.setattr(native, "loaded", lambda: own._replace(level=level))
    source = torch.Generator().manual_seed(0)
    rows, heads, values = 5, 4, 84  # vectors of four, of one, and what is left
    query, key = (torch.randn(1, rows, 2, 24, generator=source) for _ in range(2))
    value = torch.randn(1, values, heads, rows, generator=source).permute(0, 3, 2, 1)  # not contiguous
    g = -torch.rand(1, rows, heads, *decays, generator=source)
    beta, before = (
        torch.rand(1, rows, heads, generator=source),
        torch.randn(1, heads, 24, values, generator=source),
    )

    def run(first, last, state):
        part = [each[:, first:last] for each in (query, key, value, g, beta)]
        after = [torch.empty_like(state) for _ in range(last - first)]
        return delta_rule(*part, state, after, normalize=not adds, adds=adds), after

    found, states = run(0, rows, before)
    state = before
    for row in range(rows):
        alone, (after,) = run(row, row + 1, state)
        assert torch.equal(alone[:, 0], found[:, row])
        assert torch.equal(after, states[row])
        q, k = (each[0, row].repeat_interleave(2, 0) for each in (query, key))
        if not adds:
            q, k = (torch.nn.functional.normalize(each, dim=-1) for each in (q, k))
        decay = g[0, row].exp() if decays else g[0, row].exp()[:, None]
        faded = state[0] * decay[..., None]
        held = 0 if adds else torch.einsum("hkv,hk->hv", faded, k)
        delta = (value[0, row] - held) * beta[0, row][:, None]
        expected = faded + k[..., None] * delta[:, None]
        torch.testing.assert_close(after[0], expected, atol=1e-4, rtol=1e-4)
        read = torch.einsum("hkv,hk->hv", expected, q) / (1 if adds else 24**0.5)
        torch.testing.assert_close(found[0, row], read, atol=1e-4, rtol=1e-4)
        state = after
