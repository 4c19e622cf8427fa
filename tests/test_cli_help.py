"""Help that is complete and fits, and options that exclude or need each other."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

import pytest
import typer

from specbench.cli import app
from specbench.cli.conflicts import EXCLUDE, NEED
from specbench.cli.help import EXAMPLES, MOST_USED

COMMANDS: dict[str, Any] = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
FIRST = "target drafter prompts max_new_tokens temperature draft_policy gamma dtype compare batch"


def flags(command: str, name: str) -> str:
    parameter = next(each for each in COMMANDS[command].params if each.name == name)
    return str(parameter.opts[0])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_complete_and_fits(cli, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")
    out = cli(command, "--help").out
    assert max(map(len, out.splitlines())) <= 100
    for parameter in COMMANDS[command].params:
        assert parameter.help, parameter.name
        if parameter.param_type_name != "argument":
            assert any(f" {flag}" in out for flag in (*parameter.opts, *parameter.secondary_opts))


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_help_opens_with_command_lines_that_are_understood(cli, line):
    _, command, *words = shlex.split(line)
    assert line in cli(command, "--help").out.partition("\n\n")[0]
    context = typer.Context(COMMANDS[command], info_name=command)
    COMMANDS[command].make_parser(context).parse_args(words)  # an unknown option would be an error


@pytest.mark.parametrize("command", ["generate", "sweep", "plot"])
def test_the_help_of_the_first_commands_fits_two_screens(cli, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")
    assert len(cli(command, "--help").out.splitlines()) <= 80


def test_the_ten_most_used_options_come_first(cli):
    out = cli("generate", "--help").out
    headings = [line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[:2] == ["Arguments:", "Most used options:"]
    first = [line.split()[0] for line in out.split("\n\n")[3].splitlines()[1:] if line.startswith("  -")]
    assert len(first) == 10
    assert [name for name in MOST_USED if name in FIRST.split()] == FIRST.split()
    assert "Most used options" not in cli("compare", "--help").out


@pytest.mark.parametrize("width", [80, 120])
def test_summaries_of_commands_are_whole(cli, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = " ".join(cli("--help").out.split())
    assert "..." not in out.partition("Commands:")[2]


VALUES = {
    "arrivals": "closed:2", "baseline": "transformers", "batch": "2",
    "cache": "static", "dtype": "float32",
    "engine": "vllm", "format": "json-schema={}",
    "prompts": "all",
    "server": "a=http://127.0.0.1:9/v1",
}  # fmt: skip


def words(command: str, name: str) -> list[str]:
    """An option as it may stand on a command line."""
    parameter = next(each for each in COMMANDS[command].params if each.name == name)
    if parameter.param_type_name == "argument":
        return ["text"]
    return [parameter.opts[0]] if parameter.is_flag else [parameter.opts[0], VALUES.get(name, "1")]


CASES = [
    (needed, command, name, others.split()[0])
    for rows, needed in ((EXCLUDE, False), (NEED, True))
    for commands, options, others, _ in rows
    for command in commands.split()
    for each in options
    for name in (
        [each] if isinstance(each, str) else [field.name for field in fields(each) if field.metadata]
    )
]


@pytest.mark.parametrize(("needed", "command", "name", "other"), CASES)
def test_options_that_exclude_or_need_each_other_are_refused(cli, needed, command, name, other):
    more = ["--resume"] if other == "out" else ["--server", VALUES["server"]] if other == "target" else []
    base = {"compare": ["results", "results"], "predict": ["--answers", "log.jsonl"]}.get(command, [])
    arguments = {"prompt": "PROMPT", "arguments": "[-- ENGINE OPTIONS]"}
    written = arguments.get(name) or flags(command, name)
    result = cli(command, *base, *words(command, name), *more, *([] if needed else words(command, other)))
    how = f"{written} is given without" if needed else f"{written} does not go with"
    assert (result.code, result.out) == (2, "")
    assert f"{how} {flags(command, other)}" in result.err
