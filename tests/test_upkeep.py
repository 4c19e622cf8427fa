"""Files that the code host and other tools read: they must parse, and say the same as the package."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from specbench._version import __version__

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize(
    "path",
    [*sorted((ROOT / ".github").rglob("*.yml")), ROOT / ".pre-commit-config.yaml"],
    ids=lambda path: path.name,
)
def test_it_is_yaml(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_actions_are_pinned_to_commits():
    uses = [line for path in WORKFLOWS for line in path.read_text().splitlines() if "uses:" in line]
    assert len(uses) > 5
    assert not [line for line in uses if not re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d", line)]


def test_workflows_have_no_permissions_but_those_of_their_jobs():
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {}
        assert all("permissions" in job and "timeout-minutes" in job for job in workflow["jobs"].values())


def test_each_python_of_the_classifiers_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = {name.rpartition(" ")[2] for name in project["classifiers"] if re.search(r":: 3\.\d+$", name)}
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    assert claimed == {row["python"] for row in jobs["tests"]["strategy"]["matrix"]["include"]}
    lowest = jobs["versions"]["strategy"]["matrix"]["include"][0]["packages"]
    for package in ("torch", "transformers", "numpy", "pandas"):
        least = next(each for each in project["dependencies"] if re.match(rf"{package}\W", each))
        assert f"{package}=={re.search('[0-9.]+', least)[0]}" in lowest


def test_the_citation_has_the_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
