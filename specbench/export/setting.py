"""What is exported: the fastest setting of a run, or of those an engine has; a named one; a `specbench.toml`'s."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from specbench.base.errors import RunError, UsageError
from specbench.base.record import Estimate, to_dict
from specbench.base.textsafe import one_line
from specbench.decoding.theory import PassCosts, SharedCosts, best_length, expected_tokens_by_position
from specbench.recipe import Recipe
from specbench.results import stats
from specbench.results.compare import named_config, side_by_side
from specbench.results.results import Results
from specbench.results.run import Run
from specbench.results.steps import Steps
from specbench.results.summary import SummaryRow, by_config, summarize
from specbench.specs.drafters import DrafterSpec, parse_drafter
from specbench.specs.rules import RuleSpec, parse_rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.config import Config
    from specbench.models.training_metadata import TrainingMetadata

_TESTED = 10
"""Drafts that were tested at a position before its acceptance counts."""


@dataclass(frozen=True)
class Model:
    """A model by name.

    Attributes:
        name: A hub id, a built-in name, or the last name of a folder or file: runs keep no paths.
        revision: On the hub; ``None`` for the default branch.
    """

    name: str
    revision: str | None = None

    @property
    def is_hub_id(self) -> bool:
        """Whether it names an organization, so that an engine finds it by itself."""
        return "/" in self.name

    @property
    def stem(self) -> str:
        """Its last name, without the ending of a GGUF file."""
        return re.sub(r"(?i)\.gguf$", "", self.name.rpartition("/")[2])

    @classmethod
    def named(cls, text: str) -> Model:
        """Of a name as results and configurations have it."""
        name, _, revision = text.partition("@")
        return cls(name, revision or None)


@dataclass(frozen=True)
class Measured:
    """What a run says of a setting.

    Attributes:
        config: Its id there.
        label: Its name in tables.
        speedup: Over plain decoding.
        verdict: Whether it is faster.
        best: Whether it is the fastest of its run, and surely faster than plain decoding.
    """

    config: str
    label: str
    speedup: Estimate
    verdict: stats.Verdict | None
    best: bool

    def __str__(self) -> str:
        return f"{one_line(self.label)}: {stats.ratio_text(self.speedup, ' ×')} over plain decoding"


@dataclass(frozen=True)
class Replaced:
    """The fastest setting of a run, where something else is exported because an engine does not have it.

    Attributes:
        fastest: What the run says of it.
        share: Speed of what is exported over its own, on the prompts that both were measured on.
    """

    fastest: Measured
    share: Estimate

    def __str__(self) -> str:
        label = one_line(self.fastest.label)
        if not self.share.prompts:
            return f"on other prompts than {label}"
        return f"{stats.ratio_text(self.share, ' ×')} the speed of {label}"


@dataclass(frozen=True)
class Setting:
    """A way to decode, as far as other engines may have it too.

    Attributes:
        target: The model whose output is kept.
        drafter: What proposes.
        rule: How much of it.
        gamma: Tokens drafted in a step, without the bonus token, where an engine takes a fixed number only.
        gamma_from: Where that number is from, if the rule is another one; empty for the rule's own.
        dtype: Of the target; ``None`` where nobody says.
        drafter_dtype: Of a drafter's model.
        temperature: At which it was measured; ``None`` where it was not.
        measured: What a run says of it.
        beside: The fastest of that run, if this one is exported in its place.
        head: Kind of the trained head in the drafter, as far as results say; ``None`` without one.
        compact: Whether that head was written small, for specbench alone.
        speculators: Whether it is known to be in the form of `speculators`.
        unseen: Whether its drafter's model may be a trained head, for the hub could not be asked.
    """

    target: Model
    drafter: DrafterSpec
    rule: RuleSpec
    gamma: int
    gamma_from: str = ""
    dtype: str | None = None
    drafter_dtype: str | None = None
    temperature: float | None = None
    measured: Measured | None = None
    replaces: Replaced | None = None
    head: str | None = None
    compact: bool = False
    speculators: bool = False
    unseen: bool = False

    @property
    def assistant(self) -> Model | None:
        """The drafter's model of its own."""
        model = self.drafter.model_spec
        return None if model is None else Model.named(model.name)

    def with_head(self, training: TrainingMetadata | None) -> Setting:
        """With the trained head in its drafter, as results tell of it."""
        if training is None:
            return self
        model = self.drafter.model_spec
        packaged = model is not None and model.kind == "packaged"
        return replace(
            self,
            head=training.kind,
            compact=packaged or training.compact,
            speculators=training.form == "speculators",
        )


# -- of a configuration ----------------------------------------------------------------------------


def setting_of_config(config: Config, gamma: int | None = None) -> Setting:
    """The setting of a configuration that says target, drafter and rule.

    Args:
        config: Read or made.
        gamma: Where the rule is not a fixed one, the γ in its place.

    Raises:
        UsageError: It is plain decoding, or has no fixed γ and none is given; its drafter is nothing on the hub, or a
            head of a kind that is not read.
        RunError: A head in a folder is damaged.
    """
    assert config.target is not None
    assert config.drafter is not None
    assert config.rule is not None
    drafter, rule = parse_drafter(config.drafter), config.rule
    _refuse_plain(drafter, "The configuration")
    own, reason = rule.options.get("gamma", 5) if rule.word == "fixed" else None, ""
    if own is None and gamma is None:
        raise UsageError(
            f"Other engines draft a fixed γ, the rule {rule} has none, and a configuration has no figures to choose"
            " one by.",
            "Give --gamma N, or export the run that was measured.",
        )
    if gamma is not None and gamma != own:
        own, reason = gamma, "as --gamma says"
    assert own is not None
    setting = Setting(
        Model.named(config.target), drafter, rule, int(own), reason, config.dtype, config.drafter_dtype
    )
    try:
        return setting.with_head(_head_in(drafter))
    except RunError:
        if drafter.model_spec is None or drafter.model_spec.kind != "hub":
            raise
        return replace(setting, unseen=True)  # the hub cannot be reached, or only by others


def _head_in(drafter: DrafterSpec) -> TrainingMetadata | None:
    """What is told of a trained head in a drafter, as the command line would find it; ``None`` if it is none."""
    model = drafter.model_spec
    if model is None:
        return None
    from specbench.models.head_files import find_head

    files = find_head(model)
    return None if files is None else files.training


# -- of a run --------------------------------------------------------------------------------------


def setting_of_run(
    results: Results, wanted: str | None = None, gamma: int | None = None, *, name: str = "the run"
) -> Setting:
    """A setting of a run: the one that is named, or the fastest at its first temperature.

    Args:
        results: A run.
        wanted: Its name in tables, or its id.
        gamma: Instead of the γ that the run's figures suggest.
        name: Of the run, for messages.

    Raises:
        UsageError: There is no such setting, or it drafts nothing, or the run is one over servers.
    """
    run = _Run(results, name)
    return run.setting(run.fastest_first()[0] if wanted is None else run.named(wanted), gamma)


def settings_of_run(
    results: Results, gamma: int | None = None, *, name: str = "the run"
) -> Sequence[Setting]:
    """The settings of a run at its first temperature, the fastest first, as far as this version knows their drafters.

    Args:
        results, gamma, name: See ``setting_of_run``.

    Raises:
        UsageError: There is none, or the run is one over servers.
    """
    run = _Run(results, name)
    settings: list[Setting] = []
    unknown: UsageError | None = None
    for row in run.fastest_first():
        try:
            settings.append(run.setting(row, gamma))
        except UsageError as error:
            unknown = unknown or error
    if unknown is not None and not settings:
        raise unknown
    return settings


def with_replaced(results: Results, setting: Setting, fastest: Setting) -> Setting:
    """A setting that is exported because an engine does not have the fastest one, with that beside it.

    Args:
        results: The run that both are from.
        setting: What is exported.
        fastest: What is not.
    """
    assert setting.measured is not None
    assert fastest.measured is not None
    tuning = results.run.tuning
    if tuning is not None and tuning.answer is not None:
        mine = tuning.answer.measured.get(setting.measured.config)
        if mine is not None and mine.share and tuning.ranking[:1] == [fastest.measured.config]:
            return replace(setting, replaces=Replaced(fastest.measured, mine.share))
    pairs = side_by_side(results, setting.measured.config, fastest.measured.config)
    share = stats.geometric_mean(
        (pairs["a"] / pairs["b"]).to_numpy(), pairs["prompt"].to_numpy(), pairs["repeat"].to_numpy()
    )
    return replace(setting, replaces=Replaced(fastest.measured, share))


class _Run:
    """A run whose settings are asked for."""

    def __init__(self, results: Results, name: str) -> None:
        self.results, self.name, self.run = results, name, results.run
        summary = summarize(results)
        self.rows = summary.rows
        self.winners = {row.config.id for row in self.rows if not row.provisional} & summary.winners
        tuning = self.run.tuning
        self.ranking: Sequence[str] = () if tuning is None else tuning.ranking
        """The order to which `specbench tune` came, which measures the slower ones on few prompts."""
        if any(row.config.kind == "server" for row in self.rows):
            raise UsageError(
                f"In {name} servers were measured, whose settings are not known here.",
                "Name a run of models.",
            )

    def fastest_first(self) -> list[SummaryRow]:
        """What was measured at the first temperature; of `specbench tune` as that ranks it, else by speedup."""
        measured = [row for row in self.rows if row.config.kind == "speculative" and row.measured]
        if not measured:
            raise UsageError(
                f"In {self.name} no speculative decoding was measured to its end.",
                "Measure some, or resume it.",
            )
        first = [row for row in measured if row.config.temperature == measured[0].config.temperature]
        places = {config: place for place, config in enumerate(self.ranking)}
        return sorted(
            first,
            key=lambda row: (
                places.get(row.config.id, len(places)),
                row.config.id not in self.winners,
                -row.speedup.value,
            ),
        )

    def named(self, wanted: str) -> SummaryRow:
        """The row of a setting by its name or id."""
        config = named_config(self.run, wanted, self.name)
        if config.kind != "speculative":
            raise UsageError(
                f"The setting {wanted!r} is no speculative decoding of specbench.",
                "Name one that drafts by its own loop.",
            )
        found = next((row for row in self.rows if row.config.id == config.id), None)
        if found is None:
            raise UsageError(
                f"Of the setting {wanted!r} nothing is measured in {self.name}.", "Name another one."
            )
        return found

    def setting(self, row: SummaryRow, gamma: int | None) -> Setting:
        """The setting of a row."""
        config = row.config
        if config.recipe is None:
            raise UsageError(
                f"The drafter {one_line(config.drafter)} of {self.name} is of another version of specbench.",
                "Name another setting, or measure it anew.",
            )
        drafter = Recipe.from_json(to_dict(config.recipe)).drafter
        rule = parse_rule(config.policy)
        own, reason = (gamma, "as --gamma says") if gamma else _fixed(self.results, self.rows, row, rule)
        target = self.run.target
        sure: stats.Verdict = "cannot tell" if row.provisional or row.verdict is None else row.verdict
        setting = Setting(
            Model.named(one_line(target.name)),
            drafter,
            rule,
            own,
            reason,
            target.dtype,
            config.drafter_dtype,
            config.temperature,
            Measured(
                config.id,
                config.label,
                row.speedup,
                "faster" if config.id in self.winners else sure,
                config.id in self.winners,
            ),
        )
        return setting.with_head(self.run.heads.get(config.drafter))


def _refuse_plain(drafter: DrafterSpec, what: str) -> None:
    if drafter.is_plain:
        raise UsageError(
            f"{what} decodes plainly: there is nothing to switch on.", "Name a setting that drafts."
        )


def _fixed(results: Results, rows: Sequence[SummaryRow], row: SummaryRow, rule: RuleSpec) -> tuple[int, str]:
    """The γ of a fixed rule; of others the best one measured beside it, or that is predicted, or what was accepted."""
    config = row.config
    if rule.word == "fixed" and config.gamma is not None:
        return config.gamma, ""
    replaces = [
        other
        for other in rows
        if other.measured
        and other.config.gamma is not None
        and other.config.kind == "speculative"
        and (other.config.drafter, other.config.temperature) == (config.drafter, config.temperature)
    ]
    if replaces:
        best = max(replaces, key=lambda other: other.speedup.value)
        ratio = stats.ratio_text(best.speedup, " ×")
        return best.config.gamma or 1, f"the best of the {len(replaces)} fixed γ measured with it, {ratio}"
    steps = by_config(results)[config.id]
    steps = steps.take(steps["drafted"] > 0)
    predicted = _predicted(steps, config.drafter, _costs(results.run, config.batch))
    if predicted is not None:
        reason = "what it accepted by position and what passes took predict it to be the fastest; none was measured"
        return predicted, f"{reason} with it"
    mean = float(np.mean(steps["accepted"])) if len(steps) else 1.0
    return max(1, round(mean)), f"no fixed γ was measured with it; a step that drafted kept {mean:.1f} tokens"


def _costs(run: Run, batch: int | None) -> PassCosts:
    """Of single passes; of a batch, of those to which each of its requests brings so many tokens."""
    if batch is None:
        return run.costs or PassCosts({})
    shared = run.shared_costs or SharedCosts({})
    drafters = {name: times[batch] for name, times in shared.drafter_s.items() if batch in times}
    return PassCosts(shared.target_s.get(batch, {}), drafters)


def _predicted(steps: Steps, drafter: str, costs: PassCosts) -> int | None:
    """The γ that is fastest by theory; ``None`` where passes were not timed, or too few drafts were made.

    Args:
        steps: That drafted.
        drafter: Its name in results.
        costs: Of single passes.
    """
    if len(steps) < _TESTED or 1 not in costs.target_s or drafter not in costs.drafter_s:
        return None
    longest = int(np.sort(steps["tested"])[-_TESTED])
    tokens = expected_tokens_by_position(steps.rates(longest))
    verify = [costs.v(max(1, n)) for n in range(longest + 2)]
    return best_length(tokens, costs.c(drafter), verify, 1)
