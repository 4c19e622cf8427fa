"""Prompts and conversations as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.generate import encode_messages

if TYPE_CHECKING:
    from specbench.bench.prompts import Prompt
    from specbench.models.target import Target


def encode_conversation(target: Target, prompt: Prompt, answers: Sequence[Sequence[int]] = ()) -> list[int]:
    """Return the token ids of a conversation up to the turn after the given answers.

    If the chat template has no role for a system message, that message precedes the first turn. Without a template,
    all texts are joined.

    Raises:
        UsageError: The target has no tokenizer, or its template refuses the conversation.
    """
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise UsageError("The target has no tokenizer.", "Choose a model folder that holds one.")
    end_ids = set(target.end_ids)
    texts = [
        str(tokenizer.decode([token for token in answer if token not in end_ids], skip_special_tokens=True))
        for answer in answers
    ]
    turns = prompt.turns[: len(texts) + 1]
    if not getattr(tokenizer, "chat_template", None):
        parts = [] if prompt.system is None else [prompt.system]
        parts += [text for pair in zip(turns, [*texts, ""], strict=True) for text in pair if text]
        return [int(token) for token in tokenizer("\n\n".join(parts))["input_ids"]]
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(texts, turns[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    if prompt.system is None:
        return encode_messages(tokenizer, messages)
    try:
        return encode_messages(tokenizer, [{"role": "system", "content": prompt.system}, *messages])
    except UsageError:  # every configuration gets the same prompt
        messages[0]["content"] = f"{prompt.system}\n\n{turns[0]}"
        return encode_messages(tokenizer, messages)
