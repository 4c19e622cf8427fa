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
    "_version", "base", "specs", "options", "recipe", "rows", "decoding", "policies", "kernels", "backends",
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
        each.removeprefix("specbench").removeprefix(".") for each in imported if each.startswith("specbench")
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


def folder_of(name: str) -> str:
    return name.split(".")[0]


@pytest.mark.smoke
def test_imports_go_one_way():
    """Including imports for type checkers: they are dependencies too. Of ``kernels`` others import what it exports."""
    places = [row.split(",") for row in FOLDERS]
    rank = {name: number for number, row in enumerate(places) for name in row}
    assert len(rank) == sum(map(len, places))
    assert {folder_of(name) for name in modules()} - {""} == set(rank), "give the new folder a row in FOLDERS"
    left = {name: own(imports(name, checked=True)) for name in modules() if name}
    for name, imported in left.items():  # the package exports names of all layers, imported on first use
        assert "" not in imported, (
            f"{name} imports from the package itself; import from the module that defines it"
        )
        others = {other for other in imported if folder_of(other) != folder_of(name)}
        above = {other for other in others if rank[folder_of(other)] >= rank[folder_of(name)]}
        assert not above, f"{name} imports {above}, which is not below it"
        inner = {other for other in others if folder_of(other) == "kernels"} - {"kernels", "kernels.weights"}
        assert not inner, f"{name} imports what specbench/kernels does not export"
    while free := {name for name, needed in left.items() if not needed & left.keys()}:
        left = {name: needed for name, needed in left.items() if name not in free}
    assert not left, "these import each other in a circle, or something in one"


def test_the_package_itself_imports_nothing_and_tables_of_old_results_no_torch():
    assert own(imports("")) <= {"_version"}
    assert not closure("", nested=True) & HEAVY
    for name in modules():
        if folder_of(name) in ("results", "show"):
            assert not closure(name, nested=True) & {"torch", "transformers"}, name


def test_only_the_command_line_prints():
    for name in sorted(modules()):
        if name == "cli" or name.startswith("cli."):
            continue
        for statement in statements(modules()[name], nested=True):
            if isinstance(statement, ast.Call):
                called = ast.unparse(statement.func)
                assert called not in ("print", "input", "pprint", "breakpoint", "typer.echo"), (
                    f"{name} prints"
                )
                if called.split(".")[-1] == "Console":
                    given = {keyword.arg for keyword in statement.keywords}
                    assert "file" in given, f"{name} opens a console on standard output"
            if getattr(statement, "attr", None) in ("stdout", "stderr", "__stdout__"):
                assert ast.unparse(statement.value) != "sys", f"{name} uses sys.{statement.attr}"


def test_importing_a_module_does_nothing():
    """No bare calls at the top level: nothing is registered, configured or read."""
    for name, tree in modules().items():
        for statement in tree.body:
            standing_alone = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            if standing_alone and not name.startswith("cli"):
                raise AssertionError(f"{name} line {statement.lineno}: {ast.unparse(statement)}")


FOREIGN = re.compile(r"(?<![\w.~-])/[w]ork(?:/|\b)|(?:SPEC|DESIGN|STYLE|BRIEF)[.]md|\.\./[s]hared")
"""Paths of the machine that a file was written on, and documents outside the project."""

LEFT_OUT = re.compile(r"\.git|\.?venv|build|dist|site|.*\.egg-info|.*_cache|__pycache__|\.hypothesis")
TEXTS = (
    "", ".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".csv", ".yml", ".yaml", ".sh", ".html", ".svg",
)  # fmt: skip


def text_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not LEFT_OUT.fullmatch(path.name):
            yield from text_files(path)
        elif path.suffix in TEXTS and not LEFT_OUT.fullmatch(path.name):
            yield path


def test_nothing_tells_where_it_was_written():
    for path in text_files(ROOT):
        found = FOREIGN.search(path.read_text(encoding="utf-8", errors="replace"))
        assert found is None, f"{path.relative_to(ROOT)}: {found[0]}"


def test_every_snapshot_has_its_test():
    for file in sorted((ROOT / "tests" / "snapshots").rglob("*.txt")):
        text = (ROOT / "tests" / f"test_{file.parent.name}.py").read_text(encoding="utf-8")
        assert f"def test_{file.stem.partition('-')[0]}(" in text, file
