"""The race of `specbench tune` over simulated and stored times: it finds the fastest and keeps its error rate."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from regret import FakeClock, Simulated, choice_of, simulated

from specbench.decoding.theory import PassCosts
from specbench.tune.race import (
    ERROR,
    MARGIN,
    Block,
    Race,
    Timing,
    noise_correction,
    relative_slowdown,
    run_race,
)

PLAIN = "plain"


def steady(**speeds: float) -> Callable[[str, Block], Timing]:
    """Every candidate always as fast."""
    return lambda name, _: Timing(100, 100 / speeds[name])


def wobble(name: str, block: Block) -> float:
    """Up to 0.6, always the same."""
    return zlib.crc32(f"{name}/{block.prompt}".encode()) % 7 / 10


def blocks(count: int) -> list[Block]:
    return [Block(f"p-{n}") for n in range(count)]


def run(
    race: Race, measure: Callable[[str, Block], Timing | None], count: int = 100, **options: object
) -> str:
    for _ in run_race(race, blocks(count), measure, **options):  # type: ignore[arg-type]
        pass
    return str(race.ending)


def new(*names: str, limit: int = 100) -> Race:
    return Race(names, PLAIN, limit=limit)


# -- simulated and stored runs ---------------------------------------------------------------------


@pytest.mark.parametrize("predicted", [None, 0.5])
@pytest.mark.parametrize("number", range(3))
def test_the_choice_is_within_5_percent_of_the_best(number, predicted):
    """Three runs with other speeds, prompts, drift and neighbors each; also where predictions are wrong."""
    made = replace(simulated(number), predicted=predicted)
    race = made.race()
    assert made.regret(race) <= MARGIN


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_good_candidate_is_found(seed):
    """Behind eleven others, on a machine that drifts and that others use; and within the time of some thirty blocks."""
    truth = {PLAIN: 0.0, **{f"c-{n}": 0.02 * n for n in range(11)}, "planted": 0.5}
    made = Simulated(truth, seed=seed, spread=0.2, noise=0.05, drift=0.4, busy=0.3)
    race = made.race(prompts=60, seconds=800.0)
    assert race.leader == "planted"
    assert race.verdict in ("faster", "open")
    assert race.ratio("planted", PLAIN).value > 1.2
    assert made.clock.seconds <= 800.0 + 47 / 5  # no more than the last generation over


@pytest.mark.parametrize("races", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_a_choice_is_wrong_no_oftener_than_it_may_be(races):
    """Where that is most likely: all others are just outside the margin behind the best."""
    wrong = 0
    for seed in range(races):
        truth = {PLAIN: 0.0, "best": 0.16, **dict.fromkeys(("a", "b", "c", "d", "e"), 0.1)}
        made = Simulated(truth, seed=seed, spread=0.1, noise=0.03)
        race = made.race(prompts=32)
        wrong += race.decided and race.leader != "best"
    assert wrong <= ERROR * races


@pytest.mark.parametrize(("a", "verdicts"), [(-0.3, {"plain"}), (0.01, {"equal", "faster", "plain"})])
def test_plain_decoding_wins_where_nothing_is_faster(a, verdicts):
    race = Simulated({PLAIN: 0.0, "a": a, "b": -0.5}, spread=0.01, noise=0.01).race()
    assert race.verdict in verdicts
    assert race.ending == "decided"
    assert "b" in race.eliminated
    assert (choice_of(race) == PLAIN) == (race.verdict != "faster")


# -- disturbances ------------------------------------------------------------------------------------


def test_what_held_up_one_of_two_is_told_from_what_is_usual():
    """By two per cent passes of one take longer than those of the other in all blocks."""
    usual = 0.02 + np.array([-0.003, 0.001, 0.002, -0.001, 0.0, 0.003, -0.002])
    held, doubt = noise_correction(usual)
    assert held.mean() == pytest.approx(0.0, abs=1e-3)
    assert 0.0 < doubt < 0.001  # seven blocks say it well
    held, doubt = noise_correction(np.append(usual, [1.02, -0.68]))
    assert held[-2:] == pytest.approx([1.0, -0.7], abs=0.02)
    assert held[:-2].mean() == pytest.approx(0.0, abs=0.002)

    noisy = np.array(
        [0.9, -0.5, 0.3, -0.8, 0.6, 0.2]
    )  # blocks that say little: the two are taken to be alike
    held, doubt = noise_correction(noisy)
    assert held == pytest.approx(noisy, abs=0.01)
    assert doubt == pytest.approx(0.02, abs=0.001)
    assert noise_correction(np.array([5.0]))[0].tolist() == [0.0]
    assert len(noise_correction(np.array([]))[0]) == 0


@pytest.mark.parametrize("told", [True, False])
def test_who_was_held_up_is_not_thought_slow(told):
    """What is 30% ahead is held up in three of seven blocks, by a factor of two and more."""

    def measure(name: str, block: Block) -> Timing:
        slow = 2.0 + wobble("how", block) if name == "a" and wobble("who", block) > 0.35 else 1.0
        seconds = slow * (100 + wobble(name, block)) / {PLAIN: 10, "a": 20, "b": 15.4}[name]
        return Timing(100, seconds, slow * (1 + wobble(name, block) / 50) if told else 1.0)

    race = new("a", "b")
    ending = run(race, measure, 24)
    assert race.leader == ("a" if told else "b")
    if told:
        assert ending == "decided"
        assert race.ratio("a", "b").value == pytest.approx(20 / 15.4, rel=0.04)


def test_slowness_is_the_time_of_passes_over_that_of_such_passes_alone():
    steps = [0, 4, 2], [0.2, 0.5, 0.5]
    assert relative_slowdown(*steps, PassCosts({1: 0.1, 5: 0.25})) == pytest.approx(1.2 / 0.525)
    assert relative_slowdown(*steps, PassCosts({})) == 1.0
    assert relative_slowdown([], [], PassCosts({1: 0.1})) == 1.0


def test_categories_come_in_turn_so_that_what_differs_between_them_is_no_chance():
    """a is faster in one category and slower in the other, and the same over both."""

    def measured(categories: bool) -> Race:
        race = new("a")
        for number in range(16):
            kind = ("code", "chat")[number % 2]
            block = Block(f"p-{number}", 0, kind if categories else "")
            speed = 1.5 if kind == "code" else 1 / 1.5
            wave = 1.0 + number % 4 / 100
            race.add(block, {PLAIN: Timing(1, 1.0), "a": Timing(1, wave / speed)})
        race.look(last=True)
        return race

    assert measured(categories=False).verdict == "open"
    apart = measured(categories=True)
    assert apart.verdict in ("equal", "plain")
    assert apart.categories("a") == ["chat", "code"]
    assert apart.ratio("a", PLAIN, "code").value == pytest.approx(1.5, rel=0.03)


# -- how a race goes -------------------------------------------------------------------------------


def test_a_race_ends_as_soon_as_nothing_is_left_to_tell_apart():
    race = new("slow", "fast")
    assert run(race, steady(plain=10, slow=8, fast=20)) == "decided"
    assert race.blocks == 6
    assert race.running == [PLAIN, "fast"]
    assert race.eliminated == {"slow": 6}
    assert race.upper_bound("slow", "fast") == pytest.approx(0.4)


def test_all_looks_together_spend_no_more_than_there_is():
    """One bound for each of the others at every look on the way, and at the last one."""
    race = new("a", "b", "c", limit=24)
    for block in blocks(6):
        race.add(block, {name: Timing(1, 1.0 + wobble(name, block)) for name in race.running})
    spent = 5 * 3 * race.level  # after 6, 8, 12, 16 and 24 blocks
    assert spent == pytest.approx(ERROR / 2)
    race.look(last=True)
    assert spent + 3 * race.level == pytest.approx(ERROR)


def test_who_fails_is_out_and_plain_decoding_that_fails_spoils_the_block():
    def measure(name: str, block: Block) -> Timing | None:
        fails = (name == "broken" and block.prompt == "p-1") or block.prompt == "p-0"
        return None if fails else steady(plain=10, broken=30, good=20)(name, block)

    race = new("broken", "good")
    assert run(race, measure) == "decided"
    assert (race.failed, race.eliminated) == ({"broken"}, {})
    assert race.num_blocks("broken") == 0
    assert race.leader == "good"
    assert race.blocks == 6


def test_a_race_keeps_to_its_time():
    clock = FakeClock()

    def measure(name: str, block: Block) -> Timing:
        clock.seconds += 3.0
        return Timing(10, 1.0 + wobble(name, block))

    race = new("a", "b")
    assert run(race, measure, in_time=lambda *_: clock.seconds + 3.0 <= 100.0) == "time"
    assert clock.seconds <= 100.0
    assert race.blocks == 11  # another one would take until 108


def test_who_may_be_faster_than_a_new_leader_is_measured_again():
    """b is no faster than a for six prompts, and so rests; a then falls behind c, than which b may be faster."""
    race = new("a", "b", "c")
    for number, block in enumerate(blocks(8)):
        wave = 1.0 + number % 2 / 50
        speeds = {PLAIN: 1.0, "a": 3.0, "b": 2.7, "c": 2.0 * (1.0 + 0.4 * (number % 2))}
        if number >= 6:
            speeds |= {"a": 0.5, "c": 6.0}
        race.add(block, {name: Timing(100, wave / speeds[name]) for name in race.running})
        if race.blocks == 6:
            assert (race.leader, set(race.eliminated)) == ("a", {"b"})
    assert race.leader == "c"
    assert "b" in race.running
    assert not race.eliminated.keys() & {"b"}
