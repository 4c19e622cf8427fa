"""The report as one HTML page, which loads no other file."""

from __future__ import annotations

import base64
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment

from specbench.show import html
from specbench.show.document import Heading
from specbench.show.report.content import Report

_FOLDER = Path(__file__).parent


def to_html(report: Report) -> str:
    """Return the report as one HTML file that includes its figures, style and script."""
    titles = [part.text for part in report.parts if isinstance(part, Heading) and part.level == 2]
    return html.page(_templates(), _FOLDER, name=report.name, parts=report.parts, titles=titles)


@cache
def _templates() -> Environment:
    return html.templates(
        _FOLDER,
        anchor=lambda title: re.sub(r"\W+", "-", title.lower()),
        data_uri=lambda svg: "data:image/svg+xml;base64," + base64.b64encode(svg).decode(),
        kind=lambda part: type(part).__name__,
        sort_value=_sort_value,
        verdict=lambda cell: found[0] if (found := re.match("faster|fastest|slower", cell)) else "",
    )


def _sort_value(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    return None if value is None or math.isnan(value) else repr(float(value))
