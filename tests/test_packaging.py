"""What is handed out: a source distribution that can be tested, and a wheel made of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "docs", "prompts", "specbench", "tests")
FILES = (".ci/run", "CHANGELOG.md", "LICENSE", "README.md", "constraints.txt", "pyproject.toml")


def build(kind: str, tree: Path, out: Path) -> Path:
    """What the build backend makes of a tree, without pip and its network."""
    program = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(out)]
    child = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr
    return out / child.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution."""
    folder = tmp_path_factory.mktemp("packaging")
    left_out = shutil.ignore_patterns(
        ".git", ".venv", ".*_cache", ".hypothesis", "*.egg-info", "__pycache__", "build", "dist", "*.jsonl"
    )
    shutil.copytree(ROOT, folder / "tree", ignore=left_out)
    shutil.copytree(ROOT / "prompts", folder / "tree" / "prompts", dirs_exist_ok=True)
    with tarfile.open(build("sdist", folder / "tree", folder)) as archive:
        archive.extractall(folder / "source", filter="data")
    (unpacked,) = (folder / "source").iterdir()
    return unpacked


def files_under(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_source_distribution_holds_what_its_tests_need(source: Path) -> None:
    for folder in FOLDERS:
        assert files_under(ROOT / folder) == files_under(source / folder)
    for file in FILES:
        assert (source / file).read_bytes() == (ROOT / file).read_bytes()
    for link in re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert (source / link).exists(), link


def test_a_wheel_of_it_holds_the_package_and_nothing_else(source: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build("wheel", source, tmp_path)) as wheel:
        information = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        folder = information.partition("/")[0]
        metadata = message_from_bytes(wheel.read(information))
        commands = wheel.read(f"{folder}/entry_points.txt").decode()
        held = {name for name in wheel.namelist() if not name.startswith(f"{folder}/")}
        assert f"{folder}/licenses/LICENSE" in wheel.namelist()
    prompts = {f"specbench/_prompts/{name}" for name in files_under(ROOT / "prompts")}
    assert held == {f"specbench/{name}" for name in files_under(ROOT / "specbench")} | prompts
    assert len(prompts) > 9
    assert "specbench = specbench.cli:main" in commands
    assert metadata["Name"] == "specbench-llm"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Summary"]
    assert not [name for name in metadata.get_all("Classifier") if name.startswith("License")]
