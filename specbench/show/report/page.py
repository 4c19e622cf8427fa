"""The report as one HTML page, which loads no other file."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specbench.show import html
from specbench.show.document import Heading
from specbench.show.report.content import Report


def to_html(report: Report) -> str:
    """Return the report as one HTML file that includes its figures, style and script."""
    titles = [part.text for part in report.parts if isinstance(part, Heading) and part.level == 2]
    filters: dict[str, Callable[..., Any]] = {
        "anchor": lambda title: re.sub(r"\W+", "-", title.lower()),
        "data_uri": lambda svg: "data:image/svg+xml;base64," + base64.b64encode(svg).decode(),
        "kind": lambda part: type(part).__name__,
        "sort_value": _sort_value,
        "verdict": lambda cell: found[0] if (found := re.match("faster|fastest|slower", cell)) else "",
    }
    folder = Path(__file__).parent
    return html.page(folder, filters, name=report.name, parts=report.parts, titles=titles)


def _sort_value(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    return None if value is None or math.isnan(value) else repr(float(value))
