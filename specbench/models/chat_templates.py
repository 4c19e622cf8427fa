"""Chat templates are programs by a model's author: a separate process renders them, with limits on memory and time.

Jinja's sandbox keeps a template away from files and modules, but limits neither memory (`'a' * 10**9`) nor time (nested
loops).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specbench.base.bounded import BoundedProcess
from specbench.base.textsafe import excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specbench.base.record import Json

SECONDS = 10.0
"""Time limit for a template."""
_MEMORY = 512 * 2**20
"""Memory limit in addition to the process's own."""
_LONGEST = 2**24
"""Most characters of a rendered conversation: several times the longest contexts."""
_WORDS = 1000
"""Most characters of a template's own message."""


class TemplateError(Exception):
    """A chat template refuses a conversation, or exceeds a limit."""


def _preload() -> None:
    from transformers.utils import chat_template_utils  # noqa: F401


_renderer = BoundedProcess("renders chat templates", f"{__name__}:render", _MEMORY, _preload)


def start_renderer() -> None:
    """Start the process if there is none, without waiting."""
    _renderer.start()


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation as `tokenizer.apply_chat_template` does.

    Some templates take contents only as lists of parts, and write nothing, or fail, for a text. So the conversation is
    rendered a second time with made-up words in it: a form in which these do not come out would lose the real ones.

    Args:
        add_generation_prompt: Whether to append the text that opens the assistant's next answer.
        tools: The functions that the model can call, as in requests to a server.
        variables: What else the template is given, by name; see ``used_variables``.

    Raises:
        TemplateError: The template refuses, leaves out what a message says, or takes too much time or memory.
    """
    request = {
        **(variables or {}),
        "tools": tools or None,
        "chat_template": _template(tokenizer, tools),
        "add_generation_prompt": add_generation_prompt,
        **tokenizer.special_tokens_map,
    }
    marks = {place: f"mark{place}end" for place, each in enumerate(messages) if _must_come_out(each)}
    marked = [
        {**each, "content": marks[place]} if place in marks else each for place, each in enumerate(messages)
    ]
    failure = ""
    for conversations in ([messages, marked], [_in_parts(messages), _in_parts(marked)]):
        answer = _renderer.ask({"conversations": conversations, **request}, SECONDS)
        if answer is None:
            failure = failure or f"rendering took longer than {SECONDS:g} seconds or more memory than allowed"
            break
        if "texts" in answer:
            text, probe = answer["texts"]
            lost = next((place for place, mark in marks.items() if mark not in probe), None)
            if lost is None:
                return str(text)
            answer = {"error": f"it leaves out what a message of the {messages[lost]['role']} says"}
        failure = failure or answer["error"]
    raise TemplateError(failure)


def used_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the names of the variables that a tokenizer's chat template uses and does not set itself.

    Raises:
        TemplateError: It cannot be read.
    """
    answer = _renderer.ask({"chat_template": _template(tokenizer)}, SECONDS)
    if answer is None or "error" in answer:
        raise TemplateError("it cannot be read" if answer is None else answer["error"])
    return frozenset(answer["variables"])


def _template(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    given = [dict(tool) for tool in tools] or None
    try:
        return str(tokenizer.get_chat_template(tools=given))  # of several templates "tool_use" with tools
    except ValueError as error:  # it has several, and none of them is the usual one
        raise TemplateError(excerpt(error)) from error


def _must_come_out(message: Mapping[str, Any]) -> bool:
    """Whether the template must repeat this message's text; next to tool calls, some templates leave it out."""
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip()) and not message.get("tool_calls")


def _in_parts(messages: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return messages with their texts as lists of one part."""
    return [
        {**each, "content": [{"type": "text", "text": each["content"]}]}
        if isinstance(each.get("content"), str)
        else {**each}
        for each in messages
    ]


def render(request: Json) -> Json:
    """Answer a request in the other process."""
    from jinja2 import TemplateError as JinjaError
    from jinja2.meta import find_undeclared_variables
    from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

    if "conversations" not in request:
        template = request["chat_template"]
        try:
            environment = _compile_jinja_template(template).environment
        except JinjaError as error:
            return {"error": str(error)[:_WORDS]}
        known = find_undeclared_variables(environment.parse(template)) - set(environment.globals)
        return {"variables": sorted(known)}
    texts = []
    for conversation in request.pop("conversations"):
        try:
            text = render_jinja_template(conversations=[conversation], **request)[0][0]
        except MemoryError:
            return {"error": f"rendering took more than {_MEMORY // 2**20} MiB of memory"}
        except Exception as error:  # templates may raise anything
            return {"error": str(error)[:_WORDS]}
        if len(text) > _LONGEST:
            return {"error": f"the rendered text has more than {_LONGEST:,} characters"}
        texts.append(text)
    return {"texts": texts}
