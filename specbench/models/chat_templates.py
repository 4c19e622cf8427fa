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
) -> str:
    """Render a conversation as `tokenizer.apply_chat_template` does.

    Args:
        tokenizer: A tokenizer with a chat template.
        messages: The messages of the conversation, with "role" and "content".
        add_generation_prompt: Whether to append the text that opens the assistant's next answer.
        tools: The functions that the model can call, as in requests to a server.

    Raises:
        TemplateError: The template refuses, or takes too much time or memory.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # it has several, and none of them is the usual one
        raise TemplateError(excerpt(error)) from error
    request = {
        "conversations": [messages],
        "tools": tools or None,
        "chat_template": template,
        "add_generation_prompt": add_generation_prompt,
        **tokenizer.special_tokens_map,
    }
    answer = _renderer.ask(request, SECONDS)
    if answer is None:
        raise TemplateError(f"rendering took longer than {SECONDS:g} seconds or more memory than allowed")
    if "text" not in answer:
        raise TemplateError(answer["error"])
    return str(answer["text"])


def render(request: Json) -> Json:
    """Answer a request in the other process."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        text = render_jinja_template(**request)[0][0]
    except MemoryError:
        return {"error": f"rendering took more than {_MEMORY // 2**20} MiB of memory"}
    except Exception as error:  # templates may raise anything
        return {"error": str(error)[:_WORDS]}
    if len(text) > _LONGEST:
        return {"error": f"the rendered text has more than {_LONGEST:,} characters"}
    return {"text": text}
