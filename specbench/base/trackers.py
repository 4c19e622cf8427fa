"""Values of a sweep or a training as they arise, for trackio, Weights & Biases or MLflow, which are installed apart."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from specbench._version import __version__
from specbench.base.errors import RunError, UsageError

TrackerName = Literal["trackio", "wandb", "mlflow"]


class Tracker(Protocol):
    """Interface that receives values while something runs.

    Example:
        >>> class Printing:
        ...     def log(self, values, step):
        ...         print(step, dict(values))
        ...     def end(self):
        ...         pass
        >>> tracker: Tracker = Printing()
        >>> tracker.log({"loss": 0.5}, step=1)
        1 {'loss': 0.5}
    """

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take named values of a step; steps ascend."""

    def end(self) -> None:
        """Take notice that nothing more comes."""


class _Wandb:
    """A run of wandb, or of trackio, which has the same functions."""

    def __init__(self, module: Any, project: str, run: str, settings: Mapping[str, Any]) -> None:
        self._module = module
        module.init(project=project, name=run, config=dict(settings))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._module.log(dict(values), step=step)

    def end(self) -> None:
        self._module.finish()


class _MLflow:
    """A run of MLflow."""

    def __init__(self, module: Any, project: str, run: str, settings: Mapping[str, Any]) -> None:
        self._module = module
        module.set_experiment(project)
        module.start_run(run_name=run)
        module.log_params(dict(settings))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._module.log_metrics({_mlflow_name(name): value for name, value in values.items()}, step=step)

    def end(self) -> None:
        self._module.end_run()


def _mlflow_name(name: str) -> str:
    """Return a name with only the characters that MLflow allows."""
    name = name.replace("γ", "gamma").replace("+", " and ")
    return "".join(each if each.isascii() and (each.isalnum() or each in "_-. /") else "_" for each in name)


class _Enduring:
    """A tracker that may fail, for what is measured counts more: after a failure it takes no more values."""

    def __init__(self, tracker: Tracker, name: str, warn: Callable[[str], None]) -> None:
        self._tracker, self._name, self._warn = tracker, name, warn
        self._failed = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        if not self._failed:
            self._try(lambda: self._tracker.log(values, step))

    def end(self) -> None:
        self._try(self._tracker.end)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if not self._failed:
                self._warn(f"{self._name} takes no more values ({type(error).__name__}: {error}).")
            self._failed = True


_KINDS: Mapping[str, type[_Wandb | _MLflow]] = {"trackio": _Wandb, "wandb": _Wandb, "mlflow": _MLflow}


def check_tracker(name: TrackerName) -> Any:
    """Return the module of a tracker; ``UsageError``: it is unknown or not installed."""
    if name not in _KINDS:
        raise UsageError(f"There is no tracker {name!r}.", "Choose trackio, wandb or mlflow.")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name} is not installed.", f"Install it: pip install {name}.") from error


def open_tracker(
    name: TrackerName,
    run: str,
    settings: Mapping[str, Any],
    project: str = "specbench",
    *,
    warn: Callable[[str], None] = warnings.warn,
) -> Tracker:
    """Begin a run of an installed tracker. Where it stores or sends values is set by its own variables.

    If it fails later, it takes no more values, and what it was to follow goes on.

    Args:
        name: "trackio", "wandb" or "mlflow".
        run: Name of the run.
        settings: What the run is of.
        project: The tracker's project or experiment.
        warn: Receives a sentence if it fails later.

    Raises:
        UsageError: The tracker is unknown or not installed.
        RunError: It cannot begin a run.

    Example:
        >>> open_tracker("paper", "run", {})
        Traceback (most recent call last):
        specbench.base.errors.UsageError: There is no tracker 'paper'. Choose trackio, wandb or mlflow.
    """
    module = check_tracker(name)
    try:
        made = _KINDS[name](module, project, run, {"specbench": __version__, **settings})
    except Exception as error:
        raise RunError(f"{name} cannot begin a run ({type(error).__name__}: {error}).", "") from error
    return _Enduring(made, name, warn)
