"""The race of `specbench tune` over simulated and stored times: it finds the fastest, and drops it no oftener than it
may."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import regret
from exact_runs import write_exact
from regret import FakeClock, Simulated, choice_of, race_over, regret_in, simulated

from specbench.results.store import load_results
from specbench.tune.race import ERROR, MARGIN, Block, Race, Timing, run_race

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
    clock = options.pop("clock", FakeClock())
    return run_race(race, blocks(count), measure, clock=clock, **options)  # type: ignore[arg-type]


# -- simulated and stored runs ---------------------------------------------------------------------


@pytest.mark.parametrize("number", range(10))
def test_the_choice_is_within_5_percent_of_the_best(number: int) -> None:
    """Ten runs with other speeds, prompts, drift and neighbours each."""
    made = simulated(number)
    assert made.regret(made.race()) <= MARGIN


@pytest.mark.parametrize("seed", range(10))
def test_a_planted_good_candidate_is_found(seed: int) -> None:
    """Behind eleven others, on a machine that drifts and that others use; and within the time of some thirty blocks."""
    truth = {PLAIN: 0.0, **{f"c-{n}": 0.02 * n for n in range(11)}, "planted": 0.5}
    made = Simulated(truth, seed=seed, spread=0.2, noise=0.05, drift=0.4, busy=0.3)
    race = made.race(prompts=60, seconds=800.0)
    assert race.leader == "planted"
    assert race.verdict in ("faster", "open")
    assert race.ratio("planted", PLAIN).value > 1.2
    assert made.clock.seconds <= 800.0 + 47 / 5  # no more than the last generation over


def test_the_fastest_is_dropped_no_oftener_than_it_may_be() -> None:
    lost = 0
    for seed in range(60):
        truth = {PLAIN: 0.0, "best": 0.11, "a": 0.1, "b": 0.1, "c": 0.09, "d": 0.08}
        race = Simulated(truth, seed=seed, spread=0.25, noise=0.05).race(prompts=32)
        lost += "best" in race.fallen
    assert lost <= ERROR * 60


def test_plain_decoding_wins_where_nothing_is_faster() -> None:
    truth = {PLAIN: 0.0, "a": -0.3, "b": -0.5}
    made = Simulated(truth, spread=0.05, noise=0.02)
    race = made.race()
    assert (choice_of(race), race.verdict) == (PLAIN, "plain")
    assert race.running == [PLAIN]


def test_what_is_within_the_margin_of_plain_decoding_counts_as_equal() -> None:
    race = Simulated({PLAIN: 0.0, "a": 0.01, "b": -0.4}, spread=0.01, noise=0.01).race()
    assert race.verdict in ("equal", "plain")
    assert "a" in race.running
    assert "b" in race.fallen


def test_a_stored_run_is_raced(tmp_path: Path) -> None:
    prompts = {f"code-{n:02}": [10.0 + n % 3] for n in range(12)}
    scaled = {
        name: {prompt: [factor * speed[0] + n % 2 / 10] for n, (prompt, speed) in enumerate(prompts.items())}
        for name, factor in {"plain": 1.0, "d@1": 1.2, "d@2": 1.5, "d@3": 0.6}.items()
    }
    df = load_results(write_exact(tmp_path / "run", scaled))
    race = race_over(df)
    assert choice_of(race) == "d@2"
    assert {"d@1", "d@3"} == set(race.fallen)
    best, ratio = regret_in(df, "d@1", ["plain", "d@1", "d@2", "d@3"])
    assert best == "d@2"
    assert ratio.value == pytest.approx(0.8, rel=0.01)
    assert regret_in(df, "d@2", ["d@1", "d@2"])[1].value == 1.0


def test_the_benchmark_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert regret.main(["--simulated", "3"]) == 0
    assert '"races": 3, "within_5_percent": 3' in capsys.readouterr().out.splitlines()[-1]
    speeds = {
        name: {f"p-{n}": [10.0 * (1 + k) + n % 3] for n in range(8)}
        for k, name in enumerate(["plain", "d@1"])
    }
    write_exact(tmp_path / "run", speeds)
    assert regret.main(["--stored", str(tmp_path)]) == 0
    with pytest.raises(SystemExit, match="Give"):
        regret.main([])


# -- how a race goes -------------------------------------------------------------------------------


def test_a_race_ends_as_soon_as_nothing_is_left_to_tell_apart() -> None:
    race = Race(["slow", "fast"], PLAIN)
    assert run(race, steady(plain=10, slow=8, fast=20)) == "decided"
    assert race.blocks == 6
    assert race.running == [PLAIN, "fast"]
    fall = race.fallen["slow"]
    assert (fall.blocks, fall.leader) == (6, "fast")
    assert fall.ratio is not None
    assert fall.ratio.value == pytest.approx(0.4)


def test_looks_come_ever_more_rarely() -> None:
    race, looks = Race([], PLAIN), []
    for block in blocks(100):
        race.take(block, {PLAIN: Timing(1, 1.0)})
        looks += [race.blocks] if race.due else []
    assert looks == [6, 8, 12, 16, 24, 32, 48, 64, 96]


def test_later_looks_spend_less_and_all_of_them_no_more_than_there_is() -> None:
    race = Race(["a", "b", "c"], PLAIN)
    for block in blocks(6):
        race.take(block, dict.fromkeys(race.running, Timing(1, 1.0)))
    spent = []
    for _ in range(1000):
        race.look()
        spent.append((1 - race.confidence) / 2 * 3)  # one end, three others
    assert spent[0] == pytest.approx(ERROR / 2)
    assert spent == sorted(spent, reverse=True)
    assert sum(spent) <= ERROR
    assert sum(spent) == pytest.approx(ERROR, rel=0.01)


def test_who_fails_is_out_and_plain_decoding_that_fails_spoils_the_block() -> None:
    def measure(name: str, block: Block) -> Timing | None:
        fails = (name == "broken" and block.prompt == "p-1") or block.prompt == "p-0"
        return None if fails else steady(plain=10, broken=30, good=20)(name, block)

    race = Race(["broken", "good"], PLAIN)
    assert run(race, measure) == "decided"
    assert race.fallen["broken"].ratio is None
    assert race.measured("broken") == 0
    assert race.leader == "good"
    assert race.blocks == 6


def test_a_block_in_which_somebody_says_nothing_counts_for_nobody() -> None:
    def measure(name: str, block: Block) -> Timing:
        silent = name == "a" and block.prompt == "p-0"
        return Timing(0, 0.0) if silent else steady(plain=10, a=20)(name, block)

    race = Race(["a"], PLAIN)
    run(race, measure)
    assert race.measured("a") == race.measured(PLAIN) == 6
    assert not race.fallen


def test_a_race_keeps_to_its_time() -> None:
    clock = FakeClock()

    def measure(name: str, block: Block) -> Timing:
        clock.seconds += 3.0
        return Timing(10, 1.0 + wobble(name, block))

    race = Race(["a", "b"], PLAIN)
    assert run(race, measure, clock=clock, until=100.0) == "time"
    assert clock.seconds <= 100.0
    assert race.blocks == 11  # another one would take until 108


def test_a_race_that_is_not_over_says_how_much_more_it_takes() -> None:
    made = Simulated({PLAIN: 0.0, "a": 0.5, "b": 0.46}, spread=0.1, noise=0.02)
    few = made.race(prompts=6)
    assert few.open == [name for name in ("a", "b") if name != few.leader]
    wanted = few.blocks_wanted()
    assert wanted is None or wanted > 20
    many = Simulated(made.truth, spread=0.1, noise=0.02).race(prompts=24)
    assert many.blocks_wanted() is not None
    over = Race(["fast"], PLAIN)
    run(over, steady(plain=1, fast=3))
    assert over.blocks_wanted() == 0


def test_the_same_times_and_seed_give_the_same_race() -> None:
    def standing(race: Race) -> tuple[object, ...]:
        return race.leader, race.running, race.fallen, race.blocks

    assert standing(simulated(3).race()) == standing(simulated(3).race())


def test_candidates_run_in_another_order_in_every_block() -> None:
    seen: list[list[str]] = []

    def measure(name: str, block: Block) -> Timing:
        if not seen or len(seen[-1]) == 4:
            seen.append([])
        seen[-1].append(name)
        return Timing(10, 1.0 + wobble(name, block))

    run(Race(["a", "b", "c"], PLAIN), measure, 5, seed=1)
    assert len({tuple(order) for order in seen}) > 1
    assert all(sorted(order) == ["a", "b", "c", PLAIN] for order in seen)


def test_every_speedup_is_paired_by_prompt() -> None:
    """A prompt that is slow for all says nothing about anybody."""

    def measure(name: str, block: Block) -> Timing:
        number = int(block.prompt.removeprefix("p-"))
        return Timing(100, (1 + 5 * (number % 4)) * {"plain": 1.0, "a": 0.5, "b": 0.55}[name])

    race = Race(["a", "b"], PLAIN)
    assert run(race, measure) == "decided"
    assert race.ratio("a", PLAIN).value == pytest.approx(2.0)
    assert "b" in race.fallen
