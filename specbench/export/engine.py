"""What every engine answers, and what all of them have to say about a setting."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specbench.base.errors import UsageError
from specbench.export.heads import HEADS, KINDS, SPECULATORS, HeadSupport, NoHeadSupport
from specbench.export.setting import Model, Setting
from specbench.specs.drafters import Cascade, DrafterSpec, SelfForm, SmallModel
from specbench.specs.models import BUILTIN_MODELS

GREEDY_DRAFTS = (
    "Above temperature 0 a draft is the drafter's top token, kept with the target's probability of it; in specbench it"
    " is drawn, and kept with the chance of Σ min(p, q). Outputs keep their distribution, acceptance changes."
)
OLDEST_MATCH = (
    "Of several equally long matches it copies behind the oldest, specbench behind the most recent."
)


@dataclass(frozen=True)
class Export:
    """A setting in an engine's words.

    Attributes:
        text: What to run: commands for a shell, or a Python program.
        options: The engine's own names in it, each with its value; groups of them are mappings.
        needs: What has to be there first.
        missing: What the engine has no counterpart of, and what stands in its place.
        differs: What means something else there.
        check: How to see that it is on.
    """

    text: str
    options: Mapping[str, Any]
    needs: Sequence[str]
    missing: Sequence[str]
    differs: Sequence[str]
    check: str


class ExportEngine(Protocol):
    """One way to deploy.

    Attributes:
        name: What ``--to`` takes.
        title: What it calls itself.
        version: That its names were read in.
        drafters: Kinds that it can express at least some of.
        rules: Draft-length rules that it has beside a fixed γ.
    """

    name: str
    title: str
    version: str
    drafters: tuple[type[DrafterSpec], ...]
    rules: tuple[str, ...]

    def export(self, setting: Setting) -> Export:
        """The setting there, without a trained head or with one that it has (``HEADS``).

        Raises:
            UsageError: It cannot be expressed.
        """
        ...


def kinds(engine: ExportEngine) -> str:
    """The drafters that it has, in words."""
    names = {SmallModel: "a model", Cascade: "lookup+MODEL", SelfForm: "self:layers=N"}
    have = (KINDS[kind] for kind, there in HEADS[engine.name].items() if isinstance(there, HeadSupport))
    heads = ", ".join(dict.fromkeys(have))
    found = [names.get(kind, kind.word) for kind in engine.drafters]
    return ", ".join([*found, f"heads ({heads})"] if heads else found)


def head_of(engine: ExportEngine, setting: Setting) -> HeadSupport | None:
    """The trained head in a setting as an engine has it; ``None`` without one.

    Raises:
        UsageError: The engine does not read such a head, or nothing but specbench does.
    """
    if setting.head is None:
        return None
    there = HEADS[engine.name].get(setting.head, NoHeadSupport(f"has no heads of the kind {setting.head}"))
    if isinstance(there, HeadSupport) and setting.speculators and not there.speculators:
        there = SPECULATORS
    if isinstance(there, NoHeadSupport):
        raise _refusal(
            f"The drafter {setting.drafter} cannot be exported to {engine.title} {engine.version}, which {there.why}.",
            _SERVE,
        )
    if setting.compact:
        raise UsageError(
            f"{engine.title} cannot read the head in {setting.drafter}, which is compact: for specbench alone.",
            "Train one without --compact, or serve this one with `specbench serve`.",
        )
    return there


_SERVE = " `specbench serve` serves it."


def refuse(engine: ExportEngine, setting: Setting) -> UsageError:
    """The error for a drafter that an engine does not have."""
    head = "" if setting.head is None else ", with a trained head"
    what = f"{engine.title} cannot express the drafter {setting.drafter}{head}; it has {kinds(engine)}."
    return _refusal(what, _SERVE if head else "")


def _refusal(what: str, advice: str) -> UsageError:
    return UsageError(
        what,
        "Name a run without --setting, and the fastest setting that the engine has is exported; or another engine."
        + advice,
    )


def without_counterpart(
    engine: ExportEngine, setting: Setting, verifications: Sequence[str] = ()
) -> Iterator[str]:
    """What an engine lacks of rule, drafter and dtypes, whatever it is.

    Args:
        engine: The engine.
        setting: To be expressed.
        verifications: Ways to verify that it has, beside rejection of one draft after the other.
    """
    rule = setting.rule
    if setting.gamma_from and rule.word not in ("fixed", *engine.rules):
        yield f"The rule {rule}: a fixed γ of {setting.gamma} takes its place, {setting.gamma_from}."
    if not rule.kind.tree and rule.siblings:
        yield f"Siblings: specbench verified up to {rule.siblings} alternatives beside a draft."
    verification = rule.options.get("verification", "rejection")
    if setting.temperature != 0 and verification not in ("rejection", *verifications):
        yield f"The verification {verification}."
    model = setting.drafter.model_part
    if isinstance(model, SmallModel):
        if model.vocab is not None:
            yield f"vocab={model.vocab}: the drafter computes its whole head."
        if setting.head is None and setting.drafter_dtype in ("int8", "int4", None):
            dtype = setting.drafter_dtype or "int8, specbench's default on a CPU"
            yield (
                f"The drafter's {dtype}: there it runs as its checkpoint is stored, so that drafts cost more than"
                " measured unless you name a quantized one."
            )
    if setting.dtype in ("int8", "int4"):
        yield f"The target's {setting.dtype}, which is specbench's own: there it runs as its checkpoint is stored."


def model_needs(setting: Setting) -> Iterator[str]:
    """What has to be put in place of names that only one machine knows."""
    for model in (setting.target, setting.assistant):
        builtin = None if model is None else BUILTIN_MODELS.get(model.name)
        if builtin is not None:
            yield f"{builtin.alias} is a 4-bit file of {builtin.hub_id}, which other engines take in its place."
        elif model is not None and not model.is_hub_id:
            yield f"{model.name} is what one machine calls a model: put its path or hub id there."
    if setting.unseen:
        yield f"{setting.drafter} stands here as a model: the hub could not be asked whether it is a trained head."


def of_requests(setting: Setting) -> Iterator[str]:
    """What clients of a server have to know."""
    if setting.temperature is not None:
        yield (
            f"A request that says no temperature gets a default of the server, not the {setting.temperature:g} that was"
            " measured."
        )


def floating(dtype: str | None, name: str) -> dict[str, str]:
    """The option for a dtype, if other engines have it."""
    return {name: dtype} if dtype in ("float32", "bfloat16", "float16") else {}


def revision(model: Model | None, name: str) -> dict[str, str]:
    """The option for a model's revision, if one is named."""
    return {} if model is None or model.revision is None else {name: model.revision}


def command(words: Sequence[str], options: Mapping[str, Any]) -> str:
    """A command line, with an option in each line behind the first."""
    lines = [shlex.join(words), *(f"    {name} {shlex.quote(str(value))}" for name, value in options.items())]
    return " \\\n".join(lines) + "\n"
