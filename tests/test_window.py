"""Drafters that read only the beginning and the end of the context: what they read, and that outputs stay the same."""

from __future__ import annotations

import random as standard_random

import pytest
from head_files import eagle_settings, eagle_tensors, write_head
from scripted import ScriptedScorer, random_table
from tiny import save_tiny, tiny_language_model, tiny_llama, tiny_tokenizer
from transformers import MixtralConfig, MixtralForCausalLM

from specbench import GenerationRun, autoregressive_generate, load_drafter, wrap_drafter, wrap_target
from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import UsageError
from specbench.decoding.drafts import StepOutcome
from specbench.decoding.protocols import run_to_end
from specbench.decoding.sampling import Greedy, Randomness
from specbench.drafters.model import ModelDrafter
from specbench.drafters.parts import context_limit
from specbench.drafters.window import SINKS, WindowDrafter
from specbench.generate_many import GenerationRuns
from specbench.models.drafters import check_drafter
from specbench.policies import FixedLength, build_policy
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import parse_model

VOCAB, WINDOW = 5, 6
TABLE = random_table(3, VOCAB)


def proposed(drafter: ModelDrafter, context: list[int], length: int = 3) -> list[int]:
    run = drafter.propose(context, length, FixedLength(length), Greedy(), Randomness(0))
    return list(run_to_end(run).tokens)


@pytest.mark.smoke
def test_it_drafts_after_the_first_tokens_and_the_last_ones():
    """At every length of a growing context its draft is that of a new model that reads this text alone."""
    choice = standard_random.Random(1)
    context = [choice.randrange(VOCAB) for _ in range(3)]
    scorer = ScriptedScorer(TABLE, VOCAB)
    drafter = WindowDrafter(scorer, "window", WINDOW)
    drafter.begin(context)
    starts = set()
    while len(context) < 60:
        drafted = proposed(drafter, context)
        start = drafter._start
        starts.add(start)
        own = context if start == SINKS else [*context[:SINKS], *context[start:]]
        assert len(own) <= SINKS + WINDOW + WINDOW // 2
        assert start == SINKS or len(context) - start >= WINDOW
        assert drafted == proposed(ModelDrafter(ScriptedScorer(TABLE, VOCAB), "fresh"), own)
        kept = choice.randrange(len(drafted) + 1)
        new = [*drafted[:kept], choice.randrange(VOCAB)]
        context += new
        drafter.update(StepOutcome(context, len(new), TABLE([0])[None], drafted, range(kept)))
    assert len(starts) > 5


def test_a_long_prompt_is_read_in_part():
    scorer = ScriptedScorer(TABLE, VOCAB)
    drafter = WindowDrafter(scorer, "window", WINDOW)
    drafter.begin([])
    proposed(drafter, [1, 2, 3, 4] * 50, 1)
    assert scorer.passes == [SINKS + WINDOW]
    assert context_limit(drafter) is None
    short = WindowDrafter(ScriptedScorer(TABLE, VOCAB, context_limit=30), "window", WINDOW)
    short.begin([])
    assert len(proposed(short, [1, 2, 3, 4] * 50)) == 3, "its positions stay within its limit"


def test_the_next_prompt_of_a_conversation_takes_up_what_is_still_read():
    scorer = ScriptedScorer(TABLE, VOCAB)
    drafter = WindowDrafter(scorer, "window", WINDOW)
    drafter.guesses = None
    scorer.resume = scorer.cache.rollback  # type: ignore[attr-defined]
    first = [1, 2, 3, 4] * 10
    drafter.begin(first)
    proposed(drafter, first, 1)
    scorer.passes.clear()
    longer = [*first, 2]
    drafter.resume(longer, len(first) - 1)
    assert proposed(drafter, longer) == proposed(
        ModelDrafter(ScriptedScorer(TABLE, VOCAB), "fresh"), [*longer[:SINKS], *longer[drafter._start :]]
    )
    assert scorer.passes[0] == 2
    other = [*first[:10], 0, 1]
    drafter.resume(other, 10)
    assert proposed(drafter, other) == proposed(ModelDrafter(ScriptedScorer(TABLE, VOCAB), "fresh"), other)


# -- real models -------------------------------------------------------------------------------------


def texts(count: int) -> list[list[int]]:
    choice = standard_random.Random(5)
    return [[choice.randrange(250) for _ in range(choice.randint(20, 90))] for _ in range(count)]


@pytest.mark.parametrize("policy", ["fixed:gamma=3", "auto", "dynamic-tree:nodes=5"])
def test_greedy_outputs_are_plain_decodings(policy):
    target = wrap_target(tiny_llama(), tiny_tokenizer())
    alike = WindowDrafter(Scorer(tiny_llama()), "alike", 16)
    other = WindowDrafter(Scorer(tiny_llama(seed=1, layers=1)), "other", 16)
    accepted = 0
    for prompt in texts(3):
        expected = autoregressive_generate(prompt, target, max_new_tokens=40).token_ids
        for drafter in (alike, other):
            run = GenerationRun(prompt, target, drafter, policy=build_policy(policy), max_new_tokens=40)
            steps = [each for each in run if hasattr(each, "accepted")]
            assert run.result().token_ids == expected
            accepted += sum(step.accepted for step in steps)
        assert drafter._start > SINKS
    assert accepted > 0


def test_requests_of_a_batch_have_the_drafts_that_they_have_alone():
    target = wrap_target(tiny_llama(), tiny_tokenizer())
    drafter = WindowDrafter(Scorer(tiny_llama(seed=1, layers=1)), "other", 16)

    def run(prompt: list[int]) -> GenerationRun:
        return GenerationRun(prompt, target, drafter, policy=FixedLength(3), max_new_tokens=30)

    def told(run: GenerationRun) -> list[tuple[object, ...]]:
        return [(step.drafted, step.tokens) for step in run.result().steps]

    alone = []
    for prompt in texts(5):
        each = run(prompt)
        assert all(True for _ in each)
        alone.append(told(each))
    many = [run(prompt) for prompt in texts(5)]
    for _ in GenerationRuns(many, max_batch=4):
        pass
    assert [told(each) for each in many] == alone


# -- specs -------------------------------------------------------------------------------------------


def test_a_window_is_an_option_of_a_model():
    spec = parse_drafter("org/small:window=64,vocab=9")
    assert (str(spec), spec.window, spec.vocab) == ("org/small:vocab=9,window=64", 64, 9)
    with pytest.raises(UsageError, match="window"):
        parse_drafter("org/small:window=15")
    target = wrap_target(tiny_llama(), tiny_tokenizer())
    made = wrap_drafter(tiny_language_model(1), target, window=64)
    assert isinstance(made, WindowDrafter)
    assert (made.window, made.name) == (64, "tiny-1:window=64 (float32)")


def test_a_drafter_is_expected_to_read_by_the_weights_of_its_layers(tmp_path):
    target = wrap_target(tiny_llama(layers=4), tiny_tokenizer())
    small = save_tiny(tmp_path / "small", seed=1, layers=2)
    head = write_head(tmp_path / "head", eagle_settings(), eagle_tensors())
    for spec in (f"{small}", f"{small}:window=64", f"lookup+{small}"):
        assert load_drafter(spec, target).prior.reading_share == 0.5
    # A layer whose projections read twice as much, and what joins three states, over four layers.
    assert 0.25 < load_drafter(str(head), target).prior.reading_share < 0.6
    assert load_drafter("lookup", target).prior.reading_share == 0.2
    experts = wrap_target(
        MixtralForCausalLM(MixtralConfig(**tiny_llama().config.to_dict(), num_local_experts=2)),
        tiny_tokenizer(),
    )
    assert load_drafter(f"{small}", experts).prior.reading_share == 0.2


def test_windows_that_cannot_be_are_refused(tmp_path):
    target = wrap_target(tiny_llama(), tiny_tokenizer())
    with pytest.raises(UsageError, match="reads up to 1,504 tokens, but tiny-1 takes 512"):
        wrap_drafter(tiny_language_model(1), target, window=1000)
    head = write_head(tmp_path / "head", eagle_settings(), eagle_tensors())
    with pytest.raises(UsageError, match="head head reads the target's hidden states of the whole context"):
        check_drafter(parse_drafter(f"{head}:window=64"), parse_model(str(save_tiny(tmp_path / "target"))))
