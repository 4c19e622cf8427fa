"""What comes from elsewhere is data: models, files and names can neither run anything nor lead out of their folder.

docs/security.md says what is trusted. Single renderers and readers are tested in their own files.
"""

from __future__ import annotations

import ast
import csv
import html.parser
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_runs import write_exact
from test_builtin import write_gguf
from test_composites import whole_model
from tiny import save_tiny, tiny_llama, tiny_tokenizer

from specbench.base.errors import SpecbenchError, UsageError
from specbench.bench.prompts import load_prompts
from specbench.cli import run
from specbench.generate import encode_prompt
from specbench.models import chat_templates
from specbench.models.files import plain_name, read_header, shard_names
from specbench.models.gguf import read_gguf_header
from specbench.models.load import load_model
from specbench.options import LoadOptions
from specbench.results.results import load_results
from specbench.results.store import write_csv
from specbench.results.trace import read_trace
from specbench.show import plots
from specbench.show.report import write_report  # noqa: F401 - takes the figures by name when it is imported

PACKAGE = Path(__file__).resolve().parents[1] / "specbench"
CPU = LoadOptions("float32", "cpu")

# -- no code of others, and no pickles -------------------------------------------------------------

RUNS_CODE = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "runpy.run_path"}
READS_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
Node = TypeVar("Node", bound=ast.AST)


@cache
def all_nodes() -> list[tuple[str, ast.AST]]:
    """The package's syntax, with the names of its files."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    return [(path.name, node) for path, tree in trees.items() for node in ast.walk(tree)]


def nodes(kind: type[Node]) -> list[tuple[str, Node]]:
    return [(name, node) for name, node in all_nodes() if isinstance(node, kind)]


def test_the_package_has_no_means_to_run_what_it_reads():
    """What could run a model's code is told not to; calls that take their arguments from a dict get the word there."""
    loading = 0
    for file, call in nodes(ast.Call):
        called, words = ast.unparse(call.func), {keyword.arg: keyword.value for keyword in call.keywords}
        assert called.removeprefix("builtins.") not in RUNS_CODE, f"{file}: {called}"
        assert called not in ("numpy.load", "np.load"), f"{file}: {called}"
        assert called != "torch.load", file
        for word in words.keys() & {"shell", "trust_remote_code", "allow_dangerous_deserialization"}:
            assert ast.unparse(words[word]) == "False", f"{file}: {ast.unparse(call)}"
        if called.endswith("from_pretrained") and "Gguf" not in called:
            told = "trust_remote_code" in words or (None in words and file == "gguf.py")
            assert told, f"{file}: {ast.unparse(call)}"
            loading += 1
    assert loading >= 4
    for file, node in [*nodes(ast.Import), *nodes(ast.ImportFrom)]:
        names = [str(getattr(node, "module", "")), *(each.name for each in node.names)]
        if ast.unparse(node) != "import yaml":  # which has a reader of plain data too: see below
            assert not {name.split(".")[0] for name in names} & READS_CODE, file
    for file, attribute in nodes(ast.Attribute):
        if getattr(attribute.value, "id", None) == "yaml":
            assert attribute.attr in ("safe_load", "safe_dump", "YAMLError"), f"{file}: {attribute.attr}"
    for file, literal in nodes(ast.Dict):
        for key, value in zip(literal.keys, literal.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "trust_remote_code":
                assert ast.unparse(value) == "False", file


OF_CODE: tuple[dict[str, Any], ...] = (
    {"attn_implementation": "org/kernel"},
    {"_attn_implementation": "kernels-community/flash-attn2"},
    {"attn_implementation": {"": "org/kernel"}},
    {"attn_implementation": "paged|eager"},
    {"attn_implementation": "flash_attention_2"},
    {"experts_implementation": "org/kernel"},
    {"attribute_map": {"theirs": "_attn_implementation_internal"}, "theirs": "org/kernel"},
    {"attribute_map": {"_attn_implementation_internal": "theirs"}, "theirs": "org/kernel"},
    {"configuration_files": ["config.4.0.0.json"]},
    {"fusion_config": {"patch_embeddings": True}},
)


@pytest.mark.parametrize("nested", [False, True])  # a configuration within a configuration
def test_a_model_does_not_choose_the_code_it_is_computed_by(tmp_path, nested, monkeypatch):
    """Kernels are code, which `transformers` fetches from the hub by the names that a configuration gives."""
    from transformers.integrations import hub_kernels

    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *_, **__: pytest.fail("a kernel is fetched"))
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda: True)
    if nested:
        whole_model("gemma3").save_pretrained(tmp_path)
    else:
        save_tiny(tmp_path)
    ordinary = load_model(str(tmp_path), CPU, tokenizer=False)
    content = (tmp_path / "config.json").read_text()
    for settings_of in OF_CODE:
        raw = json.loads(content)
        for part in [raw, raw["text_config"], raw["vision_config"]] if nested else [raw]:
            part |= settings_of
        (tmp_path / "config.json").write_text(json.dumps(raw))
        (tmp_path / "config.4.0.0.json").write_text(json.dumps(raw | {"attn_implementation": "org/kernel"}))
        loaded = load_model(str(tmp_path), CPU, tokenizer=False)
        for module, same in zip(loaded.model.modules(), ordinary.model.modules(), strict=True):
            if (config := getattr(module, "config", None)) is not None:
                assert config._attn_implementation == same.config._attn_implementation, settings_of
                assert config._experts_implementation == same.config._experts_implementation, settings_of


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_chat_template_is_a_program_in_a_cage(template):
    with pytest.raises(UsageError, match=r"chat template refuses .* Use --raw\."):
        encode_prompt(tiny_tokenizer(chat_template=template), "Hello")


def test_a_chat_template_writes_what_its_tokenizer_writes():
    template = (
        "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message['content'] | trim }}\n{% endfor %}"
        "{% generation %}{% if add_generation_prompt %}<assistant>{% endif %}{% endgeneration %}"
        "{{ {'a': ['<b>', 'é']} | tojson }}{% set n = namespace(of=dict(x=1)) %}{{ n.of.x }}"
    )
    tokenizer = tiny_tokenizer(chat_template=template)
    messages = [{"role": "system", "content": " S\ud800 "}, {"role": "user", "content": "Ü\u2028{{ 1 }}"}]
    for prompt in (False, True):
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert chat_templates.render_chat(tokenizer, messages, add_generation_prompt=prompt) == expected


BOTH = "<system>hi<user>a <b>"


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("{{ m.content }}", BOTH),
        ("{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}", BOTH),
        ("{% for p in m['content'] %}{{ p['text'] or raise_exception('parts!') }}{% endfor %}", BOTH),
        ("{{ m.content[0].text | upper | lower }}", BOTH),
        ("{{ 's' if m.content is string }}{{ m.content | tojson }}", '<system>s"hi"<user>s"a <b>"'),
        ("{{ m.text }}", None),
        ("{% if m.role == 'user' %}{{ m.content }}{% endif %}", None),
        ("{% if m.role == 'system' %}{{ m.content }}{% endif %}", None),
    ],
)
def test_what_messages_say_comes_out_of_a_chat_template(said, written):
    """A template can take texts, or only lists of parts; words that it would leave out are not lost in silence."""
    tokenizer = tiny_tokenizer(chat_template="{% for m in messages %}<{{ m.role }}>" + said + "{% endfor %}")
    messages = [{"role": "system", "content": "hi"}, {"role": "user", "content": "a <b>"}]
    if written is None:
        with pytest.raises(chat_templates.TemplateError):
            chat_templates.render_chat(tokenizer, messages)
    else:
        assert chat_templates.render_chat(tokenizer, messages) == written


def test_a_tokenizer_names_no_files_outside_its_folder(tmp_path):
    """What its configuration says about files is passed over in favor of the folder's own."""
    folder = save_tiny(tmp_path / "model")
    secret = tmp_path / "secret.json"
    secret.write_text("{")
    file = folder / "tokenizer_config.json"
    settings_of = json.loads(file.read_text())
    settings_of |= dict.fromkeys(("tokenizer_file", "vocab_file", "merges_file"), str(secret))
    file.write_text(json.dumps(settings_of))
    tokenizer = load_model(str(folder), CPU).tokenizer
    assert tokenizer is not None
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()


# -- paths -----------------------------------------------------------------------------------------

PART = st.sampled_from(["..", ".", "a", "", "/", "\\", "C:", "~", "a.b", "\0", "..\\..", "//", "...", " "])
PARTS = st.lists(PART, min_size=1, max_size=6)


@settings(max_examples=500)
@given(PARTS.map("/".join) | PARTS.map("".join) | st.text(max_size=20))
def test_a_file_that_a_model_names_stays_in_its_folder(name):
    folder = os.path.join(os.sep, "models", "mine")  # noqa: PTH118 - as the operating system joins
    try:
        kept = plain_name(name, "mine")
    except UsageError:
        return
    for path in (kept, kept.replace("\\", "/")):
        whole = os.path.normpath(os.path.join(folder, path))  # noqa: PTH118
        assert os.path.commonpath([folder, whole]) == folder


# -- links in the folder of somebody's run ---------------------------------------------------------


@pytest.fixture
def theirs(tmp_path) -> Path:
    """The folder of a run that somebody else has made."""
    if os.name == "nt":
        pytest.skip("making links takes a privilege there")
    return write_exact(
        tmp_path / "theirs", {"plain": {"chat-01": [10.0, 10.0]}, "d@2": {"chat-01": [20.0, 20.0]}}
    )


SWEEP = shlex.split("sweep --out theirs --resume --target model --dtype float32")


@pytest.fixture
def one_figure(monkeypatch):
    """Others are written alike."""
    monkeypatch.setattr(plots, "FIGURES", {"speedup": plots.FIGURES["speedup"]})


@pytest.mark.usefixtures("one_figure")
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["report", "theirs"], "report.html"),
        (["report", "theirs"], "plots"),
        (["plot", "theirs"], "plots/speedup.png"),
        (SWEEP, "run.json"),
        (SWEEP, "generations.jsonl"),
        (SWEEP, ".lock"),
    ],
)
def test_nothing_is_written_through_a_link(theirs, monkeypatch, capsys, words, name):
    monkeypatch.chdir(theirs.parent)
    if words == SWEEP:
        save_tiny(theirs.parent / "model")
    mine = theirs.parent / "mine"
    link = theirs / name
    if name == "plots":
        mine.mkdir()
    else:
        # What a run must have, so that the link is not refused for what it holds.
        mine.write_bytes(link.read_bytes() if link.exists() else b"mine")
        link.unlink(missing_ok=True)
        link.parent.mkdir(exist_ok=True)
    link.symlink_to(mine)
    before = [] if mine.is_dir() else mine.read_bytes()
    assert run(words) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == (
        f"specbench: '{link.relative_to(theirs.parent)}' is a symbolic link, and nothing is written through it."
        " Remove it, or write elsewhere."
    )
    assert link.is_symlink()
    assert (list(mine.iterdir()) if mine.is_dir() else mine.read_bytes()) == before


@pytest.mark.usefixtures("one_figure")
def test_no_name_of_an_unfinished_file_can_be_prepared(theirs, monkeypatch):
    mine = theirs.parent / "mine"
    mine.write_text("mine")
    (theirs / ".report.html.partial").symlink_to(mine)
    opened: list[str] = []
    replace = Path.replace

    def record(self: Path, target: Any) -> Path:
        opened.append(self.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", record)
    for _ in range(2):
        assert run(["report", str(theirs)]) == 0
    assert mine.read_text() == "mine"
    assert len(set(opened)) == len(opened) > 4


# -- files of any content --------------------------------------------------------------------------


@st.composite
def edits(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Cuts, insertions and changes of single bytes."""
    step = st.tuples(
        st.sampled_from(["cut", "put", "change"]), st.floats(0, 1), st.binary(min_size=1, max_size=9)
    )
    steps = draw(st.lists(step, min_size=1, max_size=4))

    def edit(content: bytes) -> bytes:
        for what, where, data in steps:
            at = int(where * len(content))
            rest = {"cut": b"", "put": data + content[at:], "change": data + content[at + len(data) :]}[what]
            content = content[:at] + rest
        return content

    return edit


def test_a_damaged_file_is_read_or_refused_in_a_sentence(tmp_path):
    """Files of every kind that is read. The interesting part is at the beginning, where the headers are."""
    tiny_llama().save_pretrained(tmp_path / "model")
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": {"a": "b.safetensors"}}).encode()
    prompt = json.dumps({"id": "a", "category": "c", "turns": ["t"], "system": "s"}).encode() + b"\n"
    kinds: dict[str, tuple[bytes, Callable[[Path], Any]]] = {
        "model.gguf": (write_gguf(tmp_path / "tiny.gguf").read_bytes(), read_gguf_header),
        "model.safetensors": ((tmp_path / "model" / "model.safetensors").read_bytes(), read_header),
        "index.json": (index, lambda path: shard_names(path, "mine")),
        "prompts.jsonl": (prompt, lambda path: load_prompts([path])),
        "trace.jsonl": (b'{"event": "header", "version": 1}\n', lambda path: list(read_trace(path))),
    }

    @settings(max_examples=150 * len(kinds), deadline=None)
    @given(st.sampled_from(sorted(kinds)), edits())
    def check(name: str, edit: Callable[[bytes], bytes]) -> None:
        content, read = kinds[name]
        path = tmp_path / name
        path.write_bytes(edit(content[:4000]) + content[4000:])
        message = ""
        try:
            read(path)
        except SpecbenchError as error:
            message = str(error)
        assert "\n" not in message

    check()


# -- names and texts on their way out --------------------------------------------------------------

EVIL = "=cmd|' C calc'!A0;=1+1 <script>alert(1)<⁄script><blink onload=x> [red]x[⁄red] `*_$|\x1b[31m\x9b2J\u202e\r#"
"""A formula, markup of three kinds, and what moves a terminal, in a name that a folder can have."""

UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Tags(html.parser.HTMLParser):
    """What a page has in the way of tags and handlers."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


@pytest.mark.skipif(sys.platform == "win32", reason="such names cannot be")
def test_evil_names_come_out_as_what_they_are(tmp_path, monkeypatch, cli):
    """A sweep of a model and prompts with evil names, and what is made of it."""
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / EVIL)
    line = {"id": f"@{EVIL}", "category": f"+{EVIL}", "turns": [f"-{EVIL}"], "system": None}
    (tmp_path / "evil.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    options = "--dtype float32 --device cpu --prompts ./evil.jsonl -n 6 --gamma 2 --repeats 2"
    options += " --drafter lookup --ignore-eos --out run"
    folder, swept = tmp_path / "run", cli("sweep", "--target", f"./{EVIL}", *options.split())
    assert swept.code == 0, swept.err
    frame = load_results(folder)
    assert set(frame.generations["prompt"]) == {f"@{EVIL}"}
    assert set(frame.generations["target"]) == {EVIL}

    reported, compared = cli("report", "run"), cli("compare", "run:lookup@2", "run:plain")
    assert (reported.code, compared.code) in ((0, 0), (0, 1))
    (page,) = (file.read_text(encoding="utf-8") for file in folder.rglob("*.html"))
    tags = Tags(page)
    assert "alert(1)" in page, "the name is not on the page: the test shows nothing"
    assert tags.tags.count("script") <= 1
    assert "blink" not in tags.tags
    assert not [name for name in tags.attributes if name.startswith("on")]
    pages = [file.read_text(encoding="utf-8") for file in folder.rglob("*.md")]
    assert not any("<script" in markdown for markdown in pages)
    said = [
        text for result in (swept, reported, compared) for text in (result.out, result.err.replace("\r", ""))
    ]
    assert not any(UNSEEN.search(text.replace("\n", "")) for text in (*said, page, *pages))
    with (folder / "summary.csv").open(encoding="utf-8", newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert cells
    assert not [cell for cell in cells if re.match("[=+@\t\r]|-(?![0-9.])", cell)]


CELLS = st.text(st.sampled_from("=+-@\t\r\n;,|'\" ax1＝＠－")) | st.sampled_from(
    ["=1+1", "x;=1", "a\n@b", " =1"]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(CELLS, min_size=1, max_size=4), st.sampled_from(",;\t|"))
def test_no_cell_of_a_csv_file_begins_a_formula_however_it_is_cut(texts, separator):
    """Spreadsheets of some languages cut at semicolons, and some people paste."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "summary.csv"
        write_csv(pd.DataFrame({"name": texts, "value": [-1.5] * len(texts)}), path)
        with path.open(encoding="utf-8", newline="") as file:
            as_written = list(csv.reader(file))
        content = path.read_text(encoding="utf-8")
    assert [float(row[1]) for row in as_written[1:]] == [-1.5] * len(texts)
    for (shown, _), text in zip(as_written[1:], texts, strict=True):
        kept = re.sub("\r\n?", "\n", text)
        assert shown.replace("'", "") == kept.replace("'", ""), "something else than quotes was added"
    for cell in re.split(f"[{re.escape(separator)}\n\r]", content):
        assert not re.match("[=+@＝＋－＠]|-(?![0-9])", cell)
