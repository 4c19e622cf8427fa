"""HTML pages that are one file each: style and script are inside, and nothing else may be loaded or run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from specbench.base.textsafe import one_line


def page(folder: Path, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """Return a folder's ``page.html.jinja`` with its ``style.css`` and ``script.js``, as ``style`` and ``script``.

    The template escapes all values and raises an error for a missing one. The value ``policy`` is a content security
    policy that allows this style, this script, images in the page itself, and nothing else.
    """
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        loader=FileSystemLoader(folder),
    )
    environment.filters |= {"one_line": one_line, **filters}
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return environment.get_template("page.html.jinja").render(
        policy=policy,
        style=Markup(style),  # noqa: S704 - our own
        script=Markup(script),  # noqa: S704
        **values,
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
