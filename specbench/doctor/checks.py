"""The checks of `specbench doctor`: from the observations of a server to findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

from specbench.base.record import Json, ratio
from specbench.base.textsafe import counted
from specbench.doctor.probes import TEMPERATURE, draft_counts
from specbench.findings.catalog import Finding
from specbench.servers.client import count_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specbench.doctor.probes import Observations
    from specbench.servers.client import TokenCount

Expected = Literal["on", "off"]

_TELLING = 20
"""If so many draft tokens were tested and none was accepted, it is no coincidence."""

_SUM_SLACK = 0.01
_WORDS_PER_TOKEN = 1.05
"""Most words of a text per token; ordinary text has fewer words than tokens."""


@dataclass
class Examined:
    """The observations with what is computed from them.

    Attributes:
        tokenizer: The target's; ``None`` relies on the server's counts and on words.
        expected: Whether speculation should be on; ``None`` takes what is found.
    """

    seen: Observations
    tokenizer: PreTrainedTokenizerBase | None = None
    expected: Expected | None = None

    @cached_property
    def counts(self) -> list[TokenCount]:
        """The token counts of the answers."""
        return [count_tokens(answer, self.tokenizer) for answer in self.seen.answers]

    @cached_property
    def tokens(self) -> int:
        """Tokens of all answers, as far as known."""
        return sum(count.tokens or 0 for count in self.counts)

    @cached_property
    def miscount(self) -> str | None:
        """A sentence about the first answer whose token counts or text disagree; ``None`` for none."""
        for answer, count in zip(self.seen.answers, self.counts, strict=True):
            words = len(answer.text.split())
            if count.problem is not None:
                return count.problem
            if words > _WORDS_PER_TOKEN * (count.tokens or 0):
                return f"The server reports {count.tokens} tokens, but its text has {words} words."
            if count.tokens and not answer.text:
                return f"The server reports {count.tokens} tokens, but sends no text."
        return None

    @property
    def reported(self) -> tuple[int, int] | None:
        """Drafted and accepted tokens that the answers report; ``None`` if one of them does not."""
        answers, always = self.seen.answers, self.seen.dialect.reports_drafts
        known = all(None not in (answer.drafted, answer.accepted) for answer in answers)
        return draft_counts(answers) if answers and (known or always) else None

    @property
    def drafted(self) -> int | None:
        """Draft tokens over all answers; ``None`` if unknown."""
        if self.reported is not None:
            return self.reported[0]
        if self.seen.counted is None:
            return 0 if self.seen.uncounted and self.seen.dialect.counts_if_on else None
        return self.seen.counted.drafted

    @property
    def accepted(self) -> int:
        if self.reported is not None:
            return self.reported[1]
        return 0 if self.seen.counted is None else self.seen.counted.accepted

    @cached_property
    def by_position(self) -> tuple[int, tuple[int, ...]] | None:
        """Steps that drafted, and accepted tokens by position, of the counters or of the answers."""
        counted = self.seen.counted
        if counted is not None and counted.accepted_at and counted.drafts:
            return counted.drafts, counted.accepted_at
        reports = [answer.speculation for answer in self.seen.answers]
        known = [report for report in reports if report is not None]
        if not known or len(known) < len(reports):
            return None
        kept = map(sum, zip_longest(*(report.accepted_at for report in known), fillvalue=0))
        return sum(report.drafts for report in known), tuple(kept)

    @property
    def drafting_share(self) -> float:
        """Share of the steps that drafted; ``gamma`` must be known."""
        assert self.drafted
        assert self.gamma
        drafts = self.drafted / self.gamma
        return drafts / max(self.tokens - self.accepted - len(self.seen.answers), drafts)

    @cached_property
    def gamma(self) -> float | None:
        """Mean draft length of the steps that drafted."""
        drafts = self.by_position[0] if self.by_position else getattr(self.seen.counted, "drafts", 0)
        return self.drafted / drafts if self.drafted and drafts else None


# -- speculation -------------------------------------------------------------------------------------


def _speculation(e: Examined) -> Iterator[Finding]:
    drafted = e.drafted
    if drafted is None:
        yield Finding("speculation.unknown" if e.expected is None else "speculation.unconfirmed")
        per_chunk = ratio(e.tokens, sum(len(answer.pieces) for answer in e.seen.answers))
        if per_chunk > 1.2:
            yield Finding("speculation.chunks", tokens=per_chunk)
    elif drafted:
        name = "speculation.unwanted" if e.expected == "off" else "speculation.on"
        yield Finding(name, drafted=drafted, tokens=e.tokens)
    elif e.seen.dialect.counts_if_on and e.seen.counted is not None:
        yield Finding("speculation.idle")
    else:
        yield Finding("speculation.missing" if e.expected == "on" else "speculation.off")


def _length(e: Examined) -> Iterator[Finding]:
    if e.drafted and e.gamma is not None:
        yield Finding("speculation.length", gamma=e.gamma, share=e.drafting_share)


def _acceptance(e: Examined) -> Iterator[Finding]:
    if not e.drafted:
        return
    if not e.accepted and e.drafted >= _TELLING:
        yield Finding("acceptance.none", drafted=e.drafted)
        return
    yield Finding("acceptance.rate", rate=e.accepted / e.drafted)
    if not e.by_position:
        return
    drafts, kept = e.by_position
    yield Finding("acceptance.positions", shares=[f"{count / drafts:.0%}" for count in kept])
    useful = max((place for place, count in enumerate(kept, 1) if count), default=0)
    beyond = e.drafted - drafts * useful  # at least so many draft tokens are at later positions
    if useful and beyond >= _TELLING and kept[useful - 1] >= _TELLING:
        yield Finding("acceptance.placeholders", useful=useful, beyond=beyond)


def _temperature(e: Examined) -> Iterator[Finding]:
    """Acceptance at a temperature, which has collapsed if it is less than a third of that at 0."""
    drafted, accepted = e.seen.sampled
    if not (e.drafted and e.accepted and drafted):
        return
    greedy, sampled = e.accepted / e.drafted, accepted / drafted
    few = min(drafted, e.drafted) < _TELLING
    name = "temperature.like-greedy" if 3 * sampled >= greedy or few else "temperature.collapse"
    yield Finding(name, sampled=sampled, greedy=greedy, temperature=TEMPERATURE)


# -- counts ------------------------------------------------------------------------------------------


def _counters(e: Examined) -> Iterator[Finding]:
    now, reported = e.seen.counted, e.reported
    if now is None:
        return
    if e.seen.idle is not None and e.seen.idle.drafts:
        yield Finding("counters.shared")
        return
    wrong = []
    if now.accepted > now.drafted:
        wrong.append(f"{now.accepted} accepted of {now.drafted} drafted")
    if now.drafted < now.drafts:
        wrong.append(f"{now.drafts} drafts of {now.drafted} tokens")
    if now.accepted_at and sum(now.accepted_at) != now.accepted:
        wrong.append(f"{sum(now.accepted_at)} accepted by position, {now.accepted} in all")
    if list(now.accepted_at) != sorted(now.accepted_at, reverse=True) or (
        now.accepted_at and now.accepted_at[0] > now.drafts
    ):
        wrong.append("a position accepted more often than the one before it")
    if reported is not None and reported != (now.drafted, now.accepted):
        wrong.append(
            f"answers say {reported[0]} drafted, {reported[1]} accepted; counters {now.drafted} and {now.accepted}"
        )
    slack = len(e.seen.answers) * (len(now.accepted_at) + 1)  # a step may draft beyond the end
    if e.miscount is None and now.accepted + now.drafts > e.tokens + slack:
        wrong.append(f"{now.accepted} accepted in {now.drafts} steps, but only {e.tokens} tokens")
    if wrong:
        yield Finding("counters.disagree", wrong="; ".join(wrong))
    elif now.drafts:
        yield Finding("counters.agree")


def _tokens(e: Examined) -> Iterator[Finding]:
    if e.miscount is not None:
        yield Finding("tokens.miscounted", problem=e.miscount)
    elif e.counts:
        sources = sorted({count.source for count in e.counts} | ({"tokenizer"} if e.tokenizer else set()))
        yield Finding("tokens.counted", tokens=e.tokens, sources=" and ".join(sources))


# -- outputs -----------------------------------------------------------------------------------------


def _logprobs(e: Examined) -> Iterator[Finding]:
    entries = list(_entries(e.seen.logprobs)) if e.seen.logprobs else []
    if not entries:
        if "repeat" not in e.seen.failed:
            yield Finding("logprobs.none")
        return
    for place, (own, others) in enumerate(entries, 1):
        is_finite = all(map(math.isfinite, (own, *others)))
        total = sum(math.exp(min(value, 1.0)) for value in others) if is_finite else math.nan
        if not is_finite:
            yield Finding("logprobs.infinite", token=place)
        elif own > _SUM_SLACK:
            yield Finding("logprobs.positive", token=place, logprob=own)
        elif total > 1.0 + _SUM_SLACK:
            yield Finding("logprobs.sum", token=place, total=total)
        elif others and max(others) > own + 0.5:
            yield Finding("logprobs.order", token=place)
        else:
            continue
        return
    bare = sum(not others for _, others in entries)
    if 0 < bare < len(entries):
        yield Finding("logprobs.bare", bare=bare, tokens=len(entries))
    else:
        yield Finding("logprobs.sound")


def _entries(logprobs: Json) -> Iterator[tuple[float, list[float]]]:
    """Yield the log probability of each token, and those of its alternatives, of either endpoint's form."""
    for entry in _listed(logprobs.get("content")):
        if isinstance(entry, dict):
            top = _listed(entry.get("top_logprobs")) or _listed(entry.get("top_probs"))
            others = [_number(other.get("logprob")) for other in top if isinstance(other, dict)]
            yield _number(entry.get("logprob")), others
    top = _listed(logprobs.get("top_logprobs"))
    for place, value in enumerate(_listed(logprobs.get("token_logprobs"))):
        listed = top[place] if place < len(top) else None
        yield _number(value), [*map(_number, listed.values())] if isinstance(listed, dict) else []


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _repeat(e: Examined) -> Iterator[Finding]:
    texts = e.seen.again
    if len(texts) > 1:
        place = _first_difference(texts)
        name = "repeat.same" if place is None else "repeat.differs"
        yield Finding(name, answers=len(texts), shared=place)


def _first_difference(texts: Sequence[str]) -> int | None:
    """Return how many characters texts share; ``None`` if each is the beginning of the longest."""
    shown = [text.rstrip("\N{REPLACEMENT CHARACTER}") for text in texts]
    least = min(map(len, shown))
    return next((i for i in range(least) if len({text[i] for text in shown}) > 1), None)


def _cache(e: Examined) -> Iterator[Finding]:
    turns = [(first.prompt_tokens, second.cached_tokens) for first, second in e.seen.turns]
    known = [(length, cached) for length, cached in turns if length and cached is not None]
    if turns and not known:
        option = "vLLM: --enable-prompt-tokens-details." if e.seen.owner == "vllm" else ""
        yield Finding("cache.unknown", option=option)
    for name, is_lost in (("cache.lost", True), ("cache.used", False)):
        found = [f"{cached} of {length}" for length, cached in known if (cached < length / 2) is is_lost]
        if found:
            yield Finding(name, found=found)


def _failures(e: Examined) -> Iterator[Finding]:
    for name, reason in e.seen.failed.items():
        yield Finding(f"{name}.failed", reason=reason)


_CHECKS: tuple[Callable[[Examined], Iterator[Finding]], ...] = (
    _speculation, _length, _acceptance, _temperature, _counters, _tokens, _logprobs, _repeat, _cache, _failures,
)  # fmt: skip


def diagnose(examined: Examined) -> list[Finding]:
    """Return the findings of all checks, in a fixed order; without an answer only why there is none."""
    checks = _CHECKS if examined.seen.answers else (_failures,)
    return [finding for check in checks for finding in check(examined)]


def verdict_of(findings: Sequence[Finding]) -> str:
    """Return the last sentence: whether there are problems."""
    problems = sum(finding.severity == "problem" for finding in findings)
    return f"{counted(problems, 'problem')} found." if problems else "No problem found."
