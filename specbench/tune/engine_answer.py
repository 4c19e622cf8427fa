"""The answer of a search over an engine's settings: the command line, and draft lengths by batch size."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbench.results import stats

if TYPE_CHECKING:
    from specbench.export.setting import Model
    from specbench.export.start import EngineSetting, StartedEngine
    from specbench.tune.engine_search import EngineFound


@dataclass(frozen=True)
class EngineAnswer:
    """How to start the engine.

    Attributes:
        words: The words of the command line.
        needs: What must be done first, or cannot be expressed.
    """

    words: tuple[str, ...]
    needs: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command line as a shell takes it."""
        return shlex.join(self.words)

    @classmethod
    def of(
        cls,
        engine: StartedEngine,
        target: Model,
        setting: EngineSetting,
        found: EngineFound,
        arguments: Sequence[str],
        wrapper: str,
    ) -> EngineAnswer:
        """Return the command line of a setting, with draft lengths by batch size if these were measured.

        Args:
            engine, target: What is started.
            setting: The winner.
            found: The outcome of the search.
            arguments, wrapper: The user's own options and command, see ``StartedEngine.command_line``.
        """
        options, needs = setting.options, list(setting.needs)
        schedule = found.schedule(setting.gamma)
        if setting.gamma and len(schedule) > 1:
            options, needed = engine.with_schedule(options, schedule)
            needs += [needed] if needed else []
        first = shlex.split(wrapper) or engine.server
        return cls((*first, *engine.words(target, options), *arguments), tuple(needs))


def batch_lines(found: EngineFound) -> Iterator[str]:
    """Yield a sentence for each batch size: the best draft length, and its throughput over plain decoding."""
    for batch, ratios in sorted(found.batches.items()):
        best = max(ratios, key=lambda gamma: ratios[gamma])
        drafting = max((gamma for gamma in ratios if gamma), key=lambda gamma: ratios[gamma], default=None)
        if drafting is None:
            continue
        gain = f"γ={drafting} has {stats.decimals(ratios[drafting])}× the throughput of plain decoding"
        yield f"In a batch of {batch} requests, {gain}" + (": better no drafts." if best == 0 else ".")
