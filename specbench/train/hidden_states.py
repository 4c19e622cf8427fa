"""Storage of the target's hidden states while it writes answers, so that no second forward over the answers is needed.

Each written token takes a forward of the target, which computes all hidden states that a head learns from. They stay in
the folder of the training until it ends.
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

_MIN_FREE = 1 << 30
"""Bytes of the disk that stay free."""


class StateRecorder(NoDraft):
    """Plain decoding of one request that records the target's hidden states."""

    def __init__(self, layers: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self._layers, self._dtype = layers, dtype
        self._parts: list[torch.Tensor] = []
        self._recorded = 0

    @property
    def layers(self) -> Sequence[int]:
        return self._layers

    def fork(self, scorer_like: ScorerLike) -> StateRecorder:  # noqa: ARG002
        return self

    def begin(self, prompt: Sequence[int]) -> None:  # noqa: ARG002
        self._parts, self._recorded = [], 0

    def update(self, outcome: StepOutcome) -> None:
        states = outcome.states
        assert states is not None
        fresh = len(outcome.context) - 1 - self._recorded
        self._parts.append(states[len(states) - fresh :].to("cpu", self._dtype, copy=True))
        self._recorded += fresh

    def take(self) -> torch.Tensor:
        """Return the states of all tokens except the last, [positions, layers,
        width], and remove them from the recorder.
        """
        parts, self._parts = self._parts, []
        return torch.cat(parts)


class HiddenStates:
    """Hidden states of texts in a folder, one file per text, named by the text's key.

    Args:
        folder: The folder; created when the first states are added.
        layers: The layers whose states are stored; the last one is the input of the target's output head.
    """

    def __init__(self, folder: Path, layers: Sequence[int], width: int, dtype: torch.dtype) -> None:
        self._folder, self.layers, self._dtype = folder, tuple(layers), dtype
        self._position_bytes = len(self.layers) * width * dtype.itemsize

    def recorder(self) -> StateRecorder:
        """Return a recorder for the states of one request."""
        return StateRecorder(self.layers, self._dtype)

    def check_space(self, tokens: int) -> None:
        """Check that the disk has space for the states of ``tokens`` tokens, including prompts."""
        there = next(each for each in (self._folder, *self._folder.parents) if each.is_dir())
        if shutil.disk_usage(there).free < tokens * self._position_bytes + _MIN_FREE:
            raise self._full()

    def add(self, key: tuple[int, int], tokens: Sequence[int], states: torch.Tensor) -> None:
        """Store the states of a text, [positions, layers, width], in place of earlier ones with its key."""
        self.check_space(len(tokens))
        content = {"tokens": torch.tensor(tokens), "states": states.to("cpu", self._dtype).contiguous()}
        with file_errors(
            f"The folder {str(self._folder)!r} cannot be written",
            "Free some space, and add --resume.",
            full=self._full(),
        ):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_bytes(self._path(key), save(content))

    def find(self, key: tuple[int, int], tokens: Sequence[int]) -> torch.Tensor | None:
        """Return the states of a text, which can be the beginning of the
        stored one; ``None`` if the stored text differs.
        """
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
