from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.base.errors import UsageError
from specbench.bench import prompts as module
from specbench.bench.prompts import Prompt, load_prompts, read_prompt_text

SINGLE_TURN = {*["chat", "code", "code-editing", "mathematics", "question-answering", "retrieval"]}
SINGLE_TURN |= {"structured-output", "summarisation", "translation"}
MULTI_TURN = {"multi-turn-chat", "multi-turn-code"}


def row(**fields: Any) -> dict[str, Any]:
    return {"id": "a", "category": "chat", "turns": ["Hello"], **fields}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return path


def refused(source: Path | str, **options: Any) -> str:
    """What is wrong with prompts, without the hint."""
    with pytest.raises(UsageError) as caught:
        load_prompts([source], **options)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return caught.value.message


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


# The sets that come with specbench


def test_every_promised_set_exists_and_has_at_least_eight_prompts():
    sets = Counter(prompt.category for prompt in load_prompts(["all"]))
    assert set(sets) == SINGLE_TURN | MULTI_TURN
    assert min(sets.values()) >= 8
    assert list(sets) == sorted(sets)


@pytest.mark.parametrize("name", sorted(SINGLE_TURN | MULTI_TURN))
def test_a_set_has_its_own_category_numbered_ids_and_as_many_turns_as_it_says(name):
    prompts = load_prompts([name])
    assert ids(prompts) == [f"{name}-{number:02d}" for number in range(1, len(prompts) + 1)]
    assert {prompt.category for prompt in prompts} == {name}
    assert {len(prompt.turns) for prompt in prompts} <= ({2, 3} if name in MULTI_TURN else {1})
    for prompt in prompts:
        for text in [*prompt.turns, *([] if prompt.system is None else [prompt.system])]:
            assert text.strip()
            assert text == text.strip("\n")


# Reading


def test_a_file_is_read_with_all_its_fields_and_so_is_spec_benchs(tmp_path):
    path = write(
        tmp_path / "mine.jsonl",
        row(turns=["One", "Two"], system="Be brief."),
        row(id="b", category="own", source="ignored", system=None),
        row(id=7, system=""),
        {"question_id": 81, "category": "writing", "turns": ["One", "Two"], "reference": ["3"]},
    )
    assert load_prompts([path]) == load_prompts([str(path)])
    assert load_prompts([path]) == [
        Prompt("a", "chat", ("One", "Two"), "Be brief."),
        Prompt("b", "own", ("Hello",), None),
        Prompt("7", "chat", ("Hello",), ""),
        Prompt("81", "writing", ("One", "Two"), None),
    ]


def test_turns_alone_and_messages_are_read_too(tmp_path):
    """As DeepSpec and SPEED-Bench have them."""
    said = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "One"},
        {"role": "assistant", "content": "left out"},
        {"role": "user", "content": [{"type": "text", "text": "Tw"}, {"type": "text", "text": "o"}]},
    ]  # fmt: skip
    path = write(
        tmp_path / "mt.jsonl", {"turns": ["Hello"]}, {"question_id": "x", "messages": said, "category": "qa"}
    )
    assert load_prompts([path]) == [
        Prompt("mt-1", "mt", ("Hello",), None),
        Prompt("x", "qa", ("One", "Two"), "Be brief."),
    ]


def test_blank_lines_crlf_byte_order_marks_and_unicode_line_separators_do_no_harm(tmp_path):
    odd = json.dumps(row(turns=["a\u2028b\u0085c"]), ensure_ascii=False)
    lines = ["\ufeff", odd, "  \t", f"\ufeff{json.dumps(row(id='b'))}", ""]  # as where files were joined
    path = tmp_path / "mine.jsonl"
    path.write_bytes("\r\n".join(lines).encode())
    assert load_prompts([path]) == [
        Prompt("a", "chat", ("a\u2028b\u0085c",), None),
        Prompt("b", "chat", ("Hello",), None),
    ]


def test_text_is_kept_as_data_except_for_lone_surrogates(tmp_path):
    text = " [red]\x00\x1b[31m שלום 🚲 [/] <b> "
    turns = [text, "a\ud800b", "\ud83d\ude00"]
    (prompt,) = load_prompts([write(tmp_path / "mine.jsonl", row(turns=turns, system="\udfff"))])
    assert prompt.turns == (text, "a\ufffdb", "😀")  # two halves of a pair are one character together
    assert prompt.system == "\ufffd"


def test_sources_are_read_in_order_and_each_once(tmp_path):
    path = write(tmp_path / "mine.jsonl", row(), row(id="b"))
    chat = load_prompts(["chat"])
    assert load_prompts([path, "chat", path, "chat"]) == load_prompts([path]) + chat
    assert load_prompts(["chat", "all"])[: len(chat)] == chat
    assert len(load_prompts(["chat", "all"])) == len(load_prompts(["all"]))


def test_a_name_means_the_set_and_a_path_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "chat", row())
    write(tmp_path / "all", row(id="b"))
    write(tmp_path / "plain", row(id="c"))
    assert ids(load_prompts(["chat"]))[:2] == ["chat-01", "chat-02"]
    assert ids(load_prompts(["./chat"])) == ids(load_prompts([Path("chat")])) == ["a"]
    assert ids(load_prompts([Path("all")])) == ["b"]
    assert ids(load_prompts(["plain"])) == ["c"]


# Filters


@given(st.lists(st.sampled_from("xyz"), min_size=1, max_size=20), st.integers(1, 25))
def test_taken_in_turn_counts_are_as_even_as_the_supply_allows(categories, limit):
    prompts = [Prompt(str(n), category, ("Hello",), None) for n, category in enumerate(categories)]
    taken = module.interleave(prompts, limit)
    assert len(taken) == len(set(ids(taken))) == min(limit, len(prompts))
    supply, counts = Counter(categories), Counter(prompt.category for prompt in taken)
    most = max(counts.values())
    assert all(counts[category] >= min(supply[category], most - 1) for category in supply)


# Errors in sources


def test_a_line_of_text_is_a_prompt(tmp_path):
    (tmp_path / "mine.txt").write_text('Why?\n\n  {"turns": 1}\n', encoding="utf-8")
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Why?", "answer": 4}\n', encoding="utf-8")
    (first, second), (third,) = (load_prompts([tmp_path / f"mine.{kind}"]) for kind in ("txt", "jsonl"))
    assert (first.id, first.category, first.turns) == ("mine-1", "mine", ("Why?",))
    assert (second.id, second.turns) == ("mine-3", ('{"turns": 1}',))
    assert (third.id, third.turns) == ("mine-1", ("Why?",))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.jsonl", "There is no prompt set or file 'missing.jsonl'."),
        ("\x1b[31mred", "There is no prompt set or file "),  # nothing in it drives the terminal
        (Path("\udcff"), "There is no prompt set or file "),
        (Path("nul\x00"), r"The prompt file 'nul\x00' cannot be read: "),
        ("n" * 5000, "The prompt file nnn"),
        (".", "The prompt file . cannot be read: "),
    ],
)
def test_names_without_a_file_are_refused(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refused(source)
    assert said.startswith(message)
    assert said.isprintable()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            json.dumps(row()).encode() + b"\n" + '{"id": "Grüße"}'.encode("latin-1"),
            "{} is not UTF-8 (line 2).",
        ),
        (b"", "{}."),
        (b"\n \n\r\n", "{}."),
    ],
)
def test_files_that_are_not_utf8_or_hold_no_prompts_are_refused(content, message, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    assert refused(path).endswith(message.format(path))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        *((line, " is not a JSON object.") for line in ('{"id": "a", ', "[" * 100_000, '{"id": ' + "1" * 5000, "null")),
        *((line, " has an empty field, or no turns.") for line in (
            '{"id": "a", "category": "chat"}', '{"turns": []}', '{"messages": [{"role": "assistant", "content": "x"}]}',
            '{"id": " ", "turns": ["x"]}', '{"category": "", "turns": ["x"]}', '{"turns": ["Hello", " \\n"]}',
        )),
        ('{"messages": [{"role": "tool", "content": "x"}]}', ': "messages[0].role" '),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', ': "messages[0].content'),
        ('{"question_id": null, "turns": ["x"]}', ': "id" '),
        ('{"turns": ["Hello", 1]}', ': "turns[1]" '),
        ('{"turns": ["x"], "system": 1}', ': "system" '),
    ],
)  # fmt: skip
def test_a_bad_line_is_refused_with_its_number(line, reason, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{json.dumps(row())}\n\n{line}\n", encoding="utf-8")
    assert refused(path).startswith(f"Line 3 of {path}{reason}")


def test_duplicate_ids_are_named_with_both_places(tmp_path):
    one = write(tmp_path / "one.jsonl", row(), row(id="7"))
    assert refused(write(tmp_path / "same.jsonl", row(), row(id="b"), row())) == (
        f"Two prompts have the id 'a': {tmp_path / 'same.jsonl'} line 1 and {tmp_path / 'same.jsonl'} line 3."
    )
    two = write(tmp_path / "two.jsonl", {"question_id": 7, "category": "math", "turns": ["Hello"]})
    with pytest.raises(UsageError, match="Two prompts have the id '7'"):
        load_prompts([one, two])


# The prompt of generate


def stdin(data: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(data), encoding="ascii")  # the terminal's own encoding plays no part


def no_prompt(prompt: str | None, data: bytes | None = b"unread") -> str:
    with pytest.raises(UsageError) as caught:
        read_prompt_text(prompt, None if data is None else stdin(data))
    assert "\n" not in str(caught.value)
    return caught.value.message


def test_the_argument_is_the_prompt():
    assert read_prompt_text(" Hello\n", None) == " Hello\n"
    unread = stdin(b"unread")
    assert read_prompt_text("--", unread) == "--"
    assert unread.read() == "unread"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"Hello", "Hello"),
        (b"Hello\n", "Hello"),
        (b"Hello\r\n", "Hello"),
        (b"Hello\n\n", "Hello\n"),
        (b" one\r\ntwo \r", " one\r\ntwo \r"),
        (b"\xef\xbb\xbfHello", "Hello"),
        ("Grüße 🚲".encode(), "Grüße 🚲"),
        (b"-", "-"),
        (b"\x00\x1b[31m[red]\x07\n", "\x00\x1b[31m[red]\x07"),
    ],
)
def test_standard_input_gives_the_text(data, text):
    assert read_prompt_text("-", stdin(data)) == text
    if text != "-":
        assert read_prompt_text(None, stdin(data)) == text


@given(st.text(st.characters(codec=None), min_size=1))
def test_any_prompt_can_be_encoded_and_is_kept_otherwise(prompt):
    if prompt == "-" or not prompt.strip():
        return
    text = read_prompt_text(prompt, None)
    assert len(text.encode()) > 0
    assert all(
        a == b or ("\ud800" <= a <= "\udfff" and b == "\ufffd") for a, b in zip(prompt, text, strict=True)
    )


@pytest.mark.parametrize("data", [None, b"", b" \t\r\n", "\u3000\u2003".encode(), b"\xef\xbb\xbf"])
def test_a_prompt_is_needed(data):
    terminal = stdin(b"typed")
    terminal.isatty = lambda: True  # type: ignore[method-assign] # which is not waited for
    with pytest.raises(UsageError, match="No prompt was given"):
        read_prompt_text(None, terminal)
    given = [None, "-", *([] if data is None else [data.decode("utf-8-sig")])]
    assert {no_prompt(prompt, data) for prompt in given} == {"No prompt was given."}


def test_a_prompt_that_is_not_utf8_is_refused():
    assert no_prompt("-", b"one\ntwo \xff") == "The prompt from standard input is not UTF-8 (line 2)."
