"""Weights of a model, packed by a thread while others still prepare its loading.

Half of a start is Python's: imports, a model's modules, its tokenizer. It keeps one core busy. Packing is the other
half, and keeps Python waiting for nothing; so it may begin as soon as it is known what will be packed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from specbench.backends.torch.kernels.huge_pages import lay_together
from specbench.backends.torch.kernels.linear import pack_weight
from specbench.backends.torch.kernels.native import memory_of_packed

__all__ = ["Joined", "PackedAhead"]


class Joined:
    """Puts weights together, those of one shape always in the same memory."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int, torch.dtype, torch.device], torch.Tensor] = {}

    def __call__(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """[out, in] each -> [all of out, in]; holds until the next call."""
        first, rows = weights[0], sum(len(weight) for weight in weights)
        key = (rows, first.shape[1], first.dtype, first.device)
        if key not in self._held:
            self._held[key] = first.new_empty(key[:2])
        return torch.cat(list(weights), out=self._held[key])


class PackedAhead:
    """Packs weights for oneDNN, the last ones first: whoever asks for the first ones meanwhile packs these itself.

    What fails ends it, and leaves the rest to be packed as usual.

    Args:
        files: Safetensors.
        places: What is packed: names of weights in these files, joined to one, by the places of layers.
    """

    def __init__(self, files: Sequence[Path], places: Mapping[str, Sequence[str]]) -> None:
        self._files, self._places = files, places
        self._waiting = list(places)
        self._busy: str | None = None
        self._made: dict[str, torch.Tensor] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self, place: str) -> torch.Tensor | None:
        """What was packed for a place, once; ``None`` for nothing: from now on it is the caller's."""
        with self._changed:
            if place in self._waiting:
                self._waiting.remove(place)
            self._changed.wait_for(lambda: self._busy != place)
            return self._made.pop(place, None)

    def stop(self) -> None:
        """Pack no more, and let go of what nobody took; returns when the thread has ended."""
        with self._changed:
            self._waiting.clear()
        self._thread.join()
        self._made.clear()

    def _run(self) -> None:
        try:
            places: list[tuple[int, int]] = []
            with ExitStack() as stack:
                # Views of a file's pages: what is not asked for is not read.
                opened = [stack.enter_context(safe_open(path, "pt")) for path in self._files]
                holder = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - no mapping
                joined = Joined()
                while (place := self._next()) is not None:
                    weights = [holder[name].get_tensor(name) for name in self._places[place]]
                    packed = pack_weight(weights[0] if len(weights) == 1 else joined(weights))
                    if (memory := memory_of_packed(packed)) is not None:
                        places.append(memory)
                    with self._changed:
                        self._made[place], self._busy = packed, None
                        self._changed.notify_all()
            # Not all that is new: that would copy what others import meanwhile.
            lay_together(places)
        except (SafetensorError, OSError, KeyError, RuntimeError, MemoryError):
            pass
        finally:
            with self._changed:
                self._waiting.clear()
                self._busy = None
                self._changed.notify_all()

    def _next(self) -> str | None:
        with self._changed:
            self._busy = self._waiting.pop() if self._waiting else None
            return self._busy
