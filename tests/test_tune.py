"""What `specbench tune` tries, predicts, chooses, stores and says; over an engine whose times are scripted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cli_runs import refusal
from msgspec import structs
from regret import FakeClock
from scripted_engine import ScriptedEngine, cost_lines, describe, grid_of, prompts, taking, verifying
from stored_runs import run_json
from test_findings import check_claims

from specbench.base.errors import RunError
from specbench.base.load import LoadSnapshot
from specbench.base.record import NO_FIGURE, Estimate
from specbench.bench.grid import Sweep, SweepOptions
from specbench.bench.session import Session
from specbench.decoding.theory import PassCosts
from specbench.export.setting import RunSettings
from specbench.options import DecodingOptions
from specbench.predict import here
from specbench.predict.here import Prediction
from specbench.results.lines import CostLine, Generation
from specbench.results.results import load_results
from specbench.results.run import Tuning
from specbench.results.store import RunStore
from specbench.results.summary import Summary
from specbench.rows import Row
from specbench.show.answer import find_answers
from specbench.show.document import to_markdown
from specbench.specs.drafters import SelfForm, parse_drafter
from specbench.specs.policies import Heuristic
from specbench.tune import predicted
from specbench.tune.answer import (
    answer_parts,
    answer_text,
    as_json,
    find_answer,
    tried,
)
from specbench.tune.candidates import (
    GAMMAS,
    best_of_each,
    drafters_to_try,
    race_needs,
    rules_to_try,
    select,
    with_policies,
)
from specbench.tune.search import Search


def grid(*drafters: str, **options: Any) -> Sweep:
    """Everything there is to try with drafters that are models."""
    policies = (*rules_to_try(greedy=True, chained=False), Heuristic())
    defaults: dict[str, Any] = {"gammas": GAMMAS, "policies": policies, "repeats": 3, "warmup": 0, "turns": 1}
    options["decoding"] = DecodingOptions(max_new_tokens=options.pop("max_new_tokens", 17))
    made = SweepOptions(**{**defaults, **options})
    return Sweep(made, prompts(9), tuple(grid_of(made, *drafters)))


# -- candidates ------------------------------------------------------------------------------------


def test_what_is_tried():
    given = [parse_drafter("Org/small"), parse_drafter("ngram:order=3"), parse_drafter("none")]
    tried = [str(spec) for spec in drafters_to_try(given, [SelfForm(int8=True)])]
    assert tried == [
        "lookup", "suffix", "self:int8", "Org/small", "ngram:order=3", "lookup+self:int8",
        "suffix+self:int8", "lookup+Org/small", "suffix+Org/small",
    ]  # fmt: skip
    assert [str(spec) for spec in drafters_to_try([], [])] == ["lookup", "suffix"]
    named_twice = drafters_to_try(
        [parse_drafter("lookup"), parse_drafter("lookup+self:int8")], [SelfForm(int8=True)]
    )
    assert len(named_twice) == len(set(named_twice)) == 5


def test_with_a_format_everything_is_tried_behind_forced_tokens():
    forms = [parse_drafter("self:int8")]
    tried = [str(each) for each in drafters_to_try([parse_drafter("MODEL")], forms, formatted=True)]
    assert tried[:3] == ["grammar", "grammar+lookup", "grammar+suffix"]
    assert all(each.startswith("grammar") for each in tried)
    assert not any("grammar" in str(each) for each in drafters_to_try([], forms))


# -- selection -------------------------------------------------------------------------------------


def chosen(
    predicted: dict[str, float], *, seconds: float = 1000.0, first_s: float = 0.0, **options: Any
) -> Tuning:
    rows = [each for each in grid("d", "e").configs if each.kind == "speculative"]
    families = {each.id: each.drafter for each in rows}
    lengths = {each.id for each in rows if each.gamma is not None}
    failed = options.pop("failed", {})
    return select(
        predicted,
        lambda name: 6 * (first_s + 1.0 / predicted[name]),
        seconds,
        families,
        failed,
        lengths=lengths,
        **options,
    )


FAR = "predicted below 0.8 of the best"
THREE = {"d@auto": 2.0, "e@auto": 1.9, "d@heuristic": 1.8}  # two of these take 1.03 s a block
BEHIND = {"d@auto": 3.0, "d@4": 2.9, "e@8": 1.2, "e@2": 1.3, "e@auto": 1.3}


@pytest.mark.parametrize(
    ("predicted", "options", "raced", "left_out"),
    [
        (
            {"d@2": 1.2, "d@4": 1.3, "d@auto": 1.3, "e@8": 1.05, "e@auto": 1.03, "d@dynamic-tree": 2.0 / 3},
            {},
            ("d@4", "d@auto", "e@8"),  # 1.04 and up; another length of a drafter is no candidate of its own
            {"e@auto": FAR, "d@dynamic-tree": FAR, "d@heuristic": None, "d@2": None},
        ),
        ({"d@4": 0.7, "e@auto": 0.5}, {}, (), {}),
        ({"d@4": 0.7, "e@auto": 0.5}, {"needed": {"d@4", "e@auto"}}, ("d@4", "e@auto"), {}),
        (THREE, {"seconds": 6 * 1.1}, ("d@auto", "e@auto"), {}),
        (THREE, {"seconds": 0.0}, ("d@auto",), {"e@auto": "no time for 6 blocks with it"}),
        (THREE, {"seconds": 6 * 1.1, "first_s": 5.0}, ("d@auto",), {}),
        (BEHIND, {}, ("d@auto", "d@4"), {}),
        (BEHIND, {"needed": {"e@2"}}, ("d@auto", "d@4", "e@2"), {"e@auto": FAR}),  # however far behind
        (BEHIND, {"needed": {"d@auto", "e@2"}, "seconds": 0.0}, ("d@auto", "e@2"), {}),
        ({"d@auto": 1.0}, {"failed": {"e": "no memory"}}, ("d@auto",), {"e@auto": "failed: no memory"}),
    ],
)
def test_who_is_raced(predicted, options, raced, left_out):
    found = chosen(predicted, **options)
    assert tuple(found.raced) == raced
    assert {name: found.left_out.get(name) for name in left_out} == left_out


def test_what_a_race_needs():
    rows = {"d@4": "d", "d@auto": "d", "e@2": "e", "f@2": "f"}
    best = {"f": ["f@2"], "d": ["d@4", "d@auto"]}
    asked = {"e": ["e@2"], "g": []}
    needs = race_needs(rows, {"f@2": 2.0, "d@auto": 1.5, "d@4": 1.0}, asked)
    assert needs == {**best, "e": ["e@2"]}
    assert best_of_each(needs, {"f@2": 2.0, "d@auto": 1.5, "d@4": 1.0}) == {"f@2", "d@auto"}
    assert list(race_needs(rows, {"e@2": 0.1}, {})) == ["e", "d"], "what was not predicted is missing too"


def test_other_policies_count_as_the_best_draft_length_of_their_drafter():
    rows = [each for each in grid("d", "e").configs if each.kind == "speculative"]
    found = with_policies(rows, {"d@2": 1.2, "d@4": 1.5})
    assert found == {"d@2": 1.2, "d@4": 1.5, "d@auto": 1.5, "d@dynamic-tree": 1.5, "d@heuristic": 1.5}


# -- searching -------------------------------------------------------------------------------------


class TimedEngine(ScriptedEngine):
    """Plain decoding takes 0.01 s a token, everything else what is said, and each prompt a little more or less."""

    def __init__(
        self, speeds: dict[str, float], clock: FakeClock, noise: float = 0.01, **options: Any
    ) -> None:
        super().__init__(**options)
        self.speeds, self.clock, self.noise, self.pass_s = speeds, clock, noise, 0.01
        self.drafters_s = {"d": 0.002, "e": 0.2}

    def generate(self, config: Row, prompt: Sequence[int], *options: Any, **named: Any) -> Generation:
        outcome = super().generate(config, prompt, *options, **named)
        wobble = 1 + self.noise * (prompt[0] * (1 + len(config.id)) % 7) / 6
        seconds = self.pass_s * (len(outcome.token_ids) - 1) * wobble / self.speeds.get(config.id, 1.0)
        self.clock.seconds += seconds + outcome.ttft_s
        return taking(outcome, seconds)

    def measure_costs(self, prompt: Sequence[int], widths: Sequence[int], *_: object) -> list[CostLine]:
        self.cost_calls.append(tuple(widths))
        return cost_lines(
            {n: [self.pass_s] for n in widths}, {name: [s] for name, s in self.drafters_s.items()}, 256
        )


def all_accepted(
    _: object, sweep: Sweep, plain: Row, outputs: Mapping[str, Sequence[int]], costs: PassCosts, __: object
) -> tuple[dict[str, float], dict[str, str]]:
    """Predictions where every draft is accepted."""
    assert outputs
    found = {}
    for row in sweep.configs[1:] if costs.target_s[1] else ():
        gamma = row.gamma or GAMMAS[-1]
        found[row.id] = (gamma + 1) / (1 + gamma * costs.drafter_s[row.drafter] / costs.target_s[1])
    return found, {}


def quiet() -> LoadSnapshot:
    """A machine on which nothing else runs."""
    return LoadSnapshot(2, 0.0, 0.0, 0.0, 0.0, 0.0, None, 1000, 1000, None)


def search(
    folder: Path,
    engine: ScriptedEngine,
    sweep: Sweep,
    clock: FakeClock,
    seconds: float = 1000.0,
    **options: Any,
) -> Search:
    store = RunStore.open(folder) if RunStore.exists(folder) else RunStore.create(folder, describe(sweep))
    predict, longer = options.pop("predict", all_accepted), options.pop("longer", False)

    def predict_rows(*given: Any) -> tuple[dict[str, Prediction], dict[str, str]]:
        found, failed = predict(*given)
        made = {name: Prediction(Estimate(value, None, None, 4), NO_FIGURE) for name, value in found.items()}
        return made, failed

    with store, pytest.MonkeyPatch.context() as patch:
        until = clock.seconds + seconds
        patch.setattr(here, "predict_rows", predict_rows)
        patch.setattr(predicted, "with_policies", lambda _, found: found)
        made = Search(
            Session(sweep, store, engine, clock=clock, snapshot=quiet),
            partial(predicted.choose, longer=longer),
            {row.id: row.drafter for row in sweep.configs[1:]}, seconds=seconds, until=until, **options,
        )  # fmt: skip
        for _ in made.measure():
            pass
        return made


FAST = {"d@auto": 2.0, "d@8": 1.5, "d@dynamic-tree": 1.2, "d@heuristic": 1.1}


def test_a_search_finds_the_fastest_and_stores_what_it_measured(tmp_path):
    clock = FakeClock()
    engine, sweep = TimedEngine(FAST, clock), grid("d", "e")
    found = search(tmp_path / "run", engine, sweep, clock)
    assert (found.race.leader, found.race.verdict, found.race.ending) == ("d@auto", "faster", "decided")
    assert "e@auto" in found.left_out  # a pass of it takes as long as twenty of the target
    assert len(engine.cost_calls) == 3
    df = load_results(tmp_path / "run")
    assert set(df.generations["config"]) == {"plain", *found.race.eliminated, "d@auto"}
    assert df.generations.groupby("config")["prompt"].nunique()["d@auto"] == found.race.blocks
    plainly = [prompt for config, prompt, tokens in engine.calls if config == "plain" and tokens == 17]
    assert len(plainly) == 8, "the outputs that predict are not measured again in the race"
    answer = find_answer(found, df)
    assert answer.choice == "d@auto"
    assert answer.measured["d@auto"].speedup.value == pytest.approx(2.0, rel=0.02)
    assert answer.headline.startswith("Yes: d auto, 2.0")


class Disturbed(TimedEngine):
    """`d@auto` takes four times as long on every third prompt, and so do its passes of the target."""

    def generate(self, config: Row, prompt: Sequence[int], *options: Any, **named: Any) -> Generation:
        outcome = super().generate(config, prompt, *options, **named)
        if config.id != "d@auto" or prompt[0] % 3:
            return outcome
        steps = verifying(outcome.steps, [4 * seconds for seconds in outcome.steps.verify_s])
        return taking(outcome, 4 * outcome.decode_s, steps=steps)


def test_a_search_that_was_stopped_goes_on_and_comes_to_the_same(tmp_path):
    clock, sweep = FakeClock(), grid("d", "e")
    whole = search(tmp_path / "whole", TimedEngine(FAST, clock), sweep, clock)
    idle = TimedEngine({}, clock)
    assert search(tmp_path / "whole", idle, sweep, clock).race.eliminated == whole.race.eliminated
    assert (idle.calls, idle.cost_calls) == ([], []), "nothing is measured again"
    for stop in (1, 6, 11, 30):
        folder = tmp_path / str(stop)
        engine = TimedEngine(
            FAST,
            clock,
            fails=lambda *_: KeyboardInterrupt() if len(engine.calls) == stop else None,  # noqa: B023
        )
        if stop < 30:  # before the first block of the race
            with pytest.raises(KeyboardInterrupt):
                search(folder, engine, sweep, clock)
        else:
            so_far = search(folder, engine, sweep, clock)
            assert (so_far.race.ending, so_far.race.blocks > 0) == ("interrupted", True)
            assert run_json(folder)["finished"] is None
        rest = TimedEngine(FAST, clock)
        again = search(folder, rest, sweep, clock)
        assert (again.race.running, again.race.eliminated) == (whole.race.running, whole.race.eliminated)
        assert (again.predicted, again.left_out) == (whole.predicted, whole.left_out)
        keys = [(config, prompt) for config, prompt, _ in rest.calls]
        assert len(keys) + stop - 1 == len(list((folder / "generations.jsonl").open(encoding="utf-8")))


def test_the_time_is_kept_to_and_what_is_open_is_said(tmp_path):
    clock = FakeClock()
    speeds = {"d@auto": 1.5, "d@8": 1.49, "d@heuristic": 1.3, "d@dynamic-tree": 1.2}
    engine, sweep = TimedEngine(speeds, clock, noise=4.0), grid("d", max_new_tokens=20, repeats=9)
    found = search(tmp_path, engine, sweep, clock, seconds=2.0)
    assert clock.seconds <= 1.1 * 2.0
    assert found.race.ending == "time"
    assert found.race.blocks < 9 * 9


def test_without_time_for_a_block_nothing_is_said(tmp_path):
    clock, sweep = FakeClock(), grid("d")
    message = refusal(search, tmp_path, TimedEngine(FAST, clock), sweep, clock, seconds=0.2, kind=RunError)
    assert re.fullmatch(r"The time was too short to compare anything\. .* --resume --minutes \d+\.", message)
    found = search(tmp_path, TimedEngine(FAST, clock), sweep, clock, seconds=1000.0)
    assert found.race.leader == "d@auto"


@pytest.mark.parametrize(
    ("longer", "seconds", "tokens"), [(True, 60.0, 32), (False, 120.0, 21), (False, 600.0, 48)]
)
def test_on_a_slow_target_outputs_are_cut_and_all_that_a_race_needs_is_raced(
    tmp_path, longer, seconds, tokens
):
    """A pass takes 0.28 s, loading is over, and predictions take a minute."""
    clock, sweep = FakeClock(), grid("d", "e", "f", max_new_tokens=48)
    engine = TimedEngine({"d@auto": 2.0, "e@auto": 1.8, "f@4": 1.1}, clock)
    engine.pass_s = 0.28

    def predict(*_: object) -> tuple[dict[str, float], dict[str, str]]:
        clock.seconds += 30.0
        return {"d@auto": 2.6, "e@auto": 2.3, "f@4": 1.2, "d@4": 2.5}, {}

    found = search(tmp_path, engine, sweep, clock, seconds=seconds, longer=longer, predict=predict,
                   asked={"f": ["f@4", "f@auto"]})  # fmt: skip
    answer = find_answer(found, load_results(tmp_path))
    assert max(count for config, _, count in engine.calls if config in ("d@auto", "f@4")) == tokens
    assert {"d@auto", "e@auto", "f@4"} <= set(answer.measured)
    assert (answer.choice, answer.provisional) == ("d@auto", found.race.verdict == "open")
    assert clock.seconds < 300.0 or not longer
    again = search(tmp_path, TimedEngine({}, clock), sweep, clock, seconds=seconds)
    assert again.tokens == found.tokens


def test_a_drafter_that_fails_is_left_out_and_plain_decoding_that_fails_ends_it(tmp_path):
    clock, sweep = FakeClock(), grid("d", "e")
    broken = TimedEngine(
        FAST, clock, fails=lambda config, _: RunError("no memory") if config.drafter == "e" else None
    )
    failing = {"predict": lambda *_: ({"d@auto": 2.0, "d@4": 1.9}, {"e": "no memory"})}
    found = search(tmp_path / "one", broken, sweep, clock, **failing)
    assert found.left_out["e@auto"] == "failed: no memory"
    assert found.race.leader == "d@auto"
    dead = TimedEngine(FAST, clock, fails=lambda config, _: RunError("no memory"))
    message = refusal(search, tmp_path / "two", dead, sweep, clock, kind=RunError)
    assert message.startswith("Plain decoding failed: no memory.")


# -- the answer ------------------------------------------------------------------------------------


def answered(folder: Path, speeds: dict[str, float], **options: Any) -> tuple[Any, Search]:
    clock, sweep = FakeClock(), grid("d", "e")
    found = search(folder, TimedEngine(speeds, clock), sweep, clock, **options)
    return find_answer(found, load_results(folder)), found


BOTH = {"d@auto": 2.0, "e@auto": 1.5}
TEXTS: dict[str, tuple[dict[str, Any], str, bool, list[str]]] = {
    "one candidate": (
        {"drafters": "d", "predicted": {"d@auto": 2.0}}, "Yes: d auto, 2.01× [", False,
        ["Raced on 6 of 9 prompts beside plain decoding alone.\n"],
    ),
    "every prediction failed": (
        {"failed": {"d": "no memory.", "e": "its passes could not be timed"}},
        "Not known: no drafter could be measured. Plain decoding", True,
        ["Not compared: d (failed: no memory), e (failed: its passes could not be timed)."],
    ),
    "none could be predicted": (
        {}, "Not known: no drafter could be measured. Plain decoding", True,
        ["Not compared: d (it was not tried), e (it was not tried)."],
    ),
    "a rival did not load": (
        {"predicted": {"d@auto": 2.0}, "failed": {"e": "no memory."}},
        "Yes: d auto, 2.01× [2.00, 2.02] over plain decoding. Others may be faster (provisional).", True,
        ["beside plain decoding alone.", "Not compared: e (failed: no memory)."],
    ),
    "a rival failed in the race": (
        {"predicted": BOTH, "broken": "e"}, "Yes: d auto, 2.01× [", True,
        ["beside plain decoding alone.", "Not compared: e (predicted 1.50×; failed: no memory)."],
    ),
    "all failed in the race": (
        {"predicted": BOTH, "broken": "de"}, "Not known: no drafter could be measured. Plain decoding", True,
        ["Not compared: d (predicted 2.00×; failed: no memory), e (predicted 1.50×; failed: no memory)."],
    ),
    "one prompt": (
        {"predicted": BOTH, "prompts": 1},
        "Not known yet: the provisional choice is d auto, 2.00× [too few to say] over plain decoding.", True,
        ["Raced on 1 of 1 prompt beside", "One prompt says nothing of others: give more with --prompts."],
    ),
    "one prompt, on which a worse prediction is faster": (
        {"predicted": {"d@auto": 3.0, "e@auto": 1.1}, "speeds": {"d@auto": 1.5, "e@auto": 1.9}, "prompts": 1},
        "Not known yet: the provisional choice is d auto, 1.50× [too few to say] over plain decoding.",
        True, ["and e auto 1.90×"],
    ),
    "left out by prediction": (
        {"drafters": "def", "predicted": {**BOTH, "f@auto": 0.5}}, "Yes: d auto, 2.01× [", False,
        ["plain decoding and e auto 1.00", "95% confidence none of these is", "Not compared: f (predicted 0.50×)."],
    ),
    "named": (
        {"drafters": "def", "predicted": {**BOTH, "f@auto": 0.5}, "asked": {"f": ["f@auto"]}},
        "Yes: d auto, 2.01× [", False, ["and e auto 1.00", ", f auto 1.00"],
    ),
    "no gain": (
        {"predicted": BOTH, "speeds": {"d@auto": 0.5, "e@auto": 0.4}},
        "No, speculation does not pay here: d auto is 0.50× [", False,
        ["beside plain decoding and e auto 0.40× ["],
    ),
    "no gain, and a rival failed": (
        {"predicted": BOTH, "speeds": {"d@auto": 0.5}, "broken": "e"},
        "Not known yet: the provisional choice is plain decoding; d auto is 0.50× [", True,
        ["Not compared: e (predicted 1.50×; failed: no memory)."],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXTS)
def test_an_answer_says_only_what_was_measured(tmp_path, case):
    given, headline, provisional, details = TEXTS[case]
    sweep, clock, broken = grid(*given.get("drafters", "de")), FakeClock(), given.get("broken", "")
    sweep = replace(sweep, prompts=sweep.prompts[: given.get("prompts", 9)])
    fails = lambda config, _: RunError("no memory.") if config.drafter in broken else None  # noqa: E731
    predict = lambda *_: (given.get("predicted", {}), given.get("failed", {}))  # noqa: E731
    engine = TimedEngine(given.get("speeds", FAST), clock, fails=fails)
    found = search(tmp_path, engine, sweep, clock, predict=predict, asked=given.get("asked", {}))
    answer = find_answer(found, load_results(tmp_path))
    said = answer_text(answer, found, (), verbose=False)
    assert said.startswith(headline)
    assert answer.provisional == provisional
    assert [detail for detail in details if detail not in said] == []
    check_claims(said, prompts=len(sweep.prompts), rivals=len(found.race.measured))


def undecided(folder: Path, clock: FakeClock) -> tuple[Search, Sweep]:
    """A search over drafters that are much faster on every other prompt, and slower on the rest."""
    sweep = grid("d", max_new_tokens=400)
    noisy = {
        "d@auto": (2.0, 0.6),
        "d@8": (0.6, 0.18),
        "d@heuristic": (1.5, 0.9),
        "d@dynamic-tree": (0.5, 0.6),
    }

    class Noisy(TimedEngine):
        def generate(self, config: Row, prompt: Sequence[int], *options: Any, **named: Any) -> Generation:
            self.speeds = {config.id: noisy.get(config.id, (1.0, 1.0))[prompt[0] % 2]}
            return super().generate(config, prompt, *options, **named)

    return search(folder, Noisy({}, clock), sweep, clock, seconds=200.0), sweep


def test_what_is_not_sure_yet_is_provisional_with_the_time_it_takes(tmp_path):
    found, _ = undecided(tmp_path, FakeClock())
    assert found.race.verdict == "open"
    answer = find_answer(found, load_results(tmp_path))
    assert (answer.choice, answer.provisional) == (found.race.leader, True)
    assert answer.headline.startswith("Not known yet: the provisional choice is d auto, 1.")
    assert any("--resume" in each for each in answer.details)
    assert run_json(tmp_path)["finished"] is None


def test_without_a_whole_block_the_setting_is_the_predicted_one(tmp_path):
    """The machine becomes so slow when the race begins that not even one block fits."""

    class Slowing(TimedEngine):
        def generate(self, config: Row, prompt: Sequence[int], *options: Any, **named: Any) -> Generation:
            outcome = super().generate(config, prompt, *options, **named)
            if config.kind != "plain":
                self.clock.seconds += 1000.0
            return outcome

    clock, sweep = FakeClock(), grid("d")
    found = search(tmp_path, Slowing(FAST, clock), sweep, clock)
    assert (found.race.ending, found.race.blocks) == ("time", 0)
    df = load_results(tmp_path)
    answer = find_answer(found, df)
    assert answer.provisional
    assert answer.choice == found.race.names[1]
    assert "provisional" in answer.headline
    json.dumps(as_json(answer, found), allow_nan=False)
    assert answer.measured == {}
    found.predicted = dict.fromkeys(found.predicted, 0.9)
    plainly = find_answer(found, df)
    assert (plainly.choice, plainly.provisional) == ("plain", True)


def test_one_answer_is_stored_and_everything_says_it(tmp_path):
    """Where a race takes off what held generations up, its figures are not those of the times alone."""
    clock, sweep = FakeClock(), grid("d")
    folder = tmp_path / "run"
    found = search(folder, Disturbed(FAST, clock), sweep, clock)
    raw = load_results(folder).table().set_index("config")
    answer = find_answer(found, load_results(folder))
    with RunStore.open(folder) as store:
        assert store.run.tuning is not None
        store.update(tuning=structs.replace(store.run.tuning, answer=answer), finished=None)
    df = load_results(folder)
    summary = Summary(df)
    rows = summary.table().set_index("config")
    assert abs(raw.loc["d@auto", "speedup"] - rows.loc["d@auto", "speedup"]) > 0.1
    for each in tried(found):
        if each["speedup"] is not None:
            assert summary.row(each["config"]).speedup == each["speedup"]
    assert summary.winners == {"d@auto"}
    assert (rows.loc["d@auto", "verdict"], rows.loc["d@8", "verdict"]) == ("faster", "faster")
    assert rows["pooled_speedup"].isna().all()
    categories = df.table("category").set_index(["category", "config"])
    assert categories.loc[("chat", "d@auto"), "speedup"] == answer.measured["d@auto"].categories["chat"].value
    (said,) = find_answers(summary)
    assert (said.headline, said.verdict) == (answer.headline, "faster")
    assert list(said.details[: len(answer.details)]) == list(answer.details)
    assert "--draft-policy auto" in said.command
    best = RunSettings(df).all()[0]
    assert best.measured.speedup.value == answer.measured["d@auto"].speedup.value
    search(folder, TimedEngine(FAST, clock), sweep, clock)
    assert load_results(folder).run.tuning.answer is None, "what is measured after it can change it"


def test_the_answer_as_text_markdown_and_json(tmp_path):
    answer, found = answered(tmp_path, FAST)
    for verbose in (True, False):
        text = answer_text(answer, found, ["Decode:  specbench generate"], verbose=verbose)
        assert answer.headline in text
        assert text.endswith("Decode:  specbench generate\n")
    assert "| d auto |" in to_markdown(*answer_parts(answer, found))
    facts = json.loads(json.dumps(as_json(answer, found), allow_nan=False))
    assert (facts["winner"], facts["verdict"], facts["ending"]) == ("d@auto", "faster", "decided")
    assert facts["low"] <= facts["speedup"] <= facts["high"]
    assert {each["config"] for each in facts["tried"]} >= {"plain", "d@8", "e@auto"}
