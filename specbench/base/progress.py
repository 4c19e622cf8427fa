"""Progress of slow stages, and silencing of the libraries that print their own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Progress(Protocol):
    """Interface that receives the progress of slow stages; the command line draws it."""

    def update(self, stage: str, done: int, total: int | None) -> None:
        """Report ``done`` of ``total`` (``None``: unknown) units of ``stage``, such as "fetching NAME"."""


def announce(progress: Progress | None, stage: str) -> None:
    """Report a stage of unknown length, if ``progress`` is not ``None``."""
    if progress is not None:
        progress.update(stage, 0, None)


def reporting_bar(progress: Progress | None, stage: str) -> type[Any]:
    """Return a tqdm class that draws nothing and reports to ``progress``."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **(options | {"disable": True}))

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            if progress is not None:
                progress.update(stage, self.n, self.total)

        def __iter__(self) -> Iterator[Any]:
            for item in self.iterable:
                yield item
                self.update()

    return Bar


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Keep the hub client from printing."""
    from huggingface_hub import utils

    hub: Any = utils  # its bar functions are exported at run time only
    level, draws = hub.logging.get_verbosity(), not hub.are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            hub.disable_progress_bars()
            hub.logging.set_verbosity_error()
            yield
        finally:
            if draws:
                hub.enable_progress_bars()
            hub.logging.set_verbosity(level)


@contextmanager
def quiet_transformers(progress: Progress | None = None, stage: str = "") -> Iterator[None]:
    """Keep `transformers` and the hub client from printing.

    Args:
        progress: Receives their progress bars.
        stage: Name of the stage that these bars are reported as.
    """
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    bar = reporting_bar(progress, stage)
    level = logging.get_verbosity()
    gguf_reader = vars(modeling_gguf_pytorch_utils)  # it takes its bar from tqdm, past the hook
    gguf_own = gguf_reader["tqdm"]
    hook = logging.set_tqdm_hook(lambda _, arguments, options: bar(*arguments, **options))
    with quiet_hub():
        try:
            gguf_reader["tqdm"] = bar
            logging.set_verbosity_error()
            yield
        finally:
            gguf_reader["tqdm"] = gguf_own
            logging.set_tqdm_hook(hook)
            logging.set_verbosity(level)
