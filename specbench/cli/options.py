"""Options that several commands take, groups of them unfolded into single ones, and the layout of help."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from specbench.export.registry import ENGINES
from specbench.models.default import DEFAULT_DRAFTER
from specbench.options import MODELS, OUTPUT, POLICY, PROMPT, group, panel

if TYPE_CHECKING:
    from specbench.decoding.sampling import Sampling
    from specbench.models.load import LanguageModel
    from specbench.recipe import Recipe

    EngineName = str
else:
    EngineName = Literal[tuple(ENGINES)]

DEFAULT_TARGET = "smollm2-135m"

# -- groups of options -----------------------------------------------------------------------------


class Fields:
    """Which fields of a group a command takes; next to the group in its signature.

    ``names`` are those fields, in the order of the help; all but those of ``without`` if none is named. ``defaults``
    replace defaults.
    """

    def __init__(self, *names: str, without: Collection[str] = (), **defaults: Any) -> None:
        self.names, self.without, self.defaults = names, without, defaults


def unfolded(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command as typer reads it, with single options in place of groups.

    A group is a parameter whose type is a dataclass, with fields that ``specbench.options.group`` declares. Each is an
    option; one that holds a tuple may be repeated on the command line.
    """
    groups: dict[str, tuple[Any, list[Field[Any]]]] = {}
    parameters: list[Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for parameter in signature(command).parameters.values():
        hint = hints[parameter.name]
        kind, *extra = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if not is_dataclass(kind):
            parameters.append(parameter.replace(annotation=hint))
            continue
        taken = next((each for each in extra if isinstance(each, Fields)), Fields())
        known = {
            field.name: field for field in fields(kind) if field.metadata and field.name not in taken.without
        }
        chosen = [known[name] for name in taken.names or known]
        groups[parameter.name] = kind, chosen
        parameters += _single(kind, chosen, taken)

    @wraps(command)
    def call(**values: Any) -> None:
        for name, (kind, chosen) in groups.items():
            own = {field.name: values.pop(field.name) for field in chosen}
            repeated = {
                field.name: tuple(own[field.name] or ())
                for field in chosen
                if isinstance(field.default, tuple)
            }
            values[name] = kind(**own | repeated)
        command(**values)

    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _single(kind: Any, chosen: Iterable[Field[Any]], taken: Fields) -> Iterator[Parameter]:
    """Yield the fields of a group as parameters of a command."""
    hints = get_type_hints(kind)
    for field in chosen:
        value, option = hints[field.name], field.metadata["option"]
        default = taken.defaults.get(field.name, field.default)
        if isinstance(default, tuple):  # typer knows lists
            value, default = list[get_args(value)[0]] | None, None  # type: ignore[misc]
        yield Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[value, option]
        )


# -- options that several commands take ----------------------------------------------------------------


output = panel(OUTPUT)
_policy = group(POLICY)

_DRAFTER = (
    "A word of `specbench drafters`, a model or a trained head. Default: mtp where the checkpoint has MTP layers,"
    f" lookup+self:int4 for {DEFAULT_TARGET} where int4 is fast, {DEFAULT_DRAFTER} otherwise."
)
_RANGE = "4, 1..8, 2..16..2 (with a step) or 1,2,4"
_TARGET = (
    "--target MODEL",
    "Hub id (org/name@rev), folder or .gguf file.",
)


def drafters_field(heading: str, help: str = f"Repeatable. {_DRAFTER}") -> Any:  # noqa: A002
    """Return the field of a group for ``--drafter`` that may be repeated."""
    return group(heading)((), "--drafter DRAFTER", help)


def prompts_field(heading: str = PROMPT) -> Any:
    """Return the field of a group for ``--prompts`` that may be repeated."""
    text = "Repeatable: a set, all (default), or a .jsonl file."
    return group(heading)((), "--prompts -p SET", text)


def recipe_field() -> Any:
    """Return the field of a group for ``--recipe``."""
    return group(POLICY)(
        None,
        "--recipe RUN:NAME",
        "As a row of a stored run was decoded, by its name in the tables; options beside it change it.",
    )


TargetOption = Annotated[str, panel(MODELS)(*_TARGET)]


@dataclass(frozen=True)
class PoliciesOptions:
    """Draft policies, for commands that compare several."""

    gamma: str | None = _policy(
        None,
        "--gamma -g RANGE",
        f"Draft lengths γ of fixed: {_RANGE}. Default: 1..8 in a sweep, 5 in a check.",
    )
    draft_policy: tuple[str, ...] = _policy(
        (),
        "--draft-policy RULE",
        "Repeatable. Default: auto when greedy, else fixed; in a sweep also fixed with each γ.",
    )


@dataclass(frozen=True)
class DraftingOptions:
    """Target, drafter and draft policy, for commands that decode with one of each."""

    target: str = group(MODELS)(DEFAULT_TARGET, *_TARGET)
    drafter: str | None = group(MODELS)(None, "--drafter DRAFTER", _DRAFTER)
    draft_policy: str | None = _policy(
        None,
        "--draft-policy RULE",
        "auto (default when greedy), fixed (default when sampling, and with --gamma), egag, confidence,"
        " entropy-bound, svip, heuristic, or trees: static-tree, dynamic-tree. Options follow a colon:"
        " egag:scale=0.5. Your own: ./mine.py:CLASS.",
    )
    gamma: int | None = _policy(
        None,
        "--gamma -g N",
        "Draft length γ: tokens drafted in a step. Default: 5.",
        min=1,
    )
    recipe: str | None = recipe_field()


ChatOption = Annotated[
    bool | None,
    panel(PROMPT)(
        "--chat/--raw",
        "With the chat template (the default if there is one), or as it is.",
    ),
]
SystemOption = Annotated[str | None, panel(PROMPT)("--system TEXT", "System message.")]
JsonOption = Annotated[bool, output("--json", "Print one JSON object.")]


# -- the command line as given --------------------------------------------------------------------------


def deciding(recipe: Recipe, sampling: Sampling, model: LanguageModel) -> dict[str, Any]:
    """Return what decides an output, by name; ``None`` for what is switched off."""
    decoding = recipe.decoding
    switched_on = {
        each.name: value
        for each in fields(decoding)
        if (value := getattr(decoding, each.name)) or each.default
    }
    return {
        "max_new_tokens": decoding.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or None,
        "top_p": sampling.top_p if sampling.top_p < 1 else None,
        "min_p": sampling.min_p or None,
        "repetition_penalty": sampling.repetition_penalty if sampling.repetition_penalty != 1 else None,
        "seed": recipe.sampling.seed,
        "bit_exact": recipe.caching.cache == "bit-exact" or None,
        **{each.name: switched_on.get(each.name) for each in fields(decoding)},
        "stop": list(decoding.stop) or None,
        "format": None if decoding.format is None else str(decoding.format),
        "model_defaults": (decoding.model_defaults and model.defaults.applied) or None,
    }
