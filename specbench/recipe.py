"""Recipes: one value with everything that decides how a prompt is decoded. It is parsed, stored and printed whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from specbench.base.errors import UsageError
from specbench.base.record import wrong_field
from specbench.options import (
    NO_OPTIONS,
    CacheOptions,
    DecodingOptions,
    ModelOptions,
    SamplingOptions,
    TemplateOptions,
    arguments_of,
    quantized,
)
from specbench.specs.drafters import (
    Cascade,
    DrafterSpec,
    Grammar,
    Outside,
    Plain,
    Several,
    SmallModel,
    parse_drafter,
)
from specbench.specs.models import ModelSpec, split_options
from specbench.specs.policies import Fixed, OwnPolicy, PolicySpec, parse_policy

GROUPS = {
    "models": ModelOptions,
    "caching": CacheOptions,
    "decoding": DecodingOptions,
    "sampling": SamplingOptions,
    "template": TemplateOptions,
}
"""The groups of options of a recipe, by the names of its fields."""

Use = Literal["", "batch", "timing"]
"""What a recipe is for: one prompt, several at a time, or prompts that are decoded repeatedly to time them."""

PLACE = "/path/to"
"""Folder of models and files in a stored recipe, which holds no paths."""

_ANOTHER = f"{PLACE}/another"
"""Folder of a drafter's model that has the target's name and is another one."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides how a prompt is decoded.

    Attributes:
        target: The model whose output is kept.
        drafter: The drafter; ``Plain`` for plain decoding.
        policy: The draft policy with the verification method; ``None`` for plain decoding.
        models, caching, decoding, sampling, template: Groups of options.
        measured_with: Of a row of a run, fingerprints of the weights of target and drafter.
    """

    target: ModelSpec
    drafter: DrafterSpec = field(default_factory=Plain)
    policy: PolicySpec | None = None
    models: ModelOptions = field(default_factory=ModelOptions)
    caching: CacheOptions = field(default_factory=CacheOptions)
    decoding: DecodingOptions = field(default_factory=DecodingOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    template: TemplateOptions = NO_OPTIONS
    measured_with: tuple[str | None, str | None] = field(default=(None, None), compare=False)

    @property
    def chained(self) -> str | None:
        """What asks for bit-exact forward passes, with which drafts are chains; ``None`` without it."""
        if self.caching.cache == "bit-exact":
            return "The cache bit-exact"
        return None if quantized(self.models.dtype) is None else f"The dtype {self.models.dtype}"

    def check(self, use: Use = "") -> None:
        """Raise ``UsageError`` for parts that do not go with each other, or with a use (``RULES``)."""
        for uses, wrong, sentence, remedy in RULES:
            if (not uses or use in uses) and wrong(self):
                raise UsageError(sentence.format(self), remedy)

    @classmethod
    def of_target(cls, text: str, *groups: Any) -> Recipe:
        """Return the recipe of a target, with options behind it or not, and groups of options.

        Raises:
            UsageError: It is no model, or an option behind it is none or has another value in the groups.
        """
        target, options = split_options(text)
        recipe = cls(target).with_groups(*groups)
        return recipe.with_groups(recipe.models.with_options(text, options))

    def with_groups(self, *groups: Any) -> Recipe:
        """Return the recipe with these groups of options in place of its own."""
        names = {kind: name for name, kind in GROUPS.items()}
        return replace(self, **{names[type(each)]: each for each in groups})

    def with_models(self, change: Callable[[ModelSpec], ModelSpec]) -> Recipe:
        """Return the recipe with the target, and each model of the drafter, replaced by ``change(model)``."""
        return replace(self, target=change(self.target), drafter=with_models(self.drafter, change))

    def found_in(self, folder: Path) -> Recipe:
        """Return a stored recipe with the models that it names without their paths, which are in ``folder``.

        Raises:
            UsageError: One is not there, is a program, which runs only where it is named, or target and drafter have
                one name.
        """
        another = any(part.model.source.startswith(f"{_ANOTHER}/") for part in self.drafter.models)
        if another and self.target.source.startswith(f"{PLACE}/"):
            raise UsageError(
                f"The run names target and drafter {self.target.name} without their paths, and they are two models.",
                "Give --target, and run the command in the folder that holds the drafter.",
            )

        def found(model: ModelSpec) -> ModelSpec:
            if model.kind == "python" and model.source.startswith(f"{PLACE}/"):
                raise UsageError(
                    f"The row drafts with the program {model.name}.",
                    "Name it with --drafter, without --recipe.",
                )
            return replace(model, source=placed(model.source))

        def placed(path: str) -> str:
            if not path.startswith(f"{PLACE}/"):
                return path
            name = Path(path).name
            if not (folder / name).exists():
                raise UsageError(
                    f"The run names {name} without its path, and it is not in this folder.",
                    "Run the command in the folder that holds it.",
                )
            return str(folder / name)

        return self.with_models(found)

    @property
    def plain(self) -> Recipe:
        return replace(self, drafter=Plain(), policy=None)

    def arguments(self) -> list[str]:
        """Return the recipe as arguments of ``specbench generate``; options at their defaults are left out."""
        found = ["--drafter", drafter_argument(self.drafter)]
        if isinstance(self.policy, Fixed):
            rest = replace(self.policy, gamma=None)
            found += [] if rest == Fixed() else ["--draft-policy", str(rest)]
            found += ["--gamma", str(self.policy.gamma_max)]
        elif self.policy is not None:
            found += ["--draft-policy", str(self.policy)]
        found += ["--target", self.models.behind(self.target.argument)]
        groups = [getattr(self, name) for name in GROUPS if name != "models"]
        return [*found, *(word for each in groups for word in arguments_of(each))]

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as ``run.json`` stores it: paths and options at their defaults are left out."""
        own: list[dict[str, Any]] = []

        def numbered(model: ModelSpec) -> ModelSpec:
            if model.kind in ("python", "mtp"):
                return model
            own.append(_model_json(model))
            if _hides(self.target, model):
                own[-1]["another"] = True
            return ModelSpec("hub", f"MODEL{len(own)}")

        return {
            "target": _model_json(self.target),
            "drafter": str(with_models(self.drafter, numbered)),
            "drafter_models": own,
            "draft_policy": None if self.policy is None else str(self.policy),
            **{name: _changed(getattr(self, name)) for name in GROUPS},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Recipe:
        """Return the recipe that ``to_json`` stored; models that are folders or files get the path ``/path/to/``.

        Raises:
            UsageError: The data has a drafter, a policy or a value that this version does not know.
        """
        try:
            return cls._restored(data)
        except (KeyError, TypeError, AttributeError):
            raise UsageError("A recipe is damaged.", "Measure again.") from None

    @classmethod
    def _restored(cls, data: Mapping[str, Any]) -> Recipe:
        own = [_model_of(each) for each in data["drafter_models"]]
        named = {f"MODEL{number}": model for number, model in enumerate(own, start=1)}

        def restored(model: ModelSpec) -> ModelSpec:
            if model.kind == "python":  # of a stored name alone, no file runs
                return replace(model, source=f"{PLACE}/{model.name}")
            return named.get(model.source, model)

        policy = None if data["draft_policy"] is None else parse_policy(data["draft_policy"])
        if isinstance(policy, OwnPolicy):
            policy = replace(policy, file=f"{PLACE}/{policy.file}")
        return cls(
            target=_model_of(data["target"]),
            drafter=with_models(parse_drafter(data["drafter"]), restored),
            policy=policy,
            **{name: options_of(kind, data.get(name, {})) for name, kind in GROUPS.items()},
        )


def _refuses(recipe: Recipe, kind: str) -> bool:
    """Return whether the draft policy does not apply to the drafter, which is of a kind: several, chains or blind."""
    policy, drafter = recipe.policy, recipe.drafter
    if policy is None or drafter.is_plain or policy.applies(drafter):
        return False
    return kind == ("several" if len(drafter.parts) > 1 else "chains" if policy.tree else "blind")


RULES: tuple[tuple[tuple[Use, ...], Callable[[Recipe], object], str, str], ...] = (
    ((), lambda recipe: recipe.chained and recipe.policy and recipe.policy.tree,
     "{0.chained} does not go with trees, as in {0.policy}.", "Draft chains."),
    ((), lambda recipe: _refuses(recipe, "several"),
     "Several drafters draft chains of one fixed length, but {0.policy.word} decides the length while drafting.",
     "Give --gamma N."),
    ((), lambda recipe: _refuses(recipe, "chains"),
     "The drafter {0.drafter} drafts only chains, but {0.policy.word} needs trees.",
     "Choose suffix, self:... or a model, or another draft policy."),
    ((), lambda recipe: _refuses(recipe, "blind"),
     "The draft policy {0.policy.word} reads the drafter's distribution, and {0.drafter.word} has none.",
     "Choose auto, fixed or another that does not."),
    (("batch",), lambda recipe: recipe.caching.cache in ("static", "compiled"),
     "Forward passes of fixed shapes (--cache static and compiled) serve one prompt at a time.",
     "Choose another cache."),
    (("batch", "timing"), lambda recipe: recipe.drafter.keeps_state,
     "The drafter {0.drafter} carries counts from one generation to the next, so one would change the next.",
     "Leave keep out."),
)  # fmt: skip
"""What does not go with what: in which uses (none stands for all), a predicate, the sentence and the remedy."""


def with_models(drafter: DrafterSpec, change: Callable[[ModelSpec], ModelSpec]) -> DrafterSpec:
    """Return a drafter with each of its models and files replaced by ``change(model)``, in the order of the spec."""

    def changed(part: SmallModel | Outside) -> SmallModel | Outside:
        if isinstance(part, SmallModel):
            return replace(part, model=change(part.model))
        return replace(part, file=change(part.file))

    return with_small_models(drafter, changed)


def with_small_models(drafter: DrafterSpec, change: Callable[[Any], DrafterSpec]) -> DrafterSpec:
    """Return a drafter with each part that is a model or from outside replaced by ``change(part)``."""
    if isinstance(drafter, Several):
        return replace(drafter, drafters=tuple(with_small_models(each, change) for each in drafter.drafters))
    if isinstance(drafter, Cascade):
        front, back = with_small_models(drafter.front, change), with_small_models(drafter.back, change)
        return replace(drafter, front=front, back=back)  # type: ignore[arg-type]
    if isinstance(drafter, Grammar) and drafter.rest is not None:
        return replace(drafter, rest=with_small_models(drafter.rest, change))  # type: ignore[arg-type]
    return change(drafter) if isinstance(drafter, SmallModel | Outside) else drafter


def drafter_argument(drafter: DrafterSpec) -> str:
    """Return a drafter as the command line takes it; results show only the last part of its models' names."""
    return str(with_models(drafter, lambda model: ModelSpec("hub", model.argument)))


def _model_json(model: ModelSpec) -> dict[str, Any]:
    return {"kind": model.kind, "name": model.name}


def _hides(target: ModelSpec, model: ModelSpec) -> bool:
    """Return whether a model without its path looks like the target, and is another one."""
    own, other = (Path(each.source).resolve() for each in (target, model))
    return target.is_path and model.is_path and own.name == other.name and own != other


def _model_of(data: Mapping[str, Any]) -> ModelSpec:
    name, _, revision = data["name"].partition("@")
    if data["kind"] in ("folder", "gguf"):
        folder = _ANOTHER if data.get("another") else PLACE
        return ModelSpec(data["kind"], f"{folder}/{data['name']}")
    return ModelSpec(data["kind"], name, revision or None)


def _changed(group: Any) -> dict[str, Any]:
    """Return the fields of a group that are not at their defaults."""
    found = {each.name: getattr(group, each.name) for each in fields(group)}
    found = {each.name: found[each.name] for each in fields(group) if found[each.name] != each.default}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def options_of(kind: Any, data: Mapping[str, Any]) -> Any:
    """Return a group of options from stored data, without unknown ones; a wrong value raises ``UsageError``."""
    known = {each.name: data[each.name] for each in fields(kind) if each.name in data}
    try:
        return msgspec.convert(known, kind)
    except ValueError as error:
        raise UsageError(f"{wrong_field(error)} has an invalid value.") from None
