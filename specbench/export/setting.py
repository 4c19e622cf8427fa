"""The settings of runs and configurations, as far as other engines can have them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench.base.errors import RunError, UsageError
from specbench.base.record import Estimate
from specbench.base.textsafe import one_line
from specbench.decoding.theory import PassCosts, expected_tokens_by_position
from specbench.recipe import PLACE, Recipe
from specbench.results import stats
from specbench.results.results import Results
from specbench.results.run import find_config
from specbench.results.steps import Steps
from specbench.results.summary import SummaryRow, by_config, costs_at, summarize
from specbench.rows import Row
from specbench.specs.drafters import DrafterSpec, Mtp, SmallModel
from specbench.specs.models import ModelSpec
from specbench.specs.policies import Fixed, PolicySpec

if TYPE_CHECKING:
    from specbench.models.training_metadata import TrainingMetadata

_MIN_TESTED = 10
"""Draft tokens tested at a position before its acceptance rate counts."""


def location(model: ModelSpec) -> str:
    """Return a model's path if it is one, otherwise its name without the revision."""
    return one_line(model.source)


def is_found(model: ModelSpec) -> bool:
    """Return whether an engine finds a model: its path is known, or its name has an organization, as on the hub."""
    return not model.source.startswith(f"{PLACE}/") if model.is_path else "/" in model.source


def stem(model: ModelSpec) -> str:
    """Return the last part of a model's name, without ``.gguf``."""
    return re.sub(r"(?i)\.gguf$", "", location(model).rstrip("/").rpartition("/")[2])


def refuse_adapter(model: ModelSpec) -> None:
    """Raise ``UsageError`` for a model with an adapter."""
    if model.adapter is not None or (Path(model.source) / "adapter_config.json").is_file():
        raise UsageError(
            f"The model {one_line(model.name)} has a LoRA adapter, which is not exported.",
            "Merge it into its base model with peft, and measure the merged model.",
        )


@dataclass(frozen=True)
class MeasuredSetting:
    """Measurements of a setting in a run; the best one is the fastest and certain to be faster than plain decoding."""

    config: str
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
        head_unknown: Whether the drafter's model could be a trained head, because the hub could not be reached.
    """

    recipe: Recipe
    gamma: int
    gamma_from: str = ""
    drafter_dtype: str | None = None
    measured: MeasuredSetting | None = None
    fixed: Setting | None = None
    instead_of: MeasuredSetting | None = None
    head: TrainingMetadata | None = None
    head_unknown: bool = False

    def __post_init__(self) -> None:
        refuse_adapter(self.target)

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


def setting_of(recipe: Recipe, gamma: int | None = None, gamma_from: str = "given by --gamma") -> Setting:
    """Return the setting of a recipe that was not measured.

    ``gamma``, which is from ``gamma_from``, replaces the draft policy's own; policies without a fixed γ require it.

    Raises:
        UsageError: The setting is plain decoding; it has no fixed γ and none is given; or its drafter is not on the hub
            or is a head of an unknown kind.
        RunError: A head in a folder is damaged.
    """
    policy, part = recipe.policy, recipe.drafter.model_part
    if recipe.drafter.is_plain or policy is None:
        raise UsageError(
            "The configuration decodes plainly: there is no speculation to export.", "Name a drafter in it."
        )
    own = policy.gamma_max if isinstance(policy, Fixed) else None
    chosen = gamma or own
    if chosen is None:
        raise UsageError(
            f"Other engines need a fixed γ, which the draft policy {policy} does not have.",
            "Give --gamma N, or export the measured run.",
        )
    setting = Setting(
        recipe,
        chosen,
        "" if chosen == own else gamma_from,
        part.dtype if isinstance(part, SmallModel) and part.dtype != "auto" else None,
    )
    model = recipe.drafter.model_spec
    if model is None:
        return setting
    from specbench.models.heads import find_head

    try:
        files = find_head(model)
    except RunError:
        if model.kind != "hub":
            raise
        return replace(setting, head_unknown=True)  # the hub cannot be reached, or needs a login
    return setting if files is None else replace(setting, head=files.training)


class RunSettings:
    """The settings of a run, which is called ``name`` in messages.

    Args:
        results: The run.
        name: Its name.
        paths: Where folders and files of its models are now; their last names are those in the run.

    Raises:
        UsageError: The run is one of servers, or has no model with one of these names.
    """

    def __init__(self, results: Results, name: str = "the run", paths: Sequence[str] = ()) -> None:
        self._results, self._name, self._run = results, name, results.run
        self._paths = {Path(path).name: path for path in paths}
        self._check_paths()
        summary = summarize(results)
        self._rows = summary.rows
        self._winners = {row.config.id for row in self._rows if not row.provisional} & summary.winners
        if any(row.config.kind == "server" for row in self._rows):
            raise UsageError(
                f"The run {name} measured servers, whose settings are unknown.", "Name a run of models."
            )

    def _check_paths(self) -> None:
        recipes = [row.recipe for row in self._run.configs if row.recipe is not None]
        models = [
            model for each in recipes for model in (each.target, *(own.model for own in each.drafter.models))
        ]
        local = list(dict.fromkeys(one_line(each.name) for each in models if each.kind in ("folder", "gguf")))
        for name, path in self._paths.items():
            if name not in local:
                known = f"It has {', '.join(local)}." if local else "Its models are not folders or files."
                raise UsageError(
                    f"The run {self._name} has no model folder or file {one_line(path)!r}.", known
                )

    def all(self, gamma: int | None = None) -> Sequence[Setting]:
        """Return the settings at the first temperature, the fastest first.

        Raises:
            UsageError: There is none.
        """
        return [self._setting(row, gamma) for row in self._fastest_first()]

    def get(self, name: str, gamma: int | None = None) -> Setting:
        """Return a setting by its table name or id; ``gamma`` replaces the one that the run suggests.

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
        return self._setting(found, gamma)

    def _fastest_first(self) -> list[SummaryRow]:
        """Return the rows of the first temperature, as `specbench tune` ranked them, else by speedup."""
        measured = [row for row in self._rows if row.config.kind == "speculative" and row.measured]
        if not measured:
            raise UsageError(
                f"The run {self._name} has no complete measurement of speculative decoding.",
                "Resume it, or measure some.",
            )
        # `specbench tune` measures the slower ones on few prompts.
        ranking = [] if self._run.tuning is None else self._run.tuning.ranking
        places = {config: place for place, config in enumerate(ranking)}
        return sorted(
            (
                row
                for row in measured
                if row.config.condition.temperature == measured[0].config.condition.temperature
            ),
            key=lambda row: (
                places.get(row.config.id, len(places)),
                row.config.id not in self._winners,
                -row.speedup.value,
            ),
        )

    def _setting(self, row: SummaryRow, gamma: int | None) -> Setting:
        """Return the setting of a row, or of the one with this draft length and the same drafter."""
        config = row.config
        assert config.recipe is not None
        assert config.policy is not None
        own, reason = self._fixed_gamma(row, config.policy)
        if gamma is not None and gamma != config.gamma:
            own, reason = gamma, "given by --gamma"
        same = [other for other in self._with_fixed_gamma(row) if other.config.gamma == own]
        fixed = self._setting(max(same, key=_speedup), None) if same and reason else None
        if gamma is not None and fixed is not None:
            return fixed
        recipe = config.recipe.with_models(self._placed)
        dtype: Any = self._run.target.dtype or "auto"
        of_target = any(isinstance(model, Mtp) for model in recipe.drafter.models)
        return Setting(
            replace(recipe, models=replace(recipe.models, dtype=dtype)),
            gamma=own,
            gamma_from=reason,
            drafter_dtype=None if config.loaded is None else config.loaded.dtype,
            measured=self._measured(row),
            fixed=fixed,
            head=None if of_target else self._run.heads.get(config.drafter),
        )

    def _measured(self, row: SummaryRow) -> MeasuredSetting:
        sure: stats.Verdict = "cannot tell" if row.provisional or row.verdict is None else row.verdict
        best = row.config.id in self._winners
        return MeasuredSetting(row.config.id, row.config.label, row.speedup, "faster" if best else sure, best)

    def _with_fixed_gamma(self, row: SummaryRow) -> list[SummaryRow]:
        """Return the measured rows of the same drafter that have a fixed γ, at the same batch size and context."""

        def place(config: Row) -> tuple[object, ...]:
            at = config.condition
            return config.kind, config.drafter, at.temperature, at.batch, at.context

        return [
            other
            for other in self._rows
            if other.measured and other.config.gamma is not None and place(other.config) == place(row.config)
        ]

    def _placed(self, model: ModelSpec) -> ModelSpec:
        """Return a model with its path, where that is given."""
        return replace(model, source=self._paths.get(model.name, model.source))

    def _fixed_gamma(self, row: SummaryRow, policy: PolicySpec) -> tuple[int, str]:
        """Return γ of a fixed policy, else the best measured or predicted one, else the accepted length; and why."""
        config = row.config
        if isinstance(policy, Fixed) and config.gamma is not None:
            return config.gamma, ""
        others = self._with_fixed_gamma(row)
        if others:
            return max(
                others, key=_speedup
            ).config.gamma or 1, "the fastest that was measured with this drafter"
        steps = by_config(self._results)[config.id]
        steps = steps.take(steps["drafted"] > 0)
        predicted = _predicted_gamma(steps, config.drafter, costs_at(self._run, config))
        none = "no fixed γ was measured with this drafter"
        if predicted is not None:
            return predicted, f"predicted from acceptance by position and forward pass times; {none}"
        mean = float(np.mean(steps["accepted"])) if len(steps) else 1.0
        return max(1, round(mean)), f"the mean accepted length, {mean:.1f} tokens; {none}"


def _speedup(row: SummaryRow) -> float:
    return row.speedup.value


def _predicted_gamma(steps: Steps, drafter: str, costs: PassCosts) -> int | None:
    """Return the γ with the most tokens per second; ``None`` without pass times, or with too few drafts."""
    if len(steps) < _MIN_TESTED or not costs.target_s.get(1) or drafter not in costs.drafter_s:
        return None
    tokens = expected_tokens_by_position(steps.rates(int(np.sort(steps["tested"])[-_MIN_TESTED])))
    has_passes = bool(steps["passes"].any())
    return max(
        range(1, len(tokens)),
        key=lambda gamma: tokens[gamma] / costs.step_s(drafter, gamma, gamma if has_passes else 0),
        default=None,
    )
