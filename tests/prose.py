"""What specbench says in words, by where it says it: pages, docstrings, help and messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path

import click
import typer

from specbench.cli import app

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "specbench").rglob("*.py"))
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "prompts" / "README.md",
]


def without_code(page: str) -> str:
    """Return the prose of a Markdown page, with empty lines in place of code and tables."""
    page = re.sub(
        r"^( *)```.*?^\1```", lambda block: "\n" * block[0].count("\n"), page, flags=re.DOTALL | re.MULTILINE
    )
    page = re.sub(r"^(\|.*| {4}[^ \-*\d].*)$", "", page, flags=re.MULTILINE)
    page = re.sub(r"\]\([^)]*\)", "]", page)
    return without_quoted_code(page)


def without_quoted_code(text: str) -> str:
    """Put a word of its own in the place of every piece of code, so that no two are taken for a repetition."""
    number = count()
    return re.sub(r"(`+)[^`]+\1", lambda _: f"code{next(number)}", text)


def paragraphs(text: str, first_line: int = 1) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs and list items of a text, each in one line, with the number of its first line."""
    begun, lines = first_line, []
    for number, line in enumerate([*text.splitlines(), ""], first_line):
        if lines and (not line.strip() or re.match(r"\s*([-*]|\d+\.) |#", line)):
            yield begun, " ".join(lines)
            lines = []
        if line.strip():
            begun = begun if lines else number
            lines.append(re.sub(r"^\s*([-*]|\d+\.|#+) ", "", line).strip())


def of_pages() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for line, text in paragraphs(without_code(page.read_text(encoding="utf-8"))):
            yield f"{page.relative_to(ROOT)}:{line}", text


@cache
def tree(source: Path) -> ast.Module:
    return ast.parse(source.read_text(encoding="utf-8"))


def docstrings() -> Iterator[tuple[str, str]]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for source in SOURCES:
        for node in ast.walk(tree(source)):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                name = getattr(node, "name", "module")
                for _, paragraph in paragraphs(without_quoted_code(text)):
                    yield f"{source.relative_to(ROOT)}:{name}", paragraph


def messages() -> Iterator[tuple[str, str]]:
    """Yield the string constants of several words that are no docstrings: errors, notes, warnings, labels."""
    for source in SOURCES:
        inside = {
            id(node.value)
            for node in ast.walk(tree(source))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree(source)):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in inside else None
            if isinstance(text, str) and len(re.findall(r"[a-z]{2,}", text)) > 2:
                yield f"{source.relative_to(ROOT)}:{node.lineno}", text


def helps() -> Iterator[tuple[str, str]]:
    """Yield the help of every command and of each of its options."""

    def walk(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
        yield name, command.help or ""
        for parameter in command.params:
            yield f"{name} {parameter.opts[0]}", getattr(parameter, "help", None) or ""
        for child, each in getattr(command, "commands", {}).items():
            yield from walk(each, f"{name} {child}")

    return walk(typer.main.get_command(app), "specbench")
