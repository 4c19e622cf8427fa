"""What README and docs show of commands has the shape of what they print today; times and figures may differ."""

from __future__ import annotations

import re
import shlex

import pytest
import recordings
from conftest import SNAPSHOTS
from stored_runs import kept_run
from test_trace import ACCEPTED_ALL, REJECTION, event, header, prefill
from test_trace import shown as trace_shown

from specbench.backends.torch.kernels import huge_pages
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


def labels(lines: list[str]) -> set[str]:
    """Return the names in the first column of a trace, and the headings of its table."""
    rows = {found[1] for line in lines if (found := re.match(r"  ([a-z]+)(?: |$)", line))}
    heads = {word for line in lines if re.match(r"i +token", line) for word in line.split()}
    return rows | heads


def shape(line: str) -> str:
    """Return a line up to its first figure, with rules of one length; of headings, which wrap beside wide figures and
    verdicts, the first word.
    """
    text = re.sub("─+", "─", " ".join(line.split()))
    return re.split(r"\d|…|(?<=configuration) ", text)[0].strip()


@pytest.mark.parametrize("name", recordings.RECORDED)
def test_a_recording_is_of_its_command(name):
    assert SHOWN[name][0] == f"$ {recordings.RECORDED[name]}"
    assert len(SHOWN[name]) > 4
    assert "href" not in (recordings.FOLDER / f"{name}.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "command", [*recordings.RECORDED.values(), *(each for page in BLOCKS.values() for each, _ in page)]
)
def test_every_option_shown_exists(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, *words = shlex.split(command)[1:]
    assert name in _command_line().commands
    for word in words:
        if word.startswith("--"):
            options = [each for parameter in _command_line().commands[name].params for each in parameter.opts]
            assert word in options


def test_the_recorded_trace_has_the_labels_of_today():
    today = labels(trace_shown(header(), prefill(), *map(event, (ACCEPTED_ALL, REJECTION))).splitlines())
    assert {"target", "corrected", "bonus", "time", "token", "p/q", "verdict"} <= labels(SHOWN["debug"])
    assert labels(SHOWN["debug"]) <= today | {"stop"}


def test_the_recorded_answer_of_tune_has_the_lines_of_today():
    """Which the snapshot of `tests/test_tune.py` has."""
    today = (
        (SNAPSHOTS / "tune" / "the_answer_as_text_markdown_and_json.txt")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    firsts = {line.split()[0] for line in today[: today.index("---")] if line}
    assert {"Decode:", "Deploy:"} <= {line.split()[0] for line in SHOWN["tune"] if line} & firsts
    headline = r"[\w:+]+ .*[:,] \d\.\d\d× \[\d\.\d\d, \d\.\d\d\] over plain decoding"
    assert re.match(headline, today[0])
    assert re.match(headline, SHOWN["tune"][1])


@pytest.mark.real
@pytest.mark.parametrize("name", ["README.md", pytest.param("docs/tutorial.md", marks=pytest.mark.slow)])
def test_the_outputs_of_pages_have_the_shape_of_today(name, cli, tmp_path, monkeypatch):
    """Each line that is shown begins, up to its first figure, like a line that is printed. What models write is not
    compared, because another processor may write something else; nor what a busy machine adds.
    """
    kept_run("qwen2.5-coder-int4")
    recordings.work_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(recordings.COLUMNS))
    monkeypatch.setattr(
        huge_pages, "huge_page_setting", lambda: "never"
    )  # weights load faster into small pages
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
