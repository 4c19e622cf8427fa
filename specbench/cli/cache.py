"""`specbench cache`: show or clear the cache folder."""

from __future__ import annotations

from typing import Annotated

import typer

from specbench.base.textsafe import terminal_safe


def cache(
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="NAME", help="Entry or kind of entries to remove; repeatable."),
    ] = None,
) -> None:
    """Show what the cache folder holds and how large it is, or remove some of it."""
    from specbench.base.cache import cache_folder, cached, remove_cached

    if remove:
        typer.echo(f"{_size(sum(map(remove_cached, remove)))} removed.")
        return
    kinds = cached()
    width = max(len(kind.folder) for kind in kinds)
    lines = [f"{cache_folder()}: {_size(sum(kind.size for kind in kinds))}"]
    for kind in kinds:
        count = f"{kind.folder:{width}} {len(kind.entries):5}"
        lines.append(f"{count} {_size(kind.size):>10}  {kind.meaning}")
        lines += [f"{'':{width}}       {_size(each.size):>10}    {each.name}" for each in kind.entries]
    for line in lines:
        typer.echo(terminal_safe(line))


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e8 else f"{number / 1e6:.2f} MB"
