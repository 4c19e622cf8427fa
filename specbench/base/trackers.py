"""Values of a sweep or a training as they arise, for trackio, Weights & Biases or MLflow, which are installed apart."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
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


_KINDS: Mapping[str, type[_Wandb | _MLflow]] = {"trackio": _Wandb, "wandb": _Wandb, "mlflow": _MLflow}


def open_tracker(
    name: TrackerName, run: str, settings: Mapping[str, Any], project: str = "specbench"
) -> Tracker:
    """Begin a run of an installed tracker. Where it stores or sends values is set by its own variables.

    Args:
        name: "trackio", "wandb" or "mlflow".
        run: Name of the run.
        settings: What the run is of.
        project: The tracker's project or experiment.

    Raises:
        UsageError: The tracker is unknown or not installed.
        RunError: It cannot begin a run.

    Example:
        >>> open_tracker("paper", "run", {})
        Traceback (most recent call last):
        specbench.base.errors.UsageError: There is no tracker 'paper'. Choose trackio, wandb or mlflow.
    """
    if name not in _KINDS:
        raise UsageError(f"There is no tracker {name!r}.", "Choose trackio, wandb or mlflow.")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name} is not installed.", f"Install it: pip install {name}.") from error
    try:
        return _KINDS[name](module, project, run, {"specbench": __version__, **settings})
    except Exception as error:
        raise RunError(f"{name} cannot begin a run ({type(error).__name__}: {error}).", "") from error
