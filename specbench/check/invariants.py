"""What must hold in every step, whatever the models say. docs/check.md lists it by the same names.

Each function takes what was observed and returns complaints, none if all is well. Nothing here runs a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from specbench.check.observe import DecodingSetup, Drawn, Observation, Proposal, Tested
from specbench.decoding.drafts import Draft
from specbench.decoding.records import FinishReason, Prefill, Step, depth_of
from specbench.decoding.request import DraftPlan
from specbench.decoding.sampling import Sampling
from specbench.decoding.stops import special_tokens
from specbench.decoding.verify import acceptance_probabilities
from specbench.specs.verification import VerificationName

Invariant = Literal["position", "draft", "pass", "cache", "count", "choice", "chance", "stop"]

_SAME = 1e-6
"""Float32 numbers between 0 and 1 that were computed in two ways."""


@dataclass(frozen=True)
class Violation:
    """Something that does not hold.

    Attributes:
        invariant: Its name in docs/check.md.
        step: Index of the step; ``None`` in the first-target pass, or where the whole run is at fault.
        message: What was found.
    """

    invariant: Invariant
    step: int | None
    message: str


@dataclass(frozen=True)
class Rules:
    """What a run was told.

    Attributes:
        prompt: Its length.
        sampling: The transforms it decoded with.
        max_new_tokens, end_ids, stop, tokenizer: See ``DecodingSetup``.
        context_limit: Of the target; ``None`` for no limit.
        method: How drafts are verified above temperature 0.
    """

    prompt: int
    sampling: Sampling
    max_new_tokens: int
    end_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    tokenizer: Any = None
    context_limit: int | None = None
    method: VerificationName = "residual"

    @classmethod
    def of(cls, setup: DecodingSetup, prompt: Sequence[int], *, greedy: bool) -> Rules:
        """Those of a run of ``observe``."""
        return cls(
            prompt=len(prompt),
            sampling=setup.transforms(prompt, greedy=greedy),
            max_new_tokens=setup.max_new_tokens,
            end_ids=frozenset(setup.end_ids),
            stop=setup.stop,
            tokenizer=setup.tokenizer,
            context_limit=setup.target.context_limit,
            method=DraftPlan.of(setup.policy).method(setup.drafter),
        )

    def tests_a_chain(self, seen: Observation) -> bool:
        """Whether all drafts of a step were tested at once, each with min(1, p/q)."""
        return self.method in ("rejection", "residual") and seen.draft.candidates is None

    @property
    def longest(self) -> int:
        """The most tokens that prompt and output may have."""
        end = self.prompt + self.max_new_tokens
        return end if self.context_limit is None else min(end, self.context_limit)

    def finish_reason(self, output: Sequence[int]) -> FinishReason | None:
        """Why an output ends with its last token; ``None`` if it should go on. Written without ``StopRules``."""
        if output and output[-1] in self.end_ids:
            return "eos"
        if self._has_stop_string(output):
            return "stop-string"
        if len(output) >= self.max_new_tokens:
            return "length"
        full = self.context_limit is not None and self.prompt + len(output) >= self.context_limit
        return "context-limit" if full else None

    def _has_stop_string(self, output: Sequence[int]) -> bool:
        if not self.stop:
            return False
        text = self.tokenizer.decode(
            list(output), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        specials = special_tokens(self.tokenizer)
        return any(stop in text or specials.get(stop) in output for stop in self.stop)

    def went_on(self, output: Sequence[int]) -> str | None:
        """What an output went on behind; ``None`` if it did not."""
        at = next((i for i, token in enumerate(output[:-1]) if token in self.end_ids), None)
        if at is not None:
            return f"the end token at position {at} of the output"
        if self._has_stop_string(output[:-1]):
            return "a stop string"
        if len(output) > self.max_new_tokens:
            return f"the limit of {self.max_new_tokens} tokens"
        if self.prompt + len(output) > self.longest:
            return f"the target's context of {self.context_limit} tokens"
        return None


def check_observation(seen: Observation, before: Observation | None, rules: Rules) -> list[Violation]:
    """What does not hold in a record.

    Args:
        seen: The record and what happened until it came.
        before: The one before it, ``None`` if it is the first.
        rules: What the run was told.
    """
    step = seen.record.index if isinstance(seen.record, Step) else None
    complaints: list[tuple[Invariant, str]] = [*_positions(seen, before), *_caches(seen, before)]
    if isinstance(seen.record, Step):
        complaints += [*_drafts(seen, rules), *_passes(seen), *_counts(seen.record)]
    if seen.passes:
        complaints += _choices(seen, rules) if rules.sampling.greedy else _chances(seen, rules)
    return [Violation(invariant, step, message) for invariant, message in complaints]


Complaints = Iterator[tuple[Invariant, str]]


def _positions(seen: Observation, before: Observation | None) -> Complaints:
    record = seen.record
    if before is None or isinstance(record, Prefill):
        if not (before is None and isinstance(record, Prefill)):
            yield "position", "the run does not begin with one prefill"
        return
    expected = before.record.index + 1 if isinstance(before.record, Step) else 0
    if record.index != expected:
        yield "position", f"step {record.index} comes where step {expected} should"
    if record.position != len(seen.context):
        yield "position", f"it says it began at {record.position}, the context had {len(seen.context)} tokens"
    if before.record.finish_reason is not None:
        yield "stop", f"it comes behind the end of the output ({before.record.finish_reason})"


def _caches(seen: Observation, before: Observation | None) -> Complaints:
    after = len(seen.context) + len(seen.tokens) - 1
    fed = bool(seen.passes)
    if seen.target_cache is not None and fed and seen.target_cache != after:
        yield "cache", f"the target's cache holds {seen.target_cache} tokens, and should hold {after}"
    for held in seen.drafter_caches:
        if fed and held > after:
            yield "cache", f"the drafter's cache holds {held} tokens, and may hold {after} at most"
    if seen.target_cache is None:
        return
    for each in seen.passes:
        held = 0 if before is None else before.target_cache or 0
        if each.cached != held:
            yield (
                "cache",
                f"the target verified on a cache of {each.cached} tokens, of which {held} are verified",
            )


def _drafts(seen: Observation, rules: Rules) -> Complaints:
    assert isinstance(seen.record, Step)
    if len(seen.proposals) != 1:
        yield "draft", f"the drafter was asked {len(seen.proposals)} times"
        return
    proposal = seen.proposals[0]
    draft, room = proposal.draft, rules.longest - len(seen.context) - 1
    parents = None if draft.parents is None else tuple(draft.parents)
    if (tuple(draft.tokens), parents) != (seen.record.drafted, seen.record.parents):
        yield "draft", "the record's drafts are not those that were proposed"
    if (depth := depth_of(len(draft.tokens), parents)) > room:
        yield "draft", f"{depth} tokens were drafted with room for {room}"
    if draft.q is not None and len(draft.q) != len(draft.tokens):
        yield "draft", f"{len(draft.tokens)} tokens were drafted from {len(draft.q)} distributions"
    elif (complaint := _unlike_draws(proposal)) is not None:
        yield "chance", complaint


def _unlike_draws(proposal: Proposal) -> str | None:
    """Whether the drafts are the draws, in order, and no draw was thrown away: that would change q.

    A token that is certain in q may have been drawn or not.
    """
    draft = proposal.draft
    draws = [event for event in proposal.events if isinstance(event, Drawn)]
    if len(draws) != len(proposal.events):
        return "something was tested while drafting"
    if draft.candidates is not None:
        return _unlike_candidates(draft, draws)
    at = 0
    for i, token in enumerate(draft.tokens):
        q = None if draft.q is None else draft.q[i]
        drawn = at < len(draws) and draws[at].token == token
        if drawn and q is not None and torch.equal(draws[at].distribution, q):
            at += 1
        elif q is not None and float(q[token]) != float(q.sum()):
            return f"draft {i} is not what was drawn from its q"
    return f"{len(draws) - at} drawn tokens were thrown away" if at < len(draws) else None


def _unlike_candidates(draft: Draft, draws: Sequence[Drawn]) -> str | None:
    """The same of a tree: each candidate that is not certain has a draw of its own, from what was left of its q."""
    assert draft.candidates is not None
    places = draft.candidates.items()
    drawn = [(node, tokens, q) for node, groups in places for tokens, q in groups if q is not None]
    if (count := sum(len(tokens) for _, tokens, _ in drawn)) != len(draws):
        return f"{len(draws)} tokens were drawn for {count} candidates"
    unused = list(draws)
    for node, tokens, q in drawn:
        left = q.double()
        for token in tokens:
            # Several drafters draw one after the other what stands beside each other.
            fits = (
                i for i, each in enumerate(unused) if each.token == token and _alike(each.distribution, left)
            )
            at = next(fits, None)
            if at is None:
                return f"node {draft.child(node, token)} is not what was drawn from its q"
            del unused[at]
            left[token] = 0.0
    return None


def _alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two distributions, [vocab], are the same but for rounding and their sums."""
    first, second = first.double(), second.double()
    return float((first / first.sum() - second / second.sum()).abs().max()) < _SAME


def _passes(seen: Observation) -> Complaints:
    assert isinstance(seen.record, Step)
    if len(seen.passes) != 1:
        yield "pass", f"the target was asked {len(seen.passes)} times"
        return
    given = seen.passes[0]
    if given.context != seen.context:
        yield "pass", "the target was not given the context"
    nodes = len(seen.record.drafted)
    parents = tuple(range(-1, len(given.tokens) - 1)) if given.parents is None else given.parents
    drafted = tuple(range(-1, nodes - 1)) if seen.record.parents is None else seen.record.parents
    if (given.tokens[:nodes], parents[:nodes]) != (seen.record.drafted, drafted):
        yield "pass", "the target was not given the drafts"
    beside = zip(parents[nodes:], given.tokens[nodes:], strict=True)
    if tuple((parent + 1, token) for parent, token in beside) != seen.record.siblings:
        yield "pass", "the target was not given the siblings"
    if len(given.logits) != seen.record.verified:
        yield "pass", f"{len(given.logits)} rows of logits for {seen.record.verified} tokens to verify"


def _counts(step: Step) -> Complaints:
    gamma, accepted = step.gamma, step.accepted
    if not 0 <= accepted <= step.tested <= gamma:
        yield "count", f"{accepted} accepted, {step.tested} tested, {gamma} drafted"
    known = step.tokens[accepted:] and (accepted, step.tokens[accepted]) in step.siblings
    if not 0 <= step.gained <= bool(known and step.closing == "corrected"):
        yield "count", f"{len(step.tokens)} tokens for {accepted} accepted, closed by {step.closing}"
    if any(not 0 <= place < gamma or step.drafted[place] == token for place, token in step.siblings):
        yield "count", "there are siblings of no draft, or the drafts themselves"
    parents = tuple(range(-1, len(step.drafted) - 1)) if step.parents is None else step.parents
    path = range(min(accepted, gamma)) if step.parents is None else step.path
    if not {*path} <= {*range(len(parents))}:
        yield "count", "what was kept was not drafted"
        return
    if tuple(parents[node] for node in path) != (-1, *path)[:-1]:
        yield "count", "the accepted drafts do not stand behind each other"
    if step.tokens[:accepted] != tuple(step.drafted[node] for node in path[:accepted]):
        yield "count", "the accepted tokens are not the drafted ones"
    if step.closing is None:
        if step.finish_reason not in ("eos", "stop-string"):
            yield "count", "no closing token, though nothing stopped the step"
    elif step.closing != (closing := _closing(step, (-1, *path)[-1] in parents)):
        yield (
            "count",
            f"closed by {step.closing}, though {accepted} of {gamma} drafts were accepted ({closing})",
        )
    elif step.tested != accepted + (closing == "corrected"):
        yield "count", f"{step.tested} tested with {accepted} of {gamma} accepted"
    if len(step.expected_acceptance) != step.tested:
        yield "count", f"{len(step.expected_acceptance)} terms of α for {step.tested} tested drafts"


def _closing(step: Step, open_end: bool) -> str:
    """Where the closing token has to come from; ``open_end``: drafts stand behind the last accepted one."""
    return "corrected" if open_end else "bonus" if step.drafted else "target"


def _choices(seen: Observation, rules: Rules) -> Complaints:
    """Greedy: every token has the largest logit of its own row, and nothing was left to chance."""
    if seen.events or any(proposal.events for proposal in seen.proposals):
        yield "choice", "greedy decoding drew a random number"
    for i, (token, row) in enumerate(zip(seen.tokens, seen.deciding, strict=False)):
        scores = rules.sampling.scores(row.unsqueeze(0), [*seen.context, *seen.tokens[:i]])[0]
        if float(scores[token]) != float(scores.max()):
            yield (
                "choice",
                f"token {i} of the step is {token}, the largest logit is that of {int(scores.argmax())}",
            )


def _chances(seen: Observation, rules: Rules) -> Complaints:
    """Sampling: drafts are tested with min(1, p/q), and what is emitted is what was tested and drawn.

    Of other ways to verify what is emitted is looked at here, and how likely it is in ``specbench.check.exact``.
    """
    if not rules.tests_a_chain(seen):
        yield from _draw_behind_the_path(seen)
        return
    drafted = seen.record.drafted if isinstance(seen.record, Step) else ()
    siblings = seen.record.siblings if isinstance(seen.record, Step) else ()
    tests = [event for event in seen.events if isinstance(event, Tested)]
    draws = [event for event in seen.events if isinstance(event, Drawn)]
    accepted = tests[0].accepted if tests else 0
    known = bool(draws) and (accepted, draws[0].token) in siblings
    if len(tests) != (len(drafted) > 0) or len(draws) != 1 + known:
        yield "chance", f"{len(tests)} tests and {len(draws)} draws for {len(drafted)} drafts"
        return
    if tests:
        test = tests[0]
        if len(test.acceptance) != len(drafted):
            yield "chance", f"{len(test.acceptance)} drafts were tested of {len(drafted)}"
            return
        expected = acceptance_probabilities(seen.draft, target_distributions(seen, rules.sampling))
        off = (test.acceptance - expected.to(test.acceptance.device)).abs()
        if float(off.max()) > _SAME:
            i = int(off.argmax())
            yield (
                "chance",
                f"draft {i} was tested with {float(test.acceptance[i]):.6g}, min(1, p/q) is {float(expected[i]):.6g}",
            )
    emitted = (*drafted[:accepted], *(draw.token for draw in draws))
    if seen.tokens != emitted[: len(seen.tokens)]:
        yield "chance", "what was emitted is not what was accepted and drawn"


def _draw_behind_the_path(seen: Observation) -> Complaints:
    last = seen.events[-1] if seen.events else None
    if not isinstance(last, Drawn):
        yield "chance", "no token was drawn behind the accepted ones"
    elif (isinstance(seen.record, Prefill) or seen.record.closing) and seen.tokens[-1:] != (last.token,):
        yield "chance", "what was emitted is not what was drawn"


def target_distributions(seen: Observation, sampling: Sampling) -> torch.Tensor:
    """p of every position of a pass, float32 [rows, vocab], each computed by itself in the context it belongs to."""
    logits, verified = seen.passes[0].logits, seen.verified
    rows = [
        sampling.probabilities(logits[i : i + 1], [*seen.context, *verified.branch(i - 1)])
        for i in range(len(logits))
    ]
    return torch.cat(rows)


def check_run(output: Sequence[int], finish_reason: str | None, rules: Rules) -> list[Violation]:
    """What does not hold in a finished run as a whole: where and why it ended."""
    found = []
    if (what := rules.went_on(output)) is not None:
        found.append(Violation("stop", None, f"the output goes on behind {what}"))
    expected = rules.finish_reason(output)
    if finish_reason != expected:
        found.append(
            Violation(
                "stop",
                None,
                f"the output ended by {finish_reason or 'nothing'}, and should by {expected or 'nothing'}",
            )
        )
    return found
