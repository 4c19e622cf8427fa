"""Reports: the answer for every kind of outcome, warnings, and files that are safe, whole and readable."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from stored_runs import DRAFTERS, PLAIN, PROMPTS, row_of, times, write_exact, write_run
from test_findings import check_claims

from specbench.base.errors import RunError, UsageError
from specbench.cli.report import report as command
from specbench.options import CacheOptions
from specbench.recipe import Recipe
from specbench.results.results import load_results
from specbench.results.summary import Summary
from specbench.show import document, tables
from specbench.show import report as content
from specbench.show.answer import generate_command
from specbench.show.figures import FIGURES
from specbench.show.html import to_html
from specbench.show.plots import draw_figures, figure_bytes
from specbench.show.report import Report, make_report, write_report
from specbench.specs.drafters import Cascade, Lookup, SmallModel
from specbench.specs.models import ModelSpec
from specbench.specs.policies import parse_policy

EVIL = "<script>alert(1)</script>\"'&[x](javascript:alert(1))\x1b[31m|`"


@pytest.fixture
def unpictured(monkeypatch):
    """Figures take a second and more; most tests do without."""
    monkeypatch.setattr(content, "_figures", lambda df, folder: ([], ""))


def reported(path: Path, speeds: Any, **fields: Any) -> Report:
    path.mkdir(exist_ok=True)
    return make_report(load_results(write_exact(path / "run", speeds, **fields)), "run", path)


def to_page(report: Report) -> str:
    return to_html(report.name, report.parts)


def to_markdown(report: Report) -> str:
    return document.to_markdown(*report.parts)


# --- The answer -----------------------------------------------------------------------------------


MANY = dict(zip("abcd", (30.0, 12.0, 40.0, 20.0), strict=True))
ALMOST = {p: [speed * (1.01 if i % 2 else 0.98) for speed in times(2.0)[p]] for i, p in enumerate(PROMPTS)}
FAILED: dict[str, list[None]] = {prompt: [None] for prompt in PROMPTS}
OUTCOMES: dict[str, dict[str, Any]] = {  # speeds besides those of plain decoding
    "the fastest, with its categories": {"d@2": times(1.2), "d@5": times(2.0, code=1.5)},
    "of many categories the lowest and the highest": {
        "plain": {f"{name}-{i}": [10.0] for name in MANY for i in (1, 2)},
        "d@1": {f"{name}-{i}": [speed] for name, speed in MANY.items() for i in (1, 2)},
    },
    "cannot tell": {"d@2": times(1.01, 0.2)},
    "a sure gain before a greater unsure one": {"d@2": times(1.2), "d@5": times(1.5, 1.0)},
    "one prompt": {"plain": {"chat-01": [10.0, 10.0]}, "d@2": {"chat-01": [20.0, 21.0]}},
    "plain decoding alone": {},
    "an unfinished baseline": {"plain": {"chat-01": [None]}, "d@2": {"chat-01": [20.0]}},
    "as good as the best, and chosen among many": {"d@2": times(2.0), "d@3": ALMOST, "d@4": times(1.5)},
    "a rival failed": {"d@2": times(2.0), "d@5": FAILED},
    "slower, and a rival failed": {"d@2": times(0.8), "d@5": FAILED},
    "the fastest was measured on some prompts": {
        "d@2": {prompt: times(2.0)[prompt] for prompt in PROMPTS[:3]},
        "d@5": {prompt: times(1.5)[prompt] for prompt in PROMPTS},
        "d@7": {prompt: times(1.4)[prompt] for prompt in PROMPTS[:2]},
    },
    "everything failed but plain decoding": {"d@2": FAILED},
    "transformers beside it": {"d@2": times(2.0), "transformers": times(0.6, 0.0)},
}

CASCADE = Cascade(Lookup(), SmallModel(ModelSpec("folder", "/a+b/small"), dtype="int4"))


@pytest.mark.usefixtures("unpictured")
class TestAnswer:
    @pytest.mark.smoke
    @pytest.mark.parametrize("case", OUTCOMES)
    def test_answers(self, tmp_path, case, snapshot):
        report = reported(tmp_path, {"plain": PLAIN} | OUTCOMES[case])
        (answer,) = report.answers
        text = "\n".join([answer.headline, *answer.details])
        rivals = [name for name in OUTCOMES[case] if "@" in name and OUTCOMES[case][name] is not FAILED]
        check_claims(text, prompts=1 if case == "one prompt" else len(PROMPTS), rivals=len(rivals))
        snapshot(f"verdict: {answer.verdict}\n{text}")

    def test_the_best_of_all_stands_out(self, tmp_path):
        report = reported(
            tmp_path, {"plain": PLAIN, "d@2": times(1.5), "d@3": times(2.0), "transformers": times(3.0)}
        )
        assert report.answers[0].headline.endswith(" No other is as fast.")
        lines = [line for line in to_markdown(report).splitlines() if "| fastest |" in line]
        assert [line.startswith("| d γ=3 |") for line in lines] == [True]
        unsure = reported(tmp_path, {"plain": PLAIN, **OUTCOMES["a sure gain before a greater unsure one"]})
        assert "| fastest |" not in to_markdown(unsure), "the other is higher"
        page = Page(to_page(report))
        assert [attributes.get("class") for attributes in page.all("tr")].count("best") == 1
        command = 'specbench generate --drafter /path/to/d --gamma 3 --target /path/to/target "Your prompt"'
        assert f"    {command}" in to_markdown(report).splitlines()
        assert command in page.text

    def test_a_busy_machine_gets_a_provisional_verdict(self, tmp_path):
        report = reported(tmp_path, {"plain": PLAIN, "d@2": times(2.0)}, disturbed=("machine-busy",))
        (answer,) = report.answers
        assert "provisional" in answer.headline
        assert (answer.verdict, answer.command != "") == ("faster", True)
        # A quiet machine's would be faster: 1.03 [1.01, 1.06].
        speeds = {"plain": PLAIN, "d@2": times(1.025)}
        assert reported(tmp_path / "quiet", speeds).answers[0].verdict == "faster"
        report = reported(tmp_path / "close", speeds, disturbed=("machine-busy",))
        (answer,) = report.answers
        assert (answer.verdict, answer.command) == ("cannot tell", "")

    def test_the_command_decodes_as_the_configuration_did(self):
        big, caching = ModelSpec("folder", "/my models/big"), CacheOptions(cache="static")
        recipe = Recipe(big, CASCADE, parse_policy("fixed:gamma=3"), caching=caching)
        end = "--target '/my models/big' --cache static \"Your prompt\""
        drafts = f"specbench generate --drafter lookup+/a+b/small:dtype=int4 --gamma 3 {end}"
        assert generate_command(recipe, row_of("d@3")) == drafts
        plain = f"specbench generate --drafter none {end}"
        assert generate_command(recipe, row_of("d@3"), drafts=False) == plain
        assert generate_command(None, row_of("d@3")) == ""

    @pytest.mark.parametrize(
        ("ties", "said"),
        [
            ([True, True], "bfloat16, which was checked"),
            ([True, False], "rounding does not"),
            ([None], "the others"),
        ],
    )
    def test_outputs_that_differ_come_with_their_cause(self, tmp_path, ties, said):
        place = {"config": "d@2", "turn": 0, "repeat": 0, "position": 0, "gap": 0.1}
        differences = [
            {**place, "prompt": name, "numerical_tie": tie} for name, tie in zip(PROMPTS, ties, strict=False)
        ]
        speeds = {"plain": PLAIN, "d@2": times(2.0), "d@3": times(1.5)}
        fields = {"differences": differences, "target": {"dtype": "bfloat16"}, "tokens": {"d@2": [9] * 11}}
        report = reported(tmp_path, speeds, **fields)
        assert said in " ".join(report.answers[0].details)
        assert said in " ".join(tables.notes(Summary(load_results(tmp_path / "run"))))

    def test_each_temperature_has_its_answer(self, tmp_path):
        warm = {"plain,t=0.7": PLAIN, "e@2,t=0.7": times(0.5)}
        report = reported(tmp_path, {"plain": PLAIN, "d@2": times(2.0), **warm})
        starts = [answer.headline[:23] for answer in report.answers]
        assert starts == ["Greedy: Yes, d γ=2: 2.0", "At temperature 0.7: No,"]


# --- Warnings and facts -----------------------------------------------------------------------------


@pytest.mark.usefixtures("unpictured")
class TestWarnings:
    def test_an_unfinished_run_says_how_far_it_is(self, tmp_path):
        few = {"chat-01": [20.0], "chat-02": [20.0, 20.0]}
        report = reported(tmp_path, {"plain": PLAIN, "d@2": few}, finished=None)
        warning = next(each for each in report.findings if each.id == "unfinished.sweep")
        assert "15 of 24 generations" in warning.text
        assert "--resume" in warning.remedy
        report = reported(tmp_path / "finished", {"plain": PLAIN, "d@2": times(2)})
        assert not {"unfinished.sweep", "lines"} & {each.id for each in report.findings}

    def test_damaged_lines_are_told_with_advice(self, tmp_path):
        folder = write_exact(tmp_path / "run", {"plain": PLAIN, "d@2": times(2)})
        with (folder / "generations.jsonl").open("a") as file:
            file.write('{"schema":1,"conf')
        report = make_report(load_results(folder), "run", tmp_path)
        findings = {finding.id: finding for finding in report.findings}
        assert "cut short" in findings["lines"].text
        assert all(finding.remedy for finding in report.findings)

    def test_only_known_fields_of_the_machine_get_out(self, tmp_path):
        report = reported(
            tmp_path,
            {"plain": PLAIN},
            environment={"hostname": "secret-host", "home": "/home/somebody"},
            command=["sweep", "--gamma", "1..8", "--prompts", "my prompts.jsonl"],
        )
        for text in (to_page(report), to_markdown(report)):
            assert "secret-host" not in text
            assert "somebody" not in text
            assert "Example CPU" in text
            assert "specbench sweep --gamma 1..8 --prompts" in text


# --- Files ----------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Elements with their attributes, and whether they nest."""

    VOID = frozenset({"meta", "img", "source", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.raw: dict[str, str] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"<{tag}> repeats an attribute"
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.raw[self.open[-1]] = self.raw.get(self.open[-1], "") + data
        else:
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, Report]:
    """The report of a run like real ones, with figures, in the run's folder."""
    folder = write_run(
        tmp_path_factory.mktemp("reports") / "my run", drafters=DRAFTERS[1:3], gammas=(1, 4),
        categories=("chat", "code"), prompts_per_category=3, tokens=24, transformers_row=True,
    )  # fmt: skip
    report, paths = write_report(folder)
    assert paths[:2] == [folder / "report.html", folder / "report.md"]
    return folder, report


@pytest.fixture(scope="module")
def page(written) -> Page:
    return Page((written[0] / "report.html").read_text(encoding="utf-8"))


def test_the_page_is_whole(page):
    assert page.open == []
    assert page.elements[0] == ("html", {"lang": "en"})
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert headings.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(headings))


def test_the_page_loads_nothing(page):
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "object", "embed", "form", "base", "audio", "video")
        for name, value in attributes.items():
            assert not name.startswith("on"), f"<{tag} {name}>"
            assert name != "style"
            if name in ("src", "srcset", "href"):
                assert str(value).startswith(("#", "data:image/svg+xml;base64,"))
    assert not re.search(r"url\(|@import|fetch|XMLHttp|http", page.raw["style"] + page.raw["script"])


def test_its_policy_allows_its_own_style_and_script_only(page):
    (policy,) = [
        each["content"] for each in page.all("meta") if each.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    for tag in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.raw[tag].encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"


def test_the_page_can_be_used_without_eyes_or_script(page):
    assert all(each.get("alt") for each in page.all("img"))
    assert all(each.get("scope") in ("col", "row") for each in page.all("th"))
    assert not page.all("button")
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    links = [str(each["href"]) for each in page.all("a")]
    assert links
    assert {link[1:] for link in links} <= set(ids)
    tables = [each["data-sortable"] for each in page.all("table")]
    assert len(tables) == 4
    names = {str(each["alt"]).partition("'")[2].partition("'")[0] for each in page.all("img")} - {""}
    assert names
    assert names <= set(page.text)


def test_the_figures_are_those_beside_the_markdown(written, page):
    folder, _ = written
    files = sorted(path.stem for path in (folder / "plots").iterdir())
    assert files == sorted(set(FIGURES) - {"contexts", "batches"})  # which this run has not got
    links = re.findall(r"!\[[^\]]+\]\((.+?)\)", (folder / "report.md").read_text(encoding="utf-8"))
    assert len(links) == len(files) == len(page.all("img"))
    assert all((folder / link).is_file() for link in links)


def test_a_figure_is_safe_with_any_name(tmp_path):
    speeds = {"plain": PLAIN, "d@2": times(2), "d@3": times(1.5), "e@2": times(2)}
    folder = write_exact(tmp_path / "run", speeds, rows={"e@2": row_of("e@2", drafter=EVIL)})
    figure = draw_figures(load_results(folder), ["speedup"])[0]["speedup"]
    root = ET.fromstring(figure_bytes(figure, "svg", letters=True))  # noqa: S314
    assert "script" not in {each.tag.rpartition("}")[2] for each in root.iter()}
    assert "<script>" in "".join(root.itertext()), "a name is a text"


def test_no_ratio_stands_without_its_interval(written):
    report = written[1]
    for text in (to_markdown(report).replace("\\", ""), "".join(Page(to_page(report)).text)):
        ratios = re.findall(r"[\d.]+×.{0,3}", text)
        assert len(ratios) >= 3
        assert all(re.fullmatch(r"[\d.]+× \[\d", each) for each in ratios)


def test_cells_sort_by_their_figures(written, page):
    summary = Summary(load_results(written[0]))
    values = {each["data-value"] for each in page.all("td") if each.get("data-value")}
    assert {repr(float(speedup)) for speedup in summary.table()["speedup"]} <= values
    assert "nan" not in values


@pytest.mark.smoke
@pytest.mark.usefixtures("unpictured")
def test_names_are_data(tmp_path):
    report = reported(
        tmp_path,
        {"plain": PLAIN, "d@2": times(2), "d@3": {f"{EVIL}-1": [20.0], f"{EVIL}-2": [20.0]}},
        rows={"d@2": row_of("d@2", drafter=EVIL)},
        target={"name": EVIL},
        environment={"cpu": EVIL},
        command=["sweep", EVIL],
        run_id=EVIL,
    )
    plain = Page(to_page(reported(tmp_path / "plain", {"plain": PLAIN, "d@2": times(2)})))
    evil = Page(to_page(report))
    assert len(evil.all("script")) == 1
    assert evil.raw["script"] == plain.raw["script"]
    assert "<script>alert(1)</script>" in "".join(evil.text)
    assert "\x1b" not in to_page(report)
    markdown = to_markdown(report)
    assert "<script" not in markdown
    assert "[x](" not in markdown
    assert "\x1b" not in markdown
    rows = [re.sub(r"\\.", "", line) for line in markdown.splitlines() if line.startswith("| ")]
    heads = [row for row in rows if row.startswith("| ---")]
    assert {row.count("|") for row in rows} == {head.count("|") for head in heads}


# --- Command --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unpictured")
class TestCommand:
    def test_a_run_gets_its_report(self, tmp_path, capsys):
        run = write_exact(tmp_path / "one", {"plain": PLAIN, "d@2": times(2)})
        command(run)
        said = capsys.readouterr()
        expected = [run / f"report.{kind}" for kind in ("html", "md")]
        assert [line for line in said.out.splitlines() if "lengths" not in line] == [*map(str, expected)]
        assert all(path.stat().st_size for path in expected)
        assert "one: Yes, d γ=2: 2.00× [" in said.err
        with pytest.raises(UsageError, match="There is nothing to report"):
            command(write_exact(tmp_path / "zero", {"plain": {"chat-01": [None]}}))

    def test_a_place_that_cannot_be_written_is_an_error(self, tmp_path):
        run = write_exact(tmp_path / "run", {"plain": PLAIN})
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(RunError, match="cannot be written"):
            command(run, out=tmp_path / "file")
