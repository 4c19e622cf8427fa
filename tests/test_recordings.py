"""What README and docs show of commands has the shape of what they print today; times and figures may differ."""

from __future__ import annotations

import re
import shlex

import pytest
import recordings
from stored_runs import kept_run

from specbench.cli import _command_line

ROOT = recordings.ROOT
SHOWN = {
    name: recordings.shown((recordings.FOLDER / f"{name}.svg").read_text(encoding="utf-8"))
    for name in recordings.RECORDED
}
BLOCKS = {name: recordings.consoles((ROOT / name).read_text(encoding="utf-8")) for name in recordings.PAGES}
MEASURED = re.compile(
    r"(warning|info|note|why|time|steps|Verdicts|Perhaps|Too few|#|specbench:)|.*(over plain|predicted|hardly faster)"
    r"|\s*(faster|fastest|measured|provisional|cannot tell|slower|the time to|specbench generate)|.*tokens/s"
    r"|\s*tokens +tokens$"
)
"""Lines whose words depend on times, so that they may be missing another time."""


def shape(line: str) -> str:
    """Return a line up to its first figure, with rules of one length; of headings, which wrap beside wide figures and
    verdicts, the first word.
    """
    text = re.sub("─+", "─", " ".join(line.split()))
    return re.split(r"\d|…|(?<=configuration) ", text)[0].strip()


def test_a_recording_is_of_its_command():
    for name, lines in SHOWN.items():
        assert lines[0] == f"$ {recordings.RECORDED[name]}"
        assert len(lines) > 4
        assert "href" not in (recordings.FOLDER / f"{name}.svg").read_text(encoding="utf-8")


def commands_shown() -> set[str]:
    """Return all commands of the pages, in blocks of a shell or with their outputs."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "results").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages).replace("\\\n", "")
    code = re.findall(r"^ *```(?:bash|console)\n(.*?)```|^    ([^\n]*)", text, flags=re.DOTALL | re.MULTILINE)
    lines = "\n".join(map("".join, code))
    return set(re.findall(r"^ *(?:\$ |.*&& )?(specbench .*)", lines, flags=re.MULTILINE))


def test_every_option_shown_exists():
    commands = _command_line().commands
    shown = {*recordings.RECORDED.values(), *commands_shown()}
    assert len(shown) > 50
    for command in shown:
        name, *words = shlex.split(command.partition(" -- ")[0], comments=True)[1:]
        options = {word for each in commands[name].params for word in (*each.opts, *each.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= options, command


@pytest.mark.real
@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("name", ["README.md", pytest.param("docs/tutorial.md", marks=pytest.mark.slow)])
def test_the_outputs_of_pages_have_the_shape_of_today(name, cli, tmp_path, monkeypatch):
    """Each line that is shown begins, up to its first figure, like a line that is printed. What models write is not
    compared, because another processor may write something else; nor what a busy machine adds.
    """
    kept_run("qwen2.5-coder-int4")
    recordings.work_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(recordings.COLUMNS))
    for command, output in BLOCKS[name]:
        words = shlex.split(command)[1:]
        said = cli(*words)
        assert said.code == 0, said.err
        lines = [line for line in output.splitlines() if line.strip() not in ("", "...")]
        assert lines, f"run `python benchmarks/recordings.py {name}`"
        today = {shape(line) for line in (said.out + said.err).splitlines()}
        if words[0] == "generate":
            assert said.out.strip()
            lines = lines[next(i for i, line in enumerate(lines) if "tokens/s" in line) :]
        kept = [line for line in lines if not MEASURED.match(line)]
        assert kept, command
        assert [line for line in kept if shape(line) not in today] == [], command
