"""The prompts that heads are trained on: varied, and none that is measured on."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from specbench.base.errors import UsageError
from specbench.bench.prompts import ALL_SETS, TRAINING_SET, Prompt, load_prompts, set_names
from specbench.train.prompts import held_out_prompts, training_prompts

IN_A_ROW = 8


def runs_of_words(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.casefold())
    return {tuple(words[i : i + IN_A_ROW]) for i in range(len(words) - IN_A_ROW + 1)}


def test_the_set_is_large_and_varied_and_never_measured_on():
    prompts = training_prompts([TRAINING_SET])
    assert not {prompt.id for prompt in prompts} & {prompt.id for prompt in load_prompts([ALL_SETS])}
    assert TRAINING_SET in set_names()
    assert len({prompt.turns for prompt in prompts}) == len(prompts) > 600
    kinds = Counter(prompt.category for prompt in prompts)
    assert len(kinds) >= 12
    assert min(kinds.values()) >= 20
    assert max(kinds.values()) < 0.2 * len(prompts)
    measured = [turn for prompt in load_prompts([ALL_SETS]) for turn in prompt.turns]
    known = set().union(*map(runs_of_words, measured))
    assert not [prompt.turns[0] for prompt in prompts if known & runs_of_words(prompt.turns[0])]


def test_what_is_measured_on_is_refused(tmp_path):
    measured, mine = load_prompts(["chat"])[4], tmp_path / "mine.jsonl"
    changed = measured.turns[0].upper().replace(" ", "  ").rstrip(".") + " !"
    mine.write_text(json.dumps({"id": "mine", "category": "x", "turns": ["Hello", changed]}))
    with pytest.raises(UsageError, match=f"'mine' is also in a benchmark set .{measured.id}"):
        training_prompts([mine])
    mine.write_text(json.dumps({"id": "mine", "category": "x", "turns": [measured.turns[0] + " And why?"]}))
    assert len(training_prompts([mine])) == 1


def test_held_out_prompts_are_of_all_kinds_and_about_something_else():
    prompts = load_prompts([TRAINING_SET])
    trained, held = held_out_prompts(prompts, 15)
    assert len({prompt.category for prompt in held}) == len(held) == 15
    assert not {prompt.id for prompt in trained} & {prompt.id for prompt in held}
    assert len(trained) + len(held) == len(prompts)
    subject = next(each for each in held if each.category == "summary").turns[0].split(": ", 1)[-1][-60:]
    assert not [prompt for prompt in trained if subject in prompt.turns[0]]
    few = [Prompt(str(i), "x", (str(i),)) for i in range(4)]
    assert [prompt.id for prompt in held_out_prompts(few, 15)[1]] == ["3"]
    with pytest.raises(UsageError, match="at least 3 prompts"):
        held_out_prompts(few[:2], 1)
