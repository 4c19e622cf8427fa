"""Chat templates are programs by a model's author: a separate process renders them, with limits on memory and time.

Jinja's sandbox keeps a template away from files and modules, but limits neither memory (`'a' * 10**9`) nor time (nested
loops). The process is started once and renders one conversation after the other. On Linux it is a fork, which takes
milliseconds; elsewhere it is a new interpreter, which takes a second and does not import torch.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from specbench.base.errors import RunError
from specbench.base.textsafe import excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 10.0
"""Time limit for a template; starting the process does not count."""
_STARTING = 120.0
_MEMORY = 512 * 2**20
"""Memory limit in addition to the process's own, where the system has such limits."""
_LONGEST = 2**24
"""Most characters of a rendered conversation: several times the longest contexts."""
_WORDS = 1000
"""Most characters of a template's own message."""

_MAIN = (
    "import sys; sys.path[:] = sys.argv[1:]; from specbench.models.chat_templates import serve_renders;"
    " serve_renders(sys.stdin.buffer, sys.stdout.buffer)"
)


class TemplateError(Exception):
    """A chat template refuses a conversation, or exceeds a limit."""


class _Renderer:
    """The process and the pipes to it. The process ends when its input is closed."""

    def __init__(self) -> None:
        try:
            self._pid, self._requests, self._answers = _forked() if sys.platform == "linux" else _spawned()
        except OSError as error:
            raise RunError(f"The process that renders chat templates cannot be started: {error}.") from error
        self.owner = os.getpid()
        self._ready = False

    def ask(self, line: bytes) -> dict[str, Any]:
        if not self._ready:
            if not self._read(_STARTING):
                raise RunError("The process that renders chat templates does not start.", "Use --raw.")
            self._ready = True
        with suppress(OSError):  # it has ended, which reading tells
            self._requests.write(line + b"\n")
            self._requests.flush()
        if not (answer := self._read(SECONDS)):
            raise TemplateError(f"rendering took longer than {SECONDS:g} seconds or more memory than allowed")
        return dict(json.loads(answer))

    def _read(self, seconds: float) -> bytes:
        """Read the next line; empty if the process ends first, at the latest after ``seconds``."""
        timer = threading.Timer(seconds, self._kill)
        timer.daemon = True
        timer.start()
        try:
            return self._answers.readline()
        finally:
            timer.cancel()

    def _kill(self) -> None:
        with suppress(OSError):  # it has ended
            os.kill(self._pid, _KILL)

    def end(self) -> None:
        self._kill()
        with suppress(OSError):
            self._requests.close()
        self._answers.close()
        with suppress(OSError):
            os.waitpid(self._pid, 0)


_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


def _forked() -> tuple[int, BinaryIO, BinaryIO]:
    """Fork; return the process id and the pipes for requests and answers."""
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401 - what the fork imported itself, another thread could be importing now
    from transformers.utils import chat_template_utils  # noqa: F401

    requests, asking = os.pipe()
    answering, answers = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # it runs Python alone, and nothing of other threads
        pid = os.fork()
    if pid == 0:
        _serve_and_exit(requests, answers)
    os.close(requests)
    os.close(answers)
    return pid, open(asking, "wb"), open(answering, "rb")  # noqa: PTH123


def _serve_and_exit(requests: int, answers: int) -> NoReturn:
    """Serve requests in the forked process, with only these two pipes open and without signal handlers."""
    try:
        gc.disable()  # nothing of the parent's is to be ended here
        os.setsid()  # Ctrl-C is for the terminal's program
        for caught in (signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
            signal.signal(caught, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in {0, 1, 2} - {requests, answers}:
            os.dup2(nothing, number)
        low, high = sorted((requests, answers))
        for first, end in ((3, low), (low + 1, high), (high + 1, os.sysconf("SC_OPEN_MAX"))):
            os.closerange(first, end)
        serve_renders(open(requests, "rb"), open(answers, "wb"))  # noqa: SIM115
    finally:
        os._exit(0)


def _spawned() -> tuple[int, BinaryIO, BinaryIO]:
    """Start a new interpreter; return the process id and the pipes for requests and answers."""
    if not sys.executable:
        raise RunError("Python does not know its own program, which renders chat templates.", "Use --raw.")
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN, *filter(None, sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    return process.pid, process.stdin, process.stdout  # type: ignore[return-value]


_lock = threading.Lock()
_renderer: _Renderer | None = None


def start_renderer() -> None:
    """Start the process if there is none, without waiting."""
    with _lock:
        _started()


def _started() -> _Renderer:
    global _renderer
    if _renderer is None or _renderer.owner != os.getpid():  # a fork may not talk to its parent's
        if _renderer is None:
            atexit.register(_end)
        _renderer = _Renderer()
    return _renderer


def _end() -> None:
    global _renderer
    if _renderer is not None and _renderer.owner == os.getpid():
        _renderer.end()
    _renderer = None


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Render a conversation as `tokenizer.apply_chat_template` does.

    Args:
        tokenizer: A tokenizer with a chat template.
        messages: The messages of the conversation, with "role" and "content".
        add_generation_prompt: Whether to append the text that opens the assistant's next answer.
        tools: The functions that the model can call, as in requests to a server.

    Raises:
        TemplateError: The template refuses, or takes too much time or memory.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # it has several, and none of them is the usual one
        raise TemplateError(excerpt(error)) from error
    request = {
        "conversations": [messages],
        "tools": tools or None,
        "chat_template": template,
        "add_generation_prompt": add_generation_prompt,
        **tokenizer.special_tokens_map,
    }
    line = json.dumps(request).encode()
    with _lock:
        try:
            answer = _started().ask(line)
        except BaseException:  # an answer that nobody has read would be taken for the next one's
            _end()
            raise
    if "text" not in answer:
        raise TemplateError(answer["error"])
    return str(answer["text"])


def serve_renders(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests, one per line, until there are no more."""
    from transformers.utils.chat_template_utils import render_jinja_template

    _bound_memory()
    answers.write(b"ready\n")
    answers.flush()
    for line in requests:
        try:
            text = render_jinja_template(**json.loads(line))[0][0]
            answer = {"text": text} if len(text) <= _LONGEST else {"error": _TOO_LONG}
        except MemoryError:
            answer = {"error": f"rendering took more than {_MEMORY // 2**20} MiB of memory"}
        except Exception as error:  # templates may raise anything
            answer = {"error": str(error)[:_WORDS]}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


_TOO_LONG = f"the rendered text has more than {_LONGEST:,} characters"


def _bound_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limits; the time is bounded there too
        return
    with suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123
            pages = int(statm.read().split()[0])
        own = pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own + _MEMORY, own + _MEMORY))
