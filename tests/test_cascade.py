"""Cascades: lookup or ngram where they know something, a model where they do not."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from scripted import Careful, ScriptedScorer, fixed_script, random_table, steps_of
from test_exact import LENGTHS, NEW, largest_gap, loop_distribution, target_distribution
from tiny import tiny_language_model, tiny_tokenizer

from specbench.backends.torch.caches import CACHE_KINDS
from specbench.base.errors import UsageError
from specbench.decoding.drafts import Draft, Guess
from specbench.decoding.logits import Logits
from specbench.decoding.protocols import Decoding, DraftPolicy, NewPrompt, StepPlan, run_to_end
from specbench.decoding.sampling import Randomness, Sampling
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter, SelfDrafter
from specbench.drafters.ngram import NGramDrafter
from specbench.generate import autoregressive_generate, speculative_generate
from specbench.models.drafters import check_drafter, join_cascade, load_drafter, wrap_drafter
from specbench.models.target import wrap_target
from specbench.options import CacheKind
from specbench.policies import FixedLength, build_policy
from specbench.specs.drafters import Cascade, Lookup, NGram, parse_drafter
from specbench.specs.models import parse_model

VOCAB = 12


class Watched(CascadeDrafter):
    """Keeps the drafts it made."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.drafts: list[Draft] = []

    def propose(self, *arguments: Any) -> Decoding[Draft]:
        self.drafts.append((yield from super().propose(*arguments)))
        return self.drafts[-1]


def kinds(draft: Draft) -> str:
    """For every token: f where it was free, m where it is the model's."""
    return "".join("m" if isinstance(source, Logits) else "f" for source in draft.sources)


def propose(
    drafter: Any,
    context: Sequence[int],
    policy: DraftPolicy | None = None,
    sampling: Sampling | None = None,
    room: int = 99,
) -> Draft:
    policy = policy or FixedLength(6)
    policy.begin(NewPrompt())
    drafter.begin(context)
    draft: Draft = run_to_end(
        drafter.propose(context, StepPlan(room, policy, sampling or Sampling(), Randomness(0)))
    )
    return draft


# -- the output is the target's ------------------------------------------------------------------------


def model(target: ScriptedScorer, **options: Any) -> ModelDrafter:
    return ModelDrafter(Careful(random_table(2, 4), 4, **options), "model")


def on_targets_cache(target: ScriptedScorer) -> SelfDrafter:
    return SelfDrafter(
        ScriptedScorer(random_table(2, 4), 4, cache=target.cache, own_entries_only=False), "self"
    )


CASCADES: dict[str, Callable[[ScriptedScorer], CascadeDrafter]] = {
    "lookup+model": lambda target: Watched(LookupDrafter(Lookup(None)), model(target)),
    "lookup:min=2+model": lambda target: Watched(LookupDrafter(Lookup(None, 2)), model(target)),
    "lookup:min=2+self": lambda target: Watched(LookupDrafter(Lookup(None, 2)), on_targets_cache(target)),
    "ngram:min=2+model": lambda target: Watched(NGramDrafter(NGram(min=2)), model(target)),
    "ngram:sample,min=2+self": lambda target: Watched(
        NGramDrafter(NGram(sample=True, min=2)), on_targets_cache(target)
    ),
    "lookup+model with a short context": lambda target: Watched(
        LookupDrafter(Lookup(None, 2)), model(target, context_limit=6)
    ),
}


@pytest.mark.parametrize("name", CASCADES)
def test_the_output_distribution_is_the_targets(name):
    """With a token more than others, which copies need to go on."""
    made: list[Any] = []

    def build(target: ScriptedScorer) -> CascadeDrafter:
        made.append(CASCADES[name](target))
        return made[-1]

    for gamma in (1, 3):
        found = loop_distribution(build, Sampling(1.0), gamma, new=NEW + 1)
        assert largest_gap(found, target_distribution(Sampling(1.0), new=NEW + 1)) < 1e-6
    seen = {kinds(draft) for drafter in made for draft in drafter.drafts}
    assert any("f" in each for each in seen)
    assert any("m" in each for each in seen)
    if "passes" not in name and "short" not in name:
        assert any("mf" in each for each in seen), "a copy never went on from what the model began"


@pytest.mark.parametrize("new", LENGTHS)
@pytest.mark.parametrize("name", CASCADES)
def test_so_it_is_without_a_first_target_pass_and_with_end_tokens(name, new):
    found = loop_distribution(CASCADES[name], Sampling(0.8), 2, first_target=False, new=new)
    assert largest_gap(found, target_distribution(Sampling(0.8), new=new)) < 1e-6
    found = loop_distribution(CASCADES[name], Sampling(1.0), 2, end_ids=(2, 3), new=new)
    assert largest_gap(found, target_distribution(Sampling(1.0), end_ids=(2, 3), new=new)) < 1e-6


PROMPT = [7, 41, 7, 41, 19, 3, 7, 41, 19, 3, 200, 7, 41]


def engine_of(spec: str, cache: CacheKind) -> tuple[Any, Any]:
    """A target and a cascade on tiny random models; ``MODEL`` in the spec stands for another one."""
    target = wrap_target(tiny_language_model(layers=3).model, tiny_tokenizer(), cache=cache)
    parsed = parse_drafter(spec)
    if not (isinstance(parsed, Cascade) and parsed.model_spec):
        return target, load_drafter(parsed, target)
    other = wrap_drafter(tiny_language_model(seed=1), target, cache=cache)
    return target, join_cascade(parsed, other)


SPECS = (
    "lookup+MODEL", "ngram:min=1,top-k=2+self:layers=2", "lookup:min=1+MODEL", "lookup:min=1+self:int8",
    "ngram+MODEL", "lookup:min=1+self:int8,layers=1", "suffix+MODEL",
)  # fmt: skip


ON_CACHES = [
    *((SPECS[1], cache) for cache in CACHE_KINDS),
    *zip(SPECS, itertools.cycle(CACHE_KINDS), strict=False),
]
"""A cascade on the target's cache on every kind; the others on one in turn."""


@pytest.mark.parametrize(("spec", "cache"), ON_CACHES)
def test_greedy_tokens_are_those_of_plain_decoding(spec, cache):
    target, drafter = engine_of(spec, cache)
    expected = autoregressive_generate(PROMPT, target, max_new_tokens=18, ignore_eos=True).token_ids
    drafts: list[Draft] = []
    original = drafter.propose

    def propose(*arguments: Any) -> Decoding[Draft]:
        drafts.append((yield from original(*arguments)))
        return drafts[-1]

    drafter.propose = propose
    for gamma in (1, 5):
        result = speculative_generate(
            PROMPT, target, drafter, gamma=gamma, max_new_tokens=18, ignore_eos=True
        )
        assert result.token_ids == expected
    assert any("m" in kinds(draft) for draft in drafts)
    if "min=1" in spec:  # a random model repeats single tokens, and hardly ever two
        assert any("f" in kinds(draft) for draft in drafts)


# -- who drafts what -----------------------------------------------------------------------------------


def scripted(tokens: Sequence[int], start: int, kind: type[ScriptedScorer] = Careful, **options: Any) -> Any:
    return kind(fixed_script(tokens, VOCAB, start), VOCAB, **options)


def cascade(script: Sequence[int], start: int, min_match: int = 2, **options: Any) -> Any:
    """Lookup, and a model that goes on with ``script`` behind a context of ``start`` tokens."""
    drafter = ModelDrafter(scripted(script, start, **options), "model")
    return Watched(LookupDrafter(Lookup(None, min_match)), drafter)


BEGUN, NEW_TEXT = [1, 2, 3, 4, 5, 6, 9], [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("context", "script", "limits", "tokens", "drafted", "passes"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [9], {}, [3, 4, 5, 1, 2, 3], "ffffff", 0),
        (NEW_TEXT, [8, 9, 10], {"policy": FixedLength(3)}, [8, 9, 10], "mmm", 3),
        (BEGUN, [2, 3, 0], {}, [2, 3, 4, 5, 6, 9], "mmffff", 2),  # a copy goes on with what the model began
        (BEGUN, [2, 3, 0], {"room": 3}, [2, 3, 4], "mmf", 2),
        (BEGUN, [2, 3, 0], {"room": 0}, [], "", 0),
        (BEGUN, [2, 3, 0], {"policy": FixedLength(5)}, [2, 3, 4, 5, 6], "mmfff", 2),
    ],
)
def test_who_drafts(context, script, limits, tokens, drafted, passes):
    drafter = cascade(script, len(context))
    draft = propose(drafter, context, **limits)
    assert (draft.tokens, kinds(draft)) == (tokens, drafted)
    assert draft.passes == len(drafter.model.scorer.passes) == passes


class Once(LookupDrafter):
    """Knows the first token of a draft alone."""

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> Guess | None:
        return None if drafted else super().guess(context, drafted, sampling)


def test_the_model_goes_on_where_the_free_drafter_ends():
    context = [1, 2, 3, 9, 1, 2]
    drafter = Watched(Once(Lookup(min=2)), ModelDrafter(scripted([5, 6, 7, 8], 7), "model"))
    draft = propose(drafter, context, FixedLength(4))
    assert (draft.tokens, kinds(draft)) == ([3, 5, 6, 7], "fmmm")
    assert drafter.model.scorer.passes == [7, 1, 1], "prompt and free drafts in one pass"
    assert draft.sources[0] == Guess(3, 2 / 3)


# -- the rules read it ---------------------------------------------------------------------------------


class Doubting(FixedLength):
    """Says no before the token at ``stop``; notes how much evidence there was whenever it is asked."""

    def __init__(self, stop: int) -> None:
        super().__init__(9)
        self.stop = stop
        self.known: list[int] = []

    def should_continue(self, draft: Draft) -> bool:
        self.known.append(int(draft.guess is not None))
        return len(draft.tokens) < self.stop


def test_a_rule_sees_whether_the_next_token_is_free_before_it_is_drafted():
    context = [1, 2, 3, 4, 5, 6, 9]
    policy = Doubting(5)
    drafter = cascade([2, 3, 0], 7)
    assert propose(drafter, context, policy).tokens == [2, 3, 4, 5, 6]
    assert policy.known == [0, 0, 1, 1, 1, 1]
    policy = Doubting(1)
    assert propose(drafter, context, policy).tokens == [2]
    assert drafter.model.scorer.passes[-1] == 7, "no pass was spent on a token that the rule did not want"


class Preferring(FixedLength):
    """Would rather have a pass than a token without one, from the place ``since`` on."""

    def __init__(self, since: int) -> None:
        super().__init__(5)
        self.since = since
        self.seen: list[tuple[int, int]] = []

    def prefers_model(self, draft: Draft) -> bool:
        self.seen.append((len(draft.tokens), draft.guess is not None))
        return len(draft.tokens) >= self.since


def test_a_rule_may_have_the_model_draft_where_there_is_a_match():
    context = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    policy = Preferring(2)
    draft = propose(cascade([0], len(context)), context, policy)
    assert kinds(draft) == "ffmmm"
    assert draft.tokens[:3] == [3, 4, 0]
    assert policy.seen[:3] == [(0, True), (1, True), (2, True)], (
        "the evidence for the token in question is there"
    )
    behind = cascade([0], len(context), context_limit=5)
    assert kinds(propose(behind, context, Preferring(0))) == "fffff", "the model cannot"


@pytest.mark.parametrize("policy", ["svip", "entropy-bound", "confidence:max=5"])
def test_a_certain_token_does_not_stop_rules_that_read_distributions(policy):
    draft = propose(cascade([2, 3, 0], 7), [1, 2, 3, 4, 5, 6, 9], build_policy(policy), room=5)
    assert kinds(draft) == "mmfff"


# -- the model follows lazily --------------------------------------------------------------------------


def test_what_others_drafted_is_fed_in_one_pass():
    """The target repeats 4 5 6 7 8 9; the lookup copies it from the second time on."""
    cycle = [4, 5, 6, 7, 8, 9]
    prompt = [1, 2, 3]
    target = scripted(cycle, len(prompt), ScriptedScorer)
    drafter = cascade(cycle, len(prompt))
    prefill, *steps = steps_of(prompt, target, drafter, policy=FixedLength(3), max_new_tokens=26)
    assert [prefill.token, *(token for step in steps for token in step.tokens)] == (cycle * 5)[:26]
    assert [kinds(draft) for draft in drafter.drafts] == ["mmm", "mmm", "fff", "fff", "fff", "fff", ""]
    # Prompt and first token, two drafts; the last draft and the bonus, two drafts; then it is not needed any more.
    assert drafter.model.scorer.passes == [4, 1, 1, 2, 1, 1]
    assert [step.accepted for step in steps] == [len(step.drafted) for step in steps]


def test_a_free_draft_that_the_model_lacks_ends_its_part():
    context = [1, 11, 2, 11, 1]
    free = Once(Lookup(min=1))
    scorer = scripted([5], 5)
    assert kinds(propose(CascadeDrafter(free, ModelDrafter(scorer, "model")), context)) == "fmmmmm"
    scorer = scripted([5], 5)
    scorer.embeddings = 11  # 11 is padding to it
    drafter = CascadeDrafter(free, ModelDrafter(scorer, "model"))
    assert propose(drafter, context).tokens == [11]


# -- words ---------------------------------------------------------------------------------------------


def test_a_cascade_is_told_by_its_first_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("models/llama++small", "models/c++small"):  # only a name that exists may hold a plus
        (tmp_path / folder).mkdir(parents=True)
    for front, back in (
        ("lookup", "self:int8"), ("ngram:order=3", "org/name@main"), ("lookup", "models/llama++small")
    ):  # fmt: skip
        parsed = parse_drafter(f" {front} + {back}")
        assert isinstance(parsed, Cascade)
        assert (str(parsed.front), parsed.back) == (front, parse_drafter(back))
    assert not isinstance(parse_drafter("models/c++small"), Cascade)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("lookup+lookup", "'lookup', is no model"), ("lookup+none", "'none', is no model"),
        ("ngram+lookup+self:int8", "is no model"), ("lookup+", "is no model"),
        ("lookup:speed=1+self:int8", "'speed'"), ("lookup:min=0+self:int8", "'min'"),
        ("lookup:min=x+self:int8", "'min'"), ("lookup:min=5,n=3+self:int8", "'min'"),
        ("ngram:min=4+self:int8", "'min'"), ("lookup+self", "'self'"),
        ("lookup+not a model", "'not a model'"), ("self:int8+lookup", "'int8+lookup'"),
    ],
)  # fmt: skip
def test_refusals_before_any_weights_are_loaded(spec, named):
    with pytest.raises(UsageError, match=re.escape(named)) as caught:
        check_drafter(parse_drafter(spec), parse_model("no/such-target"))
    assert caught.value.hint
