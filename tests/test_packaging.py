"""What is handed out: a source distribution that can be tested, and a wheel made of it that runs elsewhere."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from stored_runs import DRAFTERS, write_run
from tiny import save_tiny

from specbench.bench.prompts import load_prompts

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "docs", "examples", "notes", "prompts", "specbench", "tests")
FILES = (
    ".ci/run", "CHANGELOG.md", "LICENSE", "README.md", "constraints.txt", "hatch_build.py", "zensical.toml",
    "pyproject.toml",
)  # fmt: skip
LIBRARY = "specbench/kernels/_native.so"


def output(command: list[str], cwd: Path, **more: str) -> str:
    child = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False, env=os.environ | more
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def build(kind: str, tree: Path, out: Path, **more: str) -> Path:
    """What the build backend makes of a tree, without pip and its network."""
    program = f"import sys; from hatchling import build; print(build.build_{kind}(sys.argv[1]))"
    return out / output([sys.executable, "-c", program, str(out)], tree, **more).splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The unpacked source distribution."""
    folder = tmp_path_factory.mktemp("packaging")
    left_out = shutil.ignore_patterns(
        ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "dist", "site", "*.jsonl"
    )
    shutil.copytree(ROOT, folder / "tree", ignore=left_out)
    shutil.copytree(ROOT / "prompts", folder / "tree" / "prompts", dirs_exist_ok=True)
    with tarfile.open(build("sdist", folder / "tree", folder)) as archive:
        archive.extractall(folder / "source", filter="data")
    (unpacked,) = (folder / "source").iterdir()
    return unpacked


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["no compiler", "compiled"],
)
def wheel(source, request, tmp_path_factory) -> Path:
    more = {} if request.param else {"CC": "false"}
    return build("wheel", source, tmp_path_factory.mktemp("wheel"), **more)


@pytest.fixture(scope="module")
def installed(wheel) -> Path:
    """A folder with the wheel installed in it."""
    folder = wheel.parent / "installed"
    options = shlex.split("--quiet --no-compile --no-deps --no-index --disable-pip-version-check --target")
    output([sys.executable, "-m", "pip", "install", *options, str(folder), str(wheel)], wheel.parent)
    return folder


def files_under(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != Path(LIBRARY).name
    }


def test_the_source_distribution_holds_what_its_tests_need(source):
    for folder in FOLDERS:
        assert files_under(ROOT / folder) == files_under(source / folder)
    for file in FILES:
        assert (source / file).read_bytes() == (ROOT / file).read_bytes()
    for link in re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert (source / link).exists(), link


def test_a_wheel_of_it_holds_the_package_and_nothing_else(wheel, request):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        information = next(name for name in names if name.endswith(".dist-info/METADATA"))
        folder = information.partition("/")[0]
        metadata = message_from_bytes(archive.read(information))
        commands = archive.read(f"{folder}/entry_points.txt").decode()
        held = {name: archive.read(name) for name in names if not name.startswith(f"{folder}/")}
    assert f"{folder}/licenses/LICENSE" in names
    prompts = {f"specbench/_prompts/{name}" for name in files_under(ROOT / "prompts")}
    compiled = "no compiler" not in request.node.name
    builds = compiled and sys.platform == "linux" and platform.machine() == "x86_64" and shutil.which("cc")
    assert (LIBRARY in held) == bool(builds)
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl" if builds else "-py3-none-any.whl")
    modules = {f"specbench/{name}" for name in files_under(ROOT / "specbench")}
    assert held.keys() - {LIBRARY} == modules | prompts
    assert len(prompts) > 9
    for name in prompts:
        assert held[name] == (ROOT / "prompts" / name.removeprefix("specbench/_prompts/")).read_bytes()
    assert "specbench = specbench.__main__:main" in commands
    assert metadata["Name"] == "specbench-llm"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Summary"]
    assert not [name for name in metadata.get_all("Classifier") if name.startswith("License")]


LIST_PROMPTS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import specbench, specbench.bench.prompts as prompts
assert specbench.__file__.startswith(sys.argv[1]), specbench.__file__
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
print(json.dumps([prompt.id for prompt in prompts.load_prompts(["all"])]))
"""


def test_the_prompts_are_found_in_a_checkout_and_in_a_wheel_zipped_and_installed(wheel, installed, tmp_path):
    expected = json.dumps([prompt.id for prompt in load_prompts(["all"])])
    for folder in (ROOT, wheel, installed):
        assert output([sys.executable, "-c", LIST_PROMPTS, str(folder)], tmp_path) == f"{expected}\n"


RUN = """
import json, sys
import specbench
from specbench.cli import run
print(specbench.__file__)
sys.exit(any(run(words) for words in json.loads(sys.argv[1])))
"""


def test_an_installed_wheel_reports_and_generates_from_another_folder(installed, tmp_path, request):
    """It generates where the wheel was compiled: the rest of it is files, which another test compares."""
    run = write_run(tmp_path / "run", drafters=DRAFTERS[:1], gammas=(1, 2), tokens=8, prompts_per_category=1)
    script = [sys.executable, str(installed / "bin" / "specbench"), "--version"]
    assert output(script, tmp_path, PYTHONPATH=str(installed)).startswith("specbench ")
    commands = [["report", str(run)]]
    if "no compiler" not in request.node.name:
        words = ["--target", str(save_tiny(tmp_path / "model")), "-n", "8", "--ignore-eos", "--json"]
        commands.append(["generate", "the thing", *words, "--drafter", "lookup"])
    told = output([sys.executable, "-c", RUN, json.dumps(commands)], tmp_path, PYTHONPATH=str(installed))
    file, *written = told.splitlines()
    assert file.startswith(str(installed))
    if len(commands) > 1:
        assert len(json.loads(written.pop())["token_ids"]) == 8
    pages = [Path(line) for line in written]
    page = next(tmp_path / path for path in pages if path.suffix == ".html").read_text(encoding="utf-8")
    assert all(part in page for part in ("<style", "data:image/svg+xml"))
