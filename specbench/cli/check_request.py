"""What `specbench check` was asked for, whatever is checked."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from specbench.base.errors import UsageError
from specbench.cli.conflicts import given
from specbench.cli.console import write_out

if TYPE_CHECKING:
    from rich.console import Console

    from specbench.check.results import Piece
    from specbench.decoding.sampling import Sampling
    from specbench.models.load import LanguageModel
    from specbench.models.target import Target
    from specbench.recipe import Recipe


@dataclass
class CheckRequest:
    """What was asked for, whatever is checked; ``sampling`` gets the model's own settings when it is loaded."""

    ctx: typer.Context
    recipe: Recipe
    chat: bool | None
    system: str | None
    sampling: Sampling
    json_output: bool
    verbose: bool
    quiet: bool
    console: Console

    def apply_defaults(self, model: LanguageModel) -> None:
        """Add the model's own settings to the transforms, as far as they are to be applied; say which they are."""
        for line in (*model.notes, *model.defaults.notes(applied=self.recipe.decoding.model_defaults)):
            self.note(line)
        self.sampling = self.sampling.with_defaults(
            model.defaults.under(self.recipe.decoding), model.vocab_size
        )

    def given(self, *names: str | type) -> list[str]:
        """Those of the named options that stand on the command line."""
        return given(self.ctx, *names)

    def note(self, text: str) -> None:
        """Say something on stderr that the user should know."""
        from specbench.cli.summary import show_notes

        if not self.quiet:
            show_notes([text], apart=False, console=self.console)

    def encode(self, model: LanguageModel, text: str, system: str | None = None) -> list[int]:
        """Token ids of a prompt. A system message without a place of its own goes in front of the text."""
        from specbench.generate import encode_prompt

        if model.tokenizer is None:
            raise UsageError("The target has no tokenizer.", "Choose a model folder that holds one.")
        if system is not None and self.system is None:
            with suppress(UsageError):
                return encode_prompt(model.tokenizer, text, chat=self.chat, system=system)
            return encode_prompt(model.tokenizer, f"{system}\n\n{text}", chat=self.chat)
        return encode_prompt(model.tokenizer, text, chat=self.chat, system=self.system)

    def write(self, figures: dict[str, Any]) -> None:
        """Print one JSON object."""
        write_out(json.dumps(figures, allow_nan=False) + "\n")


def pieces_of(model: LanguageModel) -> Piece | None:
    tokenizer = model.tokenizer
    return None if tokenizer is None else lambda token: str(tokenizer.decode([token]))


def rounding_of(target: Target) -> str:
    """The dtype whose rounding decides, by name."""
    return str(target.scorer.rounding).removeprefix("torch.")
