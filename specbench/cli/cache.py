"""`specbench cache`: show or clear the cache folder."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from specbench.base.cache import KINDS, LAYERS_FOLDER, cache_folder, cached, remove_cached
from specbench.base.textsafe import terminal_safe

_NAMED, _SHOWN = ("models", LAYERS_FOLDER), 8
"""Kinds whose entries have names that mean something, and how many of them are listed."""
_OTHER = "of another version; this one does not read it"


def cache(
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="NAME", help="Entry or kind of entries to remove; repeatable."),
    ] = None,
) -> None:
    """Show what the cache folder holds and how large it is, or remove some of it."""
    if remove:
        typer.echo(f"{_size(sum(map(remove_cached, remove))).strip()} removed.")
        return
    kinds = {kind: entries for kind, entries in cached().items() if entries}
    totals = {kind: sum(each.size for each in entries) for kind, entries in kinds.items()}
    lines = [f"{_size(sum(totals.values()))}  {cache_folder()}"]
    for kind, entries in kinds.items():
        lines += ["", f"{_size(totals[kind])}  {kind}: {KINDS.get(kind, _OTHER)}"]
        sizes = Counter[str]()
        for each in entries if kind in _NAMED else ():
            sizes[each.name] += each.size
        lines += [f"  {_size(size)}  {name}" for name, size in sizes.most_common(_SHOWN)]
        if (rest := len(sizes) - _SHOWN) > 0:
            lines.append(f"  {'':9}  and {rest} smaller")
    if kinds:
        lines += [
            "",
            "`specbench cache --remove NAME` removes one of these; what is needed is made or fetched again.",
        ]
    for line in lines:
        typer.echo(terminal_safe(line))


def _size(number: int) -> str:
    name, unit = ("GB", 1e9) if number >= 1e9 else ("MB", 1e6) if number >= 1e6 else ("kB", 1e3)
    return f"{number / unit:6.1f} {name}"
