"""`specbench cache`: show or clear the cache folder."""

from __future__ import annotations

from typing import Annotated

import typer

from specbench.base.textsafe import terminal_safe


def cache(
    clear: Annotated[
        bool,
        typer.Option(
            "--clear",
            help="Remove packed and quantized weights, which take seconds to make again.",
        ),
    ] = False,
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="NAME", help="Entry or kind of entries to remove; repeatable."),
    ] = None,
) -> None:
    """Show what the cache folder holds and how large it is, or remove some of it."""
    from specbench.models.cache import cache_folder, cached, clear_derived, remove_cached

    if clear or remove:
        freed = sum(map(remove_cached, remove or ()))
        typer.echo(f"{_size(freed + (clear_derived() if clear else 0))} removed.")
        return
    kinds = cached()
    width = max(len(kind.folder) for kind in kinds)
    lines = [f"{cache_folder()}: {_size(sum(kind.size for kind in kinds))}"]
    for kind in kinds:
        cleared = " (--clear removes them)" if kind.derived else ""
        count = f"{kind.folder:{width}} {len(kind.entries):5}"
        lines.append(f"{count} {_size(kind.size):>10}  {kind.meaning}{cleared}")
        lines += [f"{'':{width}}       {_size(each.size):>10}    {each.name}" for each in kind.entries]
    for line in lines:
        typer.echo(terminal_safe(line))


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e8 else f"{number / 1e6:.2f} MB"
