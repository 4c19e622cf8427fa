"""The picture of the architecture page: which folder of the package imports from which, drawn from the code."""

from __future__ import annotations

import ast
import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "specbench"
CELL, LEFT, TOP = 24, 250, 190


def layers() -> list[str]:
    """Return the folders and modules of the package from the bottom up, as ``tests/test_layout.py`` has them."""
    for node in ast.parse((ROOT / "tests" / "test_layout.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FOLDERS":
            rows: list[str] = ast.literal_eval(node.value)
            return [name for row in rows for name in row.split(",") if not name.startswith("_")]
    raise LookupError("tests/test_layout.py has no FOLDERS")


def imports(names: list[str]) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
    """Return how many modules of a folder import from another, and the lines of each folder."""
    found: dict[tuple[str, str], int] = {}
    lines = dict.fromkeys(names, 0)
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if own not in lines:
            continue
        text = path.read_text(encoding="utf-8")
        lines[own] += text.count("\n")
        others = set(re.findall(r"^\s*from specbench(?:\.| import )(\w+)", text, re.MULTILINE))
        for other in others & lines.keys() - {own}:
            found[own, other] = found.get((own, other), 0) + 1
    return found, lines


def draw() -> str:
    """Return the picture as SVG: a row's folder imports from a column's; the darker, the more of its modules do."""
    names = layers()
    found, lines = imports(names)
    size = len(names) * CELL
    most = max(found.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + size + 10} {TOP + size + 10}" role="img"'
        ' width="100%" font-family="sans-serif" font-size="13" fill="currentColor">',
        "<title>Which folder imports from which</title>",
    ]
    for i, name in enumerate(names):
        y, x = TOP + i * CELL, LEFT + i * CELL
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end">{escape(name)} · {lines[name]:,} lines</text>'
        )
        parts.append(f'<text transform="translate({x + 17} {TOP - 8}) rotate(-60)">{escape(name)}</text>')
        parts.append(
            f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="currentColor" opacity="0.15"/>'
        )
        for j, other in enumerate(names):
            if (count := found.get((name, other), 0)) > 0:
                label = f"{name} imports from {other} in {count} module{'s' * (count > 1)}"
                parts.append(
                    f'<rect x="{LEFT + j * CELL}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="#4051b5"'
                    f' opacity="{0.25 + 0.75 * count / most:.2f}"><title>{escape(label)}</title></rect>'
                )
    return "\n".join([*parts, "</svg>"])
