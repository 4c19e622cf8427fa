"""Called by mkdocs: README, changelog and reports of measured runs are pages too, and references are generated."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # as mkdocs loads this file; afterwards it takes them away

from picture import draw  # noqa: E402
from record_tables import with_tables  # noqa: E402

OUTSIDE = (
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "notes/*.md",
    "examples/*",
    "results/**/*.md",
    "results/**/*.png",
)


def on_files(files: Files, config: Any) -> Files:
    for pattern in OUTSIDE:
        for path in filter(Path.is_file, sorted(ROOT.glob(pattern))):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fill in what is generated, and make links between the repository's files links between pages."""
    uri = PurePosixPath(page.file.src_uri)
    folder = Path(str(page.file.abs_src_path)).relative_to(ROOT).parent

    def moved(link: re.Match[str]) -> str:
        target = normpath((folder / link[1]).as_posix()).removeprefix("docs/")
        return f"]({relpath(target, uri.parent)}"

    markdown = re.sub(r"\]\((?!https?:|#)([^)#]+)", moved, markdown)
    if uri.name in FILLED:
        markdown = FILLED[uri.name](markdown)
    return markdown


def _with_commands(markdown: str) -> str:
    return markdown.replace("<!-- commands -->", "\n".join(command_lines()))


def _with_names(markdown: str) -> str:
    return markdown.replace(
        "<!-- exported names -->", "\n\n".join(f"::: specbench.{name}" for name in exported())
    )


def _with_picture(markdown: str) -> str:
    said = "Each row imports from the marked columns, the darker the more; all of them are before it."
    return markdown.replace(
        "<!-- picture of the folders -->", f"<figure>\n{draw()}\n<figcaption>{said}</figcaption>\n</figure>"
    )


FILLED = {
    "design.md": _with_picture,
    "results-format.md": with_tables,
    "cli.md": _with_commands,
    "api.md": _with_names,
}


def exported() -> list[str]:
    """Return the names that the package exports, each with its module."""
    tree = ast.parse((ROOT / "specbench" / "__init__.py").read_text(encoding="utf-8"))
    values = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    homes = ast.literal_eval(values["_HOMES"])
    names = [f"{home}.{name}" for home, names in homes.items() for name in names]
    return sorted(names, key=lambda name: name.rpartition(".")[2].lower())


def command_lines() -> Iterator[str]:
    """Yield the lines that describe all commands, with their options in the groups of their help."""
    import typer

    from specbench.cli import app

    root: Any = typer.main.get_command(app)
    for name, command in root.commands.items():
        context = command.make_context(
            name,
            [],
            parent=root.make_context("specbench", [], resilient_parsing=True),
            resilient_parsing=True,
        )
        usage = " ".join(command.collect_usage_pieces(context))
        yield from (f"## {name}", "", *_paragraphs(command.help or ""), f"`specbench {name} {usage}`", "")
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None:
                argument = parameter.param_type_name == "argument"
                heading = (
                    "Arguments" if argument else getattr(parameter, "rich_help_panel", None) or "Options"
                )
                groups.setdefault(heading, []).append(record)
        for heading, records in groups.items():
            yield from (f"**{heading}**", "", "| option | meaning |", "|---|---|")
            yield from (f"| {_cell(option, code=True)} | {_cell(meaning)} |" for option, meaning in records)
            yield ""


def _paragraphs(text: str) -> list[str]:
    return [line for part in text.split("\n\n") for line in (" ".join(part.replace("\b", "").split()), "")]


def _cell(text: str, *, code: bool = False) -> str:
    """Return a text as a cell of a table; with ``code`` in a fixed-width font that may break between words."""
    text = " ".join(text.split())
    if code:
        return f"<code>{escape(text).replace('|', '&#124;')}</code>"
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(
        piece.replace("|", "\\|") if piece.startswith("`") else re.sub(r"([*_\[\]|<])", r"\\\1", piece)
        for piece in pieces
    )
