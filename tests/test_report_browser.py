"""The page of a report in a browser: its charts, with hostile names, on narrow screens, on paper, without script."""

from __future__ import annotations

import shutil

import pytest
from stored_runs import DRAFTERS, change_run, run_json, write_run

from specbench.show.report import write_report

api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]
EVIL = "</text><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = write_run(
        tmp_path_factory.mktemp("reports") / "run", drafters=DRAFTERS[1:3], gammas=(1, 4),
        categories=("chat", "code"), prompts_per_category=3, tokens=24,
    )  # fmt: skip

    configs = run_json(folder)["configs"]
    for config in configs:
        if config["drafter"] == configs[-1]["drafter"]:
            config["label"] = f"{EVIL} {config['label']}"
    change_run(folder, configs=configs)
    return write_report(folder)[1][0]


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def opened(browser, page_file):
    """``opened(width)``: the page, which must not complain or run anything of a name."""
    said: list[str] = []

    def open_page(width: int = 1280, *, script: bool = True):
        page = browser.new_context(
            viewport={"width": width, "height": 900}, java_script_enabled=script
        ).new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.goto(page_file.as_uri())
        return page

    yield open_page
    assert said == []


@pytest.mark.parametrize(("width", "shown"), [(1280, "wide"), (390, "narrow")])
def test_a_mark_says_its_value(opened, width, shown):
    page = opened(width)
    chart = page.locator(".chart").first
    drawn = chart.locator("svg[role=img]:visible")
    assert drawn.count() == 1
    assert drawn.get_attribute("class") == shown
    assert chart.locator(".said:visible").count() == 0
    drawn.locator(".mark .aim").last.hover()  # the topmost
    assert "prompts" in " ".join(chart.locator(".said:visible").all_text_contents())
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_arrow_keys_read_the_marks(opened):
    page = opened()
    chart = page.locator(".chart").first
    chart.locator("svg[role=img]:visible").focus()
    read = []
    for key in ("ArrowRight", "ArrowRight", "Home", "End"):
        page.keyboard.press(key)
        read.append(chart.locator(".reading").inner_text())
        assert chart.locator(".mark.read").count() == 1
    assert read[0] == read[2]
    assert len(set(read)) == 3
    assert "alert(1)" in read[3], "a name is a text"


@pytest.mark.parametrize("script", [True, False])
def test_lines_are_switched_off_with_and_without_script(opened, script):
    page = opened(script=script)
    chart = page.locator(".chart").first
    before = chart.locator("[data-line]:visible").count()
    chart.locator("input").first.uncheck()
    assert chart.locator("[data-line]:visible").count() == before - 1
    chart.locator("input").first.check()
    assert chart.locator("[data-line]:visible").count() == before


def test_paper_has_the_charts_without_switches(opened):
    page = opened(390)
    page.emulate_media(media="print")
    assert page.locator(".chart svg.wide:visible").count() == page.locator(".chart").count()
    assert page.locator(".switches input:visible").count() == 0
    assert page.locator(".switches label:visible").count() > 0
