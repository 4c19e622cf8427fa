"""Engines whose servers specbench starts: their command lines, and the settings that are tried with them."""

from __future__ import annotations

import json
import shlex
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from specbench.base.errors import UsageError
from specbench.base.record import Json
from specbench.export.engine import ExportEngine
from specbench.export.setting import Setting
from specbench.models.training_metadata import TrainingMetadata
from specbench.options import SamplingOptions
from specbench.recipe import Recipe, with_models
from specbench.specs.drafters import DrafterSpec, parse_drafter
from specbench.specs.models import ModelSpec
from specbench.specs.policies import Confidence, Fixed, PolicySpec

PLAIN = "plain"
"""Name of the setting without drafts."""

GAMMA = "GAMMA"
"""Stands for the draft length in an engine's own options."""

NGRAM_GAMMAS = (4, 12)
"""Draft lengths to try with n-grams, which cost almost nothing to draft."""

GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8)
"""Draft lengths to try with models and heads."""

P_MIN = 0.6
"""Threshold to try where an engine has one for the drafter's probability."""


@dataclass(frozen=True)
class EngineSetting:
    """A way to start a server.

    Attributes:
        name: Its name in files and tables.
        gamma: The draft length; 0 for plain decoding.
        options: The engine's options that differ from those of plain decoding.
    """

    name: str
    gamma: int
    options: Json


@dataclass(frozen=True)
class EngineDrafter:
    """A drafter to try with an engine.

    Attributes:
        spec: A spec, or the name of one of the engine's kinds of n-grams.
        model: Its model, where the engine finds it.
        head: Training metadata, if it is a trained head.
    """

    spec: DrafterSpec | str
    model: ModelSpec | None = None
    head: TrainingMetadata | None = None


class StartedEngine(ExportEngine):
    """An engine whose server specbench starts.

    Attributes:
        server: The words that start its server.
        listening: Options of the server for what is measured; the last one is for its port.
        reporting: More of them for servers that draft.
        ngrams: Kinds of n-gram drafting by their names in the engine: a drafter that is exported, or the engine's own
            options.
    """

    server: ClassVar[tuple[str, ...]]
    listening: ClassVar[tuple[str, ...]]
    reporting: ClassVar[tuple[str, ...]] = ()
    ngrams: ClassVar[Mapping[str, str | Json]]

    @abstractmethod
    def target_options(self, target: ModelSpec) -> Json:
        """Return the options that name the target and its revision; a value without an option has the key ""."""

    def command_line(
        self, target: ModelSpec, options: Json, port: int, more: Sequence[str] = (), wrapper: str = ""
    ) -> list[str]:
        """Return the words that start a server.

        Args:
            target: The target, with its path.
            options: Options of a setting; names in capitals are variables of the environment.
            port: The port to listen on.
            more: Words of the user's own, such as the engine's options for several GPUs.
            wrapper: The command in place of ``server``, in the notation of a shell, in which ``{port}`` stands for the
                port. Behind `ssh` the words are quoted once more, for the other machine's shell.
        """
        first = [word.replace("{port}", str(port)) for word in shlex.split(wrapper)] or [*self.server]
        variables = [f"{name}={value}" for name, value in options.items() if name.isupper()]
        options = {name: value for name, value in options.items() if not name.isupper()}
        measured = [*(self.reporting if options else ()), *self.listening]
        words = [*option_words({**self.target_options(target), **options}), *more, *measured, str(port)]
        if first[0].rpartition("/")[2] == "ssh":
            words = [shlex.quote(word) for word in words]
        return [*(["env", *variables] if variables else []), *first, *words]

    def setting(
        self, target: ModelSpec, drafter: EngineDrafter, gamma: int, policy: PolicySpec, temperature: float
    ) -> EngineSetting:
        """Return the setting of a drafter with a draft length.

        Raises:
            UsageError: The engine does not support the drafter.
        """
        name, end = str(drafter.spec), ""
        own = self.ngrams[drafter.spec] if isinstance(drafter.spec, str) else drafter.spec
        if isinstance(own, dict):
            options = {option: gamma if value == GAMMA else value for option, value in own.items()}
            return EngineSetting(f"{name}@{gamma}", gamma, options)
        spec = parse_drafter(own) if isinstance(own, str) else own
        if isinstance(policy, Confidence):
            end = f",p={policy.threshold:g}"
            policy = replace(policy, gamma_max=gamma)
        found = drafter.model
        placed = spec if found is None else with_models(spec, lambda _: found)
        recipe = Recipe(target, placed, policy, sampling=SamplingOptions(temperature=temperature))
        export = self.export(Setting(recipe, gamma, head=drafter.head))
        return EngineSetting(f"{name}@{gamma}{end}", gamma, export.options)


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line.

    A group is written as JSON, ``None`` stands for an option without a value, and the name "" for a value without an
    option.
    """
    found = []
    for name, value in options.items():
        found += [name] if name else []
        if value is not None:
            found.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return found


def settings_of(
    engine: StartedEngine,
    target: ModelSpec,
    drafters: Sequence[EngineDrafter],
    *,
    gammas: Sequence[int] | None = None,
    policies: Sequence[PolicySpec] = (),
    temperature: float = 0.0,
) -> list[EngineSetting]:
    """Return plain decoding and the settings of drafters with each draft length.

    Args:
        gammas: Draft lengths; ``None`` for those to try.
        policies: Draft policies for models; none for those to try: ``fixed``, and ``confidence`` if the engine has it.

    Raises:
        UsageError: The engine does not support a drafter or a policy.
    """
    tried = [Fixed(), Confidence(P_MIN)] if "confidence" in engine.policies else [Fixed()]
    for policy in policies:
        if policy.word not in ("fixed", *engine.policies):
            known = ", ".join(("fixed", *engine.policies))
            raise UsageError(
                f"{engine.title} does not have the draft policy {policy.word}.", f"Choose from {known}."
            )
    found = [EngineSetting(PLAIN, 0, {})]
    for drafter in drafters:
        has_model = not isinstance(drafter.spec, str) and drafter.spec.model_part is not None
        found += [
            engine.setting(target, drafter, gamma, policy, temperature)
            for policy in ((policies or tried) if has_model else [Fixed()])
            for gamma in gammas or (GAMMAS if has_model else NGRAM_GAMMAS)
        ]
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        raise UsageError(
            "Two drafters have the same name.", "Name each once, and give their files different names."
        )
    return found
