"""Settings of a model's ``generation_config.json``: functions of the context are applied, the rest is reported.

The logits processors are those of ``transformers``, in its order, one row at a time in the context before that
row. Target and drafter get the same ones, so p and q are transformed alike and decoding stays exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specbench.base.errors import UsageError
from specbench.options import DecodingOptions

APPLIED = (
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens",
    "suppress_tokens",
)  # fmt: skip
"""Settings of decoder models that change logits by the context alone."""

NOT_USED = (
    "do_sample", "temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff",
    "eta_cutoff", "num_beams", "penalty_alpha", "dola_layers", "guidance_scale",
    "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "watermarking_config", "force_words_ids",
    "constraints", "stop_strings", "token_healing", "max_time", "sequence_bias", "forced_bos_token_id",
    "forced_eos_token_id", "exponential_decay_length_penalty", "begin_suppress_tokens",
)  # fmt: skip
"""Settings that would change outputs, but are not used: how tokens are chosen is up to the user, and the others need
more than logits, or belong to models that are no decoders."""

NEUTRAL = {"repetition_penalty": 1.0, "num_beams": 1}

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class ModelDefaults:
    """A model's own generation settings.

    Attributes:
        applied: Those that depend on the context alone, by their names in ``transformers``, as JSON values.
        unused: Others that would change outputs; they are not used.
    """

    applied: dict[str, Any] = field(default_factory=dict)
    unused: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, generation_config: Any) -> ModelDefaults:
        """Return those of a ``GenerationConfig``; none for ``None``."""
        applied = {name: _plain(value) for name, value in _active(generation_config, APPLIED)}
        return cls(applied, {name: _plain(value) for name, value in _active(generation_config, NOT_USED)})

    def with_options(self, options: DecodingOptions) -> ModelDefaults:
        """Return the settings with decoding options applied, which add or leave out some."""
        return ModelDefaults(options.context_rules(self.applied))

    def notes(self, *, applied: bool) -> list[str]:
        """Return notes for users, a sentence each."""
        used = self.applied if applied else {}
        unused = self.unused if applied else self.applied | self.unused
        lines = []
        if used:
            lines.append(
                f"The model's own settings are applied: {_listed(used)} (--no-model-defaults leaves them out)."
            )
        if unused:
            lines.append(f"The model's own settings are not used: {_listed(unused)}.")
        return lines


def _active(config: Any, names: Iterable[str]) -> Iterable[tuple[str, Any]]:
    """Yield the settings that have an effect. (A forced token with the id 0 has one.)"""
    for name in names:
        value = getattr(config, name, None)
        nothing = value is None if name.startswith("forced_") else not value or value == NEUTRAL.get(name)
        if not nothing:
            yield name, value


def _plain(value: Any) -> Any:
    """Return a setting as JSON; a dict with tuple keys becomes a list of pairs."""
    if isinstance(value, dict):
        return [[_plain(key), item] for key, item in value.items()]
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _listed(settings: dict[str, Any]) -> str:
    """Return names and values, without long values."""
    said = {name: "on" if value is True else value for name, value in settings.items()}
    return ", ".join(
        f"{name} {value}" if isinstance(value, int | float | str) else name for name, value in said.items()
    )


class ContextRules:
    """The applied settings for one output.

    Args:
        applied: See ``ModelDefaults``.
        repetition_penalty: Replaces the settings' own; 1 for none.
        prompt: Length of the prompt.
        end_ids: The end tokens.
    """

    def __init__(
        self, applied: dict[str, Any], repetition_penalty: float, prompt: int, end_ids: Iterable[int]
    ) -> None:
        self._applied, self._penalty = applied, repetition_penalty
        self._prompt, self._end_ids = prompt, sorted(end_ids)
        self._made: dict[torch.device, list[Processor]] = {}

    def __call__(
        self, scores: torch.Tensor, context: Sequence[int], drafted: Sequence[int] = ()
    ) -> torch.Tensor:
        """Return transformed scores, float32 [rows, vocab]; for the arguments see ``Sampling.scores``."""
        device = scores.device
        if device not in self._made:
            self._made[device] = self._processors(device)
        ids = torch.tensor([[*context, *drafted]], device=device)
        before_drafts = ids.shape[1] - len(scores) + 1
        rows = []
        for place in range(len(scores)):
            row = scores[place : place + 1]
            for processor in self._made[device]:
                row = processor(ids[:, : before_drafts + place], row)
            rows.append(row)
        return torch.cat(rows)

    def _processors(self, device: torch.device) -> list[Processor]:
        import transformers as hf

        own, made = self._applied, list[Any]()
        ends = torch.tensor(self._end_ids, device=device) if self._end_ids else None
        least = self._prompt + own["min_new_tokens"] if "min_new_tokens" in own else own.get("min_length")
        if self._penalty != 1.0:
            made.append(hf.RepetitionPenaltyLogitsProcessor(float(self._penalty)))
        if "no_repeat_ngram_size" in own:
            made.append(hf.NoRepeatNGramLogitsProcessor(own["no_repeat_ngram_size"]))
        if "bad_words_ids" in own:
            made.append(hf.NoBadWordsLogitsProcessor(own["bad_words_ids"], ends))
        if least is not None and ends is not None:
            made.append(hf.MinLengthLogitsProcessor(least, ends, device=str(device)))
        if "suppress_tokens" in own:
            made.append(hf.SuppressTokensLogitsProcessor(own["suppress_tokens"], device=str(device)))
        return made

    def try_out(self, vocab_size: int) -> None:
        """Apply the settings once.

        Raises:
            UsageError: They are damaged, or name tokens that the model lacks.
        """
        try:
            for length in (1, 4):
                self(torch.zeros(1, vocab_size), [0] * length)
        except Exception as error:  # processors raise many kinds of errors
            raise UsageError(
                f"The model's own generation settings cannot be applied: {str(error).splitlines()[0]}.",
                "Leave them out with --no-model-defaults.",
            ) from error
