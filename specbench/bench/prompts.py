"""Prompts: built-in sets, files of the same format, and the one prompt of ``generate``.

A set is a JSON Lines file; ``prompts/README.md`` describes its fields. Texts are kept as they are, except for lone
surrogates, which no tokenizer can encode.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec

from specbench.base.errors import RunError, UsageError, unknown
from specbench.base.files import reason
from specbench.base.record import wrong_field
from specbench.base.textsafe import encodable
from specbench.options import NO_OPTIONS, TemplateOptions

ALL_SETS = "all"
TRAINING_SET = "training"
"""The set to train heads on; never measured on, and not part of all."""
_SUFFIX = ".jsonl"
_FORM = 'Each line holds an object such as {"id": "a-1", "category": "chat", "turns": ["Hello"]}.'


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: Unique within what ``load_prompts`` returns.
        category: Kind of prompt, by which results are broken down.
        turns: The user's messages; at least one, none of them blank.
        system: The system message; ``None`` without one.
        template: What the chat template is told.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    system: str | None = None
    template: TemplateOptions = NO_OPTIONS

    def told(self, template: TemplateOptions) -> Prompt:
        """Return the prompt with what its template is told for all prompts."""
        return replace(self, template=template.over(self.template))


def set_names() -> list[str]:
    """Return the names of built-in prompts: the sets, ``"all"`` of them, and ``"training"``."""
    return [*_built_in(), ALL_SETS, TRAINING_SET]


def load_prompts(sources: Sequence[str | Path], limit: int | None = None) -> list[Prompt]:
    """Read prompts from built-in sets and files.

    Args:
        sources: Names of built-in sets, ``"all"`` for all of them, ``"training"``, which is not
            part of all, or JSON Lines files; ``./chat`` or a ``Path`` is a file even if a set has its name. Each is
            read once.
        limit: Number of prompts, interleaved by category; a smaller limit gives the first prompts of a larger one.
            ``None`` returns all, in the order of the sources.

    Raises:
        UsageError: A source does not exist or breaks the format, two prompts share an id, the limit is below 1, or
            there are no prompts.
        RunError: The installation lacks the built-in sets.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"The limit on prompts is {limit}.", "Give at least 1.")
    if not sources:
        raise UsageError("No prompt set or file was named.", f"The sets are {', '.join(set_names())}.")
    origins: dict[str, str] = {}
    prompts: list[Prompt] = []
    for file, name in _resolve(sources).items():
        for number, prompt in _read(file, name):
            origin = f"{name} line {number}"
            if prompt.id in origins:
                raise UsageError(
                    f"Two prompts have the id {prompt.id!r}: {origins[prompt.id]} and {origin}.",
                    "Give every prompt an id of its own.",
                )
            origins[prompt.id] = origin
            prompts.append(prompt)
    if not prompts:
        names = ", ".join(_resolve(sources).values())
        raise UsageError(f"There are no prompts in {names}.", "Give each prompt a line of its own.")
    return prompts if limit is None else interleave(prompts, limit)


def read_prompt_text(prompt: str | None, stdin: TextIO | None) -> str:
    """Read the prompt of ``generate``: its argument, or standard input (``-``, or if nothing is given).

    One line break at the end of standard input is dropped, since editors and ``echo`` add it.

    Args:
        prompt: The argument, ``"-"`` for standard input; ``None`` if not given.
        stdin: A text stream over bytes, like ``sys.stdin``; ``None`` if closed. A terminal is read only for ``"-"``.

    Raises:
        UsageError: There is no prompt, or the text is blank or not UTF-8.
    """
    text = prompt or ""
    if prompt == "-" or (prompt is None and stdin is not None and not stdin.isatty()):
        text = "" if stdin is None else _decoded(stdin.buffer.read(), "The prompt from standard input")
        text = text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
    if not text.strip():
        raise UsageError("No prompt was given.", "Give it as an argument or on standard input.")
    return encodable(text)


def sets_folder() -> Traversable:
    """Return ``specbench/_prompts``, or a checkout's ``prompts/``."""
    folder = resources.files("specbench") / "_prompts"
    return folder if folder.is_dir() else Path(__file__).parents[2] / "prompts"


def _built_in() -> dict[str, Traversable]:
    """Return the files of the built-in sets by name."""
    folder = sets_folder()
    entries = list(folder.iterdir()) if folder.is_dir() else []
    files = {entry.name.removesuffix(_SUFFIX): entry for entry in entries if entry.name.endswith(_SUFFIX)}
    if not files:
        raise RunError(
            "The built-in prompt sets are missing from this installation.", "Install specbench again."
        )
    return dict(sorted(files.items()))


def _resolve(sources: Sequence[str | Path]) -> dict[Traversable, str]:
    """Return the files of the sources, in order and without repetition, each with the name to show."""
    built_in = _built_in()
    files: dict[Traversable, str] = {}
    for source in sources:
        if source == ALL_SETS:
            files.update({file: name for name, file in built_in.items()})
        elif source == TRAINING_SET:
            files[sets_folder() / TRAINING_SET / f"prompts{_SUFFIX}"] = TRAINING_SET
        elif isinstance(source, str) and source in built_in:
            files[built_in[source]] = source
        else:
            files[Path(source)] = str(source) if str(source).isprintable() else ascii(str(source))
    return files


def _read(file: Traversable, name: str) -> list[tuple[int, Prompt]]:
    """Read the prompts of a file, each with its line number; ``name`` is for errors."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise unknown("prompt set or file", name, [*set_names(), "or a file by its path"]) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UsageError(
            f"The prompt file {name} cannot be read: {reason(error)}.", "Check its path."
        ) from None
    lines = _decoded(data, f"The prompt file {name}").split("\n")
    # Not splitlines(): a JSON string may hold U+2028 and the like. A byte order mark may begin a later line, too.
    numbered = enumerate((line.removeprefix("\ufeff") for line in lines), 1)
    stem = Path(name).stem
    if name.endswith(".txt"):  # a prompt in each line
        return [(n, Prompt(f"{stem}-{n}", stem, (line.strip(),))) for n, line in numbered if line.strip()]
    return [(n, _parsed(line, f"Line {n} of {name}", stem, n)) for n, line in numbered if line.strip()]


class _Part(msgspec.Struct):
    type: Literal["text"]
    text: str = ""


class _Message(msgspec.Struct):
    role: Literal["system", "user", "assistant"]
    content: str | list[_Part]

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class _Line(msgspec.Struct):
    id: str | int
    category: str
    turns: list[str] = msgspec.field(default_factory=list)
    messages: list[_Message] = msgspec.field(default_factory=list)
    system: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None


def _parsed(line: str, where: str, stem: str, number: int) -> Prompt:
    """Return the prompt of a line; without an id it is the file's name and the line's number, without a category the
    name. What an assistant said in "messages" is left out: the target answers itself.
    """
    try:
        fields = json.loads(line)
        if isinstance(fields.get("prompt"), str):
            fields.setdefault("turns", [fields["prompt"]])
        if "turns" in fields:
            fields.pop("messages", None)
        name = fields.get("question_id", f"{stem}-{number}")
        found = msgspec.convert({"id": name, "category": stem, **fields}, _Line)
    except msgspec.ValidationError as error:
        raise UsageError(f'{where}: "{wrong_field(error)}" has the wrong form.', _FORM) from None
    except (ValueError, AttributeError, RecursionError):
        raise UsageError(f"{where} is not a JSON object.", _FORM) from None
    turns, system = found.turns, found.system
    if found.messages:
        said = [message.text for message in found.messages if message.role == "system"]
        turns = [message.text for message in found.messages if message.role == "user"]
        system = "\n\n".join(said) if said else system
    if not turns or not all(text.strip() for text in (str(found.id), found.category, *turns)):
        raise UsageError(f"{where} has an empty field, or no turns.", _FORM)
    try:
        template = TemplateOptions.of(found.chat_template_kwargs, found.reasoning_effort)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", error.hint) from None
    return Prompt(
        template=template,
        id=encodable(str(found.id)),
        category=encodable(found.category),
        turns=tuple(map(encodable, turns)),
        system=None if system is None else encodable(system),
    )


def shuffled(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    """Return prompts in a random order that depends on their ids and the seed alone."""
    return sorted(prompts, key=lambda prompt: random.Random(f"prompts/{seed}/{prompt.id}").random())


def interleave(prompts: Iterable[Prompt], limit: int | None = None) -> list[Prompt]:
    """Return the first prompt of every category, then the second ones, and so on, up to ``limit``."""
    grouped: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        grouped.setdefault(prompt.category, []).append(prompt)
    rounds = zip_longest(*grouped.values())
    return list(islice((prompt for taken in rounds for prompt in taken if prompt is not None), limit))


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")  # a byte order mark is no part of the text
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{where} is not UTF-8 (line {line}).", "Save it as UTF-8.") from None
