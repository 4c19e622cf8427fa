"""The structure of the code and of its tests: imports go one way, only the command line prints, every test can fail."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "specbench"

FOLDERS = [
    "_version", "base", "specs", "options", "recipe", "rows", "config", "decoding", "policies", "kernels", "backends",
    "drafters", "models", "generate", "loaded", "generate_many", "results", "findings", "servers", "bench",
    "show", "check", "doctor", "export", "predict", "experiment", "started", "sweeps", "tune", "train", "serve",
    "cli", "__main__",
]  # fmt: skip
"""From the bottom up: modules import from the entries before their own, and from each other without a circle."""

HEAVY = {
    "torch", "transformers", "pandas", "matplotlib", "scipy", "numpy", "accelerate", "gguf", "huggingface_hub",
}  # fmt: skip


def files() -> dict[str, Path]:
    """Return the modules of the package by name; ``""`` is the package itself."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def modules() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files().items()}


def statements(node: ast.AST, *, nested: bool, checked: bool = False) -> Iterator[ast.AST]:
    """Yield all below ``node``: with ``nested`` also inside functions, with ``checked`` also for type checkers."""
    for child in ast.iter_child_nodes(node):
        if not checked and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if not nested and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield child
        yield from statements(child, nested=nested, checked=checked)


@cache
def imports(name: str, *, nested: bool = True, checked: bool = False) -> frozenset[str]:
    """Return what a module imports: modules of the package as ``specbench.x``, everything else by its first name."""
    found = set()
    for statement in statements(modules()[name], nested=nested, checked=checked):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"{name}: a relative import"
            for alias in statement.names:
                whole = f"{statement.module}.{alias.name}"
                found.add(whole if whole.removeprefix("specbench.") in modules() else str(statement.module))
    return frozenset(module if module.startswith("specbench") else module.split(".")[0] for module in found)


def own(imported: frozenset[str]) -> set[str]:
    return {
        module.removeprefix("specbench").removeprefix(".")
        for module in imported
        if module.startswith("specbench")
    }


def closure(name: str, *, nested: bool) -> set[str]:
    """Return every module outside the package that a module imports, directly or indirectly."""
    seen, waiting, outside = set(), [name], set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        imported = imports(current, nested=nested)
        waiting += own(imported)
        outside |= {module for module in imported if not module.startswith("specbench")}
    return outside


def rank(name: str) -> int:
    return next(i for i, row in enumerate(FOLDERS) if name.split(".")[0] in row.split(","))


def test_every_module_has_one_place():
    places = ",".join(FOLDERS).split(",")
    assert len(places) == len(set(places))
    assert {name.split(".")[0] for name in modules()} - {""} == set(places), (
        "give the new folder a row in FOLDERS"
    )


@pytest.mark.smoke
def test_imports_go_one_way():
    """Including imports for type checkers: they are dependencies too."""
    for name in sorted(modules()):
        if name == "":
            continue  # the package exports names of all layers, imported on first use
        for imported in sorted(own(imports(name, checked=True))):
            assert imported, f"{name} imports from the package itself; import from the module that defines it"
            same = name.split(".")[0] == imported.split(".")[0]
            assert same or rank(imported) < rank(name), f"{name} imports {imported}, which is not below it"


def test_kernels_are_used_by_their_public_names_alone():
    """docs/kernels.md lists them."""
    for name in modules():
        if name.split(".")[0] != "kernels":
            used = {each for each in own(imports(name, checked=True)) if each.split(".")[0] == "kernels"}
            assert used <= {"kernels", "kernels.weights"}, (
                f"{name} imports what specbench/kernels does not export"
            )


def test_no_circles():
    left = {name: own(imports(name, checked=True)) - {""} for name in modules() if name}
    while free := {name for name, needed in left.items() if not needed & left.keys()}:
        left = {name: needed for name, needed in left.items() if name not in free}
    assert not left, "these import each other in a circle, or something in one"


def test_the_package_itself_imports_nothing():
    assert own(imports("")) <= {"_version"}
    assert not closure("", nested=True) & HEAVY


@pytest.mark.parametrize("name", [name for name in files() if name.split(".")[0] in ("results", "show")])
def test_a_table_of_old_results_needs_no_torch(name):
    assert not closure(name, nested=True) & {"torch", "transformers"}


def test_only_the_command_line_prints():
    for name in sorted(modules()):
        if name == "cli" or name.startswith("cli."):
            continue
        for statement in statements(modules()[name], nested=True):
            if isinstance(statement, ast.Call):
                called = ast.unparse(statement.func)
                assert called not in {"print", "input", "pprint", "breakpoint", "typer.echo"}, (
                    f"{name} prints"
                )
                if called.split(".")[-1] == "Console":
                    given = {keyword.arg for keyword in statement.keywords}
                    assert "file" in given, f"{name} opens a console on standard output"
            if isinstance(statement, ast.Attribute):
                used = ast.unparse(statement)
                assert used not in {"sys.stdout", "sys.stderr", "sys.__stdout__"}, f"{name} uses {used}"


def test_importing_a_module_does_nothing():
    """No bare calls at the top level: nothing is registered, configured or read."""
    for name, tree in modules().items():
        for statement in tree.body:
            standing_alone = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            if standing_alone and not name.startswith("cli"):
                raise AssertionError(f"{name} line {statement.lineno}: {ast.unparse(statement)}")


NAMES = {
    "Asked", "Asking", "Fall", "Seats", "Shelf", "Stand", "Told", "at_once", "lonely", "so_many", "twin", "whoever",
}  # fmt: skip
"""Names that nobody outside the project would understand; docs/glossary.md has the field's."""


@pytest.mark.smoke
def test_names_are_those_of_the_field():
    for name, tree in modules().items():
        defined = {
            getattr(node, "name", getattr(node, "id", getattr(node, "arg", None))) for node in ast.walk(tree)
        }
        assert not defined & NAMES, name


FOREIGN = re.compile(
    "|".join(
        (
            r"(?<![\w.~-])/wo" + r"rk(?:/|\b)",
            "SP" + r"EC\.md",
            "DES" + r"IGN\.md",
            "STY" + r"LE\.md",
            "BRI" + r"EF\.md",
            r"\.\./sha" + "red",
        )
    )
)
"""Paths of the machine that a file was written on, and documents outside the project."""

TEXT = {
    "", ".py", ".md", ".toml", ".txt", ".jsonl", ".json", ".csv", ".yml", ".yaml", ".sh", ".cfg", ".html", ".svg",
}  # fmt: skip


def project_files() -> Iterator[Path]:
    for top in sorted(ROOT.iterdir()):
        if top.name in {".git", ".venv", "venv", "build", "dist"} or top.name.endswith(
            (".egg-info", "_cache")
        ):
            continue
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            hidden = "__pycache__" in path.parts or ".hypothesis" in path.parts
            if path.is_file() and not hidden and path.suffix in TEXT:
                yield path


def test_nothing_tells_where_it_was_written():
    found = []
    for path in project_files():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if match := FOREIGN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert not found


def test_every_snapshot_has_its_test():
    for file in sorted((ROOT / "tests" / "snapshots").rglob("*.txt")):
        text = (ROOT / "tests" / f"test_{file.parent.name}.py").read_text(encoding="utf-8")
        assert f"def test_{file.stem.partition('-')[0]}(" in text, file
