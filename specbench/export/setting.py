"""The settings of runs and configurations, as far as other engines can have them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench.base.errors import UsageError
from specbench.base.record import Estimate
from specbench.base.textsafe import one_line
from specbench.recipe import PLACE, Recipe
from specbench.results import stats
from specbench.results.metrics import Figures
from specbench.results.results import Results
from specbench.results.run import find_config
from specbench.results.summary import Summary
from specbench.specs.drafters import DrafterSpec, Mtp
from specbench.specs.models import ModelSpec
from specbench.specs.policies import Fixed, PolicySpec

if TYPE_CHECKING:
    from specbench.models.training_metadata import TrainingMetadata


def location(model: ModelSpec) -> str:
    """Return a model's path if it is one, otherwise its name without the revision."""
    return one_line(model.source)


def is_found(model: ModelSpec) -> bool:
    """Return whether an engine finds a model: its path is known, or its name has an organization, as on the hub."""
    return not model.source.startswith(f"{PLACE}/") if model.is_path else "/" in model.source


def stem(model: ModelSpec) -> str:
    """Return the last part of a model's name, without ``.gguf``."""
    return re.sub(r"(?i)\.gguf$", "", location(model).rstrip("/").rpartition("/")[2])


@dataclass(frozen=True)
class MeasuredSetting:
    """Measurements of a setting in a run; the best one is the fastest and certain to be faster than plain decoding."""

    label: str
    speedup: Estimate
    verdict: stats.Verdict | None
    best: bool

    def __str__(self) -> str:
        return f"{one_line(self.label)}: {stats.ratio_text(self.speedup)} over plain decoding"


@dataclass(frozen=True)
class Setting:
    """A recipe with a draft policy, as far as other engines may have it.

    Attributes:
        recipe: The recipe, with the dtype of its target as it was loaded.
        gamma: Tokens drafted in a step, without the bonus token, for engines that take a fixed number.
        gamma_from: Where ``gamma`` comes from if the policy does not have it; empty if it is the policy's own.
        drafter_dtype: In which the drafter's own weights drafted.
        fixed: The measured setting with that γ as a fixed one and the same drafter, if it is not the policy's own.
        instead_of: What this one is exported in place of, because the engine does not have it.
        head: Training metadata of the trained head in the drafter; ``None`` without one.
    """

    recipe: Recipe
    gamma: int
    gamma_from: str = ""
    drafter_dtype: str | None = None
    measured: MeasuredSetting | None = None
    fixed: Setting | None = None
    instead_of: MeasuredSetting | None = None
    head: TrainingMetadata | None = None

    @property
    def target(self) -> ModelSpec:
        return self.recipe.target

    @property
    def drafter(self) -> DrafterSpec:
        return self.recipe.drafter

    @property
    def policy(self) -> PolicySpec:
        assert self.recipe.policy is not None
        return self.recipe.policy

    @property
    def temperature(self) -> float:
        return self.recipe.sampling.temperature

    @property
    def dtype(self) -> str | None:
        """Of the target; ``None`` if not known."""
        return None if self.recipe.models.dtype == "auto" else self.recipe.models.dtype

    @property
    def draft_model(self) -> ModelSpec:
        """The model of a drafter that has one of its own."""
        return self.models[1]

    @property
    def models(self) -> list[ModelSpec]:
        """The target, and the drafter's own model if it has one."""
        model = self.drafter.model_spec
        return [self.target, *([] if model is None or model.kind == "mtp" else [model])]


class RunSettings:
    """The settings of a run, which is called ``name`` in messages.

    Raises:
        UsageError: The run is one of servers.
    """

    def __init__(self, results: Results, name: str = "the run") -> None:
        self._name, self._run = name, results.run
        summary = Summary(results)
        self._rows = summary.rows
        self._winners = {row.config.id for row in self._rows if not row.provisional} & summary.winners
        if any(row.config.kind == "server" for row in self._rows):
            raise UsageError(
                f"The run {name} measured servers, whose settings are unknown.", "Name a run of models."
            )

    def all(self) -> list[Setting]:
        """Return the settings at the first temperature, as `specbench tune` ranked them, else the fastest first.

        Raises:
            UsageError: There is none.
        """
        measured = [row for row in self._rows if row.config.kind == "speculative" and row.measured]
        if not measured:
            raise UsageError(
                f"The run {self._name} has no complete measurement of speculative decoding.",
                "Resume it, or measure some.",
            )
        # `specbench tune` measures the slower ones on few prompts.
        ranking = [] if self._run.tuning is None else self._run.tuning.ranking
        places = {config: place for place, config in enumerate(ranking)}
        first = measured[0].config.condition.temperature
        rows = [row for row in measured if row.config.condition.temperature == first]
        rows.sort(
            key=lambda row: (
                places.get(row.config.id, len(places)),
                row.config.id not in self._winners,
                -row.speedup.value,
            )
        )
        return [self._setting(row) for row in rows]

    def get(self, name: str) -> Setting:
        """Return a setting by its table name or id.

        Raises:
            UsageError: There is no such setting, or it drafts nothing.
        """
        config = find_config(self._run, name, self._name)
        if config.kind != "speculative":
            raise UsageError(
                f"The setting {name!r} is not speculative decoding by specbench.", "Name one that drafts."
            )
        found = next((row for row in self._rows if row.config.id == config.id), None)
        if found is None:
            raise UsageError(
                f"The setting {name!r} has no measurements in {self._name}.", "Name another one."
            )
        return self._setting(found)

    def _setting(self, row: Figures) -> Setting:
        """Return the setting of a row.

        Without a fixed γ it has that of the fastest measured row with its drafter, or else the mean accepted length.
        """
        config = row.config
        assert config.recipe is not None
        gamma, reason, fixed = config.gamma or 1, "", None
        if not isinstance(config.policy, Fixed):
            same = [
                other
                for other in self._rows
                if other.measured
                and other.config.kind == "speculative"
                and other.config.gamma is not None
                and (other.config.drafter, other.config.condition) == (config.drafter, config.condition)
            ]
            if same:
                fixed = self._setting(max(same, key=lambda other: other.speedup.value))
                gamma, reason = fixed.gamma, "the fastest that was measured with this drafter"
            else:
                accepted = row.steps["accepted"][row.steps["drafted"] > 0]
                mean = float(np.mean(accepted)) if len(accepted) else 1.0
                gamma, reason = (
                    max(1, round(mean)),
                    f"the mean accepted length, {mean:.1f} tokens; no fixed γ was measured with this drafter",
                )
        sure: stats.Verdict = "cannot tell" if row.provisional or row.verdict is None else row.verdict
        best = config.id in self._winners
        recipe = config.recipe
        dtype: Any = self._run.target.dtype or "auto"
        of_target = any(isinstance(model, Mtp) for model in recipe.drafter.models)
        return Setting(
            replace(recipe, models=replace(recipe.models, dtype=dtype)),
            gamma=gamma,
            gamma_from=reason,
            drafter_dtype=None if config.loaded is None else config.loaded.dtype,
            measured=MeasuredSetting(config.label, row.speedup, "faster" if best else sure, best),
            fixed=fixed,
            head=None if of_target else self._run.heads.get(config.drafter),
        )
