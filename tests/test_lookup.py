from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ngram import Counting, draft

from specbench.decoding.drafts import Draft, StepOutcome
from specbench.decoding.protocols import StepPlan, run_to_end
from specbench.decoding.sampling import Randomness, Sampling
from specbench.drafters.lookup import LookupDrafter
from specbench.policies import FixedLength
from specbench.specs.drafters import Lookup


def drafted(
    context: Sequence[int], max_match: int | None = 3, min_match: int = 1, room: int = 100, gamma: int = 1
) -> list[int]:
    """What a fresh drafter proposes behind ``context``."""
    drafter = LookupDrafter(Lookup(max_match, min_match))
    drafter.begin(context)
    return draft(drafter, context, room, gamma).tokens


@pytest.mark.parametrize("stop", [0, 2])
def test_what_the_rule_did_not_want_is_told(stop):
    class Stopping(FixedLength):
        def should_continue(self, draft: Draft) -> bool:
            return len(draft.tokens) < stop

    drafter = LookupDrafter()
    drafter.begin([1, 2, 3, 4, 1])
    asking = drafter.propose([1, 2, 3, 4, 1], StepPlan(9, Stopping(7), Sampling(), Randomness(0)))
    found = run_to_end(asking)
    assert found.tokens == [2, 3][:stop]
    assert found.guess is not None
    assert found.guess.token == [2, 3, 4][stop]


def test_a_new_prompt_leaves_no_earlier_places_of_the_last():
    drafter = LookupDrafter(Lookup(None))
    drafter.begin([1, 2] * 20)
    draft(drafter, [1, 2] * 20)
    # 5 6 7 8 stood here once, and is followed by 50. In the last prompt place 20 came after place 18.
    context = [*range(100, 116), 5, 6, 7, 8, 50, 113, 5, 6, 7, 8]
    drafter.begin(context)
    assert draft(drafter, context, gamma=1).tokens == [50]


@pytest.mark.parametrize("max_match", [3, None])
def test_no_step_reads_the_whole_context(max_match):
    drafter = LookupDrafter(Lookup(max_match))
    context = Counting([1, 2, 3] * 1000)
    drafter.begin(context)
    draft(drafter, context)
    context.asked.clear()
    for token in (1, 2, 3):
        context.append(token)
        drafter.update(StepOutcome(context, 1, torch.zeros(1, 4)))
        draft(drafter, context)
    assert max(context.asked) <= 4
    assert len(context.asked) < 500  # 64 comparisons of two tokens each in a step, and little else


# Against a search through the whole context.


def reference(context: Sequence[int], max_match: int | None, min_match: int, gamma: int) -> list[int]:
    """The rule written down plainly: of all places, the longest match, of equals the last."""
    limit = min(max_match or 64, len(context) - 1)

    def match(place: int) -> int:
        length = 0
        while length < min(limit, place) and context[place - 1 - length] == context[-1 - length]:
            length += 1
        return length

    places = [place for place in range(1, len(context)) if match(place) >= min_match]
    # Matches of more than four tokens (of min_match, if that is more) are compared at 32 places only.
    indexed = max(4, min_match)
    near = [place for place in places if match(place) >= indexed][-32:]
    best = max(near or places, key=lambda place: (match(place), place), default=None)
    extended = list(context)
    while best is not None and len(extended) < len(context) + gamma:
        extended.append(extended[best + len(extended) - len(context)])
    return extended[len(context) :]


@settings(max_examples=300, deadline=None)
@given(
    # Drawn as a whole: lists drawn token by token are mostly too short to repeat themselves.
    st.builds(
        lambda seed, vocabulary, length: Random(seed).choices(range(vocabulary), k=length),
        st.integers(0, 2**32),
        st.integers(1, 4),
        st.integers(1, 150),
    ),
    st.none() | st.integers(1, 10),
    st.integers(1, 10),
    st.data(),
)
def test_agrees_with_a_search(context, max_match, min_match, data):
    min_match = min(min_match, max_match or min_match)
    drafter = LookupDrafter(Lookup(max_match, min_match))
    end = data.draw(st.integers(1, len(context)))
    drafter.begin(context[:end])
    while True:
        gamma = data.draw(st.integers(0, 6))
        assert draft(drafter, context[:end], room=gamma, gamma=9).tokens == reference(
            context[:end], max_match, min_match, gamma
        )
        if end == len(context):
            break
        emitted = data.draw(st.integers(1, len(context) - end))
        end += emitted
        drafter.update(StepOutcome(context[:end], emitted, torch.zeros(emitted, 4)))


# -- asked token by token ------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(0, 3), min_size=1, max_size=6)
)
def test_behind_tokens_of_another_the_match_includes_them(context, drafted):
    """As in a context that ends with them, but for matches that only they would make."""
    drafter = LookupDrafter(Lookup(None, 2))
    drafter.begin(context)
    drafter.read(context)
    found = drafter.guess(context, drafted, Sampling())
    text = [*context, *drafted]
    best = (0, -1)
    for place in range(1, len(context)):
        match = 0
        while match < min(place, len(text)) and text[place - 1 - match] == text[-1 - match]:
            match += 1
        if match >= 2:
            best = max(best, (match, place))
    if best[0] == 0:
        assert found is None
    else:
        assert found is not None
        assert (found.token, found.match_confidence) == (context[best[1]], best[0] / (best[0] + 1))


def test_a_draft_begins_anew_when_the_context_is_read():
    drafter = LookupDrafter(Lookup(None, 2))
    context = [1, 2, 3, 4, 1, 2]
    drafter.begin(context)
    drafter.read(context)
    assert [drafter.guess(context, [3][:n], Sampling()).token for n in (0, 1)] == [3, 4]  # type: ignore[union-attr]
    context += [9]
    drafter.read(context)
    assert drafter.guess(context, [], Sampling()) is None


def test_a_copy_that_was_not_taken_is_not_continued():
    """In a cascade the model may draft another token in its place."""
    context = [1, 2, 3, 4, 7, 3, 9, 1, 2]
    drafter = LookupDrafter()
    drafter.begin(context)
    drafter.read(context)
    for taken, expected in ((3, 4), (7, 3)):
        guess = drafter.guess(context, [], Sampling())
        assert guess is not None
        assert guess.token == 3
        guess = drafter.guess(context, [taken], Sampling())
        assert guess is not None
        assert guess.token == expected
