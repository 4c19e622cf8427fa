"""The outputs that README and docs show, from real runs.

    python benchmarks/recordings.py                                 # all, in some ten minutes
    python benchmarks/recordings.py debug tune                      # terminals drawn as docs/images/NAME.svg
    python benchmarks/recordings.py report-time                     # figures with numbers, docs/images/NAME.png
    python benchmarks/recordings.py README.md docs/tutorial.md      # the outputs in blocks of ```console
    python benchmarks/recordings.py examples/charts.ipynb           # the outputs and charts of the notebook

The commands of a page run one after the other in one folder. ``tests/test_recordings.py`` compares what is shown with
today's output.
"""

from __future__ import annotations

import ast
import base64
import fcntl
import html
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
from contextlib import chdir, redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "images"
COLUMNS = 92
RECORDED = {
    "debug": "specbench generate --drafter self:int8 --debug --max-new-tokens 9 'Why is the sky blue?'",
    "tune": "specbench tune",
}
PARTS = {"debug": ("prefill", "end"), "tune": (".* over plain decoding", "warning|info|Results")}
"""Patterns of the first line that is drawn, and of the line after the last one."""

PAGES = ("README.md", "docs/deploy.md", "docs/tutorial.md")
NOTEBOOK = "examples/charts.ipynb"

REPORT = ROOT / "results" / "qwen2.5-coder-int4"
MARKED = {
    "report-speedup": ("speedup", [(0.487, 0.36), (0.335, 0.31), (0.79, 0.235), (0.19, 0.655), (0.925, 0.4)]),
    "report-positions": ("positions", [(0.255, 0.165), (0.135, 0.32), (0.86, 0.52), (0.91, 0.155)]),
    "report-time": ("time", [(0.18, 0.485), (0.45, 0.485), (0.11, 0.37), (0.925, 0.35)]),
}
"""Figures of a stored run that a page explains, with the places of its numbers, as shares of width and height."""


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows at the end, with their colors; erased lines are gone."""
    lines, row = [""], 0
    for piece in re.split(r"(\r?\n|\r|\x1b\[\d*[A-HJKlh]|\x1b\[\?\d+[lh])", written):
        if piece.endswith("\n"):
            row += 1
            if row == len(lines):
                lines.append("")
        elif piece.endswith("A") and piece.startswith("\x1b["):
            row = max(0, row - int(piece[2:-1] or 1))
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif not piece.startswith("\r") and not re.fullmatch(r"\x1b\[\??\d*[A-HJKlh]", piece):
            lines[row] += piece
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def run_in_terminal(command: str, folder: Path) -> str:
    """Run a command in a terminal of its own; return what it wrote there."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    arguments = [sys.executable, "-m", "specbench", *shlex.split(command)[1:]]
    child = subprocess.Popen(
        arguments,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=its,
        stderr=its,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"},
    )
    os.close(its)
    written = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the terminal is closed when the command ends
            break
        if not piece:
            break
        written += piece
    if child.wait() != 0:
        raise SystemExit(f"{command}: {written.decode(errors='replace')[-2000:]}")
    return written.decode(errors="replace")


def draw(command: str, lines: list[str]) -> str:
    """Return the SVG of a terminal with a command and its output."""
    console = Console(file=StringIO(), record=True, width=COLUMNS, force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    for line in lines:
        console.print(Text.from_ansi(line))
    picture = console.export_svg(title="", theme=MONOKAI, unique_id=f"specbench-{shlex.split(command)[1]}")
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # fonts from elsewhere
    label = html.escape(f"A terminal: {command}", quote=True)
    return picture.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def shown(picture: str) -> list[str]:
    """Return the lines of text that a recording shows, the command first."""
    rows: dict[float, list[tuple[float, float, str]]] = {}
    texts = r'<text class="[^"]*" x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)"[^>]*>([^<]*)</text>'
    for x, y, length, text in re.findall(texts, picture):
        plain = html.unescape(text).replace("\xa0", " ")
        rows.setdefault(float(y), []).append((float(x), float(length) / len(plain), plain))
    lines = []
    for _, row in sorted(rows.items()):
        line = ""
        for x, width, text in sorted(row):
            line = line.ljust(round(x / width)) + text
        lines.append(line.rstrip())
    return lines


BLOCK = re.compile(r"(?:^<!-- the first (\d+) lines -->\n)?^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRESS = re.compile(r"^.* \.\.\. (\d+%, )?\d+ (s|min)\b.*\n", re.MULTILINE)
"""Lines that a terminal replaces by a bar."""


def commands_of(block: str) -> list[tuple[str, str]]:
    """Return the commands in a block of ``console``, with the outputs that are shown."""
    return re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE)


def consoles(page: str) -> list[tuple[str, str]]:
    """Return all commands and outputs that a page shows."""
    return [each for found in BLOCK.finditer(page) for each in commands_of(found[2])]


def work_in(folder: Path) -> None:
    """Let a folder have the stored runs that commands of pages name."""
    (folder / "results").symlink_to(ROOT / "results")


def run_piped(command: str, folder: Path) -> str:
    """Run a command without a terminal; return its output and then its errors and notes."""
    arguments = [sys.executable, "-m", "specbench", *shlex.split(command)[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(COLUMNS)}
    child = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, env=environment, check=True)
    texts = child.stdout, PROGRESS.sub("", child.stderr)
    lines = "\n".join(text.strip("\n") for text in texts if text.strip()).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def fill(path: Path) -> None:
    """Run the commands of a page, and write their outputs into it."""
    page = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        work_in(Path(folder))

        def filled(found: re.Match[str]) -> str:
            text = ""
            for command, _ in commands_of(found[2]):
                lines = run_piped(command, Path(folder)).splitlines()
                if found[1] and len(lines) > int(found[1]):
                    lines = [*lines[: int(found[1])], "..."]
                text += "\n".join([f"$ {command}", *lines, ""])
            return found[0].replace(found[2], text)

        page = BLOCK.sub(filled, page)
    path.write_text(page, encoding="utf-8")


def mark(name: str) -> None:
    """Draw a figure of a report, and numbers on it."""
    import matplotlib.pyplot as plt

    from specbench.results.results import load_results
    from specbench.show.plots import draw_figures, figure_bytes

    kind, places = MARKED[name]
    drawn = draw_figures(load_results(REPORT), [kind])[0][kind]
    picture = plt.imread(BytesIO(figure_bytes(drawn, "png")))
    height, width = picture.shape[:2]
    figure = plt.figure(figsize=(width / 100, height / 100), dpi=100)
    figure.figimage(picture)
    circle = {"boxstyle": "circle", "facecolor": "#222222", "edgecolor": "white"}
    style: dict[str, Any] = {"color": "white", "size": 14, "weight": "bold", "ha": "center", "va": "center"}
    for number, (x, y) in enumerate(places, 1):
        figure.text(x, 1 - y, str(number), bbox=circle, **style)
    figure.savefig(FOLDER / f"{name}.png", pil_kwargs={"optimize": True})


def run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell of a notebook; return its outputs: what it prints, its last value, and its charts."""
    import matplotlib.pyplot as plt

    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, outputs = StringIO(), list[dict[str, Any]]()
    with redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last is not None else None
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(True)})
    if value is not None:
        data = {"text/plain": str(value).splitlines(True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(True)
        outputs.append(
            {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data}
        )
    for number in plt.get_fignums():
        picture = BytesIO()
        plt.figure(number).savefig(picture, dpi=80)
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
        outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
    plt.close("all")
    return outputs


def run_notebook(path: Path) -> dict[str, Any]:
    """Return a notebook with the outputs of its cells."""
    import matplotlib

    matplotlib.use("Agg")
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    with chdir(path.parent):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell["outputs"] = run_cell("".join(cell["source"]), names)
    return notebook


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or [*RECORDED, *MARKED, *PAGES, NOTEBOOK]:
        if name in MARKED:
            mark(name)
            continue
        if name.endswith(".ipynb"):
            notebook = json.dumps(run_notebook(ROOT / name), indent=1, ensure_ascii=False)
            (ROOT / name).write_text(f"{notebook}\n", encoding="utf-8")
            continue
        if name.endswith(".md"):
            fill(ROOT / name)
            continue
        command = RECORDED[name]
        with tempfile.TemporaryDirectory() as folder:
            lines = screen(run_in_terminal(command, Path(folder)))
        if name in PARTS:
            plain = [Text.from_ansi(line).plain for line in lines]
            start, after = PARTS[name]
            first = next(i for i, line in enumerate(plain) if re.match(start, line))
            lines = lines[first : next(i for i in range(first, len(lines)) if re.match(after, plain[i]))]
        (FOLDER / f"{name}.svg").write_text(draw(command, lines), encoding="utf-8")
        print("\n".join(shown((FOLDER / f"{name}.svg").read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
