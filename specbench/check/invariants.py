"""Check the invariants of every step, which hold for all models. docs/check.md lists them by the same names.

``checked`` runs a request and yields what it observes; all else takes observations and yields complaints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from specbench.check.observe import Observation, observe
from specbench.decoding.records import FinishReason, Prefill, Step, depth_of
from specbench.decoding.request import Request
from specbench.decoding.sampling import Sampling
from specbench.decoding.stops import special_tokens
from specbench.decoding.verify import acceptance_probabilities
from specbench.drafters.drawn import DrawEvent, find_undrawn

Invariant = Literal["draft", "pass", "cache", "choice", "chance", "stop"]

_SAME = 1e-6
"""Tolerance for float32 numbers between 0 and 1 that are computed in two ways."""


@dataclass(frozen=True)
class Violation:
    """A violated invariant.

    Attributes:
        invariant: Its name in docs/check.md.
        step: Index of the step; ``None`` for the prefill or the whole run.
        message: What was found.
    """

    invariant: Invariant
    step: int | None
    message: str


class RunRules:
    """The settings that an observed generation has to follow.

    Attributes:
        verification: What judges drafts.
        max_length: Largest length of prompt and output together.
    """

    def __init__(self, request: Request) -> None:
        self._request, self._stops, self._prompt = request, request.stops, len(request.prompt)
        end, limit = self._prompt + request.max_new_tokens, request.target.context_limit
        self.sampling = request.sampling.at(self._prompt, self._stops.end_ids)
        self.verification = request.verification(self.sampling)
        self.max_length = end if limit is None else min(end, limit)

    @property
    def is_chain_test(self) -> bool:
        """Whether a step tests all its drafted tokens in one event, each with min(1, p/q)."""
        return self._request.method == "rejection"

    def finish_reason(self, output: Sequence[int]) -> FinishReason | None:
        """Return why an output ends with its last token; ``None`` if it should not. Independent of ``StopRules``."""
        if output and output[-1] in self._stops.end_ids:
            return "eos"
        if self._has_stop_string(output):
            return "stop-string"
        if len(output) >= self._request.max_new_tokens:
            return "length"
        return "context-limit" if self._prompt + len(output) >= self.max_length else None

    def _has_stop_string(self, output: Sequence[int]) -> bool:
        stops, tokenizer = self._stops.strings, self._stops.tokenizer
        if tokenizer is None or not stops:
            return False
        text = tokenizer.decode(list(output), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        specials = special_tokens(tokenizer)
        return any(stop in text or specials.get(stop) in output for stop in stops)


def checked(request: Request, rules: RunRules, violations: list[Violation]) -> Iterator[Observation]:
    """Decode a request, yield what was observed (see ``observe``), and add to ``violations`` what it violates."""
    before: Observation | None = None
    output: list[int] = []
    for seen in observe(request):
        violations += _check_observation(seen, before, rules)
        yield seen
        output += seen.tokens
        before = seen
    violations += _check_run(output, None if before is None else before.record.finish_reason, rules)


def _check_observation(seen: Observation, before: Observation | None, rules: RunRules) -> list[Violation]:
    """Return the violations in a record.

    Args:
        before: The previous one; ``None`` for the first.
    """
    step = seen.record.index if isinstance(seen.record, Step) else None
    complaints: list[tuple[Invariant, str]] = [*_check_caches(seen, before)]
    if before is not None and before.record.finish_reason is not None:
        complaints.append(("stop", f"it comes after the end of the output ({before.record.finish_reason})"))
    if isinstance(seen.record, Step):
        complaints += [*_check_draft(seen, rules), *_check_forward(seen)]
    if seen.forwards:
        complaints += _check_choices(seen, rules) if rules.sampling.greedy else _check_chances(seen, rules)
    return [Violation(invariant, step, message) for invariant, message in complaints]


Complaints = Iterator[tuple[Invariant, str]]


def _check_caches(seen: Observation, before: Observation | None) -> Complaints:
    if not seen.forwards:
        return
    after = len(seen.context) + len(seen.tokens) - 1
    if seen.target_cache is not None and seen.target_cache != after:
        yield "cache", f"the target's cache has {seen.target_cache} tokens instead of {after}"
    for cached_len in seen.drafter_caches:
        if cached_len > after:
            yield "cache", f"the drafter's cache has {cached_len} tokens, more than {after}"
    if seen.target_cache is None:
        return
    verified = 0 if before is None else before.target_cache or 0
    for forward in seen.forwards:
        if forward.cached_len != verified:
            yield "cache", f"the target's cache has {forward.cached_len} tokens, {verified} of them verified"


def _check_draft(seen: Observation, rules: RunRules) -> Complaints:
    assert isinstance(seen.record, Step)
    if len(seen.drafts) != 1:
        yield "draft", f"the drafter was called {len(seen.drafts)} times"
        return
    draft, limit = seen.draft, rules.max_length - len(seen.context) - 1
    parents = None if draft.parents is None else tuple(draft.parents)
    if (tuple(draft.tokens), parents) != (seen.record.drafted, seen.record.parents):
        yield "draft", "the recorded draft is not the proposed one"
    if (depth := depth_of(len(draft.tokens), parents)) > limit:
        yield "draft", f"{depth} tokens were drafted, more than {limit}"
    if draft.q is not None and len(draft.q) != len(draft.tokens):
        yield "draft", f"{len(draft.tokens)} tokens were drafted from {len(draft.q)} distributions"
        return
    draws = [event for event in seen.drafting if isinstance(event, DrawEvent)]
    if len(draws) != len(seen.drafting):
        yield "chance", "something was tested while drafting"
    elif not rules.sampling.greedy and (complaint := find_undrawn(draft, draws)) is not None:
        yield "chance", complaint


def _check_forward(seen: Observation) -> Complaints:
    assert isinstance(seen.record, Step)
    if len(seen.forwards) != 1:
        yield "pass", f"the target ran {len(seen.forwards)} forwards"
        return
    given = seen.forwards[0]
    if given.context != seen.context:
        yield "pass", "the forward is not over the context"
    if (given.tokens, given.parents) != (seen.record.drafted, seen.record.parents):
        yield "pass", "the forward is not over the draft"
    if len(given.logits) != seen.record.verified:
        yield "pass", f"{len(given.logits)} rows of logits for {seen.record.verified} tokens to verify"


def _check_choices(seen: Observation, rules: RunRules) -> Complaints:
    """Check greedy decoding: every token has the largest logit of its row, and there are no random events."""
    if seen.events:
        yield "choice", "greedy decoding drew a random number"
    for i, (token, row) in enumerate(zip(seen.tokens, seen.decision_logits, strict=False)):
        scores = rules.sampling.scores(row.unsqueeze(0), [*seen.context, *seen.tokens[:i]])[0]
        if float(scores[token]) != float(scores.max()):
            yield (
                "choice",
                f"token {i} of the step is {token}, but {int(scores.argmax())} has the largest logit",
            )


def _check_chances(seen: Observation, rules: RunRules) -> Complaints:
    """Check sampling: drafted tokens are tested with min(1, p/q), and emitted tokens were accepted or drawn.

    For other verification methods only the emitted tokens are checked here; see ``specbench.check.exact``.
    """
    if not rules.is_chain_test:
        yield from _check_last_draw(seen)
        return
    drafted = seen.record.drafted if isinstance(seen.record, Step) else ()
    tests, draws = seen.tests, seen.draws
    accepted = tests[0].accepted if tests else 0
    if len(tests) != (len(drafted) > 0) or len(draws) != 1:
        yield "chance", f"{len(tests)} tests and {len(draws)} draws for {len(drafted)} drafted tokens"
        return
    if tests:
        test = tests[0]
        if len(test.acceptance) != len(drafted):
            yield "chance", f"{len(test.acceptance)} of {len(drafted)} drafted tokens were tested"
            return
        expected = acceptance_probabilities(seen.draft, target_distributions(seen, rules.sampling))
        off = (test.acceptance - expected.to(test.acceptance.device)).abs()
        if float(off.max()) > _SAME:
            i = int(off.argmax())
            used, right = float(test.acceptance[i]), float(expected[i])
            yield "chance", f"drafted token {i} was tested with {used:.6g}, but min(1, p/q) is {right:.6g}"
    emitted = (*drafted[:accepted], draws[0].token)
    if seen.tokens != emitted[: len(seen.tokens)]:
        yield "chance", "the emitted tokens are not those accepted and drawn"


def _check_last_draw(seen: Observation) -> Complaints:
    last = seen.events[-1] if seen.events else None
    if not isinstance(last, DrawEvent):
        yield "chance", "no token was drawn after the accepted ones"
    elif (isinstance(seen.record, Prefill) or seen.record.closing) and seen.tokens[-1:] != (last.token,):
        yield "chance", "the emitted token is not the one drawn"


def target_distributions(seen: Observation, sampling: Sampling) -> torch.Tensor:
    """Return p at every position of a forward, float32 [rows, vocab], each computed separately in its own context."""
    logits, verified = seen.forwards[0].logits, seen.verified
    rows = [
        sampling.probabilities(logits[i : i + 1], [*seen.context, *verified.branch(i - 1)])
        for i in range(len(logits))
    ]
    return torch.cat(rows)


def _check_run(output: Sequence[int], finish_reason: str | None, rules: RunRules) -> list[Violation]:
    """Return the violations of a finished run as a whole: where and why it ended."""
    violations = []
    for end in range(1, len(output)):
        if (reason := rules.finish_reason(output[:end])) is not None:
            violations.append(
                Violation("stop", None, f"the output continues after token {end}, its end ({reason})")
            )
            break
    expected = rules.finish_reason(output)
    if finish_reason != expected:
        reasons = f"{finish_reason or 'nothing'} instead of {expected or 'nothing'}"
        violations.append(Violation("stop", None, f"the output was ended by {reasons}"))
    return violations
