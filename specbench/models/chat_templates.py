"""Chat templates are programs by a model's author, which Jinja's sandbox keeps away from files and modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specbench.base.textsafe import excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specbench.base.record import Json


class TemplateError(Exception):
    """A chat template refuses a conversation."""


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
        TemplateError: The template refuses, or leaves out what a message says.
    """

    def rendered(conversation: Sequence[Mapping[str, Any]]) -> str:
        text: Any = tokenizer.apply_chat_template(
            [dict(each) for each in conversation],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **(variables or {}),
        )
        return str(text)

    marks = {place: f"mark{place}end" for place, each in enumerate(messages) if _must_come_out(each)}
    marked = [
        {**each, "content": marks[place]} if place in marks else each for place, each in enumerate(messages)
    ]
    failure = ""
    for said, probe in ((messages, marked), (_in_parts(messages), _in_parts(marked))):
        try:
            text, shown = rendered(said), rendered(probe)
        except Exception as error:  # templates may raise anything
            failure = failure or excerpt(error, 1000)
            continue
        lost = next((place for place, mark in marks.items() if mark not in shown), None)
        if lost is None:
            return text
        failure = failure or f"it leaves out what a message of the {messages[lost]['role']} says"
    raise TemplateError(failure)


def used_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the names of the variables that a tokenizer's chat template uses and does not set itself.

    Raises:
        TemplateError: It cannot be read.
    """
    from jinja2 import TemplateError as JinjaError
    from jinja2.meta import find_undeclared_variables
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        template = tokenizer.get_chat_template()
        environment = _compile_jinja_template(template).environment
        return frozenset(find_undeclared_variables(environment.parse(template)) - set(environment.globals))
    except (JinjaError, ValueError) as error:
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
