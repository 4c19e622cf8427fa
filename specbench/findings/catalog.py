"""All findings of commands: an id with numbers, and for each id its severity, its sentence, and what to do about it.

The logic of a command returns findings, and everything that shows them takes the sentence from ``CATALOG``:

    >>> print(Finding("few-prompts", prompts=1).text)
    1 prompt says little about others.

Templates are those of ``str.format``, and ``{prompts:prompt}`` is a number with its noun, "1 prompt" or "2 prompts";
another plural stands after a bar. Text of models and servers becomes one line that is safe to print.
"""

from __future__ import annotations

import math
import string
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

from specbench.base.record import Estimate, Json
from specbench.base.textsafe import counted, listed, one_line
from specbench.results.stats import decimals, ratio_text

Severity = Literal["problem", "warning", "note", "ok"]
"""``note`` changes no conclusion, ``warning`` may, ``problem`` does."""


@dataclass(frozen=True, init=False)
class Finding:
    """What was found: an id of ``CATALOG``, and the numbers and names of its sentence."""

    id: str
    numbers: Json

    def __init__(self, name: str, /, **numbers: Any) -> None:
        object.__setattr__(self, "id", name)
        object.__setattr__(self, "numbers", numbers)

    @property
    def severity(self) -> Severity:
        return CATALOG[self.id][0]

    @property
    def topic(self) -> str:
        """What it is about: the part of the id before the dot, the same for all findings of a kind."""
        return self.id.partition(".")[0]

    @property
    def text(self) -> str:
        """What was found, in a sentence."""
        return _FORMATTER.format(CATALOG[self.id][1], **self.numbers)

    @property
    def remedy(self) -> str:
        """What to do about it, in a sentence; may be empty."""
        return _FORMATTER.format(CATALOG[self.id][2], **self.numbers)

    @property
    def line(self) -> str:
        """Severity, text and remedy in a line."""
        return f"{self.severity}: {self.text} {self.remedy}".rstrip()

    def to_json(self) -> Json:
        """Return it as JSON data."""
        return {"id": self.id, "severity": self.severity, "text": self.text, "remedy": self.remedy}


class _Formatter(string.Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, Estimate):
            return ratio_text(value)
        if isinstance(value, list | tuple):
            return listed([one_line(text) for text in value], int(spec or len(value)))
        if isinstance(value, Integral) and spec[:1].isalpha() and spec[1:]:
            return counted(int(value), *spec.split("|"), form=",")
        if isinstance(value, float) and not math.isfinite(value):
            return decimals(value)
        return format(one_line(value) if isinstance(value, str) else value, spec)


_FORMATTER = _Formatter()

_MORE_MEMORY = "Use a smaller model or a narrower dtype, or close other programs."
_DIFFER = "{what}: tokens differ from {over} in {number} of {cases:case}, first at token {place} of {prompt} ({label})"
_SAME = "{share} of the outputs are token for token those of {over}"
_UNBIASED = "If it passes without speculation, its drafts are the cause."
_NOT_DRAFTS = "Another model, chat template or setting of sampling is the cause, whatever the drafts do"
_NO_DRAFT = "Check its log for the draft model: it may not be loaded, or not fit the target's vocabulary."
_LOGPROBS = "Do not use its log probabilities; compare with speculation switched off."
_PREFIX_CACHING = (
    "Switch prefix caching on (vLLM: --enable-prefix-caching; llama.cpp: cache_prompt), and compare without"
    " speculation, which can cost the last block of a cached prompt (vLLM: disable_eagle_block_drop)."
)

CATALOG: dict[str, tuple[Severity, str, str]] = {
    # -- the machine ---------------------------------------------------------------------------------
    "machine-busy": ("warning", "Other programs used the processor {when}.", "Close other programs and measure again."),
    "machine-busy.before": (
        "warning", "The machine is busy: a load of {load:.1f} on {cores:core} before it began.",
        "Close other programs or wait for them."),
    "steal": (
        "warning", "The host of this virtual machine gave processor time to others {when}.",
        "Measure at another time, or on a machine of your own."),
    "frequency-drop": (
        "warning", "The processor ran slower than before {when}.",
        "Let it cool down, plug it in, and fix its frequency if you can."),
    "memory-pressure": ("warning", "Memory was short {when}.", _MORE_MEMORY),
    "memory-pressure.before": (
        "warning", "Memory is short: {free:.1f} of {memory:.1f} GB are free.", _MORE_MEMORY),
    "stopped": (
        "warning", "The process was stopped and continued (SIGSTOP, Ctrl-Z) {when}.",
        "Do not stop it while it measures: the pause is included in these times."),
    "hardly-disturbed": ("note", "{what}: too few to change a conclusion.", ""),
    # -- the figures of a run ------------------------------------------------------------------------
    "unfinished.sweep": (
        "warning", "The sweep is not finished: it has {measured} of {planned:generation}.",
        "Continue it: the same command with --resume."),
    "unfinished.search": (
        "warning", "The search is not finished: it has {measured:generation}.",
        "Continue it: the same command with --resume."),
    "lines": ("warning", "{problem}", "They are measured again with --resume."),
    "few-prompts": (
        "warning", "{prompts:prompt says|prompts say} little about others.",
        "Measure at least 8 prompts, of several categories: raise --limit or name more --prompts."),
    "wide-intervals": (
        "warning", "Intervals wider than ±10%: {wide} of {intervals}; the widest is ±{half:.0%} ({label}).",
        "Measure more prompts; add --resume, and --out with the run."),
    "wide-intervals.repeats": (
        "warning", "Intervals wider than ±10%: {wide} of {intervals}; the widest is ±{half:.0%} ({label}).",
        "Raise --repeats; add --resume, and --out with the run."),
    "baseline-slow": (
        "problem", "transformers' generate is {speedup:.2f}× as fast as plain decoding here, so speedups over plain"
        " decoding are too high.",
        "Try another --cache or --dtype, and divide the speedups by this figure."),
    "tokens-differ": (
        "problem", f"{_DIFFER}; the logits of the two tokens are {{gap:.3g}} apart there, more than rounding explains.",
        "Please report it: the output should be the same."),
    "tokens-differ.unchecked": (
        "warning", f"{_DIFFER}.",
        "Finish the sweep with --resume to learn whether rounding explains it, or use --dtype float32."),
    "tokens-differ.server": (
        "warning", f"{_DIFFER}.", "`specbench check --outputs` says whether rounding explains it."),
    "tokens-differ.tie": (
        "note", f"{_DIFFER}; wherever they part, the logits of the two tokens tie within rounding.",
        "Nothing to do; with --dtype float32 the outputs are the same."),
    "tokens-differ.rounded": (
        "note", f"{_DIFFER}; wherever they part, the logits of the two tokens tie within rounding.",
        "An {dtype} target amplifies rounding: leave out --cache, whose default gives bit-exact passes on most"
        " processors, or use another --dtype."),
    "failed.all": (
        "problem", "{failed:generation} of {where} failed: {reason}.", "Remove the cause and add --resume."),
    "failed": ("warning", "{failed:generation} of {where} failed: {reason}.", "Remove the cause and add --resume."),
    # -- servers in a run ----------------------------------------------------------------------------
    "token-counts": (
        "warning", "{server}: token counts are unclear in {wrong} of {answers:answer}; in the first: {problem}",
        "The tokenizer's count was used where there is one; compare totals with care."),
    "tokens-unchecked": (
        "note", "{server}: only the server counted the tokens.",
        "Add --target MODEL to check them with its tokenizer."),
    "one-piece": (
        "warning", "{server}: each answer comes in one piece, so times to the first token and per token are unknown.",
        "Make it stream its answers; results that include TTFT are right either way."),
    "prompt-cache": (
        "warning", "{label}: {share:.0%} of the prompts' tokens came from a cache that could not be switched off, so"
        " its time to the first token is too short.",
        "Start it without a prompt cache."),
    "warm-pool": (
        "warning", "{label}: {warming:.2f}× as fast with prompts that it has answered before: it drafts from what it"
        " remembers.",
        "Measure each prompt once (--repeats 1), or restart the server between repeats."),
    # -- does speculation pay? "Yes, ", "No, " or "Not known, " and -----------------------------------
    "pays.nothing": ("note", "nothing measured can be compared with {over}.", ""),
    "pays.speedup": ("ok", "{name}: {speedup} over {over}.", ""),
    "pays.best": ("ok", "the best of {count} is {name}: {speedup} over {over}.", ""),
    "pays.categories": ("ok", "By category from {low} ({least}) to {high} ({most}).", ""),
    "pays.total": ("ok", "Including the time to the first token: {speedup}.", ""),
    "others.ties": ("note", "Perhaps equally fast: {names:5}.", ""),
    "others.missing": ("note", "Not measured on all of its prompts: {names:5}.", ""),
    "others.slower": ("ok", "No other is as fast.", ""),
    "holds.repeats": (
        "note", "Only one prompt was measured: the interval is over its repeats and says nothing about others.", ""),
    "holds.little": (
        "note", "Too few prompts or repeats for an interval: another run could give a very different result.", ""),
    "holds.some": ("note", "It was measured on {prompts} of {of:prompt}.", ""),
    "holds.chosen": (
        "note", "The best of {count} on these prompts is slightly flattered: expect a little less on others.", ""),
    "curve.nothing": (
        "note", "no generation with drafts, or of another server, has finished in a closed loop of as many clients as"
        " the batch, or with a given length of context.", ""),
    "curve.unknown": (
        "note", "{name}: too few groups of prompts for intervals; it measured most at {place}, {speedup} over {over}.",
        ""),
    "curve.nowhere": (
        "note", "{name}: is not certain to pay anywhere; it measured most at {place}, {speedup} over {over}.", ""),
    "curve.slower": (
        "ok", "{name}: is slower everywhere; it measured most at {place}, {speedup} over {over}.", ""),
    "curve.only": ("ok", "{name}: pays at {place}, the only one measured, {speedup} over {over}.", ""),
    "curve.everywhere": ("ok", "{name}: pays everywhere up to {place}, {speedup} over {over}.", ""),
    "curve.up-to": ("ok", "{name}: pays up to {place}, {speedup} over {over}.", ""),
    "curve.at": ("ok", "{name}: pays at {place}, {speedup} over {over}, but not everywhere below.", ""),
    "curve.below": ("ok", "At {place} the interval lies below 1, {speedup}.", ""),
    "curve.holds": ("ok", "At {place} the interval reaches below 1, {speedup}.", ""),
    "curve.most": ("ok", "It measured most at {place}, {speedup}.", ""),
    "curve.few": ("note", "Too few groups of prompts for an interval at {place}.", ""),
    "curve.more": ("note", "More drafters and policies are in the table: {curves}.", ""),
    # -- tune ----------------------------------------------------------------------------------------
    "tune.yes": ("ok", "Yes: {name}, {speedup} over plain decoding.", ""),
    "tune.yes-provisional": (
        "note", "Yes: {name}, {speedup} over plain decoding. Others may be faster (provisional).", ""),
    "tune.no": ("ok", "No, speculation does not pay here: {name} is {speedup} over plain decoding.", ""),
    "tune.equal": ("ok", "No, speculation gains less than 5% here: {name} is {speedup} over plain decoding.", ""),
    "tune.open": ("note", "Not known yet: the provisional choice is {name}, {speedup} over plain decoding.", ""),
    "tune.open-plain": (
        "note", "Not known yet: the provisional choice is plain decoding; {name} is {speedup} of it.", ""),
    "tune.unmeasured": (
        "note", "Not known: no drafter could be measured. Plain decoding is the provisional choice.", ""),
    "tune.no-time": (
        "note", "Not known: the time was too short to compare anything. The provisional choice is {choice}.", ""),
    "tune.resume": ("note", "More time compares them: --resume --minutes N.", ""),
    "tune.raced-alone": ("ok", "Raced on {blocks} of {prompts:prompt} beside plain decoding alone.", ""),
    "tune.raced": ("ok", "Raced on {blocks} of {prompts:prompt} beside plain decoding and {others:3}.", ""),
    "tune.raced-sure": (
        "ok", "Raced on {blocks} of {prompts:prompt} beside plain decoding and {others:3}; with 95% confidence none of"
        " these is more than 5% faster.", ""),
    "tune.one-prompt": ("note", "One prompt says nothing of others: give more with --prompts.", ""),
    "tune.time-unknown": ("note", "More time is needed, how much is not known yet: --resume continues.", ""),
    "tune.hours": ("note", "More than 8 hours would be needed to decide it: --resume continues.", ""),
    "tune.minutes": (
        "note", "About {minutes:more minute} would decide it: --resume --minutes {minutes}.", ""),
    "tune.unraced": ("note", "Not compared: {names:5}.", ""),
    "tune.cut": ("note", "The target is slow, so outputs were cut after {tokens:token}.", ""),
    "tune.busy": ("note", "{why} A quiet machine needs less time.", ""),
    "tune.busy-decided": (
        "note", "{why} Candidates were measured in turn and corrected for disturbances of single generations, so the"
        " choice stands; the figures are those of a busy machine.", ""),
    "same.all": ("ok", "Outputs are token for token those of {over}.", ""),
    "same.ties": (
        "ok", f"{_SAME}; the others differ only where two tokens tie within the rounding of {{dtype}}, which was"
        " checked: either is the target's own choice.", ""),
    "same.beyond": ("note", f"{_SAME}; rounding does not explain all others: see the warnings.", ""),
    "same.unchecked": ("note", f"{_SAME}; the end of a sweep checks whether rounding explains the others.", ""),
    "same.server": ("note", f"{_SAME}; `specbench check --outputs` tells whether rounding explains the others.", ""),
    # -- check: does a server sample without bias? ----------------------------------------------------
    "server.early": ("note", "Too few positions: no round of answers is complete ({counts}).", ""),
    "server.undrafted": ("note", "Too few positions: hardly anything was drafted ({counts}).", ""),
    "server.few": ("note", "Too few positions: not even a large deviation would have been found ({counts}).", ""),
    "server.sound": (
        "ok", "No deviation from {other} above {share:.2%} of the probability mass ({power:.0%}), p = {p:.2g}:"
        " {counts}.", ""),
    "server.unreported": ("note", "The server does not report its drafts: this holds only if it speculates.", ""),
    "server.biased": ("problem", "BIASED: sampled output differs from {other}, p = {p:.2g} ({counts}).", _UNBIASED),
    "server.frequent": (
        "problem", "BIASED: sampled output differs from {other}: likely tokens are too frequent, p = {p:.2g}"
        " ({counts}).", _UNBIASED),
    "server.rare": (
        "problem", "BIASED: sampled output differs from {other}: likely tokens are too rare, p = {p:.2g} ({counts}).",
        _UNBIASED),
    "server.first-too": (
        "note", "First tokens, which are never drafted, differ as well (p = {p:.2g}).", f"{_NOT_DRAFTS}."),
    "server.first-alone": (
        "note", "Only first tokens differ, which are never drafted (p = {p:.2g}).",
        f"{_NOT_DRAFTS}, if more answers (--limit) confirm it."),
    # -- doctor: speculation -------------------------------------------------------------------------
    "speculation.unknown": (
        "note", "The server does not report whether it drafts.",
        "Switch its metrics on: --metrics (llama.cpp), --enable-metrics (SGLang); vLLM has /metrics."),
    "speculation.unconfirmed": (
        "problem", "The server does not report whether it drafts.",
        "Switch its metrics on: --metrics (llama.cpp), --enable-metrics (SGLang); vLLM has /metrics."),
    "speculation.chunks": ("note", "A chunk of text holds {tokens:.1f} tokens on average.", ""),
    "speculation.idle": ("problem", "Speculation is configured, but nothing was drafted.", _NO_DRAFT),
    "speculation.missing": ("problem", "Speculation is off: nothing was drafted.", _NO_DRAFT),
    "speculation.off": ("ok", "Speculation is off.", ""),
    "speculation.unwanted": ("problem", "Speculation is on.", "Start the server without its options."),
    "speculation.on": ("ok", "Speculation is on: {drafted:draft token} for {tokens:token}.", ""),
    "speculation.length": ("ok", "Effective γ {gamma:.1f}, {share:.0%} of the steps draft.", ""),
    "acceptance.none": (
        "problem", "None of {drafted:draft token} was accepted.",
        "The drafter does not fit the target: check its tokenizer, its weights and its revision."),
    "acceptance.rate": ("ok", "{rate:.0%} of draft tokens are accepted.", ""),
    "acceptance.positions": ("ok", "Accepted by position, of all drafts: {shares}.", ""),
    "acceptance.placeholders": (
        "problem", "No draft token after position {useful} was accepted, of {beyond:,} or more: they may be"
        " placeholders.",
        "Set the draft length to {useful} (vLLM: num_speculative_tokens; llama.cpp: --spec-draft-n-max; SGLang:"
        " --speculative-num-steps)."),
    "temperature.like-greedy": (
        "ok", "{sampled:.0%} of draft tokens are accepted at temperature {temperature:g}, {greedy:.0%} at 0.", ""),
    "temperature.collapse": (
        "problem", "Acceptance collapses: {sampled:.0%} of draft tokens are accepted at temperature {temperature:g},"
        " {greedy:.0%} at 0.",
        "Update the engine, which may accept only what it samples itself, or draft without the sampling options; or"
        " switch speculation off for sampled requests."),
    # -- doctor: counts ------------------------------------------------------------------------------
    "counters.shared": (
        "note", "The counters increase while nothing is asked: others use the server.",
        "Examine it while nobody else uses it."),
    "counters.disagree": (
        "problem", "Counts disagree: {wrong}.", "Do not use these figures; report it to the engine's developers."),
    "counters.agree": ("ok", "Counters agree with each other and with the answers.", ""),
    "tokens.miscounted": (
        "problem", "{problem}", "Count tokens with the tokenizer (--target MODEL): it may count steps or chunks."),
    "tokens.counted": ("ok", "{tokens:token}, according to {sources}.", ""),
    # -- doctor: outputs -----------------------------------------------------------------------------
    "logprobs.none": ("note", "The server gives no log probabilities.", ""),
    "logprobs.infinite": ("problem", "A log probability of token {token} is not finite.", _LOGPROBS),
    "logprobs.positive": ("problem", "Token {token} has the log probability {logprob:.3g}.", _LOGPROBS),
    "logprobs.sum": ("problem", "The probabilities of token {token} sum to {total:.2f}.", _LOGPROBS),
    "logprobs.order": (
        "problem", "Token {token} is not the most likely one of its own list, though decoding is greedy.", _LOGPROBS),
    "logprobs.bare": (
        "note", "Tokens without alternatives: {bare} of {tokens}; the server leaves them out for draft tokens.",
        "For log probabilities, switch speculation off."),
    "logprobs.sound": ("ok", "Log probabilities are finite, and sum to at most 1.", ""),
    "repeat.same": ("ok", "{answers:greedy answer} to one prompt are the same.", ""),
    "repeat.differs": (
        "problem", "Greedy answers to one prompt differ after {shared:character}.",
        "Temperature 0 may not be honored, or rounding depends on the batch (vLLM: VLLM_BATCH_INVARIANT=1)."),
    "cache.unknown": ("note", "The server does not report cached prompt tokens.", "{option}"),
    "cache.used": ("ok", "A second turn finds {found} tokens of the first in the prompt cache.", ""),
    "cache.lost": (
        "problem", "A second turn finds only {found} tokens of the first in the prompt cache.", _PREFIX_CACHING),
    **{
        f"{topic}.failed": ("problem", f"{what} failed: {{reason}}", "Read the server's log.")
        for topic, what in {
            "answers": "The check of answers", "repeat": "The check of repeated answers",
            "cache": "The check of the prompt cache", "temperature": "The check at a temperature",
            "counters": "Reading the counters",
        }.items()
    },
}  # fmt: skip
