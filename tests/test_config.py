"""`specbench.toml`: what it may hold, and which commands take what of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_runs import Result, refusal
from tiny import save_tiny

from specbench.base.errors import UsageError
from specbench.config import FILE_NAME, Config, read_config, write_config


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: Path, *lines: str, version: int = 1) -> Path:
    path = folder / FILE_NAME
    path.write_text("\n".join([f"version = {version}", *lines]), encoding="utf-8")
    return path


FULL = Config({
    "target": "Qwen/Qwen2.5-Coder-1.5B-Instruct@main:dtype=bfloat16",
    "drafter": "lookup:n=4+Qwen/Qwen2.5-Coder-0.5B-Instruct:dtype=int8",
    "draft_policy": "auto:max=12",
    "cache": "preallocated",
})  # fmt: skip


@pytest.mark.parametrize(
    "config", [Config(), FULL, Config({"drafter": "self:int8", "draft_policy": "dynamic-tree:nodes=8"})]
)
def test_what_is_written_is_read_again(here, config):
    write_config(here / FILE_NAME, config)
    assert read_config(here / FILE_NAME) == config


def test_the_documented_one_is_read(here):
    page = Path(__file__).parents[1] / "docs" / "export.md"
    (example,) = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    (here / FILE_NAME).write_text(example)
    assert set(read_config(here / FILE_NAME).given) == set(FULL.given)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("device = 'cpu'", "It has the unknown key 'device'. The keys are target, drafter,"),
        ('costs = "costs.json"', "'costs'"),
        ('"a\\u001bb" = "x"', "'a\\x1bb'"),
        ("cache = 3", "cache is 3, which is not a string"),
        ('cache = "huge"', "There is no cache 'huge'. Choose dynamic"),
        ('target = "org/a:int3"', "other options than a dtype"),
        ('target = "org/a:dtype=int3"', "'int3' is no dtype"),
        ('target = "org/a:device=cuda"', "other options than a dtype"),
        ('target = "/models/qwen"', "is no name of a model"),
        ('target = "~/qwen"', "is no name of a model"),
        ('target = "https://example.org/qwen"', "is no name of a model"),
        ('target = "a/b/c"', "is no name of a model"),
        ('drafter = "lookup+/models/qwen"', "is no name of a model"),
        ('drafter = "lokup"', "There is no drafter 'lokup'"),
        ('draft-policy = "auto:costs=x.json"', "has no option 'costs'"),
    ],
)
def test_what_it_may_not_hold(here, line, said):
    path = written(here, line)
    message = refusal(read_config, path, kind=UsageError)
    assert message.startswith(f"{path}: ")
    assert said in message


def test_a_folder_and_a_file_are_names_where_they_lie_beside_it(here):
    (here / "qwen").mkdir()
    (here / "small.gguf").touch()
    written(here, 'target = "qwen"', 'drafter = "small.gguf"')
    assert read_config(here / FILE_NAME).given == {"target": "qwen", "drafter": "small.gguf"}


def test_files_that_are_none(here):
    path = here / FILE_NAME
    assert "this specbench reads version 1" in refusal(read_config, written(here, version=2), kind=UsageError)
    for content in (b"version = ", b"\xff\xfe", b"#" * 10_001):
        path.write_bytes(content)
        assert "is no configuration: " in refusal(read_config, path, kind=UsageError)
    path.write_text("")
    assert "It has no version" in refusal(read_config, path, kind=UsageError)
    assert "cannot be read" in refusal(read_config, here / "none.toml", kind=UsageError)


def test_a_provisional_setting_says_so(here):
    config = Config({"drafter": "lookup"}, provisional=True)
    write_config(here / FILE_NAME, config)
    assert read_config(here / FILE_NAME) == config
    assert config.given == {"drafter": "lookup"}
    assert "# This setting is provisional: " in str(config)
    assert "provisional" not in str(Config({"drafter": "lookup"}))
    path = written(here)
    path.write_text('version = 1\nprovisional = "yes"\n')
    assert "Write true or false." in refusal(read_config, path, kind=UsageError)


# -- what commands make of it ----------------------------------------------------------------------


@pytest.fixture
def tiny(here) -> Path:
    """A working folder with a tiny model, and a configuration for it."""
    save_tiny(here / "tiny")
    written(here, 'target = "tiny"', 'drafter = "self:layers=1"', 'draft-policy = "fixed:gamma=3"')
    return here


GENERATE = ("generate", "the the the", "-n", 8, "--json")


def said(result: Result) -> tuple[str, str]:
    """Drafter and rule of a generation."""
    found = result.json()
    return found["drafter"], found["options"]["draft_policy"]


def test_generate_takes_it_from_the_folder_and_says_so(tiny, cli):
    result = cli(*GENERATE)
    assert said(result) == ("self:layers=1", "fixed:gamma=3")
    assert (
        "specbench: specbench.toml sets --target tiny, --drafter self:layers=1, --draft-policy fixed, --gamma 3"
        " (leave it out with --config none)\n" in result.err
    )
    assert "specbench.toml sets --target tiny, --drafter self:layers=1 (leave" in cli(*GENERATE, "-g", 2).err
    assert tiny.exists()


def test_the_command_line_wins(tiny, cli):
    """A rule goes with its drafter, and any other length in its place."""
    assert said(cli(*GENERATE, "--gamma", 2)) == ("self:layers=1", "fixed:gamma=2")
    assert said(cli(*GENERATE, "--draft-policy", "egag")) == ("self:layers=1", "egag")
    assert said(cli(*GENERATE, "--drafter", "lookup"))[1].startswith("auto")
    save_tiny(tiny / "other", seed=1)
    result = cli(*GENERATE, "--target", "other")
    assert said(result)[0] == "lookup"
    assert "specbench.toml is for the target tiny and is left out" in result.err


def test_config_none_ignores_it(tiny, cli):
    (tiny / FILE_NAME).write_text("nonsense")
    assert said(cli(*GENERATE, "--config", "none", "--target", "tiny"))[0] == "lookup"
    cli(*GENERATE).refused(2, "specbench.toml is no configuration", "--config none")
    assert cli("generate", "--help").code == 0
    assert cli("drafters").code == 0


def test_the_cache_of_an_int8_target_is_the_one_it_names(tiny, cli):
    written(tiny, 'target = "tiny:int8"', 'cache = "dynamic"')
    found = cli("check", "--limit", 1, "-n", 4, "--json").json()
    assert found["options"]["cache"] == "dynamic"
