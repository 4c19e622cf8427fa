"""Load tokenizers, and find the tokens that end an output."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specbench.base.errors import RunError, UsageError
from specbench.base.progress import quiet_transformers
from specbench.base.textsafe import excerpt
from specbench.decoding.stops import special_tokens
from specbench.models.chat_templates import TemplateError, render_chat
from specbench.models.checkpoints import custom_code, text_config


def same_tokenizer(first: Path, second: Path) -> bool:
    """Return whether two folders have the same files of a tokenizer, except for its template."""
    files = ("tokenizer.json", "tokenizer_config.json")
    return len(filecmp.cmpfiles(first, second, files, shallow=False)[0]) == len(files)


def make_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder."""
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # tokenizer files can be absent, odd or damaged in many ways
            if "trust_remote_code" in str(error):
                raise custom_code(f"The tokenizer of {name}") from error
            raise RunError(
                f"The tokenizer of {name} cannot be loaded: {excerpt(error).rstrip('.')}.",
                "A model folder needs its tokenizer files in addition to the weights.",
            ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise RunError(f"The model {name} has no tokenizer.", "A model folder needs its tokenizer files.")
    if not isinstance(tokenizer.model_max_length, int | float):
        raise RunError(f"The tokenizer of {name} is damaged: its model_max_length is no number.")
    tokenizer.name_or_path = name
    tokenizer.chat_template = tokenizer.chat_template or _processor_template(folder)
    return tokenizer


def _processor_template(folder: Path) -> str | None:
    """Return the chat template that some models with pictures have beside their tokenizer."""
    try:
        template = json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return template if isinstance(template, str) else None


def end_ids_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Return every token id that ends a text, ascending.

    They come from the generation config, the configuration, the tokenizer's end-of-text token, and the token with which
    the chat template closes an assistant's turn.

    Raises:
        UsageError: An end token of a configuration is not a token id.
    """
    named: list[Any] = [
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        getattr(text_config(model.config), "eos_token_id", None),
    ]
    if tokenizer is not None:
        named += [tokenizer.eos_token_id, end_of_turn(tokenizer)]
    values = [each for value in named for each in (value if isinstance(value, list | tuple) else [value])]
    ids = [each for each in values if each is not None]
    if not all(isinstance(each, int) for each in ids):
        raise UsageError(
            "The model's eos_token_id is neither a token id nor a list of them.",
            "Correct its config.json or generation_config.json.",
        )
    return tuple(sorted({*map(int, ids)}))


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token after an assistant's message in the chat template, if there is one."""
    if not tokenizer.chat_template:
        return None
    marker = "An answer that ends here"
    conversation = [{"role": "user", "content": "A question"}, {"role": "assistant", "content": marker}]
    try:
        text = render_chat(tokenizer, conversation)
    except TemplateError:  # templates are programs, and may refuse any conversation
        return None
    _, found, rest = text.rpartition(marker)
    if not found:
        return None
    rest = rest.lstrip()
    special = special_tokens(tokenizer)
    closing = max((token for token in special if rest.startswith(token)), key=len, default=None)
    return None if closing is None else special[closing]
