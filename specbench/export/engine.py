"""The base class of export engines, and functions that several of them share."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from specbench.base.errors import UsageError
from specbench.base.record import Json
from specbench.export.setting import Setting, is_found, location
from specbench.models.head_files import HEAD_KINDS
from specbench.specs.drafters import Cascade, DrafterSpec, SelfForm, SmallModel
from specbench.specs.models import BUILTIN_MODELS, ModelSpec

if TYPE_CHECKING:
    pass

HEAD_TITLES = {"eagle": "EAGLE-3"} | {kind: facts.title for kind, facts in HEAD_KINDS.items()}
"""Names of the kinds of heads that results store; ``eagle`` is EAGLE-3 from ``specbench train``."""

GREEDY_DRAFTS = (
    "Above temperature 0 the draft is the drafter's top token, accepted with the target's probability of it. specbench"
    " samples the draft and accepts it with probability Σ min(p, q). Outputs keep their distribution, acceptance"
    " differs."
)
OLDEST_MATCH = "Among equally long matches the oldest one is copied; specbench copies the most recent one."


@dataclass
class Export:
    """A setting in the form that an engine takes.

    Attributes:
        text: Shell commands or a Python program.
        options: The engine's option names with their values; groups are mappings.
        needs, missing, differs: Notes on what must be done first, what cannot be expressed, and what differs in
            meaning.
        check: How to verify that speculation is on.
    """

    text: str = ""
    options: Json = field(default_factory=dict)
    needs: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    check: str = ""


@dataclass(frozen=True)
class HeadSupport:
    """A kind of trained head that an engine loads.

    Attributes:
        method: The engine's name for it.
        needs: What has to be done to the head's files first; empty for nothing.
        speculators: Whether heads in the `speculators` format are loaded too.
    """

    method: str
    needs: str = ""
    speculators: bool = True


class ExportEngine(ABC):
    """An engine that settings are exported to.

    Attributes:
        name, title: Value of ``--to``; name in messages.
        version: Version of the engine that the option names are from.
        drafters: Kinds of drafters that it supports, at least in part.
        policies: Draft policies that it supports in addition to a fixed γ.
        verifications: Verification methods that it supports in addition to rejection sampling.
        heads: The kinds of trained heads that it loads.
        other_tokens: How it is told that a drafter has other tokens, or another number of logits; empty if no way is
            known.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    version: ClassVar[str]
    drafters: ClassVar[tuple[type[DrafterSpec], ...]]
    policies: ClassVar[tuple[str, ...]] = ()
    verifications: ClassVar[tuple[str, ...]] = ()
    heads: ClassVar[Mapping[str, HeadSupport]] = {}
    other_tokens: ClassVar[str] = ""

    @abstractmethod
    def fill(self, setting: Setting, export: Export) -> None:
        """Write text, options, notes and check of a supported setting into an export."""

    def export(self, setting: Setting) -> Export:
        """Return a setting in the form that this engine takes.

        Raises:
            UsageError: The engine does not support its drafter or the trained head in it.
        """
        head = self._head(setting)
        if not self.supports(setting.drafter):
            trained = "" if setting.head is None else " with a trained head"
            raise _refusal(
                f"{self.title} does not support the drafter {setting.drafter}{trained}. Supported:"
                f" {self.describe_drafters()}.",
                served=bool(trained),
            )
        export = Export(needs=[*_model_needs(setting)], missing=[*self._missing(setting)])
        self.fill(setting, export)
        if head is not None and setting.head is not None:
            name = HEAD_TITLES[setting.head.kind]
            authors = (
                f"The head in the format of the authors of {name}; the `speculators` format is not read."
            )
            export.needs += [each for each in ("" if head.speculators else authors, head.needs) if each]
        return export

    def supports(self, drafter: DrafterSpec) -> bool:
        """Return whether the engine supports a drafter, ignoring trained heads."""
        return type(drafter) in self.drafters

    def method(self, setting: Setting, otherwise: str) -> str:
        """Return the engine's name for drafting with the head of a setting, ``otherwise`` without one."""
        head = self._head(setting)
        return otherwise if head is None else head.method

    def describe_drafters(self) -> str:
        """Return the supported drafters, separated by commas."""
        names = {SmallModel: "a model", Cascade: "lookup+MODEL", SelfForm: "self:layers=N"}
        heads = [HEAD_TITLES[kind] for kind in self.heads]
        found = [names.get(kind, kind.word) for kind in self.drafters]
        return ", ".join([*found, f"heads ({', '.join(dict.fromkeys(heads))})"] if heads else found)

    def _head(self, setting: Setting) -> HeadSupport | None:
        """Return how the trained head of a setting is loaded; ``None`` without one.

        Raises:
            UsageError: It cannot be loaded.
        """
        if setting.head is None:
            return None
        kind, form = setting.head.kind, setting.head.form
        support = self.heads.get(kind)
        if support is None or (form == "speculators" and not support.speculators):
            form = " in the `speculators` format" if support is not None or kind == "eagle" else ""
            name = HEAD_TITLES.get(kind, kind)
            raise _refusal(
                f"{self.title} {self.version} cannot load the head in {setting.drafter}: no {name} heads{form}.",
                served=True,
            )
        return support

    def nearest(self, setting: Setting) -> Setting:
        """Return a setting, or the measured one with a fixed γ in place of a draft policy that the engine lacks."""
        if setting.fixed is None or not self.replaces_policy(setting):
            return setting
        return replace(setting.fixed, instead_of=setting.measured)

    def replaces_policy(self, setting: Setting) -> bool:
        """Return whether the export has a fixed γ in place of the setting's draft policy."""
        return bool(setting.gamma_from) and setting.policy.word not in self.policies

    def _missing(self, setting: Setting) -> Iterator[str]:
        """Yield what the engine lacks of the draft policy, the drafter and the dtypes."""
        policy = setting.policy
        if setting.gamma_from and policy.word not in ("fixed", *self.policies):
            yield f"Draft policy {policy}: replaced by a fixed γ of {setting.gamma}, {setting.gamma_from}."
        verification = policy.verification or "rejection"
        if setting.temperature != 0 and verification not in ("rejection", *self.verifications):
            yield f"Verification method {verification}."
        model = setting.drafter.model_part
        if (
            isinstance(model, SmallModel)
            and setting.head is None
            and setting.drafter_dtype in ("int8", "int4", None)
        ):
            dtype = setting.drafter_dtype or "int8, specbench's default on a CPU"
            yield (
                f"Drafter dtype {dtype}: the drafter runs as its checkpoint is stored, so drafts cost more than"
                " measured unless you name a quantized checkpoint."
            )
        if setting.dtype in ("int8", "int4"):
            yield f"Target dtype {setting.dtype}, specbench's own format: the target runs as its checkpoint is stored."


def _refusal(what: str, *, served: bool) -> UsageError:
    advice = "Name the run alone to export its fastest supported row, or choose another engine."
    return UsageError(what, advice + (" `specbench serve` supports it." if served else ""))


def _model_needs(setting: Setting) -> Iterator[str]:
    """Yield notes on model names that exist only on one machine and have to be replaced."""
    for model in setting.models:
        if model.kind == "builtin":
            yield f"{BUILTIN_MODELS[model.source].hub_id} in place of {model.name}, which is a 4-bit file of it."
        elif not is_found(model):
            yield f"{location(model)}: replace it by the model's folder, file or hub id."


def request_note(setting: Setting) -> str:
    return f"Requests without a temperature get the server's default instead of {setting.temperature:g}."


def floating(dtype: str | None, name: str) -> dict[str, str]:
    """Return the option for a dtype, if other engines have it."""
    return {name: dtype} if dtype in ("float32", "bfloat16", "float16") else {}


def revision(model: ModelSpec, name: str) -> dict[str, str]:
    """Return the option for a model's revision, if it has one."""
    return {} if model.revision is None else {name: model.revision}


def command(words: Sequence[str], options: Mapping[str, Any]) -> str:
    """Return a command line with one option per line; ``None`` stands for an option without a value."""
    lines = [words, *([name] if value is None else [name, str(value)] for name, value in options.items())]
    return " \\\n    ".join(shlex.join(line) for line in lines) + "\n"
