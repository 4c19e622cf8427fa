"""What the target's layers held while it wrote: stored, so that it need not read its own answers again.

Writing a token takes a pass of the target, which computes all that a head learns from. So the states are taken as they
come, and lie in the folder of a training until it ends.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from specbench.base.errors import RunError
from specbench.base.files import file_errors, write_bytes
from specbench.drafters.plain import NoDraft

if TYPE_CHECKING:
    from specbench.decoding.drafts import StepOutcome
    from specbench.decoding.protocols import ScorerLike

_SPARED = 1 << 30
"""Bytes of a disk that they leave free."""


class StateListener(NoDraft):
    """Plain decoding of one request that hears the target's hidden states.

    Args:
        layers: Whose, see ``ForwardRequest``.
        dtype: They are kept in.
    """

    def __init__(self, layers: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self._layers, self._dtype = layers, dtype
        self._parts: list[torch.Tensor] = []
        self._heard = 0

    @property
    def layers(self) -> Sequence[int]:
        return self._layers

    def fork(self, scorer_like: ScorerLike) -> StateListener:  # noqa: ARG002
        return self

    def begin(self, prompt: Sequence[int]) -> None:  # noqa: ARG002
        self._parts, self._heard = [], 0

    def update(self, outcome: StepOutcome) -> None:
        states = outcome.states
        assert states is not None
        fresh = len(outcome.context) - 1 - self._heard
        self._parts.append(states[len(states) - fresh :].to("cpu", self._dtype, copy=True))
        self._heard += fresh

    def take(self) -> torch.Tensor:
        """Of all tokens but the last, [positions, layers, width]; they are not kept any longer."""
        parts, self._parts = self._parts, []
        return torch.cat(parts)


class HiddenStates:
    """States of texts in a folder, in a file for each, known by the text's round and prompt.

    Args:
        folder: Made when the first ones are added.
        layers: Whose they are, the last of them what the target's head reads.
        width: Of the states.
        dtype: They are kept in.
    """

    def __init__(self, folder: Path, layers: Sequence[int], width: int, dtype: torch.dtype) -> None:
        self._folder, self.layers, self._dtype = folder, tuple(layers), dtype
        self._position_bytes = len(self.layers) * width * dtype.itemsize

    def listener(self) -> StateListener:
        """What hears those of a request."""
        return StateListener(self.layers, self._dtype)

    def check_space(self, tokens: int) -> None:
        """Refuse where those of so many tokens more, prompts included, have no room.

        Raises:
            RunError: They have none.
        """
        there = next(each for each in (self._folder, *self._folder.parents) if each.is_dir())
        if shutil.disk_usage(there).free < tokens * self._position_bytes + _SPARED:
            raise self._full()

    def add(self, key: tuple[int, int], tokens: Sequence[int], states: torch.Tensor) -> None:
        """Store those of a text, [positions, layers, width]; in place of others to the same prompt.

        Raises:
            RunError: The folder cannot be written, or is full.
        """
        self.check_space(len(tokens))
        content = {"tokens": torch.tensor(tokens), "states": states.to("cpu", self._dtype).contiguous()}
        with file_errors(
            f"The folder {str(self._folder)!r} cannot be written",
            "Free some space, and add --resume.",
            full=self._full(),
        ):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_bytes(self._path(key), save(content))

    def of(self, key: tuple[int, int], tokens: Sequence[int]) -> torch.Tensor | None:
        """Those of a text, which may end earlier than the one that was added; ``None`` for another one."""
        try:
            found = load_file(self._path(key))
            known, states = found["tokens"].tolist(), found["states"]
        except (OSError, SafetensorError, KeyError):
            return None
        length = len(tokens)
        same = known[:length] == list(tokens) and states.shape[1] == len(self.layers)
        return states[:length] if same else None

    def _full(self) -> RunError:
        return RunError(
            f"No space is left for hidden states in the folder {str(self._folder)!r};"
            f" a token takes {self._position_bytes / 1024:.0f} KiB.",
            "Free some, and add --resume; or train into another folder without --store-states.",
        )

    def _path(self, key: tuple[int, int]) -> Path:
        return self._folder / f"{key[0]}-{key[1]}.safetensors"
