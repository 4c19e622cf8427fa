"""`specbench drafters`: what ``--drafter`` takes, and whether a drafter fits a target."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.base.errors import UsageError
from specbench.cli.console import write_parts
from specbench.options import MODELS, panel
from specbench.specs.drafters import DRAFTERS, SmallModel, parse_drafter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specbench.export.fits import Fit, ModelFacts
    from specbench.show.document import Part, Sheet


def drafters(
    heads: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DRAFTER", help="With --target: models, trained heads or mtp.", show_default=False
        ),
    ] = None,
    target: Annotated[
        str | None,
        panel(MODELS)(
            "--target MODEL", "Say whether the named drafters fit this target; no weights are loaded."
        ),
    ] = None,
) -> None:
    """List the drafters with their options, or say whether some fit a target.

    With --target, config.json, tokenizers and the headers of weights are read, or fetched from the hub, and no weights:
    what a drafter is, what it was made for, the memory of both, and which engines take it by which options. Exit code 1
    if one does not fit.
    """
    if target is None and not heads:
        write_parts(*_listing())
    elif target is None or not heads:
        raise UsageError(
            "Whether a drafter fits depends on a target and a drafter.",
            "Name both: drafters --target MODEL DRAFTER.",
        )
    else:
        _compare(target, heads)


def _compare(target: str, heads: Sequence[str]) -> None:
    from specbench.export.fits import fit_of, read_facts
    from specbench.recipe import Recipe

    specs = []
    for text in heads:
        spec = parse_drafter(text)
        if not isinstance(spec, SmallModel):
            raise UsageError(f"The drafter {spec} is no model.", "Name models, trained heads or mtp.")
        specs.append(spec)
    facts = read_facts(Recipe.of_target(target).target)
    fits = [fit_of(facts, spec) for spec in specs]
    write_parts(*(part for fit in fits for part in _shown(fit)), _memory(facts, fits))
    if any(fit.faults for fit in fits):
        raise typer.Exit(1)


def _shown(fit: Fit) -> Iterator[Part]:
    from specbench.show.document import Code, Facts, Heading, Items, Paragraph

    yield Heading(f"{fit.name}: {fit.title}" if fit.title else fit.name)
    told = "config.json and headers tell" if fit.facts is None or fit.facts.headers else "config.json tells"
    verdict = "does not fit" if fit.faults else f"fits, as far as {told}"
    pairs = [("verdict", verdict), *fit.rows, *(("but", fault) for fault in fit.faults)]
    yield Facts([(label, [(text, "")]) for label, text in pairs])
    yield Items(fit.doubts, "Mind:" if fit.doubts else "")
    for name, command, needs in fit.engines:
        yield Paragraph(f"{name} ({needs})" if needs else name)
        yield Code(command)
    if fit.refused:
        others = [(name, [(reason, "dim")]) for name, reason in fit.refused]
        yield Facts(others, max(len(name) for name, _ in others) + 2)


def _memory(target: ModelFacts, fits: Sequence[Fit]) -> Sheet:
    from specbench.export.fits import DTYPES
    from specbench.show.document import Sheet

    rows = []
    for facts in (target, *(fit.facts for fit in fits if fit.facts is not None)):
        sizes = [facts.memory(dtype) for dtype in (None, *DTYPES)]
        rows.append([facts.name, *("–" if size is None else f"{size / 1e6:,.0f}" for size in sizes)])
    return Sheet(["weights, MB", "stored", *DTYPES], rows)


def _listing() -> Iterator[Part]:
    from specbench.show.document import Facts, Heading, Items, Paragraph

    for kind in DRAFTERS:
        yield Heading(kind.word, 3)
        yield Paragraph(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0])
        if options := kind.options():
            width = max(len(each.syntax) for each in options) + 2
            yield Facts([(each.syntax, [(each.help, "")]) for each in options], width)
    yield Items(
        (
            "Options follow a colon, separated by commas: --drafter ngram:order=3,top-k=4",
            "A drafter changes the speed, never the output's distribution.",
        )
    )
