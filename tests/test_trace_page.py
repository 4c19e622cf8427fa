"""The page of a step trace: what it says, that texts stay texts, and that it works in a browser."""

from __future__ import annotations

import re

import pytest
from msgspec import structs
from test_report import Page
from test_trace import ACCEPTED_ALL, HOSTILE, REJECTION, SUMMARY, TREE, event, header, hostile_events, prefill

from specbench.results.trace import Event, write_event
from specbench.show import html
from specbench.show.trace import trace_parts

FIRST, SECOND, THIRD = (
    structs.replace(event(step), index=i) for i, step in enumerate((REJECTION, TREE, ACCEPTED_ALL))
)


def to_html(events: list[Event]) -> str:
    return html.to_html("Trace", trace_parts(events))


@pytest.mark.smoke
def test_the_page_has_every_step_and_where_its_tokens_are_from():
    text = to_html([header(), prefill(), FIRST, SECOND, THIRD, SUMMARY])
    page = Page(text)
    assert re.findall(r"<h3[^>]*>(\w+ ?\d*)", text) == ["prefill ", "step 1", "step 2", "step 3", "end "]
    formula = "norm(max(0, p"
    for words in ("a draft is accepted if r < p/q", formula, "per step", "rejected"):
        assert words in "".join(page.text)
    for origin in ("accepted", "corrected", "bonus", "target"):
        (link, *_) = [each["href"] for each in page.all("a") if each.get("class") == origin]
        assert ("h3", {"id": str(link)[1:]}) in page.elements


def test_texts_stay_texts_and_nothing_else_runs_or_loads():
    text = to_html(hostile_events())
    page = Page(text)
    harmless = Page(to_html([header(), prefill(), SECOND, FIRST]))
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in harmless.elements}
    attributes = {name for _, attributes in page.elements for name in attributes}
    assert not attributes & {"src", "style"}
    assert all(str(each["href"]).startswith("#p") for each in page.all("a"))
    assert not [name for name in attributes if name.startswith("on")]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert any("script" in each for each in HOSTILE)


def test_the_command_writes_a_page_of_what_can_be_read(cli, tmp_path):
    file, out = tmp_path / "trace.jsonl", tmp_path / "trace.html"
    with file.open("w") as opened:
        for each in (header(), FIRST, SUMMARY):
            write_event(opened, each)
    result = cli("trace", file, "--html", out)
    assert (result.code, result.out.strip()) == (0, str(out))
    whole = out.read_text()
    assert "step 1" in whole
    result = cli("trace", file, "--html", tmp_path / "none" / "trace.html")
    assert (result.code, result.out) == (1, "")
    assert "cannot be written (No such file or directory)" in result.err
    file.write_text(file.read_text()[:-20])
    result = cli("trace", file, "--html", out)
    assert result.code == 2
    assert "cut short" in result.err
    assert "step 1" in out.read_text()
    assert out.read_text() != whole
