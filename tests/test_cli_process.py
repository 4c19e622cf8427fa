"""The command line as a process of its own: signals, pipes, terminals, and what it imports.

Interpreters are started where their start or their end is looked at; what decodes otherwise is forked.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked import Forked, specbench
from tiny import tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and terminals of POSIX")

# A shell that runs the tests in the background has them ignore SIGINT, and children inherit that.
PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from specbench.cli import main
main()
"""
COMMAND = [sys.executable, "-c", PROGRAM]
HEAVY = ("torch", "transformers", "numpy", "pandas", "matplotlib", "scipy")


@pytest.mark.parametrize("module", ["typer", "specbench.cli.drafters", "specbench.options"])
def test_an_interrupt_while_the_program_is_imported_ends_it_quietly(module):
    """Python's own imports aside."""
    program = (
        "import builtins, os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "imported = builtins.__import__\n"
        "def interrupted(name, *rest, **more):\n"
        f"    if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return imported(name, *rest, **more)\n"
        "builtins.__import__ = interrupted\n"
        "from specbench.__main__ import main\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model that never comes to an end, and whose tokenizer would complain about any prompt."""
    folder = tmp_path_factory.mktemp("models") / "endless"
    tiny_llama(context=200_000).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 8
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def endless(folder) -> list[str]:
    return ["generate", "the thing", "--target", str(folder), "--ignore-eos", "--temperature", "5"]


@pytest.fixture(autouse=True)
def plain_colors(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", **more}


class Piped(Forked):
    """`specbench` whose streams are pipes; ``stdout`` is a descriptor to write to instead."""

    def __init__(self, *words: str, stdout: int | None = None) -> None:
        (out, out_end), (errors, errors_end) = os.pipe(), os.pipe()
        super().__init__(specbench, *words, stdout=out_end if stdout is None else stdout, stderr=errors_end)
        os.close(out_end)
        os.close(errors_end)
        self.out, self.errors = os.fdopen(out, "rb"), os.fdopen(errors, "rb")

    def end(self) -> tuple[int, bytes, bytes]:
        """Exit code, and what has not been read yet."""
        with self.out, self.errors:
            out, errors = self.out.read(), self.errors.read()
            return self.wait(), out, errors


def in_terminal(words: list[str], **more: str) -> tuple[int, str]:
    """Exit code and output of `specbench` whose stdout and stderr are a terminal of 80 columns."""
    import fcntl
    import pty
    import struct
    import termios

    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    process = Forked(specbench, *words, stdout=inner, stderr=inner, environment=more)
    os.close(inner)
    output = b""
    try:
        while block := os.read(outer, 65536):
            output += block
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(outer)
    return process.wait(), output.decode("utf-8").replace("\r\n", "\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--help"],
        ["drafters"],
        *([name, "--target", "no/such"] for name in ("tune", "check")),
        ["sweep", "--gamma", "2", "--target", "no/such"],
        ["generate", "hi", "--drafter", "ngram", "--draft-policy", "dynamic-tree"],
    ],
)
def test_help_listings_and_refusals_import_nothing_heavy(arguments):
    program = (
        f"import sys; from specbench.cli import run; run({arguments}); print(*sys.modules, file=sys.stderr)"
    )
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert child.stdout or child.stderr.startswith("specbench: ")
    assert not {*(HEAVY if child.stdout else HEAVY[:2])} & {*child.stderr.split()}


def test_a_trace_whose_reader_has_seen_enough_ends_quietly(folder, tmp_path):
    trace = str(tmp_path / "trace.jsonl")
    words = ["generate", "the thing", "--target", str(folder), "-n", "4", "--quiet", "--trace-file", trace]
    assert Piped(*words).end()[0] == 0
    reading, writing = os.pipe()
    os.close(reading)
    child = Piped("trace", trace, stdout=writing)
    os.close(writing)
    assert child.end() == (141, b"", b"")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_text_and_its_exit_code(endless, number):
    child = Piped(*endless, "-n", "150000")
    first = child.out.read(40)
    child.signal(number)
    code, rest, errors = child.end()
    assert code == 128 + number
    assert (first + rest).endswith(b"\n")
    lines = errors.decode().splitlines()
    assert lines[-1] == "specbench: interrupted."
    # Nothing but the summary before it: no log of a library, no traceback.
    assert "tokens/s" in lines[0]
    heads = [line.split()[0] for line in lines[1:-1]]
    assert set(heads) <= {"why", "steps", "output", "model", "time"}
    assert any(re.fullmatch("output  [0-9]+ tokens?.*, interrupted", line) for line in lines)


@pytest.mark.parametrize(
    ("closed", "words", "code"),
    [("<&- 2>&-", "generate hello -n 4 --ignore-eos --quiet --target", 0), (">&-", "drafters", 1)],
)
def test_closed_standard_streams(folder, closed, words, code):
    """Without stdout the output is lost, which is an error; nothing else needs a stream, also no helper process."""
    given = [*words.split(), *([str(folder)] if words.endswith("--target") else [])]
    command = ["bash", "-c", f'"$@" {closed}', "-", *COMMAND, *given]
    child = subprocess.run(command, capture_output=True, timeout=120, check=False, env=environment())
    assert (child.returncode, bool(child.stdout)) == (code, not code), child.stderr
    assert child.stderr.count(b"\n") == (code and "2>" not in closed)


@pytest.mark.parametrize("what", ["a closed pipe", "a full device"])
def test_a_sweep_whose_table_nobody_takes_is_whole_in_its_folder(folder, tmp_path, what):
    words = ["--target", str(folder), "--prompts", "chat", "--limit", "1", "-n", "4", "--gamma", "1"]
    if what == "a closed pipe":
        reading, writing = os.pipe()
        os.close(reading)
    elif Path("/dev/full").exists():
        writing = os.open("/dev/full", os.O_WRONLY)
    else:
        pytest.skip("no device that is always full")
    words += ["--drafter", "lookup", "--repeats", "1", "--out", str(tmp_path / "run"), "--quiet"]
    child = Piped("sweep", *words, stdout=writing)
    os.close(writing)
    code, _, said = child.end()
    errors = said.decode().splitlines()
    full = ["specbench: the output cannot be written: No space left on device."]
    expected = {"a closed pipe": (141, []), "a full device": (1, full)}
    assert (code, [line for line in errors if line.startswith("specbench: ")]) == expected[what]
    assert any(line.startswith("warning: 1 prompt") for line in errors), errors
    assert "plain" in (tmp_path / "run" / "summary.csv").read_text()
    assert "plain" in (tmp_path / "run" / "summary.md").read_text()


@pytest.mark.parametrize("more", [{"TERM": "dumb"}, {"TERM": "xterm-256color", "NO_COLOR": "1"}])
def test_neither_prompts_nor_models_steer_a_terminal(folder, more):
    prompt = "\x1b]0;title\x07\x1b[31m[red]x[/] 👩‍👧 שלום \udced\udca0\udc80 \u202e"
    command = ["generate", prompt, "--target", str(folder), "--ignore-eos", "-t", "5", "-n", "60"]
    code, output = in_terminal([*command, "--drafter", "self:layers=1", "--debug", "--compare"], **more)
    assert code == 0, output
    if "NO_COLOR" in more:
        assert not re.search("\x1b\\[[0-9;]*[34][0-9][0-9;]*m", output), "a color"
        # What stays is rich's own: bold and dim, and the progress bar's moves.
        output = re.sub("\x1b\\[([0-9;]*m|[0-9]*[AK]|\\?25[lh])", "", output).replace("\r", "")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", output)
    assert "[red]x[/]" in output
    assert "\\x1b" in output
    assert re.search(r"\\x0[0-9a-f]", output), (
        "the model has written no control character: the test shows nothing"
    )
