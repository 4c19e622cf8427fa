"""The check is itself checked: what is sound passes, and every planted bug is found, by the part that is meant to."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checked import (
    DRAFT,
    DRAFTERS,
    PROMPTS,
    TARGET,
    VOCAB,
    decoder_with,
    draft_model,
    request_of,
    result_of,
    setup_of,
    violated,
    with_records,
)
from scripted import ScriptedCache, ScriptedScorer
from tiny import tiny_language_model, tiny_llama

import specbench.check.deviation
import specbench.check.exact
import specbench.check.invariants
import specbench.decoding.request
import specbench.decoding.verify
from specbench.backends.torch.parity import find_difference, tie_units
from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import UsageError
from specbench.check.deviation import clean_rows, deviation, judge_deviations
from specbench.check.greedy import (
    check_greedy,
    run_greedy,
)
from specbench.check.observe import plainly
from specbench.check.outputs import ExternalOutput, check_output, read_outputs
from specbench.check.reference import reference_output
from specbench.decoding.clocks import Stopwatch
from specbench.decoding.drafts import Draft
from specbench.decoding.loop import DecodingLoop, decode
from specbench.decoding.protocols import Decoding, ForwardOutput, ForwardRequest
from specbench.decoding.records import Step
from specbench.decoding.request import Request
from specbench.decoding.sampling import Sampling
from specbench.decoding.stops import StopRules
from specbench.decoding.verify import Verdict
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter
from specbench.options import DecodingOptions

PROMPT, NEW = PROMPTS[0], 12


# --- Sound configurations -------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    "sampling", [Sampling(0.9), Sampling(1.2, top_k=5, top_p=0.9, min_p=0.02, repetition_penalty=1.7)]
)
def test_sound_configurations_pass(drafter, sampling):
    result = result_of(setup_of(drafter, sampling=sampling, first_target=sampling.top_k == 0))
    assert result.violations == []
    assert result.verdict == "identical"
    assert result.largest_error < 1e-6
    kinds = {place.kind for case in result.exact for place in case.positions}
    assert {"corrected", "enumerated"} <= kinds
    assert result.deviations is not None
    assert result.deviations.largest == 0


def test_ends_are_where_they_should_be():
    for end_ids, limit in (((4,), 40), ((), 5), ((2, 3), 40)):
        setup = setup_of(end_ids=end_ids, max_new_tokens=limit)
        assert result_of(setup).verdict == "identical"
    short = setup_of()
    short.target.context_limit = len(PROMPT) + 4
    assert result_of(short).verdict == "identical"


# --- Planted bugs ---------------------------------------------------------------------------------


def with_judge(patch: pytest.MonkeyPatch, broken: Callable[..., Any]) -> None:
    """Have verdicts made by ``broken``, which is handed the right one, the draft and the logits."""
    right = specbench.decoding.request.verification_of

    def verification(*arguments: Any) -> Any:
        sound = right(*arguments)
        judge = lambda draft, logits, *rest: broken(sound.judge(draft, logits, *rest), draft, logits)  # noqa: E731
        return SimpleNamespace(takes_trees=sound.takes_trees, drawing=sound.drawing, judge=judge)

    patch.setattr(specbench.decoding.request, "verification_of", verification)


@pytest.mark.parametrize("clamped", [True, False], ids=["not adjusted", "not clamped"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_wrong_residual_is_found(monkeypatch, drafter, clamped):
    if not clamped and drafter == "lookup":
        pytest.skip("its drafts have no q")
    wrong = lambda draft, p, i: p[i] if clamped else (p[i] - draft.q[i]).abs()  # noqa: E731
    monkeypatch.setattr(specbench.decoding.verify, "residual", wrong)
    result = result_of(setup_of(drafter))
    assert result.verdict == "wrong"
    assert result.largest_error > 1e-3
    assert violated(result) == set()
    assert result.verdict_against("plain") == "identical"  # greedy decoding does not show it


def swapped(draft: Draft, p: torch.Tensor) -> torch.Tensor:
    """q over p instead of p over q."""
    tokens = torch.tensor(draft.tokens).unsqueeze(-1)
    assert draft.q is not None
    return (draft.q.gather(-1, tokens) / p[: len(tokens)].gather(-1, tokens)).squeeze(-1).clamp_max(1.0)


def test_p_and_q_swapped_are_found_in_the_loop_and_in_the_function_that_everything_uses(monkeypatch):
    monkeypatch.setattr(specbench.decoding.verify, "acceptance_probabilities", swapped)
    result = result_of(setup_of("model"))
    assert "chance" in violated(result)
    for module in (specbench.decoding.verify, specbench.check.invariants):
        monkeypatch.setattr(module, "acceptance_probabilities", swapped)
    result = result_of(setup_of("model"))
    assert violated(result) == set()
    assert result.largest_error > 1e-3


def near(tokens: Sequence[int]) -> torch.Tensor:
    """A drafter that is nearly the target, so that chance rejects nothing."""
    return TARGET(tokens) + 1e-3 * DRAFT(tokens)


@pytest.mark.parametrize("table", [near, TARGET], ids=["near", "the target"])
def test_what_no_draw_has_exercised_is_tested_too(table, monkeypatch):
    """A few tokens whose drafts pass every test, with a correction that is wrong."""
    setup = replace(setup_of(max_new_tokens=5), drafter=draft_model(table, "same"))
    assert result_of(setup).verdict == "identical"
    monkeypatch.setattr(specbench.decoding.verify, "residual", lambda draft, p, i: p[i])
    result = result_of(setup)
    assert all(case.output.accepted == case.output.drafted for case in result.greedy)
    assert result.verdict == "wrong"


TAMPERINGS: dict[str, Callable[[list[int]], list[int]]] = {
    "the last is another": lambda tokens: [*tokens[:-1], (tokens[-1] + 1) % 3],
    "the first is another": lambda tokens: [(tokens[0] + 1) % 3, *tokens[1:]],
    "the last is lost": lambda tokens: tokens[:-1] if len(tokens) > 1 else tokens,
    "the last is doubled": lambda tokens: [*tokens, tokens[-1]],
    "one token always": lambda tokens: [0] * len(tokens),
}


@pytest.mark.parametrize(
    ("tampering", "sampling"),
    [(name, Sampling(0.9)) for name in TAMPERINGS]
    + [(name, Sampling()) for name in TAMPERINGS if name != "the last is lost"],  # which costs only time
)
def test_every_tampering_of_what_steps_emit_is_found(monkeypatch, tampering, sampling):
    def broken(verdict: Verdict, draft: Draft, *_: Any) -> Verdict:
        if draft.tokens:
            verdict.tokens[:] = TAMPERINGS[tampering](verdict.tokens)
        return verdict

    with_judge(monkeypatch, broken)
    for drafter in (draft_model(near, "near"), CascadeDrafter(LookupDrafter(), draft_model(near, "near"))):
        setup = replace(setup_of(sampling=sampling), drafter=drafter)
        assert result_of(setup).verdict == "wrong", drafter.traits.name


def test_an_ignored_end_token_is_found():
    result = result_of(setup_of(end_ids=(0, 1, 2, 3)), decoder_with(stops=StopRules()))
    assert violated(result) == {"stop"}
    assert "its end (eos)" in str(result.violations)
    result = result_of(setup_of(), decoder_with(max_new_tokens=NEW + 1))
    assert "continues after token 12, its end (length)" in str(result.violations)


class Proxy:
    """A target that rolls back to another length than it is told."""

    def __init__(self, scorer: Any, surplus: int) -> None:
        self._scorer, self._surplus = scorer, surplus

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:
        self._scorer.rollback(length + self._surplus, path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)


@pytest.mark.parametrize("surplus", [1, 2])
def test_a_rejected_token_left_in_the_cache_is_found(surplus):
    def decoder(request: Request, watch: Stopwatch) -> DecodingLoop:
        return decode(replace(request, target=Proxy(request.target, surplus)), watch)

    class Forgiving(ScriptedScorer):
        """Like a real model, it computes on whatever its cache holds."""

        def score(self, asked: ForwardRequest) -> ForwardOutput:
            if self.cache.length > len(asked.context) - 1:
                self.cache.rollback(len(asked.context) - 1)
                self.cache.entries[-1:] = [(0, self)]  # what was rejected, in the place of what was kept
            return super().score(asked)

    target = Forgiving(TARGET, VOCAB, cache=ScriptedCache())
    result = result_of(setup_of("lookup", target, sampling=Sampling()), decoder)
    assert "cache" in violated(result)
    assert result.verdict == "wrong"


def test_the_deviation_of_logits_shows_what_the_tokens_do_not():
    """A cache with a wrong token in it, while the argmax stays what it was."""

    def logits(tokens: Sequence[int]) -> torch.Tensor:
        row = TARGET(tokens).clone()
        row[int(row.argmax())] += 50.0
        return row

    class Spoilt(ScriptedScorer):
        def score(self, asked: ForwardRequest) -> ForwardOutput:
            found = super().score(asked)
            return ForwardOutput(found.logits + 0.3 * DRAFT([*asked.context])) if len(asked.tokens) else found

    target = Spoilt(logits, VOCAB)
    setup = replace(setup_of(sampling=Sampling()), target=target, drafter=draft_model(logits))
    result = result_of(setup)
    assert result.verdict_against("plain") == "identical"
    assert violated(result) == set()
    assert result.deviations is not None
    assert not result.deviations.sound
    assert result.verdict == "wrong"


class Peeking(ModelDrafter):
    """Says that its tokens came from another distribution than they did."""

    def propose(self, *arguments: Any) -> Decoding[Draft]:
        draft = yield from super().propose(*arguments)
        if draft.q is not None:
            draft.q = draft.q.sqrt() / draft.q.sqrt().sum(dim=-1, keepdim=True)
        return draft


def test_drafts_that_were_not_drawn_from_their_q_are_found():
    setup = replace(setup_of(), drafter=Peeking(ScriptedScorer(DRAFT, VOCAB), "wrong"))
    assert violated(result_of(setup)) == {"chance"}


def test_greedy_decoding_that_draws_is_found():
    def decoder(request: Request, watch: Stopwatch) -> DecodingLoop:
        def draw(step: Step) -> Step:
            request.random.draw(torch.ones(3))
            return step

        return with_records(draw)(request, watch)

    assert "choice" in violated(result_of(setup_of(sampling=Sampling()), decoder))


def test_records_behind_the_end_are_found():
    def decoder(request: Request, watch: Stopwatch) -> DecodingLoop:
        last: list[Step] = []
        yield from with_records(lambda step: last.append(step) or step)(request, watch)  # type: ignore[func-returns-value]
        yield replace(last[-1], index=last[-1].index + 1)

    assert "stop" in violated(result_of(setup_of(sampling=Sampling()), decoder))


# --- Greedy outputs -------------------------------------------------------------------------------


class Row:
    """A scorer with one row of logits for every context."""

    def __init__(self, values: Sequence[float], dtype: torch.dtype) -> None:
        self.row = torch.tensor(values, dtype=torch.float32 if dtype == torch.int8 else dtype)
        self.rounding = dtype
        self.vocab_size = self.embeddings = len(values)
        self.context_limit: int | None = None

    def begin(self) -> None: ...

    def rollback(self, length: int, path: Sequence[int] = ()) -> None: ...

    def logits(
        self, context: Any, drafted: Any = (), rows: int | None = None, prompt: int | None = None
    ) -> torch.Tensor:
        return self.row.repeat(rows or 1, 1)


@pytest.mark.parametrize(
    ("values", "tokens", "dtype", "tie"),
    [
        ((20.0, 19.5, 1.0), (0, 1), torch.bfloat16, True),
        ((20.0, 19.5, 1.0), (0, 1), torch.float32, False),
        ((20.0, 20.0 - 5e-5, 1.0), (0, 1), torch.float32, True),
        ((20.0, 18.5, 1.0), (0, 1), torch.bfloat16, False),
        # Within an int8 model the logits' own dtype says nothing.
        ((20.0, 17.0, 1.0), (0, 1), torch.int8, True),
        ((20.0, 11.0, 1.0), (0, 1), torch.int8, False),
        # The two best logits tie, but one of the tokens is neither: no tie.
        ((20.0, 20.0, 1.0), (0, 2), torch.bfloat16, False),
        # Both tokens tie with each other, far below the best: no tie.
        ((20.0, 1.0, 1.0), (1, 2), torch.bfloat16, False),
    ],
)
def test_a_tie_needs_both_tokens_near_the_best(values, tokens, dtype, tie):
    difference = find_difference(Row(values, dtype), [0], [1, tokens[0]], [1, tokens[1]], Sampling())  # type: ignore[arg-type]
    assert difference is not None
    assert difference.position == 1
    assert difference.tokens == tokens
    assert difference.logits == pytest.approx([values[t] for t in tokens], rel=0.01)
    assert difference.gap == pytest.approx(max(values) - min(values[t] for t in tokens), rel=0.05)
    assert difference.numerical_tie is tie
    assert (difference.gap_units <= tie_units(dtype)) is tie


def test_an_output_that_has_ended_is_no_tie():
    difference = find_difference(Row((5.0, 5.0), torch.float32), [0], [1], [1, 0], Sampling())  # type: ignore[arg-type]
    assert difference is not None
    assert difference.tokens == (None, 0)
    assert difference.gap == 0
    assert not difference.numerical_tie


def test_transformers_own_answers_are_ours():
    model = tiny_language_model(seed=5)
    own, end = model.model.generation_config, tuple(model.end_ids)
    own.temperature = 0.123
    prompt = [10, 20, 30, 40, 50]
    asked: Any = {"sampling": Sampling(), "max_new_tokens": 24, "prompt": prompt}
    for ends in ((), end, (7, 8, 9, 250)):
        known = replace(model, end_ids=ends)
        reference = reference_output(known, DecodingOptions(max_new_tokens=24), prompt)
        request = request_of(Scorer(model.model), LookupDrafter(), end_ids=ends, **asked)
        result = check_greedy(request, "a", reference, run_greedy(plainly(request)))
        assert result.differences == {"plain": None, "transformers": None}
        assert result.violations == []
        assert model.model.generation_config is own
        assert max(result.output.deviations) < 1e-5


def test_transformers_answers_end_where_ours_do():
    model, asked = replace(tiny_language_model(seed=5), end_ids=()), DecodingOptions(max_new_tokens=16)
    assert len(reference_output(model, asked, [10, 20, 30])) == 16
    assert len(reference_output(replace(model, context_limit=8), asked, [10, 20, 30])) == 5


def test_bits_of_logits_are_compared_where_the_texts_are_the_same():
    sound = result_of(setup_of(sampling=Sampling()))
    assert sound.bitwise == (2 * NEW, 2 * NEW)

    class Rounded(ScriptedScorer):
        def score(self, asked: ForwardRequest) -> ForwardOutput:
            return ForwardOutput(super().score(asked).logits * (1 + 1e-6 * len(asked.tokens)))

    setup = setup_of(target=Rounded(TARGET, VOCAB), sampling=Sampling())
    result = result_of(setup)
    rows, equal = result.bitwise
    assert equal < rows == 2 * NEW
    assert result.verdict == "identical"  # rounding is no fault, unless it was ruled out
    assert replace(result, bit_exact=True).verdict == "wrong"
    assert replace(sound, bit_exact=True).verdict == "identical"


# --- Deviations -----------------------------------------------------------------------------------


def test_clean_rows_are_the_same_in_parts(monkeypatch):
    scorer = Scorer(tiny_llama(seed=2))
    prompt, output = [1, 2, 3], list(range(4, 24))
    whole = torch.stack(list(clean_rows(scorer, prompt, output)))
    for count in (1, 7):
        vocab = whole.shape[-1]
        monkeypatch.setattr(specbench.check.deviation, "_MAX_BYTES", 4 * vocab * count)
        parts = torch.stack(list(clean_rows(scorer, prompt, output)))
        assert parts.shape == whole.shape
        assert torch.allclose(parts, whole, atol=1e-4)
    with torch.inference_mode():
        row = tiny_llama(seed=2)(input_ids=torch.tensor([[*prompt, *output[:4]]])).logits[0, -1]
    assert torch.allclose(whole[4], row, atol=1e-4)


def test_a_deviation_is_relative_and_knows_no_shift():
    row = torch.randn(200, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(200, generator=torch.Generator().manual_seed(1))
    assert deviation(row, row) == 0.0
    assert deviation(row + 7.0, row) == pytest.approx(0.0, abs=1e-6)
    assert deviation(10 * (row + 0.1 * noise), 10 * row) == pytest.approx(
        deviation(row + 0.1 * noise, row), rel=1e-4
    )
    assert 0.08 < deviation(row + 0.1 * noise, row) < 0.12
    masked = torch.cat([row, torch.tensor([-math.inf])])
    assert deviation(masked, masked) == 0.0
    assert deviation(torch.cat([row, torch.zeros(1)]), masked) == math.inf


def test_deviations_are_judged_against_plain_decoding():
    plain = [0.02, 0.018, 0.035] * 10

    def sound(speculative: Sequence[float], plain: Sequence[float] = plain) -> bool:
        result = judge_deviations(speculative, plain, torch.bfloat16)
        assert result is not None
        return result.sound

    assert sound([0.019, 0.02, 0.04] * 10)
    assert not sound([*([0.019] * 29), 0.3])  # one row that is far off
    assert not sound([0.045] * 30)  # all of them a little
    assert not sound([0.5] * 30, [0.5] * 30)  # plain decoding itself
    assert sound([0.01] * 30, [0.0] * 30)  # where plain decoding happens to be exact
    assert judge_deviations([], plain, torch.float32) is None
    single = judge_deviations([0.01] * 30, [2e-6] * 30, torch.float32)
    assert single is not None
    assert not single.sound


# --- Outputs of other engines ---------------------------------------------------------------------


def given(output: Sequence[int]) -> ExternalOutput:
    return ExternalOutput(PROMPT, tuple(output), "a")


def test_the_targets_own_output_is_identical():
    for penalty in (1.0, 1.5):
        setup = setup_of(max_new_tokens=9, sampling=Sampling(1.0, repetition_penalty=penalty))
        output = run_greedy(plainly(setup)).tokens
        target = ScriptedScorer(TARGET, VOCAB)
        result = check_output(target, 1, given(output), PROMPT, Sampling(repetition_penalty=penalty))
        assert (result.verdict, result.first, result.tokens) == ("identical", None, 9)
    target = ScriptedScorer(TARGET, VOCAB)
    check_output(target, 1, given(output), PROMPT, Sampling())
    assert target.passes == [len(PROMPT) + len(output) - 1]  # one pass


def test_ties_are_named_and_do_not_hide_what_is_wrong():
    target: Any = Row((20.0, 19.5, 1.0), torch.bfloat16)
    result = check_output(target, 1, given([0, 1, 0, 1]), [0], Sampling())
    assert (result.verdict, result.ties, result.wrong) == ("numerical tie", 2, 0)
    assert result.first is not None
    assert (result.first.position, result.first.numerical_tie) == (1, True)
    result = check_output(target, 1, given([0, 1, 2]), [0], Sampling())
    assert (result.verdict, result.ties, result.wrong) == ("wrong", 1, 1)
    assert result.first is not None
    assert result.first.position == 2
    coarse = check_output(Row((20.0, 19.5), torch.int8), 1, given([1]), [0], Sampling())  # type: ignore[arg-type]
    assert coarse.verdict == "numerical tie"
    equal: Any = Row((3.0, 3.0, 1.0), torch.float32)
    assert check_output(equal, 1, given([0, 1]), [0], Sampling()).verdict == "identical"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "Line 3 cannot be read: "),
        (b'{"token_ids": [1]}', "`prompt`"),
        (b'{"prompt": " ", "token_ids": [1]}', '"prompt" is empty'),
        (b'{"prompt": "a", "token_ids": []}', '"token_ids" is empty'),
        (b'{"prompt": "a", "token_ids": [1, 2.5]}', "`int`"),
        (b"[" * 100_000, "Line 3 "),
    ],
)
def test_bad_lines_are_refused_with_their_number(line, reason):
    good = b'{"prompt": "a", "token_ids": [3]}'
    with pytest.raises(UsageError, match=re.escape(reason)):
        read_outputs([good, b"", line, good])
