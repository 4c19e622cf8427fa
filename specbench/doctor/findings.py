"""What the observations of a server say: findings, each with its remedy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

from specbench.base.record import Json, ratio
from specbench.base.textsafe import counted, one_line
from specbench.doctor.probes import TEMPERATURE, draft_counts
from specbench.servers.client import count_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specbench.doctor.probes import Observations
    from specbench.servers.client import StreamedAnswer, TokenCount

Status = Literal["ok", "note", "problem"]
Expected = Literal["on", "off"]

_TELLING = 20
"""If so many draft tokens were tested and none was accepted, it is no coincidence."""

_SUM_SLACK = 0.01
_WORDS_PER_TOKEN = 1.05
"""Most words of a text per token; ordinary text has fewer words than tokens."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of one check, in a sentence, and what to change."""

    check: str
    status: Status
    text: str
    remedy: str = ""


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
    seen, drafted = e.seen, e.drafted
    if drafted is None:
        per_chunk = ratio(e.tokens, sum(len(answer.pieces) for answer in seen.answers))
        guess = f"; a chunk holds {per_chunk:.1f} tokens on average" if per_chunk > 1.2 else ""
        yield Finding(
            "speculation",
            "note" if e.expected is None else "problem",
            f"The server does not report whether it drafts{guess}.",
            "Switch its metrics on: --metrics (llama.cpp), --enable-metrics (SGLang); vLLM has /metrics.",
        )
    elif not drafted:
        configured = seen.dialect.counts_if_on and seen.counted is not None
        if e.expected == "on" or configured:
            how = "is configured, but" if configured else "is off:"
            remedy = (
                "Check its log for the draft model: it may not be loaded, or not fit the target's vocabulary."
            )
            yield Finding("speculation", "problem", f"Speculation {how} nothing was drafted.", remedy)
        else:
            yield Finding("speculation", "ok", "Speculation is off.")
    elif e.expected == "off":
        yield Finding("speculation", "problem", "Speculation is on.", "Start the server without its options.")
    else:
        yield Finding(
            "speculation",
            "ok",
            f"Speculation is on: {counted(drafted, 'draft token')} for {e.tokens} tokens.",
        )


def _method(e: Examined) -> Iterator[Finding]:
    if not e.drafted:
        return
    parts = []
    named = _named_method(e.seen.about)
    if named:
        parts.append(f"Method: {named}")
    if e.gamma is not None:
        parts.append(f"effective γ {e.gamma:.1f}")
        parts.append(f"{100 * e.drafting_share:.0f}% of the steps draft")
    if parts:
        text = ", ".join(parts)
        yield Finding("method", "ok", text[0].upper() + text[1:] + ".")


def _named_method(about: Json) -> str:
    """Return the method that a server's page names; empty if it names none."""
    places: list[Any] = [about.get("speculative_algorithm")]
    for model in _listed(about.get("data")):
        if isinstance(model, dict) and isinstance(model.get("speculation"), dict):
            places += [model["speculation"].get("drafter")]
    defaults = about.get("default_generation_settings")
    if isinstance(defaults, dict) and isinstance(defaults.get("params"), dict):
        places += [defaults["params"].get("speculative.types")]
    return next((one_line(name) for name in places if isinstance(name, str) and name not in ("", "none")), "")


def _acceptance(e: Examined) -> Iterator[Finding]:
    if not e.drafted:
        return
    if not e.accepted and e.drafted >= _TELLING:
        yield Finding(
            "acceptance",
            "problem",
            f"None of {e.drafted} draft tokens was accepted.",
            "The drafter does not fit the target: check its tokenizer, its weights and its revision.",
        )
        return
    text = f"{100 * e.accepted / e.drafted:.0f}% of draft tokens are accepted"
    if e.by_position:
        drafts, kept = e.by_position
        text += "; by position, of all drafts: " + " ".join(f"{100 * each / drafts:.0f}%" for each in kept)
    yield Finding("acceptance", "ok", f"{text}.")


def _temperature(e: Examined) -> Iterator[Finding]:
    """Acceptance at a temperature, which has collapsed if it is less than a third of that at 0."""
    drafted, accepted = e.seen.sampled
    if not (e.drafted and e.accepted and drafted):
        return
    greedy, sampled = (f"{100 * rate:.0f}%" for rate in (e.accepted / e.drafted, accepted / drafted))
    rates = f"{sampled} of draft tokens are accepted at temperature {TEMPERATURE:g}, {greedy} at 0."
    if 3 * accepted * e.drafted >= e.accepted * drafted or min(drafted, e.drafted) < _TELLING:
        yield Finding("temperature", "ok", rates)
        return
    remedy = "Update the engine, which may accept only what it samples itself, or draft without the sampling options;"
    remedy += " or switch speculation off for sampled requests."
    yield Finding("temperature", "problem", f"Acceptance collapses: {rates}", remedy)


def _dummy_tokens(e: Examined) -> Iterator[Finding]:
    if not e.drafted or not e.by_position or not e.accepted:
        return
    drafts, kept = e.by_position
    useful = max((place for place, count in enumerate(kept, 1) if count), default=0)
    beyond = e.drafted - drafts * useful  # at least so many draft tokens are at later positions
    if useful and beyond >= _TELLING and kept[useful - 1] >= _TELLING:
        yield Finding(
            "dummy tokens",
            "problem",
            f"No draft token after position {useful} was accepted, of {beyond} or more: they may be placeholders.",
            f"Set the draft length to {useful}{_option_for(e, useful)}.",
        )


def _option_for(e: Examined, gamma: int) -> str:
    """Return the engine's option for a draft length, in brackets; empty if unknown."""
    options = {
        "vllm": f"--speculative-config '{{\"num_speculative_tokens\": {gamma}, ...}}'",
        "llamacpp": f"--spec-draft-n-max {gamma}",
        "sglang": f"--speculative-num-steps {gamma}",
    }
    return f" ({options[e.seen.owner]})" if e.seen.owner in options else ""


# -- counts ------------------------------------------------------------------------------------------


def _counters(e: Examined) -> Iterator[Finding]:
    now, reported = e.seen.counted, e.reported
    if now is None:
        return
    if e.seen.idle is not None and e.seen.idle.drafts:
        yield Finding(
            "counters",
            "note",
            "The counters increase while nothing is asked: others use the server.",
            "Examine it while nobody else uses it.",
        )
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
        remedy = "Do not use these figures; report it to the engine's developers."
        yield Finding("counters", "problem", f"Counts disagree: {'; '.join(wrong)}.", remedy)
    elif now.drafts:
        yield Finding("counters", "ok", "Counters agree with each other and with the answers.")


def _tokens(e: Examined) -> Iterator[Finding]:
    if e.miscount is not None:
        remedy = "Count tokens with the tokenizer (--target MODEL): it may count steps or chunks."
        yield Finding("tokens", "problem", e.miscount, remedy)
    elif e.counts:
        sources = sorted({count.source for count in e.counts} | ({"tokenizer"} if e.tokenizer else set()))
        yield Finding("tokens", "ok", f"{e.tokens} tokens, according to {' and '.join(sources)}.")


# -- outputs -----------------------------------------------------------------------------------------


def _logprobs(e: Examined) -> Iterator[Finding]:
    entries = list(_entries(e.seen.logprobs)) if e.seen.logprobs else []
    if not entries:
        if "repeat" not in e.seen.failed:
            yield Finding("logprobs", "note", "The server gives no log probabilities.")
        return
    wrong = ""
    bare = 0
    for place, (own, others) in enumerate(entries, 1):
        total = (
            sum(math.exp(min(value, 1.0)) for value in others)
            if all(map(math.isfinite, others))
            else math.nan
        )
        bare += not others
        if math.isnan(own) or math.isnan(total) or not math.isfinite(own):
            wrong = f"a log probability of token {place} is not finite"
        elif own > _SUM_SLACK:
            wrong = f"token {place} has the log probability {own:.3g}"
        elif total > 1.0 + _SUM_SLACK:
            wrong = f"the probabilities of token {place} sum to {total:.2f}"
        elif others and max(others) > own + 0.5:
            wrong = f"token {place} is not the most likely one of its own list, though decoding is greedy"
        if wrong:
            remedy = "Do not use its log probabilities; compare with speculation switched off."
            yield Finding("logprobs", "problem", f"Log probabilities are wrong: {wrong}.", remedy)
            return
    if 0 < bare < len(entries):
        yield Finding(
            "logprobs",
            "note",
            f"{bare} of {len(entries)} tokens have no alternatives: the server leaves them out for draft tokens.",
            "For log probabilities, switch speculation off.",
        )
    else:
        yield Finding("logprobs", "ok", "Log probabilities are finite, and sum to at most 1.")


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
    if len(texts) < 2:
        return
    place = _first_difference(texts)
    if place is None:
        yield Finding("repeat", "ok", f"{len(texts)} greedy answers to one prompt are the same.")
        return
    yield Finding(
        "repeat",
        "problem",
        f"Greedy answers to one prompt differ after {counted(place, 'character')}.",
        "Temperature 0 may not be honored, or rounding depends on the batch (vLLM: VLLM_BATCH_INVARIANT=1).",
    )


def _first_difference(texts: Sequence[str]) -> int | None:
    """Return how many characters texts share; ``None`` if each is the beginning of the longest."""
    shown = [text.rstrip("\N{REPLACEMENT CHARACTER}") for text in texts]
    least = min(map(len, shown))
    return next((i for i in range(least) if len({text[i] for text in shown}) > 1), None)


def _cache(e: Examined) -> Iterator[Finding]:
    turns = [(first.prompt_tokens, second.cached_tokens) for first, second in e.seen.turns]
    known = [(length, cached) for length, cached in turns if length and cached is not None]
    lost = [f"{cached} of {length}" for length, cached in known if cached < length / 2]
    if not turns:
        return
    if not known:
        yield Finding(
            "cache",
            "note",
            "The server does not report cached prompt tokens.",
            "vLLM: --enable-prompt-tokens-details." if e.seen.owner == "vllm" else "",
        )
        return
    used = ", ".join(f"{cached} of {length}" for length, cached in known if cached >= length / 2)
    if not lost:
        text = f"A second turn finds {used} tokens of the first in the prompt cache."
        yield Finding("cache", "ok", text)
        return
    text = f"A second turn finds only {', '.join(lost)} tokens of the first in the prompt cache"
    remedy = "Switch prefix caching on (vLLM: --enable-prefix-caching; llama.cpp: cache_prompt), and compare without"
    remedy += (
        " speculation, which can cost the last block of a cached prompt (vLLM: disable_eagle_block_drop)."
    )
    yield Finding("cache", "problem", f"{text}{f', but {used}' if used else ''}.", remedy)


def _plain_outputs(e: Examined) -> Iterator[Finding]:
    pairs = [(with_.text, without.text) for with_, without in e.seen.plain]
    if any(without.drafted for _, without in e.seen.plain) or not pairs:
        return
    same = sum(_first_difference(pair) is None for pair in pairs)
    text = f"{same} of {counted(len(pairs), 'greedy answer')} are the same without speculation."
    if not same and len(pairs) > 2:
        remedy = "Speculation may change the output: check it with `specbench check --outputs`."
        yield Finding("outputs", "problem", text, remedy)
    else:
        yield Finding("outputs", "ok" if same == len(pairs) else "note", text)


# -- speed -------------------------------------------------------------------------------------------


def _pace(e: Examined, answer: StreamedAnswer) -> float:
    """Return the seconds per token after the first chunk; NaN if unknown."""
    tokens = count_tokens(answer, e.tokenizer).tokens
    if answer.first is None or not tokens or tokens < 2 or len(answer.pieces) < 2:
        return math.nan
    first = len(answer.first.ids or (0,))
    return (answer.pieces[-1].at_s - answer.first.at_s) / max(1, tokens - first)


def _paces(e: Examined) -> list[tuple[float, float]]:
    """Return the seconds per token with and without speculation, of each prompt with both."""
    paces = [(_pace(e, drafting), _pace(e, plain)) for drafting, plain in e.seen.plain if not plain.drafted]
    return [pair for pair in paces if all(map(math.isfinite, pair)) and min(pair) > 0]


def _speed(e: Examined) -> Iterator[Finding]:
    from specbench.results.stats import geometric_mean, ratio_text, verdict

    paces = _paces(e)
    if not paces:
        return
    gain = geometric_mean([plain / drafting for drafting, plain in paces], list(range(len(paces))))
    found = verdict(gain)
    text = (
        f"Speculation is {ratio_text(gain)} as fast as plain decoding, over {counted(len(paces), 'prompt')}"
    )
    if found == "slower":
        remedy = "Switch it off, or find a better setting with `specbench tune`."
        yield Finding("speed", "problem", f"{text}.", remedy)
    elif found == "faster":
        yield Finding("speed", "ok", f"{text}.")
    else:
        remedy = "Measure more prompts with `specbench sweep --server`."
        yield Finding("speed", "note", f"{text}: cannot tell whether it is faster.", remedy)


def _failures(e: Examined) -> Iterator[Finding]:
    names = {"plain": "The comparison with plain decoding", "counters": "Reading the counters"}
    for name, reason in e.seen.failed.items():
        text = f"{names.get(name, f'The check of {name}')} failed: {reason}"
        yield Finding(name, "problem", text, "Read the server's log.")


_CHECKS: tuple[Callable[[Examined], Iterator[Finding]], ...] = (
    _speculation, _method, _acceptance, _temperature, _dummy_tokens, _counters, _tokens, _logprobs,
    _repeat, _plain_outputs, _cache, _speed, _failures,
)  # fmt: skip


def diagnose(examined: Examined) -> list[Finding]:
    """Return the findings of all checks, in a fixed order; without an answer only why there is none."""
    checks = _CHECKS if examined.seen.answers else (_failures,)
    return [finding for check in checks for finding in check(examined)]


def verdict_of(findings: Sequence[Finding]) -> str:
    """Return the last sentence: whether there are problems."""
    problems = sum(finding.status == "problem" for finding in findings)
    return f"{counted(problems, 'problem')} found." if problems else "No problem found."
