"""Tool calls: the form in which a model's chat template writes them, as a grammar of outputs and as a parser of texts.

A template that takes tools also writes the calls of earlier answers. So calls of made-up functions are rendered with
it, and the texts around their names and arguments are the form in which the model was trained to call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specbench.base.errors import UsageError
from specbench.decoding.grammars import one_line_json
from specbench.models.chat_templates import TemplateError, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specbench.base.record import Json

_NAMES = ("probe_one", "probe_two")
_ID = "probeid01"  # nine letters and digits, which some templates demand
_ARGUMENTS = {"probe_key": "probe_value"}
_WRITTEN = r'\{\s*"probe_key"\s*:\s*"probe_value"\s*\}'
_ANY_ID = "\0"  # stands for the id of a call


@dataclass(frozen=True)
class CallForm:
    """The texts that a chat template writes around tool calls.

    Attributes:
        opening: Before the name of the first call, at the start of an answer.
        middle: Between name and arguments.
        between: From the arguments of a call to the name of the next one; ``None`` if an answer has one call at most.
        closing: After the arguments of the last call.
        marks: Special tokens in these texts, by their text.
        arguments_as_text: Whether the template takes arguments as JSON text, not as an object.
        hidden: Whether decoding without special tokens leaves out some of these texts.
    """

    opening: str
    middle: str
    between: str | None
    closing: str
    marks: Mapping[str, int]
    arguments_as_text: bool = False
    hidden: bool = False

    @property
    def later(self) -> str:
        """What comes before the name of a call that follows text or another call."""
        between = self.between or ""
        repeats = between.startswith(self.closing) and between != self.closing
        return (between[len(self.closing) :] if repeats else self.opening).lstrip()

    def grammar(self, tools: Sequence[Json], *, several: bool, text: bool = False) -> str:
        """Return the grammar of answers that call functions.

        Args:
            tools: The functions that can be called, as in requests.
            several: Whether an answer may have more than one call.
            text: Whether there may be text in place of calls and around them.
        """
        named = (
            f"{self._lark(each['function']['name'] + self.middle)} %json {_schema(each, text)}"
            for each in tools
        )
        opening, closing = self._lark(self.opening), self._lark(self.closing)
        repeat = "*" if several else "?"
        if text:
            mark = next((mark for mark in self.marks if self.later.startswith(mark)), None)
            begin, rest = (
                (self.later[:1], self.later[1:]) if mark is None else (mark, self.later[len(mark) :])
            )
            lazy = "[lazy]" if mark is None else ""
            start = f"(begin {self._lark(rest)} call {closing}){repeat} TEXT"
            rules = [f"begin{lazy}: TEXT {self._lark(begin)}", r"TEXT: /(.|\n)*/"]
        else:
            more = f" ({self._lark(self.between)} call)*" if several and self.between else ""
            start, rules = f"{opening} call{more} {closing}", []
        if _ANY_ID in self.closing:
            rules.append("CALL_ID: /[A-Za-z0-9]{9}/")
        return "\n".join([f"start: {start}", *rules, "call: " + "\n    | ".join(named)])

    def _lark(self, text: str) -> str:
        """Return a literal text as part of a rule."""
        marks = sorted(self.marks, key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, [*marks, _ANY_ID])) + ")", text)
        written = {**{mark: f"<[{number}]>" for mark, number in self.marks.items()}, _ANY_ID: "CALL_ID"}
        return " ".join(written.get(part, json.dumps(part)) for part in parts if part)


def _schema(tool: Json, text: bool) -> str:
    """Return the schema of a function's arguments: with ``text`` any object if the function is not strict."""
    function = tool["function"]
    schema = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    return json.dumps(one_line_json({"type": "object"} if text and not function.get("strict") else schema))


def call_form(tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]) -> CallForm:
    """Return the form in which a tokenizer's chat template writes tool calls.

    Raises:
        UsageError: The template shows the model no tools, or writes calls in another way than as names and JSON.
    """
    tools = [_probe_tool(name) for name in _NAMES]
    ends = [str(tokenizer.decode([token])) for token in end_ids]
    question = {"role": "user", "content": "probe"}
    try:
        prompt = render_chat(tokenizer, [question], add_generation_prompt=True, tools=tools)
    except TemplateError:
        prompt = ""
    if not all(name in prompt for name in _NAMES):
        raise UsageError("The model's chat template takes no tools.", "Leave tools out.")

    def parts(count: int, as_text: bool) -> tuple[str, ...] | None:
        try:
            text = render_chat(tokenizer, [question, _probe_answer(count, as_text)], tools=tools)
        except TemplateError:
            return None
        start = prompt if text.startswith(prompt) else prompt.rstrip()
        middles = (rf"(.*?){name}(.*?){_WRITTEN}" for name in _NAMES[:count])
        found = re.fullmatch("".join(middles) + "(.*)", text.removeprefix(start), re.DOTALL)
        if found is None or not text.startswith(start):
            return None
        *before, closing = (part.replace(_ID, _ANY_ID) for part in found.groups())
        cuts = [closing.index(end) for end in ends if end and end in closing]
        return *before, closing[: min(cuts)] if cuts else closing.rstrip()

    for as_text in (False, True):
        if (one := parts(1, as_text)) is not None:
            opening, middle, closing = one
            two = parts(2, as_text)
            between = None if two is None else two[2]
            texts = opening + middle + (between or "") + closing
            marks = {text: number for text, number in tokenizer.get_added_vocab().items() if text in texts}
            hidden = any(not tokenizer.decode([mark], skip_special_tokens=True) for mark in marks.values())
            form = CallForm(opening, middle, between, closing, marks, as_text, hidden)
            if form.later:
                return form
            raise UsageError(
                "The model's chat template writes nothing in front of a tool call, so text cannot be told from calls.",
                "Leave tools out.",
            )
    raise UsageError(
        "The model's chat template does not write tool calls as names and JSON.", "Leave tools out."
    )


def _probe_tool(name: str) -> Json:
    parameters = {"type": "object", "properties": {"probe_key": {"type": "string", "description": "A key."}}}
    return {
        "type": "function",
        "function": {"name": name, "description": "A probe.", "parameters": parameters},
    }


def _probe_answer(count: int, as_text: bool) -> Json:
    arguments = json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS
    functions = [{"name": name, "arguments": arguments} for name in _NAMES[:count]]
    calls = [{"id": _ID, "type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of a tool call.

    Attributes:
        index: The number of the call in its answer, from 0.
        name: The function, in a call's first part; ``None`` in the others.
        arguments: More of its arguments, as JSON.
    """

    index: int
    name: str | None
    arguments: str


class CallParser:
    """Splits the text of an answer, as it grows, into text and tool calls.

    A call is recognized by the texts of its form, whatever whitespace is in them, and by the name of a known function.
    What is not recognized is text. Whitespace before a call is left out.

    Args:
        form: The form of the calls.
        names: The names of the functions.

    Attributes:
        form: The form of the calls.
        calls: The number of calls so far.
    """

    def __init__(self, form: CallForm, names: Sequence[str]) -> None:
        self.form, self._names = form, names
        self._held = ""
        self._state: Callable[[], list[str | CallDelta] | None] = self._text
        self._depth, self._quoted, self._escaped = 0, False, False
        self.calls = 0

    @property
    def called(self) -> bool:
        """Whether there are calls, and the last one has all of its arguments."""
        return self.calls > 0 and self._state != self._arguments

    def push(self, text: str) -> list[str | CallDelta]:
        """Add text; return the parts that are certain now."""
        self._held += text
        parts: list[str | CallDelta] = []
        while self._held and (more := self._state()) is not None:
            parts += more
        return parts

    def finish(self) -> list[str | CallDelta]:
        """Return the rest: the text has ended."""
        rest, self._held = self._held, ""
        is_text = self._state == self._text and (rest.strip() or not self.calls)
        return [rest] if rest and is_text else []

    def _text(self) -> list[str | CallDelta] | None:
        """Read up to the next call; ``None`` if more text is needed."""
        held, first = self._held, self.form.later[0]
        at = held.find(first)
        while at >= 0:
            call = self._call(self.form.later, at)
            if isinstance(call, CallDelta):
                text = held[:at].rstrip()
                return [text, call] if text else [call]
            if call == "unknown":
                break
            at = held.find(first, at + 1)
        sure = len(held[: at if at >= 0 else None].rstrip())
        self._held = held[sure:]
        return [held[:sure]] if sure else None

    def _arguments(self) -> list[str | CallDelta]:
        """Read arguments up to the brace that closes them."""
        held = self._held
        end = next((i + 1 for i, each in enumerate(held) if self._closes(each)), None)
        if end is not None:
            self._state = self._after
        self._held = "" if end is None else held[end:]
        return [CallDelta(self.calls - 1, None, held[:end])]

    def _closes(self, character: str) -> bool:
        """Return whether a character, the next one, ends the arguments."""
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped, self._quoted = character == "\\", character != '"'
        elif character == '"':
            self._quoted = True
        elif character in "{}":
            self._depth += 1 if character == "{" else -1
            return self._depth == 0
        return False

    def _after(self) -> list[str | CallDelta] | None:
        """Read what follows arguments; ``None`` if more text is needed."""
        form = self.form
        listed = form.between is not None and not form.between.startswith(form.closing)
        call = self._call(form.between, 0) if listed and form.between else None
        if isinstance(call, CallDelta):
            return [call]
        end = _end_of(form.closing, self._held, 0)
        if "unknown" in (call, end) and not isinstance(end, int):
            return None
        self._held = self._held[end or 0 :] if isinstance(end, int) else self._held
        self._state = self._text
        return []

    def _call(self, begin: str, at: int) -> CallDelta | Literal["unknown"] | None:
        """Return the call that begins at a place in the waiting text, and take it out of there.

        ``None`` if there is none, ``unknown`` if it takes more text to tell.
        """
        held, end = self._held, _end_of(begin, self._held, at)
        if not isinstance(end, int):
            return end
        unknown = False
        for name in self._names:
            rest = held[end : end + len(name)]
            found = _end_of(self.form.middle + "{", held, end + len(name)) if rest == name else None
            unknown |= found == "unknown" or (
                rest != name and end + len(rest) == len(held) and name.startswith(rest)
            )
            if isinstance(found, int):
                self._held, self._state = held[found - 1 :], self._arguments
                self._depth, self._quoted, self._escaped = 0, False, False
                self.calls += 1
                return CallDelta(self.calls - 1, name, "")
        return "unknown" if unknown else None


def _end_of(literal: str, text: str, at: int) -> int | Literal["unknown"] | None:
    """Return where a literal that begins at a place in a text ends, whatever whitespace is in either.

    ``None`` if it is not there, ``unknown`` if the text ends too early to tell.
    """
    for expected in filter(lambda each: not each.isspace(), literal):
        while at < len(text) and text[at].isspace():
            at += 1
        if at == len(text):
            return "unknown"
        if expected == _ANY_ID:
            length = len(re.match(r"\w*", text[at:])[0])  # type: ignore[index]
            if not length:
                return None
            at += length
        elif text[at] != expected:
            return None
        else:
            at += 1
    return at
