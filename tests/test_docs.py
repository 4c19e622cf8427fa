"""Every command of README and tutorial runs, the README names every command, and links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from make import REFERENCES, reference

import specbench
from specbench.cli import app, run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README + TUTORIAL, flags=re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for block in BLOCKS
    for line in re.findall(r"(?:^|&& )specbench (.*)", block, flags=re.MULTILINE)
]


def names_of_commands() -> list[str]:
    return [str(command.name or command.callback.__name__) for command in app.registered_commands]


@pytest.mark.smoke
def test_the_readme_names_every_command():
    assert names_of_commands()
    for name in names_of_commands():
        assert f"specbench {name}" in README, f"the README does not show `specbench {name}`"


PAGES = sorted(
    page for folder in (".", "docs", "notes", "prompts", "results") for page in (ROOT / folder).glob("*.md")
)


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside code and tables, with their numbers."""
    code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.startswith("|"):
            yield number, line


def anchors(page: Path) -> set[str]:
    """Return what links can name after ``#``: the headings, in lower case, with hyphens for spaces."""
    headings = [line.lstrip("# ") for _, line in prose(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.smoke
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere_and_prose_fits_a_screen(page):
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link
    wide = [number for number, line in prose(page) if len(line) > 120]
    assert not wide, "lines of more than 120 characters"


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("zensical", "mkdocstrings"))), reason="needs the extra docs"
)
def test_the_site_builds_and_needs_nothing_from_elsewhere(tmp_path):
    """No link between pages is dead, every page is in the navigation, and no page asks another host for anything."""
    command = [sys.executable, str(ROOT / "docs" / "make.py"), str(tmp_path)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert child.returncode == 0, child.stderr + child.stdout
    site = tmp_path / "site" / "html"
    assert "new_tokens" in (site / "results-format.html").read_text(encoding="utf-8")
    names = (site / "api.html").read_text(encoding="utf-8")
    assert [name for name in specbench.__all__ if f".{name}" not in names] == ["__version__"]
    overview = (site / "llms.txt").read_text(encoding="utf-8")
    for page in (*(ROOT / "docs").glob("*.md"), ROOT / "CHANGELOG.md"):
        assert (site / page.name).is_file()
        assert f"({page.name}): " in overview, f"{page.name} is not in the navigation"
    for report in (ROOT / "results").glob("*/report.md"):
        assert (site / "results" / report.parent.name / "report.html").is_file()
    fetched = re.compile(r"<(?:script|img|iframe|link(?! rel=.canonical))[^>]*(?:src|href)=.?(?:https?:)?//")
    for html in site.rglob("*.html"):
        assert not fetched.search(html.read_text(encoding="utf-8")), html


@pytest.mark.parametrize("name", REFERENCES)
def test_generated_references_are_of_today(name):
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert reference(name) == page, "run `python docs/make.py references`"


def test_ci_runs_the_documented_test_command():
    command = next(line for line in CONTRIBUTING.splitlines() if "pip install" in line and "pytest" in line)
    script = re.sub(r" --(quiet|no-compile)", "", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    install, *checks, tests = command[command.index("pip install") :].split(" && ")
    assert len(checks) == 4
    for step in (install, " && ".join(checks), tests):
        assert step in script
    assert f"{install} && {tests}" in README


def test_no_address_is_named_that_the_project_does_not_have():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "urls" not in project
    assert "git clone" not in README


def small(arguments: list[str], out: Path) -> list[str] | None:
    """Return the command at a size that a test can afford; ``None`` if it needs the hub, a server or a person."""
    if arguments[0] in ("chat", "doctor", "serve", "tune") or "--server" in arguments:
        return None  # they run in tests of their own
    if any(word.count("/") == 1 and word[0].isupper() for word in arguments):
        return None
    arguments = [str(out) if word.rstrip("/").startswith("results") else word for word in arguments]
    if arguments[0] == "generate":
        return [*arguments, "-v", "--max-new-tokens", "16" if "--drafter" in arguments else "6"]
    if arguments[0] == "check":
        return [*arguments, "--limit", "1", "--max-new-tokens", "6"]
    if arguments[0] == "sweep":
        limits = shlex.split("--gamma 1,2 --limit 2 --max-new-tokens 6 --repeats 1")
        return [*arguments, *limits, *([] if "--out" in arguments else ["--out", str(out)])]
    return arguments


def fed(arguments: list[str], monkeypatch: Any) -> list[str]:
    """Return a command without its ``< FILE``, which becomes the standard input."""
    if "<" not in arguments:
        return arguments
    at = arguments.index("<")
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO((ROOT / arguments[at + 1]).read_bytes())))
    return [*arguments[:at], *arguments[at + 2 :]]


def runs_of_commands() -> list[Any]:
    """Return single commands, and as one test those that read what an earlier one has written. Of commands that differ
    in the file that they read, one runs.
    """
    unlike = {shlex.join(words).partition(" '<' ")[0]: words for words in COMMANDS}.values()
    kept = [arguments for arguments in unlike if small(arguments, Path("run")) is not None]
    alone = [each for each in kept if each[0] in ("generate", "check") and "--trace-file" not in each]
    together = [each for each in kept if each not in alone]
    return [
        *(pytest.param([each], id=shlex.join(each)) for each in alone),
        pytest.param(together, id="in order"),
    ]


@pytest.mark.real
@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("commands", runs_of_commands())
def test_the_commands_of_readme_and_tutorial_run(commands, tmp_path, monkeypatch, capsys):
    """Also: every drafter shown drafts something, and the target accepts some of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")  # --show-accepted asks for a terminal
    monkeypatch.setattr("specbench.bench.pairs.ENOUGH_S", 0.0)
    for arguments in commands:
        shortened = small(fed(arguments, monkeypatch), tmp_path / "run")
        assert shortened is not None
        code = run(shortened)
        captured = capsys.readouterr()
        assert code == 0, f"specbench {shlex.join(shortened)}: {captured.err}"
        assert captured.out or arguments[0] not in ("generate", "drafters", "trace")
        if arguments[0] == "generate" and "--drafter" in arguments:
            assert accepted(captured.out, captured.err) > 0, shlex.join(arguments)


def accepted(out: str, err: str) -> int:
    """Return how many drafts were accepted, from the summary or the object of ``--json``."""
    if (summary := re.search(r"(\d+) of \d+ draft tokens? accepted", err)) is not None:
        return int(summary[1])
    return int(json.loads(out)["accepted"])


@pytest.mark.real
@pytest.mark.usefixtures("small_pages")
def test_the_python_of_the_readme_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    code = code.replace("target, drafter)", "target, drafter, max_new_tokens=8)")
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102
    assert capsys.readouterr().out.strip()


@pytest.mark.smoke
def test_the_package_exports_what_it_says():
    for name in specbench.__all__:
        assert getattr(specbench, name) is not None
    with pytest.raises(AttributeError):
        specbench.nothing_of_this_name  # noqa: B018
    assert set(specbench.__all__) <= set(dir(specbench))
