"""Prompts and conversations as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.decoding.thinking import thinking_tokens, unopened_tokens
from specbench.generate import encode_messages
from specbench.options import NO_OPTIONS

if TYPE_CHECKING:
    from specbench.bench.prompts import Prompt
    from specbench.models.load import LanguageModel
    from specbench.models.target import Target


def encode_conversation(
    target: Target | LanguageModel, prompt: Prompt, answers: Sequence[Sequence[int]] = ()
) -> list[int]:
    """Return the token ids of a conversation up to the turn after the given answers.

    What was thought before an earlier answer is left out, as in chats. If the chat template has no role for a system
    message, that message precedes the first turn. Without a template, all texts are joined.

    Raises:
        UsageError: The target has no tokenizer, or its template refuses the conversation.
    """
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise UsageError("The target has no tokenizer.", "Choose a model folder that holds one.")
    end_ids = set(target.end_ids)
    texts = []
    for answer in answers:
        thought = thinking_tokens(tokenizer, (), answer) or unopened_tokens(tokenizer, answer)
        kept = [token for token in answer[thought:] if token not in end_ids]
        texts.append(str(tokenizer.decode(kept, skip_special_tokens=True)))
    turns = prompt.turns[: len(texts) + 1]
    if not getattr(tokenizer, "chat_template", None):
        if prompt.template != NO_OPTIONS:
            raise UsageError("The target's tokenizer has no chat template to tell anything.", "Leave it out.")
        parts = [] if prompt.system is None else [prompt.system]
        parts += [text for pair in zip(turns, [*texts, ""], strict=True) for text in pair if text]
        return [int(token) for token in tokenizer("\n\n".join(parts))["input_ids"]]
    messages = [{"role": "user", "content": turns[0]}]
    for said, turn in zip(texts, turns[1:], strict=True):
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": turn}]
    if prompt.system is None:
        return encode_messages(tokenizer, messages, template=prompt.template)
    try:
        system = {"role": "system", "content": prompt.system}
        return encode_messages(tokenizer, [system, *messages], template=prompt.template)
    except UsageError:  # every configuration gets the same prompt
        messages[0]["content"] = f"{prompt.system}\n\n{turns[0]}"
        return encode_messages(tokenizer, messages, template=prompt.template)
