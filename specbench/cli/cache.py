"""`specbench cache`: what the cache folder holds."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["cache"]


def cache(
    clear: Annotated[
        bool,
        typer.Option(
            "--clear",
            help="Remove what is made anew in seconds: int8 and int4 layers of models and measured dtypes.",
        ),
    ] = False,
) -> None:
    """Show what the cache folder holds, or clear of it what is quickly made anew."""
    from specbench.models.cache import cache_folder, cached, clear_derived
    from specbench.textsafe import terminal_safe

    if clear:
        typer.echo(f"{_size(clear_derived())} removed.")
        return
    typer.echo(terminal_safe(str(cache_folder())))
    kinds = cached()
    width = max(len(kind.folder) for kind in kinds)
    for kind in kinds:
        cleared = " (--clear removes them)" if kind.derived else ""
        typer.echo(f"{kind.folder:{width}} {kind.entries:5} {_size(kind.size):>10}  {kind.meaning}{cleared}")


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e8 else f"{number / 1e6:.2f} MB"
