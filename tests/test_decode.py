"""The loop, on scripted models: who is fed what, where an output ends, what is recorded and timed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from scripted import ScriptedCache, ScriptedScorer, Ticking, fixed_script, random_table, steps_of, tokens_of
from tiny import tiny_language_model, tiny_llama

from specbench.base.errors import UsageError
from specbench.decoding.drafts import Draft, StepOutcome
from specbench.decoding.metrics import time_split
from specbench.decoding.protocols import (
    Decoding,
    Drafter,
    DrafterTraits,
    NewPrompt,
    NoDraft,
    StepPlan,
    run_to_end,
)
from specbench.decoding.records import Prefill, Step
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.stops import StopRules
from specbench.drafters.model import ModelDrafter, SelfDrafter
from specbench.generate import GenerationRun
from specbench.models.drafters import join_cascade, load_drafter, wrap_drafter
from specbench.models.target import Target, wrap_target
from specbench.policies import FixedLength
from specbench.specs.drafters import Cascade, Lookup, SelfForm

pytestmark = pytest.mark.smoke

VOCAB = 12
PROMPT = [1, 2, 3]
SCRIPT = [4, 5, 6, 7, 8, 9]


def script(tokens: Sequence[int] = SCRIPT, **options: object) -> ScriptedScorer:
    return ScriptedScorer(fixed_script(tokens, VOCAB, len(PROMPT)), VOCAB, **options)


class FixedDraft(Drafter):
    """Proposes what it is told to, and keeps what the loop tells it."""

    def __init__(self, tokens: Sequence[int], start: int = len(PROMPT)) -> None:
        super().__init__(DrafterTraits("fixed"))
        self.tokens, self.start = list(tokens), start
        self.commits: list[tuple[int, int, int]] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.commits.clear()

    def propose(self, context, plan) -> Decoding[Draft]:
        yield from ()
        at = (len(context) - self.start) % len(self.tokens)
        return Draft((self.tokens[at:] + self.tokens[:at])[: plan.policy.begin_step(plan.budget)])

    def update(self, outcome: StepOutcome) -> None:
        rows = outcome.deciding()
        assert len(rows) == outcome.emitted
        fits = int(rows[-1].argmax()) == outcome.context[-1]
        self.commits.append((len(outcome.context), outcome.emitted, fits))


def decode(
    target: ScriptedScorer,
    drafter: object = None,
    *,
    gamma: int = 3,
    max_new_tokens: int = 6,
    sampling: Sampling | None = None,
    seed: int = 0,
    end_ids: Sequence[int] = (),
    **options: object,
) -> tuple[Prefill, list[Step]]:
    first, *steps = steps_of(
        PROMPT, target, drafter or NoDraft(), policy=options.pop("policy", None) or FixedLength(gamma),
        sampling=sampling or Sampling(), random=Randomness(seed), max_new_tokens=max_new_tokens,
        stops=StopRules(end_ids), **options,
    )  # fmt: skip
    assert isinstance(first, Prefill)
    assert [record.finish_reason is None for record in [first, *steps]] == [True] * len(steps) + [False]
    return first, steps


def output(first: Prefill, steps: list[Step]) -> list[int]:
    return tokens_of([first, *steps])


def test_plain_decoding_is_one_pass_a_token():
    target = script()
    first, steps = decode(target)
    assert output(first, steps) == SCRIPT
    assert target.passes == [3, 1, 1, 1, 1, 1]
    assert [step.closing for step in steps] == ["target"] * 5
    assert [step.gamma for step in steps] == [0] * 5


def test_a_whole_draft_earns_a_bonus_token():
    target = script()
    _first, steps = decode(target, FixedDraft(SCRIPT), gamma=3, max_new_tokens=9)
    assert [(len(each.tokens), each.accepted, each.tested, each.closing) for each in steps] == [
        (4, 3, 3, "bonus")
    ] * 2
    assert target.passes == [3, 4, 4]
    assert steps[0].position == len(PROMPT) + 1


def test_a_rejection_is_corrected():
    _first, steps = decode(script(), FixedDraft([4, 5, 0, 7, 8, 9]), gamma=3, max_new_tokens=6)
    assert (steps[0].drafted, steps[0].tokens, steps[0].closing) == ((5, 0, 7), (5, 6), "corrected")
    assert (steps[0].accepted, steps[0].tested, steps[0].expected_acceptance) == (1, 2, (1.0, 0.0))


def test_nothing_is_drafted_for_the_last_token():
    drafter = FixedDraft(SCRIPT)
    _, steps = decode(script(), drafter, gamma=5, max_new_tokens=2)
    assert [step.gamma for step in steps] == [0]
    _, steps = decode(script(), drafter, gamma=5, max_new_tokens=4)
    assert [step.gamma for step in steps] == [2]


def test_a_stop_among_the_accepted_drafts_leaves_no_closing_token():
    _, steps = decode(script(), FixedDraft(SCRIPT), gamma=4, max_new_tokens=30, end_ids=[6])
    assert steps[-1].tokens == (5, 6)
    assert (steps[-1].closing, steps[-1].accepted, steps[-1].tested, steps[-1].gamma) == (None, 2, 2, 4)


def test_an_end_token_may_be_the_first_token():
    first, steps = decode(script(), end_ids=[4])
    assert (first.token, first.finish_reason, steps) == (4, "eos", [])
    first, _ = decode(script(), max_new_tokens=1)
    assert (first.token, first.finish_reason) == (4, "length")


@pytest.mark.parametrize(("prompt", "limit", "new"), [([1, 2, 3], 2, 1), ([1], None, 0), ([], None, 1)])
def test_a_request_that_cannot_be_is_refused(prompt, limit, new):
    records = steps_of(
        prompt, script(context_limit=limit), NoDraft(), policy=FixedLength(1), max_new_tokens=new
    )
    with pytest.raises(UsageError):
        list(records)


def model_drafter(draft: list[int], **options: object) -> ModelDrafter:
    return ModelDrafter(script(draft, **options), "model")


def test_the_drafter_is_fed_what_its_cache_lacks():
    drafter = model_drafter(SCRIPT)
    target = script()
    decode(target, drafter, gamma=2, max_new_tokens=7)
    # Prompt and first token, one draft more; after a whole acceptance the last draft and the bonus token.
    assert drafter.scorer.passes == [4, 1, 2, 1]
    rejected = model_drafter([4, 5, 0, 7, 8, 9])
    decode(script(), rejected, gamma=3, max_new_tokens=6)
    assert rejected.scorer.passes[:4] == [4, 1, 1, 1]
    assert rejected.scorer.passes[3:] == [1, 1], "after a rejection one corrected token is new"


@pytest.mark.parametrize("keeps", [True, False], ids=["cache", "no cache"])
def test_the_drafters_first_pass_alone_is_its_prefill(keeps):
    class NoCache(ScriptedCache):
        """What a scorer over it feeds is forgotten at once."""

        @property
        def length(self) -> int:
            self.entries.clear()
            return 0

    scorer = script(cache=ScriptedCache() if keeps else NoCache())
    drafter, clock = ModelDrafter(scorer, "model"), Ticking()
    drafter.clock = clock
    _, steps = decode(script(), drafter, gamma=2, max_new_tokens=9, clock=clock)
    assert [step.times.draft_prefill_s for step in steps] == [1.0, *[0.0] * (len(steps) - 1)]
    assert len(steps) > 1


@pytest.mark.parametrize("limit", range(3, 10))
def test_a_drafter_behind_its_own_context_limit_proposes_nothing(limit):
    drafter = model_drafter(SCRIPT, context_limit=limit)
    result = decode(script(), drafter, gamma=3, max_new_tokens=12)
    assert output(*result) == (SCRIPT * 2)[:12]
    assert result[1][-1].gamma == 0
    assert any(step.gamma for step in result[1]) == (limit >= 4)


def test_a_drafter_that_lacks_a_token_of_the_context_proposes_nothing():
    drafter = model_drafter(SCRIPT)
    drafter.scorer.embeddings = 6  # tokens 6 and up are padding to it
    result = decode(script(), drafter, gamma=3, max_new_tokens=6)
    assert output(*result) == SCRIPT
    assert result[1][0].gamma == 3
    assert [step.gamma for step in result[1][1:]] == [0] * len(result[1][1:])


@pytest.mark.parametrize("first_target", [True, False])
def test_a_self_drafter_leaves_nothing_of_its_own_in_the_cache(first_target):
    target = script(cache=ScriptedCache())  # asserts that it reads its own entries only
    cheaper = script([4, 5, 0, 7, 8, 9], cache=target.cache, own_entries_only=False)
    result = decode(
        target, SelfDrafter(cheaper, "self"), gamma=3, max_new_tokens=12, first_target=first_target
    )
    assert output(*result) == SCRIPT * 2
    assert sum(step.accepted for step in result[1]) > 0


def test_the_loop_tells_the_drafter_what_was_emitted():
    drafter = FixedDraft([4, 5, 0, 7, 8, 9])
    _, steps = decode(script(), drafter, gamma=3, max_new_tokens=6)
    assert [emitted for _, emitted, _ in drafter.commits] == [1, *(len(step.tokens) for step in steps)]
    assert all(matches for _, _, matches in drafter.commits), (
        "a row of logits does not stand before its token"
    )
    assert [length for length, _, _ in drafter.commits][-1] == len(PROMPT) + 6


@pytest.mark.parametrize("drafter", ["model", "fixed"])
def test_the_same_seed_gives_the_same_tokens(drafter):
    def run(seed: int, trace: bool = False) -> list[int]:
        target = ScriptedScorer(random_table(3, VOCAB), VOCAB)
        model = ModelDrafter(ScriptedScorer(random_table(4, VOCAB), VOCAB), "model")
        chosen = model if drafter == "model" else FixedDraft(SCRIPT)
        return output(
            *decode(target, chosen, sampling=Sampling(1.0), seed=seed, max_new_tokens=40, trace=trace)
        )

    assert run(1) == run(1) == run(1, trace=True)
    assert len({tuple(run(seed)) for seed in range(5)}) == 5


def test_a_trace_shows_every_draft():
    target = ScriptedScorer(random_table(3, VOCAB), VOCAB)
    drafter = ModelDrafter(ScriptedScorer(random_table(4, VOCAB), VOCAB), "model")
    _, steps = decode(target, drafter, sampling=Sampling(1.0), max_new_tokens=60, trace=True)
    seen = set()
    for step in steps:
        assert step.verdicts is not None
        assert [v.token for v in step.verdicts] == list(step.drafted)
        for i, verdict in enumerate(step.verdicts):
            seen.add(verdict.verdict)
            if verdict.verdict == "untested":
                assert i >= step.tested
                assert verdict.p is verdict.r is None
                continue
            assert verdict.p is not None
            assert verdict.r is not None
            assert (verdict.r < min(1.0, verdict.p / verdict.q)) == (verdict.verdict == "accepted")
            assert (verdict.verdict == "accepted") == (i < step.accepted)
        if step.closing is not None:
            assert step.closing_probability is not None
            assert 0.0 < step.closing_probability <= 1.0 + 1e-6
    assert seen == {"accepted", "rejected", "untested"}


def test_a_greedy_trace_reads_the_untempered_softmax():
    first, steps = decode(script(), model_drafter([4, 5, 0, 7, 8, 9]), trace=True)
    verdicts = steps[0].verdicts
    assert verdicts is not None
    expected = float(torch.tensor([10.0] + [0.0] * (VOCAB - 1)).softmax(0)[0])
    assert verdicts[0].q == pytest.approx(expected)
    assert verdicts[0].p == pytest.approx(expected)
    assert verdicts[1].p == pytest.approx((1 - expected) / (VOCAB - 1), rel=1e-3)
    assert all(verdict.r is None for verdict in verdicts)
    assert steps[0].closing_probability == pytest.approx(expected)
    assert first.probability == pytest.approx(expected)


def test_the_consumers_time_is_not_counted():
    clock = Ticking()
    records = []
    for record in steps_of(
        PROMPT, script(), FixedDraft(SCRIPT), clock, policy=FixedLength(2), max_new_tokens=7
    ):
        records.append(record)
        clock.time += 1000.0
    first, *steps = records
    assert first.time_s == 5.0
    for step in steps:
        assert step.times.total_s == pytest.approx(5.0)
        assert (step.times.draft_s, step.times.verify_s, step.times.accept_s) == (1.0, 1.0, 1.0)
    ttft_s, times = time_split(first, steps)
    assert (ttft_s, times.total_s) == (5.0, pytest.approx(5.0 * len(steps)))


def test_the_length_rule_sees_every_step_and_starts_afresh():
    class Watching(FixedLength):
        def __init__(self) -> None:
            super().__init__(2)
            self.events: list[object] = []

        def begin(self, prompt: NewPrompt) -> None:
            self.events.append(prompt.unread)

        def observe(self, step: Step) -> None:
            self.events.append(step.index)

        def notes(self) -> dict[str, float]:
            return {"γ": 2.0}

    policy = Watching()
    _, steps = decode(script(), FixedDraft(SCRIPT), policy=policy, max_new_tokens=7)
    assert policy.events == [0, *range(len(steps))]
    assert all(step.policy == {"γ": 2.0} for step in steps)


@pytest.mark.parametrize("gamma", [1, 8, 9, 40])
def test_a_sampled_draft_has_the_distributions_of_its_tokens(gamma):
    """They lie in memory that is used again, and grows while a draft is drawn."""
    table, sampling = random_table(4, VOCAB), Sampling(1.3)
    drafter = ModelDrafter(ScriptedScorer(table, VOCAB), "model")
    context = [1, 2, 3]
    drafter.begin(context)
    for length in (2, gamma, 3):
        policy = FixedLength(length)
        draft = run_to_end(drafter.propose(context, StepPlan(length, policy, sampling, Randomness(length))))
        assert draft.q is not None
        assert draft.q.shape == (length, VOCAB)
        for i, row in enumerate(draft.q):
            logits = table([*context, *draft.tokens[:i]])[None]
            assert torch.equal(row, sampling.probabilities(logits, context)[0])
        context = [*context, *draft.tokens]
        drafter.update(StepOutcome(context, 0, torch.empty(0)))


# --- Runs that are paused -------------------------------------------------------------------------


def tiny_target() -> Target:
    return wrap_target(tiny_llama(), name="tiny")


def run_of(
    target: Target, drafter: Drafter | None = None, prompt: Sequence[int] = (1, 2, 3, 1, 2)
) -> GenerationRun:
    return GenerationRun(prompt, target, drafter, max_new_tokens=12, ignore_eos=True)


def drafter_of(word: str, target: Target) -> Drafter:
    if word == "model":
        return wrap_drafter(tiny_language_model(1), target)
    if word == "lookup+model":
        return join_cascade(Cascade(Lookup(), SelfForm()), wrap_drafter(tiny_language_model(1), target))
    return load_drafter(word, target)


def test_a_paused_run_does_not_go_on_upon_another_one_s_context():
    target = tiny_target()
    runs = [run_of(target), run_of(target, load_drafter("self:int8", target), [7, 8, 9])]
    with pytest.raises(
        UsageError, match=r"interrupted by another one.* Let one finish before the next begins"
    ):
        list(zip(*runs, strict=False))
    assert runs[0].result().finish_reason is None
    assert len(runs[0].result().token_ids) == 1
    list(runs[1])
    assert runs[1].result().token_ids == finished(run_of(target, None, [7, 8, 9])), "the later one goes on"


@pytest.mark.parametrize("word", ["model", "lookup", "ngram", "ngram:keep", "lookup+model"])
def test_a_paused_run_does_not_go_on_with_a_drafter_that_has_begun_another_context(word):
    targets = [tiny_target(), tiny_target()]
    drafter = drafter_of(word, targets[0])
    runs = [run_of(target, drafter) for target in targets]
    with pytest.raises(UsageError, match="a target and a drafter of its own"):
        list(zip(*runs, strict=False))


@pytest.mark.parametrize("word", ["self:int8", "self:layers=1", "lookup+self:int8"])
def test_a_self_drafter_belongs_to_its_target(word):
    first, second = tiny_target(), tiny_target()
    drafter = load_drafter(word, first)
    with pytest.raises(UsageError, match=r"was made for another target. Make one for this target"):
        run_of(second, drafter)
    assert finished(run_of(first, drafter)) == finished(run_of(second))


@pytest.mark.parametrize("word", ["model", "lookup+model"])
def test_a_drafter_for_logits_of_another_width(word):
    wider = wrap_target(tiny_llama(vocab_size=512))
    with pytest.raises(UsageError, match="512"):
        run_of(wider, drafter_of(word, tiny_target()))


def finished(run: GenerationRun) -> tuple[int, ...]:
    for _ in run:
        pass
    return run.result().token_ids
