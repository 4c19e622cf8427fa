"""Progress of slow stages, and silencing of the libraries that print their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
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


class _Bar:
    """The part of tqdm's interface that `transformers` uses, reporting to a `Progress`."""

    def __init__(self, progress: Progress | None, stage: str, iterable: Any, total: int | None) -> None:
        if total is None and hasattr(iterable, "__len__"):
            total = len(iterable)
        self.progress, self.stage, self.iterable, self.total, self.n = progress, stage, iterable, total, 0

    def update(self, n: int = 1) -> None:
        self.n += n
        if self.progress is not None:
            self.progress.update(self.stage, self.n, self.total)

    def __iter__(self) -> Iterator[Any]:
        for item in self.iterable or ():
            yield item
            self.update()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_arguments, **_options: None  # set_description, close, refresh, ...


@contextmanager
def quiet_transformers(
    progress: Progress | None = None, stage: str = "", dequantizing: str = ""
) -> Iterator[None]:
    """Keep `transformers` and the hub client from printing.

    Args:
        progress: Receives their progress bars.
        stage: Name of the stage that these bars are reported as.
        dequantizing: Name of the stage that the GGUF reader's bar is reported as.
    """
    from huggingface_hub import utils
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    def bar(iterable: Any = None, *_: Any, total: int | None = None, **__: Any) -> _Bar:
        return _Bar(progress, stage, iterable, total)

    def gguf_bar(tensors: Any, **_: Any) -> _Bar:
        return _Bar(progress, dequantizing, tensors, None)

    hub: Any = utils  # its bar functions are exported at run time only
    loggers: list[Any] = [logging, hub.logging]
    levels = [logger.get_verbosity() for logger in loggers]
    hub_draws = not hub.are_progress_bars_disabled()
    gguf_reader = vars(modeling_gguf_pytorch_utils)  # it takes its bar from tqdm, past the hook
    gguf_own = gguf_reader["tqdm"]
    hook = logging.set_tqdm_hook(lambda _, arguments, options: bar(*arguments, **options))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            gguf_reader["tqdm"] = gguf_bar
            hub.disable_progress_bars()
            for logger in loggers:
                logger.set_verbosity_error()
            yield
        finally:
            gguf_reader["tqdm"] = gguf_own
            logging.set_tqdm_hook(hook)
            if hub_draws:
                hub.enable_progress_bars()
            for logger, level in zip(loggers, levels, strict=True):
                logger.set_verbosity(level)
