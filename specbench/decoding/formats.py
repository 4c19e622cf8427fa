"""Formats of outputs: a JSON Schema, a regular expression or a grammar as masks over the next token.

The target's distribution is the masked one: tokens that the format does not allow are ruled out before temperature,
top-k and top-p, at each node of a draft. The masks are those of the library llguidance. Where the format leaves only
one text, its mask allows a single token, the one with which the target's tokenizer would continue that text.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specbench.base.errors import RunError, UsageError
from specbench.base.textsafe import excerpt
from specbench.decoding.thinking import ThinkingSplit
from specbench.options import Format

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

NAMES = {"json-schema": "The JSON Schema", "regex": "The regular expression", "grammar": "The grammar"}
"""What messages call each kind of format."""

LONGEST = 2**18
"""Most characters of a format."""

_LEXER_STATES = 100_000
"""The most states of a compiled format, of up to 2 KB."""

_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python writes it, on one line; ``x-guidance`` in a schema changes it."""

_KEPT_FORMATS = 32
"""Compiled formats that are kept."""

_KEPT_MASKS = 512
"""Masks of the latest places of an output that are kept."""

_SHARED_MASKS = 10_000
"""Masks after which new outputs begin with states of their own: the library limits all states that outputs share."""


@dataclass(frozen=True)
class Mask:
    """The tokens that a format allows at one place.

    Attributes:
        bits: A bit per token, uint8 [vocab / 8]; ``None`` for a single token.
        only: The token, if it is the only one.
    """

    bits: NDArray[np.uint8] | None
    only: int | None = None

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """Whether each token is allowed, bool [at least vocab]."""
        assert self.bits is not None
        return np.unpackbits(self.bits, bitorder="little").view(np.bool_)

    def allows(self, token: int) -> bool:
        """Return whether a token is allowed."""
        if self.bits is None:
            return token == self.only
        return bool(self.bits[token >> 3] >> (token & 7) & 1) if token >> 3 < len(self.bits) else False

    def apply(self, row: torch.Tensor, outside: float) -> None:
        """Give the tokens that are not allowed the value ``outside`` in a row, [vocab], in place."""
        if self.only is not None:
            kept = row[self.only].clone()
            row.fill_(outside)
            row[self.only] = kept
            return
        forbidden = torch.from_numpy(~self.allowed[: len(row)])
        row[: len(forbidden)].masked_fill_(forbidden.to(row.device), outside)
        row[len(forbidden) :] = outside


class FormatCompiler:
    """Compiles formats for one tokenizer; thread-safe.

    Args:
        tokenizer: The target's.
        vocab_size: The number of its logits.
        end_ids: The tokens that end an output.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, end_ids: Sequence[int]
    ) -> None:
        self._tokenizer, self._vocab_size, self._end_ids = tokenizer, vocab_size, tuple(end_ids)
        self._compiled: dict[Format, CompiledFormat] = {}
        self._lock = threading.Lock()

    def compile(self, format: Format) -> CompiledFormat:  # noqa: A002
        """Compile a format, or return it if it was compiled lately.

        Raises:
            UsageError: It is invalid or too large, no output has it, its library is missing, or the tokenizer is not
                supported.
        """
        with self._lock:
            if format not in self._compiled:
                while len(self._compiled) >= _KEPT_FORMATS:
                    del self._compiled[next(iter(self._compiled))]
                self._compiled[format] = self._compile(format)
            return self._compiled[format]

    def _compile(self, given: Format) -> CompiledFormat:
        name, tokens = NAMES[given.kind], self._tokens
        assert self._tokenizer is not None
        compiled = CompiledFormat(name, grammar_of(given), self._end_ids, tokens, self._tokenizer)
        try:
            compiled.matcher(0).mask_after(())
        except RunError as error:
            if "NoExtension" not in error.message and "no token" not in error.message:
                raise UsageError(error.message, error.hint) from error
            raise UsageError(
                f"{name} allows no output.", "Give one that at least one finite text fits."
            ) from error
        return compiled

    @cached_property
    def _tokens(self) -> Any:
        """The tokenizer as the library reads it."""
        if self._tokenizer is None or not self._end_ids:
            what = "tokenizer" if self._tokenizer is None else "end token"
            raise UsageError(f"A format needs the target's {what}, and it has none.", "Leave the format out.")
        library()
        from llguidance import hf

        try:
            size = max(self._vocab_size, len(self._tokenizer))
            tokenizer: Any = self._tokenizer
            return hf.from_tokenizer(tokenizer, n_vocab=size, eos_token=[*self._end_ids])
        except ValueError as error:
            raise UsageError(
                f"Formats do not support the target's tokenizer: {excerpt(str(error))}.", "Leave them out."
            ) from error


class CompiledFormat:
    """A format for one tokenizer, from which each output gets a matcher of its own.

    Args:
        name: What messages call it.
        grammar: The format as the library's matcher takes it.
        end_ids: The tokens that end an output.
        tokens: The tokenizer as the library reads it.
        tokenizer: The target's, which tells thinking from answers.

    Attributes:
        computed: Masks computed by matchers that share states.

    Raises:
        UsageError: The library refuses the format.
    """

    def __init__(
        self, name: str, grammar: str, end_ids: Sequence[int], tokens: Any, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.name, self.grammar, self.end_ids, self.tokens = name, grammar, frozenset(end_ids), tokens
        self.tokenizer = tokenizer
        self.computed = 0
        self._lock = threading.Lock()
        self._fresh = matcher_of(tokens, grammar)
        if self._fresh.is_error():
            raise invalid(name, self._fresh.get_error())

    def matcher(self, prompt: int) -> Matcher:
        """Return a matcher for an output that follows ``prompt`` tokens."""
        with self._lock:
            if self.computed > _SHARED_MASKS:
                self._fresh, self.computed = matcher_of(self.tokens, self.grammar), 0
            return Matcher(self, self._fresh.deep_copy(), prompt)


class Matcher:
    """Follows one output and its drafts through a format.

    It holds the format's state after a path, the tokens last asked about, and rolls it back to where the next path
    branches off. The masks along the path are kept, so that target and drafter share them. If the prompt has opened the
    model's thinking, the format is that of the answer behind it, and the path begins there.

    Args:
        format: The format.
        matcher: The library's matcher, which nothing else uses.
        prompt: The length of the prompt.

    """

    def __init__(self, format: CompiledFormat, matcher: Any, prompt: int) -> None:  # noqa: A002
        self._format, self._matcher, self._prompt = format, matcher, prompt
        self._thinking: ThinkingSplit | None = None  # after the tokens below, while it lasts
        self._thought: list[int] = []
        self._path: list[int] = []
        self._masks: dict[int, Mask] = {}  # by the length of the path that they follow
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """Return the time that masks have taken since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def mask_after(self, context: Sequence[int], drafted: Sequence[int] = ()) -> Mask | None:
        """Return the mask of the next token; for the result see ``masks``."""
        return self.masks(context, drafted, 1)[0]

    def masks(self, context: Sequence[int], drafted: Sequence[int], rows: int) -> list[Mask | None]:
        """Return the masks of several places.

        Args:
            context: Tokens, including the prompt.
            drafted: At least ``rows - 1`` tokens after the context.
            rows: How many masks; the last one follows ``context + drafted``, as in ``Sampling.scores``.

        Returns:
            The masks; ``None`` in the thinking, after an end token, and after a token that the format does not allow.

        Raises:
            RunError: The library's limits are exceeded, or no token can follow.
        """
        began = time.perf_counter()
        tokens = [*context[self._prompt :], *drafted]
        start = self._answer_start(context, tokens, len(drafted))
        masks: list[Mask | None] = [None] * min(rows, max(0, start - (len(tokens) - rows + 1)))
        if len(masks) == rows:
            return masks
        tokens, rows, thinking = tokens[start:], rows - len(masks), masks
        common = self._common(tokens)
        masks = []
        for length in range(len(tokens) - rows + 1, len(tokens) + 1):
            mask = self._masks.get(length) if length <= common else None
            if mask is None:
                if not self._go(tokens, min(common, length), length):
                    masks += [None] * (rows - len(masks))
                    break
                common = length
                mask = self._masks[length] = self._compute()
            masks.append(mask)
        if len(self._masks) > 2 * _KEPT_MASKS:
            least = len(self._path) - _KEPT_MASKS
            self._masks = {length: mask for length, mask in self._masks.items() if length > least}
        self._seconds += time.perf_counter() - began
        return thinking + masks

    def _answer_start(self, context: Sequence[int], tokens: Sequence[int], drafted: int) -> int:
        """Return where the answer begins: how many tokens of the output are thinking that the prompt has opened.

        While the thinking lasts, that is one more than there are. The last ``drafted`` tokens are a draft.
        """
        kept = len(tokens) - drafted
        if self._thinking is None or self._thought != tokens[: min(kept, len(self._thought))]:
            self._thinking = ThinkingSplit(self._format.tokenizer, context[: self._prompt])
            self._thought = []
        for token in tokens[len(self._thought) : kept]:
            if not self._thinking.thinks:
                break
            self._thinking.push(token)
            self._thought.append(token)
        ahead = self._thinking.ends_after(tokens[kept:]) if self._thinking.thinks else 0
        return len(tokens) + 1 if ahead is None else len(self._thought) + ahead

    def apply(self, scores: torch.Tensor, context: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
        """Rule out the tokens that are not allowed, in place; for the arguments see ``Sampling.scores``."""
        masks = self.masks(context, drafted, len(scores))
        began = time.perf_counter()
        for row, mask in zip(scores, masks, strict=True):
            if mask is not None:
                mask.apply(row, -math.inf)
        self._seconds += time.perf_counter() - began
        return scores

    def process(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return masked scores, [rows, vocab]: a logits processor of ``transformers``; ids are [rows, tokens]."""
        rows = zip(ids.tolist(), scores.clone().split(1), strict=True)
        return torch.cat([self.apply(row, context, ()) for context, row in rows])

    def _common(self, tokens: Sequence[int]) -> int:
        """Return how many tokens begin both the path and ``tokens``."""
        path = self._path
        if tokens[: len(path)] == path:
            return len(path)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(path, tokens, strict=False)))

    def _go(self, tokens: Sequence[int], common: int, length: int) -> bool:
        """Move to ``tokens[:length]``, of which the first ``common`` are on the path; return whether it is allowed."""
        path = self._path
        if common < len(path):
            self._matcher.rollback(len(path) - common)
            del path[common:]
            self._masks = {kept: mask for kept, mask in self._masks.items() if kept <= common}
        rest = tokens[common:length]
        if not self._format.end_ids.isdisjoint(rest):
            return False
        path += rest[: self._matcher.try_consume_tokens([*rest])] if rest else []
        self._raise_errors()
        return len(path) == length

    def _compute(self) -> Mask:
        """Return the mask after the path."""
        self._format.computed += 1
        forced = self._matcher.compute_ff_tokens()
        self._raise_errors()
        if forced:
            return Mask(None, self._as_text(forced[0]))
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._raise_errors()
        held = np.flatnonzero(bits)
        if not len(held):
            raise RunError(f"{self._format.name} allows no token here.", "Change it.")
        if len(held) == 1 and (byte := int(bits[held[0]])) & (byte - 1) == 0:
            return Mask(None, 8 * int(held[0]) + byte.bit_length() - 1)
        return Mask(bits)

    def _as_text(self, token: int) -> int:
        """Return a forced token, or one that begins its text if that only looks like a special token.

        The library tokenizes ``<tool_call>`` in a forced text as the special token, and then does not take it.
        """
        tokens = self._format.tokens
        if not tokens.is_special_token(token) or self._matcher.validate_tokens([token]):
            return token
        return int(tokens.greedy_tokenize(self._matcher.compute_ff_bytes().decode(errors="ignore"))[0])

    def _raise_errors(self) -> None:
        if self._matcher.is_error():
            lines = self._matcher.get_error().splitlines() or ["it has an error"]
            why = excerpt(lines[0], 200)
            self._format.computed = _SHARED_MASKS + 1  # the states of other outputs may be why
            raise RunError(f"{self._format.name} cannot be followed further: {why}.", "Simplify it.")


# -- the library -----------------------------------------------------------------------------------


def library() -> Any:
    """Return the library.

    Raises:
        UsageError: It is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise UsageError(
            "Formats need the package llguidance.", "Install it: pip install 'specbench-llm[formats]'."
        ) from error
    return llguidance


def grammar_of(given: Format) -> str:
    """Return a format as the library's matcher takes it.

    Raises:
        UsageError: It is invalid or too long.
    """
    if len(given.text) > LONGEST:
        raise UsageError(
            f"{NAMES[given.kind]} has {len(given.text):,} characters, and only {LONGEST:,} are allowed.",
            "Shorten it.",
        )
    matcher = library().LLMatcher
    try:
        if given.kind == "regex":
            return str(matcher.grammar_from_regex(given.text))
        if given.kind == "grammar":
            return str(matcher.grammar_from_lark(given.text))
        schema = json.loads(given.text)
        if not isinstance(schema, dict | bool):
            raise ValueError("it is no JSON object")
        return str(matcher.grammar_from_json_schema({} if schema is True else schema, defaults=_JSON))
    except RecursionError as error:
        raise invalid(NAMES[given.kind], "it is nested too deeply") from error
    except ValueError as error:
        raise invalid(NAMES[given.kind], str(error)) from error


def matcher_of(tokens: Any, grammar: str) -> Any:
    """Return the library's matcher of a grammar, for a tokenizer as the library reads it."""
    limits = library().LLParserLimits(verbose_errors=False, max_lexer_states=_LEXER_STATES)
    return library().LLMatcher(tokens, grammar, log_level=0, limits=limits)


def invalid(name: str, reason: str) -> UsageError:
    """Return the error of a format that the library refuses for a reason."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    why = excerpt((causes or lines or ["it is invalid"])[0], 200)
    return UsageError(f"{name} cannot be used: {why}.", "Change it.")
