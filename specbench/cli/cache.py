"""`specbench cache`: what the cache folder holds, and what of it is removed."""

from __future__ import annotations

from typing import Annotated

import typer

from specbench.base.textsafe import terminal_safe


def cache(
    clear: Annotated[
        bool,
        typer.Option(
            "--clear",
            help="Remove what is made anew in seconds: int8 and int4 layers of models and measured dtypes.",
        ),
    ] = False,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            "--remove", metavar="NAME", help="Remove what is listed by this name, or all of a kind."
        ),
    ] = None,
) -> None:
    """Show what the cache folder holds and how large it is, or remove some of it."""
    from specbench.models.cache import cache_folder, cached, clear_derived, remove_cached

    if clear or remove:
        freed = sum(map(remove_cached, remove or ()))
        typer.echo(f"{_size(freed + (clear_derived() if clear else 0))} removed.")
        return
    kinds = cached()
    typer.echo(terminal_safe(f"{cache_folder()}: {_size(sum(kind.size for kind in kinds))}"))
    width = max(len(kind.folder) for kind in kinds)
    for kind in kinds:
        cleared = " (--clear removes them)" if kind.derived else ""
        line = f"{kind.folder:{width}} {len(kind.entries):5} {_size(kind.size):>10}  {kind.meaning}{cleared}"
        typer.echo(terminal_safe(line))
        for entry in kind.entries:
            typer.echo(terminal_safe(f"{'':{width}}       {_size(entry.size):>10}    {entry.name}"))


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e8 else f"{number / 1e6:.2f} MB"
