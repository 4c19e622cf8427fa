"""Build the docs as a site, or renew what is generated in their pages.

    python docs/make.py               # the site: open site/html/index.html
    python docs/make.py references    # cli.md, api.md, metrics.md: after a change of options, exported names or figures

Zensical reads a folder of Markdown, which is written here: README, changelog and reports of measured runs become pages
too, links between the repository's files become links between pages, and references are filled in. The site works
without a server. ``llms.txt`` lists its pages, each of which is there as Markdown too.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html import escape
from inspect import getdoc
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from textwrap import wrap
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from record_tables import with_tables  # noqa: E402

CONFIG = "zensical.toml"
INSIDE = ("*.md", "*.css", "*.js", "images/*")
OUTSIDE = (
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "notes/*.md",
    "prompts/README.md",
    "examples/*",
    "results/**/*.md",
    "results/**/*.png",
)
GENERATED = re.compile(r"(?<=<!-- generated -->\n).*(?=<!-- end -->)", re.DOTALL)
"""What ``references`` renews in a page."""

NO_SEARCH = "---\nsearch:\n  exclude: true\n---\n\n"
"""In front of reports, whose many tables would be found first."""

SHIM = "https://unpkg.com/iframe-worker/shim"
"""What pages would fetch for their search; ``offline.js`` takes its place."""


def build(root: Path) -> None:
    """Write the pages into ``site/pages`` of a folder, and the site into its ``site/html``."""
    config = tomllib.loads((ROOT / CONFIG).read_text(encoding="utf-8"))["project"]
    pages, html = root / config["docs_dir"], root / config["site_dir"]
    shutil.rmtree(pages, ignore_errors=True)
    for folder, patterns in ((ROOT, OUTSIDE), (ROOT / "docs", INSIDE)):
        for path in (path for each in patterns for path in folder.glob(each) if path.is_file()):
            page = pages / page_of(path.relative_to(ROOT).as_posix())
            page.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                page.write_text(page_text(path), encoding="utf-8")
            else:
                shutil.copy(path, page)
    if root != ROOT:
        shutil.copy(ROOT / CONFIG, root)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    subprocess.run(command, cwd=root, check=True)
    for page in pages.rglob("*.md"):
        shutil.copy(page, html / page.relative_to(pages))
    for page in html.rglob("*.html"):
        local = relpath(html / "offline.js", page.parent)
        page.write_text(page.read_text(encoding="utf-8").replace(SHIM, local), encoding="utf-8")
    (html / "llms.txt").write_text(overview(config, pages), encoding="utf-8")


def page_of(name: str) -> str:
    """Return the name of a file's page: pages of ``docs/`` are on top, and a README is the first page of its folder."""
    return re.sub(r"(^|/)README\.md$", r"\1index.md", name.removeprefix("docs/"))


def page_text(path: Path) -> str:
    """Return a page with what is generated, and with links to pages in place of links to files."""
    name = path.relative_to(ROOT).as_posix()
    here = PurePosixPath(page_of(name)).parent

    def moved(link: re.Match[str]) -> str:
        target = page_of(normpath((PurePosixPath(name).parent / link[1]).as_posix()))
        return f"]({relpath(target, here)}"

    text = re.sub(r"\]\((?!https?:|#)([^)#]+)", moved, path.read_text(encoding="utf-8"))
    if name.startswith("results/") and path.name != "README.md":
        text = NO_SEARCH + text.replace("<details>", "<details markdown>")
    return FILLED[path.name](text) if path.name in FILLED else text


def overview(config: dict[str, Any], pages: Path) -> str:
    """Return ``llms.txt``: every page of the navigation with its title and the first sentence of its text."""
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for section in config["nav"]:
        for heading, names in section.items():
            lines += ["", f"## {heading}", ""]
            for name in names:
                text = (pages / name).read_text(encoding="utf-8")
                title = text.partition("\n")[0].removeprefix("# ")
                plain = re.sub(r"```.*?```|\*\*|\[(.*?)\]\([^)]*\)", r"\1", text, flags=re.DOTALL)
                said = next(part for part in plain.split("\n\n")[1:] if re.match(r"[\w`]", part))
                first = re.split(r"(?<=[.?!])\s", " ".join(said.split()))[0]
                lines.append(f"- [{title}]({name}): {first}")
    return "\n".join([*lines, ""])


def _with_names(markdown: str) -> str:
    blocks = "".join(f"\n::: specbench.{name}\n" for name in exported())
    return GENERATED.sub(f"{blocks}\n", markdown)


FILLED = {"results-format.md": with_tables, "api.md": _with_names}


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


def name_lines() -> Iterator[str]:
    """Yield a table of the exported names with the first paragraphs of their docstrings."""
    import specbench

    yield from ("| name | what it is |", "|---|---|")
    for path in exported():
        name = path.rpartition(".")[2]
        described = (getdoc(getattr(specbench, name)) or "").partition("\n\n")[0]
        yield f"| `{name}` | {_cell(described.replace('``', '`'))} |"


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


def metric_lines() -> Iterator[str]:
    """Yield a table of all figures."""
    from specbench.results.metrics import METRICS

    yield from ("| name | heading | what it is | interval |", "|---|---|---|---|")
    for name, kind in METRICS.items():
        yield f"| `{name}` | {_cell(kind.heading)} | {_cell(kind.about)} | {'yes' if kind.interval else ''} |"


REFERENCES = {"cli.md": command_lines, "api.md": name_lines, "metrics.md": metric_lines}


def reference(name: str) -> str:
    """Return a page with a reference as it is today."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    lines = "\n".join(REFERENCES[name]()).strip()
    return GENERATED.sub(lambda _: f"\n{lines}\n\n", text)


def _paragraphs(text: str) -> list[str]:
    return [line for part in text.split("\n\n") for line in (*wrap(part.replace("\b", ""), 120), "")]


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


def main() -> None:
    if sys.argv[1:] == ["references"]:
        for name in REFERENCES:
            (ROOT / "docs" / name).write_text(reference(name), encoding="utf-8")
    else:
        build(Path(sys.argv[1]).resolve() if sys.argv[1:] else ROOT)


if __name__ == "__main__":
    main()
